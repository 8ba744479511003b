"""Ideas of other people: their formulas by hand, or against another way to compute them."""
import dataclasses

import pytest
import torch

import research.ideas as ideas
from conftest import ROOT, hand_made, spoken
from engine.sampler import generate
from engine.tokens import ANSWER, THINK
from research.ideas import (answer_probes, calibrated_gae, contrastive_hindsight,
                            optimal_token_baseline, peer_hindsight, right_peers, try_ends)
from runs import program


def test_the_baseline_by_hand():
    """Two words, p = 1/2 or 9/10: squared sizes 0.5 and 0.02. The second problem has one answer."""
    mask = torch.tensor([[True, True, False], [True] * 3, [True, False, False]])
    p = torch.tensor([[0.5, 0.5, 0.5], [0.9, 0.5, 0.5], [0.5, 0.5, 0.5]])
    rollouts = hand_made(mask, log_prob=p.log(), collision=p.square() + (1 - p).square(),
                         group=torch.tensor([0, 0, 1]),
                         scores={"reward": torch.tensor([0.0, 1.0, 1.0])})
    first, second = 0.02 / 0.52, 0.52 / 1.52  # of W 0.5 and 0.02, and of W 1 and 0.52
    expected = [[-first, -second, 0.0], [1 - first, 1 - second, 0.0], [0.0] * 3]
    torch.testing.assert_close(optimal_token_baseline(rollouts), torch.tensor(expected))


def test_a_peer_is_the_next_other_right_answer():
    rollouts = hand_made([[True]] * 6, ids=torch.arange(6)[:, None],
                         group=torch.tensor([0, 0, 0, 0, 1, 1]),
                         scores={"answer": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])})
    assert right_peers(rollouts) == [[2], [2], [3], [0], [5], []]


def log_probs(policy, prompt, answer):
    """Of the answer's tokens, without packing."""
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt + answer]))[0, len(prompt) - 1:-1]
    return logits.log_softmax(-1)[range(len(answer)), answer]


