"""`build` makes the parts of a run from its settings: policy, optimizer, methods and source of
answers."""
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from tokenizers import Tokenizer

from engine.cache import FIRST_SLOTS
from engine.choices import ADVANTAGES, LOSSES, MITIGATIONS, Choice, Method
from engine.errors import UserError, location_of
from engine.model_folder import read_config, read_model_folder
from engine.optimizer import AdamW
from engine.policy import Policy, encode_prompts
from engine.rollouts import CheckedTask, Problem, Rollouts
from engine.tokens import load_tokenizer
from harness.flags import flags_of
from harness.record import Json, find_folder
from harness.run import Run
from harness.screen import say
from harness.settings import OWN_SAMPLER, Settings, load_task
from qwen2_model import ModelConfig, Qwen2

OF_PROBLEM, OF_TOKEN = 500, 30  # bytes of a problem, and of each token of its answers, at the least


class Source(Protocol):
    """A source of answers to the problems: the policy itself, a server, or a file."""
    def sample(self, problems: Sequence[Problem], answers: int, seed: int) -> Rollouts: ...


class Parts(NamedTuple):
    """What a run is made of, once. Its steps only use these."""
    policy: Policy
    optimizer: AdamW
    reference: Qwen2 | None
    advantage: Method
    weighting: Method
    source: Source


def build(run: Run) -> Parts:
    """Build the parts of a run, in this order; those of a resumed one from its checkpoint."""
    s = run.settings
    policy = load_policy(s, run.checkpoint)
    optimizer = load_optimizer(s, policy)
    reference = initial_model(s) if s.kl else None
    advantage, weighting = make_advantage(s, policy), make_weighting(s, policy)
    source = answers_from(run, policy, optimizer)
    return Parts(policy, optimizer, reference, advantage, weighting, source)


def load_policy(s: Settings, checkpoint: Path | None = None) -> Policy:
    """The policy of a run; that of a resumed one is loaded from its `checkpoint`. What cannot work
    is refused before the weights are read, which of a large model takes long."""
    device, folder = device_of(s), checkpoint or find_folder(s.model)
    config = read_config(folder)
    tokenizer, task = load_tokenizer(folder, config.vocab_size), make_task(s.task, s.method_flags)
    refuse_beyond_memory(s, bytes_of_answer(s, config, device))
    refuse_long_prompts(s, tokenizer, task, config.max_position_embeddings)
    model = load_model(s, folder, device)
    model.model.checkpointing = s.checkpointing
    set_threads(s.threads, model)
    if device.type == "cpu" and model.is_large:
        from harness.forecast import compare_types
        compare_types(s.dtype)
    return Policy(model, tokenizer, task, s, folder)


def refuse_long_prompts(s: Settings, tokenizer: Tokenizer, task: CheckedTask, limit: int) -> None:
    """Refuse a task whose longest prompts the tokenizer cannot spell, or whose prompt and answer
    have more tokens than the model takes."""
    prompts = encode_prompts(tokenizer, task, task.extreme_problems())
    longest = max(len(prompt) for prompt in prompts)
    if longest + s.max_new_tokens > limit:
        raise UserError(f"--max_new_tokens {s.max_new_tokens}: a prompt of {longest} tokens and "
                        f"such an answer are longer than the {limit} tokens that {s.model} takes")


def bytes_of_answer(s: Settings, config: ModelConfig, device: torch.device) -> int:
    """The memory of the machine that an answer takes while it is sampled, at the least: the tables
    of the sampler, and on a CPU also the part of its cache that is there from the first token on.
    """
    tables = OF_TOKEN * s.max_new_tokens
    if device.type != "cpu":
        return tables
    dtype: torch.dtype = getattr(torch, s.dtype)
    slots = min(s.max_new_tokens - 1, FIRST_SLOTS)
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return tables + slots * of_token * dtype.itemsize


def refuse_beyond_memory(s: Settings, of_answer: int) -> None:
    """Refuse batches that cannot fit into this machine, because the program would grow until the
    system kills it. What is counted is a part of what they really need."""
    if not hasattr(os, "sysconf"):  # on Windows
        return
    sampled_here = s.pairs is None and s.rollouts == OWN_SAMPLER
    refuse_batch(s, ("questions", s.questions), ("answers", s.answers), s.questions,
                 of_answer if sampled_here else OF_TOKEN * s.max_new_tokens)
    if s.eval_every:  # as many problems are answered at a time as a step has answers
        at_once = min(s.eval_tasks, s.questions * s.answers)
        refuse_batch(s, ("eval_tasks", s.eval_tasks), ("eval_answers", s.eval_answers), at_once,
                     of_answer)


def refuse_batch(s: Settings, problems: tuple[str, int], answers: tuple[str, int], at_once: int,
                 of_answer: int) -> None:
    """Refuse these two flags, names and values, if the machine has too little memory for them:
    `at_once` problems are answered at a time, and each answer takes so many bytes."""
    needed = OF_PROBLEM * problems[1] + at_once * answers[1] * of_answer
    memory = bytes_of_machine()
    if needed > memory:
        raise UserError(f"--{problems[0]} {problems[1]} with --{answers[0]} {answers[1]} and "
                        f"--max_new_tokens {s.max_new_tokens} takes at least "
                        f"{needed / 1e9:,.0f} GB of memory, and this machine has "
                        f"{memory / 1e9:.0f} GB")


