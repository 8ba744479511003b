"""The design space of GRPO, as tables. A new idea of a paper is one line here.

A line is a name and a function. Three texts may stand beside it: how a sentence says it, what is
wrong with it, if it is hardly ever meant, and what is unusual, if it is sometimes meant.

The loss that `ours.py` makes of one entry of each is

    - sum over tokens of  weight * shape * objective(ratio, advantage)   + KL terms - entropy bonus

    advantage = finish((reward - CENTRES) / SCALES), among the rows that GROUPS compares
    weight    = factor * COUNTS, at the tokens of KINDS that CHOICES keeps
    shape     = SHAPES, how the tokens of one answer differ
    objective = RATIOS, KL terms and the entropy = TERMS

Rewards and advantages are (B,), what is per token (B, L). `view` is how the loss reads the logits
(ours.View), `n` the number of tokens of each answer.
"""
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from .batches import Batch

EPSILONS = (1e-4, 1e-6, 1e-8, 1e-5, 1e-3, 1e-9, 0.0)
SHARES = (.2, .1, .5, .25, .3, .4, .05, .8)  # of the tokens with the highest entropy


@dataclass(frozen=True)
class Line:
    """A line of a table."""
    function: Callable[..., Tensor]
    words: str = ""    # a number in it, as {epsilon}, is filled in
    mistake: str = ""
    unusual: str = ""

    def __call__(self, *given: object) -> Tensor:
        return self.function(*given)


def lines(table: Mapping[str, Callable[..., Tensor] | tuple]) -> dict[str, Line]:
    """A table whose lines are functions, or (function, words, mistake, unusual)."""
    made = {}
    for name, line in table.items():
        made[name] = Line(*line) if isinstance(line, tuple) else Line(line)
    return made


# ------------------------------------------------------------------ advantage
def sums(value: Tensor, label: Tensor) -> Tensor:
    """(B,) the sum over each row's group."""
    return torch.zeros(int(label.max()) + 1, dtype=value.dtype).index_add(0, label, value)[label]


def mean_of(r: Tensor, label: Tensor) -> Tensor:
    return sums(r, label) / sums(torch.ones_like(r), label)


def variance_of(r: Tensor, label: Tensor, correction: int) -> Tensor:
    n = sums(torch.ones_like(r), label)
    return sums((r - mean_of(r, label)).square(), label) / (n - correction)


def std_of(r: Tensor, label: Tensor, correction: int) -> Tensor:
    return variance_of(r, label, correction).sqrt()


def mean_of_others(r: Tensor, label: Tensor) -> Tensor:
    return (sums(r, label) - r) / (sums(torch.ones_like(r), label) - 1)


def over_tokens(advantage: Tensor, n: Tensor, correction: int, is_least: bool = False) -> Tensor:
    """Minus the mean over all tokens, divided by their std (REINFORCE++). 1e-8 is added to the
    variance, or is the least that it may be."""
    centred = advantage - (advantage * n).sum() / n.sum()
    variance = (centred.square() * n).sum() / (n.sum() - correction)
    return centred / (variance.clamp(min=1e-8) if is_least else variance + 1e-8).sqrt()


def std_of_others(r: Tensor, label: Tensor, epsilon: float) -> Tensor:
    """(B,) the std over n - 1 of the other answers of each row's group plus epsilon; 1, which
    divides nothing, where they are equal (NeMo-RL)."""
    others = sums(torch.ones_like(r), label) - 1
    squares = (sums(r.square(), label) - r.square()) / others
    variance = (squares - mean_of_others(r, label).square()) * others / (others - 1)
    std = variance.sqrt().nan_to_num(0.0, posinf=0.0)
    return torch.where(std > 0, std + epsilon, 1.0)


def whitened(advantage: Tensor, correction: int) -> Tensor:
    return (advantage - advantage.mean()) / (advantage.std(correction=correction) + 1e-8)


GROUPS = lines({  # (B,) which rows are compared with each other
    "": (lambda batch: batch.group, "its group"),
    "batch": (lambda batch: torch.zeros_like(batch.group), "the whole batch", "",
              "An answer is compared with those of the whole batch, and not with those of its "
              "group."),
    "mixed": (lambda batch: torch.arange(len(batch.group)) % len(batch.group.unique()),
              "a mixed group",
              "Groups are mixed: an answer is compared with answers to other problems, as where "
              "rows are taken for columns.")})

