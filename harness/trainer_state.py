"""What a resumed run needs beside the model: the optimizer's state, and that of whatever else
learns or remembers, a critic say. It is a file of tensors in every checkpoint."""
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from engine.errors import UserError
from engine.finite import refuse_undefined
from engine.optimizer import (AdamW, load_optimizer_tensors, optimizer_tensors,
                              parameters_by_name)
from harness.own_code import expect, own_code
from qwen2_model import Qwen2


@dataclass
class TrainerState:
    model: Qwen2
    optimizer: AdamW
    methods: dict[str, Callable]  # the advantage and the mitigation, which may have a state

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return parameters_by_name(self.model, self.optimizer)

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = optimizer_tensors(self.optimizer, self.parameters)
        for part, method in self.methods.items():
            with own_code(f"the {part}'s state_dict", method):
                state = getattr(method, "state_dict", dict)()
            expect(lambda: all(map(torch.is_tensor, state.values())), f"the {part}'s state_dict",
                   method, "tensors by name", state)
            tensors |= {f"{part}.{name}": value for name, value in state.items()}
        refuse_undefined("what a resumed run would go on from is", *tensors.values())
        return tensors

    def load(self, checkpoint: Path) -> None:
        """Read what `tensors` has returned from a checkpoint."""
        path = checkpoint / "trainer" / "state.safetensors"
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
        states = {}
        for part in self.methods:
            names = [name for name in tensors if name.startswith(f"{part}.")]
            states[part] = {name.partition(".")[2]: tensors.pop(name) for name in names}
        try:
            load_optimizer_tensors(self.optimizer, self.parameters, tensors)
            for part, method in self.methods.items():
                if hasattr(method, "load_state_dict"):
                    method.load_state_dict(states[part])
        except (UserError, RuntimeError, LookupError, TypeError) as error:
            raise UserError(f"{path}: {str(error).splitlines()[0]}") from None
