"""Does a single batch's gradient point the right way, and which method's does so most?

    python -m research noise
    python -m research noise --model runs/x/checkpoints/step_000100 --batches 100
    python -m research noise --only measured,belief   # beside plain GRPO and leave-one-out

Question. On average most ways of spreading credit point where the reward rises; in a single batch
chance points elsewhere. The less of that, the sooner a way should learn. How much is it?

Measurement. The gradient of every method in many batches of the size that the leaderboard trains
on, against the true gradient (the mean of leave-one-out gradients):

    one batch   cosine of a single batch's gradient with it: what is left of the signal beside the
                noise. 0.2 says that 0.2^2 = 4% of the squared length is signal
    cosine      of the mean gradient with it: what a method does to the direction
    noise       variance of a batch over the squared part of the mean along the true gradient

They belong together: 1 / one batch^2 = noise + 1 / cosine^2. An estimate of the noise divides by
a signal that may be too small to be seen. The first number does not, so that is the one to compare
methods by. All come from pairs of different batches (direction.py), so that noise does not count
as signal.

Reading it. Which methods are loud changes as a model learns: ask again of a checkpoint. Those that
take more than five times a plain step (oracle, causal_ablation, vine) are left out, as on the
leaderboard.
"""

import numpy as np

from analysis.statistics import Estimate
from analysis.tables import Table, by_row
from engine.errors import UserError
from harness.flags import Flag, shortened
from research.probes.common import OF_A_MODEL, Findings, Probe
from research.probes.direction import TRUE, measure_directions
from research.probes.methods import Methods, make_methods
from research.probes.progress import Progress

FLAGS = {
    **OF_A_MODEL,
    "batches": Flag(40, "batches, each with the gradient of every method", least=4,
                    most=1_000_000, quick=4),
    "questions": Flag(8, "problems in each of them", least=1, most=10_000, quick=1),
    "answers": Flag(8, "answers to each of those", least=2, most=1000, quick=2),
    "only": Flag(None, "these methods, with a comma between them; their numbers are the same "
                       "whichever others are measured")}
COSTLY = ("oracle", "causal_ablation", "vine")
PLAIN = "none"
NOTE = ("one batch: cosine of a single batch's gradient with the true one. Estimates of the cosine "
        "of the mean gradient can exceed 1, and a dash stands where its length is not seen beside "
        "the noise. All with --loss_norm constant. Methods with a state learn on the way: "
        "learned_importance weighs 1 in its first ten batches, gae starts from a critic of 0")


def measure(probe: Probe) -> Findings:
    args, policy, progress = probe.args, probe.policy(), Progress(gradients=1)
    methods = make_methods(policy)
    directions = measure_directions(
        policy, methods, args.batches, args.questions, args.answers,
        lambda share: progress("gradients", share), left_out(args.only, methods))
    table = noise_table({name: directions.estimates(name) for name in directions.sums})
    intro = [f"{policy.folder}: {args.batches} batches of {args.questions} x {args.answers} answers"
             ", at temperature 1. Intervals are 95%, over blocks of batches."]
    return Findings("What a single batch knows of the true gradient", intro, [table], None,
                    "about ten minutes")


def left_out(only: str | None, methods: Methods) -> set[str]:
    """What is not measured; plain GRPO and the true gradient always are."""
    names = {*methods.weightings, *methods.advantages}
    asked = set(only.split(",")) if only else names.difference(COSTLY)
    for name in asked - names:
        raise UserError(f"--only {shortened(only)}: there is no method {name}, only "
                        f"{', '.join(sorted(names))}")
    return names - asked - {PLAIN, TRUE}


def noise_table(of_methods: dict[str, dict[str, Estimate]]) -> Table:
    """The method that leaves the least to chance first."""
    def signal(name: str) -> float:
        return np.nan_to_num(of_methods[name]["one batch"].value, nan=-1.0)

    rows = []
    for name in sorted(of_methods, key=signal, reverse=True):
        one, cosine, noise = (of_methods[name][of] for of in ("one batch", "cosine", "noise"))
        rows.append([name, one.value, one.interval, cosine.value, cosine.interval, noise.value])
    formats = {"arm": "", "one batch": ".3f", "95%": ".3f", "cosine": ".2f", "cosine 95%": ".2f",
               "noise": ".1f"}
    return Table("noise", "What a single batch knows of the true gradient", by_row(formats, rows),
                 in_words(of_methods), [NOTE],
                 {"arm": "method", "95%": "95% interval", "cosine": "cosine of the mean gradient",
                  "cosine 95%": "95% interval of it", "noise": "noise over signal"})


def in_words(of_methods: dict[str, dict[str, Estimate]]) -> str:
    known = {name: of["one batch"] for name, of in of_methods.items()
             if np.isfinite(of["one batch"].value)}
    if PLAIN not in known:
        return "Too few batches to tell directions apart from noise."
    plain, best = known[PLAIN], max(known, key=lambda name: known[name].value)
    return (f"A single batch of plain GRPO has a cosine of {plain.value:.2f} ({plain.low:.2f} to "
            f"{plain.high:.2f}) with the true gradient.\n"
            f"The highest has {best}: {known[best].value:.2f}.")
