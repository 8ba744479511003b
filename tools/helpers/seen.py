"""Will a gain of success be seen within the planned steps?

A run learns from the answers of groups that teach, and it moves most where a problem is solved now
and then. So after N steps success is expected to have risen by

    gain = speed * answers * variance * N      points

`answers` are those of one step whose group teaches, and `variance` is the mean of p (1 - p) over
the problems, where p is the success at a problem. If the form comes first, all answers of groups
with different rewards count. At most 64 answers count, because no run had more, and more of them
make no step of AdamW longer.

The speed was fitted to runs (research/results/preflight/settings.jsonl has them): with half of the
settings success rises faster, with half slower. How far settings differ is the spread: the standard
deviation of the logarithm of the speed.

A gain is *seen* if it is larger than two standard errors of the difference of two evaluations.
"""
import math
from dataclasses import dataclass
from statistics import NormalDist

SURE = 0.8  # a gain "will be seen" with this chance or more, and "will not be seen" with 1 - SURE
REACH = NormalDist().inv_cdf(0.9)  # spreads to each side, which hold 80% of a normal distribution


@dataclass(frozen=True)
class Speed:
    """How fast success rose in runs that were made."""
    points: float         # for one answer, if the variance were 1
    spread: float
    learning_rate: float  # of these runs
    runs: str


# Fitted to the settings of the first two looks in which something can be learned, and rounded.
SMALL = Speed(0.04, 0.6, 2.5e-4, "43 runs of models/tiny")
LARGE = Speed(0.5, 1.0, 2e-6, "two runs of a model of half a billion weights")
KNOWN_RATES = (0.3, 1.5)  # times the rate of those runs: with three times as much, tiny models
#                           were not seen to learn
MOST_ANSWERS = 64  # of a step, in these runs

# How often each word came true in 18 settings that were trained after it was written down: of so
# many runs (the second number) so many were seen to rise.
IN_RANGE = (11, 18)  # settings of these whose mean gain lay within the range of the forecast
SEEN_OF_RUNS = {"will be seen": (18, 22), "may be seen": (7, 10), "will not be seen": (2, 4)}


@dataclass(frozen=True)
class Forecast:
    gain: float     # points: half of such settings gain more, if there is so much to gain
    spread: float   # of the logarithm of the gain
    visible: float  # points: a larger gain is seen
    steps: int      # that are planned

    @property
    def chance(self) -> float:
        """The chance that the gain is seen after the planned steps."""
        if self.gain <= 0:
            return 0.0
        return NormalDist().cdf(math.log(self.gain / self.visible) / self.spread)

    @property
    def word(self) -> str:
        if self.chance >= SURE:
            return "will be seen"
        return "may be seen" if self.chance > 1 - SURE else "will not be seen"

    def gain_between(self) -> tuple[float, float]:
        """The range of the gain, in points: 80% of it, if its logarithm is normal."""
        times = math.exp(REACH * self.spread)
        return self.gain / times, self.gain * times

    def steps_for(self, chance: float) -> int:
        """After how many steps the gain is seen with this chance. The gain grows with the steps."""
        times = math.exp(NormalDist().inv_cdf(chance) * self.spread)
        return max(1, math.ceil(self.steps * self.visible / self.gain * times))


def visible_gain(success: float, held_out: int) -> float:
    """Two standard errors of the difference of two evaluations, in points. A success of 0 or 1 is
    known to one answer at best."""
    variance = max(success * (1 - success), 1 / held_out)
    return 200 * math.sqrt(2 * variance / held_out)


def forecast(speed: Speed, learning_rate: float, answers: float, variance: float, steps: int,
             success: float, held_out: int) -> Forecast:
    """AdamW moves the parameters in proportion to the learning rate, and so does the gain. But a
    rate above that of the runs is not counted as faster, nor are more answers than they had."""
    points = speed.points * min(learning_rate / speed.learning_rate, 1.0)
    return Forecast(points * min(answers, MOST_ANSWERS) * variance * steps, speed.spread,
                    visible_gain(success, held_out), steps)
