"""The work that is measured, one kind on one model in a process of its own.

Each case has its own process, so that its peak memory is known: `python -m lab.speed.cases CASE`
takes a case as JSON, and prints what it measured as JSON.

    rollout          sampling, where all answers have the same length
    update           one update with random answers
    plain            the same in plain torch, with parameters and AdamW's state in --dtype
    step             rollout, advantage, update and credit file; rewards are random
    agreement        does models/tiny give the same answers and gradient as on the CPU?
"""
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.engine.forward import lay_out, micro_batches
from lab.engine.model_folder import read_config, read_model_folder
import mitigations  # noqa: F401  fills the lists of choices that settings are checked with
from lab.engine.errors import PROJECT, UserError
from lab.engine.optimizer import AdamW
from lab.engine.policy import Policy, as_rollouts
from lab.engine.rollouts import Rollouts
from lab.engine.sampler import Generation, generate
from grpo import grpo, policy_loss
from lab.engine.update import update
from lab.harness.memory import FreedMemory, keep_memory, should_keep_memory
from lab.harness.record import write_credit
from lab.harness.screen import run_as_program
from lab.harness.build import load_policy, pick_device
from lab.harness.step_lines import peak_memory
from lab.harness.flags import MOST_THREADS, flags_of, option
from lab.harness.settings import Settings, make_settings
from lab.engine.model import ModelConfig, Qwen2

SIZES = {  # vocabulary, width, MLP width, layers, heads, key heads, head width
    "tiny": (512, 128, 384, 4, 4, 2, 32),
    "small": (4096, 256, 1024, 6, 8, 2, 32),
    "0.5B": (151936, 896, 4864, 24, 14, 2, 64),
}
DTYPES = ("float32", "bfloat16")
NO_LEARNING = 1e-12  # as good as zero: every turn does the same work on the same weights


@dataclass(frozen=True)
class Case:
    """A case; all fields but `what` are flags of the programs."""
    what: str
    size: str = option("tiny", "size of the model", choices=tuple(SIZES))
    model: str = option("", "folder of a model, instead of --size and random weights")
    questions: int = option(8, "problems in a batch", least=1, most=10_000)
    answers: int = option(8, "answers to each problem", least=1, most=1000)
    new_tokens: int = option(128, "tokens of an answer", least=2, most=100_000)
    prompt_tokens: int = option(0, "tokens of a prompt; 0 means 60 to 100", least=0, most=100_000)
    prefix: int = option(0, "how many tokens all prompts begin with", least=0, most=100_000)
    device: str = option("cpu", "device to measure: cpu, cuda or cuda:N")
    dtype: str = option("float32", "type of the numbers to compute with", choices=DTYPES)
    threads: int = option(1, "CPU threads; 0 means as many as PyTorch finds",
                             least=0, most=MOST_THREADS)
    micro_batch: int = option(8, "as in train.py", least=1, most=10_000)
    checkpointing: bool = option(False, "as in train.py")


FLAGS = flags_of(Case)


def make_config(case: Case) -> ModelConfig:
    if case.model:
        return read_config(Path(case.model))
    return ModelConfig(*SIZES[case.size], rope_theta=1e6, tie_word_embeddings=True)


def make_model(case: Case) -> Qwen2:
    torch.manual_seed(0)
    if case.model:
        model = read_model_folder(case.model, case.device)
    else:
        with torch.device(case.device):
            model = Qwen2(make_config(case))
    model.model.checkpointing = case.checkpointing
    model.compute_in(getattr(torch, case.dtype))
    if should_keep_memory(model):
        keep_memory()
    return model


def make_prompts(case: Case) -> list[list[int]]:
    """Random tokens for each problem, the first of them the same for all."""
    rng = random.Random(0)
    vocabulary = make_config(case).vocab_size

    def draw(count: int) -> list[int]:
        return [rng.randrange(3, vocabulary) for _ in range(count)]

    shared = draw(case.prefix)
    prompts = []
    for _ in range(case.questions):
        length = case.prompt_tokens or rng.randint(60, 100)
        prompts.append(shared + draw(length - case.prefix))
    return prompts


def make_batch(case: Case) -> Rollouts:
    """Random tokens, as if sampled."""
    shape = (case.questions * case.answers, case.new_tokens)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, make_config(case).vocab_size, shape, generator=generator)
    ids = ids.to(case.device)
    full = ids.new_full(shape[:1], case.new_tokens)
    nothing = torch.zeros(3, *shape, device=case.device)
    return with_rewards(case, Generation.of_tokens(ids, nothing, full, stop=ids.new_zeros(0)))


