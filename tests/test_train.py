"""The loop as a person meets it: whole runs, runs that were killed, and wrong commands."""
import errno
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from harness import run_folder
import train
from harness.command_line import read_flags
from engine.errors import UserError
from conftest import ROOT
from engine.tokens import load_tokenizer
from grpo import update
from harness import run as start
from harness.run import Run
from qwen2_model import Qwen2
from engine.rollouts import sample_answers
from harness.settings import OPTIONS, make_settings
from runs import assert_same_run, lines, run, timeless

@pytest.fixture(scope="session")
def whole(learner, tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    printed = run("--model", learner, "--out", folder).stdout
    return folder, printed


def test_what_a_run_leaves_behind(whole, learner):
    folder, printed = whole
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "metrics.jsonl", "evaluations.jsonl", "samples.jsonl", "tokenizer.json",
        "credit", "checkpoints"
    }
    metrics = lines(folder / "metrics.jsonl")
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6] == [
        int(p.stem[5:]) for p in sorted((folder / "credit").iterdir())
    ]
    for m in metrics:
        with np.load(folder / f"credit/step_{m['step']:06d}.npz") as credit:
            assert len(credit["token_id"]) == m["tokens"] and len(credit["reward"]) == 16
            assert credit["reward"].mean() == pytest.approx(m["reward"], abs=1e-6)
            assert credit["entropy"].mean() == pytest.approx(m["entropy"], rel=1e-5)
            np.testing.assert_allclose(credit["reward"],
                                       0.1 * credit["reward_format"] + credit["reward_answer"],
                                       atol=1e-6)
            assert np.all(credit["weight"] == 1)
    assert [(e["step"], e["mode"]) for e in lines(folder / "evaluations.jsonl")] == \
        [(s, mode) for s in (0, 3, 6) for mode in ("sampled", "greedy")]
    assert all(
        len(e["answer"]) == len(e["length"]) == len(e["format"]) == 24
        for e in lines(folder / "evaluations.jsonl"))
    config = json.loads((folder / "config.json").read_text())
    assert config["model"] == str(learner)
    assert config["learning_rate"] == 1e-3
    assert config["versions"]["torch"] == torch.__version__
    assert len(re.findall(r"^ +\d/6 ", printed, re.M)) == 6
    assert "held-out, sampled" in printed
    assert "left" in printed


def test_checkpoints_open_as_model_folders_and_only_two_can_be_resumed(whole):
    steps = sorted((whole[0] / "checkpoints").iterdir())
    assert [p.name for p in steps] == ["step_000002", "step_000004", "step_000006"]
    assert [(p / "trainer").exists() for p in steps] == [False, True, True]
    transformers = pytest.importorskip("transformers")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(steps[-1])(ids).logits
        torch.testing.assert_close(Qwen2.from_pretrained(steps[-1])(ids), theirs, atol=1e-4, rtol=0)


def test_step_n_was_sampled_by_checkpoint_n_minus_1(whole):
    with np.load(whole[0] / "credit/step_000005.npz") as credit:
        start, stop = credit["episode_start"][:2]
        prompt = credit["prompt_ids"][:credit["prompt_start"][1]]
        ids = torch.tensor(np.concatenate([prompt, credit["token_id"][start:stop]]))[None]
        recorded = torch.tensor(credit["log_prob"][start:stop])
    for step, same in ((4, True), (6, False)):
        model = Qwen2.from_pretrained(whole[0] / f"checkpoints/step_{step:06d}")
        with torch.no_grad():
            log_probs = model(ids.long())[0, len(prompt) - 1:-1].log_softmax(-1)
        ours = log_probs[range(len(recorded)), ids[0, len(prompt):].long()]
        assert torch.allclose(ours, recorded, atol=1e-4) == same


def test_training_changes_the_model_and_the_seed_changes_the_run(whole, learner, tmp_path):
    before, after = Qwen2.from_pretrained(learner), Qwen2.from_pretrained(
        whole[0] / "checkpoints/step_000006")
    assert any(not torch.equal(x, y) for x, y in zip(before.parameters(), after.parameters()))
    run("--model", learner, "--out", tmp_path / "other", "--seed", 1, "--steps", 1, "--eval-every",
        0, "--checkpoint_every=0")
    with np.load(whole[0] / "credit/step_000001.npz") as x, np.load(
            tmp_path / "other/credit/step_000001.npz") as y:
        assert x["prompt_ids"].tolist() != y["prompt_ids"].tolist()
    assert not (tmp_path / "other/evaluations.jsonl").exists()
    assert not (tmp_path / "other/checkpoints").exists()


