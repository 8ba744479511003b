"""The model that ships, its folder, and how it was trained."""
import hashlib
import json
import random
from types import SimpleNamespace

import pytest
import torch

from conftest import INSTALL, ROOT
from lab.engine.errors import UserError
from lab.engine.model_folder import read_model_folder
from lab.engine.tokens import load_tokenizer
from lab.tools import warmup
from lab.tools.demonstrations import make_example, make_tokenizer
from lab.tools.warmup import orthogonal

TINY = ROOT / "models" / "tiny"


def test_muons_update_is_nearly_orthogonal():
    torch.manual_seed(0)
    for shape in ((8, 8), (24, 8), (8, 24)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.5 and values.max() < 1.3


def test_matrices_are_turned_by_muon_and_all_else_is_moved_by_adamw():
    """A first step of AdamW moves each number by its rate."""
    model = warmup.make_model(50, 1, 64)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    warmup.all_parameters(model)(1.0)
    for name, parameter in model.named_parameters():
        moved = before[name] - parameter.detach()
        is_matrix = parameter.dim() == 2 and "embed" not in name
        assert torch.allclose(moved.abs(), torch.tensor(warmup.ADAM_RATE), rtol=0.01) != is_matrix


def test_the_shipped_model_is_the_one_its_readme_describes():
    checksum = hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest()
    assert checksum in (TINY / "README.md").read_text()
    assert json.loads((TINY / "recipe.json").read_text()) == warmup.RECIPE
    tokenizer = load_tokenizer(TINY)
    assert tokenizer.to_str() == make_tokenizer().to_str()
    assert sum(p.stat().st_size for p in TINY.iterdir()) < 5_000_000


def test_transformers_reads_the_shipped_tokenizer_the_same_way():
    transformers = pytest.importorskip("transformers", reason=INSTALL)
    ours = load_tokenizer(TINY)
    ids, _ = make_example(ours, random.Random(0))
    theirs = transformers.AutoTokenizer.from_pretrained(TINY)
    assert theirs(ours.decode(ids, skip_special_tokens=False)).input_ids == ids
    assert theirs.eos_token_id == 2


@pytest.mark.parametrize("size, parameters", [
    ("small", 112_384), ("medium", 618_496), ("large", 1_813_248)])
def test_models_of_three_sizes(size, parameters):
    model = warmup.make_model(make_tokenizer().get_vocab_size(), *warmup.SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setitem(warmup.RECIPE, "eval_tasks", 4)
    return ["--steps", "1", "--batch", "2", "--threads", "1"]


def test_a_model_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch, quick):
    """One update makes a folder that opens; an error while it is written leaves nothing."""
    warmup.main([*quick, "--out", str(tmp_path / "model")])
    made, ships = (read_model_folder(folder) for folder in (tmp_path / "model", TINY))
    assert made.config == ships.config
    assert json.loads((tmp_path / "model/recipe.json").read_text()) == warmup.RECIPE
    with pytest.raises(UserError, match="exists already"):
        warmup.main([*quick, "--out", str(tmp_path / "model")])
    monkeypatch.setattr(warmup, "save", lambda *_: 1 / 0)
    with pytest.raises(UserError, match="exists already"):
        warmup.main([*quick, "--out", str(tmp_path / "model/config.json")])
    with pytest.raises(ZeroDivisionError):
        warmup.main([*quick, "--out", str(tmp_path / "other")])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.fixture
def real(learner, tmp_path):
    """A folder that transformers wrote: its own tokenizer, two ends of a turn, no recipe."""
    transformers = pytest.importorskip("transformers", reason=INSTALL)
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=load_tokenizer(learner).get_vocab_size(), hidden_size=64, intermediate_size=128,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, eos_token_id=2,
        tie_word_embeddings=True, max_position_embeddings=512)
    model = transformers.Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = [2, 0]
    model.save_pretrained(tmp_path / "real")
    (tmp_path / "real/tokenizer.json").write_bytes((learner / "tokenizer.json").read_bytes())
    (tmp_path / "real/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return tmp_path / "real"


def test_a_real_model_is_warmed_up_in_the_upper_half_of_its_layers(tmp_path, monkeypatch, quick,
                                                                    real):
    monkeypatch.setitem(warmup.REAL_RECIPE, "eval_tasks", 4)
    warmup.main([*quick, "--model", str(real), "--right", "--out", str(tmp_path / "warm")])
    before, after = (read_model_folder(folder) for folder in (real, tmp_path / "warm"))
    changed = {name for (name, a), b in zip(before.named_parameters(), after.parameters())
               if not torch.equal(a, b)}
    assert {name.split(".")[2] for name in changed} == {"2", "3"}  # of 4 layers
    assert len(changed) == 2 * 12  # and of those, every one
    assert after.config.eos_token_id == (2, 0)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "warm" / name).read_bytes() == (real / name).read_bytes()
    recipe = json.loads((tmp_path / "warm/recipe.json").read_text())
    assert recipe["learning_rate"] == 5e-6 and recipe["prompt"] == "short"


def test_the_rate_rises_for_fifty_steps_and_falls_over_the_last_half(monkeypatch, capsys):
    monkeypatch.setattr(warmup, "batches", lambda *_: iter([(None, None)] * 1000))
    monkeypatch.setattr(warmup, "weighted_loss", lambda *_: torch.zeros((), requires_grad=True))
    shares, flags = [], SimpleNamespace(steps=1000, seed=0, batch=1, right=False)
    warmup.train(torch.nn.Linear(1, 1), None, shares.append, flags)
    assert shares[:2] == [1 / 50, 2 / 50] and shares[48] < shares[49] == shares[499] == 1
    assert (shares[750], shares[999]) == pytest.approx((1 / 2, 2 / 1000))
    assert capsys.readouterr().out.count("/1000  loss 0.0000") == 20


def test_the_loss_is_that_of_all_logits(real):
    """0.5 and 2 are the weights of the third and fourth token; all else counts nothing."""
    model = read_model_folder(real)
    ids, weights = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[0, 0, 0.5, 2.0]])
    log_p = model(ids).log_softmax(-1)[0]
    expected = -(0.5 * log_p[1, 5] + 2 * log_p[2, 6]) / 2.5
    assert torch.allclose(warmup.weighted_loss(model, ids, weights), expected)
