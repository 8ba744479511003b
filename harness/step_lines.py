"""The numbers of a step: its line of metrics.jsonl.

METRICS is the one list of what a line holds. To add a metric, give it a name and a sentence there,
and compute it where its numbers are known (`batch_metrics` here, `summary` in grpo.py).
"""
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.methods import Method, metrics_of
from engine.errors import UserError
from engine.rollouts import Rollouts
from harness.record import Json, column_of_part
from harness.screen import show_status

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


class Clock:
    """The clock of a step: `with clock("update"):` measures a stage, and shows its name."""

    def __init__(self, step: int):
        self.step, self.begin = step, time.perf_counter()
        self.processor_begin = time.process_time()
        self.seconds: dict[str, float] = {}  # of each stage

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        begin = time.perf_counter()
        show_status(f"step {self.step}: {stage}")
        yield
        self.seconds[stage] = time.perf_counter() - begin


def step_metrics(clock: Clock, rollouts: Rollouts, update: Json, advantage_method: Method,
                 weights: Json) -> Json:
    """The line of a step: METRICS, the parts of the reward, and what the weighting (in `weights`)
    and the advantage measured of themselves."""
    credit = metrics_of(advantage_method)
    extra = {}
    for name in SAMPLED:
        sampled_by = credit.pop(name, 0), weights.pop(name, 0)
        extra[name] = sum(count or 0 for count in sampled_by)  # None if a method was not called
    batch = batch_metrics(rollouts)
    speed = {"rollout_tokens_per_second": batch["tokens"] / clock.seconds["rollout"],
             "peak_memory_bytes": peak_memory(rollouts.mask.device)}

    line: Json = {"step": clock.step}
    for part in (weights, credit, extra, batch, update, time_metrics(clock), speed):
        for name in line.keys() & part.keys():
            raise UserError(f"a weighting or an advantage has a metric {name}, but metrics.jsonl "
                            "has one of this name already: give it another name")
        line |= part
    return dict.fromkeys(METRICS) | line


def time_metrics(clock: Clock) -> dict[str, float]:
    stages = {f"{stage}_seconds": seconds for stage, seconds in clock.seconds.items()}
    return {**stages, "seconds": time.perf_counter() - clock.begin,
            "processor_seconds": time.process_time() - clock.processor_begin}


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


def wilson_interval(hits: float, count: int) -> tuple[float, float]:
    """The 95% interval of a proportion (Wilson 1927); unlike the usual one it stays inside 0..1."""
    z = 1.959964
    p, spread = hits / count, z * z / count
    centre = p + spread / 2
    half = z * math.sqrt(p * (1 - p) / count + spread / (4 * count))
    return max(0.0, (centre - half) / (1 + spread)), min(1.0, (centre + half) / (1 + spread))
