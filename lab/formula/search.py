"""Which formula has this loss? A search proposes one, question by question, and a proof decides.

A loss that sees the model only through the log-prob of sampled tokens has, at the logits of one
place, the gradient

    dloss/dlogits = -c (onehot(y) - p) / temperature        p = softmax(logits / temperature)

where y is the token that is predicted there. So one number c for each token says all. It is the
`push`: positive where the loss makes the token more probable. The difference between two batches
that differ in their rewards alone has no KL term and no entropy in it. Of it is asked

    lens         which log-probs does it look at
    tokens       which have a push, whichever the rewards are
    shape        how does the push differ within an answer
    credit       advantage and counting, on batches with other rewards, lengths and sizes
    ratio        where is there a push as a ratio goes from e^-4 to e^4
    sampler      and as the engine that sampled differs from the old model
    terms        what stays without the reward: a KL, an entropy

Each question is a list of candidates. The first that leaves less than a millionth over is sure, and
where none does, that which leaves least is part of the nearest formula. What was found is believed
only if it gives the gradient of batches that had no part in choosing it, to a millionth of its
size.
"""
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from .batches import (Case, Lens, make_case, one_is_another, stretched,
                      with_a_dead_group, with_other_reward)
from .calling import Examined, Loss, LossFailed, LossNotFinite
from .credit import find_credit
from .curves import find_ratio, find_sampler
from .formula import (KNOWN, Formula, Term, advantage_of, best_of, gradient_of, left_of, tidy,
                      view_of, weight_of)
from .invariances import INVARIANCES, case_to_change
from .terms import (COUNTS, PLACES, REFERENCES, SHAPES, TERMS, TOKENS, UNDETACHED,
                    UNFINISHED, Setting)

ROUNDING = 1e-9  # a gradient that is smaller may be rounding, and counts as none
SHIFTS = (1, 0, 2, -1)
FAR = 2.3  # logarithm of a reference's ratio; a k3 is below 10 there, where verl and NeMo-RL cut it
ORDINARY = "ordinary batches"
HELPS = .5  # a term is part of the nearest formula if it leaves less than this of the rest
NEAR = .3  # a formula is near if it leaves less than this of the gradients of these batches:
NEAR_ON = (ORDINARY, "answers of up to 60 tokens", "answers of up to 200 tokens",
           "a group of 200 answers", "ratios")
DEAD, UNEQUAL, TURNS = ("groups with equal rewards", "groups of unequal size",
                        "replies of an environment")
MAY_BE_REFUSED = (UNEQUAL, TURNS)
Gradients = list[tuple[str, Tensor | None]]  # by kind of batch; None where a loss gives none
NEEDED = {"credit": {"shape"}, "ratio": {"credit"}, "sampler": {"credit", "ratio"}}


@dataclass
class Found:
    """A formula, and what is known of it. Where it is not understood, it is the nearest one."""
    formula: Formula = Formula()
    is_zero: bool = False
    has_reward: bool = True            # whether a push depends on the reward
    dead_is_nan: bool = False          # groups with equal rewards give 0 / 0
    unexplained: float = 1.0           # the largest share of the gradient of a new batch
    differs: dict[str, float] = field(default_factory=dict)  # by kind of batch, where it is not so
    is_near: bool = False              # where it is not understood: most of it is explained
    token: str = ""                    # where the nearest formula differs
    refused: list[str] = field(default_factory=list)    # kinds of batches that the loss refuses
    asks_turns: bool = True            # False where what a loss does with replies has no name
    changed: list[str] = field(default_factory=list)    # names of INVARIANCES that do not hold, and
                                                        # of a term that stands elsewhere

    @property
    def understood(self) -> bool:
        return not self.is_zero and self.unexplained < KNOWN


def find_formula(loss: Loss) -> Found:
    """The formula of a loss, or what is sure of it. LossFailed says why it cannot be examined."""
    search = Search(loss)
    search.look()
    return search.found


def differences(loss: Loss, other: Loss) -> dict[str, float]:
    """By which shares two losses have other gradients, for each kind of batch."""
    return shares_of(new_gradients(loss), new_gradients(other))


