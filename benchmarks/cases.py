"""The cases that speed.py and memory.py measure, and the models, prompts and batches they work on.

A case is one kind of work on one model. Each is measured in a process of its own, because that is
how its peak memory is known.
"""
import json
import random
import subprocess
import sys
from dataclasses import asdict, dataclass, replace

import torch

from benchmarks.program import TINY
from benchmarks.shapes import NUMBER_BYTES, SHAPES, Batch
from engine.errors import UserError
from harness.files import PROJECT
from harness.flags import MOST_THREADS, Flag, check_value, shortened
from engine.rollouts import Rollouts
from grpo import grpo
from qwen2_model import ModelConfig, Qwen2

SIZES = ("tiny", "small", "shipped", "0.5B")
CASE_FLAGS = {
    "size": Flag("", choices=("", *SIZES)),  # none where the machine's limits are measured
    "what": Flag("rollout"),
    "questions": Flag(8, least=1, most=10_000),
    "answers": Flag(8, least=1, most=1000),
    "new_tokens": Flag(128, least=1, most=100_000),
    "device": Flag("cpu"),
    "dtype": Flag("float32", choices=tuple(NUMBER_BYTES)),
    "threads": Flag(1, least=0, most=MOST_THREADS),
    "micro_batch": Flag(8, least=1, most=1_000_000),
    "checkpointing": Flag(False),
    "offload_optimizer": Flag(False),
}
TOKENS_PER_END = 40  # answers of unequal length: one token in so many is the last


@dataclass(frozen=True)
class Case:
    """One thing to measure; the process that measures it is given it as JSON."""
    size: str
    what: str  # a name in work.WORK
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
    def unequal(self) -> bool:
        return self.what.endswith("unequal")


def read_sizes(text: str) -> list[str]:
    """The sizes in `tiny,small`; none of them in `none`."""
    sizes = [] if text == "none" else text.split(",")
    for size in sizes:
        check_value("sizes", size, Flag("", choices=SIZES))
    return sizes


def in_a_process(case: Case, module: str) -> dict:
    """Start `python -m MODULE --case ...` and return what it prints in its last line."""
    command = [sys.executable, "-m", module, "--case", json.dumps(asdict(case))]
    result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    if result.returncode:
        reason = result.stderr.strip() or f"ended with {result.returncode}"
        raise UserError(f"{case.size}, {case.what}: {reason.splitlines()[-1]}")
    return json.loads(result.stdout.splitlines()[-1])


def case_from(text: str) -> Case:
    """Read a case as `in_a_process` writes it."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or not {"size", "what"} <= set(values):
        raise UserError(f"--case {shortened(text)} is no JSON object with size and what")
    for name, value in values.items():
        if name not in CASE_FLAGS:
            raise UserError(f"--case has {shortened(name)}, which is nothing of a case")
        check_value(f"case: {name}", value, CASE_FLAGS[name])
    return Case(**values)


def shape_of(case: Case) -> ModelConfig:
    return ModelConfig.from_folder(TINY) if case.size == "shipped" else SHAPES[case.size]


def make_model(case: Case) -> Qwen2:
    torch.manual_seed(0)
    if case.size == "shipped":
        model = Qwen2.from_pretrained(TINY, case.device)
    else:
        with torch.device(case.device):
            model = Qwen2(shape_of(case))
    model.model.checkpointing = case.checkpointing
    return model.compute_in(getattr(torch, case.dtype))


def make_prompts(case: Case, vocabulary: int) -> list[list[int]]:
    """60 to 100 random tokens for each problem."""
    chance = random.Random(0)
    prompts = []
    for _ in range(case.questions):
        length = chance.randint(60, 100)
        prompts.append([chance.randrange(3, vocabulary) for _ in range(length)])
    return prompts


def last_tokens(case: Case, vocabulary: int) -> tuple[int, ...]:
    """Tokens that end an answer. With random weights all tokens are about as likely."""
    if not case.unequal:
        return ()
    return tuple(range(3, 3 + round(vocabulary / TOKENS_PER_END)))


def make_batch(case: Case, vocabulary: int) -> Rollouts:
    """A batch as if sampled: unequal lengths have the same chances as those of the rollout."""
    chance = torch.Generator().manual_seed(0)
    B, T = case.questions * case.answers, case.new_tokens
    lengths = torch.full((B,), T)
    if case.unequal:
        drawn = torch.empty(B).geometric_(1 / TOKENS_PER_END, generator=chance)
        lengths = drawn.long().clamp(max=T)
    mask = torch.arange(T) < lengths[:, None]
    tokens = torch.randint(3, vocabulary, (B, T), generator=chance) * mask
    log_prob, entropy, collision = torch.zeros(3, B, T).to(case.device)
    return as_rollouts(make_prompts(case, vocabulary), case.answers, tokens.to(case.device),
                       mask.to(case.device), log_prob, entropy, collision)


def as_rollouts(prompts: list[list[int]], answers: int, tokens, mask, log_prob, entropy,
                collision) -> Rollouts:
    """A batch with random rewards, and with the advantages that follow from them."""
    B, device = len(tokens), tokens.device
    reward = torch.rand(B, generator=torch.Generator().manual_seed(0)).to(device)
    no_code = torch.zeros_like(tokens, dtype=torch.uint8)
    batch = Rollouts(
        problems=[None] * len(prompts),
        prompt_ids=prompts,
        responses=[""] * B,
        texts=[[]] * B,
        ids=tokens,
        mask=mask,
        group=torch.arange(B, device=device) // answers,
        finished=torch.ones(B, dtype=torch.bool, device=device),
        log_prob=log_prob,
        entropy=entropy,
        collision=collision,
        section=no_code,
        kind=no_code,
        scores=dict.fromkeys(("reward", "format", "answer", "reasoning"), reward))
    return replace(batch, advantage=grpo(batch))


def floor_batch(case: Case, prompts: list[list[int]], mask: torch.Tensor) -> Batch:
    """The shape of a batch, for the arithmetic of floor.py."""
    return Batch([len(prompt) for prompt in prompts], mask.sum(1).tolist(), case.micro_batch,
                 NUMBER_BYTES[case.dtype], case.checkpointing, case.offload_optimizer,
                 torch.device(case.device).type)
