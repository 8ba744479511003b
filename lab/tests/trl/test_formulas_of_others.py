"""Advantages and bounds, compared with the functions of verl and rlhf-book.

They run where a folder with checkouts of both is named:

    CHECKOUTS=~/src python -m pytest lab/tests/trl/test_formulas_of_others.py

Each comparison is on a random batch of groups of different sizes, with answers of different
lengths. Where two codes divide by different things the test says by which.
"""
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import hand_made

from lab.trl.adapters import USUAL, Nothing, VerlActor, VerlConfig, settings_of
from lab.trl.codes_helpers import take
from credit.baselines import maxrl, opo, optimal_token_baseline
from credit.clips import clipped_loss
from credit.critic import generalised_advantage
from grpo import dr_grpo, grpo, policy_loss, rloo

FOLDER = os.environ.get("CHECKOUTS")
pytestmark = pytest.mark.skipif(not FOLDER, reason="CHECKOUTS names no folder with verl/ and "
                                                   "rlhf-book/ of GitHub")
CLIP = (0.2, 0.2)


@pytest.fixture(scope="module")
def verl():
    folder = Path(FOLDER).expanduser() / "verl"
    functional = take(folder / "verl/utils/torch_functional.py",
                      ["masked_sum", "masked_mean", "masked_var", "masked_whiten"], **USUAL)

    def plain(*_, **__):  # a decorator without effect
        return lambda function: function
    names = ["agg_loss", "compute_gae_advantage_return", "compute_optimal_token_baseline_advantage"]
    names += [f"compute_{name}_outcome_advantage" for name in (
        "grpo", "rloo", "rloo_vectorized", "gpg", "opo", "reinforce_plus_plus_baseline")]
    names += [f"compute_policy_loss_{name}" for name in (
        "vanilla", "gspo", "sapo", "cispo", "geo_mean")]
    return take(folder / "verl/trainer/ppo/core_algos.py", names, verl_F=functional,
                register_adv_est=plain, register_policy_loss=plain, AdvantageEstimator=Nothing(),
                AlgoConfig=VerlConfig, ActorConfig=VerlActor, **USUAL)


@pytest.fixture(scope="module")
def book():
    here = Path(FOLDER).expanduser() / "rlhf-book/code/policy_gradients"
    losses = ["GRPOLoss", "GSPOLoss", "CISPOLoss", "SAPOLoss"]
    advantages = ["compute_standardized_advantages", "compute_nonstandardized_advantages",
                  "compute_maxrl_advantages", "compute_loo_advantages", "compute_gae"]
    code = take(here / "loss.py", ["masked_mean", *losses], Experience=object, **USUAL)
    functions = take(here / "utils.py", advantages, **USUAL)
    return SimpleNamespace(**{name: getattr(code, name) for name in losses},
                           **{name: getattr(functions, name) for name in advantages}, folder=here)


def batch(seed=0, sizes=(4, 6, 3)):
    """Groups of 4, 6 and 3 answers, of 1 to 12 tokens, with rewards of 0 and 1."""
    draw = torch.Generator().manual_seed(seed)
    group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    length = torch.randint(1, 13, group.shape, generator=draw)
    mask = torch.arange(12) < length[:, None]
    log_p = torch.randn(*mask.shape, 5, generator=draw).log_softmax(-1)
    reward = torch.randint(2, group.shape, generator=draw).float()
    reward[0], reward[1] = 1.0, 0.0
    return hand_made(mask, group=group, log_prob=log_p[..., 0],
                     collision=log_p.exp().square().sum(-1),
                     scores={"reward": reward, "answer": reward})


def of_verl(code, name, rollouts, **more):
    """verl's advantages, which get the reward at the last token."""
    mask = rollouts.mask.float()
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(len(mask)), rollouts.length - 1] = rollouts.reward
    function = getattr(code, f"compute_{name}")
    return function(token_level_rewards=rewards, response_mask=mask, **more)[0]


def per_group(function, rollouts):
    """An advantage of rlhf-book, which is computed for one group at a time."""
    found = torch.zeros_like(rollouts.reward)
    for number in rollouts.group.unique():
        rows = rollouts.group == number
        found[rows] = function(rollouts.reward[rows])
    return found[:, None] * rollouts.mask


