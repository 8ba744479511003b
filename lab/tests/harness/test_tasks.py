"""A task that is a list of problems and a reward: what follows from them, and what is refused."""
import math
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Annotated

import numpy as np
import pytest
import torch

from conftest import ROOT, refusal
import countdown_task
from lab.engine.declared import Flag, Range
from lab.engine.errors import UserError
from lab.engine.policy import encode_prompts
from lab.engine.rollouts import score_answers
from lab.engine.tokens import load_tokenizer
from lab.harness.flags import flags_of
from lab.harness.settings import make_settings
from lab.harness.short_task import countdown_with_reward, short_task
from lab.harness.tasks import CheckedTask, load_task, make_task
from lab.tools.demonstrations import make_tokenizer
from small import hand_made

PROMPT = "<|im_start|>user\n say {}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [PROMPT.format(number) for number in range(20)]


def task_of(problems, reward=lambda problem, text: 0, **more):
    module = ModuleType("my_task")
    vars(module).update(__file__="my_task.py", problems=problems, reward=reward, **more)
    return CheckedTask(short_task(module)())


def test_a_fifth_is_held_out_whatever_the_order_and_never_trained_on():
    task, again = task_of(PROMPTS), task_of([*PROMPTS[::-1], PROMPTS[3]])
    held_out = task.held_out_problems(100)
    assert len(held_out) == 4 and held_out == again.held_out_problems(100)
    assert task.held_out_problems(2) == held_out[:2]
    trained = [task.training_problems(0, step, 8) for step in range(50)]
    assert {*sum(trained, [])} == {*PROMPTS} - {*held_out} and trained[0] != trained[1]
    assert trained[7] == again.training_problems(0, 7, 8) != task.training_problems(1, 7, 8)


def test_success_is_a_reward_of_1_and_the_end_of_the_turn_is_cut_off():
    def reward(problem, text):
        seen.append((problem, text))
        return {"a": 1, "b": 0.9, "c": -2}[text]

    seen, task = [], task_of(PROMPTS, reward)
    parts = [task.score(PROMPTS[0], text) for text in ("a<|im_end|>", "b", "c<|endoftext|>")]
    assert [(part["reward"], part["answer"]) for part in parts] == [(1, 1), (0.9, 0), (-2, 0)]
    assert seen == [(PROMPTS[0], text) for text in "abc"]


def test_success_is_known_while_rewards_are_0_and_1_or_a_task_scores_its_answers():
    def reward(problem, text):
        return len(text) / 2

    plain = task_of(PROMPTS, reward)
    for text, is_known in (("", True), ("ab", True), ("a", False), ("ab", False)):
        plain.score(PROMPTS[0], text)
        assert plain.knows_success == is_known
    parts = {"reward": 0.5, "format": 0.0, "answer": 0.0, "reasoning": 0.0}
    scored = task_of(PROMPTS, reward, score=lambda problem, text: parts)
    scored.score(PROMPTS[0], "a")
    assert scored.knows_success


@pytest.mark.parametrize("name", ["reward", "reply", "redraw", "prompt_for", "show"])
def test_no_method_may_change_its_problem_and_turns_are_copies(name):
    """Also in a way that a second call would not change again, such as sorting a list."""
    def deed(problem, turns=(), rng=None):
        if turns:
            turns[-1] = "changed"
        problem["numbers"].sort()
        return 1.0 if name == "reward" else problem["prompt"]

    methods = {"reward": lambda problem, turns: 0, "reply": lambda problem, turns: None, name: deed}
    task = task_of([{"prompt": prompt, "numbers": [n]} for n, prompt in enumerate(PROMPTS)],
                   **methods)
    turns = ["a"]
    more = {"reward": [turns], "reply": [turns], "redraw": [turns, 0]}.get(name, [])
    method = task.score if name == "reward" else getattr(task, name)
    method({"prompt": "a", "numbers": [3, 5]}, *more)
    assert turns == ["a"]
    whose = r"the reward of --task my_task|\w+ \(.*test_tasks.py:\d+\)"
    assert re.match(f"({whose}) changes the problem that it is given",
                    refusal(method, {"prompt": "a", "numbers": [5, 3]}, *more))


