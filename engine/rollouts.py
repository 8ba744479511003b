"""A batch of rollouts (sampled answers), with everything that is known about each token.

Everything per token is (B, T): index t is the t-th generated token. The sampler counts tokens so,
and so do rewards, credit and the loss. Only a forward pass in training needs another index, because
token t is predicted at the token before it: `lay_out` in forward.py makes this shift.
`CheckedTask` is the task that scores the answers, whose results are checked.

    3 5 7 make 22 -> " 3 * 5 = 15 ...", " no ..."   two answers to one problem, 30 and 8 tokens
    ids, mask, log_prob, ... (2, 30)                mask[1, 8:] is False
    group [0, 0], reward [1.1, 0.1]  (2,)
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from tokenizers import Tokenizer

from engine.errors import UserError, is_list, wrong_result
from engine.tokens import KINDS, SECTIONS, token_bytes

Problem = object  # any type that a task likes: it is only passed back to the task
TaskProblem = TypeVar("TaskProblem")  # the type of a task's problems
# a tensor that is not known yet; if it is used, the run ends with "not finite"
UNSET = torch.tensor(float("nan"))
LARGEST_SCORE = 1e12  # the squares of such rewards, in float32, are still finite
PARTS = {"reward", "format", "answer", "reasoning"}  # the numbers that every score has


class Task(Protocol[TaskProblem]):
    """The methods that a class must have to be named by --task. It may also have `read` and
    `right_steps` (docs/your_own_task.md)."""
    @property
    def reward(self) -> str: ...
    def training_problems(self, seed: int, step: int, count: int) -> list[TaskProblem]: ...
    def held_out_problems(self, count: int) -> list[TaskProblem]: ...
    def extreme_problems(self) -> list[TaskProblem]: ...
    def prompt_for(self, problem: TaskProblem) -> str: ...
    def show(self, problem: TaskProblem) -> str: ...
    def score(self, problem: TaskProblem, text: str) -> dict[str, float]: ...
    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]: ...


def double(values: Tensor) -> Tensor:
    """The values in float64, on the CPU, because Apple's GPUs have no such numbers."""
    return values.detach().cpu().double()


def has_format(task: object) -> bool:
    """Whether a task scores the format of answers. One that is no more than a reward does not."""
    return bool(getattr(task, "has_format", True))


