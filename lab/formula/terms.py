"""The design space of GRPO, as one table. A new idea of a paper is one line here.

A row is a code, such as `clip {low} {high}`, and one line of torch. The code is what is printed and
what an expectation is written in. In braces stand the numbers that the search solves for; their
names say how (BOUNDS, credit.py). Two sentences may follow: what is wrong with the row, if it is
hardly ever meant, and what is unusual, if it is sometimes meant. The loss made of one row of each
part is (formula.py):

    - sum over tokens of  weight * shape * sampler * objective(ratio, advantage)  + KLs - entropy

    advantage = finish((reward - centre) / scale), among the rows that are compared
    weight    = factor * count, at the tokens that are trained: those of the answers without what
                is `odd`

Rewards and advantages are (B,), what is per token (B, L). `v` is how the loss reads the logits
(formula.View), `n` the number of tokens of each answer, and `e` the number of a code.
"""
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from .batches import Batch

PROBED = 6  # tokens of the answers whose ratios are moved (curves.py)


class Row(NamedTuple):
    function: Callable[..., Tensor]
    wrong: str = ""
    unusual: str | Callable[..., str] = ""  # a sentence, or what makes one of the row's numbers


def rows(table: dict[str, Callable[..., Tensor] | tuple]) -> dict[str, Row]:
    return {code: Row(*(row if isinstance(row, tuple) else (row,))) for code, row in table.items()}


class Setting(NamedTuple):
    """A row's code, and its numbers."""
    code: str
    numbers: tuple[float, ...] = ()

    def __str__(self) -> str:
        numbers = iter(self.numbers)
        return re.sub(r"{\w+}", lambda _: shown(next(numbers)), self.code)


def shown(number: float) -> str:
    return "none" if math.isinf(number) else f"{number:.6g}"


def slots(code: str) -> list[str]:
    return re.findall(r"{(\w+)}", code)


# the number of a bound, if the response to a ratio r changes its form there; without a bound it is
# infinite. The ratio of a whole answer is the product of those of its PROBED tokens
BOUNDS = {
    "low": lambda r: 1 - r, "high": lambda r: r - 1, "least": lambda r: r, "most": lambda r: r,
    "log_low": lambda r: -math.log(r), "log_high": math.log,
    "inverse_low": lambda r: 1 - 1 / r, "inverse_high": lambda r: 1 / r - 1,
    "inverse_least": lambda r: 1 / r, "inverse_most": lambda r: 1 / r,
    "low_of_answer": lambda r: 1 - r ** PROBED, "high_of_answer": lambda r: r ** PROBED - 1,
    "least_of_answer": lambda r: r ** PROBED, "most_of_answer": lambda r: r ** PROBED}


def sums(value: Tensor, label: Tensor) -> Tensor:
    """(B,) the sum over each row's group."""
    return label.bincount(value)[label]


def mean_of(r: Tensor, label: Tensor) -> Tensor:
    return sums(r, label) / sums(torch.ones_like(r), label)


def variance_of(r: Tensor, label: Tensor, correction: int) -> Tensor:
    n = sums(torch.ones_like(r), label)
    return sums((r - mean_of(r, label)).square(), label) / (n - correction)


def std_of(r: Tensor, label: Tensor, correction: int) -> Tensor:
    return variance_of(r, label, correction).sqrt()


def mean_of_others(r: Tensor, label: Tensor) -> Tensor:
    return (sums(r, label) - r) / (sums(torch.ones_like(r), label) - 1)


def std_of_others(r: Tensor, label: Tensor, e: float) -> Tensor:
    """(B,) the std over n - 1 of the other answers of each row's group plus epsilon; 1, which
    divides nothing, where they are equal (NeMo-RL)."""
    others = sums(torch.ones_like(r), label) - 1
    squares = (sums(r.square(), label) - r.square()) / others
    variance = (squares - mean_of_others(r, label).square()) * others / (others - 1)
    std = variance.sqrt().nan_to_num(0.0, posinf=0.0)
    return torch.where(std > 0, std + e, 1.0)


