"""The loop as a person meets it: whole runs, runs that were killed, and wrong commands."""
import gc
import importlib
import math
import multiprocessing
import operator
import os
import re
import shlex
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import lab.run as train
from conftest import ROOT, refusal
from small import hand_made, spoken
from lab.engine.policy import derived_seed
from lab.engine.sampler import generate
from lab.engine.credited import with_advantage
from lab.harness.run import LabRun, mean_interval
import run as book
from lab.harness import run as harness_run
import train as loop
from lab_runs import WHOLE, after_credit_of, run
from runs import assert_same_run, config_of, lines


def test_the_way_of_a_token_at_the_top_of_the_loop_names_functions_that_are_there():
    found = re.findall(r"([\w/]+)\.py: ([\w., ]+)", loop.__doc__)
    assert found and len(found) == loop.__doc__.count(".py:")
    for file, names in found:
        module = importlib.import_module(file.replace("/", "."))
        for name in names.split(", "):
            operator.attrgetter(name)(module)


def test_the_random_numbers_of_credit_are_new_in_every_step(policy):
    def advantage(rollouts, policy):
        drawn.append(torch.rand(1, generator=rollouts.generator).item())
        return torch.zeros_like(rollouts.log_prob)

    drawn, batch = [], spoken(policy)
    for step in (1, 2, 1):
        with_advantage(batch, advantage, policy, policy.settings, step)
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("every", [0, 25])
def test_a_run_of_no_step_evaluates_and_stops(learner, tmp_path, every):
    run("--model", learner, "--out", tmp_path / "x", "--steps", 0, "--eval_tasks", 8,
        "--checkpoint_every", every)
    assert not (tmp_path / "x/metrics.jsonl").exists()
    assert not list((tmp_path / "x/checkpoints").iterdir())
    before = lines(tmp_path / "x/evaluations.jsonl")
    run("--resume", tmp_path / "x")
    assert lines(tmp_path / "x/evaluations.jsonl") == before
    sampled, greedy = lines(tmp_path / "x/evaluations.jsonl")
    assert set(sampled["answer"] + greedy["answer"]) <= {0, 1} and len(greedy["answer"]) == 8
    assert sampled["success"] == pytest.approx(sum(sampled["answer"]) / 8)


def test_a_temperature_is_of_training_and_not_of_what_is_evaluated(learner, tmp_path):
    """At a low one the first answers are other ones, and the evaluation before them is the same."""
    found = {}
    for name, flags in (("usual", ()), ("cold", ("--temperature", 0.1))):
        run("--model", learner, "--out", tmp_path / name, "--steps", 1, "--eval_tasks", 8, *flags)
        first = lines(tmp_path / name / "evaluations.jsonl")[0]
        found[name] = first["length"], lines(tmp_path / name / "metrics.jsonl")[0]["tokens"]
    usual, cold = found.values()
    assert usual[0] == cold[0] and usual[1] != cold[1]


def test_a_run_repeats_from_its_own_config(whole, tmp_path):
    run("--config", whole / "config.json", "--out", tmp_path / "again")
    assert_same_run(whole, tmp_path / "again")


@pytest.mark.parametrize("step", [1, 3])
def test_killed_and_resumed_is_as_if_never_stopped(whole, learner, tmp_path, monkeypatch, step):
    """Before the first checkpoint, and between two."""
    folder = tmp_path / "killed"
    argv = ["--model", str(learner), "--out", str(folder), *WHOLE]
    with monkeypatch.context() as patch:
        after_credit_of(step, patch, lambda: os.kill(os.getpid(), signal.SIGKILL))
        process = multiprocessing.get_context("fork").Process(target=train.train_beyond,
                                                              args=[argv])
        process.start()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    with open(folder / "metrics.jsonl", "a") as file:  # a line that the kill cut off
        file.write('{"step": 4, "rew')
    (folder / "credit/.step_000007.npz.1.tmp").write_bytes(b"half")
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints/.step_000004.tmp").mkdir(exist_ok=True)
    run("--resume", folder)
    assert_same_run(whole, folder)
    assert not list(folder.rglob("*.tmp"))


