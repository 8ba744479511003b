"""Self-distilled credit: what is read under a hint, against plain passes over the same texts."""
from dataclasses import replace

import pytest
import torch
from conftest import ASKED, SPOKEN, make_weighting, refusal, spoken

from credit.hinted import hint_for, hint_that_fits, hinted_prompt, read_with_hints, rlsd


def log_probs(policy, prompt, ids):
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt + ids]))[0, len(prompt) - 1:-1]
    return logits.log_softmax(-1)


def test_a_hint_is_another_answer_of_the_group_and_stands_in_the_question(policy):
    rollouts = spoken(policy)
    hint = hint_for(rollouts, 1, right=True)
    assert policy.tokenizer.decode(hint).strip() == "( 3 + 5 ) + 7"
    assert hint_for(rollouts, 0, right=True) is None  # it is the only right one, and not its own
    assert "3 * 5" in policy.tokenizer.decode(hint_for(rollouts, 0, right=False))
    prompt = policy.tokenizer.decode(hinted_prompt(policy, rollouts, 0, hint),
                                     skip_special_tokens=False)
    assert "3 5 7 make 15 ( 3 + 5 ) + 7<|im_end|>" in prompt and prompt.endswith("<think>")


def test_a_task_may_write_the_hint_itself(policy, monkeypatch):
    rollouts = spoken(policy)
    monkeypatch.setattr(type(policy.task), "hinted_prompt",
                        lambda task, problem, hint: f"<|im_start|>user\n{hint}", raising=False)
    found = hinted_prompt(policy, rollouts, 0, hint_for(rollouts, 1, right=True))
    assert policy.tokenizer.decode(found, skip_special_tokens=False).endswith("( 3 + 5 ) + 7")


@pytest.mark.parametrize("text", [None, 5, b"x"])
def test_a_task_that_writes_no_text_is_named(policy, monkeypatch, text):
    rollouts = spoken(policy)
    monkeypatch.setattr(type(policy.task), "hinted_prompt", lambda task, problem, hint: text,
                        raising=False)
    assert "should return a text" in refusal(hinted_prompt, policy, rollouts, 0, [5])


def test_a_hint_with_which_the_answer_does_not_fit_is_left_out(policy, monkeypatch):
    rollouts = spoken(policy)
    hint = hint_for(rollouts, 1, right=True)
    tokens = len(hinted_prompt(policy, rollouts, 0, hint)) + int(rollouts.length[1])
    for limit, found in ((tokens, hint), (tokens - 1, None)):
        config = replace(policy.model.config, max_position_embeddings=limit)
        monkeypatch.setattr(policy.model, "config", config)
        assert hint_that_fits(policy, rollouts, 1, right=True) == found
    weight = rlsd(policy)(rollouts, policy)
    assert (weight[1] == 1).all() and (weight != 1).any()


def test_gap_and_divergence_are_those_of_two_plain_passes(policy):
    rollouts = spoken(policy)
    some = policy.tokenizer.encode(" ( 2 + 4 ) - 6").ids
    hints = [None, hint_for(rollouts, 1, right=True), None, None, None, some]
    found = read_with_hints(policy, rollouts, hints)
    for row, hint in enumerate(hints):
        if hint is None:
            assert not found.gap[row].any() and not found.divergence[row].any()
            continue
        group, n = int(rollouts.group[row]), int(rollouts.length[row])
        ids = rollouts.ids[row, :n].tolist()
        p = log_probs(policy, rollouts.prompt_ids[group], ids)
        q = log_probs(policy, hinted_prompt(policy, rollouts, group, hint), ids)
        torch.testing.assert_close(found.gap[row, :n], (q - p)[range(n), ids], atol=2e-4, rtol=0)
        torch.testing.assert_close(found.divergence[row, :n], (q.exp() * (q - p)).sum(-1),
                                   atol=2e-4, rtol=0)


def test_the_weight_goes_with_the_hint_in_what_is_pushed_up_and_against_it_elsewhere(policy):
    rollouts = spoken(policy)
    method = rlsd(policy, hint_limit=1e9)
    found = method(rollouts, policy)
    seen = method.look(rollouts, right=True)
    row = 1  # it has a hint, and a negative advantage
    assert rollouts.advantage[row, 0] < 0 and seen.known[row]
    mask = rollouts.mask[row]
    torch.testing.assert_close(found[row][mask], (-seen.gap[row][mask]).exp())
    assert (found[0] == 1).all()  # the only right answer of its group has no hint
    limited = make_weighting("rlsd", {"hint_limit": 1.5}, policy)(rollouts, policy)
    assert limited.max() <= 1.5 and limited.min() >= 1 / 1.5 - 1e-6


@pytest.mark.parametrize("name", ["rlcsd", "sc_grpo"])
def test_without_a_right_and_a_wrong_answer_every_token_weighs_the_same(name, policy):
    wrong = [SPOKEN[1], SPOKEN[1]]
    rollouts = spoken(policy, wrong, ASKED[:1])
    weight = make_weighting(name, {}, policy)(rollouts, policy)[rollouts.mask]
    assert (weight == weight[0]).all() and weight[0] > 0
