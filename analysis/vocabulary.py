"""What a run's tokens are: the classes of an earlier experiment's regex, and sums over each token
id."""
import numpy as np
from tokenizers import Tokenizer

from engine.errors import UserError
from engine.tokens import KINDS, naive_class

CLASSES = ("filler", "reasoning", "structure")
SUMMED = ("count", "entropy", "log_prob", "gradient")  # over the tokens of an id


def text_of(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([int(token_id)], skip_special_tokens=False)


def most_tokens(tokenizer: Tokenizer) -> int:
    """A model can have more tokens than its tokenizer, since embeddings are padded, but not ever so
    many."""
    return 2 * tokenizer.get_vocab_size() + 4096


class Vocabulary:
    """Of each token id: its class by the regex, what is SUMMED, and how often it was of each kind.
    The arrays grow with the largest id seen."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.class_of = np.zeros(0, np.int64)  # -1 where nobody has asked
        self.sums = {name: np.zeros(0) for name in SUMMED}
        self.kinds = np.zeros((0, len(KINDS)))

    def classes(self, ids: np.ndarray) -> np.ndarray:
        """(tokens,) the index in CLASSES of each."""
        if ids.max() >= most_tokens(self.tokenizer):
            raise UserError(f"a credit file has the token_id {ids.max()}, and the run's "
                            f"tokenizer.json {self.tokenizer.get_vocab_size()} tokens: they do not "
                            "belong together")
        more = max(0, int(ids.max()) + 1 - len(self.class_of))
        self.class_of = np.pad(self.class_of, (0, more), constant_values=-1)
        for i in np.unique(ids):
            if self.class_of[i] < 0:
                self.class_of[i] = CLASSES.index(naive_class(text_of(self.tokenizer, i)))
        return self.class_of[ids]

    def add(self, tokens: dict) -> None:
        """Ask for `classes` first."""
        ids, size = tokens["token_id"], len(self.class_of)
        more = size - len(self.kinds)
        measures = {"count": None, "entropy": tokens["entropy"], "log_prob": tokens["log_prob"],
                    "gradient": np.abs(tokens["gradient"])}
        for name, value in measures.items():
            self.sums[name] = np.pad(self.sums[name], (0, more)) + np.bincount(ids, value, size)
        id_and_kind = ids * len(KINDS) + tokens["kind"]
        kinds = np.bincount(id_and_kind, minlength=size * len(KINDS)).reshape(size, -1)
        self.kinds = np.pad(self.kinds, ((0, more), (0, 0))) + kinds

    def most_frequent(self, counts: np.ndarray, number: int = 7) -> str:
        """Their texts; `counts` has an entry for each id."""
        order = np.argsort(-counts, kind="stable")[:number]
        return "  ".join(repr(text_of(self.tokenizer, i)) for i in order if counts[i])
