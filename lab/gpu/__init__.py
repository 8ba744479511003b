"""What a GPU computes in another way than qwen2_model.py and lab/engine, because it is faster:
kernels in Triton, joined matrices, and a token step that is recorded once and replayed, with a
sampler and a cache of its own. Tests compare what it samples with lab/engine's. No line of
lab/engine names this room.

`open_room` puts two functions of this room in the place of the engine's, for the whole process.
Each of them looks at its arguments, and calls the engine's function for a model that is not on a
GPU. Only lab/harness/build.py calls it, for --device cuda. The room stays closed if something of
qwen2_model.py was edited that it has another form of (forms.py). Then, as without this room, a GPU
computes with the functions of the book, in plain torch.
"""
import torch
from torch import Tensor

import lab.engine.log_probs
import lab.engine.sampler
from lab.engine.errors import say
from lab.engine.model import Qwen2
from lab.engine.sampler import Generation, Reply, Sampling, Start
from lab.gpu.forms import edited

plain_sample = lab.engine.sampler.sample
plain_log_probs = lab.engine.log_probs.token_log_probs


def open_room() -> None:
    """Or close it, and say which of the two in one sentence."""
    if names := edited():
        say(f"lab/gpu stays closed, because {', '.join(names)} (qwen2_model.py) was edited, of "
            "which it has another form. So the GPU runs the book's functions, which is slower")
        lab.engine.sampler.sample = plain_sample
        lab.engine.log_probs.token_log_probs = plain_log_probs
        return
    say("lab/gpu is open: on this GPU answers are sampled in a faster way than qwen2_model.py's, "
        "and so are log-probs computed in bfloat16")
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
