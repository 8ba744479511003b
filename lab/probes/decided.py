"""Which tokens decide the reward, and which get the gradient?

    python -m lab decided                                   # the tiny model, some minutes
    python -m lab decided --model FOLDER --minutes 60       # a large one, as far as time goes
    python -m lab decided --model runs/x/checkpoints/step_000100

The credit of a token is V after it minus V before it, where V is the expected reward of continuing
from there. It is measured from continuations (credit.py). Summed over an answer, the squared
credits are on average the variance of the reward. So the share that a token decides is its squared
credit divided by that sum. An example with four tokens:

    credit            0.0    0.5   -0.1    0.0
    share it decides  0%     96%     4%    0%       0.25 and 0.01 of 0.26

A squared credit is measured as the product of two independent estimates, because the square of one
estimate would be too large by its variance. Only tokens with 1 - p above --certain are measured:
the credit of another token is at most --certain times the range of the reward, and counts as 0.

The measured answers are written as a run folder, in which each problem is a step. `python -m lab
page results/decided-s0/run` shades them by credit.
Its column `decided` has the squared credit, `true_credit` the credit, and `true_credit_se` its
standard error. `python -m lab score my_idea` asks how well a method finds credit.
"""
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from itertools import count
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from lab.analysis.tables import WITH_INTERVAL, Row, Table, by_row, show, shown
from lab.analysis.token_table import TokenTable, joined_tables, table_of_frames
from lab.engine.errors import UserError, say
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import KINDS, SECTIONS
from mitigations import gradient_size
from lab.harness.build import load_policy
from lab.harness.flags import MOST_THREADS, Flag, read
from lab.harness.record import credit_path, new_folder, provenance, replace_text, write_credit
from lab.probes.run_tokens import CLASSES, class_codes
from lab.harness.screen import python_command, show_status
from lab.harness.settings import make_settings
from lab.probes.common import sample_batch
from run import append, make_run, own_files
from lab.probes.credit import MeasuredCredit, squared_credit, true_credit

TITLE = "Which tokens decide the reward, and which get the gradient"
AT_ONCE = 6  # so many problems are answered at the same time
FLAGS = {
    "model": Flag("models/tiny", "folder of a Qwen2, Qwen2.5 or Qwen3 model, for example a "
                  "checkpoint"),
    "max_new_tokens": Flag(0, "the most tokens of an answer; 0 means the number that suits the "
                              "model"),
    "device": Flag("cpu", "device to compute on: cpu, cuda or cuda:N"),
    "task": Flag(None, "the task, as --task of lab train; by default that of the run that the "
                 "model lies in, or Countdown"),
    "threads": Flag(0, "CPU threads; 0 means the number that suits this probe",
                    least=0, most=MOST_THREADS),
    "seed": Flag(0, "seed of all random numbers. The same seed gives the same results"),
    "out": Flag(None, "a new folder for the results. By default it is results/decided-s<seed>"),
    "problems": Flag(24, "the most problems whose credit is measured", least=2, most=10_000),
    "minutes": Flag(60.0, "minutes after which no further problem is begun", above=0, most=100_000),
    "answers": Flag(8, "answers to each problem, of which all are measured", least=2, most=1000),
    "continuations": Flag(8, "how many continuations measure the credit of an uncertain token. A "
                             "nearly certain one gets fewer", least=2, most=10_000),
    "certain": Flag(0.05, "tokens with 1 - p below this are not measured, and their credit counts "
                          "as 0", least=0, most=1)}
PARTITIONS = {"kind": (KINDS, "What each kind of token decides, and what gradient it gets"),
              "section": (SECTIONS, "The same by section of the answer"),
              "class": (CLASSES, "The same by the earlier experiment's classes: is filler wasted?")}


Measured = tuple[Rollouts, MeasuredCredit]  # the answers to a problem, and their tokens' credit


def tokens_of(policy: Policy, measured: Sequence[Measured]) -> TokenTable:
    tables = []
    for rollouts, credit in measured:
        frames = {
            "advantage": rollouts.advantage,  # plain GRPO's
            "s": gradient_size(rollouts.log_prob, rollouts.collision),
            "squared credit": squared_credit(credit.parts),
            "kind": rollouts.kind,
            "section": rollouts.section,
            "token_id": rollouts.ids}
        tokens = table_of_frames(rollouts.mask, rollouts.group, frames)
        tables.append(tokens.having(
            {"class": class_codes(policy.tokenizer, tokens["token_id"])}))
    return joined_tables(tables)


def decided_table(tokens: TokenTable, partition: str) -> Table:
    """A row for each cell of the partition: its share of the squared credit and of the gradient.
    """
    names, title = PARTITIONS[partition]
    squared, gradient = tokens["squared credit"], np.abs(tokens["advantage"]) * tokens["s"]
    rows: list[Row] = []
    for code, name in enumerate(names):
        inside = tokens[partition] == code
        if inside.any():
            rows.append([name, int(inside.sum()), float(inside.mean()),
                         tokens.share(inside, squared), tokens.share(inside, gradient)])
    formats = {partition: "", "tokens": ",d", "of all": ".1%", "decided": ".1%",
               "gradient": ".1%"}
    return Table(
        partition, title, by_row(formats, rows),
        [decided_in_words(rows),
         "The share they decide is a share of the sum of squared credits. It can be negative by "
         "chance, because a squared credit is the product of two estimates. Its interval is cut "
         "at 0 and 1, or reaches to the share itself. The share of plain GRPO's gradient is a "
         "share of the sum of abs(A) s, the sizes of the tokens' gradients at the logits"],
        {"tokens": "number of tokens", "of all": "share of all tokens",
         "decided": f"the share they decide{WITH_INTERVAL}",
         "gradient": f"share of plain GRPO's gradient{WITH_INTERVAL}"})


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


