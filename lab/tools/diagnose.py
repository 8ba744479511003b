"""Which mistake does a training show? Read from its log, ours or that of another trainer.

    python -m lab diagnose runs/none-grpo-s0     # a run of this project
    python -m lab diagnose checkpoint-500        # a folder with TRL's trainer_state.json
    python -m lab diagnose log.jsonl             # JSON lines, CSV as of W&B, what verl prints
    python -m lab diagnose log.csv --column reward=score,length=tokens

It says which rows of docs/reference/how_a_run_fails.md the metrics show, with the numbers, and
which single run would decide. The metric names of TRL, verl, OpenRLHF, slime, prime-rl, nanochat
and GRPO-Zero are known.

A log says less than a run of this project. So the command also says how many signs it could look
for, and which columns it did not read. If a metric has another name in the log, --column gives it.

The exit status is 0 if nothing was found, 1 if a mistake was, and 2 if the log cannot be read or
has too few steps. Nothing is written.
"""
import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.engine.errors import UserError
from lab.harness.flags import Flag, read
from lab.tools.logs import (FEWEST, HELD_OUT, NAMES, Log, Metric, is_for_being_right, plain_name,
                            read_log, rose)

# Each row of CHECKS looks for one fault. Most rows are signs, each a metric and what it shows:
# any_of(clipped=lambda x: x.end > 0.3). What takes more is a function that returns the metrics. The
# evidence is the same for all: each of these, from the first fifth of the steps to the last.

FLAGS = {"column": Flag("", "the column of a metric that has another name in this log, as "
                            "reward=score; several with commas between them")}
HALF = 0.42  # from fifth to fifth: so much is a straight fall by half from first to last step
LENGTH_ALONE = 0.9  # a correlation: runs with a reward for length had 0.92 to 0.99, others 0.81
Sign = Callable[[Metric], bool]  # what one metric shows


class Seen(NamedTuple):
    """The metrics of a log that show a fault, none of them if it is not there; and whether the log
    has what it takes to look for it."""
    metrics_of: Callable[[Log], list[str]]
    can_look: Callable[[Log], bool]

    def __call__(self, log: Log) -> list[str]:
        return self.metrics_of(log)


def any_of(**signs: Sign) -> Seen:
    """The names of the metrics that show their sign."""
    return needs_one(*signs)(lambda log: [name for name, sign in signs.items() if sign(log[name])])


def all_of(**signs: Sign) -> Seen:
    """The names of all these metrics if each shows its sign, and otherwise none."""
    return needs(*signs)(lambda log: [*signs] if all(
        sign(log[name]) for name, sign in signs.items()) else [])


def needs(*names: str) -> Callable[[Callable[[Log], list[str]]], Seen]:
    """A fault that can be looked for if the log has all of these metrics."""
    return lambda function: Seen(function, lambda log: all(log.has(name) for name in names))


def needs_one(*names: str) -> Callable[[Callable[[Log], list[str]]], Seen]:
    """A fault that can be looked for if the log has one of these metrics or more."""
    return lambda function: Seen(function, lambda log: any(log.has(name) for name in names))


def unless_it_gains(seen: Seen) -> Seen:
    """A fault that is none while what is paid rises: then the same numbers are those of a recipe
    that works, such as a high upper bound of the clip."""
    return Seen(lambda log: [] if log[log.paid].rises else seen(log), seen.can_look)


def breaks_twice(metric: Metric) -> bool:
    """One infinite gradient is what float16 has when its scale is too large."""
    return metric.broken > 1


def grew(times: float, least: float = 1e-12) -> Sign:
    """Whether the mean of the last fifth of the steps is above `times` the mean of the first two
    steps, and so are two or more single steps of that fifth. If the first mean is below `least`,
    as that of a KL is, or is rounded to 0, `least` or half a unit takes its place."""
    def sign(metric: Metric) -> bool:
        limit = times * max(metric.first, least, metric.unit / 2)
        return metric.end > limit and int((metric.last > limit).sum()) > 1
    return sign


def fell_below_half(metric: Metric) -> bool:
    """Whether a share that began above a half ends below it."""
    return metric.end < 0.5 < metric.values[0]


@needs_one("learning_rate", "gradient_norm")
def trains_nothing(log: Log) -> list[str]:
    """The rate or every gradient is 0, although groups had different rewards."""
    if log["learning_rate"].always(0):
        return ["learning_rate"]
    equal = log["equal_groups"]
    differs = equal.start < 1 if equal.is_known else not log["reward"].always()
    return ["gradient_norm"] if log["gradient_norm"].always(0) and differs else []


