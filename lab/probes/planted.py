"""Where does credit by token pay? Any weighting or advantage in a task whose credit is known.

    python -m lab planted --only my_idea
    python -m lab planted --only "by_kind --word_weight 0.3, mask 0.1"
    python -m lab planted --only my_idea --tasks "512/48, 128/6 all"

A model writes 200 tokens and gets one reward. Token 47 has decided it and token 150 has not, but
the reward does not say so. In a text nobody knows which tokens decide. Here it is planted, so each
method can be compared with the truth.

    task      An answer has T tokens, each of them one of four symbols. At K of its positions, the
              keys, one symbol is right. The reward is the share of keys that are right; with the
              word `all` it is 1 if all of them are right, and else 0. The other tokens decide
              nothing. A task is called 200/19 if 19 of 200 tokens decide, or 200/19 all.
    policy    A small Qwen2. At each position it gets a cue, and it sees nothing of what it wrote.
              Each key has a cue of its own, and all other positions share one. So its answers are
              independent draws, and their values are exact. But all weights are shared: what an
              update does for the other tokens, it does to the keys as well.
    arms      `plain GRPO` gives all tokens of an answer the same advantage. `true credit` is V
              after the token minus V before it, so no method can know more. `mask 0.1` has weight 1
              at the keys and 0.1 at all others. Any --mitigation or --advantage is an arm, too.

A method's gain is its expected reward, averaged over a training, minus that of plain GRPO with the
same seed. All arms have the same learning rate. A second table says how hard each arm pushes one
token that decides, and one that does not.

A key has the label of an operator, and any other token that of a word. So a method that goes by
labels, as by_kind does, is told which tokens decide, and its gain says nothing about a text. A
method that needs text or continuations cannot be measured here, and says so.
"""
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

import mitigations  # noqa: F401  it fills the lists of choices
from lab.analysis.statistics import Floats, holm, mean_over
from lab.analysis.tables import WITH_INTERVAL, Row, Table, by_row
from lab.engine.methods import (ADVANTAGES, MITIGATIONS, NEVER_RESCALED, checked_credit, make,
                                method_of)
from lab.engine.errors import UserError
from lab.engine.policy import derived_seed
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import OPERATOR, THINK, WORD
from grpo import grpo, policy_loss
from lab.harness.flags import Flag, check_value, flags_of, read
from lab.harness.screen import show_status
from lab.probes.common import COMMON, Findings
from lab.engine.credited import rescaled_weight
from lab.engine.model import ModelConfig, Qwen2, rotary

PLAIN, TRUE = "plain GRPO", "true credit"
SYMBOLS, WIDTH = 4, 32
QUESTIONS, ANSWERS = 8, 8
FIRST_SEED = 5000
MASK_WEIGHT = Flag(1.0, most=1e6)  # the number at the end of a mask's name
FLAGS = {
    **COMMON,
    "only": Flag("mask 0.1", "the arms to train besides plain GRPO and true credit, separated by "
                             "commas"),
    "tasks": Flag("50/19, 200/19, 800/19", "the tasks, separated by commas"),
    "steps": Flag(60, "steps of each run. A step has 8 problems x 8 answers",
                  least=2, most=100_000),
    "seeds": Flag(16, "number of seeds of each arm", least=2, most=1000),
    "rate": Flag(1e-2, "learning rate of AdamW", above=0, most=10)}


@dataclass(frozen=True)
class Task:
    """How many tokens an answer has, how many of them decide, and whether all have to be right."""
    tokens: int
    decide: int
    all_right: bool = False

    @classmethod
    def read(cls, text: str) -> "Task":
        """The task that a text like `200/19 all` names."""
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})( all)?", text.strip())
        if not match or not 1 <= int(match[2]) <= int(match[1]):
            raise UserError(f"--tasks {text!r}: a task is written as 200/19, if 19 of 200 tokens "
                            "decide, and then all, if all of them have to be right")
        return cls(int(match[1]), int(match[2]), bool(match[3]))

    @property
    def keys(self) -> Tensor:
        """(K,): the positions that decide, in the middle of K equal parts of the answer."""
        return (2 * torch.arange(self.decide) + 1) * self.tokens // (2 * self.decide)

    @property
    def decides(self) -> Tensor:
        """(T,) bool: whether the position is a key."""
        return torch.zeros(self.tokens, dtype=torch.bool).index_fill(0, self.keys, True)

    @property
    def cue_of(self) -> Tensor:
        """(T,): the number of each position's cue, 0..K-1 at the keys and K elsewhere."""
        number = torch.full((self.tokens,), self.decide)
        return number.index_copy(0, self.keys, torch.arange(self.decide))


