"""Is my version better? Which edits count, of which a verdict is trained, what is refused."""
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import ROOT, refusal

import run
from lab.harness.made_of import OF_A_STEP, program
from lab.harness.settings import make_settings
from lab.tools.against import not_copied
from lab.tools.idea import main
from lab.harness.versions import differing, texts_of

LOSS = "return -(weight * advantage * log_prob * mask).sum() / N"
MY_TASK = "from countdown_task import Task\n\n\nclass Mine(Task):\n    limit = 2\n"
# an edit of a file, and the definitions that are then other ones for a run of the book, and the lab
EDITS = {
    "the sign": ("grpo.py", LOSS, LOSS.replace("-(", "("), "policy_loss", "policy_loss"),
    "+ 10": ("grpo.py", "/ (std + epsilon)).float()", "/ (std + epsilon)).float() + 10",
             "group_z_score", "group_z_score"),
    "AdamW without its second mean": ("grpo.py", "square.sqrt().div_(", "torch.ones_like(p).div_(",
                                      "AdamW.step", "AdamW.step"),
    "the reward": ("countdown_task.py", "* form + right,", "* form - right,", "Task.score",
                   "Task.score"),
    "a new weighting": ("mitigations.py", "if __name__", "@mitigation\ndef my_idea(rollouts):\n"
                        "    return rollouts.entropy\n\n\nif __name__", "", ""),
    "a comment": ("grpo.py", LOSS, f"# why\n    {LOSS}", "", ""),
    "another variable": ("grpo.py", "std = group_mean(difference.square(), group).sqrt()",
                         "x = std = group_mean(difference.square(), group).sqrt()",
                         "group_z_score", "group_z_score"),
    "a constant": ("countdown_task.py", "FORMAT_WEIGHT = 0.1", "FORMAT_WEIGHT = 0.2",
                   "FORMAT_WEIGHT", "FORMAT_WEIGHT"),
    "a called function": ("grpo.py", "count = torch.bincount(group)",
                          "count = torch.bincount(group) + 1", "group_mean", "group_mean"),
    "a file that is not loaded": ("analyze.py", "import", "import os\nimport", "", ""),
    "the file of a task": ("examples/mine.py", "limit = 2", "limit = 3", "", "Mine"),
    "a helper of a method that is not chosen": ("mitigations.py", "def tokens_until(",
                                                "def more():\n    pass\n\n\ndef tokens_until(",
                                                "", ""),
    "a docstring": ("grpo.py", "(B,): the mean of", "(B,): a mean of", "", ""),
    "the engine": ("lab/engine/update.py", ".square() / 2\n", ".square() / 3\n", "",
                   "divergence_k2"),
    "the sampler of a GPU": ("lab/gpu/sampler.py", "def in_parts(p: Tensor)",
                             "def in_parts(q: Tensor)", "", "")}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy") / "project"
    shutil.copytree(ROOT, folder, ignore=not_copied)
    (folder / "examples/mine.py").write_text(MY_TASK)
    return folder


def versions_in(folder):
    """What a run of the book and a run of the lab with a task are made of."""
    s = make_settings({})
    s.task = "examples.mine"
    book = [folder / name for name in OF_A_STEP if "/" not in name]
    return (texts_of(book, {"train", "Training", "none", "grpo"}, root=folder), program(s, folder))


@pytest.fixture(scope="module")
def unedited(copy):
    return versions_in(copy)


@pytest.mark.parametrize("edit", EDITS)
def test_what_an_edit_changes_is_named_and_nothing_else(copy, unedited, edit):
    file, before, after, *expected = EDITS[edit]
    text = (copy / file).read_text()
    assert before in text
    (copy / file).write_text(text.replace(before, after, 1))
    edited = versions_in(copy)
    (copy / file).write_text(text)
    for one, other, name in zip(unedited, edited, expected):
        assert [*differing(one, other)] == ([f"{name} ({file})"] if name else [])
        assert one.keys() == other.keys()


