"""Will a way of spreading credit pay? Where it takes more off the noise than it adds to the cost.

    noise(plain) / noise(method) > cost(method) / cost(plain)

    python -m research rule
    python -m research rule --model runs/x/checkpoints/step_000100 --batches 100
    python -m research rule --only hindsight,measured      # beside plain GRPO

A batch's gradient is signal and noise. A method that leaves half of the noise is worth a batch of
twice the size, so it may cost a plain step and one more. Before training, two things are measured
of each method, in the same batches, of the size that is trained on:

    noise   variance of a batch's gradient over the squared part of its mean along the true gradient
            (the mean of leave-one-out gradients). All from pairs of different batches
            (direction.py), so that noise does not count as signal
    cost    of a step with it over a plain one: in sampled tokens, and in processor seconds of
            sampling, credit and gradient

Beside them what says why: how much is decided at each kind of token, and two scores of how well a
method finds it, from the credit of every token of one more batch (scoreboard.py):

    index   1 if the token with most weight decides everything, 0 by chance, -1 at the other end
    top     share of what is decided that the quarter of the tokens with most weight holds

Reading it. Above 1, noise ratio over the higher cost says that a method should be ahead of plain
GRPO at the same price. It pays if the interval of its noise ratio lies above both costs, not if it
lies below one of them; else nothing is told apart. The rule knows the first step of a training, and
not whether a method leads elsewhere: `cosine` of its mean gradient with the true one says where it
points at first. Methods with a state learn on the way, as in training.
"""
from collections import Counter
from contextlib import contextmanager
from time import process_time

import numpy as np
import torch

import research.pointers  # noqa: F401  its weightings are asked, too
from analysis.statistics import Estimate
from analysis.tables import Table, by_row
from engine.errors import UserError
from engine.policy import Policy
from engine.rollouts import Rollouts
from harness.flags import shortened
from harness.own_code import metrics_of
from research.probes.common import (OF_A_MODEL, Findings, Flag, Probe, gradients,
                                    sample_batch)
from research.probes.credit import MeasuredTokens, flat_tokens, measured_tokens, true_credit
from research.probes.direction import TRUE, Directions
from research.probes.methods import Method, make_methods
from research.probes.progress import Progress
from research.probes.scoreboard import decided_table, index

FLAGS = {
    **OF_A_MODEL,
    "batches": Flag(40, "batches, each with the gradient of every method", least=4,
                    most=1_000_000, quick=4),
    "questions": Flag(8, "problems in each of them", least=1, most=10_000, quick=1),
    "answers": Flag(8, "answers to each of those", least=2, most=1000, quick=2),
    "measured_questions": Flag(12, "problems whose credit is measured", least=2, most=10_000,
                               quick=2),
    "continuations": Flag(16, "behind the credit of a token that is a free choice; fewer where it "
                              "is nearly certain", least=4, most=10_000, quick=4),
    "only": Flag("entropy_weighted,low_probability,by_kind,random,gae,hindsight,free_pointer,"
                 "pointer,measured,measured_pointer",
                 "these methods beside plain GRPO, with a comma between them; or all")}
COSTLY = ("oracle", "causal_ablation", "vine")  # not in all
PLAIN, TOP = "none", 0.25
NOTE = ("noise ratio: above 1 where the method's gradient is the less noisy, from shared batches, "
        "interval over blocks of them; cost: of a step over a plain one; pays and does not: the "
        "interval lies above both costs, or below one")


def measure(probe: Probe) -> Findings:
    args, policy = probe.args, probe.policy()
    progress = Progress(gradients=70, credit=25, scores=5)
    methods = chosen(args.only, make_methods(policy))
    directions, costs = Directions(args.batches), Costs()
    for n in range(args.batches):
        progress("gradients", n / args.batches)
        with costs.timed(PLAIN):
            rollouts = sample_batch(policy, n + 1, args.questions, args.answers)
            gradients(policy, rollouts, {PLAIN: rollouts.advantage})
        costs.tokens[PLAIN] += int(rollouts.mask.sum())
        of_methods = coefficients(policy, methods, rollouts, costs)
        directions.add(gradients(policy, rollouts, of_methods))
    rollouts = sample_batch(policy, args.batches + 1, args.measured_questions, args.answers)
    credit = true_credit(policy, rollouts, args.continuations,
                         lambda share: progress("credit", share))
    progress("scores")
    tokens = measured_tokens(policy, rollouts, credit)
    found = {name: flat_tokens(method.frame(policy, rollouts).abs(), rollouts.mask)
             for name, method in methods.items()}
    intro = [f"{policy.folder}: {args.batches} batches of {args.questions} x {args.answers} answers"
             f", and the credit of {len(tokens.decided):,} tokens from {credit.spent:,} sampled "
             "ones."]
    return Findings("Which method will pay?", intro,
                    [rule_table(directions, costs, tokens, found), decided_table(tokens, "kind")],
                    None, "a quarter of an hour")


