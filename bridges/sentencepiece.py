"""Tokenizers as Llama 2's and Gemma's, for runs that are imported. A token of theirs is a text with
▁ for a space, or a byte: <0x0A>. Run folders have tokens in the byte-level alphabet."""
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models

from engine.errors import UserError
from engine.tokens import byte_alphabet, encode, load_tokenizer, token_bytes
from harness.files import read_json


class Splitter:
    """Splits texts as the tokenizer of a folder; `spelling` has its numbers in our alphabet."""

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        if not read_json(path).get("model", {}).get("byte_fallback"):
            self.splits = self.spelling = load_tokenizer(folder)
            return
        self.splits = Tokenizer.from_file(str(path))
        self.spelling = as_byte_level(self.splits)

    def encode(self, text: str, what: str) -> list[int]:
        """Some begin each text with a space of their own."""
        if self.splits is self.spelling:
            return encode(self.splits, text, what)
        ids = self.splits.encode(text, add_special_tokens=False).ids
        found = b"".join(token_bytes(self.spelling, ids)).decode(errors="replace")
        if found.replace(" ", "") != text.replace(" ", ""):
            raise UserError(f"the tokenizer cannot spell {what}")
        return ids


def as_byte_level(tokenizer: Tokenizer) -> Tokenizer:
    """Of a byte that is a text too, <0x41> and A, only the text is known: texts are split so."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    spelled = {}
    for word, number in sorted(tokenizer.get_vocab().items(), key=lambda each: -len(each[0])):
        byte = re.fullmatch("<0x([0-9A-F]{2})>", word)
        content = bytes.fromhex(byte[1]) if byte else word.replace("▁", " ").encode()
        spelled["".join(letters[each] for each in content)] = number
    spelling = Tokenizer(models.WordLevel(spelled, unk_token="<unk>"))
    spelling.decoder = decoders.ByteLevel()
    return spelling
