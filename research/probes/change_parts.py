"""Why do words lose so much of their push? Steps on parts of a batch, and who moves whom.

`python -m research change --seeds 12` measures this with the untrained model, a batch for each
seed. Two things are computed.

Parts of the batch. One step is made on all answers or on a part of them, and the share of words in
the push of the trained tokens is compared with their share in the change of the same tokens. If
words lose because right and wrong answers cancel, they lose less where only right answers are
trained on.

Who moves whom. To first order, the change of token x in a plain step on one problem is

    change(x) = rate / N * sum over y of A(y) K(x, y)
    K(x, y)   = the inner product of the gradients of log p(x) and log p(y), over all parameters

The sum goes over all tokens y of the problem's answers. So it can be cut into RELATIONS of y to x:
the token itself, the rest of its answer, tokens of other answers after the same prefix, and so on.
A relation explains a loss if words keep their share where it alone is left out, or lose it where it
alone is added to the token itself. K is also cut into two: the part of the output matrix (the head)
when it makes the logits, and the rest (the body).
"""
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from analysis.statistics import Floats, mean_over
from analysis.tables import WITH_INTERVAL, Row, Table, by_row
from analysis.tokens import TokenTable, table_of_frames
from engine.errors import read_json
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts
from engine.tokens import KINDS
from grpo import gradient_size
from harness.load import load_policy
from harness.record import replace_text
from harness.settings import make_settings
from research.probes.change_batches import change_in_a_step, with_groups

FIRST_SEED = 60_000  # of the batches; no other measurement has these
ALONE = 4            # problems of a batch that are trained on alone
SHOWN = ("word", "number", "operator")
ALL, RIGHT, WRONG = "all answers", "right answers alone", "wrong answers alone"
ONE_OF_EACH, SINGLE = "one right answer of each problem", "a single right answer"
ALL_UP = "all answers, A = 1"
PARTS = (ALL, RIGHT, WRONG, ONE_OF_EACH, SINGLE, ALL_UP)
MEASURED = ("push", "plain step", "AdamW's first")
ITSELF, OWN_ANSWER = "itself", "the rest of its answer"
SAME_WORD_THERE = "same prefix, the same token"
OTHER_WORD_THERE = "same prefix, another token"
SAME_WORD_AND_PLACE = "other prefix, the same token at the same position"
SAME_WORD = "other prefix, the same token elsewhere"
OTHERS = "other prefix, another token"
RELATIONS = (ITSELF, OWN_ANSWER, SAME_WORD_THERE, OTHER_WORD_THERE, SAME_WORD_AND_PLACE, SAME_WORD,
             OTHERS)
SUMS = (ITSELF, *(f"itself and: {name}" for name in RELATIONS[1:]), "all",
        *(f"all but: {name}" for name in RELATIONS[1:]), "itself, head alone",
        "itself, body alone", "all, head alone", "all, body alone")
KEPT = ("parts", "sums", "agreement")  # of a seed, in its file
Shares = dict[str, list[float]]  # of a row: the share of each of SHOWN
OfSeed = tuple[dict[str, Shares], Shares, float]


def load_or_measure_seed(seed: int, flags: dict) -> OfSeed:
    """The shares of one seed's batch as they were measured before, or measured now and kept."""
    sizes = f"{flags['questions']}x{flags['answers']}"
    path = Path(flags["kept"]) / f"parts-{Path(flags['model']).name}-{seed}-{sizes}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(dict(zip(KEPT, shares_of_seed(seed, flags)))))
    of_parts, of_sums, agreement = (read_json(path)[name] for name in KEPT)
    return of_parts, of_sums, agreement


def shares_of_seed(seed: int, flags: dict) -> OfSeed:
    """Of the batch of one seed: the shares of each part and measure, those of each of SUMS, and the
    correlation of the first-order change with the measured one."""
    torch.set_num_threads(flags["threads"] or 1)
    s = make_settings({"model": flags["model"], "seed": seed, "temperature": 1.0,
                       "questions": flags["questions"], "answers": flags["answers"]})
    policy = load_policy(s)
    problems = policy.task.training_problems(seed, 1, s.questions)
    rollouts = policy.ask(problems, s.answers, derived_seed("train", seed, 1))
    rollouts = with_groups(rollouts, s.answers)
    of_parts = {part: shares_of_part(policy, rollouts, part) for part in PARTS}
    of_sums, agreement = shares_of_sums(policy, rollouts)
    return of_parts, of_sums, agreement


