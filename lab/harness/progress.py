"""What a run of the lab prints: a line for each step, with the time that is left; what came of an
evaluation; and at the end how to look at the run."""
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lab.engine.rollouts import has_format
from lab.harness.memory import peak_memory
from lab.harness.record import Json
from lab.harness.screen import printable, python_command, say
from lab.harness.settings import LabSettings


class Progress:
    def __init__(self, s: LabSettings, task: Any, done: int):
        self.settings, self.task, self.done = s, task, done
        self.has_format = has_format(task)
        self.start = time.monotonic()
        self.step_seconds = 0.0                         # of all steps
        self.evaluation_seconds: dict[str, float] = {}  # of the last evaluation, by its mode
        self.evaluations: list[Json] = []               # of sampled answers, for the last line

    def say_step(self, line: Json) -> None:
        s, step, norm = self.settings, line["step"], line["gradient_norm"]
        self.step_seconds += line["seconds"]
        left = round(self.seconds_left(step))
        if step % 20 == 1 or step == self.done + 1:
            say(f"    step  reward  success{'  format' * self.has_format}  length  finished"
                "  entropy  grad norm  tokens/s      left")
        success = "not told" if line["success"] is None else f"{line['success']:.1%}"
        form = f"{line['reward_format']:8.2f}" if self.has_format else ""
        say(f"{step:4d}/{s.steps:<4d}{line['reward']:7.3f}{success:>9}{form}"
            f"{line['length']:8.1f}{line['finished']:10.1%}{line['entropy']:9.3f}  "
            f"{'  skipped' if norm is None else f'{norm:9.3f}'}"
            f"{line['tokens'] / line['seconds']:10.0f}{left // 60:7d}:{left % 60:02d}")
        if line["skipped"]:
            say(f"          no update: {line['skipped']}")
        if line["weight_note"]:
            say(f"          {line['weight_note']}")

    def seconds_left(self, step: int) -> float:
        """If the other steps take as long as those so far, and the evaluations as the last one."""
        s = self.settings
        left = self.step_seconds / (step - self.done) * (s.steps - step)
        if s.eval_every:
            evaluations = math.ceil(s.steps / s.eval_every) - (step - 1) // s.eval_every
            left += sum(self.evaluation_seconds.values()) * evaluations
        return left

    def say_evaluation(self, line: Json, seconds: float) -> None:
        self.evaluation_seconds[line["mode"]] = seconds
        form = f"format {line['format_mean']:.2f}, " if self.has_format else ""
        say(f"  held-out, {line['mode']:7s} {self.success_of(line)}  ({len(line['answer'])} "
            f"problems, {form}length {line['length_mean']:.0f}, "
            f"finished {line['finished_mean']:.0%}, {seconds:.0f} s)")
        if line["mode"] != "sampled":
            return
        self.evaluations.append(line)
        for shown in line["shown"]:
            verdict = "right" if shown["answer"] else "wrong"
            if not self.task.knows_success:
                verdict = f"reward {shown['reward']:.3f}"
            text = " ".join(printable(f"{shown['problem']}: {shown['text']}").split())
            say(f"  {verdict}  {text[:300]}")

    def success_of(self, line: Json) -> str:
        if self.task.knows_success:
            return ("{success:.1%} (95% interval {success_low:.1%} to {success_high:.1%})"
                    .format(**line))
        return ("reward {reward_mean:.3f} (95% interval {reward_low:.3f} to {reward_high:.3f})"
                .format(**line))

    def say_end(self, run: Path, step: int, is_stopped: bool) -> None:
        took = round(time.monotonic() - self.start)
        go_on = python_command("-m", "lab", "train", "--resume", run)
        say(f"{go_on} goes on from step {step}" if is_stopped else
            f"done. Everything is in {run}")
        if len(self.evaluations) > 1:
            first, last = (self.success_of(self.evaluations[place]) for place in (0, -1))
            say(f"  {first} -> {last} on the held-out problems")
        say(f"  {took // 60} min {took % 60:02d} s\n{python_command('analyze.py', run)}  "
            "makes tables, pictures and a page")
        if (memory := peak_memory(torch.device("cpu"))) is not None:
            say(f"  at most {memory / 1e9:.2f} GB of memory")
        say(f"{python_command('-m', 'lab', 'page', run)}  makes a page to play with\n"
            f"{python_command('-m', 'lab', 'follow', run)}  follows a token through a step")


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of a mean, by the normal distribution; of one value it is not known."""
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    half = 1.959964 * math.sqrt(squares / (len(values) - 1) / len(values)) if values[1:] else (
        math.nan)
    return mean - half, mean + half