def over_tokens(A: Tensor, n: Tensor, correction: int) -> tuple[Tensor, Tensor]:
    """The advantage minus its mean over all tokens, and its variance over them (REINFORCE++)."""
    centred = A - (A * n).sum() / n.sum()
    return centred, (centred.square() * n).sum() / (n.sum() - correction)


def of_tokens(correction: int, function: Callable[[Tensor, Tensor, float], Tensor]) -> Callable:
    return lambda A, n, e: function(*over_tokens(A, n, correction), e)


BATCH = "An answer is compared with those of the whole batch, and not with its group's alone."
GROUPS = rows({  # the rows that are compared with each other have one label
    "": lambda batch: batch.group,
    "batch": (lambda batch: torch.zeros_like(batch.group), "", BATCH)})
CENTRES = rows({  # taken off the reward r
    "mean": lambda r, label, n: mean_of(r, label),
    "raw": lambda r, label, n: torch.zeros_like(r),
    "leave one out": lambda r, label, n: mean_of_others(r, label),
    "by length": lambda r, label, n: sums(r * n, label) / sums(n, label)})  # OPO
SCALES = rows({  # what it is divided by
    "": lambda r, label, e: torch.ones_like(r),
    "over n {e}": lambda r, label, e: std_of(r, label, 0) + e,
    "over n-1 {e}": lambda r, label, e: std_of(r, label, 1) + e,
    "over n {e} root": lambda r, label, e: (variance_of(r, label, 0) + e).sqrt(),
    "over n-1 {e} root": lambda r, label, e: (variance_of(r, label, 1) + e).sqrt(),
    "over n {e} max": lambda r, label, e: std_of(r, label, 0).clamp(min=e),
    "over n-1 {e} max": lambda r, label, e: std_of(r, label, 1).clamp(min=e),
    "over n-1 of others {e}": lambda r, label, e: std_of_others(r, label, e),
    "over batch n {e}": (lambda r, label, e: r.std(correction=0) + e, "", BATCH),
    "over batch n-1 {e}": (lambda r, label, e: r.std() + e, "", BATCH),
    "over mean {e}": lambda r, label, e: mean_of(r, label) + e})  # MaxRL
FINISHES = rows({  # what is done with the advantage A
    "": lambda A, n, e: A,
    "only positive": (lambda A, n, e: A.clamp(min=0), "",
                      "Answers with a negative advantage are not trained."),
    "only negative": (lambda A, n, e: A.clamp(max=0), "",
                      "Answers with a positive advantage are not trained. A clamp without the 1, "
                      "as of the ratio from -0.2 to 0.2, does so."),
    "whitened n-1 {e}": lambda A, n, e: (A - A.mean()) / (A.std() + e),  # over all answers
    "whitened n {e}": lambda A, n, e: (A - A.mean()) / (A.std(correction=0) + e),
    "over tokens n-1 {e} root": of_tokens(1, lambda A, variance, e: A / (variance + e).sqrt()),
    "over tokens n {e} root": of_tokens(0, lambda A, variance, e: A / (variance + e).sqrt()),
    "over tokens n {e} max": of_tokens(0, lambda A, variance, e: A / variance.clamp(min=e).sqrt())})


def live(batch: Batch) -> Tensor:
    """(B,) 1 where the rewards of a row's group differ."""
    return (variance_of(batch.reward, batch.group, 0) > 1e-18).to(batch.reward.dtype)


def one(n: Tensor) -> Tensor:
    return torch.ones_like(n)


TWICE = "The number of answers divides twice."
PADDING = ("The divisor counts padding: an answer counts less in a batch that is wider (the mean "
           "is over all places, and not over those of the mask).")
