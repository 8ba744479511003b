"""The adapters of codes.py. Each takes the folder of a checkout, and returns losses by name.

They choose nothing: clip bounds, KL weights and epsilons are the code's own defaults, which are
taken from its files or named beside the adapter.
"""
import dataclasses
import importlib
import inspect
import itertools
import math
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional, Union  # noqa: UP035  names that codes use

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bridges.codes_helpers import (Replay, by_column, gradient_of_backward, groups_of, log_probs,
                                   padded_at_the_left, read, take, take_statement)
from engine.errors import UserError
from tools.helpers.formula_batches import Batch

TYPING = {"Any": Any, "Dict": dict, "List": list, "Optional": Optional, "Tuple": tuple,
          "Union": Union}
USUAL = {"torch": torch, "nn": nn, "F": F, "np": np, "math": math, "dataclasses": dataclasses,
         "defaultdict": defaultdict, **TYPING}


class Nothing:
    """Takes any call and attribute, and does nothing: an optimizer, a scheduler, a logger."""
    def __getattr__(self, name):
        return Nothing()

    def __call__(self, *_, **__):
        return Nothing()

    def __getitem__(self, _):
        return Nothing()


def ours():
    """This project's default: --advantage grpo --loss_norm token."""
    from grpo import group_z_score, policy_loss

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        mask = batch.mask[:, 1:]
        advantage = group_z_score(batch.reward, batch.group).double()[:, None]
        weight = torch.ones_like(mask)
        return policy_loss(log_probs(logits, batch), advantage, weight, mask, mask.sum())
    return {"ours": loss}


def grpo_zero(folder: Path):
    """policy-gradient/GRPO-Zero, grpo.py."""
    Episode = take(folder / "data_types.py", ["Episode"], dataclass=dataclasses.dataclass,
                   **USUAL).Episode
    code = take(folder / "grpo.py", ["normalize_rewards_per_group", "compute_entropy",
                                     "update_policy"], Episode=Episode, print=lambda *_, **__: 0,
                **USUAL)

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        def run(leaf: Tensor) -> None:
            model = Replay(leaf, batch.ids)
            model.forward = lambda ids, forward=model.forward: forward(ids).logits
            episodes = []
            for b in range(len(batch.ids)):
                start = int(batch.prompt_length[b])
                stop = start + int(batch.mask[b].sum())
                episodes.append(Episode(
                    f"{int(batch.group[b])}", "", batch.ids[b, :start].tolist(), [],
                    batch.ids[b, start:stop].tolist(), True, float(batch.reward[b]), {}))
            code.update_policy(model, Nothing(), episodes, 2, batch.pad_id, 1.0,
                               torch.device("cpu"), torch.float32)
        return gradient_of_backward(logits, run)
    return {"GRPO-Zero": loss}


def nano_aha_moment(folder: Path):
    """McGill-NLP/nano-aha-moment, nano_r1_script.py."""
    utils = take(folder / "utils.py", ["log_softmax_and_gather", "compute_token_log_probs"],
                 **USUAL)
    code = take(folder / "nano_r1_script.py", ["create_training_episodes", "compute_pg_loss"],
                compute_token_log_probs=utils.compute_token_log_probs,
                close_to_zero=lambda *_: torch.zeros(()),  # only logged
                compute_reward=lambda response, sample, end: (sample["reward"][response], {}),
                **USUAL)

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        size = len(batch.group) // len(batch.group.unique())
        samples = [{"input_ids": [], "reward": batch.reward[rows].tolist()}
                   for rows in groups_of(batch)]
        tokenizer = SimpleNamespace(batch_decode=lambda ids, **_: list(range(len(ids))))
        episodes, _ = code.create_training_episodes(
            samples=samples, all_generations=[[0]] * len(batch.group),
            all_finish_reasons=["stop"] * len(batch.group), tokenizer=tokenizer, EOS_TOKEN="",
            GENERATIONS_PER_SAMPLE=size)
        advantages = torch.tensor(episodes["all_advantages"], dtype=torch.float64)  # (B, 1)
        inputs = {"input_ids": batch.ids, "attention_mask": batch.ids != batch.pad_id,
                  "labels": batch.ids.clone(), "labels_mask": batch.mask.clone(),
                  "advantages": advantages.expand(batch.ids.shape),
                  "ref_log_probs": batch.reference_log_prob[:, 1:]}
        return code.compute_pg_loss(Replay(logits, batch.ids), inputs, batch.mask.sum(), 1.0,
                                    0.001)[0]
    return {"nano-aha-moment": loss}


