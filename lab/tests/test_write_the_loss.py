"""The exercise to write the parts of a step: what is right passes, and each typical mistake in what
a reader might write is named."""
import ast
import importlib.util
import re

import pytest
import torch

import train
from conftest import ROOT
from small import one_of
from lab.exercise import BLANKS, LOSSES, Given, check, right
from examples import own_grpo
from lab_runs import program_here
from runs import lines

FILE = ROOT / "examples/write_the_loss.py"
PAGE = " ".join((ROOT / "docs/course/5_can_i_write_it.md").read_text(encoding="utf-8").split())
MISTAKES = LOSSES["clipped_loss"]
STUBS = [f'    raise NotImplementedError("part {part}")\n' for part in (1, 2, 3, 4, 5)]
ADVANTAGES = '''    result = torch.zeros_like(reward)
    for number in group.unique():
        own = group == number
        own_rewards = reward[own]
        result[own] = (own_rewards - own_rewards.mean()) / (own_rewards.std(correction=0) + 0.0001)
    return result
'''
LOG_PROBS = '''    log_p = logits[:, :-1].log_softmax(-1)
    return log_p.gather(-1, ids[:, 1:, None])[..., 0]
'''
STEP = '''    norm = gradient.norm()
    if norm > max_norm:
        gradient = gradient * max_norm / norm
    return parameter - learning_rate * gradient
'''
FIRST = '''    objective = weight * advantage * log_prob
    return -(objective * mask).sum() / total
'''
SECOND = '''    ratio = (log_prob - old).exp()
    clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
    objective = weight * torch.minimum(ratio * advantage, clipped * advantage)
    return -(objective * mask).sum() / total
'''
PLAIN = CLIPPED = "    return -(objective * mask).sum() / total\n"
TERM, RATIO = "weight * advantage * log_prob", "(log_prob - old).exp()"
BOUNDS, MINIMUM = "ratio.clamp(1 - clip[0], 1 + clip[1])", "torch.minimum(ratio * advantage, "
SMALLER = MINIMUM + "clipped * advantage)"
# the mistake that is named -> the part that finds it, the right text, the text with the mistake
TYPICAL = {
    "sign": [(1, PLAIN, PLAIN.replace("-", "")), (2, CLIPPED, CLIPPED.replace("-", ""))],
    "no_gradient": [(1, TERM, TERM + ".detach()"), (2, RATIO, RATIO + ".detach()")],
    "probability": [(1, TERM, TERM + ".exp()")],
    "no_advantage": [(1, TERM, "weight * log_prob"), (2, SMALLER, "torch.minimum(ratio, clipped)")],
    "no_weight": [(1, TERM, "advantage * log_prob"), (2, "weight * torch", "torch")],
    "no_mask": [(1, PLAIN, PLAIN.replace(" * mask", "")),
                (2, CLIPPED, CLIPPED.replace(" * mask", ""))],
    "no_division": [(1, PLAIN, PLAIN.replace(" / total", "")),
                    (2, CLIPPED, CLIPPED.replace(" / total", ""))],
    "mean_of_positions": [(1, PLAIN, PLAIN.replace("sum() / total", "mean()")),
                          (2, CLIPPED, CLIPPED.replace("sum() / total", "mean()"))],
    "mean_without_mask": [(1, PLAIN, PLAIN.replace("(objective * mask).sum() / total",
                                                   "objective.mean()"))],
    "mean_of_answers": [(1, PLAIN, PLAIN.replace(".sum() / total",
                                                 ".sum(1).div(mask.sum(1)).mean()"))],
    "tokens_of_these_answers": [(1, PLAIN, PLAIN.replace("total", "mask.sum()")),
                                (2, CLIPPED, CLIPPED.replace("total", "mask.sum()"))],
    "old_is_ignored": [(2, RATIO, "(log_prob - log_prob.detach()).exp()"),
                       (2, SECOND, FIRST)],
    "ratio_upside_down": [(2, RATIO, "(old - log_prob).exp()")],
    "difference_of_logs": [(2, RATIO, "log_prob - old")],
    "ratio_times_log_prob": [(2, SMALLER, SMALLER + " * log_prob")],
    "no_clip": [(2, SMALLER, "ratio * advantage"),
                (2, SMALLER, "ratio.detach() * advantage * log_prob")],
    "no_minimum": [(2, SMALLER, "clipped * advantage")],
    "maximum": [(2, "torch.minimum", "torch.maximum")],
    "bounds_without_1": [(2, BOUNDS, "ratio.clamp(*clip)")],
    "upper_bound": [(2, BOUNDS, "ratio.clamp(1 - clip[0], 1 + clip[0])")],
    "fixed_bounds": [(2, BOUNDS, "ratio.clamp(0.8, 1.28)")]}


