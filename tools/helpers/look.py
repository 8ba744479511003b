"""A look at an idea before it is trained: how long the training will take, and what the idea does
to the gradient of a few batches.

The gradient's size at the logits is abs(A) w s for each token (grpo.gradient_size), and the
variance of a batch's gradient comes from the sum of the squares. A weighting that takes gradient
away from tokens that decide nothing is worth as much as a larger batch of plain GRPO. Which tokens
decide is not known before training, so the size of this batch is computed for two cases: if the
tenth with the largest weights decides the reward, and if all tokens decide it alike.
"""
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from analysis.shares import shares_by
from analysis.tally import ways_of_push
from analysis.tokens import TokenTable, table_of_frames
from engine.optimizer import AdamW
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts, double
from engine.tokens import KINDS
from grpo import gradient_size, update, update_with_change
from harness.memory import keep_memory, should_keep_memory
from harness.screen import say, show_status
from harness.load import load_optimizer, load_policy, make_advantage, make_weighting
from harness.settings import Settings
from mitigations import rescaled_weight
from train import drop_unfinished, with_advantage

BATCHES, TENTH = 4, 0.1
ROUNDING = 1e-5  # weights that differ by no more than this share are equal
MOST_TIMES = 1000  # a larger factor is not told in digits
RARE = 0.005  # share of the gradient: a kind of token that has less is left out


def seconds_of_runs(policy: Policy, *settings: Settings) -> list[float]:
    """A forecast of the seconds that a run of each of these settings takes, from steps that are
    tried here and learn nothing. Answers are as long as the untrained model's."""
    if should_keep_memory(policy.model):  # as a run does
        keep_memory()
    start = time.process_time()  # a run has to import and to load as much
    optimizer = load_optimizer(replace(settings[0], learning_rate=0.0), policy)
    found = []
    for number, s in enumerate(settings):
        tried = replace(policy, settings=s)
        if number == 0 or not policy.model.is_large:  # of a large one this takes long
            of_first = seconds_of_step(tried, optimizer, is_first=True)
        of_others = (s.steps - 1) * seconds_of_step(tried, optimizer)
        found.append(start + of_first + of_others + seconds_of_evaluations(tried))
    return found


def steps_of_look(is_large: bool) -> int:
    """About so many steps of training take as long as a look, which samples a few batches and takes
    a step twice."""
    return batches_of_look(is_large) + 2


def batches_of_look(is_large: bool) -> int:
    return 1 if is_large else BATCHES


def seconds_of_step(policy: Policy, optimizer: AdamW, is_first: bool = False,
                    clock: Callable[[], float] | None = None) -> float:
    """The seconds of a step. The first one warms up, and measures the change of each log-prob."""
    clock = clock or time.perf_counter
    s = policy.settings
    show_status("how long will it take? trying a step")
    methods = make_advantage(s, policy), make_weighting(s, policy)
    begun = clock()
    batch, weight, _ = credited(sample(policy, s, 1), methods, policy, s, 1)
    update_now = update_with_change if is_first else update
    update_now(policy.model, optimizer, batch, weight, replace(s, kl=0.0))
    return clock() - begun