@pytest.mark.parametrize("request_", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_well_and_the_run_goes_on(whole, learner, tmp_path, monkeypatch, capfd,
                                              request_):
    """The command that it tells works."""
    folder = tmp_path / "my run"
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        after_credit_of(1, patch, lambda: os.kill(os.getpid(), request_))
        train.train_beyond(["--model", str(learner), "--out", str(folder), *WHOLE])
    printed = capfd.readouterr().out
    assert ended.value.code == 130 and "stopping after this step; Ctrl-C again" in printed
    assert (folder / "checkpoints/step_000001/trainer/state.safetensors").exists()
    command = re.search(r"(python -m lab train --resume .*) goes on from step 1\n", printed)[1]
    assert shlex.split(command)[:4] == ["python", "-m", "lab", "train"]
    run(*shlex.split(command)[4:])
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert [line["step"] for line in lines(folder / name)] == [
            line["step"] for line in lines(whole / name)]


def test_a_loop_can_be_started_again(learner, tmp_path, monkeypatch):
    """--continue starts what is not there, goes on with what was stopped, passes over what is
    finished, and touches nothing else."""
    folder = tmp_path / "my run"
    flags = ["--model", str(learner), "--out", str(folder), "--steps", "3", "--eval_every", "0",
             "--continue"]
    with pytest.raises(SystemExit), monkeypatch.context() as patch:
        after_credit_of(1, patch, lambda: os.kill(os.getpid(), signal.SIGINT))
        train.train_beyond(flags)
    assert len(lines(folder / "metrics.jsonl")) == 1
    train.train_beyond(flags)
    whole = (folder / "metrics.jsonl").read_text()
    assert len(whole.splitlines()) == 3
    train.train_beyond(flags)
    assert (folder / "metrics.jsonl").read_text() == whole
    (tmp_path / "notes").mkdir()
    on = f"continue it with --resume {shlex.quote(str(folder))}"
    for more, said in (
            (["--learning_rate", "0.5"], "with --learning_rate 0.001 instead of 0.5: name another"),
            (["--temperature", "0.3"], "with --temperature 1.0 instead of 0.3: name another"),
            (["--steps", "6"], "with --steps 3 instead of 6: name another"),
            (["--out", str(tmp_path / "notes")], "notes is not a run folder")):
        assert said in run(*flags, *more, expect=1).stderr
    assert f"exists already: {on}, or name another folder" in run(*flags[:-1], expect=1).stderr
    assert "is not a run folder" in run("--resume", learner, expect=1).stderr  # it is a model's


def test_nothing_grows_with_the_number_of_steps(learner, tmp_path, monkeypatch):
    counts, log = [], LabRun.log

    def count_tensors(run, line):
        log(run, line)
        gc.collect()
        counts.append(sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()))

    monkeypatch.setattr(LabRun, "log", count_tensors)
    gc.freeze()  # what is there before the run is not looked at
    run("--model", learner, "--out", tmp_path / "x", "--steps", 4, "--eval_every", 0,
        "--change_every", 1)
    gc.unfreeze()
    assert len(counts) == 4 and counts[2] == counts[-1]


def test_a_sampler_that_differs_from_the_update_ends_a_run(learner, tmp_path, monkeypatch):
    def moved(*args, **given):
        drawn = generate(*args, **given)
        return replace(drawn, log_prob=drawn.log_prob - 0.1 * drawn.mask)

    monkeypatch.setattr("lab.engine.policy.generate", moved)
    said = run("--model", learner, "--out", tmp_path / "x", "--steps", 1, "--eval_every", 0,
               "--kl", 0.1, expect=1).stderr
    assert "log-probs of sampler and update differ by 0.1 a token" in said


