"""Each page of the course: what it tells a reader to paste or type prints what stands below it, and
the mistakes of page 8 show in a step what the page says."""
import ast
import json
import re
import subprocess
import textwrap
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import ROOT, copy_of_the_book, project_files
from docs import pictures
from lab.probes.claim_rules import success_by_seed
from lab.tools import diagnose
from lab_runs import block, copy_project, printed_by_each, program
from runs import arrays, lines, typed
from stored import stored_gain

PAGES = {path.name: path.read_text(encoding="utf-8")
         for path in project_files("docs/course/*.md")}
MISTAKES = "docs/course/8_what_does_each_mistake_look_like.md"
NUMBER = r"[+-]?\d+(?:\.\d+)?"
FENCED = re.compile(r"^```(\w*)\n(.*?)^```\n", flags=re.S | re.M)


def shown(kind: str) -> dict[str, tuple[str, str]]:
    """By page and number: a block of this kind, and the block directly below it, which has what it
    prints."""
    found = {}
    for name, page in PAGES.items():
        fenced = [*FENCED.finditer(page)]
        for number, (code, below) in enumerate(zip(fenced, fenced[1:])):
            is_next = not page[code.end():below.start()].strip()
            if code[1] == kind and not below[1] and is_next:
                found[f"{name} {number}"] = code[2], below[2]
    return found


PASTED, TYPED = shown("python"), shown("bash")
assert len(PASTED) >= 6 and TYPED


def assert_same(printed: str, page: str) -> None:
    """The lines of the page are printed in this order. Where the page has a line of three dots,
    anything may stand. A number may differ by one in its last digit, as it does on another CPU."""
    left = [line.rstrip() for line in printed.splitlines()]
    dots = False
    for line in page.splitlines():
        if line.strip() == "...":
            dots = True
            continue
        while dots and left and not same_line(left[0], line):
            del left[0]
        assert left and same_line(left[0], line), f"{line!r} is not in\n{printed}"
        del left[0]
        dots = False


