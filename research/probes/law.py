"""What should credit by token be worth? Predicted before it is measured, in synthetic tasks.

The noise-to-batch-size prediction is this: if a method's gradient has a third of plain GRPO's
noise-to-signal ratio, the method should gain what plain GRPO gains with three times the batch. So
two things are measured: plain GRPO's gain at several batch sizes, and the noise-to-signal ratio of
each method on untrained and half trained policies. Nothing is fitted, and no method is trained.

    noise    the noise-to-signal ratio of a batch's gradient: the trace of its covariance matrix
             over all parameters, divided by the square of its mean's part along the true gradient
             (which is known exactly here)
    ratio    a method's noise divided by that of plain GRPO on the same policy. The table has the
             geometric mean over policies
    cosine   the cosine between the method's mean gradient and the true one. The prediction leaves
             it out

Gradients are with respect to the parameters. All tokens share these, so the gradients also contain
what comes from tokens that decide nothing. The prediction also leaves out that AdamW divides each
parameter's gradient by its scale, and that the noise of a method may change as its policy learns.

For each size of the batch plain GRPO's learning rate is chosen as in python -m research dial. The
policies on which the noise is measured have the rate that is best for plain GRPO over all seeds.

The gains that are predicted here are measured by python -m research dial, on other seeds. Methods
that keep a state between batches are left out, because here each batch is alone. So are methods
that need something that these tasks do not have.

    python -m research law --against law,dial    is it better than a plainer rule would be?
    python -m research law --against board       what did it say of the tiny model's leaderboard?

With --against nothing is measured. Published gains are compared with these predictions, and with
those of simpler rules that do not need a method's noise. In synthetic tasks that is over the tasks
whose reward is the share of right tokens.
"""
import inspect
import math
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import torch

from analysis.tables import Row, Table, by_row
from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import UserError
from harness.flags import Flag, Requirement
from research.dial.arms import EXACT, PLAIN, TRUE, SyntheticArm, named_arm
from research.dial.task import SyntheticTask, TaskSpec
from research.dial.training import AdamWOfRows, batch_gradients
from research.publish.results import (RESULTS, estimates_as_arrays, read_result,
                                            table_rows)
from research.probes import dial
from research.probes.common import Findings, Progress, rank_correlation, requiring
from research.probes.law_board import compare_with_leaderboard

MEASURED: Requirement = (lambda s: not s.against, "a measurement, which --against replaces")
OF_ARMS: Requirement = (lambda s: s.against != "board", "arms of synthetic tasks, which --against "
                        "board does not have")
FLAGS = {"seed": dial.FLAGS["seed"],
         **requiring(MEASURED, {name: dial.FLAGS[name] for name in (
             "threads", "worlds", "steps", "seeds", "rates")}),
         **requiring(OF_ARMS, {"only": dial.FLAGS["only"]}),
         "against": Flag(None, "names of two published results, predictions and gains, as in "
                               "law,dial, or board: compare them, and measure nothing"),
         "policies": Flag(3, "number of policies on which the noise is measured, before training "
                             "and in the middle of it", least=1, most=100, requires=MEASURED)}
BATCH_SIZES = {"batch 0.25x": 0.25, "batch 0.5x": 0.5, PLAIN: 1.0, "batch 2x": 2.0,
               "batch 4x": 4.0, "batch 8x": 8.0, "batch 16x": 16.0, EXACT: math.inf}
CURVE_FROM, NOISE_FROM = 2000, 4000  # seeds that no gain is measured on
BATCHES = 64     # for each policy
ASKED = f"{TRUE},mask 0.1,mask 0,by_kind"  # whose mean gradient points along the true one
STATES = ("untrained", "half")  # of the policies whose noise is measured
Curve = dict[float, float]  # plain GRPO's gain by the factor of its batch
Pairs = list[tuple[float, float]]  # ratio of the noise, and cosine


def predicted_gain(row: dict, curve: Curve) -> float:
    return row["gain"]


def scaled_gain(row: dict, curve: Curve) -> float:
    return 0.6 * row["gain"]


def gain_by_arithmetic_mean(row: dict, curve: Curve) -> float:
    ratios = [row[state] for state in STATES if row[state]]
    return noise_ratio_to_gain(fmean(ratios), curve)


