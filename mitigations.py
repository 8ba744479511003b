"""Ways to spread an answer's advantage over its tokens: one small function each, (B, T) weights.

    loss = - sum( weight * advantage * log_prob ) / N

A function with the decorator is a choice of `--mitigation`. Its keyword-only parameters are flags, their
types the ranges that are allowed, its docstring the help:

    @mitigation
    def my_idea(tokens, *, strength: float = 1.0):
        \"\"\"One line that becomes the help text.\"\"\"
        return 1 + strength * tokens.entropy          # (B, T)

`tokens` is the whole batch (rollouts.py): ids, texts, mask, length, group, step, log_prob, entropy, collision,
advantage, reward, section, kind, generator, and hidden and attention for one extra forward pass. What is
beyond the mask does not matter. One that keeps a state or samples more is a class, made once a run.

To see the weights on recorded tokens, without training:

    python mitigations.py runs/none-grpo-s0 --mitigation my_idea --strength 2
"""
import inspect
import typing
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn

from countdown_task import ANSWER
from credit.monte_carlo import continuation_rewards, other_tokens, prefix_values
from credit.trained import Trained
from grpo import answer_shares, gradient_size, group_z_score, policy_loss
from engine.errors import UserError
from engine.rollouts import Rollouts

MITIGATIONS = {}


def mitigation(function):
    MITIGATIONS[function.__name__] = function
    return function


@dataclass(frozen=True)
class Bounds:
    least: float | None = None
    above: float | None = None
    most: float | None = None


NotNegative = typing.Annotated[float, Bounds(least=0, most=1e6)]
Positive = typing.Annotated[float, Bounds(above=0, most=1e6)]
Share = typing.Annotated[float, Bounds(least=0, most=1)]
Percent = typing.Annotated[float, Bounds(least=0, most=100)]
Count = typing.Annotated[int, Bounds(least=1)]
CountOrNone = typing.Annotated[int, Bounds(least=0)]


@mitigation
def none(tokens: Rollouts) -> torch.Tensor:
    """Every token of an answer weighs the same: plain GRPO."""
    return torch.ones_like(tokens.log_prob)


@mitigation
def outcome_conditional(tokens: Rollouts, *, think_discount: Share = 0.5) -> torch.Tensor:
    """Tokens after the <answer> tag weigh 1, all before it (or all, where there is none) the discount."""
    weight = torch.full_like(tokens.log_prob, think_discount)
    for b, texts in enumerate(tokens.texts):
        weight[b, tokens_until(texts, "<answer>"):] = 1
    return weight


def tokens_until(texts: list[str], tag: str) -> int:
    """How many tokens it takes to the end of the tag, which may be spread over several; all if there is none."""
    at = "".join(texts).find(tag)
    ends = np.cumsum([len(text) for text in texts])
    return int(np.searchsorted(ends, at + len(tag))) + 1 if at >= 0 else len(texts)


@mitigation
def inverse_logprob(tokens: Rollouts, *, epsilon: Positive = 0.1) -> torch.Tensor:
    """1 / (|log p| + epsilon): cancels the size of log p, not that of its gradient; sure tokens weigh most."""
    return 1 / (tokens.log_prob.abs() + epsilon)


@mitigation
def inverse_logprob_as_published(tokens: Rollouts, *, epsilon: Positive = 0.1) -> torch.Tensor:
    """epsilon / (|log p| + epsilon)^2: what inverse_logprob becomes when nobody detaches it. Never rescaled.

    The derivative of log p / (|log p| + epsilon) by log p is this, not 1 / (|log p| + epsilon).
    """
    return epsilon / (tokens.log_prob.abs() + epsilon).square()


NEVER_RESCALED = ("inverse_logprob_as_published",)


@mitigation
def equal_gradient(tokens: Rollouts, *, epsilon: Positive = 0.1) -> torch.Tensor:
    """1 / (s + epsilon), s = norm(onehot - p): makes the gradients at the logits alike in size."""
    return 1 / (gradient_size(tokens.log_prob, tokens.collision) + epsilon)


@mitigation
def attention_credit(tokens: Rollouts, *, credit_scale: NotNegative = 2.0) -> torch.Tensor:
    """What the answer looks at: 0.5 + credit_scale * attention, relative to the mean of the answer's tokens.

    Attention of the last layer, mean over heads and over the answer tokens that come later, clamped to 0.1 ..
    0.5 + 3 credit_scale. Tokens of a response without an answer section get the mean of the batch's others.
    """
    answer = ((tokens.section == ANSWER) & tokens.mask).float()
    later = answer.flip(1).cumsum(1).flip(1) - answer  # (B, T) answer tokens after t
    received = torch.einsum("bi,bij->bj", answer, tokens.attention) / later.clamp(min=1)
    mean = received.sum(1, keepdim=True) / tokens.length[:, None].clamp(min=1)
    relative = torch.where(mean > 0, received / mean, 0.0)
    weight = (0.5 + credit_scale * relative).clamp(0.1, 0.5 + 3 * credit_scale)
    answered = (answer.any(1)[:, None] & tokens.mask)
    others = weight[answered].mean() if answered.any() else 1.0
    return torch.where(answer.any(1)[:, None], weight, others)


