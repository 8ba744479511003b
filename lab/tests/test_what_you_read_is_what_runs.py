"""What you read is what runs. Each function of the book is changed in turn, and every kind of run
has to give other numbers than with the unchanged function: the book's own runs, and those of the
lab, which adds, and replaces nothing.

The changes are made by rule (edited.py), for whatever functions the files have. That a run ends
with an error counts, because it has called what was changed. What no run of the book notices, none
of the lab need notice.
"""
import ast
import os

import pytest
from conftest import ROOT
from edited import bool_arguments, definitions, reached
from forked_runs import Forks, write_brief_model

FILES = ("countdown_task.py", "qwen2_model.py", "grpo.py", "mitigations.py", "train.py")
TREES = {file: ast.parse((ROOT / file).read_text("utf-8")) for file in FILES}
FUNCTIONS = {f"{file}: {name}": node for file in FILES for name, node in definitions(TREES[file])}
CHANGES = [(label, "") for label in FUNCTIONS] + [
    (label, argument) for label, node in FUNCTIONS.items() for argument in bool_arguments(node)]

FLAGS = """--threads 1 --steps 1 --questions 2 --answers 6 --max_new_tokens 24 --change_every 1
    --learning_rate 0.01""".split()
AGAIN = ["--epochs", "2", "--kl", "0.05"]
BOOK = {"book": [], "book, epochs and KL": AGAIN}
LAB = {"temperature": ["--temperature", "0.9"], "LoRA": ["--lora", "1"],
       "bfloat16": ["--dtype", "bfloat16"], "epochs and KL": AGAIN,
       "own reward": ["--task", "examples.own_reward"],
       "turns": ["--task", "examples.guess", "--model", str(ROOT / "models/guesser")]}
BOOK_OF = {kind: "book, epochs and KL" if flags == AGAIN else "book" for kind, flags in LAB.items()}

CHANGES_NOTHING = {  # what no run notices, and why
    **{f"{file}: show": f"is shown by python {file}" for file in FILES[:-1]},
    "train.py: main": "reads the command line, and calls `train`",
    "grpo.py: advantage": "returns the function that it is given",
    "grpo.py: add_choice": "returns the function that it is given",
    "mitigations.py: mitigation": "returns the function that it is given",
    "grpo.py: place_of": "words of an error",
    "qwen2_model.py: differing_tensors": "words of an error",
    "grpo.py: why_skipped": "words of a step without an update",
    "qwen2_model.py: Qwen2.forward": "runs use the decoder and `log_probs`, which it joins"}
LOOPS = dict.fromkeys(  # the lab has its own
    ("train.py: train", "train.py: evaluate", "train.py: evaluate.ask"))
ALL_OF_LAB = dict.fromkeys(LAB, ["everything"])
STAYS = {  # what a change leaves as it is in runs of the lab, on purpose
    # a batch of the lab has a column of this name: what stands in answers of several turns
    "grpo.py: Rollouts.written": ALL_OF_LAB,
    # its additions are written as parts of the matrices, one matrix after the other
    "qwen2_model.py: save_model": {"LoRA": ["everything"]},
    # on record is the gap at temperature 1, by `sampler_gap`
    "grpo.py: update": {"temperature": ["metrics 0 sampler_gap"]}}


# -------------------------------------------------------------------- which functions a run can use
def choices(axis):
    """The names of the functions under @advantage or @mitigation, by file."""
    return {node.name: file for file in FILES for _, node in definitions(TREES[file])
            if axis in [ast.unparse(mark) for mark in node.decorator_list]}


def flags_for(label):
    """The flags that choose a method which uses this function, if the usual one does not."""
    file, name = label.split(": ")
    for axis, usual in (("advantage", "grpo"), ("mitigation", "none")):
        using = [choice for choice, place in choices(axis).items()
                 if place == file and name in reached(TREES[file], choice)]
        if using and usual not in using:
            return [f"--{axis}", using[0]]
    return []


def of_score_alone():
    """The functions that nothing but the reward of Countdown uses."""
    tree = TREES["countdown_task.py"]
    others = {name[5:] for name, _ in definitions(tree) if name.startswith("Task.")} - {"score"}
    return reached(tree, "score") - reached(tree, *others)


