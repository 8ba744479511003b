"""Several processes against one: the same batch, the same weights, the same gradient; what is left when one of them dies."""
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine import processes
from conftest import ROOT, spoken
from credit.preferences import update_preferences
from credit.weight import token_weight
from grpo import update
from engine.policy import derived_seed
from harness.load import load_policy
from engine.errors import UserError
from harness.credit_file import read_columns, write_credit
from harness.run_folder import RunFolder
from engine.sharded import whole
from harness.settings import make_settings
from harness.load import load_reference
from harness.registry import make_advantage, make_mitigation
from train import main, with_advantage

ARMS = {"plain": {}, "percentile": {"mitigation": "entropy_masking"}, "shuffled": {"mitigation": "entropy_weighted", "placebo": "weights"},
        "hidden": {"mitigation": "learned_importance", "importance_warmup": 0}, "attention": {"mitigation": "attention_credit"},
        "sequence": {"loss_norm": "sequence", "epochs": 2}, "critic": {"advantage": "gae"}, "values": {"advantage": "vine", "values_every": "8"},
        "kl": {"kl": 0.1}, "dpo": {"loss": "dpo"}, "belief": {"advantage": "belief"},
        "attribution": {"mitigation": "outcome_gradient", "noise_std": 0.1}}


def measured(model: str, arms: dict = ARMS, **more) -> dict[str, torch.Tensor]:
    """The gradient of one update of each arm, what it was made of, and what is reported, with five questions."""
    found = {}
    for arm, given in arms.items():
        policy = load_policy(make_settings({"model": model, "questions": 5, "max_new_tokens": 30, "micro_batch": 3, "max_grad_norm": 0.0, **given,
                                      **more}))
        s = policy.settings
        optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.0)
        rollouts = policy.ask(policy.task.training_problems(s.seed, 1, s.questions), s.answers, derived_seed("train", s.seed, 1))
        rollouts.scores["reward"] = torch.arange(20).remainder(3).float() * (rollouts.group != 3)  # a question of no use: 3
        rollouts.scores["answer"] = (rollouts.reward == 2).float()
        rollouts = kept = with_advantage(rollouts, make_advantage(s, policy), policy, 1)
        reference = load_reference(s)
        weight, _ = token_weight(make_mitigation(s, policy), s.mitigation, kept, policy, s.rescale, s.placebo)
        if s.loss == "dpo":
            result, implied = update_preferences(policy.model, optimizer, kept, s, reference)
            rollouts = replace(rollouts, advantage=implied)
        else:
            result, _ = update(policy.model, optimizer, kept, weight, s, reference)
        numbers = [float(value) for value in result.values() if isinstance(value, (int, float))]
        found |= {f"{arm} gradient": torch.cat([whole(p.grad).flatten() for p in policy.model.parameters()]), f"{arm} weight": weight,
                  f"{arm} advantage": rollouts.advantage, f"{arm} ids": rollouts.ids, f"{arm} log_prob": rollouts.log_prob,
                  f"{arm} reported": torch.tensor(numbers)}
    return {name: value.contiguous() for name, value in found.items()}


WORKER = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2], sys.argv[2] + '/engine']
import torch
torch.set_num_threads(1)
from engine import processes
from safetensors.torch import save_file
from test_processes import measured
save_file(measured(sys.argv[3]), f"{sys.argv[4]}/{processes.rank()}.safetensors")
processes.stop()
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment(**more) -> dict:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def start_ranks(command: list, count: int, more={}, **pipes) -> list[subprocess.Popen]:
    """So many processes that share their work, without torchrun: it takes seconds itself."""
    place = dict(WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), **more)
    return [subprocess.Popen(command, env=environment(RANK=str(rank), LOCAL_RANK=str(rank), **place),
                             **pipes) for rank in range(count)]


