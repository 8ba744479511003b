"""The folder of a run: whatever stops a run, it goes on as if nothing had stopped it, and it keeps
the code that made it."""
import json
import os
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

import run as book
import train
from conftest import BOOK, ROOT, copy_of_the_book, refusal, write_lines
from runs import assert_same_run, config_of, edit_config, everything, lines, typed

# small steps, each of which has a gradient
SMALL = ["--threads", "1", "--questions", "2", "--answers", "2", "--max_new_tokens", "24", "--seed",
         "3", "--eval_tasks", "2", "--eval_every", "2", "--checkpoint_every", "1", "--steps", "3"]
# what a resumed run does before its first step, in each of these folders
BEGIN = """import functools, sys
import run, train
del __file__  # this file is none of the run's
run.own_files = functools.cache(run.own_files)
for folder in sys.argv[1:]:
    one = run.Run(run.read_settings(["--resume", folder]))
    one.begin()
    one.locked.close()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """With the run `whole`, and copies of its folder: whole_1 and so on are as a kill would have
    left it before each change of a file."""
    folder = copy_of_the_book(tmp_path_factory.mktemp("project"))
    (folder / "begin.py").write_text(BEGIN)
    code, said = typed(folder, "train.py", *SMALL, "--out", "whole", copy="whole")
    assert code == 0, said
    assert any(line["skipped"] is None for line in lines(folder / "whole/metrics.jsonl"))
    return folder


def begun(project, runs):
    code, said = typed(project, "begin.py", *(run.name for run in runs))
    assert code == 0, said
    return said


def last_checkpoint(run):
    """The step of the last checkpoint from which it can go on."""
    whole = run.glob("checkpoints/step_*/trainer/state.safetensors")
    return max([int(path.parts[-3][5:]) for path in whole], default=0)


def up_to(run, step):
    """The files of a run up to this step, without the states of the optimizer, of which the newest
    two are kept."""
    found = {}
    for path, content in everything(run).items():
        number = re.search(r"step_(\d+)", str(path))
        if path.suffix == ".jsonl":
            content = b"".join(line for line in content.splitlines(keepends=True)
                               if step and json.loads(line)["step"] <= step)
        is_kept = content and (not number or int(number[1]) <= step)
        if is_kept and "trainer" not in path.parts and path.name != "lock":
            found[str(path)] = content
    return found


def test_wherever_it_is_killed_a_run_goes_on_as_if_never_stopped(project):
    """It goes back to its last checkpoint, also if it was killed a second time while it removed
    what came after that; without a checkpoint it begins again. Then its steps are the same to the
    bit."""
    whole = project / "whole"
    killed = {run: last_checkpoint(run) for run in sorted(project.glob("whole_*"))}
    most = max((run for run in killed if killed[run] == 2), key=lambda run: len(everything(run)))
    assert typed(project, "begin.py", most.name, copy=most.name)[0] == 0
    again = {run: last_checkpoint(run) for run in project.glob(f"{most.name}_*")}
    assert len(killed) > 40 and len(again) > 5 and {*killed.values()} == {0, 1, 2, 3}
    assert "changed" not in begun(project, killed | again)
    for run, step in (killed | again).items():
        assert up_to(run, 9) == up_to(whole, step) and not [*run.rglob("*.tmp")], (run, step)
    for run in {step: run for run, step in killed.items() if step < 3}.values():
        train.main(["--resume", str(run)])
        assert_same_run(whole, run)


def test_kill_9_with_several_updates_of_a_batch_and_a_kl_term(project):
    """The model that the KL term compares with is the first one, not that of the checkpoint. The
    lock of the folder ends with the process. The other run prints for a reader that has ended, as
    in `python train.py | head -2`."""
    flags = [*SMALL, "--eval_every", "0", "--epochs", "2", "--kl", "0.05"]
    assert typed(project, "train.py", *flags, "--out", "a", has_reader=False) == (0, "")
    code, _ = typed(project, "train.py", *flags, "--out", "b", place="credit/.step_000003",
                    signals=[signal.SIGKILL])
    assert code == -9 and len(lines(project / "b/metrics.jsonl")) == 2
    assert typed(project, "train.py", "--resume", "b")[0] == 0
    assert_same_run(project / "a", project / "b")
    assert lines(project / "a/metrics.jsonl")[2]["kl"] > 0


@pytest.mark.parametrize("name, place, count, steps", [
    ("once", "credit/.step_000001", 1, 1), ("twice", "credit/.step_000002", 2, 1),
    ("early", "evaluations.jsonl", 1, 0)])
def test_ctrl_c_finishes_the_step_and_saves_and_a_second_one_stops_at_once(
        project, name, place, count, steps):
    """So does one in the first evaluation: it may be long, and there is nothing to save."""
    every = ["--checkpoint_every", "2"] * (name == "once")
    code, said = typed(project, "train.py", *SMALL, *every, "--out", name, place=place,
                       signals=[signal.SIGINT] * count)
    assert code == 130 and said.endswith(f"--resume {name} goes on from its last checkpoint\n")
    assert ("stopping after this step" in said) == (name != "early") and "Traceback" not in said
    assert len(lines(project / name / "metrics.jsonl")) == steps
    assert last_checkpoint(project / name) == steps
    if every:
        train.main(["--resume", str(project / name)])
        assert_same_run(project / "whole", project / name)


def test_a_folder_is_written_by_one_process_and_is_not_taken_from_anybody(project, monkeypatch):
    """The same command, typed again while the first evaluation lasts or in the same moment, harms
    nothing. Empty and foreign folders are refused, too."""
    monkeypatch.chdir(project)
    settings = book.read_settings([*SMALL, "--out", "mine"])
    first, other = book.Run(settings), book.Run(settings)
    first.begin()
    before = sorted((project / "mine").rglob("*"))  # to open and close its lock would release it
    with pytest.raises(book.UserError):  # train.py makes one sentence of it
        other.begin()
    code, said = typed(project, "train.py", "--resume", "mine")
    assert code == 1 and said.startswith("train.py: another process writes to mine")
    for name in ("mine", "an empty", "models"):
        (project / name).mkdir(exist_ok=True)
        code, said = typed(project, "train.py", *SMALL, "--out", f"new/../{name}")
        assert code == 1 and said.startswith(
            f"train.py: {name} exists already: continue it with --resume {shlex.quote(name)}, or")
    first.locked.close()
    assert sorted((project / "mine").rglob("*")) == before and not [*project.glob(".*")]
    (project / "an empty").rmdir()  # it is empty
    (project / "mine/lock").write_text("no lock of ours, and long enough to be read" * 30)
    for name in ("mine", "not there"):
        assert "the lock cannot be opened" in refusal(book.lock, project / name)


# ------------------------------------------------------------------------------------------- code
def test_a_run_keeps_the_files_that_made_it_also_those_of_ones_own(tmp_path):
    """A module beside the book, and a package that lies elsewhere on Python's path."""
    folder, elsewhere = copy_of_the_book(tmp_path / "project"), tmp_path / "elsewhere"
    for path in (folder / "ideas/mine.py", elsewhere / "far/__init__.py", elsewhere / "far/near.py",
                 folder / "never_imported.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {path.name}\n")
    with open(folder / "mitigations.py", "a") as file:
        file.write(f"import sys\nsys.path.append({str(elsewhere)!r})\n"
                   "import far.near\nimport ideas.mine\n")
    assert typed(folder, "train.py", *SMALL, "--steps", "0", "--out", "run")[0] == 0
    names = [*(f"{name}.py" for name in BOOK if name != "analyze"), "ideas/mine.py"]
    files = {name: (folder / name).read_bytes() for name in names} | {
        "/".join(["elsewhere", *path.parts[1:]]): path.read_bytes()
        for path in elsewhere.rglob("*.py")}
    assert {str(path): text for path, text in everything(folder / "run/code").items()} == files


