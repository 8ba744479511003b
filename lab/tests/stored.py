"""The numbers of stored runs, and the gains that follow from them (lab/results)."""
import json

from conftest import ROOT
from lab.analysis.comparison import gain_over
from lab.analysis.tables import shown
from known_runs import recorded


# every weighting that was trained, by its file: of the tiny model, and of the real one that thinks
WEIGHTINGS = {
    "board": "attention_credit, by_kind, covariance, entropy_masking, entropy_ratio, taco, "
             "entropy_weighted, equal_gradient, future_attention, inverse_logprob, shared_prefix, "
             "planning, inverse_logprob_as_published, learned_importance, low_probability, "
             "outcome_conditional",
    "later": "negative_only, rlcsd, rlsd, sc_grpo, causal_ablation --ablation delete, "
             "by_kind --word_weight 0",
    "of_2026": "counterfactual, quadrants, delta, oar_g"}
OF_THINKING = {"real_board_brief_8_gpu": (
    "outcome_conditional 0.5, outcome_conditional 0.25, inverse_logprob, attention_credit, "
    "inverse_logprob_as_published, entropy_weighted, entropy_masking, equal_gradient, "
    "by_kind without words")}


def excluded_above(weightings):
    """How many there are, and the gain above which not one of them lies, by intervals of 95% that
    hold for all at once (Bonferroni)."""
    gains = []
    for board, names in weightings.items():
        arms = stored_arms(board)
        gains += [gain_over(arms[name], arms["none"]) for name in names.split(", ")]
    return len(gains), max(gain.excluded_above(len(gains)) for gain in gains)


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
