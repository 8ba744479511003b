"""What a run is made of: a resumed run says what has changed, writes it down, and goes on; what did
not change is never named."""
import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import keep_lines, refusal

import lab.tools.page as analyze
from lab.countdown import Task
from lab.engine.errors import UserError
from lab.harness import record
from lab.harness.made_of import made_of, program, with_imports
from lab.analysis.run_folders import read_tokenizer
from lab.harness.read_record import missing_steps
from lab.harness.settings import make_settings
from lab.harness.tasks import CheckedTask
from lab_runs import SHORT, run
from lab.harness.versions import differing, texts_of
from runs import assert_same_run, config_of, edit_config, lines

METRICS, CREDIT = "metrics.jsonl does not have one line", "not every one of the steps 1 to 4"


def metrics(*numbers):
    return lambda run: keep_lines(run / "metrics.jsonl", *numbers)


MISSING = {  # what is done to the run, and what is said
    "a line": (metrics(1, 2, 4, 5), METRICS), "the last lines": (metrics(1, 2, 3), METRICS),
    "a credit file": (lambda run: (run / "credit/step_000002.npz").unlink(), CREDIT),
    "a line twice": (metrics(1, 2, 2, 3, 4, 5), METRICS),
    "one twice, one not at all": (metrics(1, 2, 2, 4, 5), METRICS),
    "the order": (metrics(2, 1, 3, 4, 5), METRICS),
    "an evaluation": (lambda run: keep_lines(run / "evaluations.jsonl", 1, 2, 3),
                      "evaluations.jsonl does not have all lines of step 4")}


@pytest.mark.parametrize("name", MISSING)
def test_what_the_record_lacks_is_named(stopped, name):
    assert list(missing_steps(stopped, 4)) == []
    change, said = MISSING[name]
    change(stopped)
    [found] = missing_steps(stopped, 4)
    assert found.startswith(said)


def test_a_run_whose_record_lacks_a_step_goes_on_and_says_so(stopped, capsys):
    MISSING["a credit file"][0](stopped)
    assert CREDIT in run("--resume", stopped).stdout
    assert len(lines(stopped / "metrics.jsonl")) == 6
    analyze.main([str(stopped)])
    said = " ".join(capsys.readouterr().out.split())
    assert "is not whole: not every one of the steps 1 to 6 has a credit file." in said
    shutil.rmtree(stopped / "credit")  # a user may remove all credit files
    assert list(missing_steps(stopped)) == []


def test_a_line_of_a_far_step_is_no_long_search(whole, tmp_path):
    """A record is asked whether it has a hole, and a list of a billion steps is never made."""
    folder = shutil.copytree(whole, tmp_path / "x")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 1000000000}\n')
    assert METRICS in list(missing_steps(folder))[0]


