"""Which tokens move a token: relations and kernels, on a batch that is small enough to check."""
from dataclasses import replace

import numpy as np
import pytest
import torch

from analysis.tokens import TokenTable
from engine.policy import derived_seed
from harness.load import load_policy
from harness.settings import make_settings
from research.probes.change_batches import change_in_a_step, with_groups
from research.probes.change_parts import (ALL_UP, ITSELF, ONE_OF_EACH, OTHERS, OWN_ANSWER,
                                          RELATIONS, RIGHT, SAME_WORD, SAME_WORD_AND_PLACE,
                                          SAME_WORD_THERE, SINGLE, OTHER_WORD_THERE,
                                          batches_of_part, kernels, relations, token_columns)


def test_the_relation_of_two_tokens():
    """Answers `a b c`, `a b a` and `b b`, in which prefixes are numbered: '' 0, a 1, ab 2, b 3."""
    tokens = TokenTable({"problem": np.zeros(8), "answer": np.array([0, 0, 0, 1, 1, 1, 2, 2]),
                         "position": np.array([0, 1, 2, 0, 1, 2, 0, 1]),
                         "token_id": np.array([0, 1, 2, 0, 1, 0, 1, 1]),
                         "prefix": np.array([0, 1, 2, 0, 1, 2, 0, 3])})
    names = [RELATIONS[number] for number in relations(tokens)[1].tolist()]  # to the first b
    assert names == [OWN_ANSWER, ITSELF, OWN_ANSWER, OTHERS, SAME_WORD_THERE, OTHERS, SAME_WORD,
                     SAME_WORD_AND_PLACE]
    assert RELATIONS[relations(tokens)[2, 5]] == OTHER_WORD_THERE  # c and a after ab


@pytest.fixture(scope="module")
def problem():
    """A problem of the model that ships with four answers, some of them right."""
    policy = load_policy(make_settings({"model": "models/tiny", "seed": 60_999, "questions": 4,
                                        "answers": 4, "temperature": 1.0, "max_new_tokens": 40}))
    problems = policy.task.training_problems(60_999, 1, 4)
    rollouts = policy.ask(problems, 4, derived_seed("train", 60_999, 1))
    rollouts = with_groups(rollouts, 4)
    number = next(int(group) for group, advantage in zip(rollouts.group, rollouts.advantage)
                  if advantage.any())
    return policy, rollouts, rollouts.of_problems(range(number, number + 1))


def test_the_change_is_the_sum_over_the_tokens_that_move_it(problem):
    """To first order, up to the step's length: a step with a tenth of it agrees to a percent."""
    policy, _, batch = problem
    kernel, of_head = kernels(policy, batch)
    tokens = token_columns(batch)
    predicted = kernel @ torch.from_numpy(tokens["advantage"])
    measured = change_in_a_step(policy, batch)[batch.mask].double()
    assert np.corrcoef(predicted, measured)[0, 1] > 0.95
    assert torch.allclose(kernel, kernel.T, rtol=1e-3, atol=1e-4)
    own = of_head.diagonal()
    assert (own >= 0).all() and (kernel.diagonal() > 0).all()


def test_the_parts_of_a_batch(problem):
    _, rollouts, _ = problem
    [right] = batches_of_part(rollouts, RIGHT)
    assert (right.advantage >= 0).all() and right.advantage.any()
    [up] = batches_of_part(rollouts, ALL_UP)
    assert up.advantage[up.mask].eq(1).all()
    [of_each] = batches_of_part(rollouts, ONE_OF_EACH)
    assert len(set(of_each.group.tolist())) == len(of_each.group)
    assert all((one.advantage.sum() > 0) and len(one.group) == 1
               for one in batches_of_part(replace(rollouts), SINGLE))