def learned(log: Log) -> bool:
    """Whether the run has gained: its last third lies above the first, or, where all was learned in
    a few steps, its end lies half a spread above the first two."""
    paid = log[log.paid]
    return paid.rises or paid.end - paid.first > spread_of(log) / 2


def spread_of(log: Log) -> float:
    """The std of the rewards in the groups that have one, at the start. Where the log has none and
    all means lie from 0 to 1, it is that of rewards of 0 and 1, and else the size of the mean."""
    paid, spread, equal = log[log.paid], log["spread"], log["equal_groups"]
    if spread.is_known:
        return spread.start / max(1 - equal.start, 0.05) if equal.is_known else spread.start
    if paid.is_known and 0 <= paid.values.min() and paid.values.max() <= 1:
        return math.sqrt(paid.start * (1 - paid.start))
    return abs(paid.start)


def solved(log: Log) -> bool:
    """Whether the problems are solved at the end. Without a success all that is known is a gain,
    of a third of a spread at least."""
    paid = log[log.paid]
    if log["success"].is_known:
        return paid.end > 0.75
    return learned(log) and paid.end - paid.first >= spread_of(log) / 3


@needs("entropy")
def one_answer(log: Log) -> list[str]:
    """The entropy is gone and so are the differences between rewards, but not because the problems
    are solved."""
    entropy, equal, spread = log["entropy"], log["equal_groups"], log["spread"]
    is_low = entropy.end < min(0.02, entropy.start / 5)
    dead = equal.end > 0.75
    if spread.is_known:
        dead = dead or spread.end < 0.05 * max(spread.start, 1e-9)
    elif not equal.is_known:
        dead = is_low and not learned(log)  # the entropy alone has to show it
    collapsed = is_low or entropy.end < entropy.start / 3 and not learned(log)
    if solved(log) or not (collapsed and dead) or log["finished"].end <= 0.5:
        return []
    return [name for name in ("entropy", "equal_groups", "spread") if log[name].is_known]


@needs_one("gradient_norm", "entropy", "kl", "finished", "equal_groups", "length")
def destroyed(log: Log) -> list[str]:
    """What the first two steps had, the end has not, and a second sign excludes that the problems
    became harder. Beside such a loss a smaller growth is a sign than by itself (`ASTRAY`). While
    the reward rises, a success that falls is the fault of another row."""
    paid = log[log.paid]
    is_lost = paid.first > 0 and paid.end < paid.first / 4 and not log["reward"].rises
    signs = any_of(gradient_norm=grew(2), entropy=grew(1.5), kl=grew(10, least=0.1),
                   finished=fell_below_half,
                   equal_groups=lambda share: share.end > 0.95 and share.first < 0.8,
                   length=lambda length: length.end < length.first / 5)(log)
    return [log.paid, *signs] if is_lost and signs else []


ASTRAY = unless_it_gains(any_of(gradient_norm=grew(8), entropy=grew(3), kl=grew(15, least=0.1),
                                finished=fell_below_half))


@needs("reward")
def falls(log: Log) -> list[str]:
    """Half of the reward is lost, by four times its error, or it falls and held-out problems fall
    with it. Where these do not fall, the problems of the training became harder. While the reward
    rises, a success that falls is the fault of another row (`paid_for_something_else`)."""
    if log["reward"].rises:
        return []
    asked = [name for name in HELD_OUT if log[name].is_known]
    fell = [name for name in asked if log[name].values[-1] < 0.8 * log[name].values[0]]
    half_a_spread = log["spread"].start / 2 if log["spread"].is_known else 0.0
    for name in ("success", "reward"):
        metric = log[name]
        is_half = metric.start - metric.end > max(HALF * abs(metric.start), half_a_spread)
        is_lost = is_half and not asked and rose(-metric.values, errors=4)
        if is_lost or fell and metric.falls:
            return [name, *fell]
    return []


cut_off = any_of(finished=lambda share: share.start < 0.5)
too_easy = all_of(success=lambda share: share.first > 0.75,
                  equal_groups=lambda share: share.first > 0.7)


def never_right(log: Log) -> list[str]:
    """No answer was right; or the part of the reward that is for being right is never paid."""
    if cut_off(log):
        return []  # what was cut off cannot be right
    if log["success"].always(0):
        return ["success"]
    return [name for name in log.parts if is_for_being_right(name) and log[name].always(0)]


