"""The design space of GRPO, as tables. A new idea of a paper is one line here.

A line is a name and a function. Two texts may stand beside it: what is wrong with it, if it is
hardly ever meant, and what is unusual, if it is sometimes meant. A {} in a name is the place of a
number, such as an epsilon, which the search solves for.

The loss that `formula.py` makes of one entry of each is

    - sum over tokens of  weight * shape * sampler * objective(ratio, advantage)
    + KL terms - entropy bonus

    advantage = finish((reward - CENTRES) / SCALES), among the rows that GROUPS compares
    weight    = factor * COUNTS, at the tokens of KINDS that CHOICES keeps
    shape     = SHAPES, how the tokens of one answer differ
    sampler   = SAMPLERS, the correction for the engine that sampled
    objective = RATIOS, KL terms and the entropy = TERMS

Rewards and advantages are (B,), what is per token (B, L). `view` is how the loss reads the logits
(formula.View), `n` the number of tokens of each answer, and `e` the number in a name.
"""
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from .batches import Batch


@dataclass(frozen=True)
class Line:
    """A line of a table."""
    function: Callable[..., Tensor]
    mistake: str = ""
    unusual: str = ""

    def __call__(self, *given: object) -> Tensor:
        return self.function(*given)


def lines(table: Mapping[str, Callable[..., Tensor] | tuple]) -> dict[str, Line]:
    """A table whose lines are functions, or (function, mistake, unusual)."""
    made = {}
    for name, line in table.items():
        made[name] = Line(*line) if isinstance(line, tuple) else Line(line)
    return made


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


def over_tokens(advantage: Tensor, n: Tensor, correction: int, e: float,
                is_least: bool = False) -> Tensor:
    """Minus the mean over all tokens, divided by their std (REINFORCE++). The number is added to
    the variance, or is the least that it may be."""
    centred = advantage - (advantage * n).sum() / n.sum()
    variance = (centred.square() * n).sum() / (n.sum() - correction)
    return centred / (variance.clamp(min=e) if is_least else variance + e).sqrt()


def std_of_others(r: Tensor, label: Tensor, epsilon: float) -> Tensor:
    """(B,) the std over n - 1 of the other answers of each row's group plus epsilon; 1, which
    divides nothing, where they are equal (NeMo-RL)."""
    others = sums(torch.ones_like(r), label) - 1
    squares = (sums(r.square(), label) - r.square()) / others
    variance = (squares - mean_of_others(r, label).square()) * others / (others - 1)
    std = variance.sqrt().nan_to_num(0.0, posinf=0.0)
    return torch.where(std > 0, std + epsilon, 1.0)


def whitened(advantage: Tensor, correction: int, e: float) -> Tensor:
    return (advantage - advantage.mean()) / (advantage.std(correction=correction) + e)


BATCH = ("An answer is compared with those of the whole batch, and not with those of its group "
         "alone.")
GROUPS = lines({  # the rows that are compared with each other: labels, and copies of each row
    "": lambda batch: (batch.group, None),
    "batch ": (lambda batch: (torch.zeros_like(batch.group), None), "", BATCH),
    "turns ": (lambda batch: (batch.group, turns_of(batch)),
               "Turns are taken for answers: an answer counts once for each of its turns in the "
               "mean of its group.")})

CENTRES = lines({  # taken off the reward r
    "mean": lambda r, label, n: mean_of(r, label),
    "raw": lambda r, label, n: torch.zeros_like(r),
    "leave one out": lambda r, label, n: mean_of_others(r, label),
    "by length": lambda r, label, n: sums(r * n, label) / sums(n, label)})  # OPO

SCALES = lines({  # what it is divided by
    "none": lambda r, label, e: torch.ones_like(r),
    "n {}": lambda r, label, e: std_of(r, label, 0) + e,
    "n-1 {}": lambda r, label, e: std_of(r, label, 1) + e,
    "n {} root": lambda r, label, e: (variance_of(r, label, 0) + e).sqrt(),
    "n-1 {} root": lambda r, label, e: (variance_of(r, label, 1) + e).sqrt(),
    "n {} max": lambda r, label, e: std_of(r, label, 0).clamp(min=e),
    "n-1 {} max": lambda r, label, e: std_of(r, label, 1).clamp(min=e),
    "n-1 of others {}": lambda r, label, e: std_of_others(r, label, e),
    "batch n {}": (lambda r, label, e: r.std(correction=0) + e, "", BATCH),
    "batch n-1 {}": (lambda r, label, e: r.std() + e, "", BATCH),
    "mean {}": lambda r, label, e: mean_of(r, label) + e})  # MaxRL

