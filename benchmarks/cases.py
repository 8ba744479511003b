"""What is measured: one kind of work on one model, in a process of its own.

A process of its own, because that is how its peak memory is known. It is given its case as JSON,
and prints what it measured as JSON.
"""
import json
import random
import subprocess
import sys
from dataclasses import asdict, dataclass, replace

import torch

from engine.errors import UserError
from engine.rollouts import Rollouts
from grpo import grpo
from harness.files import PROJECT
from harness.flags import Flag, check_value
from qwen2_model import ModelConfig, Qwen2

SIZES = {  # vocabulary, width, MLP width, layers, heads, key heads, head width
    "tiny": (512, 128, 384, 4, 4, 2, 32),
    "small": (4096, 256, 1024, 6, 8, 2, 32),
    "0.5B": (151936, 896, 4864, 24, 14, 2, 64),
}
DTYPES = ("float32", "bfloat16")
MEBIBYTE = 2 ** 20
TOKENS_PER_END = 40  # ragged answers: one token in so many is the last


@dataclass(frozen=True)
class Case:
    size: str
    what: str  # a name in speed.WORK
    questions: int = 8
    answers: int = 8
    new_tokens: int = 128
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    micro_batch: int = 8
    checkpointing: bool = False
    offload_optimizer: bool = False

    @property
    def ragged(self) -> bool:
        return self.what.startswith("ragged")


def read_sizes(text: str) -> list[str]:
    sizes = text.split(",")
    for size in sizes:
        check_value("sizes", size, Flag("", choices=tuple(SIZES)))
    return sizes


def in_a_process(case: Case, program: str = "benchmarks.speed", most: float | None = None) -> dict:
    """The last line that `python -m PROGRAM --case ...` prints. It may take `most` seconds."""
    command = [sys.executable, "-m", program, "--case", json.dumps(asdict(case))]
    return json.loads(run_quietly(command, f"{case.size}, {case.what}", most).splitlines()[-1])


def run_quietly(command: list[str], what: str, most: float | None = None) -> str:
    """What a program prints; what it complains of at last, if it fails."""
    try:
        result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=most)
    except subprocess.TimeoutExpired:
        raise UserError(f"{what}: not done after {most:g} seconds") from None
    if result.returncode:
        reason = result.stderr.strip() or f"ended with {result.returncode}"
        raise UserError(f"{what}: {reason.splitlines()[-1]}")
    return result.stdout


def make_config(case: Case) -> ModelConfig:
    return ModelConfig(*SIZES[case.size], rope_theta=1e6, tie_word_embeddings=True)


def make_model(case: Case) -> Qwen2:
    torch.manual_seed(0)
    with torch.device("cpu" if case.offload_optimizer else case.device):
        model = Qwen2(make_config(case))
    model.model.checkpointing = case.checkpointing
    return model.compute_in(getattr(torch, case.dtype))


def make_prompts(case: Case) -> list[list[int]]:
    """60 to 100 random tokens for each problem."""
    chance, vocabulary = random.Random(0), SIZES[case.size][0]
    return [[chance.randrange(3, vocabulary) for _ in range(chance.randint(60, 100))]
            for _ in range(case.questions)]


def stop_tokens(case: Case) -> tuple[int, ...]:
    """Tokens that end an answer. With random weights all tokens are about as likely."""
    if not case.ragged:
        return ()
    return tuple(range(3, 3 + round(SIZES[case.size][0] / TOKENS_PER_END)))


def make_batch(case: Case) -> Rollouts:
    """Random tokens, as if sampled."""
    shape = (case.questions * case.answers, case.new_tokens)
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(3, SIZES[case.size][0], shape, generator=chance).to(case.device)
    facts = torch.zeros(3, *shape, device=case.device)
    return as_rollouts(case, ids, torch.ones_like(ids, dtype=torch.bool), *facts)


def as_rollouts(case: Case, ids, mask, log_prob, entropy, collision) -> Rollouts:
    """A batch with random rewards, and with the advantages that follow from them."""
    B, device = len(ids), ids.device
    reward = torch.rand(B, generator=torch.Generator().manual_seed(0)).to(device)
    no_code = torch.zeros_like(ids, dtype=torch.uint8)
    rollouts = Rollouts(
        problems=[None] * case.questions, prompt_ids=make_prompts(case),
        group=torch.arange(B, device=device) // case.answers, ids=ids, mask=mask,
        finished=torch.ones(B, dtype=torch.bool, device=device),
        log_prob=log_prob, entropy=entropy, collision=collision, section=no_code, kind=no_code,
        scores=dict.fromkeys(("reward", "format", "answer", "reasoning"), reward))
    return replace(rollouts, advantage=grpo(rollouts))
