"""Does a run of the default recipe keep what a subject of experiments has to promise?"""
import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from analysis.statistics import Estimate, mean_over
from analysis.tables import Table, by_row
from harness.credit_file import read_credit
from engine.errors import UserError
from harness.files import is_file, read_lines
from harness.record import MODES
from engine.tokens import load_tokenizer
from research.experiments.credit_shares import DISCOUNT, credit_shares, discount_cosine
from research.experiments.experiments import BEFORE, LEAST_FORMAT, LEAST_GAIN, MOST_CUT_OFF, MOST_SPREAD
from research.experiments.finished import END, START, Study, evaluated, probed, training_success
from research.experiments.plan import PlannedRun
from research.experiments.runner import SECONDS
from research.experiments.tries import HOW, how_solved, target_of
from research.probes.common import Findings

UNKNOWN = Estimate(float("nan"), float("nan"), float("nan"), float("nan"))
A_STEP = re.compile(r" *[0-9]+/[0-9]+ ")  # begins the line of a training step
EDGE = 20  # a 20th of the steps stands for the start of a run, another for its end


@dataclass
class Line:
    """What was promised, or is good to know, and what was measured."""
    what: str
    measured: Estimate
    unit: str
    aim: str = ""
    kept: bool | None = None    # None: nothing was promised, or nothing is known

    @property
    def verdict(self) -> str:
        if self.kept is None:
            return ""
        return "kept" if self.kept else "missed"


def report(study: Study) -> Findings:
    runs = list(study.of(next(iter(study.experiment.arms))).values())
    lines = [*promises(runs), *lines_of_success(runs), whole_run(study), *lines_of_tries(runs),
             *lines_of_credit(study)]
    rows = [row_of(line) for line in lines]
    formats = {"what": "", "measured": ",.3g", "95%": ",.3g", "unit": "", "aim": "", "verdict": ""}
    table = Table("promises", "What the subject promises, and what was measured",
                  by_row(formats, rows), in_words(lines), notes(study), {"95%": "95% interval"})
    printed = transcript_table(study.planned[0])
    return Findings("The subject", study.intro(), [table, *printed], ("promises",))


def row_of(line: Line) -> list:
    return [line.what, line.measured.value, line.measured.interval, line.unit, line.aim,
            line.verdict]


def in_words(lines: list[Line]) -> str:
    kept = [line for line in lines if line.verdict == "kept"]
    missed = [line.what for line in lines if line.verdict == "missed"]
    return (f"{len(kept)} of {len(kept) + len(missed)} promises are kept.\n"
            f"Missed: {'; '.join(missed) or 'none'}.")


def notes(study: Study) -> list[str]:
    edge = edge_steps(study.settings.steps)
    texts = ["Success is held out and sampled, its spread the standard deviation over seeds; cut "
             "off and format are the worst of sampled and greedy answers. A run's seconds are "
             "those of its process, with others beside it. Intervals are over seeds, those of "
             "credit over problems, that of the cosine over batches.",
             "A try is a sentence of the thinking that computes. A right answer is solved by its "
             "first try if that one reaches the target, by a later try if another one does, by "
             f"another expression if none does; in the first and the last {edge} training steps.",
             "The cosine is between the gradient of plain GRPO and the same with discounted "
             "thinking, of the untrained model."]
    if probed("scoreboard", BEFORE):
        return [*texts, "Credit is squared, a share of all; operators and numbers are those of "
                        "the thinking, verdict words the end of a try after its result."]
    return [*texts, "Shares of squared credit need python -m research probes --only scoreboard."]


def known(value: float) -> Estimate:
    """A number without an interval."""
    return Estimate(float(value), float("nan"), float("nan"), float("nan"))


def points(values) -> Estimate:
    """The mean over seeds of these shares, in points of 100."""
    return mean_over(100 * np.array(values, float))


def promises(runs: list[dict]) -> list[Line]:
    final = [100 * evaluated(run, END)["success"] for run in runs]
    gain = points([evaluated(run, END)["success"] - evaluated(run, START)["success"]
                   for run in runs])
    last = [evaluated(run, END, mode) for run in runs for mode in MODES]
    cut_off = 100 * (1 - min(line["finished_mean"] for line in last))
    well_formed = min(line["format_mean"] for line in last)
    late = points([late_gain(training_success(run)) for run in runs])
    return [spread_line(final),
            Line("cut off at the end, worst seed",
                 known(cut_off), "%", f"at most {MOST_CUT_OFF:g}", cut_off <= MOST_CUT_OFF),
            Line("format at the end, worst seed", known(well_formed), "",
                 f"at least {LEAST_FORMAT:g}", well_formed >= LEAST_FORMAT),
            Line("training, last tenth minus fifth tenth", late, "points",
                 "interval above 0", None if len(runs) < 2 else late.low > 0),
            Line("gain, end minus start", gain, "points",
                 f"at least {LEAST_GAIN:g}", gain.value >= LEAST_GAIN)]


