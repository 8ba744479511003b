"""The lines of a step: that of metrics.jsonl, and those that a run prints.

METRICS is the one list of what a line holds. To add a metric, give it a name and a sentence there,
and compute it where its numbers are known (`batch_metrics` here, `summary` in grpo.py).
"""
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch

from lab.engine.methods import Method, metrics_of
from lab.engine.errors import UserError
from lab.engine.rollouts import Rollouts
from lab.harness.record import PART, Json, column_of_part
from lab.harness.screen import python_command, right_or_wrong, say
from train import wilson_interval

# Every line has all of these names. An undefined number is null: in a step without an update these
# are most numbers of the update. Further names are the parts of the reward (reward_format, ...) and
# what a weighting or an advantage measures of itself.
METRICS = {
    "step": "number of the step, from 1",
    "reward": "mean reward of the answers",
    "success": "share of right answers",
    "tokens": "number of sampled tokens",
    "length": "mean number of tokens of an answer",
    "finished": "share of answers that ended before the limit",
    "groups_without_spread": "share of problems whose answers all got the same reward",
    "entropy": "mean over the tokens of -sum p log p, at temperature 1 over the whole vocabulary",
    "collision": "mean over the tokens of sum p^2, of the same distribution",
    "weight_factor": "c, by which the weights were multiplied (`--rescale`)",
    "weight_max": "the largest weight after that",
    "weight_note": "a sentence if the weights were replaced or could not be rescaled",
    "extra_tokens": "sampled tokens that are not in the batch: those of the weighting, the "
                    "advantage and `--dynamic_sampling`",
    "extra_answers": "sampled answers that are not in the batch, of the same three",
    "N": "number of tokens that the loss divides by",
    "trained_tokens": "tokens of the answers that have a gradient",
    "learning_rate": "learning rate of the step",
    "loss": "loss of the whole batch, before the update",
    "gradient_norm": "norm of the gradient before clipping",
    "gradient_noise": "length of the noise in that gradient, with `--noise_parts`",
    "gradient_norm_last": "the same in the last pass over the batch, with `--epochs`",
    "sampler_gap": "mean absolute difference of log-probs between training and sampling, at "
                   "temperature 1",
    "ratio_mean": "mean over the trained tokens of the ratio of new to old probability in the "
                  "last pass, with `--epochs`",
    "clipped_share": "share of trained tokens that are clipped in the last pass, with `--epochs`",
    "kl": "mean estimate over the trained tokens of the KL to the initial model, with `--kl`",
    "skipped": "why the model was not updated, or null",
    "rollout_seconds": "seconds of sampling and scoring",
    "credit_seconds": "seconds of computing advantages and weights",
    "update_seconds": "seconds of the update, with the measurement of the change",
    "record_seconds": "seconds of writing the credit file",
    "seconds": "seconds of the step",
    "processor_seconds": "processor seconds of the step, over all threads",
    "rollout_tokens_per_second": "sampled tokens in a second of rollout_seconds",
    "peak_memory_bytes": "most memory so far, of the GPU or of the process; null on Windows",
}
# if the weighting and the advantage both have one of these, the line has the sum
SAMPLED = ("extra_tokens", "extra_answers")
# The loss is not among these: its value says nothing about progress (docs/a_run.md).
HEADER = ("    step  reward  success  format  length  finished  entropy  grad norm  tokens/s"
          "      left")
EXAMPLES, MOST_OF_ANSWER = 3, 300  # answers shown at an evaluation, and characters of each


def with_all_metrics(line: Json, advantage_method: Method, weighting: Method) -> Json:
    """The line of a step as the loop made it, which has what the weighting measured of itself, with
    METRICS and what the advantage measured of itself."""
    credit = metrics_of(advantage_method)
    line, extra = dict(line), {}
    for name in SAMPLED:
        sampled_by = credit.pop(name, 0), line.pop(name, 0)
        extra[name] = sum(count or 0 for count in sampled_by)  # None if a method was not called
    of_loop = {*METRICS, *(name for name in line if name.startswith(PART))} - {*SAMPLED}
    for name in of_loop & (credit | metrics_of(weighting)).keys():
        raise UserError(f"a weighting or an advantage has a metric {name}, but metrics.jsonl has "
                        "one of this name already: give it another name")
    return dict.fromkeys(METRICS) | line | credit | extra