NEVER_RIGHT = Seen(never_right, lambda log: log.has("success") or any(
    map(is_for_being_right, log.parts)))


@needs("reward")
def dead_groups(log: Log) -> list[str]:
    """Most groups have equal rewards from the start, for no reason that another row has, and not
    because the problems were solved in a few steps."""
    if cut_off(log) or too_easy(log) or solved(log):
        return []
    equal = log["equal_groups"]
    if equal.start > 0.7 and equal.mean > 0.7:
        return ["equal_groups", "reward"]
    return ["reward"] if log["reward"].always() and not log["equal_groups"].is_known else []


def paid_for_something_else(log: Log) -> list[str]:
    """The reward rises and success does not, or by less than a quarter of that; or one part of the
    reward rises and another does not, although it could. A quarter of a spread is no such rise."""
    reward, success = log["reward"], log["success"]
    gain = reward.end - reward.start
    if not reward.rises or gain < log["spread"].start / 4:
        return []
    rising = [name for name in log.parts if log[name].rises]
    if success.is_known:
        is_less = not success.rises and success.end - success.start < gain / 4
        return ["reward", "success", *rising] if is_less else []
    flat = [name for name in log.parts if log[name].values.any() and not log[name].rises
            and log[name].end < 0.9 * max(1.0, log[name].values.max())]
    return rising + flat if rising and flat and not any(map(is_for_being_right, rising)) else []


PAID_FOR_SOMETHING_ELSE = Seen(paid_for_something_else, lambda log: log.has("success") or len(
    log.parts) > 1)


@needs("length")
def paid_for_length(log: Log) -> list[str]:
    """The length has become another one, and the reward has gained nothing; or reward and length
    change together from step to step. (Over a whole run both may rise without a connection, as
    where a model learns to think longer.)"""
    reward, length = log["reward"], log["length"]
    is_other = length.end > 3 * length.start or length.end < length.start / 5
    if is_other and log[log.paid].end <= log[log.paid].start:
        return ["length"]
    if not len(reward.values) == len(length.values) >= 10 or not reward.rises:
        return []
    changes = np.diff(reward.values), np.diff(length.values)
    if min(change.std() for change in changes) < 1e-9:
        return []
    is_joint = abs(float(np.corrcoef(*changes)[0, 1])) > LENGTH_ALONE
    return ["reward", "length"] if is_joint else []


def far_apart(log: Log) -> bool:
    """Whether one in seven ratios is clipped because the policy moved, which its KL to the one that
    sampled says. Of GSPO, whose bounds are narrow, the KL stays small."""
    return log["clipped"].end > 0.15 and log["policy_kl"].end > 0.05


def too_far(log: Log) -> list[str]:
    """Many ratios are clipped: a sign if nothing is gained, or beside a KL in any case."""
    if far_apart(log):
        return ["clipped", "policy_kl"]
    return [] if log[log.paid].rises or not log["clipped"].end > 0.3 else ["clipped"]


def fewer_turns(metric: Metric) -> bool:
    """Whether more than half of the turns after the first are lost, or of the calls of a tool."""
    least = 1.0 if metric.first > 1 else 0.0
    return metric.end - least < (metric.first - least) / 2 and metric.falls and metric.first > 0.2


@needs("equal_groups", "entropy")
def blind(log: Log) -> list[str]:
    """The answers to a problem become alike and sure while the problems are not solved, and the
    reward jumps from step to step as it finds other problems."""
    paid, equal, entropy = log[log.paid], log["equal_groups"], log["entropy"]
    third = len(paid.values) // 3
    is_alike = equal.end > max(0.6, equal.start + 0.3) and entropy.end < entropy.start / 4
    if third < 4 or not is_alike or not 0.05 < paid.end < 0.75:
        return []
    early, late = (float(np.abs(np.diff(values)).mean()) for values in (
        paid.values[:third], paid.values[-third:]))
    # with few problems in a step success jumps from the start: then three quarters of the groups
    jumps = late > 0.15 and (late > 1.5 * early or equal.end >= 0.75)
    return [log.paid, "equal_groups"] if jumps else []


