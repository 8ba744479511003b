"""Runs of an experiment: planned, made side by side, stopped and started again, refused."""
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from conftest import ROOT
from engine.choices import ADVANTAGES, MITIGATIONS
from runs import lines

import train
from harness.command_line import read_flags
from harness.credit_file import step_of
from engine.errors import UserError
from harness.run_folder import open_folder
from research.__main__ import main
from research.experiments import commands
from research.experiments.experiments import EXPERIMENTS, Experiment
from research.experiments.plan import (EVALUATED_SECONDS, State, in_words, plan_runs,
                                       seconds_left)
from research.experiments.prices import METHODS
from research.experiments.runner import Runner, is_written

TINY = "--questions 2 --answers 2"


@pytest.fixture
def experiment(monkeypatch, learner, tmp_path):
    """Makes an experiment with these arms known to the command, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def make(arms, steps=2, seeds=1, more=""):
        common = f"--model {learner} {TINY} --steps {steps} {more}"
        made = Experiment("small", "Is it?", common, arms, seeds)
        monkeypatch.setitem(EXPERIMENTS, "small", made)
        return made

    return make


def test_all_arms_come_with_one_seed_before_the_next(experiment):
    """Flags of the experiment, of the arm, of the seed, each run in a folder of its own."""
    made = experiment({"none": "", "rloo": "--advantage rloo"}, seeds=2)
    runs = plan_runs(made, "runs/study", 2)
    assert [run.name for run in runs] == ["none-s0", "rloo-s0", "none-s1", "rloo-s1"]
    last = runs[-1]
    assert str(last.folder) == "runs/study/small/rloo-s1" and last.settings.folder == last.folder
    given = read_flags(last.flags)
    assert given["continue"] and given["threads"] == 1 and given["seed"] == 1
    assert (last.settings.advantage, last.settings.steps, last.settings.answers) == ("rloo", 2, 2)
    assert runs[0].settings.advantage == "grpo"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_has_flags_that_train_py_takes(name, tmp_path):
    experiment = EXPERIMENTS[name]
    for arm, flags in experiment.arms.items():
        alone = Experiment(name, "", experiment.common, {arm: flags}, 1)
        [run] = plan_runs(alone, str(tmp_path), 1)
        assert run.settings.steps > 1, arm


def test_every_cheap_choice_is_on_the_leaderboard():
    flags = " ".join(EXPERIMENTS["leaderboard"].arms.values()).split()
    costly = {"oracle", "causal_ablation", "vine"}
    catalogue = (ROOT / "docs/weightings.md").read_text(encoding="utf-8")  # not an idea of today
    listed = {name for name in (*MITIGATIONS, *ADVANTAGES) if f"`{name}`" in catalogue}
    others = listed - {*flags, "none", "grpo"}
    assert others == costly, "give it a line in LEADERBOARD of research/experiments/experiments.py"


def test_experiments_that_share_runs_mean_the_same_by_a_name():
    """In one folder a name stands for one command."""
    commands = {}
    for experiment in EXPERIMENTS.values():
        for arm, flags in experiment.arms.items():
            command = f"{experiment.common} {flags}".split()
            assert commands.setdefault((experiment.place, arm), command) == command, arm
    by_command = {}
    for (place, arm), command in commands.items():
        if place == "8x8":
            by_command.setdefault(tuple(command), []).append(arm)
    assert all(len(arms) == 1 for arms in by_command.values())  # nothing is trained twice


def test_one_run_by_its_number(experiment, monkeypatch, tmp_path):
    """As an array of jobs makes them: no report is written until somebody asks for it."""
    experiment({"none": "", "rloo": "--advantage rloo"})
    with pytest.raises(UserError, match="--number 2: there are 2 runs, counted from 0"):
        main(["small", "--number", "2"])
    made = []
    monkeypatch.setattr(commands, "make_runs", lambda runs, *_: made.extend(runs) or {})
    main(["small", "--number", "1"])
    assert [run.name for run in made] == ["rloo-s0"] and not (tmp_path / "results").exists()


def test_time_left_follows_from_the_steps_of_the_same_arm(experiment):
    """Of 10 steps each: none-s0 has 10 at 2 s, none-s1 none; rloo-s0 4 at 5 s; gae-s0 has none, of
    4 answers each."""
    made = experiment({"none": "", "rloo": "--advantage rloo", "gae": "--advantage gae"}, steps=10,
                      more="--eval_every 0")
    runs = plan_runs(made, "runs", 1) + plan_runs(made, "runs", 2)[3:4]
    states = {"none-s0": State(10, 20.0), "none-s1": State(0, 0.0), "rloo-s0": State(4, 20.0),
               "gae-s0": State(0, 0.0)}
    left = [10 * 2, 6 * 5, 10 * 4 * METHODS["gae"][1]]
    assert seconds_left(runs, states, 1) == pytest.approx(sum(left))
    assert seconds_left(runs, states, 8) == pytest.approx(30)  # the longest run of all
    assert in_words(4800) == "about 1 h 20 min" and in_words(100) == "about 2 min"


def test_a_dry_run_lists_every_run_and_starts_none(experiment, capsys, tmp_path):
    experiment({"none": "", "rloo": "--advantage rloo"}, seeds=2)
    main(["small", "--dry_run", "--seeds", "1"])
    printed = capsys.readouterr().out
    assert "  1  runs/study/small/rloo-s0  (not begun)" in printed and "--advantage rloo" in printed
    assert "0 of 2 runs are finished" in printed and not (tmp_path / "runs").exists()
    assert re.search(r"the rest, \d+ at a time: about 1 min ", printed)


def test_before_the_first_step_time_follows_from_what_was_measured(experiment):
    """20 answers, two evaluations of 8 problems with 3 sampled answers and a greedy one each."""
    evaluated = "--steps 5 --eval_every 5 --eval_tasks 8 --eval_answers 3"
    made = experiment({"none": "", "measured": "--advantage measured --measured_k 1",
                       "gae": "--advantage gae --critic trunk"}, steps=5, more=evaluated)
    plain, measured, gae = plan_runs(made, "runs", 1)
    assert [run.seconds_a_step for run in (plain, measured, gae)] == [
        4 * METHODS[name][1] for name in ("none", "measured1", "gae")]
    assert plain.evaluated_after(0) == 2 * 8 * 4 and plain.evaluated_after(5) == 0
    seconds = seconds_left([plain], {"none-s0": State()}, 1)
    assert seconds == pytest.approx(20 * METHODS["none"][1] + 64 * EVALUATED_SECONDS)


def test_a_run_of_other_settings_or_another_model_is_in_trouble(experiment, learner, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(learner, model)

    def planned(more):
        arms = {"none": f"--model {model}"}
        return plan_runs(experiment(arms, more=f"--eval_every 0 {more}"), "runs/study", 1)[0]

    run = planned("")
    train.main(run.flags)
    assert run.state().finished and not run.state().trouble
    trouble = planned("--learning_rate 0.5").state().trouble
    assert "small/none-s0 exists already, with learning_rate" in trouble
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + " ")
    assert "is not what it was" in planned("").state().trouble


def stop_when(condition, signals=1):
    """Sends this process Ctrl-C once the condition holds."""
    def wait():
        while not condition():
            time.sleep(0.01)
        for _ in range(signals):
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


def test_stopped_and_started_again(experiment, capfd):
    """Ctrl-C: the run that was being made keeps a checkpoint, no other is begun. Started again it
    goes on from there, and what is finished is passed over."""
    experiment({"none": "", "rloo": "--advantage rloo"}, steps=40, more="--eval_every 0")
    first, second = plan_runs(EXPERIMENTS["small"], "runs/study", 1)
    stop_when(lambda: len(lines(first.folder / "metrics.jsonl")) > 0)
    with pytest.raises(SystemExit) as ended:
        main(["small", "--processes", "1"])
    printed = capfd.readouterr().out
    assert ended.value.code == 130
    assert "stopped, 0 of 2 runs are finished. Go on with: " in printed
    assert printed.strip().endswith("-m research small --processes 1") and "failed" not in printed
    done = step_of(max((first.folder / "checkpoints").iterdir()))
    assert 0 < done < 40 and not first.is_finished() and not second.folder.exists()

    runner = Runner([first], 2)
    assert runner.make_all() and not runner.failed and first.is_finished()
    assert f"going on after step {done}" in first.log.read_text()
    assert not Runner([first], 2).waiting


def test_failed_and_damaged_runs_do_not_stop_the_others(experiment, learner, tmp_path, capfd):
    """`bad` has no model to train; of `cut` a line in the middle of a file is no JSON."""
    broken = tmp_path / "broken"
    shutil.copytree(learner, broken)
    (broken / "model.safetensors").write_bytes(b"no model")
    made = experiment({"bad": f"--model {broken}", "cut": "", "none": ""},
                      more="--eval_every 2 --eval_tasks 4")
    cut = plan_runs(made, "runs/study", 1)[1]
    train.main(cut.flags)
    path = cut.folder / "evaluations.jsonl"
    path.write_text("no JSON\n" + path.read_text())
    capfd.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["small", "--processes", "1"])
    printed = capfd.readouterr().out
    assert ended.value.code == 1
    assert "finished: none-s0 (1 of 3)" in printed and "1 of 3 runs are finished." in printed
    damaged, failed = sorted(printed.strip().splitlines()[-2:], reverse=True)
    assert damaged.startswith("failed: cut-s0: ") and "evaluations.jsonl, line 1" in damaged
    assert failed.startswith("failed: bad-s0: train.py: ") and "model.safetensors" in failed
    assert failed.endswith("(log: runs/study/small/bad-s0.log)")


def test_a_run_that_another_process_makes_is_waited_for(experiment, capfd):
    """Also where the other began it in the meantime: then this one's process is refused. If it ends
    before its last step, the run is made here."""
    [run] = plan_runs(experiment({"none": ""}, more="--eval_every 0"), "runs/study", 1)
    run.folder.mkdir(parents=True)
    (run.folder / "config.json").write_text(json.dumps(run.settings.to_json()))
    runner, said = Runner([run], 1), "waiting for none-s0: another process is making it\n"
    with open_folder(run.folder):
        runner.start(runner.waiting.popleft())
        runner.collect(was_stopped=False)
        assert runner.elsewhere == [run] and not run.log.exists()
        runner.elsewhere, runner.running = [], [(run, SimpleNamespace(poll=lambda: 1))]
        runner.collect(was_stopped=False)
        assert runner.elsewhere == [run] and not runner.failed
    assert capfd.readouterr().out == 2 * said
    shutil.rmtree(run.folder)
    assert runner.make_all() and runner.finished == 1
    assert capfd.readouterr().out == "finished: none-s0 (1 of 1)\n"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells of a parent's end")
def test_a_killed_runner_leaves_no_training_behind(experiment):
    """Its run keeps a checkpoint, as after Ctrl-C."""
    made = experiment({"none": ""}, steps=10_000, more="--eval_every 0")
    [run] = plan_runs(made, "runs/study", 1)
    runner = multiprocessing.get_context("fork").Process(target=Runner([run], 1).make_all)
    runner.start()
    while not lines(run.folder / "metrics.jsonl"):
        time.sleep(0.01)
    runner.kill()
    runner.join()
    while is_written(run):
        time.sleep(0.01)
    assert "Go on with: python train.py --resume" in run.log.read_text()


def test_a_pointer_is_started_by_the_program_that_has_it():
    arms = {"none": "", "pointer": "--mitigation pointer"}
    planned = plan_runs(Experiment("small", "?", "--steps 1", arms, 1), "runs", 1)
    plain, pointer = (run.command for run in planned)
    assert plain[0].endswith("train.py") and pointer[:2] == ["-m", "research.train"]
    assert plain[1:3] == pointer[2:4] == ["--continue", "--threads"]
