"""The arms of the price: their weights by hand, and the exact gradient of one that has no bias."""
import pytest
import torch
from conftest import hand_made, write_log

from analysis.experiment import settings_of
from research.__main__ import main
from research.boards import price
from research.boards.price import (ARMS, STEPS, choices_of, end_untrained, micro_batches_of_4,
                                   per_group)
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


def test_each_arm_is_compared_with_an_arm():
    assert all(compared in ARMS or not compared for _, compared in ARMS.values())


def test_the_gain_is_over_the_arm_that_is_beside_it(tmp_path, monkeypatch,
                                                                  capsys):
    """Three seeds of 0.5 and 0.4 and 0.6; per_answer is 0.1 below on two of them, 0.2 on one."""
    monkeypatch.setattr(price, "register_weightings", lambda: None)  # here for all later tests
    experiment = price.experiment_in(tmp_path)
    for seed, (plain, other) in enumerate([(0.5, 0.4), (0.4, 0.3), (0.6, 0.4)]):
        for arm, success in (("plain", plain), ("per_answer", other)):
            planned = experiment.plan_run(arm, seed)
            config = settings_of(planned).to_json()
            write_log(planned.folder, {}, config, [{"step": step, "success": success}
                                                   for step in range(1, STEPS + 1)])
    main(["price", "--arms", "none", "--runs", str(tmp_path)])
    reach = 4.3027 * (1 / 3) ** 0.5 * 10 / 3 ** 0.5  # t of 2 degrees of freedom
    low, high = -40 / 3 - reach, -40 / 3 + reach
    assert capsys.readouterr().out == (f"per_answer                     -13.3 ({low:+.1f} to "
                                       f"{high:+.1f}) points over plain, 3 seeds\n")
