"""The folder a run leaves behind, written so that a kill at any moment costs nothing but time.

Files and checkpoints appear whole or not at all: they are written under another name, then renamed.
Lines are appended; the last one may be cut off, and is forgotten when the run goes on.
"""
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two processes on one folder are not told apart there
    fcntl = None

import numpy as np
import safetensors
import tokenizers
import torch
from safetensors.torch import save_file

from engine import processes
from engine.credit_file import credit_path, step_of
from engine.errors import UserError
from engine.files import (PROJECT, append_line, read_json, read_lines, replace_text, whole_folder,
                          writing)
from qwen2_model import Qwen2

LOGS = ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl")
TRAVELS_ALONG = (  # from the model's folder to every checkpoint
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "generation_config.json", "recipe.json")


class RunFolder:
    def __init__(self, path: Path):
        self.path = Path(path)

    @classmethod
    def create(cls, path: Path, config: dict, tokenizer: Path) -> "RunFolder":
        with whole_folder(path) as unfinished, writing(path):
            replace_text(unfinished / "config.json", json.dumps(config, indent=2) + "\n")
            shutil.copyfile(tokenizer, unfinished / "tokenizer.json")
        return cls(path)

    def __enter__(self) -> "RunFolder":
        """Lock the folder for the one process that writes it. The lock goes with the process."""
        self.lock = os.open(self.path, os.O_RDONLY) if fcntl else None
        try:
            if fcntl:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self.lock)
            raise UserError(f"{self.path} is being written by another process") from None
        return self

    def __exit__(self, *_) -> None:
        if fcntl:
            os.close(self.lock)

    def replace(self, name: str, text: str) -> None:
        replace_text(self.path / name, text)

    def append(self, name: str, line: dict) -> None:
        append_line(self.path / name, line)

    def lines(self, name: str) -> list[dict]:
        return read_lines(self.path / name)

    def credit(self, step: int, rank: int = 0) -> Path:
        return credit_path(self.path, step, rank)

    def checkpoints(self) -> list[Path]:
        """The checkpoints that training can go on from, oldest first."""
        states = self.path.glob("checkpoints/step_*/trainer/state.json")
        folders = [state.parent.parent for state in states]
        return sorted((folder for folder in folders if step_of(folder) is not None), key=step_of)

    def forget_after(self, step: int) -> None:
        """Remove what a stopped run wrote past its last checkpoint: it will be written again."""
        with writing(self.path):
            for name in LOGS:
                if (self.path / name).exists():
                    kept = [line for line in self.lines(name) if line["step"] <= step]
                    self.replace(name, "".join(json.dumps(line) + "\n" for line in kept))
            for path in self.path.glob("credit/step_*"):
                without_rank = path.with_stem(path.stem.partition("_rank")[0])
                if path.suffix == ".tmp" or (step_of(without_rank) or 0) > step:
                    path.unlink()
            for path in self.path.glob("checkpoints/.*.tmp"):
                shutil.rmtree(path)

    def save_checkpoint(self, step: int, model: Qwen2, parameters: dict[str, torch.Tensor],
                        source: Path, state: dict[str, torch.Tensor]) -> None:
        """Write a model folder like `source`, its origin, with the trainer's state below it."""
        checkpoint = self.path / "checkpoints" / f"step_{step:06d}"
        if checkpoint.exists():
            return
        with whole_folder(checkpoint) as unfinished, writing(checkpoint):
            model.save_pretrained(unfinished, parameters)
            for name in TRAVELS_ALONG:
                if (source / name).is_file():
                    shutil.copyfile(source / name, unfinished / name)
            (unfinished / "trainer").mkdir()
            save_file(state, unfinished / "trainer" / "state.safetensors")
            replace_text(unfinished / "trainer" / "state.json", json.dumps({"step": step}) + "\n")
        self.forget_old_states()

    def forget_old_states(self, keep: int = 2) -> None:
        """Keep the trainer's state, larger than the model, in the newest checkpoints only."""
        states = [path for path in self.path.glob("checkpoints/step_*/trainer")
                  if step_of(path.parent) is not None]
        with writing(self.path):
            for old in sorted(states, key=lambda path: step_of(path.parent))[:-keep]:
                shutil.rmtree(old)


class Bystander(RunFolder):
    """The folder for a process that writes only its own credit, and leaves the rest to rank 0."""

    def __enter__(self) -> "Bystander":
        return self

    def __exit__(self, *_) -> None:
        pass

    def replace(self, *_) -> None:
        pass

    append = forget_after = save_checkpoint = replace


def open_run(folder: Path) -> RunFolder:
    """The folder of a run, as this process may use it."""
    return RunFolder(folder) if processes.rank() == 0 else Bystander(folder)


def run_config(folder: Path) -> dict:
    """Read config.json of a run folder."""
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    config = read_json(folder / "config.json")
    if "mitigation" not in config:
        raise UserError(f"{folder} is not a run folder: its config.json says nothing of a "
                        "mitigation")
    return config


def provenance() -> dict:
    """The versions a run was made with, and the commit of this code (null outside a checkout)."""
    versions = {"python": platform.python_version(), "torch": torch.__version__,
                "numpy": np.__version__, "safetensors": safetensors.__version__,
                "tokenizers": tokenizers.__version__}
    commit = None
    if shutil.which("git"):
        command = ["git", "rev-parse", "HEAD"]
        result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
        commit = result.stdout.strip() if result.returncode == 0 else None
    return {"git_commit": commit, "versions": versions}