def same(ours, theirs, mask=None):
    if mask is not None:
        theirs = theirs * mask
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_advantages_of_verl(verl, seed):
    rollouts = batch(seed)
    index = {"index": rollouts.group.numpy()}
    mean = dr_grpo(rollouts)
    same(mean, of_verl(verl, "grpo_outcome_advantage", rollouts, norm_adv_by_std_in_grpo=False,
                       **index))
    for name in ("rloo", "rloo_vectorized"):
        same(rloo(rollouts), of_verl(verl, f"{name}_outcome_advantage", rollouts, **index))
    same(opo(rollouts), of_verl(verl, "opo_outcome_advantage", rollouts, **index))
    # times the answers, divided by those that have a reward
    right = rollouts.reward.count_nonzero()
    same(mean * len(rollouts.reward) / right, of_verl(verl, "gpg_outcome_advantage", rollouts,
                                                      **index))
    # divided by the std over the batch's tokens, after their mean is subtracted
    values = mean[rollouts.mask]
    whitened = (mean - values.mean()) / (values.var() + 1e-8).sqrt()
    same(whitened * rollouts.mask,
         of_verl(verl, "reinforce_plus_plus_baseline_outcome_advantage", rollouts, **index))


@pytest.mark.parametrize("seed", range(5))
def test_the_z_score_differs_by_n_minus_1_and_epsilon(verl, book, seed):
    rollouts = batch(seed)
    size = torch.bincount(rollouts.group)[rollouts.group]
    variance = torch.stack([rollouts.reward[rollouts.group == number].var(correction=0)
                            for number in rollouts.group])
    over_n_minus_1 = (variance * size / (size - 1)).sqrt()
    for epsilon, theirs in (
            (1e-6, of_verl(verl, "grpo_outcome_advantage", rollouts, index=rollouts.group.numpy())),
            (1e-8, per_group(book.compute_standardized_advantages, rollouts))):
        factor = (variance.sqrt() + 1e-4) / (over_n_minus_1 + epsilon)
        same(grpo(rollouts) * factor[:, None], theirs, rollouts.mask)


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_the_optimal_token_baseline_of_verl(verl, seed, zero_tail):
    rollouts = batch(seed)
    theirs = of_verl(verl, "optimal_token_baseline_advantage", rollouts,
                     index=rollouts.group.numpy(), old_log_probs=rollouts.log_prob,
                     sum_pi_squared=rollouts.collision, handle_zero_tail=zero_tail)
    torch.testing.assert_close(optimal_token_baseline(rollouts, zero_tail=zero_tail), theirs,
                               rtol=1e-5, atol=2e-6)  # sums of s^2 in another order


@pytest.mark.parametrize("seed", range(5))
def test_advantages_of_rlhf_book(book, seed):
    rollouts = batch(seed)
    same(dr_grpo(rollouts), per_group(book.compute_nonstandardized_advantages, rollouts))
    same(rloo(rollouts), per_group(book.compute_loo_advantages, rollouts))
    same(maxrl(rollouts), per_group(book.compute_maxrl_advantages, rollouts))


@pytest.mark.parametrize("gamma, gae_lambda", [(1.0, 1.0), (0.9, 0.8)])
def test_gae_of_both(verl, book, gamma, gae_lambda):
    rollouts = batch()
    mask = rollouts.mask
    value = torch.rand(mask.shape, generator=torch.Generator().manual_seed(1))
    ours = generalised_advantage(value, rollouts.reward, mask, gamma, gae_lambda)
    same(ours, book.compute_gae(rollouts.reward[:, None], mask.float(), value, gamma, gae_lambda))
    theirs = of_verl(verl, "gae_advantage_return", rollouts, values=value, gamma=gamma,
                     lam=gae_lambda)
    whitened = (ours - ours[mask].mean()) / (ours[mask].var() + 1e-8).sqrt()  # verl always does
    torch.testing.assert_close(whitened * mask, theirs * mask, rtol=1e-5, atol=1e-5)