def test_two_processes_give_the_gradient_of_one(learner, tmp_path):
    """Five questions do not divide by two; sampling, statistics over the batch, critics and values are shared out and put together."""
    workers = start_ranks([sys.executable, "-c", WORKER, str(ROOT), str(ROOT / "tests"), str(learner), str(tmp_path)], 2)
    alone = measured(str(learner))
    assert [worker.wait(timeout=300) for worker in workers] == [0, 0]
    for rank in range(2):
        together = load_file(tmp_path / f"{rank}.safetensors")
        assert set(together) == set(alone)
        for name, value in alone.items():
            size = float(value.float().abs().max())
            torch.testing.assert_close(together[name], value, rtol=0, atol=1e-6 * size, msg=lambda text: f"rank {rank}, {name}: {text}")
    assert all(alone[f"{arm} gradient"].abs().max() > 0 for arm in ARMS)


def torchrun(*arguments, program=ROOT / "train.py") -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2",
               "--master_port", str(free_port()), program]
    return subprocess.Popen([*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), cwd=ROOT)


def side_by_side(*arguments, count, program=ROOT / "train.py") -> str:
    """What so many processes print that share a run."""
    command = [sys.executable, program, *map(str, arguments)]
    ranks = start_ranks(command, count, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = "".join(rank.communicate(timeout=300)[0] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0] * count, output
    return output


@pytest.fixture
def flags(learner):
    return ["--model", learner, "--steps", 3, "--checkpoint_every", 1, "--eval_every", 3, "--threads", 1]


def test_a_run_of_two_ranks_leaves_the_folder_of_one(flags, tmp_path):
    """First step: the same answers to the bit, later ones as alike as rounding allows; and the tables read both alike."""
    run = torchrun(*flags, "--out", tmp_path / "two")
    main([str(flag) for flag in flags] + ["--out", str(tmp_path / "one")])
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 0, output
    assert output.count("done. Everything is in") == 1
    names = {rank: {path.name for path in (tmp_path / name / "credit").iterdir()} for rank, name in ((1, "one"), (2, "two"))}
    assert names[1] == {f"step_00000{step}.npz" for step in (1, 2, 3)}
    assert names[2] == names[1] | {f"step_00000{step}_rank1.npz" for step in (1, 2, 3)}
    one, two = (read_columns(tmp_path / name, 1) for name in ("one", "two"))
    assert set(one) == set(two)
    for name, values in one.items():
        np.testing.assert_allclose(two[name], values, atol=1e-5, err_msg=name)
        assert two[name].dtype == values.dtype
    first = [json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]) for name in ("one", "two")]
    assert first[0]["reward"] == first[1]["reward"] and first[0]["tokens"] == first[1]["tokens"]
    assert first[1]["gradient_norm"] == pytest.approx(first[0]["gradient_norm"], rel=1e-5)
    assert first[1]["loss"] == pytest.approx(first[0]["loss"], abs=1e-6)
    assert [len(RunFolder(tmp_path / name).lines("evaluations.jsonl")) for name in ("one", "two")] == [4, 4]
    assert json.loads((tmp_path / "two/config.json").read_text())["ranks"] == 2
    assert {path.name for path in (tmp_path / "two/checkpoints").iterdir()} == {"step_000001", "step_000002", "step_000003"}
    for step, count in ((4, 2), (5, 3), (6, 1)):  # as many processes, more, fewer
        output = side_by_side("--resume", tmp_path / "two", "--steps", step, count=count)
        assert output.count(f"going on after step {step - 1}") == 1, output
        metrics = RunFolder(tmp_path / "two").lines("metrics.jsonl")
        assert [line["step"] for line in metrics] == list(range(1, step + 1))
        files = list((tmp_path / "two/credit").glob(f"step_{step:06d}*"))
        assert len(files) == count


def wait_for_checkpoint(out: RunFolder, run: subprocess.Popen) -> None:
    patience = time.monotonic() + 200
    while not out.checkpoints():
        assert time.monotonic() < patience and run.poll() is None, run.communicate()[0]
        time.sleep(0.2)


