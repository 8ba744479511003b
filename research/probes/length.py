"""Does credit by token pay more as answers get longer? On a task where all credit is known.

Question. Plain GRPO gives all tokens of an answer the same number. The longer the answer, the more
of its tokens have nothing to do with the reward, so one would expect credit by token to help more.

Measurement. On a planted task (planted.py) three positions of an answer decide its reward and all
others are noise. Its length doubles, and everything else stays: the policy, the keys, the number of
answers in a step. At every length each method is trained with the same number of tokens, those it
samples to learn values included:

    grpo            one number for an answer: the z-score in its group
    critic          reward minus a learned value of the prefix (gae, lambda 1)
    critic 0.95     the same with lambda 0.95, as PPO does it
    monte carlo     segments of the answer, values from fresh continuations (vine)
    exact           the true credit V(after) - V(before), which nobody has outside such a task

Success is the expected reward of the policy, computed, not sampled; the lead of a method is its
mean over the tokens spent, minus that of plain GRPO.

Reading it. If credit by token pays more in longer answers, a method's lead grows with every
doubling. If the true credit's lead grows and that of the others does not, the credit is worth
having, but these ways to estimate it are not good enough. If no lead grows, length does not matter.

Only one learning rate was tried, the same for all methods.
"""
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from analysis.statistics import mean_over, verdicts
from analysis.tables import Table, by_row
from engine.errors import UserError
from harness.flags import Flag, shortened
from harness.progress import Progress
from harness.registry import ADVANTAGES, make
from grpo import update
from research.experiments.pictures import draw, draw_lead
from research.probes.common import COMMON, Findings, Probe
from research.probes.planted import PlantedPolicy, planted_policy, sample_planted, worths

FLAGS = {
    **COMMON,
    "lengths": Flag("16,32,64,128", "tokens of an answer", quick="8,16"),
    "steps": Flag(60, "steps of plain GRPO; the others get as many tokens", least=1, most=1_000_000,
                  quick=2),
    "seeds": Flag(4, "policies and tasks, the same for every method and length", least=2, most=1000,
                  quick=2),
    "questions": Flag(8, "groups in a step", least=1, most=10_000, quick=2),
    "answers": Flag(8, "answers in a group", least=2, most=1000, quick=4),
    "learning_rate": Flag(3e-3, "of AdamW, for all methods", least=0, most=10),
    "segments": Flag(6, "of an answer, for monte carlo", least=1, most=1000, quick=2),
    "continuations": Flag(4, "behind each value, for monte carlo", least=1, most=1000, quick=1)}
MOST_LENGTH = 100_000
METHODS = {"grpo": None, "critic": ("gae", {}), "critic 0.95": ("gae", {"gae_lambda": 0.95}),
           "monte carlo": ("vine", {}), "exact": None}  # --advantage and its flags

Curve = list[tuple[int, float]]           # tokens spent, success
Curves = dict[tuple[str, int], list[Curve]]  # by method and length, one a seed


def measure(probe: Probe) -> Findings:
    args = probe.args
    lengths = read_lengths(args.lengths)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    curves = train_methods(args, lengths, Progress(training=1))
    leads = {method: lead_over_grpo(curves, method, lengths) for method in METHODS
             if method != "grpo"}
    intro = [f"Answers of {', '.join(map(str, lengths))} tokens; {args.seeds} seeds; {args.steps} "
             f"steps of {args.questions} x {args.answers} answers for plain GRPO, and as many "
             "tokens for the others.",
             "critic: gae at lambda 1, critic 0.95: at 0.95; monte carlo: values from "
             "continuations, which count as tokens spent; exact: the true credit."]
    trend = trend_table(leads, lengths)
    return Findings("Credit by token and the length of the answer", intro, [trend],
                    draw(draw_lead, probe.folder / "lead.png", trend.to_json()),
                    "about 5 minutes")


def read_lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    are_lengths = all(part.isdecimal() and len(part) < 10 and 6 <= int(part) <= MOST_LENGTH
                      for part in parts)
    if not are_lengths or len(set(parts)) < 2:
        raise UserError(f"--lengths {shortened(text)} should be at least two different numbers of "
                        f"tokens, 6 to {MOST_LENGTH}, with commas between them")
    return sorted({int(part) for part in parts})


