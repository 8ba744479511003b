"""config.json and the logs of a run, read: all is of this run, each column of its type, no step is
missing.

A weighting, an advantage or another trainer adds columns of its own: each is a number, a text, yes,
no or null. What may be null may also be missing, as in a run of an older version.
"""
import shlex
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from engine.errors import UserError
from harness.credit_file import step_of
from harness.files import LARGEST, Json, is_there, read_json, read_lines, sha256_of
from harness.flags import Range, Share, check_file, shortened
from harness.identity import (MODES, Evaluation, Line, Number, check_origin, run_id_of,
                              run_id_on_record)
from harness.settings import ON_FILE

Check = Callable[[object], bool]
Record = typing.TypeVar("Record", bound=Mapping[str, object])
OfLog = typing.TypeVar("OfLog", bound=Line)
Code = dict[str, dict[str, str]]  # sha256 of each file, by the step from which on it holds
Amount = typing.Annotated[float, Range(least=0, most=LARGEST)]


class StepLine(Line):
    """Of metrics.jsonl, the columns that somebody reads."""
    success: Share | None
    finished: Share | None
    reward: Number | None
    entropy: Number | None
    loss: Number | None
    N: Amount | None
    length: Amount | None
    gradient_norm: Amount | None
    sampler_gap: Amount | None
    weight_factor: Amount | None
    seconds: Amount | None
    processor_seconds: Amount | None
    skipped: str | None


class RunConfig(typing.TypedDict, total=False):
    """Of config.json, beside the other settings. A probe evaluates nothing: it has no `ranks`."""
    mitigation: str
    steps: int
    seed: int
    model: str
    ranks: int | None
    eval_every: int | None
    eval_modes: typing.Annotated[str, Range(choices=tuple(MODES))] | None
    made_of: dict[str, str] | None
    code: Code | None


class Seal(typing.TypedDict):  # of a checkpoint's trainer/state.json
    run_id: str | None
    step: int | None
    files: dict[str, str] | None


NAMES: dict[type[Line], str] = {
    StepLine: "metrics.jsonl", Evaluation: "evaluations.jsonl", Line: "samples.jsonl"}


@cache
def columns_of(kind: type) -> dict[str, Check]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: check_of(hint) for name, hint in hints.items()}


def check_of(hint: object) -> Check:
    """Whether a value is of this type: 3 is a float, and True is no number."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        kinds, flag = (int, float) if parts[0] is float else parts[:1], parts[1]
        limits, choices = flag.limits(), flag.choices
        return lambda value: type(value) in kinds and (not choices or value in choices) and all(
            holds(value, limit) for _, limit, holds in limits)
    if origin in (types.UnionType, typing.Union):
        checks = [check_of(part) for part in parts]
        return lambda value: any(check(value) for check in checks)
    if origin is list:
        is_right = check_of(parts[0])
        return lambda values: isinstance(values, list) and all(map(is_right, values))
    if origin is dict:
        has_right = check_of(parts[1])
        return lambda found: isinstance(found, dict) and all(map(has_right, found.values()))
    if isinstance(hint, type) and typing.is_typeddict(hint):
        return lambda value: isinstance(value, dict) and not wrong_columns(value, hint, anything)
    return lambda value: type(value) is hint


is_number = check_of(Number)
is_plain = check_of(Number | bool | str | None)


def anything(value: object) -> bool:
    return True


def wrong_columns(found: Json, kind: type, others: Check) -> list[str]:
    """What is missing is null."""
    columns = columns_of(kind)
    whole = dict.fromkeys(columns) | found
    return [name for name, value in whole.items() if not columns.get(name, others)(value)]


def fits(found: Json, kind: type[Record], others: Check) -> typing.TypeGuard[Record]:
    return not wrong_columns(found, kind, others)


def checked(where: str | Path, found: Json, kind: type[Record], others: Check = anything) -> Record:
    if fits(found, kind, others):
        return found
    name = wrong_columns(found, kind, others)[0]
    value = "missing" if found.get(name) is None else shortened(repr(found[name]))
    raise UserError(f"{where} is not of this program: its {name} is {value}")


def record(where: str | Path, found: Json, kind: type[Record], others: Check = anything) -> Record:
    return checked(where, dict.fromkeys(columns_of(kind)) | found, kind, others)


def run_config(folder: Path) -> RunConfig:
    """Read config.json of a run folder, and compare it with its run_id."""
    path = folder / "config.json"
    if not is_there(path):
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    config = read_json(path)
    if "run_id" in config and config["run_id"] != run_id_of(config):
        raise UserError(f"{path} was changed since the run began: its settings do not fit its "
                        "run_id. Put the old ones back, or begin another run with them: "
                        f"--config {shlex.quote(str(path))} --out NAME")
    check_file(path, config, ON_FILE)
    return checked(path, config, RunConfig)


def check_seal(run: Path, checkpoint: Path) -> None:
    """Stop unless a checkpoint is this run's and as it was written. All but the newest lose their
    seal, with the trainer's state."""
    path = checkpoint / "trainer" / "state.json"
    if not is_there(path):
        return
    seal = record(path, read_json(path), Seal)
    origin = {"run_id": run_id_on_record(run), "step": step_of(checkpoint)}
    check_origin(checkpoint, seal, origin)
    for name, sha256 in (seal["files"] or {}).items():  # none in an older version
        if sha256_of(checkpoint / name) != sha256:
            raise UserError(f"{checkpoint / name} was changed after it was written")


def lines_of_run(run: Path, kind: type[OfLog]) -> list[OfLog]:
    path, wanted, lines = run / NAMES[kind], {"run_id": run_id_on_record(run)}, []
    for number, line in enumerate(read_lines(path), 1):
        where = f"{path}, line {number}"
        check_origin(where, line, wanted)
        lines.append(record(where, line, kind, anything if kind is Line else is_plain))
    return lines


def last_step(run: Path) -> int:
    """The last step on record; 0 before the first."""
    return max((line["step"] for line in lines_of_run(run, StepLine)), default=0)


def missing_evaluations(config: RunConfig, evaluations: Sequence[Evaluation], done: int,
                        steps: int) -> list[tuple[int, str]]:
    """Step and mode of those that a run with `done` of its steps has to have."""
    every = config.get("eval_every")
    if not every or config.get("ranks") is None:
        return []
    due = [*range(0, done + 1, every)]
    if done == steps and done % every:
        due.append(done)
    made = {(line["step"], line["mode"]) for line in evaluations}
    modes = MODES[config.get("eval_modes") or "both"]
    return [(step, mode) for step in due for mode in modes if (step, mode) not in made]


def refuse_gaps(run: Path, config: RunConfig, metrics: Sequence[StepLine],
                evaluations: Sequence[Evaluation], done: int) -> None:
    """Stop unless every step up to `done` is on record, in order, with its evaluation."""
    path = run / "metrics.jsonl"
    for number, line in enumerate(metrics, 1):
        if line["step"] != number:
            raise UserError(f"{path}, line {number} is step {line['step']}: lines are missing, "
                            "doubled or out of order")
    if len(metrics) < done:
        raise UserError(f"{path} has {len(metrics)} lines, while {run}/credit or {run}/checkpoints "
                        f"has files from after step {done}: lines are missing, or such a file "
                        "does not belong there")
    for step, mode in missing_evaluations(config, evaluations, done, config["steps"]):
        raise UserError(f"{run}/evaluations.jsonl has lost the {mode} evaluation at step {step}: "
                        f"{done} steps are done. --resume makes it again once the checkpoints from "
                        f"step {step} on are moved away; without one from before, train again "
                        "with another --out")