def go_on_alone(out: RunFolder, *then) -> None:
    done = int(out.checkpoints()[-1].name[-6:])
    main(["--resume", str(out.path), "--steps", str(done + 2), *then])
    assert [line["step"] for line in out.lines("metrics.jsonl")] == list(range(1, done + 3))
    assert not list((out.path / "credit").glob(f"step_{done + 1:06d}_rank*"))


SHARDED = pytest.mark.parametrize("more, then", [((), ()), (("--shard",), ("--shard", "no"))])


@SHARDED
def test_a_rank_that_dies_ends_the_run_and_another_goes_on(flags, tmp_path, more, then):
    run, out = torchrun(*flags, *more, "--steps", 400, "--out", tmp_path / "run"), RunFolder(tmp_path / "run")
    wait_for_checkpoint(out, run)
    processes = {pid: path.read_bytes() for path in Path("/proc").glob("[0-9]*/environ") if (pid := int(path.parent.name)) != os.getpid()
                 and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(run.pid)}
    victim = [pid for pid, variables in processes.items() if b"\0RANK=1\0" in b"\0" + variables]
    os.kill(victim[0], signal.SIGKILL)
    output, _ = run.communicate(timeout=120)
    assert run.returncode != 0 and "train.py --resume RUN goes on" in output, output
    go_on_alone(out, *then)


