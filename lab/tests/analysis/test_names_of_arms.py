"""Which runs are one arm, and which arm is the baseline."""
import pytest
from conftest import refusal
from logs import arms_in, write_run


@pytest.fixture
def folders(tmp_path):
    return [write_run(tmp_path / name, 0.5, seed, mitigation=weighting, placebo=placebo)
            for name, seed, weighting, placebo in (
                ("a", 0, "random", "none"), ("b", 0, "none", "weights"), ("c", 0, "none", "none"),
                ("d", 1, "none", "none"))]


def test_the_baseline_is_plain_grpo_or_the_one_that_is_named(folders):
    """A placebo is not plain."""
    arms = arms_in(folders)
    plain, random = "mitigation none placebo none", "mitigation random placebo none"
    assert [*arms] == [plain, random, "mitigation none placebo weights"]
    assert [run.folder.name for run in arms[plain].values()] == ["c", "d"]
    assert [*arms_in(folders, random)][0] == random
    assert refusal(arms_in, folders, "nobody").startswith(
        f"--baseline nobody is none of the arms: {random}, ")


def test_one_arm_with_one_seed_twice_is_refused(folders, tmp_path):
    twin = write_run(tmp_path / "twin", 0.5, 1, mitigation="none", placebo="none")
    assert refusal(arms_in, [*folders, twin]) == (
        f"{folders[3]} and {twin} are one arm with one seed: name one")
