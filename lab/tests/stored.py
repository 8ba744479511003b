"""The numbers of stored runs, and the gains that follow from them (lab/results)."""
import json

from conftest import ROOT
from lab.analysis.comparison import gain_over
from lab.analysis.tables import shown
from known_runs import recorded


def stored_arms(name):
    """The arms of lab/results/NAME.json, by seed. A run is its success, or the answers in a step,
    the seconds, and the right answers of each step."""
    text = (ROOT / f"lab/results/{name}.json").read_text(encoding="utf-8")
    arms = {}
    for run, found in json.loads(text)["values"]["runs"].items():
        arm, _, seed = run.rpartition("-s")
        if isinstance(found, float):
            success = [found]
        else:
            answers, _, right = found
            success = [int(count) / answers for count in right.split()]
        metrics = [{"success": of_step} for of_step in success]
        arms.setdefault(arm, {})[int(seed)] = recorded(metrics)
    return arms


def stored_gain(name, arm, over):
    """The gain of one stored arm over another, as pages write it: +2.8 (+1.8 to +3.8)."""
    arms = stored_arms(name)
    return shown(gain_over(arms[arm], arms[over]).estimate, "points")
