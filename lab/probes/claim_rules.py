"""What a claim is: a sentence of the notes, their figure, and a function that looks at runs.

    @claim(1, "Early tokens get more gradient than late ones", "1.6", "lab notes RUN")
    def early_over_late(seen: Evidence) -> Found:
        \"""What to believe, in a sentence or two.\"""
        return seen.ratio_of_sizes(early, late)

`python -m lab claims RUN` calls each function. A function raises `CannotBeSeen` with the reason if
the runs do not have what it needs. Figures of tokens have intervals over the run's problems, and
figures of a model have intervals over the problems that it was asked.
"""
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from lab.analysis.comparison import settings_of
from lab.analysis.run_folders import Run, flags_of_methods
from lab.analysis.statistics import Estimate, Floats, estimate, mean_over, over_problems
from lab.analysis.tables import Cell, Table, shown
from lab.credit.critic import gae
from lab.engine.errors import PROJECT, read_json
from lab.engine.policy import Policy
from lab.harness.screen import show_status
from lab.probes.common import sample_batch
from lab.probes.run_tokens import (CLASSES, FILLER, REASONING, UNITS, RunTokens,
                                   has_advantages_of_grpo)
from run import find

HOLDS, ARITHMETIC, ONE_READING, NOT, NOT_SEEN, CANNOT = VERDICTS = (
    "holds", "by arithmetic", "in one reading", "does not", "no difference seen",
    "cannot be seen here")
NOTES = {1: "the analysis of credit in GRPO", 2: "the four mitigations",
         3: "the paper on sparsity and rank (arXiv 2606.29238)", 4: "PPO and GRPO"}
CRITIC_BATCHES = 8  # that a critic is trained on, of 8 problems x 8 answers each
BY_CHANCE = 0.025  # how often an interval of 95% lies on the side of a claim that is not true


class Threshold(NamedTuple):
    number: float
    reason: str


# Where a claim gives no number of its own, its verdict needs one. These were chosen by judgement.
THRESHOLDS = {
    "the reason": Threshold(0.8, "what explains less than four fifths is not the reason alone"),
    "no reason": Threshold(0.2, "what explains less than a fifth is hardly a reason"),
    "push is the change": Threshold(0.9, "a correlation of 0.9 leaves a fifth unexplained"),
    "follows credit": Threshold(0.5, "a correlation of 0.5 shares a quarter of the variance"),
    "the same": Threshold(0.9, "the notes' two means differ by a hundredth"),
    "concise": Threshold(0.5, "the notes' answers lost three quarters of their tokens"),
    "a ratio": Threshold(4, "known less well, one ratio was 1, 2.6 and 3 in three runs"),
    "grows with answers": Threshold(2, "for sixteen times the answers t grows to fourfold"),
    "crude": Threshold(0.1, "one token in ten is in the wrong class"),
    "rank 2 from": Threshold(1.5, "it rounds to 2"), "rank 2 to": Threshold(2.5, "it rounds to 2"),
    "rank well above": Threshold(1, "well above 2 is at least one more"),
    "best baseline": Threshold(-0.1, "a tenth of the noise is worth a batch larger by a tenth"),
    "costs a model": Threshold(1.5, "a step costs half again as much"),
    "as good": Threshold(0.01, "a point of success is less than any difference in the notes"),
    "explodes": Threshold(5, "a fifth of the tokens with all the weight has at most five times"),
    "a strong signal": Threshold(0.5, "in most groups there is something to compare"),
    "long answer": Threshold(500, "the notes' number of tokens")}


class CannotBeSeen(Exception):
    """These runs do not have what the claim is about."""


@dataclass(frozen=True)
class Found:
    """A verdict, and the numbers that it follows from, each with its name. A name says after the
    number what it is of. A value may be a pair of the number and its format."""
    verdict: str
    numbers: Mapping[str, Cell | tuple[Cell, str]]
    spec: str = ".2f"
    by_interval: bool = False  # whether chance alone could have made it hold
    table: Table | None = None  # printed below

    @property
    def figure(self) -> str:
        words = []
        for name, known in self.numbers.items():
            value, spec = known if isinstance(known, tuple) else (known, self.spec)
            words.append(f"{shown(value, spec)} {name}".strip())
        return "; ".join(words)


@dataclass(frozen=True)
class Claim:
    note: int
    sentence: str
    published: str
    more: str  # the command or the page that says more
    look: Callable[["Evidence"], Found]
    is_stored: bool
    name: str
    why: str


CLAIMS: list[Claim] = []
Rule = Callable[[Estimate], str]