def main(argv: list[str]) -> None:
    """Measure, and write the findings into a folder, which appears whole or not at all."""
    args, start = read(argv, "python -m lab decided [flags]", __doc__, FLAGS), time.monotonic()
    folder = Path(args.out or f"results/decided-s{args.seed}")
    if folder.exists():
        raise UserError(f"{folder} exists already: name another folder with --out, or remove it")
    say(f"measuring the credit of tokens: {args.problems} problems, with {args.continuations} "
        f"continuations of each token, at most {args.minutes:g} minutes, into {folder}")
    with new_folder(folder) as unfinished:
        intro, tables = measure(args, unfinished)
        show_status("")
        seconds = time.monotonic() - start
        numbers = {"command": python_command("-m", "lab", "decided", *argv),
                   "settings": {flag: vars(args)[flag] for flag in FLAGS}, **provenance(),
                   "seconds": round(seconds, 1), "tables": [table.to_json() for table in tables]}
        replace_text(unfinished / "numbers.json",
                     json.dumps(numbers, indent=1, allow_nan=False) + "\n")
        printed = StringIO()
        with redirect_stdout(printed):
            show([TITLE, *intro], tables)
        replace_text(unfinished / "printed.txt", f"{numbers['command']}\ncommit "
                     f"{numbers['git_commit']}, torch {torch.__version__}\n\n{printed.getvalue()}")
    print(printed.getvalue())
    print(f"This took {seconds:.0f} s. All numbers are in {folder / 'numbers.json'}.")


def policy_of(args: SimpleNamespace) -> Policy:
    """The model and its problems: a checkpoint has those of its run. It is sampled at temperature
    1, because the policy itself is asked."""
    chosen = {name: vars(args)[name] for name in ("model", "device", "threads", "seed")}
    chosen |= {name: vars(args)[name] for name in ("max_new_tokens", "task") if vars(args)[name]}
    model = Path(args.model)
    config = model.parent.parent / "config.json"
    if model.parent.name == "checkpoints" and config.exists():
        chosen["config"] = str(config)
    # a run with LoRA keeps whole models: their W has the addition, and all of it has a gradient
    return load_policy(make_settings({**chosen, "temperature": 1.0, "lora": 0}))


def measure(args: SimpleNamespace, folder: Path) -> tuple[list[str], list[Table]]:
    """Sentences and tables. The answers are written into a run in the folder."""
    policy = policy_of(args)
    end = time.monotonic() + 60 * args.minutes
    measured: list[Measured] = []
    right: list[float] = []
    for rollouts in problems_of(policy, args.answers):
        show_status(f"{len(measured)} of {args.problems} problems")
        if len(measured) == args.problems or time.monotonic() > end:
            break
        credit = true_credit(policy, rollouts, args.continuations, certain=args.certain)
        measured.append((rollouts, credit))
        right += rollouts.scores["answer"].tolist()
    if len(measured) < 2:
        raise UserError(f"in {args.minutes:g} minutes fewer than two problems were measured: give "
                        "it more --minutes, or fewer --answers")
    tokens = tokens_of(policy, measured)
    write_run(folder / "run", policy, measured)
    spent = sum(credit.spent for _, credit in measured)
    intro = [f"Credit was measured for {len(right)} answers of {policy.folder} to {len(measured)} "
             f"problems, with {len(tokens):,} tokens. {np.mean(right):.1%} of them are right. For "
             f"this, {spent:,} tokens were sampled.",
             "The credits from one half of the continuations have a correlation of "
             f"{correlation_of_halves(measured):.2f} with those from the other half."]
    return intro, [decided_table(tokens, partition) for partition in PARTITIONS]


def problems_of(policy: Policy, answers: int) -> Iterator[Rollouts]:
    """The answers to one problem after the other. They are asked as in training."""
    for step in count(1):
        with torch.no_grad():
            rollouts = sample_batch(policy, AT_ONCE, answers, step)
        for problem in range(len(rollouts.prompt_ids)):
            group = rollouts.of_problems(range(problem, problem + 1))
            own = derived_seed("probe credit", policy.settings.seed, step, problem)
            yield replace(group, generator=torch.Generator().manual_seed(own))


def correlation_of_halves(measured: Sequence[Measured]) -> float:
    """The correlation of the measured tokens' credit by two halves of the continuations."""
    halves = []
    for rollouts, credit in measured:
        quarters = credit.parts[:, rollouts.mask]  # (4, tokens)
        halves.append(quarters.view(2, 2, -1).mean(1).cpu().numpy())
    both = np.concatenate(halves, 1)  # (2, n)
    return float(np.corrcoef(both[:, both.any(0)])[0, 1])


def write_run(path: Path, policy: Policy, measured: Sequence[Measured]) -> None:
    """A run folder for analyze.py and lab page, a step for each part that was measured."""
    config = {**policy.settings.to_json(), "steps": len(measured), "eval_every": 0, **provenance(),
              "reward": policy.task.rewarded, "model_config": asdict(policy.model.config)}
    make_run(path, config, policy.folder / "tokenizer.json", own_files())
    for step, (rollouts, credit) in enumerate(measured, 1):
        columns = {"true_credit": credit.value, "true_credit_se": credit.error,
                   "decided": squared_credit(credit.parts)}
        write_credit(credit_path(path, step), replace(rollouts, step=step), rollouts.mask.float(),
                     columns)
        success = rollouts.scores["answer"].mean().item()
        append(path / "metrics.jsonl", {"step": step, "success": success})
