"""Does a gradient's direction before training tell who loses? Tested on methods that had no runs.

    python -m research later --dry_run        # list the runs that are missing
    python -m research later --seeds 6        # make the runs of the first six seeds
    python -m research later --report_only    # print what the finished runs show

Of seven methods on a real model those lost most whose mean gradient pointed away from plain GRPO's
(noise.md). That was looked at afterwards. So here it is tested on methods that no leaderboard has
trained. First `python -m research signal` measured the cosine and the noise of each on the
untrained tiny model, then the predictions were written (results/later/protocol.txt), and then the
runs were made:

    runs       as on the leaderboard (board.py), 60 steps of 8 problems x 8 answers, but every arm
               has plain GRPO's learning rate
    gain       mean success in training minus that of plain GRPO with the same seed
    direction  a gain that is predicted from the cosine alone, by the line through the cosines and
               the gains of the leaderboard's 26 methods
    noise      a gain that is predicted from the noise, as that of a larger or smaller batch, read
               from the leaderboard's curve of twelve seeds. The factor of the batch is multiplied
               by the squared cosine

Four further methods (opo, maxpo, quantile_baseline, oracle) were measured and trained after that
test, with predictions of their own. They have rows, but are not part of it.

The runs are made seed by seed, so that all arms have the same seeds whenever it is stopped, and the
published ones are used again. Whether an arm became less sure is told by the entropy of its last
steps alone.
"""
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from analysis.experiment import Experiment, Key
from analysis.gains import Gain, gain_table, gains, mean_success
from analysis.runs import Run
from analysis.statistics import Estimate, mean_over
from analysis.sureness import last_entropy
from analysis.tables import WITH_INTERVAL, Row, Table, by_row
from engine.errors import UserError
from harness.flags import Flag
from harness.settings import METHODS
from research.boards.arms import PLAIN, SCALE
from research.boards.leaderboard import (AFRESH, Stages, by_run_name, flags_of_runs, named_arms,
                                         pairs_table, planner, published_runs, run_name,
                                         short_form, write_report)
from research.boards.protocol import COMMON as COMMON_OF_BOARD
from research.boards.protocol import REPORTED, STEPS
from research.probes.common import Findings, rank_correlation
from research.probes.law_board import gain_of_batch
from research.publish.results import RESULTS, read_result, table_rows

SIGNALS = ("signal_later", "signal_later_2", "signal_later_3")  # before training, as published
TESTED = (  # each as it is typed for `signal --only`
    "gdpo", "maxrl", "negative_only", "optimal_token_baseline", "rlcsd", "rlsd", "sc_grpo",
    "optimal_token_baseline --zero_tail no", "none --loss_norm sequence",
    "dr_grpo --loss_norm constant", "none --loss dpo",
    "causal_ablation --ablation delete", "gae --process_reward 0.2", "by_kind --word_weight 0",
    "none --entropy_bonus 0.1")
ARMS = (*TESTED, "opo", "maxpo", "quantile_baseline", "oracle")  # the last four came afterwards
RATE = "2.5e-4"
COMMON = f"{COMMON_OF_BOARD} --learning_rate {RATE}"
AT_ONE, PER_COSINE = -0.008, 0.086  # the line: gain = AT_ONE - PER_COSINE (1 - cosine)
DRAWS = 10_000
FIRST = 6  # seeds that were reported before the others were made
FLAGS = {
    "seeds": Flag(len(REPORTED), f"number of seeds, from {REPORTED[0]} on", least=2, most=1000),
    "arms": Flag(",".join(ARMS), "the arms, separated by commas"),
    **flags_of_runs("runs/later"), **AFRESH}


def plan(args: SimpleNamespace) -> tuple[Experiment, Stages]:
    known = {} if args.afresh else published()
    plan_run = planner(Path(args.runs), flags_of_arms(), COMMON.split(), STEPS)
    return Experiment(plan_run, known=known), [("later", keys_of(args))]


def flags_of_arms() -> dict[str, str]:
    return {arm: " ".join(flags_of_arm(arm)) for arm in (PLAIN, *ARMS)}


def published() -> dict[Key, Run]:
    """The runs of the published result, with the entropy of their last steps at every step."""
    found = published_runs("later", {"common": COMMON}, flags_of_arms())
    if found:
        stored = read_result(RESULTS / "later.json")["values"]["runs"]
        for key, run in found.items():
            for line in run["metrics"]:
                line["entropy"] = stored[run_name(*key)]["entropy"]
    return found


