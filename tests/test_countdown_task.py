"""Problems, reward and labels. Nothing a model writes is executed, and every string gets a
score."""
import ast
import itertools
import json
import random
from fractions import Fraction

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import countdown_task as task
from countdown_task import Problem, Task, annotate, held_out, score
from engine.labels import ANSWER, OTHER, THINK
from engine.errors import UserError
from tools.given_problems import parse_problems
from engine.tokens import encode_prompt, load_tokenizer, token_bytes

TINY = dict(prompt="short", numbers="3", min_number=1, max_number=15, max_target=99, max_result=150)
WIDE = dict(numbers="3,4", min_number=1, max_number=99, max_target=99, max_result=10_000)
FOUR = dict(numbers="4", min_number=2, max_number=9, max_target=30, max_result=150)
GOOD = " 3 * 5 = 15, 15 + 7 = 22 yes</think>\n<answer> ( 3 * 5 ) + 7 </answer>"


def answer(expression, numbers, target):
    return score(f"x</think>\n<answer>{expression}</answer>", numbers, target)["answer"]


def test_the_worked_example():
    assert score(GOOD, [3, 5, 7],
                 22) == {"reward": 1.1, "format": 1.0, "answer": 1.0, "reasoning": 1.0}


@pytest.mark.parametrize(
    "response, form, right",
    [
        (GOOD, 1.0, 1),
        ("<think>" + GOOD, 1.0, 1),
        (GOOD + "<|im_end|>", 1.0, 1),
        (GOOD + "<|endoftext|>", 1.0, 1),
        (GOOD + "\n", 0.6, 1),
        (GOOD + " so there", 0.6, 1),
        (GOOD + "<|im_end|><|im_end|>", 0.6, 1),
        (GOOD.replace("</think>\n", "</think>"), 0.6, 1),
        (GOOD.replace("</think>\n", "</think>\n\n"), 0.6, 1),
        ("hm</think>", 0.1, 0),
        ("<answer>3*5+7</answer>", 0.5, 1),
        ("no tags", 0.0, 0),
        ("", 0.0, 0),
        ("hm</think>\n<answer>3*5+7", 0.1, 0),  # never closed
        ("hm</think>\n<answer>1</answer><answer>3*5+7</answer>", 0.6,
         0),  # the first section counts
        ("hm</think>\n<answer>3*5+7</answer><answer>1</answer>", 0.6, 1),
        ("</answer><answer>3*5+7</answer></think>", 0.6, 1),
    ])
def test_format_and_answer(response, form, right):
    result = score(response, [3, 5, 7], 22)
    assert (result["format"], result["answer"]) == (form, right)
    assert result["reward"] == pytest.approx(0.1 * form + right)


@pytest.mark.parametrize(
    "expression, numbers, target, right",
    [
        ("(1+2)*3", [1, 2, 3], 9, 1),
        ("3*(2+1)", [1, 2, 3], 9, 1),
        ("1+2*3", [1, 2, 3], 7, 1),
        ("8-3-2", [8, 3, 2], 3, 1),
        ("8/4/2", [8, 4, 2], 1, 1),
        ("2/3*6", [2, 3, 6], 4, 1),
        ("8/(3-8/3)", [8, 3, 8, 3], 24, 1),  # exact thirds
        ("-3+5", [3, 5], 2, 1),
        ("5--3", [3, 5], 8, 1),
        ("-(3-5)", [3, 5], 2, 1),
        ("3*-5+20", [3, 5, 20], 5, 1),
        (" \t3\n+ 5\r", [3, 5], 8, 1),
        ("3+5", [3, 5, 2], 8, 0),
        ("3+5+5", [3, 5], 13, 0),
        ("3+5", [3, 6], 8, 0),
        ("35", [3, 5], 35, 0),  # each once
        ("2**3", [2, 3], 8, 0),
        ("7//2", [7, 2], 3, 0),
        ("9**9**9", [9, 9, 9], 1, 0),
        ("3 5", [3, 5], 8, 0),
        ("3+5=8", [3, 5], 8, 0),
        ("3+5;", [3, 5], 8, 0),
        ("3+", [3], 3, 0),
        ("(3+5", [3, 5], 8, 0),
        ("3+5)", [3, 5], 8, 0),
        ("()", [], 0, 0),
        ("", [], 0, 0),
        ("*3", [3], 3, 0),
        ("+3", [3], 3, 0),
        ("3(5)", [3, 5], 15, 0),
        ("3/(5-5)", [3, 5, 5], 0, 0),
        ("3.0+5", [3, 5], 8, 0),
        ("3e0+5", [3, 5], 8, 0),
        ("0x3+5", [3, 5], 8, 0),
        ("3_0", [30], 30, 0),
        ("int(3)+5", [3, 5], 8, 0),
        ("__import__('os')", [3], 3, 0),
        ("a+3", [3], 3, 0),
        ("\u0663+5", [3, 5], 8, 0),
        ("\uff13+5", [3, 5], 8, 0),
        ("3\u00d75", [3, 5], 15, 0),
        ("3\u00a0+5", [3, 5], 8, 0),
        ("3\x00+5", [3, 5], 8, 0),
        ("\ud800", [3], 3, 0),
        ("(" * 5000 + "3" + ")" * 5000, [3], 3, 0),
        ("-" * 5000 + "3", [3], 3, 0),
        ("9" * 10_000, [9], 9, 0),
        ("1+" * 5000 + "1", [1] * 5001, 5001, 0),
    ])