def shares(values: list[tuple[Tensor, Tensor]]) -> list[float]:
    """The share of each of SHOWN in the sum of sizes of some (values, kinds), each (n,)."""
    size = torch.cat([value.abs().double().flatten() for value, _ in values])
    kind = torch.cat([kind.flatten() for _, kind in values])
    return [float(size[kind == KINDS.index(name)].sum() / size.sum()) for name in SHOWN]


# parts of the batch

def shares_of_part(policy: Policy, rollouts: Rollouts, part: str) -> Shares:
    """Push and change of the trained tokens in a step on a part of the batch."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in MEASURED}
    for batch in batches_of_part(rollouts, part):
        s_squared = gradient_size(batch.log_prob, batch.collision).square()
        push = batch.advantage * s_squared * batch.mask
        values = {"push": push, "plain step": change_in_a_step(policy, batch),
                  "AdamW's first": change_in_a_step(policy, batch, is_plain=False)}
        for name, value in values.items():
            found[name].append((value[push != 0], batch.kind[push != 0]))
    return {name: shares(values) for name, values in found.items()}


def batches_of_part(rollouts: Rollouts, part: str) -> list[Rollouts]:
    """The batches that a step is made on; more than one for a single answer, because one answer has
    few tokens."""
    advantage = rollouts.advantage
    if part == RIGHT:
        return [replace(rollouts, advantage=advantage.clamp(min=0))]
    if part == WRONG:
        return [replace(rollouts, advantage=advantage.clamp(max=0))]
    if part == ALL_UP:
        return [replace(rollouts, advantage=rollouts.mask.float())]
    if part == ALL:
        return [rollouts]
    chosen = first_right_answers(rollouts)
    if part == SINGLE:
        return [rollouts.of_rows(torch.tensor([row])) for row in chosen[:ALONE]]
    return [rollouts.of_rows(torch.tensor(chosen))]


def first_right_answers(rollouts: Rollouts) -> list[int]:
    """The first answer with a positive advantage of each problem that has one."""
    first: dict[int, int] = {}
    is_better = (rollouts.advantage * rollouts.mask).sum(1) > 0
    for row in is_better.nonzero().flatten().tolist():
        first.setdefault(int(rollouts.group[row]), row)
    return list(first.values())


# who moves whom

def shares_of_sums(policy: Policy, rollouts: Rollouts) -> tuple[Shares, float]:
    """The shares of each of SUMS, over the first problems whose answers differ in reward."""
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in SUMS}
    pairs: list[tuple[Floats, Floats]] = []  # first-order and measured changes
    problems = sorted({int(rollouts.group[row]) for row in first_right_answers(rollouts)})
    for problem in problems[:ALONE]:
        batch = rollouts.of_problems(range(problem, problem + 1))
        kernel, of_head = kernels(policy, batch)
        tokens = token_columns(batch)
        advantage = torch.from_numpy(tokens["advantage"])
        kind = torch.from_numpy(tokens["kind"])
        relation = relations(tokens)
        moved = {name: (kernel * (relation == number)) @ advantage
                 for number, name in enumerate(RELATIONS)}
        moved_by_head = {name: (of_head * (relation == number)) @ advantage
                         for number, name in enumerate(RELATIONS)}
        total, total_of_head = sum(moved.values()), sum(moved_by_head.values())
        sums = {ITSELF: moved[ITSELF], "all": total,
                "itself, head alone": moved_by_head[ITSELF],
                "itself, body alone": moved[ITSELF] - moved_by_head[ITSELF],
                "all, head alone": total_of_head, "all, body alone": total - total_of_head}
        for name in RELATIONS[1:]:
            sums[f"itself and: {name}"] = moved[ITSELF] + moved[name]
            sums[f"all but: {name}"] = total - moved[name]
        for name, value in sums.items():
            found[name].append((value, kind))
        measured = change_in_a_step(policy, batch)[batch.mask]
        pairs.append((total.numpy(), measured.double().numpy()))
    agreement = np.mean([np.corrcoef(one, two)[0, 1] for one, two in pairs])
    return {name: shares(values) for name, values in found.items()}, float(agreement)


def kernels(policy: Policy, batch: Rollouts) -> tuple[Tensor, Tensor]:
    """(n, n) of the n tokens of a problem's answers: the inner products of the gradients of their
    log-probs, and the part of these that is the output matrix's when it makes the logits."""
    model, prompt = policy.model, batch.prompt_ids[0]
    gradients, states, at_logits = [], [], []
    _, answers = batch.groups_and_ids
    for answer in answers:
        ids = torch.tensor([prompt + answer])
        hidden = model.model(ids)[0, len(prompt) - 1:-1]  # (T, D), predicts the answer's tokens
        log_p = model.logits(hidden).log_softmax(-1)
        log_prob = log_p[range(len(answer)), answer]
        each = torch.eye(len(answer))
        of_answer = torch.autograd.grad(log_prob, list(model.parameters()), each,
                                        is_grads_batched=True)
        gradients.append(torch.cat([part.flatten(1) for part in of_answer], 1))
        states.append(hidden.detach())
        chosen = torch.nn.functional.one_hot(torch.tensor(answer), log_p.shape[-1])
        at_logits.append(chosen - log_p.detach().exp())
    every, state, at_logit = torch.cat(gradients), torch.cat(states), torch.cat(at_logits)
    of_head = (at_logit @ at_logit.T) * (state @ state.T)
    return (every @ every.T).double(), of_head.double()


