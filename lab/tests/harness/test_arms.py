"""Every arm as a person runs it: stopped and resumed, and what is on record of it."""

import pytest

import lab.run as train
from lab_runs import SHORT, assert_goes_on_the_same
from runs import lines

pytestmark = pytest.mark.slow

# What keeps a state, samples more or draws at random, one of each kind;
# test_every_method.py has all methods, of which most are functions of the batch alone.
ARMS = {
    "random": "--mitigation random", "lambda": "--mitigation lambda_grpo",
    "ablation": "--mitigation causal_ablation --ablate_every 16",
    "measured": "--advantage measured --measured_k 1 --answers 2 --max_new_tokens 28",
    "critic": "--advantage gae --gae_lambda 0.9 --process_reward 0.5",
    "trunk": "--advantage gae --critic trunk",
    "vine": "--advantage vine --values_every 16 --values_k 1",
    "epochs": "--epochs 2 --clip_low 0.1 --clip_high 0.1 --kl 0.1 --kl_kind k2",
    "bfloat16": "--checkpointing --dtype bfloat16",
    "shuffled advantages": "--placebo advantages --drop_unfinished",
    "both axes": "--mitigation learned_importance --importance_warmup 0 --advantage gae "
                 "--rescale gradient --epochs 2"}
REPORTED = {"critic": "explained_variance", "epochs": "clipped_share", "lambda": "lambda",
            "both axes": "importance_loss"}


@pytest.mark.parametrize("arm", ARMS)
def test_stopped_and_resumed_is_as_if_never_stopped(arm, tmp_path):
    """Going on after the first step's checkpoint; state of critics and weightings included."""
    whole = tmp_path / "whole"
    train.train_beyond([*SHORT, "--steps", "2", *ARMS[arm].split(), "--out", str(whole)])
    assert_goes_on_the_same(whole, tmp_path / "stopped")
    metrics = lines(whole / "metrics.jsonl")
    assert len(metrics) == 2 and any(line["trained_tokens"] for line in metrics)
    assert arm not in REPORTED or any(line.get(REPORTED[arm]) is not None for line in metrics)
    samples_more = arm in ("measured", "ablation", "vine")
    assert (metrics[0]["extra_tokens"] > 0) == samples_more