@pytest.mark.parametrize("seed, answers", [(0, 2), (1, 2), (0, 3), (0, 64)])
def test_the_random_numbers_of_an_evaluation_are_those_of_its_problems(
        learner, tmp_path, monkeypatch, seed, answers):
    """At each step, for each seed and each size of a batch, sampled and greedy."""
    drawn, rand = [], torch.rand

    def noted(*size, **given):
        numbers = rand(*size, **given)
        drawn.extend([numbers] * ("generator" in given))
        return numbers

    monkeypatch.setattr(torch, "rand", noted)
    monkeypatch.setattr("train.OF_ONE_SEED", 5)
    run("--model", learner, "--seed", seed, "--steps", 1, "--eval_every", 1, "--eval_tasks", 9,
        "--questions", 1, "--answers", answers, "--max_new_tokens", 8, "--out", tmp_path / "x")
    evaluated = torch.cat([batch for number, batch in enumerate(drawn)
                           if number != len(drawn) // 2])  # the step is in the middle
    wanted = []
    for first, count in ((0, 5), (5, 4)):
        generator = torch.Generator().manual_seed(derived_seed("evaluation", first))
        wanted.append(rand(count, 8, generator=generator))
    assert evaluated.equal(torch.cat(4 * wanted))


def test_what_is_kept_of_a_few_answers_to_held_out_problems():
    """Problems of which no word repeats are told; here two are asked at a time. Answers to problem
    n have n + 1 tokens of log p -n / 3."""
    problems = ["0 1", "2 2", "3 3", "4 5", "6 7"]

    def ask(part, generator):
        rows = [problems.index(problem) for problem in part]
        mask = torch.tensor([[t <= n for t in range(6)] for n in rows])
        first = torch.ones(len(part))
        return hand_made(mask, group=torch.arange(len(part)), problems=part,
                         log_prob=-torch.tensor(rows)[:, None].expand(-1, 6) / 3,
                         answers=[f"{n} 0" for n in rows],
                         scores={"answer": first, "format": first, "reward": first / 2})

    shown = loop.answer_all(SimpleNamespace(show=str), problems, 2, ask)["shown"]
    assert shown == [{"problem": problems[n], "text": f"{n} 0", "answer": 1,
                      "reward": 0.5, "texts": ["x"] * (n + 1),
                      "log_prob": [round(-n / 3, 4)] * (n + 1)} for n in (0, 1, 2)]


def test_the_record_tells_runs_with_other_held_out_problems_apart(tmp_path):
    """The digest follows from the problems, and not from the seed; a run that evaluates none has
    none."""
    digests = []
    for number, flags in enumerate((
            ["--eval_tasks", 8, "--seed", 3], ["--eval_tasks", 8, "--seed", 4],
            ["--eval_tasks", 8, "--numbers", "4"], ["--eval_tasks", 9], ["--eval_every", 0])):
        run("--model", ROOT / "models/tiny", "--steps", 0, "--max_new_tokens", 4, "--out",
            tmp_path / str(number), *flags)
        digests.append(config_of(tmp_path / str(number))["held_out_problems"])
    one, same, *others = digests
    assert one == same and len({one, *others}) == 4 and others[-1] is None


def test_a_run_that_is_being_written_cannot_be_resumed(tmp_path, monkeypatch):
    """The book and the lab lock a folder by the same file, so neither writes what the other does.
    """
    folder, said, log = tmp_path / "x", [], harness_run.LabRun.log

    def log_and_try(run, line):
        log(run, line)
        said.append(refusal(book.lock, folder))

    monkeypatch.setattr(harness_run.LabRun, "log", log_and_try)
    run("--model", ROOT / "models/tiny", "--steps", 1, "--eval_every", 0, "--max_new_tokens", 4,
        "--questions", 2, "--out", folder)
    held = book.lock(folder)
    said.append(refusal(train.train_beyond, ["--resume", str(folder), "--steps", "2"]))
    held.close()
    assert len(said) == 2 and all(f"another process writes to {folder}" in one for one in said)


def test_a_run_that_cannot_go_on_leaves_its_folder_unlocked(tmp_path):
    """Also while a notebook keeps the error, and with it the run."""
    folder = tmp_path / "x"
    train.train_beyond(["--model", str(ROOT / "models/tiny"), "--steps", "1", "--eval_every", "0",
                        "--max_new_tokens", "4", "--questions", "2", "--out", str(folder)])
    (folder / "checkpoints/step_000001/tokenizer.json").write_text("{}")
    with pytest.raises(Exception) as kept:
        train.train_beyond(["--resume", str(folder), "--steps", "2"])
    book.lock(folder).close()
    assert kept.tb


@pytest.mark.parametrize("argv, said", [
    (["--device", "cuda:99"], "CUDA devices"), (["--device", "meta"], "only cpu, cuda and cuda:N"),
    (["--min_number", "15", "--max_number", "15", "--max_target", "3"], "found no problem")])
def test_wrong_commands_get_one_clear_line(learner, tmp_path, argv, said):
    assert said in refusal(train.train_beyond, ["--model", str(learner), "--out",
                                                str(tmp_path / "x"), *argv])
    assert not (tmp_path / "x").exists()


def test_the_interval_of_a_mean_by_hand():
    """Of 0, 0, 1, 1 the mean is 0.5, the variance by n - 1 is 1/3, and 1.96 * sqrt(1/12) is 0.566;
    of one value it is not known."""
    assert mean_interval([0.0, 0.0, 1.0, 1.0]) == pytest.approx((-0.0658, 1.0658), abs=1e-4)
    assert all(map(math.isnan, mean_interval([0.7])))
