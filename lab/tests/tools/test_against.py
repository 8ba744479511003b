"""Is my version better? Which edits count for `lab idea`, `--against` and `lab compare`; of which a
verdict is trained, what is refused."""
import operator
import shutil

import mitigations
import pytest
from conftest import ROOT, refusal, write_log

from lab.analysis.comparison import arms_of
from lab.analysis.run_folders import Run
from lab.harness.made_of import files_of_run, imported
from lab.harness.settings import make_settings
from lab.harness.versions import differing, version_of
from lab.tools.arms import Arm, not_copied
from lab.tools.idea import main
from run import copy_files

LOSS = "log_prob * mask).sum() / N"
FILES = {"my_words.py": "WORD, NUMBER = 2.0, 3.0\n", "examples/mine.py": '''
import lab.countdown

class Task(lab.countdown.Task):
    limit = 2
''', "my_loss.py": "def policy_loss(*given):\n    return 1\n"}
IDEA = '''

from my_words import WORD as HEAVY
TABLE = {"strength": 2.0}

def helper(values):
    return values * TABLE["strength"] * HEAVY

@mitigation
def an_idea(rollouts):
    return helper(rollouts.entropy)
'''
METHOD = "    def __post_init__(self):\n        self.max_number = 9\n\n"
NEW = "@mitigation\ndef new_one(x):\n    return of_new(x)\n\n\ndef of_new(x):\n    return x"
MINE = "mitigations.py"
# edits of a file, each a text and what takes its place; without a text this is added at the end
OF_ALL = {  # for whoever trains with these files; test_versions.py has all kinds of statements
    "the sign": ("grpo.py", LOSS, f"-{LOSS}"), "the file of a loss": ("my_loss.py", "1", "2"),
    "another variable": ("grpo.py", "std = group_mean(", "x = std = group_mean("),
    "a constant": ("countdown_task.py", "FORMAT_WEIGHT = 0.1", "FORMAT_WEIGHT = 0.2"),
    "a setting": ("run.py", "learning_rate: float = 5e-6", "learning_rate: float = 6e-6"),
    "the loop": ("train.py", "        start, used", "        step += 0\n        start, used"),
    "the model": ("qwen2_model.py", "1.0 / config.rope_theta", "2.0 / config.rope_theta"),
    "one's own file": ("my_words.py", "2.0", "4.0"),
    "an entry": (MINE, "", "TABLE['strength'] = 6.0")}
OF_IDEA = {  # for whoever has chosen an_idea
    "the idea": (MINE, "return helper(r", "return 2 * helper(r"),
    "a function again": (MINE, "", "def helper(values):\n    return values"),
    "an import in a function": (MINE, "    return values * TABLE", "    import my_loss\n    return "
                                "values * TABLE")}
OF_LAB = {  # for a run of the lab with a task of one's own
    "the file of a task": ("examples/mine.py", "limit = 2", "limit = 3"),
    "a method of it": ("examples/mine.py", "    limit", f"{METHOD}    limit"),
    "the engine": ("lab/engine/update.py", ".square() / 2\n", ".square() / 3\n")}
OF_NONE = {
    "a comment": ("grpo.py", LOSS, f"{LOSS}  # why"), "a method": (MINE, "", NEW),
    "a docstring": ("grpo.py", "(B,): the mean of", "(B,): a mean of"),
    "a file that is not imported": ("analyze.py", "import", "import os, "),
    "another method": (MINE, "(entropy >= threshold)", "(entropy > threshold)"),
    "a test": ("lab/tests/small.py", "", "x = 1"),
    "the sampler of a GPU": ("lab/gpu/sampler.py", "def in_parts(p: Tensor)", "def in_parts(q)")}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy") / "project"
    shutil.copytree(ROOT, folder, ignore=not_copied)
    shutil.copytree(ROOT / "lab/tests", folder / "lab/tests", ignore=not_copied)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with open(folder / MINE, "a") as file:
        file.write(IDEA)
    (folder / "grpo.py").write_text((folder / "grpo.py").read_text().replace(
        "import torch\n", "import torch\nimport my_loss\n", 1))
    return folder


def edited(folder, file, before, after):
    """The text of the file before the edit."""
    text = (folder / file).read_text()
    assert before in text
    (folder / file).write_text(text.replace(before, after, 1) if before else f"{text}\n{after}\n")
    return text


