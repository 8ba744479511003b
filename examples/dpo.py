"""A training with DPO (Direct Preference Optimization, 2305.18290) in one file: the model learns
from pairs of answers to a problem, of which one is better than the other.

    python examples/dpo.py                              # models/tiny: a minute on one core
    python examples/dpo.py --pairs runs/dpo-s0/pairs.jsonl --out runs/offline    # those of a file
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

with a plus in the better answer and a minus in the worse one. So a step of DPO is a step of GRPO
with this advantage. `train` below is train.py's with another second stage: it computes the loss
from log-probs, and `as_advantage` makes an advantage of its derivative. Another loss of pairs, such
as IPO's, is another `dpo_loss`. The flags are train.py's, and two more.

Read train.py first. What DPO leaves out of its step: all answers of a group but two; how much
better the better one is; and what a group with equal rewards could say, which is nothing in both.
What it adds: a second model in memory. Like GRPO it has no credit for single tokens.
"""
import json
import random
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it can be started from any folder

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from tokenizers import Tokenizer
from torch import Tensor

from countdown_task import Problem, Task, is_held_out
from grpo import (AdamW, Rollouts, advantage, encode, from_task, frozen_log_probs, generator_of,
                  sample, update)
from mitigations import MITIGATIONS, weights
from qwen2_model import Qwen2, UserError, load_model, load_tokenizer, stop_tokens
from run import (Run, Settings, append, find, printable, read_lines, read_settings, say, write,
                 write_credit)
from train import evaluate, means_of

# where train.py has other defaults; what is typed comes before them
DEFAULTS = "--advantage dpo --steps 30 --questions 16 --answers 8 --eval_every 30 --eval_tasks 500"
EXPECTED = 'expected {"problem": "3 5 7 make 15", "chosen": "...", "rejected": "..."}'


@advantage  # so that beta and pairs are flags
def dpo(rollouts: Rollouts, *, beta: float = 0.1, pairs: str = "") -> Tensor:
    """Pairs of answers (DPO). With a smaller `beta` the model may move further from the reference.
    `pairs` is a file with a line of JSON for each pair; without it they are sampled."""
    raise UserError("the advantage dpo needs a second model, which only examples/dpo.py has")


