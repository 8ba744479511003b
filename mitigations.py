"""Ways to spread an answer's advantage over its tokens: one small function each, (B, T) weights.

    loss = - sum( weight * advantage * log_prob ) / N

A function with the decorator is a choice of `--mitigation`. Its keyword-only parameters are flags,
their types the ranges that are allowed, its docstring the help:

    @mitigation
    def my_idea(tokens, *, strength: Positive = 1.0):
        \"\"\"One line that becomes the help text.\"\"\"
        return 1 + strength * tokens.entropy          # (B, T)

`tokens` is the whole batch (engine/rollouts.py): ids, texts, mask, length, group, step, log_prob,
entropy, collision, advantage, reward, section, kind, generator, and hidden and attention for one
extra forward pass. What lies beyond the mask does not matter. Weights are not negative: credit
with a sign is an advantage, and is written the same way with @advantage (docs/weightings.md).

Those that keep a state or sample more are classes in credit/, in the same list. To see weights on
recorded tokens without training:

    python -m tools.preview runs/none-grpo-s0 --mitigation my_idea --strength 2
"""
import typing

import numpy as np
import torch

from countdown_task import ANSWER
from credit.placebo import shuffled_weight
from engine.checked import call_choice, metrics_of, refuse_tokens
from engine.flags import NotNegative, Percent, Positive, Range, Share
from engine.hints import python_command
from engine.registry import mitigation
from engine.rollouts import Rollouts
from grpo import gradient_size

SIGNED = " (credit with a sign is an advantage: see docs/weightings.md)"

@mitigation
def none(tokens: Rollouts) -> torch.Tensor:
    """Every token of an answer weighs the same: plain GRPO."""
    return torch.ones_like(tokens.log_prob)


@mitigation
def outcome_conditional(tokens: Rollouts, *, think_discount: Share = 0.5) -> torch.Tensor:
    """Tokens after the <answer> tag weigh 1, all before it (or all, where there is none) the
    discount."""
    weight = torch.full_like(tokens.log_prob, think_discount)
    for row, texts in enumerate(tokens.texts):
        weight[row, tokens_until(texts, "<answer>"):] = 1
    return weight


def tokens_until(texts: list[str], tag: str) -> int:
    """How many tokens it takes to the end of the tag, which may be cut into several; all if there
    is none."""
    place = "".join(texts).find(tag)
    if place < 0:
        return len(texts)
    ends = np.cumsum([len(text) for text in texts])
    return int(np.searchsorted(ends, place + len(tag))) + 1


@mitigation
def inverse_logprob(tokens: Rollouts, *, epsilon: Positive = 0.1) -> torch.Tensor:
    """1 / (|log p| + epsilon): cancels the size of log p, not of its gradient; sure tokens weigh
    most."""
    return 1 / (tokens.log_prob.abs() + epsilon)


@mitigation(rescaled=False)
def inverse_logprob_as_published(tokens: Rollouts, *, epsilon: Positive = 0.1) -> torch.Tensor:
    """epsilon / (|log p| + epsilon)^2: what inverse_logprob becomes when nobody detaches it.
    Never rescaled.

    The derivative of log p / (|log p| + epsilon) by log p is this, not 1 / (|log p| + epsilon).
    """
    return epsilon / (tokens.log_prob.abs() + epsilon).square()


@mitigation
def equal_gradient(tokens: Rollouts, *, epsilon: Positive = 0.1) -> torch.Tensor:
    """1 / (s + epsilon), s = norm(onehot - p): makes the gradients at the logits alike in size."""
    return 1 / (gradient_size(tokens.log_prob, tokens.collision) + epsilon)


@mitigation
def attention_credit(tokens: Rollouts, *, credit_scale: NotNegative = 2.0) -> torch.Tensor:
    """What the answer looks at: 0.5 + credit_scale * attention, relative to the mean of the
    answer's tokens.

    Attention of the last layer, mean over heads and over the answer tokens that come later,
    clamped to 0.1 .. 0.5 + 3 credit_scale. Tokens of an answer without an answer section get the
    mean of the batch's others. """
    answer = ((tokens.section == ANSWER) & tokens.mask).float()
    later = answer.flip(1).cumsum(1).flip(1) - answer  # (B, T) answer tokens after t
    received = torch.einsum("bi,bij->bj", answer, tokens.attention) / later.clamp(min=1)
    mean = received.sum(1, keepdim=True) / tokens.length[:, None].clamp(min=1)
    relative = torch.where(mean > 0, received / mean, 0.0)
    weight = (0.5 + credit_scale * relative).clamp(0.1, 0.5 + 3 * credit_scale)
    has_answer = answer.any(1)[:, None]
    others = weight[has_answer & tokens.mask].mean() if has_answer.any() else 1.0
    return torch.where(has_answer, weight, others)


