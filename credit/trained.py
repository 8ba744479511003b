"""A small module that is trained beside the policy, with an optimizer of its own."""
import torch
import torch.nn as nn

from engine.errors import UserError
from engine.optimizer import load_optimizer_tensors, optimizer_tensors


class Trained:
    """A small module with an AdamW of its own; all of it goes into checkpoints."""

    def __init__(self, module: nn.Module, learning_rate: float, device):
        self.module = module.to(device)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)

    def descend(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for parameter in self.module.parameters():  # one that had no part gets its state all the same, so that checkpoints are whole
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self.optimizer.step()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.module.state_dict() | optimizer_tensors(self.optimizer, dict(self.module.named_parameters()))

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        own = self.module.state_dict()
        if not set(own) <= set(tensors):
            raise UserError(f"the checkpoint lacks {sorted(set(own) - set(tensors))[0]}")
        self.module.load_state_dict({name: tensors[name] for name in own})
        load_optimizer_tensors(self.optimizer, dict(self.module.named_parameters()), {k: v for k, v in tensors.items() if k not in own})