@pytest.fixture
def edited(project, tmp_path):
    """A copy of the project, with the run as a kill in its third step left it."""
    folder = copy_of_the_book(tmp_path / "edited")
    shutil.copy(project / "begin.py", folder)
    shutil.copytree(project / "whole", folder / "run")
    shutil.rmtree(folder / "run/checkpoints/step_000003")
    return folder


def test_a_run_that_goes_on_with_other_code_says_so_and_its_old_code_goes_on(project, edited):
    """The old code makes what the old run would have made, and nothing of the other is left."""
    folder, old = edited, everything(edited / "run/code")
    text = (folder / "grpo.py").read_text()
    formula = "return -(weight * advantage"
    assert text.count(formula) == 1
    (folder / "grpo.py").write_text("import newly_imported\n" + text.replace(
        formula, "return -2 * (weight * advantage"))
    (folder / "newly_imported.py").touch()
    code, said = typed(folder, "train.py", "--resume", "run")
    assert code == 0 and "changed since then: grpo.py, newly_imported.py." in said
    assert everything(folder / "run/code") == old
    assert everything(folder / "run/code_after_000002") == {
        path: (folder / path).read_bytes() for path in [*old, Path("newly_imported.py")]}
    assert "To go on with the files of then: python run/code/train.py --resume run" in said
    last = "checkpoints/step_000003/model.safetensors"
    assert (folder / "run" / last).read_bytes() != (project / "whole" / last).read_bytes()
    shutil.rmtree(folder / "run/checkpoints/step_000003")
    code, said = typed(folder, "run/code/train.py", "--resume", "run")
    assert code == 0 and "changed since" not in said
    assert_same_run(project / "whole", folder / "run")
    assert "run is finished: a larger" in typed(folder, "train.py", "--resume", "run")[1]
    assert [path.name for path in folder.glob("run/code*")] == ["code"]


