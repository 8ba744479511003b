"""What was found, in short codes (*z n 0.0001*, *token*, *clip 0.2 0.28*), what is wrong, and
whether a loss passes.

The codes are what is printed and what an expectation is written in. An expectation holds as a
whole: its clauses are so, and nothing else is, but for what is usual (USUAL) and need not be
written. What is wrong or unusual passes only if a clause or `allow` has its name.
"""
import math
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from .calling import Loss
from .invariances import INVARIANCES
from .ours import Formula, Term
from .search import DEAD, MAY_BE_REFUSED, TURNS, UNEQUAL, Found, find_formula
from .tables import (ANSWER, CENTRES, COUNTS, FINISHES, GROUPS, OF_TURNS, PLACES, RATIOS, SAMPLERS,
                     SCALES, SHAPES, TERMS, Line)

PASSED, FAILED, UNKNOWN = 0, 1, 2  # the exit status
USUAL = frozenset({"end", "no kl", "no entropy", "temperature 1", "shift 1", "understood"})
NARROW = (.5, 2)  # bounds without a minimum: within these they are a clip that was meant, and wider
                  # ones are those of IcePop
MISPLACED = ("The old log-probs are one place off: the ratio of a token is formed with that of its "
             "neighbour.")
WRONG_CODES = {  # what is hardly ever meant, the worst first
    "zero": "The gradient is zero on every batch: nothing is trained.",
    "no reward": "The reward trains nothing: no push depends on it.",
    "sign reversed": "The sign is reversed: good answers are made less probable.",
    "shift 0": "The shift is missing: the logits at a token are taken for that token, and they "
               "predict the next one.",
    "shift 2": "The shift is made twice: logits are taken for the token after next.",
    "shift -1": "The shift goes the wrong way: logits stand for the token before.",
    "mask inverted": "Only what is no answer is trained: the mask is inverted.",
    "prompt": "The prompt is trained.",
    "last of prompt": "The last token of the prompt is trained, as where a mask begins one place "
                      "early.",
    "padding": "The padding is trained.",
    "first of padding": "The first token of the padding is trained, as where a mask ends one place "
                        "late.",
    "mask late": "The mask is one place late: the first token of an answer is not trained, and "
                 "what follows its end is.",
    "mask early": "The mask is one place early: the last token of the prompt is trained, and the "
                  "end of the answer is not.",
    "no first": "The first token of an answer is not trained.",
    "no end": "The token that ends an answer is not trained.",
    "replies": "What an environment wrote within an answer is trained, although batch.mask leaves "
               "it out. With several turns this is a mistake.",
    "first of reply": "The first token of a reply of the environment is trained.",
    "last of reply": "The last token of a reply of the environment is trained.",
    "no first of turn": "The first token of every later turn is not trained.",
    "no last of turn": "The last token of every earlier turn is not trained.",
    "turns otherwise": "Where an environment replies within an answer, the loss is another one, or "
                       "trains other tokens than batch.mask has.",
    "counts replies": "The divisor counts what an environment wrote.",
    "old misplaced 1": MISPLACED, "old misplaced -1": MISPLACED,
    "dead nan": "Groups with equal rewards give 0 / 0, which is not a number.",
    "dead raises": "The loss raises where the rewards of a group are equal.",
    "raises": "The loss raises on some batches.",
    **{name: one.sentence for name, one in INVARIANCES.items()}}
UNUSUAL_CODES = {
    "unequal groups": "Where groups have different sizes, the loss is another one.",
    "no minimum": "The clip has one bound alone.",
    "times": "The gradient is multiplied by a number.",
    "temperature": "The log-probs are at another temperature than 1, so the old ones have to be "
                   "that, too.",
    "unfinished counted": "Answers without an end are not trained, and count in the divisor.",
    "whitened again": "The advantage is whitened again, after it was divided by a std.",
    "dead pushed": "Groups with equal rewards are pushed, although they say nothing."}


class NotPassed(AssertionError):
    """A loss does not pass; the text says why."""


