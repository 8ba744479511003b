"""The training loop: sample answers, score them, compute advantages and weights, update the model,
record the step; evaluate and save a checkpoint when that is due.

    python train.py --mitigation none
    python train.py --resume runs/none-grpo-s0

Read `train` first. Where the numbers of token 17 of answer 3 are computed:

    ids[3, 17]         grpo.py: sample; qwen2_model.py: generate
    reward[3]          countdown_task.py: Task.score
    advantage[3, 17]   grpo.py: values_of, grpo
    weight[3, 17]      mitigations.py: weights, none
    the loss           grpo.py: update, policy_loss
    its log-prob       grpo.py: log_probs, states_before
    the gradient       grpo.py: update

All random numbers of a step follow from --seed and the step's number alone. So a run that was
killed goes on from its checkpoint as if nothing had happened: on the same CPU it samples the same
tokens, bit for bit. Functions of yours keep this promise if they take random numbers from
`rollouts.generator` alone, and nothing that they remember from an earlier call. All numbers are
float32. Other types, tasks and methods are in lab/, whose loop calls the same functions.
"""
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # new memory for tensors in larger pages
# Threads that wait for each other spin. Where other programs run, two threads that spin took more
# than twice the processor time of one. With this value they spin for a moment, and then sleep.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer

from countdown_task import Task
from grpo import (ADVANTAGES, AdamW, Metrics, Rollouts, frozen_log_probs, generator_of, sample,
                  update, values_of)
from mitigations import MITIGATIONS, weights
from qwen2_model import Qwen2, UserError, load_model, load_tokenizer
from run import Run, Settings, find, printable, read_settings, write_credit

OF_ONE_SEED = 256  # this many held-out problems in a row share one random seed


