"""Is a method right on average, and how noisy is it? Computed where all batches are listed.

    python -m lab exact rloo my_idea --strength 10   # weightings or advantages, with their flags
    python -m lab exact my_file.py:my_function       # anybody's advantage: see lab/foreign.py
    python -m lab exact my_idea --at-least 0.99      # which cosine is good enough
    python -m lab exact --all --json                 # all methods, in some minutes
    python -m lab exact my_idea --write exact.json   # later --baseline exact.json: lab/gate.py
    python -m lab exact --trainer trl --help         # the whole update of the installed TRL

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
--all it is 0. A test may call `check(my_function)` of this file. Mistakes in larger groups, longer
answers, or with other rewards than a verdict names are not seen, nor those at other steps of
training than 2, 30 and 1000.

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
from functools import cache
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
from lab.engine.update import length_scaling
from lab import gate
from lab.foreign import OTHERS, as_choice, foreign
from lab.formula.calling import LossFailed, of_the_user
from lab.harness.build import OF_ONE_TURN
from lab.harness.flags import Flag, flags_of, read, settle, unknown_argument
from lab.harness.screen import show_status
from lab.harness.settings import LabSettings
from lab.worlds import LETTERS, Batch, World, worlds_of

ROUNDING = 1e-6  # a smaller part of a typical gradient is rounding
RIGHT, ACCEPTED, BIASED = "right", "biased, but accepted", "biased"
WRONG_SIGN, NOT_JUDGED, ROUNDED = "wrong sign", "cannot be judged", "right but for rounding"
PASSED = (RIGHT, ACCEPTED, ROUNDED)
OF_LOSS = {name: replace(flags_of(LabSettings)[name], requires=None) for name in (
    "loss_norm", "drop_unfinished", "rescale")}
OF_LOSS["loss_norm"] = replace(OF_LOSS["loss_norm"], default="constant")
FLAGS = OF_LOSS | {
    "seeds": Flag(3, "worlds of each kind", least=1, most=100),
    "at_least": Flag(None, "the lowest cosine that is accepted; without it none below 1 is",
                     kind=float, most=1),
    "all": Flag(False, "judge all methods"), "json": Flag(False, "print JSON"),
    "write": Flag("", "a file for a later --baseline"),
    "baseline": Flag("", "a file of --write: what changed since, and its exit status")}
LEARNED_FROM = 50  # batches at most, by a method that keeps a state
# flags with which a method does something in answers of few tokens
SUITED: dict[str, dict[str, Any]] = {
    "measured": {"measured_above": 0.0}, "turn_credit": {"continuations": 6},
    "without_luck": {"redraws": 6}, "vine": {"values_k": 1, "values_every": "1"},
    "learned_importance": {"importance_warmup": 0},
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
    key: str = ""          # of the world


class Verdict(NamedTuple):
    word: str
    why: str               # sentences about it
    means: list[Mean]      # of all worlds


class Changes(UserError):
    """The same batch has another gradient."""


def gradients(world: World, choice: Choice, flags: Mapping[str, Any], batches: Iterable[Batch],
              seed: int = 0) -> Tensor:
    """(M, P): the gradient of minus the loss at all logits, for each batch."""
    method: Any = make(choice, flags, world.policy)
    learns, found = hasattr(method, "state_dict"), []
    every = math.ceil(len(world.batches()) / LEARNED_FROM)
    for groups in [*world.batches()][::every] if learns else ():
        gradient(world, choice, method, groups, 0)
    state = copied_state(method)
    for groups in batches:
        if learns:
            method.load_state_dict(state)
        elif isinstance(choice, type):  # it forgets the batch before
            method = make(choice, flags, world.policy)
        found.append(gradient(world, choice, method, groups, seed))
    [at_logits] = torch.autograd.grad(world.log_prob, world.logits, torch.stack(found),
                                      retain_graph=True, is_grads_batched=True)
    # the loss is divided by answers * max_new_tokens, and the truth is that of one answer
    return -at_logits.flatten(1) * world.kind.limit


def gradient(world: World, choice: Choice, method: Any, groups: Batch, seed: int) -> Tensor:
    """(n, T): the gradient of a step's loss at the log-probs of all answers of the world."""
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
    log_prob = world.log_prob.detach().requires_grad_()
    loss = policy_loss(log_prob[[*sum(groups, ())]], values.double(), weight.double(), batch.mask,
                       int(batch.length.sum().clamp(min=1)))
    return torch.autograd.grad(loss, log_prob)[0]


