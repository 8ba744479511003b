"""The model as a GPU's sampler computes it: with joined matrices, in few operations.

A token step has only one row for each answer, so starting an operation takes as long as carrying it
out, and fewer operations are faster. These are the matrix products of a layer (D is the width, I
the width of the MLP, H and K the numbers of query and key heads):

    qwen2_model.py            here
    q_proj, k_proj, v_proj    qkv (D, (H + 2 K) * head_dim); q and k are then rotated together
    o_proj                    o (H * head_dim, D)
    gate_proj, up_proj        gate_up (D, 2 I)
    down_proj                 down (I, D)

A matrix is stored in the type of its products, as (inputs, outputs), because in this layout a
product with few rows reads it fastest. The results are those of the model, apart from rounding.
"""
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.engine.model import Qwen2, at_least_float32, product_type
from qwen2_model import Block, RMSNorm, rotary

AttendJoined = Callable[[int, Tensor, Tensor], Tensor]  # layer, q, k and v in one tensor


class Joined(NamedTuple):
    """A matrix (inputs, outputs), and what LoRA adds to it: a (inputs, r) @ b (r, outputs). If it
    joins several matrices, their ranks stand side by side in a, and b is zero outside its blocks.
    """
    matrix: Tensor
    low_rank: tuple[Tensor, Tensor] | None = None
    bias: Tensor | None = None


class FusedLayer(NamedTuple):
    """The matrices of one layer."""
    before: Tensor           # the norms
    qkv: Joined              # (D, (H + 2 K) * head_dim)
    qk_norm: Tensor | None   # Qwen3 has it: (H + K, head_dim)
    o: Joined                # (H * head_dim, D)
    after: Tensor
    gate_up: Joined          # (D, 2 I)
    down: Joined             # (I, D)


