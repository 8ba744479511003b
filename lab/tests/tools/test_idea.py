"""Was my idea better: which runs are made, which are used again, what is refused."""
import re
import shlex
from glob import glob
from pathlib import Path
from types import SimpleNamespace

import pytest
from lab_runs import make_here
from runs import lines
from small import large_folder

from lab.tools import idea, planned_runs
from lab.tools.idea import arms_of, main

SMALL = ["--questions", "2", "--answers", "4", "--steps", "2", "--eval_tasks", "4",
         "--max_new_tokens", "32", "--seeds", "2", "--processes", "2"]


def test_the_arms_of_a_weighting_and_of_an_advantage():
    axis, of_kind = arms_of("by_kind", {"word_weight": "0.1", "steps": "20", "rescale": "none"})
    plain, own = of_kind["plain"], {"mitigation": "by_kind", "word_weight": 0.1, "rescale": "none"}
    assert axis == "mitigation" and plain == {
        "questions": 8, "answers": 8, "steps": 20, "threads": 1, "eval_every": 20,
        "checkpoint_every": 20}
    assert of_kind == {"plain": plain, "idea": plain | own,
                       "any": plain | own | {"placebo": "weights"},
                       "kind": plain | own | {"placebo": "weights_by_kind"}}
    axis, of_span = arms_of("span", {"eval_every": "9", "mitigation": "random"}, "any")
    assert axis == "advantage" and of_span["plain"]["eval_every"] == 9
    assert of_span["plain"]["mitigation"] == "random" and "advantage" not in of_span["plain"]
    assert of_span["any"]["placebo"] == "advantages" and of_span["idea"]["advantage"] == "span"
    assert "kind" not in of_span
    for name in ("rloo", "maxrl"):  # answers have no kind
        assert [*arms_of(name, {})[1]] == ["plain", "idea", "any"]
        assert [*arms_of(name, {}, "none")[1]] == ["plain", "idea"]


def test_where_all_tokens_are_of_one_category_there_is_one_placebo(tmp_path, monkeypatch, capsys):
    own = SimpleNamespace(runs=tmp_path, placebos="any,kind")
    for has_kinds, arms in ((True, 4), (False, 3)):
        monkeypatch.setattr(idea, "look", lambda *given, is_weighting: has_kinds)
        found = idea.Idea("by_kind", {}, own, "")
        found.first_look()
        assert len(found.arms) == arms
        assert ("so there is one placebo" in capsys.readouterr().out) == (not has_kinds)


def test_a_large_model_keeps_its_recipe_and_leaves_no_model(tmp_path):
    """It is evaluated at the end. If it names no steps, a CPU makes few, and a GPU the usual
    number."""
    typed = {"model": str(large_folder(tmp_path))}
    (tmp_path / "recipe.json").write_text('{"steps": 9}')
    _, of_arm = arms_of("by_kind", typed)
    assert of_arm["plain"] == {"checkpoint_every": 0, "model": str(tmp_path), "steps": 4,
                             "eval_every": 4}
    _, of_arm = arms_of("by_kind", typed | {"steps": "7", "checkpoint_every": "3"})
    assert (of_arm["idea"]["steps"], of_arm["idea"]["eval_every"]) == (7, 7)
    assert of_arm["idea"]["checkpoint_every"] == 3
    on_gpu = arms_of("by_kind", typed | {"device": "cuda"})[1]["plain"]
    assert on_gpu == of_arm["plain"] | {"device": "cuda", "steps": 4, "eval_every": 4,
                                      "checkpoint_every": 0}
    (tmp_path / "recipe.json").write_text('{"eval_tasks": 9}')  # its own, which names no steps
    assert arms_of("by_kind", typed)[1]["plain"]["steps"] == 20
    _, of_arm = arms_of("by_kind", typed | {"device": "cuda"})
    assert of_arm["plain"]["steps"] == 60 and of_arm["plain"]["threads"] == 1
    assert of_arm["plain"]["checkpoint_every"] == 0


@pytest.mark.slow
def test_runs_of_a_large_model_have_its_threads_and_are_begun_again(learner, tmp_path,
                                                                    monkeypatch):
    """Whether one is made at a time or eight, they are the same runs."""
    planned, settings = [], ["--model", str(learner), "--seeds", "2", "--runs", str(tmp_path)]

    def keep(runs, command, processes, threads):
        planned.append((runs, threads))
        raise SystemExit(f"{processes} at a time")

    monkeypatch.setattr(idea, "make_runs", keep)
    monkeypatch.setattr(planned_runs, "is_large", lambda folder: True)
    monkeypatch.setattr(planned_runs, "usable_cores", lambda: 8)
    for processes in (1, 8):
        with pytest.raises(SystemExit, match=f"{processes} at a time"):
            main(["by_kind", *settings, "--processes", str(processes)])
    alone, together = planned
    assert [run.folder for run in alone[0]] == [run.folder for run in together[0]]
    assert (alone[1], together[1]) == (8, 1)
    assert not any(run.keeps_checkpoints for run in alone[0] + together[0])
    with pytest.raises(SystemExit):
        main(["by_kind", *settings, "--checkpoint_every", "3"])
    assert all(run.keeps_checkpoints for run in planned[-1][0])


@pytest.mark.slow
def test_from_the_function_to_the_verdict(learner, tmp_path, monkeypatch, capfd):
    """Four arms of two seeds; the next idea uses plain GRPO's again, and is counted."""
    argv = ["--model", str(learner), *SMALL, "--runs", str(tmp_path / "my ideas")]
    make_here(monkeypatch)
    freed = []
    monkeypatch.setattr(idea, "return_memory", lambda: freed.append(list(tmp_path.rglob("*"))))
    main(["by_kind", "--word_weight", "0.1", *argv])
    said = capfd.readouterr().out
    for part in ("8 of 8 runs have to be made, 2 at a time", "finished: by_kind-placebo-s1",
                 "finished: by_kind-placebo-kind-s1", "by_kind minus"):
        assert part in said
    *_, pointers = said.rstrip().split("\n\n")  # nothing comes after the last paragraph
    assert pointers.startswith("To repeat all of it: python -m lab idea by_kind")
    assert "greedy" in said
    folders = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "my ideas").iterdir())
    assert folders == ["by_kind", "by_kind-placebo", "by_kind-placebo-kind", "plain"]
    [typed] = re.findall("all runs: python -m lab compare (.*)", said)
    found = [list(map(Path, glob(pattern))) for pattern in shlex.split(typed)]
    assert [[run.name for run in arm] for arm in map(sorted, found)] == 4 * [["s0", "s1"]]
    for folder in (tmp_path / "my ideas").iterdir():
        assert [len(lines(folder / f"s{seed}/metrics.jsonl")) for seed in (0, 1)] == [2, 2]
    assert freed == [[]]  # what the look has taken, before the first run begins

    main(["by_kind", "--word_weight", "0.2", "--placebos", "any", *argv])
    said = " ".join(capfd.readouterr().out.split())
    assert "4 of 6 runs have to be made" in said
    assert ("plain GRPO was compared 2 times: with by_kind here, and with by_kind --word_weight "
            "0.1 (2 seeds)") in said
