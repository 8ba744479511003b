"""Which formula has this loss? A search proposes one, question by question, and a proof decides.

    lens         which log-probs does it look at
    tokens       which have a push, on batches with random rewards
    shape        how does the push differ within an answer
    advantage    and counting, from batches with other rewards, lengths and sizes (credit.py)
    ratio        where is there a push as a ratio goes from e^-4 to e^4 (ratios.py)
    rest         what stays without the reward: KL terms, an entropy

What was found is believed only if it gives the gradient of batches that had no part in choosing it,
to a millionth of its size. Where it does not, the formula is the nearest one that was found, and
`Found.differs` says on which batches and by how much.
"""
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from . import credit, ratios
from .batches import (Case, has_a_dead_group, make_case, one_is_another, stretched,
                      with_a_dead_group, with_other_reward)
from .calling import Examined, Loss, LossFailed, LossNotFinite
from .ours import Change, Formula, Term, View, gradient_of, left_by, left_of, trained, trained_in
from .reading import EXACT, KNOWN, find_lens, first_right, read
from .tables import CHOICES, COUNTS, PLACES, SHAPES, TERMS, kinds

ROUNDING = 1e-9  # a gradient that is smaller may be rounding, and counts as none
NEAR = 0.05  # a nearest formula that leaves more of a gradient over is noise, and not told


@dataclass
class Found:
    """A formula, and what is known of it."""
    formula: Formula = Formula()
    is_zero: bool = False
    unexplained: float = 1.0           # the largest share of the gradient of a new batch
    differs: dict[str, float] = field(default_factory=dict)  # by kind of batch, where it is not so
    notes: list[str] = field(default_factory=list)
    dead_is_nan: bool = False          # groups with equal rewards give 0 / 0
    has_reward: bool = True            # whether a push depends on the reward
    trains_replies: bool | None = None  # None if no such batch could be asked
    is_random: bool = False            # each call got the same seed, of which alone all this holds
    trains_reward: bool = False        # a gradient goes through the reward, as through a KL in it
    measured: list[tuple[str, list[float]]] = field(default_factory=list)  # if not understood

    @property
    def understood(self) -> bool:
        return not (self.is_zero or self.is_random) and self.unexplained < KNOWN

    @property
    def is_near(self) -> bool:
        """Whether the nearest formula is near enough to be told."""
        return max(self.differs.values(), default=self.unexplained) < NEAR


def find_formula(loss: Loss) -> Found:
    """The formula of a loss, or the nearest one. LossFailed says why a loss cannot be examined."""
    search = Search(loss)
    search.look()
    return search.found


