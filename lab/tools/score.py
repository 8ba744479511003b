"""How well does something find credit? Scored against tokens whose credit was measured.

    python -m lab score my_idea --strength 10       # a weighting or an advantage
    python -m lab score my_file.py:my_function      # anybody's advantage (lab/foreign.py)
    python -m lab score my_scores.jsonl             # {"problem": 0, "answer": 0, "score": [...]}

The tokens of lab/data have their true credit, as two independent estimates. Of a token a is the
score, or the weight times the advantage of plain GRPO, c the credit, and s its gradient's size.

    credit            the cosine of a and c, sum a c s^2 / sqrt(sum a^2 s^2 * sum c^2 s^2)
    within answers    the same after the mean of its answer, each token counted with s^2, was
                      subtracted from each a and each c: which tokens, and not which answers

Noise is taken out: sum c^2 is the sum of products of the two estimates. The last row is what one of
them scores by the other. Intervals are over problems. A good score is no gain in training.
"""
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from countdown_task import KINDS, SECTIONS, Problem
from grpo import grpo
from mitigations import gradient_size
from lab.analysis.statistics import Estimate, over_problems
from lab.analysis.tables import Row, Table, by_row, show
from lab.engine.credited import credited
from lab.engine.errors import PROJECT, UserError
from lab.engine.methods import axis_of
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.harness.build import load_policy
from lab.harness.flags import Flag, read, unknown_argument
from lab.harness.record import Json
from lab.harness.settings import make_settings
from lab.tools.first_step import methods_of

FLAGS = {
    "data": Flag(str(PROJECT / "lab/data/tokens.jsonl"), "the tokens, as in lab/data"),
    "of": Flag("tiny", "which set of the file"),
    "model": Flag("models/tiny", "their model, for methods that look at its hidden states")}
AT_ONCE = 8  # problems in a batch, as in training
BESIDE = ("none", "entropy_weighted", "outcome_conditional")
Halves = list[np.ndarray]  # the two estimates of all tokens, end to end


