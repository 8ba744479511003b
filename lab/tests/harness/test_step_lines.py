"""Every line of metrics.jsonl has the names of one list; what the lines of a run that does not
learn make it say."""
import pytest

from lab.harness.step_lines import METRICS
from lab_runs import SHORT, run
from runs import lines

PARTS = {"reward_format", "reward_answer", "reward_reasoning"}
NOTHING_LEFT = "--max_new_tokens 1 --drop_unfinished"


@pytest.mark.parametrize("flags, own, is_skipped", [
    ("--steps 3 --change_every 3", set(), False),  # step 2 measures no change
    ("--steps 1 --kl 0.1 --epochs 2", set(), False),
    (f"--steps 1 {NOTHING_LEFT}", set(), True),
    (f"--steps 1 --epochs 2 --mitigation lambda_grpo {NOTHING_LEFT}", {"lambda"}, True),
    (f"--steps 1 --mitigation learned_importance {NOTHING_LEFT}", {"importance_loss"}, True)])
def test_every_line_has_the_same_names(tmp_path, flags, own, is_skipped):
    """In any run, in steps that are skipped too; what is undefined there is null."""
    run(*SHORT, *flags.split(), "--out", tmp_path / "x")
    for line in lines(tmp_path / "x/metrics.jsonl"):
        assert line.keys() == METRICS.keys() | PARTS | own
        assert bool(line["skipped"]) == is_skipped
        undefined = {name for name, value in line.items() if value is None}
        assert not is_skipped or {"kl", "ratio_mean", "gradient_norm",
                                  "sampler_gap"} <= undefined
        assert undefined.isdisjoint({"kl", "ratio_mean"}) == ("--kl" in flags)
        if "--kl" in flags:  # with these flags all else that is listed is computed
            assert undefined == {"weight_note", "skipped"}
