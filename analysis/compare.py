"""The tables of several runs: arms, their differences, their steadiness, where the gradient
lies."""
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from analysis.arms import Comparison, alike, refuse_unknown_baseline, setting_of, what_differs
from analysis.comparison_plots import PLACES, draw_comparison
from analysis.differences import MEASURES, PRIMARY, differences, evaluated, final_answers
from analysis.earlier import PUBLISHED, PUBLISHED_DISCOUNTED
from analysis.runs import evaluations
from analysis.sizes import end_of, lay_flat, units
from analysis.statistics import mean_reach, paired_difference
from analysis.sums import PARTITIONS
from analysis.tables import Table, by_row
from analysis.vocabulary import Vocabulary
from engine.labels import KINDS, SECTIONS
from harness.credit_file import read_columns
from harness.files import writing
from engine.tokens import load_tokenizer

PUBLISHED_ARMS = (
    "published (Qwen2.5-0.5B, another model, one seed, 128 problems): plain GRPO 15%, "
    "outcome_conditional 12% with discounts of 0.5 and 0.75, inverse_logprob_as_published 0% at "
    "step 60; filler over reasoning 1.31, and 1.41 with 0.75, in the old unit. 12% against 15% of "
    "128 is z = 0.74")

CHAPTERS = {  # what is folded on the page, and the tables in it; with several sets a number follows
    "Other measures": tuple(measure for measure in MEASURES if measure != PRIMARY),
    "Single runs, and how steady they were": ("runs", "stability"),
    "Where the gradient went": ("credit by class", "credit over seeds", "class sizes")}
PUBLISHED_SUMMARY = (  # success at step 100 and the figures by class, where it published them
    ("none*", 0.15, PUBLISHED), ("outcome_conditional, discount 0.5*", 0.12, None),
    ("outcome_conditional, discount 0.75*", 0.12, PUBLISHED_DISCOUNTED))


@dataclass
class Report:
    """What is printed of several runs, and stands on their page."""
    intro: list[str]
    short: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: list[tuple[Path, str]] = field(default_factory=list)
    places: dict[str, tuple] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)  # names of the tables that decide


def report_on(runs: list[dict], baseline: str | None, folder: Path, status) -> Report:
    """Runs that are not comparable are compared in sets, each by itself."""
    sets = alike(runs, setting_of)
    report = Report([f"{len(runs)} runs."])
    if len(sets) > 1:
        report.intro.append(what_differs(sets))
    comparisons = [Comparison(part, baseline) for part in sets]
    refuse_unknown_baseline(comparisons, baseline)
    for number, comparison in enumerate(comparisons, 1):
        tables, places = comparison_tables(comparison, status), dict(PLACES)
        with writing(folder):
            suffix = f"_{number}" if len(sets) > 1 else ""
            report.pictures += draw_comparison(comparison, tables, folder, suffix)
        deciding = [table for table in tables if table.name in ("arms", PRIMARY)]
        report.short += [table.finding for table in deciding if table.finding]
        if len(sets) > 1:
            places = name_by_set(tables, number)
        report.first += [table.name for table in deciding]
        report.places |= places
        report.tables += tables
    return report


def name_by_set(tables: list[Table], number: int) -> dict[str, tuple]:
    """Number the tables of a set; the places of its pictures, whose names have the number, too."""
    for table in tables:
        table.name, table.title = f"{table.name} {number}", f"{table.title} (set {number})"
    places = {}
    for name, pictures in PLACES.items():
        places[f"{name} {number}"] = tuple(f"{picture}_{number}" for picture in pictures)
    return places


def comparison_tables(comparison: Comparison, status=lambda text: None) -> list[Table]:
    tables = [arms_table(comparison), runs_table(comparison)]
    if len(comparison.arms) > 1:
        tables += [differences(comparison, measure) for measure in MEASURES]
    tables += [stability(comparison), *credit_by_class(comparison, status)]
    return tables


