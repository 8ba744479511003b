"""The run that trains with DPO: its advantage by hand, its step against autograd of the formula,
its pairs, and its record, which analyze.py reads."""
import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

import lab.tools.page as analyze
from conftest import ROOT, refusal
from small import SPOKEN, gradients, hand_made, log_probs_behind
from countdown_task import Problem, Task
from examples import dpo
from grpo import encode
from lab.analysis.run_folders import read_columns
from qwen2_model import load_model, load_tokenizer
from lab_runs import gradients_of_steps, program_here
from runs import lines

pytestmark = pytest.mark.slow

GOOD, BAD, *_ = SPOKEN
UNFINISHED = " hmm. first 3 * 5 = 15"
PAIR = {"problem": "3 5 7 make 15", "chosen": GOOD, "rejected": BAD}
OTHER = {"problem": "2 4 6 make 12", "chosen": UNFINISHED, "rejected": GOOD}  # against our reward
THIRD = {"problem": "3 5 9 make 6", "chosen": BAD, "rejected": UNFINISHED}
HELD_OUT = "2 13 9 make 24"
TINY = ROOT / "models/tiny"
TOKENIZER, TASK = load_tokenizer(TINY), Task(prompt="short")


def written(path, *pairs):
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(path)


def trained(out, **flags):
    """The folder of a run, when it has ended."""
    usual = {"steps": 1, "questions": 4, "eval_tasks": 2, "max_new_tokens": 60, "change_every": 0}
    named = {**usual, **flags, "out": out, "eval_every": flags.get("steps", 1)}
    argv = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    dpo.main(argv)
    return out


def read(pair, where="here"):
    line = pair if isinstance(pair, bytes) else json.dumps(pair)
    return dpo.read_pair(line, where, TASK, TOKENIZER, 60)


def test_the_advantage_of_two_pairs_by_hand():
    """With beta 0.5 the first pair has r(y_w) = 0.5 (-1 + 2) = 0.5 and r(y_l) = 0.5 (-3 + 1) = -1,
    so its margin is 1.5. The second has the margin 0.5 (-0.4 - 0) = -0.2. There are 7 tokens, and
    a group of equal rewards."""
    log_pi = torch.tensor([[-1., -1], [-2, -3], [-.9, 0], [-.3, -.2], [-1, 0], [-2, 0]],
                          requires_grad=True)
    log_ref = torch.tensor([[-2., -1], [-1, -2], [-.5, 0], [-.3, -.2], [-9, 0], [-9, 0]])
    batch = hand_made([[1, 1], [1, 1], [1, 0], [1, 1], [0, 0], [0, 0]], group=torch.arange(6) // 2,
                      scores={"reward": torch.tensor([1., 0, 1, 0, 1, 1])})
    batch = replace(batch, mask=batch.mask.bool())
    loss, margin = dpo.dpo_loss(log_pi, log_ref, dpo.best_and_worst(batch), beta=0.5)
    assert margin.tolist() == pytest.approx([1.5, -0.2])
    assert loss.item() == pytest.approx(
        (math.log(1 + math.exp(-1.5)) + math.log(1 + math.exp(0.2))) / 2)
    found = dpo.as_advantage(loss, log_pi, batch.mask)
    first, second = (7 * 0.5 / (1 + math.exp(margin)) / 2 for margin in (1.5, -0.2))
    signs = torch.tensor([first, -first, second, -second, 0, 0])
    torch.testing.assert_close(found, signs[:, None] * batch.mask)


def summed_log_prob(model, prompt, answer):
    return log_probs_behind(model, prompt, answer)[range(len(answer)), answer].sum()


