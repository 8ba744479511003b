"""Is a method right on average, and how noisy is it? Computed where all batches are listed.

    python -m lab exact rloo my_idea --strength 10   # weightings or advantages, with their flags
    python -m lab exact my_file.py:my_function       # anybody's advantage: see `foreign`
    python -m lab exact --all --json                 # all methods, in some minutes

In a small world (lab/worlds.py) all batches are listed with their probabilities. Each goes through
the functions of a training step up to the loss. So what a method does on average is a sum:

    truth     the gradient of the expected reward at the logits of all beginnings of answers
    mean      the gradient of minus the loss there, averaged over all batches
    cosine    between the two. 1 is the right direction, and below 0 the reward falls
    bias      the part of the mean that is not along the truth, as a share of the mean's length
    noise     the variance of a batch's gradient over its squared length along the truth, divided
              by plain GRPO's. With a noise of 2, the same precision takes twice as many batches

For several worlds, the lowest cosine, the largest bias, and the median and largest noise are shown.
The exit status is 1 if a method is biased or has the wrong sign, and 2 if it cannot be judged; with
--all it is 0. Mistakes in groups of more than four answers, beyond ten tokens, or at other steps of
training than 2, 30 and 1000 are not seen.

An advantage has weights of 1 here, a weighting has the advantage rloo, and the loss is divided by a
constant. Samples of a method, such as continuations, are replaced by their mean. A critic learns
from 50 batches or fewer, and then stays as it is.
"""
import json
import math
import random
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo import grpo, policy_loss, rloo
from lab.engine.credited import drop_unfinished, rescaled_weight
from lab.engine.errors import UserError
from lab.engine.methods import (ADVANTAGES, MITIGATIONS, NEVER_RESCALED, Choice, checked_credit,
                                copied_state, make, method_of)
from lab.engine.rollouts import Rollouts
from lab.engine.update import length_scaling
from lab.formula.calling import LossFailed, failed, load_loss
from lab.harness.build import OF_ONE_TURN
from lab.harness.flags import Flag, flags_of, read, settle, unknown_argument
from lab.harness.settings import LabSettings
from lab.worlds import LETTERS, Batch, World, worlds_of

ROUNDING = 1e-6  # a smaller part of a typical gradient is rounding
RIGHT, BIASED, WRONG_SIGN, NOT_JUDGED = "right", "biased", "wrong sign", "cannot be judged"
OF_LOSS = {name: replace(flags_of(LabSettings)[name], requires=None) for name in (
    "loss_norm", "drop_unfinished", "rescale")}
OF_LOSS["loss_norm"] = replace(OF_LOSS["loss_norm"], default="constant")
FLAGS = OF_LOSS | {
    "seeds": Flag(3, "worlds of each kind", least=1, most=100),
    "all": Flag(False, "judge all methods"), "json": Flag(False, "print JSON")}
LEARNED_FROM = 50  # batches, by a method that keeps a state
# flags with which a method does something in answers of few tokens
SUITED: dict[str, dict[str, Any]] = {
    "measured": {"measured_above": 0.0}, "turn_credit": {"continuations": 6},
    "without_luck": {"redraws": 6}, "vine": {"values_k": 1, "values_every": "1"},
    "oracle": {"oracle_k": 1}, "learned_importance": {"importance_warmup": 0},
    "causal_ablation": {"ablate_every": 1}}


class Mean(NamedTuple):
    """What a method does on average in a world."""
    world: str             # its kind
    cosine: float
    bias: float
    length: float          # of the mean along the truth, divided by the truth's
    noise: float
    batches: int           # that were listed
    difference: str        # where the mean is most wrong, in words


class Verdict(NamedTuple):
    word: str
    why: str               # sentences about it
    means: list[Mean]      # of all worlds


def gradients(world: World, choice: Choice, flags: Mapping[str, Any], batches: Iterable[Batch],
              seed: int = 0) -> Tensor:
    """(M, P): the gradient of minus the loss at all logits, for each batch."""
    method: Any = make(choice, flags, world.policy)
    learns, found = hasattr(method, "state_dict"), []
    for groups in spread(world.batches(), LEARNED_FROM) if learns else ():
        gradient(world, choice, method, groups, 0)
    state = copied_state(method)
    for groups in batches:
        if learns:
            method.load_state_dict(state)
        elif isinstance(choice, type):  # it forgets the batch before
            method = make(choice, flags, world.policy)
        found.append(gradient(world, choice, method, groups, seed))
    return torch.stack(found)


