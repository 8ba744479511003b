"""What was found, in the codes of the table, what is wrong, and whether a loss passes.

An expectation is written in the same codes. It holds as a whole: its clauses are so, and nothing
else is, but for what is usual (USUAL) and need not be written. What is wrong or unusual passes only
if a clause has its name.
"""
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from .calling import Loss
from .clauses import USUAL, clauses_of, is_said, with_z, words_of
from .formula import Formula, Term
from .mistakes import UNUSUAL, WRONG
from .search import DEAD, MAY_BE_REFUSED, TURNS, UNEQUAL, Found, find_formula
from .terms import COUNTS, QUESTIONS, TABLE, TERMS, TOKENS, UNFINISHED, shown

PASSED, FAILED, UNKNOWN = 0, 1, 2  # the exit status


class NotPassed(AssertionError):
    """A loss does not pass; the text says why."""


class Remark(NamedTuple):
    """A sentence about what is wrong or unusual, and the clause that lets it pass."""
    name: str
    sentence: str
    is_mistake: bool

    def __str__(self) -> str:
        return f"[{self.name}] {self.sentence}"


def codes(found: Found) -> list[str]:
    """All that holds of a loss. A question without an exact answer has no code."""
    if found.is_zero:
        return ["zero"]
    said = codes_of(found.formula, found.has_reward)
    if found.understood:
        has = {term.name for term in found.formula.terms}
        said += [f"no {name}" for name in ("kl", "entropy") if name not in has]
    said += [] if found.has_reward else ["no reward"]
    said += codes_of_batches(found) + found.changed
    return [*dict.fromkeys(said), "understood" if found.understood else "not understood"]


def codes_of(formula: Formula, has_reward: bool = True) -> list[str]:
    """The codes of a formula's settings, as far as they are sure."""
    sure, said = formula.sure, []
    if "credit" in sure:
        said += [code_of_advantage(formula), code_of_count(formula)]
        size = abs(formula.factor)
        said += [f"times {shown(size)}"] if abs(size - 1) > 1e-6 else []
        said += ["sign reversed"] if formula.is_reversed else []
    said += codes_of_tokens(formula) if "tokens" in sure and has_reward else []
    said += [formula.shape.code] if "shape" in sure and formula.shape.code else []
    said += [f"old misplaced {formula.late}"] if formula.late else []
    said += [str(formula.ratio)] if "ratio" in sure else []
    if "sampler" in sure:  # without a lower bound, its upper bound is the only number
        said += filter(None, (formula.old.code, str(formula.sampler).replace(" none ", " ", 1)))
    said += [code_of_term(term, formula) for term in formula.terms]
    if "lens" in sure:
        said += [f"temperature {formula.lens.temperature:g}", f"shift {formula.lens.shift}"]
    return said


def code_of_advantage(formula: Formula) -> str:
    return with_z(map(str, (formula.groups, formula.centre, formula.scale, formula.finish)))


def code_of_count(formula: Formula) -> str:
    return f"{formula.count}{formula.length}"


def codes_of_tokens(formula: Formula) -> list[str]:
    odd = formula.odd
    if {"no first", "first of padding"} <= odd and "padding" not in odd:
        return ["mask late"]
    if {"last of prompt", "no cut"} <= odd and not odd & {"no first", "prompt"}:
        return ["mask early"]
    said = [] if "no end" in odd else ["end"]
    said += ["mask inverted"] if {"no first", "no middle", "no end", "no cut"} <= odd else []
    hidden = {edge for whole, edge in (("prompt", "last of prompt"),
                                       ("padding", "first of padding")) if whole in odd}
    return said + [code for code in (*TOKENS, UNFINISHED) if code in odd - hidden]


def code_of_term(term: Term, formula: Formula) -> str:
    """Its counting, and that it stands on whole answers, where these are not those of the policy
    loss."""
    said = f"{term.setting}{term.reference}"
    if term.count.code != formula.count.code:
        said += f" {term.count}"
    return said + (" on answers" if formula.odd and term.place == "answer" else "")