def token_columns(batch: Rollouts) -> TokenTable:
    """The tokens of a problem's answers, with a number for each distinct prefix."""
    tokens = table_of_frames(batch.mask, batch.group, {
        "token_id": batch.ids, "kind": batch.kind, "advantage": batch.advantage.double()})
    number_of: dict[tuple[int, ...], int] = {}
    prefix = []
    for answer in batch.groups_and_ids[1]:
        for position in range(len(answer)):
            prefix.append(number_of.setdefault(tuple(answer[:position]), len(number_of)))
    return tokens.having({"prefix": np.array(prefix)})


def relations(tokens: TokenTable) -> Tensor:
    """(n, n): the number in RELATIONS of what token y (column) is to token x (row)."""
    def equal(name: str) -> np.ndarray:
        return np.asarray(tokens[name][:, None] == tokens[name][None, :])

    own_answer, prefix, word = equal("answer"), equal("prefix"), equal("token_id")
    place = equal("position")
    is_related: dict[str, np.ndarray] = {
        ITSELF: np.eye(len(tokens), dtype=bool), OWN_ANSWER: own_answer,
        SAME_WORD_THERE: prefix & word, OTHER_WORD_THERE: prefix,
        SAME_WORD_AND_PLACE: word & place, SAME_WORD: word}
    number = np.full(own_answer.shape, RELATIONS.index(OTHERS))
    for name in reversed(is_related):  # where several fit, the first in RELATIONS counts
        number[is_related[name]] = RELATIONS.index(name)
    return torch.from_numpy(number)


# tables

def tables_of_seeds(found: list[OfSeed]) -> list[Table]:
    of_parts, of_sums, agreement = zip(*found)
    return [parts_table(list(of_parts)), losses_table(list(of_parts)),
            relations_table(list(of_sums), float(np.mean(agreement)))]


def parts_table(of_seeds: list[dict[str, Shares]]) -> Table:
    """Each category's share in push and change, for each part of the batch."""
    rows: list[Row] = []
    for part in PARTS:
        for number, kind in enumerate(SHOWN):
            measured = [mean_over([seed[part][name][number] for seed in of_seeds])
                        for name in MEASURED]
            rows.append([part, kind, *measured])
    formats = {"part": "", "kind": "", **dict.fromkeys(MEASURED, ".0%")}
    headings = {"part": "the step is made on", "push": f"share of the push{WITH_INTERVAL}",
                "plain step": f"share of the change, plain step{WITH_INTERVAL}",
                "AdamW's first": f"share of the change, AdamW's first step{WITH_INTERVAL}"}
    return Table("parts", "Shares of push and change where a step is made on a part of the batch",
                 by_row(formats, rows), "",
                 [f"There are {len(of_seeds)} batches of the untrained model, one for each seed, "
                  "and intervals are Student's t over them. Push and change are those of the "
                  "tokens that the step is made on"], headings)


