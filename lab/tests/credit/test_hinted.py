"""Self-distilled credit: what is read under a hint, against plain passes over the same texts."""
from dataclasses import replace

import torch
from conftest import ASKED, SPOKEN, make_weighting, refusal, spoken

from lab.credit import hinted
from lab.credit.hinted import gap_under_hints, hint_for, hint_that_fits, hinted_prompt, rlsd


def log_probs(policy, prompt, ids):
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt + ids]))[0, len(prompt) - 1:-1]
    return logits.log_softmax(-1)


def test_a_hint_is_another_answer_of_the_group_and_stands_in_the_question(policy):
    rollouts = spoken(policy)
    hint = hint_for(rollouts, 1)
    assert policy.tokenizer.decode(hint).strip() == "( 3 + 5 ) + 7"
    assert hint_for(rollouts, 0) is None  # it is the only right one, and not its own
    prompt = policy.tokenizer.decode(hinted_prompt(policy, rollouts, 0, hint),
                                     skip_special_tokens=False)
    assert "3 5 7 make 15 ( 3 + 5 ) + 7<|im_end|>" in prompt and prompt.endswith("<think>")


def test_the_hint_is_the_next_right_answer_round_the_group(policy):
    """Where all three are right, the first follows the third. One without an answer section is
    shown whole."""
    rollouts = spoken(policy)
    right = torch.ones_like(rollouts.scores["answer"])
    rollouts = replace(rollouts, scores=rollouts.scores | {"answer": right})
    hints = [policy.tokenizer.decode(hint_for(rollouts, row)).strip() for row in range(3)]
    assert hints[0] == "( 3 * 5 ) - 7" and hints[1].startswith("first 3 * 5 = 15")
    assert hints[2] == "( 3 + 5 ) + 7"


def test_a_task_may_write_the_hint_itself(policy, monkeypatch):
    rollouts = spoken(policy)
    monkeypatch.setattr(type(policy.task), "hinted_prompt",
                        lambda task, problem, hint: f"<|im_start|>user\n{hint}", raising=False)
    found = hinted_prompt(policy, rollouts, 0, hint_for(rollouts, 1))
    assert policy.tokenizer.decode(found, skip_special_tokens=False).endswith("( 3 + 5 ) + 7")


def test_a_task_that_writes_no_text_is_named(policy, monkeypatch):
    rollouts = spoken(policy)
    monkeypatch.setattr(type(policy.task), "hinted_prompt", lambda task, problem, hint: 5,
                        raising=False)
    assert "should return a text" in refusal(hinted_prompt, policy, rollouts, 0, [5])


def test_a_hint_with_which_the_answer_does_not_fit_is_left_out(policy, monkeypatch):
    rollouts = spoken(policy)
    hint = hint_for(rollouts, 1)
    tokens = len(hinted_prompt(policy, rollouts, 0, hint)) + int(rollouts.length[1])
    for limit, found in ((tokens, hint), (tokens - 1, None)):
        config = replace(policy.model.config, max_position_embeddings=limit)
        monkeypatch.setattr(policy.model, "config", config)
        assert hint_that_fits(policy, rollouts, 1) == found
    weight = rlsd(policy)(rollouts, policy)
    assert (weight[1] == 1).all() and (weight != 1).any()
    assert weight.max() <= 2 and weight[rollouts.mask].min() >= 0.5


def test_the_gap_is_that_of_two_plain_passes(policy):
    rollouts = spoken(policy)
    some = policy.tokenizer.encode(" ( 2 + 4 ) - 6").ids
    hints = [None, hint_for(rollouts, 1), None, None, None, some]
    found = gap_under_hints(policy, rollouts, hints)
    for row, hint in enumerate(hints):
        if hint is None:
            assert not found[row].any()
            continue
        group, n = int(rollouts.group[row]), int(rollouts.length[row])
        ids = rollouts.ids[row, :n].tolist()
        p = log_probs(policy, rollouts.prompt_ids[group], ids)
        q = log_probs(policy, hinted_prompt(policy, rollouts, group, hint), ids)
        torch.testing.assert_close(found[row, :n], (q - p)[range(n), ids], atol=2e-4, rtol=0)


def test_the_weight_goes_with_the_hint_in_what_is_pushed_up_and_against_it_elsewhere(
        policy, monkeypatch):
    rollouts = spoken(policy)
    monkeypatch.setattr(hinted, "HINT_LIMIT", 1e9)
    found = rlsd(policy)(rollouts, policy)
    row = 1  # it has a hint, and a negative advantage
    hints = [hint_for(rollouts, 1) if number == row else None for number in range(6)]
    gap = gap_under_hints(policy, rollouts, hints)
    assert rollouts.advantage[row, 0] < 0
    mask = rollouts.mask[row]
    torch.testing.assert_close(found[row][mask], (-gap[row][mask]).exp())
    assert (found[0] == 1).all()  # the only right answer of its group has no hint
    assert found.max() > 2 > 0.5 > found[rollouts.mask].min()
    monkeypatch.undo()
    limited = rlsd(policy)(rollouts, policy)
    assert limited.max() == 2 and limited[rollouts.mask].min() == 0.5


def test_without_a_right_answer_every_token_weighs_the_same(policy):
    rollouts = spoken(policy, [SPOKEN[1], SPOKEN[1]], ASKED[:1])
    weight = make_weighting("rlsd", {}, policy)(rollouts, policy)[rollouts.mask]
    assert (weight == 1).all()
