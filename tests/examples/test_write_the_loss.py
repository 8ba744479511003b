"""The exercise to write the loss: its checks accept what is right, and name each typical mistake in
what a reader might write."""
import importlib.util

import pytest
import torch

import lab.engine.update as grpo
from conftest import ROOT
from examples.check_the_loss import MISTAKES, check, checks
from runs import program

FILE = ROOT / "examples/write_the_loss.py"
PAGE = (ROOT / "docs/exercises.md").read_text(encoding="utf-8")
STUB = '''    if old is None:
        raise NotImplementedError("part 1")
    raise NotImplementedError("part 2")
'''
WRITTEN = '''    if old is None:
        objective = weight * advantage * log_prob
        return -(objective * mask).sum() / total
    ratio = (log_prob - old).exp()
    clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
    objective = weight * torch.minimum(ratio * advantage, clipped * advantage)
    return -(objective * mask).sum() / total
'''
PLAIN = "        return -(objective * mask).sum() / total\n"
CLIPPED = "\n    return -(objective * mask).sum() / total\n"
TERM, RATIO = "weight * advantage * log_prob", "(log_prob - old).exp()"
BOUNDS, MINIMUM = "ratio.clamp(1 - clip[0], 1 + clip[1])", "torch.minimum(ratio * advantage, "
SMALLER = MINIMUM + "clipped * advantage)"
# the mistake that is named -> the check that finds it, the right text, the text with the mistake
TYPICAL = {
    "sign": [(1, PLAIN, PLAIN.replace("-", "")), (5, CLIPPED, CLIPPED.replace("-", ""))],
    "no_gradient": [(1, TERM, TERM + ".detach()"), (5, RATIO, RATIO + ".detach()")],
    "probability": [(1, TERM, TERM + ".exp()")],
    "no_advantage": [(1, TERM, "weight * log_prob"), (6, SMALLER, "torch.minimum(ratio, clipped)")],
    "no_weight": [(1, TERM, "advantage * log_prob"), (7, "weight * torch", "torch")],
    "no_mask": [(2, PLAIN, PLAIN.replace(" * mask", "")),
                (7, CLIPPED, CLIPPED.replace(" * mask", ""))],
    "no_division": [(1, PLAIN, PLAIN.replace(" / total", "")),
                    (5, CLIPPED, CLIPPED.replace(" / total", ""))],
    "mean_of_positions": [(2, PLAIN, PLAIN.replace("sum() / total", "mean()")),
                          (7, CLIPPED, CLIPPED.replace("sum() / total", "mean()"))],
    "mean_without_mask": [(2, PLAIN, PLAIN.replace("(objective * mask).sum() / total",
                                                   "objective.mean()"))],
    "mean_of_answers": [(2, PLAIN, PLAIN.replace(".sum() / total",
                                                 ".sum(1).div(mask.sum(1)).mean()"))],
    "tokens_of_these_answers": [(3, PLAIN, PLAIN.replace("total", "mask.sum()")),
                                (7, CLIPPED, CLIPPED.replace("total", "mask.sum()"))],
    "old_is_ignored": [(5, "old is None", "True")],
    "ratio_of_1": [(5, RATIO, "(log_prob - log_prob.detach()).exp()")],
    "ratio_upside_down": [(5, RATIO, "(old - log_prob).exp()")],
    "ratio_of_logs": [(5, RATIO, "log_prob / old")],
    "ratio_as_weight": [(5, SMALLER, "ratio.detach() * advantage * log_prob")],
    "clipped_ratio_as_weight": [(5, SMALLER, "clipped.detach() * advantage * log_prob")],
    "no_clip": [(5, SMALLER, "ratio * advantage")],
    "no_minimum": [(5, SMALLER, "clipped * advantage")],
    "maximum": [(5, "torch.minimum", "torch.maximum")],
    "smaller_ratio": [(6, SMALLER, "torch.minimum(ratio, clipped) * advantage")],
    "bounds_without_1": [(5, BOUNDS, "ratio.clamp(*clip)")],
    "upper_bound": [(5, BOUNDS, "ratio.clamp(1 - clip[0], 1 + clip[0])"),
                    (5, BOUNDS, "ratio.clamp(1 - clip[1], 1 + clip[0])")],
    "lower_bound": [(6, BOUNDS, "ratio.clamp(1 - clip[1], 1 + clip[1])")],
    "fixed_bounds": [(8, BOUNDS, "ratio.clamp(0.8, 1.28)")]}


@pytest.fixture
def screen_of(tmp_path, capsys):
    """What the checks print of the exercise's file, with this text in the place of its stub."""
    def screen_of(body: str) -> tuple[bool, str]:
        text = FILE.read_text(encoding="utf-8")
        assert text.count(STUB) == 1, "undo your solution with: git restore examples"
        place = tmp_path / "written.py"
        place.write_text(text.replace(STUB, body), encoding="utf-8")
        found = importlib.util.spec_from_file_location("written", place)
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        passed = check(module.policy_loss)
        return passed, capsys.readouterr().out
    return screen_of


def told_about(mistake: str) -> str:
    return " ".join(MISTAKES[mistake][1].split())


def test_unsolved_the_file_says_what_is_not_written_yet():
    said = program(ROOT, FILE, expect=1)
    assert said.splitlines()[-1].split() == "1 two tokens not written yet: part 1".split()
    assert "Traceback" not in said


def test_the_labs_own_function_and_a_readers_pass_every_check(screen_of, capsys):
    assert check(grpo.policy_loss)
    of_lab = capsys.readouterr().out
    assert of_lab.count("right  the loss is") == len(checks()) == 9
    assert screen_of(WRITTEN) == (True, of_lab)
    assert of_lab in PAGE