def claim(note: int, sentence: str, published: str, more: str, stored: bool = False) -> Callable:
    """`stored`: it is judged by an experiment whose numbers are in lab/results."""
    def add(look: Callable) -> Callable:
        why = " ".join(str(look.__doc__).split())
        CLAIMS.append(Claim(note, sentence, published, more, look, stored, look.__name__, why))
        return look
    return add


# ------------------------------------------------------------------- rules


def above(least: float) -> Rule:
    """Holds if the whole interval lies above, and does not hold if all of it lies below."""
    def verdict(x: Estimate) -> str:
        if not np.isfinite(x.low):
            raise CannotBeSeen("too few such tokens or problems for an interval")
        return HOLDS if x.low > least else NOT if x.high < least else NOT_SEEN
    return verdict


def below(most: float) -> Rule:
    opposite = above(-most)
    return lambda x: opposite(Estimate(-x.value, -x.high, -x.low))


RULES = {"above 0": above(0), "below 0": below(0)}


def together(verdicts: Sequence[str]) -> str:
    """The verdict of several measures. A claim that holds by some of them alone holds in one
    reading. If it holds by none, the verdict is that of most."""
    if len(set(verdicts)) == 1:
        return verdicts[0]
    if HOLDS in verdicts:
        return ONE_READING
    return NOT if verdicts.count(NOT) > len(verdicts) / 2 else NOT_SEEN


def decided(rule: Rule, numbers: Mapping[str, Estimate], spec: str = ".2f",
            **more: Cell | tuple[Cell, str]) -> Found:
    """By the intervals of all these numbers; `more` is printed beside them."""
    verdict = together([rule(x) for x in numbers.values()])
    beside = {name.replace("_", " "): value for name, value in more.items()}
    return Found(verdict, {**numbers, **beside}, spec, by_interval=True)


# ------------------------------------------------------------------- intervals over problems


def mean_ratio(problem: np.ndarray, values: np.ndarray, mine: np.ndarray, theirs: np.ndarray
               ) -> Estimate:
    """The mean of the values over the tokens of one mask, divided by that over another's."""
    return over_problems(problem, [values * mine, mine, values * theirs, theirs],
                         lambda a, n, b, m: (a / n) / (b / m), log=True)


def mean_difference(problem: np.ndarray, values: np.ndarray, mine: np.ndarray, theirs: np.ndarray
                    ) -> Estimate:
    return over_problems(problem, [values * mine, mine, values * theirs, theirs],
                         lambda a, n, b, m: a / n - b / m)


def correlation(problem: np.ndarray, x: np.ndarray, y: np.ndarray) -> Estimate:
    def statistic(n: float, x: float, y: float, xx: float, yy: float, xy: float) -> float:
        spread = (xx / n - (x / n) ** 2) * (yy / n - (y / n) ** 2)
        return (xy / n - x * y / n ** 2) / spread ** 0.5
    return over_problems(problem, [np.ones_like(x), x, y, x * x, y * y, x * y], statistic)


def difference_of_means(mine: ArrayLike, theirs: ArrayLike) -> Estimate:
    """The mean of independent numbers minus that of others, by their standard errors."""
    a, b = np.array(mine, float), np.array(theirs, float)
    if min(len(a), len(b)) < 2:
        raise CannotBeSeen(f"only {len(a)} and {len(b)} numbers to compare")
    error = np.sqrt(a.var(ddof=1) / len(a) + b.var(ddof=1) / len(b))
    return estimate(float(a.mean() - b.mean()), float(error), len(a) + len(b) - 2)


# ------------------------------------------------------------------- what is known of the runs


