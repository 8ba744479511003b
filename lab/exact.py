"""Is a method right on average, and how noisy is it? Computed where all answers are listed.

    python -m lab exact my_idea --strength 10    # a weighting or an advantage: seconds
    python -m lab exact rloo --loss_norm token   # with a flag of the loss

A world has a Qwen2 of a few hundred parameters, hidden problems, random rewards and replies. Its
answers have so few tokens that all are listed, and all groups of answers to a problem, beside fixed
answers to another one. So what a method does on average is a sum, and no estimate:

    truth     the gradient of the expected reward at the logits of all prefixes
    mean      the gradient of the loss there, averaged over all groups
    cosine    between the two. 1 is the right direction
    bias      the part of the mean that is not along the truth, as a share of the mean's length
    length    of the mean along the truth, divided by the truth's: the learning rate mends it
    noise     the variance of a batch's gradient over its squared length along the truth, divided
              by plain GRPO's: so many times the batches have the same precision

An advantage has weights of 1 here, a weighting has the advantage rloo, and the loss is divided by a
constant. What is sampled or shuffled is replaced by its mean. What a method trains, such as a
critic, is set to 2, which is wrong. A method that draws random numbers is not judged. --kl and
--entropy_bonus have another goal than the reward, and that counts as bias.
"""
import itertools
import math
import random
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from lab.credit import causal_ablation, measured, monte_carlo, turns
from lab.credit.entropy_bonus import entropy_bonus
from lab.engine.errors import UserError
from lab.engine.methods import (MITIGATIONS, NEVER_RESCALED, WHOLE_ANSWERS, Choice, Method, make,
                                method_of)
from lab.engine.policy import Policy
from lab.engine.rollouts import OF_TURNS, Rollouts, score_answers
from lab.engine.update import divergence, length_scaling, rescaling
from grpo import policy_loss, rloo
from lab.harness.build import OF_ONE_TURN
from lab.harness.flags import Flag, flags_of, read, settle, unknown_argument
from lab.harness.settings import LabSettings
from lab.credit.weightings import cells_of
from lab.engine.model import ModelConfig, Qwen2
from lab.credit.weightings import drop_unfinished

Tokens = tuple[int, ...]
SPELLING = {"1": 0, "x": 1, "<answer>": 2}
PROMPT = SPELLING["x"]
FLAGS = {name: flags_of(LabSettings)[name] for name in (
    "loss_norm", "drop_unfinished", "rescale", "placebo", "entropy_bonus", "kl", "kl_kind")}
FLAGS["loss_norm"] = replace(FLAGS["loss_norm"], default="constant")
EXACT = 1e-4  # a smaller bias is rounding
# flags with which a method does something in answers of few tokens
SUITED: dict[str, dict[str, Any]] = {
    "measured": {"measured_above": 0.0}, "turn_credit": {"continuations": 6},
    "without_luck": {"redraws": 6}, "vine": {"values_k": 1, "values_every": "1"},
    "oracle": {"oracle_k": 1}, "learned_importance": {"importance_warmup": 0},
    "pass_at_k": {"pass_k": 1}, "causal_ablation": {"ablate_every": 1}}


class Kind(NamedTuple):
    """What a world is like. Groups of `size` answers are listed, beside a group of `beside`."""
    turns: int = 1
    problems: int = 1
    graded: bool = True                # rewards have four values, and not two
    limit: int = 3                     # max_new_tokens
    stop: tuple[int, ...] = (0,)       # tokens that end a turn
    vocabulary: int = 3
    size: int = 2
    beside: int = 2
    pays: bool = False                 # each turn, and not the answer as a whole


WORLDS = {
    "one turn, rewards 0 and 1": Kind(graded=False),
    "one turn, rewards of four values": Kind(),
    "one turn, several problems": Kind(problems=3, limit=2),
    "two turns": Kind(turns=2, problems=3, limit=4, stop=(0, 1, 2)),
    "three turns": Kind(turns=3, problems=3, limit=7, stop=(0, 1), vocabulary=2),
    "three turns, each is paid": Kind(turns=3, problems=3, limit=7, stop=(0, 1), vocabulary=2,
                                      pays=True),
    "two turns, answers cut off": Kind(turns=2, problems=3, stop=(0, 1)),
    "two turns, groups of 3 and 2": Kind(turns=2, problems=3, limit=4, stop=(0, 1), vocabulary=2,
                                         size=3),
    "two turns, a group of one": Kind(turns=2, problems=3, limit=4, stop=(0, 1, 2), size=1,
                                      beside=3)}


class Answer(NamedTuple):
    problem: int
    ids: Tokens
    drawn: tuple[bool, ...]            # by the model; the others are of replies
    finished: bool
    chance: float                      # among the answers to its problem