def arms_table(comparison: Comparison) -> Table:
    rows = [arm_row(comparison, name) for name in comparison.arms]
    known = [f"{row[0]} {row[2]:.1%}" for row in rows if row[2] is not None]
    finding = "No run is finished yet."
    if any(comparison.seeds(name) for name in comparison.arms):
        finding = "No finished run was evaluated on held-out problems (--eval_every 0)."
    if known:
        finding = f"Final held-out success, sampled: {'; '.join(known)}."
    formats = {"arm": "", "seeds": "", "sampled": ".1%", "95% over seeds": ".1%", "greedy": ".1%",
               "format": ".2f", "finished": ".0%", "length": ".0f"}
    return Table("arms", "The arms", by_row(formats, rows), finding, arms_notes(comparison),
                 {"sampled": "held-out success, sampled",
                  "95% over seeds": "95% interval over seeds", "greedy": "success, greedy",
                  "length": "tokens an answer"})


def arm_row(comparison: Comparison, name: str) -> list:
    arm, done = comparison.arms[name], comparison.seeds(name)
    going = len(arm) - len(done)
    seeds = " ".join(map(str, sorted(done))) or "none"
    seeds += f" ({going} still going)" if going else ""
    mean, band = over_seeds(final_success(done, "sampled"))
    band = band and tuple(np.clip(band, 0, 1).tolist())  # of a share
    greedy, _ = over_seeds(final_success(done, "greedy"))
    sampled = [evaluations(run, "sampled") for run in done.values()]
    last = [lines[-1] for lines in sampled if lines]
    means = [mean_of(last, f"{key}_mean") for key in ("format", "finished", "length")]
    return [name, seeds, mean, band, greedy, *means]


def mean_of(lines: list[dict], key: str) -> float | None:
    return np.mean([line[key] for line in lines]) if lines else None


def final_success(runs: dict[int, dict], mode: str) -> list[float]:
    at = [(run, evaluated(run, mode)) for run in runs.values()]
    return [final_answers(run, steps, mode).mean() for run, steps in at if steps]


def over_seeds(values) -> tuple[float | None, tuple[float, float] | None]:
    """Mean, and its interval by Student's t; none where there is no spread to make it from."""
    if len(values) < 2 or np.std(values) == 0:
        return (float(values[0]) if len(values) else None), None
    mean, reach = np.mean(values), mean_reach(values)
    return float(mean), (float(mean - reach), float(mean + reach))


def arms_notes(comparison: Comparison) -> list[str]:
    config = comparison.arms[comparison.baseline][0]["config"]
    count = sum(map(len, comparison.arms.values()))
    usual = "".join(f"{key} {value} where nothing else is said; "
                    for key, value in comparison.usual.items())
    note = (f"{count} runs of {config['model']}, {config['steps']} steps; finished runs only; "
            f"{usual}95% over seeds: Student's t over the seeds of an arm")
    return [note]


def runs_table(comparison: Comparison) -> Table:
    """Each run by itself. The gain is paired: the same held-out problems at the start and at the
    last evaluation."""
    rows = []
    for arm in comparison.arms.values():
        rows += [run_row(run) for run in arm if len(evaluations(run, "sampled")) > 1]
    finding = ""
    if rows:
        gains = [row[3] for row in rows]
        finding = f"Gains of single runs go from {min(gains):+.1%} to {max(gains):+.1%}."
    formats = {"run": "", "start": ".1%", "end": ".1%", "gain": "+.1%", "95%": "+.1%",
               "greedy": "+.1%"}
    return Table("runs",
                 "Each run: held-out success, sampled, at the start and at its last evaluation",
                 by_row(formats, rows), finding,
                 ["the intervals are over problems, paired"],
                 {"95%": "95% interval of the gain", "greedy": "gain with greedy decoding"})


def run_row(run: dict) -> list:
    sampled, greedy = evaluations(run, "sampled"), evaluations(run, "greedy")
    start, end = sampled[0], sampled[-1]
    gain = paired_gain(start, end)
    greedy_gain = greedy[-1]["success"] - greedy[0]["success"] if len(greedy) > 1 else None
    return [run["folder"].name, start["success"], end["success"], gain.value, gain.interval,
            greedy_gain]


def paired_gain(start: dict, end: dict):
    """Of two evaluations of a run: the difference of success, problem by problem."""
    return paired_difference((np.array(end["answer"], float) - np.array(start["answer"]))[None])