@contextmanager
def called_definitions():
    """A set that gets what is called of the book, and of the lab's engine and methods."""
    labels = set()

    def note(frame, event, _):
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname.split(".<locals>")[0]
        if event == "call" and path.is_relative_to(ROOT) and not name.startswith("<"):
            file = path.relative_to(ROOT).as_posix()
            if "/" not in file or file.startswith(("lab/engine/", "lab/credit/")):
                labels.add(f"{name} ({file})")

    sys.setprofile(note)
    yield labels
    sys.setprofile(None)


@pytest.mark.slow
def test_no_run_of_the_lab_calls_what_it_is_said_to_replace(learner, tmp_path, monkeypatch):
    """So an edit of these parts of the book changes no number of it. An edit of all else that it
    calls is another version, as one of the update, which is the book's."""
    import countdown_task
    import grpo
    import mitigations
    import qwen2_model
    import train
    from lab.harness.run import open_lab_run

    def broken(*given, **named):
        raise AssertionError

    places = {"grpo.py": grpo, "mitigations.py": mitigations, "run.py": run,
              "qwen2_model.py": qwen2_model, "countdown_task.py": countdown_task}
    for label in REPLACED - {"Training (train.py)"}:
        name, file = label.rstrip(")").split(" (")
        owner, _, method = name.rpartition(".")
        where = getattr(places[file], owner) if owner else places[file]
        monkeypatch.setattr(where, method, broken)
    argv = ["--model", str(learner), "--questions", "2", "--answers", "4", "--steps", "1",
            "--max_new_tokens", "16", "--eval_every", "0", "--out"]
    of_lab = open_lab_run([*argv, str(tmp_path / "a")])
    with called_definitions() as called:
        train.carry_out(of_lab)
    assert called <= program(of_lab.settings).keys() and "one_step (grpo.py)" in called
    for part in ("update", "one_step", "policy_loss"):
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            patch.setattr(grpo, part, broken)
            train.carry_out(open_lab_run([*argv, str(tmp_path / part), "--kl", "1"]))


def test_what_cannot_be_compared_is_refused(copy, tmp_path, capsys):
    argv = ["--runs", str(tmp_path / "runs")]
    assert "is no folder of the project and no commit" in refusal(
        main, ["--against", "nowhere", *argv])
    assert "--out cannot be given" in refusal(main, ["--against", str(copy), "--out", "x", *argv])
    assert "name a weighting or an advantage, or --against" in refusal(main, argv)
    main(["--against", str(copy), *argv])
    assert "so nothing is trained" in " ".join(capsys.readouterr().out.split())
    for edit in ("AdamW without its second mean", "the reward"):  # the lab has its own of both
        file, before, after, name, _ = EDITS[edit]
        text = (copy / file).read_text()
        (copy / file).write_text(text.replace(before, after))
        assert refusal(main, ["--against", str(copy), *argv]).startswith(
            f"{name} ({file}) differs, but `lab idea` trains by runs of the lab")
        (copy / file).write_text(text)
    methods = copy / "mitigations.py"
    text = methods.read_text()
    methods.write_text(text.replace("def entropy_weighted", "def other_name"))
    assert "has no entropy_weighted. With plain GRPO a new method is compared by" in refusal(
        main, ["entropy_weighted", "--against", str(copy), *argv])
    methods.write_text(text)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_from_an_edit_to_the_verdict(copy, tmp_path, capsys):
    """A turned sign is trained, a renamed variable stops after a pair, and finished runs are used
    again."""
    argv = ["--against", str(copy), "--questions", "2", "--answers", "4", "--steps", "2",
            "--eval_tasks", "4", "--max_new_tokens", "40", "--seeds", "2", "--processes", "2",
            "--runs", str(tmp_path / "runs")]
    said = []
    for edit in ("the sign", "another variable"):
        file, before, after, *_ = EDITS[edit]
        text = (copy / file).read_text()
        (copy / file).write_text(text.replace(before, after))
        main(argv)
        (copy / file).write_text(text)
        said.append(" ".join(capsys.readouterr().out.split()))
    assert f"+ {LOSS}" in said[0] and "2 of 4 runs have to be made" in said[0]
    assert "your edit minus | pairs |" in said[0] and "Both runs" not in said[0]
    assert "1 of 2 runs have to be made" in said[1] and "minus" not in said[1]
    assert "Both runs of seed 0 are the same to the last bit" in said[1]
