"""Bias, direction and noise of every way of spreading credit, in a world small enough to be listed.

    python -m research exact                  # about a minute
    python -m research exact --seed 1         # another policy

The world (world.py) is a Qwen2 of a few hundred parameters with answers of at most four
tokens out of three. True is the gradient of J, the probability to be right. Each pair of
--advantage and --mitigation makes from a batch the estimate

    sum over the group's answers and their tokens of  weight * advantage * grad log pi / G

(--loss_norm constant up to a factor), by the same functions that train. All batches that can be
drawn are listed with their probability, and the tables show:

    bias     size of (mean estimate - true), over that of the true gradient
    cosine   between mean estimate and true gradient: 1 is the right direction, whatever the length
    noise    trace of the covariance over the squared part of the mean along the true gradient:
             after so many batches noise and signal are alike

Two tables are about what success says of a token: how much credit its entropy allows, and how near
a copy of the policy that is taught right answers (--advantage hindsight) comes to Bayes' rule.

An idea that is a function of the batch is listed beside the others. One that is a class keeps a
state or samples more, and is shown as n/a, unless it has a static method listed(tokens) that
returns its weights.
"""
import math
from pathlib import Path

import torch

from analysis.plots import BLUE, panels, save
from analysis.tables import Table, by_row
from engine.errors import UserError
from harness.progress import Progress
from research.probes.batches import Batches, Listed, list_advantages, list_weights
from research.probes.common import COMMON, Findings, Flag, Probe, run_probe
from research.probes.estimator import Estimator, estimator, gamma_noise, placebo
from research.probes.given_success import bounds_table, copies_table, forks_of
from research.probes.identities import HOLDS, identities, mix
from research.probes.pictures import more_ticks, name_points
from research.probes.world import World, make_world

FLAGS = {
    "length": Flag(4, "most tokens of an answer", least=2, most=10, quick=3),
    "answers": Flag(3, "answers in a group", least=2, most=10, quick=2),
    "seed": COMMON["seed"],
    "threads": COMMON["threads"],
}
MOST_GROUPS = 100_000  # half an hour
CROSSED = ("grpo", "rloo", "critic", "one-step", "vine", "span")
MOMENTS_KNOWN = {"random": gamma_noise}  # drawn at random, and still exact: its moments are known
HEADINGS = {"mitigation": "weighting"}
LEGEND = (
    "bias: size of (mean estimate - true gradient) over that of the true gradient; cosine: "
    "between the two; noise: trace of the covariance over the squared part of the mean that lies "
    "along the true gradient, the number of batches until noise and signal are alike. Critics "
    "know V exactly (wrong ones a random number for each index); vine has segments of two tokens "
    "and exact values; weights are rescaled to mean 1 over a batch, which here is one group (as "
    "published: never).")

Crossed = dict[tuple[str, str], Estimator]  # by advantage and mitigation, where there is one


def refuse_groups(length: int, answers: int) -> None:
    """Refuse a world with too many groups of answers to list them."""
    listed = 2 ** (length + 1) - 1
    groups = math.comb(listed + answers - 1, answers)
    if groups > MOST_GROUPS:
        raise UserError(f"--length {length} and --answers {answers} make {groups:,} groups, "
                        f"{MOST_GROUPS:,} are the most that are listed here")


def measure(probe: Probe) -> Findings:
    args, progress = probe.args, Progress(advantages=4, weights=20, sums=4)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    refuse_groups(args.length, args.answers)
    world = make_world(args.seed, args.length)
    batches = Batches.all(world, args.answers)
    advantages = list_advantages(world, batches, args.seed,
                                 lambda share: progress("advantages", share))
    weights = list_weights(world, batches, advantages.values["grpo"],
                           lambda share: progress("weights", share))
    progress("sums")
    crossed = cross_all(world, batches, advantages, weights)
    picture = draw(world, crossed, weights.names, probe.folder)
    return Findings("A world that can be listed", [in_numbers(world, batches), LEGEND],
                    make_tables(world, batches, advantages, weights, crossed),
                    ("cosine", "identities", "advantages", "placebos", "bounds", "hindsight"),
                    ("identities", "advantages", "bounds"), "about a minute",
                    [picture], {"noise": ("cosine_and_noise",)})


