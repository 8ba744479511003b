"""Every table against its definition, in plain loops; sizes, classes, bins and t by hand."""
import numpy as np
import pytest
from conftest import credit_columns, refusal, write_log
from logs import by_name, ids_of, mean_of, plain_rows, random_log

import lab.analysis.program as analyze
from lab.analysis.statistics import ratio
from lab.analysis.tally import Tally, early_over_late
from lab.engine.tokens import KINDS, SECTIONS


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """The tokens of a run, its tally and its tables."""
    folder, files = random_log(tmp_path_factory.mktemp("logs") / "run")
    rows = plain_rows(folder, files)
    run = {"folder": folder, "config": {"mitigation": "none", "steps": 3},
           "metrics": [{"step": 2, "success": None, "finished": None, "gradient_norm": 0.5}],
           "evaluations": []}
    tally = Tally(folder)
    return rows, tally, by_name(sum(analyze.run_chapters(run, tally).values(), []))


def test_a_token_that_no_tokenizer_knows_is_refused(tmp_path):
    columns = credit_columns([3], [0], token_id=np.array([1, 2, 10 ** 6], np.int32))
    said = refusal(Tally, write_log(tmp_path / "run", {1: columns}))
    assert "step_000001.npz is damaged: it has a token 1000000, which" in said


def test_ten_position_bins(log):
    rows, _, tables = log
    for b, found in enumerate(tables["gradient by position"]):
        part = [r for r in rows if b <= 10 * r["middle"] < b + 1]
        rest = [r for r in rows if r not in part]
        if len(part) > 1:
            size = mean_of(part, "abs gradient")
            numbers = [found["entropy"], found["abs(A) w s"], found["over rest"]["value"]]
            assert numbers == pytest.approx([mean_of(part, "entropy"), size,
                                             size / mean_of(rest, "abs gradient")], rel=1e-5)


def test_the_first_fifth_over_the_last(log, monkeypatch):
    rows, tally, _ = log
    early = mean_of([r for r in rows if r["middle"] < 0.2], "abs gradient")
    late = mean_of([r for r in rows if r["middle"] >= 0.8], "abs gradient")
    monkeypatch.setattr("lab.analysis.statistics.FEWEST", 2)  # groups
    finding = analyze.position_gradients(tally).finding
    assert f"gets {early / late:.2f} times the gradient of the last" in finding


@pytest.mark.parametrize("long, is_known", [(5, False), (6, True)])
def test_an_interval_goes_by_the_groups_that_carry_the_rarest_cell(tmp_path, long, is_known):
    """Twelve groups. Each has tokens in the first tenth of an answer, and those with an answer of
    ten tokens also in the second. The first fifth needs both, and six groups for an interval.
    Three more groups have no advantage, and so they say nothing."""
    lengths = [10] * long + [6] * (12 - long)
    advantage = np.append(np.linspace(1, 2, sum(lengths)), np.zeros(30))
    columns = credit_columns([*lengths, 10, 10, 10], range(15), advantage=advantage)
    tally = Tally(write_log(tmp_path / "run", {1: columns}))
    assert tally.groups_with_advantage["position"][:2].tolist() == [12, long]
    found = early_over_late(tally)
    assert found.value > 0 and np.isfinite(found.low) == is_known
    if is_known:
        mine, slope = tally.log_mean("position", np.array([1.0] * 2 + [0.0] * 8))
        theirs, their_slope = tally.log_mean("position", np.array([0.0] * 8 + [1.0] * 2))
        error = tally.error("position", slope - their_slope)
        assert found == ratio(mine - theirs, error, groups=6)


def test_shares_of_the_gradient(log):
    rows, _, tables = log
    total = mean_of(rows, "abs gradient") * len(rows)
    for key, names in (("kind", KINDS), ("section", SECTIONS)):
        for found in tables[f"gradient by {key}"]:
            part = [r for r in rows if names[r[key]] == found[key]]
            size = mean_of(part, "abs gradient")
            expected = {"gradient": size * len(part) / total, "tokens": len(part) / len(rows),
                        "s": mean_of(part, "s"), "abs(A)": mean_of(part, "abs advantage")}
            assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_forking_and_following_tokens(tmp_path):
    """Three tokens, ten times each, one of them only nine times."""
    def each(values):
        return np.repeat(values, [10, 10, 10, 9])

    ids = [ids_of(text)[0] for text in (" and", " 7", "\n", " +")]
    columns = credit_columns([39], [0], token_id=each(ids), entropy=each([0.5, 2.0, 0.1, 9.0]),
                             weight=np.full(39, 3.0), kind=each([0, 2, 1, 3]))
    rows = analyze.forks(Tally(write_log(tmp_path / "run", {1: columns}))).to_json()["rows"]
    assert [(row[""], row["token"]) for row in rows] == [
        *(("forking", text) for text in ("' 7'", "' and'", "'\\n'")),
        *(("following", text) for text in ("'\\n'", "' and'", "' 7'"))]
    assert (rows[0]["entropy"], rows[0]["count"], rows[0]["kind"]) == (2.0, 10, "number")
    assert rows[0]["abs(A) w s"] == pytest.approx(3 * 0.5 ** 0.5)


