"""Was my idea better: which runs are made, which are used again, what is refused."""
import pytest
from conftest import put_in, refusal
from runs import lines, train_here

from harness.files import is_taken_away
from harness.settings import make_settings
from tools.idea import arms_of, digest, main

SMALL = ["--questions", "2", "--answers", "4", "--steps", "2", "--eval_tasks", "4",
         "--max_new_tokens", "32", "--seeds", "2", "--processes", "2"]


def test_the_arms_of_a_weighting_and_of_an_advantage():
    axis, arms = arms_of("by_kind", ["--word_weight", "0.1", "--steps", "20", "--rescale", "none"])
    plain, own = arms["plain"], {"mitigation": "by_kind", "word_weight": 0.1, "rescale": "none"}
    assert axis == "mitigation" and plain == {
        "questions": 8, "answers": 8, "steps": 20, "threads": 1, "eval_every": 20,
        "checkpoint_every": 20, "eval_modes": "sampled"}
    assert arms["idea"] == plain | own and arms["placebo"] == plain | own | {"placebo": "weights"}
    axis, arms = arms_of("span", ["--eval_every", "0", "--mitigation", "taco"])
    assert axis == "advantage" and "eval_modes" not in arms["plain"]
    assert arms["plain"]["mitigation"] == "taco" and "advantage" not in arms["plain"]
    assert arms["placebo"]["placebo"] == "advantages" and arms["idea"]["advantage"] == "span"


@pytest.mark.parametrize("argv, said", [
    ([], "are required: NAME"),
    (["no_such"], "there is no weighting and no advantage no_such, which comes first"),
    (["none"], "none is what an idea is compared with"),
    (["by_kind", "--seed", "3"], "--seed is not for this program"),
    (["by_kind", "--placebo", "weights"], "--placebo is not for this program"),
    (["by_kind", "--strengh", "2"], "--strengh"),
    (["by_kind", "--seeds", "1"], "--seeds 1 should be at least 2"),
    (["by_kind", "--entropy_temp", "2"], "--entropy_temp belongs to entropy_weighted")])
def test_what_is_refused(argv, said):
    assert said in refusal(main, argv)


def own_idea(value):
    """A module of somebody's own, whose weighting uses a function and a number of that file."""
    return (f"from engine.choices import mitigation\n\nLEVEL = {value}\n\n\ndef helper(x):\n"
            "    return LEVEL * x.entropy\n\n\n"
            "def weighting(rollouts, *, strength: float = 1.0):\n    return 1 + helper(rollouts)\n")


def test_a_changed_function_has_runs_of_its_own(tmp_path, monkeypatch):
    """So does a number it uses; what else stands in its file does not count."""
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for name, text in (("one", own_idea(2)), ("two", own_idea(3)),
                       ("three", own_idea(2) + "\n\ndef other():\n    pass\n"),
                       ("four", own_idea(2).replace("1 + h", "2 + h"))):
        (tmp_path / f"own_{name}.py").write_text(text)
        with monkeypatch.context() as patch:
            put_in(patch, __import__(f"own_{name}").weighting, "own_idea")
            found.append(digest(make_settings({"mitigation": "own_idea"})))
        plain = digest(make_settings({}))
        assert plain == digest(make_settings({"seed": 3, "out": "x"})) != found[-1]
    first, other_number, other_function, other_line = found
    assert first == other_function and len({first, other_number, other_line}) == 3


def test_from_the_function_to_the_verdict(learner, tmp_path, monkeypatch, capfd):
    """Three arms of two seeds; the next idea uses plain GRPO's again, the same one all."""
    argv = ["--model", str(learner), *SMALL, "--runs", str(tmp_path / "ideas")]
    monkeypatch.setattr("tools.runs.Runs.start", train_here)
    dial = not is_taken_away("research")
    if dial:
        monkeypatch.setattr("research.probes.dial.one_line", lambda *asked: f"dial: {asked}")
    main(["by_kind", "--word_weight", "0.1", *argv])
    said = capfd.readouterr().out
    for part in ("6 of 6 runs are to be made, 2 at a time, about 1 min left\n",
                 "finished: by_kind-placebo-s1", "by_kind minus"):
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
    main(["by_kind", "--word_weight", "0.2", *argv])
    assert "4 of 6 runs are to be made" in capfd.readouterr().out
