"""The list of what lab/gpu has another form of, and the room that stays closed after an edit."""
import sys
from types import SimpleNamespace

import torch

import qwen2_model
from lab import gpu
from lab.engine import log_probs, sampler
from lab.engine.sampler import generate
from lab.gpu.forms import FORMS, digest_of, edited
from lab.gpu.sampler import sample_on_gpu


def called(function):
    """The functions and classes of qwen2_model.py that are called meanwhile."""
    found = set()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename == qwen2_model.__file__:
            found.add(code.co_qualname.split(".")[0])

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def test_the_list_has_all_that_the_room_replaces_and_nothing_else(small_model, rollouts,
                                                                  monkeypatch):
    """With the room these are not called any more, in sampling, or where an update computes
    log-probs from states, of which the kernels are stood in for."""
    states, ids = torch.randn(3, 64), torch.arange(3)
    kernels = SimpleNamespace(LogProbsByKernels=SimpleNamespace(apply=lambda *_: torch.zeros(3)))
    found = []
    for function, module, name, of_room in (
            (lambda: generate(small_model, [[5, 6, 7], [8]], max_new_tokens=4),
             sampler, "sample", sample_on_gpu),
            (lambda: small_model.log_probs(states, ids),
             log_probs, "token_log_probs", gpu.token_log_probs)):
        plain = called(function)
        monkeypatch.setitem(sys.modules, "lab.gpu.kernels", kernels)
        monkeypatch.setattr("lab.gpu.model.has_kernels", lambda *_: module is log_probs)
        monkeypatch.setattr(module, name, of_room)
        found.append(plain - called(function))
    assert found[0] | found[1] == {*FORMS} and "Qwen2" in found[1]


def test_the_room_was_compared_with_what_the_book_has_now():
    now = {name: digest_of(getattr(qwen2_model, name)) for name in edited()}
    assert not now, f"does lab/gpu still compute the same? Then lab/gpu/forms.py gets {now}"


class One:
    def f(x):
        """Says something."""
        for place in range(3):
            x = x + place
        return x  # a remark


class TheSame:
    def f(x):
        """Says something else."""

        for place in range(3):  # another remark
            x = x+place
        return x


class Another:
    def f(x):
        """Says something."""
        for place in range(3):
            x = x + place
            return x


def test_a_digest_is_of_the_code_alone():
    assert digest_of(One.f) == digest_of(TheSame.f) != digest_of(Another.f)
    assert digest_of(eval) == ""  # it is in no file


def test_an_edit_of_the_book_closes_the_room_and_it_is_said(monkeypatch, capsys):
    for module, name in ((sampler, "sample"), (log_probs, "token_log_probs")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back after the test
    monkeypatch.setattr("lab.gpu.forms.FORMS", {"draw": digest_of(qwen2_model.draw)})
    gpu.open_room()
    assert sampler.sample is gpu.sample and log_probs.token_log_probs is gpu.token_log_probs
    assert "lab/gpu is open" in capsys.readouterr().out
    monkeypatch.setattr(qwen2_model, "draw", lambda logits, uniform, greedy: None)
    gpu.open_room()
    assert sampler.sample is gpu.plain_sample
    assert log_probs.token_log_probs is gpu.plain_log_probs
    assert "lab/gpu stays closed, because draw (qwen2_model.py)" in capsys.readouterr().out