class Remark(NamedTuple):
    """A sentence about what is wrong or unusual, and the name by which it is let pass."""
    name: str
    sentence: str
    is_mistake: bool = True

    def __str__(self) -> str:
        return f"[{self.name}] {self.sentence}"


# ------------------------------------------------------------------ codes
def facts(found: Found) -> list[tuple[str, ...]]:
    """All that holds of a loss, as codes; several codes of one fact say the same. A question
    without an exact answer has none."""
    if found.is_zero:
        return [("zero",)]
    formula, said = found.formula, []
    if "credit" in formula.sure:
        said += [code_of_advantage(formula), *codes_of_count(formula)]
    said += codes_of_tokens(formula) if "tokens" in formula.sure and found.has_reward else []
    if "shape" in formula.sure and formula.shape:
        said.append(formula.shape + ("" if formula.is_detached else " undetached"))
    said += [f"old misplaced {formula.late}"] if formula.late else []
    if "ratio" in formula.sure:
        said.append(with_bounds(formula.ratio.removesuffix(" dual"), formula.bounds, 1.0))
    if "sampler" in formula.sure and formula.sampler == "for old":
        said.append("sampler for old")
    elif "sampler" in formula.sure and formula.sampler:
        said.append(with_bounds(formula.sampler, formula.limits, 0.0))
    said += [code_of_term(term, formula) for term in formula.terms]
    said += ["kl elsewhere" for term in formula.terms if PLACES[term.place].mistake]
    if found.understood:
        has = {term.is_entropy for term in formula.terms}
        said += [f"no {name}" for name, kind in (("kl", False), ("entropy", True))
                 if kind not in has]
    if "lens" in formula.sure:
        said += [f"temperature {formula.lens.temperature:g}", f"shift {formula.lens.shift}"]
    said += ["dead nan"] if found.dead_is_nan else []
    said += [] if found.has_reward else ["no reward"]
    said += codes_of_batches(found) + found.changed
    said.append("understood" if found.understood else "not understood")
    return [(code, "no clip") if code in ("ratio", "no ratio", "gspo ratio") else (code,)
            for code in dict.fromkeys(said)]


def codes(found: Found) -> set[str]:
    return {code for fact in facts(found) for code in fact}


def code_of_advantage(formula: Formula) -> str:
    scale = formula.scale.format(f"{formula.epsilon:g}")
    code = formula.centre if scale == "none" else f"minus {formula.centre} over {scale}"
    if formula.centre == "mean" and re.match(r"n(-1)? \S+( root| max)?$", scale):
        code = f"z {scale}"
    finish = formula.finish.format(f"{formula.finish_number:g}")
    return f"{formula.groups}{code} {finish}".strip()


def codes_of_count(formula: Formula) -> list[str]:
    size = abs(formula.factor)
    if formula.count == "constant":
        said = [f"constant {float(f'{1 / size:.6g}'):g}{formula.length}"]
    else:
        said = [formula.count.format(formula.rows) + formula.length]
        said += [f"times {float(f'{size:.6g}'):g}"] if abs(size - 1) > 1e-6 else []
    said += ["counts replies"] if formula.length == " (with replies)" else []
    return said + (["sign reversed"] if formula.factor < 0 else [])


def codes_of_tokens(formula: Formula) -> list[str]:
    has = formula.kinds
    if "first" not in has and "padding_first" in has and "padding_rest" not in has:
        return ["mask late"]
    if "first" in has and "prompt_last" in has and "prompt" not in has and "cut" not in has:
        return ["mask early"]
    said = ["end"] if "end" in has else ["no end"]
    said += [] if has & (ANSWER - OF_TURNS) else ["mask inverted"]
    said += [f"no {kind}" for kind in ("first", "middle") if kind not in has]
    said += ["prompt"] if "prompt" in has else ["last of prompt"] if "prompt_last" in has else []
    if "padding_rest" in has or "padding_first" in has:
        said.append("padding" if "padding_rest" in has else "first of padding")
    said += ["no cut"] if "cut" not in has else []
    if "reply_middle" in has:
        said.append("replies")
    else:
        said += [f"{edge} of reply" for edge in ("first", "last") if f"reply_{edge}" in has]
    said += [f"no {edge} of turn" for edge in ("first", "last") if f"turn_{edge}" not in has]
    return said + ([formula.choice.format(f"{formula.share:g}")] if formula.choice else [])


