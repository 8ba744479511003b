"""Exact credit on a model: expectations over groups by plain loops, one small measurement against
the sampler, which folders --model names, and what is refused."""
import itertools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from analysis.statistics import FEWEST
from analysis.tokens import TokenTable
from conftest import ROOT, refusal
from engine.tokens import KINDS, NUMBER, WORD
from grpo import gradient_size, group_z_score
from research.probes import change_tables, exact, listed, listed_tables
from research.probes.change_batches import PLAIN_STEP, change_in_a_step, with_groups
from research.probes.change_tables import live_tokens
from research.probes.common import run_probe
from research.probes.decided import decided_table
from research.probes.enumerated_identities import z_score_factor
from research.probes.listed import config_of, mean_sizes, named_models, settings_for

TINY = str(ROOT / "models/tiny")


def test_the_mean_size_of_an_advantage_is_that_over_all_groups():
    rewards, chance, G = np.array([0.0, 0.1, 1.0]), np.array([0.5, 0.3, 0.2]), 4
    expected = np.zeros(3)
    for own in range(3):
        for others in itertools.product(range(3), repeat=G - 1):
            group = torch.tensor(rewards[[own, *others]])
            advantage = group_z_score(group, torch.zeros(G, dtype=torch.long))
            expected[own] += chance[list(others)].prod() * abs(advantage[0].item())
    assert mean_sizes(rewards, chance, G) == pytest.approx(expected, rel=1e-5)
    assert mean_sizes(np.array([0.7]), np.array([1.0]), G) == pytest.approx([0])


def test_of_right_and_wrong_answers_it_is_the_z_score_of_the_small_world():
    """The mean advantage of a right answer minus that of a wrong one."""
    wrong, right = mean_sizes(np.array([0.0, 1.0]), np.array([0.7, 0.3]), 8)
    assert wrong + right == pytest.approx(z_score_factor(0.3, 8), rel=1e-4)
    assert 0.3 * right == pytest.approx(0.7 * wrong, rel=1e-4)


def test_too_many_groups_are_refused():
    said = refusal(mean_sizes, np.arange(100.0), np.full(100, 0.01), 16)
    assert "--answers 16" in said and "100 different rewards" in said


class Short:
    """The tiny model's task, with a reward for an early word, so that four tokens can have it."""

    def __init__(self, task):
        self.task = task

    def __getattr__(self, name):
        return getattr(self.task, name)

    def score(self, problem, text):
        right = float("first" in text)
        return {"reward": right, "format": 0.0, "answer": right, "reasoning": 0.0}


@pytest.fixture(scope="module")
def stage(policy):
    settings = replace(policy.settings, max_new_tokens=4)
    short = replace(policy, task=Short(policy.task), settings=settings)
    args = SimpleNamespace(training=False, questions=6, answers=8, above=1e-3, seed=0)
    return short, args, listed.measure_one(short, args, lambda share: None)


@pytest.mark.numerics
def test_a_prompt_is_worth_what_the_sampler_finds(stage):
    policy, args, found = stage
    listing = found.listing
    assert listing.listed.min() > 0.8 and len(listing.listed) == 6
    problems = policy.task.held_out_problems(6)
    reward = policy.ask(problems, 400, seed=5).reward.view(6, 400).mean(1).tolist()
    for problem, mean in enumerate(reward):
        low, high = listing.bounds[problem, ()]
        assert low - 0.1 < mean < high + 0.1  # 0.1 is four standard errors
    assert 0.05 < np.mean(reward) < 0.95
    decided = found.tokens.sums_by_problem(found.tokens["squared credit"])
    assert decided == pytest.approx(listing.variance, abs=1e-9) and listing.variance.max() > 0.1


@pytest.mark.numerics
def test_push_change_and_credit_are_of_the_same_tokens(stage):
    """Of the batch that training would sample: each number is found again by another way."""
    policy, args, found = stage
    batch = policy.ask(policy.task.held_out_problems(6), 8, listed.derived_seed("exact", 0))
    batch = with_groups(batch, 8)
    change = change_in_a_step(policy, batch)
    size = gradient_size(batch.log_prob, batch.collision) ** 2
    at = 0
    for b, ids in enumerate(batch.groups_and_ids[1]):
        for t, token in enumerate(ids):
            before, after = (found.listing.value.get((int(batch.group[b]), tuple(ids[:n])))
                             for n in (t, t + 1))
            if before is None or after is None:
                continue
            one = {name: values[at] for name, values in found.sampled.columns.items()}
            assert one["token_id"] == token and one["problem"] == batch.group[b]
            assert one["credit 1"] == pytest.approx(after - before)
            assert one["plain step"] == pytest.approx(change[b, t].item(), abs=1e-6)
            assert one["push"] == pytest.approx(
                (batch.advantage * size)[b, t].item(), abs=1e-5)
            at += 1
    assert at == len(found.sampled)
    assert found.known == pytest.approx(at / int(batch.mask.sum())) and 0.5 < found.known <= 1


