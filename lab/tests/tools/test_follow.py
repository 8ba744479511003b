"""One token followed: every line is what the function it names computes."""
import dataclasses
import importlib
import operator
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, credit_columns, refusal, write_log
from lab_runs import SHORT, program

from lab.analysis.account import NOT_TRAINED, numbers_of_step, stages
from lab.analysis.run_folders import read_credit
from lab.analysis.token_table import read_step
from lab.engine.model_folder import read_model_folder
from lab.engine.tokens import load_tokenizer
from grpo import group_mean, group_z_score, policy_loss
from mitigations import outcome_conditional
from lab.engine.update import length_scaling
from lab.harness.read_record import run_config
from lab.tools import follow

NUMBER = r"-?\d+\.?\d*(?:e[-+]?\d+)?"
STEP = 3


@pytest.fixture(scope="module")
def batch(recorded):
    return read_credit(recorded, STEP, load_tokenizer(recorded))


@pytest.fixture
def follow_it(capsys):
    """What is printed when this is typed."""
    def typed(*argv):
        follow.main(list(map(str, argv)))
        return capsys.readouterr().out
    return typed


def lines_of(printed):
    """(text, place) by label; a long line goes on in the next."""
    lines, last = {}, None
    for line in printed[printed.index("\nrewards "):].splitlines():
        label, text, place = (line[a:b].strip() for a, b in ((0, 11), (11, 82), (82, None)))
        if label and place:
            lines[label], last = [text, place], label
        elif last and not label:
            lines[last][0] += f" {line.strip()}"
    return lines


def numbers(text):
    return list(map(float, re.findall(NUMBER, text)))


def close(text, value, digits=3):
    """Whether the last number that the text says is this one."""
    value = torch.as_tensor(value).item()
    return numbers(text)[-1] == pytest.approx(value, rel=0.6 * 10 ** (1 - digits))


def a_token(batch):
    """The most uncertain one of a finished answer whose group has different rewards."""
    entropy = batch.entropy * (batch.advantage != 0) * batch.finished[:, None]
    return divmod(int(entropy.argmax()), entropy.shape[1])


@pytest.mark.parametrize("line, words", [
    ({"gradient_norm": 4.0}, "norm 4, above --max_grad_norm 0.5, so it is multiplied by 0.5 / 4 = "
                             "0.125"),
    ({"gradient_norm": 0.4}, "norm 0.4, which is not clipped (--max_grad_norm 0.5)"),
    ({"gradient_norm": None, "skipped": "no answer was finished"},
     "the step made no update: no answer was finished")])
def test_what_became_of_the_gradient(line, words):
    s = SimpleNamespace(max_grad_norm=0.5, learning_rate=1e-3, epochs=1)
    known = numbers_of_step({"N": 9, **line}, s)
    assert known["clipping"].endswith(words) and "1 in the only update" in known["ratio"]
    assert known["rate"] == (None if line["gradient_norm"] is None else 0.001)
    s.epochs = 2
    assert numbers_of_step({"N": 9, **line}, s)["ratio"] is None