@mitigation
def entropy_weighted(tokens: Rollouts, *, entropy_temp: Positive = 1.0) -> torch.Tensor:
    """softmax(entropy / entropy_temp) over the batch's tokens, times their number: forking tokens weigh more."""
    score = (tokens.entropy / entropy_temp).masked_fill(~tokens.mask, float("-inf"))
    return score.flatten().softmax(0).view_as(score) * tokens.mask.sum()


@mitigation
def entropy_masking(tokens: Rollouts, *, mask_percentile: Percent = 80.0) -> torch.Tensor:
    """Only tokens whose entropy is at or above this percentile of the batch (2506.01939; its scale is --rescale none)."""
    threshold = np.percentile(tokens.entropy[tokens.mask].double().cpu().numpy(), mask_percentile)
    return (tokens.entropy.double() >= threshold).float()


@mitigation
def entropy_ratio(tokens: Rollouts, *, entropy_beta: NotNegative = 1.0) -> torch.Tensor:
    """max(0, 1 + beta (entropy / mean entropy - 1)).

    In the spirit of GTPO (2508.04349, known here from reimplementations), which is another thing: it shares
    rewards, adding to a token's reward in right answers by its entropy, and normalises them position by position.
    """
    mean = tokens.entropy[tokens.mask].mean()
    relative = torch.where(mean > 0, tokens.entropy / mean - 1, 0.0)
    return (1 + entropy_beta * relative).clamp(min=0)


@mitigation
def random(tokens: Rollouts, *, placebo_std: typing.Annotated[float, Bounds(least=0.01, most=100)] = 1.0) -> torch.Tensor:
    """Gamma noise with mean 1: a placebo that knows nothing."""
    seed = int(torch.randint(2 ** 62, (1,), generator=tokens.generator))
    noise = np.random.default_rng(seed).gamma(placebo_std ** -2, placebo_std ** 2, tokens.mask.shape)
    return torch.tensor(noise, dtype=torch.float32, device=tokens.mask.device)


@mitigation
class lambda_grpo:
    """G softmax((1 + z/9)^lambda) over a group's answers, z their standardised lengths; lambda is learned.

    One scalar about lengths (2510.06870, known here from reimplementations). It descends the same surrogate loss
    with log_prob fixed and the weight live, after the weights of the batch are made.
    """

    def __init__(self, lab, *, lambda_init: typing.Annotated[float, Bounds(least=-100, most=100)] = 0.0, lambda_lr: Positive = 0.01):
        self.scalar = Trained(nn.ParameterDict({"lambda": torch.tensor(float(lambda_init))}), lambda_lr, lab.model.device)
        self.metrics = {}

    def __call__(self, tokens: Rollouts, lab) -> torch.Tensor:
        exponent, share = self.scalar.module["lambda"], answer_shares(tokens, lab.settings.loss_norm, lab.settings.max_new_tokens)
        with torch.enable_grad():
            weight = self.answer_weights(tokens, exponent)[:, None].expand_as(tokens.log_prob)
            loss = policy_loss(tokens.log_prob, tokens.advantage, weight * share, tokens.mask, int(tokens.mask.sum()))
        self.metrics = {"lambda": exponent.item()}
        if (tokens.advantage * tokens.mask).any():
            self.scalar.descend(loss)
        return weight.detach()

    @classmethod
    def listed(cls, tokens: Rollouts) -> torch.Tensor:
        """The weights at lambda = 1, for a world whose batches are listed."""
        return cls.answer_weights(None, tokens, torch.tensor(1.0))[:, None]

    def answer_weights(self, tokens: Rollouts, exponent: torch.Tensor) -> torch.Tensor:
        """(B,), among the answers that have tokens."""
        there, result = tokens.length > 0, torch.zeros(len(tokens.length), device=tokens.mask.device)
        z = torch.zeros_like(result)
        z[there] = group_z_score(tokens.length[there], tokens.group[there], epsilon=0.0)
        power = (1 + z / 9).clamp(min=1e-6) ** exponent
        top = torch.zeros(len(tokens.prompt_ids), device=z.device).scatter_reduce(0, tokens.group, power.detach(), "amax")
        share = torch.where(there, (power - top[tokens.group]).exp(), 0.0)
        total = torch.zeros(len(tokens.prompt_ids), device=z.device).index_add(0, tokens.group, share)
        size = torch.zeros_like(total).index_add(0, tokens.group, there.float())
        return share / total.clamp(min=1e-30)[tokens.group] * size[tokens.group]

    def state_dict(self):
        return self.scalar.state_dict()

    def load_state_dict(self, tensors):
        self.scalar.load_state_dict(tensors)