def keys_of(args: SimpleNamespace) -> list[Key]:
    """The runs, seed by seed."""
    seeds = range(REPORTED[0], REPORTED[0] + args.seeds)
    arms = (PLAIN, *named_arms(args.arms, ARMS))
    return [(arm, seed) for seed in seeds for arm in arms]


def flags_of_arm(arm: str) -> list[str]:
    """The flags of train.py: `optimal_token_baseline --zero_tail no` is the --advantage of this
    name with its own flag."""
    name, *own = arm.split()
    axis = next(axis for axis, choices in METHODS.items() if name in choices)
    return [f"--{axis}", name, *own]


def report(args: SimpleNamespace, experiment: Experiment, command: str) -> None:
    arms = experiment.arms(keys_of(args))
    if len(arms.get(PLAIN, {})) < 2 or len(arms) < 4:
        raise UserError(f"{args.runs} does not yet have two finished seeds of plain GRPO ({PLAIN}) "
                        "and a run of three other arms")
    family = {arm: (arms[arm], arms[PLAIN]) for arm in ARMS if arm in arms}
    found = gains(family)
    before = {arm: row for arm, row in measured_before().items() if arm in found}
    tested = {arm: row for arm, row in before.items() if arm in TESTED}
    order = sorted(found, key=lambda arm: -found[arm].estimate.value)
    tables = [gain_table("gains", "Mean success in training: the gain of each arm over plain GRPO",
                         {arm: found[arm] for arm in order}),
              predictions_table(before, found), rules_table(tested, found),
              looks_table(tested, family),
              pairs_table(family, "The gain in training of every pair, in points"),
              entropy_table(family)]
    made = by_run_name(arms)
    settings = {"common": COMMON, "arms": flags_of_arms()}
    findings = Findings("Does a gradient's direction before training tell who loses?",
                        [f"{len(made)} runs are finished."], tables, values_of(made))
    write_report("later", "later", findings, settings, made, command)


def measured_before() -> dict[str, dict]:
    """What `signal` found of each method before training; columns by their bare names."""
    rows = {}
    for name in SIGNALS:
        for row in table_rows(name, "signal"):
            if row["method"] in ARMS:
                rows[row["method"]] = {column.removesuffix(WITH_INTERVAL): cell
                                       for column, cell in row.items()}
    return rows


def values_of(made: dict[str, Run]) -> dict:
    """Every run in short, and the entropy of its last steps."""
    return {"runs": {name: {"in_short": short_form(run),
                            "entropy": round(last_entropy(run), 5)} for name, run in made.items()}}


def entropy_table(family: Mapping[str, tuple[Mapping[int, Run], Mapping[int, Run]]]) -> Table:
    """How sure the arms are at the end, beside plain GRPO with the same seeds."""
    rows: list[Row] = []
    for arm, (mine, theirs) in family.items():
        seeds = sorted(mine.keys() & theirs.keys())
        differences = [last_entropy(mine[seed]) - last_entropy(theirs[seed]) for seed in seeds]
        rows.append([arm, mean_over([last_entropy(mine[seed]) for seed in seeds]).value,
                     mean_over(differences)])
    formats = {"arm": "", "entropy": ".3f", "difference": "+.3f"}
    return Table("entropy", "The mean entropy of the tokens of the last ten steps, in nats",
                 by_row(formats, rows), "", [],
                 {"entropy": "entropy", "difference": f"minus plain GRPO's{WITH_INTERVAL}"})


def by_direction(row: dict) -> float:
    return AT_ONE - PER_COSINE * (1 - row["cosine"]["value"])


def by_noise(row: dict) -> float:
    """The gain of a batch that is as noisy, of which only the part along plain GRPO's direction
    counts; nan if the cosine is not above 0."""
    gain_of = {one["arm"]: one["gain"]["value"] for one in table_rows("board", "board")}
    cosine = row["cosine"]["value"]
    if cosine <= 0:
        return float("nan")
    times = row["factor"]["value"] * min(1.0, cosine) ** 2
    return gain_of_batch(times, [0.0, *(gain_of[arm] for arm in SCALE)])


RULES = {"direction": by_direction, "noise": by_noise}