def test_a_token_is_no_fork_if_it_is_less_than_one_of_2000(tmp_path):
    """Of 30,000 tokens one makes up 14, which is 0.047%, and another 16."""
    ids = np.repeat([ids_of(text)[0] for text in (" and", " 7", " +")], [29_970, 16, 14])
    columns = credit_columns([30_000], [0], token_id=ids)
    rows = analyze.forks(Tally(write_log(tmp_path / "run", {1: columns}))).to_json()["rows"]
    assert {row["token"]: row["count"] for row in rows} == {"' and'": 29_970, "' 7'": 16}


def test_a_task_that_labels_no_token_has_no_tables_of_its_labels(tmp_path):
    """All tokens are in one cell; with two kinds there is a table of kinds."""
    tables = {}
    for name, kind in (("one", [2, 2]), ("two", [2, 0])):
        tally = Tally(write_log(tmp_path / name, {1: credit_columns([2], [0], kind=kind)}))
        run = {"evaluations": [], "metrics": []}
        tables[name] = by_name(sum(analyze.run_chapters(run, tally).values(), [])).keys()
    assert "gradient by kind" not in tables["one"] and "gradient by position" in tables["one"]
    assert "gradient by kind" in tables["two"] and "gradient by section" not in tables["two"]


def test_rewards_are_means_over_answers_and_a_spread_may_not_be_known(tmp_path):
    """The second step has a reward that is not known, so neither is whether its groups have a
    spread."""
    files = {1: credit_columns([1, 1, 1, 1], [0, 0, 1, 1], reward=[1, 0, 3, 3],
                               reward_answer=[1, 0, 1, 1]),
             2: credit_columns([1, 1], [0, 0], reward=[1, np.nan])}
    tally = Tally(write_log(tmp_path / "run", files))
    growth = analyze.growth({"metrics": []}, tally).to_json()["rows"]
    assert [row["flat"] for row in growth] == [0.5, None]
    of_first = Tally(write_log(tmp_path / "first", {1: files[1]}))
    means = {row["part"]: row["mean"] for row in analyze.rewards(of_first).to_json()["rows"]}
    assert means["reward"] == 7 / 4 and means["answer"] == 3 / 4


def test_growth_over_training(log):
    rows, _, tables = log  # three steps, so each row is one
    for step, found in enumerate(tables["growth"], 1):
        part = [r for r in rows if r["step"] == step]
        answers = {r["episode"]: r["group"][1] for r in part}
        expected = {"length": len(part) / len(answers), "entropy": mean_of(part, "entropy"),
                    "flat": sum(group == 0 for group in answers.values()) / len(answers),
                    "abs(A) w s": mean_of(part, "abs gradient")}
        assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)
        assert (found["steps"], found["norm"]) == (str(step), 0.5 if step == 2 else None)


def test_a_share_of_the_gradient_has_an_interval_over_groups(tmp_path):
    """Six groups of an answer of two tokens, a word of size 1 and a number of 1 or 2: words have 6
    of 15. By the delta method each group adds (word - 0.4 both)^2 = 0.2^2, so the error is
    sqrt(6) 0.2 / 15 sqrt(6 / 5) = 0.03578, and Student's t of 5 degrees of freedom is 2.5706. Two
    more groups have no advantage, and so they say nothing."""
    sizes = np.array([[1, 1], [1, 1], [1, 1], [1, 2], [1, 2], [1, 2], [0, 0], [0, 0]], float)
    columns = credit_columns([2] * 8, list(range(8)), advantage=sizes.ravel(),
                             kind=np.tile([0, 2], 8))
    tally = Tally(write_log(tmp_path / "run", {1: columns}))
    found = tally.share("kind", 0)
    assert found.value == pytest.approx(0.4)
    assert found.high - found.value == pytest.approx(2.5706 * 0.03578, rel=1e-3)
    few = Tally(write_log(tmp_path / "few", {1: credit_columns([1] * 5, list(range(5)))}))
    assert np.isnan(few.share("kind", 0).low)
    assert "Too few groups" in analyze.gradient_table(few, "kind").finding
