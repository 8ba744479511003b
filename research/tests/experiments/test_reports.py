"""Reports from runs made by hand, with numbers worked out by hand."""
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import credit_columns, evaluation, write_log

from analysis.runs import read_run
from analysis.statistics import holm, student_quantile
from engine.errors import UserError
from research.experiments import leaderboard, report
from engine.tokens import ANSWER, NUMBER, OPERATOR, THINK
from research.experiments.experiments import EXPERIMENTS, LEADERBOARD, Experiment
from research.experiments.finished import Study, late_success, read_study, values_of
from research.experiments.plan import plan_runs
from research.experiments.report import report_on, write_report

ITEMS = 4  # held-out problems
CONTROL, RATES = EXPERIMENTS["control"], EXPERIMENTS["finals_rates"]


def table(findings, name):
    """The rows of a table by their first cell, later ones in the place of earlier ones."""
    [found] = [table for table in findings.tables if table.name == name]
    return {row[0]: dict(zip(found.columns, row)) for row in found.rows}


def run_of(folder, training, held_out, seed=0, steps=None, config=(), **more):
    """A finished run: training success by step, held-out answers by evaluation."""
    lines = [{"step": step, "success": success, "entropy": 0.5, "seconds": 2.0,
              "trained_tokens": 10, "tokens": 12, "extra_tokens": 0, "processor_seconds": 1.0,
              "gradient_norm": step / 2, **more}
             for step, success in enumerate(training, 1)]
    at = np.linspace(0, len(lines), len(held_out)).round().astype(int).tolist()
    evaluations = []
    for step, answers in zip(at, held_out):
        evaluations += [evaluation(step, answers), evaluation(step, answers, "greedy")]
    config = {"seed": seed, "steps": len(lines), "eval_every": 0, "questions": 2, "answers": 2,
              **dict(config)}
    steps = {1: credit_columns([2], [0])} if steps is None else steps
    return read_run(write_log(folder, steps, config, lines, evaluations))


def solving(count):
    return [1] * count + [0] * (ITEMS - count)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """What probes have measured in the project's folder is not looked at."""
    monkeypatch.chdir(tmp_path)


def study_of(experiment, folder, runs, seeds=1):
    """Every run is planned, and these are finished."""
    experiment = replace(experiment, arms=dict.fromkeys({**experiment.arms, **runs}, ""))
    return Study(experiment, plan_runs(experiment, str(folder / "runs"), seeds), runs)


# the report of every experiment

@pytest.fixture
def control(tmp_path):
    """Two seeds: measured solves 1 of 4 problems more at the end than plain, and as many in the
    middle; it sampled 30 tokens for each 10 that were trained on, and scored 6 answers beside 4."""
    runs = {"none": {}, "measured": {}}
    for seed in (0, 1):
        curve = [solving(1), solving(2), solving(3 - seed)]
        runs["none"][seed] = run_of(tmp_path / f"none{seed}", [0.5] * 20, curve, seed)
        curve = [solving(1), solving(2), solving(4 - seed)]
        runs["measured"][seed] = run_of(tmp_path / f"measured{seed}", [0.5] * 20, curve, seed,
                                        extra_tokens=30, extra_answers=6)
    runs["shuffled"] = {3: run_of(tmp_path / "shuffled", [0.5] * 20, [solving(1)] * 3, 3)}
    return study_of(CONTROL, tmp_path, runs)


def test_success_differences_and_cost(control, tmp_path):
    """Ends 3/4 and 2/4 of plain GRPO: mean 5/8, a quarter apart, so an error of 1/8. Norms of step
    n: n / 2, up to 20 steps."""
    findings = report_on(control, tmp_path)
    success, cost = table(findings, "success"), table(findings, "cost")
    assert findings.values["none"][1] == {
        "steps": [0, 10, 20], "success": [0.25, 0.5, 0.5], "seconds": [0, 10, 20],
        "tokens": [0, 120, 240], "rewards": [0, 40, 80]}
    plain = success["none"]
    assert [plain[when] for when in ("start", "middle", "end")] == [0.25, 0.5, 0.625]
    reach = student_quantile(0.975, 1) / 8
    assert plain["ends"] == (0.5, 0.75) and 0.625 + reach > 1
    assert plain["95%"] == (0, 1)  # a share is not above 1
    assert success["shuffled"]["95%"] is None
    [differences] = [found for found in findings.tables if found.name == "differences"]
    [row] = differences.rows  # shuffled has no seed in common
    assert (row[:3], row[4]) == (("measured", 2, 0.0), 0.25)
    assert cost["measured"]["beside"] == 3 and cost["none"]["beside"] == 0
    assert cost["none"]["tokens"] == 240 and cost["measured"]["tokens"] == 840
    assert cost["none"]["seconds"] == 20 and cost["none"]["rewards"] == 20 * 4
    assert cost["measured"]["rewards"] == 20 * (4 + 6)
    assert cost["none"]["norm"] == pytest.approx(5.25) and cost["none"]["largest"] == 10
    assert cost["none"]["first"] == pytest.approx(2.75)
    assert cost["none"]["last"] == pytest.approx(7.75)
    assert (tmp_path / "success.png").exists()


