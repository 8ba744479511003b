"""The programme for a GPU, carried out on a CPU: every part runs, and none ends the others."""
import json
from itertools import cycle
from types import SimpleNamespace

import pytest
import torch

from lab.speed import cases, gpu
from lab.speed.cases import Case
from lab.engine.errors import UserError
from lab.engine.packing import common_prefix

TINY = (512, 32, 32, 1, 2, 1, 16)


def test_every_part_runs_and_one_that_fails_says_so(monkeypatch, capsys):
    """In this process: what each part is started with, and what it prints."""
    monkeypatch.setattr(cases, "seconds_of", lambda work, case: (1.0, work()))
    monkeypatch.setitem(cases.SIZES, "tiny", TINY)
    monkeypatch.setattr(gpu, "ROWS", (8, 16))

    def run(command, timeout, cwd, **_):
        assert command[1:3] == ["-m", "lab.speed.cases"] and timeout == gpu.LONGEST
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
    assert first.startswith(f"PyTorch {torch.__version__}") and len(rows) == 7
    assert [row for row in rows if "FAILED" in row] == [rows[-1]]
    assert rows[-1].split() == "step FAILED: tiny, step: out of memory".split()
    assert rows[0].endswith("the same as on the CPU: 64 of 64 answers are equal, log-probs differ "
                            "by 0e+00, and the gradient by 0e+00 of its norm")
    assert rows[3].startswith("sample, 16 answers ") and rows[3].endswith(" MiB")


def test_of_a_models_folder_the_speed_is_the_median_of_three_turns(learner, monkeypatch):
    turns = cycle([9.0, 1.0, 2.0])
    monkeypatch.setattr(cases, "seconds_of", lambda work, case: (next(turns), work()))
    parts = gpu.parts_of(Case("", model=str(learner), new_tokens=4, device="cpu"))
    assert [case.questions * case.answers for case in parts.values()] == [16, 64, 16] + 4 * [64]
    found = {name: cases.measure(case) for name, case in parts.items()}
    assert [one["tokens"] for one in found.values()] == [64, 256, 64] + 4 * [6 * 64]
    assert {one["seconds"] for one in found.values()} == {2.0}
    monkeypatch.setattr(gpu, "in_a_process", lambda case, most: {
        "tokens": 40, "seconds": 2.0, "memory": 2 ** 20})
    assert gpu.outcome(parts["sample, 64 answers"]) == "20 tokens a second, 1 MiB"


def test_without_a_gpu_a_sentence_says_what_there_is_instead(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="sees no GPU here.*--device cpu"):
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
    assert gpu.outcome(Case("agreement")).startswith("NOT THE SAME AS on the CPU: ")


def test_the_flag_of_a_models_folder_reaches_the_parts(learner, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "outcome", lambda case: case.model)
    gpu.main(["--device", "cpu", "--model", str(learner)])
    assert capsys.readouterr().out.count(str(learner)) == 7


def test_prompts_begin_alike_where_that_is_asked_for():
    prompts = cases.make_prompts(Case("rollout", questions=3, prompt_tokens=30, prefix=20))
    assert [len(prompt) for prompt in prompts] == [30] * 3
    assert common_prefix(prompts) == 20
    assert common_prefix(cases.make_prompts(Case("rollout"))) == 0
