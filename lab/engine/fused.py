"""The model as the sampler computes it: with joined matrices, in few operations.

A token step has only one row for each answer, so starting an operation takes as long as carrying it
out, and fewer operations are faster. These are the matrix products of a layer (D is the width, I
the width of the MLP, H and K the numbers of query and key heads):

    qwen2_model.py            here
    q_proj, k_proj, v_proj    qkv (D, (H + 2 K) * head_dim); q and k are then rotated together
    o_proj, + x               o (H * head_dim, D); the same call adds x
    gate_proj, up_proj        gate_up (D, 2 I)
    down_proj, + x            down (I, D); the same call adds x

A matrix is stored in the type of its products, as (inputs, outputs), because in this layout a
product with few rows reads it fastest. In float32 the norm's weight is multiplied into the matrix
that follows it: the weight of input i scales line i. In bfloat16 it is kept apart, so that the
sampler rounds the same matrix as training does. Otherwise the sampler would round the product of
matrix and weight. A small update could change this product without changing the rounded matrix of
the model, and so change what is sampled but not what is trained. The results are those of the
model, apart from rounding.

On a GPU, in bfloat16, `token_states` of lab/gpu/kernels.py computes a token step with these
matrices in place of `hidden`.

If the hidden states have PACKED numbers or more, a CPU multiplies with matrices in oneDNN's own
layout. lab/LOG.md says how much faster it is. (torch's compiler, inductor, uses this
layout for frozen weights.)
"""
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.engine.model import Qwen2, at_least_float32, product_type, rotary, rotate
from qwen2_model import Block, RMSNorm

AttendJoined = Callable[[int, Tensor, Tensor], Tensor]  # layer, q, k and v in one tensor
PACKED, PACKED_TYPES = 512, (torch.float32, torch.bfloat16)


class Joined(NamedTuple):
    """A matrix (inputs, outputs), and what LoRA adds to it: a (inputs, r) @ b (r, outputs). If it
    joins several matrices, their ranks stand side by side in a, and b is zero outside its blocks.
    """
    matrix: Tensor
    low_rank: tuple[Tensor, Tensor] | None = None


@dataclass
class FusedLayer:
    """The matrices of one layer."""
    qkv: Joined               # (D, (H + 2 K) * head_dim)
    qkv_bias: Tensor | None   # Qwen2 has it
    qk_norm: Tensor | None    # Qwen3 has it: (H + K, head_dim)
    o: Joined                 # (H * head_dim, D)
    gate_up: Joined           # (D, 2 I)
    down: Joined              # (I, D)
    norms: list[Tensor | None]  # of qkv and gate_up; None in float32, as the matrices contain them