def test_the_expression_reader(expression, numbers, target, right):
    assert answer(expression, numbers, target) == right


def tree_value(node) -> Fraction:
    """An independent reader: Python's own grammar, values in fractions."""
    if isinstance(node, ast.UnaryOp):
        return -tree_value(node.operand)
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    left, right = tree_value(node.left), tree_value(node.right)
    if isinstance(node.op, ast.Div):
        return left / right
    return {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}.get(type(node.op))


def random_expression(rng, numbers):
    if len(numbers) == 1:
        return rng.choice(["", "", "-"]) + str(numbers[0])
    cut = rng.randrange(1, len(numbers))
    text = random_expression(rng, numbers[:cut]) + rng.choice("+-*/") + random_expression(
        rng, numbers[cut:])
    return rng.choice([text, f"({text})", f" ( {text} ) "])


def test_the_reader_agrees_with_pythons_grammar():
    rng, compared = random.Random(0), 0
    for _ in range(2000):
        numbers = [rng.randint(1, 9) for _ in range(rng.randint(1, 4))]
        text = random_expression(rng, numbers)
        try:
            value = tree_value(ast.parse(text.strip(), mode="eval").body)
        except ZeroDivisionError:
            continue
        compared += 1
        assert answer(text, numbers, value) == 1 and answer(text, numbers, value + 1) == 0
    assert compared > 1500


def test_any_string_gets_a_score():
    rng = random.Random(1)
    parts = [
        "<think>", "</think>", "\n", "<answer>", "</answer>", "<|im_end|>", "3", "+", "(", ")",
        " 3 * 5 = 15", "\ud83d", "<", ">", "é", "\x00", "9" * 300, "-" * 300
    ]
    for _ in range(3000):
        text = "".join(rng.choices(parts, k=rng.randint(0, 12)))
        result = score(text, [3, 5], 15)
        assert 0 <= result["format"] <= 1
        assert result["answer"] in (0, 1)
        assert 0 <= result["reasoning"] <= 1
    for huge in ("<answer>" * 100_000, "3 + 3 = " * 100_000,
                 "<think>" * 50_000 + "</answer>" * 50_000, " " * 1_000_000):
        score(huge, [3, 5], 15)


@pytest.mark.parametrize("think, share", [("3 * 5 = 15, 15 + 7 = 22", 1),
                                          ("3 * 5 = 16, 16 + 7 = 23", 0.5), ("3 * 4 = 12", 0),
                                          ("3 + 3 = 6", 0), ("7 - 3 = 4 and 4 + 4 = 8", 1),
                                          ("15 / 5 = 3", 0), ("3 * 5 = 15 + 7 = 22", 1),
                                          ("3 - 5 = -2", 1), ("5 / 0 = 5", 0), ("nothing", 0),
                                          ("7/3=2", 0)])
def test_reasoning_is_the_share_of_right_steps_with_available_numbers(think, share):
    assert score(f"{think}</think>\n<answer>1</answer>", [3, 5, 7], 22)["reasoning"] == share


HALF_RIGHT = " 3 * 5 = 15, 15 + 7 = 23 yes</think>\n<answer> ( 3 * 5 ) + 7 </answer>"
WRONG = " 3 * 5 = 15, 15 - 7 = 8</think>\n<answer> ( 3 * 5 ) - 7 </answer>"


@pytest.mark.parametrize("flags, words, half_right, wrong", [
    ({}, "answer + 0.1 format", 1.1, 0.1),
    ({"reward_form": "right"}, "answer", 1, 0),
    ({"reward_form": "signed"}, "2 answer - 1", 1, -1),
    ({"reasoning_weight": 0.5}, "answer + 0.1 format + 0.5 reasoning", 1.35, 0.6),
    ({"reward_form": "signed", "reasoning_weight": 2.0}, "2 answer - 1 + 2 reasoning", 2, 1)])