class Forward(Protocol):
    """Access to one more forward pass over a batch (engine/policy.py)."""
    def look(self, rollouts: "Rollouts", attention: bool = False) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Rollouts:
    """B answers to Q problems; group g holds the answers to problem g."""
    problems: Sequence[Problem]     # the Q problems
    prompt_ids: list[list[int]]     # the prompt of each problem
    group: Tensor                   # (B,) 0..Q-1
    ids: Tensor                     # (B, T) int64, 0 beyond the mask
    mask: Tensor                    # (B, T) bool
    finished: Tensor                # (B,) bool: the answer ended before the limit
    log_prob: Tensor                # (B, T) at temperature 1
    entropy: Tensor                 # (B, T) -sum p log p
    collision: Tensor               # (B, T) sum p^2

    # empty until the answers are scored
    answers: list[str] = field(default_factory=list)      # the text of each answer
    texts: list[list[str]] = field(default_factory=list)  # the same, token by token
    section: Tensor = UNSET                               # (B, T) uint8, codes in engine/tokens.py
    kind: Tensor = UNSET                                  # (B, T) uint8
    scores: dict[str, Tensor] = field(default_factory=dict)  # (B,) each part of the reward

    # empty until credit is spread
    step: int = 0
    advantage: Tensor = UNSET                             # (B, T)
    generator: torch.Generator = field(default_factory=torch.Generator)  # on the CPU
    forward: Forward | None = None                        # computes hidden and attention
    true_credit: Tensor = UNSET                           # (B, T), if a probe of lab/ has it

    @property
    def length(self) -> Tensor:
        return self.mask.sum(1)

    @cached_property
    def groups_and_ids(self) -> tuple[list[int], list[list[int]]]:
        """The group of each answer, and the ids of its tokens, as Python's lists. They are kept,
        because they have to be copied from a GPU."""
        rows = zip(self.ids.tolist(), self.length.tolist())
        return self.group.tolist(), [ids[:length] for ids, length in rows]

    @property
    def reward(self) -> Tensor:
        return self.scores["reward"]

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
        return self.forward.look(self, attention)

    def to(self, device: torch.device) -> "Rollouts":
        return self.with_each(lambda tensor: tensor.to(device))

    def of_problems(self, problems: range) -> "Rollouts":
        """The part of the batch that answers these problems, which are numbered from 0 again."""
        part = self.of_rows(self.rows_of(problems))
        chosen = slice(problems.start, problems.stop)
        return replace(part, group=part.group - problems.start, problems=self.problems[chosen],
                       prompt_ids=self.prompt_ids[chosen])

    def of_rows(self, rows: Tensor) -> "Rollouts":
        """The part of the batch that consists of these answers."""
        part = self.with_each(lambda tensor: tensor[rows])
        return replace(part, answers=[self.answers[row] for row in rows.tolist()],
                       texts=[self.texts[row] for row in rows.tolist()])

    def rows_of(self, problems: range) -> Tensor:
        """The rows that answer these problems."""
        inside = (self.group >= problems.start) & (self.group < problems.stop)
        return inside.nonzero().squeeze(1)

    @property
    def rows(self) -> Tensor:
        """(B,) the numbers of all rows."""
        return torch.arange(len(self.group), device=self.group.device)

    def with_each(self, change: Callable[[Tensor], Tensor]) -> "Rollouts":
        """The batch with every tensor changed."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor) and value.dim():  # UNSET has no dimension
                changed[name] = change(value)
        scores = {part: change(score) for part, score in self.scores.items()}
        return replace(self, **changed, scores=scores)


def score_answers(rollouts: Rollouts, tokenizer: Tokenizer, task: Task[Problem]) -> Rollouts:
    """Add what depends on the text: the scores of each answer, the section and kind of each token.
    """
    section, kind = torch.zeros(2, *rollouts.mask.shape, dtype=torch.uint8)
    texts, answers, scores = [], [], []
    groups, ids_of_rows = rollouts.groups_and_ids
    for row, (group, ids) in enumerate(zip(groups, ids_of_rows)):
        pieces = token_bytes(tokenizer, ids)
        sections, kinds = task.label(pieces)
        section[row, :len(ids)] = torch.tensor(sections, dtype=torch.uint8)
        kind[row, :len(ids)] = torch.tensor(kinds, dtype=torch.uint8)
        texts.append([piece.decode(errors="replace") for piece in pieces])
        answers.append(b"".join(pieces).decode(errors="replace"))
        scores.append(task.score(rollouts.problems[group], answers[-1]))
    device = rollouts.mask.device
    # a task may return more parts than are needed, but the same ones for every answer
    if any(score.keys() != scores[0].keys() for score in scores):
        raise UserError("score should return the same names of parts for every answer")
    columns = {}
    for part in scores[0]:
        values = [score[part] for score in scores]
        columns[part] = torch.tensor(values, dtype=torch.float32, device=device)
    return replace(rollouts, texts=texts, answers=answers, scores=columns,
                   section=section.to(device), kind=kind.to(device))


class CheckedTask:
    """A user's Task with two checks: no problem that it returned as held out is trained on, and its
    methods return what they should."""

    def __init__(self, task: Task[Any]):
        self.task = task
        self.held_out: dict[int, list[Problem]] = {}  # by their number
        self.held_out_prompts: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def held_out_problems(self, count: int) -> list[Problem]:
        if count not in self.held_out:
            problems = as_problems(self.task.held_out_problems, count)
            self.held_out_prompts |= set(map(self.prompt_for, problems))
            self.held_out[count] = problems
        return self.held_out[count]

    def training_problems(self, seed: int, step: int, count: int) -> list[Problem]:
        problems = as_problems(self.task.training_problems, seed, step, count)
        if len(problems) != count:
            raise wrong_result(self.task.training_problems, f"{count} problems", problems)
        for problem in problems:
            if self.prompt_for(problem) in self.held_out_prompts:
                raise UserError(f"training_problems returns {self.show(problem)} in step "
                                f"{step}, but held_out_problems has it, too: what is evaluated "
                                "may not be trained on")
        return problems

    def prompt_for(self, problem: Problem) -> str:
        return as_text(self.task.prompt_for, problem)

    def show(self, problem: Problem) -> str:
        return as_text(self.task.show, problem)

    def score(self, problem: Problem, text: str) -> dict[str, float]:
        score = self.task.score(problem, text)
        if not is_score(score):
            raise wrong_result(
                self.task.score, f"a dict of numbers from -{LARGEST_SCORE:g} to {LARGEST_SCORE:g}. "
                f"Among them should be {', '.join(sorted(PARTS))}, and answer should be 0 or 1",
                score)
        return score

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:
        labels = self.task.label(pieces)
        if not are_labels(labels, len(pieces)):
            raise wrong_result(
                self.task.label, f"two lists with a number for each of {len(pieces)} tokens: its "
                f"section, from 0 to {len(SECTIONS) - 1}, and its kind, from 0 to "
                f"{len(KINDS) - 1} (docs/your_own_task.md)", labels)
        return labels


def as_problems(method: Callable[..., Any], *given: int) -> list[Problem]:
    """The problems that a task's method returns."""
    problems = method(*given)
    if not is_list(problems):
        raise wrong_result(method, "a list of problems", problems)
    return list(problems)


def as_text(method: Callable[[Any], Any], problem: Problem) -> str:
    """The text that a task's method makes of a problem."""
    text = method(problem)
    if not isinstance(text, str):
        raise wrong_result(method, "a text", text)
    return text


def is_score(score: Any) -> bool:
    if not isinstance(score, dict) or not PARTS <= score.keys():
        return False
    return all(map(is_score_of_part, score.values())) and score["answer"] in (0, 1)


def is_score_of_part(value: Any) -> bool:
    """Whether it is a number, of any library, within the limits."""
    if isinstance(value, (str, bytes)):  # float("1") takes it
        return False
    try:
        return -LARGEST_SCORE <= float(value) <= LARGEST_SCORE
    except (TypeError, ValueError, OverflowError):
        return False


def are_labels(labels: Any, tokens: int) -> bool:
    """Whether it is two lists of codes, of sections and of kinds, with one for each token."""
    try:
        lists = [list(codes) for codes in labels]
    except TypeError:  # one is nothing that can be listed
        return False
    if [len(codes) for codes in lists] != [tokens, tokens]:
        return False
    sections, kinds = lists
    return {*sections} <= {*range(len(SECTIONS))} and {*kinds} <= {*range(len(KINDS))}
