"""AdamW by torch's kernel, and its state by name."""
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

import grpo


class AdamW(grpo.AdamW):
    """grpo.py's AdamW with torch's kernel for all parameters, which reads and writes each number
    once. A step gives the same bits as torch.optim.AdamW with fused=True. That class is not used,
    because it imports the whole compiler: more than a second and 70 MB at every start."""

    @torch.no_grad()
    def step(self) -> None:
        of_each = list(zip(self.parameters, self.mean, self.square))
        parameters, means, squares = map(list, zip(*(one for one in of_each
                                                     if one[0].grad is not None)))
        before = torch.full((len(parameters),), float(self.steps), device=parameters[0].device)
        gradients = [p.grad for p in parameters]
        adamw(parameters, gradients, means, squares, [], list(before), fused=True, amsgrad=False,
              maximize=False, lr=self.learning_rate, beta1=0.9, beta2=0.999, eps=1e-8,
              weight_decay=self.weight_decay)
        self.steps += 1

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The state for a checkpoint; `names` are those of the parameters."""
        found = {"step": torch.tensor(self.steps)}
        for name, mean, square in zip(names, self.mean, self.square):
            found |= {f"exp_avg.{name}": mean, f"exp_avg_sq.{name}": square}
        return found

    def put_back(self, names: Iterable[str], found: Mapping[str, Tensor]) -> None:
        for name, own in self.tensors(names).items():
            own.copy_(found[name])
        self.steps = int(found["step"])


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name. With LoRA they are few (lab/engine/lora.py)."""
    return {name: parameter for name, parameter in model.named_parameters()
            if parameter.requires_grad}


Optimizer = AdamW | torch.optim.Optimizer
