"""The programs that measure: their cases, flags and tables. Nothing is timed."""
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks import cases, cost, count, gpu, speed
from benchmarks.cases import Case
from conftest import assert_bounded
from engine import forward
from engine.choices import ADVANTAGES, MITIGATIONS
from engine.errors import UserError
from harness.command_line import read_flags
from harness.settings import make_settings

SMALL = Case("tiny", "rollout", questions=2, answers=2, new_tokens=8, micro_batch=3)


@pytest.mark.parametrize("what, flags", [
    ("rollout", {}), ("update", {}), ("step", {}),
    ("step", {"dtype": "bfloat16", "checkpointing": True, "offload_optimizer": True})])
def test_every_kind_of_work_counts_its_tokens(what, flags):
    result = speed.WORK[what](replace(SMALL, what=what, **flags))()
    assert result["tokens"] == 32
    assert all(operations or size for operations, size in result["needs"])


@pytest.mark.parametrize("what", ["ragged rollout", "ragged rollout, transformers"])
def test_a_ragged_rollout_has_answers_that_end_early(what):
    if "transformers" in what:
        pytest.importorskip("transformers")
    case = replace(SMALL, what=what, answers=8, new_tokens=30)
    assert 16 < speed.WORK[what](case)()["tokens"] < 16 * 30


def test_what_a_rollout_and_an_update_need_by_hand():
    """A prompt of 3 tokens, answers of 2 and 4: 9 tokens through the layers, 6 through the output.
    A layer of tiny has 128 * (2 * 128 + 2 * 64 + 3 * 384) numbers in its matrices."""
    model = cases.make_model(replace(SMALL, dtype="bfloat16"))
    layers, output = 4 * 128 * 1536, 128 * 512
    operations = 2 * (9 * layers + 6 * output)
    assert count.rollout_needs(model, [[5] * 3], [2, 4]) == [
        (operations, 2 * 4 * (layers + output))]
    moved = 28 * sum(p.numel() for p in model.parameters())
    assert count.update_needs(model, [[5] * 3], [2, 4]) == [(3 * operations, 0), (0, moved)]


def test_a_case_travels_to_a_process_of_its_own_and_back(monkeypatch, capsys):
    """In this process: what the command line would be given, and what it prints."""
    commands = []

    def run(command, **more):
        commands.append((command, more))
        speed.main(command[3:])
        printed = capsys.readouterr().out
        return type("Result", (), {"returncode": 0, "stdout": printed, "stderr": ""})
    monkeypatch.setattr(cases.subprocess, "run", run)
    monkeypatch.setattr(speed, "measure", lambda given: {"same": given == SMALL})
    assert cases.in_a_process(SMALL) == {"same": True}
    command, more = commands[0]
    assert command[:3] == [sys.executable, "-m", "benchmarks.speed"]
    assert more["cwd"] == cases.PROJECT


def test_a_process_that_failed_is_named_with_its_last_line(monkeypatch):
    failed = type("Result", (), {"returncode": 1, "stdout": "", "stderr": "Trace\nout of memory\n"})
    monkeypatch.setattr(cases.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match="^tiny, update: out of memory$"):
        cases.in_a_process(Case("tiny", "update"))


@pytest.mark.parametrize("module, argv, words", [
    (speed, ["--sizes", "huge"], "--sizes huge is not one of"),
    (speed, ["--size", "tiny"], "unknown argument --size"),
    (gpu, ["--size", "huge"], "--size huge is not one of"),
    (cost, ["gea"], "no method gea; there are: none"),
])
def test_wrong_flags_get_one_line(module, argv, words):
    with pytest.raises(UserError, match=words):
        module.main(argv)


def test_every_number_has_bounds_and_its_defaults_lie_within():
    assert_bounded({f"{module.__name__} {name}": flag for module in (speed, gpu, cost)
                    for name, flag in module.FLAGS.items()})


