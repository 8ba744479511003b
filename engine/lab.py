"""What a run works with: the model and its optimizer, the problems, and what spreads the credit.

Whoever needs a policy that can be asked (the loop, a preview of weights) makes one from the settings; critics and
mitigations with a state are given it with each batch. All that a stopped run needs to go on is in `trainer_tensors`.
"""
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

import mitigations
from engine import processes as ranks
from countdown_task import Problem, Problems, Ranges, encode_prompt, score
from engine.tokens import load_tokenizer, token_bytes
from credit.critic import CRITICS
from credit.trained import Trained
from engine.optimizer import load_optimizer_tensors, optimizer_tensors
from grpo import ADVANTAGES
from engine.optimizer import make_optimizer
from engine.errors import UserError
from qwen2_model import Qwen2
from engine.rollouts import Rollouts, collect
from engine.settings import Settings


@dataclass
class Lab:
    """What a run works with; mitigations and critics with a state are given it."""
    settings: Settings
    folder: Path  # the model was read from here
    model: Qwen2
    tokenizer: Tokenizer
    optimizer: torch.optim.Optimizer
    problems: Problems
    reference: Qwen2 | None = None       # the initial model, where a loss needs it
    advantage: Callable | None = None    # (rollouts, lab) -> (B, T)
    mitigation: Callable | None = None   # (tokens, lab) -> (B, T)

    def reward_of(self, problem: Problem, ids) -> float:
        """Of any answer to this problem, whole or cut off."""
        text = b"".join(token_bytes(self.tokenizer, ids)).decode(errors="replace")
        return score(text, problem.numbers, problem.target)["reward"]

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizer moves, in float32; it need not stand where the model's own are."""
        return dict(zip(dict(self.model.named_parameters()), self.optimizer.param_groups[0]["params"], strict=True))

    @property
    def extra_parameters(self) -> int:
        """Beside the policy: of a critic, a net that makes weights, a frozen copy."""
        modules = [value.module for part in (self.advantage, self.mitigation) for value in vars(part).values() if isinstance(value, Trained)]
        return sum(p.numel() for module in [*modules, *filter(None, [self.reference])] for p in module.parameters())

    def trainer_tensors(self) -> dict[str, torch.Tensor]:
        """All that a run needs to go on, beside the model."""
        tensors = optimizer_tensors(self.optimizer, self.parameters)
        for part in ("advantage", "mitigation"):
            state = getattr(getattr(self, part), "state_dict", dict)()
            tensors |= {f"{part}.{name}": value for name, value in state.items()}
            wrong = [name for name, value in state.items() if not isinstance(value, torch.Tensor)]
            if wrong:
                raise UserError(f"the {part}'s state_dict should hold tensors only, {wrong[0]} is none")
        return {name: value.detach().cpu().contiguous() for name, value in tensors.items()}

    def load_trainer_tensors(self, path: Path) -> None:
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        own = {part: {name.removeprefix(f"{part}."): value for name, value in tensors.items() if name.startswith(f"{part}.")}
               for part in ("advantage", "mitigation")}
        rest = {name: value for name, value in tensors.items() if not name.startswith(tuple(f"{part}." for part in own))}
        try:
            load_optimizer_tensors(self.optimizer, self.parameters, rest)
            for part, state in own.items():
                if hasattr(getattr(self, part), "load_state_dict"):
                    getattr(self, part).load_state_dict(state)
        except (UserError, RuntimeError, LookupError, TypeError) as error:
            raise UserError(f"{path}: {str(error).splitlines()[0]}") from None


def make_lab(settings: Settings, folder: Path | None = None) -> Lab:
    """With the model of the settings, or the same model as it was later, from `folder`."""
    device, dtype = pick_device(ranks.start(settings.device)), getattr(torch, settings.dtype)
    if settings.questions < ranks.count():
        raise UserError(f"--questions {settings.questions} cannot be shared by {ranks.count()} processes: some would have none")
    folder = folder or Path(settings.model)
    model = Qwen2.from_pretrained(folder, "cpu" if settings.offload_optimizer else device).compute_in(dtype)
    torch.set_num_threads(settings.threads or min(torch.get_num_threads(), max(1, model.config.hidden_size // 64)))
    optimizer = make_optimizer(model, settings.learning_rate, settings.weight_decay, settings.offload_optimizer, device)
    model.model.checkpointing, tokenizer = settings.checkpointing, load_tokenizer(folder)
    counts = tuple(int(n) for n in settings.numbers.split(","))
    ranges = Ranges(counts, settings.min_number, settings.max_number, settings.max_target, settings.max_result)
    lab = Lab(settings, folder, model, tokenizer, optimizer, Problems(ranges, settings.data))
    check_problems(lab)
    if settings.kl or settings.loss == "dpo":
        frozen = Qwen2.from_pretrained(settings.model, device).compute_in(dtype).requires_grad_(False)
        lab.reference = frozen.keep_matrices_in(dtype) if settings.offload_optimizer else frozen
    lab.advantage = CRITICS[settings.advantage](lab) if settings.advantage in CRITICS else \
        lambda rollouts, lab: ADVANTAGES[settings.advantage](rollouts)
    lab.mitigation = mitigations.make(settings.mitigation, settings.own, lab)
    return lab


def check_problems(lab: Lab) -> None:
    """Before anything is written: are there problems, can the tokenizer spell them, do prompt and answer fit the model?"""
    s, ranges, given = lab.settings, lab.problems.ranges, lab.problems.train + lab.problems.test
    lab.problems.training(s.seed, 1, 1), lab.problems.evaluation(1)
    most = max((len(problem.numbers) for problem in given), default=max(ranges.counts))
    values = {n for problem in given for n in (*problem.numbers, problem.target)}
    extremes = [Problem((value,) * most, value) for value in values] or [Problem((ranges.max_number,) * most, ranges.max_target)]
    length = max(len(encode_prompt(lab.tokenizer, problem, s.prompt)) for problem in extremes)
    limit = lab.model.config.max_position_embeddings
    if length + s.max_new_tokens > limit:
        raise UserError(f"--max_new_tokens {s.max_new_tokens}: a prompt of {length} tokens and the answer exceed the "
                        f"{limit} that {s.model} takes")


def pick_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name} is not a device: try cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: only cpu and cuda are implemented")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: PyTorch sees {torch.cuda.device_count()} CUDA devices here")
    return device


def derived_seed(*parts) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")


def sample(lab: Lab, problems: list[Problem], answers: int, seed: int, greedy: bool = False) -> Rollouts:
    s = lab.settings
    return collect(lab.model, lab.tokenizer, problems, s.prompt, answers, max_new_tokens=s.max_new_tokens,
                   temperature=s.temperature, greedy=greedy, seed=seed)