class Mean(NamedTuple):
    """What a method does on average in a world."""
    cosine: float
    bias: float
    length: float                      # 0: it gives no gradient
    noise: float                       # variance over the squared length along the truth


# All that depends on how the engine is built is in the functions up to `coefficient`.

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


def coefficient(choice: Choice, flags: dict[str, Any], batch: Rollouts, policy: Policy, seed: int
                ) -> Tensor:
    """(B, T): by what the loss multiplies the gradient of each token's log-prob, as a step of
    train.py has it. To the reference model of --kl all tokens are equally likely."""
    s, name, method = policy.settings, choice.__name__, make(choice, flags, policy)
    for part in vars(method).values() if isinstance(choice, type) else ():
        for parameter in part.module.parameters() if hasattr(part, "module") else ():
            torch.nn.init.constant_(parameter, 2.0)  # whatever it has learned
    batch = replace(batch, generator=torch.Generator().manual_seed(seed),
                    forward=policy.extra_forward())
    is_weighting = MITIGATIONS.get(name) is choice
    spread = make(rloo, {}, policy) if is_weighting else method
    values = numbers_of(spread, batch, policy) + s.entropy_bonus * entropy_bonus(batch)
    if s.placebo.startswith("advantages"):
        values = mean_of_shuffles(values, batch, s.placebo, spread is not method or
                                  name in WHOLE_ANSWERS)
    batch = replace(batch, advantage=values)
    batch = drop_unfinished(batch) if s.drop_unfinished else batch
    weight = batch.mask.float()
    if is_weighting and weight.any():
        weight = numbers_of(method, batch, policy)
        weight = weight if weight.any() else batch.mask.float()
        if s.placebo.startswith("weights"):
            weight = mean_of_shuffles(weight, batch, s.placebo)
        weight = weight * rescaling(weight, batch, "none" if name in NEVER_RESCALED else s.rescale)
    N = batch.length.sum().clamp(min=1)
    scale = length_scaling(batch.length, s.loss_norm, s.max_new_tokens)
    log_prob = batch.log_prob.double().requires_grad_()
    loss = policy_loss(log_prob, batch.advantage.double(), weight * scale, batch.mask, float(N))
    if s.kl:
        reference = torch.full_like(log_prob, -math.log(policy.model.config.vocab_size))
        kl = divergence(log_prob, reference, s.kl_kind)
        loss = loss + s.kl * (scale * kl * batch.mask).sum() / N
    return -torch.autograd.grad(loss, log_prob)[0].detach()


def numbers_of(method: Method, batch: Rollouts, policy: Policy) -> Tensor:
    """(B, T): what a method returns, without the checks of a step, which take most of its time."""
    values = method(batch, policy).detach().float().expand(batch.mask.shape)
    values = values.masked_fill(~batch.mask, 0.0)
    if not values.isfinite().all():
        raise UserError("it is not finite here")
    return values


def mean_of_shuffles(value: Tensor, batch: Rollouts, placebo: str, whole_answers: bool = False
                     ) -> Tensor:
    """The mean over all orders in which --placebo can put these values (B, T)."""
    cells, mean = cells_of("advantages" if whole_answers else placebo, batch), value.clone()
    counted = batch.begins_turn & (batch.turn == 0) if whole_answers else batch.mask
    for cell in cells.unique():
        inside = (cells == cell) & batch.mask
        if inside.any():
            mean[inside] = value[(cells == cell) & counted].mean()
    return mean


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

    def estimates(self, choice: Choice, flags: dict[str, Any] = {}, seed: int = 0
                  ) -> tuple[Tensor, Tensor]:
        """The probability (M,) of each group, and the gradient (M, prefixes * V) that a method
        makes of it, beside the fixed group."""
        n, B = self.kind.size, self.kind.size + self.kind.beside
        of_problem = [(self.rollouts.group == problem).nonzero()[:, 0].tolist()
                      for problem in range(self.kind.problems)]
        fixed = of_problem[-1][::2][:self.kind.beside]
        groups = [rows for answers in of_problem
                  for rows in itertools.combinations_with_replacement(answers, n)]
        chances, coefficients = [], []
        for rows in groups:
            with self.exact_values():
                found = coefficient(choice, flags, batch_of(self.rollouts, [rows, fixed]),
                                    self.policy, seed)
            # the loss is divided by B * limit, and this gradient by the group's answers
            coefficients.append(found[:n] * B * self.kind.limit / n)
            orders = math.factorial(n) / math.prod(map(math.factorial, Counter(rows).values()))
            chances.append(orders * self.chances[list(rows)].prod() / self.kind.problems)
        return torch.stack(chances), self.gradients(torch.tensor(groups), torch.stack(coefficients))

    @contextmanager
    def exact_values(self) -> Iterator[None]:
        """Within it all continuations have their exact mean as their reward."""
        def exact(policy: Policy, rollouts: Rollouts, prefixes: list[monte_carlo.Prefix], k: int,
                  progress: object = None, without: list[int] | None = None) -> tuple[Tensor, Any]:
            others = without or [-1] * len(prefixes)
            values = [self.value(rollouts.problems[group], ids, other)
                      for (group, ids), other in zip(prefixes, others)]
            return torch.tensor(values)[:, None].expand(-1, k).clone(), {}

        with ExitStack() as stack:
            for module in (monte_carlo, measured, causal_ablation, turns):
                stack.enter_context(mock.patch.object(module, "continuation_rewards", exact))
            yield