def bytes_of_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def load_model(s: Settings, folder: Path, device: torch.device) -> Qwen2:
    return read_model_folder(folder, device).compute_in(getattr(torch, s.dtype))


def load_optimizer(s: Settings, policy: Policy) -> AdamW:
    return AdamW(policy.model.parameters(), s.learning_rate, s.weight_decay)


def initial_model(s: Settings) -> Qwen2:
    """A frozen copy of the model before training, for KL terms and preferences."""
    return load_model(s, find_folder(s.model), device_of(s)).requires_grad_(False)


def make(function: Choice, values: Json, policy: Policy) -> Method:
    """Make a method, (rollouts, policy) -> (B, T), of a choice and the values of its flags."""
    if not isinstance(function, type):
        refuse_other_arguments(function, function, "(rollouts, *, flags)", None, **values)
        return wraps(function)(lambda rollouts, policy: function(rollouts, **values))
    if hasattr(function, "state_dict") != hasattr(function, "load_state_dict"):
        raise UserError(f"{function.__name__} ({location_of(function)}) needs both state_dict and "
                        "load_state_dict, or a resumed run would forget its state")
    refuse_other_arguments(function, function, "(self, policy, *, flags) in __init__", policy,
                           **values)
    made: Method = function(policy, **values)
    call = made if callable(made) else lambda: None  # without __call__ it takes no arguments
    refuse_other_arguments(function, call, "(self, rollouts, policy) in __call__", None, policy)
    state: Any = getattr(made, "state_dict", dict)()
    for name, value in state.items() if isinstance(state, Mapping) else [("it", state)]:
        if not (isinstance(name, str) and isinstance(value, torch.Tensor)
                and value.layout == torch.strided):  # the first checkpoint would be too late
            raise UserError(f"state_dict of {function.__name__} ({location_of(function)}) should "
                            f"hold dense tensors by name, but {name} is {value!r:.80}")
    return made


def refuse_other_arguments(method: Choice, called: Callable[..., Any], wanted: str,
                           *given: object, **flags: object) -> None:
    """Raise if a user's method cannot be called with these arguments."""
    try:
        inspect.signature(called).bind(*given, **flags)
    except TypeError as error:
        raise UserError(f"{method.__name__} ({location_of(method)}) should take the arguments "
                        f"{wanted}: {error}") from None


def make_advantage(s: Settings, policy: Policy) -> Method:
    chosen = LOSSES[s.loss] if s.loss in LOSSES else ADVANTAGES[s.advantage]
    made = make(chosen, s.flags_for(chosen), policy)
    if not s.entropy_bonus:
        return made
    from credit.entropy_bonus import WithEntropyBonus
    return WithEntropyBonus(made, s.entropy_bonus)


def make_weighting(s: Settings, policy: Policy) -> Method:
    return make(MITIGATIONS[s.mitigation], s.flags_for(MITIGATIONS[s.mitigation]), policy)


def answers_from(run: Run, policy: Policy, optimizer: AdamW) -> Source:
    """The source of a run's answers, by --pairs and --rollouts."""
    s = run.settings
    if s.pairs:
        from credit.pairs import GivenPairs
        return GivenPairs(s.pairs, policy, run)
    if s.rollouts != OWN_SAMPLER:
        from bridges.remote_rollouts import connect
        source: Source = connect(policy, optimizer, run)
    else:
        source = policy
    if s.dynamic_sampling > 1:
        from engine.dynamic import DynamicSampling
        return DynamicSampling(source, policy, s.dynamic_sampling, run.drawn)
    return source


def set_threads(threads: int, model: Qwen2) -> None:
    """Set the number of threads; 0 means one for every 64 hidden units, because small products get
    slower with more."""
    by_size = min(torch.get_num_threads(), max(1, model.config.hidden_size // 64))
    torch.set_num_threads(threads or by_size)


def device_of(s: Settings) -> torch.device:
    """The device of --device, and whether it computes the same numbers every time."""
    device = pick_device(s.device)
    if device.type == "cuda":
        compute_the_same_every_time(s.deterministic)
    return device


def compute_the_same_every_time(wanted: bool) -> None:
    """Whether torch uses only algorithms that give the same numbers every time (--deterministic).
    cuBLAS needs the variable for it, and reads it before its first product."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(wanted)


def pick_device(name: str) -> torch.device:
    """The device with this name. A GPU becomes PyTorch's current one, on which graphs are
    recorded."""
    if not re.fullmatch("cpu|mps|cuda(:[0-9]+)?", name):
        raise UserError(f"--device {name}: only cpu, cuda, cuda:N and mps are implemented")
    if name == "mps":
        if not torch.backends.mps.is_available():
            raise UserError("--device mps: PyTorch sees no Apple GPU here")
        say("--device mps: this program was never run on an Apple GPU. --device cpu is tested")
    elif name != "cpu":
        number, count = int(name.partition(":")[2] or 0), torch.cuda.device_count()
        if number >= count:
            raise UserError(f"--device {name}: PyTorch sees {count} CUDA devices here")
        torch.cuda.set_device(number)
        # cuDNN plans for half a second for every new shape, and shapes change every few tokens
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(name)


def make_task(name: str, flags: Json) -> CheckedTask:
    """The task that --task names; `flags` has the flags of all methods of a run."""
    task = load_task(name)
    return CheckedTask(task(**{flag: flags[flag] for flag in flags_of(task)}))
