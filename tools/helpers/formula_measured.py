"""What is measured of a loss: the push of each token, in batches that are designed.

A `Formula` is what was found of the loss so far, and the gradient that it would have. `Measured` is
the loss itself on the batches.
"""
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tools.helpers.formula_advantages import Advantage
from tools.helpers.formula_batches import Case, make_case, noise_like
from tools.helpers.formula_counts import tokens_of
from tools.helpers.formula_decode import Examined, Loss, LossFailed, decode, directions
from tools.helpers.formula_ratio import Ratio
from tools.helpers.formula_selected import Selection
from tools.helpers.formula_shapes import Shape, entropy_of
from tools.helpers.formula_terms import Counted, Term, by_answer

TINY = 1e-9        # of the largest push: less is rounding
KNOWN = 1e-6       # of the norm of a gradient: a formula that leaves less over is right


@dataclass
class Formula:
    """What was found. A part that is None was not understood."""
    examined: Examined
    digits: str = "float64"
    temperature: float | None = None
    shift: int | None = None
    absent: tuple[int, ...] = ()                 # tokens that are left out of the softmax
    kinds: dict[str, str] = field(default_factory=dict)  # all, none or some, by kind of token
    selection: Selection | None = None           # where not all tokens of a kind are trained
    is_zero: bool = False
    shape: Shape | None = None
    advantage: Advantage | None = None
    count: Counted | None = None
    ratio: Ratio | None = None
    constant_baseline: float = 0.0               # a number that is taken off each reward
    misplaced: int = 0                           # places by which old_log_prob is read too early
    terms: list[Term] = field(default_factory=list)
    entropy: Counted | None = None
    entropy_kinds: frozenset[str] = frozenset()
    term_kinds: frozenset[str] = frozenset()
    weighs_by_entropy: bool = False              # an entropy weight that is not detached
    not_understood: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    parts: dict[int, tuple[float, float]] = field(default_factory=dict)  # how far off, by parts
    order: str = "same"                          # same, other or refused: the rows interleaved
    loses_end: bool = False                      # where padding is the end token
    dead: float = 0.0                            # push in a dead group / largest push elsewhere
    nearly_dead: float = 0.0                     # the same where rewards differ by a millionth
    unexplained: float = 1.0                     # share of the gradient of new batches

    @property
    def trained(self) -> frozenset[str]:
        return frozenset(kind for kind, how in self.kinds.items() if how == "all")

    def tokens(self, case: Case) -> Tensor:
        """(B, L) bool: those that have a gradient."""
        found = tokens_of(case, self.trained)
        return found if self.selection is None else found & self.selection.chosen(case)

    @property
    def is_complete(self) -> bool:
        return not self.not_understood and self.unexplained < KNOWN

    def policy_push(self, case: Case) -> Tensor:
        """(B, L) the push of the policy loss."""
        tokens = self.tokens(case)
        advantage = self.advantage(case)
        value = (self.count(case) * advantage)[:, None] * self.shape.value(case) * tokens
        if self.ratio is not None:
            value = value * self.ratio(case, advantage, tokens)
        return value

    def rest_push(self, case: Case) -> Tensor:
        tokens = tokens_of(case, self.term_kinds)
        total = torch.zeros(case.ids.shape, dtype=torch.float64)
        for term in self.terms:
            total = total + term.push(case, tokens)
        return total

    def gradient(self, case: Case) -> Tensor:
        """(B, L, V) the gradient that this formula has."""
        towards, spread_out = directions(case, case.lens)
        push = self.policy_push(case) + self.rest_push(case)
        by_token = -push[..., None] * towards
        if self.entropy is not None:
            weight = self.entropy(case)[:, None] * tokens_of(case, self.entropy_kinds)
            by_token = by_token + weight[..., None] * spread_out
        if self.weighs_by_entropy:
            flow = self.policy_push(case) * case.log_prob / entropy_of(case)
            by_token = by_token + flow[..., None] * spread_out
        return case.lens.to_places(by_token)


