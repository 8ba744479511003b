"""The arithmetic of floor.py against counted parameters, operations and tensors."""
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import floor
from benchmarks.bytes_kept import fullest, kept, memory, total
from benchmarks.counting import Living, kept_by_autograd
from benchmarks.memory import make_moments
from benchmarks.operations import answer_pairs, prompt_pairs, rollout_work, update_work
from benchmarks.shapes import (NUMBER_BYTES, SHAPES, Batch, cached_bytes, layer_matrices,
                               parameters)
from engine import forward as forward_pass
from engine.errors import UserError
from engine.forward import TokenLogProbs
from engine.optimizer import make_optimizer
from engine.packing import SharedPrompts
from engine.sampler import generate
from qwen2_model import ModelConfig, Qwen2

CONFIG = ModelConfig(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
                     num_attention_heads=6, num_key_value_heads=2, head_dim=12,
                     tie_word_embeddings=True)
# two blocks of attention, and two answers of one token
BATCH = Batch(prompts=[5, 9], answers=[4, 7, 1, 8, 8, 3, 2, 6, 9, 5, 1, 12], micro_batch=12)


def shared(batch):
    prompt_of = torch.arange(len(batch.answers)) * len(batch.prompts) // len(batch.answers)
    return SharedPrompts(batch.prompts, batch.fed, prompt_of)


def forward(model, batch):
    """Log-probs of as many tokens as the answers have, through the lines that training takes."""
    N, tokens = batch.tokens, sum(batch.answers)
    hidden = model.model(torch.arange(N) % model.config.vocab_size, shared(batch).positions,
                         shared(batch))
    states = hidden.index_select(0, torch.arange(tokens) % N)
    return TokenLogProbs.apply(states, model.output_matrix, torch.zeros(tokens, dtype=torch.long))


def products(counter):
    """Operations of matrix products, without attention's."""
    counts = counter.get_flop_counts()["Global"].items()
    return sum(count for name, count in counts if str(name) in ("aten.mm", "aten.addmm"))


def without_pairs(work, config, pairs):
    width = config.num_attention_heads * config.head_dim
    return work - 4 * config.num_hidden_layers * width * pairs


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(kind, tied):
    config = replace(CONFIG, model_type=kind, tie_word_embeddings=tied)
    assert parameters(config) == sum(p.numel() for p in Qwen2(config).parameters())


def test_parameters_are_those_of_the_published_models():
    counts = [parameters(SHAPES[name]) for name in ("0.5B", "1.5B", "3B", "7B", "14B")]
    assert counts == [494_032_768, 1_543_714_304, 3_085_938_688, 7_615_616_512, 14_770_033_664]


def test_pairs_are_those_that_the_masks_let_see_each_other():
    """Columns of padding are never seen; rows of padding are not counted."""
    seen = 0
    for block in shared(BATCH).blocks:
        for i, row in enumerate(block.answers.tolist()):
            seen += block.mask[i, 0, :BATCH.fed[row]].sum().item()
    assert answer_pairs(BATCH) == seen
    assert prompt_pairs(BATCH) == (1 + 2 + 3 + 4 + 5) + (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9)


def test_products_of_an_update_are_counted():
    model, work = Qwen2(CONFIG), update_work(CONFIG, BATCH)
    pairs = prompt_pairs(BATCH) + answer_pairs(BATCH)
    with FlopCounterMode(display=False) as counter:
        log_prob = forward(model, BATCH)
    assert products(counter) == without_pairs(work["forward"].operations, CONFIG, pairs)
    with FlopCounterMode(display=False) as counter:
        log_prob.sum().backward()
    assert products(counter) == without_pairs(work["backward"].operations, CONFIG, 2 * pairs)


def test_products_of_a_rollout_are_counted():
    """One answer to each problem: of more, the sampler makes the first token's logits for each."""
    batch, model = Batch(prompts=[5, 9], answers=[6, 6]), Qwen2(CONFIG)
    with FlopCounterMode(display=False) as counter:
        generate(model, [[3] * 5, [4] * 9], max_new_tokens=6, stop_ids=())
    pairs = prompt_pairs(batch) + answer_pairs(batch)
    operations = sum(work.operations for work in rollout_work(CONFIG, batch).values())
    assert products(counter) == without_pairs(operations, CONFIG, pairs)