class FusedQwen2:
    """A copy of a Qwen2 to sample from."""

    def __init__(self, model: Qwen2, longest: int):
        """`longest` is the number of positions that may be used."""
        self.config = model.config
        self.dtype = model.compute_dtype
        self.wide = at_least_float32(self.dtype)  # the type of x between the layers
        self.has_kernels = (has_kernels(self.dtype, model.device)
                            and self.config.head_dim in (32, 64, 128))
        # with kernels the norms' weights are kept apart, as they always are in bfloat16
        self.is_mixed = self.dtype != self.wide or self.has_kernels
        self.product_type = product_type(self.dtype, model.output_matrix.device)
        self.is_packed = (model.device.type == "cpu" and torch.backends.mkldnn.is_available()
                          and self.product_type in PACKED_TYPES
                          and self.config.hidden_size >= PACKED)
        # Whether the lines of `o` are in the order (H / K, K), which saves a copy in `hidden`. In
        # float32 they keep the model's order (K, H / K), because then sums are added up in the
        # order in which the model adds them.
        self.swaps_heads = self.is_mixed and not self.is_packed and not self.has_kernels
        self.output = Joined(once_if_frozen(model.output_matrix, self.output_of))
        self.embeddings = model.model.embed_tokens.weight.detach()
        self.layers = [self.fuse_layer(layer) for layer in model.model.layers
                       if isinstance(layer, Block)]
        self.norm = self.weight_of(model.model.norm)
        epsilon = self.norm.new_tensor(self.config.rms_norm_eps)
        self.sqrt_n_eps = {n: (n * epsilon).sqrt()  # for `normed`
                           for n in (self.config.hidden_size, self.config.head_dim)}
        positions = torch.arange(longest, device=self.embeddings.device)
        cos_sin = rotary(positions, self.config, self.wide)
        self.cos_sin = torch.stack(cos_sin, 1)  # (longest, 2, 1, head_dim)

    def fuse_layer(self, layer: Block) -> FusedLayer:
        H, K = self.config.num_attention_heads, self.config.num_key_value_heads
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        bias = norm = None
        if attention.q_proj.bias is not None:
            bias = torch.cat([part.bias.detach() for part in qkv]).to(self.dtype)
        if hasattr(attention, "q_norm"):
            norm = torch.cat([self.weight_of(attention.q_norm).expand(H, -1),
                              self.weight_of(attention.k_norm).expand(K, -1)])
        o = self.fuse([attention.o_proj])
        if self.swaps_heads:
            def swapped(inputs_first: Tensor) -> Tensor:
                by_heads: Tensor = inputs_first.unflatten(0, (K, H // K, -1))
                return by_heads.transpose(0, 1).flatten(0, 2)
            low_rank = o.low_rank and (swapped(o.low_rank[0]), o.low_rank[1])
            o = Joined(swapped(o.matrix), low_rank)
        before = [layer.input_layernorm, layer.post_attention_layernorm]
        gate_up = self.fuse([mlp.gate_proj, mlp.up_proj], before[1])
        norms = [self.weight_of(one) if self.is_mixed else None for one in before]
        return FusedLayer(self.fuse(qkv, before[0]), bias, norm, o, gate_up,
                          self.fuse([mlp.down_proj]), norms)

    def output_of(self, matrix: Tensor) -> Tensor:
        output: Tensor = matrix.detach().to(self.dtype).to(self.product_type)  # (V, D)
        return self.packed(output) if self.is_packed else output.t()

    def fuse(self, parts: list[nn.Linear], norm: RMSNorm | None = None) -> Joined:
        """The joined matrix of the parts, (inputs, outputs of all parts)."""
        weight = None if norm is None or self.is_mixed else self.weight_of(norm)

        def join(_: Tensor) -> Tensor:
            weights = [part.weight.detach() for part in parts]
            if self.is_mixed:
                weights = [weight.to(self.dtype) for weight in weights]
            matrix = torch.cat(weights) if weights[1:] else weights[0]
            if weight is not None:
                matrix = matrix * weight  # (outputs, inputs)
            matrix = matrix.to(self.dtype).to(self.product_type)
            return self.packed(matrix) if self.is_packed else matrix.t().contiguous()

        return Joined(once_if_frozen(parts[0].weight, join), self.join_low_rank(parts, weight))

    def join_low_rank(self, parts: list[nn.Linear], norm: Tensor | None
                      ) -> tuple[Tensor, Tensor] | None:
        """What LoRA adds to the parts, rounded as training rounds it."""
        if not hasattr(parts[0], "A"):
            return None
        added = cast(list[Any], parts)  # LoRALinear
        a = torch.cat([part.A.detach() for part in added])
        if norm is not None:
            a = a * norm
        b = torch.block_diag(*(part.scale * part.B.detach() for part in added))
        a, b = (x.to(self.dtype).to(self.product_type).t().contiguous() for x in (a, b))
        return a, b

    def packed(self, matrix: Tensor) -> Tensor:
        """A matrix (outputs, inputs) in oneDNN's layout, which only `_linear_pointwise` reads."""
        result: Tensor = torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous())
        return result

    def weight_of(self, norm: RMSNorm) -> Tensor:
        """The norm's weight, times the sqrt(n) that `normed` leaves out in float32."""
        weight = norm.weight.detach().to(self.wide)
        return weight if self.is_mixed else weight * len(weight) ** 0.5

    def normed(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """RMSNorm over the last axis, of n numbers. In mixed precision it is torch's own, which is
        a single kernel on a GPU. In float32 it is x / sqrt(|x|^2 + n eps), because this is faster
        on a CPU. It leaves out a factor sqrt(n), which `weight_of` has put into the weight."""
        if self.is_mixed:
            return F.rms_norm(x, x.shape[-1:], weight, self.config.rms_norm_eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        x = x / torch.hypot(length, self.sqrt_n_eps[x.shape[-1]])  # hypot(a, b) = sqrt(a^2 + b^2)
        return x if weight is None else x * weight

    def hidden(self, ids: Tensor, positions: Tensor, attend: AttendJoined) -> Tensor:
        """(N,) ids and positions -> (N, D), as `Decoder.forward` computes it. `attend` gets keys
        and values as one tensor (N, 2 K, head_dim) and returns (N, K, H / K, head_dim)."""
        x = F.embedding(ids, self.embeddings).to(self.wide)
        cos, sin = self.cos_sin[positions].unbind(1)
        for number, layer in enumerate(self.layers):
            q, kv = self.heads(layer, self.normed(x, layer.norms[0]), cos, sin)
            attended = attend(number, q, kv)
            if self.swaps_heads:  # so that the flattening below copies nothing
                attended = attended.transpose(1, 2)
            x = self.add_product(x, attended.flatten(1), layer.o)
            normed = self.normed(x, layer.norms[1])
            gate, up = self.product(normed, layer.gate_up).chunk(2, -1)
            x = self.add_product(x, F.silu(gate).mul_(up), layer.down)
        return self.normed(x, self.norm).to(self.dtype)

    def heads(self, layer: FusedLayer, x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
        """Queries (N, H, head_dim), and keys and values side by side (N, 2 K, head_dim)."""
        H, K = self.config.num_attention_heads, self.config.num_key_value_heads
        qkv = self.product(x, layer.qkv, layer.qkv_bias).view(len(x), -1, self.config.head_dim)
        qk = qkv[:, :H + K]
        if layer.qk_norm is None:
            rotate(qk, cos, sin, out=qk)
        else:
            rotate(self.normed(qk.to(self.wide)) * layer.qk_norm, cos, sin, out=qk)
        return [qkv[:, :H], qkv[:, H:]]

    def product(self, x: Tensor, joined: Joined, bias: Tensor | None = None) -> Tensor:
        """x @ matrix + bias. Both factors and the result are rounded to the compute type."""
        x = x.to(self.dtype).to(self.product_type)
        bias = None if bias is None else bias.to(x.dtype)
        product: Tensor
        if self.is_packed:
            product = torch.ops.mkldnn._linear_pointwise(x, joined.matrix, bias, "none", [], "")
        else:
            product = x @ joined.matrix if bias is None else torch.addmm(bias, x, joined.matrix)
        product = product.to(self.dtype)
        if joined.low_rank:
            a, b = joined.low_rank
            inner = (x @ a).to(self.dtype).to(b.dtype)
            product = product.to(b.dtype).addmm_(inner, b).to(self.dtype)
        return product

    def add_product(self, x: Tensor, y: Tensor, joined: Joined) -> Tensor:
        """x += y @ matrix, in a single call if there is one for these types."""
        y, matrix = y.to(self.product_type), joined.matrix
        if joined.low_rank:
            return x.add_(self.product(y, joined))
        if self.is_packed:
            added: Tensor = torch.ops.mkldnn._linear_pointwise(y, matrix, None, "none", [], "")
            return x.add_(added)
        if x.dtype == y.dtype:
            return x.addmm_(y, matrix)
        if adds_to_float32(x.device):
            return torch.addmm(x, y, matrix, out_dtype=x.dtype, out=x)
        return x.add_(y @ matrix)

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, D) -> (N, V)"""
        return self.product(hidden, self.output)


def once_if_frozen(matrix: Tensor, lay_out: Callable[[Tensor], Tensor]) -> Tensor:
    """The matrix as the sampler reads it. Where LoRA has frozen it, it is laid out once, and kept
    beside the matrix."""
    if not getattr(matrix, "is_frozen", False):
        return lay_out(matrix)
    if not hasattr(matrix, "laid_out"):
        matrix.laid_out = lay_out(matrix)  # type: ignore[attr-defined]
    laid_out: Tensor = matrix.laid_out  # type: ignore[attr-defined]
    return laid_out


@cache
def has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether lab/gpu/kernels.py computes token steps and losses there: on CUDA, in bfloat16, if
    Triton is installed."""
    return (device.type == "cuda" and dtype == torch.bfloat16
            and find_spec("triton") is not None)


@cache
def adds_to_float32(device: torch.device) -> bool:
    """Whether `addmm` adds a product in bfloat16 to float32, as it does on CUDA in newer versions
    of torch. It is found out by trying, because the signature does not say."""
    x = torch.ones(16, 16, device=device)
    try:
        y = x.bfloat16()
        return bool((torch.addmm(x, y, y, out_dtype=x.dtype, out=x) == 17).all())
    except (RuntimeError, TypeError):
        return False
