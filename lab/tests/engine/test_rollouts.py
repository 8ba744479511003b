"""Scores and labels of a task, as the batch stores them."""
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from small import hand_made
from lab.harness.tasks import CheckedTask
from lab.engine.rollouts import score_answers
from lab.tools.demonstrations import make_tokenizer

FINE = {"reward": 1.5, "format": 0.5, "answer": 1.0, "reasoning": 0.0}
TOKENIZER = make_tokenizer()


def scored(score=FINE, label=lambda pieces: ([0] * len(pieces), [6] * len(pieces))):
    """Two answers to one question, of three tokens and of one."""
    batch = hand_made([[True, True, True], [True, False, False]],
                      ids=torch.tensor([[5, 6, 7], [8, 0, 0]]))
    task = SimpleNamespace(score=lambda problem, text: score, label=label)
    return score_answers(batch, TOKENIZER, CheckedTask(task))


@pytest.mark.parametrize("answer", [1, True, np.float32(1), np.int64(1)])
def test_whole_numbers_and_yes_or_no_are_numbers_and_a_task_may_give_more_parts(answer):
    batch = scored({**FINE, "answer": answer, "reward": 3, "format": False, "elegance": 0.25})
    assert {values.dtype for values in batch.scores.values()} == {torch.float32}
    assert batch.scores["answer"].tolist() == [1, 1] and batch.reward.mean() == 3
    assert batch.scores["elegance"].tolist() == [0.25, 0.25]


def test_labels_stand_where_their_tokens_do():
    """And may be tuples."""
    batch = scored(label=lambda pieces: ((2,) * len(pieces), list(range(len(pieces)))))
    assert batch.section.tolist() == [[2, 2, 2], [2, 0, 0]]
    assert batch.kind.tolist() == [[0, 1, 2], [0, 0, 0]]
