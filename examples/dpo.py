"""A training with DPO (Direct Preference Optimization, 2305.18290) in one file: the model learns
from pairs of answers to a problem, of which one is better than the other.

    python examples/dpo.py                              # models/tiny: a minute on one core
    python examples/dpo.py --write_pairs pairs.jsonl    # the same, and its pairs go into a file
    python examples/dpo.py --pairs pairs.jsonl --out runs/offline    # train on the pairs of a file
    python analyze.py runs/dpo-s0                       # what it leaves is a run as train.py's are

The loss, in the notation of the paper. y_w is the better answer to a prompt and y_l the worse one,
pi is the model, and ref is the model before the training, which stays as it is.

    loss = - mean over pairs of  log sigmoid( r(y_w) - r(y_l) )
    r(y) = beta (log pi(y) - log ref(y)),  where log pi(y) is the sum over the tokens of y

Where it comes from. Reinforcement learning from preferences has two stages: it fits a reward r to
the preferences, and then looks for the pi with the largest  E[r(y)] - beta KL(pi || ref).  DPO
makes one stage of the two:

    1. E[r(y)] - beta KL(pi || ref) is the mean of  r(y) - beta (log pi(y) - log ref(y))  over
       answers y of pi. With p(y) = ref(y) exp(r(y) / beta) / Z, where Z makes the sum of p over
       all answers 1, it is  beta log Z - beta KL(pi || p).  A KL is at least 0, and it is 0 only
       if both are equal. So the best pi is p.
    2. Solved for the reward, the best pi says what it was optimised for:
       r(y) = beta (log pi(y) - log ref(y)) + beta log Z.
    3. In the model of Bradley and Terry (1952) y_w is preferred to y_l with the probability
       sigmoid(r(y_w) - r(y_l)). Both answer the same prompt, so beta log Z cancels.
    4. So the probability of the preferences follows from pi alone. The loss is minus its
       logarithm, and no reward has to be fitted.

Its derivative by log pi(y_w) is  -beta sigmoid(r(y_l) - r(y_w)) / pairs,  and by log pi(y_l) the
same with a plus. It is beta / 2 / pairs at first, where both r are 0, and it fades as the model
comes to tell the pair apart. The policy loss of GRPO has the derivative -A / N by the log-prob of
a token, if its weight is 1. So DPO gives each token of a pair the advantage

    A = +- N beta sigmoid(r(y_l) - r(y_w)) / pairs,  with N tokens in the batch,

with a plus in the better answer and a minus in the worse one. That is what the record shows.

Read examples/one_step.py first. What DPO leaves out of its step: all answers of a group but two;
how much better the better one is; and what a group with equal rewards could say, which is nothing
in both. What it adds: a second model in memory. Like GRPO it has no credit for single tokens.
"""
import argparse
import json
import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it can be started from any folder

import lab.engine  # noqa: F401  before torch, as in one_step.py
import torch
import torch.nn.functional as F
from torch import Tensor

from countdown_task import Problem, is_held_out
from lab.engine.errors import UserError, parse_object
from lab.engine.extra_forward import with_facts
from lab.engine.forward import response_log_probs
from lab.engine.model import Qwen2
from lab.engine.model_folder import write_model_folder
from lab.engine.policy import Policy, derived_seed, stop_ids
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import encode, encode_prompt
from examples.one_step import MAX_GRAD_NORM
from lab.harness.build import initial_model, load_policy
from lab.harness.record import credit_path, provenance, read_given, replace_text, write_credit
from lab.harness.run import COPIED_FILES
from lab.harness.settings import MODES, LabSettings, make_settings
from run import append, make_run
from train import answer_held_out, means_of

STEPS, PROBLEMS, ANSWERS = 30, 16, 8
HELD_OUT = 500  # problems that are never trained on
BETA = 0.1
KEYS = ("problem", "chosen", "rejected")
EXPECTED = 'expected {"problem": "...", "chosen": "...", "rejected": "..."}'


class Pair(NamedTuple):
    """A pair of a file, as tokens."""
    problem: Problem
    prompt: list[int]
    chosen: list[int]    # the better answer
    rejected: list[int]  # the worse one