def compared(chances: Tensor, gradients: Tensor, truth: Tensor) -> Mean:
    """What estimates (M, P) with these chances (M,) are on average, beside the truth (P,)."""
    mean = chances @ gradients
    size, along = mean.norm().item(), (mean @ truth / truth.norm()).item()
    if size < EXACT * truth.norm().item():
        return Mean(math.nan, 0.0, 0.0, math.inf)
    across = (mean - along * truth / truth.norm()).norm().item()
    variance = (chances @ (gradients - mean).square().sum(1)).item()
    return Mean(along / size, across / size, along / truth.norm().item(),
                variance / along ** 2 if along > 0 else math.inf)


class Verdict(NamedTuple):
    word: str                          # unbiased, biased, or why it is not judged
    means: dict[str, Mean]             # by world, where it gives a gradient
    stops: dict[str, str]              # why it gives none in other worlds


def judge(choice: Choice, flags: dict[str, Any], worlds: dict[str, World]) -> Verdict:
    """Biased is what is biased in one world."""
    name, means, stops = choice.__name__, {}, {}
    flags = {**SUITED.get(name, {}), **flags}
    for about, world in worlds.items():
        try:
            if name in OF_ONE_TURN and world.kind.turns > 1:
                raise UserError("it takes answers of one turn")
            chances, gradients = world.estimates(choice, flags)
            if not means and not gradients.equal(world.estimates(choice, flags, seed=1)[1]):
                return Verdict("it draws random numbers", {}, {})
        except Exception as error:  # a user's idea may need what these worlds lack
            stops[about] = " ".join(str(error).split()) or type(error).__name__
            continue
        mean = compared(chances, gradients, world.truth)
        if mean.length:
            means[about] = mean
        else:
            stops[about] = "it gives no gradient here"
    if not means:
        return Verdict(next(iter(stops.values())), means, stops)
    is_biased = any(mean.bias > EXACT for mean in means.values())
    return Verdict("biased" if is_biased else "unbiased", means, stops)


def in_words(name: str, verdict: Verdict) -> str:
    if verdict.word not in ("unbiased", "biased"):
        return f"{name} is not judged: {verdict.word}."
    if verdict.word == "unbiased":
        return f"{name} is right on average in all {len(verdict.means)} worlds in which it runs."
    worst, mean = min(verdict.means.items(), key=lambda one: one[1].cosine)
    count = sum(mean.bias > EXACT for mean in verdict.means.values())
    return (f"{name} is biased in {count} of {len(verdict.means)} worlds, most in: {worst}. "
            f"There its mean gradient has a cosine of {mean.cosine:.4f} with the true one, so "
            f"{mean.bias:.0%} of its length points elsewhere, and more answers do not mend that.")


def main(argv: list[str]) -> None:
    others: dict[str, Any] = {}
    known = {**FLAGS, "seed": Flag(3, "seed of the rewards, the replies and the model")}
    args = read(argv, "python -m lab exact NAME [flags]", __doc__, known, {
        "NAME": "a weighting or an advantage, with its own flags"}, others)
    choice = method_of(args.name)
    own = flags_of(choice)
    for name in others.keys() - own.keys():
        raise unknown_argument(f"--{name}", [*own, *known])
    worlds = {about: World(kind, {name: getattr(args, name) for name in FLAGS}, args.seed)
              for about, kind in WORLDS.items()}
    verdict = judge(choice, {name: settle(others, own)[name] for name in others}, worlds)
    plain = judge(method_of("grpo"), {}, worlds).means
    print(f"{'':36s}{'cosine':>8s}{'bias':>8s}{'length':>8s}{'noise':>8s}")
    for about, mean in verdict.means.items():
        row = f"{about:36s}{mean.cosine:8.4f}{mean.bias:8.3f}{mean.length:8.2f}"
        print(row + (f"{mean.noise / plain[about].noise:8.2f}" if about in plain else ""))
    for about, why in verdict.stops.items():
        print(f"{about:36s}  {why:.62s}")
    print("\n" + textwrap.fill(in_words(args.name, verdict), 100))
