"""The parts of a run, made from its settings: policy, task, optimizer, methods and source of
answers."""
import inspect
import os
import re
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

import torch

from engine import processes
from engine.cache import FIRST_SLOTS
from engine.choices import ADVANTAGES, LOSSES, MITIGATIONS, Choice, Method
from engine.errors import UserError, is_list, location_of, wrong_result
from engine.model_folder import read_model_folder
from engine.optimizer import AdamW
from engine.policy import Policy, encode_prompts
from engine.rollouts import Problem, Rollouts, Task
from engine.tokens import KINDS, SECTIONS, load_tokenizer
from harness.flags import flags_of
from harness.record import Json, find_folder
from harness.run import Run
from harness.screen import say
from harness.settings import OWN_SAMPLER, Settings, load_task
from qwen2_model import Qwen2

OF_PROBLEM, OF_TOKEN = 500, 30  # bytes of a problem, and of each token of its answers, at the least
LARGEST_SCORE = 1e12  # the squares of such rewards, in float32, are still finite
PARTS = {"reward", "format", "answer", "reasoning"}  # the numbers that every score has


class Source(Protocol):
    """A source of answers to the problems: the policy itself, a server, or a file."""
    def sample(self, problems: Sequence[Problem], answers: int, seed: int) -> Rollouts: ...


def load_policy(s: Settings, checkpoint: Path | None = None) -> Policy:
    """The policy of a run; that of a resumed one is loaded from its `checkpoint`."""
    device = device_of(s)
    if s.questions < processes.count():
        raise UserError(f"--questions {s.questions} cannot be shared by {processes.count()} "
                        "processes: some would have none")
    folder = checkpoint or find_folder(s.model)
    model = load_model(s, folder, torch.device("cpu") if s.offload_optimizer else device)
    refuse_beyond_memory(s, bytes_of_answer(s, model, device))
    model.model.checkpointing = s.checkpointing
    set_threads(s.threads, model)
    if device.type == "cpu" and model.is_large:
        from harness.forecast import compare_types
        compare_types(s.dtype)
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    policy = Policy(model, tokenizer, make_task(s.task, s.method_flags), s, folder)
    check_prompts(policy)
    return policy


def bytes_of_answer(s: Settings, model: Qwen2, device: torch.device) -> int:
    """The memory of the machine that an answer takes while it is sampled, at the least: the tables
    of the sampler, and on a CPU also the part of its cache that is there from the first token on.
    Each of several processes has the cache of its own answers alone."""
    tables = OF_TOKEN * s.max_new_tokens
    if device.type != "cpu":
        return tables
    config, slots = model.config, min(s.max_new_tokens - 1, FIRST_SLOTS)
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return tables + slots * of_token * model.compute_dtype.itemsize // processes.count()


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
    """The model of a folder; with --shard the part of this process."""
    dtype = getattr(torch, s.dtype)
    if not s.shard:
        return read_model_folder(folder, device).compute_in(dtype)
    if processes.count() == 1:
        raise UserError("--shard splits a model between processes, and there is only one: start "
                        "several with torchrun (docs/large_models.md), or use --shard no")
    from engine.sharded import load_shard
    return load_shard(folder, device, dtype).compute_in(dtype)


def load_optimizer(s: Settings, policy: Policy) -> AdamW:
    """AdamW for the model; with --offload_optimizer the model is moved to its device here."""
    if not s.offload_optimizer:
        return AdamW(policy.model.parameters(), s.learning_rate, s.weight_decay)
    from engine.offload import OffloadedAdamW
    return OffloadedAdamW(policy.model, device_of(s), s.learning_rate, s.weight_decay)


def initial_model(s: Settings) -> Qwen2:
    """A frozen copy of the model before training, for KL terms and preferences."""
    model = load_model(s, find_folder(s.model), device_of(s)).requires_grad_(False)
    if s.offload_optimizer:
        from engine.offload import cast_weights
        cast_weights(model, model.compute_dtype)
    return model


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
    for name, value in getattr(made, "state_dict", dict)().items():
        if not isinstance(value, torch.Tensor):  # the first checkpoint would be too late
            raise UserError(f"state_dict of {function.__name__} ({location_of(function)}) should "
                            f"hold tensors by name, but {name} is {value!r:.80}")
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
    return WithEntropyBonus(made, s.entropy_bonus, s.entropy_target)


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


