"""Reports from runs made by hand, with numbers worked out by hand."""
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, credit_columns, evaluation, write_log
from tokenizers import Tokenizer

from analysis.runs import read_run
from analysis.statistics import Estimate, student_quantile
from countdown_task import ANSWER, NUMBER, OPERATOR, THINK
from engine.errors import UserError
from research.experiments import (control, credit_shares, critics, forecast, leaderboard, ratios, regime,
                   subject, variants)
from research.experiments.experiments import CONTROL, LEADERBOARD, REGIME, SUBJECT, Experiment, cell
from research.experiments.finished import PROBED, Study, ahead, cells_of_arms, moving_mean, read_study
from research.experiments.plan import plan_runs
from research.experiments.report import write_report

ITEMS = 4  # held-out problems


def rows(table):
    return {row[0]: dict(zip(table.columns, row)) for row in table.rows}


def metric(step, success, **more):
    return {"step": step, "success": success, "entropy": 0.5, **more}


def run_of(folder, training, held_out, seed=0, steps=None, config=(), **more):
    """A finished run: training success by step, held-out answers by evaluation."""
    lines = [metric(step, success, **more) for step, success in enumerate(training, 1)]
    at = np.linspace(0, len(lines), len(held_out)).round().astype(int).tolist()
    evaluations = []
    for step, answers in zip(at, held_out):
        evaluations += [evaluation(step, answers), evaluation(step, answers, "greedy")]
    config = {"seed": seed, "steps": len(lines), "eval_every": 0, "questions": 2, "answers": 2,
              **dict(config)}
    return read_run(write_log(folder, steps or {}, config, lines, evaluations))


def solving(count):
    return [1] * count + [0] * (ITEMS - count)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """What probes have measured in the project's folder is not looked at."""
    monkeypatch.chdir(tmp_path)


def study_of(experiment, folder, runs, seeds=1):
    """Every run is planned, and these are finished."""
    planned = plan_runs(experiment, str(folder / "runs"), seeds)
    return Study(experiment, planned, folder, runs)


def write_probed(arm, numbers):
    """As python -m research probes does."""
    folder = PROBED / arm
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "numbers.json").write_text(json.dumps(numbers))
    return folder


# seconds, spread and the like

def write_seconds(folder, seconds):
    folder.mkdir(parents=True)
    text = "".join(json.dumps({"run": name, "seconds": value, "status": 0}) + "\n"
                   for name, value in seconds)
    (folder / "seconds.jsonl").write_text(text)


PROMPT = "<|im_start|>user\n 3 5 7 make 22<|im_end|>\n<|im_start|>assistant\n<think>"
FIRST = " first 5 * 3 = 15, 15 + 7 = 22 yes!</think>\n<answer> ( 5 * 3 ) + 7</answer><|im_end|>"
LATER = (" first 7 + 5 = 12 and 12 + 3 = 15 no. last 5 * 3 = 15, 15 + 7 = 22 yes!</think>\n"
         "<answer> ( 5 * 3 ) + 7</answer><|im_end|>")
OTHER = " first 7 + 5 = 12 and 12 + 3 = 15 no.</think>\n<answer> ( 5 * 3 ) + 7</answer><|im_end|>"
WRONG = " first 7 + 5 = 12 and 12 + 3 = 15 no.</think>\n<answer> ( 7 + 5 ) + 3</answer><|im_end|>"


def credit_of(texts, **known):
    """The columns of a step in which these answers were given to one problem."""
    encode = Tokenizer.from_file(str(ROOT / "models/tiny/tokenizer.json")).encode
    ids = [encode(text).ids for text in texts]
    prompt = encode(PROMPT).ids
    right = np.array([text is not WRONG for text in texts], float)
    return credit_columns([len(row) for row in ids], [0] * len(ids), token_id=np.concatenate(ids),
                          reward_answer=right, reward=right, prompt_ids=np.array(prompt),
                          prompt_start=np.array([0]), **known)