@needs_one("held_out", "held_out_success")
def by_heart(log: Log) -> list[str]:
    """Training rises, held-out problems do not, and the two are far apart: success beside success,
    and reward beside reward, because a second part of the reward would hide what is lost."""
    if log.config.get("dynamic_sampling", 1) > 1:
        return []
    for name, held_out in ((log.paid, "held_out_success"), ("reward", "held_out")):
        trained, asked = log[name], log[held_out]
        if trained.rises and asked.is_known:
            first, last, unit = asked.values[0], asked.values[-1], max(1.0, abs(trained.end))
            if last < first + 0.02 * unit and trained.end > last + 0.15 * unit:
                return [name, held_out]
    return []


@needs("gradient_norm", "gradient_norm_last")
def later_updates_grow(log: Log) -> list[str]:
    """The last update with a batch has a much larger gradient than the first."""
    found = log["gradient_norm_last"].end > 5 * log["gradient_norm"].end
    return ["gradient_norm", "gradient_norm_last"] if found else []


class Check(NamedTuple):
    row: int      # of the list in docs/reference/how_a_run_fails.md; 0 if it is not there
    what: str     # what it most often is
    seen: Seen
    decide: str   # the run that would decide
    is_cause: bool = False  # the faults below would follow from it


TENTH = "the same run with a tenth of the learning rate"
OTHER_LOG_PROBS = ("one step at temperature 1, with the sampler's weights compared to the "
                   "trainer's")
CHECKS = (
    Check(0, "The reward function returns what is no number",
          any_of(reward=lambda reward: reward.broken > 0),
          "the reward function alone, on the answers of such a step", True),
    Check(6, "The loss or a weight is not finite, and the model is destroyed",
          any_of(loss=breaks_twice, gradient_norm=breaks_twice, kl=breaks_twice), TENTH, True),
    Check(0, "Nothing is trained: the rate is 0, or the loss is detached or multiplied by 0",
          trains_nothing, "print the rate of a step; then python -m lab.formula on the loss, of "
          "which one backward pass shows it", True),
    Check(1, "Sampling and training compute different log-probs, by more than rounding (0.002)",
          any_of(gap=lambda gap: gap.start > 0.01 or gap.end > 0.01), OTHER_LOG_PROBS),
    Check(1, "Sampling and training compute different log-probs, by more than another engine in "
             "bfloat16 (0.013)",
          any_of(gap_of_engines=lambda gap: gap.start > 0.025 or gap.end > 0.025),
          OTHER_LOG_PROBS),
    Check(17, "The answers ignore the problem: one for all is right where it happens to be",
          blind, "read answers to different problems; python -m lab claims names the success of "
          "the best blind answer", True),
    Check(5, "The learning rate is too high, and the model writes one answer for all", one_answer,
          "the same run with a fifth of the learning rate; and read answers to different problems",
          True),
    Check(6, "The learning rate is far too high, and the model is destroyed", destroyed, TENTH,
          True),
    Check(7, "The limit of new tokens is too small, or the model does not know how to end, as one "
             "whose prompts lack its chat template: trainers apply it to lists of messages alone",
          cut_off, "one step with twice the limit; and print one prompt as the model gets it"),
    Check(3, "The problems are too hard, so at most the form is learned", NEVER_RIGHT,
          "easier problems, or the same run after a cold start (python -m lab warmup)", True),
    Check(4, "The problems are too easy, and nothing is left to learn", too_easy,
          "the same run with harder problems"),
    Check(3, "The problems are too hard or too easy, or the groups too small", dead_groups,
          "python -m lab try says before training in how many groups rewards differ"),
    Check(6, "The model goes astray: the rate is too high, or nothing holds it", ASTRAY, TENTH,
          True),
    Check(9, "The reward pays for something else than you may want",
          PAID_FOR_SOMETHING_ELSE,
          "the same run with the reward of being right alone"),
    Check(9, "The reward may pay for the length of an answer", paid_for_length,
          "read ten answers of the last steps"),
    Check(18, "The agent stops using its tool, or ends after a turn",
          unless_it_gains(any_of(turns=fewer_turns)),
          "read ten answers of the last steps; and pay an answer that used the tool, or check "
          "whether its replies are trained on (python -m lab.formula)"),
    Check(8, "There are few different problems, and the model learns them by heart", by_heart,
          "the same run with more different problems"),
    Check(11, "The old log-probs are computed anew in each pass",
          all_of(ratio=lambda ratio: ratio.always(1), clipped=lambda share: share.always(0)),
          "print the ratio of the second pass over one batch"),
    Check(13, "The updates after the first have no clipped ratio", later_updates_grow,
          "the same run with one update for each batch"),
    Check(12, "The passes over a batch move the model too far", needs("clipped")(too_far),
          "the first step with a tenth of the learning rate"))
