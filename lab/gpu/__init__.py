"""What a GPU computes in another way than lab/engine, because it is faster there: kernels in
Triton, joined matrices, and a token step that is recorded once and replayed, with a sampler and a
cache of its own. Tests compare what it samples with lab/engine's. No line of lab/engine names this
room. Without it `--device cuda` computes with the engine's functions, in plain torch.

`install` puts two functions of this room in the place of the engine's, for the whole process.
Each of them looks at its arguments, and calls the engine's function for a model that is not on a
GPU. Only lab/harness/build.py calls it, for --device cuda.
"""
import torch
from torch import Tensor

import lab.engine.log_probs
import lab.engine.sampler
from lab.engine.model import Qwen2
from lab.engine.sampler import Generation, Reply, Sampling, Start

plain_sample = lab.engine.sampler.sample
plain_log_probs = lab.engine.log_probs.token_log_probs


def install() -> None:
    lab.engine.sampler.sample = sample
    lab.engine.log_probs.token_log_probs = token_log_probs


def sample(model: Qwen2, prompts: list[list[int]], starts: list[Start], limit: Tensor,
           generator: torch.Generator, sampling: Sampling, reply: Reply | None) -> Generation:
    """In the place of `sample` in lab/engine/sampler.py."""
    if model.device.type != "cuda":
        return plain_sample(model, prompts, starts, limit, generator, sampling, reply)
    from lab.gpu.sampler import sample_on_gpu
    return sample_on_gpu(model, prompts, starts, limit, generator, sampling, reply)


def token_log_probs(model: Qwen2, states: Tensor, ids: Tensor) -> Tensor:
    """In the place of `token_log_probs` in lab/engine/log_probs.py."""
    from lab.gpu.model import has_kernels
    if not has_kernels(states.dtype, states.device):
        return plain_log_probs(model, states, ids)
    from lab.gpu.kernels import LogProbsByKernels
    log_prob: Tensor = LogProbsByKernels.apply(states, model.output_matrix, ids)
    return log_prob
