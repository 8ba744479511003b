"""What a token step and an update would do on a GPU: counted from shapes, on any machine.

The model's matrices are on the device "meta": they have shapes and no numbers. Token ids and masks
are on the CPU, so the lab's own code runs as it is, and `Count` sees every operation of torch.

    launches     operations that compute something; most of them start one kernel each
    bytes        each operation reads its tensors once and writes its result once; of a table it
                 reads only the lines that are asked for
    layers       their matrices, copies of them in another type, gradients and moments
    output       the same of the output matrix, which is also the embedding
    attention    what its kernels read and write: in a token step, the cache
    vocabulary   tensors with a number for each token of the vocabulary
    at least     matrices, cache and AdamW's state are moved once, a logit is written once and read
                 once, products are made at the full rate
    likely       each operation takes LAUNCH seconds, or its bytes at REACHED of the bandwidth, or
                 its products at REACHED of the rate, whichever is most

LAUNCH and REACHED are assumptions. Left out is what moves the cache when rows leave. A norm counts
as a layer norm, which moves as much; a gradient is clipped tensor by tensor, which a GPU joins.
"""
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from math import prod

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from analysis.tables import Table, by_row
from benchmarks.cases import Case, make_batch, make_config, make_prompts
from engine.cache import Cache
from engine.fused import FusedQwen2
from engine.optimizer import AdamW
from engine.sampler import Decoding, Rows, Sampling
from grpo import update
from harness.settings import Settings
from qwen2_model import Qwen2

aten = torch.ops.aten
LAUNCH = {"token step": 3e-6, "update": 8e-6}  # seconds: replayed as a graph, called from Python
REACHED = 0.6
ROWS = (64, 256, 1024)
PARTS = ("layers", "output", "attention", "vocabulary", "other")
PICKS = {"index", "index_select", "gather", "embedding", "searchsorted"}   # lines of a table
PLACES = {"index_copy_", "index_put_", "index_add_", "scatter_add_"}       # in a table
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
    """Inside `with`, `total` adds up launches, the bytes of each part, and likely seconds."""

    def __init__(self, model: Qwen2, launch: float, gpu: dict):
        super().__init__()
        self.launch, self.gpu, self.total = launch, gpu, Counter()
        self.vocabulary = model.config.vocab_size
        tensors = list(model.parameters())
        for layer in FusedQwen2(model, longest=1).layers:
            tensors += filter(torch.is_tensor, vars(layer).values())
        self.matrices = {tuple(sorted(t.shape)): "layers" for t in tensors if t.dim() == 2}
        self.matrices[tuple(sorted(model.output_matrix.shape))] = "output"

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_composite(operation):
            with self:
                return operation.decompose(*args, **kwargs)
        result = carry_out(operation, args, kwargs)
        name = operation.overloadpacket.__name__
        if not (operation.is_view or name in COMPUTES_NOTHING):
            made = written_by(operation, args) or tensors_in(result)
            given = tensors_in((args, {**kwargs, "out": None}))
            moved = Counter()
            for tensor in moved_by(name, given, made):
                moved["attention" if "attention" in name else self.part_of(tensor)] += \
                    bytes_of(tensor)
            formula = flop_registry.get(operation.overloadpacket)
            factors = filter(torch.is_tensor, args)
            products = formula(*factors, out_val=result) if formula else 0
            seconds = least_seconds([(products, moved.total())], self.gpu) / REACHED
            self.total.update(moved, launches=1, seconds=max(self.launch, seconds))
            if name == "addmm" and given[0].dim() == 2 and made[0] is not given[0]:
                with self:  # cuBLAS adds in place: to a copy, unless it may change the matrix
                    torch.empty_like(made[0]).copy_(given[0])
        return result

    def part_of(self, tensor: torch.Tensor) -> str:
        """By its shape alone, which is enough for a vocabulary like that of Qwen2.5."""
        has_lines = tensor.numel() and tensor.numel() % self.vocabulary == 0
        rest = "vocabulary" if has_lines else "other"
        return self.matrices.get(tuple(sorted(tensor.shape)), rest)


@cache
def is_composite(operation) -> bool:
    """Whether it only calls others, where there is no kernel for it: a GPU has what a CPU has."""
    has = partial(torch._C._dispatch_has_kernel_for_dispatch_key, operation.name())
    return has("CompositeImplicitAutograd") and not has("CPU")


def carry_out(operation, args, kwargs):
    """As torch does. Where tensors with and without numbers meet, the result has none; what is
    written into a tensor on the CPU leaves it as it was; and a number asked for is 1."""
    if not any(tensor.is_meta for tensor in tensors_in((args, kwargs))):
        return operation(*args, **kwargs)
    if operation is aten._local_scalar_dense.default:
        return 1
    written = written_by(operation, args)
    if written and not (operation._schema.returns and written[0].is_meta):
        return args[0] if operation._schema.returns else None
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    return operation(*args, **kwargs)


