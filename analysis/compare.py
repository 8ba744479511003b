"""The tables of several runs: success, differences, stability and cost, where the gradient lies."""
import numpy as np

from analysis.arms import Comparison
from analysis.differences import MEASURES, differences
from analysis.runs import evaluations
from analysis.sizes import end_of, read_tokens
from analysis.statistics import mean_over
from analysis.sums import PARTITIONS
from analysis.tables import Table, by_row
from analysis.vocabulary import Vocabulary
from engine.tokens import KINDS, SECTIONS, load_tokenizer

PUBLISHED_ARMS = (
    "published (Qwen2.5-0.5B, another model, one seed, 128 problems): plain GRPO 15%, "
    "outcome_conditional 12% with discounts of 0.5 and 0.75, inverse_logprob_as_published 0% at "
    "step 60; filler over reasoning 1.31, and 1.41 with 0.75, in the old unit. 12% against 15% of "
    "128 is z = 0.74")
LIKE_PUBLISHED = {"outcome_conditional", "inverse_logprob_as_published"}


def chapters_of(comparison: Comparison, status=lambda text: None) -> dict[str, list[Table]]:
    """The tables by what they are about; the first chapter decides, the others explore."""
    measured = []
    if len(comparison.arms) > 1:
        measured = [differences(comparison, measure) for measure in MEASURES]
    return {"Which arm is better": [arms_table(comparison), *measured[:1]],
            "Learning speed": measured[1:],
            "Stability and cost": [stability(comparison)],
            "Where the gradient went": credit_tables(comparison, status)}


def arms_table(comparison: Comparison) -> Table:
    rows = [arm_row(comparison, name) for name in comparison.arms]
    note = ("seeds: how many of them are finished, of which the row is made; 95% over seeds: "
            "Student's t")
    formats = {"arm": "", "seeds": "", "sampled": ".1%", "95% over seeds": ".1%", "greedy": ".1%",
               "format": ".2f", "finished": ".0%", "length": ".0f"}
    return Table("arms", "The arms", by_row(formats, rows), "", [note],
                 {"sampled": "held-out success, sampled",
                  "95% over seeds": "95% interval over seeds", "greedy": "success, greedy",
                  "length": "tokens an answer"})


def arm_row(comparison: Comparison, name: str) -> list:
    arm, done = comparison.arms[name], comparison.seeds(name)
    seeds = f"{len(done)}"
    if len(arm) > len(done):
        seeds += f" ({len(arm) - len(done)} still going)"
    final, greedy = at_the_end(done.values(), "sampled"), at_the_end(done.values(), "greedy")
    success, interval = over_seeds([line["success"] for line in final])
    interval = interval and tuple(np.clip(interval, 0, 1).tolist())  # of a share
    means = [mean_over([line[key] for line in lines]).value for lines, key in (
        (greedy, "success"), (final, "format_mean"), (final, "finished_mean"),
        (final, "length_mean"))]
    return [name, seeds, success, interval, *means]


def at_the_end(runs, mode: str) -> list[dict]:
    """Their evaluations after the last step."""
    return [line for run in runs for line in evaluations(run, mode)
            if line["step"] == run["config"]["steps"]]


def over_seeds(values) -> tuple[float, tuple[float, float] | None]:
    """Mean, and its interval by Student's t; none where there is no spread to make it from."""
    found = mean_over(values)
    return found.value, found.interval if found.high > found.low else None


def steadiness(run: dict) -> list[float] | None:
    """How the gradient norm, the entropy and the success of a run moved; seconds a step."""
    lines = run["metrics"]
    norm = np.array([line["gradient_norm"] for line in lines if line["gradient_norm"]])
    entropy = [line["entropy"] for line in lines if line["entropy"] is not None]
    success = [line["success"] for line in lines]
    if not len(norm) or not entropy:
        return None
    best = max(np.mean(success[i:i + 5]) for i in range(max(1, len(success) - 4)))
    seconds = [np.nan if line["seconds"] is None else line["seconds"] for line in lines]
    return [norm[:10].mean(), norm[-10:].mean(), norm.max() / np.median(norm),
            np.mean(entropy[:10]), np.mean(entropy[-10:]), best, np.mean(success[-5:]),
            np.mean(seconds)]


