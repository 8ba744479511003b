"""The model against `transformers` and against its formulas, the sampler against a forward pass of
each answer alone; a model folder that is damaged, foreign or not computed here is refused in one
sentence."""
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import INSTALL, refusal, untidy_model
from plain_forward import plain_logits
from qwen2_model import Cache, draw, generate, load_model, read_config, save_model
from runs import edit_config

pytestmark = pytest.mark.numerics

SHAPE = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
             num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=256)
IDS = torch.randint(0, 97, (3, 40), generator=torch.Generator().manual_seed(0))


def reference(kind: str, tied: bool, folder, shard_size="1GB", **more):
    """A random model of the other implementation, saved in the folder; its biases and norms are
    away from 0 and 1, for defaults hide mistakes."""
    transformers = pytest.importorskip("transformers", reason=INSTALL)
    torch.manual_seed(1)
    own = dict(head_dim=20) if kind == "qwen3" else {}
    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, **own, **more},
                                               tie_word_embeddings=tied)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def assert_same_logits(folder, other, ids=IDS):
    with torch.no_grad():
        ours = load_model(folder)(ids)
        torch.testing.assert_close(ours, other(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind, tied, shard_size", [
    ("qwen2", True, "60KB"), ("qwen2", False, "1GB"), ("qwen3", True, "1GB"),
    ("qwen3", False, "60KB")])
def test_logits_agree_with_transformers(tmp_path, kind, tied, shard_size):
    other = reference(kind, tied, tmp_path, shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "60KB")
    assert_same_logits(tmp_path, other)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_what_we_save_transformers_opens(tmp_path, kind):
    rope = {"rope_type": "default", "rope_theta": 5e4}
    reference(kind, kind == "qwen2", tmp_path / "a", rope_parameters=rope)
    ours = load_model(tmp_path / "a")
    save_model(ours, tmp_path / "b")
    theirs = pytest.importorskip("transformers").AutoModelForCausalLM
    assert_same_logits(tmp_path / "b", theirs.from_pretrained(tmp_path / "b"))
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path / "b")(IDS), ours(IDS))


ROPE = {"rope_type": "default", "rope_theta": 300.0}


@pytest.mark.parametrize("place", [
    {"rope_theta": 300.0, "dtype": KeyError, "torch_dtype": "float32", "layer_types": KeyError,
     "sliding_window": 64, "use_sliding_window": False},  # as older versions wrote it
    {"rope_scaling": ROPE}])
def test_rope_theta_stands_in_one_of_three_places(tmp_path, place):
    other = reference("qwen2", True, tmp_path, rope_parameters=ROPE)
    edit_config(tmp_path, rope_parameters=KeyError, **place)
    assert_same_logits(tmp_path, other)


@pytest.mark.parametrize("kind, tied, key_heads", [
    ("qwen2", True, 2), ("qwen2", False, 1), ("qwen3", True, 4), ("qwen3", False, 2)])
def test_logits_and_gradients_are_those_of_the_formulas(kind, tied, key_heads):
    """Also without the other implementation, and for rows of a batch, whose later tokens change
    nothing before them."""
    model = untidy_model(model_type=kind, tie_word_embeddings=tied, num_key_value_heads=key_heads,
                         rope_theta=300.0, rms_norm_eps=1e-2)
    found = model(IDS % 50)
    for row, length in enumerate((40, 1, 17)):
        expected = plain_logits(model, (IDS[row, :length] % 50).tolist())
        torch.testing.assert_close(found[row, :length].double(), expected, atol=1e-4, rtol=1e-4)
    weight = torch.linspace(-1, 1, 50)
    gradients = [torch.autograd.grad((logits.log_softmax(-1) * weight).mean(), model.parameters())
                 for logits in (found[0], plain_logits(model, (IDS[0] % 50).tolist()))]
    for ours, expected in zip(*gradients):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-3)


NORM, OUTPUT = "model.norm.weight", "lm_head.weight"


def rewrite(folder, **changes):
    """Put other tensors in the place of some."""
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(tensors | changes, path)


