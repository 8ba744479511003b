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
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from . import credit, ratios
from .batches import Case, make_case
from .calling import Examined, Loss, LossFailed, LossNotFinite
from .ours import (Change, Formula, Term, View, gradient_of, left_by, left_of, trained, trained_in,
                   weight_of)
from .reading import EXACT, KNOWN, find_lens, first_right, read
from .tables import CHOICES, COUNTS, KLS, PLACES, REFERENCES, SHAPES, kinds

ROUNDING = 1e-9  # of a gradient that is smaller it is asked whether it is more than rounding
NEAR = 0.05  # a nearest formula that leaves more of a gradient over is noise, and not told


@dataclass
class Found:
    """A formula, and what is known of it."""
    formula: Formula = Formula()
    is_zero: bool = False
    unexplained: float = 1.0           # the largest share of the gradient of a new batch
    differs: list[tuple[str, float]] = field(default_factory=list)  # batches it does not explain
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
        return max([share for _, share in self.differs], default=self.unexplained) < NEAR


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
        self.found.formula = at_its_size(self.formula, self.examined.scale)

    def prepare(self) -> Case:
        """Choose how the loss is called, and refuse what is none."""
        base = make_case(1)
        self.examined.choose_dtype(base)
        self.examined.refuse_what_changes(base, make_case(2))
        self.found.is_random = self.examined.is_random
        return base

    def trains_nothing(self, base: Case) -> bool:
        """Whether the gradient is 0 on all batches, but for rounding. One that is tiny is taken
        many times as large from here on."""
        cases = [base, base.moved(5, .1, .3)]
        sizes = [float(self.gradient(case).abs().max()) for case in cases]
        if max(sizes) > ROUNDING:
            return False
        if max(sizes) > 0 and not self.examined.is_rounding(cases[sizes.index(max(sizes))]):
            self.examined.scale = 1 / max(sizes)
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
            [self.with_least(choice, views, supports) for choice in CHOICES], wrongly_kept)
        if chosen and not wrong:
            self.settle("tokens", chosen)

    def with_least(self, choice: str, views: list[View], supports: list[Tensor]) -> Formula:
        """The formula with this choice, and the number above which it keeps the tokens with a push
        and no other, if there is one."""
        kept, dropped = [], [torch.tensor([-math.inf])]
        for view, has in zip(views, supports):
            score, inside = CHOICES[choice](view), trained(view, self.formula)
            kept.append(score[inside & has])
            dropped.append(score[inside & ~has])
        lowest, highest = float(torch.cat(kept).min()), float(torch.cat(dropped).max())
        least = simplest(highest, lowest) if -math.inf < highest < lowest else lowest
        return replace(self.formula, choice=choice, least=least)

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
        try:
            push = self.push(case, with_other_reward(case)).abs()
        except LossFailed:
            return
        rows = torch.arange(len(push))
        at_reply = push[rows, case.prompt_length + 3]
        self.found.trains_replies = bool(at_reply.max() > 1e-9 * push.max())

    # -------------------------------------------------------------- advantage and counting
    def find_credit(self) -> None:
        measured = [one for case in self.ordinary() if (one := self.measure(case))]
        extreme = [one for case in self.extreme() if (one := self.measure(case))]
        self.formula, left = credit.best_fit(self.formula, measured, extreme)
        if left < KNOWN and self.knows("shape"):
            self.settle("credit", self.formula)

    def ordinary(self) -> list[Case]:
        even = self.case(32, equal_lengths=True)
        scale = torch.tensor([1.0, .3, 1e-2, 1e-4]).double()[even.group]
        start = torch.tensor([2.0, 1.0, .0, .0]).double()[even.group]
        return [self.case(21), self.case(22, 2, 4, longest=6), self.case(23, spare=3),
                self.case(24, 3, 3, longest=8), self.case(25, 2, 6), self.case(26, 3, 8),
                self.case(28, 3, prompts=(3, 3), spare=0),
                even.with_reward(start + scale * even.reward),
                stretched(self.case(29), 1e-4, 0), with_a_dead_group(self.case(27))]

    def extreme(self) -> list[Case]:
        return [*one_is_another(self.case(51, 1, 200)), stretched(self.case(53, 2, 6), 40, -20)]

    def measure(self, case: Case) -> credit.Measured | None:
        """The number of each answer; None if the loss refuses the batch."""
        other = with_other_reward(case)
        try:
            push = self.push(case, other)
        except LossNotFinite:
            self.found.dead_is_nan = True
            return None
        except LossFailed:
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
        for kinds_of_term, reference, ratio, far in (
                (["entropy"], "", 0.0, 0.0), (KLS, "", .1, 4.0), (KLS, " to old", 4.0, 0.0)):
            if kinds_of_term is KLS and not self.depends_on(reference):
                continue
            cases = [self.case(71).moved(71, ratio, far),
                     self.case(72, 3, 3, longest=6, spare=3).moved(72, ratio, far)]
            try:
                rests = [(case, self.without_policy(case)) for case in cases]
                size = max(float(self.gradient(cases[0]).norm()), float(rests[0][1].norm()))
            except LossFailed as error:  # of equal rewards, if no policy loss is known
                is_nan = isinstance(error, LossNotFinite) and not self.knows("credit")
                self.found.dead_is_nan |= is_nan
                continue
            if float(rests[0][1].norm()) > 1e-9 * size:
                self.add_term([Term(kind, count + own, place, 1.0, reference)
                               for kind in kinds_of_term for place in PLACES for count in COUNTS
                               for own in ("", " of its own")], rests)

    def without_policy(self, case: Case) -> Tensor:
        """The gradient without what is explained already. If no policy loss was found, it is the
        gradient that equal rewards leave."""
        if self.knows("credit") or not self.found.has_reward:
            return self.gradient(case) - gradient_of(self.formula, case)
        equal = case.with_reward(torch.zeros_like(case.reward))
        return self.gradient(equal) - gradient_of(replace(self.formula, factor=0.0), equal)

    def depends_on(self, reference: str) -> bool:
        """Whether the loss's value changes with these log-probs."""
        case, moved = self.case(61), self.case(61).moved(61, .1, .1)
        name = "log_ratio" if reference else "log_reference"
        return self.examined.loss_of(case) != self.examined.loss_of(
            replace(case, **{name: getattr(moved, name)}))

    def add_term(self, terms: list[Term], both: list[tuple[Case, Tensor]]) -> None:
        """Take the first of these terms that explains both rests, with one factor. Terms that
        differ in nothing but count and place are the same function of the log-probs, times a
        weight: so the function is differentiated once, and only weights are compared."""
        views = [credit.view_of(case, self.formula) for case, _ in both]
        readings = [read(rest, case, self.formula.lens) for case, rest in both]
        slopes: dict[str, list[Tensor]] = {}

        def fit(term: Term) -> tuple[float, float]:
            """The factor of the term, and what it leaves over."""
            if term.kind not in slopes:
                slopes[term.kind] = [slope_of(term, view) for view in views]
            units = [weight_of(view, term).nan_to_num(0.0) * slope
                     for view, slope in zip(views, slopes[term.kind])]
            wanted = [one.entropy if term.kind == "entropy" else one.push for one in readings]
            if wanted[0].norm() < 1e-9 * both[0][1].norm():
                return 0.0, math.inf  # the rest is of another kind
            return scaled_to(units, wanted)

        term, rest = first_right(terms, lambda term: fit(term)[1])
        if term and rest < KNOWN:
            term = replace(term, factor=fit(term)[0])
            self.formula = replace(self.formula, entropy=term) if term.kind == "entropy" \
                else replace(self.formula, kls=(*self.formula.kls, term))

    # -------------------------------------------------------------- what is not understood
    def doubt_the_ratio(self) -> None:
        """Part of a loss may change with the old log-probs although what depends on the reward does
        not."""
        is_without = self.formula.ratio == "no ratio" and not any(
            term.reference for term in self.formula.kls)
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
        try:
            gradient = self.gradient(case)
            change = (self.gradient(changed) - gradient).flatten(1).norm(dim=1)
            slope = self.examined.slope(case, direction)
        except LossFailed:
            return
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
            try:
                push = read(self.gradient(moved), moved, self.formula.lens).push * case.mask
            except LossFailed:
                continue
            of_answer = len(push) * push.sum(1) / self.examined.scale
            self.found.measured.append((f"{ratio:g}", of_answer.view(8, 4).mean(0).tolist()))

    # -------------------------------------------------------------- the proof
    def prove(self) -> None:
        """Compare the whole formula with the gradient of batches that chose nothing."""
        worst = 0.0
        for name, case in self.new_batches():
            try:
                wanted = self.gradient(case)
            except LossNotFinite:
                self.found.dead_is_nan |= name == "groups with equal rewards"
                continue
            except LossFailed:
                continue
            share = left_of(wanted, gradient_of(self.formula, case))
            if share >= KNOWN:
                self.found.differs.append((name, share))
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
        """Of batches in which all ratios differ; none if the advantage is not known, or if the loss
        refuses one of them."""
        cases = [self.case(seed).moved(seed, size)
                 for seed, size in ((34, .3), (35, 1.2), (36, .05), (37, 4.0))]
        found = self.changes([(case, case.with_reward(case.reward.roll(1))) for case in cases])
        return found if self.knows("credit") and len(found) == len(cases) else []

    def changes(self, pairs: list[tuple[Case, Case]]) -> list[Change]:
        """What the loss makes of pairs of cases, of which only the rewards differ; without the
        pairs that it refuses."""
        found = []
        for case, other in pairs:
            try:
                found.append(Change(case, other, self.change(case, other)))
            except LossFailed:
                continue
        return found

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
            "ratios up to e^4": [self.case(47).moved(47, 4.0)],
            "another reference": [self.case(54).moved(54, .3, .8)],
            "a far reference": [self.case(57).moved(57, 0.0, 4.0)],
            "rewards below 0 and above 1": [stretched(self.case(53), 40, -20),
                                            stretched(self.case(53), 4, -2)],
            "a group of 200 answers": one_is_another(self.case(51, 1, 200))}
        return [(name, replace(case, fills_zeros=False))
                for name, cases in found.items() for case in cases]


