"""Operations of a step, and the bytes that it moves: what no implementation can avoid.

Each problem's prompt once, only those pairs of tokens that see each other, the output matrix only
where a token is predicted, all weights once for each token of the longest answer. The letters are
explained in shapes.py.
"""
from typing import NamedTuple

from benchmarks.bytes_kept import kept, tokens_at_once, total
from benchmarks.shapes import (Batch, cached_bytes, head_widths, layer_matrices,
                               multiplied_matrices, parameters)
from qwen2_model import ModelConfig


class Work(NamedTuple):
    """What a part of the step takes."""
    operations: float  # an addition and a multiplication are two
    bytes: float       # read and written

    def seconds(self, rate: float, bandwidth: float) -> float:
        """As long as the slower of the two needs."""
        return max(self.operations / rate, self.bytes / bandwidth)


def prompt_pairs(batch: Batch) -> int:
    """Pairs of a prompt's tokens that see each other."""
    return sum(length * (length + 1) // 2 for length in batch.prompts)


def answer_pairs(batch: Batch) -> int:
    """A prompt and n tokens after it: the j-th of them sees the prompt and j of the n."""
    pairs = 0
    for row, n in enumerate(batch.fed):
        prompt = batch.prompts[batch.question(row)]
        pairs += prompt * n + n * (n + 1) // 2
    return pairs


def layer_operations(config: ModelConfig, tokens: int, pairs: int) -> int:
    """Operations of all layers forward. Each pair takes part in two products over A numbers."""
    A, _ = head_widths(config)
    of_matrices = 2 * layer_matrices(config) * tokens
    of_attention = 4 * A * pairs
    return config.num_hidden_layers * (of_matrices + of_attention)


def output_operations(config: ModelConfig, tokens: int) -> int:
    return 2 * config.vocab_size * config.hidden_size * tokens


def rollout_work(config: ModelConfig, batch: Batch) -> dict[str, Work]:
    weights = multiplied_matrices(config) * batch.number_bytes
    cache = cached_bytes(config, batch.number_bytes)
    tokens, steps = sum(batch.fed), max(batch.fed)
    prompts = (layer_operations(config, sum(batch.prompts), prompt_pairs(batch))
               + output_operations(config, len(batch.prompts)))
    answers = (layer_operations(config, tokens, answer_pairs(batch))
               + output_operations(config, tokens))
    return {
        "prompts": Work(prompts, weights + cache * sum(batch.prompts)),
        "answers": Work(answers, weights * steps + cache * cached_tokens_read(batch)),
    }


def cached_tokens_read(batch: Batch) -> int:
    """Tokens whose keys and values are read while answers are sampled.

    Each answer reads its own; the prompt's are read once a step for all answers to the problem.
    """
    own = sum(n * (n + 1) // 2 for n in batch.fed)
    longest = [0] * len(batch.prompts)
    for row, n in enumerate(batch.fed):
        question = batch.question(row)
        longest[question] = max(longest[question], n)
    shared = sum(prompt * steps for prompt, steps in zip(batch.prompts, longest))
    return own + shared


def update_work(config: ModelConfig, batch: Batch) -> dict[str, Work]:
    """Backward is twice forward: a product has a gradient on either side."""
    parts = batch.micro_batches()
    n = parameters(config)
    forward = (output_operations(config, sum(batch.answers))
               + layer_operations(config, batch.tokens, prompt_pairs(batch) + answer_pairs(batch)))
    weights = multiplied_matrices(config) * batch.number_bytes
    activations = sum(total(kept(config, part)) for part in parts)  # written once, read once
    gradient = n * (batch.number_bytes + 2 * 4)  # made, and added to the sum in float32
    adamw = 7 * 4 * n  # parameter, gradient and moments are read, all but the gradient written
    return {
        "forward": Work(forward, weights * len(parts) + activations),
        "backward": Work(2 * forward, (weights + gradient) * len(parts) + activations),
        "AdamW": Work(12 * n, adamw),
    }


def recomputed_work(config: ModelConfig, batch: Batch) -> dict[str, Work]:
    """What is computed a second time to keep less; no part of the floor."""
    parts = batch.micro_batches()
    tokens = [sum(part.answers) for part in parts]
    chunked = sum(count for count in tokens if count > tokens_at_once(config))
    operations = output_operations(config, chunked)
    if batch.checkpointing:
        pairs = prompt_pairs(batch) + answer_pairs(batch)
        operations += layer_operations(config, batch.tokens, pairs)
    if not operations:
        return {}
    weights = multiplied_matrices(config) * batch.number_bytes
    return {"forward again": Work(operations, weights * len(parts))}