def new_gradients(loss: Loss) -> Gradients:
    search = Search(loss)
    search.prepare()
    part = replace(make_case(60).moved(61, .3, .3), whole=200.0)
    found = [(name, search.tried(search.gradient, case))
             for name, case in [*search.new_batches(), ("a part of a larger batch", part)]]
    search.refuse_what_changes()
    return found


def shares_of(found: Gradients, others: Gradients) -> dict[str, float]:
    """For each kind of batch the largest share by which two losses have other gradients: infinite
    where one of them gives none. A kind that both refuse and may refuse is left out."""
    largest = max([float(one.norm()) for _, one in found + others if one is not None], default=0.0)
    if not largest:
        raise LossFailed("neither of the two losses has a gradient on any batch")
    shares: dict[str, float] = {}
    for (name, first), (_, second) in zip(found, others):
        share = math.inf
        if first is not None and second is not None:
            size = max(float(first.norm()), float(second.norm()), 1e-9 * largest)
            share = float((first - second).norm()) / size
        elif first is second is None and name in MAY_BE_REFUSED:
            continue
        shares[name] = max(share, shares.get(name, 0.0))
    return shares


def pushes(grad: Tensor, case: Case, lens: Lens) -> tuple[Tensor, float]:
    """(B, L) the push of each token, by least squares; and the share of the gradient that no push
    explains."""
    p = lens.distribution(case.logits).exp()
    onehot = torch.zeros_like(p).scatter(2, case.ids[:, :, None], 1.0)
    towards = (onehot - p) / lens.temperature
    g = lens.to_tokens(grad)
    push = -(g * towards).sum(-1) / towards.square().sum(-1).clamp(min=1e-300)
    rest = (g + push[..., None] * towards).square().sum()
    unread = (grad - lens.to_places(g)).square().sum()  # at places without a token
    return push, float((rest + unread) ** .5 / grad.norm().clamp(min=1e-300))


def temperature_of(grad: Tensor, case: Case, shift: int) -> float:
    """At the tokens of the vocabulary that were not sampled the gradient is proportional to p, so
    its logarithm rises with their logits by 1 / temperature."""
    g, logits = (Lens(shift=shift).to_tokens(value) for value in (grad, case.logits))
    b, t = divmod(int(g.norm(dim=2).argmax()), g.shape[1])
    others = torch.arange(g.shape[2]) != case.ids[b, t]
    x, y = logits[b, t, others], g[b, t, others].abs().log()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    temperature = float(1 / slope)
    return tidy(temperature) if math.isfinite(temperature) and temperature > 0 else 1.0


