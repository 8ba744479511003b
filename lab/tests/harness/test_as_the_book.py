"""With the flags of train.py alone, a run of the lab has the numbers of the book, bit for bit."""
import numpy as np
import pytest

import train as book
from conftest import ROOT
from lab_runs import run
from runs import arrays, lines, timeless

FLAGS = ["--model", str(ROOT / "models/tiny"), "--threads", "1", "--steps", "2", "--questions", "3",
         "--answers", "4", "--max_new_tokens", "48", "--micro_batch", "5", "--learning_rate",
         "0.001", "--seed", "3", "--eval_every", "2", "--eval_tasks", "5", "--change_every", "1",
         "--checkpoint_every", "1"]


@pytest.mark.parametrize("more", [
    [], ["--mitigation", "entropy_masking", "--advantage", "dr_grpo", "--weight_decay", "0.1"],
    ["--epochs", "2", "--kl", "0.05", "--mitigation", "by_kind", "--rescale", "none"]])
def test_the_lab_has_the_numbers_of_the_book(tmp_path, more):
    of_book, of_lab = tmp_path / "book", tmp_path / "lab"
    book.main([*FLAGS, *more, "--out", str(of_book)])
    run(*FLAGS, *more, "--out", of_lab)
    for log in ("metrics.jsonl", "evaluations.jsonl"):
        for one, other in zip(lines(of_book / log), lines(of_lab / log), strict=True):
            assert timeless(one).items() <= timeless(other).items()
    files = [path.relative_to(of_book) for path in of_book.rglob("*")
             if path.suffix in (".npz", ".safetensors")]
    assert len(files) == 6  # of tokens, models and their trainers
    for file in files:
        found, wanted = arrays(of_lab / file), arrays(of_book / file)
        assert found.keys() >= wanted.keys()
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted), file
