"""Was my idea better: which runs are made, which are used again, what is refused."""
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, put_in, refusal
from runs import lines, train_here

from harness.screen import is_taken_away
from harness.settings import make_settings
from tools.idea import arms_of, digest, is_own, main

SMALL = ["--questions", "2", "--answers", "4", "--steps", "2", "--eval_tasks", "4",
         "--max_new_tokens", "32", "--seeds", "2", "--processes", "2"]


def test_the_arms_of_a_weighting_and_of_an_advantage():
    axis, arms = arms_of("by_kind", ["--word_weight", "0.1", "--steps", "20", "--rescale", "none"])
    plain, own = arms["plain"], {"mitigation": "by_kind", "word_weight": 0.1, "rescale": "none"}
    assert axis == "mitigation" and plain == {
        "questions": 8, "answers": 8, "steps": 20, "threads": 1, "eval_every": 20,
        "checkpoint_every": 20, "eval_modes": "sampled"}
    assert arms["idea"] == plain | own and arms["placebo"] == plain | own | {"placebo": "weights"}
    axis, arms = arms_of("span", ["--eval_every", "9", "--mitigation", "taco"])
    assert axis == "advantage" and arms["plain"]["eval_every"] == 9
    assert arms["plain"]["mitigation"] == "taco" and "advantage" not in arms["plain"]
    assert arms["placebo"]["placebo"] == "advantages" and arms["idea"]["advantage"] == "span"


@pytest.mark.parametrize("argv, said", [
    ([], "are required: NAME"),
    (["no_such"], "there is no weighting and no advantage no_such, which comes first"),
    (["none"], "none is what an idea is compared with"),
    (["by_kin"], "no weighting and no advantage by_kin; did you mean by_kind?"),
    (["by_kind", "--seed", "3"], "--seed is not for this program"),
    (["by_kind", "--eval_every", "0"], "the evaluation at the end decides where training cannot")])
def test_what_is_refused(argv, said):
    assert said in refusal(main, argv)


def test_a_changed_file_has_runs_of_its_own(tmp_path, monkeypatch):
    """Also one that the idea imports, and whatever it holds. Plain GRPO's runs are used again."""
    (tmp_path / "own_helper.py").write_text("WORDS = {'wrong'}\n")
    (tmp_path / "own_idea.py").write_text(
        "from own_helper import WORDS\n\n\ndef weighting(rollouts): return rollouts.entropy\n")
    monkeypatch.syspath_prepend(tmp_path)
    put_in(monkeypatch, __import__("own_idea").weighting, "own_idea")

    def digests():
        return [digest(make_settings(more)) for more in ({"mitigation": "own_idea"}, {})]

    idea, plain = before = digests()
    assert digests() == before and plain == digest(make_settings({"seed": 3, "out": "x"}))
    for name in ("own_helper", "own_idea"):
        (tmp_path / f"{name}.py").write_text("# another\n")
        changed, same = digests()
        assert changed != idea and same == plain
        idea = changed
    helper = tmp_path / "own_data.py"  # of a task: problems follow from it
    helper.write_text("# one\n")
    monkeypatch.setitem(sys.modules, "own_data", SimpleNamespace(__file__=str(helper)))
    monkeypatch.setattr("countdown_task.made_by", SimpleNamespace(__module__="own_data"),
                        raising=False)
    before = digests()
    helper.write_text("# another\n")
    assert all(one != other for one, other in zip(before, digests()))
    assert not is_own(Path(json.__file__)) and not is_own(Path(pytest.__file__))
    assert is_own(ROOT / "mitigations.py") and not is_own(ROOT / "analysis/runs.py")


def test_from_the_function_to_the_verdict(learner, tmp_path, monkeypatch, capfd):
    """Three arms of two seeds; the next idea uses plain GRPO's again, the same one all."""
    argv = ["--model", str(learner), *SMALL, "--runs", str(tmp_path / "ideas")]
    monkeypatch.setattr("tools.runs.Runs.start", train_here)
    dial = not is_taken_away("research")
    if dial:
        monkeypatch.setattr("research.probes.dial.one_line", lambda *asked: f"dial: {asked}")
    main(["by_kind", "--word_weight", "0.1", *argv])
    said = capfd.readouterr().out
    for part in ("6 of 6 runs are to be made, 2 at a time, about ", "finished: by_kind-placebo-s1",
                 "by_kind minus"):
        assert part in said
    assert ("dial: ('by_kind', {'word_weight': 0.1})\nmore worlds: python -m research dial --only "
            "'by_kind --word_weight 0.1'\n" in said) == dial
    folders = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "ideas").iterdir())
    assert folders == ["by_kind", "by_kind-placebo", "plain"]
    [picture] = (tmp_path / "ideas").glob("by_kind-*/verdict.png")
    assert picture.stat().st_size > 10_000
    for folder in (tmp_path / "ideas").iterdir():
        assert [len(lines(folder / f"s{seed}/metrics.jsonl")) for seed in (0, 1)] == [2, 2]
    main(["by_kind", "--word_weight", "0.1", *argv])
    assert "0 of 6 runs are to be made" in capfd.readouterr().out
    monkeypatch.setattr("tools.idea.Settings", SimpleNamespace(task="of another task"))
    main(["by_kind", "--word_weight", "0.2", *argv])
    said = capfd.readouterr().out
    assert "4 of 6 runs are to be made" in said and "dial" not in said
