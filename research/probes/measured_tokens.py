"""All tokens of a batch end to end, with the credit that was measured of each.
"""
from dataclasses import dataclass

import numpy as np
import torch

from analysis.statistics import average_ranks
from analysis.vocabulary import Vocabulary
from engine.lab import Lab
from engine.rollouts import Rollouts
from grpo import gradient_size
from research.probes.credit import Credit

NARROW = 0.1  # an interval narrower than this, with 0 inside, means: no credit to speak of


@dataclass
class Truth:
    """What some continuations say of every token."""
    credit: np.ndarray    # (n,)
    decided: np.ndarray   # (n,) its square, as a product of independent estimates; may be below 0


@dataclass
class MeasuredTokens:
    questions: int
    question: np.ndarray      # (n,) of each token, as all below
    answer: np.ndarray        # rising
    ids: np.ndarray
    advantage: np.ndarray     # plain GRPO's
    size: np.ndarray          # of its log-prob's gradient at the logits
    truth: Truth              # by all continuations
    first_half: np.ndarray    # credit by half of the continuations
    second_half: Truth        # by the other half
    before: np.ndarray        # V before the token
    idle: np.ndarray          # bool, known to have no credit to speak of
    codes: dict[str, np.ndarray]  # which kind, section and class it belongs to

    def by_question(self, values: np.ndarray) -> np.ndarray:
        """Sums over the tokens of each problem."""
        return np.bincount(self.question, values, self.questions)

    def place(self, size: np.ndarray) -> np.ndarray:
        """Each token's place in its answer by size, -1 (least) to 1; equal ones share theirs."""
        below_next_answer = 0.5 * average_ranks(size) / max(len(size), 1)
        rank = average_ranks(self.answer + below_next_answer)
        count = np.bincount(self.answer)
        first = np.searchsorted(self.answer, np.arange(self.answer[-1] + 1))
        steps = np.maximum(count - 1, 1)
        middle = np.where(count > 1, 1, 0)
        return 2 * (rank - first[self.answer]) / steps[self.answer] - middle[self.answer]


def measured_tokens(lab: Lab, rollouts: Rollouts, credit: Credit) -> MeasuredTokens:
    mask = rollouts.mask
    row = mask.nonzero(as_tuple=True)[0]
    value, error = flat_tokens(credit.value, mask), flat_tokens(credit.error, mask)
    quarters = np.stack([flat_tokens(quarter, mask) for quarter in credit.quarters])
    first_half = quarters[:2].mean(0)
    ids = rollouts.ids[mask].cpu().numpy()
    contains_0 = np.abs(value) <= 1.96 * error
    return MeasuredTokens(
        questions=len(rollouts.prompt_ids),
        question=rollouts.group[row].cpu().numpy(),
        answer=row.cpu().numpy(),
        ids=ids,
        advantage=flat_tokens(rollouts.advantage, mask),
        size=flat_tokens(gradient_size(rollouts.log_prob, rollouts.collision), mask),
        truth=Truth(value, mean_product(quarters)),
        first_half=first_half,
        second_half=Truth(2 * value - first_half, quarters[2] * quarters[3]),
        before=flat_tokens(credit.before, mask),
        idle=contains_0 & (2 * 1.96 * error < NARROW),
        codes={"kind": flat_tokens(rollouts.kind, mask).astype(int),
               "section": flat_tokens(rollouts.section, mask).astype(int),
               "class": Vocabulary(lab.tokenizer).classes(ids)})


def flat_tokens(frame: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    """(B, T) -> (n,)"""
    return frame[mask].detach().double().cpu().numpy()


def mean_product(quarters: np.ndarray) -> np.ndarray:
    """The mean of the products of two different quarters, of which there are 12."""
    return (quarters.sum(0) ** 2 - (quarters ** 2).sum(0)) / 12