def tiny_grpo(folder: Path):
    """open-thought/tiny-grpo, loss.py and train.py; padding is the end token, as there."""
    objective = take(folder / "loss.py", ["approx_kl_divergence", "masked_mean", "GRPOLoss"],
                     Experience=object, **USUAL).GRPOLoss(clip_eps=0.2, kl_weight=0.01)
    code = take(folder / "train.py", ["group_advantages", "sequence_log_probs_from_logits",
                                      "sequences_log_probs"], LlamaForCausalLM=object, **USUAL)
    mask_of = take_statement(read(folder / "train.py"),
                             "action_mask[sequence_ids == pad_token_id]",
                             ["action_mask", "sequence_ids", "pad_token_id"], "action_mask")

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        ids = torch.where(batch.ids == batch.pad_id, batch.end_id, batch.ids)
        model = Replay(logits, ids)
        model.forward = lambda forward=model.forward, **named: {
            "logits": forward(named["input_ids"]).logits}
        new = code.sequences_log_probs(model, ids, ids != batch.end_id)
        place = torch.arange(ids.shape[1])
        after_prompt = place >= batch.prompt_length[:, None]
        action = mask_of(after_prompt, ids, batch.end_id)[:, 1:]
        advantages = torch.zeros_like(batch.reward)
        for rows in groups_of(batch):
            advantages[rows] = code.group_advantages(batch.reward[rows])
        experience = SimpleNamespace(
            action_log_probs=batch.old_log_prob[:, 1:], action_mask=action,
            log_probs_ref=batch.reference_log_prob[:, 1:], advantages=advantages[:, None])
        return objective(new, experience)[0]
    return {"tiny-grpo": loss}


def rlhf_book(folder: Path):
    """natolambert/rlhf-book, code/policy_gradients: each loss with its configuration."""
    here = folder / "code/policy_gradients"
    names = {"grpo": "GRPOLoss", "drgrpo": "GRPOLoss", "rloo": "ReinforceLoss",
             "reinforce": "ReinforceLoss", "maxrl": "MaxRLLoss", "gspo": "GSPOLoss",
             "cispo": "CISPOLoss", "sapo": "SAPOLoss", "dapo": "DAPOLoss"}
    code = take(here / "loss.py", ["approx_kl3", "approx_kl2", "approx_kl1", "get_approx_kl",
                                   "masked_mean", *dict.fromkeys(names.values())],
                Experience=object, **USUAL)
    advantage = take(here / "utils.py", [
        "compute_standardized_advantages", "compute_nonstandardized_advantages",
        "compute_maxrl_advantages", "compute_loo_advantages", "compute_advantages"],
        TensorDict=dict, Config=object, **USUAL).compute_advantages

    def loss_of(name: str, **changed: object):
        settings = settings_of(here / f"configs/{name}.yaml") | changed
        objective = getattr(code, names[name])(**settings)

        def loss(logits: Tensor, batch: Batch) -> Tensor:
            advantages = torch.zeros_like(batch.reward)
            for rows in groups_of(batch):
                reward = batch.reward[rows]
                advantages[rows] = advantage({"total": reward, "binary": reward}, None, None,
                                             SimpleNamespace(loss=name))
            experience = SimpleNamespace(
                log_probs_old=batch.old_log_prob[:, 1:], action_mask=batch.mask[:, 1:],
                log_probs_ref=batch.reference_log_prob[:, 1:], advantages=advantages[:, None])
            return objective(log_probs(logits, batch), experience)
        return loss

    losses = {f"rlhf-book {name}": loss_of(name) for name in names}
    for kind in ("kl1", "kl2", "kl3"):
        losses[f"rlhf-book grpo, beta 0.1, {kind}"] = loss_of("grpo", beta=0.1, kl_estimator=kind)
    return losses


