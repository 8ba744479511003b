"""Ways of spreading credit that need more than a function: a critic, fresh samples, a state, pairs.

Importing the room adds its mitigations and advantages to the lists of engine/registry.py.
"""
from credit import causal_ablation, critic, lambda_grpo  # noqa: F401
from credit import learned_importance, monte_carlo, oracle  # noqa: F401
