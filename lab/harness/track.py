"""The curves of a running run in TensorBoard (--track tensorboard).

TensorBoard shows the numbers of metrics.jsonl as train/NAME, and those of evaluations.jsonl as
held_out/MODE/NAME, by step. They are written into the run's folder, and sent nowhere.
"""
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.engine.errors import UserError, say


class Curves:
    def __init__(self, folder: Path, done: int):
        """`done` steps of the run are on record."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise UserError("--track tensorboard needs the package tensorboard: pip install "
                            f"tensorboard ({error})") from None
        # what a killed run has written past its checkpoint is not shown any more
        self.writer: Any = SummaryWriter(str(folder.resolve() / "tensorboard"), purge_step=done + 1)
        say(f"to see its curves: tensorboard --logdir {folder.resolve().parent}")

    def add(self, line: Mapping[str, Any], prefix: str) -> None:
        """Draw the numbers of a line of a record: train/reward, ..."""
        for name, value in line.items():
            if isinstance(value, (int, float)) and name != "step":
                self.writer.add_scalar(f"{prefix}/{name}", float(value), line["step"])
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()
