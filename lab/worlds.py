"""Small worlds for `lab exact`: a task, a policy, all answers, and all batches of answers.

These are all answers to a problem of the world "one turn, rewards below 0", where A is the tag
<answer> and a point ends a turn:

    7.   xA7.   xx.        the policy draws 7 or x at first, and A or x after an x

A token that is alone possible has probability 1 and no gradient, so long answers can be few.
Rewards, replies and the policy's logits are random numbers that follow from a seed. Problems are
drawn with replacement, as if from many, so one group says nothing about the others.
"""
import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from lab.countdown import annotate
from lab.engine.errors import UserError
from lab.engine.model import Qwen2
from lab.engine.policy import Policy
from lab.engine.rollouts import OF_TURNS, Rollouts, score_answers
from lab.harness.settings import LabSettings
from qwen2_model import ModelConfig

Numbers = tuple[int, ...]
Batch = tuple[Numbers, ...]  # the numbers of the answers of each group
LETTERS = ".x7A!"            # one for each token
SPELLING = {"<|im_end|>": 0, "x": 1, "7": 2, "<answer>": 3, "!": 4}
STEPS = (2, 30, 1000)        # of training, at which the worlds are


class Kind(NamedTuple):
    """What a world is like. There are several turns if there are replies."""
    texts: str                             # all that the policy can write in a turn
    rewards: tuple[float, ...]
    sizes: tuple[int, ...] = (2, 2)        # of the groups of a batch
    problems: int = 2                      # with prompts of their own; with replies it is a secret
    limit: int = 4                         # max_new_tokens
    turns: int = 1                         # at most. A turn that ends with ! is the last one
    replies: tuple[str | None, ...] = ()
    pays: bool = False                     # each turn, and not the answer as a whole


TWO, THREE, BELOW_0 = (0.0, 1.0), (0.0, 0.3, 1.3), (-1.0, 0.0, 1.3)
LONG = "x" * 59
WORLDS = {
    "three groups, two rewards": Kind("7. xA7.", TWO, sizes=(2, 2, 2), problems=3),
    "one turn, rewards below 0": Kind("7. xA7. xx.", BELOW_0),
    "groups of 4 and 2": Kind("7. xA7. xx.", THREE, sizes=(4, 2)),
    "up to 10 tokens, or cut off": Kind("7. xxxA7xxx. xxxA7xxx7. xxxA7xxx77.", THREE, limit=10),
    "two turns with luck": Kind("7. xx.", TWO, limit=5, turns=2, replies=(None, "7", "x")),
    # each token ends a turn, so a long reply may look like a short one and the turn after it
    "three turns, each is paid": Kind("! 7", BELOW_0, limit=6, turns=3,
                                      replies=("7", "77"), pays=True),
    "turns cut off, groups of 3 and 2": Kind("! 7", THREE, sizes=(3, 2), problems=1, limit=4,
                                             turns=3, replies=("7", "77")),
    "rewards from -3 to 6": Kind("7. xA7. xx.", (-3.0, 0.5, 2.2, 6.0)),
    "four groups": Kind("7. xA7.", BELOW_0, sizes=(2, 2, 2, 2)),
    "groups of 8 and 2": Kind("7. xA7.", THREE, sizes=(8, 2)),
    "groups of 1 and 3": Kind("7. xA7. xx.", BELOW_0, sizes=(1, 3)),
    "2 to 61 tokens": Kind(f"7. xA7. {LONG}. {LONG}7.", THREE, limit=64)}


def worlds_of(settings: Mapping[str, Any], seeds: int,
              kinds: Mapping[str, Kind] | None = None) -> list["World"]:
    """So many worlds of each kind, or of those of WORLDS. Worlds in which hardly anything can be
    learned, or a reward is missing, are left out."""
    found = []
    for place, (about, kind) in enumerate((WORLDS if kinds is None else kinds).items()):
        worlds = (World(about, settings, seed, kind) for seed in itertools.count())
        telling = itertools.islice((w for w in worlds if w.has_all_rewards
                                    and w.truth.norm() > 0.03), seeds)
        for number, world in enumerate(telling):
            world.step = STEPS[(place + number) % len(STEPS)]
            found.append(world)
    return found