def test_each_arm_is_compared_at_the_most_that_it_and_plain_grpo_have_paid(tmp_path, monkeypatch):
    """The short arm ends after 10 and 12 of 20 steps, with 3 and 4 of 4 solved: after 10 plain GRPO
    is half way from 1/4, or 2/4, to 1. Of pairs that were there before only the time is known."""
    tested = []
    monkeypatch.setattr(report, "holm", lambda p: tested.append(len(p)) or holm(p))

    def run(name, steps, end, seed, **settings):
        curve, folder = [solving(1 + seed), solving(end)], tmp_path / f"{name}{seed}"
        return run_of(folder, [0.5] * steps, curve, seed, config=settings)

    runs = {"none": {seed: run("none", 20, 4, seed) for seed in (0, 1)},
            "short": {seed: run("short", 10 + 2 * seed, 3 + seed, seed) for seed in (0, 1)},
            "offline": {seed: run("offline", 40, 3, seed, pairs="p.jsonl") for seed in (0, 1)}}
    experiment = replace(CONTROL, arms={"none": ""})
    findings = report_on(study_of(experiment, tmp_path, runs), tmp_path)
    [found] = [found for found in findings.tables if found.name == "versus"]
    assert [row[:3] for row in found.rows] == [
        ("short", "processor seconds", 10), ("short", "sampled tokens", 120),
        ("short", "scored answers", 40), ("offline", "processor seconds", 20)]
    reached = (0.75 + 0.5 + 0.5 * 10 / 12) / 2
    assert all(row[3:6] == pytest.approx((reached, 0.6875, reached - 0.6875))
               for row in found.rows[:3])
    assert len(found.rows) in tested and {row[-1] for row in found.rows} == {"too few seeds"}
    assert "rewards" not in findings.values["offline"][0]


def test_a_verdict_counts_all_arms_and_needs_three_seeds(tmp_path, monkeypatch):
    """Of 50 problems plain GRPO and `same` solve 40, the other two 1; `alone` has one seed."""
    tested = []
    monkeypatch.setattr(report, "holm",
                        lambda p: tested.append(np.isfinite(p).sum()) or holm(p))

    def run(name, solved, seed):
        curve = [[0] * 50, [1] * solved + [0] * (50 - solved)]
        return run_of(tmp_path / f"{name}{seed}", [0.5], curve, seed)

    runs = {name: {seed: run(name, solved, seed) for seed in seeds} for name, solved, seeds in (
        ("none", 40, range(4)), ("lost", 1, range(4)), ("same", 40, range(4)), ("alone", 1, [0]))}
    findings = report_on(study_of(replace(CONTROL, arms={"none": ""}), tmp_path, runs), tmp_path)
    verdicts = {arm: row["verdict"] for arm, row in table(findings, "differences").items()}
    assert verdicts["lost"] == "behind" and verdicts["alone"] == "too few seeds"
    assert verdicts["same"] != "ahead" and tested[0] == 2
    [differences] = [found for found in findings.tables if found.name == "differences"]
    assert differences.finding == "Ahead of plain GRPO: no arm.\nBehind it: lost."


def test_an_arm_is_compared_with_plain_grpo_of_its_own_cell(tmp_path):
    """measured-4x8 is a quarter ahead of none-4x8, and half ahead of the first arm."""
    assert RATES.plain_of("gae-trunk-5e-4") == "none-5e-4"
    solved = {"none-4x8-1e-4": 1, "none-4x8-6e-4": 2, "measured-4x8-6e-4": 3}
    runs = {name: {0: run_of(tmp_path / name, [0.5], [solving(0), solving(count)])}
            for name, count in solved.items()}
    findings = report_on(study_of(replace(CONTROL, arms={}), tmp_path, runs), tmp_path)
    rows = table(findings, "differences")
    assert list(rows) == ["measured-4x8-6e-4"] and rows["measured-4x8-6e-4"]["end"] == 0.25
    assert LEADERBOARD.plain_of("gae-trunk") == "none"


