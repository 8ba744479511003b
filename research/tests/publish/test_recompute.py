"""The second implementation of the statistics, and that the published numbers follow from what is
stored."""
import json
import math
import re

import pytest
from conftest import ROOT

from engine.errors import UserError
from research.__main__ import main
from research.publish import plain_statistics as statistics
from research.publish import recompute
from research.publish.results import RESULTS, read_result, write_result


def test_statistics_by_hand():
    """Tables of Student's t have 2.5706 for 5 degrees of freedom and 12.706 for 1, where t = 1 has
    p = 0.5. Four, two and three tests are left at the sorted p."""
    assert statistics.quantile(5) == pytest.approx(2.570582, abs=1e-6)
    assert statistics.quantile(1) == pytest.approx(12.7062, abs=1e-4)
    assert statistics.two_sided_p(1, 1) == pytest.approx(0.5)
    assert statistics.t_interval([1, 3]) == pytest.approx([2, 2 - 12.7062, 2 + 12.7062], abs=1e-4)
    assert statistics.holm({"a": 0.04, "b": 0.01, "c": 0.03}) == {"b": 0.03, "c": 0.06, "a": 0.06}
    values = [1.0, 2.0, 6.0]

    def mean_without(i):
        kept = [value for n, value in enumerate(values) if n != i]
        return sum(kept) / len(kept)

    assert statistics.jackknife(3, mean_without) == pytest.approx(statistics.t_interval(values))
    found = statistics.fieller(1.0, 2.0, 0.01, 0.0, 0.0, 5)
    reach = 2.570582 * 0.1 / 2
    assert found == pytest.approx([0.5, 0.5 - reach, 0.5 + reach])
    assert statistics.fieller(1.0, 0.1, 0.01, 0.01, 0.0, 5) is None


def test_the_published_numbers_follow_from_what_is_stored(capsys):
    """It shares no statistics with the project, so an error would have to be made twice."""
    for name in ("recompute", "recompute_earlier", "checks", "plain_statistics"):
        source = (ROOT / f"research/publish/{name}.py").read_text()
        assert not re.findall(r"^\s*(?:from|import) (?:analysis|numpy|torch)", source, re.M)
    main(["recompute"])
    printed = capsys.readouterr().out
    assert "differ" not in printed
    for name in recompute.CHECKED:
        if (RESULTS / f"{name}.json").exists():
            assert f"{name}: " in printed


def test_a_number_that_does_not_follow_is_named(tmp_path, monkeypatch, capsys):
    result = read_result(RESULTS / "real_board_brief.json")
    row = result["tables"][0]["rows"][1]
    row["gain"]["low"] += 0.001
    write_result(tmp_path / "real_board_brief.json", json.loads(json.dumps(result)))
    monkeypatch.setattr(recompute, "RESULTS", tmp_path)
    with pytest.raises(UserError, match="1 published numbers do not follow"):
        main(["recompute"])
    assert f"differs gain of {row['arm']}" in capsys.readouterr().out
    assert not math.isnan(row["p"])
