"""The programme for a GPU, carried out on a CPU: every part runs, and none ends the others."""
import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import cases, gpu
from benchmarks.cases import Case
from engine.errors import UserError

TINY = (512, 32, 32, 1, 2, 1, 16)


def test_every_part_runs_and_one_that_fails_says_so(monkeypatch, capsys):
    """In this process: what each part is started with, and what it prints."""
    monkeypatch.setattr(cases, "seconds_of", lambda work, case: (1.0, work()))
    monkeypatch.setitem(cases.SIZES, "tiny", TINY)
    monkeypatch.setattr(gpu, "ROWS", (8, 16))

    def run(command, timeout, cwd, **_):
        assert command[1:3] == ["-m", "benchmarks.cases"] and timeout == gpu.LONGEST
        assert cwd == cases.PROJECT
        if json.loads(command[3])["what"] == "step":
            return SimpleNamespace(returncode=1, stderr="Trace\nout of memory\n")
        before = capsys.readouterr().out
        cases.main(command[3:])
        result = SimpleNamespace(returncode=0, stdout=capsys.readouterr().out)
        print(before, end="")
        return result

    monkeypatch.setattr(cases.subprocess, "run", run)
    gpu.main(["--device", "cpu", "--size", "tiny", "--new_tokens", "4"])
    first, _, *rows = capsys.readouterr().out.strip().split("\n")
    assert first.startswith(f"PyTorch {torch.__version__}") and len(rows) == 8
    assert [row for row in rows if "FAILED" in row] == [rows[-1]]
    assert rows[-1].split() == "step FAILED: tiny, step: out of memory".split()
    assert rows[0].endswith("64 of 64 answers equal, their log-probs 0e+00 apart, the gradient "
                            "0e+00 of its norm: as on the CPU")
    assert rows[3].startswith("sample, 16 answers ") and rows[3].endswith(" MiB")


def test_without_a_gpu_a_sentence_says_what_there_is_instead(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="sees no GPU here.*benchmarks.count"):
        gpu.main([])


def test_a_model_that_computes_something_else_is_noticed(monkeypatch):
    load, loaded = cases.load_policy, []

    def load_policy(settings):
        loaded.append(load(settings))
        if len(loaded) % 2 == 0:  # the second is the one on the GPU
            loaded[-1].model.model.norm.weight.data.mul_(1.1)
        return loaded[-1]
    monkeypatch.setattr(cases, "load_policy", load_policy)
    monkeypatch.setattr(gpu, "in_a_process", lambda case, most: cases.agreement(case))
    assert gpu.outcome(Case("agreement")).endswith("NOT AS on the CPU")
