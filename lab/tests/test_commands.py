"""Every command of the overview: its help, what it refuses, and the pages that name it. That its
numbers have bounds is tested in harness/test_settings.py."""
import importlib
import re
import sys

import pytest
from conftest import ROOT, project_files, refusal

from lab import __main__ as overview
from lab_runs import program

# of each command the flags that are its own, beside those of train.py that some take
FLAGS = {name: vars(importlib.import_module(file)).get("FLAGS", {})
         for name, file in overview.MODULES.items()}
PLACES = {"follow": ["RUN"], "sample": ["RUN", "PROBLEM"], "pass_at_k": ["RUN"], "idea": ["rloo"],
          "compare": ["RUN"], "experiment": ["PLAN"], "notes": ["RUN"], "claims": ["RUN"],
          "exact": ["rloo"], "diagnose": ["LOG"]}


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    """The folder in which a command is typed; nothing is left there of one that is refused."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not any(tmp_path.iterdir())


def test_a_command_has_its_line_in_the_overview(capsys):
    overview.main([])
    printed = capsys.readouterr().out
    assert all(re.search(f"python -m lab {name} ", printed) for name in overview.MODULES)


def test_the_overview_has_the_questions_and_commands_of_the_readme():
    _, _, table = (ROOT / "README.md").read_text().partition("## Where is the answer?")
    listed = {}
    for question, commands in re.findall(r"^- (.*?\?\S*) (`.*`)$", table, flags=re.M):
        plain = re.sub(r"\[(.*)\]\(.*\)", r"\1", question)
        listed[plain] = re.findall(r"`(\w+)`", commands)
    assert listed == {question: list(commands) for question, commands in overview.COMMANDS.items()}


def test_a_program_that_judges_ends_with_its_status(monkeypatch):
    """1 is a verdict there, so what cannot be judged is 2. Of other programs it is 1."""
    monkeypatch.setattr("lab.tools.diagnose.main", lambda flags: 1)
    with pytest.raises(SystemExit) as ended:
        overview.main(["diagnose"])
    assert ended.value.code == 1
    for name in (*overview.JUDGES, "follow"):
        said = program(ROOT, "-m", "lab", name, "nowhere", expect=2 - (name == "follow"))
        assert said.startswith(f"lab {name}: ") and said.count("\n") == 1


def test_the_lab_started_as_a_folder_says_how_to_start_it():
    assert program(ROOT, "lab", "idea", expect=1) == "start it with: python -m lab\n"


def test_a_package_that_is_missing_or_broken_ends_a_command_in_a_sentence(monkeypatch):
    """Python raises an error where the parent of what is imported is no package."""
    with monkeypatch.context() as patch:
        patch.setitem(overview.MODULES, "page", "lab.no_such_file")
        assert "pip install -r requirements.txt" in refusal(overview.main, ["page"])
    monkeypatch.setitem(sys.modules, "matplotlib", object())
    for name in ("lab.tools.page", "lab.analysis.plots"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert "matplotlib cannot be imported: AttributeError(" in refusal(overview.main, ["page"])


@pytest.mark.parametrize("name", overview.MODULES)
def test_help_names_a_command_and_each_of_its_flags(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        overview.main([name, "--help"])
    assert stopped.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(f"python -m lab[ .]{name} ", said)
    assert [flag for flag in FLAGS[name] if f"--{flag} " not in said] == []


@pytest.mark.parametrize("name", sorted(FLAGS.keys() - {"formula", "try"}))
def test_what_is_no_flag_is_told(name):
    """try takes a long way: it asks train.py, too; formula has a parser of its own."""
    said = refusal(overview.main, [name, *PLACES.get(name, []), "--nonsense=1"])
    assert re.search("unknown argument --nonsense|--nonsense 1|nonsense", said)


TINY = ROOT / "models/tiny"


@pytest.mark.parametrize("typed, said", [
    # a flag that would be read and ignored; the same flag where it has an effect is taken
    ("try --out x", "--out has no effect, because nothing is kept"),
    ("idea no_such", "no_such is neither a weighting nor an advantage. Is its function in mitig"),
    ("idea none", "none is plain GRPO, with which an idea is compared"),
    ("idea by_kind --seed 3", "--seed cannot be given to this program"),
    ("idea by_kind --mitigation random", "--mitigation cannot be given: by_kind"),
    ("idea by_kind --eval_every 0", "the verdict needs the evaluation at the end"),
    ("follow TINY", "tiny is not a run folder: it has no config.json of a run"),
    ("follow RUN --step 9", "run has steps 1 to 3"),
    ("follow RUN --answer 8", "--answer 8: step 3 has answers 0 to 7"),
    ("follow RUN --answer 0 --token 9999", "--token 9999: answer 0 has tokens 0 to"),
    ("follow RUN --token 1", "--token has no effect without --answer"),
    ("follow RUN --credit 10", "--credit has no effect without --token"),
    ("sample TINY 3 5 7 22 --greedy --answers 2", "--greedy has no effect without one answer of"),
    ("sample TINY" + " 3" * 999, "and the model takes 1024"),
    ("experiment bord.json", "there is no file bord.json, and no plan of lab/plans has this name"),
    ("warmup --model TINY --size small", "--size has no effect without a new model"),
    ("warmup --size small --out /proc/x", "cannot write /proc/x: No such file or directory"),
    ("train --config expresion", "With the project come lab/recipes/brief.json, lab/recipes/exp"),
    ("train --task gsm8k", "examples.hackable, examples.higher_lower, examples.own_reward, exam"),
    ("train --loss_type dr_grpo", "--loss_norm constant with --advantage dr_grpo is its dr_grpo"),
    ("train --task examples.question_answer --data a.csv", "only lines of JSON and .parquet are"),
    ("bord", "there is no command bord, only train, try, warmup")])
def test_wrong_commands(recorded, typed, said):
    """Each ends in one sentence before anything is measured; an @ is a blank within a word."""
    named = {"RUN": str(recorded), "TINY": str(TINY)}
    words = [named.get(word, word.replace("@", " ")) for word in typed.split()]
    assert said in refusal(overview.main, words)


def test_a_page_names_no_command_that_is_gone_without_its_commit():
    """The log names them all, with the commit at its top."""
    gone = []
    for page in project_files("**/*.md"):
        if page.name == "LOG.md":
            continue
        text = page.read_text(encoding="utf-8")
        for paragraph in text.split("\n\n"):
            for name in re.findall(r"python -m lab (\w+)", paragraph):
                if name not in overview.MODULES and not re.search(r"\b[0-9a-f]{8}\b", paragraph):
                    gone.append(f"{page.name}: {name}")
    assert not gone