@pytest.fixture
def screen_of(tmp_path, capsys):
    """What the checks print of the exercise's file, with these texts in the place of its stubs."""
    def screen_of(first: str = FIRST, second: str = SECOND, advantages: str = ADVANTAGES,
                  log_probs: str = LOG_PROBS, step: str = STEP) -> tuple[bool, str]:
        text = FILE.read_text(encoding="utf-8")
        for stub, body in zip(STUBS, (advantages, log_probs, first, step, second)):
            assert text.count(stub) == 1, "undo your solution with: git restore examples"
            text = text.replace(stub, body)
        place = tmp_path / "written.py"
        place.write_text(text, encoding="utf-8")
        found = importlib.util.spec_from_file_location("written", place)
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        passed = check(vars(module))
        return passed, capsys.readouterr().out
    return screen_of


def changed(part, old, new):
    """Both texts, with another expression in one of them."""
    texts = [FIRST, SECOND]
    assert texts[part - 1].count(old) == 1
    texts[part - 1] = texts[part - 1].replace(old, new)
    return texts


@pytest.mark.parametrize("words", [[], ["train"]])
def test_unsolved_the_file_says_what_is_not_written_yet(words):
    said = program_here(FILE, *words, expect=1)
    assert said.endswith("not written yet: part 1\n") and "Traceback" not in said


def test_the_labs_own_function_and_a_readers_pass(screen_of):
    passed, said = screen_of()
    same = "the same gradient on 17 kinds of batches"
    assert passed and said.count(same) == 2
    own = "    import grpo\n    return grpo.policy_loss(log_prob, advantage, weight, mask, total)\n"
    advantages = "    import grpo\n    return grpo.group_z_score(reward, group)\n"
    assert screen_of(own, advantages=advantages) == (True, said)


def test_the_training_in_40_lines_is_that_of_train_py(tmp_path, capsys):
    """In each printed digit, for as many steps as rounding on any CPU allows."""
    train.main(["--questions", "8", "--answers", "8", "--steps", "4", "--eval_every", "0", "--out",
                str(tmp_path / "run")])
    capsys.readouterr()
    own_grpo.train(own_grpo.advantages, own_grpo.log_prob_of, own_grpo.policy_loss, steps=4)
    printed = capsys.readouterr().out.splitlines()
    for line, text in zip(lines(tmp_path / "run/metrics.jsonl"), printed, strict=True):
        numbers = [float(number) for number in re.findall(r"[+-]?\d+(?:\.\d+)?", text)]
        told = [line["step"], line["reward"], 100 * line["success"], line["length"], line["loss"],
                line["gradient_norm"]]
        assert numbers == pytest.approx(told, rel=0.004, abs=0.0001), text
    functions = [node for node in ast.parse((ROOT / "examples/own_grpo.py").read_text()).body
                 if isinstance(node, ast.FunctionDef)]
    assert sum(node.end_lineno - node.lineno + 1 for node in functions) <= 40


def test_the_page_says_how_many_mistakes_are_known():
    count = len(MISTAKES) + sum(len(blank.mistakes) for blank in BLANKS.values())
    assert f"{count} known mistakes" in PAGE


def test_the_first_loss_can_be_checked_alone(screen_of):
    passed, said = screen_of(FIRST, STUBS[4])
    assert not passed and said.count("right  the same gradient") == 1
    assert said.endswith("not written yet: part 5\n")


