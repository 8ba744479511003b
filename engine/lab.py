"""What a run works with: the task, the model and its optimizer, and what spreads the credit.

Whoever needs a policy that can be asked (the loop, a probe, a preview of weights) makes a Lab from
settings. Weightings and advantages get the Lab with each batch. `trainer_tensors` are all that a
stopped run needs to go on, beside the model.
"""
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from engine import processes
from engine.errors import UserError
from engine.files import find_folder
from engine.finite import BrokenModel, refuse_undefined
from engine.forward import Forward
from engine.given_pairs import GivenPairs
from engine.optimizer import AdamW, load_optimizer_tensors, make_optimizer, optimizer_tensors
from engine.own_code import expect, own_code
from engine.registry import ADVANTAGES, MITIGATIONS, make
from engine.rollouts import Rollouts, sample_answers, score_answers
from engine.settings import Settings
from engine.sharded import load_shard
from engine.tasks import make_task
from engine.tokens import encode_prompt, load_tokenizer, token_bytes
from qwen2_model import Qwen2


@dataclass
class Lab:
    settings: Settings
    folder: Path  # the model was read from here
    model: Qwen2
    tokenizer: Tokenizer
    optimizer: AdamW
    task: object                         # see Task in countdown_task.py
    reference: Qwen2 | None = None       # the initial model, where a loss needs it
    advantage: Callable | None = None    # (rollouts, lab) -> (B, T), a choice of --advantage
    mitigation: Callable | None = None   # (tokens, lab) -> (B, T), a choice of --mitigation
    pairs: GivenPairs | None = None      # with --pairs: they take the place of sampled answers
    server: object = None                # with --rollouts: see engine/remote_rollouts.py

    def sample(self, problems: list, answers: int, seed: int, greedy: bool = False) -> Rollouts:
        """`answers` answers to each problem."""
        s = self.settings
        return sample_answers(self.model, self.tokenizer, self.task, problems, answers,
                              max_new_tokens=s.max_new_tokens, temperature=s.temperature,
                              greedy=greedy, seed=seed)

    def score(self, rollouts: Rollouts) -> Rollouts:
        """The batch with the reward of each answer, and the section and kind of each token."""
        return score_answers(rollouts, self.tokenizer, self.task)

    def ask(self, problems: list, answers: int, seed: int, greedy: bool = False) -> Rollouts:
        """Sample and score."""
        return self.score(self.sample(problems, answers, seed, greedy))

    def look_with(self, micro_batch: int | None = None) -> Forward:
        """For `Rollouts.forward`: it makes hidden states and attention when they are asked for."""
        return Forward(self.model, micro_batch or self.settings.micro_batch)

    def reward_of(self, problem, ids) -> float:
        """The reward of any answer to this problem, whole or cut off."""
        text = b"".join(token_bytes(self.tokenizer, ids)).decode(errors="replace")
        return self.task.score(problem, text)["reward"]

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The float32 parameters that the optimizer moves, by name. With --offload_optimizer they
        are copies on the CPU, not the model's own."""
        names = dict(self.model.named_parameters())
        return dict(zip(names, self.optimizer.param_groups[0]["params"], strict=True))

    @property
    def spreaders(self) -> dict[str, Callable]:
        """What may keep a state of its own, by its name in a checkpoint."""
        return {"advantage": self.advantage, "mitigation": self.mitigation}

    @property
    def extra_parameters(self) -> int:
        """How many parameters there are beside the policy's: those of a frozen copy, of a critic,
        of a net that makes weights."""
        modules = [] if self.reference is None else [self.reference]
        for spreader in self.spreaders.values():
            for value in getattr(spreader, "__dict__", {}).values():
                if isinstance(getattr(value, "module", None), torch.nn.Module):  # credit.trained
                    modules.append(value.module)
        return sum(p.numel() for module in modules for p in module.parameters())

    def credit_strengths(self) -> dict[str, float]:
        """Those flags of the chosen advantage and mitigation that are not whole numbers or words:
        a strength or a learning rate, which can be too large."""
        s = self.settings
        flags = s.flags_for(ADVANTAGES[s.advantage]) | s.flags_for(MITIGATIONS[s.mitigation])
        return {name: value for name, value in flags.items() if isinstance(value, float)}

    @torch.no_grad()
    def refuse_broken_model(self) -> None:
        """Parameters can be finite and too large to compute with: try them on a problem."""
        problem = self.task.held_out_problems(1)[0]
        prompt = encode_prompt(self.tokenizer, self.task.prompt_for(problem), "")
        hidden = self.model.model(torch.tensor([prompt], device=self.model.device))
        refuse_undefined("the model's logits are", self.model.logits(hidden[:, -1]),
                         kind=BrokenModel)

    def trainer_tensors(self) -> dict[str, torch.Tensor]:
        """All that a run needs to go on, beside the model."""
        tensors = optimizer_tensors(self.optimizer, self.parameters)
        for part, spreader in self.spreaders.items():
            with own_code(f"the {part}'s state_dict", spreader):
                state = getattr(spreader, "state_dict", dict)()
            expect(lambda: all(map(torch.is_tensor, state.values())), f"the {part}'s state_dict",
                   spreader, "tensors by name", state)
            tensors |= {f"{part}.{name}": value for name, value in state.items()}
        refuse_undefined("what a resumed run would go on from is", *tensors.values())
        return tensors

    def load_trainer_tensors(self, path: Path) -> None:
        """Read what `trainer_tensors` has written."""
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        states = {part: take_part(tensors, f"{part}.") for part in self.spreaders}
        try:
            load_optimizer_tensors(self.optimizer, self.parameters, tensors)
            for part, spreader in self.spreaders.items():
                if hasattr(spreader, "load_state_dict"):
                    spreader.load_state_dict(states[part])
        except (UserError, RuntimeError, LookupError, TypeError) as error:
            raise UserError(f"{path}: {str(error).splitlines()[0]}") from None


