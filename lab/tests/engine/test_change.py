"""The change of each token in a step: against other forward passes, and in runs."""
import dataclasses

import numpy as np
import pytest
import torch

from small import copied
from lab.engine.update import update
from lab.analysis.run_folders import read_columns
from lab_runs import run
from runs import lines, timeless
from test_update import row_log_probs, settings


@pytest.mark.numerics
@pytest.mark.parametrize("changed", [{}, {"temperature": 0.7}, {"micro_batch": 1, "epochs": 3}])
def test_it_is_the_log_prob_after_minus_before(small_model, rollouts, changed):
    """It is measured for all tokens: those of the second group have no push and change too. A
    dropped answer has no change."""
    kept = rollouts.mask & (torch.arange(6) != 1)[:, None]
    rollouts = dataclasses.replace(rollouts, mask=kept)
    model = copied(small_model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.25)
    _, columns = update(model, sgd, rollouts, rollouts.mask.float(), settings(**changed),
                        is_measured=True)
    assert not columns["change"][1].any()
    for row in (0, 2, 3, 4, 5):
        n = int(rollouts.mask[row].sum())
        after, before = (row_log_probs(m, rollouts, row).detach() for m in (model, small_model))
        torch.testing.assert_close(columns["change"][row, :n], after - before, atol=2e-5, rtol=1e-3)
        assert (after - before).abs().max() > 1e-4 and not columns["change"][row, n:].any()


def test_a_run_is_the_same_with_and_without(learner, tmp_path):
    """The credit file has one more column when it is due, and no other number differs."""
    folders = [tmp_path / name for name in ("with", "without")]
    for folder, every in zip(folders, (2, 0)):
        run("--model", learner, "--out", folder, "--steps", 4, "--eval_every", 0,
            "--change_every", every)
    ours, theirs = (lines(folder / "metrics.jsonl") for folder in folders)
    for step, (one, two) in enumerate(zip(ours, theirs), 1):
        columns, plain = (read_columns(folder, step) for folder in folders)
        assert columns.keys() - plain.keys() == ({"change"} if step != 2 else set())
        assert timeless(one) == timeless(two)
        for name in plain:
            np.testing.assert_array_equal(columns[name], plain[name], name)
    a, b = (folder / "checkpoints/step_000004/model.safetensors" for folder in folders)
    assert a.read_bytes() == b.read_bytes()
