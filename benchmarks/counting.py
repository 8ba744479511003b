"""Counting the bytes of tensors: those that are alive, and those that autograd keeps."""
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qwen2_model import Qwen2


class Living(TorchDispatchMode):
    """Bytes of the tensors that were made while this was entered and still exist: now, at most."""

    def __init__(self, before: list[torch.Tensor]):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in before}
        self.now = 0
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
                self.look_at(leaf.untyped_storage())
        return result

    def look_at(self, storage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place in self.known:
            return
        self.known.add(place)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.forget, place, size)

    def forget(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


def kept_by_autograd(function: Callable, model: Qwen2) -> int:
    """Bytes of the numbers that autograd keeps, without the model's own and without indices."""
    of_model = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}  # keeping the storages themselves, so that no address is used twice

    def look(tensor):
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in of_model:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        result = function()
    del result
    return sum(storage.nbytes() for storage in storages.values())


def resident() -> int:
    """Bytes of this process in memory (Linux)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024