def settings_of(path: Path) -> dict[str, object]:
    """The plain `name: number` lines of a yaml file."""
    found: dict[str, object] = {}
    for line in read(path).splitlines():
        name, colon, value = line.partition("#")[0].partition(":")
        if colon and value.strip() and not line.startswith((" ", "-")):
            text = value.strip()
            try:
                found[name] = float(text)
            except ValueError:
                found[name] = text
    return found


def simple_grpo(folder: Path):
    """lsdefine/simple_GRPO, grpo_vllm_one.py: one micro-batch for each problem, as there."""
    source = read(folder / "grpo_vllm_one.py")
    advantage = take_statement(source, "curr_rewards.std()", ["curr_rewards"], "curr_rewards")

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        model = Replay(logits, batch.ids)
        code = take(folder / "grpo_vllm_one.py", ["get_per_token_logps", "GRPO_step"],
                    engine=model, beta=0.04, clip_param=0.2, compute_gen_logps=True,
                    tokenizer=SimpleNamespace(pad_token_id=batch.pad_id), **USUAL)
        losses = []
        for rows in groups_of(batch):
            start = int(batch.prompt_length[rows[0]])
            losses.append(code.GRPO_step({
                "plen": start, "inputs": batch.ids[rows], "rewards": advantage(batch.reward[rows]),
                "refs": batch.reference_log_prob[rows, start:],
                "gen_logps": batch.old_log_prob[rows, start:]}))
        return torch.stack(losses).mean()
    return {"simple_GRPO": loss}


def reasoning_from_scratch(folder: Path):
    """rasbt/reasoning-from-scratch, chapter 6: one problem a step, as there."""
    path = folder / "reasoning_from_scratch/ch06.py"

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        model = Replay(logits, batch.ids)
        model.forward = lambda ids, forward=model.forward: forward(ids).logits
        losses = []
        for rows in groups_of(batch):
            left = iter(rows.tolist())

            def sample(left=left, **_):
                row = next(left)
                stop = int(batch.prompt_length[row] + batch.mask[row].sum())
                return batch.ids[row, :stop], int(batch.prompt_length[row]), row
            code = take(path, ["sequence_logprob", "compute_grpo_loss"], sample_response=sample,
                        render_prompt=str, reward_rlvr=lambda row, _: float(batch.reward[row]),
                        **USUAL)
            found = code.compute_grpo_loss(model, None, {"problem": "", "answer": ""},
                                           torch.device("cpu"), num_rollouts=len(rows))
            losses.append(found["loss_tensor"])
        return torch.stack(losses).mean()
    return {"reasoning-from-scratch ch06": loss}


def reasoning_from_scratch_7(folder: Path):
    """rasbt/reasoning-from-scratch, chapter 7 with clipping and KL: 7_5_plus_kl.py."""
    path = folder / "ch07/03_rlvr_grpo_scripts_advanced/7_5_plus_kl.py"
    own = take(path, ["sequence_logprob_and_entropy"], **USUAL).sequence_logprob_and_entropy

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        replay = Replay(logits, batch.ids)
        known = {"old": (batch.old_log_prob * batch.mask).sum(1),
                 "reference": (batch.reference_log_prob * batch.mask).sum(1)}
        losses = []
        for rows in groups_of(batch):
            drawn: list[int] = []
            asked = {name: 0 for name in known}

            def sample(rows=rows, drawn=drawn, **_):
                row = int(rows[len(drawn)])
                drawn.append(row)
                stop = int(batch.prompt_length[row] + batch.mask[row].sum())
                return batch.ids[row, :stop], int(batch.prompt_length[row]), row

            def log_prob(model, ids, start, return_entropy=False, rows=rows, asked=asked):
                if model.name == "new":
                    return own(lambda ids: replay(ids).logits, ids, start)
                value = known[model.name][rows[asked[model.name]]]
                asked[model.name] += 1
                return (value, torch.zeros(())) if return_entropy else value

            code = take(path, ["compute_grpo_loss_plus_kl"], sample_response=sample,
                        sequence_logprob_and_entropy=log_prob, render_prompt=str,
                        reward_rlvr=lambda row, _: float(batch.reward[row]), **USUAL)
            models = [NamedModel(name) for name in ("new", "old", "reference")]
            found = code.compute_grpo_loss_plus_kl(
                *models, None, {"problem": "", "answer": ""}, torch.device("cpu"),
                num_rollouts=len(rows))
            losses.append(found["loss_tensor"])
        return torch.stack(losses).mean()
    return {"reasoning-from-scratch ch07, clipping and KL": loss}


