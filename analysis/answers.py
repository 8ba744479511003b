"""The answers on a page: which of them, which come first, and what is known of each token."""
from pathlib import Path

import numpy as np

from analysis.account import numbers_of, rounded, stages
from analysis.sizes import read_tokens
from engine.errors import UserError
from engine.tokens import token_bytes
from harness.identity import lines_of_run
from harness.run_folder import run_config

PER_PAGE = 60_000  # tokens that the viewer shows
MEANING = {  # of what a token can be shaded by, the first at first: the stronger its colour, ...
    "gradient size": "the larger the gradient that it was given: abs(advantage) x weight x s, "
                     "where s is the size of the gradient of its log-prob at the logits",
    "advantage": "the further its advantage is from 0: blue makes it more likely, orange less",
    "weight": "the larger the weight that the method gave it",
    "entropy": "the less sure the model was what to write there",
    "log-prob": "the less likely the token was",
    "contribution": "the further advantage x log-prob is from 0, which an earlier experiment took "
                    "for the gradient",
    "true credit": "the more the expected reward rose (blue) or fell (orange) with it",
    "true credit se": "the less sure its true credit is: the standard error"}


def steps_to_show(run: dict, wanted: list[int]) -> list[int]:
    """The steps whose answers the page shows."""
    steps = run["steps"]
    for step in wanted:
        if step not in steps:
            there = "no credit files"
            if steps:
                there = f"credit files of {len(steps)} steps, {steps[0]} to {steps[-1]}"
            raise UserError(f"--steps {step}: {run['folder']} has {there}")
    if wanted or not steps:
        return sorted(set(wanted))
    places = {round(place) for place in np.linspace(0, len(steps) - 1, 8)}
    return [steps[place] for place in sorted(places)]


def answers_of(run: Path, tokenizer, steps: list[int], paired: dict[int, int] = {},
               most_tokens: int = PER_PAGE) -> list[dict]:
    """What the viewer shows: of each step whole groups, as many as fit, those with different
    rewards first. Before them stand the groups, by step, that were asked the same problem. The
    first answer has the lines of every token's account."""
    answers, config, factors = [], run_config(run), weight_factors(run)
    for step in steps:
        tokens = read_tokens(run, step)
        room = most_tokens // len(steps)
        for number, members in enumerate(groups_in_order(tokens, paired.get(step))):
            size = int(tokens["length"][members].sum())
            if size > room and number:  # the first group is shown, however long
                break
            room -= size
            answers += [answer_of(tokens, tokenizer, config, factors.get(step), step, int(b))
                        for b in members]
    for answer in answers:
        answer["paired"] = paired.get(answer["step"]) == answer["group"]
    if answers:
        answers[0]["stages"] = stages(config)
    return answers


def weight_factors(run: Path) -> dict[int, float | None]:
    """By which factor the weights of each step were rescaled, where that is on record."""
    lines = lines_of_run(run, "metrics.jsonl")
    return {line["step"]: line.get("weight_factor") for line in lines}


def groups_in_order(tokens: dict, first: int | None = None) -> list[np.ndarray]:
    """The answers of each group."""
    groups = [np.flatnonzero(tokens["group"] == g) for g in np.unique(tokens["group"])]
    return sorted(groups, key=lambda members: (tokens["group"][members[0]] != first,
                                               np.ptp(tokens["reward"][members]) == 0))


def answer_of(tokens: dict, tokenizer, config: dict, factor: float | None, step: int,
              b: int) -> dict:
    """One answer: its texts, labels and numbers token by token, and those of its account."""
    start = int(tokens["episode_start"][b])
    of_answer = slice(start, start + int(tokens["length"][b]))
    prompts = np.split(tokens["prompt_ids"], tokens["prompt_start"][1:])
    prompt = token_bytes(tokenizer, prompts[int(tokens["group"][b])].tolist())
    pieces = token_bytes(tokenizer, tokens["token_id"][of_answer].tolist())
    return {"step": step, "episode": b, "group": int(tokens["group"][b]),
            "reward": rounded(tokens["reward"][b]), "answer": rounded(tokens["reward_answer"][b]),
            "finished": bool(tokens["finished"][b]),
            "prompt": b"".join(prompt).decode(errors="replace"),
            "texts": [piece.decode(errors="replace") for piece in pieces],
            "section": tokens["section"][of_answer].tolist(),
            "kind": tokens["kind"][of_answer].tolist(),
            "values": shown_values(tokens, of_answer),
            "account": numbers_of(tokens, config, factor, b)}


def shown_values(tokens: dict, of_answer: slice) -> dict[str, list[float | None]]:
    """What a token can be shaded by. The true credit is there where it was measured."""
    names = {"advantage": "advantage", "weight": "weight", "entropy": "entropy",
             "log-prob": "log_prob", "contribution": "contribution"}
    values = {"gradient size": np.abs(tokens["gradient"][of_answer]),
              **{shown: tokens[name][of_answer] for shown, name in names.items()}}
    for name in ("true_credit", "true_credit_se"):
        if name in tokens:
            values[name.replace("_", " ")] = tokens[name][of_answer].astype(float)
    return {name: list(map(rounded, numbers.tolist())) for name, numbers in values.items()}


def first_shown(answers: list[dict]) -> list[int]:
    """Which answers the viewer starts with: an early one and a late one to the same problem; if
    there is none, one of the first step and one of the last. Rather a solved one with a
    gradient."""
    paired = [i for i, answer in enumerate(answers) if answer.get("paired")]
    places = paired or range(len(answers))
    steps = [answers[i]["step"] for i in places]
    return [max((i for i in places if answers[i]["step"] == end),
                key=lambda i: interest(answers[i]))
            for end in dict.fromkeys(steps[:1] + steps[-1:])]


def interest(answer: dict) -> tuple[bool, bool]:
    return any(answer["values"]["gradient size"]), (answer["answer"] or 0) > 0