class WorldTask:
    """Rewards and replies are random, and follow from the seed, the problem and the answer."""

    def __init__(self, kind: Kind, seed: int):
        self.kind, self.seed, self.asked = kind, seed, 0
        if kind.replies:
            self.reply, self.redraw = self.own_reply, self.own_redraw

    def prompt_for(self, problem: int) -> str:
        return "x" if self.kind.replies else "x" * (1 + problem)

    show, label = prompt_for, staticmethod(annotate)

    def score(self, problem: int, text: Any) -> dict[str, Any]:
        # what a turn earns follows from it and the turns before it
        paid_for = [text[:d + 1] for d in range(len(text))] if self.kind.pays else [text]
        paid = [self.draw("reward", problem, str(one), self.kind.rewards) for one in paid_for]
        parts = {"reward": sum(paid), "answer": float(paid[-1] >= 1),
                 "format": float(paid[-1] > 0), "reasoning": 0.0}
        return parts | ({OF_TURNS: paid} if self.kind.pays else {})

    def own_reply(self, problem: int, turns: list[str]) -> str | None:
        is_last = len(turns) == self.kind.turns or turns[-1] == "!"
        return None if is_last else self.draw("reply", problem, str(turns), self.kind.replies)

    def own_redraw(self, problem: int, turns: list[str], rng: object) -> int:
        """The problems that fit, in turn: in six calls each of them comes equally often."""
        fit = [other for other in range(self.kind.problems)
               if all(self.own_reply(other, turns[:d]) == self.own_reply(problem, turns[:d])
                      for d in range(1, len(turns) + 1))]
        self.asked += 1
        return fit[self.asked % len(fit)]

    @cache  # to seed a generator takes long
    def draw(self, what: str, problem: int, text: str, choices: tuple[Any, ...]) -> Any:
        return random.Random(f"{what} {self.seed} {problem} {text}").choice(choices)


class Answer(NamedTuple):
    problem: int
    ids: Numbers
    drawn: Numbers  # 1 for each token of the policy, and 0 for those of replies
    finished: bool