def gradient(loss, log_prob):
    """The gradient of a loss of the log-probs."""
    leaf = log_prob.clone().requires_grad_()
    loss(leaf).backward()
    return leaf.grad


def updated(seed=0):
    """A batch, its old and new log-probs, advantages, and weights with which every answer counts
    the same."""
    rollouts = batch(seed)
    draw = torch.Generator().manual_seed(seed + 100)
    new = rollouts.log_prob + 0.4 * torch.randn(rollouts.mask.shape, generator=draw)
    N = rollouts.mask.sum()
    weight = (N / (len(rollouts.reward) * rollouts.length))[:, None] * rollouts.mask
    return rollouts, new, rloo(rollouts), weight, N


@pytest.mark.parametrize("kind, theirs, counting", [
    ("dual", "vanilla", "token-mean"), ("gspo", "gspo", "answer"), ("sapo", "sapo", "answer"),
    ("cispo", "cispo", "token-mean"), ("gmpo", "geo_mean", "answer")])
def test_clip_kinds_of_verl(verl, kind, theirs, counting):
    rollouts, new, advantage, weight, N = updated()
    old, mask = rollouts.log_prob, rollouts.mask
    clip = CLIP
    if kind == "gmpo":  # verl's bounds are of the log-ratio, and ours of the ratio
        clip = (1 - float(np.exp(-0.2)), float(np.exp(0.2)) - 1)
    w = mask.float() if counting == "token-mean" else weight
    ours = gradient(lambda leaf: clipped_loss(kind)(leaf, advantage, w, mask, N, old, clip), new)
    function = getattr(verl, f"compute_policy_loss_{theirs}")
    found = gradient(lambda leaf: function(old, leaf, advantage, mask.float(), "token-mean",
                                           VerlActor())[0], new)
    torch.testing.assert_close(ours * mask, found * mask, rtol=1e-5, atol=1e-7)
    plain = gradient(lambda leaf: policy_loss(leaf, advantage, w, mask, N), new)
    assert not torch.allclose(ours * mask, plain * mask, rtol=1e-2)  # ratios are not 1


@pytest.mark.parametrize("kind, theirs", [
    ("ppo", "grpo"), ("cispo", "cispo"), ("sapo", "sapo")])
def test_clip_kinds_of_rlhf_book(book, kind, theirs):
    rollouts, new, advantage, weight, N = updated()
    settings = settings_of(book.folder / f"configs/{theirs}.yaml")
    objective = getattr(book, f"{theirs.upper()}Loss")(**settings)
    clip = (settings.get("clip_eps_lo", 0), settings.get("clip_eps_hi", 0))
    loss = policy_loss if kind == "ppo" else clipped_loss(kind)
    old, mask = rollouts.log_prob, rollouts.mask
    ours = gradient(lambda leaf: loss(leaf, advantage, weight, mask, N, old, clip), new)
    experience = SimpleNamespace(log_probs_old=old, action_mask=mask.float(), log_probs_ref=old,
                                 advantages=advantage)
    found = gradient(lambda leaf: objective(leaf, experience), new)
    torch.testing.assert_close(ours * mask, found * mask, rtol=1e-5, atol=1e-7)


def test_the_ratio_of_an_answer_in_rlhf_book_has_the_same_gradient_for_equal_advantages(book):
    """Its GSPO has one objective for the answer. The sum over an answer's tokens is the same, so
    each token's gradient is the answer's ratio divided by its length, as here."""
    rollouts, new, advantage, weight, N = updated()
    settings = settings_of(book.folder / "configs/gspo.yaml")
    clip = (settings["clip_eps_lo"], settings["clip_eps_hi"])
    old, mask = rollouts.log_prob, rollouts.mask
    ours = gradient(lambda leaf: clipped_loss("gspo")(leaf, advantage, weight, mask, N, old, clip),
                    new)
    experience = SimpleNamespace(log_probs_old=old, action_mask=mask.float(), log_probs_ref=old,
                                 advantages=advantage)
    found = gradient(lambda leaf: book.GSPOLoss(**settings)(leaf, experience), new)
    torch.testing.assert_close(ours * mask, found * mask, rtol=1e-5, atol=1e-7)
