"""The model that ships, its folder, and how it was trained."""
import hashlib
import json
import random

import pytest
import torch

from conftest import ROOT
from engine.errors import UserError
from engine.rollouts import sample_answers, score_answers
from harness.settings import make_settings
from engine.tokens import load_tokenizer
from qwen2_model import Qwen2
from tools import warmup
from tools.demonstrations import TASK, make_example, make_tokenizer
from tools.warmup import orthogonal

TINY = ROOT / "models" / "tiny"


def test_muons_update_is_nearly_orthogonal():
    torch.manual_seed(0)
    for shape in ((8, 8), (24, 8), (8, 24)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
        assert values.min() > 0.5 and values.max() < 1.3


def test_the_shipped_model_is_the_one_its_readme_describes():
    checksum = hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest()
    assert checksum in (TINY / "README.md").read_text()
    assert json.loads((TINY / "recipe.json").read_text()) == warmup.RECIPE
    tokenizer = load_tokenizer(TINY)
    assert tokenizer.to_str() == make_tokenizer().to_str()
    assert sum(p.stat().st_size for p in TINY.iterdir()) < 5_000_000


def test_transformers_reads_the_shipped_folder_the_same_way():
    transformers = pytest.importorskip("transformers")
    ours = load_tokenizer(TINY)
    ids, _ = make_example(ours, random.Random(0))
    theirs = transformers.AutoTokenizer.from_pretrained(TINY)
    assert theirs(ours.decode(ids, skip_special_tokens=False)).input_ids == ids
    assert theirs.eos_token_id == 2
    with torch.no_grad():
        logits = transformers.AutoModelForCausalLM.from_pretrained(TINY)(torch.tensor([ids])).logits
        torch.testing.assert_close(
            Qwen2.from_pretrained(TINY)(torch.tensor([ids])), logits, atol=1e-4, rtol=0)


def test_the_shipped_model_starts_where_there_is_something_to_learn():
    """Held-out success between 15% and 30%, some lapses of format, arithmetic in place."""
    settings = make_settings({"model": str(TINY)})
    model, tokenizer, task = Qwen2.from_pretrained(TINY), load_tokenizer(TINY), TASK
    rollouts = sample_answers(model, tokenizer, task, task.held_out_problems(400), 1,
                              max_new_tokens=settings.max_new_tokens, seed=1)
    rollouts = score_answers(rollouts, tokenizer, task)
    mean = {name: values.mean().item() for name, values in rollouts.scores.items()}
    assert 0.15 < mean["answer"] < 0.30 and 0.90 < mean["format"] < 0.98
    assert mean["reasoning"] > 0.93
    assert rollouts.finished.float().mean() > 0.97


@pytest.mark.parametrize("size, layers, width", [("small", 2, 64), ("medium", 3, 128),
                                                 ("large", 6, 256)])
def test_a_size_is_a_number_of_blocks_and_a_width(size, layers, width):
    config = warmup.make_model(10, *warmup.SIZES[size]).config
    assert (config.num_hidden_layers, config.hidden_size) == (layers, width)
    shipped = Qwen2.from_pretrained(TINY).config
    assert warmup.SIZES[warmup.FLAGS["size"].default] == (shipped.num_hidden_layers,
                                                          shipped.hidden_size)


def test_the_page_says_how_large_the_sizes_are():
    page = (ROOT / "docs/results.md").read_text()
    for layers, width in warmup.SIZES.values():
        model = warmup.make_model(make_tokenizer().get_vocab_size(), layers, width)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert f"| {layers} | {width} | {parameters:,} |" in page


def test_a_model_folder_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    """One update makes a folder that opens; an error while it is written leaves nothing."""
    monkeypatch.setattr(warmup, "TEST_PROBLEMS", 4)
    short = ["--steps", "1", "--batch", "2", "--size", "small", "--threads", "1"]
    warmup.main([*short, "--out", str(tmp_path / "model")])
    assert Qwen2.from_pretrained(tmp_path / "model").config.num_hidden_layers == 2
    readme = (tmp_path / "model/README.md").read_text()
    assert "`python -m tools.warmup --steps 1 --batch 2 --size small" in readme
    assert json.loads((tmp_path / "model/recipe.json").read_text()) == warmup.RECIPE
    with pytest.raises(UserError, match="exists already"):
        warmup.main([*short, "--out", str(tmp_path / "model")])
    monkeypatch.setattr(warmup, "write_json", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        warmup.main([*short, "--out", str(tmp_path / "other")])
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
