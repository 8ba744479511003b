"""Runs are compared on held-out problems only if these are the same."""

import pytest

import analyze
from conftest import evaluation, write_log


def runs_of(tmp_path, *, digests=(None, None), shown=("a", "a")):
    runs = []
    for number, (digest, title) in enumerate(zip(digests, shown)):
        lines = [evaluation(step, [0, step > 0]) | {"shown": [{"problem": title}]}
                 for step in (0, 1)]
        config = {"mitigation": ["none", "random"][number], "held_out_problems": digest}
        metrics = [{"step": 1, "success": 0.25}]
        write_log(tmp_path / str(number), {}, config, metrics, lines)
        runs.append(analyze.Run(tmp_path / str(number)))
    return runs


@pytest.mark.parametrize("known, is_same", [
    (dict(digests="aa"), True), (dict(digests="ab"), False), (dict(digests="aa", shown="ab"), True),
    ({}, True), (dict(shown="ab"), False), (dict(digests=["a", None]), False)])
def test_runs_with_other_problems_are_not_compared_on_them(tmp_path, known, is_same):
    """By their digest, or by what an evaluation shows, where a run has none."""
    runs = runs_of(tmp_path, **known)
    title, _, rows = analyze.comparison(runs, analyze.names_of(runs))
    assert [row[0] for row in rows] == ["mitigation none", "mitigation random"]
    assert ("problems are not known to be the same" in title) is not is_same
    assert rows[1][2:4] == (["50.0%", "+0.0% (one pair)"] if is_same else ["", "no pairs"])
    assert rows[1][4:] == ["25.0%", "+0.0% (one pair)"]