@pytest.mark.parametrize("mistake", one_of(4, MISTAKES))
def test_a_typical_mistake_is_named(mistake, screen_of):
    told = " ".join(MISTAKES[mistake][1].split())
    for part, old, new in TYPICAL[mistake]:
        passed, said = screen_of(*changed(part, old, new))
        assert not passed and said.count("right  the same gradient") == part - 1, said
        assert f"Probably wrong: {told} Mend it" in " ".join(said.split()), said


@pytest.mark.parametrize("part, old, new, told", [
    ("advantages", "group == number", "group >= 0", "with the whole batch"),
    ("advantages", " / (own_rewards.std(correction=0) + 0.0001)", "", "It is missing."),
    ("advantages", "own_rewards - own_rewards.mean()", "own_rewards", "no answer is pushed down"),
    ("advantages", "correction=0", "", "minus 1"),
    ("advantages", " + 0.0001", "", "0 / 0"),
    ("advantages", "own_rewards - own_rewards.mean()", "own_rewards.mean() - own_rewards", "sign"),
    ("advantages", "std(correction=0)", "norm()", "differs is 0.6987, and should be 1.7245"),
    ("log_probs", "logits[:, :-1]", "logits[:, 1:]", "For the token at position t"),
    ("log_probs", "ids[:, 1:", "ids[:, :-1", "the wrong tokens"),
    ("log_probs", "[..., 0]", "[..., 0].exp()", "Yours are probabilities"),
    ("log_probs", ".log_softmax(-1)", "", "Yours are logits"),
    ("log_probs", "[..., 0]", "[..., 0].neg()", "F.cross_entropy is the log-prob with a minus"),
    ("log_probs", "log_softmax(-1)", "log_softmax(1)", "over the positions"),
    ("log_probs", "[..., 0]", "[..., 0].detach()", "flows back to the logits"),
    ("log_probs", LOG_PROBS, "    with torch.no_grad():\n    " + LOG_PROBS.replace(
        "    return", "        return"), "flows back to the logits"),
    ("log_probs", "log_p.gather(-1, ids[:, 1:, None])[..., 0]",
     "torch.tensor(log_p.gather(-1, ids[:, 1:, None])[..., 0].tolist())", "a list of numbers"),
    ("log_probs", "logits[:, :-1].log", "logits.view(-1, 3).log", "it raised RuntimeError"),
    ("log_probs", "[..., 0]", "", "should return a tensor of shape (2, 4)"),
    ("step", "parameter - ", "parameter + ", "go against its gradient"),
    ("step", "if norm > max_norm", "if False", "is longer than max_norm"),
    ("step", "if norm > max_norm", "if True", "also lengthen"),
    ("step", "if norm > max_norm", "if norm < max_norm", "the wrong way round"),
    ("step", "learning_rate * ", "", "The learning rate. It is missing")])
def test_a_typical_mistake_in_a_function_of_values_is_named(part, old, new, told, screen_of):
    text = {"advantages": ADVANTAGES, "log_probs": LOG_PROBS, "step": STEP}[part]
    assert text.count(old) == 1
    passed, said = screen_of(**{part: text.replace(old, new)})
    assert not passed and told in " ".join(said.split()), said


@pytest.mark.parametrize("body, told", [
    ("    loss = -log_prob.sum()\n", "it returned nothing"),
    (FIRST.replace(".sum()", ".sum().item()"), "it returned a float, and a loss is a tensor"),
    (FIRST.replace(".sum()", ""), "it returned a tensor of shape (16, 11)"),
    (FIRST.replace(TERM, TERM + " ** 3"), "No typical mistake has this gradient"),
    (FIRST.replace("sum()", "expected_sum()"), "no attribute 'expected_sum' (written.py, line")])
def test_what_is_no_loss_or_no_typical_mistake_is_told(body, told, screen_of):
    passed, said = screen_of(body)
    assert not passed and told in said