def spread_line(final: list[float]) -> Line:
    what, aim = "spread of the final success", MOST_SPREAD
    if len(final) < 2:
        return Line(what, UNKNOWN, "points", f"at most {aim:g}")
    spread = float(np.std(final, ddof=1))
    return Line(what, known(spread), "points", f"at most {aim:g}", spread <= aim)


def late_gain(success: np.ndarray) -> float:
    """Mean success in the last tenth of the steps minus that in the fifth tenth."""
    tenths = np.array_split(success, 10)
    if not len(tenths[-1]):
        return float("nan")
    return float(tenths[9].mean() - tenths[4].mean())


def lines_of_success(runs: list[dict]) -> list[Line]:
    lines = []
    for mode in MODES:
        for name, place in (("start", START), ("end", END)):
            success = [evaluated(run, place, mode)["success"] for run in runs]
            lines.append(Line(f"success at the {name}, {mode}", points(success), "%"))
    final = [100 * evaluated(run, END)["success"] for run in runs]
    lines.append(Line("success at the end, sampled, lowest seed", known(min(final)), "%"))
    lines.append(Line("success at the end, sampled, highest seed", known(max(final)), "%"))
    return lines


def whole_run(study: Study) -> Line:
    """From the beginning of the process to its end, evaluations included; what was computed twice
    after a stop is counted twice."""
    seconds = Counter()
    for line in read_lines(study.planned[0].folder.with_name(SECONDS)):
        seconds[line.get("run")] += line.get("seconds") or 0
    finished = [run.name for run in study.planned if run.seed in study.of(run.arm)]
    times = [seconds[name] for name in finished if name in seconds]
    return Line("a whole run on one thread", mean_over(times), "seconds")


def edge_steps(steps: int) -> int:
    return max(1, steps // EDGE)


def lines_of_tries(runs: list[dict]) -> list[Line]:
    """Success at the first try, and which kind of success the gain comes from."""
    starts, ends = [], []
    for run in runs:
        count = edge_steps(len(run["steps"]))
        starts.append(ways_to_success(run, run["steps"][:count]))
        ends.append(ways_to_success(run, run["steps"][-count:]))
    first = "solved by the first try, {}"
    lines = [Line(first.format(name), points([ways["first try"] for ways in edge]), "%")
             for name, edge in (("start", starts), ("end", ends))]
    for way in HOW:
        gains = [end[way] - start[way] for start, end in zip(starts, ends)]
        lines.append(Line(f"gain by {way}", points(gains), "points"))
    return lines


def ways_to_success(run: dict, steps: list[int]) -> dict[str, float]:
    """The share of all answers of these steps that each way of HOW solved."""
    tokenizer, ways, answers = load_tokenizer(run["folder"]), Counter(), 0
    for step in steps:
        batch = read_credit(run["folder"], step, tokenizer)
        targets = [target_of(tokenizer.decode(ids, skip_special_tokens=False))
                   for ids in batch.prompt_ids]
        if None in targets:
            raise UserError(f"{run['folder']}: a prompt of step {step} names no target")
        answers += len(batch.responses)
        for row in batch.scores["answer"].nonzero().flatten().tolist():
            ways[how_solved(batch.responses[row], targets[batch.group[row]])] += 1
    return {way: ways[way] / answers for way in HOW}


def transcript_table(run: PlannedRun) -> list[Table]:
    """What the first run printed at its beginning and at its end, if its log is there."""
    if not is_file(run.log):
        return []
    printed = run.log.read_text(encoding="utf-8", errors="replace")
    lines = [line for line in printed.splitlines() if line.startswith(" ")]
    steps = [place for place, line in enumerate(lines) if A_STEP.match(line)]
    if not steps:
        return []
    shown = [*lines[:steps[0] + 1], " ...", *lines[steps[-1]:]]
    return [Table("transcript", f"What {run.name} printed", {"line": ("", shown)})]


def lines_of_credit(study: Study) -> list[Line]:
    """Of the untrained model: what decides its reward, and what a discount changes."""
    lines, scores = [], probed("scoreboard", BEFORE)
    if scores:
        for name, share in credit_shares(scores).items():
            percent = Estimate(100 * share.value, 100 * share.low, 100 * share.high, share.p)
            lines.append(Line(f"credit at the start, {name}", percent, "%"))
    cosine = discount_cosine(study.settings)
    what = f"cosine, thinking discounted by {DISCOUNT:g}"
    return [*lines, Line(what, cosine, "")]