def with_rewards(case: Case, sampled: Generation) -> Rollouts:
    """A batch with random rewards, and with the advantages that follow from them."""
    rollouts = as_rollouts([None] * case.questions, make_prompts(case), case.answers, sampled)
    reward = torch.rand(len(rollouts.ids), generator=torch.Generator().manual_seed(0))
    scores = dict.fromkeys(("reward", "format", "answer", "reasoning"), reward.to(case.device))
    no_code = torch.zeros_like(rollouts.ids, dtype=torch.uint8)
    rollouts = replace(rollouts, section=no_code, kind=no_code, scores=scores)
    return replace(rollouts, advantage=grpo(rollouts))


def work_of(case: Case) -> Callable[[], dict]:
    """A rollout, an update of random answers, or both and a credit file, as a training step has
    them, without a task: rewards are random, texts are not read."""
    model, prompts = make_model(case), make_prompts(case)
    batch = make_batch(case) if case.what == "update" else None
    optimizer = None
    if case.what != "rollout":
        optimizer = AdamW(model.parameters(), NO_LEARNING)

    freed = FreedMemory()

    def work() -> dict:
        rollouts = batch
        if rollouts is None:
            sampled = generate(model, prompts, answers=case.answers, stop_ids=(),
                               max_new_tokens=case.new_tokens, seed=1)
            rollouts = with_rewards(case, sampled)
        if optimizer:
            train_on(model, optimizer, rollouts, case)
        if case.what == "step":
            with tempfile.TemporaryDirectory() as folder:
                write_credit(Path(folder, "step.npz"), rollouts, rollouts.mask.float())
        if model.is_large:
            freed.after_step()
        return {"tokens": int(rollouts.mask.sum())}
    return work


def work_of_plain_torch(case: Case) -> Callable[[], dict]:
    """An update as torch alone makes it, with the model's own forward pass: all logits of a
    micro-batch at once, torch's AdamW, and parameters and moments in the type of the products. On a
    CPU it computes the same tokens as the lab, with shared prompts. On a GPU it takes whole rows,
    as anybody would who knows flash attention, because there it is faster so."""
    model, batch = make_model(case).to(getattr(torch, case.dtype)), make_batch(case)
    optimizer = torch.optim.AdamW(model.parameters(), NO_LEARNING, weight_decay=0.0, fused=True)
    weight, every = batch.mask.float(), torch.arange(len(batch.ids))
    log_probs = log_probs_of_rows if model.device.type == "cuda" else log_probs_of_packed
    freed = FreedMemory()

    def work() -> dict:
        optimizer.zero_grad()
        for rows in micro_batches(batch, every, case.micro_batch):
            log_prob = log_probs(model, batch, rows)
            policy_loss(log_prob, batch.advantage[rows], weight[rows], batch.mask[rows],
                        batch.mask.sum()).backward()
            del log_prob  # and with it all logits
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        freed.after_step()
        return {"tokens": int(batch.mask.sum())}
    return work


def log_probs_of_packed(model: Qwen2, batch: Rollouts, rows: Tensor) -> Tensor:
    ids, shared, predicts = lay_out(batch, rows)
    hidden = model.model(ids, shared.positions, shared)
    log_p = model.logits(hidden[predicts]).log_softmax(-1, dtype=torch.float32)  # (rows, T, V)
    return log_p.gather(-1, batch.ids[rows, :, None]).squeeze(-1)


def log_probs_of_rows(model: Qwen2, batch: Rollouts, rows: Tensor) -> Tensor:
    """Each answer in a row with its prompt, padded on the right: causal attention needs no mask."""
    answers, T = batch.ids[rows], batch.ids.shape[1]
    group_of, _ = batch.groups_and_ids
    prompts = [batch.prompt_ids[group_of[row]] for row in rows.tolist()]
    length = torch.tensor([len(prompt) for prompt in prompts], device=answers.device)[:, None]
    steps = torch.arange(T, device=answers.device)
    ids = answers.new_zeros(len(rows), int(length.max()) + T)
    for row, prompt in zip(ids, prompts):
        row[:len(prompt)] = torch.tensor(prompt)
    ids.scatter_(1, length + steps, answers)
    predicts = length - 1 + steps
    hidden = model.model(ids)                                                   # (rows, L, D)
    states = hidden.gather(1, predicts[..., None].expand(-1, -1, hidden.shape[-1]))
    losses = F.cross_entropy(model.logits(states).flatten(0, 1), answers.flatten(),
                             reduction="none")
    return -losses.view_as(answers)