def counts(label, kind):
    """Whether a run of this kind has to notice a change of the function."""
    file, name = label.split(": ")
    if kind in BOOK:
        return True
    if label in CHANGES_NOTHING | LOOPS or (file == "countdown_task.py" and kind == "turns"):
        return False
    return not (kind == "own reward" and name.split(".")[-1] in of_score_alone())


class Runs:
    """Runs with a function changed beside runs with all as it is, which are made once."""

    def __init__(self, model):
        self.forks = Forks()
        self.usual: dict[tuple[str, ...], dict[str, object]] = {}  # by kind and flags
        self.of_model = ["--model", str(model), "--numbers", "2", "--max_number", "9"]

    def outcomes(self, kinds, more, edit=None):
        """{kind: its numbers}"""
        return self.forks.ask(edit, [self.asked(kind, more) for kind in kinds])

    def asked(self, kind, more):
        of_task = [] if kind == "turns" else self.of_model
        return kind, kind in BOOK, [*FLAGS, *of_task, *(BOOK | LAB)[kind], *more]

    def pairs(self, kinds, label, argument):
        """{kind: its numbers as usual, and with this change}. Where they are equal, the pair is
        made again with an evaluation, which takes longer."""
        found, left = {}, [*kinds]
        for evaluation in ("--eval_every 0", "--eval_every 1 --eval_tasks 3"):
            more = (*flags_for(label), *evaluation.split())
            new = [kind for kind in left if (kind, *more) not in self.usual]
            for kind, usual in self.outcomes(new, more).items():
                assert "ended" not in usual, (kind, usual)
                self.usual[kind, *more] = usual
            changed = self.outcomes(left, more, (*label.split(": "), argument))
            found |= {kind: (self.usual[kind, *more], changed[kind]) for kind in left}
            left = [kind for kind in kinds if found[kind][0] == found[kind][1]]
        return found

    def noticed(self, label, argument, kinds):
        """Which runs of the book notice a change, and {kind: what stays} of those of the lab that
        do not as well."""
        asked = [kind for kind in kinds if counts(label, kind)]
        found = self.pairs(asked, label, argument)
        book = [kind for kind in asked if kind in BOOK and found[kind][0] != found[kind][1]]
        missed = {kind: what_stays(found[kind], found[BOOK_OF[kind]]) for kind in asked
                  if BOOK_OF.get(kind) in book}
        return book, {kind: stays for kind, stays in missed.items() if stays}


def what_stays(of_lab, of_book):
    """Everything, if the lab's run gives the same numbers. Otherwise, if the change leaves the
    tokens as they are in both runs, each number that differs in the book's by a hundredth or more,
    and not at all in the lab's."""
    usual, changed = of_lab
    if usual == changed:
        return ["everything"]
    for name in ("step_000001 token_id", "step_000001 prompt_ids"):
        if any(before[name] != after.get(name) for before, after in (of_lab, of_book)):
            return []
    before, after = of_book
    moved = [name for name, value in before.items()
             if isinstance(value, float) and isinstance(after.get(name), float)
             and abs(after[name] - value) > 0.01 * abs(value)
             and not name.startswith("evaluations")]
    return [name for name in moved if usual.get(name) and usual[name] == changed.get(name)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = Runs(write_brief_model(tmp_path_factory.mktemp("brief")))
    yield runs
    runs.forks.close()


KINDS, FEW = [*BOOK, *LAB], ["book", "LoRA", "turns"]
TRIED = [change for change in CHANGES if change[0] not in CHANGES_NOTHING]
SOME = TRIED[::len(TRIED) // 8 + 1]  # at most eight
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")


def assert_noticed(runs, label, argument, kinds):
    book, missed = runs.noticed(label, argument, kinds)
    assert bool(book) != (label in CHANGES_NOTHING), f"runs of the book that notice: {book}"
    known = STAYS.get(label, {})
    assert missed == {kind: known[kind] for kind in known if kind in kinds}


@pytest.mark.parametrize("label, argument", SOME)
def test_some_changes_are_noticed(runs, label, argument):
    assert_noticed(runs, label, argument, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("label, argument", CHANGES)
def test_every_change_is_noticed_by_every_kind_of_run(runs, label, argument):
    assert_noticed(runs, label, argument, KINDS)


def test_no_two_functions_have_one_name_and_every_listed_one_is_there():
    names = [f"{file}: {name}" for file in FILES for name, _ in definitions(TREES[file])]
    assert len({*names}) == len(names)
    assert {*CHANGES_NOTHING, *STAYS, *LOOPS} <= {*names}
