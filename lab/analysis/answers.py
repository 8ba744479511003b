"""The training answers on a page: which ones, and what is known about each token."""
from collections.abc import Mapping
from typing import NotRequired, TypedDict

import numpy as np
from tokenizers import Tokenizer

from lab.analysis.account import (Numbers, Stage, Value, numbers_of, only_of_own, rounded,
                                  stages)
from lab.analysis.run_folders import Run, read_columns, read_tokenizer
from lab.analysis.token_table import StepRecord, read_step
from lab.engine.tokens import token_bytes, without_earlier_turns
from lab.harness.record import Json

PER_PAGE, STEPS = 10_000, 21  # tokens of training answers on a page, and steps they are from
# What a page can shade tokens by; it begins with the first. Each has the name of its column, and
# the end of a sentence that begins "The stronger a token's colour, ...". A run may lack some.
SHADED_BY = {
    "gradient size": ("abs gradient", "the larger the gradient's size at the logits: "
                      "abs(advantage) x weight x s, where s is the size of the gradient of its "
                      "log-prob"),
    "push": ("push", "the harder its own term of the loss pushes its log-prob up (blue) or down "
             "(orange): advantage x weight x s squared"),
    "change": ("change", "the further its log-prob rose (blue) or fell (orange) in the step. This "
               "comes from the update on all tokens of the batch"),
    "advantage": ("advantage", "the further its advantage is from 0. A blue one makes it more "
                  "likely, an orange one less likely"),
    "weight": ("weight", "the larger the weight that the method gave it"),
    "entropy": ("entropy", "the less certain the model was what to write there"),
    "log-prob": ("log_prob", "the less likely the token was"),
    "credit": ("true_credit", "the further the expected reward rose (blue) or fell (orange) with "
               "this token. If the 95% interval of a measured credit includes 0, it has no colour"),
    "credit's error": ("true_credit_se", "the larger the standard error of its measured credit")}
MEANING = {name: meaning for name, (_, meaning) in SHADED_BY.items()}


class ShownAnswer(TypedDict):
    """A training answer on the page; the first one has the lines of every token's account."""
    step: int
    episode: int
    group: int
    reward: float | None
    answer: float | None  # that part of the reward
    finished: bool
    prompt: str
    texts: list[str]
    own: NotRequired[list[bool]]  # which tokens the model drew, if an environment wrote others
    paid: NotRequired[list[Value]]  # the reward of a turn at its last token, if the task pays turns
    section: list[int]
    kind: list[int]
    values: Numbers
    account: Numbers
    stages: NotRequired[list[Stage]]


def answers_of(run: Run, most_tokens: int = PER_PAGE) -> list[ShownAnswer]:
    """The answers that a page shows token by token, of evenly spaced steps of a run. If the change
    of the tokens was measured in some steps, they are of these.

    It takes as many answers of a step as fit, and never fewer than two. Groups whose rewards differ
    come first.
    """
    folder, lines, tokenizer = run.folder, metrics_by_step(run), read_tokenizer(run.folder)
    with_change = [step for step in run.steps if "change" in read_columns(folder, step)]
    steps = with_change or run.steps
    chosen = {steps[index] for index in set(map(round, np.linspace(0, len(steps) - 1, STEPS)))}
    found: list[ShownAnswer] = []
    for step in sorted(chosen):
        record = read_step(folder, step)
        groups = groups_in_order(record.answers["group"], record.answers["reward"])
        order = np.concatenate(groups)
        length_so_far = np.cumsum(record.answers["length"][order])
        room = most_tokens // len(chosen)
        for b in order[:max(2, int((length_so_far <= room).sum()))].tolist():
            found.append(answer_of(record, tokenizer, run.config, lines.get(step), b))
    found[0]["stages"] = stages(run.config)
    return with_the_same_values(found)


def with_the_same_values(answers: list[ShownAnswer]) -> list[ShownAnswer]:
    """Give each answer all quantities that any of them has; where one is not known it is None."""
    names = {name for answer in answers for name in answer["values"]}
    for answer in answers:
        known = answer["values"]
        unknown: list[Value] = [None] * len(answer["texts"])
        answer["values"] = {name: known.get(name, unknown) for name in SHADED_BY if name in names}
    return answers


def metrics_by_step(run: Run) -> dict[int, Json]:
    return {line["step"]: line for line in run.metrics}


def groups_in_order(group: np.ndarray, reward: np.ndarray) -> list[np.ndarray]:
    """The answers of each group in the order best, worst, second best, second worst, ... Groups
    with equal rewards come last. `group` and `reward` are (answers,)."""
    groups = [np.flatnonzero(group == number) for number in np.unique(group)]
    groups.sort(key=lambda members: np.ptp(reward[members]) == 0)
    in_order = []
    for members in groups:
        best_first = members[np.argsort(-reward[members], kind="stable")]
        both_ends = np.stack([best_first, best_first[::-1]], axis=1).ravel()
        in_order.append(both_ends[:len(members)])
    return in_order


def answer_of(record: StepRecord, tokenizer: Tokenizer, config: Mapping[str, object],
              line: Json | None, b: int) -> ShownAnswer:
    """Answer b: its texts, labels and numbers token by token, and those of its account. `line` is
    the step's in metrics.jsonl."""
    tokens, answers = record.tokens_of(b), record.answers
    group = int(answers["group"][b])
    pieces = token_bytes(tokenizer, tokens["token_id"].tolist())
    prompt = b"".join(token_bytes(tokenizer, record.prompts[group].tolist()))
    reward_answer = None
    if "reward_answer" in answers:
        reward_answer = rounded(answers["reward_answer"][b])
    values: Numbers = {}
    for quantity, (column, _) in SHADED_BY.items():
        if column in tokens:
            values[quantity] = only_of_own(list(map(rounded, tokens[column].tolist())), tokens)
    answer: ShownAnswer = {
        "step": record.step,
        "episode": b,
        "group": group,
        "reward": rounded(answers["reward"][b]),
        "answer": reward_answer,
        "finished": bool(answers["finished"][b]),
        "prompt": without_earlier_turns(prompt.decode(errors="replace")),
        "texts": [piece.decode(errors="replace") for piece in pieces],
        "section": tokens["section"].tolist(),
        "kind": tokens["kind"].tolist(),
        "values": values,
        "account": numbers_of(record, config, line, b)}
    if not tokens["own"].all():
        answer["own"] = tokens["own"].tolist()
    if "paid" in tokens:
        answer["paid"] = [rounded(paid) if paid else None for paid in tokens["paid"].tolist()]
    return answer
