"""Byte-level tokenizers (Qwen's): the ids of a prompt, and the bytes of each token."""
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer

import grpo
import qwen2_model
from countdown_task import (  # many take these from here
    ANSWER as ANSWER, BRACKET as BRACKET, END as END, END_OF_TURN as END_OF_TURN, KINDS as KINDS,
    NUMBER as NUMBER, OPERATOR as OPERATOR, OTHER as OTHER, SECTIONS as SECTIONS, SPACE as SPACE,
    TAG as TAG, THINK as THINK, WORD as WORD, without_end_of_turn as without_end_of_turn)
from lab.engine.errors import UserError

CHATML = ("<|im_start|>", "<|im_end|>")  # around a turn, in every prompt
KNOWS_WORDS = 10_000  # tokens: a tokenizer with fewer is that of models/tiny or the like
USER_TURN = "<|im_start|>user\n"
UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()


def load_tokenizer(folder: str | Path, vocabulary: int | None = None) -> Tokenizer:
    """Read tokenizer.json, and check that it suits a model that knows `vocabulary` tokens. All its
    tokens must be among them, and the tokens of ChatML, the format of the prompts, must be among
    its own. Without a model `vocabulary` is None: then the tokenizer is only needed to spell what
    was sampled."""
    tokenizer = qwen2_model.load_tokenizer(Path(folder))
    if wrong := next(faults(tokenizer, vocabulary), ""):
        raise UserError(f"{folder}/tokenizer.json{wrong}")
    return tokenizer


def faults(tokenizer: Tokenizer, vocabulary: int | None) -> Iterator[str]:
    """What is wrong with a tokenizer for a model that knows `vocabulary` tokens."""
    if '"ByteLevel"' not in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        yield ": only byte-level tokenizers (as Qwen's) are implemented here"
    for token in CHATML if vocabulary is not None else ():
        if len(tokenizer.encode(token, add_special_tokens=False).ids) != 1:
            yield (f": {token} is not one of added_tokens. Every prompt has it, because prompts "
                   "are ChatML, and there it would be spelt out in several tokens")
    bytes_of = spellings(tokenizer)
    if not bytes_of:
        yield " has no tokens"
    for number, spelling in bytes_of.items():
        if spelling is None:
            yield f": token {number} is not written in the byte-level alphabet"
    highest = max(bytes_of)
    if vocabulary is not None and highest >= vocabulary:
        yield (f" belongs to another model: it has a token {highest}, and the model of this folder "
               f"knows only {vocabulary} tokens")


def encode_prompt(tokenizer: Tokenizer, text: str, problem: str) -> list[int]:
    """The ids of a prompt. `problem` names it in the message if the tokenizer lacks a word."""
    named = problem if len(problem) <= 100 else f"{problem[:100]}..."
    ids = encode(tokenizer, text, f"the prompt of the problem {named}")
    if not ids:
        raise UserError(f"the prompt of the problem {named!r} is empty: there is nothing for the "
                        "model to continue")
    return ids


def without_earlier_turns(prompt: str) -> str:
    """A prompt as it is printed for people: of several user turns, only the last one."""
    _, *turns = prompt.split(USER_TURN)  # before the first turn may be one of the system
    if len(turns) < 2:
        return prompt
    return f"[{len(turns) - 1} earlier turns] {USER_TURN}{turns[-1]}"


def encode(tokenizer: Tokenizer, text: str, what: str) -> list[int]:
    """The ids of a text by grpo.py's `encode`, which refuses a text that they do not spell. What is
    missing is said here; `what` names the text in messages."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{what} contains half of a character: {text[error.start]!r}") from None
    text = normalised(tokenizer, text)
    try:
        return grpo.encode(tokenizer, text)
    except UserError:
        lost = [word for word in re.findall(r"\s*\S+", text) if not can_spell(tokenizer, word)]
        which = f" ({lost[0]!r})" if lost else ""
        spaced = re.sub(r"(?<![\s\d])(?=\d)", " ", text)  # a blank before each number
        hint = (". Its numbers begin with a blank: it can spell the same text with one before "
                "every number" if can_spell(tokenizer, spaced) else "")
        size = tokenizer.get_vocab_size()
        if not hint and size < KNOWS_WORDS:
            hint = (". --model takes one that knows words, such as Qwen2.5-Coder-0.5B-Instruct "
                    "(docs/reference/real_models.md)")
        raise UserError(f"the tokenizer cannot spell {what}{which}: this model knows no words and "
                        f"numbers other than its {size} tokens{hint}") from None


def normalised(tokenizer: Tokenizer, text: str) -> str:
    """The text that its tokens spell. Qwen's normalizer joins a letter and its accent into one
    character."""
    normalizer = tokenizer.normalizer
    return str(normalizer.normalize_str(text)) if normalizer else text


def can_spell(tokenizer: Tokenizer, text: str) -> bool:
    return spelt_by(tokenizer, tokenizer.encode(text, add_special_tokens=False).ids) == text


def spelt_by(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of these tokens, as grpo.py's `from_task` spells an answer."""
    return str(tokenizer.decode(ids, skip_special_tokens=False))


def token_bytes(tokenizer: Tokenizer, ids: Iterable[int]) -> list[bytes]:
    """The bytes of each token. A character may be spread over several tokens, a byte never is."""
    known = spellings(tokenizer)
    # A model can sample a token that the tokenizer does not know, because an embedding matrix is
    # often larger than the vocabulary.
    return [known.get(i) or UNKNOWN for i in ids]


@lru_cache(maxsize=4)
def spellings(tokenizer: Tokenizer) -> dict[int, bytes | None]:
    """The bytes of every token; None for a token that is not written in the byte-level alphabet."""
    alphabet = byte_alphabet()
    bytes_of: dict[int, bytes | None] = {}
    for word, number in tokenizer.get_vocab(with_added_tokens=False).items():
        is_spelt = alphabet.keys() >= set(word)
        bytes_of[number] = bytes(alphabet[c] for c in word) if is_spelt else None
    for number, token in tokenizer.get_added_tokens_decoder().items():
        bytes_of[number] = token.content.encode()
    return bytes_of


def byte_alphabet() -> dict[str, int]:
    """The byte that each of the 256 characters of byte-level tokenizers means (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(hidden)}