def test_a_run_repeats_from_its_own_config(whole, tmp_path):
    run("--config", whole[0] / "config.json", "--out", tmp_path / "again")
    assert_same_run(whole[0], tmp_path / "again")


SIGNALLED = """
import os, runpy, sys
program, step, number, *flags = sys.argv[1:]
sys.path.insert(0, os.path.dirname(program))
from harness import run_folder
write_credit = run_folder.write_credit

def write_and_signal(path, *args):
    write_credit(path, *args)
    if path.stem == f"step_{int(step):06d}":
        os.kill(os.getpid(), int(number))

run_folder.write_credit = write_and_signal
sys.argv = [program, *flags]
runpy.run_path(program, run_name="__main__")
"""


def signalled_at(step, number, model, folder):
    """A process of its own that gets the signal right after the credit file of this step: whoever
    waits for the file from outside may come too late."""
    program = [sys.executable, "-c", SIGNALLED, ROOT / "train.py", step, number]
    return subprocess.run(list(map(str, [*program, "--model", model, "--out", folder])),
                          capture_output=True, text=True)


def break_off_at(step, model, folder, monkeypatch):
    """The same in this process, at once after the credit file of this step: no wait for another
    one."""
    write_credit = run_folder.write_credit

    def write_and_stop(path, *args):
        write_credit(path, *args)
        if path.stem == f"step_{step:06d}":
            raise KeyboardInterrupt
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_folder, "write_credit", write_and_stop)
        run("--model", model, "--out", folder)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_killed_and_resumed_is_as_if_never_stopped(whole, learner, tmp_path, monkeypatch, step):
    """Before the first checkpoint, between two, after the last but one."""
    folder = tmp_path / "killed"
    if step == 3:
        assert signalled_at(step, int(signal.SIGKILL), learner, folder).returncode < 0
    else:
        break_off_at(step, learner, folder, monkeypatch)
    for name in ("metrics.jsonl", "samples.jsonl"):  # a line that the kill cut off
        with open(folder / name, "a") as file:
            file.write('{"step": 4, "rew')
    (folder / "credit/step_000007.tmp").write_bytes(b"half")
    (folder / "checkpoints").mkdir(exist_ok=True)
    (folder / "checkpoints/.step_000004.tmp").mkdir(exist_ok=True)
    run("--resume", folder)
    assert_same_run(whole[0], folder)
    assert not list(folder.rglob("*.tmp"))


def test_ctrl_c_ends_well_and_the_run_goes_on(whole, learner, tmp_path):
    folder = tmp_path / "stopped"
    process = signalled_at(1, int(signal.SIGINT), learner, folder)
    assert process.returncode == 130
    assert f"python train.py --resume {folder}" in process.stdout
    assert "Traceback" not in process.stderr
    stopped = int(re.search(r"stopped at step (\d)", process.stdout)[1])
    assert (folder / f"checkpoints/step_{stopped:06d}/trainer/state.json").exists()
    run("--resume", folder)
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert list(map(timeless, lines(folder / name))) == list(
            map(timeless, lines(whole[0] / name)))


def test_a_finished_run_says_so_and_more_steps_go_on(whole, learner, tmp_path):
    assert "is finished" in run("--resume", whole[0]).stdout
    folder = tmp_path / "longer"
    run("--model", learner, "--out", folder, "--steps", 4)
    run("--resume", folder, "--steps", 6)
    assert list(map(timeless, lines(folder / "metrics.jsonl"))) == list(
        map(timeless, lines(whole[0] / "metrics.jsonl")))
    assert "--seed cannot be changed" in run("--resume", folder, "--seed", 3, expect=1).stderr


