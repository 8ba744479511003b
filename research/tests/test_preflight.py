"""The numbers of tools.preflight's forecast follow from the published settings."""
import json
import math
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

from tools.helpers.seen import IN_RANGE, LARGE, SEEN_OF_RUNS, SMALL, Forecast, visible_gain

SETTINGS = Path(__file__).parents[1] / "results/preflight/settings.jsonl"
FITTED = (1, 2)  # the looks whose settings were trained before the forecast was made


def settings():
    return [json.loads(line) for line in SETTINGS.read_text().splitlines()]


def worth(one):
    """The answers of all steps, times the variance: the gain is this times the speed."""
    return one["answers"] * one["steps"] * one["variance"]


def rose(one):
    """Whether each of its runs ends two standard errors above its beginning."""
    n, before = one["held_out"], one["before"]
    for after in one["after"]:
        error = math.sqrt((before * (1 - before) + after * (1 - after)) / n)
        yield after - before > 2 * error


def fitted_settings():
    """Those of the tiny model in which something can be learned, and that were evaluated as they
    were trained."""
    return [one for one in settings() if one["look"] in FITTED and one["model"] == "tiny"
            and worth(one) > 0 and one["setting"] != "--temperature 1.5"]


def test_speed_and_spread_are_the_likeliest_for_the_runs_that_were_seen_to_rise_or_not():
    runs = []
    for one in fitted_settings():
        ratio = worth(one) / visible_gain(one["before"], one["held_out"])
        runs.append((math.log(ratio), list(rose(one))))
    assert len(runs) == 18

    def log_likelihood(speed, spread):
        total = 0.0
        for log_ratio, seen in runs:
            chance = NormalDist().cdf((log_ratio + math.log(speed)) / spread)
            chance = min(max(chance, 1e-9), 1 - 1e-9)
            total += np.mean([math.log(chance if one else 1 - chance) for one in seen])
        return total

    points = [(speed, spread) for speed in np.arange(0.02, 0.08, 0.002)
              for spread in np.arange(0.3, 1.2, 0.05)]
    best = max(points, key=lambda point: log_likelihood(*point))
    assert SMALL.points == pytest.approx(best[0], abs=0.004)
    assert SMALL.spread == pytest.approx(best[1], abs=0.05)


def test_the_speed_of_a_real_model_is_that_of_its_runs():
    speeds = [100 * (one["after"][0] - one["before"]) / worth(one) for one in settings()
              if one["model"] == "real" and worth(one) > 1]
    assert len(speeds) == 2 and np.mean(speeds) == pytest.approx(LARGE.points, rel=0.02)


def test_how_often_the_words_of_the_third_look_came_true():
    """The command and the page say it of runs, and the page of settings, too: *will be seen* came
    true if all seeds rise, and *will not be seen* if none does."""
    third = [one for one in settings() if one["look"] == 3 and "said" in one]
    runs = {said: [list(rose(one)) for one in third if one["said"] == said]
            for said in SEEN_OF_RUNS}
    for said, of_settings in runs.items():
        seen = [one for of_setting in of_settings for one in of_setting]
        assert SEEN_OF_RUNS[said] == (sum(seen), len(seen))
    sure, never = runs["will be seen"], runs["will not be seen"]
    page = " ".join((Path(__file__).parents[2] / "docs/preflight.md").read_text().split())
    assert f"both seeds rose in {sum(map(all, sure))} of {len(sure)} settings" in page
    assert f"none in {sum(not any(seeds) for seeds in never)} of {len(never)}" in page
    assert all(f"{seen} of {of} runs" in page for seen, of in SEEN_OF_RUNS.values())
    fitted = [one | {"forecast": SMALL.points * worth(one)} for one in fitted_settings()]
    assert (in_range(third), len(third)) == IN_RANGE
    assert f"held {in_range(fitted)} of the {len(fitted)} fitted settings" in page
    assert f"{in_range(third)} of the {len(third)} new ones" in page


def in_range(of_settings):
    """How many mean gains lie within the range of their forecast."""
    within = 0
    for one in of_settings:
        low, high = Forecast(one["forecast"], SMALL.spread, 1.0, one["steps"]).gain_between()
        within += low <= 100 * (np.mean(one["after"]) - one["before"]) <= high
    return within
