"""Answers of several turns in what a person types and looks at."""
import pytest
from conftest import ROOT, refusal

import lab.tools.page as analyze
import lab.run as train
from lab.analysis.answers import answer_of
from lab.analysis.run_folders import Run, read_credit
from lab.analysis.token_table import read_step
from lab.engine.tokens import load_tokenizer
from lab.tools import follow, sample, try_task
from lab.analysis import shading as terminal

GUESSER = str(ROOT / "models/guesser")


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("played") / "run"
    train.train_beyond(["--model", GUESSER, "--steps", "2", "--questions", "2", "--answers", "4",
                "--eval_every", "0", "--checkpoint_every", "1", "--out", str(folder)])
    return folder


def test_a_page_shows_replies_and_knows_no_number_of_them(played, capsys):
    run, record = Run(played), read_step(played, 2)
    b = next(b for b in range(8) if not record.tokens_of(b)["own"].all())
    answer = answer_of(record, load_tokenizer(played), run.config, run.metrics[1], b)
    assert "".join(answer["texts"]).count("<|im_end|>") > 1
    of_replies = [t for t, own in enumerate(answer["own"]) if not own]
    for values in (*answer["values"].values(), answer["account"]["p"], answer["account"]["term"]):
        assert all((values[t] is None) == (t in of_replies) for t in range(len(values)))
    assert answer["account"]["tokens"] == sum(answer["own"])
    analyze.main([str(played)])
    page = (played / "analysis/page.html").read_text()
    assert "written by the environment" in page and '"own":' in page.replace(" ", "")
    assert "--credit" not in capsys.readouterr().out


def test_follow_shows_replies_in_their_place(played, capsys):
    follow.main([str(played), "--step", "2"])
    follow.main([str(played), "--step", "2", "--answer", "0"])
    follow.main([str(played), "--step", "2", "--answer", "0", "--token", "0"])
    assert capsys.readouterr().out.count("<|im_end|>") > 4
    said = refusal(follow.main, [str(played), "--step", "2", "--answer", "0", "--token", "0",
                                 "--credit", "10"])
    assert said.startswith("--credit is measured in answers of one turn alone")
    record = read_step(played, 2)
    b = next(b for b in range(8) if not record.tokens_of(b)["own"].all())
    t = record.tokens_of(b)["own"].tolist().index(False)
    said = refusal(follow.main, [str(played), "--step", "2", "--answer", str(b), "--token", str(t)])
    assert said.startswith(f"token {t} of answer {b} was written by the environment")


def test_a_game_is_played_for_a_person(capsys, monkeypatch):
    sample.main([GUESSER, "5", "--answers", "8"])
    printed = capsys.readouterr().out
    assert "the secret 5 in game typed" in printed
    assert " big." in printed and " small." in printed
    assert "expected a secret from 1 to 7" in refusal(sample.main, [GUESSER, "8"])
    monkeypatch.setattr(terminal, "has_colour", lambda: True)
    monkeypatch.setattr(terminal, "styled", lambda text, style: f"<{style}>{text}</>")
    assert terminal.shaded([" big", "."], [None, 0.5], ((1.0, "1"),), str) == (
        "<38;5;245> big</><1>.</>")


def test_what_turns_are_paid_is_on_the_page_and_the_task_is_tried(tmp_path, capsys):
    """The price of a guess, at the end of each turn that no right one ends."""
    flags = ["--model", GUESSER, "--task", "lab.tests.paid_guess", "--questions", "2"]
    train.train_beyond([*flags, "--steps", "1", "--answers", "4", "--eval_every", "0",
                        "--advantage", "without_luck", "--out", str(tmp_path / "run")])
    run, record = Run(tmp_path / "run"), read_step(tmp_path / "run", 1)
    answer = answer_of(record, load_tokenizer(tmp_path / "run"), run.config, run.metrics[0],
                       0)
    assert [text for text, paid in zip(answer["texts"], answer["paid"]) if paid] == [
        "<|im_end|>"] * answer["texts"].count("<|im_end|>")
    assert sum(paid or 0 for paid in answer["paid"]) == answer["reward"]
    batch = read_credit(tmp_path / "run", 1, load_tokenizer(tmp_path / "run"))
    assert (batch.paid != 0).sum(1).max() > 1  # not the last turn alone
    analyze.main([str(tmp_path / "run")])
    assert '"paid":[' in (tmp_path / "run/analysis/page.html").read_text()
    capsys.readouterr()
    assert try_task.main([*flags, "--problems", "4", "--answers", "16"]) == 0
    assert "LEARNS: in 4 of 4 groups of 16 answers the rewards differ" in capsys.readouterr().out