def losses_table(of_seeds: list[dict[str, Shares]]) -> Table:
    """How much of their share words lose from push to change, beside what they lose in a step on
    all answers."""
    def loss(seed: dict[str, Shares], part: str, step: str) -> float:
        return seed[part]["push"][0] - seed[part][step][0]

    rows: list[Row] = []
    for part in PARTS:
        row: Row = [part]
        for step in MEASURED[1:]:
            own = [loss(seed, part, step) for seed in of_seeds]
            usual = [loss(seed, ALL, step) for seed in of_seeds]
            differences = [mine - all_of_it for mine, all_of_it in zip(own, usual)]
            row += [mean_over(own), mean_over(differences) if part != ALL else None]
        rows.append(row)
    formats = {"part": "", "plain": "size", "plain, difference": "points", "AdamW": "size",
               "AdamW, difference": "points"}
    return Table("losses", "How many points of their share words lose from push to change",
                 by_row(formats, rows), "",
                 ["The loss is the share of words in the push minus their share in the change of "
                  "the same tokens, in points. The difference is from the loss in a step on all "
                  "answers, for pairs of the same batch"],
                 {"part": "the step is made on", "plain": f"loss, plain step{WITH_INTERVAL}",
                  "plain, difference": f"difference from all answers{WITH_INTERVAL}",
                  "AdamW": f"loss, AdamW's first step{WITH_INTERVAL}",
                  "AdamW, difference": f"difference, AdamW{WITH_INTERVAL}"})


def relations_table(of_seeds: list[Shares], agreement: float) -> Table:
    """Each category's share in sums over some of the tokens that move a token."""
    rows: list[Row] = []
    for name in SUMS:
        row: Row = [name]
        for number in range(len(SHOWN)):
            row.append(mean_over([seed[name][number] for seed in of_seeds]))
        for other in (ITSELF, "all"):
            differences = [seed[name][0] - seed[other][0] for seed in of_seeds]
            row.append(mean_over(differences) if name != other else None)
        rows.append(row)
    formats = {"moved by": "", **dict.fromkeys(SHOWN, ".0%"), "minus itself": "points",
               "minus all": "points"}
    return Table("relations", "Shares of the first-order change, by which tokens move a token",
                 by_row(formats, rows),
                 f"The correlation of the first-order change with the measured one is "
                 f"{agreement:.3f}.",
                 [f"A plain step on one problem alone, {ALONE} problems of each of "
                  f"{len(of_seeds)} batches. The last two columns are differences in the share of "
                  "words, in points. Intervals are Student's t over the batches"],
                 {"moved by": "the tokens that move it",
                  **{kind: f"share of {kind}s{WITH_INTERVAL}" for kind in SHOWN},
                  "minus itself": f"words, minus those of itself{WITH_INTERVAL}",
                  "minus all": f"words, minus those of all{WITH_INTERVAL}"})


def values_of_seeds(found: list[OfSeed]) -> dict:
    """The shares of every batch, which the tables were made of: [words, numbers, operators]."""
    def rounded(values: list[float]) -> list[float]:
        return [round(value, 6) for value in values]

    of_parts: dict[str, dict[str, list]] = {}
    of_sums: dict[str, list] = {}
    for part in PARTS:
        of_parts[part] = {name: [rounded(seed[part][name]) for seed, _, _ in found]
                          for name in MEASURED}
    for name in SUMS:
        of_sums[name] = [rounded(sums[name]) for _, sums, _ in found]
    return {"kinds": list(SHOWN), "seeds": [FIRST_SEED + number for number in range(len(found))],
            "parts": of_parts, "relations": of_sums,
            "agreement": rounded([agreement for _, _, agreement in found])}