def test_bytes_of_sampling_by_hand():
    """Two prompts of 3 and 5 tokens, answers of 2, 4, 3 and 3.

    3 steps read all matrices; the answers' own tokens are read 1 + (1 + 2 + 3) + (1 + 2) + (1 + 2)
    times, and the prompts' 3 tokens in 3 steps and 5 in 2, for both answers at once.
    """
    work = rollout_work(CONFIG, Batch(prompts=[3, 5], answers=[2, 4, 3, 3], number_bytes=2))
    matrices = 2 * 3 * (3 * layer_matrices(CONFIG) + 97 * 48)
    cache = cached_bytes(CONFIG, 2) * (1 + 6 + 3 + 3 + 3 * 3 + 5 * 2)
    assert work["answers"].bytes == matrices + cache


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_autograd_keeps_what_is_said(kind, dtype, checkpointing):
    config = replace(CONFIG, model_type=kind)
    model = Qwen2(config).compute_in(getattr(torch, dtype))
    model.model.checkpointing = checkpointing
    batch = replace(BATCH, number_bytes=NUMBER_BYTES[dtype], checkpointing=checkpointing)
    counted = kept_by_autograd(lambda: forward(model, batch), model)
    assert counted == total(kept(config, batch))


def test_probabilities_are_not_kept_where_they_are_made_in_chunks(monkeypatch):
    monkeypatch.setattr(forward_pass, "LOGITS_AT_ONCE", 97 * 10)
    model = Qwen2(CONFIG)
    assert kept(CONFIG, BATCH)["probabilities"] == 0
    counted = kept_by_autograd(lambda: forward(model, BATCH), model)
    assert counted == total(kept(CONFIG, BATCH))


LONG, MIDDLE, SHORT = Batch([40, 50], [60] * 8), Batch([10], [30] * 4), Batch([10], [10] * 4)
MOMENTS = [  # batch, checkpointing, vocabulary, tokens in a chunk of logits, what is fullest
    (LONG, False, 97, None, "logits"),
    (LONG, True, 97, None, "a layer's"),
    (SHORT, True, 200, None, "a layer's"),
    (LONG, False, 2000, None, "logits"),
    (LONG, True, 8000, 40, "logits"),
    (MIDDLE, True, 2000, 60, "logits"),
    (MIDDLE, False, 1500, 80, "logits"),
    (Batch([2], [2]), False, 20000, None, "gradient"),
]
CASES = ([("float32", *moment) for moment in MOMENTS]
         + [("bfloat16", *moment) for moment in MOMENTS if moment[-1] == "logits"])


