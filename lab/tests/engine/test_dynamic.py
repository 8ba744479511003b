"""Dynamic sampling: what is drawn, what is kept, and what it cost; and the rate of a step."""
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from small import hand_made, spoken

from lab.engine.dynamic import DynamicSampling, joined
from lab_runs import run
from runs import lines

SPREAD = {0: [0, 1], 1: [1, 1], 2: [0, 0], 3: [1, 0], 4: [0, 1]}  # rewards of each problem


class Sampler:
    """Two answers to each problem; the token of an answer says which."""

    def ask(self, problems, answers, seed):
        n = 2 * len(problems)
        ids = torch.tensor([[10 * problem + answer] * 2 for problem in problems
                            for answer in range(2)])
        reward = [SPREAD[problem][answer] for problem in problems for answer in range(2)]
        return dataclasses.replace(
            hand_made(torch.ones(n, 2, dtype=torch.bool), ids=ids, problems=list(problems),
                      prompt_ids=[[problem] for problem in problems],
                      group=torch.arange(n) // 2), finished=torch.ones(n, dtype=torch.bool),
            scores={"reward": torch.tensor(reward).float()}, answers=["x"] * n, texts=[["x"]] * n)


@pytest.mark.parametrize("most, problems, extra", [
    (1, [0, 1], 0),      # one batch: the group without spread stays
    (2, [0, 3], 4),      # the second batch brings 3
    (3, [0, 3], 4)])     # two are enough, so no third batch is drawn
def test_groups_without_spread_are_replaced_and_what_was_drawn_is_counted(most, problems, extra):
    rounds = {1: [3, 2], 2: [4, 1]}
    task = SimpleNamespace(training_problems=lambda seed, step, count: rounds[step])
    drawn = {}
    source = DynamicSampling(SimpleNamespace(task=task, ask=Sampler().ask), most, drawn)
    found = source.sample([0, 1], 2, seed=7)
    assert found.problems == problems and drawn["extra_answers"] == extra
    assert found.prompt_ids == [[problem] for problem in problems]
    assert found.ids[:, 0].tolist() == [10 * problem + answer for problem in problems
                                        for answer in range(2)]
    assert found.group.tolist() == [0, 0, 1, 1]
    assert found.reward.tolist() == [reward for problem in problems for reward in SPREAD[problem]]
    assert drawn["extra_tokens"] == 2 * extra


def test_the_speed_of_a_run_counts_what_was_thrown_away(learner, tmp_path):
    run("--model", learner, "--out", tmp_path / "x", "--steps", 1, "--answers", 2,
        "--eval_every", 0, "--dynamic_sampling", 3)
    [line] = lines(tmp_path / "x/metrics.jsonl")
    assert line["extra_answers"] == 16 and line["extra_tokens"] > 0
    assert line["rollout_tokens_per_second"] * line["rollout_seconds"] == pytest.approx(
        line["tokens"] + line["extra_tokens"])


def test_groups_that_are_taken_apart_and_joined_lack_no_column(policy):
    """Every field of the batch, with what a probe or a task of several turns adds to it."""
    batch = spoken(policy)
    more = {name: torch.rand(batch.mask.shape) for name in ("true_credit", "of_turns")}
    batch = dataclasses.replace(batch, turns=[[text] for text in batch.answers],
                                written=torch.ones_like(batch.mask), **more)
    found = joined([batch.of_problems(range(group, group + 1)) for group in range(2)])
    for one in dataclasses.fields(batch):
        values, expected = getattr(found, one.name), getattr(batch, one.name)
        if one.name == "scores":
            assert all(torch.equal(values[name], expected[name]) for name in expected)
        elif isinstance(expected, torch.Tensor):
            assert torch.equal(values, expected), one.name
        elif one.name not in ("step", "generator", "forward"):
            assert values == expected, one.name