def test_forms_of_the_reward(flags, words, half_right, wrong):
    """Half of one answer's steps are right, all of the other's; only the reward is another."""
    task, problem = Task(**flags), Problem((3, 5, 7), 22)
    assert task.reward == words
    for text, reward, answer, reasoning in ((HALF_RIGHT, half_right, 1, 0.5), (WRONG, wrong, 0, 1)):
        expected = {"reward": reward, "format": 1, "answer": answer, "reasoning": reasoning}
        assert task.score(problem, text) == pytest.approx(expected)


@pytest.mark.parametrize("pieces, expected", [
    ([" 3", " *", " 5", " =", " 1", "5", ",", "</think>"], [5]),
    (["<think>", "3*5=1", "5,15+", "7=", "2", "2</think>"], [2, 5]),
    (["3 * 5 = 15 + 7 = 22", "</think>"], [0, 0]),
    (["3 * 5 = 16, 3 + 5 = 8", "</think>"], [0]),
    (["é", "3 * 5", "", " = 15", "", "</think>"], [3]),
    (["3 * 5 = 15"], []), ([], [])])
def test_right_steps_end_with_these_tokens(pieces, expected):
    pieces = [piece.encode() for piece in pieces]
    assert Task().right_steps(Problem((3, 5, 7), 22), pieces) == expected


def test_half_a_character_moves_no_step():
    pieces = [b"\xc3", b"\xa93 * ", b"5 = 15", b"\xe2</think>"]
    assert Task().right_steps(Problem((3, 5, 7), 22), pieces) == [2]


# problems

def brute_force(numbers, target):
    """Whether some order, operators and grouping give the target, in exact fractions."""
    if len(numbers) == 1:
        return numbers[0] == target
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        a, b = numbers[i], numbers[j]
        if any(
                brute_force([*rest, c], target)
                for c in (a + b, a - b, a * b, *([a / b] if b else []))):
            return True
    return False


@pytest.mark.parametrize("ranges", [TINY, WIDE, FOUR])
def test_every_problem_has_a_solution_and_keeps_to_its_ranges(ranges):
    made = Task(**ranges)
    for problem in made.training_problems(0, 1, 12):
        assert len(problem.numbers) in made.counts and 1 <= problem.target <= made.max_target
        assert all(made.min_number <= n <= made.max_number for n in problem.numbers)
        assert brute_force([Fraction(n) for n in problem.numbers], problem.target)


def test_the_seed_changes_the_problems_and_the_order_of_numbers_does_not_change_the_split():
    problems = Task(**TINY)
    assert problems.training_problems(0, 1, 8) == problems.training_problems(0, 1, 8)
    assert problems.training_problems(0, 1, 8) != problems.training_problems(
        1, 1, 8) != problems.training_problems(1, 2, 8)
    for target in range(1, 21):
        assert len({
            held_out(Problem(numbers, target)) for numbers in itertools.permutations((3, 5, 7))
        }) == 1


def test_nothing_evaluated_was_ever_trained_on():
    problems = Task(**TINY)
    trained = {p for step in range(50) for p in problems.training_problems(0, step, 16)}
    evaluated = problems.held_out_problems(300)
    assert not any(map(held_out, trained)) and all(map(held_out, evaluated))
    assert len({(tuple(sorted(p.numbers)), p.target) for p in evaluated}) == 300
    assert evaluated == Task(**TINY).held_out_problems(300)


def test_problems_from_a_file_are_split_by_the_same_rule(tmp_path):
    made = Task(**WIDE).training_problems(0, 0, 40)
    made += Task(**TINY).held_out_problems(10)
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(json.dumps({"nums": p.numbers, "target": p.target})
                              for p in made) + "\n\n")
    problems = Task(data=str(path))
    assert set(problems.training_problems(0, 1, 2000)) == {p for p in made if not held_out(p)}
    assert set(problems.held_out_problems(500)) == {p for p in made if held_out(p)}


@pytest.mark.parametrize("line", [
    "{}", '{"nums": [], "target": 3}', '{"nums": [1, "2"], "target": 3}', "[1]", "no json",
    '{"nums": [1, 2], "target": 1.5}', '{"nums": [1, true], "target": 2}'
])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"nums": [1, 2], "target": 3}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        Task(data=str(path))