CENTRES = lines({  # taken off the reward r
    "mean": (lambda r, label, n: mean_of(r, label), "the mean of {among}"),
    "raw": lambda r, label, n: torch.zeros_like(r),
    "leave one out": (lambda r, label, n: mean_of_others(r, label),
                      "the mean of the other answers of {among}"),
    "by length": (lambda r, label, n: sums(r * n, label) / sums(n, label),  # OPO
                  "the mean of {among}, weighted by length")})

SCALES = lines({  # what it is divided by
    "none": lambda r, label, e: torch.ones_like(r),
    "n": (lambda r, label, e: std_of(r, label, 0) + e, "the std of {among} over n + {epsilon}"),
    "n-1": (lambda r, label, e: std_of(r, label, 1) + e,
            "the std of {among} over n - 1 + {epsilon}"),
    "n root": (lambda r, label, e: (variance_of(r, label, 0) + e).sqrt(),
               "the root of its variance (over n) + {epsilon}"),
    "n-1 root": (lambda r, label, e: (variance_of(r, label, 1) + e).sqrt(),
                 "the root of its variance (over n - 1) + {epsilon}"),
    "n max": (lambda r, label, e: std_of(r, label, 0).clamp(min=e),
              "the std of {among} over n, at least {epsilon}"),
    "n-1 max": (lambda r, label, e: std_of(r, label, 1).clamp(min=e),
                "the std of {among} over n - 1, at least {epsilon}"),
    "n-1 of others": (lambda r, label, e: std_of_others(r, label, e),
                      "the std of the other answers of {among} + {epsilon}, where that is not 0"),
    "batch n": (lambda r, label, e: r.std(correction=0) + e,
                "the std of the batch over n + {epsilon}"),
    "batch n-1": (lambda r, label, e: r.std() + e, "the std of the batch over n - 1 + {epsilon}"),
    "mean": (lambda r, label, e: mean_of(r, label) + e,
             "the mean of {among} + {epsilon}")})  # MaxRL
WITHOUT_EPSILON = ("none",)

FINISHES = lines({  # what is done with the advantage A
    "": lambda A, n: A,
    "whitened n-1": (lambda A, n: whitened(A, 1), "whitened over all answers (std over n - 1)"),
    "whitened n": (lambda A, n: whitened(A, 0), "whitened over all answers (std over n)"),
    "over tokens n-1 1e-08 root": (lambda A, n: over_tokens(A, n, 1),
                                   "whitened over all tokens (variance over n - 1)"),
    "over tokens n 1e-08 root": (lambda A, n: over_tokens(A, n, 0),
                                 "whitened over all tokens (variance over n)"),  # OpenRLHF
    "over tokens n 1e-08 max": (lambda A, n: over_tokens(A, n, 0, is_least=True),
                                "whitened over all tokens (variance over n, at least 1e-8)"),
    **{f"limit {k:g}": (lambda A, n, k=k: A.clamp(-k, k), f"clamped to [-{k:g}, {k:g}]")
       for k in (.5, 1, 2, 3, 4, 5, 10)}})


# ------------------------------------------------------------------ counting
def live(batch: Batch) -> Tensor:
    """(B,) 1 where the rewards of a row's group differ."""
    return (variance_of(batch.reward, batch.group, 0) > 1e-18).to(batch.reward.dtype)


def ended(batch: Batch) -> Tensor:
    """(B,) 1 where the answer ends with the end token."""
    last = batch.prompt_length + (batch.mask > 0).sum(1) - 1
    return (batch.ids.gather(1, last[:, None])[:, 0] == batch.end_id).to(batch.reward.dtype)


