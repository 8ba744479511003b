"""The arms of the leaderboard: the weightings and advantages that sample nothing for their credit.

`oracle`, `vine` and `causal_ablation` are left out because they sample, as the control does, and
`dr_grpo` because it is a multiple of `rloo`. Methods that came after the leaderboard was made have
a card (../cards.md). An arm is the flags of train.py that make it.
"""
from engine.choices import WHOLE_ANSWERS

PLAIN, CONTROL = "none", "measured"

WEIGHTINGS = {name: f"--mitigation {name}" for name in (
    "entropy_weighted", "entropy_masking", "entropy_ratio", "inverse_logprob",
    "inverse_logprob_as_published", "equal_gradient", "attention_credit",
    "learned_importance", "lambda_grpo", "random", "by_kind", "low_probability", "taco", "planning",
    "covariance", "shared_prefix", "future_attention")}
WEIGHTINGS["outcome_conditional"] = "--mitigation outcome_conditional --think_discount 0.5"
ADVANTAGES = {name: f"--advantage {name}" for name in (
    "rloo", "batch_mean", "span", "deletion", "gae", "prefix_tree", "gtpo")}
ADVANTAGES["gae-trunk"] = "--advantage gae --critic trunk"
METHODS = WEIGHTINGS | ADVANTAGES
CONTROLS = {CONTROL: "--advantage measured --measured_k 2"}  # must be ahead
SCALE = {"none-16x8": "--questions 16", "none-32x8": "--questions 32"}  # plain GRPO, larger batches
ARMS = {PLAIN: "", **CONTROLS, **SCALE, **METHODS}


def placebos(arms: list[str]) -> dict[str, str]:
    """The placebos of these arms by name: an arm's weights, or advantages, at shuffled tokens. An
    arm with one number for all tokens of an answer has none."""
    found = {}
    for arm in arms:
        if arm not in WHOLE_ANSWERS:
            shuffled = "weights" if arm in WEIGHTINGS else "advantages"
            found[f"{arm}-placebo"] = f"{ARMS[arm]} --placebo {shuffled}"
    return found