def gain_of_exact_gradient(row: dict, curve: Curve) -> float:
    return curve[math.inf]


def no_gain(row: dict, curve: Curve) -> float:
    return 0.0


RULES: dict[str, Callable[[dict, Curve], float]] = {  # of a row of the predictions, and the curve
    "the prediction": predicted_gain,
    "its gain times 0.6": scaled_gain,
    "the prediction, arithmetic mean": gain_by_arithmetic_mean,
    "as the exact gradient": gain_of_exact_gradient,
    "no gain": no_gain}


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    if args.against == "board":
        return compare_with_leaderboard()
    if args.against:
        if args.against.count(",") != 1:
            raise UserError(f"--against {args.against}: the names of two results are needed, as in "
                            "law,dial")
        predictions, measured = args.against.split(",")
        return compare_rules(predictions, measured, dial.arms_asked(args.only or ASKED))
    torch.set_num_threads(args.threads or 1)
    tasks = list(dict.fromkeys(args.worlds.split(",")))
    progress = Progress(**{task: TaskSpec.read(task).tokens for task in tasks})
    arms: dict[str, SyntheticArm] = {}
    left_out = []
    for name in [TRUE, *dial.arms_asked(args.only)]:
        arm = dial.arm_as_typed(name)
        if keeps_state(name):
            left_out.append(name)
        else:
            arms[name] = arm
    first = args.seed + NOISE_FROM
    seeds = range(first, first + args.policies)

    curves: dict[str, dict[str, float]] = {}
    noise: dict[str, dict[str, dict[str, Pairs]]] = {}
    rows: list[Row] = []
    for task in tasks:
        cells: list[dict] = []
        for i, name in enumerate(BATCH_SIZES):
            progress(task, i / (len(BATCH_SIZES) + 4), f"{task}: {name}")
            cells.append(dial.trained_cell(task, named_arm(name), name, args, CURVE_FROM))
        sizes, _ = dial.arms_of_task(task, cells)
        plain = sizes.mean(PLAIN)
        curve = {size: sizes.mean(name) - plain for name, size in BATCH_SIZES.items()}
        curves[task] = {str(size): gain for size, gain in curve.items()}

        progress(task, 0.8, f"{task}: noise")
        rate = cells[0]["rates"][sizes.best_rate(PLAIN)]
        found = noise_of_arms(TaskSpec.read(task), arms, rate, args.steps, seeds,
                              are_asked=bool(args.only))
        noise[task] = {name: states for name, states in found.items() if states}
        for name, states in noise[task].items():
            means = {state: mean_of_pairs(pairs) for state, pairs in states.items()}
            rows.append(prediction_row(task, name, means, curve))
    return Findings("What should credit by token be worth?", [dial.training_in_words(args)],
                    [predictions_table(rows, left_out)], {"curves": curves, "noise": noise})


def keeps_state(name: str) -> bool:
    """Whether a listed method is a class, which learns from batch to batch. It may be typed with
    flags."""
    method, *_ = name.split(" --")
    return inspect.isclass(MITIGATIONS.get(method) or ADVANTAGES.get(method))


def noise_ratio_to_gain(ratio: float, curve: Curve) -> float:
    """The gain of a method whose noise is `ratio` times plain GRPO's. `curve` has plain GRPO's own
    gain by the factor of its batch, infinity for the exact gradient.

    Straight between two batches by the logarithm of their size, and from the largest to the exact
    gradient by the noise; beyond what was measured the last value holds.
    """
    sizes = sorted(curve)
    size = 1 / ratio if ratio > 0 else math.inf
    size = min(max(size, sizes[0]), sizes[-1])
    if size in curve:
        return curve[size]
    below = max(known for known in sizes if known < size)
    above = min(known for known in sizes if known > size)
    if above == math.inf:
        place = 1 - below / size
    else:
        place = math.log(size / below) / math.log(above / below)
    return curve[below] + place * (curve[above] - curve[below])