def at_its_size(formula: Formula, scale: float) -> Formula:
    """The formula of a loss whose gradient was taken so many times as large."""
    if scale == 1:
        return formula
    kls = tuple(replace(term, factor=term.factor / scale) for term in formula.kls)
    entropy = formula.entropy and replace(formula.entropy, factor=formula.entropy.factor / scale)
    return replace(formula, factor=formula.factor / scale, kls=kls, entropy=entropy)


def scaled_to(units: list[Tensor], wanted: list[Tensor]) -> tuple[float, float]:
    """How many times the first unit explains what is wanted of it, and the largest share that all
    units, so many times, leave over."""
    along = float((units[0] * wanted[0]).sum())
    factor = along / max(float(units[0].square().sum()), 1e-300)
    left = [left_of(rest, factor * unit) for unit, rest in zip(units, wanted)]
    return credit.tidy(factor), max(left) if factor else math.inf


def slope_of(term: Term, view: View) -> Tensor:
    """(B, L) the push of a KL of which every token has the weight 1; of an entropy its own 1."""
    if term.kind == "entropy":
        return torch.ones_like(view.log_prob)
    leaf = view.log_prob.detach().requires_grad_(True)
    ratio = (leaf - view.batch.old_log_prob).exp()
    value = KLS[term.kind](REFERENCES[term.reference](view.batch) - leaf, ratio)
    return -torch.autograd.grad(value.sum(), leaf)[0]


