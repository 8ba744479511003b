"""Who will lose? The first step of an idea, and what became of earlier methods with such a step.

    python -m lab.tools.first_step              # measures the methods of stored boards again

The command writes lab/results/first_step.json, its table and its picture. `lab idea` reads it.
"""
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lab.analysis.statistics import Estimate
from lab.analysis.tables import Row, Table, by_row, show
from lab.engine.errors import PROJECT, UserError
from lab.engine.methods import axis_of
from lab.engine.policy import Policy
from lab.foreign import foreign
from lab.harness.build import load_policy, make_advantage, make_weighting
from lab.harness.record import Json, provenance
from lab.harness.screen import say
from lab.harness.settings import LabSettings, make_settings, read_flags
from lab.probes.claim_rules import stored_gain, success_by_seed
from lab.probes.first_step import Methods, first_steps

STORED = PROJECT / "lab/results/first_step.json"
BOARDS = ("board", "later", "predicted", "of_2026", "twelve_of_2026")
LEAST, MOST, REACH = 30, 60, 0.09  # batches, and how far an interval may reach
BELOW, LOSS = -0.10, -0.01         # of the first step, and of the success in training
USUAL = {"model": "models/tiny", "questions": 8, "answers": 8, "threads": 1}  # as on the boards
AT_ONCE = 8                        # arms of the table, because their gradients take memory


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


# ---------------------------------------------------------------------- the table
def arms_of(board: str) -> Iterator[tuple[str, LabSettings]]:
    """The arms of a stored board whose method is here, and that sample as plain GRPO does."""
    plan = PROJECT / f"lab/plans/{board}.json"
    flags = json.loads(plan.read_text("utf-8"))["arms"] if plan.exists() else {}
    stored = json.loads((STORED.parent / f"{board}.json").read_text("utf-8"))["values"]["runs"]
    for arm in dict.fromkeys(run.rpartition("-s")[0] for run in stored):
        try:
            name, *words = arm.split()
            typed = flags[arm].split() if arm in flags else [f"--{axis_of(name)}", name, *words]
            yield arm, make_settings(USUAL | read_flags(typed))
        except UserError:
            continue  # a method or a setting that has left


def measure_all() -> list[Json]:
    """Rows of methods that have left are kept."""
    rows: list[Json] = []
    for board in BOARDS:
        if not (STORED.parent / f"{board}.json").exists():
            continue
        arms = dict(arms_of(board))
        plain = arms.pop("none")
        usual = {name: s for name, s in arms.items() if s.questions == plain.questions}
        names = [name for name in usual if name not in {row["arm"] for row in rows}]
        for start in range(0, len(names), AT_ONCE):
            chosen = {"none": plain} | {name: usual[name] for name in names[start:start + AT_ONCE]}
            for name, found in first_steps(load_policy(plain), chosen, LEAST).items():
                pairs = len(success_by_seed(board, name))
                numbers = [round(x, 4) for x in (found.value, found.low, found.high)]
                rows.append({"board": board, "arm": name, "step": numbers, "pairs": pairs})
                say(json.dumps(rows[-1]))
    found = {(row["board"], row["arm"]) for row in rows}
    before = json.loads(STORED.read_text("utf-8"))["values"]
    return rows + [row for row in before if (row["board"], row["arm"]) not in found]


def table_of(known: list[Known]) -> Table:
    rows: list[Row] = [[one.arm, one.board, one.step, one.pairs, one.gain]
                       for one in sorted(known, key=lambda one: one.step.value)]
    formats = {"method": "", "board": "", "first step": "+.0%", "pairs": "d", "gain": "points"}
    return Table("first_step", "The first step, and the gain in training", by_row(formats, rows),
                 [calibration(known)])


def draw(known: list[Known], folder: Path) -> None:
    from lab.analysis.plots import BLUE, GREY, ORANGE, plt, save
    figure, axis = plt.subplots()
    axis.axvline(100 * BELOW, color=GREY)
    axis.axhline(100 * LOSS, color=GREY)
    for one in known:
        x, y = ([100 * part for part in (of.value, *of.interval)] for of in (one.step, one.gain))
        colour = ORANGE if one.loses else BLUE
        axis.plot(x[1:], [y[0]] * 2, color=colour, lw=0.6)
        axis.plot([x[0]] * 2, y[1:], color=colour, lw=0.6)
        axis.plot(x[0], y[0], "o", color=colour, ms=4)
    axis.set(xlabel="the first step's gain over plain GRPO's, percent",
             ylabel="gain in training, points")
    save(figure, folder, "first_step", "")


def main(argv: list[str]) -> None:
    if argv:
        raise UserError("give no words: python -m lab.tools.first_step")
    found: dict[str, Any] = {"command": "python -m lab.tools.first_step", **provenance()}
    STORED.write_text(json.dumps(found | {"values": measure_all()}, indent=1) + "\n", "utf-8")
    known = read_stored()
    show([], [table_of(known)])
    draw(known, STORED.parent)


if __name__ == "__main__":
    main(sys.argv[1:])