def code_of_term(term: Term, formula: Formula) -> str:
    """Its counting, and that it stands on whole answers, where these are not those of the policy
    loss."""
    name, _, how = term.kind.partition(" with ")
    said = f"{name if term.is_entropy else f'kl {name}'} {term.factor:.6g}"
    said += f" with {how}" if how else ""
    is_same = term.count == formula.count and term.counts_own == bool(formula.length)
    count = term.count.format(formula.rows) + (" of its own" if term.counts_own else "")
    is_part = formula.kinds != ANSWER or formula.choice
    return said + term.reference + ("" if is_same else f" {count}") + (
        " on answers" if is_part and term.place == "answer" else "")


def with_bounds(name: str, bounds: tuple[float, ...], middle: float) -> str:
    """The name with its bounds, as distances from 1 or as they are."""
    if not middle and len(bounds) == 2 and math.isinf(bounds[0]):
        return f"{name} {bounds[1]:g}"
    numbers = [sign * (bound - middle) if middle else bound
               for sign, bound in zip((-1, 1), bounds)]
    said = ["none" if math.isinf(number) else f"{round(number, 6):g}" for number in numbers]
    return " ".join([name, *said, *(f"dual {bound:g}" for bound in bounds[2:])])


def codes_of_batches(found: Found) -> list[str]:
    """What batches of some kinds show."""
    said = ["unequal groups"] if UNEQUAL in found.differs and found.understood else []
    is_known = "tokens" in found.formula.sure and found.has_reward and TURNS not in found.refused
    if is_known and (found.understood and TURNS in found.differs
                     or not found.formula.kinds & {"reply_middle"} and not found.asks_turns):
        said.append("turns otherwise")
    said += ["dead raises"] if DEAD in found.refused and not found.dead_is_nan else []
    others = set(found.refused) - {DEAD, *MAY_BE_REFUSED}
    return said + (["raises"] if others else [])


# ------------------------------------------------------------------ what is wrong or unusual
def lines_of(formula: Formula) -> list[tuple[str, Line]]:
    """The lines that were found, of the questions that have an exact answer."""
    found = [(GROUPS, formula.groups), (CENTRES, formula.centre), (SCALES, formula.scale),
             (COUNTS, formula.count)] if "credit" in formula.sure else []
    found += [(RATIOS, formula.ratio)] if "ratio" in formula.sure else []
    found += [(SAMPLERS, formula.sampler)] if "sampler" in formula.sure else []
    return [(name.removesuffix(" {}").strip(), table[name]) for table, name in found]


def remarks(found: Found) -> list[Remark]:
    """What is hardly ever meant, the worst first, and then what is sometimes meant, and often
    not."""
    formula, said = found.formula, codes(found)
    seen = [Remark(code, sentence) for code, sentence in WRONG_CODES.items() if code in said]
    for name, line in lines_of(formula):
        is_wide = name == "mask" and not (
            formula.bounds[0] > NARROW[0] and formula.bounds[1] < NARROW[1])
        if is_wide:
            seen.append(Remark(name, "Outside wide bounds there is no gradient, whichever the "
                                     "sign, as in IcePop.", is_mistake=False))
        elif line.mistake:
            seen.append(Remark(name, line.mistake))
        elif line.unusual:
            seen.append(Remark(name, line.unusual, is_mistake=False))
    if not formula.is_detached and "shape" in formula.sure:
        seen.append(Remark(f"{formula.shape} undetached",
                           "The weight is not detached, so it is trained itself."))
    for term in formula.terms:
        seen += remarks_of_term(term, formula)
    seen += [Remark(name, UNUSUAL_CODES[name.partition(" ")[0] if name[-1].isdigit() else name],
                    is_mistake=False) for name in unusual_codes(found, said)]
    seen += unusual_bounds(formula) if "ratio" in formula.sure else []
    return sorted(dict.fromkeys(seen), key=lambda remark: not remark.is_mistake)