def test_where_the_gradient_lay(tmp_path):
    """Three tokens of the same size s: one with weight 3, one with 1, one without an advantage."""
    columns = credit_columns(
        [3], [0], log_prob=np.array([-9.0, -9, -9]), collision=np.zeros(3),
        weight=np.array([3.0, 1, 5]), advantage=np.array([-1.0, 1, 0]),
        section=np.array([THINK, ANSWER, ANSWER]), kind=np.array([NUMBER, OPERATOR, OPERATOR]))
    runs = {"none": {0: run_of(tmp_path / "run", [0.5], [solving(2)], steps={1: columns})}}
    row = table(report_on(study_of(CONTROL, tmp_path, runs), tmp_path), "credit")["none"]
    assert row["think"] == row["number"] == pytest.approx(0.75)
    assert row["answer"] == row["operator"] == pytest.approx(0.25) and row["word"] == 0


# the leaderboard

def board_of(folder, successes):
    """Arms with these numbers of solved problems at the end, by seed."""
    runs = {}
    for arm, counts in filter(lambda item: item[1], successes.items()):
        runs[arm] = {seed: run_of(folder / f"{arm}{seed}", [0.5] * 12, [solving(count)], seed)
                     for seed, count in enumerate(counts)}
    return study_of(replace(LEADERBOARD, arms=dict.fromkeys(successes)), folder, runs)


def test_the_board_is_sorted_and_compares_pairs_of_seeds(tmp_path, monkeypatch):
    """Plain GRPO solves 2, 2, 2 and, alone, 3 of 4; entropy 1, 2, 4 on the same seeds: minus 1/4, 0
    and 1/2, in the mean 1/12 with variance 7/48 and error^2 7/144. Holm counts the candidates:
    entropy and rloo."""
    counted = []
    monkeypatch.setattr(leaderboard, "holm", lambda p: counted.append(len(p)) or holm(p))
    findings = report_on(board_of(tmp_path, {
        "none": [2, 2, 2, 3], "measured": [4, 4, 4, 4], "shuffled": [0, 0, 0, 1],
        "entropy": [1, 2, 4], "entropy-placebo": [2, 3, 2], "rloo": [2, 3]}), tmp_path)
    board = table(findings, "board")
    assert list(board)[:2] == ["measured", "rloo"] and list(board)[-1] == "shuffled"
    row, reach = board["entropy"], student_quantile(0.975, 2) * math.sqrt(7 / 144)
    assert row["ahead"] == pytest.approx(1 / 12) and row["placebo"] == pytest.approx(0)
    assert row["95%"] == pytest.approx((1 / 12 - reach, 1 / 12 + reach))
    assert board["none"]["ahead"] is None and board["none"]["verdict"] == "" and set(counted) == {2}
    verdicts = {arm: board[arm]["verdict"] for arm in ("measured", "entropy", "shuffled", "rloo")}
    assert verdicts == {"measured": "ahead", "entropy": "open", "shuffled": "behind",
                        "rloo": "too few seeds"}
    said = findings.tables[0].finding
    assert said.startswith("Ahead of plain GRPO: no arm.\nBehind it: no arm.\n")  # of candidates
    assert "Each control is where it should be: measured ahead, shuffled behind." in said
    assert (tmp_path / "board.png").exists()


def test_how_likely_half_the_headroom_is_seen(tmp_path):
    """measured leads by a half. A candidate whose differences are 0 and 1/4 has an error of 1/8:
    a lead of 1/4 is two errors, which t of one degree of freedom sees in 13 of 100 experiments."""
    board = table(report_on(board_of(tmp_path, {
        "none": [2, 2], "measured": [4, 4], "entropy": [2, 3]}), tmp_path), "board")
    assert board["entropy"]["half"] == pytest.approx(0.126, abs=0.005)
    assert board["measured"]["half"] is None and board["none"]["half"] is None


