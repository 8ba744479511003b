"""A world whose policy is a Qwen2 of a few hundred parameters, so that it can be sampled, and whose
answers are listed. lab/worlds.py has worlds for judging methods, whose policies are tables."""
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from lab.engine.model import ModelConfig, Qwen2
from lab.engine.policy import Policy
from lab.engine.rollouts import OF_TURNS, Rollouts, score_answers
from lab.harness.settings import LabSettings

Tokens = tuple[int, ...]
SPELLING = {"1": 0, "x": 1, "<answer>": 2}
PROMPT = SPELLING["x"]


class Kind(NamedTuple):
    """What a world is like. Groups of `size` answers are listed, beside a group of `beside`."""
    turns: int = 1
    problems: int = 1
    graded: bool = True                # rewards have four values, and not two
    limit: int = 3                     # max_new_tokens
    stop: tuple[int, ...] = (0,)       # tokens that end a turn
    vocabulary: int = 3
    size: int = 2
    pays: bool = False                 # each turn, and not the answer as a whole


class Answer(NamedTuple):
    problem: int
    ids: Tokens
    drawn: tuple[bool, ...]            # by the model; the others are of replies
    finished: bool
    chance: float                      # among the answers to its problem


def policy_of(task: object, kind: Kind, seed: int, settings: dict[str, Any]) -> Policy:
    """A random policy, whose distributions differ from prefix to prefix."""
    model = Qwen2(ModelConfig(
        vocab_size=kind.vocabulary, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        head_dim=8, num_attention_heads=1, num_key_value_heads=1, eos_token_id=kind.stop))
    generator = torch.Generator().manual_seed(seed)
    for part in model.parameters():
        mean = float(part.dim() == 1)  # those of a norm are 1, and not 0
        torch.nn.init.normal_(part, mean=mean, std=0.6, generator=generator)
    spelling = {text: number for text, number in SPELLING.items() if number < kind.vocabulary}
    tokenizer = Tokenizer(models.BPE(vocab=spelling, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    s = LabSettings(model="world", task="world", questions=kind.problems, answers=kind.size,
                 max_new_tokens=kind.limit, **{"loss_norm": "constant", **settings})
    return Policy(model, tokenizer, task, s, Path())


@torch.no_grad()
def next_logits(policy: Policy, ids: Tokens) -> Tensor:
    """Rounded, so that prefixes with equal distributions have equal entropies on every CPU."""
    logits = policy.model(torch.tensor([[PROMPT, *ids]]))[0, -1]
    return logits.double().round(decimals=4)


def rollouts_of(policy: Policy, answers: list[Answer], log_p: Tensor) -> Rollouts:
    """These answers, scored; `log_p` (B, T, V) has the distributions of their tokens."""
    T, groups = log_p.shape[1], range(answers[-1].problem + 1)
    ids = padded([answer.ids for answer in answers], T)
    mask = padded([answer.drawn for answer in answers], T).bool()
    written = padded([[1] * len(answer.ids) for answer in answers], T).bool()
    log_prob, p = log_p.gather(2, ids[..., None]).squeeze(2), log_p.exp()
    columns = torch.stack([log_prob, -(p * log_p).sum(2), p.square().sum(2)]).float() * mask
    finished = torch.tensor([answer.finished for answer in answers])
    batch = Rollouts(groups, [[PROMPT] for _ in groups],
                     torch.tensor([answer.problem for answer in answers]), ids, mask, finished,
                     *columns, written=written)
    return score_answers(batch, policy.tokenizer, policy.task)


def padded(rows: list, T: int) -> Tensor:
    return torch.tensor([[*row, *[0] * (T - len(row))] for row in rows])


def batch_of(rollouts: Rollouts, groups: list[list[int]]) -> Rollouts:
    """A batch whose groups are these rows, those of a group answers to one problem."""
    sizes = torch.tensor([len(rows) for rows in groups])
    problems = [int(rollouts.group[rows[0]]) for rows in groups]
    return replace(rollouts.of_rows(torch.tensor([row for rows in groups for row in rows])),
                   group=torch.arange(len(groups)).repeat_interleave(sizes), problems=problems,
                   prompt_ids=[[PROMPT] for _ in groups], step=2)


class WorldTask:
    """What an answer earns, and what the environment replies, are random numbers that follow from
    the problem and the answer."""

    def __init__(self, kind: Kind, seed: int):
        self.kind, self.seed, self.count = kind, seed, 0
        if kind.turns > 1:
            self.reply, self.redraw = self.own_reply, self.own_redraw

    def prompt_for(self, problem: int) -> str:
        return "x"

    show = prompt_for

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:
        return ([1 + (piece == b"<answer>") for piece in pieces],
                [2 * (piece == b"1") for piece in pieces])

    def score(self, problem: int, text: Any) -> dict[str, Any]:
        if not self.kind.pays:
            return self.score_of(problem, text)
        # that of a turn follows from it and the turns before it
        of_turns = [self.score_of(problem, text[:d + 1])["reward"] for d in range(len(text))]
        return {**self.score_of(problem, text), "reward": sum(of_turns), OF_TURNS: of_turns}

    def score_of(self, problem: int, text: object) -> dict[str, float]:
        draw = random.Random(f"reward {self.seed} {problem} {text}")
        right, neat = float(draw.random() < 0.4), float(draw.random() < 0.5)
        return {"reward": right + 0.3 * neat * self.kind.graded, "answer": right, "format": neat,
                "reasoning": draw.random()}

    def own_reply(self, problem: int, turns: list[str]) -> str | None:
        draw = random.Random(f"reply {self.seed} {problem} {turns}")
        return None if len(turns) == self.kind.turns else draw.choice((None, "1", "x", "xx"))

    def own_redraw(self, problem: int, turns: list[str], rng: object) -> int:
        """The problems that fit, in turn: in six calls each of them comes equally often."""
        fit = [other for other in range(self.kind.problems)
               if all(self.own_reply(other, turns[:d]) == self.own_reply(problem, turns[:d])
                      for d in range(1, len(turns) + 1))]
        self.count += 1
        return fit[self.count % len(fit)]


class World:
    """A task, its policy, and all answers to each of its problems."""

    def __init__(self, kind: Kind, settings: dict[str, Any] | None = None, seed: int = 3):
        self.kind = kind
        self.policy = policy_of(WorldTask(kind, seed), kind, seed, settings or {})
        self.next: dict[Tokens, Tensor] = {}  # of each prefix the log-probs (V,)
        self.answers = [answer for problem in range(kind.problems)
                        for answer in self.continued(problem, (), (), 1.0)]
        self.log_p = torch.stack(list(self.next.values()))  # (prefixes, V)
        number = {prefix: place for place, prefix in enumerate(self.next)}
        # (n, T) which prefix each token follows; those of replies count nowhere
        self.places = padded([[number.get(answer.ids[:t], 0) for t in range(len(answer.ids))]
                              for answer in self.answers], kind.limit)
        self.rollouts = rollouts_of(self.policy, self.answers, self.log_p[self.places])
        self.chances = torch.tensor([answer.chance for answer in self.answers]).double()

    def continued(self, problem: int, ids: Tokens, drawn: tuple[bool, ...], chance: float
                  ) -> Iterator[Answer]:
        """All answers that begin so, as the sampler would go on."""
        if len(ids) == self.kind.limit:
            yield Answer(problem, ids, drawn, False, chance)
            return
        if ids not in self.next:
            self.next[ids] = next_logits(self.policy, ids).log_softmax(0)
        for token, p in enumerate(self.next[ids].exp().tolist()):
            more, own, reply = (*ids, token), (*drawn, True), Tokens()
            if token in self.kind.stop:
                environment, written = self.policy.environment, None
                if environment:
                    written = environment.reply(problem, list(more), list(own))
                if written is None:
                    yield Answer(problem, more, own, True, chance * p)
                    continue
                reply = tuple(written[:self.kind.limit - len(more)])
            yield from self.continued(problem, more + reply, own + (False,) * len(reply),
                                      chance * p)

    def value(self, problem: int, prefix: Tokens, without: int = -1) -> float:
        """The mean reward of the answers that begin so, and go on without this token."""
        chances, total = 0.0, 0.0
        for answer, reward in zip(self.answers, self.rollouts.reward.tolist()):
            rest = answer.ids[len(prefix):]
            begins_so = answer.problem == problem and answer.ids[:len(prefix)] == prefix
            if begins_so and (not rest or rest[0] != without):
                chances, total = chances + answer.chance, total + answer.chance * reward
        return total / chances

    def gradients(self, which: Tensor, coefficients: Tensor) -> Tensor:
        """(M, prefixes * V): sum of coefficient * (onehot - p), the gradient at all logits, of M
        groups of answers (M, n) with coefficients (M, n, T)."""
        places, ids = self.places[which].flatten(1), self.rollouts.ids[which].flatten(1)
        values = (coefficients * self.rollouts.mask[which]).double().flatten(1)
        at_prefix = torch.zeros(len(which), len(self.log_p)).double().scatter_add(1, places, values)
        result = (-at_prefix[..., None] * self.log_p.exp()).flatten(1)
        return result.scatter_add(1, places * self.kind.vocabulary + ids, values)

    @property
    def truth(self) -> Tensor:
        reward = self.rollouts.reward[:, None, None].expand(-1, 1, self.kind.limit)
        each = self.gradients(torch.arange(len(self.answers))[:, None], reward)
        return self.chances @ each / self.kind.problems

    def estimates(self, advantage: Callable[[Rollouts], Tensor]) -> tuple[Tensor, Tensor]:
        """The probability (M,) of each group of answers to a problem, and the gradient (M, prefixes
        * V) that an advantage makes of it."""
        groups = [rows for problem in range(self.kind.problems)
                  for rows in itertools.combinations_with_replacement(
                      (self.rollouts.group == problem).nonzero()[:, 0].tolist(), self.kind.size)]
        chances, coefficients = [], []
        for rows in groups:
            values = advantage(batch_of(self.rollouts, [list(rows)]))
            coefficients.append(values / self.kind.size)
            orders = math.factorial(self.kind.size) / math.prod(
                map(math.factorial, Counter(rows).values()))
            chances.append(orders * self.chances[list(rows)].prod() / self.kind.problems)
        return torch.stack(chances), self.gradients(torch.tensor(groups), torch.stack(coefficients))