class Measured:
    """A loss, measured on batches of known seeds."""

    def __init__(self, loss: Loss):
        self.examined = Examined(loss)
        self.formula = Formula(self.examined)
        self.has_rest = True          # whether a batch without reward has a gradient
        self.is_foreign = False       # whether that gradient is in no known direction
        self.is_permuted = False      # whether an answer's push does not depend on its own reward
        self.sizes = (4, 3, 6)        # numbers of answers in a group that are tried
        self.hidden = ""              # what is a part of the reward, by the names of formula_rest
        self.offset = 0.0             # of all log-ratios
        self.tolerance = 1e-6         # of an answer's number; more if it is computed in float32

    def policy_gradient(self, case: Case) -> Tensor:
        """The gradient that depends on the reward."""
        if self.offset:
            case = replace(case, log_ratio=case.log_ratio + self.offset)
        grad = self.examined.raw(case)
        if self.has_rest:
            grad = grad - self.gradient_without_reward(case)
        return grad

    def gradient_without_reward(self, case: Case) -> Tensor:
        return self.examined.raw(self.examined.without_reward(case))

    def policy_push(self, case: Case) -> Tensor:
        return decode(self.policy_gradient(case), case, self.examined.lens).push

    def answer_tokens(self, case: Case) -> Tensor:
        """(B, L) bool: the tokens of the answers that have a gradient."""
        return self.formula.tokens(case) & case.mask

    def per_answer(self, shape: Shape, case: Case, tolerance: float = 1e-6) -> Tensor | None:
        """(B,) the push of an answer's tokens, its shape divided away; None if they differ."""
        push = self.policy_push(case)
        return by_answer(push / shape.value(case), self.answer_tokens(case), tolerance)

    def unexplained(self, case: Case, only_policy: bool = False) -> float:
        """The share of the gradient that the formula does not give; or of the part of it that
        depends on the reward."""
        try:
            grad = self.policy_gradient(case) if only_policy else self.examined.raw(case)
        except LossFailed:  # said elsewhere: a dead group gives what is not finite
            return 0.0
        return float((grad - self.formula.gradient(case)).norm() / grad.norm())

    # ------------------------------------------------------------------ the batches
    def case(self, seed: int, groups: int = 4, answers: int = 4, **more) -> Case:
        return make_case(seed, groups, answers, lens=self.examined.lens, **more)

    def designs(self) -> list[Case]:
        """Batches of several sizes, on policy. Groups of 4 alone, if the loss takes no others."""
        found = [self.case(21), self.case(22, 2, longest=6), self.case(23, spare=3, prompts=(3, 5))]
        if 3 in self.sizes:
            found.append(self.case(24, 3, 3, longest=8))
        if 6 in self.sizes:
            found.append(self.case(25, 2, 6))
        return found

    def with_a_dead_group(self, seed: int, of: float = .5) -> Case:
        case = self.case(seed)
        reward = case.reward.clone()
        reward[case.group == 1] = of
        return replace(case, reward=reward)

    def with_large_rewards(self, seed: int) -> Case:
        case = self.case(seed)
        return replace(case, reward=40 * case.reward - 20)

    def one_of_200(self, seed: int, right: float) -> list[Case]:
        """One right answer, or one wrong one, in a group. Its z-score is 14, more than any in a
        small group: a limit of 10 would be seen."""
        if 6 not in self.sizes:
            return []
        case, is_other = self.case(seed, 1, 200), torch.arange(200) == 7
        return [replace(case, reward=torch.where(is_other, right, 1 - right).double())]

    def far_reference(self, seed: int, sign: int) -> Case:
        """So far away that a clamp of the KL at 10, or of the log-ratio at 20, would be seen."""
        case = self.off_policy(seed, "log_reference", 24.0)
        return replace(case, log_reference=sign * case.log_reference.abs())

    def without_padding(self, seed: int) -> list[Case]:
        """Rows that are full to their last place; none if tokens outside of the answer count."""
        of_answer = {"first", "middle", "end", "cut", "unfinished"}
        if not self.formula.trained <= of_answer:
            return []
        return [self.case(seed, prompts=(3, 3), spare=0)]

    def off_policy(self, seed: int, column: str, size: float) -> Case:
        case = self.case(seed)
        return replace(case, fills_zeros=False,
                       **{column: noise_like(case, seed, size) * case.mask})

    def everything(self, seed: int) -> Case:
        case = self.off_policy(seed, "log_ratio", .5)
        return replace(case, log_reference=noise_like(case, seed + 1, .5) * case.mask)


def far(case: Case) -> Case:
    """The case with ratios and a reference that are not 1."""
    return replace(case, log_ratio=noise_like(case, 5, .1), log_reference=noise_like(case, 6, .3))


def right_or_wrong(case: Case) -> Case:
    return replace(case, reward=(case.reward > .5).double())