@pytest.mark.parametrize("name, method, arguments", [
    ("reply", lambda problem: None, "problem, turns"),
    ("redraw", lambda problem, turns: None, "problem, turns, rng"),
    ("training_problems", lambda seed, step: 0, "seed, step, count")])
def test_a_method_with_other_arguments_is_told_with_its_place(name, method, arguments):
    assert re.search(rf"test_tasks.py:\d+\) should take the arguments \({arguments}\): ",
                     refusal(lambda: task_of(PROMPTS, **{name: method})))


def test_prompts_that_differ_by_white_space_are_one_problem():
    twins = [text for prompt in PROMPTS for text in (prompt, prompt.replace(" ", "  "))]
    task = task_of(twins)
    assert len(task.to_test) == 4 and len(task.to_train) == 16
    task = task_of([{"prompt": text, "n": n // 2} for n, text in enumerate(twins)])
    assert len(task.to_test + task.to_train) == 20

    class Leaky:
        prompt_for = show = staticmethod(str)

        def held_out_problems(self, count):
            return ["say  3"]

        def training_problems(self, seed, step, count):
            return ["say 3"]

    leaky = CheckedTask(Leaky())
    leaky.held_out_problems(1)
    assert "held_out_problems has it, too" in refusal(leaky.training_problems, 0, 1, 1)


def test_half_a_character_in_a_prompt_is_told():
    task, tokenizer = task_of([*PROMPTS, "a \ud800 b"]), load_tokenizer(ROOT / "models/tiny")
    [half] = [problem for problem in task.extreme_problems() if problem not in PROMPTS]
    said = refusal(encode_prompts, tokenizer, task, [half])
    assert said.endswith("contains half of a character: '\\ud800'")


def test_problems_are_shown_and_read_by_what_the_user_says():
    task = task_of([{"prompt": prompt, "number": n} for n, prompt in enumerate(PROMPTS)])
    problem = task.read(["say", "7"])
    assert problem["number"] == 7 and task.show(problem) == "say 7"
    assert task.prompt_for(problem) == PROMPTS[7] and task.label(["a", "b"]) == ([0, 0], [0, 0])
    with pytest.raises(UserError, match="^say 77 is none of the problems of my_task; say "):
        task.read(["say", "77"])


def test_a_function_with_the_name_of_a_method_takes_its_place():
    task = task_of([3, 5], prompt_for=PROMPT.format, show=lambda problem: f"number {problem}")
    [problem] = task.held_out_problems(9)
    assert task.prompt_for(problem) == PROMPTS[problem] and task.show(5) == "number 5"


def test_problems_may_be_a_function_whose_keywords_are_flags():
    def problems(*, words: Annotated[int, Range(text="how many", least=2)] = 20):
        return [PROMPT.format(number) for number in range(words)]

    module = ModuleType("my_task")
    vars(module).update(problems=problems, reward=lambda problem, text: 0)
    task = short_task(module)
    assert flags_of(task) == {"words": Flag(20, "how many", least=2, kind=int)}
    assert len(task().to_test) == 4 and len(task(words=5).to_train) == 4


MESSAGES = [[{"role": "system", "content": "s"}, {"role": "user", "content": f"say  {number}"}]
            for number in range(20)]


def test_messages_become_a_prompt_by_the_models_template(tmp_path):
    """And are split in the same way with every model, whatever a file's own of_model does."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages[1].content }}!")
    told = []
    tiny, other = (task_of([{"prompt": messages} for messages in MESSAGES], of_model=told.append)
                   for _ in range(2))
    tiny.task.of_model(ROOT / "models/tiny")
    other.task.of_model(tmp_path)
    problem = tiny.read(["say", "7"])
    assert tiny.prompt_for(problem) == ("<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nsay  7"
                                        "<|im_end|>\n<|im_start|>assistant\n")
    assert other.prompt_for(problem) == "say  7!" and other.show(problem) == "say 7"
    assert told == [ROOT / "models/tiny", tmp_path]
    assert tiny.held_out_problems(9) == other.held_out_problems(9)


@pytest.mark.parametrize("prompts, said", [
    (PROMPTS, "a b"), (MESSAGES, [{"role": "assistant", "content": "a b"}])])
def test_a_reward_of_trl_is_given_lists_of_one(prompts, said):
    def reward(prompts, completions, target, **columns):
        seen.append((prompts, completions, target, columns))
        return [len(target)] * (1 + (target == [3]))

    seen = []
    task = task_of([{"prompt": prompt, "target": n, "more": None}
                    for n, prompt in enumerate(prompts)], reward)
    assert task.score(task.read(["say", "7"]), "a b<|im_end|>")["reward"] == 1
    assert seen == [([prompts[7]], [said], [7], {"more": [None]})]
    assert re.match(r"reward \(.*test_tasks.py:\d+\) should return a list with a number for each",
                    refusal(task.score, task.read(["say", "3"]), "a"))


def test_what_a_reward_of_trl_cannot_have_is_told():
    def reward(completions, goal):
        return [1.0]

    rows = [{"prompt": prompt, "target": n} for n, prompt in enumerate(PROMPTS)]
    task = task_of(rows, reward)
    assert re.match(r"reward \(.*test_tasks.py:\d+\) should take the arguments that a problem has "
                    r"\(prompts, completions, target\): missing a required argument: 'goal'",
                    refusal(task.score, rows[0], "a"))
    assert task_of([{**row, "goal": 1} for row in rows], reward).score(
        {**rows[0], "goal": 1}, "a")["reward"] == 1
    assert "it should be reward(problem, turns)" in refusal(
        lambda: task_of(rows, reward, reply=lambda problem, turns: None))


TWINS = [{"prompt": prompt, "number": n} for n, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("problems, said", [
    (PROMPTS[:1] * 3, "`problems` has 1 different prompts"),
    ([], "`problems` has 0 different prompts"), (None, "`problems` should be a list"),
    ("xxx", "`problems` should be a list"), ({"a": 1}, "`problems` should be a list"),
    ([1, 2], "the prompt of each of `problems` should be a text"),
    ([{"text": "a"}, {}], "the prompt of each of `problems` should be a text"),
    # only one of them would be asked, and nobody could say which
    ([*TWINS, {**TWINS[3], "number": 0}], "two of `problems` have .* prompt, 'say 3', and"),
    ([*TWINS, TWINS[3]], None)])
def test_a_list_that_is_none_of_problems(problems, said):
    if said:
        assert re.match(f"my_task: {said}", refusal(task_of, problems))
    else:
        task_of(problems)


IMPORTED = "from countdown_task import Task\n"
REWARD = "def reward(problem, text): return 0.25\n"
PROBLEMS = "problems = ['a', 'b']\n"
CLASS = "import dataclasses\n@dataclasses.dataclass\nclass Task: 0\n"


@pytest.mark.parametrize("content, said", [
    (PROBLEMS, "should have a function `reward(problem, text)`"),
    (PROBLEMS + CLASS, None), (PROBLEMS + IMPORTED + REWARD, None),
    ("reward = [len, len]\n", "should have a function `reward(problem, text)`"),
    # Countdown's problems would be taken in the place of the file's own
    ("def reward(completions, **_): return [1.0]\n", "has no `problems`"),
    ("dataset = ['a', 'b']\n" + REWARD, "by the line `problems = dataset`"),
    # it would be trained in the place of the file's own functions
    (IMPORTED, "or else a dataclass Task of its own"), ("class Task: 0\n", "a dataclass Task"),
    (CLASS + REWARD, "has both a class Task and a function `reward`")])
def test_what_a_file_needs_to_be_a_task(monkeypatch, tmp_path, content, said):
    monkeypatch.setattr("lab.harness.tasks.PROJECT", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"a_task_of_{len(content)}_letters"
    (tmp_path / f"{name}.py").write_text(content)
    if said:
        assert said in refusal(load_task, name)
        return
    found = load_task(name)
    assert found is load_task(name)  # its flags are looked up by it
    if CLASS in content:
        assert found is sys.modules[name].Task
    else:
        assert found().score("a", "text")["reward"] == 0.25


def test_a_class_without_all_methods_is_told_which_class_has_them(monkeypatch):
    """As one that inherits from the book's task."""
    monkeypatch.setattr("lab.harness.tasks.load_task", lambda name: countdown_task.Task)
    said = refusal(make_task, "mine", vars(countdown_task.Task()))
    assert "its class Task has no method extreme_problems" in said and "lab.countdown.Task" in said
    monkeypatch.setattr(countdown_task.Task, "training_problems", None)
    assert "no method training_problems" in refusal(make_task, "mine", vars(countdown_task.Task()))


def test_a_reward_alone_has_the_problems_of_countdown():
    """With the model's recipe for them, and the functions of its file before those of Countdown."""
    tasks = []
    for name in ("examples.own_reward", "countdown_task"):
        s = make_settings({"task": name, "max_number": 9})
        tasks.append(make_task(s.task, s.keywords))
    task, countdown = tasks
    problem, answer = countdown.training_problems(0, 1, 2)[0], "</think>\n<answer> {}</answer>"
    assert task.training_problems(0, 1, 2)[0] == problem and max(problem.numbers) <= 9
    assert task.prompt_for(problem) == countdown.prompt_for(problem)
    assert task.label(["<answer>", " 3"]) == countdown.label(["<answer>", " 3"])
    rewards = [task.score(problem, answer.format(text))["reward"] for text in ("8 / 4", "8 * 4")]
    assert rewards == [1, 0] and task.rewarded == "reward of examples.own_reward"

    module = ModuleType("my_task")
    module.reward, module.show = len, lambda problem: "mine"
    assert countdown_with_reward(module, load_task("countdown_task"))().show(problem) == "mine"


GOOD = {"reward": 1.1, "format": 1, "answer": True, "reasoning": 0}


@pytest.mark.parametrize("name, given, wrong", [
    ("reward", (PROMPTS[0], "a"), [None, "1.0", b"1", (1, 2), {"reward": 1}, math.nan, 1e39,
                                   10 ** 400]),
    ("score", ("3 5", "8"), [None, "1.0", (1, 2), [1], {**GOOD, "reward": "1"},
                             {**GOOD, "reward": b"1"}, {**GOOD, "reward": 10 ** 400},
                             {**GOOD, "reward": math.nan}, {**GOOD, "answer": 0.5},
                             {**GOOD, "reward": 1.1e12}, {**GOOD, "reward": -1e39},
                             {"reward": 1, "format": 1, "answer": 1}]),
    ("show", ("3 5",), [None, 5]), ("prompt_for", ("3 5",), [None, 5]),
    ("label", (["a", "b"],), [None, 5, [[0, 0]], [0, 0], ([0], [0, 0]), ([0, 9], [0, 0]),
                                ([0, 0], [0, -1])]),
    ("training_problems", (0, 1, 8), [None, "1.0", [1, 2]]),
    ("held_out_problems", (8,), [None, []])])
def test_what_a_method_of_a_task_returns_is_told_with_its_name_and_place(name, given, wrong):
    """Also a `return` that was forgotten."""
    for found in wrong:
        def method(*given):
            return found

        method.__name__ = name
        if name == "reward":
            said = refusal(task_of(PROMPTS, method).score, *given)
        else:
            said = refusal(getattr(CheckedTask(SimpleNamespace(**{name: method})), name), *given)
        assert re.match(rf"{name} \(lab/tests/harness/test_tasks.py:\d+\) should return ", said)
        assert f"It returned {found!r:.99}" in said
        assert ("a `return` is missing" in said) == (found is None)


def test_what_a_task_returns_rightly_is_handed_on():
    """The square of the largest reward is a float32."""
    labels, score = ([0, 0], [0, 0]), {**GOOD, "reward": -1e12}
    task = CheckedTask(SimpleNamespace(score=lambda *_: score, label=lambda _: labels))
    assert task.label(["a", "b"]) is labels and task.score("3 5", "8") is score


def guesses(reward):
    return task_of(PROMPTS, reward, reply=lambda problem, turns: None)


def test_a_list_of_rewards_is_what_the_turns_are_paid():
    """The reward is the sum. Success is a sum of 1 or more, or that of one turn: what earlier turns
    cost takes no success away."""
    task = guesses(lambda problem, turns: [-0.5, *[0.75 * len(turn) for turn in turns[1:]]])
    assert task.score("", ["a", "b"]) == {"reward": 0.25, "of_turns": [-0.5, 0.75], "format": 0.0,
                                          "answer": 0.0, "reasoning": 0.0}
    assert task.score("", ["a", "bb"])["answer"] == task.score("", ["a", "b", "c"])["answer"] == 1
    assert "of_turns" not in guesses(lambda problem, turns: 1).score("", ["a"])


@pytest.mark.parametrize("reward, turns, said", [
    (lambda problem, turns: [1.0], ["a", "b"], "return a reward for each turn of ['a', 'b']"),
    (lambda problem, turns: [1e12] * len(turns), ["a", "b"], "rewards whose sum is at most 1e+12"),
    (lambda problem, turns: ["1"], ["a"], "or a list with one for each turn. It returned ['1']"),
    (lambda problem, turns: [math.nan], ["a"], "It returned [nan]"),
    (lambda problem, text: [1.0], "a", "should return a number from")])
def test_rewards_of_turns_that_fit_no_turns_are_refused(reward, turns, said):
    assert said in refusal(guesses(reward).score, "", turns)


def test_a_task_pays_all_answers_in_one_way():
    task = guesses(lambda problem, turns: 1 if len(turns) > 1 else [1])
    task.score("", ["a"])
    assert "is a list for some answers, and a number for others" in refusal(
        task.score, "", ["a", "b"])


def test_a_class_may_pay_turns_and_one_turn_alone_may_not():
    class Task:
        def score(self, problem, turns):
            return {"reward": [0.5] * len(turns), "format": 0, "answer": 0, "reasoning": 0}

    assert CheckedTask(Task()).score("", ["a", "b"])["reward"] == 1.0
    assert "because no environment replies" in refusal(CheckedTask(Task()).score, "", "ab")


FINE = {"reward": 1.5, "format": 0.5, "answer": 1.0, "reasoning": 0.0}
TOKENIZER = make_tokenizer()


def scored(score=FINE, label=lambda pieces: ([0] * len(pieces), [6] * len(pieces))):
    """Two answers to one question, of three tokens and of one."""
    batch = hand_made([[True, True, True], [True, False, False]],
                      ids=torch.tensor([[5, 6, 7], [8, 0, 0]]))
    task = SimpleNamespace(score=lambda problem, text: score, label=label)
    return score_answers(batch, TOKENIZER, CheckedTask(task))


@pytest.mark.parametrize("answer", [1, True, np.float32(1), np.int64(1)])
def test_whole_numbers_and_yes_or_no_are_numbers_and_a_task_may_give_more_parts(answer):
    batch = scored({**FINE, "answer": answer, "reward": 3, "format": False, "elegance": 0.25})
    assert {values.dtype for values in batch.scores.values()} == {torch.float32}
    assert batch.scores["answer"].tolist() == [1, 1] and batch.reward.mean() == 3
    assert batch.scores["elegance"].tolist() == [0.25, 0.25]


def test_labels_stand_where_their_tokens_do():
    """And may be tuples."""
    batch = scored(label=lambda pieces: ((2,) * len(pieces), list(range(len(pieces)))))
    assert batch.section.tolist() == [[2, 2, 2], [2, 0, 0]]
    assert batch.kind.tolist() == [[0, 1, 2], [0, 0, 0]]