def in_numbers(world: World, batches: Batches) -> str:
    groups, G = batches.which.shape
    return (f"{len(world.probability)} answers, {len(world.score)} choices, {world.score.shape[1]} "
            f"parameters; J = {world.J:.3f}, {world.mean_length:.2f} tokens an answer; {groups:,} "
            f"different groups of {G} answers, with their probabilities.")


def make_tables(world: World, batches: Batches, advantages: Listed, weights: Listed,
                crossed: Crossed) -> list[Table]:
    names, rloo = weights.names, advantages.values["rloo"]
    unweighted = {advantage: crossed[advantage, "none"] for advantage in CROSSED}
    note = (f"{weights.note(without=MOMENTS_KNOWN)}; lambda_grpo at lambda = 1; oracle knows the "
            "true credit; a weighting that looks at the advantage sees that of grpo")
    return [identities(world, batches, advantages.values, unweighted),
            advantage_table(world, batches, advantages),
            cosine_table(world, crossed, names, note),
            bias_table(world, crossed, names, note),
            noise_table(world, crossed, names, note),
            placebo_table(world, batches, rloo, weights, crossed),
            norm_table(world, batches, rloo),
            bounds_table(forks_of(world)),
            copies_table(world),
            mix()]


def cross_all(world: World, batches: Batches, advantages: Listed, weights: Listed) -> Crossed:
    G, crossed = batches.which.shape[1], {}
    for name in CROSSED:
        advantage = advantages.values[name]
        for mitigation in weights.names:
            if mitigation in MOMENTS_KNOWN:
                moments = MOMENTS_KNOWN[mitigation]
                crossed[name, mitigation] = moments(world, batches, advantage)
            elif mitigation in weights.values:
                factor = weights.values[mitigation] * advantage / G
                crossed[name, mitigation] = estimator(world, batches, factor)
    return crossed


def advantage_table(world: World, batches: Batches, advantages: Listed) -> Table:
    G, rows = batches.which.shape[1], []
    for name, credit in advantages.values.items():
        numbers = estimator(world, batches, credit / G).against(world.gradient)
        rows.append([name, numbers["bias"], numbers["cosine"], numbers["noise"]])
    unbiased = [row for row in rows if row[1] < HOLDS]
    quietest = min(unbiased, key=lambda row: row[3])
    rows += [[name, "n/a", "n/a", "n/a"] for name in advantages.reasons]
    rloo = advantages.values["rloo"]
    shuffled = rloo[..., :1].mean(1, keepdim=True).expand_as(rloo)  # on average, the group's mean
    bias = estimator(world, batches, shuffled / G).against(world.gradient)["bias"]
    rows.append(["rloo, shuffled in the group", bias, None, None])
    notes = ["shuffled: advantages that change places within the group leave a mean estimate of "
             "nothing, a bias of 1"]
    if advantages.reasons:
        notes.append(advantages.note())
    formats = {"advantage": "", "bias": ".3f", "cosine": ".4f", "noise": ".2f"}
    return Table("advantages", "Advantages, all weights 1", by_row(formats, rows),
                 f"Without bias: {', '.join(row[0] for row in unbiased)}.\n"
                 f"Among these {quietest[0]} has the least noise: {quietest[3]:.2f}.", notes)


def cosine_table(world: World, crossed: Crossed, names: list[str], note: str) -> Table:
    with_rloo = numbers_with_rloo(world, crossed, "cosine")
    exact = [name for name, cosine in with_rloo.items() if 1 - cosine < HOLDS]
    worst = min(with_rloo, key=with_rloo.get)
    return Table("cosine", "Direction: cosine of the mean estimate with the true gradient",
                 crossed_columns(world, crossed, names, "cosine", ".4f"),
                 f"Weightings that keep the true direction (with rloo): {', '.join(exact)}.\n"
                 f"Farthest from it is {worst}, with a cosine of {with_rloo[worst]:.4f}.", [note],
                 HEADINGS)


def bias_table(world: World, crossed: Crossed, names: list[str], note: str) -> Table:
    return Table("bias", "Bias, relative to the true gradient",
                 crossed_columns(world, crossed, names, "bias", ".3f"), notes=[note],
                 headings=HEADINGS)


