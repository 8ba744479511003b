"""What one step of each arm of plans/predicted.json is expected to gain, on the untrained model.

    python -m lab.plans.predicted 32 > measured.json    # from 32 batches

Each batch is given to all methods. With g for a method's gradient of one batch, and t for the
gradient of the success rate, a step of length 1 along g gains t g / |g| on average (`step`). AdamW
divides each parameter's step by the root of the mean square of its gradients, and then it gains the
sum of t g / root(mean g^2) over the parameters (`adam`). Both are divided by what plain GRPO's step
gains, minus 1. The truth t is estimated without bias, by rloo on right and wrong answers, from all
batches but the one that gave g.
"""
import json
import sys
from collections import defaultdict
from dataclasses import replace

import torch

from lab.engine.credited import rescaled_weight, with_advantage
from lab.engine.forward import micro_batches, response_log_probs
from lab.engine.update import length_scaling
from lab.harness.build import load_policy, make_advantage, make_weighting
from lab.harness.settings import make_settings, read_flags
from lab.tools.experiment import read_plan
from lab.tools.idea import sample

# Arms of the leaderboard with plain GRPO's rate, and what they gained there, in points. The slope
# of the prediction is fitted to them by least squares.
KNOWN = {
    "--mitigation outcome_conditional": 1.0, "--loss_norm sequence": 0.8,
    "--advantage batch_mean": 0.2, "--advantage rloo": -0.1, "--mitigation equal_gradient": -1.0,
    "--advantage quantile_baseline": -1.2, "--mitigation entropy_weighted": -1.5,
    "--mitigation entropy_ratio": -2.2, "--mitigation inverse_logprob": -2.7,
    "--entropy_bonus 0.1": -5.7, "--advantage span": -5.9, "--mitigation negative_only": -7.3}
TRUTH = "--advantage rloo --loss_norm constant"


def main(batches: int) -> None:
    plan = read_plan("predicted")
    arms = {**plan.arms, **{flags: flags for flags in KNOWN}, "truth": TRUTH}
    settings = {arm: make_settings(read_flags([*plan.common.split(), *flags.split()]))
                for arm, flags in arms.items()}
    policy = load_policy(settings["none"])
    methods = {arm: (make_advantage(s, policy), make_weighting(s, policy))
               for arm, s in settings.items()}
    sums: dict[tuple[str, str], torch.Tensor] = defaultdict(lambda: torch.tensor(0.0))
    for step in range(1, batches + 1):
        batch = sample(policy, replace(settings["none"], seed=900), step)
        found = gradients(batch, methods, policy, settings, step)
        truth = found["truth"]
        for arm, g in found.items():
            length = g / g.norm()
            for name, value in (("unit", length), ("unit truth", length @ truth), ("mean", g),
                                ("square", g.square()), ("mean truth", g * truth)):
                sums[arm, name] = sums[arm, name] + value
        print(step, file=sys.stderr, flush=True)
    T = sums["truth", "mean"]
    gain = {}
    for arm in arms:
        along = sums[arm, "unit"] @ T - sums[arm, "unit truth"]
        adam = (sums[arm, "mean"] * T - sums[arm, "mean truth"]) / (
            sums[arm, "square"].sqrt() + 1e-12)
        gain[arm] = {"step": float(along), "adam": float(adam.sum())}
    plain = gain["none"]
    result = {arm: {name: of_arm[name] / plain[name] - 1 for name in plain}
              for arm, of_arm in gain.items()}
    print(json.dumps({"batches": batches, "measured": result, "known": KNOWN}, indent=1))


def gradients(batch, methods, policy, settings, step):
    """The gradient (P,) of minus the loss of each arm, from one forward pass."""
    rows = torch.arange(len(batch.mask))
    log_prob = torch.zeros_like(batch.log_prob)
    for part in micro_batches(batch, rows, len(rows)):
        log_prob = log_prob.index_add(0, part, response_log_probs(policy.model, batch, part))
    parameters, found = list(policy.model.parameters()), {}
    for arm, (advantage, weighting) in methods.items():
        s, of_arm = settings[arm], batch
        if arm == "truth":
            right = {**batch.scores, "reward": batch.scores["answer"]}
            of_arm = replace(batch, scores=right)
        of_arm = with_advantage(of_arm, advantage, policy, s, step)
        weight, _ = rescaled_weight(weighting, s.mitigation, of_arm, policy, s.rescale)
        weight = weight * length_scaling(of_arm.length, s.loss_norm, s.max_new_tokens)
        value = (weight * of_arm.advantage * log_prob * of_arm.mask).sum() / of_arm.mask.sum()
        each = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
        found[arm] = torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten()
                                for p, g in zip(parameters, each)])
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