def batches_of(lines: list[Json], policy: Policy) -> Iterator[Rollouts]:
    for start in range(0, 1 + max(line["problem"] for line in lines), AT_ONCE):
        part = [line for line in lines if start <= line["problem"] < start + AT_ONCE]
        problems = [Problem(tuple(line["numbers"]), line["target"]) for line in part
                    if line["answer"] == 0]
        prompts = [policy.tokenizer.encode(policy.task.prompt_for(problem)).ids
                   for problem in problems]
        T = max(len(line["ids"]) for line in part)

        def frame(values: list[list[float]], kind: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor([row + [0] * (T - len(row)) for row in values], dtype=kind)

        def column(name: str) -> Tensor:
            return torch.tensor([line[name] for line in part])

        numbers = {name: frame([line[name] for line in part])
                   for name in ("log_prob", "entropy", "collision")}
        for name, words in (("section", SECTIONS), ("kind", KINDS)):
            numbers[name] = frame([[*map(words.index, line[name])] for line in part], torch.uint8)
        ids, texts = [line["ids"] for line in part], [line["text"] for line in part]
        batch = Rollouts(
            problems, prompts, column("problem") - start, frame(ids, torch.int64),
            frame([[1] * len(row) for row in ids], torch.bool), column("finished"), **numbers,
            texts=texts, answers=["".join(text) for text in texts],
            scores={"reward": column("reward"), "answer": column("right"),
                    "format": column("format")})
        yield replace(batch, advantage=grpo(batch), forward=policy.extra_forward())


def scores_of(name: str, typed: Json, policy: Policy, batches: list[Rollouts]) -> np.ndarray:
    """The weight times the advantage of each token, as a step of training has them."""
    s = policy.settings
    if ":" not in name:
        s = make_settings(s.typed | {axis_of(name): name} | typed)
    methods = methods_of(name, s, policy)
    found = []
    for number, batch in enumerate(batches, 1):
        mine, weight, _ = credited(batch, methods, replace(policy, settings=s), s, number)
        found.append((weight * mine.advantage)[batch.mask].double().numpy())
    return np.concatenate(found)


def scores_in(path: Path, lines: list[Json]) -> np.ndarray:
    with open(path, encoding="utf-8") as file:
        given = {(one["problem"], one["answer"]): one["score"] for one in map(json.loads, file)}
    for line in lines:
        found = given.get((line["problem"], line["answer"]), [])
        if len(found) != len(line["ids"]):
            raise UserError(f"{path}: problem {line['problem']}, answer {line['answer']} has "
                            f"{len(line['ids'])} tokens, and its score {len(found)} numbers")
    return np.concatenate([given[line["problem"], line["answer"]] for line in lines]).astype(float)


def off_mean(x: np.ndarray, answer: np.ndarray, s2: np.ndarray) -> np.ndarray:
    return x - (np.bincount(answer, x * s2) / np.bincount(answer, s2).clip(1e-30))[answer]


def cosine(problem: np.ndarray, s2: np.ndarray, a: np.ndarray, halves: Halves) -> Estimate:
    one, other = halves
    if not np.abs(a).max() > 1e-9:
        return Estimate(np.nan)  # all tokens of an answer have the same score
    return over_problems(problem, (a * (one + other) / 2 * s2, a * a * s2, one * other * s2),
                         lambda along, own, true: along / np.sqrt(own * true))


def ceiling(problem: np.ndarray, s2: np.ndarray, halves: Halves) -> Estimate:
    one, other = halves
    return over_problems(problem, (one * other * s2, one * one * s2),
                         lambda both, own: np.sqrt(max(both, 0) / own))


def main(argv: list[str]) -> None:
    typed: Json = {}
    args = read(argv, "python -m lab score [NAME | FILE.py:NAME | FILE.jsonl] [flags]", __doc__,
                FLAGS, {"[NAME]": "what is scored"}, others=typed)
    if typed and (not args.name or args.name.endswith(".jsonl") or ":" in args.name):
        raise unknown_argument(f"--{min(typed)}", [*FLAGS])
    with open(args.data, encoding="utf-8") as file:
        every = sorted(map(json.loads, file), key=lambda line: (line["problem"], line["answer"]))
    lines = [line for line in every if line["of"] == args.of]  # as batches_of makes groups
    if not lines:
        raise UserError(f"--of {args.of}: {args.data} has {sorted({x['of'] for x in every})}")
    policy = load_policy(make_settings({"model": args.model, "threads": 1}))
    batches = list(batches_of(lines, policy))
    names = dict.fromkeys([*filter(None, [args.name]), *BESIDE])
    scores = {name: scores_in(Path(name), lines) if name.endswith(".jsonl") else scores_of(
        name, typed if name == args.name else {}, policy, batches) for name in names}

    length = [len(line["ids"]) for line in lines]
    problem = np.repeat([line["problem"] for line in lines], length)
    answer = np.repeat(range(len(lines)), length)
    halves = [np.concatenate([line[half] for line in lines]) for half in ("half_1", "half_2")]
    s2 = np.concatenate([gradient_size(batch.log_prob, batch.collision)[batch.mask].double() ** 2
                         for batch in batches])
    inner = [off_mean(half, answer, s2) for half in halves]
    rows: list[Row] = [[name, cosine(problem, s2, a, halves),
                        cosine(problem, s2, off_mean(a, answer, s2), inner)]
                       for name, a in scores.items()]
    rows.append(["one half of the continuations", *(ceiling(problem, s2, x)
                                                    for x in (halves, inner))])
    formats = {"score of": "", "credit": "+.2f", "within answers": "+.2f"}
    show([], [Table("score", f"Agreement of {len(problem):,} tokens with their true credit",
                    by_row(formats, rows), ["A good score is no gain in training"])])