@pytest.mark.parametrize("dtype, batch, checkpointing, vocabulary, chunk, moment", CASES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_fullest_moment_of_an_update(monkeypatch, tied, dtype, batch, checkpointing,
                                         vocabulary, chunk, moment):
    """Within 5%: tensors of a layer's width and less that come and go are left out."""
    if chunk:
        monkeypatch.setattr(forward_pass, "LOGITS_AT_ONCE", vocabulary * chunk)
    config = replace(CONFIG, vocab_size=vocabulary, tie_word_embeddings=tied)
    batch = replace(batch, checkpointing=checkpointing, number_bytes=NUMBER_BYTES[dtype])
    model = Qwen2(config).compute_in(getattr(torch, dtype))
    model.model.checkpointing = checkpointing
    forward(model, batch).sum().backward()  # as in a second micro-batch: gradients are there
    with Living([*model.parameters(), *(p.grad for p in model.parameters())]) as living:
        forward(model, batch).sum().backward()
    parts = fullest(config, batch)
    assert any(moment in name for name in parts)
    assert living.most == pytest.approx(total(parts), rel=0.05)


def test_micro_batches_have_the_prompts_that_their_answers_need():
    parts = Batch([3, 5, 9], [2, 4, 6, 8, 1, 7], micro_batch=3).micro_batches()
    pieces = [(part.prompts, part.answers) for part in parts]
    assert pieces == [([3, 5], [2, 4, 6]), ([5, 9], [8, 1, 7])]


def assert_a_rollout_keeps(config, prompt_lengths, tokens, dtype):
    """What is counted, within 10%, when each prompt gets four answers of so many tokens."""
    model = Qwen2(config).compute_in(getattr(torch, dtype))
    batch = Batch(prompt_lengths, [tokens] * 4 * len(prompt_lengths),
                  number_bytes=NUMBER_BYTES[dtype])
    prompts = [[3] * length for length in prompt_lengths]
    with Living(list(model.parameters())) as living:
        generate(model, prompts, answers=4, max_new_tokens=tokens, stop_ids=())
    held = ("parameters", "gradient", "moments of AdamW")
    parts = memory(config, batch)["rollout"].items()
    expected = sum(size for name, size in parts if name not in held)
    assert living.most == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("vocabulary", [97, 20000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_rollout_keeps(dtype, vocabulary):
    """Within 10%. The prompts' pass is fullest, or with a large vocabulary a step of sampling."""
    config = replace(CONFIG, vocab_size=vocabulary, intermediate_size=200)
    assert_a_rollout_keeps(config, [40, 50], 60, dtype)


def test_a_cache_that_grows_is_fullest_while_it_grows():
    """8 rows of 70 tokens: 64 slots become 69, and the old values are there beside the new."""
    assert_a_rollout_keeps(CONFIG, [3, 4], 70, "float32")


def test_offloading_leaves_the_parameters_on_the_device():
    config = replace(CONFIG, tie_word_embeddings=False)
    model = Qwen2(config).compute_in(torch.bfloat16)
    optimizer = make_optimizer(model, 1e-6, 0.0, True, "cpu")
    held = memory(config, replace(BATCH, number_bytes=2, offload_optimizer=True))["update"]
    assert held["parameters"] == sum(p.numel() * p.element_size() for p in model.parameters())
    make_moments(optimizer)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    beside = sum(value.numel() * 4 for value in moments if value.dim())
    exact = [p for group in optimizer.param_groups for p in group["params"]]
    assert 16 * parameters(config) == beside + 2 * sum(p.numel() * 4 for p in exact)


def test_of_a_model_in_parts_only_the_copy_to_sample_with_is_whole():
    """What passes through, by hand: a layer has 2 * 48 * 72 + 2 * 48 * 24 + 3 * 48 * 80 = 20736
    numbers, the embeddings 97 * 48 = 4656. Three layers and these in 2 bytes, two gradients of a
    layer in 2 and in 4."""
    held = memory(CONFIG, replace(BATCH, number_bytes=2, shards=4, device="cuda"))
    kept = sum(held["update"][name] for name in ("parameters", "gradient", "moments of AdamW"))
    assert kept == 16 * -(-parameters(CONFIG) // 4)
    assert held["rollout"]["matrices to sample with"] == 2 * (3 * 20736 + 4656)
    assert held["update"]["made whole of parts"] == 2 * (4656 + 3 * 20736) + 6 * 20736


def test_parts_cross_the_wire_for_every_micro_batch(capsys):
    n = parameters(SHAPES["7B"])
    floor.main(["7B", "--ranks", "8", "--dtype", "bfloat16", "--shard", "--micro_batch", "4"])
    wire = 8 * n * 7 / 8 * 2  # 8 bytes a parameter, in two micro-batches
    assert f"{wire / 1e9:,.1f} GB of parameters and gradients" in capsys.readouterr().out


def test_moments_and_gradient_are_what_training_holds():
    model = Qwen2(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    with Living(list(model.parameters())) as living:
        make_moments(optimizer)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    held = memory(CONFIG, BATCH)["update"]
    assert held["parameters"] == sum(4 * p.numel() for p in model.parameters())
    counters = sum(4 for _ in model.parameters())
    assert living.now - counters == held["gradient"] + held["moments of AdamW"]


@pytest.mark.parametrize("argv, words", [
    (["5B"], "no model folder 5B"),
    (["tiny", "--dtype", "int8"], "float32, bfloat16"),
    (["tiny", "--flops", "1e12"], "go together"),
    (["tiny", "--flops", "0", "--bandwidth", "1"], "--flops 0.0 should be above 0"),
    (["tiny", "--ranks", "9"], "more than there are problems"),
    (["tiny", "--shard"], "--shard is for several --ranks"),
    (["tiny", "--shard", "--ranks", "2", "--offload_optimizer"], "without --offload_optimizer"),
    ([], "no model given"),
])
def test_flags_that_cannot_be_meant(argv, words):
    with pytest.raises(UserError, match=words):
        floor.main(argv)


def test_the_tables_are_printed(capsys):
    floor.main(["tiny", "--flops", "1e11", "--bandwidth", "1e10", "--ranks", "2",
                "--offload-optimizer"])
    printed = capsys.readouterr().out
    assert "over the wire" in printed and "bound by" in printed
    floor.main(["--worked"])
    assert "fits" in capsys.readouterr().out