def test_a_loop_can_be_started_again(learner, tmp_path, monkeypatch):
    """--continue starts what is not there, goes on with what was stopped, passes over what is
    finished, and touches nothing else."""
    flags = [
        "--model",
        str(learner), "--out",
        str(tmp_path / "run"), "--steps", "3", "--eval_every", "0", "--continue"
    ]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit), monkeypatch.context() as patch:
        patch.setattr(start.StopRequest, "__enter__",
                      lambda self: setattr(self, "asked", True) or self)  # Ctrl-C in the first step
        patch.setattr(start.StopRequest, "__exit__", lambda self, *_: None)
        train.main(flags)
    assert len(lines(tmp_path / "run/metrics.jsonl")) == 1
    train.main(flags)
    whole = (tmp_path / "run/metrics.jsonl").read_text()
    assert len(whole.splitlines()) == 3
    train.main(flags)
    assert (tmp_path / "run/metrics.jsonl").read_text() == whole
    with pytest.raises(UserError,
                       match="with learning_rate 0.001 instead of 0.5: name another with --out"):
        train.main([*flags, "--learning_rate", "0.5"])
    config = json.loads((tmp_path / "run/config.json").read_text())
    del config["temperature"]  # as in a run from before there was such a flag
    (tmp_path / "run/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="with temperature 1.0 instead of 0.3"):
        train.main([*flags, "--temperature", "0.3"])
    with pytest.raises(
            UserError,
            match="exists already: go on with --resume .*run, or name another with --out"):
        train.main(flags[:-1])
    (tmp_path / "notes").mkdir()
    with pytest.raises(UserError, match="notes exists already and is not a run folder"):
        train.main([*flags, "--out", str(tmp_path / "notes")])


def test_more_steps_are_remembered_by_a_run_that_is_stopped_again(learner, tmp_path, monkeypatch):
    folder = tmp_path / "longer"
    run("--model", learner, "--out", folder, "--steps", 2, "--eval_every", 0)
    monkeypatch.setattr(Run, "steps", lambda run: [])  # killed before it got anywhere
    train.main(["--resume", str(folder), "--steps", "6"])
    assert json.loads((folder / "config.json").read_text())["steps"] == 6
    monkeypatch.undo()
    run("--resume", folder)
    assert len(lines(folder / "metrics.jsonl")) == 6


def test_problems_from_a_file_are_the_ones_trained_on(learner, tmp_path):
    data = tmp_path / "problems.jsonl"
    data.write_text("".join(
        json.dumps({"nums": [a, b, 3], "target": a + b + 3}) + "\n"
        for a in range(1, 8)
        for b in range(1, 8)))
    run("--model", learner, "--out", tmp_path / "x", "--data", data, "--steps", 1)
    tokenizer = load_tokenizer(learner)
    with np.load(tmp_path / "x/credit/step_000001.npz") as credit:
        prompts = tokenizer.decode(credit["prompt_ids"].tolist(), skip_special_tokens=False)
    found = re.findall(r"user\n (\d+) (\d+) 3 make (\d+)<", prompts)
    assert len(found) == 4 and all(int(a) + int(b) + 3 == int(c) for a, b, c in found)
    data.write_text(data.read_text() + '{"nums": [3, 5, 700], "target": 22}\n')
    with pytest.raises(UserError, match="cannot spell"):
        train.main(["--model", str(learner), "--out", str(tmp_path / "y"), "--data", str(data)])


def test_nothing_grows_with_the_number_of_steps(learner, tmp_path, monkeypatch):
    counts, log = [], Run.log

    def count_tensors(run, line):
        log(run, line)
        gc.collect()
        counts.append(sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects()))

    monkeypatch.setattr(Run, "log", count_tensors)
    run("--model", learner, "--out", tmp_path / "x", "--steps", 6, "--eval_every", 0)
    assert len(counts) == 6 and counts[2] == counts[-1]


def test_flags_reach_the_sampler_and_the_optimizer(learner, tmp_path, monkeypatch):
    sampling, updating = {}, []
    monkeypatch.setattr(
        "engine.policy.sample_answers",
        lambda *args, **given: sampling.update(given) or sample_answers(*args, **given))
    monkeypatch.setattr(train, "update", lambda *args: updating.extend(args) or update(*args))
    train.main(["--model", str(learner), "--out", str(tmp_path / "x"), "--steps", "1",
                "--eval_every", "0", "--temperature", "0.7", "--weight_decay", "0.25",
                "--max_grad_norm", "0.125", "--micro_batch", "3", "--learning_rate", "0.5"])
    assert sampling["temperature"] == 0.7
    assert sampling["max_new_tokens"] == 40
    assert updating[1].weight_decay == 0.25 and updating[1].learning_rate == 0.5
    assert (updating[4].micro_batch, updating[4].max_grad_norm) == (3, 0.125)