def batch_metrics(rollouts: Rollouts) -> dict[str, float]:
    """Means over all sampled answers, also over those that --drop_unfinished drops."""
    parts = {column_of_part(part): score.mean().item() for part, score in rollouts.scores.items()}
    tokens = rollouts.mask.sum().item()
    no_reward = rollouts.reward.new_empty(len(rollouts.prompt_ids))
    lowest, highest = (no_reward.scatter_reduce(0, rollouts.group, rollouts.reward, which,
                                                include_self=False)
                       for which in ("amin", "amax"))  # of each problem
    is_without_spread = lowest == highest
    return {**parts, "success": success(rollouts), "tokens": tokens,
            "length": tokens / len(rollouts.texts),
            "finished": rollouts.finished.float().mean().item(),
            "groups_without_spread": is_without_spread.float().mean().item(),
            "entropy": rollouts.entropy.sum().item() / tokens,
            "collision": rollouts.collision.sum().item() / tokens}


def success(rollouts: Rollouts) -> float:
    """The share of right answers; NaN if the part of the reward called `answer` is missing, or is
    not always 0 or 1. With TRL a reward function of any kind may have this name."""
    right = rollouts.scores.get("answer")
    if right is None or not ((right == 0) | (right == 1)).all():
        return math.nan
    return right.mean().item()


def peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":  # it keeps no record of that
        return None
    import resource
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def print_step(line: Json, steps: int, seconds_left: float, with_header: bool,
               with_format: bool) -> None:
    if with_header:
        say(HEADER if with_format else HEADER.replace("  format", ""))
    form = f"{line['reward_format']:8.2f}" if with_format else ""
    norm = "  skipped" if line["gradient_norm"] is None else f"{line['gradient_norm']:9.3f}"
    minutes, seconds = divmod(round(seconds_left), 60)
    say(f"{line['step']:4d}/{steps:<4d}{line['reward']:7.3f}{line['success']:9.1%}"
        f"{form}{line['length']:8.1f}{line['finished']:10.1%}"
        f"{line['entropy']:9.3f}  {norm}{line['tokens'] / line['seconds']:10.0f}"
        f"{minutes:7d}:{seconds:02d}")
    if line["skipped"]:
        say(f"          no update: {line['skipped']}")
    elif line.get("weight_note"):
        say(f"          {line['weight_note']}")


def print_evaluation(line: Json, seconds: float, with_format: bool) -> None:
    """Print a line of evaluations.jsonl for people, and some of its sampled answers."""
    form = f"format {line['format_mean']:.2f}, " if with_format else ""
    say(f"  held-out, {line['mode']:7s} {line['success']:6.1%}  95% interval "
        f"{line['success_low']:.1%} to {line['success_high']:.1%}  "
        f"({len(line['answer'])} problems, {form}length "
        f"{line['length_mean']:.0f}, finished {line['finished_mean']:.0%}, {seconds:.0f} s)")
    for shown in line["shown"] if line["mode"] == "sampled" else []:
        text = f"{shown['problem']}: {shown['text']}"
        say(textwrap.shorten(text, MOST_OF_ANSWER, placeholder=" ..."),
            f"  {right_or_wrong(shown['answer'])}  ")


def most_varied(shown: list[str]) -> list[int]:
    """The indices of a few problems to print: those in which the fewest words repeat, because a
    problem such as 11 11 11 shows little. Of equally good ones the first are taken."""
    repeats = []
    for text in shown:
        words = text.split()
        repeats.append(len(words) - len(set(words)))
    return sorted(range(len(shown)), key=lambda number: repeats[number])[:EXAMPLES]


def print_outcome(path: Path, sampled: Sequence[Json], duration: float, done: int,
                  has_steps: bool = True) -> None:
    """Print how success has changed in the evaluations of sampled answers, how long that took
    (since step `done`, if the run was resumed), and what to look at next."""
    minutes, seconds = divmod(round(duration), 60)
    took = f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"
    if done:
        took += f" since step {done}"
    if len(sampled) > 1:
        took = f"{change(sampled[0], sampled[-1])}, {took}"
    say(f"  {took}")
    # without a name the programs take the newest run in runs/
    named = [] if path.parent == Path("runs") else [path]
    say(f"{python_command('-m', 'lab', 'page', *named)}  makes tables, pictures and a page")
    if has_steps:
        say(f"{python_command('-m', 'lab', 'follow', *named)}  follows a token through a step")


def change(before: Json, after: Json) -> str:
    """Success before and after in words, as in
    23.1% (95% interval 21.0% to 25.3%) -> 48.9% (46.4% to 51.5%) of 1,500 held-out problems"""
    parts = []
    for line in (before, after):
        low, high = wilson_interval(sum(line["answer"]), len(line["answer"]))
        parts.append((line["success"], low, high))
    (start, low, high), (end, end_low, end_high) = parts
    return (f"{start:.1%} (95% interval {low:.1%} to {high:.1%}) -> {end:.1%} "
            f"({end_low:.1%} to {end_high:.1%}) of {len(after['answer']):,} held-out problems")