def reward_of(task: Task, hit: Tensor) -> Tensor:
    """(..., K) -> (...,): the reward of an answer, from its hits, which are 1 where a key is right.
    Keys are independent, so from their probabilities this is the expected reward."""
    return hit.prod(-1) if task.all_right else hit.mean(-1)


def credit_of_keys(task: Task, hit: Tensor, chance: Tensor) -> Tensor:
    """(B, K) and (K,) -> (B, K): V after each key minus V before it, where V is the expected reward
    given the tokens so far. `chance` has the probability that each key is right.

    If the reward is the share of keys that are right, only this key's part of it changes, from its
    probability to 0 or 1. If all have to be right, V before key j is 0 once a key was wrong, and
    else the probability that key j and all later ones are right.
    """
    if not task.all_right:
        return (hit - chance) / task.decide
    one = torch.ones(1)
    rest = torch.cat([chance.flip(0).cumprod(0).flip(0), one])                       # (K + 1,)
    is_right_so_far = torch.cat([one.expand(len(hit), 1), hit.cumprod(1)[:, :-1]], 1)  # (B, K)
    return is_right_so_far * (hit * rest[1:] - rest[:-1])


class Learner:
    """An untrained policy of a task, and the symbols that are right in it."""

    def __init__(self, task: Task, seed: int):
        self.task, self.seed = task, seed
        config = ModelConfig(SYMBOLS, WIDTH, 2 * WIDTH, num_hidden_layers=1, num_attention_heads=2,
                             num_key_value_heads=2, head_dim=WIDTH // 2)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derived_seed("planted", seed))
            self.model = Qwen2(config)
            self.cue = 0.02 * torch.randn(task.decide + 1, WIDTH)  # as large as fresh embeddings
            self.right = torch.randint(SYMBOLS, (task.decide,))    # (K,)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Hidden states (K + 1, D) and log-probs (K + 1, 4) at each cue. A position attends to
        itself alone, so the values are what it gets."""
        model, positions = self.model.model, torch.zeros(len(self.cue))
        x = self.cue
        for layer in model.layers:
            x = layer(x, *rotary(positions, model.config), lambda number, q, k, v: v)
        hidden = model.norm(x)
        return hidden, self.model.logits(hidden).log_softmax(-1)

    def chance(self, log_prob: Tensor) -> Tensor:
        """(K,): the probability that each key is right."""
        return log_prob[:-1].exp().gather(1, self.right[:, None])[:, 0]

    def sample(self, hidden: Tensor, log_prob: Tensor, step: int) -> Rollouts:
        """A batch of answers as a run has them, with plain GRPO's advantage and true credit."""
        task, shape = self.task, (QUESTIONS * ANSWERS, self.task.tokens)
        generator = torch.Generator().manual_seed(derived_seed("planted batch", self.seed, step))
        probability = log_prob.exp()                                                 # (K + 1, 4)
        at_each = probability[task.cue_of]                                           # (T, 4)
        ids = torch.multinomial(at_each, shape[0], replacement=True, generator=generator).T
        hit = (ids[:, task.keys] == self.right).float()                              # (B, K)
        credit = torch.zeros(shape).index_copy(
            1, task.keys, credit_of_keys(task, hit, self.chance(log_prob)))
        reward = reward_of(task, hit)
        entropy = -(probability * log_prob).sum(-1)
        collision = probability.square().sum(-1)
        hidden_of_all = hidden[task.cue_of].expand(*shape, WIDTH)
        mask = torch.ones(shape, dtype=torch.bool)
        rollouts = Rollouts(
            problems=[0] * QUESTIONS,
            prompt_ids=[[0]] * QUESTIONS,
            group=torch.arange(shape[0]) // ANSWERS,
            ids=ids,
            mask=mask,
            finished=mask[:, 0],
            log_prob=log_prob[task.cue_of, ids],
            entropy=entropy[task.cue_of].expand(shape),
            collision=collision[task.cue_of].expand(shape),
            answers=None,  # there is no text: what looks at one ends in an error
            texts=None,
            kind=torch.where(task.decides, OPERATOR, WORD).byte().expand(shape),
            section=torch.full(shape, THINK).byte(),
            scores={"reward": reward, "answer": reward, "reasoning": reward,
                    "format": torch.zeros_like(reward)},
            step=step,
            generator=generator,
            forward=SimpleNamespace(look=lambda rollouts, attention=False: {
                "hidden": hidden_of_all}),
            true_credit=credit)
        return replace(rollouts, advantage=grpo(rollouts))

    def as_policy(self) -> SimpleNamespace:
        """As much of lab.engine.policy.Policy as there is."""
        model = SimpleNamespace(config=self.model.config, device=self.model.device)
        settings = SimpleNamespace(seed=self.seed, temperature=1.0, top_k=0, loss_norm="token",
                                   max_new_tokens=self.task.tokens, micro_batch=QUESTIONS * ANSWERS)
        return SimpleNamespace(model=model, settings=settings)


# An arm is made anew for each training, because a method may keep a state. Called with a batch it
# gives the advantage and the weight of each token, as the loss takes them.
Arm = Callable[[Rollouts], tuple[Tensor, Tensor]]
Start = Callable[[Learner], Arm]


def ones(rollouts: Rollouts) -> Tensor:
    return torch.ones_like(rollouts.log_prob)


def plain_grpo(learner: Learner) -> Arm:
    return lambda rollouts: (rollouts.advantage, ones(rollouts))


def true_credit(learner: Learner) -> Arm:
    return lambda rollouts: (rollouts.true_credit, ones(rollouts))


def mask_of(elsewhere: float) -> Start:
    """Weight 1 at the keys, and less elsewhere; rescaled to a mean of 1."""
    def start(learner: Learner) -> Arm:
        weight = torch.where(learner.task.decides, 1.0, elsewhere)
        weight = weight / weight.mean()
        return lambda rollouts: (rollouts.advantage, weight * ones(rollouts))
    return start


def method(name: str, flags: dict) -> Start:
    """A choice of --mitigation or of --advantage."""
    is_weighting = name in MITIGATIONS
    chosen = MITIGATIONS[name] if is_weighting else ADVANTAGES[name]

    def start(learner: Learner) -> Arm:
        policy = learner.as_policy()
        made, rescale = make(chosen, flags, policy), "none" if name in NEVER_RESCALED else "mean"

        def arm(rollouts: Rollouts) -> tuple[Tensor, Tensor]:
            if is_weighting:
                weight, _ = rescaled_weight(made, name, rollouts, policy, rescale)
                return rollouts.advantage, weight
            return checked_credit(made, f"the advantage {name}", rollouts, policy), ones(rollouts)
        return arm
    return start


def read_arm(text: str) -> Start:
    """The arm of a text such as `my_idea --strength 2`, or of a name alone."""
    known = {PLAIN: plain_grpo, TRUE: true_credit}
    if text in known:
        return known[text]
    if text.startswith("mask "):
        return mask_of(check_value("only mask", text.removeprefix("mask "), MASK_WEIGHT))
    name, *typed = text.split(" --")
    words = []
    for flag in typed:
        words += f"--{flag}".split(maxsplit=1)
    flags = flags_of(method_of(name))
    return method(name, read(words, f"python -m lab planted --only {name}", None, flags).typed)


def train(task: Task, start: Start, seed: int, steps: int, rate: float) -> tuple[float, Floats]:
    """The expected reward, averaged over a training; and for each position (T,) how hard it was
    pushed, which is the mean of abs(weight * advantage)."""
    learner = Learner(task, seed)
    arm = start(learner)
    optimizer = torch.optim.AdamW(learner.model.parameters(), lr=rate, weight_decay=0.0)
    values, pushes = [], []
    for step in range(1, steps + 1):
        hidden, log_prob = learner.forward()
        values.append(reward_of(task, learner.chance(log_prob)).item())
        rollouts = learner.sample(hidden.detach(), log_prob.detach(), step)
        advantage, weight = arm(rollouts)                                            # (B, T) each
        pushes.append((weight * advantage).abs().mean(0))
        loss = policy_loss(log_prob[task.cue_of, rollouts.ids], advantage, weight, rollouts.mask,
                           rollouts.mask.sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    values.append(reward_of(task, learner.chance(learner.forward()[1])).item())
    # each step counts with the mean of before and after it
    return float(np.trapezoid(values) / steps), torch.stack(pushes).mean(0).double().numpy()


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    torch.set_num_threads(args.threads or 1)  # a step is too small for more
    tasks = {text: Task.read(text) for text in separated(args.tasks)}
    names = list(dict.fromkeys([PLAIN, TRUE, *separated(args.only)]))
    arms = {name: read_arm(name) for name in names}  # a wrong name is told before the training
    success: dict[tuple[str, str], Floats] = {}
    pushes: dict[tuple[str, str], Floats] = {}
    for text, task in tasks.items():
        for name, start in arms.items():
            show_status(f"{text}: {name}")
            runs = []
            for seed in range(args.seed + FIRST_SEED, args.seed + FIRST_SEED + args.seeds):
                try:
                    runs.append(train(task, start, seed, args.steps, args.rate))
                except Exception as error:  # an idea may need what this task does not have
                    raise UserError(
                        f"{name} cannot be measured in these tasks, which have no text, no "
                        f"attention and no continuations: {type(error).__name__}: "
                        f"{' '.join(str(error).split())}") from None
            success[text, name] = np.array([value for value, _ in runs])
            pushes[text, name] = np.mean([push for _, push in runs], 0)
    intro = (f"Each arm has {args.seeds} seeds, and {args.steps} steps of 8 problems x 8 answers. "
             f"The learning rate is {args.rate:g}.")
    return Findings("Where does credit by token pay?", [intro],
                    [gains_table(success), push_table(pushes)])


def separated(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def gains_table(success: dict[tuple[str, str], Floats]) -> Table:
    """The gain of each arm over plain GRPO in each task."""
    gains = {(task, name): mean_over(values - success[task, PLAIN])
             for (task, name), values in success.items() if name != PLAIN}
    tested = [key for key in gains if key[1] != TRUE]
    corrected = dict(zip(tested, holm([gains[key].p for key in tested])))
    rows: list[Row] = []
    for (task, name), values in success.items():
        rows.append([task, name, float(values.mean()), gains.get((task, name)),
                     corrected.get((task, name))])
    formats = {"task": "", "arm": "", "mean": ".1%", "gain": "points", "p": "p"}
    return Table("gains", "Mean success in training, and its gain over plain GRPO",
                 by_row(formats, rows),
                 ["The gain is in points, with Student's interval over pairs with the same seed. p "
                  "has Holm's correction over all gains but those of true credit"],
                 {"mean": "mean success", "gain": f"gain over plain GRPO{WITH_INTERVAL}"})


def push_table(pushes: dict[tuple[str, str], Floats]) -> Table:
    """How hard each arm pushes two tokens: one that decides, about a quarter into the answer, and
    one that does not, about three quarters into it."""
    rows: list[Row] = []
    for (name_of_task, name), push in pushes.items():
        task = Task.read(name_of_task)
        key = int(task.keys[task.decide // 4])
        row: Row = [name_of_task, name, f"token {key}", float(push[key]), "", None]
        others = (~task.decides).nonzero()[:, 0]
        if len(others):
            other = int(others[(others - 3 * task.tokens // 4).abs().argmin()])
            row[4:] = [f"token {other}", float(push[other])]
        rows.append(row)
    formats = {"task": "", "arm": "", "a key": "", "push": ".4f", "no key": "", "its push": ".4f"}
    return Table("push", "How hard a token is pushed that decides, and one that does not",
                 by_row(formats, rows),
                 ["A push is the mean of abs(weight * advantage) over all answers and steps. AdamW "
                  "divides by the size of the gradient, so compare the two within a row"],
                 {"a key": "it decides", "no key": "it does not", "its push": "push"})