def test_hindsight_is_what_the_model_says_behind_another_prompt(policy):
    """The first answer and the last are the only right ones of their groups."""
    rollouts = spoken(policy)
    (groups, answers), prompts = rollouts.lists, rollouts.prompt_ids
    plain, contrast = peer_hindsight(rollouts), contrastive_hindsight(rollouts)
    peers = [[], answers[0], answers[0], answers[5], answers[5], []]
    assert right_peers(rollouts) == peers
    for row, (group, answer, peer) in enumerate(zip(groups, answers, peers)):
        said = [torch.zeros(len(answer))] * 2
        if peer:
            said = [log_probs(policy, prompt + peer + prompt, answer)
                    - log_probs(policy, prompt, answer)
                    for prompt in (prompts[group], prompts[1 - group])]
        n = len(answer)
        torch.testing.assert_close(plain[row, :n], said[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(contrast[row, :n], said[0] - said[1], atol=1e-4, rtol=1e-4)


def test_a_try_ends_with_a_sentence_that_computes():
    texts = ["hm", ".", " 3", " =", " 3", ".", " so", ".", " 1 = 1", " yes", "!", "=", "."]
    assert try_ends(texts, [THINK] * 11 + [ANSWER] * 2) == [6, 11]


def test_probes_by_hand(policy, monkeypatch):
    """A right first try, a second that changes nothing, a third that spoils it."""
    texts = [" 1=1", ".", " 2=2", ".", " 3=3", ".", " 4"]
    rollouts = hand_made([[True] * 7] * 2, problems=[None], texts=[texts, [""] * 7],
                         ids=torch.arange(14).view(2, 7), section=torch.full((2, 7), THINK),
                         scores={"reward": torch.tensor([1.0, 0.0])})
    asked = []

    def table(policy, rollouts, prefixes, k):
        asked.extend([policy.settings.temperature, k, *prefixes])
        worth = {0: 0.0, 2: 1.0, 4: 1.0, 6: 0.5}
        return torch.tensor([[worth[len(ids) - 1]] for _, ids in prefixes]), {"extra_tokens": 5}

    monkeypatch.setattr(ideas, "forced_texts", lambda *_: ([99], []))
    monkeypatch.setattr(ideas, "continuation_rewards", table)
    probes, temperature = answer_probes(policy), policy.settings.temperature
    A = 1 / 1.0002  # (1 - 0.5) / (0.5 + 1e-4)
    expected = torch.tensor([[1 + A] * 2 + [0.0] * 2 + [A - 0.5] * 2 + [A], [-A] * 7])
    torch.testing.assert_close(probes(rollouts, policy), expected)
    assert asked == [0.01, 1, (0, (99,)), (0, (0, 1, 99)), (0, (0, 1, 2, 3, 99)),
                     (0, (0, 1, 2, 3, 4, 5, 99))]
    assert probes.metrics == {"extra_tokens": 5} and policy.settings.temperature == temperature


def test_probes_are_answered_as_by_the_likeliest_tokens(policy):
    """The change over all tries is what a greedy sampler is worth after the last, minus before."""
    rollouts = spoken(policy)
    groups, answers = rollouts.lists
    credit = answer_probes(policy)(rollouts, policy)
    for row in (0, 1):
        ends = [0, *try_ends(rollouts.texts[row], rollouts.section[row].tolist())]
        opening = policy.tokenizer.encode("</think>\n<answer>").ids
        told = [answers[row][:end] + opening for end in ends]
        fresh = generate(policy.model, [rollouts.prompt_ids[0] + ids for ids in told], greedy=True,
                         max_new_tokens=30)
        rest = [ids[:n] for ids, n in zip(fresh.tokens.tolist(), fresh.mask.sum(1).tolist())]
        worth = [policy.reward_of(rollouts.problems[0], [*ids, *more])
                 for ids, more in zip(told, rest)]
        D, plain = worth[1] - worth[0], rollouts.advantage[row, 0].item()
        assert len(ends) == 2
        assert credit[row, 0].item() == pytest.approx(D + plain * (D != 0))
        assert credit[row, len(answers[row]) - 1].item() == pytest.approx(plain)


def test_lambda_grows_with_the_length(policy):
    """A new critic says 0: so A_t is R lambda^(tokens left). alpha l is 2, and below 1."""
    rollouts = hand_made([[True] * 5, [True] * 2 + [False] * 3], step=2,
                         scores={"reward": torch.tensor([1.0, 4.0])})
    credit = calibrated_gae(policy, value_alpha=0.4)(rollouts, policy)
    torch.testing.assert_close(credit, torch.tensor(
        [[0.0625, 0.125, 0.25, 0.5, 1.0], [0.0, 4.0, 0.0, 0.0, 0.0]]))


def test_the_critic_learns_rewards_before_the_first_step_alone(policy, monkeypatch):
    """At a large alpha the advantage is R - V, V from before this batch and after the others."""
    rollouts, asked = spoken(policy, step=1), []

    def ask(problems, answers, seed):
        asked.append((len(problems), answers, seed))
        return spoken(policy, generator=None)

    monkeypatch.setattr(policy, "ask", ask, raising=False)
    chosen, same = (calibrated_gae(policy, value_alpha=1000.0, value_batches=3) for _ in range(2))
    again = same(spoken(policy, step=1), policy)
    asked.clear()
    values, rows = chosen.critic.module.values, torch.arange(len(rollouts.mask))
    steps, step = [], chosen.critic.gradient_step
    monkeypatch.setattr(chosen.critic, "gradient_step", lambda loss: (
        steps.append(values(rollouts, rows).detach()), step(loss)))
    credit = chosen(rollouts, policy)
    assert torch.equal(credit, again)
    assert len(asked) == 3 == len(set(asked)) and asked[0][:2] == (2, 3)
    assert chosen.metrics["extra_tokens"] == 3 * int(rollouts.mask.sum())
    learned = steps[-len(steps) // 4]  # before the last of four equal batches
    assert len(steps) % 4 == 0
    reward = rollouts.reward[:, None].expand_as(rollouts.mask)[rollouts.mask]
    torch.testing.assert_close(credit[rollouts.mask], reward - learned, atol=2e-3, rtol=0)
    before, after = ((reward - value).square().mean() for value in (steps[0], learned))
    assert after < before / 2
    chosen(dataclasses.replace(rollouts, step=2), policy)
    assert len(asked) == 3 and chosen.metrics["extra_tokens"] == 0


def test_train_with_the_ideas_still_has_the_choices_that_they_import():
    assert "critic" in program(ROOT, "-m", "research.train", "--help", "gae")