class NamedModel(Nothing):
    """A model of which only the name is asked."""
    training = False

    def __init__(self, name: str):
        self.name = name


def search_r1(folder: Path):
    """PeterGriffinJin/Search-R1, its update of the actor, with the settings of train_grpo.sh."""
    functional = take(folder / "verl/utils/torch_functional.py", ["masked_mean"], **USUAL)
    core = take(folder / "verl/trainer/ppo/core_algos.py",
                ["compute_grpo_outcome_advantage", "compute_policy_loss", "kl_penalty"],
                verl_F=functional, **USUAL)
    actor_class = take(folder / "verl/workers/actor/dp_actor.py", ["DataParallelPPOActor"],
                       BasePPOActor=object, core_algos=core, verl_F=functional,
                       masked_mean=functional.masked_mean, append_to_dict=Nothing(),
                       **USUAL).DataParallelPPOActor

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        mask = batch.mask[:, 1:]
        reward = torch.zeros_like(mask)
        reward[torch.arange(len(mask)), batch.prompt_length - 1] = batch.reward
        advantage, _ = core.compute_grpo_outcome_advantage(reward, mask, batch.group.tolist())
        data = ActorData({"responses": batch.ids[:, 1:], "attention_mask": mask,
                          "old_log_probs": batch.old_log_prob[:, 1:], "advantages": advantage,
                          "ref_log_prob": batch.reference_log_prob[:, 1:], "loss_mask": mask})

        def run(leaf: Tensor) -> None:
            actor = actor_class.__new__(actor_class)
            log_p = leaf.log_softmax(-1)[:, :-1]
            entropy = -(log_p.exp() * log_p).sum(-1)
            actor.actor_module = actor.actor_optimizer = Nothing()
            actor._optimizer_step = lambda: torch.zeros(())
            actor._forward_micro_batch = lambda **_: (entropy, log_probs(leaf, batch))
            actor.config = SimpleNamespace(
                ppo_mini_batch_size=1, ppo_micro_batch_size=1, state_masking=True,
                use_dynamic_bsz=False, clip_ratio=.2, entropy_coeff=.001, use_kl_loss=True,
                kl_loss_coef=.001, kl_loss_type="low_var_kl")
            actor.update_policy(data)
        return gradient_of_backward(logits, run)
    return {"Search-R1": loss}


class ActorData(dict):
    """A batch of Search-R1 that is its own only part."""
    meta_info = {"temperature": 1.0}

    @property
    def batch(self):
        return self

    def select(self, **_):
        return self

    def split(self, _):
        return [self]

    def cuda(self):
        return self


