"""What a run of the lab is made of: which files are copied; a resumed run says what has changed,
and goes on; what did not change is never named."""
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, refusal, write_lines

import lab.tools.page as analyze
from lab.countdown import Task
from lab.engine.errors import UserError
from lab.harness import record
from lab.harness.made_of import changed_data, files_of_run, imported, made_of
from lab.analysis.run_folders import read_tokenizer
from lab.harness.read_record import missing_steps
from lab.harness.settings import make_settings
from lab.harness.tasks import CheckedTask
from lab_runs import SHORT, keep_lines, program, run
from runs import assert_same_run, edit_config, everything, lines

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


def test_what_has_changed_is_named_and_the_run_goes_on(whole, stopped, capsys):
    """As if policy_loss had been another one: its text is that of the copy in the run's folder."""
    copy = stopped / "code/grpo.py"
    edit_config(stopped, versions={"torch": "2.6.0"})
    copy.write_text(copy.read_text().replace("policy_loss(", "policy_loss(x, "))
    said = run("--resume", stopped).stdout
    assert "had torch 2.6.0, and this is" in said
    assert "changed since the 4 steps were made: grpo.py. So what follows" in said
    later = stopped / "code_after_000004"
    assert everything(later) == everything(whole / "code") != everything(stopped / "code")
    analyze.main([str(stopped)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "went on after step 4 with changed files: policy_loss (grpo.py)" in printed
    assert_same_run(whole, stopped)


def test_what_a_task_imports_is_copied(monkeypatch, tmp_path):
    """At its top and in a function, of one's own folders on Python's path, with the __init__.py of
    packages; no file of Python or of a package that is installed, wherever that is, and of the
    project none that this copy of it lacks."""
    wanted = {
        "project/tasks/mine.py": "import eager, torch, installed, analyze\n"
        "from package.part import inner\nfrom farther.part import all_of_it\n"
        "from . import beside\ndef reward(problem, text):\n    import lazy\n"
        "    from .inner.deep import x\n",
        "project/tasks/__init__.py": "", "project/tasks/beside.py": "from .. import top\n",
        "project/top.py": "", "project/tasks/inner/deep.py": "",
        "beside/eager.py": "import numpy\nfrom far import away\n", "elsewhere/far.py": "away = (\n",
        "elsewhere/lazy.py": "import tasks.mine, missing\n", "elsewhere/farther/__init__.py": "",
        "elsewhere/farther/part.py": "", "beside/package/__init__.py": "import set_up\n",
        "elsewhere/set_up.py": "", "beside/package/part/__init__.py": "from . import inner\n",
        "beside/package/part/inner.py": ""}
    others = {"elsewhere/eager.py": "import other\n", "elsewhere/other.py": "",
              "project/lab/tests/help.py": "", "site-packages/installed.py": "import far\n"}
    for name, text in (wanted | others).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for folder in ("elsewhere", "beside", "site-packages"):
        monkeypatch.syspath_prepend(tmp_path / folder)
    found = imported(["tasks/mine.py", "lab/tests/help.py"], tmp_path / "project", ("lab/tests/",))
    assert {path.relative_to(tmp_path).as_posix() for path in found.values()} == wanted.keys()
    outside = [name for name, path in found.items() if "project" not in path.parts]
    assert len(outside) == 9 and all(name.startswith("elsewhere/") for name in outside)
    assert found["tasks/inner/deep.py"] == tmp_path / "project/tasks/inner/deep.py"


LOADED = """
import sys
from lab.__main__ import main
main(["train", *sys.argv[1:]])
print(*sorted(getattr(one, "__file__", None) or "" for one in [*sys.modules.values()]), sep="\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--task examples.own_reward --mitigation random --lora 1",
                                   "--advantage vine --values_k 1 --kl 0.1 --dynamic_sampling 2"])
def test_every_file_that_a_run_loads_is_copied(flags, tmp_path):
    """And a run that was stopped goes on with its copy alone."""
    printed = program(ROOT, "-c", LOADED, *SHORT, *flags.split(), "--out", tmp_path / "x")
    loaded = {Path(line).relative_to(ROOT).as_posix() for line in printed.splitlines()
              if line.startswith(f"{ROOT}/") and line.endswith(".py")}
    copied = {path.as_posix() for path in everything(tmp_path / "x/code")}
    assert loaded <= copied and {"train.py", "lab/run.py"} <= loaded
    assert not any(name.startswith(("lab/tests/", "lab/gpu/", "lab/tools/")) for name in copied)
    stopped = shutil.copytree(tmp_path / "x", tmp_path / "stopped")
    shutil.rmtree(stopped / "checkpoints/step_000003")
    said = program(stopped / "code", "-m", "lab", "train", "--resume", stopped)
    assert "after step 2" in said and "changed" not in said
    assert_same_run(tmp_path / "x", stopped)


def test_what_is_copied_follows_from_the_settings():
    usual, more = (files_of_run(make_settings(given)).keys() for given in (
        {}, {"task": "examples.own_reward", "mitigation": "random", "advantage": "batch_mean"}))
    assert more - usual == {
        "examples/__init__.py", "examples/own_reward.py", "lab/credit/__init__.py",
        "lab/credit/weightings.py", "lab/credit/baselines.py"}
    s = make_settings({})
    s.device = "cuda"
    assert {name.rpartition("/")[0] for name in files_of_run(s).keys() - usual} == {"lab/gpu"}


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


ONE_STEP = [*SHORT, "--steps", "1"]


def test_a_file_that_a_flag_names_and_a_model_that_have_changed_are_named(learner, tmp_path):
    data = tmp_path / "problems.jsonl"
    write_lines(data, [{"nums": [a, b, 5], "target": a + b + 5} for a in range(2, 9)
                       for b in range(2, 9)])
    model = shutil.copytree(learner, tmp_path / "model")
    run(*ONE_STEP, "--data", data, "--out", tmp_path / "x", "--model", model)
    data.write_text(data.read_text().replace("[2, 2, 5]", "[2, 2, 6]"))
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    said = run("--resume", tmp_path / "x", "--steps", 2).stdout
    assert f"were made: {weights}, {data}. So what follows" in said


def test_data_that_lies_elsewhere_has_not_changed():
    before = {"x.jsonl": "1", "model.safetensors": "2"}
    assert changed_data(before, {"/y/x.jsonl": "1", "model.safetensors": "4"}) == {
        "model.safetensors": "2"}


def test_a_file_of_data_that_never_ends_is_refused_at_once():
    with pytest.raises(UserError, match="no regular file"):
        record.digest_of(Path("/dev/null"))  # a pipe would wait for ever