def remarks_of_term(term: Term, formula: Formula) -> list[Remark]:
    name, about = ("entropy", "The entropy bonus") if term.is_entropy else ("kl", "A KL term")
    seen = [Remark(f"{name} elsewhere", PLACES[term.place].mistake.format(term=about)),
            Remark(f"kl {term.kind}", TERMS[term.kind].mistake)]
    if term.count != formula.count and term.place in ("trained", "answer"):
        seen.append(Remark(f"{name} {term.count}", COUNTS[term.count].mistake))
    if term.factor < 0:
        effect = "lowers the entropy" if term.is_entropy else (
            "drives the policy away from the reference")
        seen.append(Remark(f"{name} reversed", f"{about} has the wrong sign: it {effect}."))
    return [remark for remark in seen if remark.sentence]


def unusual_codes(found: Found, said: set[str]) -> list[str]:
    formula = found.formula
    names = [code for code in sorted(said) if code == "unequal groups" or (
        code.startswith(("times ", "temperature ")) and code != "temperature 1")]
    if "credit" not in formula.sure:
        return names
    if formula.choice == "no unfinished" and not formula.length and formula.count != "sum":
        names.append("unfinished counted")
    if formula.finish.startswith(("whitened", "over tokens")):
        if formula.scale != "none":
            names.append("whitened again")
        elif formula.finish.startswith("over") and not formula.groups and formula.centre != "raw":
            names.append("dead pushed")  # of the answers alone the mean is 0 already
    return names


def unusual_bounds(formula: Formula) -> list[Remark]:
    name, (low, high) = formula.ratio, (*formula.bounds, 0.0, 0.0)[:2]
    code, said = with_bounds(name.removesuffix(" dual"), formula.bounds, 1.0), ""
    if "clip" in name and 0 < low < NARROW[0]:
        said = f"The lower bound is {low:g}, far below 1: a clip of 0.2 has the lower bound 0.8."
    elif "clip" in name and formula.bounds and math.isinf(low - high):
        said = "The clip has one bound alone."
    elif "clip" in name and 1 - low > high - 1 + 1e-9:
        said = "The ratio may fall further than it may rise: are the bounds exchanged?"
    elif name == "cispo" and high < 1:
        said = f"The weight is at most {high:g}, which is below 1, so hardly a token's ratio counts."
    return [Remark(code, said, is_mistake=False)] if said else []


def refuse_unknown(names: Collection[str]) -> None:
    """Refuse what is no name of a mistake, nor begins with that of a line of a table."""
    known = {*WRONG_CODES, *UNUSUAL_CODES, "kl", "entropy", *SHAPES}
    for table in (GROUPS, SCALES, COUNTS, RATIOS, SAMPLERS):
        known.update(name.removesuffix(" {}").strip() for name in table)
    for name in names:
        if not any(name == one or name.startswith(f"{one} ") for one in known - {""}):
            raise ValueError(f"no mistake has the name {name!r}: it is what stands in brackets, "
                             "such as: no end")


