"""What should credit by token be worth? Predicted before it is measured, in a world with dials.

Credit by token is a batch size in disguise: if a method's gradient has a third of plain GRPO's
noise at the same signal, it should lead as plain GRPO with three times the batch leads. So plain
GRPO's own leads by batch size, and the noise of a method on policies that are untrained and half
trained, say what the method should be worth. Nothing is fitted, and no method is trained.

    noise    trace of the covariance of a batch's gradient at the parameters, over the square of its
             mean along the true gradient, which is exact here
    ratio    noise over that of plain GRPO on the same policy; the geometric mean over policies
    cosine   between the method's mean gradient and the true one: what the law leaves out

All is in the space of the parameters: what the tokens that decide nothing do to shared weights is
in it. AdamW, which divides by a scale of each parameter, and what happens to the noise while a
policy learns something else, are not.

These are predictions: python -m research dial, on other seeds, measures what they are about.
Methods that keep a state are left out, as they have none on one batch, and what cannot be asked in
such a world.

    python -m research law --against law,dial    does it foretell better than a plainer rule would?

This measures nothing: it holds published predictions against published leads, beside what rules
foretell that need no noise of the method, over worlds whose reward is the share of right tokens.
"""
import inspect
import math
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import torch

from analysis.tables import Table, by_row
from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import UserError
from harness.flags import Flag
from research.dial.arms import EXACT, PLAIN, TRUE, Arm, arm_of
from research.dial.training import AdamW, gradients
from research.dial.world import Dials, World
from research.experiments.published import RESULTS, read_result, table_rows
from research.probes import dial
from research.probes.common import Findings, Progress, rank_correlation

FLAGS = {**dial.FLAGS,
         "against": Flag(None, "published predictions and leads, two names: hold one against the "
                               "other, and measure nothing"),
         "policies": Flag(3, "whose gradients' noise is measured, before training and in the "
                             "middle of it", least=1, most=100)}
SIZES = {"batch 0.25x": 0.25, "batch 0.5x": 0.5, PLAIN: 1.0, "batch 2x": 2.0, "batch 4x": 4.0,
         "batch 8x": 8.0, "batch 16x": 16.0, EXACT: math.inf}
CURVE_FROM, NOISE_FROM = 2000, 4000  # seeds that no lead is measured on
BATCHES = 64     # of each policy
ASKED = f"{TRUE},mask 0.1,mask 0,by_kind"  # whose mean gradient points along the true one
RULES = {  # of a row of the predictions, and plain GRPO's curve in its world
    "the law": lambda row, curve: row["lead"],
    "its lead times 0.6": lambda row, curve: 0.6 * row["lead"],
    "the law, arithmetic mean": lambda row, curve: noise_ratio_to_lead(
        fmean(filter(None, (row["untrained"], row["half"]))), curve),
    "as the exact gradient": lambda row, curve: curve[math.inf],
    "no lead": lambda row, curve: 0.0}


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    if args.against:
        if args.against.count(",") != 1:
            raise UserError(f"--against {args.against}: two names are needed, as in law,dial")
        return against_published(*args.against.split(","), dial.arms_asked(args.only or ASKED))
    torch.set_num_threads(args.threads or 1)
    worlds, curves, rows = args.worlds.split(","), {}, []
    progress = Progress(**{world: Dials.read(world).tokens for world in worlds})
    arms = {name: dial.arm_as_typed(name) for name in [TRUE, *dial.arms_asked(args.only)]
            if not inspect.isclass(MITIGATIONS.get(name) or ADVANTAGES.get(name))}
    seeds = range(args.seed + NOISE_FROM, args.seed + NOISE_FROM + args.policies)
    for world in worlds:
        cells = {}
        for i, name in enumerate(SIZES):
            progress(world, i / (len(SIZES) + 4), f"{world}: {name}")
            cells[name] = dial.cell_of(world, arm_of(name), name, args, CURVE_FROM)
        plain = fmean(cells[PLAIN]["mean"])
        curve = {size: fmean(cells[name]["mean"]) - plain for name, size in SIZES.items()}
        curves[world] = {str(size): lead for size, lead in curve.items()}
        progress(world, 0.8, f"{world}: noise")
        found = noise_of(Dials.read(world), arms, cells[PLAIN]["rate"], args.steps, seeds,
                         bool(args.only))
        rows += [row_of(world, name, of, curve) for name, of in found.items() if of]
    return Findings("What should credit by token be worth?", [dial.in_words(args)],
                    [predictions_table(rows)], {"curves": curves})