def train(s: LabSettings, beta: float = BETA, pairs_file: str | None = None,
          write_pairs: Path | None = None) -> Policy:
    """Train on the pairs of a file, or else on pairs of answers that are sampled in each step.
    Print a line for each step, write the record, and return the policy as it is at the end.

    Shapes: B is the number of a step's answers, T is the tokens of the longest of them.
    """
    # Stage 1: load the model, and once more as the reference, which has no gradient. What follows
    # is as in train.py. The folder of a run begins with its settings.
    policy = load_policy(s)
    model, task = policy.model, policy.task
    reference = initial_model(s)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.learning_rate, weight_decay=0)
    given = []
    if pairs_file:
        given = read_given(pairs_file, "pairs", lambda line, where: read_pair(line, where, policy))
    settings = {**s.to_json(), "loss": "dpo", "dpo_beta": beta, "pairs": pairs_file,
                "reward": task.rewarded, "columns_temperature": 1, **provenance()}
    make_run(s.folder, settings, policy.folder / "tokenizer.json")
    evaluate(policy, s, 0)
    print("\nstep  pairs    loss  in order  gradient norm  success", flush=True)

    written = []
    for step in range(1, s.steps + 1):
        # Stage 2: take pairs. Online, each step samples answers to new problems and compares the
        # best with the worst of each group, so the pairs are of the model as it is now. Offline,
        # they are some of the pairs that existed before, as in the paper: nothing is sampled.
        if given:
            rng = random.Random(f"pairs {s.seed} {step}")
            batch = batch_of(rng.sample(given, min(s.questions, len(given))), policy)
            pairs = torch.arange(len(batch.ids)).view(-1, 2)                         # (pairs, 2)
        else:
            problems = task.training_problems(s.seed, step, s.questions)
            batch = policy.ask(problems, s.answers, derived_seed("train", s.seed, step))
            pairs = best_and_worst(batch)                                            # (pairs, 2)
        if write_pairs:
            written += as_lines(batch, pairs, policy)

        # Stage 3: compute the loss and its gradient, pair by pair, so that the memory is that of
        # one pair. Each token of a pair gets the advantage that stands at the top of this file.
        N = int(batch.mask.sum())
        optimizer.zero_grad()
        total = 0.0
        in_order = 0  # pairs whose margin is above 0
        advantage = torch.zeros(len(batch.ids))                                      # (B,)
        for rows in pairs:
            log_pi = response_log_probs(model, batch, rows)                          # (2, T)
            with torch.no_grad():
                log_ref = response_log_probs(reference, batch, rows)                 # (2, T)
            loss, margin = pair_loss(log_pi, log_ref, beta)
            loss = loss / len(pairs)
            loss.backward()
            total += loss.item()
            in_order += int(margin > 0)
            size = N * beta * torch.sigmoid(-margin).item() / len(pairs)
            advantage[rows] = torch.tensor([size, -size])

        # Stage 4: move the parameters, unless no group had two different rewards.
        norm = None
        if len(pairs):
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM))
            optimizer.step()

        # Stage 5: record the step. The rewards of a file's answers do not say what the model can.
        means = {"tokens": float(N)} if given else means_of(batch)
        line = {"step": step, **means, "loss": total, "gradient_norm": norm, "pairs": len(pairs),
                "pairs_in_order": in_order / len(pairs) if len(pairs) else None}
        append(s.folder / "metrics.jsonl", line)
        batch = replace(batch, advantage=advantage[:, None] * batch.mask, step=step)
        weight = torch.ones_like(batch.log_prob)                                     # (B, T)
        write_credit(credit_path(s.folder, step), batch, weight)
        right = f"{means['success']:8.1%}" if "success" in means else "       -"
        print(f"{step:4}  {len(pairs):5}  {total:6.4f}  {in_order:8}  {norm or 0:13.3f} {right}",
              flush=True)

    print()
    evaluate(policy, s, s.steps)
    save(model, s.folder / "checkpoints" / f"step_{s.steps:06d}", policy.folder)
    if write_pairs:
        replace_text(write_pairs, "".join(written))
        print(f"{len(written)} pairs are written to {write_pairs}")
    print(f"The record is in {s.folder}")
    return policy