def test_the_evaluations_after_the_middle_count(tmp_path):
    """Of those at 0, 5, 10, 15 and 20 the last two."""
    curve = [solving(count) for count in (4, 4, 4, 1, 2)]
    assert late_success(values_of(run_of(tmp_path / "run", [0.5] * 20, curve))) == 0.375


def test_pairs_that_an_experiment_holds_against_each_other():
    """A lead of 10, 12 and 14 points: Student's t over three seeds; late success is the end here."""
    curves = {arm: {seed: {"steps": [0, 2], "success": [0.0, success]}
                    for seed, success in enumerate(ends)}
              for arm, ends in {"a": (0.3, 0.42, 0.54), "b": (0.2, 0.3, 0.4)}.items()}
    experiment = replace(CONTROL, pairs=(("a", "b"), ("a", "not made")))
    [found] = report.pairs_table(experiment, curves)
    [(arm, other, lead, (low, high), verdict)] = found.rows
    assert (arm, other, verdict) == ("a", "b", "ahead") and lead == pytest.approx(0.12)
    assert high - lead == pytest.approx(4.3027 * 0.02 / 3 ** 0.5, rel=1e-3)
    assert report.pairs_table(CONTROL, curves) == []


def test_without_its_controls_a_board_is_not_to_be_trusted(tmp_path):
    study = board_of(tmp_path, {"none": [2, 3], "measured": [2, 3], "entropy": [3, 2], "span": [0],
                                "shuffled": []})
    board = report_on(study, tmp_path).tables[0]
    assert "measured and shuffled should be told apart" in board.finding
    assert dict(zip(*(board.columns[key][1] for key in ("arm", "verdict"))))["span"] \
        == "too few seeds"
    study.runs.pop("none")
    with pytest.raises(UserError, match="no run of none is finished yet"):
        report_on(study, tmp_path)


# what is finished, and what is not

def test_what_a_run_printed_at_its_beginning_and_its_end(tmp_path):
    """Under the name that the run has when nobody says --out."""
    [run] = plan_runs(Experiment("one", "", "", {"none": ""}, 1), str(tmp_path), 1)
    assert report.transcript_table(run) == []
    run.log.parent.mkdir(parents=True)
    first, last = "   1/3    0.319    22.3%", "   3/3    0.439    34.0%"
    run.log.write_text(f"a model; writing to {run.folder}\n  held-out  23.1%\n{first}\n"
                       f"   2/3    0\n{last}\n  held-out  48.9%\ndone. Everything is in {run.folder}\n")
    [found] = report.transcript_table(run)
    assert [line for line, in found.rows] == [
        "  held-out  23.1%", first, " ...", last, "  held-out  48.9%",
        "done. Everything is in runs/none-grpo-s0"]


def test_a_report_is_written_again_and_names_what_is_missing(tmp_path, learner, capsys):
    """One run is finished, one not begun, and of one a line is damaged."""
    common = f"--model {learner} --questions 2 --answers 2 --steps 2 --eval_every 0"
    experiment = Experiment("small", "Is it so?", common, {"none": "", "rloo": ""}, 2)
    planned = plan_runs(experiment, "runs", 2)
    with pytest.raises(UserError, match="small is finished. Not yet: none-s0 .0 of 2 steps"):
        read_study(experiment, planned)
    for run in (planned[0], planned[3]):
        config = {**run.settings.to_json(), "checkpoint_every": 0, "git_commit": "a" * 40}
        run_of(run.folder, [0.5, 0.5], [solving(1), solving(3)], run.seed, config=config)
    damaged = planned[3].folder / "evaluations.jsonl"
    damaged.write_text(damaged.read_text().replace('"success": 0.75', '"success": "much"'))
    for _ in range(2):
        failed = write_report(experiment, planned, "python -m research small")
    assert list(failed) == ["rloo-s1"] and "its success is" in failed["rloo-s1"]
    printed = capsys.readouterr().out
    assert "1 of 4 runs are finished." in printed and "Failed: rloo-s1: " in printed
    assert "Not yet: rloo-s0 (0 of 2 steps), none-s1 (0 of 2 steps)." in printed
    numbers = json.loads((tmp_path / "results/study-small/numbers.json").read_text())
    assert numbers["settings"]["made_by"] == [
        {"git_commit": "a" * 40, "versions": None, "runs": ["none-s0"]}]
    assert numbers["measured"] == "study-small" and numbers["tables"][0]["rows"][0]["end"] == 0.75
    assert "Is it so?" in (tmp_path / "results/study-small/report.html").read_text()