def test_what_has_changed_is_named_and_written_down_and_the_run_goes_on(whole, stopped, capsys):
    """As if policy_loss had been another one: its digest is what the run has written down."""
    digests = config_of(stopped)["made_of"]
    assert {"policy_loss (grpo.py)", "none (mitigations.py)", "LabRun.update (lab/harness/run.py)",
            "Task.make_problem (countdown_task.py)"} <= digests.keys()
    others = ("tests/", "lab/analysis/", "lab/tools/", "analyze.py")
    assert not any(f"({other}" in name for name in digests for other in others)
    assert not REPLACED & digests.keys()
    edit_config(stopped, versions={"torch": "2.6.0"},
                made_of=digests | {"policy_loss (grpo.py)": "0", "gone (mine.py)": "1"})
    said = run("--resume", stopped).stdout
    assert "had torch 2.6.0, and this is" in said
    assert "changed since the 4 steps were made: policy_loss (grpo.py). So what follows" in said
    config = config_of(stopped)
    assert config["changed"] == [{"after_step": 4, "files": {"policy_loss (grpo.py)": "0"}}]
    assert config["made_of"] == digests
    analyze.main([str(stopped)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "went on after step 4 with changed files: policy_loss (grpo.py)." in printed
    assert_same_run(whole, stopped)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A function that writes a file in one of two folders; both are on Python's path."""
    for folder in ("beside", "elsewhere"):
        (tmp_path / folder).mkdir()
        monkeypatch.syspath_prepend(tmp_path / folder)

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path
    return write


def test_what_a_task_imports_counts(written, monkeypatch):
    """At its top and in a function, beside it and elsewhere, with the __init__.py of packages; no
    file of Python or of a package that is installed, wherever that is."""
    task = written("beside/my_task.py", "import eager\nimport json, torch\n"
                   "from package.part import inner\nfrom farther.part import all_of_it\n"
                   "import installed\n"
                   "def reward(problem, text):\n    import lazy\n")
    imported = {written(name, text) for name, text in (
        ("beside/eager.py", "import numpy\nfrom far import away\n"),
        ("elsewhere/lazy.py", "import my_task, missing\n"), ("elsewhere/far.py", "away = (\n"),
        ("elsewhere/farther/__init__.py", ""), ("elsewhere/farther/part.py", ""),
        ("beside/package/__init__.py", "import set_up\n"), ("elsewhere/set_up.py", ""),
        ("beside/package/part/__init__.py", "from . import inner\n"),
        ("beside/package/part/inner.py", ""))}
    written("elsewhere/eager.py", "import other\n")  # another one is found first
    written("elsewhere/other.py", "")
    monkeypatch.syspath_prepend(written("site-packages/installed.py", "import far\n").parent)
    assert with_imports([task]) == {task} | imported


MINE = '''
"""About the file."""
import math
A, B = 2, 3
C = 4
def helper(x):
    """Of helper."""
    mean = x + C
    return mean

# about mine
@mitigation
def mine(rollouts):
    return helper(rollouts)

def mean(x):
    return x - 1

@mitigation
def other(rollouts):
    return mean(used.value(rollouts))

@advantage
class used(base):
    D = 4
    def value(self, x):
        return -grpo.centred(x)

def centred(x):
    return x - 2

if __name__ == "__main__":
    print(mine)
'''
ALWAYS = {"A, B = 2, 3": "when imported"}
OF_MINE = {"C = 4": "C", "mean = x": "helper", "helper(rollouts)": "mine"}
OF_USED = {"D = 4": "used", "(base)": "used", "-grpo": "used.value", "x - 2": "centred"}
OF_OTHER = OF_USED | {"x - 1": "mean", "mean(used": "other"}
NEVER = ("About the", "Of helper", "about mine", "print", "import math")


@pytest.mark.parametrize("chosen, counts", [
    ("mine", OF_MINE), ("other", OF_OTHER), ("used", OF_USED), ("none", {})])
def test_what_a_run_can_reach_counts_by_its_definition(tmp_path, chosen, counts):
    """And what is done whenever the file is imported; no comment, no docstring, and nothing that
    only another method uses, although a local variable has its name."""
    path = tmp_path / "mine.py"

    def version(text):
        path.write_text(text)
        os.utime(path, ns=(0, next(times)))
        return texts_of([path], {chosen}, root=tmp_path)

    times = iter(range(1000))
    before = version(MINE)
    for part in (*ALWAYS, *OF_MINE, *OF_OTHER, *NEVER):
        assert MINE.count(part) == 1, part
        number = part[:-1] + str(int(part[-1]) + 1) if part[-1].isdigit() else ""
        changed = {"-grpo": "--grpo", "(base)": "(list)", "mean = x": "mean = x + x"}.get(part, (
            number or f"{part}.x" * part.endswith(")") or f"{part}_2"))
        label = (ALWAYS | counts).get(part)
        found = differing(before, version(MINE.replace(part, changed)))
        assert [*found] == ([f"{label} (mine.py)"] if label else []), part
    added = "@advantage\ndef new(x):\n    return mean(C)\n\n\ndef more():\n    pass\n# about"
    assert version(MINE.replace("# about", added)) == before


def test_the_file_of_a_task_counts_and_what_mitigations_py_imports(written, tmp_path):
    """With all of their definitions, because a run can reach any of them."""
    written("mitigations.py", "import my_formula\n")
    written("my_formula.py", "def formula(x):\n    return x\n")
    written("examples/own_reward.py", "import broken, far\nlimit: int = 3\n")
    written("far.py", "FAR = 1\n")
    written("broken.py", "away = (\n")
    found = program(make_settings({"task": "examples.own_reward"}), tmp_path)
    assert found == {"formula (my_formula.py)": "def formula(x):\n    return x\n",
                     "limit (examples/own_reward.py)": "limit: int = 3\n",
                     "FAR (far.py)": "FAR = 1\n"}
    assert [*program(make_settings({}), tmp_path)] == ["formula (my_formula.py)"]


def test_in_a_models_folder_only_files_count(learner, tmp_path):
    model = shutil.copytree(learner, tmp_path / "model")
    before = made_of(make_settings({"model": str(model)}))
    assert str(model / "recipe.json") in before and str(model / "model.safetensors") in before
    (model / "backup.json").mkdir()
    (model / "broken.json").symlink_to("nowhere")
    assert made_of(make_settings({"model": str(model)})) == before


@pytest.mark.parametrize("drawn_anew, said", [
    ("training", "training_problems (lab/tests/harness/test_made_of.py:"),
    ("held out", "held_out_problems (lab/tests/harness/test_made_of.py:"), ("none", "")])
def test_a_task_that_draws_without_the_seed_is_told(capsys, drawn_anew, said):
    """Once, when it is first asked: those of training or those of evaluations."""
    class Unseeded(Task):
        def training_problems(self, seed, step, count):
            seed = next(drawn) if drawn_anew == "training" else seed
            return super().training_problems(seed, step, count)

        def held_out_problems(self, count):
            first = next(drawn) if drawn_anew == "held out" else 0
            return super().held_out_problems(count + first)[first:]

    task, drawn = CheckedTask(Unseeded()), iter(range(2, 10_000))
    for _ in range(2):
        task.held_out_problems(4)
        task.training_problems(0, 1, 4)
        task.training_problems(0, 2, 4)
    printed = capsys.readouterr().out
    assert printed.startswith(said) and printed.count("asked twice for the same") == bool(said)


def test_another_tokenizer_is_told(whole, tmp_path):
    """Its texts would be shown as those of this run."""
    folder = shutil.copytree(whole, tmp_path / "x")
    read_tokenizer(folder)
    with open(folder / "tokenizer.json", "a") as file:
        file.write("\n")
    assert "is not the tokenizer that the run was made with" in refusal(read_tokenizer, folder)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "problems.jsonl"
    problems = [{"nums": [a, b, 5], "target": a + b + 5} for a in range(2, 9) for b in range(2, 9)]
    path.write_text("\n".join(map(json.dumps, problems)))
    return path


ONE_STEP = [*SHORT, "--steps", "1"]


def test_a_file_that_a_flag_names_and_a_model_that_have_changed_are_named(data, learner, tmp_path):
    model = shutil.copytree(learner, tmp_path / "model")
    run(*ONE_STEP, "--data", data, "--out", tmp_path / "x", "--model", model)
    data.write_text(data.read_text().replace("[2, 2, 5]", "[2, 2, 6]"))
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    said = run("--resume", tmp_path / "x", "--steps", 2).stdout
    assert f"were made: {weights}, {data}. So what follows" in said


def test_relative_paths_that_lead_elsewhere_are_named(data, learner, tmp_path, monkeypatch):
    """Because the command is typed in another folder, where a model and a file have the same names:
    --kl would compare with another model."""
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        shutil.copytree(learner, folder / "model")
        shutil.copy(data, folder)
    monkeypatch.chdir(here)
    run(*ONE_STEP, "--model", "model", "--data", data.name, "--kl", "0.1", "--out", tmp_path / "x")
    monkeypatch.chdir(there)
    said = run("--resume", tmp_path / "x", "--steps", 2).stdout
    [changed] = config_of(tmp_path / "x")["changed"]
    assert "changed since" in said
    assert {str(here / "model/model.safetensors"), str(here / data.name)} <= {*changed["files"]}


def test_a_pipe_and_an_endless_file_are_refused_at_once(stopped):
    (stopped / "metrics.jsonl").unlink()
    (stopped / "metrics.jsonl").symlink_to("/dev/zero")
    assert "no regular file" in run("--resume", stopped, expect=1).stderr
    with pytest.raises(UserError, match="no regular file"):
        record.digest_of(Path("/dev/null"))  # as of a credit file; a pipe would wait for ever
    (stopped / "config.json").unlink()
    os.mkfifo(stopped / "config.json")
    assert "no regular file" in run("--resume", stopped, expect=1).stderr