def compared(world: World, batches: Mapping[Batch, float], found: Tensor) -> Mean:
    """What the gradients (M, P) of all batches are on average, beside the truth."""
    chance, scale = torch.tensor([*batches.values()]).double(), float(world.truth.norm())
    mean, truth = chance @ found, world.truth / scale
    size, along = float(mean.norm()), float(mean @ truth)
    typical = float(chance @ found.square().sum(1)) ** 0.5
    if size <= ROUNDING * typical:
        return Mean(world.about, 0.0, 1.0, 0.0, math.inf, len(found), "it gives no gradient",
                    world.key)
    across = float((mean - along * truth).norm())
    bias = across / size if across > ROUNDING * typical else 0.0
    noise = float(chance @ (found - mean).square().sum(1)) / along ** 2 if along > 0 else math.inf
    as_long = mean * scale / along if along > 0 else mean
    most = int((as_long - world.truth).abs().argmax())
    row, token = divmod(most, len(LETTERS))
    begun = "".join(LETTERS[one] for one in [*world.beginnings][row][1])
    begun = begun if len(begun) < 12 else f"{len(begun)} tokens"
    difference = (f"{LETTERS[token]} {f'behind {begun}' if begun else 'at the start'} is pushed by "
                  f"{as_long[most]:+.4f}, and {world.truth[most]:+.4f} would be right")
    return Mean(world.about, along / size, bias, along / scale, noise, len(found), difference,
                world.key)


def judged(world: World, choice: Choice, flags: Mapping[str, Any]) -> Mean:
    """If the order of answers or of groups matters to a method, all orders are listed. Whether it
    does, and whether a method draws random numbers, is seen in the most varied batches."""
    batches, shuffle = world.batches(), random.Random(0)
    found, listed = gradients(world, choice, flags, batches), [*batches]
    sizes = found.norm(dim=1).tolist()
    varied = sorted(range(len(listed)), key=lambda n: (
        sizes[n] > 0, len({*sum(listed[n], ())}), sizes[n]))[-20:]
    some = [listed[n] for n in varied]
    if not found[varied].equal(gradients(world, choice, flags, some, seed=1)):
        raise Changes("it draws random numbers, or it remembers earlier batches")

    def matters(others: list[Batch]) -> bool:
        moved = gradients(world, choice, flags, others)
        return not found[varied].allclose(moved, rtol=0, atol=1e-5)

    of_answers = matters([tuple(tuple(shuffle.sample(rows, len(rows))) for rows in groups)
                          for groups in some])
    alike = len({*world.kind.sizes}) == 1
    of_groups = alike and matters([tuple(shuffle.sample(groups, len(groups))) for groups in some])
    if of_answers or of_groups:
        batches = world.batches(of_answers, of_groups)
        found = gradients(world, choice, flags, batches)
    return compared(world, batches, found)


@cache
def plain_noise(world: World) -> float:
    """The noise of plain GRPO."""
    return compared(world, world.batches(), gradients(world, grpo, {}, world.batches())).noise


