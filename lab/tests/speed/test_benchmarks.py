"""The programs that measure: their cases, flags and tables. Nothing is timed."""
from dataclasses import replace

import pytest
import torch

from lab.speed import cases, gpu
from lab.speed.cases import Case
from conftest import assert_bounded
from lab.engine.errors import UserError

SMALL = Case("rollout", questions=2, answers=2, new_tokens=8, micro_batch=3)


@pytest.mark.parametrize("what, flags", [
    ("rollout", {}), ("update", {}), ("step", {}),
    ("step", {"dtype": "bfloat16", "checkpointing": True})])
def test_every_kind_of_work_counts_its_tokens(what, flags):
    assert cases.work_of(replace(SMALL, what=what, **flags))() == {"tokens": 32}


def test_plain_torch_makes_the_same_update(monkeypatch):
    """The same gradient, before any clipping; two of its four answers are in a micro-batch."""
    found = []
    for work_of in (cases.work_of, cases.work_of_plain_torch):
        case = replace(SMALL, what="update", micro_batch=2)
        model = cases.make_model(case)
        monkeypatch.setattr(cases, "make_model", lambda case: model)
        assert work_of(case)() == {"tokens": 32}
        monkeypatch.undo()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (found[0] - found[1]).norm() < 1e-4 * found[0].norm()


def test_whole_rows_have_the_log_probs_of_packed_ones():
    case = replace(SMALL, what="update")
    model, batch, rows = cases.make_model(case), cases.make_batch(case), torch.tensor([0, 3])
    assert len({len(prompt) for prompt in batch.prompt_ids}) > 1  # so that one has padding
    torch.testing.assert_close(cases.log_probs_of_rows(model, batch, rows),
                               cases.log_probs_of_packed(model, batch, rows))


def test_every_number_has_bounds_and_its_defaults_lie_within():
    assert_bounded(gpu.FLAGS)


@pytest.mark.parametrize("argv", [[], ["--help"], ["3"], ['{"what": "rollout", "x": 3}'], ["{}"]])
def test_what_is_no_case(argv):
    with pytest.raises(UserError, match="one case as JSON.*what, size, model"):
        cases.main(argv)
