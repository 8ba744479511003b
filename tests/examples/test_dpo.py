"""The page that trains with DPO: its loss by hand, its step against autograd of the formula, its
pairs, and its record, which analyze.py reads."""
import json
import math
from types import SimpleNamespace

import pytest
import torch

import lab.analysis.program as analyze
import lab.run as train
from conftest import ROOT, SPOKEN, copied, gradients, hand_made, refusal
from countdown_task import Problem, is_held_out
from lab.engine.model_folder import read_model_folder
from lab.engine.tokens import load_tokenizer
from examples import dpo
from lab.harness.build import load_policy
from lab.harness.read_record import is_complete, missing_steps, read_credit, run_config
from lab.harness.settings import make_settings
from runs import gradients_of_steps, lines, program_here

pytestmark = pytest.mark.slow

GOOD, BAD, *_ = SPOKEN
UNFINISHED = " hmm. first 3 * 5 = 15"
PAIR = {"problem": "3 5 7 make 15", "chosen": GOOD, "rejected": BAD}
OTHER = {"problem": "2 4 6 make 12", "chosen": UNFINISHED, "rejected": GOOD}  # against our reward
THIRD = {"problem": "3 5 9 make 6", "chosen": BAD, "rejected": UNFINISHED}
HELD_OUT = "2 13 9 make 24"


def written(path, *pairs):
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return str(path)


def settings(out, **changed):
    usual = {"model": str(ROOT / "models/tiny"), "steps": 1, "questions": 4, "answers": 8,
             "eval_tasks": 2, "max_new_tokens": 60, "eval_every": changed.get("steps", 1),
             "checkpoint_every": 1, "change_every": 0}
    return make_settings({**usual, "out": str(out), **changed})


def test_the_loss_of_two_pairs_by_hand():
    """With beta 0.5 the first pair has r(y_w) = 0.5 (-1 + 2) = 0.5 and r(y_l) = 0.5 (-3 + 1) = -1,
    so its margin is 1.5. The second has the margin 0.5 (-0.4 - 0) = -0.2, so it is in the wrong
    order, and its gradient is larger."""
    for log_pi, log_ref, margin in (
            ([[-1.0, -1.0], [-2.0, -3.0]], [[-2.0, -1.0], [-1.0, -2.0]], 1.5),
            ([[-0.9, 0.0], [-0.3, -0.2]], [[-0.5, 0.0], [-0.3, -0.2]], -0.2)):
        log_pi = torch.tensor(log_pi, requires_grad=True)
        loss, found = dpo.pair_loss(log_pi, torch.tensor(log_ref), 0.5)
        assert found.item() == pytest.approx(margin)
        assert loss.item() == pytest.approx(math.log(1 + math.exp(-margin)))
        loss.backward()
        pull = 0.5 / (1 + math.exp(margin))  # beta sigmoid(-margin), the same for all its tokens
        expected = torch.tensor([[-pull, -pull], [pull, pull]])
        assert torch.allclose(log_pi.grad, expected)


def summed_log_prob(model, prompt, answer):
    """By the whole model, without a cache, shared prompts or a batch."""
    logits = model(torch.tensor([prompt + answer]))[0, len(prompt) - 1:-1]
    return logits.log_softmax(-1)[range(len(answer)), answer].sum()


def moved_reference(monkeypatch):
    """A reference that is another model, so that pairs have margins from the first step on."""
    reference = read_model_folder(ROOT / "models/tiny")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    monkeypatch.setattr(dpo, "initial_model", lambda s: reference)
    return reference


