"""Answers of several turns. When the model ends a turn, the task's `reply` says what the
environment writes next, or None if the answer has ended:

    def reply(problem, turns):      # turns: the texts that the model wrote, without their ends
        guess = int(turns[-1])
        return None if guess == problem else " big.\n" if guess > problem else " small.\n"

It should follow from its arguments alone. Then an answer can be scored again, continued from its
middle, and sampled again by a run that is resumed, and no state has to be copied for it. `turns`
has what the model wrote and nothing else, so a model that writes the environment's words itself
deceives nobody.

Only a reply is encoded. What the model drew stays the tokens that it drew, because a text that is
encoded again can have other tokens.
"""
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer

from lab.engine.errors import UserError, location_of, result_of
from lab.engine.rollouts import Problem, turns_of
from lab.engine.tokens import encode


@dataclass
class Environment:
    """The environment of a task that has a method `reply`. It keeps nothing between two calls."""
    task: object
    tokenizer: Tokenizer
    stop: Sequence[int]  # the tokens that end a turn

    @cached_property
    def location(self) -> str:
        return location_of(self.task.reply)  # type: ignore[attr-defined]

    def reply(self, problem: Problem, ids: list[int], drawn: list[bool]) -> list[int] | None:
        """The tokens that it writes after these tokens of an answer, of which the model has `drawn`
        some; None if the answer has ended. The last token ends a turn of the model."""
        text = result_of(self.task.reply,  # type: ignore[attr-defined]
                         "a text that is not empty, or None if the answer has ended", is_reply,
                         problem, turns_of(self.tokenizer, ids, drawn))
        if text is None:
            return None
        return encode(self.tokenizer, text, f"what reply ({self.location}) returned")

    def drawn_in(self, problem: Problem, ids: Sequence[int]) -> list[bool]:
        """Which of these tokens, with which an answer begins, the model has drawn. All others are
        those of replies, which follow from what stands before them."""
        return self.completed(problem, ids)[1][:len(ids)]

    def completed(self, problem: Problem, ids: Sequence[int]
                  ) -> tuple[list[int], list[bool], bool]:
        """The tokens with which an answer begins, and the rest of a reply if they end in one or
        just before it; which of them the model has drawn; and whether the answer has ended. A reply
        that differs from what stands there is an error."""
        whole, drawn = list(ids), list[bool]()
        while len(drawn) < len(whole):
            drawn.append(True)
            if whole[len(drawn) - 1] not in self.stop:
                continue
            written = self.reply(problem, whole[:len(drawn)], drawn)
            there = whole[len(drawn):] if written is None else whole[len(drawn):][:len(written)]
            if there != (written or [])[:len(there)]:
                raise UserError(
                    f"reply ({self.location}) was asked twice after the same turns, and wrote "
                    "something else the second time. It should follow from the problem and the "
                    "turns alone, or else no answer can be continued or sampled again")
            if written is None:
                return whole, drawn, True
            whole += written[len(there):]
            drawn += [False] * len(written)
        return whole, drawn, False


def is_reply(found: object) -> bool:
    return found is None or (isinstance(found, str) and found != "")