@pytest.fixture
def subject_study(tmp_path, monkeypatch):
    """Two seeds of 20 steps: final success 75% and 100%, both 25% at the start."""
    cosine = subject.known(0.5)
    monkeypatch.setattr(subject, "discount_cosine", lambda settings: cosine)
    start, end = credit_of([FIRST, WRONG, WRONG, WRONG]), credit_of([FIRST, FIRST, LATER, OTHER])
    steps = {step: start if step < 20 else end for step in range(1, 21)}
    training = [[0.2] * 8 + [0.4, 0.4] + [0.5] * 8 + [0.6, 0.8], [0.4] * 18 + [0.7, 0.7]]
    runs = {}
    for seed, final in ((0, 3), (1, 4)):
        folder = tmp_path / f"run{seed}"
        runs[seed] = run_of(folder, training[seed], [solving(1), solving(final)], seed, steps)
    planned = plan_runs(SUBJECT, str(tmp_path / "runs"), 2)
    for run in planned:
        run.settings.steps = 20
    write_seconds(tmp_path / "runs/subject",
                  [("none-s0", 100.0), ("none-s0", 20.0), ("none-s1", 140.0), ("none-s7", 9.0)])
    return Study(SUBJECT, planned, tmp_path, runs={"none": runs})


def test_promises_of_the_subject(subject_study):
    """Points: spread 25 / sqrt(2); gain (50 + 75) / 2; late (0.7 - 0.4 and 0.7 - 0.4) without any
    spread, so its interval is the value; seconds (120 + 140) / 2."""
    findings = subject.report(subject_study)
    table = rows(findings.tables[0])
    spread = table["spread of the final success"]
    assert spread["measured"] == pytest.approx(25 / math.sqrt(2)) and spread["verdict"] == "missed"
    gain = table["gain, end minus start"]
    assert gain["measured"] == pytest.approx(62.5) and gain["verdict"] == "kept"
    success = [table[f"success at the {when}, sampled"]["measured"] for when in ("start", "end")]
    assert success == pytest.approx([25, 87.5])
    reach = student_quantile(0.975, 1) * 12.5
    assert gain["95%"] == pytest.approx((62.5 - reach, 62.5 + reach))
    late = table["training, last tenth minus fifth tenth"]
    assert late["measured"] == pytest.approx(30) and late["verdict"] == "kept"
    cut = table["cut off at the end, worst seed"]
    assert cut["measured"] == pytest.approx(25) and cut["verdict"] == "missed"
    assert table["format at the end, worst seed"]["verdict"] == "missed"
    assert table["a whole run on one thread"]["measured"] == pytest.approx(130)
    assert table["cosine, thinking discounted by 0.5"]["measured"] == 0.5
    assert findings.tables[0].finding.startswith("2 of 5 promises are kept.")


def test_where_the_gain_comes_from(subject_study):
    """One of four answers is solved at the start, by its first try. At the end all are: two by the
    first, one by a later try, one by an expression that was not tried."""
    table = rows(subject.report(subject_study).tables[0])
    assert table["solved by the first try, start"]["measured"] == pytest.approx(25)
    assert table["solved by the first try, end"]["measured"] == pytest.approx(50)
    gains = [table[f"gain by {way}"]["measured"] for way in subject.HOW]
    assert gains == pytest.approx([25, 25, 25])


def test_with_one_seed_nothing_is_said_about_seeds(subject_study):
    subject_study.runs["none"].pop(1)
    table = rows(subject.report(subject_study).tables[0])
    for what in ("spread of the final success", "training, last tenth minus fifth tenth"):
        assert table[what]["verdict"] == ""
    assert table["gain, end minus start"]["verdict"] == "kept"  # 50 points


def test_the_transcript_is_of_the_first_run(subject_study):
    """Its first step and its last one with what stands around them; without a log there is none."""
    assert [table.name for table in subject.report(subject_study).tables] == ["promises"]
    log = subject_study.planned[0].log
    log.write_text("finished already\n")
    assert len(subject.report(subject_study).tables) == 1
    log.write_text("models/tiny: a model\n  held-out 23%\n    step  reward\n   1/30   0.3\n"
                   "   2/30   0.4\n    step  reward\n  30/30   0.5\n  held-out 49%\ndone.\n")
    _, printed = subject.report(subject_study).tables
    assert [row[0] for row in printed.rows] == [
        "  held-out 23%", "    step  reward", "   1/30   0.3", " ...", "  30/30   0.5",
        "  held-out 49%"]