def pair_loss(log_pi: Tensor, log_ref: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The loss of a pair, and its margin r(y_w) - r(y_l). The log-probs of the tokens are (2, T):
    the better answer is first. They are 0 beyond its end."""
    r_better, r_worse = beta * (log_pi - log_ref).sum(1)
    margin = r_better - r_worse
    return -F.logsigmoid(margin), margin


def best_and_worst(batch: Rollouts) -> Tensor:
    """(pairs, 2) rows: the first best and first worst answer of each group whose rewards differ."""
    pairs = []
    for group in range(len(batch.prompt_ids)):
        rows = (batch.group == group).nonzero().squeeze(1)
        reward = batch.reward[rows]
        if reward.max() > reward.min():
            pairs.append([int(rows[reward.argmax()]), int(rows[reward.argmin()])])
    return torch.tensor(pairs, dtype=torch.long).view(-1, 2)


def save(model: Qwen2, folder: Path, made_from: Path) -> None:
    """Write a folder that this project and `transformers` can open."""
    write_model_folder(model, folder)
    for name in COPIED_FILES:
        if (made_from / name).exists():
            shutil.copyfile(made_from / name, folder / name)


def evaluate(policy: Policy, s: LabSettings, step: int) -> None:
    """Answer the held-out problems as train.py does, and record and print the success."""
    # what it needs of a run
    asked: Any = SimpleNamespace(settings=s, task=policy.task, ask=policy.ask)
    for mode in MODES:
        line = answer_held_out(asked, step, mode)
        append(s.folder / "evaluations.jsonl", line)
        print(f"step {step}, {mode} answers: {line['success']:.1%} of {len(line['answer'])} "
              f"held-out problems (95% interval {line['success_low']:.1%} to "
              f"{line['success_high']:.1%})", flush=True)


def read_pair(line: str, where: str, policy: Policy) -> Pair:
    """The pair in a line of a file, if the model may be trained on it. `where` names the line."""
    written = parse_object(line, where)
    texts = [written.get(key) for key in KEYS]
    found = [text for text in texts if isinstance(text, str) and text.strip()]
    if len(found) < len(KEYS):
        raise UserError(f"{where}: {EXPECTED}, got {line[:80]!r}")
    name, better, worse = found
    task: Any = policy.task  # Countdown, which has a method `read`
    try:
        problem = task.read(name.split())
        text = task.prompt_for(problem)
        prompt = encode_prompt(policy.tokenizer, text, name)
        chosen = encode(policy.tokenizer, better, "an answer")
        rejected = encode(policy.tokenizer, worse, "an answer")
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if is_held_out(problem):
        raise UserError(f"{where}: {name} is a held-out problem, and what is evaluated may not be "
                        "trained on")
    if written.get("prompt", text) != text:
        raise UserError(f"{where}: its prompt is not the one of {name}, so its answers may be to "
                        "another problem")
    longest = len(prompt) + max(len(chosen), len(rejected))
    limit = policy.model.config.max_position_embeddings
    if longest > limit:
        raise UserError(f"{where}: prompt and answer have {longest} tokens, and the model takes "
                        f"{limit}")
    return Pair(problem, prompt, chosen, rejected)


def batch_of(pairs: list[Pair], policy: Policy) -> Rollouts:
    """The pairs as a batch, in which each pair is a group: its better answer, then its worse one.
    Log-prob and entropy of each token are computed for the record."""
    answers = []
    for pair in pairs:
        answers += [pair.chosen, pair.rejected]
    length = torch.tensor([len(answer) for answer in answers])                       # (B,)
    mask = torch.arange(int(length.max())) < length[:, None]                         # (B, T)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    for row, answer in enumerate(answers):
        ids[row, :len(answer)] = torch.tensor(answer)
    stop = stop_ids(policy.model, policy.tokenizer)
    finished = torch.tensor([answer[-1] in stop for answer in answers])
    unknown = torch.zeros(mask.shape)
    batch = Rollouts([pair.problem for pair in pairs], [pair.prompt for pair in pairs],
                     torch.arange(len(answers)) // 2, ids, mask, finished, log_prob=unknown,
                     entropy=unknown, collision=unknown)
    return policy.score(with_facts(policy.model, batch, policy.settings.micro_batch))


def as_lines(batch: Rollouts, pairs: Tensor, policy: Policy) -> list[str]:
    """The pairs as lines of a file. The prompt is for other programs, and for the check of
    `read_pair`: TRL's DPOTrainer trains on prompt, chosen and rejected."""
    lines = []
    for better, worse in pairs.tolist():
        problem = batch.problems[int(batch.group[better])]
        pair = {"problem": policy.task.show(problem), "prompt": policy.task.prompt_for(problem),
                "chosen": batch.answers[better], "rejected": batch.answers[worse]}
        lines.append(json.dumps(pair) + "\n")
    return lines


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A training with DPO in one file.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="models/tiny", help="a model folder")
    parser.add_argument("--steps", type=int, default=STEPS, help="how many steps")
    parser.add_argument("--seed", type=int, default=0,
                        help="decides the problems, or the pairs, and the random numbers")
    parser.add_argument("--problems", type=int, default=PROBLEMS,
                        help="problems of a step, or with --pairs its pairs")
    parser.add_argument("--held_out", type=int, default=HELD_OUT, help="problems of an evaluation")
    parser.add_argument("--learning_rate", type=float,
                        help="if not typed, the one of the model's recipe.json")
    parser.add_argument("--beta", type=float, default=BETA,
                        help="with a smaller one the model may move further from the reference")
    parser.add_argument("--out", help="a new folder for the record; runs/dpo-s<seed> if not named")
    of_pairs = parser.add_mutually_exclusive_group()
    of_pairs.add_argument("--pairs", metavar="FILE",
                          help=f"train on the pairs of a file. Of each line {EXPECTED}")
    of_pairs.add_argument("--write_pairs", type=Path, metavar="FILE",
                          help="write the pairs of all steps into a new file")
    typed = parser.parse_args()
    if min(typed.steps, typed.problems, typed.held_out) < 1 or not typed.beta > 0:
        parser.error("--steps, --problems and --held_out should be at least 1, and --beta above 0")
    if typed.write_pairs and typed.write_pairs.exists():
        parser.error(f"{typed.write_pairs} exists already")
    wanted = {"task": "countdown_task", "model": typed.model, "seed": typed.seed,
              "steps": typed.steps, "questions": typed.problems, "answers": ANSWERS,
              "eval_tasks": typed.held_out, "eval_every": typed.steps,
              "checkpoint_every": typed.steps, "change_every": 0, "temperature": 1.0,
              "out": typed.out or f"runs/dpo-s{typed.seed}"}
    if typed.learning_rate:
        wanted["learning_rate"] = typed.learning_rate
    try:
        train(make_settings(wanted), typed.beta, typed.pairs, typed.write_pairs)
    except (UserError, OSError) as error:
        raise SystemExit(f"dpo.py: {error}") from None