def unsloth(folder: Path):
    """unslothai/unsloth-zoo, grpo_compute_loss; TRL, whose trainer it replaces, has the
    advantage."""
    code = take(folder / "unsloth_zoo/rl_replacements.py", ["grpo_compute_loss"], **USUAL)

    def loss_of(kind: str, level: str, beta: float):
        def loss(logits: Tensor, batch: Batch) -> Tensor:
            mask = batch.mask[:, 1:]
            advantage = torch.zeros_like(batch.reward)
            for rows in groups_of(batch):
                reward = batch.reward[rows]
                advantage[rows] = (reward - reward.mean()) / (reward.std() + 1e-4)
            found = code.grpo_compute_loss(
                batch.reference_log_prob[:, 1:], log_probs(logits, batch),
                batch.old_log_prob[:, 1:], None, batch.ids[:, 1:], mask, beta, advantage,
                loss_type=kind, importance_sampling_level=level, num_items_in_batch=mask.sum(),
                max_completion_length=512)
            return found[0]
        return loss
    found = {f"unsloth {kind}": loss_of(kind, "token", 0.0)
             for kind in ("grpo", "bnpo", "dapo", "dr_grpo", "cispo", "sapo")}
    found["unsloth grpo, ratio of the answer"] = loss_of("grpo", "sequence", 0.0)
    return found | {"unsloth grpo, beta 0.04": loss_of("grpo", "token", .04)}