def chosen(only: str, methods: dict[str, Method]) -> dict[str, Method]:
    """Those that are asked for, plain GRPO, and what the true gradient is made of."""
    asked = methods.keys() - {*COSTLY} if only == "all" else set(only.split(","))
    for name in asked - methods.keys():
        raise UserError(f"--only {shortened(only)}: there is no method {name}, only "
                        f"{', '.join(sorted(methods))}")
    kept = {*asked, PLAIN, TRUE}
    return {name: method for name, method in methods.items() if name in kept}


class Costs:
    """Of plain steps; and of each method, what it takes beside one."""

    def __init__(self):
        self.tokens, self.seconds = Counter(), Counter()  # of a processor

    @contextmanager
    def timed(self, name: str):
        start = process_time()
        yield
        self.seconds[name] += process_time() - start

    def ratio(self, name: str, of: Counter) -> float:
        return 1 + (of[name] / of[PLAIN] if name != PLAIN else 0)


def coefficients(policy: Policy, methods: dict[str, Method], rollouts: Rollouts,
                 costs: Costs) -> dict[str, torch.Tensor]:
    of_all = {}
    for name, method in methods.items():
        with costs.timed(name):
            of_all[name] = method.coefficient(policy, rollouts)
        costs.tokens[name] += metrics_of(method.function).get("extra_tokens", 0)
    return of_all


def rule_table(directions: Directions, costs: Costs, tokens: MeasuredTokens,
               found: dict[str, np.ndarray]) -> Table:
    rows, noise = [], {}
    for name in directions.sums:
        if name == TRUE:
            continue
        noise[name] = directions.noise_ratio(PLAIN, name)
        spent = [costs.ratio(name, of) for of in (costs.tokens, costs.seconds)]
        place = index(tokens, found[name], tokens.decided)
        rows.append([name, place.value if place else 0.0,
                     held_by_top(tokens, found[name]) if place else None,
                     directions.cosine(name).value,
                     noise[name].value, noise[name].interval, *spent,
                     noise[name].value / max(spent), verdict(noise[name], spent, name)])
    rows.sort(key=lambda row: -np.nan_to_num(row[-2], nan=-1.0))
    formats = {"arm": "", "index": "+.2f", "top": ".0%", "cosine": ".2f", "noise": ".2f",
               "95%": ".2f", "tokens": ".2f", "seconds": ".2f", "ratio": ".2f", "verdict": ""}
    return Table("rule", "Noise of plain GRPO over that of the method, against what it costs",
                 by_row(formats, rows), in_words(rows), [NOTE],
                 {"arm": "method", "top": "of what is decided, in the top quarter",
                  "noise": "noise ratio", "95%": "95% interval", "tokens": "cost in tokens",
                  "seconds": "cost in seconds", "ratio": "noise ratio over the higher cost"})


def held_by_top(tokens: MeasuredTokens, size: np.ndarray) -> float:
    """Share of what is decided at the quarter of all tokens with most weight."""
    top = np.argsort(-size, kind="stable")[:round(TOP * len(size))]
    return tokens.decided[top].sum() / tokens.decided.sum()


def verdict(noise: Estimate, spent: list[float], name: str) -> str:
    if name == PLAIN:
        return ""
    if noise.low > max(spent):
        return "pays"
    return "does not" if noise.high < max(spent) else "open"


def in_words(rows: list[list]) -> str:
    paying, losing = ([row[0] for row in rows if row[-1] == word] for word in ("pays", "does not"))
    return (f"Should be ahead of plain GRPO at its price: {', '.join(paying) or 'no method'}.\n"
            f"Should not: {', '.join(losing) or 'no method'}. Of the others nothing is told apart.")