def steadiness(run: dict) -> list[float] | None:
    """How the gradient norm, the entropy and the success of a run moved."""
    lines = run["metrics"]
    norm = np.array([line["gradient_norm"] for line in lines if line.get("gradient_norm")])
    entropy = [line["entropy"] for line in lines if line["entropy"] is not None]
    success = [line["success"] for line in lines if line["success"] is not None]
    if not len(norm) or not entropy:
        return None
    best = max(np.mean(success[i:i + 5]) for i in range(max(1, len(success) - 4)))
    spread, peak = norm.std() / norm.mean(), norm.max() / np.median(norm)
    return [norm[:10].mean(), norm[-10:].mean(), spread, peak,
            np.mean(entropy[:10]), np.mean(entropy[-10:]), best, np.mean(success[-5:])]


def stability(comparison: Comparison) -> Table:
    rows = []
    for name in comparison.arms:
        measured = [steadiness(run) for run in comparison.shown(name)]
        measured = [values for values in measured if values]
        if measured:
            rows.append([name, len(measured), *np.mean(measured, 0).tolist()])
    formats = {"arm": "", "runs": "d", "norm first": ".3f", "last": ".3f", "spread": ".0%",
               "peak": ".1f", "entropy": ".2f", "to": ".2f", "best": ".0%", "end": ".0%"}
    finding = ""
    if rows:
        best_and_end = "; ".join(f"{row[0]} {row[-2]:.0%} and {row[-1]:.0%}" for row in rows)
        finding = f"Best five steps in a row of training, and last five: {best_and_end}."
    return Table("stability",
                 "Gradient norm before clipping, entropy, and success in training batches",
                 by_row(formats, rows), finding,
                 ["means over runs; first and last: of ten steps; success: the best five steps in "
                  "a row, and the last five"],
                 {"norm first": "gradient norm, first", "last": "gradient norm, last",
                  "spread": "its deviation over steps over its mean",
                  "peak": "its largest over its median", "entropy": "entropy, first",
                  "to": "entropy, last", "best": "best success", "end": "last success"})


def credit_by_class(comparison: Comparison, status=lambda text: None) -> list[Table]:
    """Where the gradient lies in each arm; and two ratios of sizes with intervals over seeds, which
    those of one run are not."""
    by_arm = {}
    for name in comparison.arms:
        credit = [credit_of(run, status) for run in comparison.shown(name) if run["steps"]]
        if credit:
            by_arm[name] = {key: np.array([of_run[key] for of_run in credit]) for key in credit[0]}
    return [shares_table(by_arm, comparison.baseline),
            ratios_table(by_arm, published_notes(comparison)), summary_table(comparison, by_arm)]


def published_notes(comparison: Comparison) -> list[str]:
    """What the earlier experiment had of arms like these."""
    mitigations = {arm[0]["config"]["mitigation"] for arm in comparison.arms.values()}
    alike = mitigations & {"outcome_conditional", "inverse_logprob_as_published"}
    return [PUBLISHED_ARMS] if alike else []


def credit_of(run: dict, status) -> dict[str, list[float]]:
    """Of the gradient, weights included: the share of each kind, of think and answer; mean sizes
    of filler and reasoning, in the old unit as well; and early over late."""
    vocabulary = Vocabulary(load_tokenizer(run["folder"]))
    sums = {name: np.zeros((3, len(PARTITIONS[name])))  # tokens, sizes in the old unit, gradient
            for name in ("kind", "section", "class", "ends")}
    for step in run["steps"]:
        status(f"{run['folder'].name}: step {step} of {run['steps'][-1]}")
        tokens = lay_flat(read_columns(run["folder"], step))
        factors, advantage = units(tokens), np.abs(tokens["advantage"])
        old = advantage * np.abs(factors["contribution"])
        gradient = advantage * factors["weighted gradient"]
        cells = {"kind": tokens["kind"], "section": tokens["section"],
                 "class": vocabulary.classes(tokens["token_id"]), "ends": end_of(tokens)}
        for name, total in sums.items():
            count = total.shape[1]
            total += [np.bincount(cells[name], size, count) for size in (None, old, gradient)]
    with np.errstate(invalid="ignore", divide="ignore"):
        kind, section = (sums[name][2] / sums[name][2].sum() for name in ("kind", "section"))
        of_class, of_end = (sums[name][1:] / sums[name][0] for name in ("class", "ends"))
        (filler, reasoning, _), (early, _, late) = of_class[1], of_end[1]
        return {"shares": [*kind, *section[1:]], "old": of_class[0, :2], "new": of_class[1, :2],
                "filler over reasoning": filler / reasoning, "early over late": early / late}