def codes_of_batches(found: Found) -> list[str]:
    """What batches of some kinds show."""
    said = ["dead nan"] if found.dead_is_nan else []
    said += ["dead raises"] if DEAD in found.refused and not said else []
    said += ["raises"] if set(found.refused) - {DEAD, *MAY_BE_REFUSED} else []
    said += ["unequal groups"] if UNEQUAL in found.differs and found.understood else []
    is_other = TURNS in found.differs if found.understood else not found.asks_turns
    is_shifted = {"mask late", "mask early"} & {*codes_of_tokens(found.formula)}
    is_sure = "tokens" in found.formula.sure and not is_shifted
    if is_other and is_sure and TURNS not in found.refused:
        said.append("turns otherwise")
    return said


def remarks(found: Found) -> list[Remark]:
    """What is hardly ever meant, the worst first, and then what is sometimes meant."""
    formula, said = found.formula, codes(found)
    wrong = [(code, WRONG[code]) for code in WRONG if code in said]
    seen = [(code, UNUSUAL[name]) for name in UNUSUAL for code in said
            if is_said(code, name) and code != "temperature 1"]
    for question, parts in QUESTIONS.items():
        for part in parts if question in formula.sure else ():
            setting, name = getattr(formula, part), name_of(part, formula)
            _, sentence, unusual = TABLE[part][setting.code]
            wrong.append((name, sentence))
            seen.append((str(setting), unusual(*setting.numbers)) if callable(unusual)
                        else (name, unusual))
    for term in formula.terms:
        words = words_of(code_of_term(term, formula))
        if term.setting.numbers[0] < 0:
            wrong.append((f"{term.name} reversed", WRONG[f"{term.name} reversed"]))
        wrong.append((words, TERMS[term.setting.code].wrong))
        if term.count.code != formula.count.code:
            wrong.append((words, COUNTS[term.count.code].wrong))
    seen += unusual_settings(formula)
    return [Remark(name, sentence, is_mistake)
            for pairs, is_mistake in ((wrong, True), (seen, False))
            for name, sentence in pairs if sentence]


def name_of(part: str, formula: Formula) -> str:
    """The code in which a part of the formula is said, without its numbers."""
    code = getattr(formula, part)
    if part in ("groups", "centre", "scale", "finish"):
        code = code_of_advantage(formula)
    elif part in ("count", "length"):
        code = code_of_count(formula)
    return words_of(str(code))


def unusual_settings(formula: Formula) -> list[tuple[str, str]]:
    """Names and sentences of settings that are unusual beside one another."""
    if "credit" not in formula.sure:
        return []
    finish, name, found = formula.finish.code, name_of("finish", formula), []
    if UNFINISHED in formula.odd and formula.count.code != "sum" and not formula.length.code:
        found.append((UNFINISHED, "Answers without an end are not trained, and count in the "
                      "divisor."))
    if finish.startswith(("whitened", "over tokens")) and formula.scale.code:
        found.append((name, "The advantage is whitened again, after it was divided by a std."))
    elif finish.startswith("over") and (formula.groups.code, formula.centre.code) != ("", "raw"):
        found.append((name, "Groups with equal rewards are pushed, although they say nothing."))
    return found  # of the answers alone the mean is 0 already