def spread(batches: Iterable[Batch], most: int) -> list[Batch]:
    """At most so many of them, at equal distances."""
    listed = [*batches]
    return listed[::-(-len(listed) // most)]


def gradient(world: World, choice: Choice, method: Any, groups: Batch, seed: int) -> Tensor:
    """(P,): as a step of training has it."""
    name, s, policy = choice.__name__, world.policy.settings, world.policy
    is_weighting = MITIGATIONS.data.get(name) is choice
    batch = replace(world.batch(groups), generator=torch.Generator().manual_seed(seed),
                    forward=policy.extra_forward())
    values = rloo(batch) if is_weighting else checked_credit(method, f"the advantage {name}", batch,
                                                             policy)
    batch = replace(batch, advantage=values)
    batch = drop_unfinished(batch) if s.drop_unfinished else batch
    weight = batch.mask.float()
    if is_weighting:
        rescale = "none" if name in NEVER_RESCALED else s.rescale
        weight, _ = rescaled_weight(method, name, batch, policy, rescale)
    weight = weight * length_scaling(batch.length, s.loss_norm, s.max_new_tokens)
    loss = policy_loss(world.log_prob[[*sum(groups, ())]], values.double(), weight.double(),
                       batch.mask, int(batch.length.sum().clamp(min=1)))
    [at_logits] = torch.autograd.grad(loss, world.logits, retain_graph=True)
    # the loss is divided by answers * max_new_tokens, and the truth is that of one answer
    return -at_logits.flatten() * world.kind.limit


def compared(world: World, batches: Mapping[Batch, float], found: Tensor) -> Mean:
    """What the gradients (M, P) of all batches are on average, beside the truth."""
    chance, scale = torch.tensor([*batches.values()]).double(), float(world.truth.norm())
    mean, truth = chance @ found, world.truth / scale
    size, along = float(mean.norm()), float(mean @ truth)
    typical = float(chance @ found.square().sum(1)) ** 0.5
    if size <= ROUNDING * typical:
        return Mean(world.about, 0.0, 1.0, 0.0, math.inf, len(found), "it gives no gradient")
    across = float((mean - along * truth).norm())
    bias = across / size if across > ROUNDING * typical else 0.0
    noise = float(chance @ (found - mean).square().sum(1)) / along ** 2 if along > 0 else math.inf
    as_long = mean * scale / along if along > 0 else mean
    most = int((as_long - world.truth).abs().argmax())
    row, token = divmod(most, len(LETTERS))
    begun = "".join(LETTERS[one] for one in [*world.beginnings][row][1])
    difference = (f"{LETTERS[token]} {f'behind {begun}' if begun else 'at the start'} is pushed by "
                  f"{as_long[most]:+.4f}, and {world.truth[most]:+.4f} would be right")
    return Mean(world.about, along / size, bias, along / scale, noise, len(found), difference)


def judged(world: World, choice: Choice, flags: Mapping[str, Any]) -> Mean:
    """If the order of answers or groups matters to a method, all orders are listed. Whether it
    does, and whether a method draws random numbers, is seen in the most varied batches."""
    batches, shuffle, shuffled = world.batches(), random.Random(0), []
    found, listed = gradients(world, choice, flags, batches), [*batches]
    varied = sorted(range(len(listed)), key=lambda n: (
        bool(found[n].any()), len({*sum(listed[n], ())}), float(found[n].norm())))[-20:]
    some = [listed[n] for n in varied]
    if not found[varied].equal(gradients(world, choice, flags, some, seed=1)):
        raise UserError("it draws random numbers, or it remembers earlier batches")
    for groups in some:
        alike = len({*map(len, groups)}) == 1
        order = shuffle.sample(groups, len(groups)) if alike else groups
        shuffled.append(tuple(tuple(shuffle.sample(rows, len(rows))) for rows in order))
    if not found[varied].allclose(gradients(world, choice, flags, shuffled), rtol=0, atol=1e-5):
        batches = world.batches(ordered=True)
        found = gradients(world, choice, flags, batches)
    return compared(world, batches, found)


def judge(choice: Choice, flags: Mapping[str, Any], worlds: list[World],
          plain: dict[World, float]) -> Verdict:
    """`plain` keeps the noise of plain GRPO in each world."""
    name, means = choice.__name__, list[Mean]()
    reasons: dict[str, list[str]] = {"fails in": [], "is not made for": []}
    flags = {**SUITED.get(name, {}), **flags}
    for world in worlds:
        does = "is not made for"
        try:
            if name in OF_ONE_TURN and world.kind.turns > 1:
                raise UserError("it takes answers of one turn")
            make(choice, flags, world.policy)
            does = "fails in"
            mean = judged(world, choice, flags)
        except Exception as error:  # of a function that may be wrong, or that refuses the task
            reason = f" {error}" if isinstance(error, UserError) else str(failed("", error))
            reasons[does].append(f"{world.about}.{reason}")
            continue
        if world not in plain:
            batches = world.batches()
            plain[world] = compared(world, batches, gradients(world, grpo, {}, batches)).noise
        means.append(mean._replace(noise=mean.noise / plain[world]))
    word, why = in_words(name, means, bool(reasons["fails in"]))
    for does, found in reasons.items():
        if found:
            why += f" It {does} {len(found)} of {len(worlds)} worlds, first: {found[0]}"
    return Verdict(word, why, means)


def in_words(name: str, means: list[Mean], fails: bool) -> tuple[str, str]:
    """The word, and a sentence."""
    wrong = [mean for mean in means if mean.bias or mean.length <= 0]
    if not means:
        return NOT_JUDGED, f"{name} ran in no world."
    if all(mean.length == 0 for mean in means):
        return NOT_JUDGED, f"{name} gives no gradient in {len(means)} worlds."
    if not wrong:
        return NOT_JUDGED if fails else RIGHT, f"{name} is right on average in {len(means)} worlds."
    worst = min(wrong, key=lambda mean: mean.cosine)
    where = f"in {len(wrong)} of {len(means)} worlds, most in: {worst.world}. There"
    if not worst.bias or all(mean.length < 0 for mean in means):
        return WRONG_SIGN, (f"{name} has the wrong sign {where} its mean gradient points against "
                            "the true one, so the reward falls.")
    return BIASED, (f"{name} is biased {where} the cosine of its mean gradient with the true one "
                    f"is {worst.cosine:.6f}: {worst.difference}. More answers do not mend that.")


def foreign(where: str) -> Choice:
    """The function of FILE:function, anybody's advantage:

        f(rewards (B,), mask (B, T), group (B,)) -> (B,) or (B, T)

    `mask` is True at the policy's tokens, so each turn is a run of True. Answers to one problem
    stand side by side, and have the same `group`. examples/foreign_advantages.py brings functions
    of TRL, verl and AgentCreditBench into this form."""
    file, _, name = where.rpartition(":")
    try:
        function: Any = load_loss(Path(file), name)
    except LossFailed as error:
        raise UserError(str(error)) from None

    def called(rollouts: Rollouts) -> Tensor:
        given = rollouts.reward, rollouts.mask, rollouts.group
        values = torch.as_tensor(function(*(one.clone() for one in given)))
        if values.shape not in (given[0].shape, given[1].shape):
            raise UserError(f"{name} returned the shape {tuple(values.shape)}, for a mask of the "
                            f"shape {tuple(given[1].shape)}")
        return values[:, None] if values.dim() == 1 else values

    called.__name__ = name
    return called


def summary(means: list[Mean]) -> dict[str, float]:
    if not means:
        return {}
    _, cosine, bias, length, noise, batches, _ = zip(*means)
    return {"cosine": min(cosine), "bias": max(bias), "length": min(length), "noise": median(noise),
            "noise_most": max(noise), "worlds": len(means), "batches": sum(batches)}


def table(verdicts: Mapping[str, Verdict]) -> str:
    """A line for each method, or for each kind of world if there is one method; and sentences."""
    rows = [(name, means, word) for name, (word, _, means) in verdicts.items()]
    if len(rows) == 1:
        rows = [(about, [mean for mean in rows[0][1] if mean.world == about], "")
                for about in dict.fromkeys(mean.world for mean in rows[0][1])]
    lines = [f"{'':34s}{'cosine':>9s}{'bias':>9s}{'noise':>8s}{'largest':>9s}{'batches':>9s}"]
    for label, means, word in rows:
        form = "{cosine:9.4f}{bias:9.5f}{noise:8.2f}{noise_most:9.2f}{batches:9d}"
        numbers = form.format(**summary(means)) if means else " " * 44
        lines.append(f"{label[-33:]:34s}{numbers}  {word}".rstrip())
    for word, why, _ in verdicts.values():
        lines.append(f"\n{textwrap.fill(f'{word.upper()}: {why}', 100)}")
    return "\n".join(lines)


def as_json(verdicts: Mapping[str, Verdict]) -> str:
    found = [{"method": name, "word": word, "why": why, **summary(means)}
             for name, (word, why, means) in verdicts.items()]
    return json.dumps(found, indent=1).replace(" Infinity", " null")  # which JSON does not have


def main(argv: list[str]) -> int:
    others: dict[str, Any] = {}
    args = read(argv, "python -m lab exact NAME [NAME ...] [flags]", __doc__, FLAGS, {
        "[NAME ...]": "weightings or advantages, with their flags, or FILE.py:function"}, others)
    if bool(args.name) == args.all:
        raise UserError("exact needs the names of methods, or --all")
    choices = {name: foreign(name) if ":" in name else method_of(name)
               for name in args.name or (*ADVANTAGES, *MITIGATIONS)}
    own = {} if args.all else {flag: about for choice in choices.values()
                               for flag, about in flags_of(choice).items()}
    for flag in others.keys() - own.keys():
        raise unknown_argument(f"--{flag}", [*own, *FLAGS])
    values = settle(others, own)
    worlds = worlds_of({name: getattr(args, name) for name in OF_LOSS}, args.seeds)
    plain, verdicts = dict[World, float](), {}
    for name, choice in choices.items():
        typed = {flag: values[flag] for flag in others.keys() & flags_of(choice).keys()}
        verdicts[name] = judge(choice, typed, worlds, plain)
    print(as_json(verdicts) if args.json else table(verdicts))
    words = {verdict.word for verdict in verdicts.values()}
    return 0 if args.all or words == {RIGHT} else 2 if words <= {RIGHT, NOT_JUDGED} else 1