FINISHES = lines({  # what is done with the advantage A
    "": lambda A, n, e: A,
    "limit {}": lambda A, n, e: A.clamp(-e, e),
    "whitened n-1 {}": lambda A, n, e: whitened(A, 1, e),  # over all answers
    "whitened n {}": lambda A, n, e: whitened(A, 0, e),
    "over tokens n-1 {} root": lambda A, n, e: over_tokens(A, n, 1, e),
    "over tokens n {} root": lambda A, n, e: over_tokens(A, n, 0, e),  # OpenRLHF
    "over tokens n {} max": lambda A, n, e: over_tokens(A, n, 0, e, is_least=True)})


def turns_of(batch: Batch) -> Tensor:
    """(B,) the number of turns of each answer: the stretches of its mask."""
    inside = batch.mask > 0
    return (inside & ~inside.roll(1, 1)).sum(1)


def live(batch: Batch) -> Tensor:
    """(B,) 1 where the rewards of a row's group differ."""
    return (variance_of(batch.reward, batch.group, 0) > 1e-18).to(batch.reward.dtype)


def last_place(batch: Batch) -> Tensor:
    """(B,) the place of the last token of each answer."""
    place = torch.arange(batch.ids.shape[1])
    return torch.where(batch.mask > 0, place, 0).amax(1)


def ended(batch: Batch) -> Tensor:
    """(B,) 1 where the answer ends with the end token."""
    last = last_place(batch)
    return (batch.ids.gather(1, last[:, None])[:, 0] == batch.end_id).to(batch.reward.dtype)