def test_shares_of_the_squared_credit(tmp_path):
    """In " first 5 * 3 = 15, 15 + 7 = 22 good, that is 22." each operator decides 0.24, the first
    " 22" 0.16, the second 0.04, and a number of the answer 0.01: of 0.69."""
    tokenizer = Tokenizer.from_file(str(ROOT / "models/tiny/tokenizer.json"))
    said = FIRST.replace(" yes!", " good, that is 22.")
    ids = tokenizer.encode(said).ids
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in ids]
    end = texts.index("</")
    n = len(ids)
    decided, section, kind = np.zeros((3, n))
    section[:end], section[texts.index("answer") + 2:n - 4] = THINK, ANSWER
    for place, text in enumerate(texts):
        kind[place] = {"*": OPERATOR, "+": OPERATOR}.get(text.strip(), 0)
        if text.strip().isdigit():
            kind[place] = NUMBER
        if kind[place] == OPERATOR and place < end:
            decided[place] = 0.24
    decided[texts.index(" 22")], decided[texts.index(" is") + 1] = 0.16, 0.04
    decided[n - 5] = 0.01
    assert texts[n - 5] == " 7"
    known = dict(section=section, kind=kind, decided=decided)
    write_log(tmp_path / "one/run", {1: credit_of([said], **known)})
    one = write_probed("scoreboard-before", {"folders": ["one"]})
    shares = credit_shares.credit_shares(one)
    expected = {"operators": 0.48, "numbers": 0.16, "verdict words": 0.04, "answer tokens": 0.01}
    assert {name: share.value for name, share in shares.items()} == pytest.approx(
        {name: value / 0.69 for name, value in expected.items()})

    other = np.zeros(n)  # another seed, with 0.31 at the first operator and nothing else
    other[texts.index(" *")] = 0.31
    write_log(tmp_path / "other/run", {1: credit_of([said], **known | {"decided": other})})
    both = write_probed("scoreboard-before", {"folders": ["one", "other"]})
    shares = credit_shares.credit_shares(both)
    assert shares["operators"].value == pytest.approx(0.79)
    assert shares["numbers"].value == pytest.approx(0.16)


def test_a_discount_of_1_changes_no_gradient(lab, monkeypatch):
    monkeypatch.setattr(credit_shares, "GRADIENT_BATCHES", 1)
    cosines = []
    for discount in (1.0, 0.5, 0.0):
        monkeypatch.setattr(credit_shares, "DISCOUNT", discount)
        cosines.append(credit_shares.discount_cosine(replace(lab.settings, questions=4)).value)
    assert cosines[0] == pytest.approx(1, abs=1e-5) and cosines[0] >= cosines[1] > cosines[2]


# arms side by side

def test_arms_against_the_first_one(tmp_path):
    """Two seeds: measured solves 1 of 4 problems more at the end than plain, and as many in the
    middle; it sampled 30 tokens for each 10 that were trained on."""
    runs = {"none": {}, "measured": {}}
    for seed in (0, 1):
        curve = [solving(1), solving(2), solving(3 - seed)]
        runs["none"][seed] = run_of(tmp_path / f"none{seed}", [0.5] * 20, curve, seed)
        curve = [solving(1), solving(2), solving(4 - seed)]
        beside = {"extra_tokens": 30, "trained_tokens": 10}
        runs["measured"][seed] = run_of(tmp_path / f"measured{seed}", [0.5] * 20, curve, seed,
                                        **beside)
    runs["shuffled"] = {3: run_of(tmp_path / "shuffled", [0.5] * 20, [solving(1)] * 3, 3)}
    experiment = replace(CONTROL, arms={"none": "", "measured": "", "shuffled": ""})
    findings = control.report(study_of(experiment, tmp_path, runs))
    success, differences = findings.tables
    by_arm = rows(success)
    assert [by_arm["none"][when] for when in ("start", "middle", "end")] == [0.25, 0.5, 0.625]
    assert by_arm["measured"]["beside"] == pytest.approx(3)
    assert math.isnan(by_arm["none"]["beside"])
    assert [row[:4] for row in differences.rows] == [
        ("measured", "middle", 2, 0.0), ("measured", "end", 2, 0.25)]  # shuffled has no pair
    assert "At the end measured is +25.0 points from none" in differences.finding
    assert (tmp_path / "success.png").exists()


def test_pairs_are_of_the_same_seed(tmp_path):
    runs = {"none": {seed: run_of(tmp_path / f"n{seed}", [0.5], [solving(1)], seed)
                     for seed in (0, 1)},
            "other": {seed: run_of(tmp_path / f"o{seed}", [0.5], [solving(seed + 1)], seed)
                      for seed in (1, 2)}}
    study = study_of(replace(CONTROL, arms={"none": ""}), tmp_path, runs)
    seeds, estimate = ahead(study, "other", "none", -1)
    assert seeds == 1 and estimate.value == 0.25