def test_every_step_and_every_seed_samples_anew_and_every_evaluation_alike(
        learner, tmp_path, monkeypatch):
    seeds = []
    monkeypatch.setattr(
        "engine.policy.sample_answers",
        lambda *args, **given: seeds.append(given["seed"]) or sample_answers(*args, **given))
    for seed in (0, 1):
        run("--model", learner, "--seed", seed, "--steps", 2, "--eval_every", 1,
            "--out", tmp_path / str(seed))
    one, two = seeds[:14], seeds[14:]  # two evaluations of 24 problems in parts of 16, then a step
    trained = [one[4], one[9], two[4], two[9]]
    evaluated = [one[:4], one[5:9], one[10:], two[:4], two[5:9], two[10:]]
    assert len(seeds) == 28 and len(set(trained)) == 4
    assert all(part == evaluated[0] for part in evaluated) and evaluated[0][:2] == evaluated[0][2:]


def test_a_run_that_is_being_written_cannot_be_resumed(learner, tmp_path):
    folder = tmp_path / "alive"
    process = subprocess.Popen([
        sys.executable, ROOT / "train.py", "--model", learner, "--out", folder, "--steps", "10000"
    ], stdout=subprocess.DEVNULL)
    while not (folder / "credit/step_000002.npz").exists():
        assert process.poll() is None
        time.sleep(0.002)
    assert "is being written by another process" in run("--resume", folder, expect=1).stderr
    process.kill()
    process.wait()
    assert [line["step"] for line in lines(folder / "metrics.jsonl")[:2]] == [1, 2]