def train(s: Settings) -> None:
    run = Run(s)
    model = load_model(run.source).to(s.device)
    tokenizer = load_tokenizer(run.source)
    task = Task(**s.keywords_of(Task))
    held_out = task.held_out_problems(s.eval_tasks) if s.eval_every else []
    optimizer = AdamW(model.parameters(), s.learning_rate, s.weight_decay)
    run.restore(model, optimizer)  # where a resumed run stopped
    reference = None
    if s.kl:
        reference = load_model(find(s.model)).to(s.device).requires_grad_(False)
    advantage = ADVANTAGES[s.advantage]
    weighting = MITIGATIONS[s.mitigation]
    enough = max(1, model.config.hidden_size // 64)  # with more threads a small model is slower
    threads = s.threads or min(torch.get_num_threads(), enough)
    torch.set_num_threads(threads)

    run.begin()
    if run.done == 0 and held_out:
        evaluate(run, model, tokenizer, task, held_out, 0)
    signal.signal(signal.SIGINT, run.interrupt)  # from now on Ctrl-C waits for a step's end
    for step in range(run.done + 1, s.steps + 1):
        start, used = time.perf_counter(), time.process_time()
        is_last = step == s.steps

        # 1. Sample answers to new problems. Those of the last step came from an older model.
        problems = task.training_problems(s.seed, step, s.questions)
        generator = generator_of("train", s.seed, step)
        rollouts = sample(model, tokenizer, task, problems, s.answers, s.max_new_tokens, generator)

        # 2. How good was each token (its advantage), and how much does it count (its weight)? Both
        # are computed for the whole batch, before it is cut into micro-batches.
        rollouts.step = step
        rollouts.generator = generator_of("credit", s.seed, step)
        rollouts.advantage = values_of(advantage, rollouts, s.keywords_of(advantage))  # (B, T)
        weight, weight_metrics = weights(weighting, rollouts, s.keywords_of(weighting), s.rescale)

        # 3. Make tokens with a positive advantage more likely, and those with a negative one less
        # likely. Every few steps, also measure how much the log-prob of each token has changed.
        is_measured = s.change_every and ((step - 1) % s.change_every == 0 or is_last)
        if is_measured:
            before = frozen_log_probs(model, rollouts, s.micro_batch)                # (B, T)
        reference_log_prob = None
        if reference is not None:
            reference_log_prob = frozen_log_probs(reference, rollouts, s.micro_batch)
        metrics, columns = update(model, optimizer, rollouts, weight, s, reference_log_prob)
        if is_measured:
            after = frozen_log_probs(model, rollouts, s.micro_batch)
            columns["change"] = after - before

        # 4. Record the step.
        write_credit(run.folder / f"credit/step_{step:06d}.npz", rollouts, weight, columns)
        line = {"step": step, "learning_rate": s.learning_rate}
        line |= means_of(rollouts)
        line |= weight_metrics
        line |= metrics
        line["seconds"] = time.perf_counter() - start
        line["processor_seconds"] = time.process_time() - used  # of all threads
        run.log(line)
        if held_out and (step % s.eval_every == 0 or is_last):
            evaluate(run, model, tokenizer, task, held_out, step)
        is_due = s.checkpoint_every and step % s.checkpoint_every == 0
        if is_due or run.stopping or is_last:
            run.save(step, model, optimizer)  # last, when all of its step is on record
        if run.stopping and not is_last:
            raise KeyboardInterrupt
    run.end()


def means_of(rollouts: Rollouts) -> Metrics:
    """Means over all sampled answers and tokens."""
    tokens = int(rollouts.mask.sum())
    problems = len(rollouts.prompt_ids)
    by_group = rollouts.reward.view(problems, -1)
    is_equal = by_group.amin(1) == by_group.amax(1)
    means: Metrics = {}
    for part, score in rollouts.scores.items():
        name = part if part == "reward" else f"reward_{part}"
        means[name] = score.mean().item()
    means["success"] = means.get("reward_answer", math.nan)
    means["tokens"] = tokens
    means["length"] = tokens / len(rollouts.group)
    means["finished"] = rollouts.finished.float().mean().item()
    means["groups_without_spread"] = is_equal.float().mean().item()
    means["entropy"] = rollouts.entropy.sum().item() / tokens
    means["collision"] = rollouts.collision.sum().item() / tokens
    return means


def evaluate(run: Run, model: Qwen2, tokenizer: Tokenizer, task: Task, problems: list[Any],
             step: int) -> None:
    """Answer every held-out problem, first with a sampled answer, then with a greedy one. The
    rewards of training are partly luck, and its problems change from step to step."""
    s = run.settings
    at_a_time = s.questions * s.answers  # as many answers as in training
    for mode in ("sampled", "greedy"):
        def ask(some: list[Any], generator: torch.Generator) -> Rollouts:
            return sample(model, tokenizer, task, some, 1, s.max_new_tokens, generator,
                          greedy=mode == "greedy")

        line = answer_all(task, problems, at_a_time, ask)
        run.log_evaluation({"step": step, "mode": mode} | line)


def answer_all(task: Any, problems: list[Any], at_a_time: int, ask: Callable[..., Rollouts]
               ) -> dict[str, Any]:
    """The numbers of each answer, their means, and three answers, for evaluations.jsonl."""
    names = ("reward", "answer", "format", "length", "finished")
    found: dict[str, list[float]] = {name: [] for name in names}
    shown: list[dict[str, Any]] = []
    for start in range(0, len(problems), OF_ONE_SEED):
        # The random numbers of a problem follow from its index, so they are the same at every
        # step, for every --seed and for every size of a batch.
        generator = generator_of("evaluation", start)
        of_seed = problems[start:start + OF_ONE_SEED]
        for first in range(0, len(of_seed), at_a_time):
            rollouts = ask(of_seed[first:first + at_a_time], generator)
            known = dict(rollouts.scores)
            known["length"] = rollouts.length
            known["finished"] = rollouts.finished
            for name in names:
                found[name] += known[name].double().tolist()
            for row in range(len(rollouts.ids)):
                if len(shown) < 3:
                    shown.append(example(task, rollouts, row))
    means = {f"{name}_mean": sum(found[name]) / len(problems) for name in names}
    success = means.pop("answer_mean")
    low, high = wilson_interval(sum(found["answer"]), len(problems))
    del found["finished"]
    return {"success": success, "success_low": low, "success_high": high, **means, **found,
            "shown": shown}


def example(task: Any, rollouts: Rollouts, row: int) -> dict[str, Any]:
    """An answer for the record, with the log-prob of each of its tokens."""
    texts = rollouts.texts[row]
    log_prob = rollouts.log_prob[row, :len(texts)].tolist()
    return {"problem": task.show(rollouts.problems[row]),
            "text": rollouts.answers[row],
            "texts": texts,
            "answer": int(rollouts.scores["answer"][row]),
            "reward": rollouts.reward[row].item(),
            "log_prob": [round(x, 4) for x in log_prob]}


def wilson_interval(hits: float, count: int) -> tuple[float, float]:
    """The 95% interval of a proportion (Wilson 1927); unlike the usual one it stays inside 0..1."""
    z = 1.959964
    p = hits / count
    spread = z * z / count
    centre = p + spread / 2
    half = z * math.sqrt(p * (1 - p) / count + spread / (4 * count))
    low = (centre - half) / (1 + spread)
    high = (centre + half) / (1 + spread)
    return max(0.0, low), min(1.0, high)


def main(argv: list[str]) -> None:
    s = read_settings(argv)
    try:
        with nullcontext() if s.device == "cpu" else torch.device(s.device):
            train(s)
    except KeyboardInterrupt:
        command = f"python train.py --resume {shlex.quote(s.out)}"
        print(f"\nstopped: {command} goes on from its last checkpoint")
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, OSError, SafetensorError) as error:  # a full disk raises the last two
        sys.exit(f"train.py: {printable(str(error))}")