def stability(comparison: Comparison) -> Table:
    rows = []
    for name in comparison.arms:
        measured = [steadiness(run) for run in comparison.shown(name)]
        measured = [values for values in measured if values]
        if measured:
            rows.append([name, len(measured), *np.mean(measured, 0).tolist()])
    formats = {"arm": "", "runs": "d", "norm first": ".3f", "last": ".3f", "peak": ".1f",
               "entropy": ".2f", "to": ".2f", "best": ".0%", "end": ".0%", "seconds": ".1f"}
    return Table("stability",
                 "Gradient norm before clipping, entropy, success in training batches, and cost",
                 by_row(formats, rows), "",
                 ["means over runs; first and last: of ten steps; success: the best five steps in "
                  "a row, and the last five"],
                 {"norm first": "gradient norm, first", "last": "gradient norm, last",
                  "peak": "its largest over its median", "entropy": "entropy, first",
                  "to": "entropy, last", "best": "best success", "end": "last success",
                  "seconds": "seconds a step"})


def credit_tables(comparison: Comparison, status=lambda text: None) -> list[Table]:
    """Where the gradient lies in each arm; and ratios of mean sizes with intervals over seeds,
    which those of one run are not."""
    by_arm = {}
    for name in comparison.arms:
        credit = [credit_of(run, status) for run in comparison.shown(name) if run["steps"]]
        if credit:
            by_arm[name] = [np.array(values) for values in zip(*credit)]
    shares = {name: shares.mean(0) for name, (shares, _) in by_arm.items()}
    ratios = [[name, len(of_runs), *(cell for column in of_runs.T for cell in over_seeds(column))]
              for name, (_, of_runs) in by_arm.items()]
    weightings = {arm[0]["config"]["mitigation"] for arm in comparison.arms.values()}
    notes = [PUBLISHED_ARMS] * bool(weightings & LIKE_PUBLISHED)
    return [shares_table(shares), ratios_table(ratios, notes)]


def credit_of(run: dict, status) -> tuple[list[float], list[float]]:
    """Of the gradient, weights included: the share of each kind, of think and answer; and three
    ratios of mean sizes: filler over reasoning, early over late, and the first in the old unit."""
    vocabulary = Vocabulary(load_tokenizer(run["folder"]))
    sums = {name: np.zeros((3, len(PARTITIONS[name])))  # tokens, sizes in the old unit, gradient
            for name in ("kind", "section", "class", "ends")}
    for step in run["steps"]:
        status(f"{run['folder'].name}: step {step} of {run['steps'][-1]}")
        tokens = read_tokens(run["folder"], step)
        old, gradient = np.abs(tokens["contribution"]), np.abs(tokens["gradient"])
        cells = {"kind": tokens["kind"], "section": tokens["section"],
                 "class": vocabulary.classes(tokens["token_id"]), "ends": end_of(tokens)}
        for name, total in sums.items():
            count = total.shape[1]
            total += [np.bincount(cells[name], size, count) for size in (None, old, gradient)]
    with np.errstate(invalid="ignore", divide="ignore"):
        kind, section = (sums[name][2] / sums[name][2].sum() for name in ("kind", "section"))
        old, new = sums["class"][1:] / sums["class"][0]
        early, _, late = sums["ends"][2] / sums["ends"][0]
        ratios = [new[0] / new[1], early / late, old[0] / old[1]]
    return [*kind, *section[1:]], ratios


def shares_table(shares: dict[str, np.ndarray]) -> Table:
    formats = {"arm": "", **dict.fromkeys((*KINDS, *SECTIONS[1:]), ".0%")}
    rows = [[name, *share.tolist()] for name, share in shares.items()]
    return Table("credit by class", "Share of the gradient abs(A) w s by kind and section",
                 by_row(formats, rows), "",
                 ["means over the runs of an arm; policies that learned other things write other "
                  "texts, so this is not the weighting alone"])


def ratios_table(rows: list[list], notes: list[str]) -> Table:
    formats = {"arm": "", "runs": "d", "filler/reasoning": ".2f", "95%": ".2f", "early/late": ".2f",
               "95% of it": ".2f", "old filler/reasoning": ".2f", "95% of old": ".2f"}
    interval = "95% interval"
    return Table("credit over seeds",
                 "Filler over reasoning and early over late, abs(A) w s, over the seeds of an arm",
                 by_row(formats, rows), "",
                 ["filler and reasoning by the regex of an earlier experiment, whose unit is "
                  "abs(A lp); intervals by Student's t over seeds", *notes],
                 {"filler/reasoning": "filler over reasoning", "95%": interval,
                  "early/late": "first fifth over last fifth", "95% of it": interval,
                  "old filler/reasoning": "filler over reasoning, abs(A lp)",
                  "95% of old": interval})