def test_a_config_that_asks_for_something_else_is_refused_before_memory_is_taken(folder):
    text = (folder / "config.json").read_text()
    for changes, words in (
            ({"model_type": "llama"}, "model_type 'llama' is not implemented"),
            ({"model_type": None}, "model_type None is not implemented"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling is not"),
            ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope scaling is not"),
            ({"use_sliding_window": True}, "use_sliding_window True is not implemented"),
            ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
            ({"attention_bias": True, "model_type": "qwen3"}, "attention_bias True"),
            ({"quantization_config": {"bits": 4}}, "quantization_config"),
            ({"vocab_size": 10 ** 9}, "weight has the shape (50, 64) and not (1000000000, 64)"),
            ({"rope_scaling": [4]}, "rope scaling is not"),
            ({"num_key_value_heads": 3}, "_proj."), ({"head_dim": 15}, "_proj."),
            ({"num_hidden_layers": 1}, "norm.weight is unexpected (12 "),
            ({"model_type": "qwen3"}, "attn."),
            ({"tie_word_embeddings": False}, f"asks for: {OUTPUT} is missing")):
        (folder / "config.json").write_text(text)
        edit_config(folder, **changes)
        assert words in refusal(load_model, folder), changes


@pytest.mark.parametrize("name, value", [
    ("vocab_size", KeyError), ("hidden_size", "64"), ("hidden_size", 64.0), ("hidden_size", True),
    ("num_attention_heads", 0), ("num_hidden_layers", -1), ("num_hidden_layers", 10 ** 7),
    ("max_position_embeddings", 10 ** 10), ("rms_norm_eps", "1e-6"), ("rope_theta", math.inf),
    ("rope_theta", [4]), ("tie_word_embeddings", "false"), ("eos_token_id", "</s>"),
    ("eos_token_id", [[5]]), ("eos_token_id", 10 ** 30), ("eos_token_id", -1)])
def test_read_config_refuses_numbers_that_no_model_has(folder, name, value):
    edit_config(folder, head_dim=KeyError, rope_parameters=KeyError, **{name: value})
    assert f"{name} should not be " in refusal(load_model, folder)


def test_four_kinds_of_numbers_are_read(folder):
    for kind in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        rewrite(folder, **{NORM: torch.full((64,), 1.5, dtype=kind)})
        norm = load_model(folder).model.norm.weight
        assert norm.dtype == torch.float32 and (norm == 1.5).all()


def test_files_that_are_cut_off_or_missing_are_named(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for content in (whole[:len(whole) // 2], b""):
        path.write_bytes(content)
        assert "model.safetensors cannot be read: " in refusal(load_model, folder)
    path.unlink()
    assert f"{folder} has no model.safetensors" in refusal(load_model, folder)
    assert "is no model folder" in refusal(load_model, folder / "elsewhere")


def test_stop_tokens_come_from_the_generation_config_first(folder):
    for config, generation, stop in ((5, None, (5,)), ([5, 6], None, (5, 6)), (None, None, ()),
                                     (5, [7, 8], (7, 8)), (None, 9, (9,))):
        edit_config(folder, eos_token_id=config)
        file = folder / "generation_config.json"
        file.unlink(missing_ok=True)
        if generation:
            file.write_text(json.dumps({"eos_token_id": generation}))
        model = load_model(folder)
        assert model.config.eos_token_id == stop
        save_model(model, folder.parent / "again")
        assert read_config(folder.parent / "again") == model.config


# ------------------------------------------------------------------------------------ the sampler
PROMPTS, STOPS = [[7, 8, 9], [11], [*range(10, 47)]], (2, 23, 41)


@pytest.mark.parametrize("greedy", [False, True])
def test_what_is_sampled_is_what_the_model_says_of_it(greedy):
    """Each answer alone behind its prompt. The position before a token predicts it, and no answer
    depends on the others of its batch."""
    model = untidy_model()
    found = generate(model, PROMPTS, 4, 14, STOPS, torch.Generator().manual_seed(1), greedy)
    assert found.ids.shape == found.mask.shape and found.mask[:, -1].any()
    assert greedy or 0 < found.finished.sum() < len(found.ids)  # some stop, some are cut off
    for row, prompt in enumerate(prompt for prompt in PROMPTS for _ in range(4)):
        ids, n = found.ids[row, found.mask[row]].tolist(), int(found.mask[row].sum())
        logits = plain_logits(model, prompt + ids)[len(prompt) - 1:-1].detach()
        log_p = logits.log_softmax(-1)
        p = log_p.exp()
        for name, expected in (("log_prob", log_p[range(n), ids]), ("entropy", -(p * log_p).sum(1)),
                               ("collision", p.square().sum(1))):
            column = getattr(found, name)[row]
            torch.testing.assert_close(column[:n].double(), expected, atol=1e-4, rtol=1e-4)
            assert not column[n:].any()
        assert not greedy or ids == logits.argmax(-1).tolist()
        assert not set(ids[:-1]) & {*STOPS} and (ids[-1] in STOPS) == bool(found.finished[row])
        assert found.mask[row, :n].all() and not found.ids[row, n:].any()
        assert n == 14 or found.finished[row]


def test_a_cache_reads_on_with_a_gradient_and_takes_rows_in_any_order():
    """Answers to prompts of 3 and 1 tokens, against the whole row at once. With a gradient they are
    read in two parts; without one, rows change their places between the parts."""
    model, prompts, prompt_of = untidy_model(), PROMPTS[:2], torch.tensor([0, 0, 1, 1])
    ids, weight = IDS[0, :24].view(4, 6) % 50, torch.linspace(-1, 1, 50)
    cache = Cache(model.model, prompts, prompt_of)
    states = torch.cat([cache.read(ids[:, :2]), cache.read(ids[:, 2:])], 1)
    found, expected = model.logits(states), torch.stack([
        plain_logits(model, prompts[number] + row.tolist())[len(prompts[number]):]
        for number, row in zip(prompt_of.tolist(), ids)])
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)
    gradients = [torch.autograd.grad((logits.log_softmax(-1) * weight).mean(), model.parameters())
                 for logits in (found, expected)]
    for ours, of_formulas in zip(*gradients):
        torch.testing.assert_close(ours, of_formulas, atol=1e-5, rtol=1e-3)
    rows = torch.tensor([3, 0, 2])
    with torch.no_grad():
        cache = Cache(model.model, prompts, prompt_of)
        cache.read(ids[:, :3])
        cache.take(rows)
        found = model.logits(cache.read(ids[rows, 3:]))
    torch.testing.assert_close(found.double(), expected[rows, 3:], atol=1e-4, rtol=1e-4)
    with pytest.raises(RuntimeError):
        cache.take(torch.tensor([0, 1, 2, 2]))  # more rows than there were


def test_an_answer_does_not_depend_on_the_answers_beside_it():
    """The random numbers of all tokens are drawn first, so the first prompt's answers are the same
    without the other prompts, and without stop tokens until they would have stopped."""
    model = untidy_model()
    whole, alone, endless = (
        generate(model, prompts, 4, 14, stops, torch.Generator().manual_seed(1))
        for prompts, stops in ((PROMPTS, STOPS), (PROMPTS[:1], STOPS), (PROMPTS, ())))
    T = alone.mask.shape[1]
    assert torch.equal(whole.ids[:4, :T], alone.ids) and torch.equal(whole.mask[:4, :T], alone.mask)
    T = whole.mask.shape[1]
    assert endless.mask.all() and endless.mask.shape[1] == 14 and not endless.finished.any()
    assert torch.equal(endless.ids[:, :T] * whole.mask, whole.ids)


def test_known_tokens_may_follow_and_are_read_at_once():
    """Every answer gets 3 and 4 after its first token, and ends with its second own one. So two
    passes are made: over the prompts, and over three tokens of each row."""
    model, passes, draws = untidy_model(), [], []
    model.model.register_forward_pre_hook(lambda _, given: passes.append(given[0].shape))

    def choose(logits, uniform, greedy):
        draws.append(draw(logits, uniform, greedy))
        return draws[-1]

    def follow(row, t, token, ends):
        known = torch.tensor([[3, 4]] if t == 0 else [[]], dtype=torch.long)
        ends = torch.full_like(token, t == 3, dtype=torch.bool)
        return torch.cat([token[:, None], known.expand(len(row), -1)], 1), ends

    found = generate(model, [[9], [9]], 2, 8, (), torch.Generator().manual_seed(1), False,
                     Cache(model.model, PROMPTS, torch.tensor([0, 2, 2])), choose, follow)
    assert passes == [(3, 37), (3, 3)] and len(draws) == 2
    assert found.mask.tolist() == [[True] * 4] * 3 and found.ids[:, 1:3].tolist() == [[3, 4]] * 3
    for row, prompt in enumerate([PROMPTS[0], PROMPTS[2], PROMPTS[2]]):
        first, _, _, last = ids = found.ids[row].tolist()
        log_p = plain_logits(model, prompt + ids)[len(prompt) - 1:].detach().log_softmax(-1)
        expected = [float(log_p[0, first]), 0, 0, float(log_p[3, last])]
        assert found.log_prob[row].tolist() == pytest.approx(expected, abs=1e-4)


def test_a_token_is_drawn_as_often_as_its_probability_says():
    """Numbers in equal distances from 0 to 1 take each token once for each piece of its length; the
    last of them takes a token that has a probability, also after rounding."""
    p = torch.tensor([0.05, 0.0, 0.6, 0.25, 0.1, 0.0])
    uniform = (torch.arange(1000) + 0.5) / 1000
    token, known = draw((p.log() + 7).expand(1000, 6), uniform, greedy=False)
    assert torch.bincount(token, minlength=6).tolist() == [50, 0, 600, 250, 100, 0]
    assert known[0].exp().tolist() == pytest.approx(p[token].tolist(), rel=1e-5)
    [token], _ = draw(p.log()[None], torch.tensor([1.0]), greedy=False)
    assert token == 4
    [token], known = draw(torch.tensor([[1.0, 2.0, 1.0]]).log(), torch.tensor([0.99]), greedy=True)
    log_2 = math.log(2)  # p is 1/4, 1/2, 1/4
    assert token == 1 and known[:, 0].tolist() == pytest.approx([-log_2, 1.5 * log_2, 0.375])
