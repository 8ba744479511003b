"""The adapters of codes.py. Each returns losses by name.

They choose nothing: clip bounds, KL weights and epsilons are the code's own defaults, which are
taken from its files.
"""
import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable

import torch
from torch import Tensor

from lab.engine.errors import UserError
from lab.formula.adapters import log_probs, module_of, of_trl
from lab.formula.batches import Batch


def ours():
    """This project's default: --advantage grpo --loss_norm token."""
    from grpo import group_z_score, policy_loss

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        mask = batch.mask[:, 1:]
        advantage = group_z_score(batch.reward, batch.group).double()[:, None]
        weight = torch.ones_like(mask)
        return policy_loss(log_probs(logits, batch), advantage, weight, mask, mask.sum())
    return {"ours": loss}


def take_statement(source: str, containing: str, inputs: list[str], output: str,
                   **given: object) -> Callable[..., Tensor]:
    """A function of the shortest statement that contains a text: from `inputs` to the variable
    `output`, for what a code does in the middle of a long function."""
    found = [ast.unparse(node) for node in ast.walk(ast.parse(textwrap.dedent(source)))
             if isinstance(node, (ast.Assign, ast.AugAssign, ast.For))]
    found = [text for text in found if containing in text]
    if not found:
        raise UserError(f"no statement contains {containing!r}: it is another version")
    body = textwrap.indent(min(found, key=len), "    ")
    return module_of(f"def piece({', '.join(inputs)}):\n{body}\n    return {output}\n", given).piece


def trl():
    """The installed TRL: each loss_type of GRPOTrainer, with the log-probs of the batch."""
    try:
        import trl as package
        from trl import GRPOTrainer
    except ImportError:
        raise UserError("TRL is missing: pip install -r lab/trl/requirements.txt") from None
    source = inspect.getsource(GRPOTrainer)
    nanstd = importlib.import_module(GRPOTrainer.__module__).nanstd
    mean = take_statement(source, "torch.nanmean(rewards.view", ["rewards", "num_generations"],
                          "mean_grouped_rewards", torch=torch)
    std = take_statement(source, "std_rewards = nanstd(rewards.view",
                         ["rewards", "num_generations"], "std_rewards", nanstd=nanstd, torch=torch)
    scaled = take_statement(source, "advantages / (std_rewards", ["advantages", "std_rewards"],
                            "advantages", torch=torch)

    def loss_of(kind: str, **changed: object):
        def advantage(batch: Batch) -> Tensor:
            size = len(batch.group) // len(batch.group.unique())
            advantages = batch.reward - mean(batch.reward, size).repeat_interleave(size)
            if changed.get("scale_rewards") == "none":
                return advantages
            return scaled(advantages, std(batch.reward, size).repeat_interleave(size))
        return of_trl(GRPOTrainer, advantage, loss_type=kind, **changed)

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


ADAPTERS = {"ours": ours, "trl": trl}
