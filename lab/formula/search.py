"""Which formula has this loss? A search proposes one, question by question, and a proof decides.

    lens         which log-probs does it look at
    tokens       which have a push, on batches with random rewards
    shape        how does the push differ within an answer
    advantage    and counting, from batches with other rewards, lengths and sizes (credit.py)
    ratio        where is there a push as a ratio goes from e^-24 to e^24 (ratios.py)
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
from .ours import Formula, Term, View, gradient_of, trained, trained_in, weight_of
from .reading import EXACT, KNOWN, find_lens, read
from .tables import (CHOICES, COUNTS, KLS, PLACES, REFERENCES, SHAPES, ended, good, kinds)

ROUNDING = 1e-15  # a gradient that is smaller is 0
COSTS = ("length", "kl k1", "kl k1 mean", "kl k3", "kl k3 mean")  # of an answer, off its reward


@dataclass
class Found:
    """A formula, and what is known of it."""
    formula: Formula = Formula()
    is_zero: bool = False
    unexplained: float = 1.0           # the largest share of the gradient of a new batch
    differs: list[tuple[str, float]] = field(default_factory=list)  # batches it does not explain
    places: list[str] = field(default_factory=list)   # where in them all of the difference is
    notes: list[str] = field(default_factory=list)
    dead_is_nan: bool = False          # groups with equal rewards give 0 / 0
    has_reward: bool = True            # whether a push depends on the reward

    @property
    def understood(self) -> bool:
        return not self.is_zero and self.unexplained < KNOWN


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
        base = make_case(1)
        self.examined.choose_dtype(base)
        self.examined.refuse_what_changes(base, make_case(2))
        if self.trains_nothing(base):
            return
        self.find_lens(base)
        self.found.has_reward = bool(self.support(self.case(3)).any())
        if self.found.has_reward:
            self.find_shape()
            self.find_credit()
            self.find_cost()
            ratios.find_ratio(self)
        else:
            self.formula = replace(self.formula, factor=0.0)
        self.find_rest()
        self.prove()
        self.found.formula = self.formula

    def trains_nothing(self, base: Case) -> bool:
        cases = [base, base.moved(5, .1, .3)]
        if any(self.gradient(case).abs().max() > ROUNDING for case in cases):
            return False
        if self.gradient(base.with_reward((base.reward > .5).double())).abs().max() > ROUNDING:
            self.found.notes.append("it trains nothing unless a reward is exactly 0 or 1")
        else:
            self.found.is_zero = True
        return True

    def find_lens(self, base: Case) -> None:
        case = base.moved(5, .1, .3)
        lens, rest = find_lens(self.gradient(case), case)
        if rest > EXACT:
            part, left = find_lens(self.change(case, case.with_reward(other_reward(case))), case)
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
        cases = [self.case(5, longest=60, spread=True), self.case(3), self.case(4)]
        supports = [self.support(case) for case in cases]
        views = [View(case.logits, case.batch(), self.formula.lens) for case in cases]
        present = frozenset(kind for view, has in zip(views, supports)
                            for kind, where in kinds(view).items() if (where & has).any())
        self.formula = replace(self.formula, kinds=present)
        for choice in CHOICES:
            least = self.least_kept(choice, views, supports)
            if least is not None:
                self.settle("tokens", replace(self.formula, choice=choice, least=least))
                return

    def least_kept(self, choice: str, views: list[View], supports: list[Tensor]) -> float | None:
        """The number above which the choice keeps just the tokens with a push, if there is one."""
        kept, dropped = [], []
        for view, has in zip(views, supports):
            score, inside = CHOICES[choice](view), trained(view, self.formula)
            kept.append(score[inside & has])
            dropped.append(score[inside & ~has])
        lowest = float(torch.cat(kept).min())
        if not torch.cat(dropped).numel():
            return lowest if choice == "" else None
        highest = float(torch.cat(dropped).max())
        return simplest(highest, lowest) if highest < lowest else None

    # -------------------------------------------------------------- shape
    def find_shape(self) -> None:
        """How the tokens of an answer differ; or, where none of the known shapes is right, whether
        the old log-probs are those of a neighbouring token."""
        for late in (0, 1, -1):
            self.formula = replace(self.formula, late=late)
            self.find_tokens()
            case = self.case(21)
            grad = self.change(case, case.with_reward(other_reward(case)))
            reading = read(grad, case, self.formula.lens)
            for formula in self.shapes():
                unit = self.unit(formula, case)
                if is_even(reading.push, unit.push, trained_in(case, formula)) \
                        and bool(reading.entropy.any()) == bool(unit.entropy.any()):
                    self.settle("shape", formula)
                    return
        self.formula = replace(self.formula, late=0)
        self.find_tokens()

    def shapes(self) -> list[Formula]:
        if self.formula.late:
            return [self.formula]
        return [replace(self.formula, shape=shape, is_detached=is_detached)
                for shape in SHAPES for is_detached in (True, False) if shape or is_detached]

    def unit(self, formula: Formula, case: Case):
        """What each token would get if all advantages and weights were 1."""
        plain = replace(formula, centre="raw", scale="none", groups="", finish="", order="",
                        reward="", cost="", count="sum", factor=1.0)
        ones = case.with_reward(torch.ones_like(case.reward))
        return read(gradient_of(plain, ones), ones, formula.lens)

    # -------------------------------------------------------------- advantage and counting
    def find_credit(self) -> None:
        measured = [one for case in self.ordinary() if (one := self.measure(case))]
        extreme = [one for case in self.extreme() if (one := self.measure(case))]
        fit = credit.best_fit(self.formula, measured, extreme)
        if fit.left_over > KNOWN:
            fit = credit.with_length_cost(fit, self.formula, measured)
        self.formula = fit.formula
        if fit.left_over < KNOWN and self.knows("shape"):
            self.settle("credit", fit.formula)

    def find_cost(self) -> None:
        """A KL of the whole answer that is taken off its reward shows when the reference moves."""
        formula = self.formula
        if self.knows("credit") and formula.scale == "none" and not (
                formula.finish or formula.cost):
            self.find_linear_cost()
            return
        if not self.knows("credit") or not self.depends_on(""):
            return
        cases = [self.case(seed).moved(seed, 0.0, .3) for seed in (73, 74)]
        measured = [one for case in cases if (one := self.measure(case))]
        if not measured or credit.share_left(self.formula, measured) < KNOWN:
            return
        for cost in COSTS[1:]:  # the KLs
            formula = credit.with_price(replace(self.formula, cost=cost), measured)
            if credit.share_left(formula, measured) < KNOWN:
                self.formula = formula
                return

    def find_linear_cost(self) -> None:
        """What is taken off the reward of an advantage without a scale. It is the same for all
        rewards, so their difference does not show it, and what is left over does."""
        formula, cases = self.formula, [self.case(seed).moved(seed, 0.0, .3) for seed in (75, 76)]
        try:
            both = [(case, self.without_policy(case)) for case in cases]
        except LossFailed:
            return
        for cost in COSTS:
            priced = replace(formula, cost=cost, price=1.0)
            units = [gradient_of(priced, case) - gradient_of(formula, case) for case in cases]
            if price := factor_of(units, both):
                self.formula = replace(priced, price=price)
                return

    def ordinary(self) -> list[Case]:
        even = self.case(32, equal_lengths=True)
        scale = torch.tensor([1.0, .3, 1e-2, 1e-5]).double()[even.group]
        start = torch.tensor([2.0, 1.0, .0, .0]).double()[even.group]
        dead = self.case(27)
        return [self.case(21), self.case(22, 2, 4, longest=6), self.case(23, spare=3),
                self.case(24, 3, 3, longest=8), self.case(25, 2, 6), self.case(26, 3, 8),
                self.case(28, 3, prompts=(3, 3), spare=0),
                even.with_reward(start + scale * even.reward),
                self.case(30, spread=True),
                self.case(29).with_reward(1e-5 * self.case(29).reward),
                dead.with_reward(torch.where(dead.group == 1, .5, dead.reward))]

    def extreme(self) -> list[Case]:
        one, wide = self.case(51, 1, 200), self.case(53, 2, 6)
        right = (torch.arange(200) == 7).double()
        return [one.with_reward(right), one.with_reward(1 - right),
                wide.with_reward(40 * wide.reward - 20)]

    def measure(self, case: Case) -> credit.Measured | None:
        """The number of each answer; None if the loss refuses the batch."""
        other = case.with_reward(other_reward(case))
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
    def find_rest(self) -> None:
        base = self.case(61)
        try:
            rest = self.without_policy(base)
        except LossNotFinite:
            self.found.dead_is_nan = True
            return
        size = max(float(self.gradient(base).norm()), float(rest.norm()))
        if rest.norm() > 1e-9 * size:
            self.find_entropy(base, rest)
        self.find_kls()

    def without_policy(self, case: Case) -> Tensor:
        """The gradient without the part that depends on the reward: what is not explained by the
        policy loss that was found, or what equal rewards leave where none was found."""
        if self.knows("credit") or not self.found.has_reward:
            return self.gradient(case) - gradient_of(self.formula, case)
        return self.gradient(case.with_reward(torch.zeros_like(case.reward)))

    def find_entropy(self, case: Case, rest: Tensor) -> None:
        """An entropy bonus: how its tokens count, where, and its factor."""
        if read(rest, case, self.formula.lens).entropy.abs().max() < 1e-9 * rest.abs().max():
            return
        second = self.case(62, 3, longest=9)
        both = [(case, rest), (second, self.without_policy(second))]
        self.formula = self.best_term([Term("entropy", count, place, 1.0)
                                       for place in PLACES for count in term_counts()], both)

    def best_term(self, terms: list[Term], both: list[tuple[Case, Tensor]]) -> Formula:
        """The formula with the first of these terms that explains both rests, with one factor."""
        for term in terms:
            units = []
            for case, _ in both:
                view = credit.view_of(case, self.formula)
                weight = weight_of(view, term)
                unit = self.term_alone(term)
                units.append(gradient_of(unit, case) if weight.any() else None)
            if any(unit is None for unit in units):
                continue
            if factor := factor_of(units, both):
                term = replace(term, factor=factor)
                if term.kind == "entropy":
                    return replace(self.formula, entropy=term)
                return replace(self.formula, kls=(*self.formula.kls, term))
        return self.formula

    def term_alone(self, term: Term) -> Formula:
        alone = replace(self.formula, factor=0.0, kls=(), entropy=None)
        if term.kind == "entropy":
            return replace(alone, entropy=term)
        return replace(alone, kls=(term,))

    def find_kls(self) -> None:
        """A KL to the reference, and one to the old model: their estimators, counts and places.
        A k1 shows nothing of its reference in the gradient, so the loss's value is asked."""
        sizes = {"": ((.1, 4.0), (0.0, 4.0)), " to old": ((.1, 0.0),)}
        for reference, moves in sizes.items():
            for ratio, far in moves:
                cases = [self.case(71).moved(71, ratio, far),
                         self.case(72, 3, spare=3).moved(72, ratio, far)]
                before = len(self.formula.kls)
                if self.depends_on(reference):
                    self.find_kl(reference, cases)
                if len(self.formula.kls) > before:
                    break

    def depends_on(self, reference: str) -> bool:
        case, moved = self.case(61), self.case(61).moved(61, .1, .1)
        name = "log_ratio" if reference else "log_reference"
        return self.examined.loss_of(case) != self.examined.loss_of(
            replace(case, **{name: getattr(moved, name)}))

    def find_kl(self, reference: str, cases: list[Case]) -> None:
        try:
            rests = [(case, self.without_policy(case)) for case in cases]
            size = float(self.gradient(cases[0]).norm())
        except LossFailed:
            return
        if not self.knows("credit") and self.found.has_reward:
            terms_alone = replace(self.formula, factor=0.0)
            rests = [(case, rest - gradient_of(terms_alone, case)) for case, rest in rests]
        if float(rests[0][1].norm()) > 1e-9 * size:
            self.formula = self.best_term(self.nearest_terms(reference, rests), rests)

    def nearest_terms(self, reference: str, rests: list[tuple[Case, Tensor]]) -> list[Term]:
        """The KL terms that fit best, in the order of the tables."""
        ways = [(place, count) for place in PLACES for count in term_counts()]
        slopes: list[Tensor] = []
        weights: list[Tensor] = []
        pushes: list[Tensor] = []
        for case, rest in rests:
            view = credit.view_of(case, self.formula)
            slopes.append(slopes_of_kls(view, reference))
            weights.append(torch.stack([weight_of(view, Term("", count, place, 1.0)).flatten()
                                        for place, count in ways]))
            pushes.append(read(rest, case, self.formula.lens).push.flatten())
        slope, weight = torch.cat(slopes, 1), torch.cat(weights, 1).nan_to_num(0.0, 0.0, 0.0)
        explained = ((slope * torch.cat(pushes)) @ weight.T).square() \
            / (slope.square() @ weight.square().T).clamp(min=1e-300)
        explained = explained.flatten().nan_to_num(0.0, 0.0, 0.0)
        kept = (explained >= explained.max() * (1 - 1e-9)).nonzero().flatten().tolist()[:40]
        names = list(KLS)
        return [Term(names[k // len(ways)], ways[k % len(ways)][1], ways[k % len(ways)][0], 1.0,
                     reference) for k in kept]

    # -------------------------------------------------------------- the proof
    def prove(self) -> None:
        """Compare the whole formula with the gradient of batches that chose nothing."""
        worst, where = 0.0, []
        for name, case in self.new_batches():
            try:
                wanted = self.gradient(case)
            except LossNotFinite:
                self.found.dead_is_nan |= name == "groups with equal rewards"
                continue
            except LossFailed:
                continue
            off = wanted - gradient_of(self.formula, case)
            share = float(off.norm() / wanted.norm().clamp(min=1e-12))
            if share >= KNOWN:
                self.found.differs.append((name, share))
                where.append((case, off))
            worst = max(worst, share if math.isfinite(share) else 1.0)
        self.found.unexplained = worst
        self.found.places = places_of(where, self.formula)
        self.check_parts()

    def check_parts(self) -> None:
        """Keep as sure only what new batches have not refuted."""
        refuted = set()
        for question, case in (("credit", self.case(41)), ("credit", self.case(42, 3, spare=2)),
                               ("ratio", self.case(44).moved(44, .8)),
                               ("ratio", self.case(46).moved(46, .3))):
            if not self.knows("credit", question):
                continue
            other = case.with_reward(other_reward(case))
            plain = replace(self.formula, kls=(), entropy=None)
            try:
                wanted = self.change(case, other)
            except LossFailed:
                continue
            off = wanted - gradient_of(plain, case) + gradient_of(plain, other)
            if float(off.norm()) > KNOWN * float(wanted.norm()):
                refuted.add(question)
        self.formula = replace(self.formula, sure=self.formula.sure - refuted)

    def new_batches(self) -> list[tuple[str, Case]]:
        dead, one, sure = self.case(43), self.case(51, 1, 200), self.case(56, spread=True)
        wide, right = self.case(53), (torch.arange(200) == 7).double()
        cut = self.case(52, longest=60)
        found = [("ordinary batches", self.case(41)), ("ordinary batches", self.case(42, 3)),
                 ("rows with more padding", self.case(48, 3, spare=4)),
                 ("rows without padding", self.case(49, prompts=(3, 3), spare=0)),
                 ("six groups", self.case(50, 6)),
                 ("answers of up to 60 tokens", cut),
                 ("answers of up to 200 tokens", self.case(58, 2, 2, longest=200)),
                 ("probabilities of 1e-6 to 1 - 1e-6", sure),
                 ("groups with equal rewards", dead.with_reward(
                     torch.where(dead.group == 1, .5, dead.reward))),
                 ("ratios", self.case(44).moved(44, .8)), ("ratios", self.case(45).moved(45, .2)),
                 ("ratios up to e^24", self.case(47).moved(47, 24.0)),
                 ("another reference", self.case(54).moved(54, .3, .8)),
                 ("a far reference", self.case(57).moved(57, 0.0, 24.0)),
                 ("rewards below 0 and above 1", wide.with_reward(40 * wide.reward - 20)),
                 ("rewards below 0 and above 1", wide.with_reward(4 * wide.reward - 2)),
                 ("a group of 200 answers", one.with_reward(right)),
                 ("a group of 200 answers", one.with_reward(1 - right))]
        return [(name, replace(case, fills_zeros=False)) for name, case in found]


def factor_of(units: list[Tensor], both: list[tuple[Case, Tensor]]) -> float:
    """How many times the unit explains what is left in both cases; 0 if it does not."""
    along = float((units[0] * both[0][1]).sum())
    factor = along / max(float(units[0].square().sum()), 1e-300)
    holds = all(float((rest - factor * unit).norm()) < KNOWN * float(rest.norm())
                for unit, (_, rest) in zip(units, both))
    return credit.tidy(factor) if holds else 0.0


def slopes_of_kls(view: View, reference: str) -> Tensor:
    """(kinds, B L) the push that each KL has, where all tokens have the weight 1."""
    leaf = view.log_prob.detach().requires_grad_(True)
    found = []
    for function in KLS.values():
        ratio = (leaf - view.batch.old_log_prob).exp()
        value = function(REFERENCES[reference](view.batch) - leaf, ratio)
        found.append(-torch.autograd.grad(value.sum(), leaf)[0].flatten())
    return torch.stack(found)


def term_counts() -> list[str]:
    return [count + own for count in COUNTS for own in ("", " of its own")]


def other_reward(case: Case) -> Tensor:
    """Other rewards for the same answers. They are no multiple of the first ones in another order,
    which would have the same z-scores."""
    draw = torch.Generator().manual_seed(len(case.reward))
    size = .3 + .7 * torch.rand(len(case.reward), generator=draw, dtype=torch.float64)
    return case.reward.flip(0).roll(1) * size + .1


def is_even(push: Tensor, unit: Tensor, tokens: Tensor) -> bool:
    """Whether push / unit is the same number at all tokens of an answer."""
    value = torch.where(tokens, push / unit, 0.0).nan_to_num(0.0, 0.0, 0.0)
    mean = value.sum(1) / tokens.sum(1).clamp(min=1)
    off = ((value - mean[:, None]).abs() * tokens).amax(1)
    return bool((off <= KNOWN * mean.abs().max()).all()) and bool(mean.any())


def simplest(below: float, above: float) -> float:
    """The decimal with the fewest digits that is above the one number and not above the other:
    people write 0.2, and not 0.2137."""
    scale = max(abs(below), abs(above), 1e-300)
    for digits in range(-int(math.floor(math.log10(scale))) - 1, 18):
        value = math.floor(above * 10.0 ** digits) / 10.0 ** digits
        if below < value <= above:
            return value
    return above


def places_of(parts: list[tuple[Case, Tensor]], formula: Formula) -> list[str]:
    """Where, in the batches that the formula does not explain, all that is not explained stands."""
    if not parts:
        return []
    totals: dict[str, list[float]] = {}
    for case, off in parts:
        at_token = formula.lens.to_tokens(off).square().sum(-1)
        view = View(case.logits, case.batch(), formula.lens)
        for name, where in regions(view, case).items():
            where = where.expand(at_token.shape)
            inside, size = totals.setdefault(name, [0.0, 0.0])
            totals[name] = [inside + float(at_token[where].sum() / at_token.sum()),
                            size + float((where & case.mask).sum() / case.mask.sum())]
    n = len(parts)
    complete = [name for name, (inside, size) in totals.items()
                if inside > .999 * n and size < .9 * n]
    return sorted(complete, key=lambda name: totals[name][1])[:2]


def regions(view: View, case: Case) -> dict[str, Tensor]:
    """(B, L) bool by name: what may be special about a token."""
    batch, ratio = view.batch, case.log_ratio.exp()
    is_good = good(batch)[:, None] > 0
    return {"answers that are better than the mean of their group": is_good,
            "answers that are worse than the mean of their group": ~is_good,
            "answers whose reward is below 0": batch.reward[:, None] < 0,
            "answers whose reward is above 1": batch.reward[:, None] > 1,
            "answers that were cut": ended(batch)[:, None] == 0,
            "ratios above 1": ratio > 1, "ratios below 1": ratio < 1,
            "ratios above 3": ratio > 3, "ratios below 0.3": ratio < .3,
            "the prompt": view.place < batch.prompt_length[:, None],
            "the padding": view.from_end < 0,
            "the first token of an answer": view.place == batch.prompt_length[:, None],
            "the last token of an answer": view.from_end == 0}
