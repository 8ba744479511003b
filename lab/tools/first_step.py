"""Who will lose? The first step of an idea, and what became of earlier methods with such a step, of
which lab/results/first_step.json is the record.
"""
import json
import textwrap
from pathlib import Path
from typing import NamedTuple

from lab.analysis.statistics import Estimate
from lab.engine.errors import PROJECT
from lab.engine.policy import Policy
from lab.foreign import foreign
from lab.harness.build import load_policy, make_advantage, make_weighting
from lab.harness.screen import say
from lab.harness.settings import LabSettings, make_settings
from lab.probes.claim_rules import stored_gain
from lab.probes.first_step import Methods, first_steps

STORED = PROJECT / "lab/results/first_step.json"
LEAST, MOST, REACH = 30, 60, 0.09  # batches, and how far an interval may reach
BELOW, LOSS = -0.10, -0.01         # of the first step, and of the success in training


class Known(NamedTuple):
    """A method whose first step and whose gain in training are stored."""
    board: str
    arm: str
    step: Estimate
    gain: Estimate
    pairs: int

    @property
    def loses(self) -> bool:
        return self.gain.value <= LOSS


def report(name: str, plain: LabSettings, idea: LabSettings, checkpoints: list[Path]) -> None:
    """Print how far the first step of an idea goes on the untrained model, and from a checkpoint of
    plain GRPO. A name with a colon is anybody's advantage (lab/foreign.py)."""
    for path in [None, *checkpoints]:
        s = plain if path is None else make_settings(plain.typed | {"model": str(path)})
        policy = load_policy(s)
        if policy.model.is_large:
            return say("The first step is not measured, because the model is large")
        own = {name: methods_of(name, plain, policy)} if ":" in name else None
        found = first_steps(policy, {"plain": plain, name: idea}, LEAST, MOST, is_enough, own)[name]
        place = f"From {path}, which plain GRPO has trained, the" if path else "The"
        say(textwrap.fill(f"{place} first step of {name} gains {in_words(found)}", 100))
    say(textwrap.fill(calibration(read_stored()), 100))


def is_enough(found: Estimate) -> bool:
    return found.high - found.low <= 2 * REACH or found.high < BELOW


def methods_of(name: str, s: LabSettings, policy: Policy) -> Methods:
    """Of the settings; or anybody's advantage, with their weighting, if the name has a colon."""
    if ":" not in name:
        return make_advantage(s, policy), make_weighting(s, policy)
    function = foreign(name)
    return (lambda rollouts, policy: function(rollouts)), make_weighting(s, policy)


def in_words(found: Estimate) -> str:
    """A number such as -0.38, which is a gain over plain GRPO's."""
    word = "less" if found.value < 0 else "more"
    return (f"{abs(found.value):.0%} {word} than plain GRPO's ({found.low:+.0%} to "
            f"{found.high:+.0%})")


def calibration(known: list[Known]) -> str:
    """What became of the stored methods, by their first step."""
    below, others = [[one.loses for one in known if (one.step.value < BELOW) == is_below]
                     for is_below in (True, False)]
    return (f"On the tiny model {sum(below)} of {len(below)} methods below {BELOW:.0%} lost a "
            f"point or more in training, and {sum(others)} of the other {len(others)}. The first "
            "step does not tell who gains.")


def read_stored() -> list[Known]:
    rows = json.loads(STORED.read_text("utf-8"))["values"]
    return [Known(row["board"], row["arm"], Estimate(*row["step"]),
                  stored_gain(row["board"], row["arm"]), row["pairs"]) for row in rows]
