"""A step's line of metrics.jsonl, and the interval of a share.

METRICS is the one list of what a line holds. To add a metric, give it a name and a sentence there,
compute it where its numbers are known (`batch_metrics` here, `summary` or `change_metrics` in
grpo.py), and add its row to docs/what_a_run_leaves.md.
"""
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import mean

import torch

from engine.choices import Method, metrics_of
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
    "entropy": "mean over the tokens of -sum p log p, of the distribution each was drawn from",
    "collision": "mean over the tokens of sum p^2, of the same distribution",
    "weight_factor": "c, by which the weights were multiplied (`--rescale`)",
    "weight_max": "the largest weight after that",
    "weight_note": "a sentence if the weights were replaced or could not be rescaled",
    "extra_tokens": "tokens that the weighting and the advantage sampled for themselves",
    "extra_answers": "answers that they sampled for themselves",
    "N": "number of tokens that the loss divides by",
    "trained_tokens": "tokens of the answers that have a gradient",
    "loss": "loss of the whole batch, before the update",
    "gradient_norm": "norm of the gradient before clipping",
    "gradient_norm_last": "the same in the last pass over the batch, with `--epochs`",
    "sampler_gap": "mean absolute difference of log-probs between training and sampling, each at "
                   "its own temperature",
    "ratio_mean": "mean over the trained tokens of the ratio of new to old probability in the "
                  "last pass, with `--epochs`",
    "clipped_share": "share of trained tokens that are clipped in the last pass, with `--epochs`",
    "kl": "mean estimate over the trained tokens of the KL to the initial model, with `--kl`",
    # these three are measured in the first step, every --change_every steps after it, and the last
    "fell_of_positive": "of all pushes up, the share that went to tokens that fell",
    "rose_of_negative": "of all pushes down, the share that went to tokens that rose",
    "change_correlation": "correlation of push and change over the tokens that have a push",
    "skipped": "why the model was not updated, or null",
    "rollout_seconds": "seconds of sampling and scoring",
    "credit_seconds": "seconds of computing advantages and weights",
    "update_seconds": "seconds of the update, with the measurement of the change",
    "record_seconds": "seconds of writing the credit file",
    "seconds": "seconds of the step",
    "processor_seconds": "processor seconds of the step, over all threads",
    "rollout_tokens_per_second": "sampled tokens in a second of rollout_seconds",
    "update_tokens_per_second": "trained tokens in a second of update_seconds",
    "peak_memory_bytes": "most memory so far, of the GPU or of the process; null on Windows",
}
STAGES = ("rollout", "credit", "update", "record")  # of a step
# if the weighting and the advantage both have one of these, the line has the sum
SAMPLED = ("extra_tokens", "extra_answers")

# What is told about a run that does not learn, and after how many such steps in a row.
FLAT_STEPS, COLLAPSED_STEPS = 10, 5
CERTAIN, NEARLY_ALL = 0.01, 0.75  # entropy below which, and share of groups, answers are the same
LEARNED = 0.75  # success from which on certainty is no failure
WHAT_HELPS = ("What helps: solved examples in the prompt, easier problems, or a cold start by "
              "python -m tools.warmup (docs/how_a_run_fails.md)")
ADVICE = {
    "none right": "no answer has been right so far, and in the last {steps} steps all answers to "
                  "the same problem had equal rewards, so there was nothing to learn from. "
                  + WHAT_HELPS,
    "all right": "in the last {steps} steps every answer was right, and all answers to the same "
                 "problem had equal rewards. So nothing is left to learn: only harder problems "
                 "would teach more",
    "no spread": "in the last {steps} steps all answers to the same problem had equal rewards, so "
                 "there was nothing to learn from. What helps: problems that are solved sometimes, "
                 "but not always, or more --answers to each (docs/how_a_run_fails.md)",
    "one answer": "in the last {steps} steps nearly all answers to the same problem were the same "
                  "(entropy {entropy:.3f}), and {success:.0%} of the answers were right. The model "
                  "no longer tries other answers. What helps: begin again with a lower "
                  "--learning_rate (docs/how_a_run_fails.md)"}