@SHARDED
def test_a_rank_that_waits_for_one_that_is_silent_ends_when_it_is_told_to(flags, tmp_path, more, then):
    """A process that is frozen closes no connection, like a machine that has lost its power: the other one waits for it in C++."""
    command, out = [sys.executable, ROOT / "train.py", *map(str, [*flags, *more, "--steps", 400, "--out", tmp_path / "run"])], RunFolder(tmp_path / "run")
    waits, silent = start_ranks(command, 2, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "3"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for_checkpoint(out, waits)
    silent.send_signal(signal.SIGSTOP)
    waits.send_signal(signal.SIGTERM)
    output, _ = waits.communicate(timeout=120)
    silent.kill()
    silent.communicate()
    assert waits.returncode == 1 and "train.py --resume RUN goes on" in output, output
    go_on_alone(out, *then)


SLOW = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
import train
from engine import processes
from harness import load
from harness import run as start
from harness.program import run_as_program
from harness.run_folder import RunFolder

def late(function):
    def sleep_first(*given):
        time.sleep(3)
        return function(*given)
    return sleep_first

if os.environ["RANK"] == "0":
    start.read_flags, RunFolder.truncate = late(start.read_flags), late(RunFolder.truncate)
    load.pick_device = late(load.pick_device)
run_as_program("train.py", train.main)
"""


@pytest.fixture
def with_slow_rank_0(tmp_path):
    """A program in which rank 0 comes later than the others to where all read a folder or stop."""
    program = tmp_path / "slow.py"
    program.write_text(SLOW)
    return program


@pytest.mark.parametrize("flag, value, said", [("--questions", 1, "--questions 1 cannot be shared by 2 processes"), ("--steps", "many", "argument --steps: ")])
def test_an_error_of_all_is_said_once(learner, tmp_path, with_slow_rank_0, flag, value, said):
    run = torchrun("--model", learner, flag, value, "--out", tmp_path / "run", program=with_slow_rank_0)
    output, _ = run.communicate(timeout=120)
    assert run.returncode != 0 and output.count(f"train.py: {said}") == 1 and output.count("train.py: ") == 1, output
    assert not (tmp_path / "run").exists()


def test_all_ranks_start_again_alike(flags, tmp_path, with_slow_rank_0):
    """Without a checkpoint rank 0 removes the evaluation that is made again; nobody may look for it in between."""
    out = RunFolder(tmp_path / "run")
    main([*map(str, flags), "--steps", "1", "--checkpoint_every", "9", "--out", str(out.path)])
    (out.path / "metrics.jsonl").write_text("")
    for folder in out.path.glob("checkpoints/*"):
        shutil.rmtree(folder)
    output = side_by_side("--resume", out.path, count=2, program=with_slow_rank_0)
    assert "starting again at step 1" in output
    assert [line["step"] for line in out.lines("evaluations.jsonl")] == [0, 0, 1, 1]


@pytest.mark.parametrize("variables, missing", [
    ({}, "RANK"), ({"RANK": "1"}, "LOCAL_RANK"), ({"RANK": "one", "LOCAL_RANK": "1"}, "RANK"),
    ({"RANK": "1", "LOCAL_RANK": "1"}, "MASTER_PORT")])
def test_half_an_environment_is_said(monkeypatch, variables, missing):
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"WORLD_SIZE is '2', but {missing} is"):
        processes.start("cpu")


@pytest.mark.parametrize("count, rank, expected", [
    (None, None, True), (None, "3", True), ("", "3", True), ("1", "3", True), ("4", "0", True),
    ("4", "3", False)])
def test_a_rank_without_others_speaks(monkeypatch, count, rank, expected):
    for name, value in (("WORLD_SIZE", count), ("RANK", rank)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert processes.is_main_process() == expected
    if count != "4":
        assert processes.start("cpu") == "cpu"


def test_a_rank_that_nobody_has_is_said(monkeypatch):
    numbers = {"WORLD_SIZE": 2, "RANK": 2, "LOCAL_RANK": 0, "MASTER_PORT": 1}
    for name, value in numbers.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match="RANK is 2, but WORLD_SIZE is 2: ranks count from 0"):
        processes.start("cuda")


@pytest.mark.parametrize("device, said", [("cuda", "PyTorch sees 1 CUDA devices"), ("cuda:0", "a device of its own")])
def test_a_process_without_a_gpu_of_its_own_is_told(monkeypatch, device, said):
    for name, value in (("WORLD_SIZE", 2), ("RANK", 1), ("LOCAL_RANK", 1), ("MASTER_PORT", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=said):
        processes.start(device)


def test_shares_are_whole_and_apart(monkeypatch):
    for n, count in ((5, 2), (8, 3), (2, 2), (7, 7)):
        monkeypatch.setattr(processes, "count", lambda: count)
        shares = []
        for rank in range(count):
            monkeypatch.setattr(processes, "rank", lambda: rank)
            shares.append(processes.shard_of(n))
        assert [i for share in shares for i in share] == list(range(n)) and min(map(len, shares)) >= 1
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_what_is_past_the_checkpoint_is_forgotten_of_all_ranks(tmp_path):
    (tmp_path / "credit").mkdir()
    for step in (1, 2, 10):
        for name in (f"step_{step:06d}.npz", f"step_{step:06d}_rank1.npz", f"step_{step:06d}_rank12.npz"):
            (tmp_path / "credit" / name).touch()
    RunFolder(tmp_path).truncate(2)
    assert {path.name[:11] for path in (tmp_path / "credit").iterdir()} == {"step_000001", "step_000002"}
    assert len(list((tmp_path / "credit").iterdir())) == 6


def test_files_of_several_ranks_are_read_as_one(policy, tmp_path, monkeypatch):
    batch = spoken(policy)
    weight, (one, two) = torch.rand(batch.mask.shape), (RunFolder(tmp_path / name) for name in ("one", "two"))
    for run in (one, two):
        run.path.mkdir()
    write_credit(one.credit(1), batch, weight)
    monkeypatch.setattr(processes, "count", lambda: 2)
    for rank in range(2):
        monkeypatch.setattr(processes, "rank", lambda rank=rank: rank)
        write_credit(two.credit(1, rank), batch.of_questions(range(rank, rank + 1)), weight[batch.rows_of(range(rank, rank + 1))])
    whole, parts = read_columns(one.path, 1), read_columns(two.path, 1)
    assert list(whole) == list(parts)
    for name, values in whole.items():
        assert np.array_equal(values, parts[name]) and values.dtype == parts[name].dtype, name