def test_the_page_shows_what_is_told_about_a_mistake(screen_of):
    [(_, old, new)] = TYPICAL["smaller_ratio"]
    _, said = screen_of(WRITTEN.replace(old, new))
    last_check = said.partition("\n  6  ")[2].partition("\n\nMend it")[0]
    assert last_check and last_check in PAGE
    assert f"which of {len(MISTAKES)} mistakes gives your numbers" in " ".join(PAGE.split())


def test_the_first_part_can_be_checked_alone(screen_of):
    first = WRITTEN.partition("    ratio")[0] + '    raise NotImplementedError("part 2")\n'
    passed, said = screen_of(first)
    assert not passed and said.count("right  the loss is") == 4
    assert said.endswith("not written yet: part 2\n")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_typical_mistake_is_named(mistake, screen_of):
    for number, old, new in TYPICAL[mistake]:
        assert WRITTEN.count(old) == 1
        passed, said = screen_of(WRITTEN.replace(old, new))
        assert not passed and said.count("right  the loss is") == number - 1, said
        assert f"Probably wrong: {told_about(mistake)} Mend it" in " ".join(said.split()), said


@pytest.mark.parametrize("body, told", [
    ("    loss = -log_prob.sum()\n", "is a `return` missing?"),
    (WRITTEN.replace("/ total", "/ total * 1.0").replace(".sum()", ".sum().item()"),
     "a float is returned"),
    (WRITTEN.replace(".sum()", ""), "a tensor of shape (1, 2) is returned"),
    (WRITTEN.replace(TERM, TERM + ".detach()"), "which is right, but its gradient is not"),
    (WRITTEN.replace(TERM, TERM + ".detach()"), "          1          0         -1\n"),
    (WRITTEN.replace(TERM, TERM + " ** 3"), "No typical mistake gives these numbers")])
def test_what_is_no_loss_or_no_typical_mistake_is_told(body, told, screen_of):
    passed, said = screen_of(body)
    assert not passed and told in said


# other texts that are right
RIGHT = [
    (PLAIN, PLAIN.replace("objective * mask", "objective.double() * mask")),
    (PLAIN, PLAIN.replace("(objective * mask)", "objective[mask.bool()]")),
    (RATIO, "log_prob.exp() / old.exp()"),
    (SMALLER, "torch.where(advantage > 0, torch.minimum(ratio, clipped), torch.maximum(ratio, "
              "clipped)) * advantage"),
    (MINIMUM, "-torch.maximum(-ratio * advantage, -")]
# wrong only far from 1, where they bound the ratio a second time
BOUND_TWICE = [
    (SMALLER, SMALLER[:-1].replace("torch.minimum(", "torch.maximum(torch.minimum(")
     + "), torch.where(advantage < 0, 3 * advantage, -torch.inf))"),  # a dual clip
    (RATIO, "(log_prob - old).clamp(max=3).exp()"), (RATIO, "(log_prob - old).clamp(min=-3).exp()")]


@pytest.mark.parametrize("old, new", RIGHT)
def test_what_is_right_in_other_words_passes(old, new, screen_of):
    assert WRITTEN.count(old) == 1
    passed, said = screen_of(WRITTEN.replace(old, new))
    assert passed, said


@pytest.mark.parametrize("old, new", BOUND_TWICE)
def test_a_second_bound_is_found_by_the_last_check(old, new, screen_of):
    assert WRITTEN.count(old) == 1
    passed, said = screen_of(WRITTEN.replace(old, new))
    assert not passed and said.count("right  the loss is") == 8, said


@pytest.mark.parametrize("bounded", [
    "advantage.clamp(max=10)", "advantage.clamp(min=-10)", "weight.clamp(max=2)"])
def test_a_bound_of_advantages_or_weights_is_found(bounded, screen_of):
    name = bounded.split(".")[0]
    passed, said = screen_of(WRITTEN.replace(TERM, TERM.replace(name, bounded)))
    assert not passed and "4  random numbers             WRONG" in said, said


@pytest.mark.parametrize("name", ["advantage", "weight", "mask", "old"])
def test_an_argument_that_is_changed_in_place_is_named(name, screen_of):
    body = f"    result = policy_loss_(log_prob, advantage, weight, mask, total, old, clip)\n" \
           f"    if {name} is not None:\n        {name}.zero_()\n    return result\n"
    body += "\n\ndef policy_loss_(log_prob, advantage, weight, mask, total, old, clip):\n" + WRITTEN
    passed, said = screen_of(body)
    assert not passed and f"the argument `{name}` is changed in place" in said


def test_an_error_of_the_readers_code_keeps_its_own_words(screen_of):
    with pytest.raises(AttributeError, match="no attribute 'exponential_of'"):
        screen_of(WRITTEN.replace("sum()", "exponential_of()"))


def test_the_first_checks_are_those_that_are_worked_out_by_hand():
    """The losses and derivatives of docs/exercises.md."""
    by_hand = {1: (2, [-1, -0.5]), 2: (1 / 3, [-2 / 3, -1 / 3, 1 / 3, 0]),
               3: (1 / 6, [-1 / 3, -1 / 6, 1 / 6, 0]),
               5: (-0.945, [-0.125, -0.1875, -0.3125, 0]), 6: (1.0875, [0, 0, 0.3125, 0.375])}
    for number, (loss, derivatives) in by_hand.items():
        batch = checks()[number - 1].batch
        batch.log_prob.requires_grad_()
        found = grpo.policy_loss(**vars(batch))
        found.backward()
        assert found.item() == pytest.approx(loss, abs=1e-6)
        assert torch.flatten(batch.log_prob.grad).tolist() == pytest.approx(derivatives, abs=1e-6)