def train_methods(args: SimpleNamespace, lengths: list[int], progress: Progress) -> Curves:
    done, whole = 0, sum(lengths) * len(METHODS) * args.seeds
    curves = {(method, length): [] for length in lengths for method in METHODS}
    for (method, length), of_seeds in curves.items():
        for seed in range(args.seed, args.seed + args.seeds):
            progress("training", done / whole, f"length {length}, {method}, seed {seed}")
            of_seeds.append(train(args, method, seed, length))
            done += length
    return curves


def train(args: SimpleNamespace, method: str, seed: int, length: int) -> Curve:
    """From the start until the tokens are spent."""
    policy = planted_policy(seed, length, learning_rate=args.learning_rate,
                            questions=64, answers=64)  # for generate, which wants many rows at once
    budget = args.steps * args.questions * args.answers * length
    advantage = make_advantage(args, policy, method, length)
    spent, step, curve = 0, 0, [(0, worths(policy)[()])]
    while spent < budget:
        step += 1
        rollouts = sample_planted(policy, step, args.questions, args.answers)
        spent += int(rollouts.mask.sum())
        if advantage:
            rollouts = replace(rollouts, advantage=advantage(rollouts, policy))
            spent += advantage.metrics.get("extra_tokens", 0)
        elif method == "exact":
            rollouts = replace(rollouts, advantage=rollouts.true_credit)
        weight = torch.ones_like(rollouts.log_prob)
        update(policy.model, policy.optimizer, rollouts, weight, policy.settings)
        curve.append((spent, worths(policy)[()]))
    return curve


def make_advantage(args: SimpleNamespace, policy: PlantedPolicy, method: str, length: int):
    """Its --advantage; None where the rewards or the exact credit are enough."""
    if METHODS[method] is None:
        return None
    name, flags = METHODS[method]
    if name == "vine":
        segment = max(1, -(-length // args.segments))
        flags = {"values_k": args.continuations, "values_every": str(segment)}
    return make(ADVANTAGES[name], flags, policy)


def budget_of(curves: Curves, length: int) -> int:
    """What plain GRPO spends."""
    tokens, _ = curves["grpo", length][0][-1]
    return tokens


def success_at(curve: Curve, tokens) -> np.ndarray:
    """Methods differ in the size of their steps."""
    spent, success = np.array(curve).T
    return np.interp(tokens, spent, success)


def area(curve: Curve, budget: int) -> float:
    """Mean success over the tokens up to `budget`."""
    return float(success_at(curve, np.linspace(0, budget, 1001)).mean())


def lead_over_grpo(curves: Curves, method: str, lengths: list[int]) -> np.ndarray:
    """(seeds, lengths): at equal tokens, of the same seed."""
    leads = []
    for length in lengths:
        budget = budget_of(curves, length)
        pairs = zip(curves[method, length], curves["grpo", length], strict=True)
        leads.append([area(curve, budget) - area(of_grpo, budget) for curve, of_grpo in pairs])
    return np.array(leads).T


def trend_table(leads: dict[str, np.ndarray], lengths: list[int]) -> Table:
    """The lead of each method at every length, and its change when length doubles."""
    slopes = {method: mean_over(np.polyfit(np.log2(lengths), lead.T, 1)[0])
              for method, lead in leads.items()}
    words = verdicts(list(slopes.values()), ("grows", "shrinks"), null=0.0)
    rows = []
    for (method, slope), word in zip(slopes.items(), words):
        at_lengths = [mean_over(lead) for lead in leads[method].T]
        cells = sum(([of.value, of.interval] for of in at_lengths), [])
        rows.append([method, *cells, slope.value, slope.interval, word])
    finding = "\n".join(f"Lead of {method} over plain GRPO, by doubling: {100 * of.value:+.1f} "
                        f"points ({100 * of.low:+.1f} to {100 * of.high:+.1f}), {word}; "
                        f"{100 * leads[method][:, -1].mean():+.1f} at {lengths[-1]} tokens."
                        for (method, of), word in zip(slopes.items(), words))
    formats, headings = {"arm": ""}, {"arm": "method", "a doubling": "what a doubling brings"}
    for length in lengths:
        formats |= {f"{length}": "points", f"95%, {length}": "points"}
        headings |= {f"{length}": f"lead at {length}", f"95%, {length}": "95% interval"}
    formats |= {"a doubling": "points", "95% interval": "points", "the lead": ""}
    return Table("trend", "Lead over plain GRPO at equal tokens, points of mean success",
                 by_row(formats, rows), finding,
                 ["A doubling: slope of a straight line over the logarithm of the length, one for "
                  "each seed. Student's t over seeds, Holm over the methods' slopes."], headings)