def predictions_table(before: dict[str, dict], found: dict[str, Gain]) -> Table:
    """A row for each method, the smallest cosine first."""
    rows: list[Row] = []
    for arm in sorted(before, key=lambda name: before[name]["cosine"]["value"]):
        row = before[arm]
        rows.append([arm, Estimate(**row["cosine"]), Estimate(**row["factor"]), by_direction(row),
                     by_noise(row), found[arm].estimate])
    formats = {"arm": "", "cosine": "+.2f", "factor": ".2f", "direction": "points",
               "noise": "points", "gain": "points"}
    return Table("predicted", "What was known before training, and the gain",
                 by_row(formats, rows), "", ["Gains are in points of mean success in training"],
                 {"cosine": f"cosine with plain GRPO{WITH_INTERVAL}",
                  "factor": f"as a batch so many times as large{WITH_INTERVAL}",
                  "direction": "predicted by its direction",
                  "noise": "predicted by noise and direction", "gain": f"gain{WITH_INTERVAL}"})


def rules_table(before: dict[str, dict], found: dict[str, Gain]) -> Table:
    """How well each number that was known before training orders the gains."""
    measured = np.array([found[arm].estimate.value for arm in before])
    known = {"cosine": [row["cosine"]["value"] for row in before.values()],
             "noise as that of a batch": [row["factor"]["value"] for row in before.values()],
             "noise and direction": [by_noise(row) for row in before.values()]}
    off = {"cosine": [by_direction(row) for row in before.values()],
           "noise and direction": known["noise and direction"]}
    rows: list[Row] = []
    for name, values in known.items():
        deviation = float(np.mean(np.abs(measured - off[name]))) if name in off else None
        rows.append([name, len(measured), rank_with_interval(np.array(values), measured),
                     p_of_rank(np.array(values), measured), deviation])
    rows.append(["no gain for any", len(measured), None, None, float(np.mean(np.abs(measured)))])
    formats = {"by": "", "methods": "d", "rank": "+.2f", "p": "p", "deviation": "size"}
    return Table("rules", "How well the gains were told before training", by_row(formats, rows), "",
                 [f"The interval is a bootstrap over the methods, p is of {DRAWS:,} permutations, "
                  "two-sided and not corrected. Mean deviation: the mean size of the difference "
                  "between predicted and measured gains, in points"],
                 {"by": "known before training", "rank": f"rank correlation with the gain"
                  f"{WITH_INTERVAL}", "deviation": "mean deviation, points"})


def looks_table(before: dict[str, dict],
                family: Mapping[str, tuple[Mapping[int, Run], Mapping[int, Run]]]) -> Table:
    """The same test in the seeds that were reported first alone, and in the later ones alone."""
    first = range(REPORTED[0], REPORTED[0] + FIRST)
    looks = {f"{first[0]} to {first[-1]}": True, f"{first[-1] + 1} and on": False}
    rows: list[Row] = []
    for name, is_first in looks.items():
        cosine, gain = [], []
        for arm, row in before.items():
            mine, theirs = family[arm]
            of_look = [mean_success(mine[seed]) - mean_success(theirs[seed])
                       for seed in mine.keys() & theirs.keys() if (seed in first) == is_first]
            if of_look:
                cosine.append(row["cosine"]["value"])
                gain.append(float(np.mean(of_look)))
        if len(gain) > 2:
            known, measured = np.array(cosine), np.array(gain)
            rows.append([name, len(gain), rank_with_interval(known, measured),
                         p_of_rank(known, measured)])
    formats = {"seeds": "", "methods": "d", "rank": "+.2f", "p": "p"}
    return Table("looks", "The cosine and the gain, in the first seeds and in the later ones",
                 by_row(formats, rows), "", [],
                 {"rank": f"rank correlation of cosine and gain{WITH_INTERVAL}"})


def rank_with_interval(one: np.ndarray, two: np.ndarray) -> Estimate:
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        rows = generator.integers(len(one), size=len(one))
        if np.ptp(one[rows]) and np.ptp(two[rows]):
            drawn.append(rank_correlation(one[rows], two[rows]))
    low, high = np.percentile(drawn, [2.5, 97.5]).tolist()
    return Estimate(rank_correlation(one, two), low, high)


def p_of_rank(one: np.ndarray, two: np.ndarray) -> float:
    """How often the ranks of shuffled gains agree as well."""
    generator = np.random.default_rng(0)
    seen = abs(rank_correlation(one, two))
    shuffled = [abs(rank_correlation(one, generator.permutation(two))) for _ in range(DRAWS)]
    return float((1 + np.sum(np.array(shuffled) >= seen - 1e-12)) / (1 + DRAWS))
