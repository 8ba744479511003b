"""Does credit by token pay more as answers get longer? On a task where the credit of every token is known.

A planted task (truth/planted.py): three positions of an answer decide its reward, all others are noise. Its length doubles,
and everything else stays: the policy, the keys, the number of answers in a step. At every length each arm is trained with
the same number of tokens, those it samples to learn values included:

    grpo            one number for an answer: the z-score in its group
    critic          reward minus a learned value of the prefix (gae, lambda 1)
    critic 0.95     the same with lambda 0.95, as PPO does it
    monte carlo     segments of the answer, values from fresh continuations (vine)
    exact           the true credit V(after) - V(before), which nobody has outside such a task

Success is the expected reward of the policy, computed, not sampled. Only one learning rate was tried for all arms alike.
"""
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from credit.critic import CRITICS
from grpo import rloo, update
from analysis.statistics import mean_over, mean_reach, verdicts
from analysis.plots import COLOURS, panels, save
from engine.errors import UserError
from qwen2_model import ModelConfig
from analysis.tables import Table, by_row
from truth.common import Findings, Flag, Probe, Progress, gradients
from truth.planted import SMALL, PlantedLab, planted_lab, sample_planted, worths

FLAGS = {"model": Flag("small", "small", "a model folder whose shape (not its weights) the policy takes; small is one layer of width 32"),
         "lengths": Flag("16,32,64,128", "8,16", "tokens of an answer"), "steps": Flag(60, 2, "steps of plain GRPO; the others get as many tokens"),
         "seeds": Flag(4, 2, "policies and tasks, the same for every arm and length", 2), "questions": Flag(8, 2, "groups in a step"),
         "answers": Flag(8, 4, "answers in a group", 2), "learning_rate": Flag(3e-3, 3e-3, "of AdamW, for all arms", 0),
         "segments": Flag(6, 2, "of an answer, for monte carlo"), "continuations": Flag(4, 1, "behind each value, for monte carlo"),
         "batches": Flag(16, 2, "of the fresh policy, to measure the noise of the gradient", 2)}
ARMS = {"grpo": {}, "critic": {"advantage": "gae"}, "critic 0.95": {"advantage": "gae", "gae_lambda": 0.95}, "monte carlo": {"advantage": "vine"}, "exact": {}}
ENOUGH = 0.8


def measure(probe: Probe) -> Findings:
    args = probe.args
    lengths, config = read_lengths(args.lengths), SMALL if args.model == "small" else ModelConfig.from_folder(Path(args.model))
    if args.device != "cpu":
        raise UserError(f"--device {args.device}: the planted task is made for the CPU")
    torch.set_num_threads(args.threads or torch.get_num_threads())
    progress, curves, noise = Progress(noise=0.1, training=1), {}, {}
    for i, length in enumerate(lengths):
        noise[length] = [noise_of(args, config, args.seed + seed, length) for seed in range(args.seeds)]
        progress("noise", (i + 1) / len(lengths))
    done = 0
    for length in lengths:
        for arm in ARMS:
            curves[arm, length] = []
            for seed in range(args.seeds):
                progress("training", done / (sum(lengths) * len(ARMS) * args.seeds), f"length {length}, {arm}, seed {args.seed + seed}")
                curves[arm, length].append(train_arm(args, config, arm, args.seed + seed, length))
                done += length
    tables = [areas(curves, lengths), trend(curves, lengths), tokens_needed(curves, lengths, args), noise_table(noise, lengths)]
    intro = [f"Lengths {args.lengths}; {args.seeds} seeds; {args.steps} steps of {args.questions} x {args.answers} answers for plain GRPO, and as many tokens for the "
             f"others; the policy is {'a Qwen2 of one layer and width 32' if args.model == 'small' else f'of the shape of {args.model}'}.",
             "critic: gae at lambda 1, critic 0.95: at 0.95; monte carlo: values from continuations, which count as tokens spent; exact: the true credit."]
    return Findings("Credit by token and the length of the answer", intro, tables, ("trend", "area", "tokens", "noise"),
                    [draw_curves(curves, lengths, probe.folder), draw_scaling(curves, noise, lengths, probe.folder)],
                    {"area": ("curves",), "noise": ("scaling",)})