def noise_ratio_to_lead(ratio: float, curve: dict[float, float]) -> float:
    """The lead of a method whose noise is `ratio` times plain GRPO's. `curve` has plain GRPO's own
    lead by the factor of its batch, infinity for the exact gradient.

    Straight between two batches by the logarithm of their size, and from the largest to the exact
    gradient by the noise; beyond what was measured the last value holds.
    """
    sizes = sorted(curve)
    size = min(max(1 / ratio if ratio > 0 else math.inf, sizes[0]), sizes[-1])
    if size in curve:
        return curve[size]
    below = max(known for known in sizes if known < size)
    above = min(known for known in sizes if known > size)
    place = (1 - below / size if above == math.inf else
             math.log(size / below) / math.log(above / below))
    return curve[below] + place * (curve[above] - curve[below])


def noise_of(dials: Dials, arms: dict[str, Arm], rate: float, steps: int, seeds: range,
             are_asked: bool = False) -> dict[str, dict]:
    """Of each arm that can be asked: noise over plain GRPO's and cosine, of policies that are
    untrained and half trained by plain GRPO. One whose answers all have the same reward says
    nothing. One that was asked for by name, and cannot be asked, is an error."""
    found = {name: {"untrained": [], "half": []} for name in arms}
    for seed in seeds:
        for when, parameters in zip(("untrained", "half"), trained(dials, seed, rate, steps // 2)):
            plain, _ = noise_and_cosine(dials, arm_of(PLAIN), seed, parameters)
            for name in list(found) if math.isfinite(plain) else []:
                try:
                    noise, cosine = noise_and_cosine(dials, arms[name], seed, parameters)
                    found[name][when].append((noise / plain, cosine))
                except UserError as error:  # of the others python -m research dial says why
                    if are_asked:
                        raise UserError(f"{name} cannot be asked here: {error}") from None
                    del found[name]
    return {name: {when: [math.exp(fmean(math.log(ratio) for ratio, _ in pairs)),
                          fmean(cosine for _, cosine in pairs)]
                   for when, pairs in of.items() if pairs} for name, of in found.items()}


def trained(dials: Dials, seed: int, rate: float, steps: int) -> list[torch.Tensor]:
    """Parameters (1, P) before and after so many steps of plain GRPO."""
    arm, world = arm_of(PLAIN), World(dials, [seed])
    method, optimizer, start = arm.start(world), AdamW(world.parameters, [rate]), world.parameters
    for step in range(1, steps + 1):
        gradient, _ = gradients(world, arm, method, step)
        world.parameters = world.parameters + optimizer.change(gradient)
    return [start, world.parameters]


def noise_and_cosine(dials: Dials, arm: Arm, seed: int,
                     parameters: torch.Tensor) -> tuple[float, float]:
    """Of many batches of one policy. Where nothing points along the true gradient the noise is
    without end; here it is very large."""
    world = World(dials, [seed] * BATCHES)
    world.parameters = parameters.expand(BATCHES, -1)
    draws = [("noise", seed, number) for number in range(BATCHES)]
    found, _ = gradients(world, arm, arm.start(world), 1, draws)
    world = World(dials, [seed])
    world.parameters = parameters
    true, _ = gradients(world, arm_of(EXACT), None, 1)
    return against(found.double(), true[0].double())


def against(found: torch.Tensor, true: torch.Tensor) -> tuple[float, float]:
    """Noise and cosine of gradients (n, P). The square of a mean of few holds some of their
    variance, which is taken out."""
    mean, variance = found.mean(0), found.var(0).sum().item()
    if variance == 0:
        return math.nan, math.nan
    along = (mean @ true / true.norm()).item()
    square = (mean @ mean).item() - variance / len(found)
    cosine = along / math.sqrt(square) if square > along ** 2 else math.copysign(1.0, along)
    return variance / max(along, 1e-6 * variance ** 0.5) ** 2, cosine


def row_of(world: str, name: str, of: dict[str, list[float]], curve: dict[float, float]) -> list:
    (untrained, straight), (half, straight_half) = (
        of.get(when, (None, None)) for when in ("untrained", "half"))
    known = [noise for noise, _ in of.values()]
    ratio = math.prod(known) ** (1 / len(known))
    return [world, name, untrained, half, straight, straight_half, ratio,
            noise_ratio_to_lead(ratio, curve)]


def predictions_table(rows: list[list]) -> Table:
    formats = {"world": "", "arm": "", "untrained": ".3g", "half": ".3g", "cosine": ".2f",
               "cosine half": ".2f", "ratio": ".3g", "lead": "points"}
    return Table("predictions", "Noise over plain GRPO's, and the lead that it foretells",
                 by_row(formats, rows), "",
                 ["noise at the parameters, at equal signal; cosine: of the mean gradient with the "
                  "true one, which the prediction leaves out; ratio: the mean of both"],
                 {"untrained": "noise, untrained", "half": "half trained", "cosine": "cosine",
                  "cosine half": "cosine, half trained", "lead": "predicted lead"})


def against_published(predictions: str, leads: str, arms: list[str]) -> Findings:
    """What each rule foretold for these arms, and what was measured."""
    said, measured = (read_result(RESULTS / f"{name}.json")["values"]
                      for name in (predictions, leads))
    curves = {world: {float(size): lead for size, lead in curve.items()}
              for world, curve in said["curves"].items()}
    found = {(row["world"], row["arm"]): row for row in table_rows(leads, "board")}
    rows = []
    for arm in arms:
        pairs = [(row, found[row["world"], arm]) for row in table_rows(predictions, "predictions")
                 if row["arm"] == arm and (row["world"], arm) in found
                 and not Dials.read(row["world"]).all]
        rows += [[arm, rule, *compared([foretell(row, curves[row["world"]]) for row, _ in pairs],
                                       [lead for _, lead in pairs])]
                 for rule, foretell in RULES.items() if pairs]
    formats = {"arm": "", "rule": "", "worlds": "d", "inside": "d", "deviation": "size",
               "rank": ".2f", "slope": ".2f"}
    return Findings("Does the law foretell better than a plainer rule?",
                    [f"{predictions}.json against {leads}.json"],
                    [Table("rules", "What was foretold, and what was measured",
                           by_row(formats, rows), "",
                           ["inside: of the 95% interval of what was measured; deviation: mean, in "
                            "points; rank: correlation over worlds; slope: of measured over "
                            "predicted leads, by least squares through 0"],
                           {"rule": "foretold by", "inside": "inside the interval",
                            "deviation": "mean deviation", "rank": "rank correlation",
                            "slope": "measured over predicted"}),
                     dial.shares_table(measured["cells"])])


def compared(predicted: list[float], measured: list[dict]) -> list[float]:
    """How many worlds, how many inside, mean deviation, rank correlation, slope through 0."""
    foretold, lead = np.array(predicted), np.array([row["lead"] for row in measured])
    low, high = np.array([row["95%"] for row in measured]).T
    return [len(lead), int(((low <= foretold) & (foretold <= high)).sum()),
            float(abs(foretold - lead).mean()),
            rank_correlation(foretold, lead) if np.ptp(foretold) else math.nan,
            float(foretold @ lead / (foretold @ foretold)) if foretold.any() else math.nan]