class Evidence:
    """The runs, and what is computed from them once. `run` is the first one; the others are there
    for claims about weightings. `seen["log_prob"]` is a column of the first run's tokens (n,). Its
    sizes are plain GRPO's: the claims are about GRPO, so a run's weights and advantages are left
    out."""

    def __init__(self, runs: Sequence[Run], problems: int = 12, device: str = "cpu"):
        self.run, self.others = runs[0], list(runs[1:])
        self.problems, self.device = problems, device  # that a model is asked, and where
        self.known: dict[tuple[str, int], Any] = {}

    @cached_property
    def tokens(self) -> RunTokens:
        return tokens_of(self.run, is_plain=True)

    def __getitem__(self, column: str) -> np.ndarray:
        return self.tokens[column]

    def is_of(self, name: str) -> np.ndarray:
        """(n,) bool: the tokens of a class."""
        return np.asarray(self.tokens.cells["class"] == CLASSES.index(name))

    def filler_and_reasoning(self) -> tuple[np.ndarray, np.ndarray]:
        """(n,) bool each: the tokens of the two classes."""
        filler, reasoning = self.is_of(FILLER), self.is_of(REASONING)
        if not filler.any() or not reasoning.any():
            raise CannotBeSeen("this run's tokens are all of one class")
        return filler, reasoning

    def most_entropy(self) -> np.ndarray:
        """(n,) bool: the fifth of the tokens with the most entropy."""
        top = self["entropy"] >= np.quantile(self["entropy"], 0.8)
        if top.all():
            raise CannotBeSeen("all tokens have the same entropy")
        return np.asarray(top)

    def ratios_of_sizes(self, mine: np.ndarray, theirs: np.ndarray) -> dict[str, Estimate]:
        """The mean size of one mask's tokens over that of another's, in both units."""
        names = "by A log p", "by the gradient"
        return {name: mean_ratio(self["problem"], self[f"abs {unit}"], mine, theirs)
                for name, unit in zip(names, UNITS)}

    def share(self, inside: np.ndarray) -> Estimate:
        """The share of the gradient's size that falls to the tokens of a mask."""
        return self.tokens.table.share(inside, self["abs gradient"])

    def arm(self, *weightings: str) -> Run:
        """The first run that has one of these weightings."""
        for run in (self.run, *self.others):
            if run.config["mitigation"] in weightings:
                return run
        raise CannotBeSeen(f"needs a run with --mitigation {weightings[0]}")

    def pair_of(self, *weightings: str) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """(steps,) success, nan if it is not told, and norm in a run with one of these weightings
        and in a plain one, over the steps that both have. They differ in nothing else."""
        mine, plain = self.arm(*weightings), self.arm("none")
        if others := different_settings(mine, plain):
            raise CannotBeSeen(f"the two runs also differ in {others}, so they are no pair")
        lines = [{line["step"]: line for line in run.metrics} for run in (mine, plain)]
        steps = sorted(set.intersection(*map(set, lines)))
        values = [{name: np.array([known[step][name] for step in steps], float)
                   for name in ("success", "gradient_norm")} for known in lines]
        return tuple(one | {"gradient_norm": np.nan_to_num(one["gradient_norm"])} for one in values)

    def of_model(self, measure: Callable[[Policy, "Evidence"], Any],
                 policy: Policy | None = None) -> Any:
        """What a function measures of a model, measured once; by default of the last model."""
        policy = policy or self.model
        key = measure.__name__, id(policy)
        if key not in self.known:
            self.known[key] = measure(policy, self)
        return self.known[key]

    @cached_property
    def models(self) -> dict[int, Policy]:
        """The first and the last model of the run, by step."""
        models = self.run.models
        if len(models) < 2:
            raise CannotBeSeen("this run has no checkpoint")
        has_first = (models[0] / "config.json").exists()
        return {step: self.run.policy(step, device=self.device, threads=1, seed=0, temperature=1.0)
                for step in ([0] if has_first else []) + [max(models)]}

    @property
    def model(self) -> Policy:
        """The last one."""
        return self.models[max(self.models)]

    def is_like_stored(self) -> bool:
        """Whether the run is of what stored numbers *of tiny* are: Countdown, models/tiny, GRPO."""
        config = self.run.config
        is_tiny = find(str(config.get("model"))).resolve() == PROJECT / "models/tiny"
        is_countdown = config.get("task", "countdown_task") == "countdown_task"
        return is_tiny and is_countdown and has_advantages_of_grpo(self.run)

    def like_stored(self) -> None:
        if not self.is_like_stored():
            raise CannotBeSeen("the stored number beside it is of Countdown, models/tiny and the "
                               "advantage grpo, and this run is not")

    def before_and_after(self) -> tuple[Policy, Policy]:
        if len(self.models) < 2:
            raise CannotBeSeen("the model that this run began with is not here")
        first, last = self.models.values()
        return first, last

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """(n,) bool each: the tokens of the first and of the last fifth of the recorded steps."""
        step, count = self["step"], len(self.tokens.steps)
        if count < 5:
            raise CannotBeSeen(f"{count} recorded steps have no beginning and no end")
        return step < count // 5, step >= count - count // 5

    def metric(self, name: str) -> list[np.ndarray]:
        """A number of each step, in the first and in the last fifth of the steps."""
        values = [line[name] for line in self.run.metrics if line[name] is not None]
        fifth = len(values) // 5
        if fifth < 2:
            raise CannotBeSeen(f"{len(values)} steps have no beginning and no end")
        return [np.array(values[:fifth], float), np.array(values[-fifth:], float)]