class World:
    """The policy is a table of logits, with a row for each beginning of an answer. There is also a
    Qwen2, for methods that ask for hidden states, but it has no say in what is drawn."""

    def __init__(self, about: str, settings: Mapping[str, Any] = {}, seed: int = 0,
                 kind: Kind | None = None):
        self.about, self.settings, self.seed, self.step = about, settings, seed, STEPS[0]
        self.kind = kind = kind or WORLDS[about]
        self.task = WorldTask(kind, seed)
        generator = torch.Generator().manual_seed(seed)
        tokenizer = Tokenizer(models.BPE(vocab=SPELLING, merges=[]))
        tokenizer.decoder = decoders.ByteLevel()
        stop = {LETTERS.index(text[-1]) for text in kind.texts.split()}
        model = Qwen2(ModelConfig(vocab_size=len(LETTERS), hidden_size=8, intermediate_size=8,
                                  num_hidden_layers=1, head_dim=8, num_attention_heads=1,
                                  num_key_value_heads=1, eos_token_id=tuple(stop)))
        for part in model.parameters():  # those of a norm are about 1, and not 0
            torch.nn.init.normal_(part, float(part.dim() == 1), 0.6, generator=generator)
        s = LabSettings(model="world", task="world", questions=len(kind.sizes), answers=2,
                        max_new_tokens=kind.limit, **{"loss_norm": "constant", **settings})
        self.policy = WorldPolicy(model, tokenizer, self.task, s, Path(), self)
        self.answers = [*dict.fromkeys(answer for problem in range(kind.problems)
                                       for answer in self.continued(problem))]
        self.draw_policy(generator)

    def continued(self, problem: int, begun: str = "", drawn: Numbers = (),
                  turns: tuple[str, ...] = ()) -> Iterator[Answer]:
        """All answers that begin so. Several are equal where the limit cuts them off."""
        for turn in self.kind.texts.split():
            text, own, so_far = begun + turn, drawn + (1,) * len(turn), (*turns, turn.strip("."))
            reply = self.task.own_reply(problem, [*so_far])
            if reply is not None:
                yield from self.continued(problem, text + reply, own + (0,) * len(reply), so_far)
            else:
                limit, ids = self.kind.limit, tuple(map(LETTERS.index, text))
                yield Answer(problem, ids[:limit], own[:limit], len(ids) <= limit)

    def draw_policy(self, generator: torch.Generator) -> None:
        """The logits, the probabilities of all answers, and the answers as a batch."""
        self.beginnings: dict[tuple[str, Numbers], int] = {}  # the row of each
        columns = []
        for problem, ids, drawn, _ in self.answers:
            keys = [(self.task.prompt_for(problem), ids[:t]) for t in range(len(ids))]
            rows = [self.beginnings.setdefault(key, len(self.beginnings)) if own else 0
                    for key, own in zip(keys, drawn)]
            columns.append([[*column, *[0] * (self.kind.limit - len(ids))]
                            for column in (ids, drawn, rows, [1] * len(ids))])
        ids, drawn, rows, written = torch.tensor(columns).unbind(1)               # (n, T) each
        self.rows = rows  # of the logits, at each token of each answer
        mask, possible = drawn.bool(), torch.zeros(len(self.beginnings), len(LETTERS)).bool()
        possible[rows[mask], ids[mask]] = True
        logits = torch.randn(possible.shape, generator=generator).double()
        self.logits = logits.masked_fill(~possible, -1e4).requires_grad_()
        log_p = self.logits.log_softmax(1)[rows]                                  # (n, T, V)
        self.log_prob = log_p.gather(2, ids[..., None])[..., 0] * mask            # (n, T)
        self.chance = self.log_prob.sum(1).exp()  # (n,) among the answers to its problem
        p, log_p = log_p.detach().exp(), log_p.detach()
        of_tokens = torch.stack([self.log_prob.detach(), -(p * log_p).sum(2), p.square().sum(2)])
        problem, _, _, finished = zip(*self.answers)
        prompts = [[1] * len(self.task.prompt_for(one)) for one in range(self.kind.problems)]
        batch = WorldRollouts(range(len(prompts)), prompts, torch.tensor(problem), ids, mask,
                              torch.tensor(finished), *(of_tokens * mask).float(),
                              written=written.bool())
        self.rollouts = score_answers(batch, self.policy.tokenizer, self.task)

    @property
    def has_all_rewards(self) -> bool:
        of_turns = self.rollouts.of_turns[self.rollouts.ends_turn] if self.kind.pays else None
        paid = self.rollouts.reward if of_turns is None else of_turns
        return {*torch.tensor(self.kind.rewards).tolist()} == {*paid.tolist()}

    @cached_property
    def key(self) -> str:
        """A hash of its numbers, by which a later run knows it again."""
        logits = [f"{one:.3f}" for one in self.logits.flatten().tolist()]
        rewards = [f"{one:.3f}" for one in self.rollouts.reward.tolist()]
        parts = str((self.answers, self.kind.sizes, self.step, rewards, logits))
        return hashlib.sha256(parts.encode()).hexdigest()[:12]

    @cached_property
    def truth(self) -> Tensor:
        """(P,): the gradient of the expected reward at all logits."""
        expected = (self.chance * self.rollouts.reward).sum() / self.kind.problems
        return torch.autograd.grad(expected, self.logits, retain_graph=True)[0].flatten()

    @cache
    def batches(self, of_answers: bool = False, of_groups: bool = False) -> dict[Batch, float]:
        """The probabilities of all batches: with all orders of a group's answers, and of groups of
        one size, or with one order each."""
        kind, chances = self.kind, self.chance.tolist()
        count, alike = len(kind.sizes), len({*kind.sizes}) == 1
        of_sizes: list[dict[Numbers, float]] = [Counter() for _ in kind.sizes]
        for number, problem in itertools.product(range(count), range(kind.problems)):
            own = [row for row, answer in enumerate(self.answers) if answer.problem == problem]
            for rows in itertools.product(own, repeat=kind.sizes[number]):
                chance = math.prod(chances[row] for row in rows) / kind.problems
                of_sizes[number][rows if of_answers else tuple(sorted(rows))] += chance
        found: dict[Batch, float] = Counter()
        for chosen in itertools.product(*of_sizes):
            chance = math.prod(groups[rows] for groups, rows in zip(of_sizes, chosen))
            found[chosen if of_groups or not alike else tuple(sorted(chosen))] += chance
        return found

    @cache
    def batch(self, groups: Batch) -> Rollouts:
        """These answers as a step of training has them."""
        group = [number for number, rows in enumerate(groups) for _ in rows]
        problems = [self.answers[rows[0]].problem for rows in groups]
        prompts = [self.rollouts.prompt_ids[problem] for problem in problems]
        return replace(self.rollouts.of_rows(torch.tensor(sum(groups, ()))), problems=problems,
                       group=torch.tensor(group), prompt_ids=prompts, step=self.step)

    @cache
    def value(self, problem: int, prefix: Numbers, without: int = -1) -> float:
        """The mean reward of the answers that begin so and go on without this token, or 0."""
        rows = [row for row, (of_problem, ids, *_) in enumerate(self.answers)
                if of_problem == problem and ids[:len(prefix)] == prefix
                and ids[len(prefix):][:1] != (without,)]
        chance = self.chance[rows].detach()
        return float(chance @ self.rollouts.reward[rows].double() / chance.sum()) if rows else 0.0


class WorldRollouts(Rollouts):
    """A copy for a method has tensors of its own. The rest, of which a copy takes ten times as
    long, it shares."""

    def __deepcopy__(self, memo: object) -> Rollouts:
        return self.with_each(Tensor.clone)


@dataclass
class WorldPolicy(Policy):
    """A method's continuations all have their exact mean as their reward."""
    world: World

    def known_values(self, rollouts: Rollouts, prefixes: Sequence[tuple[int, Numbers]],
                     without: Sequence[int] | None) -> Tensor:
        excluded = without or [-1] * len(prefixes)
        return torch.tensor([self.world.value(rollouts.problems[group], ids, other)
                             for (group, ids), other in zip(prefixes, excluded)])

    def ask(self, *asked: object, **more: object) -> Rollouts:
        raise UserError("it samples answers, whose mean is known here only if they continue others "
                        "(continuation_rewards in lab/credit/monte_carlo.py)")