def test_a_map_of_what_is_finished(tmp_path):
    """One cell has both arms: measured is a quarter ahead, plain solves half. Another has plain."""
    runs = {}
    for arm, batch, solved in (("none", (4, 8), 2), ("measured", (4, 8), 3), ("none", (8, 8), 1)):
        name = cell(arm, *batch, "2.5e-4")
        runs[name] = {0: run_of(tmp_path / name, [0.5], [solving(0), solving(solved)])}
    arms = {name: "" for name in REGIME.arms}
    findings = regime.report(study_of(replace(REGIME, arms=arms), tmp_path, runs))
    first, plain, cells = findings.tables
    shown = rows(first)
    assert shown["4x8"]["2.5e-4"].startswith("+25.0 (") and shown["4x8"]["1e-4"] == "-"
    assert shown["8x8"]["2.5e-4"] == "-"
    assert rows(plain)["4x8"]["2.5e-4"] == "50.0%" and rows(plain)["8x8"]["2.5e-4"] == "25.0%"
    [measured] = [row for row in cells.rows if row[4] is not None]
    assert measured[:5] == ("4x8", "2.5e-4", 1, 0.5, 0.25) and (tmp_path / "map.png").exists()


# the forecast

ONE_BATCH = {"none": 0.1, "entropy_weighted": 0.4, "rloo": 0.2, "span": 0.3, "gae": None}


def write_one_batch(time, of_arms):
    of_all = {"95%": [0.1, 0.2], "cosine": 0.5, "cosine 95%": [None, None]}
    table = {"name": "noise", "rows": [{"arm": arm, "one batch": value, **of_all}
                                       for arm, value in of_arms.items()]}
    write_probed(f"noise-{time}", {"tables": [table]})


def test_a_moving_mean_has_as_many_values_behind_each():
    assert moving_mean(np.array([1.0, 2, 3, 4]), 3) == pytest.approx([2, 3])
    assert not len(moving_mean(np.array([1.0, 2]), 3))


def test_what_one_batch_knows_and_answers_needed(tmp_path, monkeypatch):
    """4 answers a step. A success of 1 from step n on makes the mean of ten steps 0.5 at n + 4.
    The more one batch knows, the earlier: n = 30 (none), 10 (entropy_weighted), 20 (span); dr_grpo,
    which is a multiple of rloo, and rloo never get there."""
    monkeypatch.setattr(forecast, "RACE_TO", 0.5)
    begins = {"none": 30, "entropy_weighted": 10, "span": 20, "dr_grpo": 99, "rloo": 99, "gae": 5}
    solved = {"none": 2, "entropy_weighted": 4, "span": 3, "dr_grpo": 0, "rloo": 1, "gae": 4}
    runs = {}
    for arm, n in begins.items():
        training = [float(step >= n) for step in range(1, 41)]
        runs[arm] = {0: run_of(tmp_path / arm, training, [solving(solved[arm])])}
    write_one_batch("before", ONE_BATCH)
    write_one_batch("third", {"none": 0.25, "span": 0.5})
    arms = dict.fromkeys(runs, "")
    findings = forecast.report(study_of(replace(LEADERBOARD, arms=arms), tmp_path, runs))
    race, correlation = findings.tables
    by_arm = rows(race)
    assert list(by_arm) == ["entropy_weighted", "gae", "span", "none", "rloo", "dr_grpo"]
    assert {arm: row["answers"] for arm, row in by_arm.items()} == {
        "none": "136", "entropy_weighted": "56", "span": "96", "dr_grpo": "never",
        "rloo": "never", "gae": "40"}
    assert by_arm["dr_grpo"]["one batch"] == 0.2 and by_arm["gae"]["one batch"] is None
    assert by_arm["none"]["later one batch"] == 0.25
    assert by_arm["rloo"]["later one batch"] is None
    at_start, later = correlation.rows
    assert (at_start[1], later[1]) == (5, 2) and math.isnan(later[2])
    # ranks: none 0, entropy_weighted 4, span 3, two with 1.5; of answers 2, 0, 1, 3.5, 3.5
    known, answers, success = [0, 4, 3, 1.5, 1.5], [2, 0, 1, 3.5, 3.5], [2, 4, 3, 0, 1]
    assert at_start[2] == pytest.approx(np.corrcoef(known, answers)[0, 1])
    assert at_start[4] == pytest.approx(np.corrcoef(known, success)[0, 1])
    assert at_start[3][0] <= at_start[2] < at_start[3][1]
    assert "of too few arms (2)" in correlation.finding
    assert (tmp_path / "forecast.png").exists()


