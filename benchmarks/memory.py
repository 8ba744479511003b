"""Is floor.py's account of an update's memory right? Beside it, what was counted.

    python benchmarks/memory.py                      # about ten minutes on one core, most of it for 0.5B
    python benchmarks/memory.py --sizes tiny,small

    kept     tensors that autograd keeps of the largest micro-batch for its backward pass: exact, no allocator in it
    peak     the most bytes of tensors at once during an update, beyond parameters and moments
    process  by how much an update raised the process's peak memory: with gaps in the allocator's blocks and what the
             kernels take for themselves (Linux)

32 answers of 128 tokens to 4 questions, or 16 of 32 tokens to 2 with 0.5B, on the CPU.
"""
import json
import sys
import weakref
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.cases import SIZES, Case, floor_batch, in_a_process, make_batch, make_model
from benchmarks.floor import Batch, fullest, kept, parameters
from grpo import update
from mitigations import Bounds
from engine.optimizer import make_optimizer
from qwen2_model import Qwen2
from analysis.tables import Table, by_row
from engine.forward import response_log_probs
from engine.settings import Parser, Settings, check_value, run_as_program
from train import peak_memory


class Living(TorchDispatchMode):
    """Bytes of the tensors that came into being while this was entered and are not gone yet: now, and at most."""

    def __init__(self, before: list[torch.Tensor]):
        super().__init__()
        self.known, self.now, self.most = {tensor.untyped_storage()._cdata for tensor in before}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta" and tensor.untyped_storage()._cdata not in self.known:
                self.comes(tensor.untyped_storage())
        return found

    def comes(self, storage) -> None:
        place, size = storage._cdata, storage.nbytes()
        self.known.add(place)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.goes, place, size)

    def goes(self, place: int, size: int) -> None:
        self.known.discard(place)
        self.now -= size


def kept_by_autograd(function, model: Qwen2) -> int:
    """Bytes of the numbers that autograd keeps, the model's own and the indices aside."""
    own, found = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def look(tensor):
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()  # held on to, so that no place is taken twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        result = function()
    del result
    return sum(storage.nbytes() for storage in found.values())


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) * 1024


def make_moments(optimizer) -> None:
    """As after a first step, one gradient at a time, so that they leave little room behind them."""
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
        optimizer.step()
        p.grad = None


def count(case: Case) -> dict:
    torch.set_num_threads(1)
    model, settings = make_model(case), Settings(micro_batch=case.micro_batch)
    batch, optimizer = make_batch(case, model.config.vocab_size), make_optimizer(model, 1e-12, 0.0, case.offload_optimizer, case.device)
    make_moments(optimizer)
    before = resident()
    update(model, optimizer, batch, batch.mask.float(), settings)
    process = peak_memory(model.device) - before
    optimizer.zero_grad(set_to_none=True)
    with Living([*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]) as living:
        update(model, optimizer, batch, batch.mask.float(), settings)
    parts = floor_batch(case, batch.prompt_ids, batch.mask).micro_batches()
    largest = max(range(len(parts)), key=lambda i: sum(kept(model.config, parts[i]).values()))
    rows = torch.arange(len(batch.mask)).split(case.micro_batch)[largest]
    return {"kept": kept_by_autograd(lambda: response_log_probs(model, batch, rows), model), "peak": living.most, "process": process,
            "kept, floor": sum(kept(model.config, parts[largest]).values()), "peak, floor": peak_of(model.config, parts)}


def peak_of(config, parts: list[Batch]) -> int:
    return 4 * parameters(config) + max(sum(fullest(config, part).values()) for part in parts)


def cases_of(size: str) -> list[Case]:
    shape, micro_batches = ((2, 8, 32), (2, 8)) if size == "0.5B" else ((4, 8, 128), (4, 16))
    cases = [Case(size, "update", *shape, micro_batch=micro_batch, checkpointing=checkpointing)
             for micro_batch in micro_batches for checkpointing in (False, True)]
    more = [replace(case, dtype="bfloat16", offload_optimizer=offload) for offload in (False, True) for case in cases]
    return cases + (more if size != "0.5B" else [])


def row(case: Case) -> list:
    print(f"\r\033[K{case.size}, {case.dtype}, micro-batches of {case.micro_batch}", end="", file=sys.stderr, flush=True)
    found = {name: value / 2 ** 20 for name, value in in_a_process(case, __file__).items()}
    return [case.size, case.dtype, str(case.micro_batch), " ".join(name for name in ("checkpointing", "offload_optimizer") if getattr(case, name)), found["kept, floor"], found["kept"],
            found["peak, floor"], found["peak"], found["process"]]


def main(argv: list[str]) -> None:
    if argv[:1] == ["--case"]:  # what in_a_process calls
        return print(json.dumps(count(Case(**json.loads(argv[1])))))
    parser = Parser(usage="python benchmarks/memory.py [--sizes ...]", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--sizes", default="tiny,small,0.5B", help=f"some of {', '.join(SIZES)}")
    sizes = parser.parse_args(argv).sizes.split(",")
    for size in sizes:
        check_value("sizes", size, str, Bounds(), SIZES)
    formats = {"size": "", "computes in": "", "micro-batch": "", "with": "", "kept, floor": ",.1f", "counted": ",.1f",
               "peak, floor": ",.1f", "peak, counted": ",.1f", "process": ",.0f"}
    rows = [row(case) for size in sizes for case in cases_of(size)]
    print("\r\033[K", end="", file=sys.stderr)
    print("MiB\n\n" + Table("memory", "", by_row(formats, rows)).to_text(limit=1000))


if __name__ == "__main__":
    run_as_program("memory.py", main)
