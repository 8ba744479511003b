"""The trainers whose functions are known here: by which parameter of an advantage each is told, and
its settings, as far as advantages and losses read them.
"""
from types import SimpleNamespace
from typing import NamedTuple


class Trainer(NamedTuple):
    package: str                     # as pip knows it
    place: str                       # of its advantages
    told_by: tuple[str, ...]         # parameters of an advantage; the first that is there tells
    settings: dict[str, object]      # its own defaults


TRAINERS = {
    "verl": Trainer("verl", "verl.trainer.ppo.core_algos", ("token_level_rewards",), {
        "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0,
        "tau_pos": 1.0, "tau_neg": 1.05, "loss_agg_mode": "token-mean", "gamma": 1.0, "lam": 1.0,
        "norm_adv_by_std_in_grpo": True}),
    "TRL": Trainer("trl", "trl.GRPOTrainer", ("num_generations", "rewards_per_func"), {
        "scale_rewards": "group"}),
    "OpenRLHF": Trainer("openrlhf", "openrlhf.trainer.ppo_utils.experience_maker",
                        ("n_samples_per_prompt",), {}),
    "NeMo-RL": Trainer("nemo-rl", "nemo_rl.algorithms.advantage_estimator", ("prompt_ids",), {
        "use_leave_one_out_baseline": True, "normalize_rewards": True, "minus_baseline": True,
        "use_kl_in_reward": False, "reference_policy_kl_penalty": 0.0,
        "reference_policy_kl_type": "k3"}),
    "prime-rl": Trainer("prime-rl", "prime_rl.orchestrator.advantage",
                        ("inputs", "samples_per_problem"), {
        "length_weighted_mean": False, "std_norm": None, "leave_one_out": False,
        "neg_clipped": False}),
    "slime": Trainer("slime", "slime.utils.ppo_utils", ("samples", "kl"), {
        "advantage_estimator": "grpo", "rewards_normalization": True, "reward_key": None,
        "grpo_std_normalization": True}),
    "AgentCreditBench": Trainer("agentcreditbench", "", ("context",), {}),
    "any trainer": Trainer("", "", ("group_size",), {}),
    "this project": Trainer("", "", ("rollouts",), {})}
CONFIGS = ("config", "args", "estimator_config", "loss_config", "advantage_config", "algo_config")


class Config(SimpleNamespace):
    """Settings as config.name, config.get(name) and config[name]."""

    def get(self, name: str, default: object = None) -> object:
        return getattr(self, name, default)

    def __getitem__(self, name: str) -> object:
        return getattr(self, name)


def config_of(settings: dict[str, object], **more: object) -> Config:
    return Config(**{**settings, **more})
