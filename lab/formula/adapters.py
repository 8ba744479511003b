"""Losses that are not called as loss(logits, batch): adapters for the shapes of trainers.

    from lab.formula import of_log_probs, of_trl, of_verl

    loss = of_log_probs(my_loss)      # my_loss(log_probs, old_log_probs, advantages, mask)
    loss = of_trl(MyTrainer)          # a class with TRL's _compute_loss(model, inputs)
    loss = of_verl(compute_policy_loss_vanilla, {"clip_ratio_high": 0.28})

The log-probs are those of the batch at temperature 1, so nothing is said of how a trainer computes
them, nor of its shift and its mask. Advantages are TRL's, unless another function of a batch is
given.
"""
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .batches import Batch
from .calling import Loss, LossFailed


def log_probs(logits: Tensor, batch: Batch) -> Tensor:
    """(B, L - 1) the log-probs of the tokens: column j is for token j + 1."""
    log_p = logits.log_softmax(-1)[:, :-1]
    return log_p.gather(2, batch.ids[:, 1:, None]).squeeze(2)


def by_group(batch: Batch, function: Callable[[Tensor], Tensor]) -> Tensor:
    """(B,) function(rewards of a group), for each group."""
    found = torch.zeros_like(batch.reward)
    for number in batch.group.unique():
        rows = batch.group == number
        found[rows] = function(batch.reward[rows])
    return found


def z_score(batch: Batch, epsilon: float = 1e-4) -> Tensor:
    """(B,) TRL's advantage."""
    return by_group(batch, lambda reward: (reward - reward.mean()) / (reward.std() + epsilon))


class Config(SimpleNamespace):
    """Settings as config.name, config.get(name) and config[name]."""

    def get(self, name: str, default: object = None) -> object:
        return getattr(self, name, default)

    def __getitem__(self, name: str) -> object:
        return getattr(self, name)


def verl_config(changed: Mapping[str, object] = {}) -> Config:
    """verl's own defaults, as far as its advantages and losses read them, but for what is changed.
    """
    defaults = {
        "clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0,
        "tau_pos": 1.0, "tau_neg": 1.05, "loss_agg_mode": "token-mean", "global_batch_info": {},
        "gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True}
    return Config(**defaults | changed)


MORE = {  # arguments that a function may have besides, by their names
    "reference": lambda batch: batch.reference_log_prob[:, 1:],
    "sampler": lambda batch: batch.sampler_log_prob[:, 1:],
    "group": lambda batch: batch.group, "total": lambda batch: batch.total}


def of_log_probs(function: Callable[..., object],
                 advantage: Callable[[Batch], Tensor] = z_score, per_token: bool = True) -> Loss:
    """The loss of function(log_probs, old_log_probs, advantages, mask), all of them floats (B, T),
    or the advantages (B,) without `per_token`. Where it has arguments that are called reference,
    sampler, group or total, it is given these, too. It may return a number, or a tuple that begins
    with one."""
    named = [name for name in inspect.signature(function).parameters if name in MORE]

    def loss(logits: Tensor, batch: Batch) -> object:
        new, mask = log_probs(logits, batch), batch.mask[:, 1:]
        given = advantage(batch)
        given = given[:, None].expand_as(new) if per_token else given
        value = function(new, batch.old_log_prob[:, 1:], given, mask,
                         **{name: MORE[name](batch) for name in named})
        return value[0] if isinstance(value, tuple) else value
    return loss


def of_verl(function: Callable[..., object], config: Any,
            advantage: Callable[[Batch], Tensor] = partial(z_score, epsilon=1e-6)) -> Loss:
    """The loss of a function that verl registers as policy loss, which takes (old_log_prob,
    log_prob, advantages, response_mask, loss_agg_mode, config). The config is verl's ActorConfig,
    or a dictionary of what differs from its defaults."""
    if isinstance(config, dict):
        config = verl_config(config)
    wanted = ["old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config"]
    if absent := [name for name in wanted if name not in inspect.signature(function).parameters]:
        raise LossFailed(f"{function.__name__} has no argument {', '.join(absent)}, as the policy "
                         "losses of today's verl have; of_log_probs takes one of an older form")

    def of_theirs(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor) -> object:
        return function(old_log_prob=old, log_prob=new, advantages=advantages * mask,
                        response_mask=mask, loss_agg_mode=config.loss_agg_mode, config=config)
    return of_log_probs(of_theirs, advantage)


def of_trl(trainer_class: type, advantage: Callable[[Batch], Tensor] = z_score,
           **changed: object) -> Loss:
    """The loss of a GRPOTrainer's `_compute_loss(model, inputs)`, with the defaults of TRL's
    GRPOConfig but for what is `changed`, such as beta=0.04 or use_vllm=True."""
    from trl import GRPOConfig
    defaults = {name: field.default for name, field in GRPOConfig.__dataclass_fields__.items()}
    unknown = changed.keys() - defaults.keys()
    if unknown:
        raise LossFailed(f"TRL's GRPOConfig has no setting {', '.join(sorted(unknown))}")
    settings = defaults | changed

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        trainer = stand_in(trainer_class, settings)
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)[:, :-1]
        found = log_probs(logits, batch), entropy, None
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: found
        return trainer._compute_loss(None, {
            "prompt_ids": batch.ids[:, :1], "prompt_mask": batch.ids[:, :1] * 0 + 1,
            "completion_ids": batch.ids[:, 1:], "completion_mask": batch.mask[:, 1:],
            "advantages": advantage(batch), "old_per_token_logps": batch.old_log_prob[:, 1:],
            "ref_per_token_logps": batch.reference_log_prob[:, 1:],
            "sampling_per_token_logps": batch.sampler_log_prob[:, 1:],
            "importance_sampling_ratio": correction_for_vllm(batch, settings),
            "num_items_in_batch": batch.total})
    return loss


def correction_for_vllm(batch: Batch, settings: Mapping[str, object]) -> Tensor:
    """(B, T) or (B, 1) the weight that TRL computes before its loss: old over sampler, of tokens or
    of whole answers, truncated or masked."""
    d = ((batch.old_log_prob - batch.sampler_log_prob) * batch.mask)[:, 1:]
    mode = str(settings.get("vllm_importance_sampling_mode", "token_truncate"))
    w = (d.sum(1, keepdim=True) if mode.startswith("sequence") else d).exp()
    low, high = (settings.get(f"vllm_importance_sampling_clip_{end}") for end in ("min", "max"))
    if mode.endswith("truncate"):
        return w.clamp(low, high)
    is_kept = (w >= (0 if low is None else low)) & (w <= (math.inf if high is None else high))
    return torch.where(is_kept, w, 0.0)


def stand_in(trainer_class: type, settings: Mapping[str, object]) -> object:
    """A GRPOTrainer that was not set up: its settings, and an accelerator of one process."""
    trainer = trainer_class.__new__(trainer_class)
    high, entropy = settings["epsilon_high"], settings.get("entropy_coef") or 0.0

    def same(value, *_, **__):
        return value

    vars(trainer).update(settings)
    vars(trainer).update(
        args=SimpleNamespace(**{**settings, "steps_per_generation": 1}),
        epsilon_low=settings["epsilon"],
        epsilon_high=settings["epsilon"] if high is None else high,
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=bool(entropy),
        use_adaptive_entropy=False, _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True), tools=None,
        accelerator=SimpleNamespace(num_processes=1, gather=same, gather_for_metrics=same,
                                    reduce=same, sync_gradients=True))
    return trainer