def different_settings(mine: Run, plain: Run) -> str:
    """The names of the settings in which two runs differ, their weightings aside."""
    of_weighting = {"mitigation", "rescale", "made by", *flags_of_methods(mine.config)}
    known = [{**settings_of(run), "seed": run.config["seed"]} for run in (mine, plain)]
    both = (set(known[0]) & set(known[1])) - of_weighting
    return ", ".join(sorted(name for name in both if known[0][name] != known[1][name]))


def trained_critic(policy: Policy, seen: Evidence) -> gae:
    """A linear critic, trained on problems that no claim asks it about."""
    critic = gae(policy)
    for batch in range(CRITIC_BATCHES):
        show_status(f"critic: batch {batch + 1} of {CRITIC_BATCHES}")
        critic(sample_batch(policy, 8, 8, step=201 + batch), policy)
    return critic


def own_critic(seen: Evidence) -> gae:
    """A copy of the trained critic, because a critic learns from each batch that it judges."""
    return copy.deepcopy(seen.of_model(trained_critic))


@cache
def tokens_of(run: Run, is_plain: bool = False) -> RunTokens:
    if not run.steps:
        raise CannotBeSeen("this run has no credit files, which hold its tokens")
    return RunTokens(run, is_plain)


# ------------------------------------------------------------------- stored experiments


SAMPLES = ("scoreboard_24", "scoreboard_24_1", "scoreboard_24_2", "scoreboard_20_steps")
TINY, REAL, REAL_SHORT, LATER = (
    "board", "real_board_brief_8_gpu", "real_board_expression", "later")


@cache
def stored_results(name: str) -> dict[str, Any]:
    """A file of lab/results."""
    return read_json(PROJECT / "lab" / "results" / f"{name}.json")


def success_by_seed(board: str, arm: str) -> dict[str, Floats]:
    """(steps,) the success of each step in training, of each seed of an arm; or the one number that
    was kept of a run."""
    found = {}
    for name, kept in stored_results(board)["values"]["runs"].items():
        of_arm, _, seed = name.rpartition("-s")
        if of_arm == arm:
            is_number = isinstance(kept, float)
            found[seed] = np.array([kept] if is_number else kept[2].split(), float)
            found[seed] /= 1 if is_number else kept[0]
    return found


def stored_gain(board: str, arm: str, over: str = "none") -> Estimate:
    """The gain of an arm over another one, by default plain GRPO, in mean success in training."""
    theirs = success_by_seed(board, over)
    return mean_over([success.mean() - theirs[seed].mean()
                      for seed, success in success_by_seed(board, arm).items() if seed in theirs])


def stored(experiment: str, name: str) -> Estimate:
    """A number with its interval of an experiment without runs."""
    return Estimate(*stored_results("claims")[experiment]["values"][name])


def pair(seen: Evidence, weightings: Sequence[str]) -> dict[str, tuple[Cell, str]]:
    """The difference in success of a run with one of these weightings and a plain run that differs
    in nothing else. One pair decides nothing, so it only stands beside a verdict."""
    try:
        mine, plain = seen.pair_of(*weightings)
    except CannotBeSeen:
        return {}
    difference = mine["success"].mean() - plain["success"].mean()
    return {f"points in this pair, {len(mine['success'])} steps": (difference, "points")}


def add_stored_claims() -> None:
    """The claims of stored_claims.json. A number there is a gain: a board, an arm, and if it is not
    plain GRPO the other arm. Or it is one that an experiment without runs has printed."""
    def numbers_at(places: Mapping[str, Sequence[str]]) -> dict[str, Estimate]:
        return {name: (stored if place[0] in stored_results("claims") else stored_gain)(*place)
                for name, place in places.items()}

    def look_at(row: dict[str, Any], seen: Evidence) -> Found:
        if "needs" in row:
            raise CannotBeSeen(f"needs {row['needs']}")
        numbers, beside = numbers_at(row["numbers"]), numbers_at(row.get("beside", {}))
        verdict = together([RULES[row["holds"]](x) for x in numbers.values()])
        of_pair = pair(seen, row["pair"]) if "pair" in row else {}
        return Found(verdict, {**numbers, **beside, **of_pair}, "points", by_interval=True)

    for name, row in read_json(PROJECT / "lab/probes/stored_claims.json").items():
        CLAIMS.append(Claim(row["note"], row["sentence"], row.get("published", ""), row["more"],
                            partial(look_at, row), "numbers" in row, name, row["why"]))