def test_a_reader_that_goes_away_does_not_end_the_run(whole, learner, tmp_path):
    process = subprocess.Popen(
        [sys.executable, ROOT / "train.py", "--model", learner, "--out", tmp_path / "x"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 0 and process.stderr.read() == ""
    assert_same_run(whole[0], tmp_path / "x")


def test_names_that_people_gave_are_left_alone(learner, tmp_path):
    folder = tmp_path / "x"
    run("--model", learner, "--out", folder, "--steps", 4)
    shutil.copytree(folder / "checkpoints/step_000004", folder / "checkpoints/step_000002_best")
    (folder / "credit/step_notes.txt").write_text("mine")
    run("--resume", folder, "--steps", 6)
    assert (folder / "credit/step_notes.txt").exists()
    assert (folder / "checkpoints/step_000002_best/trainer").exists()
    assert [(folder / f"checkpoints/step_00000{n}/trainer").exists()
            for n in (2, 4, 6)] == [False, True, True]


def test_zero_steps_evaluate_and_stop(learner, tmp_path):
    run("--model", learner, "--out", tmp_path / "zero", "--steps", 0)
    assert len(lines(tmp_path / "zero/evaluations.jsonl")) == 2
    assert not (tmp_path / "zero/metrics.jsonl").exists()
    assert "is finished" in run("--resume", tmp_path / "zero").stdout


def test_bfloat16_computes_and_parameters_stay_float32(learner, tmp_path):
    run("--model", learner, "--out", tmp_path / "half", "--dtype", "bfloat16", "--steps", 2,
        "--eval_every", 0)
    assert {
        t.dtype
        for t in load_file(tmp_path / "half/checkpoints/step_000002/model.safetensors").values()
    } == {torch.float32}
    gaps = [
        m["sampler_gap"]
        for m in lines(tmp_path / "half/metrics.jsonl")
        if m["sampler_gap"] is not None
    ]
    assert gaps and all(1e-5 < gap < 0.2 for gap in gaps)  # float32 has about 1e-7


@pytest.mark.parametrize(
    "argv, said",
    [(["--mitigation", "nome"], "--mitigation nome is not one of: none"),
     (["--model", "nowhere"], "there is no model folder nowhere"),
     (["--lerning_rate", "1"], "did you mean --learning_rate"),
     (["--dtype", "float8"], "--dtype float8 is not one of: float"),
     (["--device", "tpu"], "--device tpu"), (["--device", "cuda:99"], "CUDA devices"),
     (["--device", "meta"], "only cpu and cuda"), (["--steps", "many"], "invalid int value"),
     (["--answers", "1"], "--answers 1 should be at least 2"),
     (["--temperature", "0"], "--temperature 0.0 should be at least 0.01"),
     (["--learning_rate", "nan"], "should be a number"),
     (["--min_number", "20", "--max_number", "10"], "--min_number 20 is above --max_number 10"),
     (["--data", "nothing.jsonl"], "cannot read nothing.jsonl"),
     (["--config", "nothing.json"], "nothing.json does not exist"),
     (["--config", "."], "cannot read"),
     (["--max_new_tokens", "5000"], "and the answer exceed the 1024"),
     (["--max_number", "500"], "cannot spell"),
     (["--min_number", "15", "--max_number", "15", "--max_target", "3"], "found no problem"),
     (["--model", ""], "--model '' should be a text"),
     (["--resume", "nowhere"], "nowhere is not a run folder"),
     (["stray"], "unknown argument stray"), ])
def test_wrong_commands_get_one_clear_line(learner, tmp_path, argv, said):
    model = [] if "--model" in argv or "--resume" in argv else ["--model", str(learner)]
    with pytest.raises(UserError) as error:
        train.main([*model, "--out", str(tmp_path /
                                         "x"), *argv] if "--resume" not in argv else argv)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "x").exists()


def test_the_line_is_printed_without_a_traceback(learner, tmp_path):
    (tmp_path / "file").write_text("")
    program = [sys.executable, ROOT / "train.py", "--model", learner, "--out"]
    result = subprocess.run([*program, tmp_path / "file"], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("train.py: ")
    assert "exists already" in result.stderr
    assert result.stderr.count("\n") == 1
    for name, said in (("file/run", "cannot write"), ("a" * 300, "name too long")):
        assert said in run("--model", learner, "--out", tmp_path / name, expect=1).stderr


@pytest.mark.parametrize("name", ["write_tensors", "shutil.rmtree", "os.replace", "shutil.copyfile"])
def test_stopped_in_the_middle_of_a_checkpoint(whole, learner, tmp_path, monkeypatch, name):
    """Whatever call of the second checkpoint the end comes in, the folder can be resumed to the
    same run."""
    folder, calls = tmp_path / "cut", []
    owner, _, attribute = name.rpartition(".")
    target = getattr(run_folder, owner) if owner else run_folder
    original = getattr(target, attribute)

    def cut_off(*args, **kwargs):
        calls.append(1)
        if "step_000004" in str(args) or attribute == "rmtree" and "step_000002" in str(args):
            raise KeyboardInterrupt
        return original(*args, **kwargs)
    monkeypatch.setattr(target, attribute, cut_off)
    with pytest.raises(KeyboardInterrupt):
        train.main(["--model", str(learner), "--out", str(folder)])
    monkeypatch.undo()
    run("--resume", folder)
    assert_same_run(whole[0], folder)


def test_a_full_disk_is_one_line_and_loses_nothing(whole, learner, tmp_path, monkeypatch):
    """The disk fills at the credit file of step 5; with room again the run goes on from step 4."""
    folder, save, calls = tmp_path / "full", np.savez_compressed, []

    def fails_at_fifth(file, **columns):
        calls.append(1)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(file, **columns)
    monkeypatch.setattr(np, "savez_compressed", fails_at_fifth)
    with pytest.raises(UserError, match="No space left"):
        train.main(["--model", str(learner), "--out", str(folder)])
    monkeypatch.undo()
    run("--resume", folder)
    assert_same_run(whole[0], folder)


def test_a_typo_in_a_recipe_fails(learner, tmp_path):
    for path in learner.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "recipe.json").write_text('{"lerning_rate": 1}')
    with pytest.raises(UserError, match="lerning_rate"):
        train.main(["--model", str(tmp_path), "--out", str(tmp_path / "x")])


def test_flags_win_over_the_recipe_and_the_recipe_over_the_defaults(learner):
    settings = make_settings(
        read_flags(["--model", str(learner), "--max-new-tokens", "7", "--eval-tasks=3"]))
    assert (settings.max_new_tokens, settings.eval_tasks, settings.questions,
            settings.temperature) == (7, 3, 4, 1.0)


def test_help_names_every_flag_and_mitigation(capsys):
    with pytest.raises(SystemExit):
        train.main(["--help"])
    text = capsys.readouterr().out
    assert all(f"--{name} " in text for name in OPTIONS) and "plain GRPO" in text


@pytest.mark.parametrize("hits, count, low, high", [(15, 128, 0.0723, 0.1847), (0, 10, 0.0, 0.2775),
                                                    (10, 10, 0.7225, 1.0)])
def test_wilson_interval(hits, count, low, high):
    """Values of the textbook formula, worked out separately."""
    assert train.wilson_interval(hits, count) == pytest.approx((low, high), abs=1e-3)


def test_another_temperature_than_training_has_is_said(learner, tmp_path):
    """Answers come from one distribution, the loss and the record are of another."""
    bare = ["--model", learner, "--steps", 0, "--eval_every", 0]
    usual = run(*bare, "--out", tmp_path / "usual").stdout
    sharp = run(*bare, "--temperature", 0.7, "--out", tmp_path / "sharp").stdout
    assert "note: answers are sampled at temperature 0.7" in sharp and "note:" not in usual