COUNTS = rows({  # (B,) the weight of a token
    "token": lambda n, batch, e: one(n) / n.sum(),
    "answer": lambda n, batch, e: 1 / n / len(n),
    "group": lambda n, batch, e: 1 / sums(n, batch.group) / len(batch.group.unique()),
    "sum": lambda n, batch, e: one(n),
    "constant {N}": lambda n, batch, e: one(n) / len(n) / e,
    "answer multiplied by the number of answers": lambda n, batch, e: 1 / n,
    "answer divided by the number of answers": (lambda n, batch, e: 1 / n / len(n) ** 2, TWICE),
    "token divided by the number of answers": (
        lambda n, batch, e: one(n) / n.sum() / len(n), TWICE),
    "constant over longest answer": lambda n, batch, e: one(n) / len(n) / n.max(),
    "constant over width of a row": (lambda n, batch, e: one(n) / batch.ids.numel(), PADDING),
    "constant over width less one": (
        lambda n, batch, e: one(n) / len(n) / (batch.ids.shape[1] - 1), PADDING),
    "live token": lambda n, batch, e: one(n) / (n * live(batch)).sum().clamp(min=1)})  # DAPO
LENGTHS = rows({  # (B,) how many tokens of each row are counted
    "": lambda v: v.inside.sum(1),
    " (trained)": lambda v: v.trained.sum(1),
    " (with replies)": (lambda v: v.span.sum(1), "The divisor counts what an environment wrote."),
    " (with prompt)": (lambda v: (v.batch.ids != v.batch.pad_id).sum(1), "",
                       "The divisor counts the prompt, too."),
    " plus prompt": (lambda v: v.inside.sum(1) + v.start[:, 0], "",
                     "The divisor counts the prompt, too."),
    " less one": (lambda v: v.inside.sum(1) - 1, "",
                  "The divisor is one token less than an answer has.")})

# (B, L) bool for each kind of token. A code with "no" is that of tokens which a right loss trains.
# `cut` is the last token of an answer without an end. What an environment wrote is a reply
TOKENS = rows({
    "no middle": lambda v: v.inside & (v.place > v.start) & (v.place < v.last),
    "no cut": lambda v: (v.place == v.last) & ~v.has_end,
    "prompt": (lambda v: (v.place < v.start - 1) & v.readable, "The prompt is trained."),
    "last of prompt": (lambda v: (v.place == v.start - 1) & v.readable, "The last token of the "
                       "prompt is trained: a mask begins one place early."),
    "padding": (lambda v: (v.place > v.last + 1) & v.readable, "The padding is trained."),
    "first of padding": (lambda v: (v.place == v.last + 1) & v.readable, "The first token of the "
                         "padding is trained: a mask ends one place late."),
    "no first": (lambda v: v.place == v.start, "The first token of an answer is not trained."),
    "no end": (lambda v: (v.place == v.last) & v.has_end,
               "The token that ends an answer is not trained."),
    "replies": (lambda v: v.span & ~v.inside, "What an environment wrote within an answer is "
                "trained, although batch.mask leaves it out. With several turns this is a "
                "mistake.")})
UNFINISHED = "no unfinished"  # answers without an end are not trained at all
SHAPES = rows({  # how an answer's tokens differ
    "": lambda v: torch.ones_like(v.log_prob),
    "weight p": (lambda v: v.log_prob.exp(), "", "A token counts in proportion to its probability, "
                 "as where the logarithm is missing.")})


# x.d (B, L) is the log-ratio of a token, x.mean and x.sum that of its answer, x.log_p the token's
# log-prob, x.A the advantage. Bounds are distances from 1, but for that of a dual clip.
def ppo(r: Tensor, x: SimpleNamespace, low: float, high: float) -> Tensor:
    return torch.minimum(r * x.A, r.clamp(1 - low, 1 + high) * x.A)


def dual(r: Tensor, x: SimpleNamespace, low: float, high: float, most: float) -> Tensor:
    """Bad answers have no gradient above a third bound (arXiv 1912.09729)."""
    return torch.where(x.A < 0, torch.maximum(ppo(r, x, low, high), most * x.A),
                       ppo(r, x, low, high))


def wrong_side(r: Tensor, x: SimpleNamespace, low: float, high: float) -> Tensor:
    return torch.maximum(r * x.A, r.clamp(1 - low, 1 + high) * x.A)