def with_a_dead_group(case: Case) -> Case:
    """All rewards of a group are equal."""
    return case.with_reward(torch.where(case.group == 1, .5, case.reward))


def stretched(case: Case, size: float, start: float) -> Case:
    return case.with_reward(start + size * case.reward)


def one_is_another(case: Case) -> list[Case]:
    """One answer is right and all others are wrong; and the other way round."""
    right = (torch.arange(len(case.reward)) == 7).double()
    return [case.with_reward(right), case.with_reward(1 - right)]


def with_other_reward(case: Case) -> Case:
    """The same answers with other rewards. They are no multiple of the first ones in another order,
    which would have the same z-scores."""
    draw = torch.Generator().manual_seed(len(case.reward))
    size = .3 + .7 * torch.rand(len(case.reward), generator=draw, dtype=torch.float64)
    return case.with_reward(case.reward.flip(0).roll(1) * size + .1)


def unevenness(value: Tensor, tokens: Tensor) -> float:
    """How much the values of an answer's tokens differ, relative to the largest mean."""
    value = torch.where(tokens, value, 0.0).nan_to_num(0.0, 0.0, 0.0)
    mean = value.sum(1) / tokens.sum(1).clamp(min=1)
    off = ((value - mean[:, None]) * tokens).abs().max()
    return float(off / mean.abs().max()) if mean.any() else math.inf


def simplest(below: float, above: float) -> float:
    """The decimal with the fewest digits that is above the one number and not above the other:
    people write 0.2, and not 0.2137."""
    scale = max(abs(below), abs(above), 1e-300)
    for digits in range(-int(math.floor(math.log10(scale))) - 1, 18):
        value = math.floor(above * 10.0 ** digits) / 10.0 ** digits
        if below < value <= above:
            return value
    return above
