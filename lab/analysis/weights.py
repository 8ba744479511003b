"""What do these weights do to these tokens? Sentences about the tokens of some batches.

The gradient's size at the logits is abs(A) w s for each token (`gradient_size` in mitigations.py).
So it is said which kinds of token get more of the gradient than in plain GRPO.
"""
import numpy as np
import torch

from lab.engine.tokens import KINDS

RARE = 0.005  # share of the gradient: a kind of token that has less is left out


def differs_within(weight: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether some answer's tokens have different weights."""
    return bool(((weight != weight[:, :1]) & mask).any())


def share_gains(kind: np.ndarray, *sizes: np.ndarray) -> str:
    """word 1.50, number 0.67: by which factor each kind's share of the first sizes is larger than
    that of the second, the largest first."""
    mine, plain = (np.bincount(kind, one) / max(float(one.sum()), 1e-300) for one in sizes)
    gains = {KINDS[k]: mine[k] / plain[k] for k in np.flatnonzero(plain > RARE)}
    largest_first = sorted(gains.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gain:.2f}" for name, gain in largest_first)


def about_gradient(is_weighting: bool, kind: np.ndarray, s: np.ndarray, usual: np.ndarray,
                   advantage: np.ndarray, weight: np.ndarray,
                   tells_tokens_apart: bool = True) -> list[str]:
    """Lines about some tokens, (n,) each: their kind, s, plain GRPO's advantage, and the idea's
    advantage and weight."""
    size, usual_size = np.abs(advantage * weight * s), np.abs(usual * s)
    gains = share_gains(kind, size, usual_size)
    if not usual_size.any():
        return ["no token has a gradient in plain GRPO, because all its advantages are 0: there is "
                "nothing to compare with"]
    lines = [f"each kind's share of the gradient, divided by its share in plain GRPO: {gains}"]
    if not is_weighting:
        both = (advantage != 0) & (usual != 0)
        turned = np.mean((advantage * usual)[both] < 0) if both.any() else 0.0
        return [*lines, "the sign of the new advantage differs from that of plain GRPO's at "
                        f"{turned:.0%} of the tokens where neither is 0"]
    if not tells_tokens_apart:
        return [*lines, "all tokens of an answer have the same weight, so no credit is moved "
                        "between them"]
    return lines
