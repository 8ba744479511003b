"""The training loop: sample answers, score them, compute advantages and weights, update the model,
record the step; evaluate and save a checkpoint when that is due.

    python train.py --mitigation none
    python train.py --resume runs/none-grpo-s0

Read `train` from top to bottom: first what a run needs is built, then the same step is repeated.
Everything per token is a tensor (B, T): B answers, and as many positions T as the longest answer
has tokens. Where the numbers of token 17 of answer 3 are computed, with plain GRPO:

    ids[3, 17]         lab/engine/sampler.py: generate
    reward[3]          lab/engine/rollouts.py: score_answers; countdown_task.py: Task.score
    advantage[3, 17]   grpo.py: grpo
    weight[3, 17]      mitigations.py: none, rescaled_weight
    the loss           grpo.py: update, policy_loss
    its gradient       lab/engine/forward.py: response_log_probs, TokenLogProbs.backward

Every random draw of step n depends on (seed, n) alone, so a resumed run needs no random state: on
the same CPU it samples, bit for bit, what the uninterrupted run would have sampled.

Left out: a replay buffer, a reward model, and sampling while the model is being updated. Every
answer is sampled by the weights that it then updates.
"""
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import mean

import lab.engine  # noqa: F401  before torch: it sets how torch's threads wait
import torch

from lab.engine.methods import WHOLE_ANSWERS, Method, checked_credit
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import Rollouts, double
from grpo import update, update_with_change
from lab.harness.step_lines import Clock, most_varied, step_metrics, wilson_interval
from lab.harness.record import Json
from lab.harness.run import Run, open_run
from lab.harness.screen import run_as_program, show_status
from lab.harness.settings import MODES, Settings
from mitigations import rescaled_weight, shuffled

OF_ONE_SEED = 256  # held-out problems, one after the other, whose random numbers have one seed


def train(run: Run) -> None:
    s, parts = run.settings, run.begin()
    policy = parts.policy                        # model, tokenizer, task
    optimizer = parts.optimizer                  # AdamW
    reference = parts.reference                  # the model that the KL term compares with, or None
    advantage_method = parts.advantage_method    # --advantage: rollouts -> (B, T)
    weighting = parts.weighting                  # --mitigation: rollouts -> (B, T)

    if run.done == 0 and s.eval_every:
        evaluate(policy, run, 0)
    for step in run.steps():
        clock = Clock(step)
        with clock("rollout"):
            problems = policy.task.training_problems(s.seed, step, s.questions)
            rollouts = parts.sample(problems, s.answers, derived_seed("train", s.seed, step))
            rollouts = policy.score(rollouts)                                   # rewards (B,)
        with clock("credit"):
            rollouts = with_advantage(rollouts, advantage_method, policy, s, step)  # (B, T)
            batch = drop_unfinished(rollouts) if s.drop_unfinished else rollouts
            weight, weight_metrics = rescaled_weight(                           # (B, T)
                weighting, s.mitigation, batch, policy, s.rescale, s.placebo)
        with clock("update"):
            update_now = update_with_change if is_change_measured(s, step) else update
            metrics, columns = update_now(policy.model, optimizer, batch, weight, s, reference)
        with clock("record"):
            # also the answers that were dropped, with weight 0
            run.record(step, rollouts, weight, columns)
        run.log(step_metrics(clock, rollouts, metrics, advantage_method, weight_metrics))

        if run.is_due(s.eval_every, step):
            evaluate(policy, run, step)
        run.save_if_due(step)  # last, so that the record is complete up to every checkpoint
    run.end()


def with_advantage(rollouts: Rollouts, advantage_method: Method, policy: Policy,
                   s: Settings, step: int) -> Rollouts:
    """Add the advantage (B, T) that --advantage computes from the rewards. Before that, add what a
    method may need: the step's number, a random generator, access to one more forward pass."""
    generator = torch.Generator().manual_seed(derived_seed("credit", s.seed, step))
    rollouts = replace(rollouts, step=step, generator=generator, forward=policy.extra_forward())
    values = checked_credit(advantage_method, f"the advantage {s.advantage}", rollouts,
                            policy)
    if s.entropy_bonus:
        from lab.credit.entropy_bonus import entropy_bonus
        values = values + s.entropy_bonus * entropy_bonus(rollouts)
    if s.placebo.startswith("advantages"):
        values = shuffled(values, rollouts, s.placebo, s.advantage in WHOLE_ANSWERS)
    return replace(rollouts, advantage=values)


