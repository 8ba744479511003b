"""How long a step of a large model takes on this CPU, before there is one."""
import time

import torch

from lab.engine.policy import Policy, encode_prompts
from lab.engine.model import is_fast_in_bfloat16

ROWS = 512     # of the product that stands for an update
MATRICES = 12  # in a row, because a single one may stay in the processor's cache


def about_cost(policy: Policy) -> str:
    """A sentence about how long a step of this model takes here, if its answers are as long as they
    may be.

    Sampling reads every matrix for each token, with a row for each answer. An update reads the
    tokens of prompts and answers forward, and backward for its inputs and, without LoRA, for the
    matrices. What is no matrix product is not counted: it took a fifth of this time in float32, and
    as long again in bfloat16.
    """
    s, config = policy.settings, policy.model.config
    prompt, *_ = encode_prompts(policy.tokenizer, policy.task, policy.task.extreme_problems()[:1])
    size = config.hidden_size, config.intermediate_size
    of_model = sum(one.numel() for one in policy.model.parameters() if one.dim() > 1)
    answers = s.questions * s.answers
    dtype = policy.model.compute_dtype
    sampling = s.max_new_tokens * seconds_of_product(answers, *size, dtype)
    tokens = s.questions * len(prompt) + answers * s.max_new_tokens
    passes = 2 if s.lora else 3
    update = passes * tokens / ROWS * seconds_of_product(ROWS, *size, dtype)
    seconds = (sampling + update) * of_model / (size[0] * size[1])
    without = "" if is_fast_in_bfloat16() else ", which has no fast bfloat16"
    return (f"a step whose answers have {s.max_new_tokens} tokens will take about {seconds:.0f} s "
            f"or more on this CPU{without}, by two matrix products of the model's size. With "
            "shorter answers it takes less")


def seconds_of_product(rows: int, inner: int, outer: int, dtype: torch.dtype) -> float:
    """The seconds of a matrix product, in the fastest of three tries."""
    left = torch.ones(rows, inner, dtype=dtype)
    right = torch.ones(MATRICES, outer, inner, dtype=dtype)
    seconds = []
    for _ in range(4):  # the first one is slower
        start = time.perf_counter()
        for matrix in right:
            torch.nn.functional.linear(left, matrix)
        seconds.append((time.perf_counter() - start) / MATRICES)
    return min(seconds[1:])
