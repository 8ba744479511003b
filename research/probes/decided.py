"""The share of the reward's variance that tokens decide, beside their share of the gradient.

The credit of a token is V(after) - V(before). Summed over an answer, the squares of the credits are
on average the variance of the reward, so a token decides its squared credit's share of that sum.
`scoreboard` measures all answers of a batch, `large` some answers within a given time. Both make
their tables of tokens, their tables and their run folders here.
"""
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from analysis.shares import occurring, share_of, sums_by_problem
from analysis.tables import WITH_INTERVAL, Row, Table, by_row, shown
from analysis.tokens import TokenTable, joined_tables, table_of_frames
from engine.policy import Policy
from engine.rollouts import Rollouts
from engine.tokens import KINDS, SECTIONS
from grpo import gradient_size, update_with_change
from harness.load import load_optimizer
from harness.record import credit_path, make_run, provenance, write_credit
from research.earlier.notes import CLASSES, class_codes
from research.probes.credit import MeasuredCredit, squared_credit

PARTITIONS = {"kind": (KINDS, "What each kind of token decides, and what gradient it gets"),
              "section": (SECTIONS, "The same by section of the answer"),
              "class": (CLASSES, "The same by the earlier experiment's classes: is filler wasted?")}


@dataclass
class MeasuredAnswers:
    """Some answers with the credit of their tokens. An answer may stand for several of its group,
    of which it was drawn."""
    rollouts: Rollouts
    credit: MeasuredCredit
    stands_for: torch.Tensor | float = 1.0   # (B,)


def tokens_of(policy: Policy, measured: Sequence[MeasuredAnswers]) -> TokenTable:
    """The measured tokens. What an answer stands for is in its advantage and its squared credit."""
    tables = []
    for part in measured:
        rollouts = part.rollouts
        frames = {
            "advantage": rollouts.advantage,  # plain GRPO's
            "s": gradient_size(rollouts.log_prob, rollouts.collision),
            "squared credit": squared_credit(part.credit.parts),
            "kind": rollouts.kind,
            "section": rollouts.section,
            "token_id": rollouts.ids}
        tokens = table_of_frames(rollouts.mask, rollouts.group, frames)
        times = part.stands_for
        if isinstance(times, torch.Tensor):
            times = times.numpy()[tokens["answer"]]
        tables.append(tokens.having({
            "class": class_codes(policy.tokenizer, tokens["token_id"]),
            "count": np.ones(len(tokens)),
            "advantage": tokens["advantage"] * times,
            "squared credit": tokens["squared credit"] * times}))
    return joined_tables(tables)


def decided_table(tokens: TokenTable, partition: str,
                  partitions: Mapping[str, tuple] = PARTITIONS) -> Table:
    """A row for each cell of the partition: its share of the squared credit and of the gradient. A
    token counts `count` times."""
    names, title = partitions[partition]
    squared, gradient = tokens["squared credit"], np.abs(tokens["advantage"]) * tokens["s"]
    count = tokens["count"]
    rows: list[Row] = []
    for name, inside in occurring(tokens[partition], names):
        of_name = count[inside].sum()
        rows.append([name, round(of_name), of_name / count.sum(),
                     share_of(tokens, inside, squared), share_of(tokens, inside, gradient)])
    formats = {partition: "", "tokens": ",d", "of all": ".1%", "decided": ".1%",
               "gradient": ".1%"}
    return Table(
        partition, title, by_row(formats, rows), decided_in_words(rows),
        ["The share they decide is a share of the sum of squared credits. It can be negative by "
         "chance, because a squared credit is the product of two estimates. Its interval is cut "
         "at 0 and 1. The share of plain GRPO's gradient is a share of the sum of abs(A) s, the "
         "sizes of the tokens' gradients at the logits"],
        {"tokens": "number of tokens", "of all": "share of all tokens",
         "decided": f"the share they decide{WITH_INTERVAL}",
         "gradient": f"share of plain GRPO's gradient{WITH_INTERVAL}"})


def sums_of(tokens: TokenTable, partition: str) -> dict[str, dict[str, list[float]]]:
    """The sum of each cell's squared credit and of its gradient in each problem."""
    names, _ = PARTITIONS[partition]
    sizes = {"decided_by_problem": tokens["squared credit"],
             "gradient_by_problem": np.abs(tokens["advantage"]) * tokens["s"]}
    return sums_by_problem(tokens, sizes, list(occurring(tokens[partition], names)))


def decided_in_words(rows: list[Row]) -> str:
    """A sentence about filler, or else about the tokens that decide most."""
    filler = [row for row in rows if row[0] == "filler"]
    chosen = filler[0] if filler else max(rows, key=lambda row: row[3].value)
    name, _, _, decided, gradient = chosen
    if not decided.high - decided.low < 1:
        return ("There are too few problems, continuations or differences in reward to say which "
                "tokens decide the reward.")
    return (f"The {name} tokens decide {decided.value:.0%} (95% interval {decided.low:.0%} to "
            f"{decided.high:.0%}) of the reward's variance and get {shown(gradient, '.0%')} of "
            "plain GRPO's gradient.")


def write_run(path: Path, policy: Policy, measured: Sequence[MeasuredAnswers],
              with_change: bool = False) -> None:
    """A run folder for analyze.py, a step for each part that was measured. With the change of each
    log-prob in AdamW's first step if it is asked for, after which the model is another one."""
    config = {**policy.settings.to_json(), "steps": 1, **provenance(),
              "reward": policy.task.reward, "model_config": policy.model.config.to_json()}
    make_run(path, config, policy.folder / "tokenizer.json")
    for step, part in enumerate(measured, 1):
        weight = part.rollouts.mask.float()
        columns = {"true_credit": part.credit.value, "true_credit_se": part.credit.error,
                   "decided": squared_credit(part.credit.parts)}
        if with_change:
            optimizer = load_optimizer(policy.settings, policy)
            _, changes = update_with_change(policy.model, optimizer, part.rollouts, weight,
                                            policy.settings)
            columns |= changes
        write_credit(credit_path(path, step), part.rollouts, weight, {}, **columns)