def test_a_change_that_made_no_step_leaves_nothing(edited):
    """Wherever the run with the changed file is killed before it has a checkpoint."""
    folder, before = edited, up_to(edited / "run", 2)
    text = (folder / "train.py").read_text()
    (folder / "train.py").write_text(text + "# changed\n")
    code, said = typed(folder, "begin.py", "run", copy="run")
    assert code == 0 and "changed since then: train.py." in said
    killed, changed = [*folder.glob("run_*")], up_to(folder / "run", 2)
    assert {str(path) for path in changed.keys() - before.keys()} == {
        path.replace("code/", "code_after_000002/") for path in before if path.startswith("code/")}
    begun(folder, killed)
    assert all(up_to(run, 2) == changed and not [*run.rglob("*.tmp")] for run in killed)
    early = shutil.copytree(folder / "run", folder / "early", ignore=shutil.ignore_patterns(
        "step_00000?", "*.jsonl"))  # before the first checkpoint
    assert "changed" not in begun(folder, [early])
    assert (early / "code/train.py").read_text() == text + "# changed\n"
    assert not (early / "code_after_000002").exists()
    (folder / "train.py").write_text(text)
    assert "changed" not in begun(folder, killed)
    assert all(up_to(run, 2) == before for run in killed)
    files = {path.name: path for path in folder.glob("run/code/[a-q]*.py")}
    assert book.note_changes(folder / "run", 2, files) == ["run.py", "train.py"]  # are no more


# ------------------------------------------------------------------------------------ what is kept
def test_a_checkpoint_is_a_whole_model_also_when_the_first_one_is_gone(tmp_path):
    """It has every small file of the first one, but none of its weights or the list of them."""
    small = {name: f"{name} of mine".encode() for name in ("chat_template.jinja", "LICENSE")}
    small["generation_config.json"] = b'{"eos_token_id": 1}'
    others = dict.fromkeys(("model.safetensors.index.json", "pytorch_model.bin"), b"{}")
    shutil.copytree(ROOT / "models/tiny", tmp_path / "mine")
    for name, content in (small | others).items():
        (tmp_path / "mine" / name).write_bytes(content)
    folder, flags = tmp_path / "moved", ["--model", "mine", "--steps", "1", "--out", "moved"]
    assert typed(tmp_path, ROOT / "train.py", *SMALL, *flags)[0] == 0
    shutil.rmtree(tmp_path / "mine")
    train.main(["--resume", str(folder), "--steps", "2"])
    assert len(lines(folder / "metrics.jsonl")) == config_of(folder)["steps"] == 2
    last = folder / "checkpoints/step_000002"
    assert {name: (last / name).read_bytes() for name in small} == small
    assert not any((last / name).exists() for name in others)


def test_what_people_have_laid_into_a_run_is_no_part_of_it_and_stays(project):
    folder = shutil.copytree(project / "whole", project / "laid")
    names = {"step_000002.best", "step_000009.keep", "step_000001.npz", "step_9_best"}
    for name in names:
        shutil.copytree(folder / "checkpoints/step_000003", folder / "checkpoints" / name)
    notes = [folder / "credit" / name for name in ("step_000009.txt", "step_000009_old.npz")]
    for path in notes:
        path.write_text("mine")
    train.main(["--resume", str(folder), "--steps", "4"])
    kept = {path.parent.name for path in folder.glob("checkpoints/*/trainer")}
    assert kept | names == {*names, "step_000003", "step_000004"}
    assert kept >= names - {"step_000001.npz"} and all(path.exists() for path in notes)


