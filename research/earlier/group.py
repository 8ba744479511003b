"""What becomes of one group's rewards in one step?

    python train.py --mitigation none --steps 1 --eval_every 0 --out runs/first_step
    python -m research group --run runs/first_step

A run keeps, for some of its steps, what the step did to each token. This probe reads such a step
and writes down, for the answers to one problem, how each number follows from the one before:

    each answer            its reward, its advantage, the log-prob of all its tokens before the
                           step, and how the step changed this log-prob
    each token of the      its probability, advantage, weight, push and change
    best answer
    each category of       its share of the push and of the change, over all tokens of the step
    tokens

Nothing is sampled. The pictures of a step on the pages are drawn from these numbers.
"""
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from analysis.shares import shares_by
from analysis.tables import Row, Table, by_row
from analysis.tokens import StepRecord, TokenTable, read_step
from engine.errors import UserError
from engine.tokens import CHATML, KINDS, USER_TURN, load_tokenizer, token_bytes
from harness.flags import Flag
from harness.record import find_folder
from research.probes.common import FOLDER_SEED, Findings

FLAGS = {
    "seed": FOLDER_SEED,
    "run": Flag("runs/none-grpo-s0", "folder of a run"),
    "step": Flag(1, "a step whose change was measured. Runs measure the first step and, by "
                 "default, every tenth after it", least=1,
                 most=1_000_000),
    "group": Flag(0, "which problem of the step", least=0, most=1_000_000)}
Speller = Callable[[np.ndarray], str]  # from the ids of some tokens to their text


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    run = find_folder(args.run)
    record = read_step(run, args.step)
    if "change" not in record.tokens:
        raise UserError(f"{run} did not measure the change of step {args.step}. It did so in step "
                        "1, unless the run had --change_every 0")
    if args.group >= len(record.prompts):
        raise UserError(f"--group {args.group}: the step has the problems 0 to "
                        f"{len(record.prompts) - 1}")
    tokenizer = load_tokenizer(run)

    def text(ids: np.ndarray) -> str:
        return b"".join(token_bytes(tokenizer, ids.tolist())).decode(errors="replace")

    prompt = text(record.prompts[args.group])
    problem = prompt.rpartition(USER_TURN)[2].partition(CHATML[1])[0].strip()
    answers = np.flatnonzero(record.answers["group"] == args.group)
    best = answers[np.argmax(record.answers["reward"][answers])]
    intro = [f"This is step {args.step} of the run {run.name}. The problem is {problem}, and the "
             f"best of the answers is {text(record.tokens_of(best)['token_id'])!r}."]
    tables = [answers_table(record, answers, text, f"The answers to {problem}"),
              tokens_table(record.tokens_of(best), text), kinds_table(record.tokens)]
    return Findings("One group, through one step", intro, tables)


def answers_table(record: StepRecord, answers: np.ndarray, text: Speller, title: str) -> Table:
    """A row for each answer of the group."""
    rows: list[Row] = []
    for number in answers:
        tokens = record.tokens_of(number)
        rows.append([str(number), text(tokens["token_id"]), len(tokens),
                     float(record.answers["reward"][number]), tokens["advantage"][0],
                     tokens["log_prob"].sum(), tokens["change"].sum()])
    formats = {"answer": "", "text": "", "tokens": ".0f", "reward": ".2f", "advantage": "+.3f",
               "log-prob": ".3f", "change": "+.3f"}
    reward = record.answers["reward"][answers].astype(float)
    rose = sum(row[-1] > 0 for row in rows)
    return Table("answers", title, by_row(formats, rows),
                 f"The rewards have the mean {reward.mean():.4f} and the standard deviation "
                 f"{reward.std():.4f}. {rose} of {len(rows)} answers became more likely.")


def tokens_table(tokens: TokenTable, text: Speller) -> Table:
    """A row for each token of one answer."""
    rows: list[Row] = []
    for number in range(len(tokens)):
        one = tokens.where(slice(number, number + 1))
        rows.append([str(number), text(one["token_id"]), KINDS[one["kind"][0]],
                     np.exp(one["log_prob"][0]), *(one[name][0] for name in (
                         "advantage", "weight", "s", "abs gradient", "push", "change"))])
    formats = {"number": "", "token": "", "kind": "", "p": ".4f", "advantage": "+.3f",
               "weight": ".2f", "s": ".3f", "gradient": ".3f", "push": "+.3f", "change": "+.4f"}
    fell = sum(row[-1] < 0 < row[-2] for row in rows)
    return Table("tokens", "The tokens of the best answer", by_row(formats, rows),
                 f"Of the {len(rows)} tokens of the best answer, {fell} were pushed up and became "
                 "less likely.",
                 notes=["p is the probability of the token, s the size of the gradient of its "
                        "log-prob at the logits, and abs(A) w s the size of its gradient there. "
                        "The push A w s^2 is what its own term of the loss asks for, and the "
                        "change is what the step did to its log-prob"],
                 headings={"kind": "category", "gradient": "abs(A) w s"})


def kinds_table(tokens: TokenTable) -> Table:
    """A row for each category, of all tokens of the step."""
    sizes = np.ones(len(tokens)), np.abs(tokens["push"]), np.abs(tokens["change"])
    shares = [shares_by(tokens["kind"], size, len(KINDS)) for size in sizes]
    rows: list[Row] = [[name, *of_kind] for name, *of_kind in zip(KINDS, *shares) if of_kind[0]]
    words = {name: of_kind for name, *of_kind in rows}.get("word")
    finding = "" if words is None else (
        f"Words are {words[0]:.0%} of the tokens, get {words[1]:.0%} of the push and make up "
        f"{words[2]:.0%} of the change.")
    formats = {"kind": "", "tokens": ".1%", "push": ".1%", "change": ".1%"}
    return Table("kinds",
                 "Each category's share of the step's tokens, of their push and of their change",
                 by_row(formats, rows), finding,
                 ["Shares of push and change are shares of the sum of their sizes"],
                 headings={"kind": "category"})
