"""A step's line of metrics.jsonl: batch, credit, update, time; and the interval of a share."""
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from engine.choices import Method, metrics_of
from engine.errors import UserError
from engine.rollouts import Rollouts
from harness.record import Json, column_of_part
from harness.screen import show_status


class Clock:
    """`with clock("update"):` measures a stage and shows its name to people at a terminal."""

    def __init__(self, step: int):
        self.step, self.begin = step, time.perf_counter()
        self.processor_begin = time.process_time()
        self.seconds: dict[str, float] = {}  # of each stage

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        show_status(f"step {self.step}: {stage}")
        begin = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - begin


def step_metrics(clock: Clock, rollouts: Rollouts, update: Json, advantage: Method,
                 weights: Json) -> Json:
    """Of batch, update, advantage and weights; what the last two sampled for themselves adds up."""
    batch, credit = batch_metrics(rollouts), metrics_of(advantage)
    extra = {name: credit.pop(name, 0) + weights.pop(name, 0)
             for name in ("extra_tokens", "extra_answers")}
    speed = {**{f"{stage}_seconds": seconds for stage, seconds in clock.seconds.items()},
             "seconds": time.perf_counter() - clock.begin,
             "processor_seconds": time.process_time() - clock.processor_begin,
             "rollout_tokens_per_second": batch["tokens"] / clock.seconds["rollout"],
             "update_tokens_per_second": update["trained_tokens"] / clock.seconds["update"],
             "peak_memory_bytes": peak_memory(rollouts.mask.device)}
    line: Json = {"step": clock.step}
    for part in (weights, credit, extra, batch, update, speed):
        for name in line.keys() & part.keys():
            raise UserError(f"the metric {name} of a weighting or an advantage needs another name")
        line |= part
    return line


def batch_metrics(rollouts: Rollouts) -> dict[str, float]:
    means = {column_of_part(part): score.mean().item() for part, score in rollouts.scores.items()}
    right = rollouts.scores.get("answer", torch.tensor(math.nan))
    is_known = bool(((right == 0) | (right == 1)).all())  # TRL has functions of any name
    reward = rollouts.reward.view(len(rollouts.prompt_ids), -1)  # (problems, answers)
    tokens = rollouts.mask.sum().item()
    return {**means, "success": right.mean().item() if is_known else math.nan, "tokens": tokens,
            "length": tokens / len(rollouts.texts),
            "finished": rollouts.finished.float().mean().item(),
            "groups_without_spread": (reward == reward[:, :1]).all(1).float().mean().item(),
            "entropy": rollouts.entropy.sum().item() / tokens,
            "collision": rollouts.collision.sum().item() / tokens}


def peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":  # it keeps no record of that
        return None
    import resource
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def wilson_interval(hits: float, count: int) -> tuple[float, float]:
    """95% interval of a proportion (Wilson 1927); unlike the plain one it stays inside 0..1."""
    z = 1.959964
    p, spread = hits / count, z * z / count
    centre = p + spread / 2
    half = z * math.sqrt(p * (1 - p) / count + spread / (4 * count))
    return max(0.0, (centre - half) / (1 + spread)), min(1.0, (centre + half) / (1 + spread))