def dpo_loss(log_pi: Tensor, log_ref: Tensor, pairs: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The formula at the top of this file, and r(y_w) - r(y_l) of each pair. Log-probs are (B, T);
    `pairs` has a row for each pair: the better answer, the worse one."""
    r = beta * (log_pi - log_ref).sum(1)                                             # (B,)
    better, worse = pairs.unbind(1)                                                  # (pairs,)
    margin = r[better] - r[worse]
    return -F.logsigmoid(margin).sum() / max(len(pairs), 1), margin


def as_advantage(loss: Tensor, log_pi: Tensor, mask: Tensor) -> Tensor:
    """(B, T): the advantage whose policy loss, -sum(A log p) / N, has the gradient of this loss. It
    is 0 in answers that are in no pair."""
    [derivative] = torch.autograd.grad(loss, log_pi)
    return -derivative * mask * mask.sum()


def best_and_worst(rollouts: Rollouts) -> Tensor:
    """(pairs, 2) rows: the first best and first worst answer of each group whose rewards differ."""
    pairs = []
    for group in range(len(rollouts.prompt_ids)):
        rows = (rollouts.group == group).nonzero()[:, 0]
        reward = rollouts.reward[rows]
        if reward.max() > reward.min():
            pairs.append([int(rows[reward.argmax()]), int(rows[reward.argmin()])])
    return torch.tensor(pairs, dtype=torch.long).view(-1, 2)


def train(s: Settings) -> None:
    """Online, each step samples answers to new problems and compares the best with the worst of
    each group, so the pairs are of the model as it is now. Offline, they are some of those of a
    file, which existed before, as in the paper: nothing is sampled."""
    run, task = Run(s), Task(**s.keywords_of(Task))
    model, tokenizer = load_model(run.source).to(s.device), load_tokenizer(run.source)
    reference = load_model(find(s.model)).to(s.device).requires_grad_(False)
    optimizer = AdamW(model.parameters(), s.learning_rate, s.weight_decay)
    run.restore(model, optimizer)
    torch.set_num_threads(s.threads or torch.get_num_threads())
    weighting, file = MITIGATIONS[s.mitigation], run.folder / "pairs.jsonl"
    given = read_pairs(file if s.resume else Path(s.keywords["pairs"]), s, task, tokenizer)

    held_out = task.held_out_problems(s.eval_tasks) if s.eval_every else []
    run.begin()
    begin_pairs(file, run)
    if run.done == 0 and held_out:
        evaluate(run, model, tokenizer, task, held_out, 0)
    signal.signal(signal.SIGINT, run.interrupt)
    for step in range(run.done + 1, s.steps + 1):
        start = time.perf_counter()

        # 1. The pairs.
        if given:
            rng = random.Random(f"pairs {s.seed} {step}")
            chosen = rng.sample(given, min(s.questions, len(given)))
            rollouts = batch_of(chosen, model, tokenizer, task, s.micro_batch)
        else:
            problems = task.training_problems(s.seed, step, s.questions)
            rollouts = sample(model, tokenizer, task, problems, s.answers, s.max_new_tokens,
                              generator_of("train", s.seed, step))
        rollouts.step, rollouts.generator = step, generator_of("credit", s.seed, step)
        pairs = best_and_worst(rollouts)

        # 2. The loss of DPO, by the log-probs of both models.
        log_pi = frozen_log_probs(model, rollouts, s.micro_batch).requires_grad_()   # (B, T)
        log_ref = frozen_log_probs(reference, rollouts, s.micro_batch)               # (B, T)
        loss, margin = dpo_loss(log_pi, log_ref, pairs, s.keywords["beta"])
        rollouts.advantage = as_advantage(loss, log_pi, rollouts.mask)
        of_pairs = {"pairs": len(pairs), "loss": loss.item(),
                    "pairs_in_order": (margin > 0).float().mean().item()}

        # 3. A step of GRPO with the advantage that stands for this loss.
        weight, of_weight = weights(weighting, rollouts, s.keywords_of(weighting), s.rescale)
        metrics, columns = update(model, optimizer, rollouts, weight, s, log_ref if s.kl else None)
        if s.change_every and ((step - 1) % s.change_every == 0 or step == s.steps):
            after = frozen_log_probs(model, rollouts, s.micro_batch)
            columns["change"] = after - log_pi.detach()

        # 4. Write it all down.
        write_credit(run.folder / f"credit/step_{step:06d}.npz", rollouts, weight, columns)
        if not given:
            record_pairs(file, pairs, rollouts, task)
        run.log({"step": step} | means_of(rollouts) | of_weight | metrics | of_pairs | {
            "seconds": time.perf_counter() - start, "learning_rate": s.learning_rate})
        say("          {pairs} pairs, {pairs_in_order:.0%} of them in order, loss {loss:.4f}"
            .format(**of_pairs))
        if held_out and (step % s.eval_every == 0 or step == s.steps):
            evaluate(run, model, tokenizer, task, held_out, step)
        is_due = s.checkpoint_every and step % s.checkpoint_every == 0
        if is_due or run.stopping or step == s.steps:
            run.save(step, model, optimizer)
        if run.stopping and step < s.steps:
            raise KeyboardInterrupt
    run.end()


# ------------------------------------------------------------------------------- the pairs as files
def begin_pairs(file: Path, run: Run) -> None:
    """A run keeps its pairs: a copy of those that it was given, so that it goes on with them; or
    those that it sampled, but none of steps after its last checkpoint."""
    given, is_resumed = run.settings.keywords["pairs"], run.settings.resume
    if given and not is_resumed:
        shutil.copy(given, file)
    if not given:
        kept = [line for line in read_lines(file) if line["step"] <= run.done]
        write(file, "".join(json.dumps(line) + "\n" for line in kept))


def record_pairs(file: Path, pairs: Tensor, rollouts: Rollouts, task: Task) -> None:
    """The prompt is for other programs: TRL's DPOTrainer trains on prompt, chosen and rejected."""
    for better, worse in pairs.tolist():
        problem = rollouts.problems[int(rollouts.group[better])]
        append(file, {"step": rollouts.step, "problem": task.show(problem),
                      "prompt": task.prompt_for(problem), "chosen": rollouts.answers[better],
                      "rejected": rollouts.answers[worse]})


class Pair(NamedTuple):
    """A pair of a file, as tokens."""
    problem: Problem
    answers: list[list[int]]  # the better one, the worse one


def read_pairs(file: Path, s: Settings, task: Task, tokenizer: Tokenizer) -> list[Pair]:
    """Those of a file; none if the run was not given one."""
    if not s.keywords["pairs"]:
        return []
    if not file.is_file():  # /dev/zero never ends
        raise UserError(f"there is no file {file}")
    return [read_pair(line, f"{file}, line {number}", task, tokenizer, s.max_new_tokens)
            for number, line in enumerate(file.read_bytes().splitlines() or [b""], 1)]


def read_pair(line: str | bytes, where: str, task: Task, tokenizer: Tokenizer, limit: int) -> Pair:
    """The pair in a line of a file, if the model may be trained on it. `where` names the line."""
    try:
        written = json.loads(line)
        first, *others, target = map(int, written["problem"].replace("make", " ").split())
        texts = ["" + written[key] for key in ("chosen", "rejected")]  # a text and nothing else
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{where}: {EXPECTED}, got {line[:80]!r}") from None
    problem = Problem((first, *others), target)
    prompt = task.prompt_for(problem)
    encode(tokenizer, prompt)  # refuses one that cannot be spelt
    if is_held_out(problem):
        raise UserError(f"{where}: {written['problem']} is a held-out problem, and what is "
                        "evaluated may not be trained on")
    if written.get("prompt", prompt) != prompt:
        raise UserError(f"{where}: its prompt is not the one of {written['problem']}, so its "
                        "answers may be to another problem")
    answers = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    for text, ids in zip(texts, answers):
        spelt = tokenizer.decode(ids, skip_special_tokens=False)
        if not ids or spelt != text or len(ids) > limit:
            raise UserError(f"{where}: the answer {text[:80]!r} has {len(ids)} tokens, of at most "
                            f"{limit} (--max_new_tokens), which spell {spelt[:80]!r}")
    return Pair(problem, answers)


def batch_of(pairs: list[Pair], model: Qwen2, tokenizer: Tokenizer, task: Task, micro_batch: int
             ) -> Rollouts:
    """The pairs as a batch, in which each is a group: its better answer, with the reward 1, and its
    worse one. The entropy of its tokens, and the parts of a reward, are not known."""
    answers = [ids for pair in pairs for ids in pair.answers]
    length = torch.tensor([len(ids) for ids in answers])                             # (B,)
    mask = torch.arange(int(length.max())) < length[:, None]                         # (B, T)
    ids = torch.zeros(mask.shape, dtype=torch.long)
    ids[mask] = torch.tensor(sum(answers, []))
    problems = [pair.problem for pair in pairs]
    asked = [problem for problem in problems for _ in ("chosen", "rejected")]
    unknown, stop = torch.full(mask.shape, float("nan")), stop_tokens(model, tokenizer)
    scores = dict.fromkeys(("format", "answer"), unknown[:, 0])
    scores["reward"] = torch.tensor([1.0, 0.0]).repeat(len(pairs))
    rollouts = Rollouts(
        problems, [encode(tokenizer, task.prompt_for(problem)) for problem in problems],
        torch.arange(len(answers)) // 2, ids, mask,
        finished=torch.tensor([answer[-1] in stop for answer in answers]),
        log_prob=unknown, entropy=unknown, collision=unknown,
        **from_task(task, tokenizer, asked, ids, mask) | {"scores": scores})
    rollouts.log_prob = frozen_log_probs(model, rollouts, micro_batch)
    return rollouts


def settings_of(argv: list[str]) -> Settings:
    is_resumed, is_named = (any(word.startswith(flag) for word in argv)
                            for flag in ("--resume", "--out"))
    s = read_settings(argv if is_resumed else [*DEFAULTS.split(), *argv])
    if s.advantage != "dpo":
        raise UserError(f"the advantage {s.advantage} is one of train.py, and here is dpo")
    if s.keywords["beta"] <= 0:  # then no pair would have a gradient
        raise UserError(f"--beta {s.keywords['beta']}: should be above 0")
    if not is_resumed and not is_named:
        s.out = f"runs/dpo-s{s.seed}"
    return s


def main(argv: list[str]) -> None:
    s = settings_of(argv)
    try:
        with nullcontext() if s.device == "cpu" else torch.device(s.device):
            train(s)
    except KeyboardInterrupt:
        print(f"\nstopped: python examples/dpo.py --resume {s.out} goes on from the last step")
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, OSError, SafetensorError) as error:
        sys.exit(f"dpo.py: {printable(str(error))}")