def micro_batch(n: Tensor, batch: Batch, rows: int) -> Tensor:
    """Each part of the batch is averaged over its tokens, and the parts are averaged."""
    part = torch.arange(len(n)) // rows
    return 1 / sums(n, part) / -(-len(n) // rows)


def one(n: Tensor) -> Tensor:
    return torch.ones_like(n)


TWICE = "The number of answers divides twice."
PADDING = ("The divisor counts padding: an answer counts less in a batch that is wider (the mean "
           "is over all places, and not over those of the mask).")
COUNTS = lines({  # (B,) the weight of a token
    "token": lambda n, batch, e: one(n) / n.sum(),
    "answer": lambda n, batch, e: 1 / n / len(n),
    "group": lambda n, batch, e: 1 / sums(n, batch.group) / len(batch.group.unique()),
    "sum": lambda n, batch, e: one(n),
    "constant": lambda n, batch, e: one(n) / len(n),
    "answer multiplied by the number of answers": lambda n, batch, e: 1 / n,
    "answer divided by the number of answers": (lambda n, batch, e: 1 / n / len(n) ** 2, TWICE),
    "token divided by the number of answers": (
        lambda n, batch, e: one(n) / n.sum() / len(n), TWICE),
    "constant over longest answer": lambda n, batch, e: one(n) / len(n) / n.max(),
    "constant over width of a row": (lambda n, batch, e: one(n) / batch.ids.numel(), PADDING),
    "constant over width less one": (
        lambda n, batch, e: one(n) / len(n) / (batch.ids.shape[1] - 1), PADDING),
    "token (with prompt)": lambda n, batch, e: one(n) / (batch.ids != batch.pad_id).sum(),
    "live token": lambda n, batch, e: one(n) / (n * live(batch)).sum().clamp(min=1),  # DAPO
    "micro-batch {}": (micro_batch, "",
                       "A token counts more in a micro-batch with fewer tokens: the size of "
                       "micro-batches changes the gradient.")})
LENGTHS = {  # (B, L) the tokens that are counted
    "": lambda view: view.batch.mask > 0,
    " (trained)": lambda view: view.trained,
    " (with replies)": lambda view: (view.place >= view.batch.prompt_length[:, None]) & (
        view.place <= last_place(view.batch)[:, None])}


def kinds(view: SimpleNamespace) -> dict[str, Tensor]:
    """(B, L) bool for each kind of token; `cut` is the last one of an answer without an end. What
    an environment wrote is a reply, and what follows it a turn."""
    batch, place = view.batch, view.place
    start, last = batch.prompt_length[:, None], last_place(batch)[:, None]
    inside, has_end = batch.mask > 0, ended(batch)[:, None] > 0
    gap = ~inside & (place > start) & (place < last)
    after_own, before_own = inside.roll(1, 1), inside.roll(-1, 1)
    found = {"prompt": (place < start - 1) & view.readable,
             "prompt_last": (place == start - 1) & view.readable,
             "first": place == start,
             "end": (place == last) & has_end, "cut": (place == last) & ~has_end,
             "turn_first": inside & ~after_own & (place > start),
             "turn_last": inside & ~before_own & (place < last),
             "reply_first": gap & after_own, "reply_last": gap & before_own,
             "reply_middle": gap & ~after_own & ~before_own,
             "padding_first": (place == last + 1) & view.readable,
             "padding_rest": (place > last + 1) & view.readable}
    edges = torch.stack([found[name] for name in ("first", "end", "cut", "turn_first",
                                                  "turn_last")]).any(0)
    return found | {"middle": inside & ~edges}


OF_TURNS = frozenset({"turn_first", "turn_last"})
ANSWER = frozenset({"first", "middle", "end", "cut"}) | OF_TURNS


def has_high_entropy(view: SimpleNamespace, share: float) -> Tensor:
    """Where the entropy is among this share of the highest of all answers' tokens, as
    torch.quantile counts."""
    inside = view.batch.mask > 0
    below = torch.full_like(view.entropy, -1.0)  # the share of tokens that have less
    below[inside] = view.entropy[inside].argsort().argsort() / (inside.sum().double() - 1)
    return below >= 1 - share - 1e-12


CHOICES = lines({  # (B, L) bool: of these kinds only where it is so
    "": lambda view, e: torch.ones_like(view.place, dtype=torch.bool),
    "no unfinished": lambda view, e: ended(view.batch)[:, None] > 0,
    "highest entropy {} of batch": has_high_entropy})

SHAPES = lines({  # how an answer's tokens differ
    "": lambda view: torch.ones_like(view.log_prob),
    "weight p": lambda view: view.log_prob.exp(),
    "weight 1-p": lambda view: 1 - view.log_prob.exp(),
    "weight -log p": lambda view: -view.log_prob,
    "weight entropy": lambda view: view.entropy,
    "weight 1/(|log p|+0.1)": lambda view: 1 / (view.log_prob.abs() + .1)})


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


def by_probability(x: SimpleNamespace) -> Tensor:
    """A token has no gradient where its probability, and not its ratio, has moved by more than 0.2
    the way it is pushed (arXiv 2602.04879; the default of prime-rl)."""
    moved = x.log_p.exp() - (x.log_p - x.d).exp()
    return torch.where(moved * x.A.sign() > .2, 0.0, x.d.exp() * x.A)


def vespo(x: SimpleNamespace) -> Tensor:
    """Soft weights of whole answers, with its paper's powers."""
    w = x.sum.exp()
    weight = torch.where(x.A >= 0, w ** 2 * (3 - 3 * w).exp(), w ** 3 * (2 - 2 * w).exp())
    return detached(weight, x)


def log_of(bound: float) -> float:
    return float(torch.tensor(bound, dtype=torch.float64).log())


UPSIDE_DOWN = "The ratio is upside down: old over new."
WRONG_SIDE = ("The clip is on the wrong side: the larger of both terms is taken (max for min), so "
              "it bounds where it should let through.")
NO_MINIMUM = ("Outside the bounds there is no gradient, whichever the sign, as in IcePop. In PPO "
              "the minimum is missing then, and a bad answer that became likely stays.")
SUMMED = "The log-ratio of an answer is summed over its tokens, and GSPO has their mean."
RATIOS = lines({  # (x, bounds ...) -> the objective, to be increased
    "no ratio": lambda x: x.log_p * x.A,
    "ratio": lambda x: x.d.exp() * x.A,
    "clip": lambda x, low, high: ppo(x.d.exp(), x, low, high),
    "clip dual": lambda x, low, high, most: dual(x.d.exp(), x, low, high, most),
    "clip wrong side": (lambda x, low, high: wrong_side(x.d.exp(), x, low, high), WRONG_SIDE),
    "mask": (lambda x, low, high: x.d.exp().clamp(low, high) * x.A, "", NO_MINIMUM),
    "cispo": lambda x, low, high: detached(x.d.exp().clamp(low, high), x),
    "sapo 1 1.05": sapo,
    "dppo 0.2": by_probability,
    "gspo ratio": lambda x: x.mean.exp() * x.A,
    "gspo clip": lambda x, low, high: ppo(x.mean.exp(), x, low, high),
    "gspo clip dual": lambda x, low, high, most: dual(x.mean.exp(), x, low, high, most),
    "gmpo clip": of_clipped_mean,
    "vespo 2 3 3 2": vespo,
    "summed ratio": (lambda x: x.sum.exp() / x.n * x.A, "", SUMMED),
    "summed clip": (lambda x, low, high: ppo(x.sum.exp(), x, low, high) / x.n, "", SUMMED),
    "inverse ratio": (lambda x: -(-x.d).exp() * x.A, UPSIDE_DOWN)})


def only_within(w: Tensor, low: float, high: float) -> Tensor:
    return torch.where((w >= low) & (w <= high), w, 0.0)


# w (B, L) is the probability of a token under the old model over that of the sampler, or the same
# of whole answers. Truncated importance sampling, IcePop (TRL's masks), and decoupled losses.
SAMPLERS = lines({
    "": lambda x: torch.ones_like(x.w),
    "sampler for old": lambda x: torch.ones_like(x.w),  # the ratio is that to the sampler
    "decoupled": lambda x: x.w,
    "tis": lambda x, low, high: x.w.clamp(low, high),
    "icepop": lambda x, low, high: only_within(x.w, low, high),
    "tis of answer": lambda x, low, high: x.w_sum.clamp(low, high),
    "icepop of answer": lambda x, low, high: only_within(x.w_sum, low, high),
    "tis of mean": lambda x, low, high: x.w_mean.clamp(low, high),
    "icepop of mean": lambda x, low, high: only_within(x.w_mean, low, high),
    "inverse tis": (lambda x, low, high: (1 / x.w).clamp(1 / high, 1 / low),
                    "The correction for the sampler is upside down: sampler over old.")})


def k3(d: Tensor) -> Tensor:
    return d.exp() - d - 1


TERMS = lines({  # of d = reference - log p, of the ratio and of the entropy h
    "entropy": lambda d, r, h: -h,
    "k1": (lambda d, r, h: -d,
           "The KL is k1 in the loss: its gradient pushes all tokens down alike, and its mean is "
           "0."),
    "k2": lambda d, r, h: d.square() / 2,
    "k3": lambda d, r, h: k3(d),
    "k3 exchanged": (lambda d, r, h: k3(-d),
                     "In the k3 the policy and the reference are exchanged."),
    "k3 with ratio": lambda d, r, h: r * k3(d),
    "k1 with ratio": lambda d, r, h: -r * d,
    # NeMo-RL's k3, times a ratio that is 1 and has a gradient: together they have that of k2
    "k2 where k3 is below 10": lambda d, r, h: torch.where(k3(d) < 10, d.square() / 2, 0.0)})

REFERENCES = {  # the log-probs that a KL compares with
    "": lambda batch: batch.reference_log_prob,
    " to old": lambda batch: batch.old_log_prob,
    " to sampler": lambda batch: batch.sampler_log_prob}

OUTSIDE = "It stands outside the answers, too."
PLACES = lines({  # where a term without reward stands
    "trained": lambda view: view.trained,
    "answer": LENGTHS[""],
    "answer with replies": (LENGTHS[" (with replies)"], OUTSIDE),
    "prompt and answer": (lambda view: (view.batch.ids != view.batch.pad_id) & view.readable,
                          OUTSIDE),
    "answer and padding": (lambda view: view.place >= view.batch.prompt_length[:, None], OUTSIDE),
    "all": (lambda view: view.readable.expand_as(view.batch.mask), OUTSIDE)})