def test_a_part_that_takes_too_long_is_an_error(monkeypatch):
    def run(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)
    monkeypatch.setattr(cases.subprocess, "run", run)
    with pytest.raises(UserError, match="^tiny, rollout: not done after 5 seconds$"):
        cases.in_a_process(SMALL, most=5)


def test_a_row_of_speeds_by_hand(monkeypatch):
    """100 and 80 tokens in a second. One part of the work takes 0.4 s for its operations, another
    0.1 s for its bytes."""
    monkeypatch.setattr(speed, "find_spec", lambda name: name == "transformers")
    case = Case("tiny", "rollout", questions=2, answers=5)
    turns = [{"tokens": tokens, "seconds": 1.0, "memory": size * 2 ** 20,
              "needs": [[40, 10], [1, 10]]} for tokens, size in ((100, 1), (80, 2))]
    results = {case: turns,
               replace(case, what="rollout, transformers"): [{"tokens": 50, "seconds": 1.0}] * 2}
    row = speed.row_of(case, results, [{"rate": 100, "bandwidth": 100}] * 2)
    assert row == ["tiny", "rollout", "10 x 10", 90, (80, 100), 1.8, 0.5, 1.5]


def test_transformers_does_the_same_work_where_it_can(monkeypatch):
    monkeypatch.setattr(speed, "find_spec", lambda name: None)
    assert speed.rival_of(SMALL) is None
    monkeypatch.setattr(speed, "find_spec", lambda name: name == "transformers")
    assert speed.rival_of(replace(SMALL, what="update")) is None
    assert speed.rival_of(SMALL).what == "rollout, transformers"


def test_the_table_of_costs_by_hand():
    """Two steps of a method against two of plain GRPO; every method has its row."""
    def line(credit, update, size, extra=0):
        return {"credit_seconds": credit, "update_seconds": update, "seconds": 2.0, "tokens": 100,
                "extra_tokens": extra, "peak_memory_bytes": size * 2 ** 20}
    plain = [line(0.0, 1.0, 600), line(0.002, 1.0, 610)]
    row = cost.row_of("gae", [line(0.5, 1.1, 640, 250), line(0.502, 1.1, 650, 250)], plain)
    assert row == ["gae", pytest.approx(501), pytest.approx(1100), pytest.approx(0.3), 2.5, 40]
    ours = {name for choices in (MITIGATIONS, ADVANTAGES) for name, chosen in choices.items()
            if not chosen.__module__.startswith("research.")}  # which another test may import
    assert ours - {"grpo"} <= set(cost.METHODS)
    for flags in cost.METHODS.values():
        make_settings(read_flags(flags))


def kept_by_autograd(case: Case) -> list[torch.Size]:
    """Shapes of what the forward pass of an update keeps, without the model's own."""
    model, batch = cases.make_model(case), cases.make_batch(case)
    of_model = {p.data_ptr() for p in model.parameters()}
    shapes = []

    def look(tensor):
        if tensor.is_floating_point() and tensor.data_ptr() not in of_model:
            shapes.append(tensor.shape)
        return tensor
    with torch.autograd.graph.saved_tensors_hooks(look, lambda tensor: tensor):
        forward.response_log_probs(model, batch, torch.arange(len(batch.ids)))
    return shapes


def test_logits_in_chunks_are_not_kept(monkeypatch):
    V = cases.SIZES["tiny"][0]
    assert any(V in shape for shape in kept_by_autograd(SMALL))
    monkeypatch.setattr(forward, "LOGITS_AT_ONCE", V * 10)
    assert not any(V in shape for shape in kept_by_autograd(SMALL))


def test_with_checkpointing_one_state_a_layer_is_kept():
    """4 layers, the last norm and the output; and nothing as wide as the MLP."""
    wide = [shape[-1] for shape in kept_by_autograd(replace(SMALL, checkpointing=True))
            if shape and shape[-1] in (128, 384)]
    assert 384 not in wide and 4 <= len(wide) <= 8
    assert 384 in [shape[-1] for shape in kept_by_autograd(SMALL) if shape]