class ImportanceNet(nn.Module):
    """A positive number for each hidden state, and a reading of their weighted mean."""

    def __init__(self, width: int, seed: int):
        super().__init__()
        self.inner, self.outer, self.read = nn.Linear(width, 32), nn.Linear(32, 1), nn.Linear(width, 1)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.0, generator=generator)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.softplus(self.outer(nn.functional.silu(self.inner(hidden)))).squeeze(-1)


@mitigation
class learned_importance:
    """A small net on the hidden states, trained to tell an answer's advantage from the weighted mean of them.

    Weight 1 during the warm-up. What helps to predict the outcome need not have caused it. Where the
    true credit of the tokens is known, the net learns its size instead.
    """

    def __init__(self, lab, *, importance_warmup: CountOrNone = 10, importance_lr: Positive = 1e-3):
        self.warmup, self.metrics = importance_warmup, {}
        self.net = Trained(ImportanceNet(lab.model.config.hidden_size, lab.settings.seed), importance_lr, lab.model.device)

    def __call__(self, tokens: Rollouts, lab) -> torch.Tensor:
        with torch.no_grad():
            weight = self.net.module(tokens.hidden)
        with torch.enable_grad():
            loss = self.loss(tokens)
        self.metrics = {"importance_loss": loss.item()}
        self.net.descend(loss)
        return weight if tokens.step > self.warmup else torch.ones_like(weight)

    def loss(self, tokens: Rollouts) -> torch.Tensor:
        importance = self.net.module(tokens.hidden) * tokens.mask
        if tokens.true_credit is not None:
            return (importance - tokens.true_credit.abs())[tokens.mask].square().mean()
        there, length = tokens.length > 0, tokens.length.clamp(min=1)
        pooled = torch.einsum("bt,btd->bd", importance, tokens.hidden) / importance.sum(1, keepdim=True).clamp(min=1e-6)
        advantage = (tokens.advantage * tokens.mask).sum(1) / length  # one number an answer, whatever its tokens have
        return (self.net.module.read(pooled).squeeze(-1) - advantage)[there].square().mean()

    def state_dict(self):
        return self.net.state_dict()

    def load_state_dict(self, tensors):
        self.net.load_state_dict(tensors)


@mitigation
class causal_ablation:
    """What happens without the token: every n-th is replaced by another draw, the answer goes on, |change of reward|.

    The replacement comes from the policy with the token ruled out; one continuation; linear in between.
    """

    def __init__(self, lab, *, ablate_every: Count = 8):
        self.every, self.metrics = ablate_every, {}

    def __call__(self, tokens: Rollouts, lab) -> torch.Tensor:
        lengths, groups = tokens.length.tolist(), tokens.group.tolist()
        at = [(b, t) for b, n in enumerate(lengths) for t in range(0, n, self.every)]
        others, ids = other_tokens(lab, tokens, torch.tensor(at, device=tokens.ids.device)), tokens.ids.tolist()
        prefixes = [(groups[b], (*ids[b][:t], other)) for (b, t), other in zip(at, others)]
        rewards, spent = continuation_rewards(lab, tokens, prefixes, 1)
        self.metrics = {"extra_tokens": spent}
        change = (tokens.reward[[b for b, _ in at]] - rewards[:, 0]).abs().tolist()
        weight, start = torch.zeros_like(tokens.log_prob), 0
        for b, n in enumerate(lengths):
            here = range(0, n, self.every)
            weight[b, :n] = torch.tensor(np.interp(range(n), here, change[start:start + len(here)])) if n else 0.0
            start += len(here)
        return weight