@pytest.mark.parametrize("part, old, new", one_of(3, [
    (1, PLAIN, PLAIN.replace("objective * mask", "objective.double() * mask")),
    (1, PLAIN, PLAIN.replace("(objective * mask)", "objective[mask.bool()]")),
    (2, RATIO, "log_prob.exp() / old.exp()"),
    (2, SMALLER, "torch.where(advantage > 0, torch.minimum(ratio, clipped), torch.maximum(ratio, "
                 "clipped)) * advantage"),
    (2, MINIMUM, "-torch.maximum(-ratio * advantage, -")]))
def test_what_is_right_in_other_words_passes(part, old, new, screen_of):
    passed, said = screen_of(*changed(part, old, new))
    assert passed, said


@pytest.mark.parametrize("part, old, new", [
    ("advantages", "torch.zeros_like(reward)", "reward"),
    ("log_probs", "logits[:, :-1].log", "logits.mul_(1)[:, :-1].log"),
    ("step", "    return parameter - learning_rate * gradient\n",
     "    parameter -= learning_rate * gradient\n    return parameter\n")])
def test_a_function_of_values_may_work_in_place(part, old, new, screen_of):
    text = {"advantages": ADVANTAGES, "log_probs": LOG_PROBS, "step": STEP}[part]
    passed, said = screen_of(**{part: text.replace(old, new)})
    assert text.count(old) == 1 and passed, said


@pytest.mark.parametrize("old, new, part", one_of(3, [  # a dual clip, say, is wrong far from 1
    (SMALLER, SMALLER[:-1].replace("torch.minimum(", "torch.maximum(torch.minimum(")
     + "), torch.where(advantage < 0, 3 * advantage, -torch.inf))", 2),
    (RATIO, "(log_prob - old).clamp(max=3).exp()", 2),
    (RATIO, "(log_prob - old).clamp(min=-3).exp()", 2),
    (TERM, TERM.replace("advantage", "advantage.clamp(max=10)"), 1),
    (TERM, TERM.replace("advantage", "advantage.clamp(min=-10)"), 1),
    (TERM, TERM.replace("weight", "weight.clamp(max=8)"), 1)]))
def test_a_bound_too_much_is_found(old, new, part, screen_of):
    passed, said = screen_of(*changed(part, old, new))
    assert not passed and said.count("right  the same gradient") == part - 1, said


def test_the_examples_of_the_page_are_those_of_the_labs_function():
    """The losses and derivatives of pages 5 and 9 of the course."""
    two = dict(log_prob=[[-1, -2]], advantage=[[2, 2]], weight=[[1, .5]], mask=[[1, 1]], total=2)
    three = dict(log_prob=[[-1, -2], [-3, -5]], advantage=[[2, 2], [-1, -1]],
                 weight=[[1, .5], [1, 1]], mask=[[1, 1], [1, 0]], total=3)
    old = [[-1, -2, -1, -2]]
    moved = (torch.tensor(old) + torch.tensor([[.5, .75, 1.25, 1.5]]).log()).tolist()
    four = dict(log_prob=moved, weight=[[1] * 4], mask=[[1] * 4], total=4, old=old)
    for given, loss, derivatives in (
            (two, 2, [-1, -.5]), (three, 1 / 3, [-2 / 3, -1 / 3, 1 / 3, 0]),
            (three | {"total": 6}, 1 / 6, [-1 / 3, -1 / 6, 1 / 6, 0]),
            (four | {"advantage": [[1] * 4]}, -.945, [-.125, -.1875, -.3125, 0]),
            (four | {"advantage": [[-1] * 4]}, 1.0875, [0, 0, .3125, .375])):
        batch = {name: torch.tensor(value, dtype=torch.float32) if name != "total" else value
                 for name, value in given.items()}
        batch["log_prob"].requires_grad_()
        found = right(Given(**{"old": None, "clip": (0.2, 0.28)} | batch))
        found.backward()
        assert found.item() == pytest.approx(loss, abs=1e-6)
        assert batch["log_prob"].grad.flatten().tolist() == pytest.approx(derivatives, abs=1e-6)