class FusedQwen2:
    """A copy of a Qwen2 to sample from."""

    def __init__(self, model: Qwen2, longest: int):
        """`longest` is the number of positions that may be used."""
        self.config, self.dtype = model.config, model.compute_dtype
        self.wide = at_least_float32(self.dtype)  # the type of x between the layers
        self.product_type = product_type(self.dtype, model.device)
        self.embeddings = model.model.embed_tokens.weight.detach()
        self.output = Joined(once_if_frozen(model.output_matrix, lambda matrix: self.laid_out(
            matrix.detach(), copies=False)))
        self.layers = [self.fuse_layer(layer) for layer in model.model.layers
                       if isinstance(layer, Block)]
        self.norm = self.weight_of(model.model.norm)
        cos_sin = [x.to(self.wide) for x in rotary(
            torch.arange(longest, device=model.device), self.config)]
        self.cos_sin = torch.stack(cos_sin, 1)  # (longest, 2, 1, head_dim)

    def fuse_layer(self, layer: Block) -> FusedLayer:
        attention, mlp, norm = layer.self_attn, layer.mlp, None
        q_norm, k_norm = attention.q_norm, attention.k_norm
        if isinstance(q_norm, RMSNorm) and isinstance(k_norm, RMSNorm):
            H, K = self.config.num_attention_heads, self.config.num_key_value_heads
            norm = torch.cat([self.weight_of(q_norm).expand(H, -1),
                              self.weight_of(k_norm).expand(K, -1)])
        return FusedLayer(
            self.weight_of(layer.input_layernorm),
            self.fuse(attention.q_proj, attention.k_proj, attention.v_proj), norm,
            self.fuse(attention.o_proj), self.weight_of(layer.post_attention_layernorm),
            self.fuse(mlp.gate_proj, mlp.up_proj), self.fuse(mlp.down_proj))

    def fuse(self, *parts: nn.Linear) -> Joined:
        """The joined matrix of the parts, (inputs, outputs of all parts)."""
        matrix = once_if_frozen(parts[0].weight, lambda _: self.laid_out(torch.cat(
            [part.weight.detach().to(self.dtype) for part in parts])))
        bias = None
        if parts[0].bias is not None:
            bias = torch.cat([part.bias.detach() for part in parts])
            bias = bias.to(self.dtype).to(self.product_type)
        if not hasattr(parts[0], "A"):
            return Joined(matrix, None, bias)
        added = cast(list[Any], parts)  # LoRALinear: A and B, rounded as training rounds them
        a = torch.cat([part.A.detach() for part in added])
        b = torch.block_diag(*(part.scale * part.B.detach() for part in added))
        a, b = (x.to(self.dtype).to(self.product_type).t().contiguous() for x in (a, b))
        return Joined(matrix, (a, b), bias)

    def laid_out(self, matrix: Tensor, copies: bool = True) -> Tensor:
        """A matrix (outputs, inputs) as `product` reads it."""
        matrix = matrix.to(self.dtype).to(self.product_type)
        inputs_first: Tensor = matrix.t()
        return inputs_first.contiguous() if copies else inputs_first

    def weight_of(self, norm: RMSNorm) -> Tensor:
        return norm.weight.detach().to(self.wide)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = self.config.rms_norm_eps
        if weight.dim() == 1:
            return F.rms_norm(x, weight.shape, weight, eps)
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight  # a weight for each head

    def hidden(self, ids: Tensor, positions: Tensor, attend: AttendJoined) -> Tensor:
        """(N,) ids and positions -> (N, D), as `Decoder.forward` computes it. `attend` gets keys
        and values as one tensor (N, 2 K, head_dim) and returns (N, K, H / K, head_dim)."""
        H, K = self.config.num_attention_heads, self.config.num_key_value_heads
        x = F.embedding(ids, self.embeddings).to(self.wide)
        cos, sin = self.cos_sin[positions].unbind(1)
        for number, layer in enumerate(self.layers):
            qkv = self.product(self.normed(x, layer.before), layer.qkv)
            qkv = qkv.view(len(x), -1, self.config.head_dim)
            qk = qkv[:, :H + K]
            unturned = qk if layer.qk_norm is None else self.normed(qk.to(self.wide), layer.qk_norm)
            torch.addcmul(unturned * cos, unturned.roll(unturned.shape[-1] // 2, -1), sin, out=qk)
            attended = attend(number, qkv[:, :H], qkv[:, H:])
            x = self.add_product(x, attended.flatten(1), layer.o)
            gate, up = self.product(self.normed(x, layer.after), layer.gate_up).chunk(2, -1)
            x = self.add_product(x, F.silu(gate).mul_(up), layer.down)
        return self.normed(x, self.norm).to(self.dtype)

    def product(self, x: Tensor, joined: Joined) -> Tensor:
        """x @ matrix + bias. Both factors and the result are rounded to the compute type."""
        x = x.to(self.dtype).to(self.product_type)
        product: Tensor
        if joined.bias is None:
            product = x @ joined.matrix
        else:
            product = torch.addmm(joined.bias, x, joined.matrix)
        product = product.to(self.dtype)
        if joined.low_rank:
            a, b = joined.low_rank
            inner = (x @ a).to(self.dtype).to(b.dtype)
            product = product.to(b.dtype).addmm_(inner, b).to(self.dtype)
        return product

    def add_product(self, x: Tensor, y: Tensor, joined: Joined) -> Tensor:
        """x += y @ matrix, in a single call if there is one for these types."""
        if x.dtype == y.dtype == self.product_type and not joined.low_rank:
            return x.addmm_(y, joined.matrix)
        return x.add_(self.product(y, joined))

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, D) -> (N, V)"""
        return self.product(hidden, self.output)


def once_if_frozen(matrix: Tensor, lay_out: Callable[[Tensor], Tensor]) -> Tensor:
    """The matrix as the sampler reads it. Where LoRA has frozen it, it is laid out once, and kept
    beside the matrix."""
    if not getattr(matrix, "is_frozen", False):
        return lay_out(matrix)
    if not hasattr(matrix, "joined"):
        matrix.joined = lay_out(matrix)  # type: ignore[attr-defined]
    joined: Tensor = matrix.joined  # type: ignore[attr-defined]
    return joined