@dataclass(frozen=True)
class Verdict:
    """Whether a loss passes, and why not."""
    found: Found
    status: int
    expect: str | None
    missing: list[str]        # clauses that do not hold
    unexpected: list[str]     # what holds, and no clause names

    def in_words(self) -> list[str]:
        """The lines of the report: the formula that the loss is or is nearest to, its mistakes,
        what is unusual, and the expectations that do not hold."""
        found, seen = self.found, remarks(self.found)
        wrong = [remark for remark in seen if remark.is_mistake]
        said = self.headline()
        if wrong or found.understood:
            said.append(f"Mistakes: {len(wrong) or 'none'}.")
        said += [f"{number}. {remark}" for number, remark in enumerate(wrong, 1)]
        if len(wrong) < len(seen):
            said.append("Unusual, check that you want it:")
            said += [f"- {remark}" for remark in seen if not remark.is_mistake]
        if self.missing:
            said.append(f"Expected, and not so: {', '.join(self.missing)}.")
        if self.unexpected:
            said.append(f"Not expected, and so: {', '.join(self.unexpected)}.")
        if self.expect is None and self.status == PASSED:
            said.append("Nothing was expected, so a formula that you do not want passes, too. What "
                        f'would see it: --expect "{", ".join(all_clauses(found))}"')
        return said

    def headline(self) -> list[str]:
        found, clauses = self.found, ", ".join(all_clauses(self.found))
        if found.understood:
            size = max(found.unexplained, 1e-16)
            return [f'Understood: "{clauses}"', "This formula gives the gradient of new batches to "
                    f"{size:.0e} of its size."]
        if found.is_zero:
            return ["Nothing is trained."]
        leaves = f"leaves, of the gradient, {worst_of(found.differs, 4)}."
        said = [f"Not understood. No formula of the table is near it: the nearest {leaves}"]
        if found.is_near:
            said = [f'Nearest: "{", ".join(nearest(found))}"', "The loss is not understood: this "
                    f"formula {leaves}", f"Where it differs, in {found.token}."]
        sure = clauses.removesuffix("not understood").removesuffix(", ")
        return said + ([f'Sure is: "{sure}"'] if sure else [])


def worst_of(shares: dict[str, float], most: int) -> str:
    """The kinds of batches that differ most, and by how much."""
    worst = sorted(shares, key=shares.get, reverse=True)[:most]
    said = ("more than 200%" if shares[name] > 2 else f"{shares[name]:.1%}"
            if shares[name] > 5e-4 else f"{shares[name]:.0e}" for name in worst)
    return "; ".join(f"{share} with {name}" for share, name in zip(said, worst))


def nearest(found: Found) -> list[str]:
    """The whole formula, its unsure settings included, with numbers of three digits."""
    formula = replace(found.formula, sure=frozenset({*QUESTIONS, "lens"}),
                      terms=(*found.formula.terms, *found.formula.guesses))
    return [re.sub(r"\d+\.\d{4,}", lambda number: f"{float(number[0]):.3g}", code)
            for code in codes_of(formula, found.has_reward) if code not in USUAL]


def all_clauses(found: Found) -> list[str]:
    """All that holds and is not usual, as an expectation."""
    named = [code for code in codes(found) if code not in USUAL]
    more = [remark.name for remark in remarks(found)
            if not any(is_said(code, remark.name) for code in named)]
    return [*dict.fromkeys([*named, *more])] or ["understood"]


def judge(found: Found, expect: str | None = None) -> Verdict:
    """Whether a loss passes. `expect` has clauses, with commas between them."""
    clauses = [] if expect is None else clauses_of(expect)
    wrong = [remark.name for remark in remarks(found)
             if not any(is_said(clause, remark.name) for clause in clauses)]
    if expect is None:
        status = FAILED if wrong else PASSED if found.understood else UNKNOWN
        return Verdict(found, status, expect, [], [])
    said = codes(found)
    holds = [*said, *all_clauses(found)]
    missing = [clause for clause in clauses if not any(is_said(code, clause) for code in holds)]
    unexpected = [code for code in said if code not in USUAL and not any(
        is_said(code, clause) for clause in clauses)]
    unexpected += [name for name in wrong if not any(is_said(code, name) for code in unexpected)]
    status = FAILED if missing or unexpected else PASSED
    return Verdict(found, status, expect, missing, unexpected)


def check(loss: Loss, expect: str | None = None) -> Found:
    """What is known of a loss that passes. NotPassed is raised if it does not, and LossFailed if it
    cannot be examined."""
    if expect is not None:
        clauses_of(expect)  # a mistake in it is told before the search
    verdict = judge(find_formula(loss), expect)
    if verdict.status != PASSED:
        raise NotPassed("\n".join(verdict.in_words()))
    return verdict.found
