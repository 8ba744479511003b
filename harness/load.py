"""What a run works with, made from its settings: the policy, a frozen copy of it, its optimizer,
and who answers the problems."""
from pathlib import Path

import torch

from engine import processes
from engine.errors import UserError
from engine.optimizer import AdamW, make_optimizer
from engine.policy import Policy
from engine.sharded import load_shard
from engine.tokens import encode_prompt, load_tokenizer
from harness.files import find_folder
from harness.settings import OWN_SAMPLER, Settings
from harness.tasks import make_task
from qwen2_model import Qwen2


def load_policy(s: Settings, checkpoint: Path | None = None) -> Policy:
    """The policy of these settings. `checkpoint` is loaded instead of --model where a run is
    resumed."""
    device = pick_device(processes.start(s.device))
    if s.questions < processes.count():
        raise UserError(f"--questions {s.questions} cannot be shared by {processes.count()} "
                        "processes: some would have none")
    folder = checkpoint or find_folder(s.model)
    model = load_model(s, folder, "cpu" if s.offload_optimizer else device)
    model.model.checkpointing = s.checkpointing
    set_threads(s.threads, model)
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    policy = Policy(model, tokenizer, make_task(s), s, folder)
    check_prompts(policy)
    return policy


def load_model(s: Settings, folder: Path, device) -> Qwen2:
    """The model of a folder; with --shard this process's part of it."""
    dtype = getattr(torch, s.dtype)
    if not s.shard:
        return Qwen2.from_pretrained(folder, device).compute_in(dtype)
    if processes.count() == 1:
        raise UserError("--shard shares a model between processes, and this one is alone: start "
                        "several with torchrun (docs/large_models.md), or say --shard no")
    return load_shard(folder, device, dtype).compute_in(dtype)


def load_optimizer(s: Settings, policy: Policy) -> AdamW:
    """AdamW for the policy's parameters. With --offload_optimizer the model is moved here."""
    device = pick_device(processes.start(s.device))
    return make_optimizer(policy.model, s.learning_rate, s.weight_decay, s.offload_optimizer,
                          device)


def load_reference(s: Settings) -> Qwen2 | None:
    """The model as it was before training, where a loss compares with it."""
    if not s.kl and s.loss != "dpo":
        return None
    device = pick_device(processes.start(s.device))
    model = load_model(s, find_folder(s.model), device).requires_grad_(False)
    return model.cast_weights(getattr(torch, s.dtype)) if s.offload_optimizer else model


def answers_from(run, policy: Policy, optimizer: AdamW):
    """What has the method `sample(problems, answers, seed) -> Rollouts`: the policy itself, a
    server, or pairs of a file."""
    s = policy.settings
    if s.pairs:
        from harness.given_pairs import GivenPairs  # few runs need it
        return GivenPairs(s.pairs, policy, run)
    if s.rollouts != OWN_SAMPLER:
        from harness.remote_rollouts import connect
        return connect(policy, optimizer, run)
    return policy


def set_threads(threads: int, model: Qwen2) -> None:
    """0 is one for every 64 hidden units: small products get slower with more."""
    by_size = min(torch.get_num_threads(), max(1, model.config.hidden_size // 64))
    torch.set_num_threads(threads or by_size)


def check_prompts(policy: Policy) -> None:
    """Check before anything is written: are there problems, can the tokenizer spell the prompts,
    and does the model take prompt and answer?"""
    s, task = policy.settings, policy.task
    task.training_problems(s.seed, 1, 1)
    task.held_out_problems(1)
    longest = 0
    for problem in task.extreme_problems():
        prompt = encode_prompt(policy.tokenizer, task.prompt_for(problem), task.show(problem))
        longest = max(longest, len(prompt))
    limit = policy.model.config.max_position_embeddings
    if longest + s.max_new_tokens > limit:
        raise UserError(f"--max_new_tokens {s.max_new_tokens}: a prompt of {longest} tokens and "
                        f"the answer exceed the {limit} that {s.model} takes")


def pick_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name} is not a device: try cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: only cpu and cuda are implemented")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: PyTorch sees {torch.cuda.device_count()} CUDA devices "
                        "here")
    return device
