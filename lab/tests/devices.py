"""A second device that is only called cuda: its tensors are computed on the CPU, but never together
with those that are there. A recorded step waits for no value, takes nothing from the CPU, and finds
its tensors where they were."""
import contextlib
from unittest.mock import MagicMock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from lab.gpu import cuda_graph
from lab.gpu.sampler import Decoding

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MOVES = ("copy_", "to", "type_as", "__setitem__", "__deepcopy__")  # or may see both
WAITS = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__",
         "__index__", "unique", "unique_consecutive", "masked_select", "equal", "isin",
         "pin_memory", "tensor")
recorded = []  # something while a step is recorded or replayed


class OnGPU(torch.Tensor):
    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            copy = self.detach().clone().as_subclass(OnGPU).requires_grad_(self.requires_grad)
            memo[id(self)] = as_parameter(copy) if hasattr(self, "_is_param") else copy
        return memo[id(self)]


def as_parameter(tensor):
    tensor.__class__ = OnGPU
    tensor._is_param = True  # for isinstance
    return tensor


def names(x, kind):
    """Whether x is or says this kind of device."""
    return isinstance(x, (str, torch.device)) and str(x).split(":")[0] == kind


def is_gpu(x):
    return names(x, "cuda")


def any_tensor(given):
    return any(isinstance(x, torch.Tensor) for x in given)


def refuse_two_devices(name, given):
    """An operation takes tensors of one device; a single number may come from the CPU."""
    others = [x for x in given if isinstance(x, torch.Tensor) and not isinstance(x, OnGPU)]
    if not name.startswith("_fused"):
        others = [x for x in others if x.dim()]
    assert not others, f"{name} takes tensors of two devices"
    assert name != "numpy", "numpy reads a GPU's tensor"


def refuse_waits(name, args, crosses, leaves):
    """Whoever reads a number, picks by a mask or moves a tensor waits. A recorded step may not."""
    if not recorded:
        return
    masks = [x for x in tree_leaves(args[1:]) if isinstance(x, torch.Tensor)]
    by_mask = name == "__getitem__" and any(x.dtype == torch.bool for x in masks)
    is_free = name not in WAITS and not (by_mask or crosses or leaves)
    assert is_free, f"a recorded step waits in {name}"


class TwoDevices(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.device:
            return function(*args, **kwargs)
        given, name = tree_leaves((args, kwargs)), getattr(function, "__name__", "")
        there = any(isinstance(x, OnGPU) for x in given)
        moved = any(map(is_gpu, given)) or name == "to" and isinstance(args[1], OnGPU)
        left = name == "cpu" or any(names(x, "cpu") for x in given)
        if there and name not in MOVES:
            refuse_two_devices(name, given)
        if there or moved:
            assert kwargs.get("generator") is None, f"{name} draws with a generator of the CPU"
            crosses = moved and not there and not kwargs.get("non_blocking")
            refuse_waits(name, args, crosses and any_tensor(given), there and left)
        if name == "pin_memory":
            return args[0]
        args, kwargs = tree_map(lambda x: CPU if is_gpu(x) else x, (args, kwargs))
        kwargs.pop("non_blocking", None)
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        result = function(*args, **kwargs)
        if name.startswith("__set") or name == "copy_" or isinstance(result, torch.Size):
            return result
        if there and left:
            return tree_map(lambda x: x.as_subclass(torch.Tensor) if isinstance(x, OnGPU) else x,
                            result)
        if there or moved:
            result = tree_map(lambda x: x.as_subclass(OnGPU) if type(x) is torch.Tensor else x,
                              result)
        return result


def places(decoding):
    """Where the tensors lie that a step reads or writes, and what it looks at."""
    tensors = {}
    for part in (decoding, decoding.rows, decoding.cache):
        tensors |= {name: value for name, value in vars(part).items()
                    if isinstance(value, torch.Tensor)}
    tensors |= {f"layer {layer}": x for layer, x in enumerate(decoding.cache.stored)}
    return {name: x.data_ptr() for name, x in tensors.items()} | {"end": decoding.cache.end}


class Graph:
    """Stands in for torch.cuda.CUDAGraph; what is recorded is carried out, too."""
    decoding = None  # the one that stepped last

    def capture_begin(self, pool=None):
        recorded.append(self)

    def capture_end(self):
        recorded.clear()
        self.places, self.is_new = places(Graph.decoding), True

    def pool(self):
        return 0, 1

    def replay(self):
        assert self.places == places(Graph.decoding), "what is replayed is elsewhere now"
        if not self.is_new:
            recorded.append(self)
            Graph.decoding.step()
            recorded.clear()
        self.is_new = False


@contextlib.contextmanager
def second_device(monkeypatch):
    step, to = Decoding.step, torch.nn.Module.to

    def move(module, *args, **kwargs):
        if not any(map(is_gpu, args)):
            return to(module, *args, **kwargs)
        for parameter in module.parameters():  # they stay the objects that they are
            as_parameter(parameter)
        return module

    def noted(decoding):
        Graph.decoding = decoding
        step(decoding)

    monkeypatch.setattr(Decoding, "step", noted)
    monkeypatch.setattr(torch.nn.Module, "to", move)
    for name, stand_in in {"CUDAGraph": Graph, "current_stream": lambda device: MagicMock(),
                           "stream": lambda stream: contextlib.nullcontext(),
                           "empty_cache": lambda: None, "device_count": lambda: 1,
                           "set_device": lambda device: None, "synchronize": lambda *_: None,
                           "max_memory_allocated": lambda *_: 0,
                           "reset_peak_memory_stats": lambda *_: None}.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(cuda_graph, "side_stream", lambda device: MagicMock())
    with TwoDevices():
        yield
