"""A batch of rollouts (sampled answers), with everything that is known about each token.

Everything per token is (B, T): index t is the t-th generated token. The sampler counts tokens so,
and so do rewards, credit and the loss. Only a forward pass in training needs another index, because
token t is predicted at the token before it: `states_before` of grpo.py makes this shift.

    3 5 7 make 22 -> " 3 * 5 = 15 ...", " no ..."   two answers to one problem, 30 and 8 tokens
    ids, mask, log_prob, ... (2, 30)                mask[1, 8:] is False
    group [0, 0], reward [1.1, 0.1]  (2,)

An answer of several turns has tokens that an environment wrote, and the mask has holes there. So
whatever goes by the mask is about what the model drew: loss, N, weights, entropy, and every table
of tokens. Only what cuts, records or shows an answer goes by `written`.
"""
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from tokenizers import Tokenizer

import grpo
from lab.engine.errors import UserError
from lab.engine.tokens import spelt_by, without_end_of_turn

Problem = object  # any type that a task likes: it is only passed back to the task
TaskProblem = TypeVar("TaskProblem")  # the type of a task's problems
# a tensor that is not known yet; if it is used, the run ends with "not finite"
UNSET = torch.tensor(float("nan"))
OF_TURNS = "of_turns"  # in a score: the reward of each turn, if a task pays turns


class Task(Protocol[TaskProblem]):
    """The methods that a class must have to be named by --task
    (docs/reference/your_own_task.md). It may also have

        read(words)                     a problem, of the words that somebody typed for `lab sample`
        reply(problem, turns)           what an environment writes after a turn of the model, or
                                        None; `score` then gets the turns in the place of the text
        redraw(problem, turns, rng)     another problem, whose replies would have been the same
        right_steps(problem, pieces)    the tokens with which a right step ends
        of_model(folder)                is called once with the folder of the model, before any
                                        prompt is made
    """
    @property
    def rewarded(self) -> str: ...  # a line about the reward, for config.json

    # the problems of a step, which depend on these three numbers alone
    def training_problems(self, seed: int, step: int, count: int) -> list[TaskProblem]: ...

    # the problems of an evaluation, which are never trained on
    def held_out_problems(self, count: int) -> list[TaskProblem]: ...

    # those with the longest prompts and with every number that occurs, which are tried before
    # training, so that what does not fit is refused at once
    def extreme_problems(self) -> list[TaskProblem]: ...

    # the text that ends where the answer begins
    def prompt_for(self, problem: TaskProblem) -> str: ...

    # the problem in one short line, for people to read
    def show(self, problem: TaskProblem) -> str: ...

    # for any string: `reward`, `format`, `answer` (1 is success), and `reasoning`, for the steps
    def score(self, problem: TaskProblem, text: Any) -> dict[str, Any]: ...

    # the section and the category of each token of an answer, as codes, by the tokens' texts
    def label(self, pieces: list[str]) -> tuple[list[int], list[int]]: ...


def double(values: Tensor) -> Tensor:
    """The values in float64, on the CPU, because Apple's GPUs have no such numbers."""
    return values.detach().cpu().double()