def the_lm_book(folder: Path):
    """aburkov/theLMbook, GRPO.py."""
    code = take(folder / "GRPO.py", [
        "selective_log_softmax", "compute_log_probabilities", "create_completion_mask",
        "compute_group_relative_advantages", "maximize_grpo_objective"],
        print=lambda *_: None, **USUAL)

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        place, P = padded_at_the_left(batch)
        ids = by_column(batch.ids, place)
        mask = code.create_completion_mask(ids[:, P:], batch.end_id)

        def run(leaf: Tensor) -> None:
            laid = by_column(leaf, place)
            model = Replay(laid, ids)
            model.forward = lambda **named: SimpleNamespace(logits=laid)
            rollouts = {
                "input_ids": ids, "attention_mask": None, "completion_mask": mask,
                "old_log_probs": by_column(batch.old_log_prob, place)[:, P:],
                "ref_log_probs": by_column(batch.reference_log_prob, place)[:, P:],
                "logits_to_keep": ids.shape[1] - P, "formatted_completions": None,
                "repeated_prompts": None, "repeated_answers": None,
                "batch_size": len(batch.group.unique()),
                "num_generations": len(batch.group) // len(batch.group.unique())}
            code.maximize_grpo_objective(model, None, rollouts, None,
                                         lambda **_: batch.reward.tolist(), Nothing(), 0.04, 0.1)
        return gradient_of_backward(logits, run)
    return {"theLMbook": loss}


def minimind(folder: Path):
    """jingyaogong/minimind, trainer/train_grpo.py: both of its losses."""
    path = folder / "trainer/train_grpo.py"

    def loss_of(kind: str):
        def loss(logits: Tensor, batch: Batch) -> Tensor:
            place, P = padded_at_the_left(batch)
            ids = by_column(batch.ids, place)
            in_answer = by_column(batch.mask, place)[:, P:]
            size = len(batch.group) // len(batch.group.unique())

            def run(leaf: Tensor) -> None:
                laid = by_column(leaf, place)
                model = Replay(laid, ids)
                model.forward = lambda *_, **__: SimpleNamespace(logits=laid)
                rollout = SimpleNamespace(
                    output_ids=ids, completion_ids=ids[:, P:], completions=None,
                    per_token_logps=by_column(batch.old_log_prob, place)[:, P:],
                    prompt_lens=torch.full((len(ids),), P), completion_mask=in_answer)
                args = SimpleNamespace(
                    device="cpu", max_seq_len=0, num_generations=size, max_gen_len=9, beta=0.1,
                    epsilon=0.2, epsilon_high=5.0, loss_type=kind, accumulation_steps=1,
                    grad_clip=0, log_interval=999, save_interval=999, debug_mode=False)
                engine = SimpleNamespace(rollout=lambda **_: rollout, update_policy=lambda _: None)
                # The reference is a model there. Its log-probs stand in for its logits, and are
                # what log_softmax makes of them; they alone have no gradient.
                functions = SimpleNamespace(log_softmax=lambda x, dim: (
                    F.log_softmax(x, dim=dim) if x.requires_grad else x))
                code = take(path, ["grpo_train_epoch"], args=args, model=model,
                            tokenizer=minimind_tokenizer(batch), optimizer=Nothing(),
                            scheduler=Nothing(), autocast_ctx=nullcontext(), Logger=Nothing(),
                            lm_config=SimpleNamespace(use_moe=False),
                            DistributedDataParallel=type(None), is_main_process=lambda: False,
                            calculate_rewards=lambda *_: batch.reward,
                            **USUAL | {"F": functions})
                log_p = by_column(batch.reference_log_prob, place)
                log_p = torch.cat([log_p[:, 1:], log_p[:, :1]], 1)  # at the place that predicts it
                kept = SimpleNamespace(logits=log_p[..., None].expand(laid.shape))
                code.grpo_train_epoch(0, [{"prompt": [""]}], 999, engine, lambda *_, **__: kept,
                                      None)
            return gradient_of_backward(logits, run)
        return loss
    return {f"minimind {kind}": loss_of(kind) for kind in ("cispo", "grpo")}


def minimind_tokenizer(batch: Batch):
    class Inputs(dict):
        def to(self, _):
            return self

    class Tokenizer:
        pad_token_id, eos_token_id = batch.pad_id, batch.end_id

        def __call__(self, *_, **__):
            return Inputs(input_ids=batch.ids, attention_mask=batch.ids)
    return Tokenizer()


def nanochat(folder: Path):
    """karpathy/nanochat, scripts/chat_rl.py: the loop over the problems of a step."""
    path = folder / "scripts/chat_rl.py"
    source = read(path)

    def loss(logits: Tensor, batch: Batch) -> Tensor:
        groups = groups_of(batch)
        size = len(groups[0])

        def run(leaf: Tensor) -> None:
            replay = Replay(leaf, batch.ids)
            model = NanochatModel(replay)
            engine = SimpleNamespace(generate_batch=lambda tokens, **_: [
                [batch.ids[row, :stop_of(batch, row)].tolist() for row in groups[tokens.group]],
                [batch.mask[row, :stop_of(batch, row)].long().tolist()
                 for row in groups[tokens.group]]])
            tokenizer = SimpleNamespace(
                encode_special=lambda _: batch.pad_id, decode=lambda ids: ids,
                render_for_completion=lambda group: Prompt(
                    batch.ids[groups[group][0], :batch.prompt_length[groups[group][0]]].tolist(),
                    group))
            rewards = iter(batch.reward.tolist())  # they are asked for row by row

            class Task(list):
                def reward(self, *_):
                    return next(rewards)
            args = SimpleNamespace(num_samples=size, device_batch_size=size, max_new_tokens=9,
                                   temperature=1.0, top_k=50)
            given = {"tokenizer": tokenizer, "engine": engine, "model": model, "args": args,
                     "train_task": Task(range(len(groups))), "ddp_rank": 0, "ddp_world_size": 1,
                     "device": torch.device("cpu"), "step": 0, "itertools": itertools} | USUAL
            get_batch = take(path, ["get_batch"], **given).get_batch
            loop = take_statement(
                source, "for example_step in range",
                ["examples_per_rank", "batch_iterator", "rewards_list", "sequence_lengths"],
                "rewards_list",
                **given, num_steps=1, print0=lambda *_: None)
            loop(len(groups), get_batch(), [], [])
        return gradient_of_backward(logits, run)
    return {"nanochat": loss}


class Prompt(list):
    """The tokens of a prompt that knows its group."""
    def __init__(self, tokens: list[int], group: int):
        super().__init__(tokens)
        self.group = group


class NanochatModel:
    """nanochat's model returns the loss of each token when it gets targets; -1 has none."""
    def __init__(self, replay: Replay):
        self.replay = replay

    def eval(self):
        return self

    train = eval

    def __call__(self, inputs: Tensor, targets: Tensor, loss_reduction: str) -> Tensor:
        logits = self.replay(inputs).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1,
                               reduction=loss_reduction)


def stop_of(batch: Batch, row) -> int:
    return int(batch.prompt_length[row] + batch.mask[row].sum())


