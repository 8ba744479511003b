"""Tokenizers that are damaged, foreign, or fail."""
import json
import re
import shutil

import pytest
from conftest import ROOT
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from lab.engine.errors import UserError
from lab.harness.build import load_policy
from lab.harness.settings import make_settings
from lab.engine.tokens import (encode, encode_prompt, load_tokenizer, token_bytes,
                               without_earlier_turns)
from qwen2_model import spelling


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
    for token in range(tokenizer.get_vocab_size()):  # a part of a character, too
        [piece] = token_bytes(tokenizer, [token])
        assert spelling(tokenizer, token) == piece.decode(errors="replace")
    tokenizer.normalizer = normalizers.NFC()  # it composes an accent, which is no loss
    ids = encode(tokenizer, "e\u0301", "a text")
    assert b"".join(token_bytes(tokenizer, ids)).decode() == "\u00e9"


TINY = ROOT / "models/tiny"
EMPTY = {"type": "BPE", "vocab": {}, "merges": []}


@pytest.mark.parametrize("content, vocabulary, words", [
    *((text, None, "cannot be read")
      for text in ("5", "", '{"version": "1.0"}', "[" * 100_000)),
    ("\udc80", None, "'utf-8' codec"),
    ({"decoder": None}, None, "only byte-level"), ({"added_tokens": []}, 1000, "<|im_start|> is"),
    ({"model": {**EMPTY, "vocab": {"\u20ac": 500}}}, None, "500 is not written in the byte-level"),
    ({"model": EMPTY, "added_tokens": []}, None, "has no tokens"), (None, None, "No such file")])
def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path, content, vocabulary, words):
    """Whatever a file holds; what an own one has changed; no file."""
    path = tmp_path / "tokenizer.json"
    if isinstance(content, str):
        path.write_bytes(content.encode(errors="surrogateescape"))
    elif content:
        byte_level_tokenizer([]).save(str(path))
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    with pytest.raises(UserError, match=f"tokenizer.json.* {re.escape(words)}"):
        load_tokenizer(tmp_path, vocabulary)


def test_a_tokenizer_of_another_model_is_refused(learner, tmp_path):
    """The prompt would name tokens that the model has no embedding of."""
    shutil.copytree(learner, tmp_path / "model")
    tokenizer = load_tokenizer(learner)
    known = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["more"])
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    with pytest.raises(UserError, match=f"has a token {known}, and the model .* only {known} tok"):
        load_policy(make_settings({"model": str(tmp_path / "model")}))


@pytest.mark.parametrize("text, hint", [(" 4,3", True), (" 4,999999", False), (" wrd", False)])
def test_a_number_without_its_blank_is_told(text, hint):
    with pytest.raises(UserError, match="cannot spell a text") as refused:
        encode(load_tokenizer(TINY), text, "a text")
    assert ("begin with a blank" in str(refused.value)) == hint


def test_a_turn_that_would_be_spelt_out_is_refused(tmp_path):
    """<|im_end|> has an id of its own, which no text is encoded to."""
    tokenizer = byte_level_tokenizer([])
    known = json.loads(tokenizer.to_str())
    turn = known["added_tokens"].pop()
    known["model"]["vocab"][turn["content"]] = turn["id"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(known))
    with pytest.raises(UserError, match=re.escape("<|im_end|> is not one of added_tokens")):
        load_tokenizer(tmp_path, 1000)
    load_tokenizer(tmp_path)  # to spell what was sampled it will do


@pytest.mark.parametrize("text, words", [
    ("", "the prompt of the problem 'this' is empty"),
    ("a\ud800", "the prompt of the problem this contains half of a character: '\\ud800'")])
def test_a_prompt_that_no_model_can_take_is_refused(text, words):
    with pytest.raises(UserError, match=re.escape(words)):
        encode_prompt(byte_level_tokenizer([]), text, "this")


@pytest.mark.parametrize("prompt, shown", [
    ("<|im_start|>user\na", "<|im_start|>user\na"), ("no turns", "no turns"), ("", ""),
    ("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na",
     "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na"),
    ("<|im_start|>user\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>user\nc",
     "[2 earlier turns] <|im_start|>user\nc")])
def test_of_several_questions_people_are_shown_the_last(prompt, shown):
    assert without_earlier_turns(prompt) == shown
