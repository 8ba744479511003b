"""`build` makes the parts of a run from its settings: policy, optimizer, methods and the function
that samples. `Parts.state` has what a resumed run has to get back of them."""
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer

from lab.engine.methods import ADVANTAGES, MITIGATIONS, Method, make
from lab.engine.errors import UserError, say
from lab.engine.model_folder import read_config, read_model_folder
from lab.engine.optimizer import AdamW, trained_parameters
from lab.engine.policy import Policy, derived_seed, encode_prompts
from lab.engine.rollouts import Rollouts, has_turns
from lab.engine.tokens import load_tokenizer
from lab.harness.record import Json, find_folder
from lab.harness.settings import LabSettings
from lab.harness.tasks import CheckedTask, make_task
from lab.engine.model import Qwen2, keep_less_of_layers


# methods that cut an answer where a reply may follow
OF_ONE_TURN = ("causal_ablation", "deletion")


class Parts(NamedTuple):
    """What a run is made of, once. Its steps only use these."""
    policy: Policy
    optimizer: AdamW
    reference: Qwen2 | None
    advantage_method: Method
    weighting: Method
    sample: Callable[..., Rollouts]  # problems, answers to each, seed -> a batch with rewards

    @property
    def methods(self) -> dict[str, Method]:
        return {"advantage": self.advantage_method, "mitigation": self.weighting}

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that are trained, by name."""
        return trained_parameters(self.policy.model)

    def state(self) -> dict[str, torch.Tensor]:
        """What a resumed run has to get back beside the model: the state of the optimizer, and of
        the methods with the method's axis before each name."""
        tensors = self.optimizer.tensors(self.parameters)
        for axis, method in self.methods.items():
            state: dict[str, torch.Tensor] = getattr(method, "state_dict", dict)()
            for name, value in state.items():
                # a copy, because two tensors of a state may share their memory, which no file can
                tensors[f"{axis}.{name}"] = value.clone()
        if self.policy.settings.lora:  # the checkpoint's model has A and B in W + B A alone
            tensors |= {f"lora.{name}": value for name, value in self.parameters.items()}
        return tensors

    def put_back(self, tensors: dict[str, torch.Tensor]) -> None:
        """Put back what `state` returned."""
        rest = dict(tensors)
        for axis, method in self.methods.items():
            names = [name for name in rest if name.startswith(f"{axis}.")]
            state = {name.removeprefix(f"{axis}."): rest.pop(name) for name in names}
            if hasattr(method, "load_state_dict"):
                try:
                    method.load_state_dict(state)
                except (KeyError, RuntimeError) as error:
                    raise UserError("the last checkpoint's state does not fit --"
                                    f"{axis} {getattr(self.policy.settings, axis)}: "
                                    f"{type(error).__name__}: {error}") from None
        if self.policy.settings.lora:
            for name, parameter in self.parameters.items():
                parameter.data.copy_(rest.pop(f"lora.{name}"))
        self.optimizer.put_back(self.parameters, rest)


def build(s: LabSettings, checkpoint: Path | None, drawn: Json) -> Parts:
    """Build the parts of a run, in this order. The model of a resumed run is that of its
    checkpoint; with --lora it is the first model again, to which `put_back` adds A and B. `drawn`
    is filled with what dynamic sampling draws beyond a batch."""
    policy = load_policy(s, None if s.lora else checkpoint)
    refuse_methods_of_one_turn(s, policy.task)
    trained = trained_parameters(policy.model) if s.steps else {}  # else its means take memory
    optimizer = AdamW(trained.values(), s.learning_rate, s.weight_decay)
    reference = initial_model(s) if s.kl else None
    advantage, weighting = make_advantage(s, policy), make_weighting(s, policy)
    if s.advantage == "span" and (unpaid := unpaid_parts(s.keywords)):
        say(f"--advantage span pays {' and '.join(unpaid)}, which the reward of this run does not")
    sample: Callable[..., Rollouts] = policy.ask
    if s.dynamic_sampling > 1:
        from lab.engine.dynamic import DynamicSampling
        sample = DynamicSampling(policy, s.dynamic_sampling, drawn).sample
    return Parts(policy, optimizer, reference, advantage, weighting, sample)


def unpaid_parts(flags: Json) -> list[str]:
    """The parts of Countdown's score that its reward leaves out."""
    unpaid = ["the format"] if flags.get("reward_form", "graded") != "graded" else []
    return unpaid + ["the reasoning"] * (flags.get("reasoning_weight") == 0)


