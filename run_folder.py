"""The folder a run leaves behind: written so that a kill at any moment costs nothing but time.

Files and checkpoints appear whole or not at all: they are written under another name, then renamed. Lines
are appended; the last one may be cut off, and is forgotten when the run goes on.
"""
import json
import math
import os
import platform
import re
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two processes on one folder are not told apart there
    fcntl = None

import numpy
import safetensors
import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from qwen2_model import Qwen2, UserError

TRAVELS_ALONG = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
                 "added_tokens.json", "generation_config.json", "recipe.json")  # from the model's folder to checkpoints


class RunFolder:
    def __init__(self, path: Path):
        self.path = Path(path)

    @classmethod
    def create(cls, path: Path, config: dict, tokenizer: Path) -> "RunFolder":
        with writing(path):
            fresh = path.with_name(f".{path.name}.tmp")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            cls(fresh).replace("config.json", json.dumps(config, indent=2) + "\n")
            shutil.copyfile(tokenizer, fresh / "tokenizer.json")
            fresh.rename(path)
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
        with writing(self.path / name):
            (self.path / f"{name}.tmp").write_text(text, encoding="utf-8")
            os.replace(self.path / f"{name}.tmp", self.path / name)

    def append(self, name: str, line: dict) -> None:
        with writing(self.path / name), open(self.path / name, "a", encoding="utf-8") as file:
            file.write(json.dumps({key: defined(value) for key, value in line.items()}, allow_nan=False) + "\n")

    def lines(self, name: str) -> list[dict]:
        return read_lines(self.path / name)

    def credit(self, step: int) -> Path:
        return self.path / "credit" / f"step_{step:06d}.npz"

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
                if path.suffix == ".tmp" or (step_of(path) or 0) > step:
                    path.unlink()
            for path in self.path.glob("checkpoints/.*.tmp"):
                shutil.rmtree(path)

    def save_checkpoint(self, step: int, model: Qwen2, source: Path, state: dict[str, torch.Tensor]) -> None:
        """A model folder like the one it came from, `source`, with the trainer's state below it.
        Only the newest two keep that state."""
        final = self.path / "checkpoints" / f"step_{step:06d}"
        if final.exists():
            return
        fresh = final.with_name(f".{final.name}.tmp")
        with writing(final):
            shutil.rmtree(fresh, ignore_errors=True)
            model.save_pretrained(fresh)
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


def step_of(path: Path) -> int | None:
    """100 of step_000100 or step_000100.npz; None for a name that people gave, a backup say."""
    match = re.fullmatch("step_([0-9]+)", path.stem)
    return int(match[1]) if match else None


def read_lines(path: Path) -> list[dict]:
    """The lines of a JSONL file. The last may be cut off (being written, or killed), any other must be whole."""
    found, lines = [], path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise UserError(f"{path}, line {number} is not JSON") from None
    return found


def defined(value):
    """An undefined number is null: JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def writing(path: Path):
    """A full disk or a folder that cannot be written is one clear line."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"cannot write {path}: {reason}") from None


def provenance() -> dict:
    """The versions a run was made with, and the commit of this code (null outside a checkout)."""
    git = ["git", "rev-parse", "HEAD"]
    result = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True) if shutil.which("git") else None
    return {"git_commit": result.stdout.strip() if result and result.returncode == 0 else None,
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__,
                         "safetensors": safetensors.__version__, "tokenizers": tokenizers.__version__}}
