"""The arms of the price: their weights by hand, and the exact gradient of one that has no bias."""
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import hand_made, write_log

from analysis.experiment import settings_of
from engine.choices import MITIGATIONS, NEVER_RESCALED
from engine.errors import UserError
from harness.settings import make_settings, read_flags
from research.__main__ import main as research_main
from research.boards import price
from research.boards.price import ARMS, FLAGS, REAL, TINY
from research.boards.price_exact import Sampler, choices_of, of_policy
from research.boards.price_train import (end_untrained, micro_batches_of_4, per_group,
                                          register_weightings)
from research.probes.enumerated import Batches, estimator, make_enumerated


def batch_of_lengths(*lengths, group, finished):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return hand_made(mask, group=torch.tensor(group), finished=torch.tensor(finished))


def test_the_weights_by_hand():
    rollouts = batch_of_lengths(2, 1, 3, 2, group=[0, 0, 1, 1], finished=[True, True, False, True])
    assert end_untrained(rollouts).tolist() == [[1, 0, 1], [0, 1, 1], [1, 1, 1], [1, 0, 1]]
    # N = 8: in group 0, of 3 tokens, each has 8 / (2 * 3); in group 1, of 5, 8 / (2 * 5)
    assert per_group(rollouts)[:, 0].tolist() == pytest.approx([4 / 3, 4 / 3, .8, .8])
    assert micro_batches_of_4(rollouts)[:, 0].tolist() == [1, 1, 1, 1]  # one part: all of them


def test_the_sum_over_tokens_has_the_direction_of_the_true_gradient():
    task = make_enumerated(1, 3)
    batches = Batches.all(task, 3)
    factors = choices_of(task, batches)
    found = {name: estimator(task, batches, factor).against(task.gradient)["cosine"]
             for name, factor in factors.items()}
    assert found["mean, sum"] == pytest.approx(1, abs=1e-6)
    assert found["z, answer"] < 1 - 1e-4 > found["z, token, its end untrained"]


def test_a_sampler_that_is_trained_as_it_samples_has_the_true_direction():
    """Scores, probabilities and gradient of another temperature belong together: the sum over
    tokens has no bias. The mean of a score over what may follow a prefix is 0."""
    task = Sampler(.7).task(make_enumerated(2, 3))
    assert task.probability.sum().item() == pytest.approx(1)
    batches = Batches.all(task, 3)
    found = estimator(task, batches, choices_of(task, batches)["mean, sum"])
    assert found.against(task.gradient)["cosine"] == pytest.approx(1, abs=1e-6)
    same = Sampler().task(make_enumerated(2, 3))
    torch.testing.assert_close(same.gradient, make_enumerated(2, 3).gradient, atol=1e-5, rtol=1e-4)


def test_a_kl_in_the_reward_has_the_direction_of_the_kl_and_k1_in_the_loss_has_none():
    found = of_policy(make_enumerated(3, 3))
    assert found["KL by itself, k1 in the reward"][0] == pytest.approx(1, abs=1e-6)
    assert math.isnan(found["KL by itself, k1"][0])
    trained_at_1 = found["sampled at 0.8, trained at 1 on all tokens"][0]
    assert trained_at_1 < found["sampled and trained at 0.8"][0]


def args_with(**changed):
    return SimpleNamespace(**{name: flag.default for name, flag in FLAGS.items()} | changed)


@pytest.fixture
def weightings():
    """The weightings of the price are choices in one test alone."""
    known = set(MITIGATIONS)
    register_weightings()
    yield
    for name in MITIGATIONS.keys() - known:
        del MITIGATIONS[name]
        NEVER_RESCALED.discard(name)


@pytest.mark.parametrize("form", [TINY, REAL], ids=["tiny", "real"])
def test_each_arm_is_compared_with_an_arm(form):
    assert all(arm.compared in form.arms or not arm.compared for arm in form.arms.values())


def test_the_runs_of_a_real_model_differ_from_plain_grpo_in_what_their_arm_says(weightings):
    """All are trained on the answer alone, and each seed is trained with all arms before the next.
    """
    experiment, [(name, keys)] = price.plan(args_with(model="models/tiny", device="cuda", seeds=2,
                                                      afresh=True))
    assert name == "choices_real_gpu" and [seed for _, seed in keys] == [40] * 13 + [41] * 13
    runs = {arm: experiment.plan_run(arm, seed) for arm, seed in keys}
    assert {run.folder.parent.as_posix() for run in runs.values()} == {"runs/price/real_gpu"}
    settings = {arm: make_settings(read_flags(run.flags)).to_json() for arm, run in runs.items()}
    plain = settings["plain"]
    assert (plain["prompt"], plain["questions"], plain["learning_rate"]) == ("expression", 8, 2e-6)
    for arm, values in settings.items():
        differ = {name for name in plain if values[name] != plain[name]} - {"rescale"}
        assert len(differ) == len(ARMS[arm].flags.split()) / 2, arm


def test_the_command_is_the_one_that_knows_the_weightings(monkeypatch):
    """Without them no finished run of theirs could be read. A leaderboard has no command of its
    own, which is what else would be started."""
    typed = []
    monkeypatch.setattr(price, "main", typed.append)
    research_main(["price", "--report_only", "yes"])
    assert typed == [["--report_only", "yes"]]


def test_a_device_without_a_real_model_is_refused():
    with pytest.raises(UserError, match="--device has no effect without --model"):
        price.plan(args_with(device="cuda"))


def test_the_gain_is_over_the_arm_that_is_beside_it(tmp_path):
    """Three seeds of 0.5 and 0.4 and 0.6; per_answer is 0.1 below on two of them, 0.2 on one. Its
    p is corrected for ten arms, although nine have no runs."""
    experiment, _ = price.plan(args_with(runs=str(tmp_path)))
    for seed, (plain, other) in enumerate([(0.5, 0.4), (0.4, 0.3), (0.6, 0.4)]):
        for arm, success in (("plain", plain), ("per_answer", other)):
            planned = experiment.plan_run(arm, seed)
            config = settings_of(planned).to_json()
            write_log(planned.folder, {}, config, [{"step": step, "success": success}
                                                   for step in range(1, TINY.steps + 1)])
    arms = experiment.arms((arm, seed) for arm in ("plain", "per_answer") for seed in range(3))
    [row] = price.gains_table(arms, ARMS).rows
    choice, compared, seeds, gain, p, corrected, _ = row
    assert (choice, compared, seeds) == ("every answer counts the same", "plain GRPO", 3)
    reach = 4.3027 * (1 / 3) ** 0.5 * .1 / 3 ** 0.5  # t of 2 degrees of freedom
    assert gain.value == pytest.approx(-.4 / 3)
    assert gain.low == pytest.approx(-.4 / 3 - reach, abs=1e-4)
    assert corrected == pytest.approx(min(1, 10 * p))
