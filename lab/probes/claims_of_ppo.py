"""The claims of the note on PPO and GRPO: through what credit comes, and what a critic is worth."""
import json

import numpy as np
import torch

from lab.analysis.statistics import Estimate, Floats, mean_over, over_problems
from lab.analysis.tables import Table, by_row
from lab.engine.errors import PROJECT
from lab.engine.policy import Policy
from lab.probes.baseline import squares
from lab.probes.claim_rules import (ARITHMETIC, HOLDS, NOT, NOT_SEEN, ONE_READING, THRESHOLDS, TINY,
                                    CannotBeSeen, Evidence, Found, above, claim, decided,
                                    difference_of_means, mean_ratio, own_critic, stored,
                                    stored_gain, stored_results, success_by_seed, together)
from lab.probes.common import sample_batch
from grpo import group_z_score

POLICY_GRADIENT = "docs/reference/policy_gradient.md"
BOARD = "lab/reports/board.md"


@claim(4, "The reward does not say that token 47 mattered and token 150 did not", "token 47; 150",
       "lab/reports/synthetic.md")
def token_47(seen: Evidence) -> Found:
    """In a task whose truth is planted, plain GRPO pushes a token that decides and one that does
    not alike, and true credit the first alone. Of 200 tokens 19 decide, each is right with
    probability 1/4, and the reward is the share of them that is right. 1,000 groups of eight."""
    is_right = np.random.default_rng(0).random((1000, 8, 19)) < 1 / 4
    reward = torch.tensor(is_right.mean(2))
    z_score = group_z_score(reward.flatten(), torch.arange(1000).repeat_interleave(8))
    plain = z_score.abs().mean().item()  # at every token of an answer
    credit = np.abs(is_right[..., 4] - 1 / 4).mean() / 19  # V after the token minus V before it
    return Found(HOLDS if plain > 0 else NOT, {
        "on token 47 by plain GRPO": plain, "on token 150 by plain GRPO": plain,
        "on token 47 by true credit": credit, "on token 150 by true credit": 0.0}, ".4f")


@claim(4, "Credit comes through PPO's ratio, which differs by token", "", POLICY_GRADIENT)
def through_the_ratio(seen: Evidence) -> Found:
    """With one update from a batch the ratio is 1 at every token, so its value tells tokens apart
    nowhere. Its gradient does, which there is the gradient of log p."""
    gaps = [line["sampler_gap"] for line in seen.run.metrics if line["sampler_gap"] is not None]
    if not gaps:
        raise CannotBeSeen("this run has no record of the ratio")
    used, updates = seen["advantage"] != 0, seen.run.config.get("epochs", 1)
    by_value, by_gradient = updates > 1, seen["s"][used].std() > 0
    verdicts = [HOLDS if differs else NOT for differs in (by_value, by_gradient)]
    return Found(together(verdicts), {
        "update from each batch": (updates, "d"),
        "is the largest mean distance of the first ratio from 1": (max(gaps), ".0e"),
        "is the mean length of the ratio's gradient": (seen["s"][used].mean(), ".2f"),
        "its standard deviation": (seen["s"][used].std(), ".2f")})


@claim(4, "Tokens of which the policy is unsure get larger gradients", "", POLICY_GRADIENT)
def unsure_tokens(seen: Evidence) -> Found:
    """The mean squared length of log p's gradient at the logits is 1 - sum p^2. Here: the fifth
    with the most entropy over all others."""
    top = seen.most_entropy()
    return decided(above(1), {"times as large": mean_ratio(seen["problem"], seen["s"] ** 2, top,
                                                           ~top)}, ".1f")


@claim(4, "If 12 of 16 answers are right, the 4 wrong ones get strongly negative advantages",
       "4 of 16", f"{POLICY_GRADIENT}#what-does-the-z-score-do")
def rarer_outcome(seen: Evidence) -> Found:
    """-1.73, and the right ones +0.58, by arithmetic. Where 4 of 16 are right, these get +1.73. In
    this run: abs(A) of the rarer sign in a group over that of the other."""
    first = np.unique(seen["answer"], return_index=True)[1]
    problem, advantage = seen["problem"][first], seen["advantage"][first]
    right, wrong = np.bincount(problem, advantage > 0), np.bincount(problem, advantage < 0)
    rarer = np.where((right < wrong)[problem], advantage > 0, advantage < 0)
    used = ((right != wrong) & (right > 0) & (wrong > 0))[problem]
    if not used.any():
        raise CannotBeSeen("in no group one of the signs is rarer")
    x = mean_ratio(problem[used], np.abs(advantage[used]), rarer[used], ~rarer[used])
    return Found(ARITHMETIC, {"times as large": x}, ".1f")


@claim(4, "Over many problems the group comparison finds the tokens that matter", "",
       "lab/reports/change.md", stored=True)