def micro_batches(rows: int) -> Callable[[Tensor, Batch], Tensor]:
    """Each part of the batch is averaged over its tokens, and the parts are averaged."""
    def weight(n: Tensor, batch: Batch) -> Tensor:
        part = torch.arange(len(n)) // rows
        return 1 / sums(n, part) / -(-len(n) // rows)
    return weight


def one(n: Tensor) -> Tensor:
    return torch.ones_like(n)


TWICE = "The number of answers divides twice."
PADDING = ("The divisor counts padding: an answer counts less in a batch that is wider (the mean "
           "is over all places, and not over those of the mask).")
COUNTS = lines({  # (B,) the weight of a token
    "token": (lambda n, batch: one(n) / n.sum(), "every token of the batch counts the same"),
    "answer": (lambda n, batch: 1 / n / len(n), "every answer counts the same"),
    "group": (lambda n, batch: 1 / sums(n, batch.group) / len(batch.group.unique()),
              "every problem counts the same"),
    "sum": (lambda n, batch: one(n), "the plain sum over all tokens"),
    "constant": (lambda n, batch: one(n) / len(n), "a token counts 1 / (answers x {constant})"),
    "answer multiplied by the number of answers": (
        lambda n, batch: 1 / n, "an answer counts 1, and the answers are summed"),
    "answer divided by the number of answers": (
        lambda n, batch: 1 / n / len(n) ** 2, "an answer counts 1 / answers squared", TWICE),
    "token divided by the number of answers": (
        lambda n, batch: one(n) / n.sum() / len(n), "a token counts 1 / (tokens x answers)", TWICE),
    "constant over longest answer": (
        lambda n, batch: one(n) / len(n) / n.max(),
        "a token counts 1 / (answers x the longest answer of the batch)"),
    "constant over width of a row": (
        lambda n, batch: one(n) / batch.ids.numel(),
        "a token counts 1 / (answers x the width of a row)", PADDING),
    "constant over width less one": (
        lambda n, batch: one(n) / len(n) / (batch.ids.shape[1] - 1),
        "a token counts 1 / (answers x the width of a row less one)", PADDING),
    "square of length": (lambda n, batch: 1 / n ** 2 / len(n), "a token counts 1 / n squared, "
                         "n the length of its answer, and answers are averaged",
                         "The length of an answer divides twice."),
    "token (with prompt)": (
        lambda n, batch: one(n) / (batch.ids != batch.pad_id).sum(),
        "a token counts 1 / (tokens of prompts and answers)"),
    "live token": (
        lambda n, batch: one(n) / (n * live(batch)).sum().clamp(min=1),
        "every token counts the same, without groups whose rewards are equal"),  # DAPO
    **{f"micro-batch {rows}": (micro_batches(rows), f"every token of a micro-batch of {rows} "
                               "answers counts the same, and micro-batches are averaged", "",
                               "A token counts more in a micro-batch with fewer tokens: the size "
                               "of micro-batches changes the gradient.")
       for rows in (2, 3, 4, 8)}})


# ------------------------------------------------------------------ tokens
def kinds(view: SimpleNamespace) -> dict[str, Tensor]:
    """(B, L) bool for each kind of token; `cut` is the last one of an answer without an end."""
    batch, place = view.batch, view.place
    start, has_end = batch.prompt_length[:, None], ended(batch)[:, None] > 0
    stop = start + (batch.mask > 0).sum(1, keepdim=True)
    return {"prompt": (place < start - 1) & view.readable,
            "prompt_last": (place == start - 1) & view.readable,
            "first": place == start,
            "middle": (place > start) & (place < stop - 1),
            "end": (place == stop - 1) & has_end,
            "cut": (place == stop - 1) & ~has_end,
            "padding_first": (place == stop) & view.readable,
            "padding_rest": (place > stop) & view.readable}


ANSWER = frozenset({"first", "middle", "end", "cut"})


def has_high_entropy(view: SimpleNamespace, share: float) -> Tensor:
    """Where the entropy is among this share of the highest of all answers' tokens, as
    torch.quantile counts."""
    inside = view.batch.mask > 0
    below = torch.full_like(view.entropy, -1.0)  # the share of tokens that have less
    below[inside] = view.entropy[inside].argsort().argsort() / (inside.sum().double() - 1)
    return below >= 1 - share - 1e-12


CHOICES = lines({  # (B, L) bool: of these kinds only where it is so
    "": lambda view: torch.ones_like(view.place, dtype=torch.bool),
    "no unfinished": (lambda view: ended(view.batch)[:, None] > 0, "those of answers that ended"),
    **{f"highest entropy {share:g} of batch": (
        lambda view, share=share: has_high_entropy(view, share),
        f"the {share:.0%} of the batch's tokens that have the highest entropy")
       for share in SHARES}})

SHAPES = lines({  # how an answer's tokens differ
    "": lambda view: torch.ones_like(view.log_prob),
    "weight p": (lambda view: view.log_prob.exp(), "its probability p"),
    "weight 1-p": (lambda view: 1 - view.log_prob.exp(), "1 - p, of its probability p"),
    "weight -log p": (lambda view: -view.log_prob, "-log p, of its probability p"),
    "weight entropy": (lambda view: view.entropy, "the entropy at its place"),
    **{f"weight 1/(|log p|+{e:g})": (lambda view, e=e: 1 / (view.log_prob.abs() + e),
                                     f"1 / (abs(log p) + {e:g}), of its probability p")
       for e in (.01, .1, .5, 1.0)}})


# ------------------------------------------------------------------ ratio
# x.d (B, L) is the log-ratio of a token, x.mean and x.sum that of its answer, x.log_p the token's
# log-prob, x.A the advantage.
def ppo(r: Tensor, x: SimpleNamespace, low: float, high: float) -> Tensor:
    return torch.minimum(r * x.A, r.clamp(low, high) * x.A)


def dual(r: Tensor, x: SimpleNamespace, low: float, high: float, most: float) -> Tensor:
    """Bad answers have no gradient above a third bound (arXiv 1912.09729)."""
    value = ppo(r, x, low, high)
    return torch.where(x.A < 0, torch.maximum(value, most * x.A), value)


def wrong_side(r: Tensor, x: SimpleNamespace, low: float, high: float) -> Tensor:
    return torch.maximum(r * x.A, r.clamp(low, high) * x.A)


def detached(weight: Tensor, x: SimpleNamespace) -> Tensor:
    return weight.detach() * x.A * x.log_p


def sapo(x: SimpleNamespace) -> Tensor:
    """A soft gate, with its paper's rates."""
    rate = torch.where(x.A > 0, 1.0, 1.05)
    return 4 / rate * torch.sigmoid(rate * (x.d.exp() - 1)) * x.A


def of_clipped_mean(x: SimpleNamespace, low: float, high: float) -> Tensor:
    """GMPO: the geometric mean of ratios that are clipped one by one."""
    sign = x.A.sign()
    clipped = torch.minimum(sign * x.d, sign * x.d.clamp(log_of(low), log_of(high))) * sign
    return x.mean_of(clipped).exp() * x.A


def by_probability(limit: float, is_one_sided: bool) -> Callable[[SimpleNamespace], Tensor]:
    """A token has no gradient where its probability, and not its ratio, has moved by more than the
    limit; one-sided only if that is the way it is pushed (arXiv 2602.04879)."""
    def objective(x: SimpleNamespace) -> Tensor:
        moved = x.log_p.exp() - (x.log_p - x.d).exp()
        size = moved * x.A.sign() if is_one_sided else moved.abs()
        return torch.where(size > limit, 0.0, x.d.exp() * x.A)
    return objective


def vespo(x: SimpleNamespace) -> Tensor:
    """Soft weights of whole answers, with its paper's powers."""
    w = x.sum.exp()
    weight = torch.where(x.A >= 0, w ** 2 * (3 - 3 * w).exp(), w ** 3 * (2 - 2 * w).exp())
    return detached(weight, x)


def log_of(bound: float) -> float:
    return float(torch.tensor(bound, dtype=torch.float64).log())


UNCLIPPED = "that of {of}, used and not clipped"
CLIPPED = "that of {of} is clipped as in PPO, to {bounds}"
DUAL = CLIPPED + ", and a bad answer has no gradient above {most:g}"
CLAMPED = "that of {of} is a detached weight, clamped to {bounds}"
MASKED = "that of {of} has no gradient outside {bounds}"
MOVED = "that of {of} has no gradient where its probability moved by more than "
WRONG = "that of {of} is bounded by {bounds}, on the wrong side"
UPSIDE_DOWN = "The ratio is upside down: old over new."
WRONG_SIDE = ("The clip is on the wrong side: the larger of both terms is taken (max for min), so "
              "it bounds where it should let through.")
NO_MINIMUM = ("The minimum is missing: outside the bounds there is no gradient, whichever the "
              "sign, so a bad answer that became likely stays.")
NOT_DETACHED = ("The clamped ratio is a weight that is not detached, so it is trained itself, and "
                "a token of a good answer whose probability is below 1 / e is pushed down.")
SUMMED = "The log-ratio of an answer is summed over its tokens, and GSPO has their mean."
RATIOS = lines({  # (x, bounds ...) -> the objective, to be increased
    "no ratio": (lambda x: x.log_p * x.A, "none; the loss does not change with the old log-probs"),
    "ratio": (lambda x: x.d.exp() * x.A, UNCLIPPED),
    "clip": (lambda x, low, high: ppo(x.d.exp(), x, low, high), CLIPPED),
    "clip dual": (lambda x, low, high, most: dual(x.d.exp(), x, low, high, most), DUAL),
    "clip wrong side": (lambda x, low, high: wrong_side(x.d.exp(), x, low, high), WRONG,
                        WRONG_SIDE),
    "mask": (lambda x, low, high: x.d.exp().clamp(low, high) * x.A, MASKED, NO_MINIMUM),
    "cispo": (lambda x, low, high: detached(x.d.exp().clamp(low, high), x), CLAMPED),
    "cispo undetached": (lambda x, low, high: x.d.exp().clamp(low, high) * x.A * x.log_p,
                         "that of {of} is a weight, clamped to {bounds}", NOT_DETACHED),
    "sapo 1 1.05": (sapo, "that of {of} goes through SAPO's gate, with the rates 1 and 1.05"),
    **{f"dppo {limit:g}": (by_probability(limit, True), MOVED + f"{limit:g} the way it is pushed")
       for limit in (.1, .2, .3)},  # prime-rl's default is 0.2
    **{f"ipo {limit:g}": (by_probability(limit, False), MOVED + f"{limit:g}, whichever the sign")
       for limit in (.1, .2, .3)},  # and 0.1 for this one
    "gspo ratio": (lambda x: x.mean.exp() * x.A, UNCLIPPED),
    "gspo clip": (lambda x, low, high: ppo(x.mean.exp(), x, low, high), CLIPPED),
    "gspo clip dual": (lambda x, low, high, most: dual(x.mean.exp(), x, low, high, most), DUAL),
    "gspo cispo": (lambda x, low, high: detached(x.mean.exp().clamp(low, high), x), CLAMPED),
    "gmpo clip": (of_clipped_mean, "the geometric mean of the ratios of an answer's tokens (GMPO), "
                                   "each clipped to {bounds}"),
    "vespo 2 3 3 2": (vespo, "that of {of} is VESPO's detached weight"),
    "summed ratio": (lambda x: x.sum.exp() / x.n * x.A, UNCLIPPED, "", SUMMED),
    "summed clip": (lambda x, low, high: ppo(x.sum.exp(), x, low, high) / x.n, CLIPPED, "",
                    SUMMED),
    "summed mask": (lambda x, low, high: x.sum.exp().clamp(low, high) * x.A / x.n, MASKED,
                    NO_MINIMUM, SUMMED),
    "inverse ratio": (lambda x: -(-x.d).exp() * x.A, UNCLIPPED, UPSIDE_DOWN),
    "inverse clip": (lambda x, low, high: torch.maximum(
        -(-x.d).exp() * x.A, -(-x.d).exp().clamp(low, high) * x.A), CLIPPED, UPSIDE_DOWN)})


# ------------------------------------------------------------------ terms without the reward
def k3(d: Tensor) -> Tensor:
    return d.exp() - d - 1


TERMS = lines({  # of d = reference - log p, of the ratio and of the entropy h
    "entropy": lambda d, r, h: -h,
    "k1": lambda d, r, h: -d,
    "k2": lambda d, r, h: d.square() / 2,
    "k3": lambda d, r, h: k3(d),
    "k3 exchanged": (lambda d, r, h: k3(-d), "",
                     "In the k3 the policy and the reference are exchanged."),
    "k3 with ratio": lambda d, r, h: r * k3(d),
    "k1 with ratio": lambda d, r, h: -r * d,
    "absolute": lambda d, r, h: d.abs(),
    "k3 at most 10": lambda d, r, h: k3(d).clamp(max=10),
    # NeMo-RL's k3, times a ratio that is 1 and has a gradient: together they have that of k2
    "k2 where k3 is below 10": lambda d, r, h: torch.where(k3(d) < 10, d.square() / 2, 0.0)})

REFERENCES = lines({
    "": lambda batch: batch.reference_log_prob,
    " to old": lambda batch: batch.old_log_prob})

OUTSIDE = "{term} stands outside the answers, too, at their prompt or padding."
PLACES = lines({  # where a term without reward stands
    "trained": lambda view: view.trained,
    "answer": lambda view: view.batch.mask > 0,
    "prompt and answer": (
        lambda view: (view.batch.ids != view.batch.pad_id) & view.readable, "", OUTSIDE),
    "answer and padding": (
        lambda view: view.place >= view.batch.prompt_length[:, None], "", OUTSIDE),
    "all": (lambda view: view.readable.expand_as(view.batch.mask), "", OUTSIDE)})
