"""The programme for a GPU, carried out on a CPU: every part runs, and none ends the others."""
import json

import pytest
import torch

from benchmarks import cases, gpu
from benchmarks.cases import Case
from engine.errors import UserError

TINY = (512, 32, 32, 1, 2, 1, 16)


def test_every_part_runs_and_one_that_fails_says_so(tmp_path, monkeypatch, capsys):
    """In this process: what each part is started with, and what it prints."""
    monkeypatch.setattr(cases, "seconds_of", lambda work, case: (1.0, work()))
    monkeypatch.setitem(cases.SIZES, "tiny", TINY)
    monkeypatch.setattr(gpu, "ROWS", (8, 16))
    def run(command, what, most):
        assert command[1:3] == ["-m", "benchmarks.cases"] and most == gpu.LONGEST
        if what.endswith("step"):
            raise UserError("out of memory")
        before = capsys.readouterr().out
        cases.main(command[3:])
        printed = capsys.readouterr().out
        print(before, end="")
        return printed
    monkeypatch.setattr(cases, "run_quietly", run)
    out = tmp_path / "report.json"
    gpu.main(["--device", "cpu", "--size", "tiny", "--new_tokens", "4", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "a process each: models/tiny, float32; " in printed.split("|")[0]
    assert "FAILED: out of memory" in printed and "16 answers" in printed
    parts = json.loads(out.read_text())["parts"]
    assert len(parts) == 8
    assert [name for name, found in parts.items() if "error" in found] == ["step"]
    assert parts["models/tiny, float32"]["gradient"] == 0
    with pytest.raises(UserError, match="there is such a file already"):
        gpu.main(["--device", "cpu", "--out", str(out)])


def test_without_a_gpu_a_sentence_says_what_there_is_instead(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="sees no GPU here.*benchmarks.speed --count"):
        gpu.main([])


@pytest.mark.parametrize("spoil, words", [
    (lambda model: None, "64 of 64 answers equal, their log-probs 0e+00 apart, the gradient 0e+00 "
                         "of its norm: as on the CPU"),
    (lambda model: model.model.norm.weight.data.mul_(1.1), "NOT AS on the CPU")])
def test_a_model_that_computes_something_else_is_noticed(monkeypatch, spoil, words):
    load, loaded = cases.load_policy, []

    def load_policy(settings):
        loaded.append(load(settings))
        if len(loaded) % 2 == 0:  # the second is the one on the GPU
            spoil(loaded[-1].model)
        return loaded[-1]
    monkeypatch.setattr(cases, "load_policy", load_policy)
    case = Case("tiny", "agreement")
    assert gpu.sentence(case, cases.agreement(case)()).endswith(words)


def test_a_speed_by_hand():
    found = dict(tokens=3000, seconds=2.0, memory=5 * 2 ** 20)
    assert gpu.sentence(Case("tiny", "update"), found) == "1,500 tokens a second, 5 MiB"
