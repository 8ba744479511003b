"""Tokenizers that are damaged, foreign, or fail."""
import json
import shutil

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from conftest import ROOT
from engine.errors import UserError
from harness.load import load_policy
from harness.settings import make_settings
from engine.tokens import encode, load_tokenizer, naive_class, token_bytes
from qwen2_model import Qwen2

@pytest.fixture
def tokenizer_file(tmp_path):
    shutil.copy(ROOT / "models/tiny/tokenizer.json", tmp_path)
    return tmp_path / "tokenizer.json"


@pytest.mark.parametrize("content", ["5", "", '{"version": "1.0"}', "[" * 100_000, "\udc80"])
def test_a_damaged_tokenizer_is_refused(tokenizer_file, content):
    tokenizer_file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match="tokenizer.json is not a tokenizer file"):
        load_tokenizer(tokenizer_file.parent)


def byte_level_tokenizer(merges):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def test_the_bytes_of_a_byte_level_tokenizer():
    tokenizer = byte_level_tokenizer([("<", "/"), (">", "Ċ"), ("Ã", "©")])
    text = "né \U0001f600 a</think>\n<answer>3</answer><|im_end|>"
    pieces = token_bytes(tokenizer, tokenizer.encode(text).ids)
    assert b"".join(pieces).decode() == text and b">\n" in pieces and b"<|im_end|>" in pieces
    assert token_bytes(tokenizer, [10_000])[0].decode() == "\ufffd"  # beyond the vocabulary
    tokenizer.normalizer = normalizers.NFC()  # it composes an accent, which is no loss
    ids = encode(tokenizer, "e\u0301", "a text")
    assert b"".join(token_bytes(tokenizer, ids)).decode() == "\u00e9"


@pytest.mark.parametrize("changes, words", [
    ({"decoder": None}, "byte-level"), ({"added_tokens": []}, "im_start"),
    ({"model": {"type": "BPE", "vocab": {"\u20ac": 500}, "merges": []}},
     "token 500 is not written in the byte-level alphabet")])
def test_a_tokenizer_that_does_not_fit_is_refused(tokenizer_file, changes, words):
    byte_level_tokenizer([]).save(str(tokenizer_file))
    tokenizer_file.write_text(json.dumps(json.loads(tokenizer_file.read_text()) | changes))
    with pytest.raises(UserError, match=words):
        load_tokenizer(tokenizer_file.parent, vocabulary=1000)
    tokenizer_file.unlink()
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(tokenizer_file.parent)


def test_a_tokenizer_without_tokens_is_refused(tokenizer_file):
    """The tiny model's are all added ones."""
    content = json.loads(tokenizer_file.read_text()) | {"added_tokens": []}
    content["model"] |= {"vocab": {}, "merges": []}
    tokenizer_file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="tokenizer.json has no tokens"):
        load_tokenizer(tokenizer_file.parent)


def test_a_tokenizer_of_another_model_is_refused(learner, tmp_path):
    """The prompt would name tokens that the model has no embedding of."""
    model = Qwen2.from_pretrained(learner)
    known = model.config.vocab_size
    assert token_bytes(load_tokenizer(learner, known), [known - 1]) != [b"\xef\xbf\xbd"]
    shutil.copytree(learner, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(learner / "tokenizer.json"))
    tokenizer.add_tokens(["more"])
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    with pytest.raises(UserError, match=f"has a token {known}, beyond the {known} that the model"):
        load_policy(make_settings({"model": str(tmp_path / "model")}))


@pytest.mark.parametrize("name, texts", [
    ("structure", ("<think>", " </answer> ")),
    ("filler", ("</", "think", ">\n", "Times", "", ",", "<think>a", "[")),
    ("reasoning", (" 12", "x2", "+", " =", "()", " times", "2 + 3"))])
def test_the_classes_of_a_regex(name, texts):
    assert {naive_class(text) for text in texts} == {name}