def finds_tokens(seen: Evidence) -> Found:
    """The correlation of a step's change with the true credit on tiny. For spellings, which are
    the same token over all answers, a step before training changes what their credit says; for
    single tokens hardly."""
    rows = {f"{of}, step {step}": stored("change", f"step {step}, AdamW's first, {of}")
            for of in ("spellings", "tokens") for step in (1, 51, 101)}
    least = THRESHOLDS["follows credit"].number
    follows = [x.low > least for x in rows.values()]
    return Found(HOLDS if all(follows) else ONE_READING if any(follows) else NOT, rows, "+.2f",
                 by_interval=True)


# ------------------------------------------------------------------- the critic


@claim(4, "PPO's value function is hard to train", "", "lab/credit/critic.py")
def value_is_hard(seen: Evidence) -> Found:
    """The share of the rewards' variance that a linear critic explains after eight batches, at the
    last model. A critic that knew the true values would explain so much on the untrained tiny
    model."""
    seen.like_stored()
    explained = seen.of_model(critic_beside_mean)["explained"]
    perfect = stored("scoreboard_24", "a perfect critic explains")
    return Found(HOLDS if explained.high < perfect.low else
                 NOT if explained.low > perfect.high else NOT_SEEN,
                 {"by the critic": explained, "by true values (stored, tiny)": perfect},
                 by_interval=True)


@claim(4, "So a critic's advantages by token are noisier than GRPO's by answer", "",
       "lab exact gae")
def critic_is_noisier(seen: Evidence) -> Found:
    """The mean square of an answer's gradient with the critic's value of each prefix subtracted
    (lambda 1), over that with the mean of the other answers. Both have the same expectation, so the
    difference is noise. The critic is the one above. In the small worlds of `lab exact` a critic is
    less noisy: the mean of one to three other answers is itself noisy there."""
    found = seen.of_model(critic_beside_mean)
    x = over_problems(np.arange(len(found["critic"])), [found["critic"], found["mean"]],
                      lambda mine, usual: mine / usual, log=True)
    is_known = x.high < THRESHOLDS["a ratio"].number * x.low
    worlds = json.loads((PROJECT / "lab/results/exact_all.json").read_text("utf-8"))
    in_worlds = next(one["noise"] for one in worlds if one["method"] == "gae")
    return Found(above(1)(x) if is_known else NOT_SEEN, {
        "times as noisy": x, "in small worlds (stored)": in_worlds}, by_interval=True)


def critic_beside_mean(policy: Policy, seen: Evidence) -> dict[str, Floats | Estimate]:
    """Of 8 answers to each problem: (problems,) the mean square of the gradient with the critic's
    advantages, and with the mean of the others subtracted; and what the critic explains."""
    shape = seen.problems, 8
    rollouts = sample_batch(policy, *shape, step=100)
    advantage = own_critic(seen)(rollouts, policy)  # R - V before each token
    with_critic = squares(policy, rollouts, advantage).reshape(shape)
    plain, reward = squares(policy, rollouts).reshape(shape), numbers_of(rollouts.reward)
    others = (reward.reshape(shape).sum(1, keepdims=True) - reward.reshape(shape)) / 7
    length, a = numbers_of(rollouts.length), numbers_of(advantage)

    def explained(n: float, a: float, aa: float, r: float, rr: float) -> float:
        return 1 - (aa / n - (a / n) ** 2) / (rr / n - (r / n) ** 2)
    of_tokens = [length, a.sum(1), (a ** 2).sum(1), reward * length, reward ** 2 * length]
    return {"critic": with_critic.mean(1),
            "mean": ((reward.reshape(shape) - others) ** 2 * plain).mean(1),
            "explained": over_problems(numbers_of(rollouts.group).astype(int), of_tokens,
                                       explained)}


def numbers_of(x: torch.Tensor) -> Floats:
    return np.asarray(x.double().cpu().numpy())