def verl(folder: Path):
    """volcengine/verl, core_algos.py: its losses, ways of averaging and advantages."""
    path = folder / "verl/trainer/ppo/core_algos.py"
    functional = take(folder / "verl/utils/torch_functional.py",
                      ["masked_sum", "masked_mean", "masked_var", "masked_whiten"], **USUAL)
    losses = {"vanilla": "compute_policy_loss_vanilla", "gspo": "compute_policy_loss_gspo",
              "sapo": "compute_policy_loss_sapo", "cispo": "compute_policy_loss_cispo",
              "gpg": "compute_policy_loss_gpg", "geo_mean": "compute_policy_loss_geo_mean"}
    advantages = {"grpo": "compute_grpo_outcome_advantage",
                  "rloo": "compute_rloo_outcome_advantage",
                  "reinforce_plus_plus_baseline":
                      "compute_reinforce_plus_plus_baseline_outcome_advantage",
                  "opo": "compute_opo_outcome_advantage", "gpg": "compute_gpg_outcome_advantage"}

    def plain(*_, **__):  # a decorator without effect
        return lambda function: function

    code = take(path, ["agg_loss", *losses.values(), *advantages.values()],
                verl_F=functional, register_adv_est=plain, register_policy_loss=plain,
                AdvantageEstimator=Nothing(), AlgoConfig=VerlConfig, ActorConfig=VerlActor, **USUAL)

    def loss_of(policy: str, mode: str, estimator: str, **of_estimator: object):
        def loss(logits: Tensor, batch: Batch) -> Tensor:
            mask = batch.mask[:, 1:]
            reward = torch.zeros_like(mask)
            reward[torch.arange(len(mask)), batch.prompt_length - 1] = batch.reward
            advantage, _ = getattr(code, advantages[estimator])(
                token_level_rewards=reward, response_mask=mask, index=batch.group.numpy(),
                **of_estimator)
            found = getattr(code, losses[policy])(
                batch.old_log_prob[:, 1:], log_probs(logits, batch), advantage, mask, mode,
                VerlActor())
            return found[0]
        return loss

    modes = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    found = {f"verl vanilla, {mode}": loss_of("vanilla", mode, "grpo") for mode in modes}
    for policy in ("gspo", "sapo", "cispo", "gpg", "geo_mean"):
        found[f"verl {policy}"] = loss_of(policy, "seq-mean-token-mean", "grpo")
    found["verl vanilla, Dr. GRPO's advantage"] = loss_of("vanilla", "token-mean", "grpo",
                                                          norm_adv_by_std_in_grpo=False)
    for estimator in ("rloo", "reinforce_plus_plus_baseline", "opo", "gpg"):
        found[f"verl vanilla, advantage {estimator}"] = loss_of("vanilla", "token-mean", estimator)
    return found


class VerlConfig:
    """Only a type that verl asks for."""


class VerlActor:
    """verl's settings of the actor, with its defaults."""
    clip_ratio = 0.2
    clip_ratio_low = clip_ratio_high = 0.2
    global_batch_info: dict[str, object] = {}
    policy_loss = SimpleNamespace(tau_pos=1.0, tau_neg=1.05)
    tau_pos, tau_neg = 1.0, 1.05

    def get(self, name: str, default: object = None) -> object:
        return getattr(self, name, default)


def trl():
    """The installed TRL: each loss_type of GRPOTrainer, with the log-probs of the batch."""
    try:
        import trl as package
        from trl import GRPOConfig, GRPOTrainer
    except ImportError:
        raise UserError("TRL is missing: pip install -r bridges/requirements.txt") from None
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


ADAPTERS = {
    "ours": ours, "trl": trl, "verl": verl, "rlhf-book": rlhf_book, "tiny-grpo": tiny_grpo,
    "GRPO-Zero": grpo_zero, "nano-aha-moment": nano_aha_moment, "simple_GRPO": simple_grpo,
    "reasoning-from-scratch": reasoning_from_scratch, "theLMbook": the_lm_book,
    "minimind": minimind, "nanochat": nanochat,
    "reasoning-from-scratch, chapter 7": reasoning_from_scratch_7, "Search-R1": search_r1,
    "unsloth": unsloth}
