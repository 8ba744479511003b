"""A look at an idea before it is trained: how long that will take, and what the idea does to the
gradient of a few batches.

The size of a token's gradient at the logits is abs(A) w s (grpo.gradient_size), and the noise of a
batch is the sum of the squares. A weighting that takes noise off tokens that decide nothing is as
good as a larger batch of plain GRPO: how large at the most is known before any training.
"""
import textwrap
import time
from dataclasses import replace

import numpy as np
import torch

from engine.optimizer import AdamW
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts
from engine.tokens import KINDS
from grpo import gradient_size, update, update_with_change
from harness.memory import return_memory
from harness.screen import say, show_status
from harness.load import load_optimizer, load_policy, make_advantage, make_weighting
from harness.settings import MODES, Settings
from mitigations import rescaled_weight
from train import drop_unfinished, with_advantage

BATCHES, TENTH = 4, 0.1
RARE = 0.005  # share of the gradient: of a kind that has less nothing is said


def seconds_of_runs(policy: Policy, *settings: Settings) -> list[float]:
    """A forecast for a run of each, by steps that are tried here and learn nothing. Answers are as
    long as the untrained model's."""
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


def seconds_of_step(policy: Policy, optimizer: AdamW, is_first: bool = False) -> float:
    """The first one warms up, and it is measured what becomes of its tokens."""
    s = policy.settings
    show_status("how long will it take? a step")
    methods = make_advantage(s, policy), make_weighting(s, policy)
    begun = time.perf_counter()
    batch, weight, _ = credited(sample(policy, s, 1), methods, policy, s, 1)
    update_now = update_with_change if is_first else update
    update_now(policy.model, optimizer, batch, weight, replace(s, kl=0.0))
    if policy.model.is_large:  # as a run does, whose next step takes it anew
        return_memory()
    return time.perf_counter() - begun


