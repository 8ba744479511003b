"""Which answers are measured, what each stands for, and the shares of tokens, by hand; a whole run,
small."""
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lab.analysis.token_table import TokenTable
from conftest import ROOT, hand_made
from lab.engine.errors import UserError
from lab.harness.read_record import read_columns
from lab.probes import decided
from lab.probes.common import run_probe
from lab.probes.credit import MeasuredCredit
from lab.probes.decided import MeasuredAnswers, decided_table, tokens_of


def test_an_answer_stands_for_those_of_its_group_that_are_like_it():
    """Of problem 0 one answer is right, too few; of problem 1 rows 5 and 6 of 4 to 8. Three are
    drawn: one of the two right ones stands for 2, or both for 1; of the 3 wrong ones likewise."""
    right = torch.tensor([1, 0, 0, 0, 0, 1, 1, 0, 0.0])
    rollouts = hand_made(torch.ones(9, 1, dtype=torch.bool), group=torch.tensor([0] * 4 + [1] * 5),
                         problems=["a", "b"], prompt_ids=[[1], [2]], step=1,
                         answers=list(map(str, range(9))), texts=[["x"]] * 9,
                         scores={"answer": right, "reward": right})
    drawn = set()
    for seed in range(30):
        args = SimpleNamespace(seed=seed, of_each=3, all_answers=False)
        (part, stands_for), = decided.kept(rollouts, args)
        good = part.scores["answer"] == 1
        assert part.problems == ["b"] and part.prompt_ids == [[2]] and not part.group.any()
        assert stands_for[good].sum() == 2 and stands_for[~good].sum() == 3
        assert part.answers == sorted(part.answers) and len(part.answers) == 3
        drawn |= set(part.answers)
    assert drawn == set("45678")


def test_what_it_stands_for_counts_in_both_shares(policy):
    """The two answers to a problem stand for 3 and for half an answer."""
    rollouts = hand_made(torch.tensor([[True, False], [True, True]]), advantage=torch.ones(2, 2),
                         log_prob=torch.full((2, 2), -1.0), collision=torch.full((2, 2), 0.5))
    parts = torch.tensor([[[0.1, 0], [0.2, 0.3]]]).expand(4, 2, 2)
    credit = MeasuredCredit(parts[0], parts[0], parts, 0)
    measured = MeasuredAnswers(rollouts, credit, torch.tensor([3.0, 0.5]))
    tokens = tokens_of(policy, [measured, measured])
    assert np.allclose(tokens["squared credit"], 2 * [0.03, 0.02, 0.045])
    assert tokens["advantage"].tolist() == 2 * [3, 0.5, 0.5]
    assert tokens["problem"].tolist() == [0, 0, 0, 1, 1, 1]
    assert tokens["answer"].tolist() == [0, 1, 1, 2, 3, 3]


def test_the_time_ends_where_no_problem_is_ever_solved(policy, monkeypatch):
    """Each round takes a minute here, and in none is an answer right: two begin within 1.5
    minutes."""
    clock = SimpleNamespace(minutes=0)

    def sample(*_):
        clock.minutes += 1
        return hand_made([[True]] * 4, scores={"answer": torch.zeros(4)})

    monkeypatch.setattr(decided, "sample_batch", sample)
    monkeypatch.setattr(decided, "time", SimpleNamespace(monotonic=lambda: 60 * clock.minutes))
    monkeypatch.setattr(decided, "policy_from_flags", lambda args: policy)
    args = SimpleNamespace(minutes=1.5, problems=2, questions=1, answers=4, of_each=2,
                           all_answers=False)
    with pytest.raises(UserError, match="0.0% of 8 answers are right. In 1.5 minutes fewer"):
        decided.measure(args, None)


def test_two_problems_of_the_model_that_ships(tmp_path, capsys):
    flags = "--problems 2 --of_each 2 --continuations 4 --certain 0.3 --threads 1".split()
    run_probe("decided", decided.__doc__, decided.FLAGS, decided.measure,
              [*flags, "--model", str(ROOT / "models/tiny"), "--out", str(tmp_path / "one")])
    printed = " ".join(capsys.readouterr().out.split())
    assert "Credit was measured for 4 answers to 2 problems" in printed
    numbers = json.loads((tmp_path / "one/numbers.json").read_text())
    for table in numbers["tables"]:
        assert sum(row["gradient"]["value"] for row in table["rows"]) == pytest.approx(1)
    for step in (1, 2):
        columns = read_columns(tmp_path / "one/run", step)
        chance = 1 - np.exp(columns["log_prob"].astype(float))
        assert not columns["true_credit"][chance < 0.299].any()
        assert columns["true_credit"].any()


def test_all_answers_to_a_problem_that_is_never_solved_are_measured_on_demand():
    rollouts = hand_made(torch.ones(4, 1, dtype=torch.bool), problems=["a"], prompt_ids=[[1]],
                         step=1, answers=list("abcd"), texts=[["x"]] * 4,
                         scores={"answer": torch.zeros(4), "reward": torch.zeros(4)})
    args = SimpleNamespace(seed=0, of_each=3, all_answers=True)
    (part, stands_for), = decided.kept(rollouts, args)
    assert part.answers == list("abcd") and stands_for.tolist() == [1, 1, 1, 1]
    args.all_answers = False
    assert not list(decided.kept(rollouts, args))


def test_shares_of_what_is_decided_and_of_the_gradient():
    """Two problems, an answer each, eight times over: credits 0.4, 0, -0.2 and 0, 0.3, advantages 1
    and -2. Filler: decided (0.16 + 0.09) / 0.29, gradient (1 + 2 + 0.5) / 4.5."""
    def repeat(values):
        return np.concatenate([np.array(values)] * 8)

    answer = np.concatenate([np.array([0, 0, 0, 1, 1]) + 2 * n for n in range(8)])
    table = decided_table(TokenTable({
        "problem": answer, "answer": answer, "count": np.ones(len(answer)),
        "squared credit": repeat([0.16, 0, 0.04, 0, 0.09]), "s": repeat([1, 0.5, 0.5, 1, 0.25]),
        "advantage": repeat([1, 1, 1, -2, -2.0]), "class": repeat([0, 1, 1, 0, 0])}), "class")
    row = dict(zip(table.columns, table.rows[0]))
    assert row["class"] == "filler" and row["tokens"] == 24 and row["of all"] == 0.6
    assert row["decided"].value == pytest.approx(0.25 / 0.29)
    assert row["gradient"].value == pytest.approx(3.5 / 4.5)
    assert table.finding.startswith("The filler tokens decide 86% (95% interval ")
    assert "get 78% (" in table.finding