@claim(4, "GRPO is often more stable than PPO", "", BOARD, stored=True)
def more_stable(seen: Evidence) -> Found:
    """The distance of a seed's success in the last third of the training from its arm's mean, with
    a critic minus without, in points."""
    def spread(arm: str) -> Floats:
        late = np.array([run[-len(run) // 3:].mean()
                         for run in success_by_seed(TINY, arm).values()])
        return np.abs(late - late.mean())
    plain = spread("none")
    return decided(above(0), {
        "with a critic": difference_of_means(spread("gae"), plain),
        "with layers of its own": difference_of_means(spread("gae-trunk"), plain)}, "points",
        without=(plain.mean(), "size"))


@claim(4, "A critic costs as much as another model, and GRPO has none", "4 models in memory",
       "lab/credit/critic.py", stored=True)
def critic_costs(seen: Evidence) -> Found:
    """Processor seconds of a step, as a multiple of plain GRPO's. A linear critic on the policy's
    hidden states is nearly free, one with layers of its own is not, and they gain alike."""
    plain = seconds_of("none")
    costs = {f"times with {name}": mean_over([seconds / plain[seed]
                                              for seed, seconds in seconds_of(arm).items()])
             for arm, name in (("gae", "a linear critic"), ("gae-trunk", "layers of its own"))}
    least = THRESHOLDS["costs a model"].number
    return Found(together([above(least)(x) for x in costs.values()]), {
        **costs, "points with a linear critic": (stored_gain(TINY, "gae"), "points"),
        "points with layers of its own": (stored_gain(TINY, "gae-trunk"), "points")},
        table=Table("methods", "", by_row(dict.fromkeys(HEADS, ""), METHODS)))


HEADS = "", "reward", "critic", "credit of a token", "models here", "answers"
METHODS = (  # as in the note; a model that is not trained is kept only with --kl and for DPO
    ("PPO", "at the end, or for steps", "yes", "its own, by GAE", "2, or 1 with a linear critic",
     "new ones"),
    ("PPO, fallback", "at the end", "no", "its answer's", "1", "new ones"),
    ("GRPO", "at the end, z-score of the group", "no", "its answer's", "1", "new ones"),
    ("RLOO", "at the end, minus the others' mean", "no", "its answer's", "1", "new ones"),
    ("DPO", "which of two is better", "no", "implicit in the loss", "2", "new ones, or a file"),
    ("RFT", "right ones are kept", "no", "1 for all", "1", "new ones, or a file"))


def seconds_of(arm: str) -> dict[str, float]:
    """An arm's processor seconds a step, by seed."""
    runs = stored_results(TINY)["values"]["runs"]
    return {name.rpartition("-s")[2]: seconds for name, (_, seconds, _) in runs.items()
            if name.rpartition("-s")[0] == arm}


@claim(4, "A clean unbiased signal for the answer can outperform a noisy biased one for tokens", "",
       "lab/reports/turns.md#a-longer-game", stored=True)
def clean_beats_biased(seen: Evidence) -> Found:
    """GAE with lambda 0 is biased while its critic is untrained. In a game of eight turns, four
    seeds at one rate (lab/results/turns/flaky.txt): GRPO's mean reward minus its."""
    runs = stored_results("claims")["turns/flaky"]["values"]
    return decided(above(0), {"of the reward": mean_over(
        [ours - theirs for ours, theirs in zip(runs["grpo"], runs["gae, lambda 0"])])}, "+.3f")


@claim(4, "DPO's credit is implicit, in its loss", "", "examples/dpo.py")
def dpo_is_implicit(seen: Evidence) -> Found:
    """Its gradient gives all tokens of the better answer one number, and all of the worse one its
    opposite: as in GRPO, an answer's tokens share one advantage."""
    return Found(ARITHMETIC, {"number for all tokens of an answer": (1, "d")})


@claim(4, "RLOO, also without a critic, is as good", "", BOARD, stored=True)
def rloo(seen: Evidence) -> Found:
    """The interval lies within one point, so a larger difference is excluded."""
    x, most = stored_gain(TINY, "rloo"), THRESHOLDS["as good"].number
    return Found(HOLDS if -most < x.low and x.high < most else NOT_SEEN,
                 {"points over plain GRPO": x}, "points", by_interval=True)


@claim(4, "Credit by token becomes important when answers are very long", "500 tokens",
       "lab/reports/synthetic.md")
def long_answers(seen: Evidence) -> Found:
    """Where the truth is planted and 19 tokens decide, true credit gains +6.3 points in answers of
    50 tokens, +8.2 of 200 and +17.3 of 800."""
    length = np.mean([line["length"] for line in seen.run.metrics])
    raise CannotBeSeen(f"answers of {length:.0f} tokens, and more than "
                       f"{THRESHOLDS['long answer'].number:g} are meant")


@claim(4, "DPO learns offline, from pairs", "", "examples/dpo.py", stored=True)
def dpo(seen: Evidence) -> Found:
    """Held-out success after 30 steps on stored pairs minus that before, at plain GRPO's learning
    rate and at a fifth of it. Sampling its own pairs it learns, too, and plain GRPO learns more."""
    numbers = {}
    for arm, name in (("offline", "offline"), ("fifth", "offline at a fifth of the rate"),
                      ("dpo", "with pairs of its own"), ("grpo", "plain GRPO")):
        runs = stored_results("claims")["dpo"]["values"]
        numbers[f"points {name}"] = mean_over([end - start for run, (start, end) in runs.items()
                                               if run.rpartition("-s")[0] == arm])
    verdicts = [above(0)(numbers[f"points offline{rate}"])
                for rate in ("", " at a fifth of the rate")]
    return Found(together(verdicts), numbers, "points", by_interval=True)