@mitigation
def entropy_weighted(tokens: Rollouts, *, entropy_temp: Positive = 1.0) -> torch.Tensor:
    """softmax(entropy / entropy_temp) over the batch's tokens, times their number: forking tokens
    weigh more."""
    score = (tokens.entropy / entropy_temp).masked_fill(~tokens.mask, float("-inf"))
    return score.flatten().softmax(0).view_as(score) * tokens.mask.sum()


@mitigation
def entropy_masking(tokens: Rollouts, *, mask_percentile: Percent = 80.0) -> torch.Tensor:
    """Only tokens whose entropy is at or above this percentile of the batch (2506.01939; its
    scale is --rescale none)."""
    entropy = tokens.entropy.double()
    threshold = np.percentile(entropy[tokens.mask].cpu().numpy(), mask_percentile)
    return (entropy >= threshold).float()


@mitigation
def entropy_ratio(tokens: Rollouts, *, entropy_beta: NotNegative = 1.0) -> torch.Tensor:
    """max(0, 1 + beta (entropy / mean entropy - 1)).

    In the spirit of GTPO (2508.04349, known here from reimplementations), which is another thing:
    it shares rewards, adding to a token's reward in right answers by its entropy, and normalises
    them position by position. """
    mean = tokens.entropy[tokens.mask].mean()
    relative = torch.where(mean > 0, tokens.entropy / mean - 1, 0.0)
    return (1 + entropy_beta * relative).clamp(min=0)


Spread = typing.Annotated[float, Range(least=0.01, most=100)]


@mitigation
def random(tokens: Rollouts, *, placebo_std: Spread = 1.0) -> torch.Tensor:
    """Gamma noise with mean 1: a placebo that knows nothing."""
    seed = int(torch.randint(2 ** 62, (1,), generator=tokens.generator))
    chance = np.random.default_rng(seed)
    noise = chance.gamma(placebo_std ** -2, placebo_std ** 2, tokens.mask.shape)
    return torch.tensor(noise, dtype=torch.float32, device=tokens.mask.device)


# those with a state or samples of their own join the lists here, by being imported
import credit.lambda_grpo         # noqa: E402, F401
import credit.learned_importance  # noqa: E402, F401
import credit.causal_ablation     # noqa: E402, F401
import credit.outcome_gradient    # noqa: E402, F401
import credit.oracle              # noqa: E402, F401
import credit.critic              # noqa: E402, F401  the advantage gae
import credit.monte_carlo         # noqa: E402, F401  the advantage vine
import credit.measured            # noqa: E402, F401  the advantage measured
import credit.hindsight           # noqa: E402, F401  the advantage hindsight
import credit.belief              # noqa: E402, F401  the advantage belief


@torch.no_grad()
def token_weight(chosen, name: str, tokens: Rollouts, lab=None, rescale: str = "mean",
                 placebo: str = "none") -> tuple[torch.Tensor, dict]:
    """The weights of a batch as the loss takes them: checked, without gradient, 0 beyond the mask,
    shuffled for a placebo, rescaled. Also what there is to tell about them."""
    if not tokens.mask.any():  # every answer was dropped
        nothing = {"weight_factor": 1.0, "weight_max": 0.0, "weight_note": None}
        return torch.zeros_like(tokens.log_prob), nothing
    weight, note = call_choice(chosen, f"the mitigation {name}", tokens, lab), None
    refuse_tokens(weight < 0, tokens.mask, f"the mitigation {name} is negative", hint=SIGNED)
    if not weight.any():
        weight, note = tokens.mask.float(), "all weights were 0: every token gets 1"
    if placebo == "weights":
        weight = shuffled_weight(weight, tokens)
    factor = scale_factor(weight, tokens, rescale)
    if not (weight * factor).isfinite().all():
        factor, note = 1.0, "not rescaled: next to no weight lies on tokens with an advantage"
    weight = weight * factor
    return weight, {**metrics_of(chosen, name), "weight_factor": factor,
                    "weight_max": weight.max().item(), "weight_note": note}


def scale_factor(weight: torch.Tensor, tokens: Rollouts, rescale: str) -> float:
    """mean: so that the batch's tokens weigh 1 on average. gradient: so that the gradients at the
    logits have the same sum of sizes as without weights."""
    if rescale == "none":
        return 1.0
    size = tokens.mask.double()
    if rescale == "gradient":
        size = size * tokens.advantage.abs() * gradient_size(tokens.log_prob, tokens.collision)
    whole, weighted = size.sum().item(), (weight * size).sum().item()
    if whole == 0:
        return 1.0
    return whole / weighted if weighted > 0 else float("inf")


if __name__ == "__main__":
    raise SystemExit("this file is read, not run: "
                     f"{python_command('-m', 'tools.preview')} RUN --mitigation NAME")
