"""The loop of a run of the lab: the steps of train.py, with the parts of a LabRun, which may stop
early, and whose folder is locked."""
import time
from typing import Any

import torch

from grpo import Rollouts, generator_of
from lab.harness.run import LabRun
from lab.harness.screen import ctrl_c_calls
from train import answer_all, means_of


def train(run: LabRun) -> None:
    s = run.settings
    for step in range(run.done + 1, s.steps + 1):
        run.step = step
        start, used = time.perf_counter(), time.process_time()

        problems = run.task.training_problems(s.seed, step, s.questions)
        rollouts = run.sample(problems, s.answers, generator_of("train", s.seed, step))

        rollouts.step, rollouts.generator = step, generator_of("credit", s.seed, step)
        rollouts.advantage = run.advantages(rollouts)                                # (B, T)
        weight, of_weight = run.weights(rollouts)                                    # (B, T)

        is_measured = s.change_every and ((step - 1) % s.change_every == 0 or step == s.steps)
        metrics, columns = run.update(rollouts, weight, bool(is_measured))

        run.record(rollouts, weight, columns)
        run.log({"step": step} | means_of(rollouts) | of_weight | metrics | {
            "seconds": time.perf_counter() - start,
            "processor_seconds": time.process_time() - used})

        is_last = step == s.steps or run.stopping
        if s.eval_every and (step % s.eval_every == 0 or step == s.steps):
            evaluate(run, step)
        if is_last or (s.checkpoint_every and step % s.checkpoint_every == 0):
            run.save(step)  # after all else, so the record is complete up to every checkpoint
        if is_last:
            break


def evaluate(run: LabRun, step: int) -> None:
    s = run.settings
    for mode in ("sampled", "greedy"):
        def ask(problems: list[Any], generator: torch.Generator) -> Rollouts:
            return run.sample(problems, 1, generator, mode == "greedy")

        line = answer_all(run.task, run.held_out, s.questions * s.answers, ask)
        run.log_evaluation({"step": step, "mode": mode} | line)


def carry_out(run: LabRun) -> None:
    """Whatever happens, the folder is unlocked."""
    failed = True
    try:
        run.begin()
        if run.done == 0 and run.settings.eval_every:
            evaluate(run, 0)
        with ctrl_c_calls(run.interrupt):  # from now on Ctrl-C waits for the end of a step
            train(run)
            run.end()
        failed = False
    finally:
        run.close(failed)
    if run.is_stopped:
        raise SystemExit(130)