def test_every_line_is_what_the_function_it_names_computes(recorded, batch, follow_it):
    """The gradient at the logits is that of the loss of the whole batch, by autograd, of the model
    that sampled the step."""
    b, t = a_token(batch)
    lines = lines_of(follow_it(recorded, "--step", STEP, "--answer", b, "--token", t))
    assert list(lines) == ["rewards", "p", "entropy", "reward", "group",
                           "advantage", "weight", "rescaling", "loss norm", "term", "ratio", "s",
                           "gradient", "push", "clipping", "AdamW", "change"]
    for _, place in lines.values():
        path, _, names = re.split(":| ", place)
        module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
        assert callable(operator.attrgetter(names)(module))
    settings = run_config(recorded)
    trained = batch.mask & batch.finished[:, None]
    assert not batch.finished.all() and trained.any()
    before = batch.prompt_ids[batch.group[b]] + batch.ids[b, :t].tolist()
    logits, after = (read_model_folder(recorded / f"checkpoints/step_{step:06d}")(
        torch.tensor([before]))[0, -1].detach() for step in (STEP - 1, STEP))
    logits.requires_grad_()
    log_probs, chosen = logits.log_softmax(-1), batch.ids[b, t]
    p = log_probs.exp()

    mean = group_mean(batch.reward, batch.group)
    deviation = group_mean((batch.reward - mean) ** 2, batch.group).sqrt()
    weight = outcome_conditional(batch, think_discount=settings["think_discount"]) * trained
    kept = dataclasses.replace(batch, mask=trained)
    rescale = float(trained.sum() / weight.double().sum())  # to a mean of 1
    length_scale = length_scaling(kept.length, "sequence", 40)
    log_prob = torch.zeros_like(batch.log_prob)
    log_prob[b, t] = log_probs[chosen]
    loss = policy_loss(log_prob, batch.advantage, weight * rescale * length_scale, trained,
                       trained.sum())
    loss.backward()
    # a step of size 1 at the logits, along the gradient of -N times the loss; without m
    again = logits.detach().clone().requires_grad_()
    again.log_softmax(-1)[chosen].backward()
    push = again.grad @ -logits.grad * trained.sum()
    at_logits, in_loss = lines["gradient"][0].split(". The loss takes m / N of it")
    for text, value in (
            (lines["p"][0], p[chosen]), (lines["entropy"][0], -(p * log_probs).sum()),
            (lines["advantage"][0], group_z_score(batch.reward, batch.group)[b]),
            (lines["term"][0], loss), (lines["AdamW"][0], settings["learning_rate"]),
            (lines["s"][0], torch.nn.functional.one_hot(chosen, len(p)).sub(p).norm()),
            # the gradient of the loss at the logits, and its size there without m / N
            (in_loss, logits.grad.norm()),
            (at_logits, logits.grad.norm() * trained.sum() / length_scale[b]),
            (lines["push"][0].partition(": ")[0], push / length_scale[b])):
        assert close(text, value), text

    of_group = batch.reward[batch.group == batch.group[b]]
    said = re.findall(rf"(\d+) got ({NUMBER})", lines["rewards"][0])
    said = sorted(float(value) for count, value in said for _ in range(int(count)))
    change = (after.log_softmax(-1) - log_probs)[chosen].detach()
    for found, values in (
            (said, sorted(of_group.tolist())),
            (numbers(lines["reward"][0].partition(" = ")[2]),  # parts that the formula names
             [batch.scores[part][b] for part in ("reward", "answer", "format")]),
            (numbers(lines["group"][0]), [mean[b], deviation[b]]),
            (numbers(lines["weight"][0])[:1], [weight[b, t]]),
            (numbers(lines["rescaling"][0])[1:], [rescale, weight[b, t] * rescale]),
            (numbers(lines["loss norm"][0])[-2:], [length_scale[b], trained.sum()]),
            (numbers(lines["change"][0]), [change, after.softmax(-1)[chosen]])):
        assert found == pytest.approx([float(value) for value in values], rel=5e-3, abs=1e-6)


def test_a_model_that_was_not_kept_is_not_asked(recorded, batch, follow_it, tmp_path, capsys):
    folder = shutil.copytree(recorded, tmp_path / "run")
    argv = (folder, "--step", STEP, "--answer", 0, "--token", 0)
    shutil.rmtree(folder / "checkpoints/step_000002")
    said = refusal(follow_it, *argv, "--credit", 10)
    assert said.endswith("sampled step 3, and it was not kept. It was kept for --step 1 or 2")
    assert "--show has no effect without several answers" in refusal(follow_it, *argv, "--show", 1)
    assert not capsys.readouterr().out  # it is refused before anything is printed


def test_credit_is_measured_in_a_run_of_the_book(follow_it, tmp_path):
    """As page 7 types it. Its config.json has no task, and torch's version by another name."""
    program(ROOT, "train.py", *SHORT, "--steps", "1", "--out", tmp_path / "one")
    said = follow_it(tmp_path / "one", "--step", 1, "--answer", 0, "--token", 0, "--credit", 10)
    assert "V after - V before" in said and "lab/credit/monte_carlo.py" in said


def test_what_is_not_on_record_has_no_line(tmp_path, follow_it):
    """Two answers of two tokens, advantages that are no z-score; nothing of parts, entropy or the
    loss."""
    unknown = np.full(4, np.nan)
    columns = credit_columns([2, 2], [0, 0], reward=[1, 0], advantage=[2, 2, -1, -1],
                             entropy=unknown, collision=unknown, reward_answer=[np.nan] * 2,
                             reward_format=[np.nan] * 2, reward_reasoning=[np.nan] * 2)
    folder = write_log(tmp_path / "mine", {4: columns}, {"task": None, "mitigation": "mine"},
                       [{"step": 4}])
    printed = follow_it(folder, "--answer", 0, "--token", 1)
    for label in ("entropy", "reward ", "weight", "rescaling", "loss norm", "term", "ratio",
                  "gradient", "clipping", "AdamW"):
        assert f"\n{label}" not in printed
    lines = lines_of(printed)
    assert "A = 2, as recorded" in printed and "rewards    of the 2 answers" in printed
    assert close(lines["p"][0], 0.5)
    said = refusal(follow_it, folder, "--answer", 0, "--token", 1, "--credit", 10)
    assert said.endswith("mine is not there, which would score the continuations")
    assert follow_it(folder).count("+2.00") == follow_it(folder).count("-1.00") == 1


