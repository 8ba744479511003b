"""What the engine notes of its progress while it computes."""
import torch

from conftest import ROOT
from engine import processes
from engine.forward import over_answers
from engine.model_folder import read_model_folder
from engine.sampler import generate


def test_answers_are_counted_before_each_part():
    parts = [torch.arange(3), torch.arange(3, 5), torch.arange(0)]
    noted = [(part.tolist(), processes.progress) for part in over_answers(parts)]
    assert noted == [([0, 1, 2], "0 of 5 answers"), ([3, 4], "3 of 5 answers"),
                     ([], "5 of 5 answers")]


def test_tokens_are_counted_while_they_are_sampled(monkeypatch):
    noted = []
    monkeypatch.setattr(processes, "note_progress", noted.append)
    generate(read_model_folder(ROOT / "models/tiny"), [[5, 6, 7]], max_new_tokens=20,
             stop_ids=())
    assert noted[0] == "1 of at most 20 tokens" and len(noted) > 1
    assert all(text.endswith(" of at most 20 tokens") for text in noted)