@pytest.mark.numerics
def test_a_step_against_autograd_of_the_formula(tmp_path, monkeypatch):
    """And the record has the advantage whose policy loss, -sum(A log p) / N, has this gradient."""
    model, reference, other = (load_model(TINY) for _ in range(3))
    reference.requires_grad_(False)
    torch.manual_seed(0)
    for parameter in reference.parameters():  # so pairs have margins from the first step on
        parameter += 0.02 * torch.randn_like(parameter)
    loaded = iter((model, reference))
    monkeypatch.setattr(dpo, "load_model", lambda folder: next(loaded))
    found = gradients_of_steps(monkeypatch)
    trained(tmp_path / "run", questions=2, beta=0.3,
            pairs=written(tmp_path / "pairs.jsonl", PAIR, OTHER))
    losses = []
    for pair in (PAIR, OTHER):
        problem, answers = read(pair)
        prompt = encode(TOKENIZER, TASK.prompt_for(problem))
        r = [0.3 * (summed_log_prob(other, prompt, answer)
                    - summed_log_prob(reference, prompt, answer)) for answer in answers]
        losses.append(torch.log(1 + torch.exp(r[1] - r[0])))
    loss = sum(losses) / 2
    loss.backward()
    expected = gradients(other)
    assert (found[0] - expected).norm() < 1e-4 * expected.norm()
    [line] = lines(tmp_path / "run/metrics.jsonl")
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-4) != pytest.approx(math.log(2))
    assert line["gradient_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)
    columns = read_columns(tmp_path / "run", 1)
    signs = columns["advantage"][columns["episode_start"]] > 0
    assert signs.tolist() == [True, False, True, False]


def test_the_best_and_the_worst_of_each_group():
    """The first ones, and none of a group whose rewards are equal."""
    reward = torch.tensor([1.1, 0.1, 0.06, 0.1, 0.3, 0.3, 0.1, 0.1, 0.1])
    batch = hand_made([[True]] * 9, group=torch.arange(9) // 3, scores={"reward": reward})
    assert dpo.best_and_worst(batch).tolist() == [[0, 2], [4, 3]]
    batch.scores["reward"] = torch.zeros(9)
    assert dpo.best_and_worst(batch).shape == (0, 2)


def test_a_batch_of_pairs_is_the_text_of_the_file():
    """The better answer first, whatever our reward says, and with the numbers of the model."""
    pairs, model = [read(pair) for pair in (PAIR, OTHER)], load_model(TINY)
    batch = dpo.batch_of(pairs, model, TOKENIZER, TASK, 2)
    assert batch.answers == [GOOD, BAD, UNFINISHED, GOOD]
    assert batch.problems == [Problem((3, 5, 7), 15), Problem((2, 4, 6), 12)]
    assert batch.group.tolist() == [0, 0, 1, 1] and batch.reward.tolist() == [1, 0, 1, 0]
    assert batch.finished.tolist() == [True, True, False, True]
    for row, ids in enumerate(sum((pair.answers for pair in pairs), [])):
        with torch.no_grad():
            expected = summed_log_prob(model, batch.prompt_ids[row // 2], ids)
        assert batch.log_prob[row].sum().item() == pytest.approx(expected.item(), rel=1e-4)


def test_a_line_that_may_not_be_trained_on_is_refused(tmp_path):
    """Among them held-out problems, and answers that were given to another prompt."""
    for changed, said in (
            ({"rejected": KeyError}, 'expected {"problem": '), ({"problem": 5}, "expected"),
            ({"problem": "3 x 7"}, "expected"), ({"problem": "15"}, "expected"),
            ({"chosen": None}, "expected"), ({"rejected": [{"content": BAD}]}, "expected"),
            ({"problem": "3 5 70000 15"}, "cannot spell the"),
            ({"chosen": "Zebra"}, "which spell"), ({"chosen": ""}, "has 0 tokens"),
            ({"chosen": GOOD * 40}, "of at most 60 (--max_new_tokens)"),
            ({"problem": HELD_OUT}, f"{HELD_OUT} is a held-out problem"),
            ({"problem": "13 2 9 make 24"}, "is a held-out problem"),
            ({"prompt": " 12 12 11 make 12"}, "its prompt is not the one of 3 5 7")):
        pair = {key: value for key, value in {**PAIR, **changed}.items() if value is not KeyError}
        assert said in refusal(read, pair, "pairs.jsonl, line 2"), changed
    for line in (b"[1, 2]", b"", b"\xff"):
        assert "expected" in refusal(read, line)
    (tmp_path / "empty").touch()
    for flags, said in ((["--pairs", str(tmp_path / "empty")], "/empty, line 1: expected"),
                        (["--pairs", "/dev/zero"], "there is no file /dev/zero"),
                        (["--advantage", "rloo"], "the advantage rloo is one of train.py")):
        assert said in refusal(dpo.main, ["--out", str(tmp_path / "run"), *flags])


def test_the_pairs_of_a_run_give_the_same_step_offline(tmp_path, monkeypatch):
    """The best and the worst answer to each problem of the step; from the file the same loss and
    gradient, and no success, which is of what the model itself answers."""
    found = gradients_of_steps(monkeypatch)
    online = trained(tmp_path / "online", questions=8)
    pairs = lines(online / "pairs.jsonl")
    offline = trained(tmp_path / "offline", questions=8, pairs=online / "pairs.jsonl")
    settings = dpo.settings_of([])
    problems = Task(**settings.keywords_of(Task)).training_problems(0, 1, 8)
    assert 1 < len(pairs) <= 8
    for pair in pairs:
        problem = read(pair).problem
        better, worse = (TASK.score(problem, pair[key])["reward"]
                         for key in ("chosen", "rejected"))
        assert problem in problems and better > worse
    assert (found[0] - found[1]).norm() < 1e-4 * found[0].norm()
    one, other = (lines(run / "metrics.jsonl")[0] for run in (online, offline))
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
    assert one["pairs"] == other["pairs"] == len(pairs)
    assert 0 <= one["success"] <= 1 and other["success"] is None


def test_training_tells_the_pairs_apart_and_seed_and_step_decide_which(tmp_path, monkeypatch):
    """Whatever the rewards. At first all margins are 0, and no later loss would fall below log 2 if
    the reference moved, too."""
    drawn, batch_of = [], dpo.batch_of
    monkeypatch.setattr(dpo, "batch_of", lambda pairs, *rest: (
        drawn.append([pair.problem.target for pair in pairs]) or batch_of(pairs, *rest)))
    file = written(tmp_path / "pairs.jsonl", PAIR, OTHER, THIRD)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        trained(tmp_path / name, steps=4, questions=2, pairs=file, seed=seed)
    a, b, c = drawn[:4], drawn[4:8], drawn[8:]
    assert a == b != c and any(step != a[0] for step in a)
    assert all(len(set(step)) == 2 for step in drawn)
    trained(tmp_path / "d", steps=4, questions=2, learning_rate=1e-3,
            pairs=written(tmp_path / "two.jsonl", PAIR, OTHER))
    metrics = lines(tmp_path / "d/metrics.jsonl")
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics[0]["pairs_in_order"] == 0 and metrics[-1]["loss"] < math.log(2) - 0.01


def test_a_step_without_pairs_moves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(dpo, "best_and_worst", lambda batch: torch.zeros(0, 2, dtype=torch.long))
    trained(tmp_path / "run")
    start, after = load_model(TINY), load_model(tmp_path / "run/checkpoints/step_000001")
    assert all(map(torch.equal, after.parameters(), start.parameters()))
    [line] = lines(tmp_path / "run/metrics.jsonl")
    assert line["pairs"] == 0 and line["gradient_norm"] is None


def test_the_record_is_a_runs_and_a_stopped_run_goes_on(tmp_path):
    """Of pairs that were given it keeps a copy, so a change of their file changes nothing."""
    own = trained(tmp_path / "own", steps=2, checkpoint_every=1)
    analyze.main([str(own), "--output_dir", str(tmp_path / "page")])
    page = (tmp_path / "page/page.html").read_text()
    assert "the advantage dpo" in page and "Where the gradient went" in page
    file = tmp_path / "three.jsonl"
    given = trained(tmp_path / "given", steps=2, questions=2, checkpoint_every=1,
                    pairs=written(file, PAIR, OTHER, THIRD))
    file.unlink()
    for run in (own, given):
        stopped = shutil.copytree(run, tmp_path / f"stopped-{run.name}")
        shutil.rmtree(stopped / "checkpoints/step_000002")
        dpo.main(["--resume", str(stopped)])
        for name in ("pairs.jsonl", "checkpoints/step_000002/model.safetensors"):
            assert (stopped / name).read_bytes() == (run / name).read_bytes(), name


def test_the_program(tmp_path, monkeypatch):
    """Typed in another folder; what is there already is not overwritten."""
    monkeypatch.chdir(tmp_path)
    command = [ROOT / "examples/dpo.py", "--questions", 2, "--eval_tasks", 3, "--steps", 1]
    assert "pairs, 0% of them in order, loss 0.69" in program_here(*command, "--answers", 16)
    assert (tmp_path / "runs/dpo-s0/pairs.jsonl").exists()
    for wrong, sentence in (((), "runs/dpo-s0 exists already"),
                            (("--model", "none", "--out", "y"), "none"),
                            (("--beta", 0, "--out", "z"), "--beta 0.0: should be above 0"),
                            (("--out", "x", "--pairs", "none.jsonl"), "none.jsonl")):
        said = program_here(*command, *wrong, expect=1)
        assert said.splitlines()[-1].startswith("dpo.py: ") and sentence in said