def test_of_a_dropped_answer_no_weight_is_told(recorded, batch, follow_it):
    """Its group's statistics know it, the loss does not. Nor was its change measured, and the 0 on
    record is not told."""
    b = int((~batch.finished).nonzero()[0])
    printed = follow_it(recorded, "--step", STEP, "--answer", b, "--token", 0)
    lines = lines_of(printed)
    assert "change     not measured, because the step left this answer out" in printed
    assert lines["dropped"][0] == NOT_TRAINED and {"group", "advantage", "s"} <= set(lines)
    assert not {"weight", "rescaling", "loss norm", "term", "gradient", "change"} & set(lines)


def test_the_answers_to_each_problem(recorded, batch, follow_it):
    printed = follow_it(recorded)  # the last step
    assert f"step {STEP}: 8 answers to 2 problems" in printed
    rows = re.findall(r"^ +(\d) +([\d.]+) +([-+][\d.]+) +(\d+)  ", printed, flags=re.M)
    assert sorted(int(row[0]) for row in rows) == list(range(8))
    for b, reward, advantage, length in rows:
        assert float(reward) == pytest.approx(float(batch.reward[int(b)]), abs=0.006)
        assert float(advantage) == pytest.approx(float(batch.advantage[int(b), 0]), abs=0.006)
        assert int(length) == int(batch.length[int(b)])


def test_an_answer_is_shown_with_its_largest_gradients(recorded, batch, follow_it):
    b, _ = a_token(batch)
    sizes = read_step(recorded, STEP).tokens_of(b)["abs gradient"]
    printed = follow_it(recorded, "--step", STEP, "--answer", b)
    rows = re.findall(r"^\| +(\d+) \|.*\| +([-+.e\d]+) \|$", printed, flags=re.M)
    largest = np.argsort(-sizes)[:8]
    assert [int(t) for t, _ in rows] == largest.tolist()
    assert [float(size) for _, size in rows] == pytest.approx(sizes[largest], rel=1e-3)
    shares = sorted((int(share) for share in re.findall(r"\[(\d+)%\]", printed)), reverse=True)
    assert shares[0] == 100 and len(shares) == (sizes >= 0.05 * sizes.max()).sum()


@pytest.mark.parametrize("step, is_measured", [(2, False), (STEP, True)])
def test_a_step_whose_change_was_not_measured_says_so(recorded, follow_it, step, is_measured):
    """It is measured in the first step and in the last one."""
    said = follow_it(recorded, "--step", step, "--answer", 0, "--token", 0)
    assert ("change     not measured in this step; --change_every" in said) != is_measured


@pytest.mark.parametrize("config, of_lab", [
    ({"numbers": "3"}, set()), ({"task": "countdown_task"}, {"lab/countdown.py"}),
    ({"numbers": "3", "rescale": "gradient", "loss_norm": "sequence"}, {"lab/engine/update.py"})])
def test_the_functions_are_those_that_ran_with_their_lines(config, of_lab):
    """Those of the book, and what the lab adds by a flag, reads in a record, or measures anew. At
    each line the function begins."""
    found = [function for *_, function in stages({
        "mitigation": "none", "advantage": "grpo", **config}) if function]
    named = {function.partition(":")[0] for function in found}
    of_book = {"analyze.py", "countdown_task.py", "grpo.py", "mitigations.py", "qwen2_model.py"}
    assert {name for name in named if "/" in name} == of_lab | {
        "lab/credit/monte_carlo.py", "lab/engine/credited.py"}
    assert of_book - named == ({"countdown_task.py"} if "task" in config else set())
    for function in found:
        file, line, name = re.match(r"(.+):(\d+) (.+)", function).groups()
        lines = (ROOT / file).read_text().splitlines()[int(line) - 1:]
        first = next(line for line in lines if not line.lstrip().startswith("@"))
        assert re.search(rf"(def|class) {name.rpartition('.')[2]}\b", first), function
