"""A run's curves while it goes, in a program that draws them: --track tensorboard, trackio, wandb.

Each gets the numbers of metrics.jsonl as train/NAME and those of evaluations.jsonl as
held_out/MODE/NAME, by step. Nothing is sent anywhere: wandb works offline, and writes into the
run's folder, as TensorBoard does; trackio keeps a file in its own folder of this machine.

A curve has each step once. TensorBoard forgets what a killed run has written past its checkpoint.
trackio and wandb cannot, so a resumed run begins there as a new one, with all steps on record. Each
start has a name of its own, so that two runs whose folders have the same name stay apart.
"""
import io
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from lab.engine.errors import UserError
from lab.harness.record import Json, read_lines
from lab.harness.screen import say

PROJECT_NAME = "grpo-credit-lab"
Log = Callable[[dict[str, float], int], object]  # numbers by name, and their step


@contextmanager
def tracking(name: str, folder: Path, done: int, config: Json) -> Iterator[Log]:
    """A function that logs numbers; `done` steps of the run are on record."""
    try:
        log, close = TRACKERS[name](folder.resolve(), done, config)
    except ModuleNotFoundError as error:
        raise UserError(f"--track {name} needs the package {name}: pip install {name} "
                        f"({error})") from None
    try:
        if done and name != "tensorboard":
            log_what_is_on_record(log, folder, done)
        yield log
    finally:
        close()


def log_what_is_on_record(log: Log, folder: Path, done: int) -> None:
    for line in read_lines(folder / "metrics.jsonl"):
        if line["step"] <= done:
            log(numbers_of(line, "train"), line["step"])
    evaluations = folder / "evaluations.jsonl"
    for line in read_lines(evaluations) if evaluations.exists() else []:
        if line["step"] <= done:
            log(numbers_of(line, f"held_out/{line['mode']}"), line["step"])


def name_of_start(folder: Path, done: int) -> str:
    """The name of a start: the folder, from which step it goes on, and eight letters of its own."""
    resumed = f"-from-{done + 1}" if done else ""
    return f"{folder.name}{resumed}-{secrets.token_hex(4)}"


def tensorboard(folder: Path, done: int, config: Json) -> tuple[Log, Callable[[], object]]:
    from torch.utils.tensorboard import SummaryWriter
    # what a killed run has written past its checkpoint is not shown any more
    writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def log(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    say(f"to see its curves: tensorboard --logdir {folder.parent}")
    return log, writer.close


def trackio(folder: Path, done: int, config: Json) -> tuple[Log, Callable[[], object]]:
    import trackio
    with redirect_stdout(io.StringIO()):  # it prints ten lines
        trackio.init(project=PROJECT_NAME, name=name_of_start(folder, done), config=config,
                     resume="never", auto_log_cpu=False, auto_log_gpu=False)

    def close() -> None:
        with redirect_stdout(io.StringIO()):
            trackio.finish()

    say(f"to see its curves: trackio show --project {PROJECT_NAME}")
    return lambda numbers, step: trackio.log(numbers, step=step), close


def wandb(folder: Path, done: int, config: Json) -> tuple[Log, Callable[[], object]]:
    import wandb
    name = name_of_start(folder, done)
    run = wandb.init(project=PROJECT_NAME, name=name, id=name, mode="offline", dir=str(folder),
                     config=config,
                     settings=wandb.Settings(console="off", silent=True))
    say(f"to see its curves on wandb's server: wandb sync {folder / 'wandb'}/offline-run-*")
    return lambda numbers, step: run.log(numbers, step=step), run.finish


TRACKERS = {"tensorboard": tensorboard, "trackio": trackio, "wandb": wandb}


def numbers_of(line: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """The numbers in a line of a record, by name: {"train/reward": 0.3, ...}."""
    numbers = {}
    for name, value in line.items():
        if isinstance(value, (int, float)) and name != "step":
            numbers[f"{prefix}/{name}"] = float(value)
    return numbers
