"""What a run writes: whole or not at all, read as it was written, by one process; and the curves of
--track, which are the numbers on record."""
import shutil
import sys
from pathlib import Path

import pytest

from conftest import INSTALL
from lab.engine.errors import PROJECT, UserError, read_json
from lab.harness.record import find_folder, new_folder, read_lines
from lab.harness.step_lines import METRICS
from lab_runs import SHORT, run
from runs import lines


def test_a_folder_that_is_there_is_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "b").mkdir()
    (tmp_path / "b/mine").write_text("")
    with pytest.raises(UserError, match="b exists already"), new_folder(tmp_path / "b"):
        pytest.fail("the work began")
    assert (tmp_path / "b/mine").exists()
    monkeypatch.chdir(tmp_path)
    for unnamed in (".", "/"):
        with pytest.raises(UserError, match="exists already"), new_folder(Path(unnamed)):
            pytest.fail("the work began")


@pytest.mark.parametrize("text, lines", [
    ('{"step": 1}\n{"step": 2}\n', [{"step": 1}, {"step": 2}]),
    ('{"step": 1}\n{"step": ', [{"step": 1}]), ('{"step": 1}\n{"step": 2}', [{"step": 1}]),
    ("", [])])
def test_a_last_line_that_is_cut_off_is_left_out(tmp_path, text, lines):
    """Also where only the end of the line is missing: the next one would follow it."""
    (tmp_path / "x.jsonl").write_text(text)
    assert read_lines(tmp_path / "x.jsonl") == lines


@pytest.mark.parametrize("read, text, words", [
    (read_json, b"[1]", "x should hold an object"), (read_json, b"{", "x is not JSON"),
    (read_json, b"\xef\xbb\xbf[1]", "x should hold an object"),  # as some editors begin a file
    (read_json, b"[" * 10 ** 5, "x is not JSON"), (read_json, b"\xff", "x is not JSON"),
    (read_json, None, "cannot read .*x: No such file"),
    (read_lines, b'{"loss": 1}\n', "x, line 1 is damaged")])
def test_what_cannot_be_read_is_named(tmp_path, read, text, words):
    if text is not None:
        (tmp_path / "x").write_bytes(text)
    with pytest.raises(UserError, match=words):
        read(tmp_path / "x")


def test_a_shipped_folder_is_found_from_anywhere_and_a_folder_of_ones_own_comes_first(
        tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_folder("models/tiny") == PROJECT / "models/tiny"
    assert str(find_folder("models/none")) == "models/none"
    (tmp_path / "models/tiny").mkdir(parents=True)
    assert str(find_folder("models/tiny")) == "models/tiny"


PARTS = {"reward_format", "reward_answer", "reward_reasoning"}
NOTHING_LEFT = "--max_new_tokens 1 --drop_unfinished"


@pytest.mark.parametrize("flags, own, is_skipped", [
    ("--steps 3 --change_every 3", set(), False),  # step 2 measures no change
    ("--steps 1 --kl 0.1 --epochs 2", set(), False),
    (f"--steps 1 {NOTHING_LEFT}", set(), True),
    (f"--steps 1 --epochs 2 --mitigation lambda_grpo {NOTHING_LEFT}", {"lambda"}, True),
    (f"--steps 1 --mitigation learned_importance {NOTHING_LEFT}", {"importance_loss"}, True)])
def test_every_line_has_the_same_names(tmp_path, flags, own, is_skipped):
    """In any run, in steps that are skipped too; what is undefined there is null."""
    run(*SHORT, *flags.split(), "--out", tmp_path / "x")
    for line in lines(tmp_path / "x/metrics.jsonl"):
        assert line.keys() == METRICS.keys() | PARTS | own
        assert bool(line["skipped"]) == is_skipped
        undefined = {name for name, value in line.items() if value is None}
        assert not is_skipped or {"kl", "ratio_mean", "gradient_norm",
                                  "sampler_gap"} <= undefined
        assert undefined.isdisjoint({"kl", "ratio_mean"}) == ("--kl" in flags)
        if "--kl" in flags:  # with these flags all else that is listed is computed
            assert undefined == {"weight_note", "skipped"}


FLAGS = [*SHORT, "--steps", "2", "--eval_every", "2", "--eval_tasks", "4"]


def test_tensorboard_shows_each_step_once(tmp_path):
    """Of a run of two steps that lost the second checkpoint, and was resumed for a third step."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator",
                                 reason=INSTALL)
    folder = tmp_path / "run"
    said = run(*FLAGS, "--track", "tensorboard", "--out", folder).stdout
    shutil.rmtree(folder / "checkpoints/step_000002")
    run("--resume", folder, "--steps", "3")
    steps, evaluations = (lines(folder / f"{name}.jsonl") for name in ("metrics", "evaluations"))
    assert f"tensorboard --logdir {tmp_path}" in said
    shown = events.EventAccumulator(str(folder / "tensorboard")).Reload()

    def curve(name):
        return [(event.step, pytest.approx(event.value)) for event in shown.Scalars(name)]

    assert curve("train/reward") == [(line["step"], line["reward"]) for line in steps]
    greedy = [(line["step"], line["success"]) for line in evaluations if line["mode"] == "greedy"]
    assert curve("held_out/greedy/success") == greedy
    assert [step for step, _ in greedy] == [0, 2, 3]


def test_a_program_that_is_not_installed_is_one_sentence(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said = run(*FLAGS, "--track", "tensorboard", "--out", tmp_path / "run", expect=1).stderr
    assert "--track tensorboard needs the package tensorboard: pip install tensorboard" in said
    assert not (tmp_path / "run").exists()
