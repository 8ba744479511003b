"""What a run works with, made from its settings: policy, optimizer, methods, source of answers."""
import re
from collections.abc import Sequence
from functools import wraps
from pathlib import Path
from typing import Protocol

import torch

from engine import processes
from engine.choices import ADVANTAGES, LOSSES, MITIGATIONS, Choice, Method
from engine.errors import UserError
from engine.optimizer import AdamW
from engine.policy import Policy, RunSettings, encode_prompts
from engine.rollouts import Problem, Rollouts
from engine.tokens import load_tokenizer
from harness.own_code import place_of
from harness.record import Json, find_folder
from harness.run import Run
from harness.settings import OWN_SAMPLER, Settings
from harness.tasks import make_task
from qwen2_model import Qwen2


class Source(Protocol):
    """Who answers the problems: the policy itself, a server, or a file."""
    def sample(self, problems: Sequence[Problem], answers: int, seed: int) -> Rollouts: ...


def load_policy(s: Settings, checkpoint: Path | None = None) -> Policy:
    """`checkpoint` is loaded instead of --model where a run is resumed."""
    device = device_of(s)
    if s.questions < processes.count():
        raise UserError(f"--questions {s.questions} cannot be shared by {processes.count()} "
                        "processes: some would have none")
    folder = checkpoint or find_folder(s.model)
    model = load_model(s, folder, torch.device("cpu") if s.offload_optimizer else device)
    model.model.checkpointing = s.checkpointing
    set_threads(s.threads, model)
    if device.type == "cpu" and model.is_large:
        from harness.forecast import compare_types
        compare_types(s.dtype)
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    policy = Policy(model, tokenizer, make_task(s.task, s.method_flags), s, folder)
    check_prompts(policy)
    return policy


def load_model(s: RunSettings, folder: Path, device: torch.device) -> Qwen2:
    """With --shard this process's part of it."""
    dtype = getattr(torch, s.dtype)
    if not s.shard:
        return Qwen2.from_pretrained(folder, device).compute_in(dtype)
    if processes.count() == 1:
        raise UserError("--shard shares a model between processes, and this one is alone: start "
                        "several with torchrun (docs/large_models.md), or say --shard no")
    from engine.sharded import load_shard
    return load_shard(folder, device, dtype).compute_in(dtype)


def load_optimizer(s: Settings, policy: Policy) -> AdamW:
    """With --offload_optimizer the model is moved to its device here."""
    if not s.offload_optimizer:
        return AdamW(policy.model.parameters(), s.learning_rate, s.weight_decay)
    from engine.offload import OffloadedAdamW
    return OffloadedAdamW(policy.model, device_of(s), s.learning_rate, s.weight_decay)


def initial_model(s: RunSettings) -> Qwen2:
    model = load_model(s, find_folder(s.model), device_of(s)).requires_grad_(False)
    if s.offload_optimizer:
        from engine.offload import cast_weights
        cast_weights(model, model.compute_dtype)
    return model


def make(function: Choice, values: Json, policy: Policy) -> Method:
    """Bring a choice with the values of its flags into the form (rollouts, policy) -> (B, T)."""
    if not isinstance(function, type):
        return wraps(function)(lambda rollouts, policy: function(rollouts, **values))
    if hasattr(function, "state_dict") != hasattr(function, "load_state_dict"):
        raise UserError(f"{function.__name__} ({place_of(function)}) needs both state_dict and "
                        "load_state_dict, or a resumed run would forget its state")
    made: Method = function(policy, **values)
    return made


def make_advantage(s: Settings, policy: Policy) -> Method:
    chosen = LOSSES[s.loss] if s.loss in LOSSES else ADVANTAGES[s.advantage]
    return make(chosen, s.flags_for(chosen), policy)


def make_weighting(s: Settings, policy: Policy) -> Method:
    return make(MITIGATIONS[s.mitigation], s.flags_for(MITIGATIONS[s.mitigation]), policy)


def answers_from(run: Run, policy: Policy, optimizer: AdamW) -> Source:
    s = run.settings
    if s.pairs:
        from credit.pairs import GivenPairs
        return GivenPairs(s.pairs, policy, run)
    if s.rollouts != OWN_SAMPLER:
        from bridges.remote_rollouts import connect
        return connect(policy, optimizer, run)
    return policy


def set_threads(threads: int, model: Qwen2) -> None:
    """0 is one for every 64 hidden units: small products get slower with more."""
    by_size = min(torch.get_num_threads(), max(1, model.config.hidden_size // 64))
    torch.set_num_threads(threads or by_size)


def check_prompts(policy: Policy) -> None:
    """Can the tokenizer spell the longest prompts, does the model take prompt and answer?"""
    s, task = policy.settings, policy.task
    longest = max(map(len, encode_prompts(policy.tokenizer, task, task.extreme_problems())))
    limit = policy.model.config.max_position_embeddings
    if longest + s.max_new_tokens > limit:
        raise UserError(f"--max_new_tokens {s.max_new_tokens}: a prompt of {longest} tokens and "
                        f"the answer exceed the {limit} that {s.model} takes")


def device_of(s: RunSettings) -> torch.device:
    """--device; of several processes each has its own."""
    return pick_device(processes.start(s.device))


def pick_device(name: str) -> torch.device:
    """The device of a flag. A GPU is made the present one, on which PyTorch records graphs."""
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", name):
        raise UserError(f"--device {name}: only cpu, cuda and cuda:N are implemented")
    number, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
    if name != "cpu":
        if number >= count:
            raise UserError(f"--device {name}: PyTorch sees {count} CUDA devices here")
        torch.cuda.set_device(number)
        # plans half a second for every new shape, and every few tokens shapes are new
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(name)