class Clock:
    """`with clock("update"):` measures a stage. At a terminal it shows the stage's name."""

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


def step_metrics(clock: Clock, rollouts: Rollouts, update: Json, advantage: Method,
                 weights: Json) -> Json:
    """The line of a step: METRICS, the parts of the reward, and what the weighting (in `weights`)
    and the advantage measured of themselves."""
    credit = metrics_of(advantage)
    extra = {}
    for name in SAMPLED:
        sampled_by = credit.pop(name, 0), weights.pop(name, 0)
        extra[name] = sum(count or 0 for count in sampled_by)  # None if a method was not called
    batch = batch_metrics(rollouts)
    speed = {"rollout_tokens_per_second": batch["tokens"] / clock.seconds["rollout"],
             "update_tokens_per_second": update["trained_tokens"] / clock.seconds["update"],
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
    """Means over the sampled answers, those of dropped answers too."""
    parts = {column_of_part(part): score.mean().item() for part, score in rollouts.scores.items()}
    tokens = rollouts.mask.sum().item()
    reward = rollouts.reward.view(len(rollouts.prompt_ids), -1)  # (problems, answers)
    is_without_spread = (reward == reward[:, :1]).all(1)
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


class Watch:
    """The steps so far, seen as signs that a run does not learn. Each reason is told once, and
    again only after another one."""

    def __init__(self) -> None:
        self.was_right = self.was_unsure = False  # in some step
        self.flat: list[float] = []       # success of the last steps without spread, in a row
        self.collapsed: list[float] = []  # and of those in which the model was certain
        self.told = ""

    def advice(self, line: Json) -> str:
        """The sentence that is due after a step with these metrics; "" if there is none."""
        success, entropy = known(line, "success"), known(line, "entropy")
        without_spread = line["groups_without_spread"]
        self.was_right |= success != 0  # NaN is unknown
        self.was_unsure |= entropy >= CERTAIN
        extend(self.flat, success, FLAT_STEPS, goes_on=without_spread == 1)
        extend(self.collapsed, success, COLLAPSED_STEPS,
               goes_on=entropy < CERTAIN and without_spread >= NEARLY_ALL)
        reason = self.reason(is_skipped=bool(line["skipped"]))
        if reason in ("", self.told):
            return ""
        self.told = reason
        steps = COLLAPSED_STEPS if reason == "one answer" else FLAT_STEPS
        share = mean(self.collapsed or self.flat)
        return ADVICE[reason].format(steps=steps, entropy=entropy, success=share)

    def reason(self, is_skipped: bool) -> str:
        """A name in ADVICE, or ""."""
        is_flat = len(self.flat) == FLAT_STEPS
        if is_flat and not self.was_right:
            return "none right"
        if is_flat and all(success == 1 for success in self.flat):
            return "all right"
        has_fallen = self.was_right and self.was_unsure and len(self.collapsed) == COLLAPSED_STEPS
        if has_fallen and mean(self.collapsed) < LEARNED:
            return "one answer"
        if is_flat and is_skipped:  # a critic learns from differences between problems, too
            return "no spread"
        return ""

    def advice_at_end(self, before: float, after: float) -> str:
        """The sentence about a run with these successes on the held-out problems."""
        if before or after:
            return ""
        if self.was_right:
            return ("no held-out answer was right, but some answers in training were: with more "
                    "--steps there may be more")
        return f"no answer in training was right, either. {WHAT_HELPS}"


def known(line: Json, name: str) -> float:
    """A metric; NaN if it is undefined, which is null in a line that was read back."""
    return math.nan if line[name] is None else line[name]


def extend(values: list[float], value: float, most: int, goes_on: bool) -> None:
    """Add a value and keep the last `most`; if the row of steps has ended, keep none."""
    values.append(value)
    del values[:-most]
    if not goes_on:
        values.clear()


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