def tensors_in(tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def written_by(operation, args) -> list[torch.Tensor]:
    """The arguments that it changes in place."""
    return tensors_in([value for value, known in zip(args, operation._schema.arguments)
                       if known.alias_info and known.alias_info.is_write])


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
    with torch.inference_mode(), AsOnGPU(), Count(model, LAUNCH["token step"], gpu) as count:
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
    """Of as many micro-batches as problems: what the second adds is what each other adds."""
    model = make_shapes(case)
    optimizer = AdamW(model.parameters(), 1e-12)
    totals = []
    for questions in (1, 1, 2):  # in the first, AdamW makes its moments
        batch = make_batch(replace(case, questions=questions))
        with AsOnGPU(), Count(model, LAUNCH["update"], gpu) as count:
            update(model, optimizer, batch, batch.mask.float(), Settings(micro_batch=case.answers))
        totals.append(count.total)
    _, one, two = totals
    return Counter({name: one[name] + (case.questions - 1) * (two[name] - one[name])
                    for name in two})


def step_needs(model: Qwen2, case: Case) -> list[tuple[float, float]]:
    """(operations, bytes) of a token step, as `rollout_needs`; and the bytes of the keys and values
    of all prompts and half of the answers' tokens, and of each logit twice."""
    config, rows = model.config, case.questions * case.answers
    numbers, size = sum(matrix_numbers(model)), model.compute_dtype.itemsize
    earlier = sum(map(len, make_prompts(case))) + rows * case.new_tokens / 2
    of_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return [(2 * rows * numbers, size * numbers),
            (0, size * (earlier * of_token + 2 * rows * config.vocab_size))]


def rollout_needs(model: Qwen2, prompts: list, lengths: list[int]) -> list[tuple[float, float]]:
    """(operations, bytes): two operations a token for each number of the matrices, which are read
    once for every token step of all rows."""
    layers, output = matrix_numbers(model)
    tokens = sum(lengths)
    operations = 2 * (layers * (sum(map(len, prompts)) + tokens) + output * tokens)
    return [(operations, model.compute_dtype.itemsize * (layers + output) * max(lengths))]


def update_needs(model: Qwen2, prompts: list, lengths: list[int]) -> list[tuple[float, float]]:
    """Three times the operations: the backward pass takes two products where the forward pass takes
    one. AdamW reads parameters, gradients and moments, and writes all but the gradients."""
    (operations, _), = rollout_needs(model, prompts, lengths)
    return [(3 * operations, 0), (0, 28 * sum(p.numel() for p in model.parameters()))]


def matrix_numbers(model: Qwen2) -> tuple[int, int]:
    """In the layers, and in the output matrix."""
    layers = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    return layers, model.output_matrix.numel()


def least_seconds(needs: list, machine: dict) -> float:
    """Each part of the work takes as long as the slower of its operations and its bytes."""
    return sum(max(operations / machine["rate"], size / machine["bandwidth"])
               for operations, size in needs)


COLUMNS = {"what": "", "answers": ",.0f", "launches": ",.0f",
           **{f"{part}, MB": ",.0f" for part in PARTS}, "bytes a logit": ".0f",
           "at least, ms": ",.1f", "likely, ms": ",.1f", "likely tokens a second": ",.0f"}


def count_table(case: Case, gpu: dict) -> Table:
    """A token step of ROWS answers, and the case's update."""
    model, rows = make_shapes(case), []
    for number in ROWS:
        step = replace(case, answers=-(-number // case.questions))
        rows.append(row_of("token step", step, 1, token_step(step, gpu), step_needs(model, step),
                           gpu))
    lengths = [case.new_tokens] * case.questions * case.answers
    needs = update_needs(model, make_prompts(case), lengths)
    rows.append(row_of("update", case, case.new_tokens, whole_update(case, gpu), needs, gpu))
    return Table("count", "", by_row(COLUMNS, rows))


def row_of(what: str, case: Case, tokens: int, total: Counter, needs: list, gpu: dict) -> list:
    """`tokens` are those of an answer."""
    answers = case.questions * case.answers
    tokens *= answers
    return [what, answers, total["launches"], *(total[part] / 1e6 for part in PARTS),
            total["vocabulary"] / (tokens * make_config(case).vocab_size),
            1e3 * least_seconds(needs, gpu), 1e3 * total["seconds"], tokens / total["seconds"]]


def show_counted(case: Case, gpu: dict) -> None:
    print(f"Computed, not measured: {case.size}, {case.dtype}, {case.questions} problems, answers "
          f"of {case.new_tokens} tokens, a token step in their middle; a GPU with "
          f"{gpu['bandwidth'] / 1e12:.3g} TB a second and {gpu['rate'] / 1e12:.3g} * 10^12 "
          f"operations a second, of which {REACHED:.0%} are likely; a launch takes at least "
          f"{1e6 * LAUNCH['token step']:g} us in a token step, {1e6 * LAUNCH['update']:g} us in an "
          "update.\n")
    print(count_table(case, gpu).to_text(limit=1000))