def take_part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Take the tensors with this prefix out of `tensors`, and return them without the prefix."""
    names = [name for name in tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): tensors.pop(name) for name in names}


def make_lab(settings: Settings, checkpoint: Path | None = None) -> Lab:
    """Load the model and make all that is trained with it. `checkpoint` is loaded instead of
    --model where a run goes on."""
    s = settings
    device = pick_device(processes.start(s.device))
    dtype = getattr(torch, s.dtype)
    if s.questions < processes.count():
        raise UserError(f"--questions {s.questions} cannot be shared by {processes.count()} "
                        "processes: some would have none")
    folder = checkpoint or find_folder(s.model)
    place = "cpu" if s.offload_optimizer else device
    model = load_model(s, folder, place, dtype)
    model.model.checkpointing = s.checkpointing
    set_threads(s.threads, model)
    optimizer = make_optimizer(model, s.learning_rate, s.weight_decay, s.offload_optimizer, device)
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    lab = Lab(s, folder, model, tokenizer, optimizer, make_task(s))
    check_prompts(lab)
    lab.pairs = GivenPairs(s.pairs, lab) if s.pairs else None
    if s.kl or s.loss == "dpo":
        lab.reference = load_reference(s, device, dtype)
    advantage, mitigation = ADVANTAGES[s.advantage], MITIGATIONS[s.mitigation]
    lab.advantage = make(advantage, s.flags_for(advantage), lab)
    lab.mitigation = make(mitigation, s.flags_for(mitigation), lab)
    return lab


def load_model(settings: Settings, folder: Path, device, dtype: torch.dtype) -> Qwen2:
    """The model of a folder; with --shard this process's part of it."""
    if not settings.shard:
        return Qwen2.from_pretrained(folder, device).compute_in(dtype)
    if processes.count() == 1:
        raise UserError("--shard shares a model between processes, and this one is alone: start "
                        "several with torchrun (docs/large_models.md), or say --shard no")
    return load_shard(folder, device, dtype).compute_in(dtype)


def load_reference(settings: Settings, device, dtype: torch.dtype) -> Qwen2:
    """The model as it was before training, which a loss compares with."""
    model = load_model(settings, find_folder(settings.model), device, dtype)
    model.requires_grad_(False)
    return model.cast_weights(dtype) if settings.offload_optimizer else model


def set_threads(threads: int, model: Qwen2) -> None:
    """0 is one for every 64 hidden units: small products get slower with more."""
    by_size = min(torch.get_num_threads(), max(1, model.config.hidden_size // 64))
    torch.set_num_threads(threads or by_size)


def check_prompts(lab: Lab) -> None:
    """Check before anything is written: are there problems, can the tokenizer spell the prompts,
    and does the model take prompt and answer?"""
    s, task = lab.settings, lab.task
    task.training_problems(s.seed, 1, 1)
    task.held_out_problems(1)
    longest = 0
    for problem in task.extreme_problems():
        prompt = encode_prompt(lab.tokenizer, task.prompt_for(problem), task.show(problem))
        longest = max(longest, len(prompt))
    limit = lab.model.config.max_position_embeddings
    if longest + s.max_new_tokens > limit:
        raise UserError(f"--max_new_tokens {s.max_new_tokens}: a prompt of {longest} tokens and "
                        f"the answer exceed the {limit} that {s.model} takes")


def try_problems(lab: Lab, step: int) -> None:
    """Ask the task, which is checked (engine/tasks.py), for all that the next step and evaluation
    need. From here on training may not meet what is evaluated."""
    s = lab.settings
    if s.eval_every:
        lab.task.held_out_problems(s.eval_tasks)
    if not lab.pairs:
        lab.task.training_problems(s.seed, step, s.questions)


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


def derived_seed(*parts) -> int:
    """A number that follows from these parts alone, for a random generator."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")
