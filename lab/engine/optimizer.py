"""AdamW (1711.05101): a step with a clipped gradient, the learning rate of a step, and the state by
name."""
import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.adamw import adamw

from lab.engine.errors import UserError, refuse_undefined

STATE = ("step", "exp_avg", "exp_avg_sq")  # the tensors that AdamW keeps for each parameter


def clip_and_step(optimizer: "Optimizer", max_grad_norm: float) -> float:
    """Clip the gradient and let the optimizer step. Returns the norm of the gradient before
    clipping. If the gradient is not finite, nothing is changed and the run stops."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
    refuse_undefined("the gradient is", norm)
    if max_grad_norm and norm >= max_grad_norm:  # else it would take time to multiply by 1
        clip_grads_with_norm_(parameters, max_grad_norm, norm)
    optimizer.step()
    refuse_undefined("after the update a parameter is", *parameters)
    return norm.item()


def rate_of_step(step: int, steps: int, rate: float, warmup: int, decay: str) -> float:
    """The learning rate of a step, counted from 1 (--warmup_steps, --decay). It follows from the
    step alone, so a run that is resumed has the rates of one that was never stopped.

    It rises in equal parts over the first `warmup` steps, in the last of which it is `rate`. Then,
    with `decay`, it falls to nearly 0 in the last step:

        linear    in equal parts
        cosine    along half a cosine, slowly at first and at the end
    """
    if step <= warmup:
        return rate * step / warmup
    if decay == "none":
        return rate
    left = (steps - step + 1) / (steps - warmup + 1)  # below 1, above 0
    if decay == "linear":
        return rate * left
    return rate * (1 - math.cos(math.pi * left)) / 2


class AdamW:
    """An optimizer with the same step, to the bit, as torch.optim.AdamW with fused=True. torch's
    own would import the whole compiler: more than a second and 70 MB at every start."""
    BETAS, EPSILON = (0.9, 0.999), 1e-8

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float,
                 weight_decay: float = 0.0):
        self.param_groups = [{"params": list(parameters)}]  # the names of torch's optimizers
        # for each parameter the tensors of STATE by name, once it is trained
        self.state: dict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)
        self.learning_rate, self.weight_decay = learning_rate, weight_decay

    def zero_grad(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.grad = None
            # Before the update makes its tensors: when these are freed, the moments would settle
            # in their room, and the next update would have to take new memory from the system.
            self.state_of(p)

    def state_of(self, p: nn.Parameter) -> dict[str, Tensor]:
        """The tensors of STATE, which are made when they are first asked for."""
        if not self.state[p]:
            self.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=p.device),
                             "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        return self.state[p]

    @torch.no_grad()
    def step(self) -> None:
        gradients = {p: p.grad for p in self.param_groups[0]["params"] if p.grad is not None}
        states = [self.state_of(p) for p in gradients]
        steps, means, squares = ([state[name] for state in states] for name in STATE)
        adamw(list(gradients), list(gradients.values()), means, squares, [], steps, fused=True,
              amsgrad=False, maximize=False, lr=self.learning_rate, beta1=self.BETAS[0],
              beta2=self.BETAS[1], eps=self.EPSILON, weight_decay=self.weight_decay)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name. With LoRA they are few (lab/engine/lora.py)."""
    return {name: parameter for name, parameter in model.named_parameters()
            if parameter.requires_grad}


Optimizer = AdamW | torch.optim.Optimizer


def optimizer_tensors(optimizer: AdamW, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The optimizer's state for a checkpoint; empty before the first update."""
    tensors = {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state[parameter].items():
            tensors[f"{key}.{name}"] = value
    return tensors


def load_optimizer_tensors(optimizer: AdamW, parameters: dict[str, nn.Parameter],
                           tensors: dict[str, Tensor]) -> None:
    """Put back what `optimizer_tensors` returned."""
    if not tensors:
        return
    for name, parameter in parameters.items():
        for key in STATE:
            stored = tensors.get(f"{key}.{name}")
            wanted = parameter.shape if key != "step" else ()
            if stored is None or stored.shape != wanted:
                raise UserError(f"the trainer's state has no {key}.{name} of the shape "
                                f"{tuple(wanted)}, as it was saved by a run like this")
            if key == "step":
                optimizer.state[parameter]["step"] = stored.clone().to(parameter.device)
            else:
                moment = torch.empty_like(parameter, requires_grad=False)
                optimizer.state[parameter][key] = moment.copy_(stored)