class Known:
    """What plain GRPO, an_idea, and a run of the lab are with these files: arms for `lab idea` and
    --against, and for `lab compare` runs with a copy of the files."""

    def __init__(self, root, runs, seed):
        s = make_settings({})
        s.task = "examples.mine"
        self.arms = [Arm("x", {"mitigation": axis}, runs, root) for axis in ("none", "an_idea")]
        book, lab = imported(["train.py"], root), files_of_run(s, root)
        of_lab = version_of(lab, {"none", "grpo"})
        self.folders = [arm.folder.name for arm in self.arms] + [of_lab]
        self.versions, self.made = [*(arm.version for arm in self.arms), of_lab], []
        for axis, files in (("none", book), ("an_idea", book), ("none", lab)):
            folder = runs / f"{axis}-{len(self.made)}-{seed}"
            write_log(folder, {}, {"mitigation": axis, "seed": seed}, [{"step": 1, "success": 0.5}])
            copy_files(files, folder / "code")
            self.made.append(Run(folder))


@pytest.fixture(scope="module")
def unedited(copy, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(mitigations.MITIGATIONS, "an_idea", lambda rollouts: rollouts.entropy)
        patch.setattr("lab.tools.arms.is_of_book", lambda flags: True)  # which it asks for long
        yield Known(copy, tmp_path_factory.mktemp("runs"), 0)


@pytest.mark.parametrize("seen, edit", [
    *(((True, True, True), edit) for edit in OF_ALL.values()),
    *(((False, True, False), edit) for edit in OF_IDEA.values()),
    *(((False, False, True), edit) for edit in OF_LAB.values()),
    *(((False, False, False), edit) for edit in OF_NONE.values())],
    ids=[*OF_ALL, *OF_IDEA, *OF_LAB, *OF_NONE])
def test_what_counts_is_seen_by_idea_against_and_compare(copy, unedited, tmp_path, seen, edit):
    """Of plain GRPO, of an_idea and of a run of the lab: runs are made anew, a difference is told
    with its file, and there are two arms; or nothing of it."""
    text = edited(copy, *edit)
    now = Known(copy, tmp_path, 1)
    (copy / edit[0]).write_text(text)
    assert tuple(map(operator.ne, unedited.folders, now.folders)) == seen
    for number, is_seen in enumerate(seen):
        labels = differing(unedited.versions[number], now.versions[number])
        assert bool(labels) == is_seen
        assert edit[0] in " ".join(labels) or not labels
        assert len(arms_of([unedited.made[number], now.made[number]])) == 1 + is_seen


def test_what_cannot_be_compared_is_refused(copy, unedited, tmp_path, capsys):
    argv = ["--runs", str(tmp_path / "runs")]
    assert "is no folder of the project, no run with code/ and no commit" in refusal(
        main, ["--against", "nowhere", *argv])
    assert "--out cannot be given" in refusal(main, ["--against", str(copy), "--out", "x", *argv])
    assert "the name of a weighting or an advantage, --set, or --against" in " ".join(
        refusal(main, argv).split())
    of_run = ["--against", str(unedited.made[0].folder), *argv]
    main(["--against", str(ROOT), *argv])
    assert "so nothing is trained" in " ".join(capsys.readouterr().out.split())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lab.tools.arms.is_of_book", lambda flags: False)
        assert "has no lab, which these flags need" in refusal(main, [*of_run, "--lora", "1"])
    assert f"{ROOT} has no an_idea. With plain GRPO a new method is compared by" in refusal(
        main, ["an_idea", "--against", str(ROOT), *argv])
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_from_an_edit_to_the_verdict(tmp_path, capsys):
    """A turned sign is trained, a renamed variable stops after a pair, and finished runs are used
    again, also as the other version."""
    folder = shutil.copytree(ROOT, tmp_path / "project", ignore=not_copied)
    argv = ["--questions", "2", "--answers", "4", "--steps", "2", "--eval_tasks", "4",
            "--max_new_tokens", "40", "--seeds", "2", "--processes", "2",
            "--runs", str(tmp_path / "runs"), "--against"]
    said = []
    for edit in (OF_ALL["the sign"], OF_ALL["another variable"]):
        text = edited(folder, *edit)
        main([*argv, str(folder)])
        (folder / edit[0]).write_text(text)
        said.append(" ".join(capsys.readouterr().out.split()))
    assert "policy_loss (grpo.py)" in said[0] and "2 of 4 runs have to be made" in said[0]
    assert "your edit minus | pairs |" in said[0] and "Both runs" not in said[0]
    assert "1 of 2 runs have to be made" in said[1] and "minus" not in said[1]
    assert "Both runs of seed 0 are the same to the last bit" in said[1]
    [of_sign, *_] = [run for run in (tmp_path / "runs").glob("*/s1")
                     if f"-{LOSS}" in (run / "code/grpo.py").read_text()]
    main([*argv, str(of_sign)])
    assert "0 of 4 runs have to be made" in capsys.readouterr().out