def shares_table(by_arm: dict[str, dict], baseline: str) -> Table:
    kinds = {name: of_arm["shares"][:, :len(KINDS)].mean(0) for name, of_arm in by_arm.items()}
    finding = ""
    if baseline in kinds and len(kinds) > 1:
        moved = {name: np.abs(share - kinds[baseline]).sum() / 2
                 for name, share in kinds.items() if name != baseline}
        shares = ", ".join(f"{name} {share:.0%}" for name, share in moved.items())
        finding = (f"Share of the gradient that lies on other kinds of tokens than in {baseline}: "
                   f"{shares}.")
    formats = {"arm": "", **dict.fromkeys((*KINDS, *SECTIONS[1:]), ".0%")}
    rows = [[name, *of_arm["shares"].mean(0).tolist()] for name, of_arm in by_arm.items()]
    return Table("credit by class", "Share of the gradient abs(A) w s by kind and section",
                 by_row(formats, rows), finding,
                 ["means over the runs of an arm; policies that learned other things write other "
                  "texts, so this is not the weighting alone"])


def summary_table(comparison: Comparison, by_arm: dict[str, dict]) -> Table:
    """The summary of the earlier experiment, in its unit, and in the one that counts."""
    rows = []
    for name, of_arm in by_arm.items():
        success, _ = over_seeds(final_success(comparison.seeds(name), "sampled"))
        rows.append([name, success, *with_ratio(of_arm["old"].mean(0)),
                     *with_ratio(of_arm["new"].mean(0))])
    for name, success, figures in PUBLISHED_SUMMARY if published_notes(comparison) else ():
        sizes = [None, None, None]
        if figures:
            sizes = with_ratio([of_class[-1] for of_class in figures["classes"].values()])
        rows.append([name, success, *sizes, None, None, None])
    formats = {"arm": "", "success": ".1%", "filler": ".3f", "reasoning": ".3f", "ratio": ".2f",
               "filler s": ".3f", "reasoning s": ".3f", "ratio s": ".2f"}
    return Table("class sizes", "Filler and reasoning in both units, mean sizes",
                 by_row(formats, rows), "",
                 ["classes by the regex of an earlier experiment; * its published figures, of "
                  "another model, one seed, 128 problems; its log knew no weights"],
                 {"success": "final success", "filler": "filler, abs(A lp)",
                  "reasoning": "reasoning, abs(A lp)", "filler s": "filler, abs(A) w s",
                  "reasoning s": "reasoning, abs(A) w s", "ratio s": "ratio"})


def with_ratio(sizes) -> list[float]:
    """Filler, reasoning, and the one over the other."""
    filler, reasoning = map(float, sizes)
    return [filler, reasoning, filler / reasoning if reasoning else float("nan")]


def ratios_table(by_arm: dict[str, dict], notes: list[str]) -> Table:
    rows = []
    for name, of_arm in by_arm.items():
        filler, early = of_arm["filler over reasoning"], of_arm["early over late"]
        rows.append([name, len(filler), *over_seeds(filler), *over_seeds(early)])
    finding = ""
    if rows:
        ratios = "; ".join(f"{row[0]} {row[2]:.2f} and {row[4]:.2f}" for row in rows)
        finding = f"Filler over reasoning, and first fifth over last: {ratios}."
    formats = {"arm": "", "runs": "d", "filler/reasoning": ".2f", "95%": ".2f", "early/late": ".2f",
               "95% of it": ".2f"}
    return Table("credit over seeds",
                 "Filler over reasoning and early over late, abs(A) w s, over the seeds of an arm",
                 by_row(formats, rows), finding,
                 ["filler and reasoning by the regex of an earlier experiment; intervals by "
                  "Student's t over seeds", *notes],
                 {"filler/reasoning": "filler over reasoning", "95%": "95% interval of it",
                  "early/late": "first fifth over last fifth", "95% of it": "95% interval of that"})