def test_single_seeds_are_beside_their_mean_curve(tmp_path, monkeypatch):
    monkeypatch.setattr(forecast, "RACE_TO", 0.5)
    runs = {"none": {seed: run_of(tmp_path / str(seed), [1.0 - seed] * 12, [solving(1)], seed)
                     for seed in (0, 1)}}
    study = study_of(replace(LEADERBOARD, arms={"none": ""}), tmp_path, runs)
    race = forecast.report(study).tables[0]
    assert rows(race)["none"]["by seed"] == "40 to never"


def test_the_mean_curve_of_all_seeds_decides(tmp_path, monkeypatch):
    """One seed is there at once, one never: their mean is 0.5, after ten steps."""
    monkeypatch.setattr(forecast, "RACE_TO", 0.5)
    runs = [run_of(tmp_path / str(seed), [1.0 - seed] * 12, [solving(1)], seed) for seed in (0, 1)]
    assert forecast.answers_needed(runs) == 10 * 4
    assert forecast.answers_needed(runs[1:]) == math.inf


def test_without_the_probe_there_is_no_forecast(tmp_path):
    runs = {"none": {0: run_of(tmp_path / "none", [1.0] * 12, [solving(1)])}}
    findings = forecast.report(study_of(replace(LEADERBOARD, arms={"none": ""}), tmp_path, runs))
    assert "of too few arms (0)" in findings.tables[1].finding
    assert any("--only noise measure them" in note for note in findings.tables[0].notes)
    for damaged in ({}, {"tables": 3}, {"tables": [{"name": "noise", "rows": [{}]}]}):
        write_probed("noise-before", damaged)
        with pytest.raises(UserError, match="no table of noise: .*--only noise --report_only"):
            cells_of_arms("noise", "before", "noise", "one batch")


# the leaderboard

def test_with_two_arms_the_difference_is_the_paired_one(tmp_path):
    """Of 4 problems 1, 2, 3 against 2, 4, 4: differences 1/4, 2/4, 1/4, by Student's t with 2
    degrees of freedom. A seed that only one arm has changes nothing."""
    d = np.array([0.25, 0.5, 0.25])
    reach = student_quantile(0.975, 2) * d.std(ddof=1) / math.sqrt(3)
    for plain in ([1, 2, 3], [1, 2, 3, 4]):
        study = board_of(tmp_path / str(len(plain)), {"none": plain, "rloo": [2, 4, 4]})
        parts = leaderboard.parts_of_success(study)
        found = parts.difference("rloo", "none")
        assert parts.freedom == 2 and found.value == pytest.approx(d.mean())
        assert found.interval == pytest.approx((d.mean() - reach, d.mean() + reach))


def test_the_chance_is_that_of_all_arms_together(tmp_path):
    """Three arms, two seeds: what is left after arms and seeds has 6 - 3 - 1 degrees of freedom. By
    hand: success in quarters (1, 2), (2, 2), (3, 4); means by arm 1.5, 2, 3.5, by seed 2, 8/3, all
    7/3; what is left -1/6, 1/6, 1/3, -1/3, -1/6, 1/6 of a quarter."""
    study = board_of(tmp_path, {"none": [1, 2], "rloo": [2, 2], "span": [3, 4]})
    parts = leaderboard.parts_of_success(study)
    left = np.array([-1 / 6, 1 / 6, 1 / 3, -1 / 3, -1 / 6, 1 / 6]) / 4
    error = math.sqrt(np.square(left).sum() / 2 * (1 / 2 + 1 / 2))
    found = parts.difference("span", "none")
    assert parts.freedom == 2 and found.value == pytest.approx(0.5)
    assert found.high == pytest.approx(0.5 + student_quantile(0.975, 2) * error)


def board_of(folder, successes):
    """Arms with these numbers of solved problems at the end, by seed."""
    runs = {}
    for arm, counts in successes.items():
        runs[arm] = {seed: run_of(folder / f"{arm}{seed}", [0.5] * 12, [solving(count)], seed,
                                  extra_tokens=30, trained_tokens=10)
                     for seed, count in enumerate(counts)}
    arms = dict.fromkeys(runs, "")
    return study_of(replace(LEADERBOARD, arms=arms), folder, runs)