def judge(choice: Choice, flags: Mapping[str, Any], worlds: list[World],
          at_least: float | None = None) -> Verdict:
    """A cosine of `at_least` is accepted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more only wait for each other at tensors of this size
    try:
        return judge_in(choice, flags, worlds, at_least)
    finally:
        torch.set_num_threads(threads)


def judge_in(choice: Choice, flags: Mapping[str, Any], worlds: list[World],
             at_least: float | None) -> Verdict:
    name, means = choice.__name__, list[Mean]()
    reasons: dict[str, list[str]] = {"fails in": [], "is not made for": []}
    flags = {**SUITED.get(name, {}), **flags}
    least = getattr(choice, "least_group", 2)  # the lab has no groups of one answer
    worlds = [world for world in worlds if min(world.kind.sizes) >= least]
    before = dict[World, Tensor]()  # gradients of some batches
    for world in worlds:
        show_status(f"{name}: {world.about}")
        does = "is not made for"
        try:
            with of_the_user(""):
                if name in OF_ONE_TURN and world.kind.turns > 1:
                    raise UserError("it takes answers of one turn")
                make(choice, flags, world.policy)
                does = "fails in"
                first = gradients(world, choice, flags, some_batches(world))
                mean = judged(world, choice, flags)
        except LossFailed as error:  # of a function that may be wrong, or that refuses the task
            if isinstance(error.__cause__, Changes):
                return Verdict(NOT_JUDGED, f"{name} cannot be judged: {error.__cause__}.", [])
            cause = error.__cause__ if isinstance(error.__cause__, UserError) else error
            reasons[does].append(f"{world.about}. {str(cause).strip()}")
            continue
        before[world] = first
        means.append(mean._replace(noise=mean.noise / plain_noise(world)))
    show_status("")
    if remembers(choice, flags, before):
        return Verdict(NOT_JUDGED, f"{name} remembers: a batch has another gradient in a later "
                       "call.", [])
    word, why = in_words(name, means, bool(reasons["fails in"]), at_least)
    if word == BIASED and summary(means)["cosine"] > 1 - 5e-6 and is_short(choice, flags, worlds):
        word, why = ROUNDED, (f"{name} is right on average but for its numbers of 16 bits, with a "
                              f"cosine of at least {summary(means)['cosine']:.6f}.")
    why += seen([*before]) if word in PASSED else ""
    if called_as := getattr(choice, "called_as", ""):
        why += f" It was called as {called_as}."
        why += "" if means else f" {OTHERS}."
    return Verdict(word, why + where_not(reasons, len(worlds)), means)


def where_not(reasons: Mapping[str, list[str]], count: int) -> str:
    return "".join(f" It {does} {len(found)} of {count} worlds, first: {found[0]}"
                   for does, found in reasons.items() if found)


def remembers(choice: Choice, flags: Mapping[str, Any], before: Mapping[World, Tensor]) -> bool:
    """Whether some batches have another gradient now than before."""
    return not all(first.equal(gradients(world, choice, flags, some_batches(world)))
                   for world, first in before.items())


def some_batches(world: World) -> list[Batch]:
    listed = [*world.batches()]
    return listed[1::max(1, len(listed) // 5)]


def is_short(choice: Choice, flags: Mapping[str, Any], worlds: list[World]) -> bool:
    """Whether an advantage's numbers have no more digits than those of 16 bits."""
    if MITIGATIONS.data.get(choice.__name__) is choice:
        return False
    world = worlds[0]
    found = [checked_credit(make(choice, flags, world.policy), "it", world.batch(groups),
                            world.policy) for groups in some_batches(world)]
    values = torch.stack(found)
    return any(values.to(short).float().equal(values) for short in (torch.bfloat16, torch.half))


def in_words(name: str, means: list[Mean], fails: bool, at_least: float | None) -> tuple[str, str]:
    """The word, and sentences."""
    wrong = [mean for mean in means if mean.bias or mean.length <= 0]
    if not means:
        return NOT_JUDGED, f"{name} ran in no world."
    if all(mean.length == 0 for mean in means):
        return NOT_JUDGED, f"{name} gives no gradient in {len(means)} worlds."
    if not wrong:
        said = f"{name} is right on average in {len(means)} worlds."
        return NOT_JUDGED if fails else RIGHT, said + about_length(means)
    worst, where = min(wrong, key=lambda mean: mean.cosine), f"{len(wrong)} of {len(means)} worlds"
    if at_least is not None and worst.cosine >= at_least:
        said = f"{name} is biased in {where}, with a cosine of at least {worst.cosine:.6f}."
        return NOT_JUDGED if fails else ACCEPTED, said + about_length(means)
    falls = sum(mean.length < 0 for mean in wrong)
    if falls == len(wrong):
        return WRONG_SIGN, (f"{name} has the wrong sign in {where}, most in: {worst.world}. There "
                            "its mean gradient points against the true one, so the reward falls.")
    said = (f"{name} is biased in {where}, most in: {worst.world}. There the cosine of its mean "
            f"gradient with the true one is {worst.cosine:.6f}: {worst.difference}. More answers "
            "do not mend that.")
    if falls:
        said += f" In {falls} worlds its mean gradient points against the true one."
    return BIASED, said + about_length(means)


def about_length(means: list[Mean]) -> str:
    """A sentence if the mean is longer or shorter than the truth, as at another learning rate."""
    least, most = min(mean.length for mean in means), max(mean.length for mean in means)
    if least <= 0 or max(1 - least, most - 1) < 1e-3:
        return ""
    times = f"{least:.2f}" if most - least < 0.005 else f"{least:.2f} to {most:.2f}"
    return f" Along the true gradient its mean is {times} times as long."


def seen(worlds: list[World]) -> str:
    """A sentence about what the worlds have, because beyond it nothing is known."""
    rewards = torch.cat([world.rollouts.reward for world in worlds])
    sizes = sorted(size for world in worlds for size in world.kind.sizes)
    return (f" Seen: rewards {rewards.min():g} to {rewards.max():g}, groups of {sizes[0]} to "
            f"{sizes[-1]}, up to {max(len(world.kind.sizes) for world in worlds)} groups, answers "
            f"of up to {max(int(world.rollouts.length.max()) for world in worlds)} tokens.")