def test_tables_have_a_row_for_each_model_and_kind(stage, monkeypatch):
    policy, _, found = stage
    monkeypatch.setattr(change_tables, "COMMON_ITEM", 1)
    stages = {"before": found, "after": found}
    follows = listed_tables.follow_table(stages)
    assert [row[:2] for row in follows.rows] == [
        (name, arm) for name in stages for arm in listed_tables.LABELS.values()]
    known = live_tokens(found.sampled, PLAIN_STEP)
    assert follows.rows[1][2].value == pytest.approx(
        np.corrcoef(known["change"], known["credit 1"])[0, 1])
    assert follows.rows[1][3] >= FEWEST and follows.rows[1][4].value < 1
    monkeypatch.setattr(listed_tables, "FEWEST", follows.rows[1][3] + 1)  # so it has too few items
    assert all(row[4] is None for row in listed_tables.follow_table(stages).rows)
    shares = [row for row in listed_tables.shares_table_of_models(stages).rows if row[0] == "after"]
    assert sum(row[2] for row in shares) == pytest.approx(1)
    for kind, column, name in (("number", 3, "push"), ("number", 6, "credit 1"),
                               ("word", 6, "credit 1")):
        inside = known["kind"] == KINDS.index(kind)
        size = np.abs(known[name])
        [row] = [row for row in shares if row[1] == kind]
        assert row[column].value == pytest.approx(size[inside].sum() / size.sum())
    types = listed_tables.largest_items_table({"only": found}, policy.tokenizer).rows
    assert abs(types[0][5]) == max(abs(row[5]) for row in types)


def test_the_credit_of_a_sampled_answer_sums_to_its_reward_minus_the_value_of_the_prompt(stage):
    policy, _, found = stage
    batch = policy.ask(policy.task.held_out_problems(6), 8, seed=9)
    credit = found.listing.credit(batch).sum(1)
    for row in (~credit.isnan()).nonzero().flatten().tolist():
        V = found.listing.value[int(batch.group[row]), ()]
        assert credit[row] == pytest.approx(batch.reward[row].item() - V)
    assert (~credit.isnan()).sum() > 20


def make_run(folder, *steps):
    """What of a run's folder is looked at."""
    for step in steps:
        (folder / f"checkpoints/step_{step:06d}").mkdir(parents=True)
        (folder / f"checkpoints/step_{step:06d}/config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps({"mitigation": "none", "model": TINY}))
    return folder


def test_a_token_counts_as_often_as_its_answer_is_drawn():
    """Two words count 3 and 1, a number 6: words are 4 of 10."""
    ones = np.ones(3)
    tokens = TokenTable({"problem": np.array([0, 1, 1]), "kind": np.array([WORD, WORD, NUMBER]),
                         "count": np.array([3.0, 1.0, 6.0]), "squared credit": ones,
                         "advantage": ones, "s": ones})
    rows = {row["kind"]: row for row in decided_table(tokens, "kind").to_json()["rows"]}
    assert (rows["word"]["tokens"], rows["word"]["of all"]) == (4, pytest.approx(0.4))
    assert rows["number"]["tokens"] == 6


def test_each_model_of_a_run_has_the_runs_settings(tmp_path):
    """The one that it began with, too, whose folder does not lie in the run's."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"mitigation": "none", "model": TINY, "numbers": "4"}))
    typed = SimpleNamespace(device="cpu", threads=1, seed=3, answers=4, dtype="bfloat16",
                            max_new_tokens=0, config=None)
    s = settings_for(typed, Path(TINY), str(config))
    assert s.method_flags["numbers"] == "4"
    assert (s.seed, s.answers, s.dtype, s.temperature) == (3, 4, "bfloat16", 1.0)


def test_a_run_stands_for_the_models_before_in_the_middle_and_after(tmp_path):
    one = make_run(tmp_path / "one", 10, 20, 30, 40)
    steps = {step: one / f"checkpoints/step_{step:06d}" for step in (10, 20, 40)}
    assert named_models(str(one)) == {
        "untrained": Path(TINY), "step 20": steps[20], "step 40": steps[40]}
    assert list(named_models(str(make_run(tmp_path / "two", 12)))) == ["untrained", "step 12"]
    assert named_models(f"{TINY},{steps[10]}") == {"tiny": Path(TINY), "step 10": steps[10]}
    for text in (str(one), f"{TINY},{steps[10]}"):
        assert config_of(text) == str(one / "config.json")
    assert config_of(TINY) is None
    other = make_run(tmp_path / "other", 40)
    assert "would both be called step 40" in refusal(named_models, f"{one},{other}")


def run(folder, *flags):
    run_probe("exact", exact.__doc__, exact.FLAGS, exact.measure,
              [*flags, "--threads", "1", "--out", str(folder)])


def test_flags_and_folders_that_do_not_go_together_are_refused(tmp_path):
    out = tmp_path / "x"
    assert "--length has no effect without the synthetic task" in refusal(
        run, out, "--model", TINY, "--length", "3")
    assert "--above has no effect without --model" in refusal(run, out, "--above", "0.01")
    assert "--answers 5 should be at least 2 and at most 3" in refusal(run, out, "--answers", "5")
    assert "no_such_folder" in refusal(run, out, "--model", "no_such_folder")
    assert "too many paths" in refusal(run, out, "--model", TINY, "--questions", "2")
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.json").write_text('{"mitigation": "none", "model": "x"}')
    assert "has no checkpoints" in refusal(run, out, "--model", str(tmp_path / "run"))
    assert not out.exists()


def test_where_all_rewards_are_equal_nothing_is_said(tmp_path, capsys):
    """Three tokens of the tiny model are never right."""
    out = tmp_path / "x"
    run(out, "--model", TINY, "--questions", "2", "--max_new_tokens", "3", "--above", "0.005",
        "--answers", "2")
    assert "too few problems" in " ".join(capsys.readouterr().out.split())
    numbers = json.loads((out / "numbers.json").read_text())
    assert [table["name"] for table in numbers["tables"]] == ["kind", "index", "listed"]
    lines = [json.loads(line) for line in (out / "tiny.jsonl").read_text().splitlines()]
    assert len({line["problem"] for line in lines}) == 2 and (out / "kinds.png").exists()
    for line in lines:
        assert len(line["V"]) == len(line["bounds"]) == len(line["credit"]) + 1
        assert line["probability"] >= 0.005 and len(line["tokens"]) == len(line["credit"])