class Search:
    def __init__(self, loss: Loss):
        self.examined, self.found = Examined(loss), Found()
        self.formula = Formula()
        self.asks_turns = True  # until the loss refuses replies, or treats them in no known way

    def case(self, seed: int, groups: int = 4, answers: int = 4, **more) -> Case:
        return make_case(seed, groups, answers, lens=self.formula.lens, late=self.formula.late,
                         **more)

    def gradient(self, case: Case) -> Tensor:
        return self.examined.gradient(case)

    def change(self, case: Case, other: Case) -> Tensor:
        """The gradient of a case less that of the other one, of which only the rewards differ."""
        return self.gradient(case) - self.gradient(other)

    def push(self, case: Case, other: Case) -> Tensor:
        return pushes(self.change(case, other), case, self.formula.lens)[0]

    def tried(self, function: Callable[..., Any], *given: Any) -> Any:
        """What a function gives of these cases; None if the loss refuses one of them."""
        try:
            return function(*given)
        except LossFailed as error:
            self.why = error
        return None

    def knows(self, *questions: str) -> bool:
        return set(questions) <= self.formula.sure

    def settle(self, question: str, formula: Formula | None, left: float) -> None:
        """Take the best formula. The answer is sure if nothing is left over, and if the questions
        before it have sure answers."""
        if formula is not None:
            is_sure = left < KNOWN and self.knows(*NEEDED.get(question, ()))
            self.formula = replace(formula, sure=self.formula.sure | {question} if is_sure
                                   else self.formula.sure)

    def look(self) -> None:
        self.prepare()
        base = make_case(1)
        cases = base, base.moved(5, .1, .3), base.with_reward((base.reward > .5).double())
        if all(self.gradient(case).abs().max() < ROUNDING for case in cases):
            self.found.is_zero = True
            return
        self.find_lens(base.moved(5, .1, .3))
        self.found.has_reward = bool(self.support(self.case(3)).any())
        if self.found.has_reward:
            self.find_shape()
            find_credit(self)
            find_ratio(self)
            find_sampler(self)
        else:
            self.formula = replace(self.formula, factor=0.0)
        self.find_terms()
        self.prove()
        self.ask_invariances()
        self.refuse_what_changes()
        self.found.formula, self.found.asks_turns = self.formula, self.asks_turns

    def prepare(self) -> None:
        """Choose how the loss is called, and refuse what is none."""
        self.examined.choose_dtype(make_case(1))
        self.refuse_what_changes()

    def refuse_what_changes(self) -> None:
        """Refuse a loss that has become another one since it was called with this batch."""
        self.examined.refuse_what_changes(make_case(1).moved(5, .8, .8, .8), make_case(2))

    def find_lens(self, case: Case) -> None:
        change = self.change(case, with_other_reward(case))
        if change.abs().max() < ROUNDING:  # no push depends on the reward
            change = self.gradient(case)
        lenses = (Lens(temperature, shift) for shift in SHIFTS
                  for temperature in (1.0, temperature_of(change, case, shift)))
        lens, left = best_of(lenses, lambda lens: pushes(change, case, lens)[1])
        if left < KNOWN:
            self.settle("lens", replace(self.formula, lens=lens), left)

    def support(self, case: Case) -> Tensor:
        """(B, L) where a push depends on the reward, whichever the rewards are."""
        found = torch.zeros_like(case.mask)
        for seed in range(3):
            draw = torch.Generator().manual_seed(seed)
            first, second = torch.rand(2, len(case.reward), generator=draw, dtype=torch.float64)
            push = self.push(case.with_reward(first), case.with_reward(second)).abs()
            found = found | (push > 1e-9 * push.max().clamp(min=1e-12))
        return found

    def find_tokens(self) -> None:
        """Which kinds of tokens have a push, and which choice among them. Where no choice is right
        with replies of an environment, these are left out."""
        cases = [self.case(5, longest=60), self.case(3), self.case(4)]
        with_turns = [self.case(6, has_turns=True), self.case(7, has_turns=True)]
        supports = [self.support(case) for case in cases]
        of_turns = [self.tried(self.support, case) for case in with_turns]
        self.asks_turns = all(has is not None for has in of_turns)
        if self.asks_turns and self.choose_tokens(cases + with_turns, supports + of_turns):
            return
        self.asks_turns = False
        self.choose_tokens(cases, supports)

    def choose_tokens(self, cases: list[Case], supports: list[Tensor]) -> bool:
        views = [view_of(case, self.formula) for case in cases]
        odd = {code for code, row in TOKENS.items() if code.startswith("no ") != any(
            (row.function(view) & has).any() for view, has in zip(views, supports))}
        plain = replace(self.formula, odd=frozenset(odd))
        inside = [view_of(case, plain).trained for case in cases]
        finished = replace(plain, odd=plain.odd - {"no cut"} | {UNFINISHED})

        def wrongly_kept(formula: Formula) -> float:
            """The number of tokens that are trained without a push, or have one untrained."""
            return float(sum((view_of(case, formula).trained != has & where).sum()
                             for case, has, where in zip(cases, supports, inside)))

        chosen, left = best_of([plain, finished], wrongly_kept, plain=1)
        self.settle("tokens", chosen, left)
        return left < KNOWN

    def find_shape(self) -> None:
        """How the tokens of an answer differ; or, where none of the known shapes is right, whether
        the old log-probs are those of a neighbouring token."""
        for late in (0, 1, -1, 0):
            self.formula = replace(self.formula, late=late)
            self.find_tokens()
            case = self.case(21)
            push = self.push(case, with_other_reward(case))
            shapes = [self.formula.given(shape=shape) for shape in SHAPES]
            shapes.append(self.formula.given(ratio=Setting(UNDETACHED, (math.inf, math.inf))))
            shape, left = best_of(shapes[:1] if late else shapes, lambda formula: unevenness(
                push / self.unit(formula, case), view_of(case, formula).trained), plain=1)
            if left < KNOWN:
                break
        self.settle("shape", shape, left)

    def unit(self, formula: Formula, case: Case) -> Tensor:
        """(B, L) the push of each token if all advantages and weights were 1."""
        plain = formula.given(centre="raw", scale="", groups="", finish="", count="sum", factor=1.0)
        ones = case.with_reward(torch.ones_like(case.reward))
        return pushes(gradient_of(plain, ones), ones, formula.lens)[0]

    def find_terms(self) -> None:
        """An entropy bonus, and KL terms: their estimators, references, counts and places."""
        for is_kl, ratio, far, sampler in ((False, 0.0, 0.0, 0.0), (True, .3, FAR, .6)):
            cases = [self.case(71).moved(71, ratio, far, sampler),
                     self.case(72, 3, 3, longest=6, spare=3).moved(72, ratio, far, sampler)]
            cases += [self.case(73, has_turns=True).moved(73, ratio, far, sampler)
                      ] * self.asks_turns
            rests = [self.tried(self.without_policy, case) for case in cases]
            if any(rest is None or rest.norm() < ROUNDING for rest in rests):
                continue
            if any(map(self.is_outside, cases, rests)):
                self.found.changed.append("kl elsewhere" if is_kl else "entropy elsewhere")
            term, factor, left = self.best_term(self.terms(is_kl), cases, rests)
            if left < KNOWN:
                term = term.times(tidy(factor))
                self.formula = replace(self.formula, terms=(*self.formula.terms, term))
            elif left < HELPS:
                self.formula = replace(self.formula, guesses=(term.times(factor),))

    def is_outside(self, case: Case, rest: Tensor) -> bool:
        """Whether a gradient without reward stands beside the answers and what is trained."""
        view = view_of(case, self.formula)
        outside = self.formula.lens.to_tokens(rest)[~view.inside & ~view.trained]
        return float(outside.norm()) > KNOWN * float(rest.norm())

    def best_term(self, terms: Iterable[Term], cases: list[Case], rests: list[Tensor]
                  ) -> tuple[Term, float, float]:
        """The term that leaves least of what is left, its factor, and the share. The gradient of a
        term is that of its value at all places, times the weights of the places."""
        nothing, lens = replace(self.formula, factor=0.0, terms=()), self.formula.lens
        views = [view_of(case, self.formula) for case in cases]

        @cache
        def value(number: int, setting: Setting, reference: str) -> Tensor:
            everywhere = Term(setting, Setting("sum"), "all", reference)
            return gradient_of(replace(nothing, terms=(everywhere,)), cases[number]).nan_to_num(0.0)

        @cache
        def weight(number: int, count: Setting, place: str) -> Tensor:
            term = Term(Setting(""), count, place)
            return lens.to_places(weight_of(views[number], term, self.formula))[..., None]

        def fit(term: Term) -> tuple[float, float]:
            factor, left = 0.0, 0.0
            for number, rest in enumerate(rests):
                unit = value(number, term.setting, term.reference) * weight(
                    number, term.count, term.place)
                factor = factor or float((unit * rest).sum() / unit.square().sum())
                left = max(left, left_of(rest, factor * unit))
                if left > KNOWN:
                    break
            return factor, left

        term, left = best_of(terms, lambda term: fit(term)[1])
        if term and left > KNOWN:  # no exact one: that of the policy loss's tokens, if it is near
            usual = replace(term, count=self.formula.count, place="trained")
            term, left = best_of([usual, term], lambda term: fit(term)[1], plain=1)
        return term, fit(term)[0] if term else 0.0, left

    def terms(self, is_kl: bool) -> Iterator[Term]:
        """All KL terms or entropies with a factor of 1. Where the advantage is not known, one that
        is no 0 at equal rewards looks like a k1, so that is left out."""
        without = {"kl k1 {factor}"} if self.found.has_reward and not self.knows("credit") else ()
        settings = [Setting(code, (1.0,)) for code in TERMS
                    if code.startswith("kl") == is_kl and code not in without]
        counts = [Setting(code, (1.0,) * ("{" in code)) for code in COUNTS
                  if code != self.formula.count.code]
        counts.insert(0, self.formula.count)  # with its number
        for reference, count, place, setting in product(
                REFERENCES if is_kl else [""], counts, PLACES, settings):
            yield Term(setting, count, place, reference)

    def without_policy(self, case: Case) -> Tensor:
        """The gradient without what is explained already. If no policy loss was found, it is the
        gradient that equal rewards leave."""
        formula = self.formula
        if self.found.has_reward and not self.knows("credit"):
            case = case.with_reward(torch.zeros_like(case.reward))
            formula = replace(formula, factor=0.0)
        return self.gradient(case) - gradient_of(formula, case)

    def prove(self) -> None:
        """Compare the whole formula with the gradient of batches that chose nothing."""
        worst = 0.0
        for name, case in self.new_batches():
            wanted = self.tried(self.gradient, case)
            if wanted is None:
                self.found.refused.append(name)
                self.found.dead_is_nan |= name == DEAD and isinstance(self.why, LossNotFinite)
                continue
            explained = gradient_of(self.formula, case)
            share = left_of(wanted, explained)
            if share >= KNOWN:
                self.found.differs[name] = max(share, self.found.differs.get(name, 0.0))
                self.found.token = self.found.token or self.token_that_differs(
                    name, case, wanted, explained)
            if name not in MAY_BE_REFUSED:  # these have a name of their own
                worst = max(worst, share)
        self.found.unexplained = worst
        self.found.is_near = all(self.found.differs.get(name, 0.0) < NEAR for name in NEAR_ON)

    def token_that_differs(self, name: str, case: Case, wanted: Tensor, explained: Tensor) -> str:
        """The token whose push differs most from that of the formula, in words."""
        lens, batch = self.formula.lens, case.batch()
        theirs, nearest = (pushes(gradient, case, lens)[0] for gradient in (wanted, explained))
        row, place = divmod(int((theirs - nearest).abs().argmax()), theirs.shape[1])
        number = place - int(case.prompt_length[row]) + 1
        ratio = (lens.log_probs(case.logits, case.ids) - batch.old_log_prob)[row, place].exp()
        where = (f"token {number} of answer {row + 1}" if case.mask[row, place] else
                 "a token of the prompt" if number < 1 else "a token outside the mask")
        return (f"{name}: {where} (reward {case.reward[row]:.3g}, ratio {ratio:.3g}, advantage "
                f"{advantage_of(batch, self.formula)[row]:.3g} by the formula) is pushed by "
                f"{theirs[row, place]:+.3g}, and by {nearest[row, place] + 0:+.3g} in the formula")

    def ask_invariances(self) -> None:
        """Changes of a batch that leave a right loss as it is. One that the formula explains is
        told as part of it."""
        case = case_to_change(self.formula.lens, self.formula.late)
        theirs, explained = cache(self.gradient), cache(partial(gradient_of, self.formula))
        for name, (_, left) in INVARIANCES.items():
            share = self.tried(left, theirs, case)
            if (share is None or share > KNOWN) and not (
                    self.found.understood and left(explained, case) > KNOWN):
                self.found.changed.append(name)

    def new_batches(self) -> list[tuple[str, Case]]:
        turns = [self.case(55, has_turns=True), self.case(56, 3, 5, has_turns=True)]
        found = {
            ORDINARY: [self.case(41), self.case(42, 3)],
            "rows with more padding": [self.case(48, 3, spare=4)],
            "rows without padding": [self.case(49, prompts=(3, 3), spare=0)],
            "six groups": [self.case(50, 6)],
            "answers of up to 60 tokens": [self.case(52, longest=60)],
            "answers of up to 200 tokens": [self.case(58, 2, 2, longest=200)],
            DEAD: [with_a_dead_group(self.case(43))],
            UNEQUAL: [self.case(59, sizes=(3, 5, 4, 5))],
            TURNS: [*turns, *(case.moved(57, .3, .3, .3) for case in turns)],
            "ratios": [self.case(44).moved(44, .8), self.case(45).moved(45, .2)],
            "ratios up to e^4": [stretched(self.case(47).moved(47, 4.0), 2, -1)],
            "another reference": [self.case(54).moved(54, .3, .8)],
            "a far reference": [self.case(57).moved(57, 0.0, FAR)],
            "another sampler": [self.case(46).moved(46, .3, .3, .8),
                                self.case(46).moved(47, 0.0, 0.0, 4.0)],
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
