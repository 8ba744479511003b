"""The gains of stored runs (lab/results), and what follows from them."""
from lab.analysis.comparison import Gain
from lab.analysis.tables import shown
from lab.probes import claim_rules
from lab.probes.claim_rules import stored_results, success_by_seed

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
        for name in names.split(", "):
            pairs = success_by_seed(board, name).keys() & success_by_seed(board, "none").keys()
            gains.append(Gain(tuple(pairs), claim_rules.stored_gain(board, name)))
    return len(gains), max(gain.excluded_above(len(gains)) for gain in gains)


def arms_of(name):
    """The arms of lab/results/NAME.json."""
    runs = stored_results(name)["values"]["runs"]
    return [*dict.fromkeys(run.rpartition("-s")[0] for run in runs)]


def stored_gain(name, arm, over):
    """The gain of one stored arm over another, as pages write it: +2.8 (+1.8 to +3.8)."""
    return shown(claim_rules.stored_gain(name, arm, over), "points")
