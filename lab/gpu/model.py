"""The model as a GPU samples from it: that of lab/gpu/fused.py, with other operations where a
GPU has one kernel for what a CPU does in several. In bfloat16, and if Triton is there,
`token_states` of lab/gpu/kernels.py computes a token step with the same matrices."""
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from lab.gpu.fused import FusedQwen2, Joined
from lab.engine.model import Qwen2


class ModelOnGPU(FusedQwen2):
    def __init__(self, model: Qwen2, longest: int):
        super().__init__(model, longest)
        self.has_kernels = (has_kernels(self.dtype, model.device)
                            and self.config.head_dim in (32, 64, 128))

    def add_product(self, x: Tensor, y: Tensor, joined: Joined) -> Tensor:
        """In bfloat16 a single call adds the product to x, which is in float32."""
        is_mixed = x.dtype != self.dtype and joined.low_rank is None
        if is_mixed and adds_to_float32(x.device):
            return torch.addmm(x, y, joined.matrix, out_dtype=x.dtype, out=x)
        return super().add_product(x, y, joined)


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
