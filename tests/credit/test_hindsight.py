"""A copy that is taught the right answers, against a plain loop."""
import dataclasses

import torch

from conftest import copied, spoken
from credit.hindsight import hindsight
from engine.forward import response_log_probs


def test_it_is_what_a_plain_loop_gives(policy):
    """Answers 0 and 5 are right: two steps of AdamW on the mean log-prob of their tokens."""
    rollouts, copy = spoken(policy), copied(policy.model)
    right = torch.tensor([0, 5])
    assert rollouts.scores["answer"].nonzero().flatten().tolist() == right.tolist()
    optimizer = torch.optim.AdamW(copy.parameters(), lr=1e-3, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        log_prob = response_log_probs(copy, rollouts, right)
        (-log_prob.sum() / rollouts.length[right].sum()).backward()
        optimizer.step()
    credit = hindsight(policy, hindsight_lr=1e-3, hindsight_steps=2)(rollouts, policy)
    with torch.no_grad():
        taught, before = (response_log_probs(model, rollouts, torch.arange(6))
                          for model in (copy, policy.model))
    torch.testing.assert_close(credit, taught - before, atol=1e-4, rtol=1e-3)
    assert credit[right].sum() > 0 and not credit[~rollouts.mask].any()


def test_without_a_right_answer_there_is_no_credit(policy):
    rollouts = spoken(policy)
    scores = {**rollouts.scores, "answer": torch.zeros(6)}
    assert not hindsight(policy)(dataclasses.replace(rollouts, scores=scores), policy).any()
