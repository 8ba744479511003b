"""Identities of theory about credit and gradient, each with both of its sides, in the synthetic
task whose answers are all listed (probes/enumerated.py)."""
import math

import pytest
import torch

from grpo import gradient_size
from lab.probes.enumerated import Batches, estimator, make_enumerated
from lab.probes.enumerated_methods import list_advantages

LISTED = [(0, 3), (3, 2)]  # seed of a policy, and answers in a group


@pytest.fixture(scope="module", params=LISTED, ids=str)
def listed(request):
    """A task, all groups that it can draw, and the advantages of these groups."""
    seed, G = request.param
    task = make_enumerated(seed, length=3)
    batches = Batches.all(task, G)
    return task, batches, list_advantages(task, batches, seed).values


def gradient_with(task, values):
    """E[sum_t value_t grad log pi(y_t)] over single answers; `values` are (n, T)."""
    terms = (task.probability[:, None] * values * task.rollouts.mask).flatten()
    of_choices = torch.zeros(len(task.score), dtype=torch.float64)
    return of_choices.index_add(0, task.node.flatten(), terms) @ task.score


def assert_equal(left, right):
    assert (left - right).norm() < 1e-5 * right.norm()


def test_the_gradient_of_j_is_that_of_true_credit(listed):
    """By autograd of J, and E[sum A_t grad log pi] with A_t = V(after) - V(before)."""
    task, _, _ = listed
    assert_equal(gradient_with(task, task.credit), task.gradient)


def test_squared_credits_add_up_to_the_variance_of_the_reward(listed):
    """sum_t E[A_t^2] = Var(R) = p (1 - p)."""
    task, _, _ = listed
    assert (task.probability @ task.credit.square().sum(1)).item() == pytest.approx(
        task.J * (1 - task.J), rel=1e-5)


def test_unsure_tokens_have_the_larger_gradients(listed):
    """E[s^2] of a token = 1 - sum p^2."""
    task, _, _ = listed
    rollouts, mask = task.rollouts, task.rollouts.mask
    collision = rollouts.collision.double()
    s = gradient_size(rollouts.log_prob.double(), collision)
    left = task.probability @ (s.square() * mask).sum(1)
    assert left.item() == pytest.approx(
        (task.probability @ ((1 - collision) * mask).sum(1)).item(), rel=1e-5)


def mean_of(listed, factor):
    task, batches, _ = listed
    return estimator(task, batches, factor / batches.which.shape[1]).mean


def test_group_means_shorten_the_gradient_and_a_z_score_stretches_it(listed):
    """dr_grpo is (G - 1) / G of the true gradient, the z-score c(p, G) times it."""
    task, batches, advantages = listed
    G = batches.which.shape[1]
    assert_equal(mean_of(listed, advantages["rloo"]), task.gradient)
    assert_equal(mean_of(listed, advantages["dr_grpo"]), task.gradient * (G - 1) / G)
    assert_equal(mean_of(listed, advantages["grpo"]), z_score_factor(task.J, G) * task.gradient)


def test_a_weight_that_looks_at_the_drawn_token_changes_what_is_learned(listed):
    """A weight of the prefix alone weights the credits. One of the token also pays it for V of its
    prefix: E[sum w (A_t + V - b) grad log pi], where the baseline b is J on average."""
    task, batches, advantages = listed
    by_prefix = 1 + task.rollouts.entropy.double()
    by_token = 1 / (task.rollouts.log_prob.double().abs() + 0.1)
    of_token = by_token * (task.credit + task.worth[:, :-1] - task.J)
    for weight, values in ((by_prefix, by_prefix * task.credit), (by_token, of_token)):
        assert_equal(mean_of(listed, weight[batches.which] * advantages["rloo"]),
                     gradient_with(task, values))


def z_score_factor(p, G, epsilon=1e-4):
    """The mean advantage of a right answer minus that of a wrong one. Without epsilon
    E sqrt((G-1-K)/(K+1)) + E sqrt(K/(G-K)), where K ~ Bin(G-1, p) others are right."""
    total = 0.0
    for K in range(G):
        chance = math.comb(G - 1, K) * p ** K * (1 - p) ** (G - 1 - K)
        if_right, if_wrong = (K + 1) / G, K / G  # the share of right answers in the group
        up = (1 - if_right) / (math.sqrt(if_right * (1 - if_right)) + epsilon)
        down = if_wrong / (math.sqrt(if_wrong * (1 - if_wrong)) + epsilon)
        total += chance * (up + down)
    return total
