"""The folder a run leaves behind, written so that a kill at any moment costs nothing but time.

Files and checkpoints appear whole or not at all: they are written under another name, then renamed.
Lines are appended; the last one may be cut off, and is forgotten when the run goes on.
"""
import json
import shutil
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path

import torch

from engine import processes
from engine.errors import UserError
from engine.rollouts import Rollouts
from harness.credit_file import checkpoint_folders, credit_path, write_credit
from harness.files import (append_line, is_file, is_folder, is_there, locked, replace_text,
                           whole_folder, writing)
from harness.identity import make_seal, run_id_on_record
from harness.own_code import joined
from qwen2_model import Qwen2, write_tensors

TRAVELS_ALONG = (  # from the model's folder to every checkpoint
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "generation_config.json", "recipe.json")


class RunFolder:
    def __init__(self, path: Path):
        self.path = Path(path)

    @classmethod
    def create(cls, path: Path, config: dict, tokenizer: Path) -> "RunFolder":
        """Make the folder with its config.json and a copy of the tokenizer."""
        with whole_folder(path) as unfinished, writing(path):
            replace_text(unfinished / "config.json", json.dumps(config, indent=2) + "\n")
            shutil.copyfile(tokenizer, unfinished / "tokenizer.json")
        return cls(path)

    @cached_property
    def origin(self) -> dict:
        """What all that is written here says of itself."""
        run_id = run_id_on_record(self.path)
        return {"run_id": run_id} if run_id else {}

    def replace(self, name: str, text: str) -> None:
        replace_text(self.path / name, text)

    def append(self, name: str, line: dict) -> None:
        append_line(self.path / name, joined(line, self.origin))

    def write_credit(self, step: int, rollouts: Rollouts, weight: torch.Tensor,
                     **more: torch.Tensor) -> None:
        """Write what every token was given, of the answers to this process's problems."""
        path = credit_path(self.path, step, processes.rank())
        with writing(path):
            write_credit(path, rollouts, weight, {"step": step, **self.origin}, **more)

    def checkpoints(self) -> list[Path]:
        """The checkpoints that training can go on from, oldest first."""
        return [folder for folder in checkpoint_folders(self.path).values()
                if is_file(folder / "trainer" / "state.json")]

    def save_checkpoint(self, step: int, model: Qwen2, parameters: dict[str, torch.Tensor],
                        source: Path, state: dict[str, torch.Tensor]) -> None:
        """Write a model folder with the trainer's state in trainer/. `source` is the folder from
        which the model was loaded: its tokenizer and the like are copied."""
        checkpoint = self.path / "checkpoints" / f"step_{step:06d}"
        with whole_folder(checkpoint) as unfinished, writing(checkpoint):
            model.save_pretrained(unfinished, parameters)
            for name in TRAVELS_ALONG:
                if is_file(source / name):
                    shutil.copyfile(source / name, unfinished / name)
            (unfinished / "trainer").mkdir()
            write_tensors(unfinished / "trainer" / "state.safetensors", state)
            seal = make_seal(self.path, unfinished, step)
            replace_text(unfinished / "trainer" / "state.json", json.dumps(seal, indent=2) + "\n")
        self.remove_old_states()

    def remove_old_states(self, keep: int = 2) -> None:
        """Keep the trainer's state, larger than the model, in the newest checkpoints only."""
        states = [folder / "trainer" for folder in checkpoint_folders(self.path).values()
                  if is_folder(folder / "trainer")]
        with writing(self.path):
            for old_state in states[:-keep]:
                shutil.rmtree(old_state)

    def remove_unless_begun(self) -> None:
        """Remove the folder if no step is on record, so that it is not in the way of the next
        attempt."""
        if not is_there(self.path / "metrics.jsonl"):
            shutil.rmtree(self.path, ignore_errors=True)


class OtherRank(RunFolder):
    """The folder for a process that writes only its own credit, and leaves the rest to rank 0."""

    def replace(self, *_) -> None:
        pass

    append = remove_old_states = remove_unless_begun = replace

    def save_checkpoint(self, step: int, model: Qwen2, parameters: dict[str, torch.Tensor],
                        source: Path, state: dict[str, torch.Tensor]) -> None:
        """Give rank 0 the parts of the tensors that it writes, in the same order."""
        for tensors in (parameters, state):
            write_tensors(None, tensors)


@contextmanager
def open_folder(path: Path):
    """The folder of a run: locked for rank 0, which writes it, an OtherRank for the others."""
    if processes.rank() > 0:
        yield OtherRank(path)
        return
    with ExitStack() as opened:
        try:
            opened.enter_context(locked(path))
        except BlockingIOError:
            raise UserError(f"{path} is being written by another process") from None
        yield RunFolder(path)