LAST = Check(  # said only if no other fault was seen: a cause that is rare
    10, "The reward falls, and nothing else in this log says why: the learning rate is too high, "
        "the sign of the loss is wrong, advantages belong to other answers, or the problems became "
        "harder", falls, f"first {TENTH}, and then python -m lab.formula on the loss")


@dataclass(frozen=True)
class Fault:
    check: Check
    evidence: str

    def in_words(self) -> str:
        page = "docs/reference/how_a_run_fails.md"
        row = f"row {self.check.row} of {page}" if self.check.row else "no row has it"
        return (f"{self.check.what} ({row}). Seen: {self.evidence}. The run that would decide: "
                f"{self.check.decide}.")


def faults_of(log: Log) -> list[Fault]:
    """The faults of a run. What follows from one that is a cause is left out."""
    found: list[Fault] = []
    for check in (*CHECKS, LAST):
        names = check.seen(log)
        if names and not (check is LAST and found):
            found.append(Fault(check, ", ".join(map(log.way, names))))
            if check.is_cause:
                break
    return found


def signs_looked_for(log: Log) -> str:
    """12 of 21 signs of a mistake"""
    every = (*CHECKS, LAST)
    count = sum(check.seen.can_look(log) for check in every)
    return f"{count} of {len(every)} signs of a mistake"


def looked_at(log: Log) -> tuple[list[str], list[str]]:
    """The metrics that the log has, and the main ones that it has not."""
    looked = [name for name in NAMES if (log[name].is_known or log[name].broken)
              and name != "cut_off"]
    absent = [name for name in ("reward", "equal_groups", "entropy", "length", "finished",
                                "gradient_norm", "loss", "kl") if name not in looked]
    return looked, absent


def in_words(log: Log, found: list[Fault]) -> list[str]:
    """The faults that a log shows, or how its reward went, and what was looked at."""
    if log.steps < FEWEST:
        return [f"With fewer than {FEWEST} steps nothing can be said."]
    said = [fault.in_words() for fault in found]
    reward = log["reward"]
    way = f"from {reward.start:.3g} to {reward.end:.3g}"
    none_seen = f"{signs_looked_for(log)} could be looked for, and none is seen"
    if not found and reward.falls:
        said.append(f"{none_seen}. The reward falls, {way}. If the problems "
                    f"have not become harder: {LAST.decide}.")
    elif not found:
        rises = "rises" if reward.rises else "does not rise by more than its noise"
        said.append(f"{none_seen}. The reward {rises}, {way}.")
    looked, absent = looked_at(log)
    last = f"Looked at: {', '.join(looked)}."
    if absent:
        last += f" Not in this log: {', '.join(absent)}."
    if log.rounded:
        last += (f" Not judged: {', '.join(log.rounded)}, printed with so few digits that a small "
                 "number cannot be told from none.")
    if log.unread and not log.config:  # our own lines have much more than the signs need
        last += f" Not read: {', '.join(log.unread)}."
    return [*said, last]


def filled(parts: list[str]) -> str:
    return "\n\n".join(textwrap.fill(part, 100) for part in parts)


def chosen_columns(typed: str) -> dict[str, str]:
    """reward=score,length=tokens -> {"reward": "score", "length": "tokens"}"""
    chosen = {}
    for pair in filter(None, typed.split(",")):
        name, _, column = pair.partition("=")
        if name.strip() not in NAMES or not column.strip():
            raise UserError(f"--column {pair}: should be NAME=COLUMN, where NAME is one of "
                            f"{', '.join(NAMES)}")
        chosen[name.strip()] = plain_name(column)
    return chosen


def main(argv: list[str]) -> int:
    """Print what the log shows, and return the exit status."""
    flags = read(argv, "python -m lab diagnose LOG [--column NAME=COLUMN]", __doc__, FLAGS, {
        "LOG": "a run folder, or the log of another trainer"})
    log = read_log(Path(flags.log), chosen_columns(flags.column))
    found = faults_of(log) if log.steps >= FEWEST else []
    print(filled([f"{log.path}: {log.steps} steps.", *in_words(log, found)]))
    return 2 if log.steps < FEWEST else int(bool(found))