def train_on(model: Qwen2, optimizer: AdamW, batch: Rollouts, case: Case) -> None:
    """Update the model once, every token with weight 1."""
    update(model, optimizer, batch, batch.mask.float(), Settings(micro_batch=case.micro_batch))


def agreement(case: Case) -> dict:
    """How far models/tiny on the device is from the CPU, with equal random numbers."""
    on_cpu, there = (load_policy(make_settings({"device": device, "dtype": case.dtype}))
                     for device in ("cpu", case.device))
    expected, found = ask(on_cpu, case), ask(there, case).to("cpu")
    equal = (expected.ids == found.ids).all(1)
    gap = (expected.log_prob - found.log_prob)[equal]
    gradient = gradient_of(on_cpu, expected, case)
    difference = gradient_of(there, expected, case) - gradient
    return {
        "answers": len(equal),
        "equal": int(equal.sum()),
        "log_prob": gap.abs().sum().item(),
        "tokens": int(expected.mask[equal].sum()),
        "gradient": (difference.norm() / gradient.norm()).item()}


def ask(policy: Policy, case: Case) -> Rollouts:
    problems = policy.task.training_problems(0, 1, case.questions)
    rollouts = policy.ask(problems, case.answers, seed=1)
    return replace(rollouts, advantage=grpo(rollouts))


def gradient_of(policy: Policy, batch: Rollouts, case: Case) -> torch.Tensor:
    """The gradient of all parameters, end to end on the CPU."""
    model = policy.model
    train_on(model, AdamW(model.parameters(), NO_LEARNING), batch.to(model.device), case)
    return torch.cat([p.grad.flatten().double().cpu() for p in model.parameters()])


def seconds_of(function: Callable, case: Case) -> tuple[float, dict]:
    """Seconds that the function takes, and what it returns.

    With one CPU thread the clock is the processor's time of this process: what others do on a
    shared machine then counts only by what it does to caches and memory.
    """
    is_cpu = case.device == "cpu"
    clock = time.process_time if is_cpu and case.threads == 1 else time.perf_counter
    wait = (lambda: None) if is_cpu else partial(torch.cuda.synchronize, case.device)
    wait()
    start = clock()
    result = function()
    wait()
    return clock() - start, result


def measure(case: Case) -> dict:
    """Do the work once to warm up, then for about a second, at least once; with a real model three
    times each. Returns tokens, the median of the seconds, and the most bytes beyond those of the
    program itself."""
    device = pick_device(case.device)
    torch.set_num_threads(case.threads or torch.get_num_threads())
    if case.what == "agreement":
        return agreement(case)
    before = 0 if device.type == "cuda" else peak_memory(device)
    work = work_of_plain_torch(case) if case.what == "plain" else work_of(case)
    least = 3 if case.model else 1
    for _ in range(least):  # the memory of a real model still grows in the first ones
        work()
    seconds: list[float] = []
    while len(seconds) < least or sum(seconds) < 1 and len(seconds) < 9:
        duration, result = seconds_of(work, case)
        seconds.append(duration)
    return {**result, "seconds": median(seconds), "memory": peak_memory(device) - before}


def in_a_process(case: Case, most: float | None = None) -> dict:
    """Measure a case in a process of its own, in at most so many seconds. If it fails, the last
    line that it printed is the error."""
    command = [sys.executable, "-m", "lab.speed.cases", json.dumps(asdict(case))]
    what = f"{case.model or case.size}, {case.what}"
    try:
        result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=most)
    except subprocess.TimeoutExpired:
        raise UserError(f"{what}: not done after {most:g} seconds") from None
    if result.returncode:
        reason = result.stderr.strip() or f"ended with {result.returncode}"
        raise UserError(f"{what}: {reason.splitlines()[-1]}")
    return json.loads(result.stdout.splitlines()[-1])


def main(argv: list[str]) -> None:
    try:
        [text] = argv
        case = Case(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise UserError("it takes one case as JSON, such as '{\"what\": \"rollout\"}'. Its fields "
                        f"are {', '.join(Case.__dataclass_fields__)} ({error})") from None
    print(json.dumps(measure(case)))


if __name__ == "__main__":
    run_as_program("lab.speed.cases", main)
