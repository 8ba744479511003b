"""The training answers on a page: which of them, and what is known of each token."""
from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
from tokenizers import Tokenizer

from analysis.account import Numbers, Stage, numbers_of, rounded, stages
from analysis.runs import read_metrics
from analysis.tally import Tokens, read_tokens
from engine.tokens import token_bytes, without_earlier_turns
from harness.record import Json, run_config

PER_PAGE, STEPS = 10_000, 21  # tokens of training answers on a page, and steps they are from
SHADED_BY = {  # what a page can shade tokens by, the first at first: its column, and what it says:
    # the stronger a token's colour, ... Not every run has measured credit
    "gradient size": ("abs gradient", "the larger the gradient that it was given: abs(advantage) x "
                      "weight x s, where s is the size of the gradient of its log-prob at the "
                      "logits"),
    "given": ("given", "the further its own gradient pushes its log-prob up (blue) or down "
              "(orange): advantage x weight x s squared"),
    "became": ("change", "the further its log-prob rose (blue) or fell (orange) in the step, which "
               "all tokens of the batch move together"),
    "advantage": ("advantage", "the further its advantage is from 0: blue makes it more likely, "
                  "orange less"),
    "weight": ("weight", "the larger the weight that the method gave it"),
    "entropy": ("entropy", "the less sure the model was what to write there"),
    "log-prob": ("log_prob", "the less likely the token was"),
    "true credit": ("true_credit", "the more the expected reward rose (blue) or fell (orange) with "
                    "it"),
    "true credit se": ("true_credit_se", "the less sure its true credit is: the standard error")}
MEANING = {name: meaning for name, (_, meaning) in SHADED_BY.items()}


class Answer(TypedDict):
    """A training answer on the page; the first one has the lines of every token's account."""
    step: int
    own_step: int  # as another trainer numbers it
    episode: int
    group: int
    reward: float | None
    answer: float | None  # that part of the reward
    finished: bool
    prompt: str
    texts: list[str]
    section: list[int]
    kind: list[int]
    values: Numbers
    account: Numbers
    stages: NotRequired[list[Stage]]


def answers_of(run: Path, tokenizer: Tokenizer, steps: list[int],
               most_tokens: int = PER_PAGE) -> list[Answer]:
    """What the viewer shows of steps that are evenly spaced: as many answers as fit, and never less
    than two, those of groups with different rewards first."""
    answers: list[Answer] = []
    config, metrics = run_config(run), metrics_by_step(run)
    places = {round(place) for place in np.linspace(0, len(steps) - 1, STEPS)}
    for step in (steps[place] for place in sorted(places)):
        tokens = read_tokens(run, step)
        order = np.concatenate(groups_in_order(tokens))
        room = most_tokens // len(places)
        fitting = int((np.cumsum(tokens["length"][order]) <= room).sum())
        answers += [answer_of(tokens, tokenizer, config, metrics.get(step), step, b)
                    for b in order[:max(2, fitting)].tolist()]
    if answers:
        answers[0]["stages"] = stages(config)
    return answers


def metrics_by_step(run: Path) -> dict[int, Json]:
    return {line["step"]: line for line in read_metrics(run)}


def groups_in_order(tokens: Tokens) -> list[np.ndarray]:
    """The answers of each group: the best, the worst, the second best, the second worst, ..."""
    groups = [np.flatnonzero(tokens["group"] == g) for g in np.unique(tokens["group"])]
    groups.sort(key=lambda members: np.ptp(tokens["reward"][members]) == 0)
    ranked = [members[np.argsort(-tokens["reward"][members], kind="stable")] for members in groups]
    return [np.stack([best, best[::-1]], axis=1).ravel()[:len(best)] for best in ranked]


def own_step(tokens: Tokens, step: int) -> int:
    return int(tokens["trainer_step"][0]) if "trainer_step" in tokens else step


def answer_of(tokens: Tokens, tokenizer: Tokenizer, config: Mapping[str, object],
              line: Json | None, step: int, b: int) -> Answer:
    """One answer: its texts, labels and numbers token by token, and those of its account."""
    start = int(tokens["episode_start"][b])
    of_answer = slice(start, start + int(tokens["length"][b]))
    prompts = np.split(tokens["prompt_ids"], tokens["prompt_start"][1:])
    prompt = token_bytes(tokenizer, prompts[int(tokens["group"][b])].tolist())
    pieces = token_bytes(tokenizer, tokens["token_id"][of_answer].tolist())
    return {"step": step, "episode": b, "group": int(tokens["group"][b]),
            "reward": rounded(tokens["reward"][b]),
            "own_step": own_step(tokens, step),
            "answer": rounded(tokens["reward_answer"][b]) if "reward_answer" in tokens else None,
            "finished": bool(tokens["finished"][b]),
            "prompt": without_earlier_turns(b"".join(prompt).decode(errors="replace")),
            "texts": [piece.decode(errors="replace") for piece in pieces],
            "section": tokens["section"][of_answer].tolist(),
            "kind": tokens["kind"][of_answer].tolist(),
            "values": {shown: list(map(rounded, tokens[name][of_answer].tolist()))
                       for shown, (name, _) in SHADED_BY.items() if name in tokens},
            "account": numbers_of(tokens, config, line, b)}
