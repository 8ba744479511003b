"""What should credit by token be worth? Predicted before it is measured, in a world with dials.

If a method's gradient has a third of the noise of plain GRPO's, it should lead as plain GRPO with
three times the batch (research/dial/law.py). So measured are plain GRPO's own leads by the size of
its batch, and the noise and direction of each method's gradient on policies that are untrained and
half trained. Of each pair of numbers the geometric mean gives the predicted lead. Nothing is
fitted, and no method is trained.

These are predictions: python -m research dial, on other seeds, measures what they are about.
Methods that keep a state are left out: on one batch they have none.
"""
import inspect
import math
from pathlib import Path

import torch

from analysis.tables import Table, by_row
from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import UserError
from harness.files import append_line, is_file, read_lines
from research.dial.arms import EXACT, PLAIN, TRUE, arm_of
from research.dial.law import noise_of, noise_ratio_to_lead
from research.dial.training import train
from research.dial.world import Dials
from research.probes import dial
from research.probes.common import Findings, Flag, Probe
from research.probes.progress import Progress

FLAGS = {**dial.FLAGS,
         "policies": Flag(3, "whose gradients' noise is measured, before training and in the "
                             "middle of it", least=1, most=100, quick=1)}
del FLAGS["max_grad_norm"], FLAGS["report_only"]
SIZES = {"batch 0.25x": 0.25, "batch 0.5x": 0.5, PLAIN: 1.0, "batch 2x": 2.0, "batch 4x": 4.0,
         "batch 8x": 8.0, "batch 16x": 16.0, EXACT: math.inf}
CURVE_FROM, NOISE_FROM = 2000, 4000  # seeds that no lead is measured on


def measure(probe: Probe) -> Findings:
    args = probe.args
    args.max_grad_norm, args.report_only = 0.0, False
    torch.set_num_threads(args.threads or 1)
    worlds, curves, rows = args.worlds.split(","), {}, []
    progress = Progress(**{world: Dials.read(world).tokens for world in worlds})
    for world in worlds:
        cells = {}
        for i, name in enumerate(SIZES):
            progress(world, i / (len(SIZES) + 4), f"{world}: {name}")
            cells[name] = dial.cell_of(world, name, args, CURVE_FROM)
        curves[world] = curve_of(cells)
        rate = cells[PLAIN]["rate"]
        progress(world, 0.8, f"{world}: noise")
        rows += rows_of(world, curves[world], rate, args)
    values = {"curves": {world: {str(size): lead for size, lead in curve.items()}
                         for world, curve in curves.items()}}
    return Findings("What should credit by token be worth?", [dial.in_words(args)],
                    [predictions_table(rows), curve_table(curves)], None, "half an hour",
                    values=values)


def curve_of(cells: dict[str, dict]) -> dict[float, float]:
    """Plain GRPO's mean lead over itself by the factor of its batch."""
    plain = sum(cells[PLAIN]["mean"])
    return {size: (sum(cells[name]["mean"]) - plain) / len(cells[name]["mean"])
            for name, size in SIZES.items()}


def rows_of(world: str, curve: dict, rate: float, args) -> list[list]:
    rows = []
    for name, of in known_noise(world, rate, args).items():
        (untrained, straight), (half, straight_half) = (
            of.get(when, (None, None)) for when in ("untrained", "half"))
        known = [noise for noise in (untrained, half) if noise]
        ratio = math.prod(known) ** (1 / max(1, len(known)))
        if known:
            rows.append([world, name, untrained, half, straight, straight_half, ratio,
                         noise_ratio_to_lead(ratio, curve)])
    return rows


def known_noise(world: str, rate: float, args) -> dict[str, dict]:
    """Of each arm; from the file where it is known."""
    names = [name for name in [TRUE, *dial.arms_asked(args.only)] if can_be_asked(name)]
    key = {"noise of": world, "arms": names, "rate": rate, "steps": args.steps,
           "policies": [args.seed + NOISE_FROM, args.policies]}
    file = Path(args.runs)
    for line in read_lines(file) if is_file(file) else []:
        if key.items() <= line.items():
            return line["found"]
    seeds = range(args.seed + NOISE_FROM, args.seed + NOISE_FROM + args.policies)
    found = noise_of(Dials.read(world), names, rate, args.steps, seeds)
    append_line(file, {**key, "found": found})
    return found


def can_be_asked(name: str) -> bool:
    if inspect.isclass(MITIGATIONS.get(name) or ADVANTAGES.get(name)):
        return False
    try:
        train(Dials.read("8/2"), arm_of(name), [0], [1e-3], steps=1)
    except UserError:
        return False
    return True


def predictions_table(rows: list[list]) -> Table:
    formats = {"world": "", "arm": "", "untrained": ".3g", "half": ".3g", "cosine": ".2f",
               "cosine half": ".2f", "ratio": ".3g", "lead": "points"}
    return Table("predictions", "Noise over plain GRPO's, and the lead that it foretells",
                 by_row(formats, rows), "",
                 ["noise at the parameters, at equal signal; cosine: of the mean gradient with the "
                  "true one, which the prediction leaves out; ratio: the mean of both"],
                 {"untrained": "noise, untrained", "half": "half trained", "cosine": "cosine",
                  "cosine half": "cosine, half trained", "lead": "predicted lead"})


def curve_table(curves: dict[str, dict]) -> Table:
    rows = [[world, *curve.values()] for world, curve in curves.items()]
    heads = ["exact" if size == math.inf else f"{size:g}x" for size in SIZES.values()]
    return Table("curves", "Plain GRPO's lead over itself by the size of its batch",
                 by_row({"world": "", **dict.fromkeys(heads, "points")}, rows), "",
                 ["exact: the exact gradient, as of a batch without end"])
