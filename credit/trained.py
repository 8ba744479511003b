"""A small module that is trained beside the policy, with an AdamW of its own."""
import torch
import torch.nn as nn

from engine.errors import UserError
from engine.finite import refuse_undefined
from engine.optimizer import AdamW, load_optimizer_tensors, optimizer_tensors


class Trained:
    """`state_dict` holds the module and its optimizer, so that a resumed run forgets nothing."""

    def __init__(self, module: nn.Module, learning_rate: float, device):
        self.module = module.to(device)
        self.optimizer = AdamW(module.parameters(), learning_rate)

    def descend(self, loss: torch.Tensor) -> None:
        """One step down the gradient of the loss."""
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.module.parameters():
            if parameter.grad is None:  # not in this loss: AdamW makes its state all the same
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        refuse_undefined("after its update, what is trained beside the policy is",
                         *self.module.parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.module.state_dict() | optimizer_tensors(self.optimizer, self.named_parameters())

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        names = set(self.module.state_dict())
        missing = sorted(names - set(tensors))
        if missing:
            raise UserError(f"the checkpoint lacks {missing[0]}")
        self.module.load_state_dict({name: tensors[name] for name in names})
        rest = {name: value for name, value in tensors.items() if name not in names}
        load_optimizer_tensors(self.optimizer, self.named_parameters(), rest)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters())