@pytest.mark.numerics
def test_a_step_against_autograd_of_the_formula(tmp_path, monkeypatch):
    """The record has the advantage whose policy loss, -sum(A log p) / N, has this gradient.
    """
    s = settings(tmp_path / "run", questions=2)
    reference, other = moved_reference(monkeypatch), read_model_folder(ROOT / "models/tiny")
    found = gradients_of_steps(monkeypatch)
    dpo.train(s, 0.3, written(tmp_path / "pairs.jsonl", PAIR, OTHER))

    policy, losses, pull = load_policy(s), [], {}
    for pair in (PAIR, OTHER):
        prompt = policy.tokenizer.encode(
            policy.task.prompt_for(policy.task.read(pair["problem"].split()))).ids
        better, worse = (policy.tokenizer.encode(pair[key]).ids for key in ("chosen", "rejected"))
        of_better, of_worse = (
            summed_log_prob(other, prompt, answer)
            - summed_log_prob(reference, prompt, answer).detach() for answer in (better, worse))
        margin = 0.3 * (of_better - of_worse)
        losses.append(torch.log(1 + torch.exp(-margin)))
        pull[tuple(prompt)] = 0.3 / (1 + math.exp(margin.item())) / 2  # of 2 pairs
    loss = sum(losses) / 2
    loss.backward()
    expected = gradients(other)
    assert (found[0] - expected).norm() < 1e-4 * expected.norm()
    [line] = lines(tmp_path / "run/metrics.jsonl")
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-4) != pytest.approx(math.log(2))
    assert line["gradient_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)
    assert line["pairs"] == 2
    credit, advantage = read_credit(tmp_path / "run", 1, policy.tokenizer), []
    for prompt in credit.prompt_ids:
        size = pull[tuple(prompt)] * int(credit.mask.sum())
        advantage += [size, -size]
    assert credit.advantage[:, 0].tolist() == pytest.approx(advantage, rel=1e-3)
    assert (credit.advantage == credit.advantage[:, :1] * credit.mask).all()


def test_a_pair_and_its_reverse_are_not_both_in_order(tmp_path, monkeypatch):
    """Their gradients, of different sizes, add up anew in each step: it hardly moves anything."""
    moved_reference(monkeypatch)
    reverse = {**PAIR, "chosen": BAD, "rejected": GOOD}
    file = written(tmp_path / "pairs.jsonl", PAIR, reverse)
    dpo.train(settings(tmp_path / "run", steps=2, questions=2, learning_rate=1e-9), 0.1, file)
    first, second = lines(tmp_path / "run/metrics.jsonl")
    assert first["pairs_in_order"] == second["pairs_in_order"] == 0.5
    assert second["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=0.01) and (
        first["gradient_norm"] > 0)


def test_the_best_and_the_worst_of_each_group():
    """The first ones, and none of a group whose rewards are equal."""
    reward = torch.tensor([1.1, 0.1, 0.06, 0.1, 0.3, 0.3, 0.1, 0.1, 0.1])
    batch = hand_made([[True]] * 9, group=torch.arange(9) // 3, scores={"reward": reward})
    assert dpo.best_and_worst(batch).tolist() == [[0, 2], [4, 3]]
    batch.scores["reward"] = torch.zeros(9)
    assert dpo.best_and_worst(batch).shape == (0, 2)


def test_a_batch_of_pairs_is_the_text_of_the_file(policy):
    """The better answer first, whatever our reward says."""
    pairs = [dpo.read_pair(json.dumps(pair), "here", policy) for pair in (PAIR, OTHER)]
    batch = dpo.batch_of(pairs, policy)
    assert batch.answers == [GOOD, BAD, UNFINISHED, GOOD]
    assert batch.problems == [Problem((3, 5, 7), 15), Problem((2, 4, 6), 12)]
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.finished.tolist() == [True, True, False, True]
    for row, (pair, key) in enumerate([(0, "chosen"), (0, "rejected"), (1, "chosen")]):
        expected = summed_log_prob(policy.model, pairs[pair].prompt, getattr(pairs[pair], key))
        assert batch.log_prob[row].sum().item() == pytest.approx(expected.item(), rel=1e-4)
    assert batch.reward.tolist() == pytest.approx([1.1, 0.1, 0, 0.1])  # the format counts 0.1


@pytest.mark.parametrize("line, said", [
    ("[1, 2]", "should hold a JSON object"),
    (json.dumps({**PAIR, "rejected": " "}), 'expected {"problem": "...", "chosen": "...", '),
    (json.dumps({**PAIR, "problem": "3 x 7"}), "'x' is not a whole positive number"),
    (json.dumps({**PAIR, "problem": "3 5 70000 15"}), "the tokenizer cannot spell the"),
    (json.dumps({**PAIR, "chosen": "Zebra"}), "the tokenizer cannot spell an answer"),
    (json.dumps({**PAIR, "chosen": GOOD * 40}), "tokens, and the model takes 1024"),
    (json.dumps({**PAIR, "problem": HELD_OUT}), f"{HELD_OUT} is a held-out problem"),
    (json.dumps({**PAIR, "problem": "13 2 9 make 24"}), "is a held-out problem"),
    (json.dumps({**PAIR, "prompt": " 12 12 11 make 12"}), "its prompt is not the one of 3 5 7")])
def test_a_line_that_may_not_be_trained_on_is_refused(policy, line, said):
    """Among them held-out problems, and answers that were given to another prompt."""
    message = refusal(dpo.read_pair, line, "pairs.jsonl, line 2", policy)
    assert message.startswith("pairs.jsonl, line 2") and said in message
    assert is_held_out(policy.task.read(HELD_OUT.split()))
    assert not is_held_out(policy.task.read(PAIR["problem"].split()))


def test_pairs_that_were_written_give_the_same_step_offline(tmp_path, monkeypatch):
    """The best and the worst answer to each problem of the step; from the file the same loss and
    gradient. As advantages are N times a derivative, they are divided by N here."""
    found = gradients_of_steps(monkeypatch)
    online, offline = tmp_path / "online", tmp_path / "offline"
    file = tmp_path / "pairs.jsonl"
    dpo.train(settings(online, questions=8), 0.1, write_pairs=file)
    pairs = lines(file)
    policy = dpo.train(settings(offline, questions=8), 0.1, str(file))

    trained = policy.task.training_problems(0, 1, 8)
    assert 1 < len(pairs) <= 8
    for pair in pairs:
        problem = policy.task.read(pair["problem"].split())
        better, worse = (policy.task.score(problem, pair[key])["reward"]
                         for key in ("chosen", "rejected"))
        assert problem in trained and better > worse
        assert pair["prompt"] == policy.task.prompt_for(problem)
    assert (found[0] - found[1]).norm() < 1e-4 * found[0].norm()
    of_online, of_offline = (lines(run / "metrics.jsonl")[0] for run in (online, offline))
    assert of_online["loss"] == pytest.approx(of_offline["loss"], abs=1e-6)
    assert of_online["pairs"] == of_offline["pairs"] == len(pairs)
    pulls = []
    for run in (online, offline):
        credit = read_credit(run, 1, policy.tokenizer)
        pull = {}
        for row in credit.advantage[:, 0].nonzero().squeeze(1).tolist():
            pull[credit.answers[row]] = credit.advantage[row, 0].item() / credit.mask.sum().item()
        pulls.append(pull)
    assert pulls[0] == pytest.approx(pulls[1], rel=1e-4) and len(pulls[0]) == 2 * len(pairs)
    # only what the model itself answered in training is its success
    assert 0 <= of_online["success"] <= 1 and "success" not in of_offline


def test_a_step_takes_each_pair_once_and_the_seed_and_the_step_decide_which(tmp_path, monkeypatch):
    file, drawn, batch_of = written(tmp_path / "pairs.jsonl", PAIR, OTHER, THIRD), [], dpo.batch_of

    def noted(pairs, policy):
        drawn.append([pair.problem.target for pair in pairs])
        return batch_of(pairs, policy)

    monkeypatch.setattr(dpo, "batch_of", noted)
    for run, seed in (("a", 0), ("b", 0), ("c", 1)):
        dpo.train(settings(tmp_path / run, seed=seed, steps=4, questions=2), 0.1, file)
    a, b, c = drawn[:4], drawn[4:8], drawn[8:]
    assert a == b != c and any(step != a[0] for step in a)
    assert all(len(set(step)) == 2 for step in drawn)
    dpo.train(settings(tmp_path / "d", questions=8), 0.1, file)
    assert sorted(drawn[-1]) == [6, 12, 15]


def test_training_tells_the_pairs_apart(tmp_path):
    """Whatever the rewards, and the more so the longer it lasts. The reference stays as it is: at
    first all margins are 0, and no later loss would fall below log 2 if it moved, too."""
    file = written(tmp_path / "pairs.jsonl", PAIR, OTHER)
    dpo.train(settings(tmp_path / "run", steps=4, questions=2, learning_rate=1e-3), 0.1, file)
    metrics = lines(tmp_path / "run/metrics.jsonl")
    assert metrics[0]["loss"] == pytest.approx(math.log(2), abs=1e-3)
    assert metrics[-1]["loss"] < metrics[1]["loss"] < math.log(2) - 0.01
    assert metrics[-1]["pairs_in_order"] == 1


def test_a_step_without_pairs_moves_nothing(tmp_path, monkeypatch):
    """Not even by what AdamW keeps of the step before."""
    best_and_worst, models = dpo.best_and_worst, []

    def none_in_step_2(batch):
        models.append(copied(policies[0].model))
        pairs = best_and_worst(batch)
        return pairs if len(models) == 1 else pairs[:0]

    policies, load = [], dpo.load_policy
    monkeypatch.setattr(dpo, "load_policy", lambda s: policies.append(load(s)) or policies[0])
    monkeypatch.setattr(dpo, "best_and_worst", none_in_step_2)
    trained = dpo.train(settings(tmp_path / "run", steps=2, questions=8)).model
    start, after_1, after_2 = (torch.cat([p.detach().flatten() for p in model.parameters()])
                               for model in (*models, trained))
    assert not torch.equal(start, after_1) and torch.equal(after_1, after_2)
    metrics = lines(tmp_path / "run/metrics.jsonl")[1]
    assert metrics["pairs"] == 0
    assert metrics["gradient_norm"] is None and metrics["pairs_in_order"] is None


@pytest.fixture(scope="module")
def run_of_dpo(tmp_path_factory):
    """One of its own answers, and the policy at its end."""
    folder = tmp_path_factory.mktemp("dpo") / "own"
    return SimpleNamespace(folder=folder, trained=dpo.train(settings(folder, steps=2)))


def test_the_record_is_whole_and_analyze_reads_it(run_of_dpo, tmp_path, capsys):
    run = run_of_dpo.folder
    assert not list(missing_steps(run))
    logs = [lines(run / name) for name in ("metrics.jsonl", "evaluations.jsonl")]
    assert is_complete(run_config(run), *logs)
    assert [(line["step"], line["mode"]) for line in logs[1]] == [
        (0, "sampled"), (0, "greedy"), (2, "sampled"), (2, "greedy")]
    analyze.main([str(run), "--output_dir", str(tmp_path / "page")])
    printed = capsys.readouterr().out
    assert "2 held-out problems at step 0" in " ".join(printed.split())
    page = (tmp_path / "page/report.html").read_text()
    assert "Where the gradient went, by kind" in page and "--credit" not in printed
    assert "Loss dpo on Countdown, 2 steps" in page
    credit = read_credit(run, 2, load_tokenizer(run))
    signs = credit.advantage[:, 0].sign()
    pairs = logs[0][1]["pairs"]
    assert pairs > 0 and (signs == 1).sum() == pairs == (signs == -1).sum()
    for group in credit.group[signs != 0].unique():
        inside = credit.group == group
        assert credit.reward[(signs == 1) & inside] == credit.reward[inside].max()
        assert credit.reward[(signs == -1) & inside] == credit.reward[inside].min()


def test_its_model_is_an_ordinary_one_and_its_run_is_not_resumed(run_of_dpo, tmp_path):
    folder = run_of_dpo.folder / "checkpoints/step_000002"
    for name, tensor in read_model_folder(folder).state_dict().items():
        assert torch.equal(tensor, run_of_dpo.trained.model.state_dict()[name])
    said = refusal(train.train_beyond, ["--resume", str(run_of_dpo.folder)])
    assert "examples/dpo.py wrote it" in said
    train.train_beyond(["--model", str(folder), "--steps", "0", "--eval_tasks", "2",
                "--out", str(tmp_path / "next")])


def test_the_program(tmp_path, monkeypatch):
    """Typed in another folder; what is there already is not overwritten."""
    monkeypatch.chdir(tmp_path)
    command = [ROOT / "examples/dpo.py", "--problems", 2, "--held_out", 3, "--steps", 1]
    said = program_here(*command, "--write_pairs", "pairs.jsonl", "--seed", 3)
    assert "step 1, greedy answers: " in said and "of 3 held-out problems" in said
    assert run_config(tmp_path / "runs/dpo-s3")["loss"] == "dpo"
    written(tmp_path / "mine.jsonl", PAIR)
    program_here(*command, "--pairs", "mine.jsonl", "--beta", 0.2, "--learning_rate", 1e-5,
                 "--out", "given")
    config = run_config(tmp_path / "given")
    assert (config["dpo_beta"], config["learning_rate"]) == (0.2, 1e-5)
    for wrong in (("--steps", 0), ("--beta", 0), ("--write_pairs", "pairs.jsonl"),
                  ("--pairs", "mine.jsonl", "--write_pairs", "others.jsonl")):
        program_here(*command, *wrong, expect=2)
    for wrong, sentence in ((("--out", "given"), "given exists already"),
                            (("--model", "none"), "none"),
                            (("--pairs", "none.jsonl"), "cannot read none.jsonl")):
        said = program_here(*command, *wrong, expect=1)
        assert said.splitlines()[-1].startswith("dpo.py: ") and sentence in said