def drop_unfinished(rollouts: Rollouts) -> Rollouts:
    """Mask the answers that were cut off by the limit. They are not trained on, but the advantages
    of the other answers were computed with their rewards."""
    return replace(rollouts, mask=rollouts.mask & rollouts.finished[:, None])


def is_change_measured(s: Settings, step: int) -> bool:
    """Whether the change of each token is measured in this step: in step 1, every --change_every
    steps after it, and in the last step. So with --change_every 10 step 51 is one of them. It
    begins with the model of checkpoint 50, from which it can be made again."""
    if not s.change_every:
        return False
    return (step - 1) % s.change_every == 0 or step == s.steps


def evaluate(policy: Policy, run: Run, step: int) -> None:
    """Answer every held-out problem, first with sampled answers, then with a greedy one. Sampled
    ones are drawn at temperature 1, whatever training does."""
    s = replace(run.settings, temperature=1.0)
    policy = replace(policy, settings=s)
    for mode in MODES:
        start = time.perf_counter()
        line = answer_held_out(policy, s, step, mode)
        run.log_evaluation(line, time.perf_counter() - start)


def answer_held_out(policy: Policy, s: Settings, step: int, mode: str) -> Json:
    """Answer the held-out problems and return the line of evaluations.jsonl.

    The number of problems that are answered at a time is at most that of answers in a training
    batch, which fit into memory. The random numbers of a problem follow from its index. So they are
    the same at every step, for every --seed and for every size of a batch.
    """
    problems = policy.task.held_out_problems(s.eval_tasks)
    is_greedy = mode == "greedy"
    titles = [policy.task.show(problem) for problem in problems]
    to_show = most_varied(titles)  # indices of the problems whose answers are printed
    examples: dict[int, Json] = {}
    found: dict[str, list[float]] = {  # one number a problem
        "format": [], "length": [], "finished": [], "answer": []}
    for start, stop in parts_of(len(problems), s.questions * s.answers):
        show_status(f"held-out problems, {mode}: {start} of {len(problems)}")
        if start % OF_ONE_SEED == 0:
            generator = torch.Generator().manual_seed(derived_seed("evaluation", start))
        part = policy.ask(problems[start:stop], 1, generator, is_greedy)
        known = {**part.scores, "length": part.length, "finished": part.finished}
        for name, values in found.items():
            values += double(known[name]).tolist()
        for index in to_show:
            if start <= index < stop:
                examples[index] = example(part, index - start, titles[index])
    answer = found["answer"]
    low, high = wilson_interval(sum(answer), len(answer))
    return {"step": step, "mode": mode, "success": mean(answer), "success_low": low,
            "success_high": high, "format_mean": mean(found["format"]),
            "length_mean": mean(found["length"]), "finished_mean": mean(found["finished"]),
            "answer": answer, "format": found["format"], "length": found["length"],
            "shown": [examples[index] for index in to_show]}


def parts_of(count: int, most: int) -> Iterator[tuple[int, int]]:
    """The held-out problems in parts of at most so many, each of one seed: where a part begins, and
    where it ends."""
    for first in range(0, count, OF_ONE_SEED):
        last = min(first + OF_ONE_SEED, count)
        for start in range(first, last, most):
            yield start, min(start + most, last)


def example(rollouts: Rollouts, row: int, problem: str) -> Json:
    """An answer for the record, with the log-prob of each of its tokens."""
    texts = rollouts.texts[row]
    log_prob = rollouts.log_prob[row, :len(texts)].tolist()
    return {"problem": problem, "text": rollouts.answers[row],
            "answer": int(rollouts.scores["answer"][row] > 0), "texts": texts,
            "log_prob": [round(value, 4) for value in log_prob]}


def main(argv: list[str]) -> None:
    with open_run(argv) as run:  # a new one, or one that is resumed
        if not run.is_finished:
            train(run)


if __name__ == "__main__":
    run_as_program("train.py", main, interrupted="stopped at once; --resume continues a run from "
                   "its last checkpoint, if it has one")
