"""Beliefs against whole sequences, one at a time; credit by hand; what is listed is right."""
import random
from types import SimpleNamespace

import pytest
import torch

from conftest import ASKED, hand_made, spoken
from countdown_task import Problem, Task
from credit import belief as module
from credit.belief import belief, beliefs, thought_lengths
from tools.countdown_data import right_expressions
from engine.errors import UserError
from harness.tasks import CheckedTask
from tools.demonstrations import TASK, candidates
from tools.largest_last import Task as LargestLast


def probability(policy, prompt, continuation):
    with torch.no_grad():
        log_probs = policy.model(torch.tensor([prompt + continuation]))[0].log_softmax(-1)
    places = range(len(prompt) - 1, len(prompt) + len(continuation) - 1)
    return log_probs[places, continuation].sum().exp().item()


def test_a_belief_is_the_probability_of_all_right_answers(policy):
    """15 of 3 5 7: three numbers in a sum, 12 spellings. At the start and after 7 tokens."""
    rollouts = spoken(policy)
    opening, right = policy.task.right_answers(ASKED[0])
    assert opening == "</think>\n<answer>" and " ( 5 + 3 ) + 7</answer>" in right
    assert len(right) == 12
    prefix = tuple(rollouts.ids[0, :7].tolist())
    known = beliefs(policy, rollouts, [(0, ()), (0, prefix), (1, prefix)])
    for question, prefix in known:
        opening, right = policy.task.right_answers(ASKED[question])
        forced = [*rollouts.prompt_ids[question], *prefix, *policy.tokenizer.encode(opening).ids]
        spelled = [policy.tokenizer.encode(text).ids for text in right]
        expected = sum(probability(policy, forced, ids) for ids in spelled)
        assert known[question, prefix] == pytest.approx(expected, rel=1e-4)
    assert known[0, ()] != pytest.approx(known[0, prefix], rel=0.01)
    without_one = spoken(policy, problems=[Problem((1, 1, 1), 99), ASKED[1]])
    assert beliefs(policy, without_one, [(0, ())]) == {(0, ()): 0.0}


def test_a_thought_ends_with_its_last_token_and_leaves_one_for_the_reward():
    section = torch.tensor([[1, 1, 0, 2], [1, 1, 1, 1], [0, 0, 2, 2], [1, 0, 1, 0]])
    mask = torch.tensor([[True] * 4, [True] * 4, [True] * 4, [True, True, False, False]])
    assert thought_lengths(hand_made(mask, section=section)) == [2, 3, 0, 1]


def test_between_the_cuts_a_belief_is_linear(monkeypatch):
    """Asked after 0, 2 and 3 tokens of a thought: 0.2, 0.6, 0.5, so 0.4 in between; what is left of
    the reward is for each later token. Of the answer without a thought it is for all tokens."""
    asked = []

    def table(policy, rollouts, prefixes):
        asked.extend(prefixes)
        return dict(zip(prefixes, (0.2, 0.6, 0.5, 0.7)))

    monkeypatch.setattr(module, "beliefs", table)
    batch = hand_made([[True] * 5, [True] * 2 + [False] * 3], group=torch.tensor([0, 1]),
                      ids=torch.tensor([[4, 5, 6, 7, 8], [9, 9, 0, 0, 0]]),
                      section=torch.tensor([[1, 1, 1, 0, 2], [0] * 5]),
                      scores={"reward": torch.tensor([1.0, 0.0])})
    policy = SimpleNamespace(task=Task())
    chosen = belief(policy, belief_every=2)
    expected = torch.tensor([[0.2, 0.2, -0.1, 0.5, 0.5], [-0.7, -0.7, 0, 0, 0]])
    torch.testing.assert_close(chosen(batch, policy), expected)
    assert asked == [(0, ()), (0, (4, 5)), (0, (4, 5, 6)), (1, ())]
    assert chosen.metrics["belief"] == pytest.approx(0.6)


def test_what_is_listed_is_right_and_holds_all_that_the_teacher_writes():
    rng = random.Random(0)
    for _ in range(40):
        problem = TASK.make_problem(rng)
        opening, right = TASK.right_answers(problem)
        assert 0 < len(right) == len(set(right)) <= 32
        for text in right:
            assert TASK.score(problem, f" so.{opening}{text}")["reward"] == pytest.approx(1.1)
        taught = {f" {candidate.expression}</answer>"
                  for candidate in candidates(tuple(sorted(problem.numbers)))
                  if candidate.value == problem.target}
        assert taught <= set(right)


def test_the_long_prompt_has_its_own_spelling_and_the_list_an_end():
    task, problem = Task(prompt="full"), Problem((1, 2, 3, 4), 10)
    opening, right = task.right_answers(problem)
    assert " (4 + 3) + (2 + 1) </answer>" in right and len(right) == 32
    assert task.score(problem, f"so{opening}{right[-1]}")["reward"] == pytest.approx(1.1)
    assert right_expressions((2, 3), 6, 100) == ["3 * 2", "2 * 3"]  # the larger number first
    with pytest.raises(UserError, match="of 5 numbers are not listed"):
        task.right_answers(Problem((1, 2, 3, 4, 5), 15))


def test_a_task_without_a_list_is_refused_and_a_wrong_list_is_one_line(policy):
    with pytest.raises(UserError, match="tools.largest_last has no method right_answers"):
        belief(SimpleNamespace(task=LargestLast(),
                               settings=SimpleNamespace(task="tools.largest_last")))
    rollouts = spoken(policy)
    for answers in (("a", "b"), 3):
        task = CheckedTask(SimpleNamespace(right_answers=lambda problem: answers))
        other = SimpleNamespace(task=task, tokenizer=policy.tokenizer)
        with pytest.raises(UserError, match=r"right_answers\(.* should return a text that ends"):
            beliefs(other, rollouts, [(0, ())])
    other.task = SimpleNamespace(right_answers=lambda problem: ("</think>", [" banana"]), show=str)
    with pytest.raises(UserError, match="cannot spell ' banana', a right answer"):
        beliefs(other, rollouts, [(0, ())])