def seconds_of_evaluations(policy: Policy) -> float:
    """The seconds of a run's evaluations, from as many held-out problems as are asked at once."""
    s = policy.settings
    if not s.eval_every:
        return 0.0
    show_status("how long will it take? trying an evaluation")
    problems = policy.task.held_out_problems(s.eval_tasks)[:s.questions * s.answers]
    begun = time.perf_counter()
    policy.ask(problems, 1, derived_seed("evaluation", 0))
    of_problem = (time.perf_counter() - begun) / len(problems)
    return (1 + -(-s.steps // s.eval_every)) * s.eval_tasks * 2 * of_problem  # sampled, greedy


def look(name: str, plain: Settings, idea: Settings, is_weighting: bool) -> None:
    """Print what the idea does to the tokens of a few batches of the untrained model."""
    policy, found, notes, by_token = load_policy(plain), [], set(), False
    of_plain, of_idea = ((make_advantage(s, policy), make_weighting(s, policy))
                         for s in (plain, idea))
    count = batches_of_look(policy.model.is_large)
    for step in range(1, count + 1):
        show_status(f"a look at the untrained model, batch {step} of {count}")
        batch = sample(policy, plain, step)
        usual, ones, _ = credited(batch, of_plain, policy, plain, step)
        mine, weight, metrics = credited(batch, of_idea, replace(policy, settings=idea), idea, step)
        if metrics["weight_note"]:
            notes.add(metrics["weight_note"])
        by_token |= differs_within(weight, mine.mask)
        s = gradient_size(batch.log_prob, batch.collision)
        as_returned = weight / (metrics["weight_factor"] or 1)
        frames = (mine.kind, s, usual.advantage, mine.advantage, weight, as_returned)
        found.append([double(frame[mine.mask]) for frame in frames])
    usual, mine = (replace(batch, forward=None) for batch in (usual, mine))
    del policy, of_plain, of_idea  # the model: of a large one there is no room for two
    kind, *columns, as_returned = (torch.cat(parts).numpy() for parts in zip(*found))
    say(f"{name} compared with plain GRPO, for {count * len(batch.mask)} answers "
        f"({len(kind)} tokens) of the untrained model:")
    show_status("a look at the untrained model, the change of its log-probs in plain GRPO")
    in_plain = tokens_after_a_step(plain, usual, ones)
    show_status(f"a look at the untrained model, the change of its log-probs with {name}")
    in_idea = tokens_after_a_step(idea, mine, weight)
    lines = about_gradient(is_weighting, kind.astype(int), *columns, by_token, as_returned)
    for line in [*lines, about_change(in_plain, in_idea), *notes]:
        say(textwrap.fill(f"  {line}", 100, subsequent_indent="    "))


def sample(policy: Policy, s: Settings, step: int) -> Rollouts:
    problems = policy.task.training_problems(s.seed, step, s.questions)
    return policy.ask(problems, s.answers, derived_seed("train", s.seed, step))


def credited(batch: Rollouts, methods: tuple, policy: Policy, s: Settings, step: int) -> tuple:
    """The batch and its weights (B, T), as a step of training makes them; and their metrics."""
    advantage, weighting = methods
    rollouts = with_advantage(batch, advantage, policy, s, step)
    rollouts = drop_unfinished(rollouts) if s.drop_unfinished else rollouts
    weight, metrics = rescaled_weight(weighting, s.mitigation, rollouts, policy, s.rescale)
    return rollouts, weight, metrics


def differs_within(weight: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether some answer's tokens have different weights."""
    return bool(((weight != weight[:, :1]) & mask).any())


def tokens_after_a_step(s: Settings, batch: Rollouts, weight: torch.Tensor) -> TokenTable:
    """The tokens with their push A c w s^2 and the change of their log-prob in a step."""
    policy = load_policy(s)
    _, columns = update_with_change(policy.model, load_optimizer(s, policy), batch, weight,
                                    replace(s, kl=0.0))
    s_squared = gradient_size(batch.log_prob, batch.collision).square()
    return table_of_frames(batch.mask, batch.group, {
        "kind": batch.kind, "push": batch.advantage * weight * s_squared,
        "change": columns["change"]})


def about_change(plain: TokenTable, idea: TokenTable) -> str:
    """A line about the step: not every kind of token changes as it is pushed, because tokens share
    weights."""
    gains = share_gains(shares_by(idea["kind"], np.abs(idea["change"]), len(KINDS)),
                        shares_by(plain["kind"], np.abs(plain["change"]), len(KINDS)))
    return ("each kind's share of the change of log p in a step, divided by its share in plain "
            f"GRPO: {gains}. Of the upward push (A w s^2, what a token's own term of the loss "
            f"would do to its log-prob), {share_that_fell(idea):.0%} went to tokens whose log-prob "
            f"fell, and {share_that_fell(plain):.0%} in plain GRPO")


def share_that_fell(tokens: TokenTable) -> float:
    """The share of the upward push that went to tokens whose log-prob fell."""
    by_way = ways_of_push(tokens["push"], tokens["change"])
    return float(by_way["up, fell"].sum() / max(by_way["up"].sum(), 1e-30))


def share_gains(mine: np.ndarray, plain: np.ndarray) -> str:
    """word 1.50, number 0.67: by which factor each kind's share has grown, the largest first."""
    gains = {KINDS[k]: mine[k] / plain[k] for k in np.flatnonzero(plain > RARE)}
    largest_first = sorted(gains.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gain:.2f}" for name, gain in largest_first)


def about_gradient(is_weighting: bool, kind: np.ndarray, s: np.ndarray, usual: np.ndarray,
                   advantage: np.ndarray, weight: np.ndarray,
                   tells_tokens_apart: bool = True,
                   as_returned: np.ndarray | None = None) -> list[str]:
    """Lines about some tokens, (n,) each: their kind, s, plain GRPO's advantage, and the idea's
    advantage and weight. `as_returned` are the weights before they were rescaled, if the tokens
    come from several batches: each batch has another factor, and with it equal weights would no
    longer be equal."""
    size, usual_size = np.abs(advantage * weight * s), np.abs(usual * s)
    gains = share_gains(shares_by(kind, size, len(KINDS)), shares_by(kind, usual_size, len(KINDS)))
    amount = weight if is_weighting else np.abs(advantage)
    order = amount if as_returned is None or not is_weighting else as_returned
    heaviest = amount[is_heaviest(order)]
    share = in_percent(len(heaviest) / len(amount))
    of_all = heaviest.sum() / max(amount.sum(), 1e-30)
    heaviest_tokens, sum_of_all = f"the heaviest {share} of the tokens", "all weight"
    if not is_weighting:
        heaviest_tokens = f"the {share} of the tokens with the largest advantages"
        sum_of_all = "the sum of abs(A)"
    if not usual_size.any():
        return ["no token has a gradient in plain GRPO, because all its advantages are 0: there is "
                "nothing to compare with"]
    lines = [f"each kind's share of the gradient, divided by its share in plain GRPO: {gains}",
             f"{heaviest_tokens} have {in_percent(of_all)} of {sum_of_all}"]
    if len(heaviest) == len(amount):
        lines[1] = "all tokens have the same share of " + sum_of_all
    if not is_weighting:
        both = (advantage != 0) & (usual != 0)
        turned = np.mean((advantage * usual)[both] < 0) if both.any() else 0.0
        return [*lines, "the sign of the new advantage differs from that of plain GRPO's at "
                        f"{turned:.0%} of the tokens where neither is 0"]
    if not tells_tokens_apart:
        return [*lines, "all tokens of an answer have the same weight, so no credit is moved "
                        "between them"]
    if_found = as_a_batch(weight, usual_size, heaviest.mean())
    if_alike = as_a_batch(weight, usual_size, weight.mean())
    return [*lines,
            "how noisy the gradient is depends on which tokens decide the reward, and this look "
            f"does not know them. If the heaviest {share} decide it, and no others, the "
            "noise-to-signal ratio is that of plain GRPO with a batch "
            f"{in_times(if_found)} times as large. If all tokens decide it alike, it is that of a "
            f"batch {in_times(if_alike)} times as large"]


def is_heaviest(weight: np.ndarray) -> np.ndarray:
    """(n,) bool: about a tenth of the tokens, the heaviest. Those that have the same weight as the
    last of the tenth stay together: they are all in, or all out if that comes closer to a tenth,
    as it does where few tokens are lifted above all others."""
    of_last = np.sort(weight)[::-1][max(1, round(TENTH * len(weight))) - 1]
    with_equals = np.asarray(weight >= of_last * (1 - ROUNDING))
    without_equals = np.asarray(weight > of_last * (1 + ROUNDING))
    is_closer = TENTH - without_equals.mean() < with_equals.mean() - TENTH
    return without_equals if without_equals.any() and is_closer else with_equals


def in_percent(share: float) -> str:
    """A share below one percent has a digit more: it is not 0."""
    return f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"


def in_times(factor: float) -> str:
    """A number before the word `times`. With nearly all weight on a few tokens without a gradient
    it can have eight digits, which say nothing more than that it is large."""
    return f"{factor:.1f}" if factor < MOST_TIMES else f"more than {MOST_TIMES}"


def as_a_batch(weight: np.ndarray, size: np.ndarray, level: float) -> float:
    """The size of the batch of plain GRPO that has the same noise-to-signal ratio, divided by the
    size of this batch. The variance at the logits is the sum of squared sizes. The signal of the
    tokens that decide is multiplied by their weight, `level`."""
    variance = (weight ** 2 * size ** 2).sum()
    return float(level ** 2 * (size ** 2).sum() / variance) if variance > 0 else float("nan")
