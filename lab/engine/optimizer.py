"""AdamW's state by name."""
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

import grpo


class AdamW(grpo.AdamW):
    """grpo.py's AdamW, and its state for a checkpoint."""

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
