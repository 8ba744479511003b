"""The second task: its score by hand, its labels, its split."""
import itertools

import pytest

from conftest import ROOT
from lab.engine.tokens import encode_prompt, load_tokenizer
from examples.largest_last import Task, is_held_out

TINY = ROOT / "models" / "tiny"


@pytest.mark.parametrize("text, reward, well_formed, right", [
    (" hmm.</think>\n<answer> ( 7 - 3 ) + 12</answer><|im_end|>", 1.1, 1, 1),
    (" hmm.</think>\n<answer>3, 7, 12</answer>", 1.1, 1, 1),
    (" hmm.</think>\n<answer> ( 12 + 3 ) + 7</answer><|im_end|>", 0.1, 1, 0),
    (" hmm.</think>\n<answer> 7 12</answer>", 0.1, 1, 0),             # one is missing
    (" hmm.</think>\n<answer> 3 7 7 12</answer>", 0.1, 1, 0),         # one too many
    (" hmm.</think>\n<answer> 37 12</answer>", 0.1, 1, 0),
    ("<answer>3 7 12</answer>", 1.0, 0, 1),                           # the thinking did not end
    ("<answer>3 7 12</answer></think>", 1.0, 0, 1),                   # or too late
    (" hmm.</think>\n<answer> 3 7 12", 0.0, 0, 0),                    # cut off
    ("</think><answer>3 7 12</answer><answer>3</answer>", 1.1, 1, 1),  # the first one counts
    ("\x00é\ud83d<answer>" + "9" * 5000, 0.0, 0, 0),
])
def test_the_score_by_hand(text, reward, well_formed, right):
    score = Task().score((3, 12, 7), text)
    assert score["reward"] == pytest.approx(reward)
    assert (score["format"], score["answer"]) == (well_formed, right)


def test_nothing_held_out_is_ever_trained_on():
    """Problems follow from seed and step, the held-out ones from nothing."""
    task = Task()
    drawn = [tuple(task.training_problems(seed, step, 8))
             for seed, step in ((0, 5), (0, 5), (0, 6), (1, 5))]
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3
    assert task.held_out_problems(20) == Task().held_out_problems(40)[:20]
    held_out = {tuple(sorted(problem)) for problem in task.held_out_problems(1000)}
    trained = {tuple(sorted(problem)) for step in range(300)
               for problem in task.training_problems(0, step, 16)}
    assert len(held_out) > 50 and len(trained) > 300 and not held_out & trained
    assert all(len(set(problem)) == 3 for problem in held_out | trained)
    for order in itertools.permutations((3, 12, 7)):
        assert is_held_out(order) == is_held_out((3, 7, 12))


@pytest.mark.parametrize("flags", [{}, {"count": 2, "largest": 75}, {"count": 5, "largest": 30}])
def test_the_tiny_model_can_spell_every_prompt(flags):
    task, tokenizer = Task(**flags), load_tokenizer(TINY)
    for problem in [*task.extreme_problems(), *task.training_problems(0, 1, 50)]:
        assert len(problem) == task.count
        assert encode_prompt(tokenizer, task.prompt_for(problem), task.show(problem))
    assert task.prompt_for((3, 12, 7)[:task.count]).endswith("<think>")
