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
import zipfile
import zlib
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: two processes on one folder are not told apart there
    fcntl = None

import numpy as np
import safetensors
import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from countdown_task import KINDS, SECTIONS, token_bytes
from qwen2_model import Qwen2, UserError, read_json
from rollouts import Rollouts

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

    def credit(self, step: int, rank: int = 0) -> Path:
        return self.path / "credit" / f"step_{step:06d}{f'_rank{rank}' if rank else ''}.npz"

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


def write_credit(path: Path, rollouts: Rollouts, weight: torch.Tensor, **more: torch.Tensor) -> None:
    """One step's record: a value a token (answers end to end), an answer, or a question. See the README. `more` are
    further (B, T) by name: the true credit, where it was measured."""
    mask, lengths = rollouts.mask, rollouts.length.cpu().numpy()

    def flat(values, dtype=np.float32):
        return values[mask].cpu().numpy().astype(dtype)

    def starts(sizes):
        return np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int32)

    columns = {
        "token_id": flat(rollouts.ids, np.int32), "log_prob": flat(rollouts.log_prob),
        "entropy": flat(rollouts.entropy), "collision": flat(rollouts.collision),
        "weight": flat(weight), "advantage": flat(rollouts.advantage),
        "section": flat(rollouts.section, np.uint8), "kind": flat(rollouts.kind, np.uint8),
        **{name: flat(values) for name, values in more.items()},
        "episode_start": starts(lengths), "group": rollouts.group.cpu().numpy().astype(np.int32),
        "finished": rollouts.finished.cpu().numpy(),
        "reward": rollouts.reward.cpu().numpy(),
        **{f"reward_{name}": rollouts.scores[name].cpu().numpy() for name in ("format", "answer", "reasoning")},
        "prompt_ids": np.concatenate(rollouts.prompt_ids).astype(np.int32),
        "prompt_start": starts([len(prompt) for prompt in rollouts.prompt_ids])}
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with open(unfinished, "wb") as file:
        np.savez_compressed(file, **columns)
    os.replace(unfinished, path)


def read_credit(run: Path, step: int, tokenizer, problems=(), **known) -> Rollouts:
    """The batch that was written, as far as it is on record."""
    columns = read_columns(run, step)
    ends = np.append(columns["episode_start"][1:], len(columns["token_id"]))
    lengths = ends - columns["episode_start"]
    mask = torch.arange(int(lengths.max()))[None] < torch.from_numpy(lengths)[:, None]

    def frame(name, dtype=None):
        values = torch.from_numpy(columns[name])
        return torch.zeros(mask.shape, dtype=dtype or values.dtype).masked_scatter(mask, values.to(dtype or values.dtype))

    pieces = [token_bytes(tokenizer, row.tolist()) for row in np.split(columns["token_id"], ends[:-1])]
    return Rollouts(
        problems=problems, prompt_ids=[row.tolist() for row in np.split(columns["prompt_ids"], columns["prompt_start"][1:])],
        responses=[b"".join(row).decode(errors="replace") for row in pieces],
        texts=[[piece.decode(errors="replace") for piece in row] for row in pieces], mask=mask,
        group=torch.from_numpy(columns["group"]).long(), finished=torch.from_numpy(columns["finished"]),
        ids=frame("token_id", torch.long),
        **{name: frame(name) for name in ("log_prob", "entropy", "collision", "section", "kind", "advantage")},
        true_credit=frame("true_credit") if "true_credit" in columns else None, step=step,
        scores={name.removeprefix("reward_"): torch.from_numpy(columns[name])
                for name in ("reward", "reward_format", "reward_answer", "reward_reasoning")}, **known)


PER_TOKEN = {  # and between what their values lie, rounding allowed for
    "token_id": (0, 2 ** 24), "log_prob": (-np.inf, 1e-3), "entropy": (-1e-3, np.inf), "collision": (0, 1.001), "weight": (0, np.inf),
    "advantage": (-np.inf, np.inf), "section": (0, len(SECTIONS) - 1), "kind": (0, len(KINDS) - 1)}
PER_ANSWER = ("episode_start", "group", "finished", "reward", "reward_format", "reward_answer", "reward_reasoning")


def read_columns(run: Path, step: int) -> dict[str, np.ndarray]:
    """A step's record as it is: one file, or those of several ranks as if they were one."""
    found = len(list((Path(run) / "credit").glob(f"step_{step:06d}_rank*.npz")))
    return put_together([read_file(RunFolder(run).credit(step, rank)) for rank in range(1 + found)])


def put_together(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """What is counted from 0 in each file (tokens, questions, the prompts' tokens) goes on where the last one ended."""
    for name, counts in (("episode_start", "token_id"), ("group", "prompt_start"), ("prompt_start", "prompt_ids")):
        ends = np.cumsum([0, *(len(part[counts]) for part in parts)])
        parts = [{**part, name: (part[name] + end).astype(part[name].dtype)} for part, end in zip(parts, ends)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def read_file(path: Path) -> dict[str, np.ndarray]:
    """One credit file, checked: a broken one, or one of something else, is named."""
    try:
        with np.load(path, allow_pickle=False) as file:
            columns = dict(file)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is not a credit file of this program: {error}") from None
    except ValueError:  # numpy's words would recommend what is never done here: to load it all the same
        raise UserError(f"{path} is not a credit file of this program: it holds other things than numbers") from None
    missing = [name for name in (*PER_TOKEN, *PER_ANSWER, "prompt_ids", "prompt_start") if name not in columns]
    if missing:
        raise UserError(f"{path} is not a credit file of this program: it has no column {missing[0]}")
    tokens, answers, starts = len(columns["token_id"]), len(columns["group"]), columns["episode_start"]
    uneven = [name for names, count in ((PER_TOKEN, tokens), (PER_ANSWER, answers)) for name in names if columns[name].shape != (count,)]
    if uneven or not answers or starts[0] != 0 or np.any(np.diff(np.append(starts, tokens)) < 1):
        raise UserError(f"{path} is broken: its {uneven[0] if uneven else 'episode_start'} does not fit the other columns")
    for name, (low, high) in {**PER_TOKEN, "group": (0, len(columns["prompt_start"]) - 1), "reward": (-np.inf, np.inf)}.items():
        values = columns[name]
        wrong = values[~(np.isfinite(values) & (values >= low) & (values <= high))]
        if len(wrong):
            raise UserError(f"{path} is broken: its {name} has the value {wrong[0]}")
    return columns


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


def read_lines(path: Path) -> list[dict]:
    """The lines of a JSONL file. The last may be cut off (being written, or killed), any other must be whole."""
    try:
        found, lines = [], path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text") from None
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
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__,
                         "safetensors": safetensors.__version__, "tokenizers": tokenizers.__version__}}
