"""The model against `transformers`, the cache against no cache, the sampler against the model."""
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen2_model import KVCache, Qwen2, generate, prefill

transformers = pytest.importorskip("transformers")
SHAPE = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=256)


def reference(kind: str, tied: bool, folder, shard_size="1GB", **more):
    """A random model of the other implementation, with biases and norms away from 0 and 1 (defaults hide mistakes)."""
    torch.manual_seed(1)
    own = dict(head_dim=20) if kind == "qwen3" else {}
    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, **own, **more}, tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


IDS = torch.randint(0, 97, (3, 40), generator=torch.Generator().manual_seed(0))


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key, None) if value is KeyError else config.update({key: value})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("shard_size", ["1GB", "60KB"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_logits_agree_with_transformers(tmp_path, kind, tied, shard_size):
    other = reference(kind, tied, tmp_path, shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    ours = Qwen2.from_pretrained(tmp_path, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(IDS), other(IDS).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_attention_that_is_looked_at_agrees_with_transformers(tmp_path, kind):
    other = reference(kind, True, tmp_path, attn_implementation="eager")
    ours, seen = Qwen2.from_pretrained(tmp_path), []
    for layer in ours.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda module, inputs: seen.append(module.probabilities(*inputs[:3])))
    with torch.no_grad():
        ours.model(IDS)
        for mine, theirs in zip(seen, other(IDS, output_attentions=True).attentions, strict=True):
            torch.testing.assert_close(mine, theirs.mean(1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_what_we_save_transformers_opens(tmp_path, kind):
    reference(kind, kind == "qwen2", tmp_path / "a", rope_parameters={"rope_type": "default", "rope_theta": 5e4})
    ours = Qwen2.from_pretrained(tmp_path / "a")
    ours.save_pretrained(tmp_path / "b")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, ours(IDS), atol=1e-4, rtol=0)
        assert torch.equal(Qwen2.from_pretrained(tmp_path / "b")(IDS), ours(IDS))


def test_rope_theta_of_older_configs(tmp_path):
    other = reference("qwen2", True, tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 300.0})
    edit_config(tmp_path, rope_parameters=KeyError, rope_theta=300.0, dtype=KeyError, torch_dtype="float32",
                layer_types=KeyError, sliding_window=64, use_sliding_window=False)
    with torch.no_grad():
        torch.testing.assert_close(Qwen2.from_pretrained(tmp_path)(IDS), other(IDS).logits, atol=1e-4, rtol=0)


def test_rope_theta_in_the_place_of_scaling(tmp_path):
    other = reference("qwen2", True, tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 300.0})
    edit_config(tmp_path, rope_parameters=KeyError, rope_scaling={"rope_type": "default", "rope_theta": 300.0})
    with torch.no_grad():
        torch.testing.assert_close(Qwen2.from_pretrained(tmp_path)(IDS), other(IDS).logits, atol=1e-4, rtol=0)


def test_a_tied_output_matrix_may_stand_in_another_shard(tmp_path):
    other = reference("qwen3", True, tmp_path)
    tensors = {k: v.clone() for k, v in load_file(tmp_path / "model.safetensors").items()}
    (tmp_path / "model.safetensors").unlink()
    second = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(tensors, tmp_path / "a.safetensors")
    save_file(second, tmp_path / "b.safetensors")
    index = {"weight_map": {**{name: "a.safetensors" for name in tensors}, "lm_head.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with torch.no_grad():
        torch.testing.assert_close(Qwen2.from_pretrained(tmp_path)(IDS), other(IDS).logits, atol=1e-4, rtol=0)


def test_saving_over_a_sharded_model_is_not_shadowed_by_its_index(tmp_path):
    reference("qwen2", True, tmp_path, "60KB")
    model = Qwen2.from_pretrained(tmp_path)
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    model.save_pretrained(tmp_path)
    assert torch.equal(Qwen2.from_pretrained(tmp_path).model.norm.weight, model.model.norm.weight)


@pytest.mark.parametrize("config, generation, stop", [(5, None, (5, 0)), ([5, 6], None, (5, 6, 0)), (5, [7, 8], (7, 8, 0)), (None, 9, (9, 0))])
def test_stop_tokens_come_from_the_generation_config_first(tmp_path, config, generation, stop):
    reference("qwen2", True, tmp_path)
    edit_config(tmp_path, eos_token_id=config, pad_token_id=0)
    (tmp_path / "generation_config.json").write_text(json.dumps({} if generation is None else {"eos_token_id": generation}))
    model = Qwen2.from_pretrained(tmp_path)
    assert model.config.stop_ids == stop
    model.save_pretrained(tmp_path / "again")
    assert Qwen2.from_pretrained(tmp_path / "again").config.stop_ids == stop


@pytest.mark.skipif(not os.environ.get("REAL_SHAPES"), reason="takes minutes and 5 GB: REAL_SHAPES=1 python -m pytest -k real")
def test_the_real_shapes_of_qwen2_5_0_5b(tmp_path):
    shape = dict(vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                 num_key_value_heads=2, max_position_embeddings=32_768)
    other = reference("qwen2", True, tmp_path, "500MB", **shape, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    ids = torch.randint(0, 151_936, (2, 40))
    with torch.no_grad():
        torch.testing.assert_close(Qwen2.from_pretrained(tmp_path)(ids), other(ids).logits, atol=1e-4, rtol=1e-4)


def test_dtype_is_the_one_asked_for(tmp_path):
    reference("qwen2", True, tmp_path)
    assert {p.dtype for p in Qwen2.from_pretrained(tmp_path, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("changes, named", [
    (dict(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "rope_scaling"),
    (dict(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling"),
    (dict(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}), "rope_parameters"),
    (dict(use_sliding_window=True, sliding_window=16, max_window_layers=1, layer_types=KeyError), "use_sliding_window"),
    (dict(layer_types=["full_attention", "sliding_attention", "full_attention"]), "layer_types"),
    (dict(model_type="llama"), "model_type 'llama'"),
    (dict(hidden_act="gelu"), "hidden_act 'gelu'"),
    (dict(quantization_config={"bits": 4}), "quantization_config"),
    (dict(num_hidden_layers=2), "layers.2."),
    (dict(num_hidden_layers=4), "layers.3."),
    (dict(intermediate_size=81), "shape"),
    (dict(hidden_size=KeyError), "hidden_size"), (dict(rope_theta="abc"), "rope_theta"), (dict(rms_norm_eps=None), "rms_norm_eps"),
    (dict(head_dim="16"), "head_dim"), (dict(layer_types=5), "layer_types"), (dict(vocab_size=10 ** 15), "vocab_size"),
    (dict(eos_token_id="1"), "eos_token_id"), (dict(pad_token_id="0"), "pad_token_id"), (dict(tie_word_embeddings=None), "tie_word"),
    (dict(max_position_embeddings=None), "max_position"), (dict(rope_parameters={"rope_theta": None}), "rope_parameters"),
    (dict(num_attention_heads=0), "num_attention_heads"),
    (dict(num_key_value_heads=4), "num_key_value_heads"),
])
def test_what_is_not_implemented_is_refused_by_name(tmp_path, changes, named):
    reference("qwen2", True, tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=named):
        Qwen2.from_pretrained(tmp_path)


def test_qwen3_with_biases_is_refused(tmp_path):
    reference("qwen3", True, tmp_path, attention_bias=True)
    with pytest.raises(ValueError, match="attention_bias"):
        Qwen2.from_pretrained(tmp_path)


def test_damaged_files_are_refused_by_name(tmp_path):
    reference("qwen2", False, tmp_path)
    path = tmp_path / "model.safetensors"
    whole, tensors = path.read_bytes(), {k: v.clone() for k, v in load_file(path).items()}
    for content in (whole[:len(whole) // 2], whole[:5], b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="model.safetensors"):
            Qwen2.from_pretrained(tmp_path)
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, path)
    with pytest.raises(ValueError, match="lacks model.norm.weight"):
        Qwen2.from_pretrained(tmp_path)
    save_file({**tensors, "model.extra": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="model.extra"):
        Qwen2.from_pretrained(tmp_path)
    save_file(tensors, path)
    edit_config(tmp_path, tie_word_embeddings=True)  # the file's own output matrix would be dropped silently
    with pytest.raises(ValueError, match="lm_head.weight"):
        Qwen2.from_pretrained(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match="model.safetensors"):
        Qwen2.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no model folder"):
        Qwen2.from_pretrained(tmp_path / "elsewhere")


@pytest.mark.parametrize("cuts", [[12], [1] * 12, [5, 4, 3], [11, 1]])
def test_cached_equals_uncached_in_any_chunks(small_model, cuts):
    ids = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    cache, parts, at = KVCache(small_model, 2, 12), [], 0
    with torch.no_grad():
        for cut in cuts:
            parts.append(small_model(ids[:, at:at + cut], cache))
            at += cut
        torch.testing.assert_close(torch.cat(parts, 1), small_model(ids), atol=1e-5, rtol=0)


@pytest.mark.parametrize("cuts", [[12], [5, 4, 3], [1] * 12])
def test_padded_rows_see_only_themselves(small_model, cuts):
    """Row 1 is 7 tokens long and sits at the right end of 12 slots: its logits are those of the 7 alone."""
    ids = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    cache, parts, at = KVCache(small_model, 2, 12, pad=torch.tensor([0, 5])), [], 0
    with torch.no_grad():
        for cut in cuts:
            parts.append(small_model(ids[:, at:at + cut], cache))
            at += cut
        joined = torch.cat(parts, 1)
        torch.testing.assert_close(joined[:1], small_model(ids[:1]), atol=1e-5, rtol=0)
        torch.testing.assert_close(joined[1:, 5:], small_model(ids[1:, 5:]), atol=1e-5, rtol=0)


PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]


def test_greedy_equals_the_slow_loop(small_model):
    result = generate(small_model, PROMPTS, max_new_tokens=15, greedy=True, stop_ids=())
    for prompt, row in zip(PROMPTS, result.tokens):
        ids = list(prompt)
        for _ in range(15):
            ids.append(int(small_model(torch.tensor([ids]))[0, -1].argmax()))
        assert row.tolist() == ids[len(prompt):]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recorded_numbers_are_those_of_temperature_1(small_model, temperature):
    result = generate(small_model, PROMPTS, answers=3, max_new_tokens=12, temperature=temperature, seed=5)
    assert result.mask.any(1).all()
    for b, (row, mask) in enumerate(zip(result.tokens, result.mask)):
        prompt, response = PROMPTS[b // 3], row[mask].tolist()
        with torch.no_grad():
            logits = small_model(torch.tensor([prompt + response]))[0, len(prompt) - 1:-1]
        distribution = torch.distributions.Categorical(logits=logits)
        torch.testing.assert_close(result.log_prob[b][mask], distribution.log_prob(row[mask]), atol=1e-4, rtol=0)
        torch.testing.assert_close(result.entropy[b][mask], distribution.entropy(), atol=1e-4, rtol=0)
        torch.testing.assert_close(result.collision[b][mask], distribution.probs.square().sum(-1), atol=1e-5, rtol=0)
        assert not any(values[b][~mask].any() for values in (result.tokens, result.log_prob, result.entropy, result.collision))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_sampling_follows_the_distribution(small_model, temperature):
    count = 20_000
    result = generate(small_model, [[5, 6, 7]], answers=count, max_new_tokens=1, temperature=temperature, seed=1)
    with torch.no_grad():
        expected = (small_model(torch.tensor([[5, 6, 7]]))[0, -1] / temperature).softmax(-1)
    seen = torch.bincount(result.tokens[:, 0], minlength=50) / count
    assert ((seen - expected).abs() < 5 * (expected * (1 - expected) / count).sqrt() + 1e-4).all()


def test_a_departure_changes_nothing_for_those_who_stay(small_model):
    """The same run with and without stop tokens: rows agree up to their own end."""
    stopping = generate(small_model, PROMPTS, answers=20, max_new_tokens=25, seed=3, stop_ids=(2, 4, 9, 17, 30))
    endless = generate(small_model, PROMPTS, answers=20, max_new_tokens=25, seed=3, stop_ids=())
    assert 0 < stopping.finished.sum() and len(set(stopping.mask.sum(1).tolist())) > 5
    assert torch.equal(stopping.tokens[stopping.mask], endless.tokens[stopping.mask])
    torch.testing.assert_close(stopping.log_prob[stopping.mask], endless.log_prob[stopping.mask], atol=1e-5, rtol=0)
    assert not endless.finished.any() and endless.mask.all()


def test_finished_rows_leave_the_batch(small_model, monkeypatch):
    rows, forward = [], small_model.model.forward
    monkeypatch.setattr(small_model.model, "forward", lambda ids, cache=None: rows.append(len(ids)) or forward(ids, cache))
    result = generate(small_model, PROMPTS, answers=20, max_new_tokens=25, seed=3, stop_ids=(2, 4, 9, 17, 30))
    live = result.mask.sum(0).tolist()
    assert all(alive <= computed <= alive * 8 / 7 + 1 for computed, alive in zip(rows[1:], live[1:]))


def test_alone_or_in_company(small_model):
    company = generate(small_model, PROMPTS, max_new_tokens=20, greedy=True, stop_ids=())
    for i, prompt in enumerate(PROMPTS):
        alone = generate(small_model, [prompt], max_new_tokens=20, greedy=True, stop_ids=())
        assert torch.equal(alone.tokens[0], company.tokens[i])
        torch.testing.assert_close(alone.log_prob[0], company.log_prob[i], atol=1e-5, rtol=0)


def test_own_seed_and_nothing_else(small_model):
    torch.manual_seed(1)
    first = generate(small_model, PROMPTS, answers=4, max_new_tokens=10, seed=7)
    torch.manual_seed(2)
    assert torch.equal(first.tokens, generate(small_model, PROMPTS, answers=4, max_new_tokens=10, seed=7).tokens)
    assert not torch.equal(first.tokens, generate(small_model, PROMPTS, answers=4, max_new_tokens=10, seed=8).tokens)


def test_a_stop_token_or_a_pad_ends_the_answer_and_the_limit_says_so(small_model):
    assert small_model.config.stop_ids == (2, 0)
    first = int(generate(small_model, PROMPTS[:1], max_new_tokens=1, greedy=True, stop_ids=()).tokens)
    ended = generate(small_model, PROMPTS[:1], max_new_tokens=9, greedy=True, stop_ids=(first,))
    assert ended.mask.sum() == 1 and ended.finished.all() and ended.tokens[0, 0] == first
    cut = generate(small_model, PROMPTS, max_new_tokens=4, greedy=True, stop_ids=())
    assert (cut.mask.sum(1) == 4).all() and not cut.finished.any()  # the same budget for every prompt length


def test_every_prompt_may_have_a_limit_of_its_own(small_model):
    """Each row is the start of what it would be with room to spare, and no stop token past the limit finishes it."""
    free = generate(small_model, PROMPTS, answers=6, max_new_tokens=25, seed=3, stop_ids=(2, 4, 9, 17, 30))
    limits = [3, 25, 7]
    bound = generate(small_model, PROMPTS, answers=6, max_new_tokens=limits, seed=3, stop_ids=(2, 4, 9, 17, 30))
    limit = torch.tensor(limits).repeat_interleave(6)
    assert torch.equal(bound.mask, free.mask & (torch.arange(25) < limit[:, None]))
    assert torch.equal(bound.tokens, free.tokens * bound.mask)
    assert torch.equal(bound.finished, free.finished & (free.mask.sum(1) <= limit))
    torch.testing.assert_close(bound.log_prob, free.log_prob * bound.mask, atol=1e-5, rtol=0)


def test_a_prompt_is_computed_once_per_question(small_model, monkeypatch):
    rows = []
    forward = small_model.model.forward
    monkeypatch.setattr(small_model.model, "forward", lambda ids, cache=None: rows.append(len(ids)) or forward(ids, cache))
    with torch.no_grad():
        cache, hidden = prefill(small_model, PROMPTS, 5, 8)
    assert rows == [3] and cache.rows == 15 and len(hidden) == 15


@pytest.mark.parametrize("bad", [dict(max_new_tokens=0), dict(answers=0), dict(temperature=0.0), dict(max_new_tokens=40_000),
                                 dict(max_new_tokens=[4, 4]), dict(max_new_tokens=[4, 0, 4])])
def test_senseless_requests_are_refused(small_model, bad):
    with pytest.raises(ValueError):
        generate(small_model, PROMPTS, **{"max_new_tokens": 4, **bad})
