"""The programme for a GPU, carried out on a CPU: every part runs, and none ends the others."""
import json

import pytest
import torch

from benchmarks import cases, gpu, speed
from benchmarks.cases import Case
from engine.errors import UserError

TINY = (512, 32, 32, 1, 2, 1, 16)


def test_every_part_runs_and_one_that_fails_says_so(tmp_path, monkeypatch, capsys):
    """In this process: what each part is started with, and what it prints."""
    monkeypatch.setattr(speed, "seconds_of", lambda work, case: (1.0, work()))
    monkeypatch.setitem(cases.SIZES, "tiny", TINY)
    monkeypatch.setattr(gpu, "ROWS", (8, 16))
    started = []

    def run(command, what, most):
        assert command[1] == "-m" and most == gpu.LONGEST
        if "limits" in command[-1]:
            raise UserError("out of memory")
        started.append(command[2])
        before = capsys.readouterr().out
        {"benchmarks.gpu": gpu, "benchmarks.speed": speed}[command[2]].main(command[3:])
        printed = capsys.readouterr().out
        print(before, end="")
        return printed
    monkeypatch.setattr(cases, "run_quietly", run)
    monkeypatch.setattr(gpu, "run_quietly", run)
    out = tmp_path / "report.json"
    gpu.main(["--device", "cpu", "--size", "tiny", "--new_tokens", "4", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "a process each: rates; models/tiny, float32; " in printed.split("|")[0]
    assert "FAILED: out of memory" in printed and "16 answers" in printed
    assert "Computed, not measured: tiny, bfloat16" in printed
    assert started == 9 * ["benchmarks.gpu"] + ["benchmarks.speed"]
    report = json.loads(out.read_text())
    assert len(report["parts"]) == 10 and report["expected"] in printed
    assert [name for name, found in report["parts"].items() if "error" in found] == ["rates"]
    assert report["parts"]["models/tiny, float32"]["gradient"] == 0
    assert report["parts"]["kernels"]["token step"] > 50
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
    load, loaded = gpu.load_policy, []

    def load_policy(settings):
        loaded.append(load(settings))
        if len(loaded) % 2 == 0:  # the second is the one on the GPU
            spoil(loaded[-1].model)
        return loaded[-1]
    monkeypatch.setattr(gpu, "load_policy", load_policy)
    case = Case("tiny", "agreement")
    assert gpu.sentence(case, gpu.agreement(case)()).endswith(words)


def test_sentences_by_hand():
    def sentence(what, **found):
        return gpu.sentence(Case("tiny", what), found)
    assert sentence("update", tokens=3000, seconds=2.0, memory=5 * 2 ** 20) \
        == "1,500 tokens a second, 5 MiB"
    assert sentence("limits", rate=700e12, bandwidth=3.2e12).startswith("700 * 10^12 operations")
    assert sentence("kernels", **{"token step": 641.2, "update": 4000}) \
        == "641 a token step, 4,000 an update"


def test_of_two_profiles_the_difference_is_token_steps(monkeypatch):
    """600 events a token; one lasts 2 ms, all others none."""
    class Event:
        def __init__(self, name, us):
            self.name = name
            self.time_range = type("Range", (), {"elapsed_us": lambda _: us})()

    def profiled(case):
        tokens = case.new_tokens if case.what == "rollout" else 1
        return [Event("add", 0)] * (600 * tokens + 77) + [Event("product", 2000)]
    monkeypatch.setattr(gpu, "profiled", profiled)
    found = gpu.kernels(Case("tiny", "kernels"))()
    assert found["token step"] == 600 and found["update"] == 678
    assert found["slowest of a rollout"] == {"product": 2, "add": 0}