def same_line(printed: str, page: str) -> bool:
    if re.sub(NUMBER, "#", printed).split() != re.sub(NUMBER, "#", page).split():
        return False
    for ours, told in zip(re.findall(NUMBER, printed), re.findall(NUMBER, page)):
        digits = len(told.partition(".")[2])
        if abs(float(ours) - float(told)) > (1.01 * 10 ** -digits if digits else 0):
            return False
    return True


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A copy of the program, in which the files of the pages lie, and the run of one step that page
    7 reads."""
    folder = copy_project(tmp_path_factory.mktemp("course"), "models", "docs", "examples")
    (folder / "divide.py").write_text(block("docs/course/1_can_i_watch_it_learn.md", "def reward"))
    with open(folder / "mitigations.py", "a") as source:
        source.write("\n\n" + block("README.md", "def my_idea"))
    program(folder, "train.py", "--steps", "1", "--eval_every", "0", "--checkpoint_every", "0",
            "--out", "runs/one")
    return folder


@pytest.fixture(scope="module")
def printed(project):
    """What the blocks print, by page and number."""
    return printed_by_each(project, {name: code for name, (code, _) in PASTED.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", PASTED)
def test_what_a_page_pastes_prints_what_stands_below_it(name, printed):
    assert_same(printed[name], PASTED[name][1])


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPED)
def test_a_command_of_a_page_prints_what_stands_below_it(name, project):
    command, page = TYPED[name]
    assert_same(program(project, *command.split("#")[0].split()[1:]), page)


@pytest.mark.slow
def test_twenty_steps_teach_the_task_of_page_1(project):
    """As on the page, 22 of a hundred held-out answers divide before, and most afterwards."""
    [command] = re.findall(r"^python (-m lab train --task divide .*)$", "".join(PAGES.values()),
                           flags=re.M)
    program(project, *command.split())
    before, after = [line["success"] for line in lines(project / "runs/divide/evaluations.jsonl")
                     if line["mode"] == "sampled"]
    assert before == pytest.approx(0.22, abs=0.03) and after > 0.6


def test_the_table_of_page_1_is_the_stored_one():
    page = PAGES["1_can_i_watch_it_learn.md"]
    stored = (ROOT / "lab/results/successes.txt").read_text("utf-8")
    rows = re.findall(r"^\w.*  ([\d.]+%) \(.*  ([\d.]+%) \(", stored, flags=re.M)
    assert re.findall(r"^\|.*[*a-z] \| ([\d.]+%) \| ([\d.]+%) \|$", page, flags=re.M) == rows
    for steps, words in (("1-10", "So {} of the answers .* Of hits {} become .* before"),
                         ("91-100", "before, and {} after: .* before, and {} after:")):
        shares = re.findall(rf"^ *{steps} +(\S+) +(\S+)", stored, flags=re.M)[0]
        assert re.search(words.format(*shares), " ".join(page.split()))


STEP = ["--questions", "8", "--answers", "8", "--micro_batch", "8", "--steps", "1",
        "--eval_every", "0", "--checkpoint_every", "0", "--out", "run"]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """By the row of page 8's table: the metrics of a step with this mistake, what the run said, and
    its folder."""
    found, mistakes = {}, [None, *mistakes_of(block(MISTAKES, "# break_it.py"))]
    for row, mistake in zip(("right", "C", "A", "F", "E", "B", "D"), mistakes, strict=True):
        folder = copy_of_the_book(tmp_path_factory.mktemp(row))
        if mistake:
            text = (folder / "grpo.py").read_text()
            assert text.count(mistake[0]) == 1, mistake
            (folder / "grpo.py").write_text(text.replace(*mistake))
        _, said = typed(folder, "train.py", *STEP)
        found[row] = lines(folder / "run/metrics.jsonl"), said, folder / "run"
    return found


def mistakes_of(code: str) -> list[tuple[str, str]]:
    """What break_it.py chooses from: the old and the new text of each mistake."""
    chosen: list[list[tuple[str, str]]] = []
    no_change = SimpleNamespace(run=lambda *_: SimpleNamespace(returncode=0))

    class Random:
        @staticmethod
        def choice(mistakes):
            chosen.append(mistakes)
            raise StopIteration

    with pytest.raises(StopIteration):
        exec(re.sub("^import .*", "", code, flags=re.M),
             {"random": Random, "subprocess": no_change})
    return chosen[0]


def rows_of_page_8() -> dict[str, list[str]]:
    page = PAGES[Path(MISTAKES).name]
    return {name: [cell.strip(" *") for cell in cells.split("|")]
            for name, cells in re.findall(r"^\| (right|[A-F]) \|(.*)\|$", page, flags=re.M)}


@pytest.mark.slow
@pytest.mark.parametrize("row", ["right", *"ABCDEF"])
def test_a_mistake_of_page_8_shows_what_its_row_says(row, broken):
    """To the digits of the page, plus or minus a few of the last one."""
    loss, norm, gap, advantages = rows_of_page_8()[row][:4]
    metrics, said, folder = broken[row]
    if not loss:  # the run ends in its first step
        assert not metrics and f"differ by {gap} a token" in said
        return
    assert metrics[0]["sampler_gap"] < 1e-5
    assert metrics[0]["loss"] == pytest.approx(float(loss), abs=0.002)
    assert metrics[0]["gradient_norm"] == pytest.approx(float(norm), rel=0.02)
    low, high = map(float, advantages.split(" to "))
    found = arrays(folder / "credit/step_000001.npz")["advantage"]
    assert (found.min(), found.max()) == pytest.approx((low, high), abs=0.01)


@pytest.mark.slow
def test_break_it_makes_one_mistake_and_only_one(tmp_path):
    """Before a second one the first has to be undone."""
    copy_project(tmp_path)
    for words in "init", "add grpo.py":
        subprocess.run(["git", *words.split()], cwd=tmp_path, check=True, capture_output=True)
    before = (tmp_path / "grpo.py").read_text()
    code = block(MISTAKES, "# break_it.py")
    program(tmp_path, "-c", code)
    after = (tmp_path / "grpo.py").read_text()
    assert [before.replace(*mistake) for mistake in mistakes_of(code)].count(after) == 1
    for _ in range(3):
        assert "first undo the last mistake" in program(tmp_path, "-c", code, expect=1)
    assert (tmp_path / "grpo.py").read_text() == after


@pytest.mark.slow
def test_the_pictures_of_the_course_can_be_drawn_and_are_shown():
    """Each on the page that the docstring says."""
    said = dict(re.findall(r"^    ([\w-]+) +page (\d+) ", pictures.__doc__, flags=re.M))
    assert said.keys() == pictures.PICTURES.keys() - {"found"}  # that is README's
    for name in said:
        [page] = [page for place, page in PAGES.items() if place.startswith(f"{said[name]}_")]
        assert f"](../{name}.png)" in page and pictures.PICTURES[name]().axes


def test_the_table_of_page_9_follows_from_the_success_of_each_seed():
    found = json.loads((ROOT / "lab/results/page_9/success.json").read_text())
    page = PAGES["9_can_i_use_a_batch_twice.md"]
    columns = "ratio and clip", "no ratio", "one update, k times the rate"
    rows = re.findall(r"^\| (\d+) \| (.*?)\|$", page, flags=re.M)
    assert [count for count, _ in rows] == ["1", "2", "4", "8", "16", "50"]
    for count, text in rows:
        cells = [cell.strip() for cell in text.split("|")]
        share = cells.pop(1)
        assert not share or float(share) == found["clipped_share"][count]
        for cell, column in zip(cells, columns, strict=True):
            seeds = found[column][count]
            assert not cell or f"{np.mean(seeds):.1f}%" == cell.split(",")[0].rstrip("*")
            assert ("*" in cell) == (bool(cell) and len(seeds) == 1)
    with_kl = np.mean(found["8 updates with kl 0.1"])
    without = np.mean(found["ratio and clip"]["8"])
    told = f"{with_kl:.1f}% were right in place of {without:.1f}%"
    assert told in " ".join(page.split())


@pytest.mark.parametrize("run, said", [
    ("A", "by heart"), ("B", "none is seen"), ("C", "rate is far too high"),
    ("D", "pays for something else"), ("E", "The reward falls"), ("F", "none is seen")])
def test_each_run_of_page_8_is_diagnosed(run, said, capsys):
    with suppress(SystemExit):
        diagnose.main([str(ROOT / f"lab/results/curves/{run}.jsonl")])
    assert said in " ".join(capsys.readouterr().out.split())


def test_numbers_of_pages_2_and_10_follow_from_the_value_of_each_seed():
    page = " ".join(PAGES["2_why_does_a_step_raise_the_reward.md"].split())
    assert f"[{stored_gain('bridge', 'right_only', 'grpo')}]" in page
    right = [100 * success.mean() for success in success_by_seed("board", "none").values()]
    page = " ".join(PAGES["10_is_my_idea_better.md"].split())
    assert len(right) == 12 and f"between {min(right):.1f}% and {max(right):.1f}%" in page


CODE = {path.name: path.read_text() for pattern in ("*.py", "examples/*.py")
        for path in project_files(pattern)}


def source_of(function, text):
    """Of the first function of this name in a text."""
    node = next(node for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.FunctionDef) and node.name == function)
    return textwrap.dedent(ast.get_source_segment(text, node, padded=True))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_what_is_in_the_code_and_in_which_file(name):
    """Names with an underscore, wherever they stand; and names in a line that says in which file
    they are."""
    known, prose = "".join(CODE.values()), FENCED.sub("", PAGES[name])
    for word in re.findall(r"`(\w+_\w*)`", prose):
        assert re.search(rf"\b{word}\b", known + PAGES[name].replace(f"`{word}`", "")), word
    for line in prose.splitlines():
        files = re.findall(r"`(?:examples/)?(\w+\.py)`", line)
        if line.startswith("In the code:") or re.match(r"\d\. .*`\w+\.py`.*: `", line):
            for word in re.findall(r"`([a-z]\w+)`", line):
                assert any(re.search(rf"\b{word}\b", CODE[file]) for file in files), line


def test_what_a_page_replaces_in_a_function_stands_there():
    """Once, and with the other words it is Python, too."""
    told = r"`([^`\n]+)` in (?:the )?place of `([^`\n]+)` in `(\w+)`(?: of `(\w+)`)?"
    found = [(name, *words) for name, page in PAGES.items()
             for words in re.findall(told, FENCED.sub("", page))]
    assert found
    for name, new, old, function, outer in found:
        text = CODE["grpo.py"]
        source = source_of(function, source_of(outer, text) if outer else text)
        assert source.count(old) == 1, f"{name}: {old} in {function}"
        ast.parse(source.replace(old, new))