@mitigation
class oracle:
    """The size of each token's Monte Carlo credit |V(after) - V(before)|: expensive, a reference for the others.

    The sign stays the outcome's, so this is no upper bound; that is --advantage vine with many continuations. A
    token of probability p cannot be credited with more than (1 - p) of the reward's range, so values are sampled
    only around tokens with 1 - p above a thousandth; the others get 0.
    """

    def __init__(self, lab, *, oracle_k: Count = 8):
        self.k, self.metrics = oracle_k, {}

    def __call__(self, tokens: Rollouts, lab) -> torch.Tensor:
        sure = -torch.expm1(tokens.log_prob) <= 1e-3 if lab.settings.temperature <= 1 else False  # hotter, a sure token is not
        open_ones = tokens.mask & ~torch.as_tensor(sure)
        chosen = [[t for t, is_open in enumerate(row) if is_open] for row in open_ones.tolist()]
        lengths = tokens.length.tolist()
        cuts = [sorted({n for t in row for n in (t, t + 1) if n < length}) for row, length in zip(chosen, lengths)]
        values, spent = prefix_values(lab, tokens, cuts, self.k)
        self.metrics, weight = {"extra_tokens": spent}, torch.zeros_like(tokens.log_prob)
        for b, (row, at, value, length) in enumerate(zip(chosen, cuts, values, lengths)):
            known = dict(zip(at, value)) | {length: tokens.reward[b].item()}
            for t in row:
                weight[b, t] = abs(known[t + 1] - known[t])
        return weight


def make(name: str, own: dict, lab):
    """The mitigation with its flags, in the one form (tokens, lab) -> weights."""
    chosen = MITIGATIONS[name]
    if not inspect.isclass(chosen):
        return lambda tokens, lab: chosen(tokens, **own)
    if hasattr(chosen, "state_dict") != hasattr(chosen, "load_state_dict"):
        raise UserError(f"{name} in mitigations.py needs both state_dict and load_state_dict, or a resumed run would forget its state")
    return chosen(lab, **own)


@torch.no_grad()
def token_weight(chosen, name: str, tokens: Rollouts, lab=None, rescale: str = "mean", placebo: str = "none") -> tuple[torch.Tensor, dict]:
    """Weights of the whole batch, without gradient, 0 beyond the mask, and what there is to say about them."""
    mask, note = tokens.mask, None
    if not mask.any():  # every answer was dropped
        return torch.zeros_like(tokens.log_prob), {"weight_factor": 1.0, "weight_max": 0.0, "weight_note": None}
    given = [value for value in (vars(tokens) | tokens.scores).values() if isinstance(value, torch.Tensor)]
    versions = [value._version for value in given]
    weight = checked(chosen(tokens, lab), name, mask)
    if versions != [value._version for value in given]:
        raise UserError(f"{name} in mitigations.py changed a tensor of the batch in place; it should make a new one")
    if not weight.any():
        weight, note = mask.float(), "all weights were 0: every token gets 1"
    if placebo == "weights":
        order = torch.randperm(int(mask.sum()), generator=tokens.generator).to(mask.device)
        weight = torch.zeros_like(weight).masked_scatter(mask, weight[mask][order])
    factor = scale_factor(weight, tokens, rescale)
    if not (weight * factor).isfinite().all():
        factor, note = 1.0, "not rescaled: next to no weight lies on tokens with an advantage"
    weight = weight * factor
    own = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in getattr(chosen, "metrics", {}).items()}
    return weight, {**own, "weight_factor": factor, "weight_max": weight.max().item(), "weight_note": note}


def checked(weight, name: str, mask: torch.Tensor) -> torch.Tensor:
    """Somebody's new idea may be wrong: say what is, in one line."""
    try:
        assert weight.dim() == 2  # one number an answer is (B, 1): a (B,) would be spread along the tokens where B is T
        weight = torch.broadcast_to(weight.detach().float(), mask.shape).masked_fill(~mask, 0.0)
    except (AttributeError, AssertionError, RuntimeError):
        found = f"on {weight.device} of shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else repr(weight)[:40]
        raise UserError(f"{name} in mitigations.py should return a tensor (B, T) = {tuple(mask.shape)} on {mask.device}, got one {found}") from None
    for wrong, words in ((~weight.isfinite(), "not finite"), (weight < 0, "negative")):
        if wrong.any():
            b, t = wrong.nonzero()[0].tolist()
            raise UserError(f"the weights of {name} are {words} at {int(wrong.sum())} of {int(mask.sum())} tokens, first at answer {b}, token {t}")
    return weight


def scale_factor(weight: torch.Tensor, tokens: Rollouts, rescale: str) -> float:
    """mean: so that the batch's tokens weigh 1 on average. gradient: so that the gradients at the logits have the
    same sum of sizes as without weights."""
    if rescale == "none":
        return 1.0
    size = tokens.mask.double()
    if rescale == "gradient":
        size = size * tokens.advantage.abs() * gradient_size(tokens.log_prob, tokens.collision)
    whole, weighted = size.sum().item(), (weight * size).sum().item()
    return 1.0 if whole == 0 else whole / weighted if weighted > 0 else float("inf")


if __name__ == "__main__":
    from tools import preview
    from engine import settings
    settings.run_as_program("mitigations.py", preview.main)