@pytest.mark.parametrize("made, every, steps, has_folder, is_refused", [
    (3, 2, 9, True, True), (2, 2, 9, True, False), (3, 0, 3, True, False), (4, 0, 3, True, True),
    (1, 2, 9, False, True), (0, 2, 9, False, False)])
def test_a_record_without_checkpoints_is_not_wiped(
        tmp_path, made, every, steps, has_folder, is_refused):
    """A user has removed them. Killed before the first one is written, also if its step is on
    record, a run begins again."""
    write_lines(tmp_path / "metrics.jsonl", [{"step": step + 1} for step in range(made)])
    if has_folder:
        (tmp_path / "checkpoints").mkdir()
    s = book.Settings(out=str(tmp_path), resume="yes", checkpoint_every=every, steps=steps)
    if is_refused:
        assert f"has {made} steps on record, and no checkpoint" in refusal(book.Run, s)
    else:
        assert book.Run(s).done == 0


def test_a_checkpoint_that_has_lost_a_file_is_not_in_the_way(tmp_path):
    """It is made again."""
    for step, files in ((2, "config.json trainer/state.safetensors"),
                        (4, "trainer/state.safetensors"), (6, "config.json")):
        for file in map(Path, files.split()):
            path = tmp_path / f"checkpoints/step_{step:06d}" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    (tmp_path / "checkpoints/step_best").mkdir()
    assert [*book.checkpoints(tmp_path)] == [2]
    book.forget_after(tmp_path, 2)
    assert {path.name for path in tmp_path.glob("checkpoints/*")} == {"step_000002", "step_best"}


def test_a_full_disk_ends_in_one_sentence(project):
    """No file may be larger than 1 MB here, and a model's is."""
    code, said = typed(project, "train.py", *SMALL, "--out", "large", largest_file=2 ** 20)
    assert code == 1 and re.search(
        "\ntrain.py: large/checkpoints/step_000001 is not written: .*File too large.*\n$", said)
    assert "Traceback" not in said and not [*(project / "large").rglob("*.tmp")]


DAMAGES = [  # what is written over a file of a run, and what the one line says
    ("config.json", b'{"lora": 1}', "--lora=1 (--help lists the flags; `python -m lab train`"),
    ("config.json", b'{"steps": 3', "config.json is not JSON"),
    ("metrics.jsonl", b'{"step": 1}\n{"st\n', "metrics.jsonl, line 2 is damaged"),
    ("metrics.jsonl", b'\xff\xfe\n', "metrics.jsonl, line 1 is damaged"),
    ("evaluations.jsonl", b'{"step": "1"}\n', "evaluations.jsonl, line 1 is damaged")]


def test_a_damaged_run_ends_in_one_sentence_and_stays_as_it_is(project):
    for number, (file, held, sentence) in enumerate(DAMAGES):
        run = shutil.copytree(project / "whole", project / f"damaged_{number}")
        (run / file).write_bytes(held)
        before = everything(run)
        assert sentence in refusal(train.main, ["--resume", str(run), "--steps", "4"])
        assert everything(run) == before


@pytest.mark.parametrize("file", [
    "config.json", "model.safetensors", "tokenizer.json", "trainer/state.safetensors"])
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(project, capsys, file):
    """As a power cut leaves it. The steps after that checkpoint are made again; without another
    checkpoint nothing is begun again."""
    run = shutil.copytree(project / "whole", project / f"cut_{Path(file).stem}")
    damaged = run / "checkpoints/step_000003"
    os.truncate(damaged / file, 100)
    train.main(["--resume", str(run)])
    said = capsys.readouterr().out
    assert f"{damaged} is damaged, so the run does not go on from it: {Path(file).name}" in said
    assert f"continuing {run} after step 2" in said
    assert_same_run(project / "whole", run)
    edit_config(run, checkpoint_every=100)  # as if none had been due yet
    for path in run.glob("checkpoints/*/config.json"):
        path.write_text("{")
    before = everything(run)
    assert "and no checkpoint to go on from" in refusal(train.main, ["--resume", str(run)])
    assert everything(run) == before


def test_damage_of_is_not_that_a_file_may_not_be_read(tmp_path, monkeypatch):
    """Such a checkpoint would be deleted, and the steps after it made again."""
    (tmp_path / "config.json").write_text("{}")
    assert book.damage_of(tmp_path) == ""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: open(tmp_path))
    with pytest.raises(OSError):
        book.damage_of(tmp_path)
