"""What a token step and an update would do on a GPU: counted from shapes, on any machine.

    python -m benchmarks.count
    python -m benchmarks.count --bandwidth 1 --rate 165 --micro_batch 32   # another GPU

The model's matrices are on the device "meta": they have shapes and no numbers. Token ids and masks
are on the CPU, so the lab's own code runs as it is, and `Count` sees every operation of torch.

    launches     operations that compute something; most of them start one kernel each
    bytes        each operation reads its tensors once and writes its result once; of a table it
                 reads only the lines that are asked for
    likely       each operation takes LAUNCH seconds, or its bytes at REACHED of the bandwidth, or
                 its products at REACHED of the rate, whichever is most
    peak         the most bytes that results, parameters and moments hold at the same time

LAUNCH and REACHED are assumptions. Left out is what moves the cache when rows leave, and of the
peak what libraries and torch's allocator take. A norm counts as a layer norm, which moves as much.
"""
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from math import prod
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from analysis.tables import Table, by_row
from benchmarks import cases
from benchmarks.cases import NO_LEARNING, Case, make_batch, make_config, make_prompts, train_on
from engine.cache import Cache
from engine.forward import TokenLogProbs
from engine.fused import FusedQwen2
from engine.optimizer import AdamW
from engine.sampler import Decoding, Rows, Sampling
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from harness.screen import run_as_program
from qwen2_model import Qwen2

COUNTED = {"size": "0.5B", "questions": 8, "answers": 8, "new_tokens": 512, "dtype": "bfloat16",
           "micro_batch": 8, "checkpointing": False}
FLAGS = {
    **{name: replace(cases.FLAGS[name], default=default) for name, default in COUNTED.items()},
    "bandwidth": Flag(3.35, "TB a second; that of an H100 SXM", above=0, most=1000),
    "rate": Flag(989.0, "10^12 operations a second in products, likewise", above=0, most=1e6)}
aten = torch.ops.aten
LAUNCH = {"token step": 3e-6, "update": 8e-6}  # seconds: replayed as a graph, called from Python
REACHED = 0.6
ROWS = (64, 256, 1024)
PICKS = {"index", "index_select", "gather", "embedding", "searchsorted"}          # lines of a table
PLACES = {"index_copy_", "index_put_", "index_add_", "scatter_", "scatter_add_"}  # in a table
FILLS = {"copy_", "fill_", "zero_", "new_zeros", "zeros_like", "ones_like"}  # and reads nothing
COMPUTES_NOTHING = {"empty", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view",
                    "_local_scalar_dense"}


class Shapes(Qwen2):
    """A model without numbers, whose ids and masks are on the CPU."""
    device = torch.device("cpu")


def make_shapes(case: Case) -> Shapes:
    with torch.device("meta"):
        return Shapes(make_config(case)).compute_in(getattr(torch, case.dtype))


