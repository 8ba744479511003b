"""The credit of one token: by hand from given rewards, and in a run against other samples."""
import re
import shutil

import pytest
import torch
from conftest import refusal

from engine.policy import stop_ids
from engine.sampler import generate
from engine.tokens import load_tokenizer
from harness.load import load_policy
from harness.record import read_credit
from harness.settings import make_settings
from tools import follow
from tools.helpers import credit_of_token
from tools.helpers.credit_of_token import CreditOfToken, measure_credit

STEP, K = 1, 400


@pytest.fixture(scope="module")
def batch(recorded):
    return read_credit(recorded, STEP, load_tokenizer(recorded))


@pytest.fixture(scope="module")
def policy(recorded):
    return load_policy(make_settings({"config": recorded / "config.json"}))


def uncertain_token(batch):
    """(answer, index) of the token with the largest entropy that is not the first of its answer."""
    entropy = (batch.entropy * batch.mask).clone()
    entropy[:, 0] = 0
    return divmod(int(entropy.argmax()), entropy.shape[1])


def test_it_is_the_difference_of_two_means(recorded, policy, batch, monkeypatch):
    """Rewards 0 0 1 1 before the token, with mean 1/2 and variance 1/3, and 1 1 1 0 after it, with
    mean 3/4 and variance 1/4. The squared error is (1/3 + 1/4) / 4."""
    asked = []

    def given(policy, rollouts, prefixes, k, progress):
        asked.extend(prefixes)
        return torch.tensor([[0.0, 0, 1, 1], [1.0, 1, 1, 0]]), {}

    monkeypatch.setattr(credit_of_token, "continuation_rewards", given)
    b, t = uncertain_token(batch)
    found = measure_credit(recorded, str(policy.folder), STEP, b, t, 4)
    ids, problem = batch.ids[b].tolist(), int(batch.group[b])
    assert asked == [(problem, tuple(ids[:t])), (problem, tuple(ids[:t + 1]))]
    assert (found.before, found.after) == (0.5, 0.75)
    assert found.error == pytest.approx(((1 / 3 + 1 / 4) / 4) ** 0.5)


def test_in_words():
    said = CreditOfToken(before=0.25, after=0.75, error=0.1, k=1000).in_words()
    assert said == ("V after - V before = 0.7500 - 0.2500 = +0.500 (95% interval +0.304 to +0.696)."
                    " Each V is the mean reward of 1,000 continuations by the model that sampled "
                    "the answer")


def test_v_is_the_mean_reward_of_answers_that_begin_so(recorded, policy, batch):
    """Sampled here as answers to a longer prompt, with other random numbers."""
    b, t = uncertain_token(batch)
    found = measure_credit(recorded, str(policy.folder), STEP, b, t, K)
    s, prompt = policy.settings, batch.prompt_ids[int(batch.group[b])]
    problem = policy.task.training_problems(s.seed, STEP, s.questions)[int(batch.group[b])]
    for length, value in ((t, found.before), (t + 1, found.after)):
        begun = batch.ids[b, :length].tolist()
        fresh = generate(policy.model, [prompt + begun], answers=K, seed=7,
                         stop_ids=stop_ids(policy.model, policy.tokenizer),
                         max_new_tokens=s.max_new_tokens - length)
        rewards = []
        for row, inside in zip(fresh.tokens, fresh.mask):
            rewards.append(policy.reward_of(problem, begun + row[inside].tolist()))
        rewards = torch.tensor(rewards, dtype=torch.float64)
        error = (2 * rewards.var() / K).sqrt().item()  # of the difference of two such means
        assert abs(rewards.mean().item() - value) < 5 * error + 1e-6
    assert found.error > 0


def test_after_the_last_token_v_is_the_reward(recorded, batch, capsys):
    b = int((batch.finished & (batch.reward > 0)).nonzero()[0])
    last = int(batch.length[b]) - 1
    argv = [str(recorded), "--step", str(STEP), "--answer", str(b), "--token", str(last)]
    follow.main([*argv, "--credit", "8"])
    printed = capsys.readouterr().out
    [after] = re.findall(r"^credit +V after - V before = ([\d.]+) - ", printed, re.M)
    assert float(after) == pytest.approx(batch.reward[b].item(), abs=1e-4)


def test_what_it_cannot_measure(recorded, tmp_path):
    folder = shutil.copytree(recorded, tmp_path / "run")
    assert "--credit needs --token" in refusal(follow.main, [str(folder), "--credit", "8"])
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"min_number": 1,', '"min_number": 2,'))
    said = refusal(follow.main, [str(folder), "--step", "1", "--answer", "0", "--token", "0",
                                 "--credit", "8"])
    assert "are not those that its settings make now" in said
    shutil.rmtree(folder / "checkpoints/step_000002")
    said = refusal(follow.main, [str(folder), "--step", "3", "--answer", "0", "--token", "0",
                                 "--credit", "8"])
    assert "--credit needs the model that sampled step 3, and it was not kept" in said