def noise_of_arms(spec: TaskSpec, arms: dict[str, SyntheticArm], rate: float, steps: int,
                  seeds: range,
                  are_asked: bool = False) -> dict[str, dict[str, Pairs]]:
    """The ratio of each arm's noise to plain GRPO's and its cosine, for policies that are untrained
    and half trained by plain GRPO, one pair for each policy. One whose answers all have the same
    reward says nothing. An arm that was asked for by name, and cannot be measured, is an error."""
    found: dict[str, dict[str, Pairs]] = {name: {} for name in arms}
    for seed in seeds:
        for state, parameters in zip(STATES, trained_by_plain(spec, seed, rate, steps // 2)):
            plain, _ = noise_and_cosine(spec, named_arm(PLAIN), seed, parameters)
            if not math.isfinite(plain):
                continue
            for name in list(found):
                try:
                    noise, cosine = noise_and_cosine(spec, arms[name], seed, parameters)
                    found[name].setdefault(state, []).append((noise / plain, cosine))
                except UserError as error:  # for the others python -m research dial says why
                    if are_asked:
                        raise UserError(f"{name} cannot be measured here: {error}") from None
                    del found[name]
    return found


def mean_of_pairs(pairs: Pairs) -> tuple[float, float]:
    """The geometric mean of the ratios, and the mean of the cosines."""
    ratios, cosines = zip(*pairs)
    return math.exp(fmean(map(math.log, ratios))), fmean(cosines)


def trained_by_plain(spec: TaskSpec, seed: int, rate: float, steps: int) -> list[torch.Tensor]:
    """Parameters (1, P) before and after so many steps of plain GRPO."""
    arm, task = named_arm(PLAIN), SyntheticTask(spec, [seed])
    method, start = arm.start(task), task.parameters
    optimizer = AdamWOfRows(start, [rate])
    for step in range(1, steps + 1):
        gradient, _ = batch_gradients(task, arm, method, step)
        task.parameters = task.parameters + optimizer.change(gradient)
    return [start, task.parameters]


def noise_and_cosine(spec: TaskSpec, arm: SyntheticArm, seed: int,
                     parameters: torch.Tensor) -> tuple[float, float]:
    """The noise and the cosine of many batches of one policy. Where nothing points along the true
    gradient the noise is without end; here it is very large."""
    task = SyntheticTask(spec, [seed] * BATCHES)
    task.parameters = parameters.expand(BATCHES, -1)
    draws = [("noise", seed, number) for number in range(BATCHES)]
    found, _ = batch_gradients(task, arm, arm.start(task), 1, draws)
    task = SyntheticTask(spec, [seed])
    task.parameters = parameters
    true, _ = batch_gradients(task, named_arm(EXACT), None, 1)
    return noise_beside(found.double(), true[0].double())


def noise_beside(found: torch.Tensor, true: torch.Tensor) -> tuple[float, float]:
    """Noise and cosine of gradients (n, P) beside the true one. The square of a mean of few holds
    some of their variance, which is taken out."""
    mean, variance = found.mean(0), found.var(0).sum().item()
    if variance == 0:
        return math.nan, math.nan
    along = (mean @ true / true.norm()).item()
    square = (mean @ mean).item() - variance / len(found)
    if square > along ** 2:
        cosine = along / math.sqrt(square)
    else:
        cosine = math.copysign(1.0, along)
    signal = max(along, 1e-6 * variance ** 0.5)
    return variance / signal ** 2, cosine


def prediction_row(task: str, name: str, means: dict[str, tuple[float, float]],
                   curve: Curve) -> Row:
    untrained, cosine = means.get("untrained", (None, None))
    half, cosine_half = means.get("half", (None, None))
    known = [noise for noise, _ in means.values()]
    ratio = math.prod(known) ** (1 / len(known))
    return [task, name, untrained, half, cosine, cosine_half, ratio,
            noise_ratio_to_gain(ratio, curve)]


def predictions_table(rows: list[Row], left_out: list[str]) -> Table:
    formats = {"world": "", "arm": "", "untrained": ".3g", "half": ".3g", "cosine": ".2f",
               "cosine half": ".2f", "ratio": ".3g", "gain": "points"}
    notes = ["Noise is the noise-to-signal ratio of a batch's gradient with respect to the "
             "parameters. It is measured on untrained and on half trained policies, and the "
             "ratio is the geometric mean of both. The predicted gain is in points of mean "
             "success over plain GRPO. The cosine is that between the method's mean gradient "
             "and the true one, and the prediction leaves it out"]
    if left_out:
        notes.append("Some methods keep a state between batches. They are left out, because each "
                     f"batch is alone here: {', '.join(left_out)}")
    return Table("predictions",
                 "Each method's noise, divided by plain GRPO's, and the gain that it "
                 "predicts", by_row(formats, rows), "", notes,
                 {"world": "task", "untrained": "noise, untrained", "half": "noise, half trained",
                  "cosine": "cosine, untrained", "cosine half": "cosine, half trained",
                  "gain": "predicted gain, points"})


def compare_rules(predictions: str, measured: str, arms: list[str]) -> Findings:
    """What each rule predicted for these arms, and what was measured."""
    said = read_result(RESULTS / f"{predictions}.json")
    found = read_result(RESULTS / f"{measured}.json")
    if said["measured"] != "law" or "curves" not in said["values"]:
        raise UserError(f"--against: {predictions}.json has no predictions of python -m research "
                        "law")
    if found["measured"] != "dial":
        raise UserError(f"--against: {measured}.json has no gains of python -m research dial")
    curves = {}
    for task, curve in said["values"]["curves"].items():
        curves[task] = {float(size): gain for size, gain in curve.items()}
    gains = {(row["world"], row["arm"]): row["gain"] for row in table_rows(measured, "board")}
    of_arms: dict[str, list[dict]] = {arm: [] for arm in arms}  # predictions that can be compared
    for row in table_rows(predictions, "predictions"):
        is_measured = (row["world"], row["arm"]) in gains
        if row["arm"] in of_arms and is_measured and not TaskSpec.read(row["world"]).all:
            of_arms[row["arm"]].append(row)
    rows: list[Row] = []
    for arm, known in of_arms.items():
        if not known:
            continue
        gains_of_arm = [gains[row["world"], arm] for row in known]
        for rule, predict in RULES.items():
            predicted = [predict(row, curves[row["world"]]) for row in known]
            rows.append([arm, rule, *prediction_errors(predicted, gains_of_arm)])
    if not rows:
        raise UserError(f"none of the arms {', '.join(arms)} is both in {predictions}.json and in "
                        f"{measured}.json")
    formats = {"arm": "", "rule": "", "worlds": "d", "inside": "d", "deviation": "size",
               "rank": ".2f", "slope": ".2f"}
    rules = Table("rules", "What was predicted, and what was measured", by_row(formats, rows), "",
                  ["Inside the interval: the number of tasks in which the predicted gain lies in "
                   "the 95% interval of the measured one. Mean deviation: the mean size of "
                   "measured minus predicted gain, in points. Rank correlation: of predicted and "
                   "measured gains, over tasks. Measured / predicted: the slope of a line through "
                   "0, by least squares",
                   "Predicted by: `its gain times 0.6` is the prediction times 0.6. `the "
                   "prediction, arithmetic mean` has the arithmetic mean of the noise ratios in "
                   "place of the geometric one. `as the exact gradient` is the gain of plain GRPO "
                   "with the exact gradient. `no gain` is 0"],
                  {"rule": "predicted by", "worlds": "tasks", "inside": "inside the interval",
                   "deviation": "mean deviation, points", "rank": "rank correlation",
                   "slope": "measured / predicted"})
    return Findings("Is the noise-to-batch-size prediction better than a plainer rule?",
                    [f"The predictions are those of {predictions}.json, and the gains those of "
                     f"{measured}.json."], [rules])


def prediction_errors(predicted: list[float], measured: list[dict]) -> list[float]:
    """How many tasks, how many inside, mean deviation, rank correlation, slope through 0."""
    x = np.array(predicted)
    gain, low, high = estimates_as_arrays(measured)
    is_inside = (low <= x) & (x <= high)
    deviation = np.abs(x - gain).mean()
    rank = rank_correlation(x, gain) if np.ptp(x) else math.nan
    slope = float(x @ gain / (x @ x)) if x.any() else math.nan
    return [len(gain), int(is_inside.sum()), float(deviation), rank, slope]