def check_prompts(policy: Policy) -> None:
    """Raise an error if the tokenizer cannot spell the longest prompts, or the model cannot take
    prompt and answer."""
    s, task = policy.settings, policy.task
    prompts = encode_prompts(policy.tokenizer, task, task.extreme_problems())
    longest = max(len(prompt) for prompt in prompts)
    limit = policy.model.config.max_position_embeddings
    if longest + s.max_new_tokens > limit:
        raise UserError(f"--max_new_tokens {s.max_new_tokens}: a prompt of {longest} tokens and "
                        f"such an answer are longer than the {limit} tokens that {s.model} takes")


def device_of(s: Settings) -> torch.device:
    """The device of --device; each of several processes has its own."""
    device = pick_device(processes.start(s.device))
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


def make_task(name: str, flags: Json) -> "CheckedTask":
    """The task that --task names; `flags` has the flags of all methods of a run."""
    task = load_task(name)
    return CheckedTask(task(**{flag: flags[flag] for flag in flags_of(task)}))


class CheckedTask:
    """A user's Task with two checks: no problem that it returned as held out is trained on, and its
    methods return what they should."""

    def __init__(self, task: Task[Any]):
        self.task = task
        self.held_out: dict[int, list[Problem]] = {}  # by their number
        self.held_out_prompts: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def held_out_problems(self, count: int) -> list[Problem]:
        if count not in self.held_out:
            problems = as_problems(self.task.held_out_problems, count)
            self.held_out_prompts |= set(map(self.prompt_for, problems))
            self.held_out[count] = problems
        return self.held_out[count]

    def training_problems(self, seed: int, step: int, count: int) -> list[Problem]:
        problems = as_problems(self.task.training_problems, seed, step, count)
        if len(problems) != count:
            raise wrong_result(self.task.training_problems, f"{count} problems", problems)
        for problem in problems:
            if self.prompt_for(problem) in self.held_out_prompts:
                raise UserError(f"training_problems returns {self.show(problem)} in step "
                                f"{step}, but held_out_problems has it, too: what is evaluated "
                                "may not be trained on")
        return problems

    def prompt_for(self, problem: Problem) -> str:
        return as_text(self.task.prompt_for, problem)

    def show(self, problem: Problem) -> str:
        return as_text(self.task.show, problem)

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        score = self.task.score(problem, text)
        if not is_score(score):
            raise wrong_result(
                self.task.score, f"a dict of numbers from -{LARGEST_SCORE:g} to {LARGEST_SCORE:g}. "
                f"Among them should be {', '.join(sorted(PARTS))}, and answer should be 0 or 1",
                score)
        return score

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:
        labels = self.task.label(pieces)
        if not are_labels(labels, len(pieces)):
            raise wrong_result(
                self.task.label, f"two lists with a number for each of {len(pieces)} tokens: its "
                f"section, from 0 to {len(SECTIONS) - 1}, and its kind, from 0 to "
                f"{len(KINDS) - 1} (docs/your_own_task.md)", labels)
        return labels


def as_problems(method: Callable[..., Any], *given: int) -> list[Problem]:
    """The problems that a task's method returns."""
    problems = method(*given)
    if not is_list(problems):
        raise wrong_result(method, "a list of problems", problems)
    return list(problems)


def as_text(method: Callable[[Any], Any], problem: Problem) -> str:
    """The text that a task's method makes of a problem."""
    text = method(problem)
    if not isinstance(text, str):
        raise wrong_result(method, "a text", text)
    return text


def is_score(score: Any) -> bool:
    if not isinstance(score, dict) or not PARTS <= score.keys():
        return False
    try:
        are_numbers = all(-LARGEST_SCORE <= float(value) <= LARGEST_SCORE
                          for value in score.values() if not isinstance(value, str))
    except (TypeError, ValueError):
        return False
    has_text = any(isinstance(value, str) for value in score.values())  # float("1") takes it
    return are_numbers and not has_text and score["answer"] in (0, 1)


def are_labels(labels: Any, tokens: int) -> bool:
    """Whether it is two lists of codes, of sections and of kinds, with one for each token."""
    try:
        lists = [list(codes) for codes in labels]
    except TypeError:  # one is nothing that can be listed
        return False
    if [len(codes) for codes in lists] != [tokens, tokens]:
        return False
    sections, kinds = lists
    return {*sections} <= {*range(len(SECTIONS))} and {*kinds} <= {*range(len(KINDS))}
