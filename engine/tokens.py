"""Byte-level tokenizers (Qwen's): the ids of a prompt, the bytes of each token; and what a token is
called: the section of the answer it stands in, the kind of text it is."""
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

from engine.errors import UserError

END_OF_TURN = ("<|im_end|>", "<|endoftext|>")
CHATML = ("<|im_start|>", "<|im_end|>")  # around a turn: every prompt is written so
USER_TURN = "<|im_start|>user\n"
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()

# Codes, as credit files hold them; a task assigns them (its method `label`).
OTHER, THINK, ANSWER = range(3)                                # section codes
WORD, SPACE, NUMBER, OPERATOR, BRACKET, TAG, END = range(7)    # kind codes
SECTIONS = ("other", "think", "answer")
KINDS = ("word", "space", "number", "operator", "bracket", "tag", "end")


def load_tokenizer(folder: str | Path, vocabulary: int | None = None) -> Tokenizer:
    """A model that knows `vocabulary` tokens can take no others, and is asked in ChatML; without a
    model the tokenizer only has to spell what was sampled."""
    path = Path(folder) / "tokenizer.json"
    if not path.exists():
        raise UserError(f"{path} does not exist: the folder needs the model's own tokenizer")
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer file: {error}") from None
    if '"ByteLevel"' not in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        raise UserError(f"{path}: only byte-level tokenizers (as Qwen's) are implemented here")
    for token in CHATML:
        if vocabulary is not None and (
                len(tokenizer.encode(token, add_special_tokens=False).ids) != 1):
            raise UserError(f"{path}: {token} is not one of added_tokens, so it would be spelt out "
                            "in every prompt, which is ChatML")
    refuse_tokens(spellings(tokenizer), vocabulary, path)
    return tokenizer


def refuse_tokens(bytes_of: dict[int, bytes | None], vocabulary: int | None, path: Path) -> None:
    if not bytes_of:
        raise UserError(f"{path} has no tokens")
    for number, spelling in bytes_of.items():
        if spelling is None:
            raise UserError(f"{path}: token {number} is not written in the byte-level alphabet")
    highest = max(bytes_of)
    if vocabulary is not None and highest >= vocabulary:
        raise UserError(f"{path} has a token {highest}, beyond the {vocabulary} that the model of "
                        "this folder knows: it belongs to another model")


def encode_prompt(tokenizer: Tokenizer, text: str, problem: str) -> list[int]:
    """The ids of a prompt. `problem` says whose it is, should the tokenizer lack a word of it."""
    told = problem if len(problem) <= 100 else f"{problem[:100]}..."
    ids = encode(tokenizer, text, f"the prompt of the problem {told}")
    if not ids:
        raise UserError(f"the prompt of the problem {told!r} is empty: there is nothing to go on "
                        "from")
    return ids


def without_earlier_turns(prompt: str) -> str:
    """A prompt for people: of several questions the last one, which is the one that is asked."""
    *earlier, asked = prompt.split(USER_TURN)
    if len(earlier) < 2:
        return prompt
    return f"[{len(earlier) - 1} earlier turns] {USER_TURN}{asked}"


def encode(tokenizer: Tokenizer, text: str, what: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} has half a character: {text[error.start]!r}") from None
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    rules = tokenizer.normalizer  # Qwen's composes accents: another spelling, but nothing is lost
    if b"".join(token_bytes(tokenizer, ids)).decode(errors="replace") != (
            rules.normalize_str(text) if rules else text):
        raise UserError(f"the tokenizer cannot spell {what}: its {tokenizer.get_vocab_size()} "
                        "tokens are all the words and numbers that this model knows")
    return ids


def token_bytes(tokenizer: Tokenizer, ids: Iterable[int]) -> list[bytes]:
    """The bytes of each token. A character may be spread over several tokens, bytes never are."""
    known = spellings(tokenizer)
    # an embedding matrix is often larger than the vocabulary: a model may sample an unknown token
    return [known.get(i) or UNKNOWN for i in ids]


@lru_cache(maxsize=4)
def spellings(tokenizer: Tokenizer) -> dict[int, bytes | None]:
    """The bytes of every token; None of a token that is not written in the byte-level alphabet."""
    alphabet = byte_alphabet()
    bytes_of = {i: bytes(alphabet[c] for c in word) if alphabet.keys() >= set(word) else None
                for word, i in tokenizer.get_vocab(with_added_tokens=False).items()}
    added = tokenizer.get_added_tokens_decoder().items()
    return bytes_of | {i: token.content.encode() for i, token in added}


def byte_alphabet() -> dict[str, int]:
    """The byte behind each of the 256 characters of byte-level tokenizers (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(hidden)}
