"""The loop: sample, score, advantage, weight, loss, update, record; evaluate, and never lose a run.

    python train.py --mitigation none
    python train.py --resume runs/none-grpo-s0

Read `train` from top to bottom: what is built, then the step, again and again. Everything per token
is a tensor (B, T): B answers, T the longest one's tokens. Token 17 of answer 3, with plain GRPO:

    ids[3, 17]         engine/sampler.py: generate
    reward[3]          engine/rollouts.py: score_answers; countdown_task.py: Task.score
    advantage[3, 17]   grpo.py: grpo
    weight[3, 17]      mitigations.py: none, rescaled_weight
    the loss           grpo.py: update, policy_loss
    its gradient       engine/forward.py: response_log_probs, TokenLogProbs.backward

Every random draw of step n follows from (seed, n) alone, so a resumed run needs no random state: it
samples what the uninterrupted run would have sampled, bit for bit on the same CPU.

Left out: a replay buffer, a reward model, and sampling while training goes on. Every answer is
sampled from the weights that are updated with it (unless --rollouts_every says less often).
"""
import time
from dataclasses import replace
from statistics import mean

import engine  # noqa: F401  before torch: it sets how torch's threads wait
import torch

from engine.choices import WHOLE_ANSWERS, Method, checked_credit
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts
from grpo import update
from harness.load import (answers_from, initial_model, load_optimizer, load_policy, make_advantage,
                          make_weighting)
from harness.metrics import Clock, step_metrics, wilson_interval
from harness.record import Json
from harness.run import Run, open_run
from harness.screen import most_varied, print_evaluation, run_as_program, show_status
from harness.settings import MODES, Settings
from mitigations import rescaled_weight, shuffled


def train(run: Run) -> None:
    s = run.settings
    policy = load_policy(s, run.checkpoint)         # model, tokenizer, task
    optimizer = load_optimizer(s, policy)           # AdamW
    reference = initial_model(s) if s.kl else None  # what the KL term compares with
    advantage = make_advantage(s, policy)           # rollouts -> (B, T), of --advantage or --loss
    weighting = make_weighting(s, policy)           # rollouts -> (B, T), of --mitigation
    source = answers_from(run, policy, optimizer)   # the policy itself, a server, or a file
    run.begin(policy, optimizer, {"advantage": advantage, "mitigation": weighting})

    if run.done == 0 and s.eval_every:
        evaluate(policy, run, 0)
    for step in run.steps():
        clock = Clock(step)
        with clock("rollout"):
            problems = policy.task.training_problems(s.seed, step, s.questions)
            rollouts = source.sample(problems, s.answers, derived_seed("train", s.seed, step))
            rollouts = policy.score(rollouts)                                   # rewards (B,)
        with clock("credit"):
            rollouts = with_advantage(rollouts, advantage, policy, s, step)     # (B, T)
            batch = drop_unfinished(rollouts) if s.drop_unfinished else rollouts
            weight, weight_metrics = rescaled_weight(                           # (B, T)
                weighting, s.mitigation, batch, policy, s.rescale, s.placebo)
        with clock("update"):
            metrics, columns = update(policy.model, optimizer, batch, weight, s, reference,
                                      is_watched(s, step))
        with clock("record"):
            run.record(step, rollouts, weight, columns)  # dropped answers, too: weight 0
        run.log(step_metrics(clock, rollouts, metrics, advantage, weight_metrics))

        if run.is_due(s.eval_every, step):
            evaluate(policy, run, step)
        run.save_if_due(step)  # after the evaluation: up to a checkpoint, everything is on record
    run.end()


def with_advantage(rollouts: Rollouts, advantage: Method, policy: Policy, s: Settings,
                   step: int) -> Rollouts:
    """Add the advantage (B, T) that --advantage makes from the rewards; and before, what a method
    may ask for: the step, random numbers, one more forward pass."""
    generator = torch.Generator().manual_seed(derived_seed("credit", s.seed, step))
    rollouts = replace(rollouts, step=step, generator=generator, forward=policy.extra_forward())
    values = checked_credit(advantage, f"the advantage {s.advantage}", rollouts, policy)
    if s.placebo == "advantages":
        values = shuffled(values, rollouts.mask, rollouts.group, generator,
                          s.advantage in WHOLE_ANSWERS)
    return replace(rollouts, advantage=values)


def drop_unfinished(rollouts: Rollouts) -> Rollouts:
    """Answers that the limit cut off stay in their group's statistics, and are not trained on."""
    return replace(rollouts, mask=rollouts.mask & rollouts.finished[:, None])


def is_watched(s: Settings, step: int) -> bool:
    """Whether it is measured what becomes of each token: at step 1 and every so many steps after
    it, as the model before is a checkpoint then; and at the last."""
    return bool(s.change_every) and ((step - 1) % s.change_every == 0 or step == s.steps)


def evaluate(policy: Policy, run: Run, step: int) -> None:
    """Answers to every held-out problem, first sampled, then a greedy one."""
    for mode in MODES[run.settings.eval_modes]:
        start = time.perf_counter()
        line = answer_held_out(policy, run.settings, step, mode)
        run.folder.append("evaluations.jsonl", line)
        print_evaluation(line, time.perf_counter() - start)


def answer_held_out(policy: Policy, s: Settings, step: int, mode: str) -> Json:
    """The line of evaluations.jsonl. As many problems are asked at a time as a training batch has
    answers. Random numbers follow from the problem's place alone: neither from step nor --seed."""
    problems = policy.task.held_out_problems(s.eval_tasks)
    is_greedy = mode == "greedy"
    each = 1 if is_greedy else s.eval_answers
    at_once = s.questions * s.answers
    asked = [policy.task.show(problem) for problem in problems]
    places = most_varied(asked)
    shown: dict[int, Json] = {}
    found: dict[str, list[float]] = {  # a number a problem
        "format": [], "length": [], "finished": [], "answer": []}
    for start in range(0, len(problems), at_once):
        show_status(f"held-out problems, {mode}: {start} of {len(problems)}")
        part = policy.ask(problems[start:start + at_once], each, derived_seed("evaluation", start),
                          is_greedy)
        known = {**part.scores, "length": part.length, "finished": part.finished}
        for name, values in found.items():
            values += known[name].double().view(-1, each).mean(1).tolist()
        shown |= {place: example(part, (place - start) * each, asked[place])
                  for place in places if start <= place < start + at_once}
    answer = found["answer"]
    # over problems: where each has several answers it is too wide, never too narrow
    low, high = wilson_interval(sum(answer), len(answer))
    return {"step": step, "mode": mode, "success": mean(answer), "success_low": low,
            "success_high": high, "format_mean": mean(found["format"]),
            "length_mean": mean(found["length"]), "finished_mean": mean(found["finished"]),
            "answer": answer, "format": found["format"], "length": found["length"],
            "shown": [shown[place] for place in places]}


def example(rollouts: Rollouts, row: int, problem: str) -> Json:
    """One answer, and how sure the model was of each of its tokens."""
    log_prob = rollouts.log_prob[row, :rollouts.length[row]].tolist()
    return {"problem": problem, "text": rollouts.answers[row],
            "answer": int(rollouts.scores["answer"][row] > 0), "texts": rollouts.texts[row],
            "log_prob": [round(value, 4) for value in log_prob]}


def main(argv: list[str]) -> None:
    with open_run(argv) as run:  # a new one, or one that is resumed
        if not run.is_finished:
            train(run)


if __name__ == "__main__":
    run_as_program("train.py", main, interrupted="stopped at once; --resume goes on from the last "
                   "checkpoint of a run that has one")
