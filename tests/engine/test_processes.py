"""Several processes against one: the same batch, the same weights, the same gradient; what is left
when one of them dies."""
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import ROOT
from engine import processes
from engine.policy import derived_seed
from engine.processes import full_tensor
from grpo import update
from harness import load
from harness import run as harness_run
from harness.record import RunFolder, read_columns
from harness.screen import run_as_program
from harness.load import initial_model, load_policy, make_advantage, make_weighting
from harness.settings import make_settings
from mitigations import rescaled_weight
from runs import environment, free_port, lines
from train import main, with_advantage

ARMS = {
    "plain": {}, "shuffled": {"mitigation": "entropy_masking", "placebo": "weights"},
    "attention": {"mitigation": "attention_credit"},
    "critic": {"advantage": "gae"},
    "values": {"advantage": "vine", "values_every": "8", "values_k": 2},
    "kl": {"kl": 0.1, "loss_norm": "sequence", "epochs": 2}, "dpo": {"loss": "dpo"}}
# Sums over up to 20 answers of 30 tokens, added up in another order: n roundings of float32 each
TOLERANCE = 20 * 30 * torch.finfo(torch.float32).eps


def measured(model: str, arms: dict = ARMS, **more) -> dict[str, torch.Tensor]:
    """The gradient of one update of each arm, what it was made of, and what is reported, with five
    questions, one of which is of no use."""
    found = {}
    for arm, given in arms.items():
        policy = load_policy(make_settings({
            "model": model, "questions": 5, "max_new_tokens": 30, "micro_batch": 3,
            "max_grad_norm": 0.0, **given, **more}))
        s = policy.settings
        optimizer = torch.optim.SGD(policy.model.parameters(), lr=0.0)
        problems = policy.task.training_problems(s.seed, 1, s.questions)
        rollouts = policy.ask(problems, s.answers, derived_seed("train", s.seed, 1))
        reward = torch.arange(20).remainder(3).float() * (rollouts.group != 3)
        rollouts.scores.update(reward=reward, answer=(reward == 2).float())
        rollouts = with_advantage(rollouts, make_advantage(s, policy), policy, s, 1)
        weight, _ = rescaled_weight(make_weighting(s, policy), s.mitigation, rollouts, policy,
                                    s.rescale, s.placebo)
        reference = initial_model(s) if s.kl else None
        result, _ = update(policy.model, optimizer, rollouts, weight, s, reference)
        gradient = torch.cat([full_tensor(p.grad).flatten() for p in policy.model.parameters()])
        numbers = [float(value) for value in result.values() if isinstance(value, (int, float))]
        parts = {"gradient": gradient, "weight": weight, "advantage": rollouts.advantage,
                 "ids": rollouts.ids, "log_prob": rollouts.log_prob,
                 "reported": torch.tensor(numbers)}
        found |= {f"{arm} {name}": value.contiguous() for name, value in parts.items()}
    return found


def forked(deed, printed: Path) -> list:
    """Two processes that share their work, each a fork of this one: torch is imported already.
    What they print comes together in a file."""
    place = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))

    def begin(rank):
        os.environ.update(place, RANK=rank, LOCAL_RANK=rank)
        file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")
        deed()

    ranks = [multiprocessing.get_context("fork").Process(target=begin, args=[rank], daemon=True)
             for rank in "01"]
    for rank in ranks:
        rank.start()
    return ranks


def typed(*arguments):
    """What a process does in which this is typed behind `python train.py`."""
    def train():
        sys.argv = ["train.py", *map(str, arguments)]
        run_as_program("train.py", main)
    return train


def ended(ranks: list, printed: Path) -> tuple[list, str]:
    """How all of them end, and what they printed."""
    for rank in ranks:
        rank.join(timeout=300)
    return [rank.exitcode for rank in ranks], printed.read_text()


def side_by_side(folder: Path, *arguments, deed=typed) -> str:
    """What two processes print that share a run."""
    printed = folder / "printed"
    printed.unlink(missing_ok=True)
    codes, output = ended(forked(deed(*arguments), printed), printed)
    assert codes == [0, 0], output
    return output


def ranks_that_agree(found_by, arms: dict, model: str, folder: Path) -> list[dict]:
    """What this function finds in each of two processes: what `measured` finds in one, and maybe
    more."""
    def find():
        save_file(found_by(model), folder / f"{processes.rank()}.safetensors")
        processes.stop()

    ranks = forked(find, folder / "printed")
    alone = measured(model, arms)
    codes, output = ended(ranks, folder / "printed")
    assert codes == [0, 0], output
    assert all(alone[f"{arm} gradient"].abs().max() > 0 for arm in arms)
    found = [load_file(folder / f"{rank}.safetensors") for rank in range(2)]
    for name, expected in alone.items():
        for together in found:
            apart = (together[name].double() - expected.double()).norm()
            assert apart <= TOLERANCE * expected.double().norm(), name
    return found