class AsOnGPU(TorchFunctionMode):
    """Take one operation where a GPU does: on "meta" torch would take several."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        instead = {F.scaled_dot_product_attention: attention, F.rms_norm: layer_norm,
                   torch.Tensor.softmax: softmax, torch.Tensor.log_softmax: softmax}
        return instead.get(function, function)(*args, **(kwargs or {}))


def as_on_gpu(function):
    """Also where autograd calls it: the backward pass does not know of the mode around it."""
    def called(*args):
        with AsOnGPU():
            return function(*args)
    return called


def attention(q, k, v, mask=None, is_causal=False, enable_gqa=False):
    """Flash attention; where there is a mask, the memory-efficient kernel."""
    if mask is None:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    return aten._scaled_dot_product_efficient_attention(q, k, v, mask, True)[0]


def layer_norm(x, shape, weight=None, eps=None):
    return F.layer_norm(x, shape, weight, None, eps)


def softmax(x, dim, dtype=None):
    """It reads bfloat16 and writes float32 at once; its logarithm does so, too."""
    return aten._softmax(x, dim, dtype not in (None, x.dtype))


class Count(TorchDispatchMode):
    """Inside `with`, `total` adds up launches, bytes and likely seconds; and `peak` is known."""

    def __init__(self, launch: float, gpu: dict):
        super().__init__()
        self.launch, self.gpu, self.total = launch, gpu, Counter()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}  # memory that was seen, its bytes
        self.held = self.peak = 0

    def note_memory(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = StorageWeakRef(tensor.untyped_storage())
            if tensor.is_meta and storage.cdata not in self.alive:
                self.alive[storage.cdata] = storage, tensor.untyped_storage().nbytes()
                self.held += self.alive[storage.cdata][1]
        if self.held > self.peak:  # unless some of it is free again
            for number in [key for key, (storage, _) in self.alive.items() if storage.expired()]:
                self.held -= self.alive.pop(number)[1]
            self.peak = max(self.peak, self.held)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_composite(operation):
            with self:
                return operation.decompose(*args, **kwargs)
        result = carry_out(operation, args, kwargs)
        self.note_memory(tensors_in(*args, *kwargs.values(), result))
        name = operation.overloadpacket.__name__
        if not (operation.is_view or name in COMPUTES_NOTHING):
            made = written_by(operation, args) or tensors_in(result)
            given = tensors_in(*args, *(kwargs[key] for key in kwargs if key != "out"))
            moved = sum(map(bytes_of, moved_by(name, given, made)))
            formula = flop_registry.get(operation.overloadpacket)
            factors = filter(torch.is_tensor, args)
            products = formula(*factors, out_val=result) if formula else 0
            seconds = max(products / self.gpu["rate"], moved / self.gpu["bandwidth"]) / REACHED
            self.total.update(launches=1, bytes=moved, seconds=max(self.launch, seconds))
            if name == "addmm" and given[0].dim() == 2 and made[0] is not given[0]:
                with self:  # cuBLAS adds in place: to a copy, unless it may change the matrix
                    torch.empty_like(made[0]).copy_(given[0])
        return result


@cache
def is_composite(operation) -> bool:
    """Whether it only calls others, where there is no kernel for it: a GPU has what a CPU has."""
    has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, operation.name())
    return has("CompositeImplicitAutograd") and not has("CPU")


def carry_out(operation, args, kwargs):
    """As torch does. Where tensors with and without numbers meet, the result has none; what is
    written into a tensor on the CPU leaves it as it was; and a number asked for is 1."""
    are_meta = {tensor.is_meta for tensor in tensors_in(*args, *kwargs.values())}
    if operation is aten._local_scalar_dense.default and True in are_meta:
        return 1
    if len(are_meta) < 2:
        return operation(*args, **kwargs)
    written = written_by(operation, args)
    if written and not (operation._schema.returns and written[0].is_meta):
        return args[0] if operation._schema.returns else None
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    return operation(*args, **kwargs)


def tensors_in(*values) -> list[torch.Tensor]:
    """Those among the arguments or results of an operation, which may be lists."""
    each = [value if isinstance(value, (list, tuple)) else (value,) for value in values]
    return [one for several in each for one in several if isinstance(one, torch.Tensor)]


def written_by(operation, args) -> list[torch.Tensor]:
    """The arguments that it changes in place."""
    return tensors_in(*(args[place] for place in places_written(operation) if place < len(args)))


@cache
def places_written(operation) -> list[int]:
    return [place for place, known in enumerate(operation._schema.arguments)
            if known.alias_info and known.alias_info.is_write]


def moved_by(name: str, given: list, made: list) -> list[torch.Tensor]:
    """What an operation reads and writes; what it does both to stands there twice."""
    if name in PICKS:
        return [*given[1:], *made, *made]
    if name in PLACES:
        return [*given[1:], *given[1:]]
    return [*(given[1:] if name in FILLS else given), *made]


def bytes_of(tensor: torch.Tensor) -> int:
    """Of the numbers that are in memory: `expand` repeats some."""
    sides = zip(tensor.shape, tensor.stride())
    return tensor.itemsize * prod(side for side, stride in sides if stride or not side)


def token_step(case: Case, gpu: dict) -> Counter:
    """The step in the middle of answers of so many tokens, all of which are still growing."""
    model, prompts = make_shapes(case), make_prompts(case)
    window = -(-case.new_tokens // 2)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    answer = torch.arange(case.questions * case.answers)
    prompt, nothing = answer // case.answers, torch.zeros_like(answer)
    seen = lengths[prompt]
    rows = Rows(answer, prompt, seen, limit=nothing + case.new_tokens, token=nothing,
                position=seen - 1, done=nothing.bool())
    longest = int(lengths.max())
    with torch.inference_mode(), AsOnGPU(), Count(LAUNCH["token step"], gpu) as count:
        decoding = Decoding(FusedQwen2(model, longest + case.new_tokens), rows,
                            Cache(model.config, model.compute_dtype, longest),
                            torch.rand(len(answer), case.new_tokens),
                            Sampling(stop=nothing[:0], temperature=1.0, greedy=False))
        decoding.arrange(slots=window, written=0)
        decoding.prefill(prompts)
        decoding.cache.set_window(window)
        count.total.clear()
        decoding.step()
    return count.total


def whole_update(case: Case, gpu: dict) -> Counter:
    model = make_shapes(case)
    model.model.checkpointing = case.checkpointing
    for layer in model.model.layers:
        layer.forward = as_on_gpu(layer.forward)
    backward = as_on_gpu(TokenLogProbs.backward)
    optimizer, batch = AdamW(model.parameters(), NO_LEARNING), make_batch(case)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with (patch.object(TokenLogProbs, "backward", backward), AsOnGPU(),
          patch("torch.nn.utils.clip_grad._has_foreach_support", lambda *_: True),
          Count(LAUNCH["update"], gpu) as count):
        optimizer.step()  # makes its moments
        count.total.clear()
        train_on(model, optimizer, batch, case)
    return count.total | {"peak": count.peak}


COLUMNS = {"what": "", "answers": ",.0f", "launches": ",.0f", "GB moved": ",.1f",
           "likely, ms": ",.1f", "likely tokens a second": ",.0f", "peak, GB": ".1f"}


def row_of(what: str, case: Case, tokens: int, total: Counter) -> list:
    """`tokens` are those of an answer."""
    answers = case.questions * case.answers
    return [what, answers, total["launches"], total["bytes"] / 1e9, 1e3 * total["seconds"],
            tokens * answers / total["seconds"],
            total["peak"] / 1e9 if total["peak"] else None]


def main(argv: list[str]) -> None:
    """Print a token step of ROWS answers, and the case's update."""
    parser = make_parser("python -m benchmarks.count [flags]", __doc__, FLAGS)
    given = with_defaults(parser.read(argv), FLAGS)
    case = Case("", **{name: getattr(given, name) for name in COUNTED})
    gpu = {"bandwidth": given.bandwidth * 1e12, "rate": given.rate * 1e12}
    print(f"Computed, not measured: {case.size}, {case.dtype}, {case.questions} problems, answers "
          f"of {case.new_tokens} tokens, a token step in their middle; a GPU with "
          f"{gpu['bandwidth'] / 1e12:.3g} TB a second and {gpu['rate'] / 1e12:.3g} * 10^12 "
          f"operations a second, of which {REACHED:.0%} are likely; a launch takes at least "
          f"{1e6 * LAUNCH['token step']:g} us in a token step, {1e6 * LAUNCH['update']:g} us in an "
          "update.\n")
    steps = [replace(case, answers=-(-number // case.questions)) for number in ROWS]
    rows = [row_of("token step", step, 1, token_step(step, gpu)) for step in steps]
    rows.append(row_of("update", case, case.new_tokens, whole_update(case, gpu)))
    print(Table("count", "", by_row(COLUMNS, rows)).to_text(limit=1000))


if __name__ == "__main__":
    run_as_program("benchmarks.count", main)
