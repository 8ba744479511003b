"""Byte-level tokenizers: loading one, and the bytes of each token."""
import json
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import UserError

END_OF_TURN = ("<|im_end|>", "<|endoftext|>")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"{path} does not exist: the folder needs the model's own tokenizer")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer file: {error}") from None
    if '"ByteLevel"' not in json.dumps(json.loads(path.read_text(encoding="utf-8")).get("decoder")):
        raise UserError(f"{path}: only byte-level tokenizers (as Qwen's) are implemented here")
    absent = [token for token in ("<|im_start|>", "<|im_end|>") if tokenizer.token_to_id(token) is None]
    if absent:
        raise UserError(f"{path} has no token {absent[0]}: the prompt is ChatML")
    return tokenizer


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """The printable characters that byte-level tokenizers write for the 256 bytes (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


@lru_cache(maxsize=4)
def spellings(tokenizer: Tokenizer) -> dict[int, bytes]:
    """The bytes of every token, worked out once."""
    alphabet, added = byte_alphabet(), tokenizer.get_added_tokens_decoder()
    return {i: word.encode() if i in added else bytes(alphabet[character] for character in word)
            for word, i in tokenizer.get_vocab(with_added_tokens=True).items()}


def token_bytes(tokenizer: Tokenizer, ids) -> list[bytes]:
    """The bytes of each token. A character may be spread over several tokens, bytes never are."""
    known, unknown = spellings(tokenizer), "\N{REPLACEMENT CHARACTER}".encode()
    return [known.get(i, unknown) for i in ids]  # embedding matrices are often larger than the vocabulary