def test_two_processes_give_the_gradient_of_one(learner, tmp_path):
    """Five questions do not divide by two; sampling, statistics over the batch, critics and values
    are shared out and put together."""
    ranks_that_agree(measured, ARMS, str(learner), tmp_path)


@pytest.fixture
def flags(learner):
    return ["--model", learner, "--steps", 1, "--checkpoint_every", 1, "--eval_every", 1,
            "--eval_tasks", 4, "--threads", 1]


def test_a_run_of_two_ranks_leaves_the_folder_of_one(flags, tmp_path):
    """The same answers to the bit, and the tables read both alike. One goes on with more processes,
    the other with fewer."""
    folders = one, two = tmp_path / "one", tmp_path / "two"
    main([*map(str, flags), "--out", str(one)])
    output = side_by_side(tmp_path, *flags, "--out", two)
    assert output.count("done. Everything is in") == 1, output
    names = [{path.name for path in (folder / "credit").iterdir()} for folder in folders]
    assert names == [{"step_000001.npz"}, {"step_000001.npz", "step_000001_rank1.npz"}]
    ours, theirs = (read_columns(folder, 1) for folder in folders)
    assert set(ours) == set(theirs)
    for name, values in ours.items():
        np.testing.assert_allclose(theirs[name], values, atol=1e-5, err_msg=name)
        assert theirs[name].dtype == values.dtype
    first, second = (lines(folder / "metrics.jsonl")[0] for folder in folders)
    for name in ("reward", "tokens", "loss", "gradient_norm"):
        assert second[name] == pytest.approx(first[name], rel=TOLERANCE, abs=1e-5), name
    assert [len(lines(folder / "evaluations.jsonl")) for folder in folders] == [4, 4]
    assert json.loads((two / "config.json").read_text())["ranks"] == 2
    output = side_by_side(tmp_path, "--resume", one, "--steps", 2)
    assert output.count("continuing after step 1") == 1, output
    main(["--resume", str(two), "--steps", "2"])
    for folder, count in ((one, 2), (two, 1)):
        assert [line["step"] for line in lines(folder / "metrics.jsonl")] == [1, 2]
        assert len(list((folder / "credit").glob("step_000002*"))) == count


def wait_for_checkpoint(out: RunFolder, is_over, printed: Path) -> None:
    patience = time.monotonic() + 200
    while not out.checkpoints():
        assert time.monotonic() < patience and not is_over(), printed.read_text()
        time.sleep(0.05)


def go_on_alone(out: RunFolder) -> None:
    done = max(out.checkpoints())
    main(["--resume", str(out.path), "--steps", str(done + 1)])
    steps = [line["step"] for line in lines(out.path / "metrics.jsonl")]
    assert steps == list(range(1, done + 2))
    assert not list((out.path / "credit").glob(f"step_{done + 1:06d}_rank*"))


def child_of(parent: int, variable: bytes) -> int:
    """The child that has this variable in its environment."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        if path.read_text().rpartition(")")[2].split()[1] == str(parent):
            if variable in path.with_name("environ").read_bytes().split(b"\0"):
                return int(path.parent.name)


def test_a_rank_that_dies_ends_the_run_and_another_goes_on(flags, tmp_path):
    """Started by torchrun, which stops the others."""
    out, printed = RunFolder(tmp_path / "run"), tmp_path / "printed"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 2,
               "--master_port", free_port(), ROOT / "train.py", *flags, "--steps", 400,
               "--out", out.path]
    with open(printed, "w") as file:
        run = subprocess.Popen(list(map(str, command)), stdout=file, stderr=file,
                               env=environment(), cwd=ROOT)
    wait_for_checkpoint(out, lambda: run.poll() is not None, printed)
    os.kill(child_of(run.pid, b"RANK=1"), signal.SIGKILL)
    assert run.wait(timeout=120) != 0
    go_on_alone(out)


def late_rank_0(*arguments):
    """Rank 0 comes later than the other to where both read a folder or stop."""
    def late(function):
        return lambda *given: time.sleep(1) or function(*given)

    def train():
        if os.environ["RANK"] == "0":
            harness_run.read_flags = late(harness_run.read_flags)
            RunFolder.forget_after = late(RunFolder.forget_after)
            load.pick_device = late(load.pick_device)
        typed(*arguments)()
    return train


def test_all_ranks_start_again_alike(flags, tmp_path):
    """Without a checkpoint rank 0 removes the evaluation that is made again; nobody may look for it
    in between."""
    out = RunFolder(tmp_path / "run")
    main([*map(str, flags), "--out", str(out.path)])
    (out.path / "metrics.jsonl").write_text("")
    shutil.rmtree(out.path / "checkpoints")
    output = side_by_side(tmp_path, "--resume", out.path, deed=late_rank_0)
    assert "starting again at step 1" in output
    assert [line["step"] for line in lines(out.path / "evaluations.jsonl")] == [0, 0, 1, 1]
