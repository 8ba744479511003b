"""What the tests of the book share: where the project lies, a record made by hand, one sentence of
refusal. Nothing here imports the lab or downloads anything."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
# Before torch is imported, and for the programs that a test starts: threads of several processes on
# the same cores wait for one another, and a test takes ten times as long.
os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
BOOK = ("countdown_task", "qwen2_model", "grpo", "mitigations", "run", "train", "analyze")
INSTALL = "to run it: pip install -r tests/requirements.txt"  # why a test is skipped

import numpy as np
import torch

from grpo import Rollouts
from qwen2_model import ModelConfig, Qwen2, UserError, save_model

SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2)
# the first step of a run with these flags has the digits of any.json on any machine
ANY = ROOT / "tests/digits/any.json"
COMMON = ["--model", "models/tiny", "--threads", "1", "--steps", "3", "--questions", "3",
          "--answers", "4", "--max_new_tokens", "48", "--eval_every", "0",
          "--checkpoint_every", "0", "--change_every", "1"]


def copy_of_the_book(folder):
    """The seven files and the model, and nothing else."""
    folder.mkdir(exist_ok=True)
    for name in BOOK:
        shutil.copy(ROOT / f"{name}.py", folder)
    shutil.copytree(ROOT / "models/tiny", folder / "models/tiny")
    return folder


def project_files(pattern, root=ROOT):
    """The files that match and that git keeps; all that match where there is no checkout. What a
    user has laid beside them is not the project's."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True
                            ).stdout if shutil.which("git") else ""
    kept = {root / name for name in listed.split("\0") if name}
    return sorted(path for path in root.glob(pattern) if path in kept or not kept)


def refusal(function, *arguments) -> str:
    """What is said to who asks for it: one line, however long what was given is."""
    with pytest.raises(UserError) as error:
        function(*arguments)
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    return str(error.value)


def credit_columns(lengths, group, **known):
    """The columns of a credit file, dull where nothing is given: every token ' 1', p = 0.5 of two,
    advantage 1, weight 1."""
    n, answers, groups = sum(lengths), len(lengths), max(group) + 1
    nothing = np.zeros(answers)
    dull = dict(token_id=np.zeros(n), log_prob=np.full(n, np.log(0.5)),
                entropy=np.full(n, np.log(2)), collision=np.full(n, 0.5), weight=np.ones(n),
                advantage=np.ones(n), section=np.zeros(n), kind=np.zeros(n),
                episode_start=np.cumsum([0, *lengths[:-1]]), group=group,
                finished=np.ones(answers), reward=nothing, reward_format=nothing,
                reward_answer=nothing, reward_reasoning=nothing,
                prompt_ids=np.zeros(2 * groups), prompt_start=2 * np.arange(groups))
    types = dict(token_id=np.int32, section=np.uint8, kind=np.uint8, episode_start=np.int32,
                 group=np.int32, finished=bool, prompt_ids=np.int32, prompt_start=np.int32)
    return {name: np.asarray(value).astype(types.get(name, np.float32))
            for name, value in {**dull, **known}.items()}


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def cut(path, count):
    """Leave so many lines of a file, the first."""
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:count]))


def write_log(folder, steps, config=(), metrics=(), evaluations=()):
    """A run folder with these credit files (columns by step), settings and lines. A setting that is
    None is not on record."""
    (folder / "credit").mkdir(parents=True)
    shutil.copy(ROOT / "models/tiny/tokenizer.json", folder)
    usual = {"mitigation": "none", "advantage": "grpo", "seed": 0, "steps": len(steps),
             "model": "models/tiny", "task": "countdown_task"}
    known = {name: value for name, value in (usual | dict(config)).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(known))
    write_lines(folder / "metrics.jsonl", metrics)
    write_lines(folder / "evaluations.jsonl", evaluations)
    for step, columns in steps.items():
        np.savez_compressed(folder / f"credit/step_{step:06d}.npz", **columns)
    return folder


def evaluation(step, answer, mode="sampled"):
    return {"step": step, "mode": mode, "success": sum(answer) / len(answer), "success_low": 0.0,
            "success_high": 1.0, "answer": answer, "format_mean": 0.5, "finished_mean": 0.75,
            "length_mean": 12.0, "shown": []}


@pytest.fixture(autouse=True)
def left_as_found():
    """What a test calls may set threads, and put folders on Python's path. With two threads where
    the cores are busy, or 300 folders, all tests after it would be slow."""
    path = [*sys.path]
    yield
    sys.path[:] = path
    torch.set_num_threads(1)


def hand_made(mask, kind_of_batch=Rollouts, **known):
    """A batch with the given (B, T) tensors; what is not given is there, and dull."""
    mask = torch.as_tensor(mask)
    B, T = mask.shape
    zeros, code = torch.zeros(B, T), torch.zeros(B, T, dtype=torch.uint8)
    group = known.get("group", torch.zeros(B, dtype=torch.long))
    questions, reward = int(group.max()) + 1, torch.zeros(B)
    scores = dict.fromkeys(("reward", "format", "answer", "reasoning"), reward)
    dull = dict(problems=[None] * questions, prompt_ids=[[5]] * questions, answers=[""] * B,
                texts=[["x"] * int(n) for n in mask.sum(1)], group=group,
                ids=torch.ones(B, T, dtype=torch.long), finished=torch.ones(B, dtype=torch.bool),
                log_prob=zeros - 1.0, entropy=zeros + 1.0, collision=zeros + 0.5, section=code,
                kind=code, advantage=zeros, step=1, scores=scores,
                generator=torch.Generator().manual_seed(0))
    return kind_of_batch(mask=mask, **{**dull, **known})


def one_row(kind_of_batch=Rollouts, **known):
    """A batch of one answer: what it is given are lists of numbers, one for each token."""
    tokens = len(next(iter(known.values())))
    return hand_made([[True] * tokens], kind_of_batch,
                     **{name: torch.tensor([values]) for name, values in known.items()})


def untidy_model(**changed):
    """A small model of the book. Its biases and norms are away from 0 and 1, because defaults hide
    mistakes, and its logits are far from uniform."""
    torch.manual_seed(0)
    usual = dict(vocab_size=50, head_dim=16, tie_word_embeddings=True, eos_token_id=(2,), **SMALL)
    model = Qwen2(ModelConfig(**usual | changed))
    with torch.no_grad():
        for parameter in model.parameters():
            is_matrix = parameter.dim() > 1
            parameter.copy_(torch.randn_like(parameter) * (0.3 if is_matrix else 0.5)
                            + (not is_matrix))
    return model


@pytest.fixture
def folder(tmp_path):
    """The folder of a model of 50 tokens, in one file."""
    save_model(untidy_model(eos_token_id=()), tmp_path / "model")
    return tmp_path / "model"
