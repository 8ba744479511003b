"""What `lab exact --trainer trl` says, against an enumeration in numpy: its own formulas, and all
orders of all batches."""
import itertools
import json

import numpy as np
import pytest

from conftest import ROOT
from lab.tests.with_trl import INSTALL
from lab_runs import program

pytest.importorskip("trl", reason=INSTALL)

from lab.engine.errors import UserError
from lab.exact import of_each_kind
from lab.trl import exact_trl
from lab.trl.exact_trl import KINDS, NEUTRAL, Setup, configs_of, judge, judged, with_defaults
from lab.worlds import worlds_of

pytestmark = pytest.mark.slow
WORLDS = {world.about: world for world in worlds_of({"loss_norm": "constant"}, 1, KINDS)}
BELOW, TEN, CUT, LONG = ("rewards below 0", "up to 10 tokens, or cut off",
                         "3 tokens, many cut off", "2 to 61 tokens")
GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.02,
        "num_iterations": 2}
PLAIN = with_defaults({**NEUTRAL, "num_generations": 2})


class Own:
    """A world's answers, and the update of a batch by a loss that is written down here."""

    def __init__(self, world, config):
        self.c, self.limit, self.problems = config, world.kind.limit, world.kind.problems
        self.logits, self.rows = world.logits.detach().numpy(), world.rows.numpy()
        self.ids, self.mask = world.rollouts.ids.numpy(), world.rollouts.mask.numpy() * 1.0
        self.reward = world.rollouts.reward.double().numpy()
        self.of = [[n for n, one in enumerate(world.answers) if one.problem == problem]
                   for problem in range(self.problems)]
        self.ended = np.array([one.finished for one in world.answers])[:, None]
        self.start, self.entropy = self.log_p(self.logits)[:2]
        self.chance = np.exp((self.start * self.mask).sum(1))
        self.reference = self.log_p(exact_trl.moved(world, 0.5, 1).numpy())[0]

    def log_p(self, logits):
        log_p = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(
            1, keepdims=True)) - logits.max(1, keepdims=True)
        entropy = -(np.exp(log_p) * log_p).sum(1)[self.rows]
        return log_p[self.rows, self.ids], entropy, np.exp(log_p)

    def push(self, coefficients, answers, p):
        """The sum of coefficient times the gradient of log p, which is one hot minus p."""
        found = np.zeros_like(p)
        for at_tokens, answer in zip(coefficients, answers):
            np.add.at(found, (self.rows[answer], self.ids[answer]), at_tokens)
            np.add.at(found, self.rows[answer], -at_tokens[:, None] * p[self.rows[answer]])
        return found.ravel()

    def update(self, answers, size, rate):
        reward = self.reward[answers].reshape(-1, size)
        advantage, scale = reward - reward.mean(1, keepdims=True), self.c["scale_rewards"]
        if scale != "none":
            of_groups = scale == "group"
            std = reward.std(1, ddof=1, keepdims=True) if of_groups else reward.std(ddof=1)
            advantage = advantage / (std + 1e-4)
        advantage, mask = advantage.reshape(-1, 1), self.mask[answers]
        mask = mask * self.ended[answers] if self.c["mask_truncated_completions"] else mask
        length, total = np.maximum(mask.sum(1, keepdims=True), 1), np.zeros(self.logits.size)
        for _ in range(self.c["num_iterations"]):
            now, _, p = self.log_p(self.logits + rate * np.reshape(total, self.logits.shape))
            change = now[answers] - self.start[answers]
            if self.c["importance_sampling_level"] == "sequence":
                change = (change * mask).sum(1, keepdims=True) / length
            ratio, epsilon = np.exp(change), self.c["epsilon"]
            counts = np.where(advantage > 0, ratio <= 1 + epsilon, ratio >= 1 - epsilon)
            coefficient = advantage * ratio * counts * mask
            if self.c["top_entropy_quantile"] < 1:
                entropy = np.float32(self.entropy[answers])
                least = np.quantile(entropy[mask > 0], 1 - self.c["top_entropy_quantile"])
                coefficient = coefficient * (entropy >= least)
            far = self.reference[answers] - now[answers]
            kl_push = ratio * (np.exp(far) - far - 1 + 1 - np.exp(far))
            coefficient = (coefficient - self.c["beta"] * kl_push * mask) / {
                "dr_grpo": len(answers) * self.limit, "dapo": max(mask.sum(), 1),
                "grpo": len(answers) * length}[self.c["loss_type"]]
            total = total + self.push(coefficient, answers, p)
        return total / self.c["num_iterations"]

    def numbers(self, size, groups, rate):
        """Cosine, length, and noise."""
        own = [group for rows in self.of for group in itertools.product(rows, repeat=size)]
        mean = square = 0.0
        for batch in itertools.product(own, repeat=groups):
            answers = [*sum(batch, ())]
            chance = self.chance[answers].prod() / self.problems ** groups
            update = self.update(answers, size, rate)
            mean, square = mean + chance * update, square + chance * (update @ update)
        truth = self.push((self.chance * self.reward / self.problems)[:, None] * self.mask,
                          range(len(self.mask)), self.log_p(self.logits)[2])
        along = mean @ truth / np.linalg.norm(truth)
        return (along / np.linalg.norm(mean), along / np.linalg.norm(truth),
                (square - mean @ mean) / along ** 2)


