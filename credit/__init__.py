"""Ways of spreading credit that need more than one function: a critic, fresh samples, a state,
pairs.

Importing the room adds its mitigations and advantages to the lists of engine/registry.py.
"""
from credit import causal_ablation, critic, lambda_grpo, learned_importance, monte_carlo, oracle

__all__ = ["causal_ablation", "critic", "lambda_grpo", "learned_importance", "monte_carlo",
           "oracle"]