@pytest.mark.parametrize("line", [
    '{"nums": [3, 5, 7], "target": 1' + "0" * 5000 + "}", '{"nums": [1000000000], "target": 3}',
    '{"nums": [1' + ", 1" * 30 + '], "target": 3}', "[" * 9000, "7" * 20_000, " " * 9990 + "[[]]"
])
def test_a_line_beyond_reason_is_named_without_being_repeated(tmp_path, line):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"nums": [1, 2], "target": 3}\n' + line + "\n")
    with pytest.raises(UserError, match="line 2: expected .* whole numbers from 1 to") as error:
        Task(data=str(path))
    assert len(str(error.value)) < 400


def test_a_line_without_an_end_is_not_read_to_its_end():
    read = []

    class Endless:
        def readline(self, size):
            read.append(size)
            return "[" * size

    with pytest.raises(UserError, match="endless, line 1: expected"):
        parse_problems(Endless(), "endless")
    assert len(read) == 1 and 0 < read[0] <= 100_000


@pytest.mark.parametrize("name, words", [
    ("/dev/zero", "it is not a file"), ("/", "it is not a file"),
    ("nowhere.jsonl", "there is no such file"), ("x" * 5000, "there is no such file")])
def test_data_that_is_no_file_is_refused(name, words):
    with pytest.raises(UserError, match=words):
        Task(data=name)


def test_a_file_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "problems.jsonl"
    with open(path, "wb") as file:
        file.truncate(2 ** 40)  # takes no room
    monkeypatch.setattr("tools.given_problems.parse_problems", lambda *_: pytest.fail("it was read"))
    with pytest.raises(UserError, match="is larger than 1,073,741,824 bytes"):
        Task(data=str(path))


def test_a_held_out_problem_counts_once_in_whatever_order_its_numbers_stand(tmp_path):
    first = Task(**TINY).held_out_problems(4)
    trained = Task(**TINY).training_problems(0, 0, 4)
    lines = []
    for problem in (*first, *trained):
        for numbers in itertools.permutations(problem.numbers):
            lines.append(json.dumps({"nums": numbers, "target": problem.target}))
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(lines))
    task = Task(data=str(path))
    assert sorted(task.to_test, key=first.index) == first
    assert len(task.to_train) == len(lines) - 4 * 6  # those count as often as they are there


def test_few_problems_are_not_looked_for_without_end(monkeypatch):
    draws = []
    task = Task(prompt="short", numbers="3", max_number=2)
    make_problem = task.make_problem
    monkeypatch.setattr(task, "make_problem", lambda *more: draws.append(1) or make_problem(*more))
    monkeypatch.setattr("countdown_task.MAX_IN_VAIN", 200)
    assert len(task.held_out_problems(2000)) == 3
    assert len(draws) < 1000


# tokens

def cut(text, *lengths):
    """The bytes of the text in pieces of these lengths, then whatever is left."""
    data, pieces = text.encode(), []
    for length in lengths:
        pieces.append(data[:length])
        data = data[length:]
    return pieces + ([data] if data else [])


def labels(pieces):
    section, kind = annotate(pieces)
    return [(task.SECTIONS[s], task.KINDS[k]) for s, k in zip(section, kind)]


def test_sections_and_kinds_of_whole_tags():
    pieces = [
        b" try", b" 3", b" *", b" 5", b" =", b" 15", b"</think>", b"\n", b"<answer>", b" (", b" 3",
        b"</answer>", b"<|im_end|>"
    ]
    assert labels(pieces) == [("think", "word"), ("think", "number"), ("think", "operator"),
                              ("think", "number"), ("think", "bracket"), ("think", "number"),
                              ("other", "tag"), ("other", "space"), ("other", "tag"),
                              ("answer", "bracket"), ("answer", "number"), ("other", "tag"),
                              ("other", "end")]


def test_tags_cut_into_pieces_and_glued_to_their_neighbours():
    """As Qwen's tokenizer does: "</", "think", ">\\n", "<", "answer", ">", ..., "</", "answer",
    ">"."""
    pieces = [
        b"so", b"</", b"think", b">\n", b"<", b"answer", b">", b"3", b"+", b"5", b"</", b"answer",
        b">", b"<|im_end|>"
    ]
    assert [s for s, _ in labels(pieces)
            ] == ["think"] + ["other"] * 6 + ["answer"] * 3 + ["other"] * 4
    assert [k for _, k in labels(pieces)
            ] == ["word"] + ["tag"] * 6 + ["number", "operator", "number"] + ["tag"] * 3 + ["end"]


def test_the_answer_section_neither_starts_nor_ends_a_token_early():
    """The token that closes the opening tag and the one that opens the closing tag are outside."""
    pieces = [b"x</think>\n<answer", b">3", b"+", b"5<", b"/answer>"]
    assert labels(pieces) == [("other", "tag"), ("other", "tag"), ("answer", "operator"),
                              ("other", "tag"), ("other", "tag")]