@pytest.mark.parametrize("about, size, groups, changed", [
    (BELOW, 2, 2, {"loss_type": "dapo", "scale_rewards": "group"}),
    (BELOW, 3, 1, {"scale_rewards": "batch", "loss_type": "grpo"}),
    (TEN, 2, 1, {"loss_type": "dapo", "num_iterations": 2}),
    (CUT, 3, 1, {"mask_truncated_completions": True, "loss_type": "grpo"}),
    (CUT, 2, 2, {"mask_truncated_completions": True, "loss_type": "dapo"}),
    (BELOW, 3, 1, {"top_entropy_quantile": 0.4}), (BELOW, 2, 1, {"beta": 0.3}),
    (LONG, 2, 1, {"beta": 0.3, "num_iterations": 2}), (LONG, 3, 1, GSPO)])
def test_numbers_of_an_own_enumeration(about, size, groups, changed, monkeypatch):
    monkeypatch.setattr(exact_trl, "rate_for", lambda *_: 0.7)
    config, world = {**PLAIN, **changed, "num_generations": size}, WORLDS[about]
    mean, _ = judged(Setup(config, groups), world)
    cosine, length, noise = Own(world, config).numbers(size, groups, 0.7)
    noise /= Own(world, PLAIN).numbers(size, groups, 0.7)[2]
    found = mean.cosine, mean.length, mean.noise
    assert found == pytest.approx((cosine, length, noise), rel=1e-5)


def test_one_pass_has_three_classes_of_losses():
    """The sum over tokens, its mean over a batch's tokens, and over an answer's. cispo with TRL's
    epsilon_high has the weight 0.2 instead of 1."""
    found = {loss: judged(Setup({**PLAIN, "loss_type": loss}, 1), WORLDS[LONG])[0] for loss in (
        "dr_grpo", "luspo", "dapo", "bnpo", "vespo", "cispo", "grpo", "sapo")}
    for names, factors in ((("dr_grpo", "luspo"), (1, 64)), (("grpo", "sapo"), (1, 1)),
                           (("dapo", "bnpo", "vespo", "cispo"), (1, 1, 1, 0.2))):
        for name, factor in zip(names, factors):
            assert found[name].cosine == pytest.approx(found[names[0]].cosine, abs=1e-9)
            assert found[name].length == pytest.approx(factor * found[names[0]].length, rel=1e-4)
    assert len({round(found[loss].cosine, 3) for loss in ("dr_grpo", "dapo", "grpo")}) == 3


def test_beta_acts_as_n_over_n_minus_1():
    for size in (2, 3):
        mean, along_kl = judged(Setup({**PLAIN, "beta": 0.5, "num_generations": size}, 1),
                                WORLDS[BELOW])
        assert mean.cosine < 0.99 and along_kl == pytest.approx(1, abs=1e-7)


def test_the_engine_is_the_sampler():
    """Its whole answers' ratios, below their limit, make the mean right; without them it is not."""
    of_engine = {**PLAIN, "use_vllm": True, "vllm_importance_sampling_clip_max": 1e3}
    assert judged(Setup(of_engine, 1), WORLDS[BELOW])[0].bias < 1e-6
    uncorrected = {**of_engine, "vllm_importance_sampling_correction": False}
    assert judged(Setup(uncorrected, 1), WORLDS[BELOW])[0].bias > 1e-3


def test_a_trl_that_does_something_else_is_refused(monkeypatch):
    import trl
    inner = trl.GRPOTrainer.compute_loss
    monkeypatch.setattr(trl.GRPOTrainer, "compute_loss", lambda *args: 2 * inner(*args))
    exact_trl.right_noise.cache_clear()
    with pytest.raises(UserError, match="even dr_grpo without scaling is not right"):
        judged(Setup(PLAIN, 1), WORLDS[BELOW])


def test_rows_are_those_that_the_page_has():
    stored = (ROOT / "lab/results/trl_settings.txt").read_text("utf-8")
    settings = json.loads((ROOT / "lab/results/trl_settings/settings.json").read_text("utf-8"))
    worlds = worlds_of({"loss_norm": "constant"}, 2, {about: KINDS[about] for about in (BELOW,)})
    for name in ("the defaults of TRL", "dr_grpo none, mask_truncated", "GSPO, 2 passes"):
        [line] = of_each_kind(judge(Setup(with_defaults(settings[name])), worlds, name).means)
        of_name = stored[:stored.index(f"\n{name} ")].splitlines()[-len(KINDS):]
        assert line in of_name


def test_what_is_typed(tmp_path):
    (tmp_path / "config.json").write_text('{"loss_type": "grpo", "learning_rate": 1e-6}')
    [config] = configs_of(str(tmp_path / "config.json"), {"beta": 0.04}).values()
    assert (config["loss_type"], config["beta"], config["scale_rewards"]) == ("grpo", 0.04, "group")
    assert [*exact_trl.alone(config)] == ["loss_type grpo alone", "scale_rewards group alone",
                                          "beta 0.04 alone"]
    said = program(ROOT, "-m", "lab", "exact", "--trainer", "trl", "--los_type", "x", expect=2)
    assert "GRPOConfig has no field los_type. Did you mean loss_type?" in said