# ------------------------------------------------------------------ an expectation
@dataclass(frozen=True)
class Verdict:
    """Whether a loss passes, and why not."""
    found: Found
    status: int
    expect: str | None
    wrong: list[Remark]       # those that are not let pass
    missing: list[str]        # clauses that do not hold
    unexpected: list[str]     # what holds, and no clause names

    def in_words(self) -> list[str]:
        """The mistakes, what is unusual, what holds, and how far."""
        found, seen = self.found, remarks(self.found)
        wrong = [remark for remark in seen if remark.is_mistake]
        said = [f"Mistakes: {len(wrong) or 'none seen'}."]
        said += [f"{number}. {remark}" for number, remark in enumerate(wrong, 1)]
        if len(wrong) < len(seen):
            said.append("Unusual, check that you want it:")
            said += [f"- {remark}" for remark in seen if not remark.is_mistake]
        clauses = ", ".join(all_clauses(found))
        said.append(f'What holds of it: "{clauses}"')
        if found.understood:
            size = max(found.unexplained, 1e-16)
            said.append(f"This formula gives the gradient of new batches to {size:.0e} of its "
                        "size.")
        elif not found.is_zero:
            worst = sorted(found.differs, key=found.differs.get, reverse=True)
            said.append("Not understood. With what holds, of the gradient differs " + "; ".join(
                f"{percent(found.differs[name])} with {name}" for name in worst[:4]) + ".")
        if self.missing:
            said.append(f"Expected, and not so: {', '.join(self.missing)}.")
        if self.unexpected:
            said.append(f"Not expected, and so: {', '.join(self.unexpected)}.")
        if self.expect is None and self.status == PASSED:
            said.append("Nothing was expected, so a formula that you do not want passes, too. What "
                        f'would see it: --expect "{clauses}"')
        return said

    def as_json(self) -> dict[str, object]:
        seen, found = remarks(self.found), self.found
        return {"status": self.status, "understood": found.understood,
                "mistakes": [remark._asdict() for remark in seen if remark.is_mistake],
                "unusual": [remark._asdict() for remark in seen if not remark.is_mistake],
                "facts": all_clauses(found), "missing": self.missing,
                "unexpected": self.unexpected, "unexplained": found.unexplained,
                "differs": found.differs, "refused": found.refused, "sentences": self.in_words()}


def percent(share: float) -> str:
    return "more than 200%" if share > 2 else f"{share:.1%}" if share > 5e-4 else f"{share:.0e}"


def all_clauses(found: Found) -> list[str]:
    """All that holds and is not usual, as an expectation."""
    named = [fact[0] for fact in facts(found) if USUAL.isdisjoint(fact)]
    more = [remark.name for remark in remarks(found)
            if not any(is_said(code, remark.name) for code in named)]
    return [*named, *more] or ["understood"]


def judge(found: Found, expect: str | None = None, allow: Collection[str] = ()) -> Verdict:
    """Whether a loss passes. `allow` has the names of mistakes that are let pass, and `expect` has
    clauses, with commas between them."""
    refuse_unknown(allow)
    clauses = [] if expect is None else clauses_of(expect)
    wrong = [remark for remark in remarks(found) if remark.name not in allow
             and not any(is_said(clause, remark.name) for clause in clauses)]
    if expect is None:
        status = FAILED if wrong else PASSED if found.understood or found.is_zero else UNKNOWN
        return Verdict(found, status, expect, wrong, [], [])
    missing = [clause for clause in clauses
               if not any(is_said(code, clause) for code in (*codes(found), *all_clauses(found)))]
    unexpected = [fact[0] for fact in facts(found) if USUAL.isdisjoint(fact) and not any(
        is_said(code, clause) for code in fact for clause in (*clauses, *allow))]
    unexpected += [remark.name for remark in wrong if remark.name not in unexpected
                   and not any(is_said(code, remark.name) for code in unexpected)]
    status = FAILED if missing or unexpected else PASSED
    return Verdict(found, status, expect, wrong, missing, unexpected)


def check(loss: Loss, expect: str | None = None, allow: Collection[str] = ()) -> Found:
    """What is known of a loss that passes. NotPassed is raised if it does not, and LossFailed if it
    cannot be examined."""
    verdict = judge(find_formula(loss), expect, allow)
    if verdict.status != PASSED:
        raise NotPassed("\n".join(verdict.in_words()))
    return verdict.found


def clauses_of(expected: str) -> list[str]:
    """The clauses of an expectation, which has commas between them."""
    found = [" ".join(map(short, clause.split())) for clause in expected.split(",")]
    found = [clause for clause in found if clause]
    if not found:
        raise ValueError("the expectation names no clause, such as: z n-1 1e-4, token, "
                         "clip 0.2 0.28")
    return found


def is_said(code: str, clause: str) -> bool:
    """Whether a clause has this code. Numbers at its end may be left out, and may be any then."""
    rest = code.removeprefix(clause)
    return code.startswith(clause) and re.fullmatch(r"( (-?[\d.]+(e[+-]?\d+)?|none))*",
                                                    rest) is not None


def short(word: str) -> str:
    try:
        return f"{float(word):g}" if word not in ("nan", "inf", "infinity") else word
    except ValueError:
        return word
