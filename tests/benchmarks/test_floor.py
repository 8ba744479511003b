"""The arithmetic of benchmarks/floor.py against the parameters, operations and tensors that there are. Nothing is timed."""
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode



from benchmarks.floor import SHAPES, Batch, answer_pairs, cached, fullest, kept, layer_matrices, memory, parameters, prompt_pairs, rollout_work, update_work
from benchmarks.memory import Living, kept_by_autograd, make_moments
from engine.optimizer import make_optimizer
from engine.errors import UserError
from engine.packing import SharedPrompts
from qwen2_model import ModelConfig, Qwen2
from engine.forward import TokenLogProbs
from engine.sampler import generate
from benchmarks import floor
from engine import rollouts

CONFIG = ModelConfig(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
                     head_dim=12, tie_word_embeddings=True)
BATCH = Batch(prompts=[5, 9], answers=[4, 7, 1, 8, 8, 3, 2, 6, 9, 5, 1, 12], micro_batch=12)  # two blocks of attention, and two tokens alone


def shared(batch):
    return SharedPrompts(batch.prompts, batch.fed, torch.arange(len(batch.answers)) * len(batch.prompts) // len(batch.answers))


def forward(model, batch):
    """The log-probs of as many tokens as the answers have, through the lines that training takes."""
    N, tokens = sum(batch.prompts) + sum(batch.fed), sum(batch.answers)
    hidden = model.model(torch.arange(N) % model.config.vocab_size, shared(batch).positions, shared(batch))
    return TokenLogProbs.apply(hidden.index_select(0, torch.arange(tokens) % N), model.output_matrix, torch.zeros(tokens, dtype=torch.long))


def products(counter):
    """Operations of matrix products, attention's aside."""
    return sum(count for name, count in counter.get_flop_counts()["Global"].items() if str(name) in ("aten.mm", "aten.addmm"))


def without_pairs(work, config, pairs):
    return work - 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_the_model(kind, tied):
    config = replace(CONFIG, model_type=kind, tie_word_embeddings=tied)
    assert parameters(config) == sum(p.numel() for p in Qwen2(config).parameters())


def test_parameters_are_those_of_the_published_models():
    assert [parameters(SHAPES[name]) for name in ("0.5B", "1.5B", "3B", "7B")] == [494_032_768, 1_543_714_304, 3_085_938_688, 7_615_616_512]


def test_pairs_are_those_that_the_masks_let_see_each_other():
    """Columns of padding are never seen; rows of padding are not counted."""
    seen = 0
    for rows, _, mask in shared(BATCH).blocks:
        seen += sum(mask[i, 0, :BATCH.fed[row]].sum().item() for i, row in enumerate(rows.tolist()))
    assert answer_pairs(BATCH) == seen
    assert prompt_pairs(BATCH) == (1 + 2 + 3 + 4 + 5) + (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8 + 9)


def test_products_of_an_update_are_counted():
    model, work, pairs = Qwen2(CONFIG), update_work(CONFIG, BATCH), prompt_pairs(BATCH) + answer_pairs(BATCH)
    with FlopCounterMode(display=False) as counter:
        found = forward(model, BATCH)
    assert products(counter) == without_pairs(work["forward"].operations, CONFIG, pairs)
    with FlopCounterMode(display=False) as counter:
        found.sum().backward()
    assert products(counter) == without_pairs(work["backward"].operations, CONFIG, 2 * pairs)


def test_products_of_a_rollout_are_counted():
    """One answer to each question: where there are more, the sampler makes the first token's logits for each of them."""
    batch, model = Batch(prompts=[5, 9], answers=[6, 6]), Qwen2(CONFIG)
    with FlopCounterMode(display=False) as counter:
        generate(model, [[3] * 5, [4] * 9], max_new_tokens=6, stop_ids=())
    pairs = prompt_pairs(batch) + answer_pairs(batch)
    assert products(counter) == without_pairs(sum(work.operations for work in rollout_work(CONFIG, batch).values()), CONFIG, pairs)


def test_bytes_of_sampling_by_hand():
    """Two prompts of 3 and 5, two answers each of 2, 4 and 3, 3 tokens: 3 steps read all matrices, own tokens 1 + (1 + 2 + 3) +
    (1 + 2) + (1 + 2), and the prompts' 3 tokens in 3 steps and 5 in 2, for both answers at once."""
    work = rollout_work(CONFIG, Batch(prompts=[3, 5], answers=[2, 4, 3, 3], number=2))["answers"]
    assert work.bytes == 2 * 3 * (3 * layer_matrices(CONFIG) + 97 * 48) + cached(CONFIG, 2) * (1 + 6 + 3 + 3 + 3 * 3 + 5 * 2)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_autograd_keeps_what_is_said(kind, dtype, checkpointing):
    config = replace(CONFIG, model_type=kind)
    model = Qwen2(config).compute_in(getattr(torch, dtype))
    model.model.checkpointing = checkpointing
    batch = replace(BATCH, number=floor.NUMBER[dtype], checkpointing=checkpointing)
    assert kept_by_autograd(lambda: forward(model, batch), model) == sum(kept(config, batch).values())


def test_probabilities_are_not_kept_where_they_are_made_in_chunks(monkeypatch):
    for module in (floor, rollouts):
        monkeypatch.setattr(module, "LOGITS_AT_ONCE", 97 * 10)
    model = Qwen2(CONFIG)
    assert kept(CONFIG, BATCH)["probabilities"] == 0
    assert kept_by_autograd(lambda: forward(model, BATCH), model) == sum(kept(CONFIG, BATCH).values())


LONG, MIDDLE, SHORT = Batch([40, 50], [60] * 8), Batch([10], [30] * 4), Batch([10], [10] * 4)


MOMENTS = [(LONG, False, 97, None, "logits"), (LONG, True, 97, None, "a layer's"), (SHORT, True, 200, None, "a layer's"), (LONG, False, 2000, None, "logits"),
           (LONG, True, 8000, 40, "logits"), (MIDDLE, True, 2000, 60, "logits"), (MIDDLE, False, 1500, 80, "logits"), (Batch([2], [2]), False, 20000, None, "gradient")]


@pytest.mark.parametrize("dtype, batch, checkpointing, vocabulary, chunk, moment",
                         [("float32", *case) for case in MOMENTS] + [("bfloat16", *case) for case in MOMENTS if case[-1] == "logits"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_fullest_moment_of_an_update(monkeypatch, tied, dtype, batch, checkpointing, vocabulary, chunk, moment):
    """Within 5%: tensors of a layer's width and less that come and go are left out."""
    for module in (floor, rollouts) if chunk else ():
        monkeypatch.setattr(module, "LOGITS_AT_ONCE", vocabulary * chunk)
    config, batch = replace(CONFIG, vocab_size=vocabulary, tie_word_embeddings=tied), replace(batch, checkpointing=checkpointing, number=floor.NUMBER[dtype])
    model, found = Qwen2(config).compute_in(getattr(torch, dtype)), fullest(config, batch)
    model.model.checkpointing = checkpointing
    forward(model, batch).sum().backward()  # as in a second micro-batch: gradients are there
    with Living([*model.parameters(), *(p.grad for p in model.parameters())]) as living:
        forward(model, batch).sum().backward()
    assert any(moment in name for name in found)
    assert living.most == pytest.approx(sum(found.values()), rel=0.05)


def test_micro_batches_have_the_prompts_that_their_answers_need():
    parts = Batch([3, 5, 9], [2, 4, 6, 8, 1, 7], micro_batch=3).micro_batches()
    assert [(part.prompts, part.answers) for part in parts] == [([3, 5], [2, 4, 6]), ([5, 9], [8, 1, 7])]


@pytest.mark.parametrize("vocabulary", [97, 20000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_rollout_keeps(dtype, vocabulary):
    """Within 10%, as above. Once the prompts' pass is fullest, once a step over a large vocabulary."""
    config = replace(CONFIG, vocab_size=vocabulary, intermediate_size=200)
    model, batch = Qwen2(config).compute_in(getattr(torch, dtype)), Batch([40, 50], [60] * 8, number=floor.NUMBER[dtype])
    with Living(list(model.parameters())) as living:
        generate(model, [[3] * 40, [4] * 50], answers=4, max_new_tokens=60, stop_ids=())
    beside_what_is_held = sum(bytes for name, bytes in memory(config, batch)["rollout"].items() if name not in ("parameters", "gradient", "moments of AdamW"))
    assert living.most == pytest.approx(beside_what_is_held, rel=0.1)


def test_offloading_leaves_the_parameters_on_the_device():
    config = replace(CONFIG, tie_word_embeddings=False)
    model = Qwen2(config).compute_in(torch.bfloat16)
    optimizer = make_optimizer(model, 1e-6, 0.0, True, "cpu")
    held = memory(config, replace(BATCH, number=2, offload_optimizer=True))["update"]
    assert held["parameters"] == sum(p.numel() * p.element_size() for p in model.parameters())
    make_moments(optimizer)
    beside = sum(value.numel() * 4 for state in optimizer.state.values() for value in state.values() if value.dim())
    assert 16 * parameters(config) == beside + 2 * sum(p.numel() * 4 for group in optimizer.param_groups for p in group["params"])


def test_moments_and_gradient_are_what_training_holds():
    model = Qwen2(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())
    with Living(list(model.parameters())) as living:
        make_moments(optimizer)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
    found = memory(CONFIG, BATCH)["update"]
    assert found["parameters"] == sum(4 * p.numel() for p in model.parameters())
    counters = sum(4 for _ in model.parameters())
    assert living.now - counters == found["gradient"] + found["moments of AdamW"]


def test_flags_that_cannot_be_meant(capsys):
    for argv, words in ((["5B"], "no model folder 5B"), (["tiny", "--dtype", "int8"], "float32, bfloat16"), (["tiny", "--flops", "1e12"], "go together"),
                        (["tiny", "--ranks", "9"], "more than there are questions"), ([], "no model given")):
        with pytest.raises(UserError, match=words):
            floor.main(argv)
    floor.main(["tiny", "--flops", "1e11", "--bandwidth", "1e10", "--ranks", "2", "--offload_optimizer"])
    assert "over the wire" in capsys.readouterr().out