class Search:
    def __init__(self, loss: Loss):
        self.examined, self.found = Examined(loss), Found()
        self.formula = Formula()

    # -------------------------------------------------------------- the loss, asked
    def case(self, seed: int, groups: int = 4, answers: int = 4, **more) -> Case:
        return make_case(seed, groups, answers, lens=self.formula.lens, late=self.formula.late,
                         **more)

    def gradient(self, case: Case) -> Tensor:
        return self.examined.gradient(case)

    def change(self, case: Case, other: Case) -> Tensor:
        """The gradient of a case less that of the other one, of which only the rewards differ."""
        return self.gradient(case) - self.gradient(other)

    def push(self, case: Case, other: Case) -> Tensor:
        """(B, L) the push that depends on the reward."""
        return read(self.change(case, other), case, self.formula.lens).push

    def tried(self, function: Callable[..., Tensor], *cases: Case) -> Tensor | None:
        """What a function gives of these cases; None if the loss refuses one of them."""
        try:
            return function(*cases)
        except LossNotFinite:
            self.found.dead_is_nan |= any(has_a_dead_group(case) for case in cases)
        except LossFailed:
            pass
        return None

    def knows(self, *questions: str) -> bool:
        return set(questions) <= self.formula.sure

    def settle(self, question: str, formula: Formula) -> None:
        self.formula = replace(formula, sure=self.formula.sure | {question})

    # -------------------------------------------------------------- the questions in order
    def look(self) -> None:
        base = self.prepare()
        if self.trains_nothing(base):
            return
        self.find_lens(base)
        self.found.has_reward = bool(self.support(self.case(3)).any())
        if self.found.has_reward:
            self.find_shape()
            self.find_credit()
            ratios.find_ratio(self)
            self.find_replies()
        else:
            self.formula = replace(self.formula, factor=0.0)
        self.find_terms()
        self.prove()
        if not self.found.understood:
            self.doubt_the_ratio()
            self.ask_the_reward()
            self.measure_pushes()
        self.found.formula = self.formula

    def prepare(self) -> Case:
        """Choose how the loss is called, and refuse what is none."""
        base = make_case(1)
        self.examined.choose_dtype(base)
        self.examined.refuse_what_changes(base, make_case(2))
        self.found.is_random = self.examined.is_random
        return base

    def trains_nothing(self, base: Case) -> bool:
        """Whether the gradient is 0 on all batches, but for rounding."""
        cases = base, base.moved(5, .1, .3)
        if any(self.gradient(case).abs().max() > ROUNDING for case in cases):
            return False
        right_or_wrong = base.with_reward((base.reward > .5).double())
        if self.gradient(right_or_wrong).abs().max() > ROUNDING:
            self.found.notes.append("it trains nothing unless a reward is exactly 0 or 1")
        else:
            self.found.is_zero = True
        return True

    def find_lens(self, base: Case) -> None:
        case = base.moved(5, .1, .3)
        lens, rest = find_lens(self.gradient(case), case)
        if rest > EXACT:
            part, left = find_lens(self.change(case, with_other_reward(case)), case)
            self.found.notes.append(f"{rest:.1%} of the gradient is neither that of a log-prob of "
                                    "a sampled token nor that of an entropy")
            lens, rest = (part, left) if left < rest else (lens, rest)
        self.formula = replace(self.formula, lens=lens)
        if rest <= EXACT:
            self.settle("lens", self.formula)

    # -------------------------------------------------------------- tokens
    def support(self, case: Case) -> Tensor:
        """(B, L) where a push depends on the reward, whichever the rewards are."""
        found = torch.zeros_like(case.mask)
        for seed in range(3):
            draw = torch.Generator().manual_seed(seed)
            first, second = torch.rand(2, len(case.reward), generator=draw, dtype=torch.float64)
            push = self.push(case.with_reward(first), case.with_reward(second))
            found = found | (push.abs() > 1e-9 * push.abs().max().clamp(min=1e-12))
        return found

    def find_tokens(self) -> None:
        """Which kinds of tokens have a push, and which choice among them."""
        cases = [self.case(5, longest=60), self.case(3), self.case(4)]
        supports = [self.support(case) for case in cases]
        views = [View(case.logits, case.batch(), self.formula.lens) for case in cases]
        present = frozenset(kind for view, has in zip(views, supports)
                            for kind, where in kinds(view).items() if (where & has).any())
        self.formula = replace(self.formula, kinds=present, choice="")

        def wrongly_kept(formula: Formula) -> float:
            """The number of tokens that are trained without a push, or have one untrained."""
            return float(sum((trained(view, formula) != (trained(view, self.formula) & has)).sum()
                             for view, has in zip(views, supports)))

        chosen, wrong = first_right(
            [replace(self.formula, choice=choice) for choice in CHOICES], wrongly_kept)
        if chosen and not wrong:
            self.settle("tokens", chosen)

    # -------------------------------------------------------------- shape
    def find_shape(self) -> None:
        """How the tokens of an answer differ; or, where none of the known shapes is right, whether
        the old log-probs are those of a neighbouring token."""
        for late in (0, 1, -1):
            self.formula = replace(self.formula, late=late)
            self.find_tokens()
            case = self.case(21)
            reading = read(self.change(case, with_other_reward(case)), case, self.formula.lens)

            def uneven(formula: Formula) -> float:
                unit = self.unit(formula, case)
                if bool(reading.entropy.any()) != bool(unit.entropy.any()):
                    return math.inf
                return unevenness(reading.push / unit.push, trained_in(case, formula))

            shape, rest = first_right(self.shapes(), uneven)
            if shape and rest < KNOWN:
                self.settle("shape", shape)
                return
        self.formula = replace(self.formula, late=0)
        self.find_tokens()

    def shapes(self) -> list[Formula]:
        if self.formula.late:
            return [self.formula]
        found = [replace(self.formula, shape=shape, is_detached=is_detached)
                 for shape in SHAPES for is_detached in (True, False) if shape or is_detached]
        return [*found, replace(self.formula, ratio=ratios.UNDETACHED,
                                bounds=(-math.inf, math.inf))]

    def unit(self, formula: Formula, case: Case):
        """What each token would get if all advantages and weights were 1."""
        plain = replace(formula, centre="raw", scale="none", groups="", finish="", count="sum",
                        factor=1.0)
        ones = case.with_reward(torch.ones_like(case.reward))
        return read(gradient_of(plain, ones), ones, formula.lens)

    # -------------------------------------------------------------- several turns
    def replied(self) -> Case:
        """A batch in which an environment wrote the third to the fifth token of each answer."""
        return replace(self.case(55, equal_lengths=True), reply=(2, 5), fills_zeros=False)

    def find_replies(self) -> None:
        """Whether there is a push where an environment wrote: within an answer, and outside the
        mask. Of three such tokens the middle one is asked, so a mask that is one place off, which
        is a mistake of its own, is not taken for it."""
        case = self.replied()
        push = self.tried(self.push, case, with_other_reward(case))
        if push is None:
            return
        push = push.abs()
        rows = torch.arange(len(push))
        at_reply = push[rows, case.prompt_length + 3]
        self.found.trains_replies = bool(at_reply.max() > 1e-9 * push.max())

    # -------------------------------------------------------------- advantage and counting
    def find_credit(self) -> None:
        ordinary = [one for case in self.rewarded() if (one := self.measure(case))]
        extreme = [one for case in (*one_is_another(self.case(51, 1, 200)),
                                    stretched(self.case(53, 2, 6), 40, -20))
                   if (one := self.measure(case))]
        self.formula, left = credit.best_fit(self.formula, ordinary, extreme)
        if left < KNOWN and self.knows("shape"):
            self.settle("credit", self.formula)

    def rewarded(self) -> list[Case]:
        """Batches with rewards, lengths and sizes of many kinds."""
        even = self.case(32, equal_lengths=True)
        scale = torch.tensor([1.0, .3, 1e-2, 1e-4]).double()[even.group]
        start = torch.tensor([2.0, 1.0, .0, .0]).double()[even.group]
        return [self.case(21), self.case(22, 2, 4, longest=6), self.case(23, spare=3),
                self.case(24, 3, 3, longest=8), self.case(25, 2, 6), self.case(26, 3, 8),
                self.case(28, 3, prompts=(3, 3), spare=0),
                even.with_reward(start + scale * even.reward),
                stretched(self.case(29), 1e-4, 0), with_a_dead_group(self.case(27))]

    def measure(self, case: Case) -> credit.Measured | None:
        """The number of each answer; None if the loss refuses the batch."""
        other = with_other_reward(case)
        push = self.tried(self.push, case, other)
        if push is None:
            return None
        push = push / self.unit(self.formula, case).push
        where = trained_in(case, self.formula) & torch.isfinite(push)
        tokens = where.sum(1)
        number = torch.where(where, push, 0.0).sum(1) / tokens.clamp(min=1)
        views = (credit.view_of(case, self.formula), credit.view_of(other, self.formula))
        return credit.Measured(views, number, tokens > 0)

    # -------------------------------------------------------------- what needs no reward
    def find_terms(self) -> None:
        """An entropy bonus, a KL to the reference and one to the old model: their estimators,
        counts and places. A k1 shows nothing of its reference in the gradient, so the loss's value
        is asked."""
        kls = [kind for kind in TERMS if kind != "entropy"]
        for kinds_of_term, reference, ratio, far in (
                (["entropy"], "", 0.0, 0.0), (kls, "", .1, 4.0), (kls, " to old", 4.0, 0.0)):
            if kinds_of_term is kls and not self.depends_on(reference):
                continue
            cases = [self.case(71).moved(71, ratio, far),
                     self.case(72, 3, 3, longest=6, spare=3).moved(72, ratio, far)]
            whole = self.tried(self.gradient, cases[0])
            rests = [(case, rest) for case in cases
                     if (rest := self.without_policy(case)) is not None]
            if whole is None or len(rests) < len(cases):
                continue
            size = max(float(whole.norm()), float(rests[0][1].norm()))
            if float(rests[0][1].norm()) > EXACT * size:
                counts = sorted(COUNTS, key=lambda count: count != self.formula.count)
                self.add_term([Term(kind, count + own, place, 1.0, reference) for count in counts
                               for own in ("", " of its own") for place in PLACES
                               for kind in kinds_of_term], rests)

    def without_policy(self, case: Case) -> Tensor | None:
        """The gradient without what is explained already. If no policy loss was found, it is the
        gradient that equal rewards leave."""
        formula = self.formula
        if self.found.has_reward and not self.knows("credit"):
            case = case.with_reward(torch.zeros_like(case.reward))
            formula = replace(formula, factor=0.0)
        whole = self.tried(self.gradient, case)
        return None if whole is None else whole - gradient_of(formula, case)

    def depends_on(self, reference: str) -> bool:
        """Whether the loss's value changes with these log-probs."""
        case, moved = self.case(61), self.case(61).moved(61, .1, .1)
        name = "log_ratio" if reference else "log_reference"
        return self.examined.loss_of(case) != self.examined.loss_of(
            replace(case, **{name: getattr(moved, name)}))

    def add_term(self, terms: list[Term], rests: list[tuple[Case, Tensor]]) -> None:
        """Take the first of these terms that explains all rests, with one factor."""
        def fit(term: Term) -> tuple[float, float]:
            """The factor of the term, and what it leaves over."""
            alone, factor, left = replace(self.formula, factor=0.0, terms=(term,)), 0.0, 0.0
            for case, rest in rests:
                unit = gradient_of(alone, case).nan_to_num(0.0)
                factor = factor or float((unit * rest).sum() / unit.square().sum())
                left = max(left, left_of(rest, factor * unit))
                if left > KNOWN:
                    break
            return factor, left

        term, left = first_right(terms, lambda term: fit(term)[1])
        if term and left < KNOWN:
            term = replace(term, factor=credit.tidy(fit(term)[0]))
            self.formula = replace(self.formula, terms=(*self.formula.terms, term))

    # -------------------------------------------------------------- what is not understood
    def doubt_the_ratio(self) -> None:
        """Part of a loss may change with the old log-probs although what depends on the reward does
        not."""
        is_without = self.formula.ratio == "no ratio" and not any(
            term.reference for term in self.formula.terms)
        if is_without and self.depends_on(" to old"):
            self.formula = replace(self.formula, sure=self.formula.sure - {"ratio"})

    def ask_the_reward(self) -> None:
        """Whether a gradient goes through the reward, as where a KL is taken off it and is not
        detached. A KL is in the reward if the reference of one answer changes the pushes of the
        other answers of its group, and of no other. It is not detached if the gradient is the
        derivative of the loss's value."""
        case, direction = self.case(62).moved(62, .1, .3), self.case(63).logits
        first = torch.arange(len(case.group)) == 0
        changed = replace(case, log_reference=case.log_reference + .3 * first[:, None])
        gradient, other = (self.tried(self.gradient, one) for one in (case, changed))
        if gradient is None or other is None:
            return
        change = (other - gradient).flatten(1).norm(dim=1)
        slope = self.examined.slope(case, direction)
        moved = change > 1e-6 * gradient.norm()
        along = float((gradient * direction).sum())
        is_in_reward = bool(moved[(case.group == 0) & ~first].any()) and not bool(
            moved[case.group > 0].any())
        self.found.trains_reward = is_in_reward and abs(slope - along) < 1e-4 * abs(along)

    def measure_pushes(self) -> None:
        """The pushes of four answers to a problem where no ratio has changed, and those of a good
        and a bad one at other ratios, as means over all groups."""
        case = self.case(33, 8, 4, equal_lengths=True)
        case = case.with_reward(torch.tensor([1.0, .5, 0.0, 0.0]).double().repeat(8))
        for ratio in (.5, 1.0, 2.0):
            moved = replace(case, log_ratio=torch.full_like(case.log_ratio, math.log(ratio)))
            gradient = self.tried(self.gradient, moved)
            if gradient is None:
                continue
            push = read(gradient, moved, self.formula.lens).push * case.mask
            of_answer = len(push) * push.sum(1)
            self.found.measured.append((f"{ratio:g}", of_answer.view(8, 4).mean(0).tolist()))

    # -------------------------------------------------------------- the proof
    def prove(self) -> None:
        """Compare the whole formula with the gradient of batches that chose nothing."""
        worst = 0.0
        for name, case in self.new_batches():
            wanted = self.tried(self.gradient, case)
            if wanted is None:
                continue
            share = left_of(wanted, gradient_of(self.formula, case))
            if share >= KNOWN:
                self.found.differs[name] = max(share, self.found.differs.get(name, 0.0))
            worst = max(worst, share)
        self.found.unexplained = worst
        self.check_parts()

    def check_parts(self) -> None:
        """Keep as sure only what new batches have not refuted."""
        cases = {"credit": [self.case(41), self.case(42, 3, spare=2)],
                 "ratio": [self.case(44).moved(44, .8), self.case(46).moved(46, .3)]}
        for question, new in cases.items():
            changes = self.changes([(case, with_other_reward(case)) for case in new])
            if self.knows("credit", question) and left_by(self.formula, changes) > KNOWN:
                self.formula = replace(self.formula, sure=self.formula.sure - {question})

    def ratio_changes(self) -> list[Change]:
        """Of batches in which all ratios differ, with rewards from -1 to 1, so that a raw reward is
        negative, too; none if the advantage is not known, or if the loss refuses one of them."""
        cases = [stretched(self.case(seed).moved(seed, size), 2, -1)
                 for seed, size in ((34, .3), (35, 1.2), (36, .05), (37, 4.0))]
        found = self.changes([(case, case.with_reward(case.reward.roll(1))) for case in cases])
        return found if self.knows("credit") and len(found) == len(cases) else []

    def changes(self, pairs: list[tuple[Case, Case]]) -> list[Change]:
        """What the loss makes of pairs of cases, of which only the rewards differ; without the
        pairs that it refuses."""
        tried = [(case, other, self.tried(self.change, case, other)) for case, other in pairs]
        return [Change(case, other, gradient) for case, other, gradient in tried
                if gradient is not None]

    def batches_to_compare(self) -> list[tuple[str, Case]]:
        """Batches on which two losses are compared, also some in which an environment replied."""
        name = "replies of an environment"
        return [*self.new_batches(), (name, self.replied()),
                (name, self.replied().moved(56, .3, .3))]

    def new_batches(self) -> list[tuple[str, Case]]:
        found = {
            "ordinary batches": [self.case(41), self.case(42, 3)],
            "rows with more padding": [self.case(48, 3, spare=4)],
            "rows without padding": [self.case(49, prompts=(3, 3), spare=0)],
            "six groups": [self.case(50, 6)],
            "answers of up to 60 tokens": [self.case(52, longest=60)],
            "answers of up to 200 tokens": [self.case(58, 2, 2, longest=200)],
            "groups with equal rewards": [with_a_dead_group(self.case(43))],
            "ratios": [self.case(44).moved(44, .8), self.case(45).moved(45, .2)],
            "ratios up to e^4": [stretched(self.case(47).moved(47, 4.0), 2, -1)],
            "another reference": [self.case(54).moved(54, .3, .8)],
            "a far reference": [self.case(57).moved(57, 0.0, 4.0)],
            "rewards below 0 and above 1": [stretched(self.case(53), 40, -20),
                                            stretched(self.case(53), 4, -2)],
            "a group of 200 answers": one_is_another(self.case(51, 1, 200))}
        return [(name, replace(case, fills_zeros=False))
                for name, cases in found.items() for case in cases]


def unevenness(value: Tensor, tokens: Tensor) -> float:
    """How much the values of an answer's tokens differ, relative to the largest mean."""
    value = torch.where(tokens, value, 0.0).nan_to_num(0.0, 0.0, 0.0)
    mean = value.sum(1) / tokens.sum(1).clamp(min=1)
    off = ((value - mean[:, None]) * tokens).abs().max()
    return float(off / mean.abs().max()) if mean.any() else math.inf
