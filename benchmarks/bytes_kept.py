"""Bytes that a step keeps on the device, tensor by tensor. The tests count the tensors.

This is what the implementation keeps for the largest micro-batch of the update, not a lower
bound. On a GPU the norms keep a tensor less, and keys and values are repeated for every query head:
that is read off the code, not measured. The letters are explained in shapes.py.
"""
from benchmarks.shapes import (Batch, all_matrices, cached_bytes, head_widths, layer_matrices,
                               parameters)
from engine import forward
from engine.cache import FIRST_SLOTS
from engine.packing import SharedPrompts
from qwen2_model import ModelConfig


def total(parts: dict[str, int]) -> int:
    return sum(parts.values())


def tokens_at_once(config: ModelConfig) -> int:
    """Logits of more tokens than these are computed in chunks, and their probabilities not kept."""
    return max(1, forward.LOGITS_AT_ONCE // config.vocab_size)


def attention_blocks(part: Batch) -> list[tuple[int, int]]:
    """(answers, longest answer) of each block that attention is computed for at once."""
    fed = sorted(length for length in part.fed if length)
    starts = range(0, len(fed), SharedPrompts.ROWS)
    blocks = [fed[start:start + SharedPrompts.ROWS] for start in starts]
    return [(len(block), max(block)) for block in blocks]


def kept(config: ModelConfig, part: Batch) -> dict[str, int]:
    """Bytes that autograd keeps from the forward to the backward pass of one micro-batch."""
    D = config.hidden_size
    answer_tokens = sum(part.answers)
    layer = 4 * D * part.tokens if part.checkpointing else total(kept_in_layer(config, part))
    cosines_and_sines = 8 * config.head_dim
    final_norm = D * (8 if part.device == "cpu" else 4) + 4
    at_once = answer_tokens <= tokens_at_once(config)
    return {
        "layers": config.num_hidden_layers * layer,
        "final norm": part.tokens * (final_norm + cosines_and_sines),
        "states that predict": part.number_bytes * D * answer_tokens,
        "probabilities": 4 * config.vocab_size * answer_tokens if at_once else 0,
    }


def kept_in_layer(config: ModelConfig, part: Batch) -> dict[str, int]:
    """Bytes that autograd keeps of one layer, for one micro-batch."""
    A, C = head_widths(config)
    b, N = part.number_bytes, part.tokens
    Q, P = len(part.prompts), max(part.prompts)
    blocks = attention_blocks(part)
    query_rows = Q * P + sum(rows * longest for rows, longest in blocks)
    # every answer has its keys and values in a row with the prompt's
    seen = sum(rows * (P + longest) for rows, longest in blocks)
    seen_width = C if part.device == "cpu" else A
    log_normaliser = 4 * config.num_attention_heads * query_rows
    mask_numbers = sum(longest * rows * (P + longest) for rows, longest in blocks)
    return {
        "norms": N * norm_bytes(config, part),
        "queries": b * A * query_rows,
        "keys and values": 2 * b * (C * Q * P + seen_width * seen),
        "mixed values": b * A * (query_rows + N) + log_normaliser,  # in rows, and end to end
        "mask": b * mask_numbers,                                   # as numbers to be added
        "MLP": 4 * b * config.intermediate_size * N,                # gate, silu, up, product
        "converted matrices": layer_matrices(config) * b if part.converts else 0,
    }


def norm_bytes(config: ModelConfig, part: Batch) -> int:
    """Bytes that the norms of a layer keep of a token. Norms always work in float32."""
    A, C = head_widths(config)
    scaled = 4 if part.device == "cpu" else 0  # x / rms(x), which the fused kernel makes again
    of_a_number = 4 + scaled + part.number_bytes  # x, perhaps scaled, what comes out
    one_norm = config.hidden_size * of_a_number + 4  # and 1 / rms(x)
    bytes_of_norms = 2 * one_norm
    if config.model_type == "qwen3":
        bytes_of_norms += (A + C) * (4 + scaled) + 4 * (A + C) // config.head_dim
    return bytes_of_norms


def fullest(config: ModelConfig, part: Batch) -> dict[str, int]:
    """Bytes by part at the fullest moment of a micro-batch's backward pass.

    It begins at the output matrix, goes down through the layers and ends at the embeddings. With
    tied weights the first gradient waits for the last, and their sum is a third.
    """
    moments = [at_output_matrix(config, part), inside_a_layer(config, part),
               at_embeddings(config, part)]
    if part.shards > 1:
        moments.append(while_added_up(config, part))
    if sum(part.answers) > tokens_at_once(config):
        moments.append(between_two_chunks(config, part))
    return max(moments, key=total)


def activations(config: ModelConfig, part: Batch) -> int:
    everything = kept(config, part)
    return total(everything) - everything["probabilities"]


def gradient_of_matrix(config: ModelConfig, part: Batch) -> int:
    """Bytes of the sum of the gradients of a (V, D) matrix."""
    summed_in = part.number_bytes if part.offload_optimizer or part.shards > 1 else 4
    return summed_in * config.vocab_size * config.hidden_size


def logit_bytes(part: Batch) -> int:
    """Bytes of a logit's gradient: made in float32, and converted where the products are not."""
    converted = part.number_bytes if part.number_bytes < 4 else 0
    return 4 + converted


def states_and_their_gradient(config: ModelConfig, part: Batch) -> int:
    return 2 * part.number_bytes * config.hidden_size * sum(part.answers)


def at_output_matrix(config: ModelConfig, part: Batch) -> dict[str, int]:
    V, D = config.vocab_size, config.hidden_size
    chunk = min(sum(part.answers), tokens_at_once(config))
    # the probabilities become their own gradient, unless they were kept
    logits = V * chunk * logit_bytes(part) + kept(config, part)["probabilities"]
    added = part.number_bytes * V * D
    return {
        "activations": activations(config, part),
        "logits and their gradient": logits + states_and_their_gradient(config, part),
        "gradient being made": gradient_of_matrix(config, part) + added,
    }


def between_two_chunks(config: ModelConfig, part: Batch) -> dict[str, int]:
    """A chunk's logits come, and are made float32, while the gradient of the last one is there."""
    tokens, chunk = sum(part.answers), tokens_at_once(config)
    both = chunk + min(chunk, tokens - chunk)
    logits = config.vocab_size * both * logit_bytes(part)
    return {
        "activations": activations(config, part),
        "logits and their gradient": logits + states_and_their_gradient(config, part),
        "gradient being made": gradient_of_matrix(config, part),
    }


def inside_a_layer(config: ModelConfig, part: Batch) -> dict[str, int]:
    made_again = total(kept_in_layer(config, part)) if part.checkpointing else 0
    mlp = part.number_bytes * config.intermediate_size * part.tokens
    waiting = gradient_of_matrix(config, part) if config.tie_word_embeddings else 0
    return {
        "activations": activations(config, part),
        "a layer's backward pass": made_again + mlp,
        "gradient being made": waiting,
    }


def at_embeddings(config: ModelConfig, part: Batch) -> dict[str, int]:
    count = 3 if config.tie_word_embeddings else 1
    return {"gradient being made": count * gradient_of_matrix(config, part)}


def while_added_up(config: ModelConfig, part: Batch) -> dict[str, int]:
    """With --shard: the gradient of the output matrix goes to the other processes in float32, at
    once, or where it is that of the embeddings, too, at the end."""
    in_float32 = 4 * config.vocab_size * config.hidden_size
    is_tied = config.tie_word_embeddings
    return {
        "activations": 0 if is_tied else activations(config, part),
        "gradient being made": gradient_of_matrix(config, part) + in_float32,
    }


def made_whole(config: ModelConfig, batch: Batch) -> int:
    """With --shard, bytes of what is not a part during an update: embeddings and output matrix; of
    layers one in use and one on its way, which is there twice; and the gradients of one being made
    and of one being added up, in float32."""
    b, layer = batch.number_bytes, layer_matrices(config)
    beside_layers = all_matrices(config) - config.num_hidden_layers * layer
    return b * (beside_layers + 3 * layer) + (b + 4) * layer


def memory(config: ModelConfig, batch: Batch) -> dict[str, dict[str, int]]:
    """Bytes by part on the device, during a rollout and during an update at its fullest."""
    held = held_throughout(config, batch)
    update = max((fullest(config, part) for part in batch.micro_batches()), key=total)
    if batch.shards > 1:
        update["made whole of parts"] = made_whole(config, batch)
    return {"rollout": held | held_for_sampling(config, batch), "update": held | update}


def held_throughout(config: ModelConfig, batch: Batch) -> dict[str, int]:
    n = -(-parameters(config) // batch.shards)
    if not batch.offload_optimizer:
        return {"parameters": 4 * n, "gradient": 4 * n, "moments of AdamW": 8 * n}
    in_matrices = all_matrices(config)
    return {"parameters": batch.number_bytes * in_matrices + 4 * (n - in_matrices)}


def held_for_sampling(config: ModelConfig, batch: Batch) -> dict[str, int]:
    b, V = batch.number_bytes, config.vocab_size
    Q, P = len(batch.prompts), max(batch.prompts)
    R, T = len(batch.answers), max(batch.answers)
    inside_a_step = 12 * R * V
    prompt_token = 3 * b * config.intermediate_size + 12 * config.hidden_size
    slot = R * cached_bytes(config, b)  # of every row
    last = T - 1                        # slots at the end
    moments = [(min(last, FIRST_SLOTS), sum(batch.prompts) * prompt_token),  # the prompts' pass
               (last, inside_a_step),
               (last + slots_before_the_last_growth(last) // 2, 0)]  # values grow after the keys
    slots, inside = max(moments, key=lambda moment: moment[0] * slot + moment[1])
    return {
        "matrices to sample with": b * matrices_to_sample_with(config, batch),
        "keys and values": cached_bytes(config, b) * Q * P + slots * slot,
        "what was sampled": 25 * R * T,
        "a step's or the prompts' inside": inside,
    }


def slots_before_the_last_growth(last: int) -> int:
    """The cache doubles until it has `last` slots; 0 where it had them from the start."""
    slots = FIRST_SLOTS
    while 2 * slots < last:
        slots *= 2
    return slots if slots < last else 0


def matrices_to_sample_with(config: ModelConfig, batch: Batch) -> int:
    """Numbers in the sampler's own copies: converted, gathered from all processes, or on a CPU laid
    out column by column."""
    count = all_matrices(config) if batch.converts or batch.shards > 1 else 0
    if batch.device == "cpu" and not batch.converts:
        count += all_matrices(config) - config.vocab_size * config.hidden_size
    return count