def noise_table(world: World, crossed: Crossed, names: list[str], note: str) -> Table:
    return Table("noise", "Noise: batches until noise and signal along the true gradient are alike",
                 crossed_columns(world, crossed, names, "noise", ",.4g"), notes=[note],
                 headings=HEADINGS)


def numbers_with_rloo(world: World, crossed: Crossed, number: str) -> dict[str, float]:
    return {name: estimate.against(world.gradient)[number]
            for (advantage, name), estimate in crossed.items() if advantage == "rloo"}


def crossed_columns(world: World, crossed: Crossed, names: list[str], number: str,
                    spec: str) -> dict[str, tuple]:
    columns = {"mitigation": ("", names)}
    for advantage in CROSSED:
        values = ["n/a"] * len(names)
        for i, name in enumerate(names):
            if (advantage, name) in crossed:
                values[i] = crossed[advantage, name].against(world.gradient)[number]
        columns[advantage] = (spec, values)
    return columns


def placebo_table(world: World, batches: Batches, rloo: torch.Tensor, weights: Listed,
                  crossed: Crossed) -> Table:
    """Each weighting beside its own weights in random order."""
    rows = []
    for name, weight in weights.values.items():
        if name != "none":
            own = crossed["rloo", name].against(world.gradient)
            other = placebo(world, batches, rloo, weight).against(world.gradient)
            rows.append([name, own["cosine"], other["cosine"], own["noise"], other["noise"],
                         own["noise"] / other["noise"]])
    unweighted = crossed["rloo", "none"].against(world.gradient)["noise"]
    than_placebo = [row[0] for row in rows if row[5] < 1]
    than_none = [row[0] for row in rows if row[3] < unweighted]
    formats = {"mitigation": "", "cosine": ".4f", "of placebo": ".4f", "noise": ".2f",
               "of its placebo": ".2f", "ratio": ".2f"}
    title = "Each weighting beside its own weights shuffled over the batch's tokens (rloo)"
    return Table("placebos", title, by_row(formats, rows),
                 f"Less noise than its placebo: {', '.join(than_placebo) or 'none'}.\n"
                 f"Less noise than no weighting ({unweighted:.2f}): "
                 f"{', '.join(than_none) or 'none'}.",
                 ["rescaled weights are 1 on average at every token once they are shuffled, so the "
                  "direction stays and noise is added; those as published are not rescaled"],
                 {**HEADINGS, "of placebo": "cosine of its placebo",
                  "of its placebo": "noise of its placebo", "ratio": "noise over its placebo's"})


def norm_table(world: World, batches: Batches, rloo: torch.Tensor) -> Table:
    """What the loss is divided by, everything else being without bias."""
    length, G = world.rollouts.length.double()[batches.which], batches.which.shape[1]
    shares = {"constant": torch.ones_like(length),
              "token": world.mean_length * G / length.sum(1, keepdim=True),
              "sequence": world.mean_length / length}
    rows = []
    for name, share in shares.items():
        numbers = estimator(world, batches, share[..., None] * rloo / G).against(world.gradient)
        rows.append([name, numbers["bias"], numbers["cosine"], numbers["noise"]])
    formats = {"loss_norm": "", "bias": ".3f", "cosine": ".4f", "noise": ".2f"}
    title = "What the loss is divided by (rloo, no weights)"
    return Table("norms", title, by_row(formats, rows), notes=[
        "token and sequence are scaled by the mean length, so that only what their being random "
        "does is left"], headings={"loss_norm": "--loss_norm"})


def draw(world: World, crossed: Crossed, names: list[str], folder: Path) -> tuple[Path, str]:
    figure, axes = panels(2)
    for axis, advantage in zip(axes, ("rloo", "one-step")):
        points = []
        for name in names:
            if (advantage, name) in crossed:
                numbers = crossed[advantage, name].against(world.gradient)
                points.append((name, numbers["cosine"], numbers["noise"]))
        for _, x, y in points:
            axis.plot(x, y, "o", color=BLUE, ms=5)
        axis.set(xlabel="cosine with the true gradient", ylabel="noise over signal",
                 title=f"advantage {advantage}", yscale="log")
        more_ticks(axis)
        name_points(axis, points)
    return save(figure, folder, "cosine_and_noise",
                "Direction and noise of each weighting, by enumeration: lower right is better")


def main(argv: list[str]) -> None:
    run_probe("exact", __doc__, FLAGS, measure, argv, common={})
