"""The adapters of codes.py. Each returns losses by name.

They choose nothing: clip bounds, KL weights and epsilons are the code's own defaults, which are
taken from its files.
"""
import dataclasses
import importlib
import inspect
import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, Optional, Union  # noqa: UP035  names that codes use

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab.trl.codes_helpers import log_probs, take_statement
from engine.errors import UserError
from lab.formula.batches import Batch

TYPING = {"Any": Any, "Dict": dict, "List": list, "Optional": Optional, "Tuple": tuple,
          "Union": Union}
USUAL = {"torch": torch, "nn": nn, "F": F, "np": np, "math": math, "dataclasses": dataclasses,
         "defaultdict": defaultdict, **TYPING}


def ours():
    """This project's default: --advantage grpo --loss_norm token."""
    from grpo import group_z_score, policy_loss

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        mask = batch.mask[:, 1:]
        advantage = group_z_score(batch.reward, batch.group).double()[:, None]
        weight = torch.ones_like(mask)
        return policy_loss(log_probs(logits, batch), advantage, weight, mask, mask.sum())
    return {"ours": loss}


def trl():
    """The installed TRL: each loss_type of GRPOTrainer, with the log-probs of the batch."""
    try:
        import trl as package
        from trl import GRPOConfig, GRPOTrainer
    except ImportError:
        raise UserError("TRL is missing: pip install -r lab/trl/requirements.txt") from None
    source = inspect.getsource(GRPOTrainer)
    nanstd = importlib.import_module(GRPOTrainer.__module__).nanstd
    mean = take_statement(source, "torch.nanmean(rewards.view", ["rewards", "num_generations"],
                          "mean_grouped_rewards", **USUAL)
    std = take_statement(source, "std_rewards = nanstd(rewards.view",
                         ["rewards", "num_generations"], "std_rewards", nanstd=nanstd, **USUAL)
    scaled = take_statement(source, "advantages / (std_rewards", ["advantages", "std_rewards"],
                            "advantages", **USUAL)
    defaults = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}

    def loss_of(kind: str, **changed: object):
        def loss(logits: Tensor, batch: Batch) -> Tensor:
            trainer = stand_in(GRPOTrainer, defaults | {"loss_type": kind} | changed)
            size = len(batch.group) // len(batch.group.unique())
            advantages = batch.reward - mean(batch.reward, size).repeat_interleave(size)
            if changed.get("scale_rewards") != "none":
                of_answer = std(batch.reward, size).repeat_interleave(size)
                advantages = scaled(advantages, of_answer)
            found = log_probs(logits, batch)
            h = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)[:, :-1]
            trainer._get_per_token_logps_and_entropies = lambda *_, **__: (found, h, None)
            return trainer._compute_loss(None, {
                "prompt_ids": batch.ids[:, :1], "prompt_mask": batch.ids[:, :1] * 0 + 1,
                "completion_ids": batch.ids[:, 1:], "completion_mask": batch.mask[:, 1:],
                "advantages": advantages, "old_per_token_logps": batch.old_log_prob[:, 1:],
                "ref_per_token_logps": batch.reference_log_prob[:, 1:],
                "num_items_in_batch": batch.mask.sum()})
        return loss

    name = f"TRL {package.__version__}"
    kinds = ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo")
    found = {f"{name} {kind}": loss_of(kind) for kind in kinds}
    found[f"{name} luspo, ratio of the answer"] = loss_of("luspo",
                                                          importance_sampling_level="sequence")
    found[f"{name} grpo, ratio of the answer"] = loss_of("grpo",
                                                         importance_sampling_level="sequence")
    found[f"{name} dapo, beta 0.04"] = loss_of("dapo", beta=0.04)
    found[f"{name} dapo, scale_rewards none"] = loss_of("dapo", scale_rewards="none")
    found[f"{name} dapo, entropy_coef 0.01"] = loss_of("dapo", entropy_coef=0.01)
    return found


def stand_in(trainer_class: type, settings: dict[str, object]) -> object:
    """A GRPOTrainer that was not set up: its settings, and an accelerator of one process."""
    trainer = trainer_class.__new__(trainer_class)
    vars(trainer).update(settings)
    entropy = settings.get("entropy_coef") or 0.0

    def same(value, *_, **__):
        return value

    vars(trainer).update(
        args=SimpleNamespace(**settings | {"steps_per_generation": 1}), use_vllm=False,
        epsilon_low=settings["epsilon"],
        epsilon_high=settings["epsilon"] if settings["epsilon_high"] is None
        else settings["epsilon_high"],
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=bool(entropy),
        use_adaptive_entropy=False, _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True), tools=None,
        accelerator=SimpleNamespace(num_processes=1, gather=same, gather_for_metrics=same,
                                    reduce=same, sync_gradients=True))
    return trainer


ADAPTERS = {"ours": ours, "trl": trl}