@dataclass
class Rollouts(grpo.Rollouts):
    """The book's batch, with what a run beyond it needs: answers that are not scored yet, several
    turns, one more forward pass."""
    # empty until the answers are scored
    texts: list[list[str]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    section: Tensor = UNSET
    kind: Tensor = UNSET
    scores: dict[str, Tensor] = field(default_factory=dict)
    advantage: Tensor = UNSET

    turns: list[list[str]] = field(default_factory=list)  # with replies: what the model wrote
    forward: Any = None                                   # computes hidden and attention
    true_credit: Tensor = UNSET                           # (B, T), if a probe of lab/ has it
    # (B, T) bool: it stands in the answer. It is the mask itself if no environment writes
    written: Tensor = UNSET
    # (B, T) the reward of each turn at its last token, if the task pays turns
    of_turns: Tensor = UNSET

    def __post_init__(self) -> None:
        if not self.written.dim():
            self.written = self.mask

    @property
    def turn(self) -> Tensor:
        """(B, T) the number of each token's turn, counted from 0; the reply to it is part of it."""
        return (self.begins_turn.cumsum(1) - 1).clamp(min=0)

    @property
    def begins_turn(self) -> Tensor:
        """(B, T) bool: a turn of the model begins here, at the start of an answer, or after what
        the environment wrote."""
        return self.mask & ~F.pad(self.mask, (1, 0))[:, :-1]

    @property
    def ends_turn(self) -> Tensor:
        """(B, T) bool: the last token that the model drew in a turn."""
        return self.mask & ~F.pad(self.mask, (0, 1))[:, 1:]

    @property
    def paid(self) -> Tensor:
        """(B, T): what is paid at each token. Rewards of turns come at the end of their turns, and
        one reward for the whole answer comes at its end."""
        if self.of_turns.dim():
            return self.of_turns
        is_last = self.ends_turn & (self.turn == self.turn.amax(1, keepdim=True))
        return self.reward[:, None] * is_last

    @property
    def to_go(self) -> Tensor:
        """(B, T): what is paid from a token on, which is the reward if that comes at the end."""
        return self.paid.flip(1).cumsum(1).flip(1)

    @cached_property
    def groups_and_ids(self) -> tuple[list[int], list[list[int]]]:
        """The group of each answer, and the ids of its tokens, as Python's lists. They are kept,
        because they have to be copied from a GPU."""
        rows = zip(self.ids.tolist(), self.written.sum(1).tolist())
        return self.group.tolist(), [ids[:length] for ids, length in rows]

    @cached_property
    def drawn(self) -> Tensor:
        """The mask on the CPU."""
        return self.mask.cpu()

    @property
    def hidden(self) -> Tensor:
        """(B, T, D): the hidden state that predicted token t. It costs one extra forward pass."""
        return self.look(attention=False)["hidden"].clone()  # other methods look at it, too

    @property
    def attention(self) -> Tensor:
        """(B, T, T): [b, i, j] is the attention that token j received when token i was predicted,
        and 0 unless j < i. It is that of the last layer, averaged over heads, and costs one extra
        forward pass."""
        return self.look(attention=True)["attention"].clone()

    def look(self, attention: bool) -> dict[str, Tensor]:
        if self.forward is None:
            raise UserError("hidden and attention need a model, and this batch has none")
        found: dict[str, Tensor] = self.forward.look(self, attention)
        return found

    def to(self, device: torch.device) -> "Rollouts":
        return self.with_each(lambda tensor: tensor.to(device))

    def of_problems(self, problems: range) -> "Rollouts":
        """The part of the batch that answers these problems, which are numbered from 0 again."""
        inside = (self.group >= problems.start) & (self.group < problems.stop)
        part, chosen = self.of_rows(self.rows[inside]), slice(problems.start, problems.stop)
        return replace(part, group=part.group - problems.start, problems=self.problems[chosen],
                       prompt_ids=self.prompt_ids[chosen])

    def of_rows(self, rows: Tensor) -> "Rollouts":
        """The part of the batch that consists of these answers."""
        part = self.with_each(lambda tensor: tensor[rows])
        numbers = rows.tolist()
        return replace(part, answers=[self.answers[row] for row in numbers],
                       texts=[self.texts[row] for row in numbers],
                       turns=[self.turns[row] for row in numbers if self.turns])

    def scored(self, row: int) -> str | list[str]:
        """What a task's `score` is given of an answer: its text, or the texts of its turns."""
        return self.turns[row] if self.turns else self.answers[row]

    @property
    def rows(self) -> Tensor:
        """(B,) the numbers of all rows."""
        return torch.arange(len(self.group), device=self.group.device)

    def with_each(self, change: Callable[[Tensor], Tensor]) -> "Rollouts":
        """The batch with every tensor changed."""
        changed: dict[str, Any] = {}
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.dim():  # UNSET has no dimension
                changed[name] = change(value)
        scores = {part: change(score) for part, score in self.scores.items()}
        return replace(self, **changed, scores=scores)


def score_answers(rollouts: Rollouts, tokenizer: Tokenizer, task: Task[Problem]) -> Rollouts:
    """Add what depends on the texts, by grpo.py's `from_task`."""
    problems = [rollouts.problems[group] for group in rollouts.group.tolist()]
    asked: Any = task
    if has_turns(task):
        asked = ByTurns(task, tokenizer, problems, rollouts)
    found = grpo.from_task(asked, tokenizer, problems, rollouts.ids, rollouts.written)
    scored = replace(rollouts, **found).to(rollouts.mask.device)
    return asked.with_turns(scored) if has_turns(task) else scored


class ByTurns:
    """A task with replies, as grpo.py's `from_task` asks it about a batch: by the texts of answers.
    The task itself is given the turns of the answer."""

    def __init__(self, task: Any, tokenizer: Tokenizer, problems: list[Problem], answers: Any):
        """`problems` has the problem of each answer, of which ids, mask and written are known."""
        self.task, self.label, self.problems = task, task.label, problems
        self.turns: list[list[str]] = []
        # of the answers to a problem that have a text, which is hardly ever more than one
        self.with_text: dict[tuple[int, str], list[list[str]]] = defaultdict(list)
        self.paid: dict[tuple[int, str], list[float]] = {}  # for each turn, if turns are paid
        lengths = answers.written.sum(1).tolist()
        for problem, ids, drawn, length in zip(problems, answers.ids.tolist(),
                                               answers.mask.tolist(), lengths):
            turns = turns_of(tokenizer, ids[:length], drawn)
            self.turns.append(turns)
            self.with_text[id(problem), spelt_by(tokenizer, ids[:length])].append(turns)

    def score(self, problem: Problem, text: str) -> dict[str, Any]:
        known = self.with_text[id(problem), text]
        if not known:
            raise UserError("answers of several turns are scored as they were sampled, and none of "
                            f"this batch is {text[:80]!r}")
        known.append(known.pop(0))  # each in its turn
        score = dict(self.task.score(problem, known[-1]))
        if OF_TURNS in score:
            self.paid[id(problem), repr(known[-1])] = score.pop(OF_TURNS)
        return score

    def with_turns(self, rollouts: Rollouts) -> Rollouts:
        """The batch with its turns, and with what each of them is paid, at its last token."""
        if not self.paid:
            return replace(rollouts, turns=self.turns)
        of_turns = [self.paid[id(problem), repr(turns)]
                    for problem, turns in zip(self.problems, self.turns)]
        return replace(rollouts, turns=self.turns, of_turns=at_ends_of_turns(of_turns, rollouts))


def at_ends_of_turns(of_turns: list[list[float]], rollouts: Rollouts) -> Tensor:
    """(B, T): the number of each turn of each answer, at the last token of the turn."""
    paid, ends = torch.zeros(rollouts.mask.shape), rollouts.ends_turn.cpu()
    paid[ends] = torch.tensor([float(reward) for rewards in of_turns for reward in rewards])
    return paid.to(rollouts.mask.device)


def has_turns(task: object) -> bool:
    """Whether answers to a task's problems can have several turns: whether an environment replies.
    """
    return hasattr(task, "reply")


def turns_of(tokenizer: Tokenizer, ids: list[int], drawn: list[bool]) -> list[str]:
    """The texts that the model wrote in an answer, turn by turn, without the ends of turns. `drawn`
    says which of the tokens are the model's. So what it wrote itself is never taken for what an
    environment wrote, even if the texts are equal."""
    turns: list[list[int]] = []
    is_open = False
    for token, is_own in zip(ids, drawn):
        if is_own and not is_open:
            turns.append([])
        if is_own:
            turns[-1].append(token)
        is_open = is_own
    return [without_end_of_turn(spelt_by(tokenizer, turn)) for turn in turns]