def sapo(x: SimpleNamespace) -> Tensor:
    """A soft gate, with its paper's rates."""
    rate = torch.where(x.A > 0, 1.0, 1.05)
    return 4 / rate * torch.sigmoid(rate * (x.d.exp() - 1)) * x.A


def of_clipped_mean(x: SimpleNamespace, low: float, high: float) -> Tensor:
    """GMPO: the geometric mean of ratios whose logarithms are clipped one by one."""
    sign = x.A.sign()
    return x.mean_of(torch.minimum(sign * x.d, sign * x.d.clamp(-low, high)) * sign).exp() * x.A


def by_probability(x: SimpleNamespace) -> Tensor:
    """A token has no gradient where its probability, and not its ratio, has moved by more than 0.2
    the way it is pushed (arXiv 2602.04879; the default of prime-rl)."""
    moved = x.log_p.exp() - (x.log_p - x.d).exp()
    return torch.where(moved * x.A.sign() > .2, 0.0, x.d.exp() * x.A)


OLDS = rows({  # what the new log-probs are compared with
    "": lambda batch: batch.old_log_prob,
    "sampler for old": lambda batch: batch.sampler_log_prob,
    "reference for old": (lambda batch: batch.reference_log_prob, "The ratio is that to the "
                          "reference model, and not to the model that sampled.")})
def odd_bounds(low: float, high: float, *more: float) -> str:
    """What is unusual about the bounds of a clip."""
    if math.isinf(low) != math.isinf(high):
        return "The clip has one bound alone."
    if .5 < low < 1:
        return "The lower bound is far below 1: a clip of 0.2 has the lower bound 0.8."
    return ("The ratio may fall further than it may rise: are the bounds exchanged?"
            if high + 1e-4 < low < .5 else "")


UPSIDE_DOWN = "The ratio is upside down: old over new."
WRONG_SIDE = ("The clip is on the wrong side: the larger of both terms is taken (max for min), so "
              "it bounds where it should let through.")
NO_MINIMUM = ("Outside the bounds there is no gradient, whichever the sign, as in IcePop. In PPO "
              "the minimum is missing then, and a bad answer that became likely stays.")
UNDETACHED = "cispo undetached {low} {high}"
SUMMED = "The log-ratio of an answer is summed over its tokens, and GSPO has their mean."
RATIOS = rows({  # (x, bounds ...) -> the objective, to be increased
    "no ratio": lambda x: x.log_p * x.A,
    "ratio": lambda x: x.d.exp() * x.A,
    "sapo 1 1.05": sapo,
    "dppo 0.2": by_probability,
    "gspo ratio": lambda x: x.mean.exp() * x.A,
    "summed ratio": (lambda x: x.sum.exp() / x.n * x.A, "", SUMMED),
    "inverse ratio": (lambda x: (-x.d).exp() * x.A, UPSIDE_DOWN),
    "clip {low} {high}": (lambda x, *bounds: ppo(x.d.exp(), x, *bounds), "", odd_bounds),
    "clip wrong side {low} {high}": (lambda x, *bounds: wrong_side(x.d.exp(), x, *bounds),
                                     WRONG_SIDE, odd_bounds),
    "mask {low} {high}": (lambda x, low, high: x.d.exp().clamp(1 - low, 1 + high) * x.A, "",
                          NO_MINIMUM),
    "cispo {low} {high}": (
        lambda x, low, high: x.d.exp().clamp(1 - low, 1 + high).detach() * x.A * x.log_p, "",
        lambda low, high: "The weight is at most a number below 1, so hardly a token's ratio "
                          "counts." if high < 0 else ""),
    UNDETACHED: (
        lambda x, low, high: x.d.exp().clamp(1 - low, 1 + high) * x.A * x.log_p,
        "The weight of CISPO, which is the ratio, is not detached, so it is trained itself."),
    "gspo clip {low} {high}": (lambda x, *bounds: ppo(x.mean.exp(), x, *bounds), "", odd_bounds),
    "gmpo clip {log_low} {log_high}": of_clipped_mean,
    "summed clip {low_of_answer} {high_of_answer}": (
        lambda x, *bounds: ppo(x.sum.exp(), x, *bounds) / x.n, "", SUMMED),
    "inverse clip {inverse_low} {inverse_high}": (
        lambda x, *bounds: ppo((-x.d).exp(), x, *bounds), UPSIDE_DOWN, odd_bounds),
    "clip {low} {high} dual {most}": (lambda x, *bounds: dual(x.d.exp(), x, *bounds), "",
                                      odd_bounds),
    "gspo clip {low} {high} dual {most}": (lambda x, *bounds: dual(x.mean.exp(), x, *bounds), "",
                                           odd_bounds)})


