"""The rows of a card (card.py) that come from other probes, each a function.

A row is a dict: `own`, `plain` and `control` are an Estimate, a text, or None where nothing is
known; `could_see` says what the measurement could have seen, and `reason` why there is no number.
"""
from functools import cache
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np
import torch

from analysis.statistics import Estimate, Floats, jackknife, within
from lab.probes.estimates import jackknife_of_log
from engine.choices import MITIGATIONS
from engine.errors import UserError
from lab.dial.told import BY_KIND, told_by_definition
from lab.probes import dial, signal
from lab.probes.enumerated import (Batches, EnumeratedTask, Estimator, estimator,
                                        make_enumerated)
from lab.probes.enumerated_methods import list_advantages, list_weights
from lab.probes.exact import median_of
from lab.publish.results import table_rows

Row = dict[str, object]
POLICIES, LENGTH, GROUP = 6, 4, 3  # of the task whose answers are all listed
TRUE_CREDIT = "one-step"           # the advantage V after a token minus V before it, there
PUBLISHED = {"start": "signal_tiny", "half": "signal_tiny_half"}  # where `measured` is the control
CONTROL = "measured --measured_k 2"


@cache
def listed_task(seed: int) -> tuple[EnumeratedTask, Batches, dict[str, torch.Tensor]]:
    """A policy, all groups that it can draw, and the advantages of rloo, grpo and true credit."""
    task = make_enumerated(seed, LENGTH)
    batches = Batches.all(task, GROUP)
    return task, batches, list_advantages(task, batches, seed, only=("grpo", "rloo")).values


def own_advantages(name: str, flags: dict, seed: int) -> torch.Tensor:
    """(M, G, T) the advantages of a method; of a weighting they are its weights times those of
    rloo, which alone have no bias."""
    task, batches, known = listed_task(seed)
    if name in MITIGATIONS:
        listed = list_weights(task, batches, known["grpo"], only=(name,), flags={name: flags})
        factor: torch.Tensor | float = known["rloo"]
    else:
        listed = list_advantages(task, batches, seed, only=(name,), flags={name: flags})
        factor = 1.0
    if name not in listed.values:
        raise UserError(listed.reasons.get(name, "`python -m lab exact` has it with exact "
                                                 "values alone"))
    return listed.values[name] * factor


def in_the_enumerated_task(name: str, flags: dict) -> dict[str, Row]:
    """Bias, cosine with the true gradient, and noise over signal as a multiple of plain GRPO's:
    medians of six policies. Plain GRPO is rloo beside a weighting."""
    plain = "rloo" if name in MITIGATIONS else "grpo"
    found: dict[str, list[dict[str, float]]] = {"own": [], "plain": [], "control": []}
    try:
        for seed in range(POLICIES):
            task, batches, known = listed_task(seed)
            of_arms = {"own": own_advantages(name, flags, seed), "plain": known[plain],
                       "control": known[TRUE_CREDIT]}
            noise_of_plain = 1.0
            for arm in ("plain", "own", "control"):
                one: Estimator = estimator(task, batches, of_arms[arm] / GROUP)
                numbers = one.against(task.gradient)
                noise_of_plain = numbers["noise"] if arm == "plain" else noise_of_plain
                found[arm].append(numbers | {"times": numbers["noise"] / noise_of_plain})
    except UserError as error:
        return {key: {"reason": str(error)} for key in ("bias", "direction", "noise")}
    rows = {}
    for key, number in (("bias", "bias"), ("direction", "cosine"), ("noise", "times")):
        of_arm = {arm: median_of([one[number] for one in values]) for arm, values in found.items()}
        rows[key] = {**of_arm, "could_see": "exact"}
    return rows


def gradient_noise(method: str, model: str, questions: int, answers: int, batches: int,
                   stage: str, device: str, config: Path) -> dict[str, Row]:
    """Of what batch of plain GRPO the method's gradient has the noise, along plain GRPO's mean
    gradient; and the cosine of the two mean gradients. The method is typed as in `signal --only`.

    The part of a method's mean gradient along plain GRPO's is known better than its length, because
    both come from the same batches. So the first number is the factor of `signal` times the square
    of the cosine.
    """
    args = SimpleNamespace(model=model, max_new_tokens=0, device=device, threads=1, seed=0,
                           config=str(config), only=method, questions=questions, answers=answers,
                           batches=batches)
    _, inner, _ = signal.measure_gradients(args)
    return rows_of_noise(inner, stage)


def rows_of_noise(pair: Floats, stage: str) -> dict[str, Row]:
    numbers = np.arange(pair.shape[-1])

    def of_batches(kept: Floats) -> Floats:
        return np.asarray(pair[:, :, kept][:, :, :, kept])

    as_batch = jackknife_of_log(lambda kept: along_plain(of_batches(kept)), numbers)
    cosine = within(jackknife(lambda kept: signal.cosine(of_batches(kept)), numbers), -1, 1)
    control = published_control(stage)
    seen = as_batch.high / as_batch.value if np.isfinite(as_batch.high) else np.nan
    could_see = "its direction was not seen"
    if np.isfinite(seen):
        could_see = f"about a factor of {seen ** 1.4:.2g}"
    return {f"batch_{stage}": {"own": as_batch, "plain": 1.0, "control": control[0],
                               "could_see": could_see},
            f"cosine_{stage}": {"own": cosine, "plain": 1.0, "control": control[1],
                                "could_see": "its interval" if np.isfinite(cosine.low) else
                                             "not seen in so few batches"}}


def along_plain(pair: Floats) -> float:
    """How many times as large a batch of plain GRPO has this noise, along its mean gradient."""
    squared, along = signal.mean_of_pairs(pair[0, 0]), signal.mean_of_pairs(pair[0, 1])
    if squared <= 0 or along <= 0:
        return float("nan")
    noise = [np.trace(pair[m, m]) / pair.shape[-1] - signal.mean_of_pairs(pair[m, m])
             for m in (0, 1)]
    return float((along / squared) ** 2 * noise[0] / noise[1])


def published_control(stage: str) -> tuple[Estimate | None, Estimate | None]:
    """The same two numbers of `measured`, from a published measurement with more batches. The
    first has no interval, because only its parts have."""
    if stage not in PUBLISHED:
        return None, None
    row = next(row for row in table_rows(PUBLISHED[stage], "signal") if row["method"] == CONTROL)
    factor, cosine = (row[f"{name} (95% interval)"] for name in ("factor", "cosine"))
    return (Estimate(factor["value"] * cosine["value"] ** 2),
            Estimate(cosine["value"], cosine["low"], cosine["high"]))


def in_planted_tasks(name: str, flags: dict) -> dict[str, Row]:
    """The gain over plain GRPO in three tasks where few, some or many tokens are known to decide;
    the control is each token's true credit. A method that is told there which tokens decide, or
    that does the same as plain GRPO there, has the reason in the place of gains."""
    tasks = zip(("few", "some", "many"), dial.FEW_SOME_MANY)
    try:
        told = told_by_definition(name, flags)
        if BY_KIND.format(name=name) in told:
            raise UserError(told[0])
        found = dial.gains_in_three_tasks(name, flags)
        if all(one.is_same for one in found):
            raise UserError(f"there {name} does the same as plain GRPO: it tells tokens apart by "
                            "something that is the same for all tokens there")
    except UserError as error:
        return {key: {"reason": str(error)} for key, _ in tasks}
    rows = {}
    for (key, _), one in zip(tasks, found):
        rows[key] = {"own": one.gain, "plain": fmean(one.plain), "control": one.true,
                     "could_see": one.gain.visible, "told": " ".join(told)}
    return rows
