"""lab score: the agreement of numbers with measured credit, by hand, and of each kind of source."""
import json

import numpy as np
import pytest
import torch

from lab.__main__ import main
from lab.engine.errors import UserError
from lab.engine.tokens import KINDS, SECTIONS
from lab.tools import score
from lab.tools.score import ceiling, cosine, off_mean
from small import spoken

PROBLEM, ANSWER, S2 = np.arange(8) // 4, np.arange(8) // 4, np.ones(8)
CREDIT = np.array([0.5, 0.0, -0.1, 0.0, 0.2, -0.3, 0.0, 0.1])


def test_credit_itself_has_cosine_1_and_its_negative_minus_1():
    for a, expected in ((3 * CREDIT, 1), (-CREDIT, -1)):
        assert cosine(PROBLEM, S2, a, [CREDIT, CREDIT]).value == pytest.approx(expected)
    assert ceiling(PROBLEM, S2, [CREDIT, CREDIT]).value == pytest.approx(1)
    # plain GRPO: 1 in the first answer, -1 in the second. Their credit sums to 0.4 and 0
    plain = np.repeat([1.0, -1.0], 4)
    found = cosine(PROBLEM, S2, plain, [CREDIT, CREDIT])
    assert found.value == pytest.approx(0.4 / np.sqrt(8 * 0.4))
    assert np.isnan(cosine(PROBLEM, S2, off_mean(plain, ANSWER, S2), [CREDIT, CREDIT]).value)


def test_the_mean_of_an_answer_counts_each_token_with_its_squared_gradient():
    weighted = off_mean(np.array([1.0, 5, 2, 2]), np.array([0, 0, 1, 1]), np.array([3.0, 1, 1, 1]))
    assert weighted.tolist() == [-1, 3, 0, 0]


def test_noise_of_the_credit_is_taken_out():
    draw, n = np.random.default_rng(0), 40_000
    credit = draw.normal(size=n) * 0.1
    halves = [credit + draw.normal(size=n) * 0.2 for _ in range(2)]
    problem, s2 = np.arange(n) % 20, np.ones(n)
    assert cosine(problem, s2, credit, halves).value == pytest.approx(1, abs=0.05)
    assert np.isnan(cosine(problem, s2, credit, [credit, -credit]).value)  # nothing but noise
    # one half: signal 0.01 of 0.05
    assert ceiling(problem, s2, halves).value == pytest.approx(np.sqrt(0.2), abs=0.05)


@pytest.fixture
def data(policy, tmp_path):
    """The spoken answers with a credit of 0.15 at their first tokens, as lab/data has its lines."""
    batch, path = spoken(policy), tmp_path / "tokens.jsonl"
    rows = []
    for row, (group, n) in enumerate(zip(batch.group.tolist(), batch.length.tolist())):
        problem = batch.problems[group]
        line = {"of": "spoken", "problem": group, "answer": batch.group[:row].tolist().count(group),
                "numbers": [*problem.numbers], "target": problem.target,
                "finished": bool(batch.finished[row]), "reward": float(batch.reward[row]),
                "right": float(batch.scores["answer"][row]),
                "format": float(batch.scores["format"][row]),
                "ids": batch.ids[row, :n].tolist(), "text": batch.texts[row],
                "kind": [KINDS[code] for code in batch.kind[row, :n].tolist()],
                "section": [SECTIONS[code] for code in batch.section[row, :n].tolist()],
                "half_1": [0.2, *[0.0] * (n - 1)], "half_2": [0.1, *[0.0] * (n - 1)]}
        for name in ("log_prob", "entropy", "collision"):
            line[name] = getattr(batch, name)[row, :n].tolist()
        rows.append(line)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_all_sources_of_one_advantage_have_one_score(data, tmp_path, capsys, monkeypatch):
    """An advantage of the project, a function of a file, and numbers of anybody."""
    monkeypatch.setattr(score, "BESIDE", ())
    monkeypatch.setattr(score, "AT_ONCE", 1)
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    reward = torch.tensor([row["reward"] for row in rows]).view(2, 3)
    values = (reward - reward.mean(1, keepdim=True)).flatten().tolist()
    few, file = tmp_path / "mine.jsonl", tmp_path / "mine.py"
    few.write_text("".join(json.dumps({
        "problem": row["problem"], "answer": row["answer"],
        "score": [value] * len(row["ids"])}) + "\n" for row, value in zip(rows, values)))
    file.write_text("import torch\ndef f(rewards, mask, group):\n    return rewards - torch.stack("
                    "[rewards[group == g].mean() for g in group])\n")
    found, own = [], data.read_text().splitlines(True)
    for name, order in (("dr_grpo", 1), ("mine.py:f", -1), ("mine.jsonl", -1)):
        data.write_text("".join(own[::order]))  # which says nothing
        main(["score", name, "--data", str(data), "--of", "spoken"])
        table = capsys.readouterr().out
        found.append([line.split("|")[2].strip() for line in table.splitlines()
                      if line.startswith("|")][2:])
    assert found[0] == found[1] == found[2] and len(found[0]) == 2
    few.write_text("".join(few.read_text().splitlines(True)[:-1]))
    with pytest.raises(UserError, match="problem 1, answer 2 has 32 tokens, and its score 0 num"):
        main(["score", str(few), "--data", str(data), "--of", "spoken"])
    with pytest.raises(UserError, match=r"--of tiny: .* has \['spoken'\]"):
        main(["score", str(few), "--data", str(data)])