def seconds_of_evaluations(policy: Policy) -> float:
    """Of a whole run, by as many held-out problems as are asked at a time."""
    s = policy.settings
    if not s.eval_every:
        return 0.0
    show_status("how long will it take? an evaluation")
    problems = policy.task.held_out_problems(s.eval_tasks)[:s.questions * s.answers]
    begun = time.perf_counter()
    policy.ask(problems, 1, derived_seed("evaluation", 0))
    of_problem = (time.perf_counter() - begun) / len(problems)
    answers = s.eval_answers + ("greedy" in MODES[s.eval_modes])
    return (1 + -(-s.steps // s.eval_every)) * s.eval_tasks * answers * of_problem


def look(name: str, plain: Settings, idea: Settings, is_weighting: bool) -> None:
    """Print what the idea does to the tokens of a few batches of the untrained model."""
    policy, found, notes, by_token = load_policy(plain), [], set(), False
    of_plain, of_idea = ((make_advantage(s, policy), make_weighting(s, policy))
                         for s in (plain, idea))
    count = 1 if policy.model.is_large else BATCHES
    for step in range(1, count + 1):
        show_status(f"a look at the untrained model, batch {step} of {count}")
        batch = sample(policy, plain, step)
        usual, ones, _ = credited(batch, of_plain, policy, plain, step)
        mine, weight, note = credited(batch, of_idea, replace(policy, settings=idea), idea, step)
        notes |= {note} - {None}
        by_token |= differs_within(weight, mine.mask)
        s = gradient_size(batch.log_prob, batch.collision)
        found.append([frame[mine.mask].double() for frame in (
            mine.kind, s, usual.advantage, mine.advantage, weight)])
    usual, mine = (replace(batch, forward=None) for batch in (usual, mine))
    del policy, of_plain, of_idea  # the model: of a large one there is no room for two
    kind, *columns = (torch.cat(parts).numpy() for parts in zip(*found))
    say(f"{count * len(batch.mask)} answers of the untrained model, {len(kind)} tokens; {name} "
        "against plain GRPO:")
    show_status("a look at the untrained model, what becomes of its tokens in plain GRPO")
    after_plain = after_a_step(plain, usual, ones)
    show_status(f"a look at the untrained model, what becomes of its tokens with {name}")
    became = about_change(after_plain, after_a_step(idea, mine, weight))
    lines = about_gradient(is_weighting, kind.astype(int), *columns, by_token)
    for line in [*lines, became, *notes]:
        say(textwrap.fill(f"  {line}", 100, subsequent_indent="    "))


def sample(policy: Policy, s: Settings, step: int) -> Rollouts:
    problems = policy.task.training_problems(s.seed, step, s.questions)
    return policy.ask(problems, s.answers, derived_seed("train", s.seed, step))


def credited(batch: Rollouts, methods: tuple, policy: Policy, s: Settings, step: int) -> tuple:
    """The batch and its weights (B, T), as a step of training makes them; what is to be said."""
    advantage, weighting = methods
    rollouts = with_advantage(batch, advantage, policy, s, step)
    rollouts = drop_unfinished(rollouts) if s.drop_unfinished else rollouts
    weight, metrics = rescaled_weight(weighting, s.mitigation, rollouts, policy, s.rescale)
    return rollouts, weight, metrics["weight_note"]


def differs_within(weight: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether some answer's tokens have different weights."""
    return bool(((weight != weight[:, :1]) & mask).any())


def after_a_step(s: Settings, batch: Rollouts, weight: torch.Tensor) -> tuple[np.ndarray, ...]:
    """Of each token the kind, what it was given, A c w s^2, and what became of it in a step."""
    policy = load_policy(s)
    _, columns = update_with_change(policy.model, load_optimizer(s, policy), batch, weight,
                                    replace(s, kl=0.0))
    s_square = gradient_size(batch.log_prob, batch.collision).square()
    frames = batch.kind.long(), batch.advantage * weight * s_square, columns["change"]
    return tuple(frame[batch.mask].cpu().numpy() for frame in frames)


def about_change(plain: tuple[np.ndarray, ...], idea: tuple[np.ndarray, ...]) -> str:
    """What tokens share moves them all: not every kind gets what it is given."""
    (of_plain, fell), (of_idea, fell_of_idea) = (
        (np.bincount(kind, np.abs(change), len(KINDS)) / max(np.abs(change).sum(), 1e-30),
         given[(given > 0) & (change < 0)].sum() / max(given.clip(0).sum(), 1e-30))
        for kind, given, change in (plain, idea))
    gains = {KINDS[k]: of_idea[k] / of_plain[k] for k in np.flatnonzero(of_plain > RARE)}
    ordered = sorted(gains.items(), key=lambda item: -item[1])
    return ("what becomes of log p in a step, as a share of all change, times plain GRPO's: "
            + ", ".join(f"{name} {gain:.2f}" for name, gain in ordered)
            + f"; of the push up {fell_of_idea:.0%} went to tokens that fell, {fell:.0%} in plain "
            "GRPO")


def about_gradient(is_weighting: bool, kind, s, usual, advantage, weight,
                   tells_tokens_apart: bool = True) -> list[str]:
    """Lines about some tokens: their kind, s, plain GRPO's advantage, and what the idea gives."""
    size, was = np.abs(advantage * weight * s), np.abs(usual * s)
    mine, plain = (np.bincount(kind, one, len(KINDS)) / max(one.sum(), 1e-30)
                   for one in (size, was))
    gains = {KINDS[k]: mine[k] / plain[k] for k in np.flatnonzero(plain > RARE)}
    ordered = sorted(gains.items(), key=lambda item: -item[1])
    amount = weight if is_weighting else np.abs(advantage)
    heaviest = np.sort(amount)[::-1][:max(1, round(TENTH * len(amount)))]
    of_all = heaviest.sum() / max(amount.sum(), 1e-30)
    lines = ["share of the gradient, times plain GRPO's: "
             + ", ".join(f"{name} {gain:.2f}" for name, gain in ordered),
             f"the heaviest tenth of the tokens has {of_all:.0%} of all "
             + ("weight" if is_weighting else "abs(A)")]
    if not is_weighting:
        both = (advantage != 0) & (usual != 0)
        turned = np.mean((advantage * usual)[both] < 0) if both.any() else 0.0
        return [*lines, f"its sign is not plain GRPO's at {turned:.0%} of the tokens where both "
                        "have one"]
    if not tells_tokens_apart:
        return [*lines, "its weights are one number an answer: they move no credit between tokens"]
    at_most, even = (as_a_batch(weight, was, level) for level in (heaviest.mean(), weight.mean()))
    return [*lines,
            f"noise: worth a batch {at_most:.1f} times as large if only that tenth decides the "
            f"reward, {even:.1f} times if every token does"]


def as_a_batch(weight: np.ndarray, size: np.ndarray, level: float) -> float:
    """The batch of plain GRPO with the same noise for its signal. The noise at the logits is the
    sum of squared sizes; the signal of what decides is multiplied by its weight, `level`."""
    noise = (weight ** 2 * size ** 2).sum()
    return float(level ** 2 * (size ** 2).sum() / noise) if noise > 0 else float("nan")