def test_the_board_is_sorted_and_knows_its_controls(tmp_path, monkeypatch):
    """Candidates go by the parts of success, controls by the comparison of the experiment control,
    which has too few problems here to tell anything apart."""
    paired = {"measured": Estimate(0.4, 0.1, 0.7, 0.01),
              "shuffled": Estimate(-0.4, -0.7, -0.1, 0.01)}
    monkeypatch.setattr(leaderboard, "ahead", lambda study, arm, plain, place: (2, paired[arm]))
    study = board_of(tmp_path, {"none": [2, 2, 2, 3], "measured": [4, 4], "shuffled": [0, 0],
                                "entropy": [2, 3], "entropy-placebo": [2, 2]})
    findings = leaderboard.report(study)
    board = rows(findings.tables[0])
    assert list(board) == ["measured", "entropy", "none", "entropy-placebo", "shuffled"]
    assert board["measured"]["ahead"] == 0.4 and board["measured"]["beside"] == 3
    assert board["entropy"]["ahead"] == pytest.approx(0.125)
    assert board["entropy"]["placebo"] == pytest.approx(0.125)
    assert board["none"]["ahead"] is None and board["none"]["verdict"] == ""
    verdicts = {arm: board[arm]["verdict"] for arm in ("measured", "entropy", "shuffled")}
    assert verdicts == {"measured": "ahead", "entropy": "open", "shuffled": "behind"}
    said = findings.tables[0].finding
    assert "Ahead of none: measured.\nBehind it: shuffled." in said
    assert "Both controls are where they should be." in said
    assert (tmp_path / "board.png").exists()


def test_what_probes_have_measured_is_shown_with_its_range(tmp_path):
    """The index of the scoreboard, direction and one batch of the probe of noise."""
    scores = {"name": "scores", "rows": [{"arm": "rloo", "index": 0.25, "95%": [0.1, 0.3]}]}
    write_probed("scoreboard-third", {"tables": [scores]})
    write_one_batch("before", {"none": 0.1, "rloo": 0.2})
    study = board_of(tmp_path, {"none": [1, 2], "rloo": [2, 3]})
    race = rows(leaderboard.report(study).tables[1])
    shown = ("index", "later index", "later index 95%", "direction", "one batch", "one batch 95%")
    assert [race["rloo"][column] for column in shown] == [
        None, 0.25, (0.1, 0.3), 0.5, 0.2, (0.1, 0.2)]
    assert race["none"]["later index"] is None and race["none"]["one batch"] == 0.1
    assert race["none"]["direction 95%"] == (None, None) and list(race) == ["rloo", "none"]


def test_variants_are_compared_as_on_the_board(tmp_path):
    """Of 4 problems `half` solves 1 with either seed, plain GRPO 2 and 3, and 2 with a third."""
    study = board_of(tmp_path, {"none": [2, 3, 2], "half": [1, 1]})
    findings = variants.report(study)
    [table] = findings.tables
    found = rows(table)
    assert found["none"]["ends"] == (0.5, 0.75) and found["half"]["ends"] == (0.25, 0.25)
    entry = next(entry for entry in leaderboard.make_entries(study, "none") if entry.ahead)
    assert found["half"]["ahead"] == entry.ahead.value == pytest.approx(-0.375)
    assert found["half"]["p"] == entry.p and found["none"]["verdict"] == ""
    assert "Behind it: " in table.finding and "points would have been seen" in table.finding
    assert "trusted" not in table.finding  # it has no controls


def test_what_critics_explain_first_and_last(tmp_path):
    """Of six steps the first two and the last two; a step without a number, or an arm, is passed
    over."""
    def run(name, seed, values):
        folder = tmp_path / f"{name}{seed}"
        made = run_of(folder, [0.5] * len(values), [solving(2)], seed)
        for line, value in zip(made["metrics"], values):
            line["explained_variance"] = value
        return made

    runs = {"none": {0: run_of(tmp_path / "none", [0.5] * 6, [solving(2)])},
            "gae": {0: run("gae", 0, [0.0, 0.2, 0.3, 0.3, 0.5, 0.7]),
                    1: run("gae", 1, [None, 0.4, 0.6, 0.3, 0.3, 0.2, 0.2])}}
    study = study_of(replace(LEADERBOARD, arms=dict.fromkeys(runs, "")), tmp_path, runs, seeds=2)
    [row] = critics.critics_table(study).rows
    assert row[:2] == ("gae", 2)
    assert row[2:] == (pytest.approx(0.3), pytest.approx((0.1, 0.5)), pytest.approx(0.4),
                       pytest.approx((0.2, 0.6)))
    del runs["gae"]
    assert critics.critics_table(study) is None


