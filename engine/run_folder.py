"""The folder a run leaves behind: written so that a kill at any moment costs nothing but time.

Files and checkpoints appear whole or not at all: they are written under another name, then renamed. Lines
are appended; the last one may be cut off, and is forgotten when the run goes on.
"""
import json
import os
import platform
import re
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

from engine.credit_file import credit_path
from engine.errors import UserError
from engine.files import PROJECT, append_line, read_json, read_lines, replace_text, whole_folder, writing
from qwen2_model import Qwen2

TRAVELS_ALONG = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
                 "added_tokens.json", "generation_config.json", "recipe.json")  # from the model's folder to checkpoints


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
        """Entered by the one process that writes it. The lock goes with the process, whatever ends it."""
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
        """Those that training can go on from, oldest first."""
        found = [path.parent.parent for path in self.path.glob("checkpoints/step_*/trainer/state.json")]
        return sorted((path for path in found if step_of(path) is not None), key=step_of)

    def forget_after(self, step: int) -> None:
        """Remove what a stopped run wrote past its last checkpoint: it will be written again, the same."""
        with writing(self.path):
            for name in ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl"):
                kept = [json.dumps(line) + "\n" for line in self.lines(name) if line["step"] <= step]
                if (self.path / name).exists():
                    self.replace(name, "".join(kept))
            for path in self.path.glob("credit/step_*"):
                if path.suffix == ".tmp" or (step_of(path.with_stem(path.stem.partition("_rank")[0])) or 0) > step:
                    path.unlink()
            for path in self.path.glob("checkpoints/.*.tmp"):
                shutil.rmtree(path)

    def save_checkpoint(self, step: int, model: Qwen2, parameters: dict[str, torch.Tensor], source: Path, state: dict[str, torch.Tensor]) -> None:
        """A model folder like the one it came from, `source`, with the trainer's state below it.
        Only the newest two keep that state."""
        final = self.path / "checkpoints" / f"step_{step:06d}"
        if final.exists():
            return
        fresh = final.with_name(f".{final.name}.tmp")
        with writing(final):
            shutil.rmtree(fresh, ignore_errors=True)
            model.save_pretrained(fresh, parameters)
            for name in TRAVELS_ALONG:
                if (source / name).is_file():
                    shutil.copyfile(source / name, fresh / name)
            (fresh / "trainer").mkdir()
            save_file(state, fresh / "trainer" / "state.safetensors")
            (fresh / "trainer" / "state.json").write_text(json.dumps({"step": step}) + "\n")
            fresh.rename(final)
            kept = [path for path in self.path.glob("checkpoints/step_*/trainer") if step_of(path.parent) is not None]
            for old in sorted(kept, key=lambda path: step_of(path.parent))[:-2]:
                shutil.rmtree(old)


class Bystander(RunFolder):
    """The folder of a rank that reads it, writes its own credit, and leaves the rest to rank 0."""

    def __enter__(self) -> "Bystander":
        return self

    def __exit__(self, *_) -> None:
        pass

    def replace(self, *_) -> None:
        pass

    append = forget_after = save_checkpoint = replace


def run_config(folder: Path) -> dict:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    config = read_json(folder / "config.json")
    if "mitigation" not in config:
        raise UserError(f"{folder} is not a run folder: its config.json says nothing of a mitigation")
    return config


def step_of(path: Path) -> int | None:
    """100 of step_000100 or step_000100.npz; None for a name that people gave, a backup say."""
    match = re.fullmatch("step_([0-9]+)", path.stem)
    return int(match[1]) if match else None


def provenance() -> dict:
    """The versions a run was made with, and the commit of this code (null outside a checkout)."""
    git = ["git", "rev-parse", "HEAD"]
    result = subprocess.run(git, cwd=PROJECT, capture_output=True, text=True) if shutil.which("git") else None
    return {"git_commit": result.stdout.strip() if result and result.returncode == 0 else None,
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
                         "safetensors": safetensors.__version__, "tokenizers": tokenizers.__version__}}