def read_lengths(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 6 for part in parts) or len(set(parts)) < 2:
        raise UserError(f"--lengths {text} should be at least two different numbers of tokens, 6 or more, with commas between them")
    return sorted({int(part) for part in parts})


def make(args: SimpleNamespace, config: ModelConfig, seed: int, length: int, **settings) -> PlantedLab:
    """The settings' questions and answers are for sampling values, which wants many rows at once."""
    return planted_lab(seed, length, config=config, learning_rate=args.learning_rate, values_k=args.continuations,
                       values_every=str(max(1, -(-length // args.segments))), questions=64, answers=64, **settings)


def train_arm(args: SimpleNamespace, config: ModelConfig, arm: str, seed: int, length: int) -> list[tuple[int, float]]:
    """(tokens spent, expected reward of the policy), from the start until the tokens are spent."""
    lab, spent, step, curve = make(args, config, seed, length, **ARMS[arm]), 0, 0, []
    advantage = CRITICS[lab.settings.advantage](lab) if "advantage" in ARMS[arm] else None
    curve.append((0, worths(lab)[()]))
    while spent < args.steps * args.questions * args.answers * length:
        step += 1
        rollouts = sample_planted(lab, step, args.questions, args.answers)
        if advantage:
            rollouts = replace(rollouts, advantage=advantage(rollouts, lab))
        elif arm == "exact":
            rollouts = replace(rollouts, advantage=rollouts.true_credit)
        update(lab.model, lab.optimizer, rollouts, torch.ones_like(rollouts.log_prob), lab.settings)
        spent += int(rollouts.mask.sum()) + getattr(advantage, "metrics", {}).get("extra_tokens", 0)
        curve.append((spent, worths(lab)[()]))
    return curve


def noise_of(args: SimpleNamespace, config: ModelConfig, seed: int, length: int) -> dict[str, float]:
    """Of a batch's gradient at the fresh policy: its variance over the squared size of its mean. Both have the same mean,
    which is estimated from pairs of different batches of the quieter."""
    lab, squares, total, own = make(args, config, seed, length), {}, 0, 0.0
    for batch in range(1, args.batches + 1):
        rollouts = sample_planted(lab, -batch, args.questions, args.answers)
        found = gradients(lab, rollouts, {"grpo": rloo(rollouts), "exact": rollouts.true_credit})
        for name, gradient in found.items():
            squares[name] = squares.get(name, 0.0) + gradient.square().sum().item() / args.batches
        total, own = total + found["exact"], own + found["exact"].square().sum().item()
    signal = (total.square().sum().item() - own) / (args.batches * (args.batches - 1))
    return {name: square / signal - 1 if square > signal > 0 else np.nan for name, square in squares.items()}  # few batches can say nothing


def area(curve: list[tuple[int, float]], budget: int) -> float:
    """Mean success over the tokens up to `budget`, whose steps are of different sizes in different arms."""
    spent, success = np.array(curve).T
    grid = np.linspace(0, budget, 1001)
    return float(np.interp(grid, spent, success).mean())


def needed(curve: list[tuple[int, float]]) -> float:
    """Tokens until the policy is right at 80% of the keys; infinite where it never was."""
    return next((spent for spent, success in curve if success >= ENOUGH), np.inf)


def areas(curves: dict, lengths: list[int]) -> Table:
    """Each arm against plain GRPO at the same length, paired by seed, at equal tokens."""
    rows, differences = [], []
    for length in lengths:
        budget = curves["grpo", length][0][-1][0]
        own = {arm: np.array([area(curve, budget) for curve in curves[arm, length]]) for arm in ARMS}
        for arm in ARMS:
            difference = None if arm == "grpo" else mean_over(own[arm] - own["grpo"])
            differences.append(difference)
            ends = [float(np.interp(budget, *np.array(curve).T)) for curve in curves[arm, length]]
            rows.append([str(length) if arm == "grpo" else "", arm, own[arm].mean(), np.mean(ends), *((difference.value, difference.interval) if difference else (None, None))])
    said = iter(verdicts([d for d in differences if d], ("ahead", "behind"), null=0.0))
    for row, difference in zip(rows, differences):
        row.append(next(said) if difference else "")
    formats = {"length": "", "arm": "", "mean success": ".1%", "at the end": ".1%", "minus grpo": "+.1%", "95% interval": "+.1%", "verdict": ""}
    at = {(length, arm): rows[i * len(ARMS) + j] for i, length in enumerate(lengths) for j, arm in enumerate(ARMS)}
    finding = " ".join(f"{arm}: {parted(arm, lengths, at)}" for arm in ARMS if arm != "grpo")
    return Table("area", "Success at equal tokens: mean over the budget, and at its end", by_row(formats, rows), finding,
                 ["interval over seeds, paired; ahead and behind only where that survives Holm's correction over all rows, which few seeds seldom do"])


def trend(curves: dict, lengths: list[int]) -> Table:
    """The question itself, one number an arm: by how many points does its lead over plain GRPO change when length doubles?"""
    found = {}
    for arm in ARMS:
        if arm != "grpo":
            lead = np.array([[area(curves[arm, length][seed], curves["grpo", length][0][-1][0]) - area(curves["grpo", length][seed], curves["grpo", length][0][-1][0])
                              for length in lengths] for seed in range(len(curves[arm, lengths[0]]))])
            found[arm] = mean_over(np.polyfit(np.log2(lengths), lead.T, 1)[0])
    said = verdicts(list(found.values()), ("grows", "shrinks"), null=0.0)
    rows = [[arm, e.value, e.interval, word] for (arm, e), word in zip(found.items(), said)]
    told = [f"{arm} {100 * e.value:+.1f} ({100 * e.low:+.1f} to {100 * e.high:+.1f}): {'no clear change' if word not in ('grows', 'shrinks') else word}"
            for (arm, e), word in zip(found.items(), said)]
    return Table("trend", "Change of the lead over plain GRPO when answers get twice as long, points of mean success", by_row(
        {"arm": "", "a doubling": "+.1%", "95% interval": "+.1%", "the lead": ""}, rows),
        f"Points of lead over plain GRPO that a doubling of the length brings: {'; '.join(told)}.",
        ["slope of a straight line over the logarithm of the length, one for each seed; Student's t over seeds, Holm over the arms"])


def parted(arm: str, lengths: list[int], at: dict) -> str:
    """From which length on an arm is ahead of grpo, in words."""
    said = [at[length, arm][6] for length in lengths]
    shown = f"({', '.join(f'{100 * at[length, arm][4]:+.0f}' for length in lengths)} points)"
    names = {word: [str(length) for length, s in zip(lengths, said) if s == word] for word in ("ahead", "behind")}
    parts = [f"{word} at {', '.join(found)}" for word, found in names.items() if found]
    return f"{' and '.join(parts) or 'no difference seen at any length'} {shown}."


def tokens_needed(curves: dict, lengths: list[int], args) -> Table:
    rows = []
    for length in lengths:
        middle = {arm: float(np.median([needed(curve) for curve in curves[arm, length]])) for arm in ARMS}
        rows.append([str(length), *(middle[arm] / length if np.isfinite(middle[arm]) else "more" for arm in ARMS),
                     middle["grpo"] / middle["exact"] if np.isfinite(middle["grpo"]) and np.isfinite(middle["exact"]) else None])
    columns = {"length": "", **{arm: ",.0f" for arm in ARMS}, "grpo / exact": ".1f"}
    budget = args.steps * args.questions * args.answers
    told = [f"{row[0]}: {shown_count(row[1])} and {shown_count(row[5])}" for row in (rows[0], rows[-1])]
    return Table("tokens", f"Tokens until {ENOUGH:.0%} of the keys are right, over the length of an answer (median over seeds)", by_row(columns, rows),
                 f"grpo and exact need, in lengths of an answer, at length {told[0]}; at {told[1]}.",
                 [f"tokens over length, so that a column that stays the same needs the same number of answers; more: not within the budget of {budget:,}"])


def shown_count(value) -> str:
    return value if isinstance(value, str) else f"{value:,.0f}"


def noise_table(noise: dict, lengths: list[int]) -> Table:
    names, rows = ("grpo", "exact"), []
    for length in lengths:
        logs = np.log([[seed[name] for name in names] for seed in noise[length]])
        ratio = mean_over(logs[:, 0] - logs[:, 1])
        rows.append([str(length), *np.exp(logs.mean(0)).tolist(), np.exp(ratio.value), tuple(np.exp(ratio.interval).tolist())])
    seeds = range(len(noise[lengths[0]]))
    slopes = mean_over([power(lengths, [noise[length][i]["grpo"] / noise[length][i]["exact"] for length in lengths]) for i in seeds])
    flat = mean_over([power(lengths, [noise[length][i]["exact"] for length in lengths]) for i in seeds])
    columns = {"length": "", **{name: ".3f" for name in names}, "grpo / exact": ".0f", "95% interval": ".0f"}
    return Table("noise", "Noise of one batch's gradient at the fresh policy: variance over squared mean", by_row(columns, rows),
                 f"The noise of the outcome's advantage over that of exact credit goes as length to the power {slopes.value:.2f} ({slopes.low:.2f} to {slopes.high:.2f}): "
                 f"{'it grows' if slopes.low > 0 else 'it falls' if slopes.high < 0 else 'no clear change'}. That of exact credit itself goes to the power "
                 f"{flat.value:.2f} ({flat.low:.2f} to {flat.high:.2f}).",
                 ["grpo: reward minus the mean of the others, which has the same mean as the true credit; the z-score is about a multiple of it"])


def power(lengths: list[int], values: list[float]) -> float:
    """The exponent with which the values go with length; undefined where one of them is."""
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0]) if np.isfinite(values).all() else np.nan


def draw_curves(curves: dict, lengths: list[int], folder: Path) -> tuple[Path, str]:
    shown = sorted({lengths[0], lengths[len(lengths) // 2], lengths[-1]})
    figure, axes = panels(len(shown), sharey=True, squeeze=False)
    for axis, length in zip(axes[0], shown):
        budget = curves["grpo", length][0][-1][0]
        grid = np.linspace(0, budget, 101)
        for arm, colour in zip(ARMS, COLOURS):
            values = np.stack([np.interp(grid, *np.array(curve).T) for curve in curves[arm, length]])
            reach = mean_reach(values)
            axis.plot(grid / length, values.mean(0), color=colour, lw=1.5, label=arm)
            axis.fill_between(grid / length, values.mean(0) - reach, values.mean(0) + reach, color=colour, alpha=0.12, lw=0)
        axis.set(xlabel="tokens spent / length", title=f"Answers of {length} tokens", ylim=(0, 1))
    axes[0][0].set_ylabel("expected reward of the policy")
    axes[0][0].legend()
    return save(figure, folder, "curves", "Expected reward against tokens spent, means over seeds with 95% intervals")


def draw_scaling(curves: dict, noise: dict, lengths: list[int], folder: Path) -> tuple[Path, str]:
    figure, axes = panels(2)
    for arm, colour in zip(ARMS, COLOURS):
        middle = np.array([np.median([needed(curve) for curve in curves[arm, length]]) for length in lengths]) / lengths
        axes[0].plot(lengths, np.where(np.isfinite(middle), middle, np.nan), "o-", color=colour, label=arm)
    axes[0].set(xlabel="length", ylabel="tokens / length", title=f"Tokens until {ENOUGH:.0%} of the keys are right", ylim=(0, None))
    for name, colour in (("grpo", COLOURS[0]), ("exact", COLOURS[4])):
        axes[1].plot(lengths, [np.exp(np.mean(np.log([seed[name] for seed in noise[length]]))) for length in lengths], "o-", color=colour, label=name)
    known = any(np.isfinite(line.get_ydata()).any() for line in axes[1].lines)
    axes[1].set(yscale="log" if known else "linear", xlabel="length", ylabel="variance / squared mean", title="Noise of one batch's gradient, fresh policy")
    for axis in axes:
        axis.set_xlim(lengths[0] / 1.3, lengths[-1] * 1.3)
        axis.set_xscale("log", base=2)
        axis.set(xticks=lengths, xticklabels=lengths)
        axis.legend()
    return save(figure, folder, "scaling", "What grows with the length of the answer; points that are missing were not reached within the budget")