def only_within(w: Tensor, low: float, high: float) -> Tensor:
    return torch.where((w >= low) & (w <= high), w, 0.0)


# w (B, L) is the probability of a token under the old model over that of the sampler, or the same
# of whole answers. Truncated importance sampling, IcePop (TRL's masks), and decoupled losses.
SAMPLERS = rows({
    "": lambda x: torch.ones_like(x.w),
    "decoupled": lambda x: x.w,
    "tis {least} {most}": lambda x, low, high: x.w.clamp(low, high),
    "icepop {least} {most}": lambda x, low, high: only_within(x.w, low, high),
    "tis of answer {least_of_answer} {most_of_answer}": lambda x, low, high: (
        x.w_sum.clamp(low, high)),
    "icepop of answer {least_of_answer} {most_of_answer}": lambda x, low, high: (
        only_within(x.w_sum, low, high)),
    "tis of mean {least} {most}": lambda x, low, high: x.w_mean.clamp(low, high),
    "icepop of mean {least} {most}": lambda x, low, high: only_within(x.w_mean, low, high),
    "inverse tis {inverse_least} {inverse_most}": (
        lambda x, low, high: (1 / x.w).clamp(low, high),
        "The correction for the sampler is upside down: sampler over old.")})


def k3(d: Tensor) -> Tensor:
    return d.exp() - d - 1


# x.d is the log-prob of the reference less x.log_p, that of the policy; x.ratio that of new and old
# probability; x.entropy that of the distribution from which the token was drawn.
TERMS = rows({
    "entropy {factor}": lambda x: -x.entropy,
    "kl k1 {factor}": (lambda x: -x.d,
                       "The KL is k1 in the loss: its gradient pushes all tokens down alike, and "
                       "its mean is 0."),
    "kl k2 {factor}": lambda x: x.d.square() / 2,
    "kl k3 {factor}": lambda x: k3(x.d),
    "kl k3 exchanged {factor}": (lambda x: k3(-x.d),
                                 "In the k3 the policy and the reference are exchanged."),
    "kl k3 sign {factor}": (lambda x: x.d.exp() + x.d - 1,
                            "The k3 has a wrong sign: it is exp(d) - d - 1 of d = reference - log "
                            "p, and one d has the other sign."),
    "kl k3 {factor} with ratio": lambda x: x.ratio * k3(x.d),
    "kl k1 {factor} with ratio": lambda x: -x.ratio * x.d,
    "kl k1 {factor} in the advantage": (
        lambda x: -x.log_p * x.d,
        "A KL is taken off the advantage and not detached, so the advantage is trained, too.")})
REFERENCES = {  # the log-probs that a KL compares with
    "": lambda batch: batch.reference_log_prob,
    " to old": lambda batch: batch.old_log_prob,
    " to sampler": lambda batch: batch.sampler_log_prob}
PLACES = {  # where a term without reward stands
    "trained": lambda v: v.trained,
    "answer": lambda v: v.inside,
    "all": lambda v: v.readable.expand_as(v.inside)}

TABLE = {"groups": GROUPS, "centre": CENTRES, "scale": SCALES, "finish": FINISHES, "count": COUNTS,
         "length": LENGTHS, "shape": SHAPES, "old": OLDS, "ratio": RATIOS, "sampler": SAMPLERS}
QUESTIONS = {  # of the search, and the parts of the table that answer them
    "credit": ("groups", "centre", "scale", "finish", "count", "length"),
    "shape": ("shape",), "ratio": ("ratio",), "sampler": ("old", "sampler")}