def refuse_methods_of_one_turn(s: LabSettings, task: object) -> None:
    for axis, name in (("mitigation", s.mitigation), ("advantage", s.advantage)):
        if has_turns(task) and name in OF_ONE_TURN:
            raise UserError(f"--{axis} {name} takes answers of one turn, and those of --task "
                            f"{s.task} have several, because it has a reply")


def load_policy(s: LabSettings, checkpoint: Path | None = None) -> Policy:
    """The policy of a run; that of a resumed one is loaded from its `checkpoint`. What cannot work
    is refused before the weights are read, which of a large model takes long."""
    device, folder = device_of(s), checkpoint or find_folder(s.model)
    config = read_config(folder)
    tokenizer = load_tokenizer(folder, config.vocab_size)
    task = make_task(s.task, s.keywords, folder)
    refuse_long_prompts(s, tokenizer, task, config.max_position_embeddings)
    if device.type == "cuda":
        from lab.gpu import open_room
        open_room()
    model = load_model(s, folder, device)
    if s.checkpointing:
        keep_less_of_layers(model)
    set_threads(s.threads, model)
    return Policy(model, tokenizer, task, s, folder)


def refuse_long_prompts(s: LabSettings, tokenizer: Tokenizer, task: CheckedTask, limit: int
                        ) -> None:
    """Refuse a task whose longest prompts the tokenizer cannot spell, or whose prompt and answer
    have more tokens than the model takes."""
    prompts = encode_prompts(tokenizer, task, task.extreme_problems())
    longest = max(len(prompt) for prompt in prompts)
    if longest + s.max_new_tokens > limit:
        raise UserError(f"--max_new_tokens {s.max_new_tokens}: a prompt of {longest} tokens and "
                        f"such an answer are longer than the {limit} tokens that {s.model} takes")


def load_model(s: LabSettings, folder: Path, device: torch.device) -> Qwen2:
    """The model of a folder. With --lora it has new additions, with which it computes the same."""
    model = read_model_folder(folder, device).compute_in(getattr(torch, s.dtype))
    if s.lora:
        from lab.engine.lora import add_lora, keep_less, keep_rounded
        keep_rounded(add_lora(model, s.lora, derived_seed("lora", s.seed)))
        if not s.checkpointing:
            keep_less(model)
    return model


def initial_model(s: LabSettings) -> Qwen2:
    """A frozen copy of the model before training, for KL terms."""
    return load_model(s, find_folder(s.model), device_of(s)).requires_grad_(False)


def make_advantage(s: LabSettings, policy: Policy) -> Method:
    return make(ADVANTAGES[s.advantage], s.keywords_of(ADVANTAGES[s.advantage]), policy)


def make_weighting(s: LabSettings, policy: Policy) -> Method:
    return make(MITIGATIONS[s.mitigation], s.keywords_of(MITIGATIONS[s.mitigation]), policy)


def set_threads(threads: int, model: Qwen2) -> None:
    """Set the number of threads; 0 means one for every 64 hidden units, because small products get
    slower with more."""
    by_size = min(torch.get_num_threads(), max(1, model.config.hidden_size // 64))
    torch.set_num_threads(threads or by_size)


def device_of(s: LabSettings) -> torch.device:
    """The device of --device. A GPU is told whether to compute the same numbers every time."""
    device = pick_device(s.device)
    if device.type == "cuda":
        compute_the_same_every_time(s.deterministic)
    return device


def compute_the_same_every_time(wanted: bool) -> None:
    """Let torch use only algorithms that give the same numbers every time, if that is `wanted`
    (--deterministic). cuBLAS needs the variable for it, and reads it before its first product."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(wanted)


def pick_device(name: str) -> torch.device:
    """The device with this name. A GPU becomes PyTorch's current one, on which graphs are
    recorded."""
    kind, _, number = name.partition(":")
    wrong = ""
    if not re.fullmatch("cpu|cuda(:[0-9]+)?", name):
        wrong = "only cpu, cuda and cuda:N are implemented"
    elif kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        wrong = (f"PyTorch sees {torch.cuda.device_count()} CUDA devices here. --device cpu "
                 "computes without one")
    if wrong:
        raise UserError(f"--device {name}: {wrong}")
    if kind == "cuda":
        torch.cuda.set_device(int(number or 0))
        # cuDNN plans for half a second for every new shape, and shapes change every few tokens
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device(name)
