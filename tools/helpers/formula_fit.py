"""Find the formula of a loss: every part is fitted on some batches, and is believed only if the
whole formula gives the gradient of other batches.

The order is: temperature and shift; which tokens have a gradient; what is left without rewards
(KL, entropy); how the push differs within an answer; advantage and counting; the ratio. What the
new batches contradict is not named.
"""
import itertools
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tools.helpers.formula_advantages import (EPSILONS, ORDERS, Advantage, hypotheses,
                                              rows_in_order, short)
from tools.helpers.formula_batches import END, Case, make_case, noise_like
from tools.helpers.formula_counts import counts, places, tokens_of
from tools.helpers.formula_decode import (EXACT, Examined, Loss, LossFailed, LossNotFinite,
                                          decode, directions)
from tools.helpers.formula_ratio import Ratio, find_ratio
from tools.helpers.formula_shapes import Shape, entropy_of, rescaled, shapes
from tools.helpers.formula_terms import (KINDS, Counted, Term, by_answer, difference, fit_counted,
                                         spread, table_of)

TINY = 1e-9        # of the largest push: less is rounding
KNOWN = 1e-6       # of the norm of a gradient: a formula that leaves less over is right
COARSE = ("bfloat16", "float16", "float32")


@dataclass
class Formula:
    """What was found. A part that is None was not understood."""
    examined: Examined
    digits: str = "float64"
    temperature: float | None = None
    shift: int | None = None
    absent: tuple[int, ...] = ()                 # tokens that are left out of the softmax
    left_over: float = 0.0                       # share of a gradient that is in no known direction
    kinds: dict[str, str] = field(default_factory=dict)  # all, none or some, by kind of token
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

    @property
    def is_complete(self) -> bool:
        return not self.not_understood and self.unexplained < KNOWN

    def policy_push(self, case: Case) -> Tensor:
        """(B, L) the push of the policy loss."""
        tokens = tokens_of(case, self.trained)
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