def test_answers_without_their_tags():
    assert [s for s, _ in labels([b"a", b"b"])] == ["think", "think"]
    assert [s for s, _ in labels([b"a", b"<answer>", b"3"])] == ["think", "other", "answer"]
    assert [s for s, _ in labels([b"<answer>", b"3", b"</answer>", b" so", b"<answer>", b"4"])] == \
        ["other", "answer", "other", "other", "other", "other"]  # only the first answer is one
    assert [s for s, _ in labels([b"<think>", b"a", b"</think>", b"b"])] == [
        "other", "think", "other", "other"
    ]
    assert annotate([]) == ([], [])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_spread_over_tokens(size):
    text = "né 3×5</think>\n<answer>3</answer>"
    pieces = cut(text, *[size] * 60)
    assert b"".join(pieces).decode() == text
    section, _ = annotate(pieces)
    inside = b"".join(p for p, s in zip(pieces, section) if s == THINK)
    assert "né 3×5".encode().startswith(inside) and len(inside) > len("né 3×5".encode()) - size
    assert len(section) == len(pieces) and set(section) <= {OTHER, THINK, ANSWER}


def byte_level_tokenizer(merges):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *("".join(m) for m in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def test_the_bytes_of_a_byte_level_tokenizer():
    tokenizer = byte_level_tokenizer([("<", "/"), (">", "Ċ"), ("Ã", "©")])
    text = "né \U0001f600 a</think>\n<answer>3</answer><|im_end|>"
    ids = tokenizer.encode(text).ids
    pieces = token_bytes(tokenizer, ids)
    assert b"".join(pieces).decode() == text and b">\n" in pieces and b"<|im_end|>" in pieces
    assert labels(pieces)[-1] == ("other", "end")
    assert b"".join(token_bytes(tokenizer, [10_000])).decode() == "\ufffd"  # beyond the vocabulary


def test_prompts_end_with_an_opened_think_and_are_chatml(learner):
    tiny, real = load_tokenizer(learner), byte_level_tokenizer([])
    problem = Problem((3, 5, 7), 22)
    for tokenizer, form in ((tiny, "short"), (real, "original"), (real, "full")):
        text = b"".join(
            token_bytes(tokenizer,
                        encode_prompt(tokenizer,
                                      Task(prompt=form).prompt_for(problem), ""))).decode()
        assert text.endswith("<think>")
        assert text.startswith("<|im_start|>")
        assert "<|im_start|>assistant\n" in text
        assert "22" in text
        assert tokenizer.token_to_id("<|im_end|>") in encode_prompt(
            tokenizer,
            Task(prompt=form).prompt_for(problem), "")
    for word in ("3, 5, 7", "+", "-", "*", "/", "exactly once", "<answer>", "</answer>",
                 "</think>"):
        assert word in text


def test_the_original_prompt_is_the_one_of_the_earlier_experiment():
    """Qwen2.5's chat form of its two messages, and the numbers as numpy prints an array."""
    text = Task(prompt="original").prompt_for(Problem((3, 44, 19), 60))
    system, user, answer = text.split("<|im_end|>\n")
    assert system == (
        "<|im_start|>system\nYou are a helpful assistant. You first think about the reasoning "
        "process in your mind and then provide the user with the answer.")
    assert user.startswith("<|im_start|>user\nUsing the numbers [ 3 44 19], create an equation "
                           "that equals 60. You can use basic arithmetic operations (+, -, *, /) "
                           "and each number can only be used once. Show your work in <think> "
                           "</think> tags. And return")
    assert answer == "<|im_start|>assistant\nLet me solve this step by step.\n<think>"
    for numbers in ((3, 5, 7), (3, 44, 119, 5)):
        assert f"numbers {np.array(numbers)}, create" in Task(prompt="original").prompt_for(
            Problem(numbers, 22))


def test_numbers_the_tokenizer_cannot_spell_are_refused(learner):
    with pytest.raises(ValueError, match="cannot spell"):
        encode_prompt(load_tokenizer(learner),
                      Task(prompt="short").prompt_for(Problem((3, 5, 700), 22)), "3 5 700")


def test_folders_without_a_fitting_tokenizer_are_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer"):
        load_tokenizer(tmp_path)
    byte_level_tokenizer([]).save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "decoder": None}))
    with pytest.raises(ValueError, match="byte-level"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({**content, "added_tokens": []}))
    with pytest.raises(ValueError, match="im_start"):
        load_tokenizer(tmp_path)