def check(method: Any, *, at_least: float | None = None, seeds: int = 3, **flags: Any) -> Verdict:
    """For a test: an AssertionError unless the function, or the method of this name, is right on
    average, or has a cosine of `at_least` in all worlds."""
    choice = choice_of(method) if isinstance(method, str) else as_choice(method)
    verdict = judge(choice, flags, worlds_of({}, seeds), at_least)
    if verdict.word not in PASSED:
        raise AssertionError(f"{verdict.word}: {verdict.why}")
    return verdict


def choice_of(name: str) -> Choice:
    """What was typed: a method, or anybody's function as FILE.py:NAME."""
    return foreign(name if ":" in name else f"{name}:") if ".py" in name else method_of(name)


def summary(means: list[Mean]) -> dict[str, float]:
    if not means:
        return {}
    _, cosine, bias, length, noise, batches, *_ = zip(*means)
    return {"cosine": min(cosine), "bias": max(bias), "length": min(length), "noise": median(noise),
            "noise_most": max(noise), "worlds": len(means), "batches": sum(batches)}


HEADINGS = f"{'':34s}{'cosine':>9s}{'bias':>9s}{'noise':>8s}{'largest':>9s}{'batches':>9s}"


def row(label: str, means: list[Mean], word: str = "") -> str:
    form = "{cosine:9.4f}{bias:9.5f}{noise:8.2f}{noise_most:9.2f}{batches:9d}"
    numbers = form.format(**summary(means)) if means else " " * 44
    return f"{label[-33:]:34s}{numbers}  {word}".rstrip()


def of_each_kind(means: list[Mean]) -> list[str]:
    return [row(about, [mean for mean in means if mean.world == about])
            for about in dict.fromkeys(mean.world for mean in means)]


def as_json(verdicts: Mapping[str, Verdict], each_world: bool) -> str:
    found = []
    for name, (word, why, means) in verdicts.items():
        found.append({"method": name, "word": word, "why": why, **summary(means)})
        if each_world:
            found[-1]["each_world"] = [mean._asdict() for mean in means]
    return json.dumps(found, indent=1).replace(" Infinity", " null")  # which JSON does not have


def main(argv: list[str]) -> int:
    others: dict[str, Any] = {}
    args = read(argv, "python -m lab exact NAME [NAME ...] [flags]", __doc__, FLAGS, {
        "[NAME ...]": "weightings or advantages, with their flags, or FILE.py:function"}, others)
    if bool(args.name) == args.all:
        raise UserError("exact needs the names of methods, or --all")
    choices = {name: choice_of(name) for name in args.name or (*ADVANTAGES, *MITIGATIONS)}
    own = {} if args.all else {flag: about for choice in choices.values()
                               for flag, about in flags_of(choice).items()}
    for flag in others.keys() - own.keys():
        raise unknown_argument(f"--{flag}", [*own, *FLAGS])
    values = settle(others, own)
    settings = {name: getattr(args, name) for name in OF_LOSS}
    worlds = worlds_of(settings, args.seeds)
    verdicts = dict[str, Verdict]()
    rows = [] if args.json else [HEADINGS]
    for name, choice in choices.items():
        typed = {flag: values[flag] for flag in others.keys() & flags_of(choice).keys()}
        verdict = verdicts[name] = judge(choice, typed, worlds, args.at_least)
        if not args.json:
            rows += (of_each_kind(verdict.means) if len(choices) == 1
                     else [row(name, verdict.means, verdict.word)])
            print(*rows, sep="\n", flush=True)
            rows.clear()
    found = {name: verdict.means for name, verdict in verdicts.items()}
    if args.write:
        gate.write(Path(args.write), found)
    if args.baseline:
        said, status = gate.compare(Path(args.baseline), found)
        said += [one.why for one in verdicts.values() if one.word == NOT_JUDGED]
        print(*said, sep="\n")
        return status
    if args.json:
        print(as_json(verdicts, each_world=not args.all))
    for word, why, *_ in () if args.json else verdicts.values():
        print(f"\n{textwrap.fill(f'{word.upper()}: {why}', 100)}")
    words = {verdict.word for verdict in verdicts.values()}.difference(PASSED)
    return 0 if args.all or not words else 2 if words == {NOT_JUDGED} else 1