class Finder:
    """Examines one loss; `formula` is filled step by step."""

    def __init__(self, loss: Loss):
        self.examined = Examined(loss)
        self.formula = Formula(self.examined)
        self.has_rest = True          # whether a batch without reward has a gradient
        self.is_foreign = False       # whether that gradient is in no known direction
        self.is_permuted = False      # whether an answer's push does not depend on its own reward
        self.sizes = (4, 3, 6)        # numbers of answers in a group that are tried
        self.tolerance = 1e-6         # of an answer's number; more if it is computed in float32

    # ------------------------------------------------------------------ pieces of a gradient
    def case(self, seed: int, groups: int = 4, answers: int = 4, **more) -> Case:
        return make_case(seed, groups, answers, lens=self.examined.lens, **more)

    def policy_push(self, case: Case) -> Tensor:
        """The push that depends on the reward."""
        return decode(self.policy_gradient(case), case, self.examined.lens).push

    def policy_gradient(self, case: Case) -> Tensor:
        grad = self.examined.raw(case)
        if self.has_rest:
            grad = grad - self.examined.raw(self.examined.without_reward(case))
        return grad

    def tokens(self, case: Case) -> Tensor:
        return tokens_of(case, self.formula.trained)

    def answer_tokens(self, case: Case) -> Tensor:
        return self.tokens(case) & case.mask

    # ------------------------------------------------------------------ step by step
    def find(self) -> Formula:
        formula, examined = self.formula, self.examined
        base = make_case(1)
        formula.digits = examined.choose_dtype(base)
        refuse_random(examined, base)
        if self.has_no_gradient(base):
            formula.is_zero, formula.unexplained = True, 0.0
            return formula
        if formula.digits.startswith(COARSE):
            formula.not_understood.append(
                f"anything: the gradient comes in {formula.digits}, and what tells formulas apart "
                "are the digits after that. Let the loss take float64")
            return formula
        self.note_casts(base)
        self.look_at_equal_rewards()
        self.find_lens(base)
        if formula.temperature is None:
            return formula
        self.find_tokens()
        self.drop_refused_sizes()
        self.find_terms()
        self.find_entropy()
        self.look_for_short_advantages()
        self.find_policy()
        self.find_clip()
        self.check_on_new_batches()
        self.try_parts()
        self.try_other_batches()
        return formula

    def has_no_gradient(self, base: Case) -> bool:
        cases = [base, replace(base, log_ratio=noise_like(base, 5, .1),
                               log_reference=noise_like(base, 6, .3))]
        return not any(self.examined.raw(case).any() for case in cases)

    def note_casts(self, base: Case) -> None:
        casts = self.examined.casts(base)
        if casts and self.examined.in_float64:
            self.formula.notes.append(f"it casts to {' and '.join(casts)}. Here float64 took its "
                                      "place, so what rounding does in training is not seen")

    def look_at_equal_rewards(self) -> None:
        """What is left where all rewards are equal, so that each group is dead."""
        examined, base = self.examined, self.case(2)
        far = replace(base, log_ratio=noise_like(base, 5, .1),
                      log_reference=noise_like(base, 6, .3))
        try:
            rest = [examined.raw(examined.without_reward(case)) for case in (base, far)]
        except LossFailed:
            self.has_rest = False
            self.formula.notes.append("a batch whose groups all have equal rewards gives a loss or "
                                      "a gradient that is not finite (0 / 0)")
            return
        if self.prefers_lengths(rest[0]):
            return
        whole = examined.raw(base)
        self.has_rest = any(float(grad.abs().max()) > TINY * float(whole.abs().max())
                            for grad in rest)
        one = examined.raw(replace(base, reward=torch.ones_like(base.reward)))
        change = one - rest[0]  # not 0 if there is no baseline
        if self.has_rest and change.norm() > 1e-6 * whole.norm():
            self.look_for_a_constant_baseline(rest[0], change, base)

    def prefers_lengths(self, rest: Tensor) -> bool:
        """Whether answers with equal rewards have a gradient where their lengths differ, and none
        where all lengths are the same."""
        even = self.case(2, equal_lengths=True)
        far = replace(even, log_ratio=noise_like(even, 5, .1),
                      log_reference=noise_like(even, 6, .3))
        still = self.examined.raw(self.examined.without_reward(far)).norm()
        if not rest.any() or still > TINY * rest.norm():
            return False
        self.has_rest = False
        self.formula.not_understood.append(
            "answers with equal rewards get a push if their lengths differ, and none if all have "
            "the same length: the length is a part of the reward, as with a penalty on long ones")
        return True

    def look_for_a_constant_baseline(self, at_zero: Tensor, change: Tensor, base: Case) -> None:
        """If the gradient vanishes where all rewards are b, then b is taken off each reward."""
        b = -float((at_zero * change).sum() / change.square().sum())
        grad = self.examined.raw(replace(base, reward=torch.full_like(base.reward, b)))
        if abs(b) > 1e-9 and grad.norm() < 1e-9 * change.norm() and not self.knows_reference(base):
            self.examined.zero_reward = self.formula.constant_baseline = short(b)
            far = replace(base, log_ratio=noise_like(base, 5, .1))
            rest = self.examined.raw(self.examined.without_reward(far))
            self.has_rest = bool(rest.norm() > 1e-9 * change.norm())

    def knows_reference(self, case: Case) -> bool:
        """Whether the value of the loss depends on the reference model."""
        moved = replace(case, log_reference=noise_like(case, 6, .3))
        values = [float(self.examined.value_and_gradient(one)[0]) for one in (case, moved)]
        return abs(values[0] - values[1]) > 1e-12 * abs(values[0])

    def find_lens(self, base: Case) -> None:
        """From the whole gradient; or if that fails, from the part that depends on the reward."""
        formula, examined = self.formula, self.examined
        rest = examined.find_lens(examined.raw(base), base)
        if rest > EXACT and self.has_rest:
            part = examined.raw(base) - examined.raw(examined.without_reward(base))
            self.is_foreign = examined.find_lens(part, base) <= EXACT
        formula.left_over = rest
        if rest > EXACT:
            formula.not_understood.append(
                f"{rest:.1%} of the gradient is not that of a log-prob of a sampled token, nor "
                "that of an entropy"
                + (". It does not depend on the reward" if self.is_foreign else ""))
        if rest <= EXACT or self.is_foreign:
            lens = examined.lens
            formula.temperature, formula.shift = lens.temperature, lens.shift
            formula.absent = lens.absent
        else:
            formula.unexplained = rest

    def find_tokens(self) -> None:
        """Which kinds of tokens have a gradient: all of a kind, none of them, or some."""
        found = {}
        cases = [self.case(3), self.case(4)]
        cases += [replace(case, reward=1 - case.reward) for case in cases]
        for case in cases:
            push = self.policy_push(case)
            if not push.any():
                push = self.examined.push(case)
            tiny = TINY * push.abs().max()
            live = (push.abs() > tiny).any(1, keepdim=True)
            for name, where in places(case).items():
                if name != "unfinished":
                    where = where & live
                has = (push.abs() > tiny) & where
                if not where.any():
                    continue
                how = "none" if not has.any() else "all" if torch.equal(has, where) else "some"
                found[name] = how if found.get(name, how) == how else "some"
        if found["unfinished"] == "some":  # a whole answer may have an advantage of 0
            found["unfinished"] = "all"
        self.formula.kinds = found

    # ------------------------------------------------------------------ terms without a reward
    def find_terms(self) -> None:
        """KL and other pushes that stay when all rewards are 0."""
        formula = self.formula
        if not self.has_rest or self.is_foreign:
            return
        zero = [self.examined.without_reward(case) for case in self.designs()]
        still = [self.examined.push(case) for case in zero]
        scale = max(float(self.examined.push(case).abs().max()) for case in self.designs()[:2])
        formula.term_kinds = self.kinds_with_push(zero, scale)
        constant = self.fit_term("constant", "nothing", zero, still, scale)
        for source, column in (("reference", "log_reference"), ("old", "log_ratio")):
            moved = [replace(case, **{column: noise_like(case, 7 + k, .8)})
                     for k, case in enumerate(zero)]
            change = [self.examined.push(case) - before for case, before in zip(moved, still)]
            if max(float(part.abs().max()) for part in change) < TINY * scale:
                continue
            if constant and source == "old":
                formula.not_understood.append(
                    "a push without reward depends on the ratio of new to old probability")
                return
            fits = [self.fit_term(kind, source, moved, change, scale) for kind in KINDS]
            term = next((fit for fit in fits if fit), None)
            if term is None:
                formula.not_understood.append(
                    self.about_shared_reference(zero[0]) if source == "reference" else
                    "a push without reward depends on the old log-probs, and is none of the known "
                    "kinds of KL")
                return
            formula.terms.append(term)
        if constant:
            is_k1 = self.knows_reference(self.designs()[0])
            formula.terms.append(replace(constant, kind="k1") if is_k1 else constant)

    def about_shared_reference(self, case: Case) -> str:
        """Which tokens change if the reference of a single token does: if the rest of its answer
        does too, the reference is part of the advantage."""
        row = int(case.length.argmax())
        token = int(case.prompt_length[row]) + 1
        moved = case.log_reference.clone()
        moved[row, token] += .5
        change = self.examined.push(replace(case, log_reference=moved)) - self.examined.push(case)
        change[row, token] = 0
        if change[row].abs().max() > 1e-6 * self.examined.push(case).abs().max():
            return ("the reference's log-prob of one token changes the push of all tokens of its "
                    "answer, as where the KL is taken off the reward, before the advantage")
        return ("a push without reward depends on the reference log-probs, and is none of the "
                "known kinds of KL")

    def kinds_with_push(self, zero: list[Case], scale: float) -> frozenset[str]:
        found = None
        for case in zero:
            far = replace(case, log_reference=noise_like(case, 9, .8),
                          log_ratio=noise_like(case, 8, .3))
            has = self.examined.push(far).abs() > TINY * scale
            kinds = {name for name, where in places(case).items()
                     if where.any() and torch.equal(has & where, where)}
            missing = {name for name, where in places(case).items() if not where.any()}
            found = kinds | missing if found is None else found & (kinds | missing)
        return frozenset(found)

    def fit_term(self, kind: str, source: str, cases: list[Case], pushes: list[Tensor],
                 scale: float) -> Term | None:
        if max(float(push.abs().max()) for push in pushes) < TINY * scale:
            return None
        numbers = []
        for case, push in zip(cases, pushes):
            tokens = tokens_of(case, self.formula.term_kinds)
            shape = torch.ones_like(push)
            if kind != "constant":
                shape = KINDS[kind][1](difference(case, source))
            number = by_answer(push / torch.where(shape == 0, 1.0, shape), tokens & case.mask)
            if number is None:
                return None
            numbers.append(number)
        fits = fit_counted(cases, numbers, table_of(cases, counts(self.formula.term_kinds)))
        if not fits:
            return None
        return Term(kind, source, fits[0])

    def find_entropy(self) -> None:
        """A term with the entropy of the distribution; or a weight by entropy, not detached."""
        formula = self.formula
        if self.is_foreign:
            return
        cases = self.designs()
        readings = [self.examined.read(case) for case in cases]
        scale = max(float(reading.push.abs().max()) for reading in readings)
        if max(float(reading.entropy.abs().max()) for reading in readings) < 1e-8 * scale:
            return
        zero = cases
        if self.has_rest:
            zero = [self.examined.without_reward(case) for case in cases]
        rest = [self.examined.read(case).entropy for case in zero] if self.has_rest else \
            [torch.zeros_like(reading.entropy) for reading in readings]
        change = max(float((reading.entropy - still).abs().max())
                     for reading, still in zip(readings, rest))
        if change > 1e-8 * scale:
            formula.weighs_by_entropy = True
            return
        kinds = [frozenset(name for name, where in places(case).items() if where.any()
                           and bool((still.abs() > 1e-9 * scale)[where].all()))
                 for case, still in zip(cases, rest)]
        formula.entropy_kinds = frozenset.union(*kinds)
        numbers = [by_answer(still, tokens_of(case, formula.entropy_kinds))
                   for case, still in zip(cases, rest)]
        fits = [] if any(number is None for number in numbers) else \
            fit_counted(cases, numbers, table_of(cases, counts(formula.entropy_kinds)))
        if fits:
            formula.entropy = fits[0]
        else:
            formula.not_understood.append("an entropy term, averaged in a way that is not known")

    # ------------------------------------------------------------------ the policy loss
    def designs(self) -> list[Case]:
        """Batches of several sizes, on policy. Groups of 4 alone, if the loss takes no others."""
        found = [self.case(21), self.case(22, 2, longest=6), self.case(23, spare=3, prompts=(3, 5))]
        if 3 in self.sizes:
            found.append(self.case(24, 3, 3, longest=8))
        if 6 in self.sizes:
            found.append(self.case(25, 2, 6))
        return found

    def drop_refused_sizes(self) -> None:
        """Forget the sizes of groups that the loss cannot take."""
        kept = [4]
        for groups, answers in ((3, 3), (2, 6)):
            try:
                self.examined.raw(self.case(26, groups, answers))
                kept.append(answers)
            except LossFailed:
                self.formula.notes.append(f"groups of {answers} answers are refused")
        self.sizes = tuple(kept)

    def look_for_short_advantages(self) -> None:
        """Whether rewards or advantages are rounded to float32, as by numpy. Then a change of a
        reward by 1e-10 has no effect at all, or a far larger one."""
        case = self.case(28)
        before = self.policy_push(case)
        changes = []
        for size in (1e-10, 1e-3):
            reward = case.reward.clone()
            reward[0] += size
            change = self.policy_push(replace(case, reward=reward)) - before
            changes.append(float(change.abs().max() / before.abs().max()))
        little, more = changes
        if more > 1e-8 and (little == 0 or little > 1e-3 * more):
            self.tolerance = 1e-4
            self.formula.notes.append("the advantage is computed from rewards in float32, so it "
                                      "was compared with known ones to 1e-4 and not to a millionth")

    def find_policy(self) -> None:
        """With groups of several sizes; or else of 4 alone, where the size stands in the code."""
        tried, known = self.sizes, list(self.formula.not_understood)
        self.fit_policy()
        if self.formula.advantage is None and tried != (4,):
            failed_with = self.formula.not_understood
            self.sizes, self.formula.not_understood = (4,), known
            self.fit_policy()
            if self.formula.advantage is None:
                self.sizes, self.formula.not_understood = tried, failed_with
            else:
                self.formula.notes.append("this holds for groups of 4 answers. In batches with "
                                          "groups of another size the gradient is another one, as "
                                          "if the size 4 stood in the code")

    def fit_policy(self) -> None:
        formula = self.formula
        cases = self.designs()
        pushes = [self.policy_push(case) for case in cases]
        if not any(push.any() for push in pushes):
            formula.not_understood.append("no push depends on the reward")
            return
        if any(how == "some" for how in formula.kinds.values()):
            some = [kind for kind, how in formula.kinds.items() if how == "some"]
            formula.not_understood.append(f"only some tokens of the kind {' and '.join(some)} have "
                                          "a gradient")
            return
        candidates = self.shapes_that_fit(cases, pushes)
        if not candidates:
            formula.not_understood.append("the push differs between the tokens of an answer in a "
                                          "way that is not known")
            return
        for shape in candidates:
            if self.fit_advantage_and_count(shape, cases, pushes):
                return
        formula.shape = candidates[0] if len(candidates) == 1 else None
        self.fit_one_by_one(candidates[0])

    def shapes_that_fit(self, cases: list[Case], pushes: list[Tensor]) -> list[Shape]:
        found = []
        for shape in shapes(cases[0], pushes[0], self.answer_tokens(cases[0])):
            for variant in rescaled(shape, self.answer_tokens):
                values = [by_answer(push / variant.value(case), self.answer_tokens(case))
                          for case, push in zip(cases, pushes)]
                if all(value is not None for value in values):
                    found.append(variant)
            if found and not shape.code.startswith("discount"):  # two of them, from either end
                break
        return found

    def per_answer(self, shape: Shape, case: Case) -> Tensor | None:
        """(B,) the push of an answer's tokens, its shape divided away."""
        push = self.policy_push(case)
        return by_answer(push / shape.value(case), self.answer_tokens(case), 1e-5)

    def fit_advantage_and_count(self, shape: Shape, cases: list[Case],
                                pushes: list[Tensor]) -> bool:
        grouping = self.grouping(shape)
        numbers = [by_answer(push / shape.value(case), self.answer_tokens(case))
                   for case, push in zip(cases, pushes)]
        dead = [self.with_a_dead_group(27, reward) for reward in (.5, 0.0)]
        table = table_of(cases, counts(self.formula.trained))
        fits = []
        for advantage in self.advantages_that_fit(shape, grouping):
            quotients = [divided(number, advantage(case)) for number, case in zip(numbers, cases)]
            fits += [(advantage, count) for count in
                     fit_counted(cases, quotients, table, self.tolerance)]
        if not fits:
            return False
        right = [fit for fit in fits if all(self.holds_for(case, shape, *fit)
                                                for case in dead)]
        if right:
            fits = right
        fits.sort(key=lambda fit: fit[0].cost + fit[1].count.cost + fit[1].sizes.cost
                  + 4 * (abs(abs(fit[1].factor) - 1) > 1e-6))
        formula = self.formula
        if shape.detached and not self.gradient_is_derivative(cases[0]):
            shape = replace(shape, code=shape.code.replace("undetached", "as if undetached"),
                            words=shape.detached)
        formula.shape, (formula.advantage, formula.count) = shape, fits[0]
        return True

    def gradient_is_derivative(self, case: Case) -> bool:
        """Whether the gradient is the derivative of the loss's value, as it is where nothing was
        detached."""
        step = 1e-5 * noise_like(case, 71, 1.0)[..., None] * case.logits
        values = [self.examined.value_and_gradient(
            replace(case, logits=case.logits + sign * step))[0] for sign in (1, -1)]
        expected = float((self.examined.raw(case) * step).sum())
        return abs(float(values[0] - values[1]) / 2 - expected) < 1e-4 * abs(expected)

    def holds_for(self, case: Case, shape: Shape, advantage: Advantage, count: Counted) -> bool:
        """Whether these give the push of a case."""
        try:
            push = self.policy_push(case)
        except LossFailed:  # a dead group is refused, and so says nothing about counting
            return True
        tokens = self.answer_tokens(case)
        wanted = (count(case) * advantage(case))[:, None] * shape.value(case) * tokens
        return bool(((push - wanted) * tokens).norm() <= KNOWN * push.norm())

    def with_a_dead_group(self, seed: int, of: float = .5) -> Case:
        case = self.case(seed)
        reward = case.reward.clone()
        reward[case.group == 1] = of
        return replace(case, reward=reward)

    def grouping(self, shape: Shape) -> str:
        """Which rows are a group: those whose advantage changes with a row's reward."""
        case = self.case(31, equal_lengths=True)
        before = self.per_answer(shape, case)
        B = len(case.group)
        linked = torch.eye(B, dtype=torch.bool)
        for row in range(B):
            reward = case.reward.clone()
            reward[row] += .01
            after = self.per_answer(shape, replace(case, reward=reward))
            self.is_permuted |= bool((after[row] - before[row]).abs() < 1e-8 * before.abs().max())
            linked[row] |= (after - before).abs() > 1e-8 * before.abs().max()
        linked = linked | linked.T
        for _ in range(4):
            linked = (linked.double() @ linked.double()) > 0
        rows = torch.arange(B)
        for name, label in (("group", case.group), ("mixed", rows % 4), ("rows 2", rows // 2),
                            ("rows 8", rows // 8)):
            if torch.equal(linked, label[:, None] == label[None]):
                return name
        return "group"  # all rows are linked, or none is: the hypotheses know both

    def advantages_that_fit(self, shape: Shape, grouping: str) -> list[Advantage]:
        """Those that explain, up to a factor, batches whose answers all have the same length. Some
        of their groups have nearly equal rewards."""
        cases = self.advantage_cases(grouping)
        found = [self.per_answer(shape, case) for case in cases]
        if any(numbers is None for numbers in found):
            return []
        for order in ("", *(ORDERS if self.is_permuted else ())):
            fits = self.advantages_in_order(order, cases, found, grouping)
            if fits:
                return fits
        return [limited for limited in with_limit(cases, found, grouping)
                        if matches(limited, cases, found, self.tolerance)]

    def advantages_in_order(self, order: str, cases: list[Case], found: list[Tensor],
                            grouping: str) -> list[Advantage]:
        fits = []
        straight = [numbers[rows_in_order(len(numbers), order).argsort()] for numbers in found]
        for advantage in hypotheses(cases, straight, grouping):
            advantage = replace(advantage, constant=self.formula.constant_baseline, order=order)
            for variant in variants(advantage, cases, found):
                if matches(variant, cases, found, self.tolerance):
                    fits.append(variant)
                    break
        return fits

    def advantage_cases(self, grouping: str) -> list[Case]:
        case = self.case(32, equal_lengths=True)
        label = torch.arange(16) % 4 if grouping == "mixed" else case.group
        scale = torch.tensor([1.0, .3, 1e-2, 1e-5]).double()[label]
        start = torch.tensor([2.0, 1.0, .0, .0]).double()[label]
        return [replace(case, reward=start + scale * case.reward),
                replace(case, reward=1e-4 * case.reward), case]

    def fit_one_by_one(self, shape: Shape) -> None:
        """Where no advantage and count fit together: what each of them is by itself."""
        formula = self.formula
        alone = self.advantages_that_fit(shape, self.grouping(shape))
        names = {advantage.code for advantage in alone}
        formula.not_understood.append(
            "advantage and counting: no pair of known ones gives the push of each answer"
            + (f". Where all answers have the same length, the advantage fits {alone[0].code}"
               if len(names) == 1 else ""))

    # ------------------------------------------------------------------ the ratio
    def find_clip(self) -> None:
        if "some" in self.formula.kinds.values():
            return
        case = self.case(33)
        found = find_ratio(self.examined, case, self.answer_tokens(case), self.has_rest,
                           self.formula.advantage)
        if isinstance(found, str) and found.startswith("misplaced"):
            self.formula.misplaced = int(found.split()[1])
            self.formula.not_understood.append("what follows from a ratio of two different tokens")
        elif isinstance(found, str):
            self.formula.not_understood.append(found)
        else:
            self.formula.ratio = found
            if self.formula.count is not None:  # it was read where the ratio is 1
                at_one = float(found.good(torch.ones((), dtype=torch.float64)))
                count = self.formula.count
                self.formula.count = replace(count, factor=count.factor / at_one)

    # ------------------------------------------------------------------ the proof
    def check_on_new_batches(self) -> None:
        """Compare the whole formula with the gradient of batches that chose nothing."""
        formula = self.formula
        if formula.advantage is None or formula.count is None:
            formula.terms = [term for term in formula.terms if term.kind not in ("constant", "k1")]
            return
        tests = (("on policy", [self.case(41), self.case(42, 3, spare=2)]),
                 ("a dead group", [self.with_a_dead_group(43)]),
                 ("rows without padding", self.without_padding(49)),
                 ("rewards below 0 and above 1", [self.with_large_rewards(50)]),
                 ("one right answer of 40", [self.with_one_right(51)] if 6 in self.sizes else []),
                 ("long answers", [self.case(52, longest=longest) for longest in (20, 60, 200)]),
                 ("the reference", [self.off_policy(44, "log_reference", .8)]),
                 ("the ratio", [self.off_policy(45, "log_ratio", .1),
                                self.off_policy(46, "log_ratio", 2.0)]))
        for name, cases in tests:
            rest = max((self.unexplained(case, self.is_foreign) for case in cases), default=0.0)
            if rest > KNOWN:
                self.withdraw(name, rest)
                return
        everything = [self.everything(seed) for seed in (47, 48)]
        rest = max(self.unexplained(case, self.is_foreign) for case in everything)
        if rest > KNOWN and formula.terms:
            plain = formula.terms
            formula.terms = [replace(term, with_ratio=True) for term in plain]
            rest = max(self.unexplained(case) for case in everything)
            if rest > KNOWN:
                formula.terms = []
        if rest > KNOWN:
            self.withdraw("the ratio and the reference together", rest)
            return
        formula.unexplained = max(self.unexplained(case) for case in everything)

    # ------------------------------------------------------------------ more batches to look at
    def try_parts(self) -> None:
        """The same batch in parts of whole groups: is the sum of their gradients, or their mean,
        that of the whole?"""
        case = self.case(51)
        whole = self.examined.raw(case)
        for parts in (2, 4):
            try:
                rows = [case.rows(part) for part in torch.arange(16).chunk(parts)]
                joined = torch.cat([self.examined.raw(part) for part in rows])
            except LossFailed:
                continue
            far = [float((factor * joined - whole).norm() / whole.norm())
                   for factor in (1.0, 1 / parts)]
            self.formula.parts[parts] = (far[0], far[1])

    def try_other_batches(self) -> None:
        """Rows in another order; padding that is the end token; dead and nearly dead groups."""
        case, formula = self.case(52), self.formula
        order = torch.arange(16).view(4, 4).T.flatten()  # the first answers of all groups first
        try:
            whole, other = self.examined.raw(case), self.examined.raw(case.rows(order))
            is_same = (whole[order] - other).norm() <= 1e-6 * whole.norm()
            formula.order = "same" if is_same else "other"
        except LossFailed:
            formula.order = "refused"
        formula.loses_end = formula.kinds.get("end") == "all" and self.loses_the_end()
        formula.dead = self.push_of_group(torch.full((4,), .1).double())
        formula.nearly_dead = self.push_of_group(torch.tensor([.1, .1, .1, .1 + 1e-6]).double())

    def loses_the_end(self) -> bool:
        case = self.case(53, pad_id=END)
        try:
            push = self.policy_push(case)
        except LossFailed:
            return False
        end = places(case)["end"] & (push.abs() > 0).any(1, keepdim=True)
        return not push[end].any()

    def push_of_group(self, rewards: Tensor) -> float:
        """The largest push in a group with these rewards / the largest one in the others, in
        float32, as a trainer has them. NaN if it is not finite."""
        case = self.case(54, equal_lengths=True)
        reward = case.reward.clone()
        reward[:4] = rewards
        examined = Examined(self.examined.loss)
        examined.lens, examined.dtype = self.examined.lens, torch.float32
        examined.zero_reward = self.examined.zero_reward
        try:
            push = examined.push(replace(case, reward=reward))
            if self.has_rest:
                push = push - examined.push(examined.without_reward(case))
        except LossNotFinite:
            return float("nan")
        except LossFailed:  # it takes float64 alone
            push = self.policy_push(replace(case, reward=reward))
        return float(push[:4].abs().max() / push[4:].abs().max())

    def off_policy(self, seed: int, column: str, size: float) -> Case:
        case = self.case(seed)
        return replace(case, fills_zeros=False,
                       **{column: noise_like(case, seed, size) * case.mask})

    def without_padding(self, seed: int) -> list[Case]:
        """Rows that are full to their last place; none if tokens outside of the answer count."""
        of_answer = {"first", "middle", "end", "cut", "unfinished"}
        if not self.formula.trained <= of_answer:
            return []
        return [self.case(seed, prompts=(3, 3), spare=0)]

    def with_large_rewards(self, seed: int) -> Case:
        case = self.case(seed)
        return replace(case, reward=40 * case.reward - 20)

    def with_one_right(self, seed: int) -> Case:
        """Its z-score is 6, more than any in a small group: a limit of 5 would be seen."""
        case = self.case(seed, 1, 40)
        return replace(case, reward=(torch.arange(40) == 7).double())

    def everything(self, seed: int) -> Case:
        case = self.off_policy(seed, "log_ratio", .5)
        return replace(case, log_reference=noise_like(case, seed + 1, .5) * case.mask)

    def unexplained(self, case: Case, only_policy: bool = False) -> float:
        """The share of the gradient that the formula does not give; or of the part of it that
        depends on the reward."""
        try:
            grad = self.policy_gradient(case) if only_policy else self.examined.raw(case)
        except LossFailed:  # said elsewhere: a dead group gives what is not finite
            return 0.0
        return float((grad - self.formula.gradient(case)).norm() / grad.norm())

    def withdraw(self, name: str, rest: float) -> None:
        """Take back what a new batch contradicts."""
        formula = self.formula
        formula.unexplained = min(rest, 1.0)
        if name == "on policy":
            formula.advantage = formula.count = formula.ratio = formula.entropy = None
            formula.terms = [term for term in formula.terms if term.kind not in ("constant", "k1")]
        if name == "the ratio":
            formula.ratio = None
        if name == "the reference":
            formula.terms = []
        formula.not_understood.append(f"{min(rest, 1):.1%} of the gradient, in a batch that tries "
                                      f"{name}")


def variants(advantage: Advantage, cases: list[Case], found: list[Tensor]) -> list[Advantage]:
    """The advantage as it is, with another weight for negative ones, and with a limit."""
    wanted = torch.cat([advantage(case) for case in cases])
    numbers = torch.cat(found)
    result = [advantage]
    if advantage.scale == "none" and advantage.baseline == "none":
        return result
    quotient = numbers / torch.where(wanted == 0, 1.0, wanted)
    positive, negative = quotient[wanted > 0], quotient[wanted < 0]
    if len(positive) > 2 and not positive.any():
        result.append(replace(advantage, positive=0.0))
    elif len(positive) > 2 and len(negative) > 2 and spread(positive) < 1e-6:
        rate = float(negative.mean() / positive.mean())
        if abs(rate - 1) > 1e-6 and rate > -1e-9:
            result.append(replace(advantage, negative=round(rate, 6)))
    return result


def with_limit(cases: list[Case], found: list[Tensor], grouping: str) -> list[Advantage]:
    """Advantages that are clamped, to the limit that the largest of the numbers shows."""
    numbers = torch.cat(found)
    result = []
    for scale, epsilon in itertools.product(("none", "std n", "std n-1"), EPSILONS):
        plain = Advantage("mean", scale, "plus", epsilon, grouping=grouping)
        wanted = torch.cat([plain(case) for case in cases])
        small = (wanted.abs() < wanted.abs().median()) & (wanted != 0)
        quotient = (numbers / wanted)[small]
        if spread(quotient) < 1e-6:
            limit = float((numbers / quotient.mean()).abs().max())
            result.append(replace(plain, limit=short(limit)))
    return result


def matches(advantage: Advantage, cases: list[Case], found: list[Tensor],
            tolerance: float = 1e-6) -> bool:
    wanted, numbers = torch.cat([advantage(case) for case in cases]), torch.cat(found)
    if not wanted.any() or not torch.isfinite(wanted).all():
        return False
    factor = (numbers * wanted).sum() / wanted.square().sum()
    error = (numbers - factor * wanted).abs()
    rounding = 1e-4 * tolerance * numbers.abs().max()
    return bool((error <= tolerance * (factor * wanted).abs() + rounding).all())


def divided(number: Tensor, advantage: Tensor) -> Tensor:
    """The quotient (B,), NaN where the advantage is 0."""
    return torch.where(advantage.abs() > 1e-9 * advantage.abs().max(),
                       number / torch.where(advantage == 0, 1.0, advantage), torch.nan)


def refuse_random(examined: Examined, case: Case) -> None:
    first, second = examined.raw(case), examined.raw(case)
    if (first - second).abs().max() > 1e-9 * first.abs().max():
        raise LossFailed("it is random: two calls with the same batch give other gradients")


def find_formula(loss: Loss) -> Formula:
    finder = Finder(loss)
    return finder.find()