def test_ratios_of_an_arm_with_a_discount(tmp_path):
    """Two answers of ten tokens, log p -2 in the first fifth, -1 in the last; the first fifth has
    weight 0.25. So early over late is 2 without the weight, and a half with it."""
    log_prob = np.tile([-2.0, -2.0, *[-1.0] * 8], 2)
    weight = np.tile([0.25, 0.25, *[1.0] * 8], 2)
    columns = credit_columns([10, 10], [0, 0], log_prob=log_prob, weight=weight,
                             advantage=np.repeat([1.0, -1.0], 10))
    runs = {"discount": {0: run_of(tmp_path / "run", [0.5], [solving(2)], steps={1: columns})}}
    study = study_of(replace(LEADERBOARD, arms={"discount": ""}), tmp_path, runs)
    found = {row[1]: row for row in ratios.ratios_table(study).rows}
    assert found["A lp"][3] == pytest.approx(2) and found["A w lp"][3] == pytest.approx(0.5)
    assert found["A lp"][4] == pytest.approx((2, 2))


def test_of_a_single_seed_nothing_is_said(tmp_path):
    study = board_of(tmp_path, {"none": [2, 2, 2], "rloo": [2, 2, 2], "span": [0]})
    board = rows(leaderboard.report(study).tables[0])
    assert board["span"]["verdict"] == "too few seeds" and board["rloo"]["verdict"] == "open"


def test_without_its_controls_a_board_is_not_to_be_trusted(tmp_path):
    study = board_of(tmp_path, {"none": [2, 3], "measured": [2, 3], "entropy": [3, 2]})
    said = leaderboard.report(study).tables[0].finding
    assert "measured and shuffled should be told apart" in said
    with pytest.raises(UserError, match="no run of none is finished yet"):
        leaderboard.make_entries(replace(study, runs={"entropy": study.runs["entropy"]}), "none")


def test_plain_grpo_has_twice_as_many_seeds(tmp_path):
    experiment = Experiment("small", "?", "", {"none": "", "rloo": ""}, 2, twice=("none",))
    names = [run.name for run in plan_runs(experiment, str(tmp_path), 2)]
    assert names == ["none-s0", "rloo-s0", "none-s1", "rloo-s1", "none-s2", "none-s3"]


# what is finished, and what is not

def test_of_many_that_are_missing_some_are_named(tmp_path):
    study = study_of(LEADERBOARD, tmp_path, {})
    study.unfinished = [f"span-s{seed}" for seed in range(10)]
    assert study.intro()[-1].endswith("span-s7, and 2 more.")


def test_a_report_is_written_again_and_names_what_is_missing(tmp_path, learner, capsys):
    common = f"--model {learner} --questions 2 --answers 2 --steps 2 --eval_every 0"
    experiment = Experiment("small", "Is it so?", common, {"none": "", "rloo": ""}, 1)
    planned = plan_runs(experiment, "runs", 1)
    with pytest.raises(UserError, match="no run of small is finished yet: none-s0 .0 of 2 steps"):
        read_study(experiment, planned, tmp_path)
    curve = [solving(1), solving(3)]
    config = {**planned[0].settings.to_json(), "checkpoint_every": 0}
    run_of(planned[0].folder, [0.5, 0.5], curve, config=config, reward=0.5, tokens=10, loss=0.25,
           gradient_norm=1.0)
    for _ in range(2):
        write_report(experiment, planned, "python -m research small")
    printed = capsys.readouterr().out
    assert "1 of 2 runs are finished." in printed
    assert "Not yet: rloo-s0 (0 of 2 steps)." in printed
    numbers = json.loads(Path("results/study-small/numbers.json").read_text())
    assert numbers["settings"]["first_steps"] == {"none": [0.5, 10, 0.25, 1.0]}
    assert numbers["measured"] == "study-small" and numbers["tables"][0]["rows"][0]["end"] == 0.75
    assert "Is it so?" in Path("results/study-small/report.html").read_text()
