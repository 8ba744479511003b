"""What was found, in short codes (*z n 0.0001*, *token*, *clip 0.2 0.28*), what is wrong, and
whether a loss passes.

The codes are what is printed and what an expectation is written in. An expectation holds as a
whole: its clauses are so, and nothing else is, but for what is usual (USUAL) and need not be
written. What is wrong or unusual passes only if a clause has its name.
"""
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from .calling import Loss
from .invariances import INVARIANCES
from .formula import Formula, Term
from .search import DEAD, MAY_BE_REFUSED, TURNS, UNEQUAL, Found, find_formula
from .terms import (ANSWER, COUNTS, GROUPS, OF_TURNS, PLACES, RATIOS, SAMPLERS, SCALES,
                     TERMS)

PASSED, FAILED, UNKNOWN = 0, 1, 2  # the exit status
USUAL = frozenset({"end", "no kl", "no entropy", "temperature 1", "shift 1", "understood"})
MISPLACED = ("The old log-probs are one place off: the ratio of a token is formed with that of its "
             "neighbour.")
WRONG = {  # what is hardly ever meant, the worst first
    "zero": "The gradient is zero on every batch: nothing is trained.",
    "no reward": "The reward trains nothing: no push depends on it.",
    "sign reversed": "The sign is reversed: good answers are made less probable.",
    "shift 0": "The shift is missing: the logits at a token are taken for that token, and they "
               "predict the next one.",
    "shift 2": "The shift is made twice: logits are taken for the token after next.",
    "shift -1": "The shift goes the wrong way: logits stand for the token before.",
    "mask inverted": "Only what is no answer is trained: the mask is inverted.",
    "prompt": "The prompt is trained.",
    "last of prompt": "The last token of the prompt is trained: a mask begins one place early.",
    "padding": "The padding is trained.",
    "first of padding": "The first token of the padding is trained: a mask ends one place late.",
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
    "undetached": "The weight is not detached, so it is trained itself.",
    "kl elsewhere": "A KL term stands outside the answers, too: at their prompt, their padding or "
                    "their replies.",
    "entropy elsewhere": "The entropy bonus stands outside the answers, too: at their prompt, "
                         "their padding or their replies.",
    "kl reversed": "A KL term has the wrong sign: it drives the policy away from the reference.",
    "entropy reversed": "The entropy bonus has the wrong sign: it lowers the entropy.",
    **{name: sentence for name, (sentence, _) in INVARIANCES.items()}}
UNUSUAL = {  # what is sometimes meant, and often not
    "unequal groups": "Where groups have different sizes, the loss is another one.",
    "times": "The gradient is multiplied by a number.",
    "temperature": "The log-probs are at another temperature than 1, so the old ones have to be "
                   "that, too.",
    "unfinished counted": "Answers without an end are not trained, and count in the divisor.",
    "whitened again": "The advantage is whitened again, after it was divided by a std.",
    "dead pushed": "Groups with equal rewards are pushed, although they say nothing.",
    "low": "The lower bound is far below 1: a clip of 0.2 has the lower bound 0.8.",
    "one bound": "The clip has one bound alone.",
    "exchanged": "The ratio may fall further than it may rise: are the bounds exchanged?",
    "below 1": "The weight is at most a number below 1, so hardly a token's ratio counts."}


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
    formula, said = found.formula, []
    if "credit" in formula.sure:
        said += [code_of_advantage(formula), *codes_of_count(formula)]
    said += codes_of_tokens(formula) if "tokens" in formula.sure and found.has_reward else []
    if "shape" in formula.sure and formula.shape:
        said.append(formula.shape + ("" if formula.is_detached else " undetached"))
    said += [f"old misplaced {formula.late}"] if formula.late else []
    if "ratio" in formula.sure:
        said.append(code_of_ratio(formula))
    if "sampler" in formula.sure and formula.sampler:
        limits = formula.limits[1:] if formula.limits[:1] == (-math.inf,) else formula.limits
        said.append(" ".join([formula.sampler, *map(bound_in_words, limits)]))
    said += [code_of_term(term, formula) for term in formula.terms]
    if found.understood:
        has = {term.is_entropy for term in formula.terms}
        said += [f"no {name}" for name, kind in (("kl", False), ("entropy", True))
                 if kind not in has]
    if "lens" in formula.sure:
        said += [f"temperature {formula.lens.temperature:g}", f"shift {formula.lens.shift}"]
    said += [] if found.has_reward else ["no reward"]
    said += codes_of_batches(found) + found.changed
    return [*dict.fromkeys(said), "understood" if found.understood else "not understood"]


def code_of_advantage(formula: Formula) -> str:
    scale = formula.scale.format(f"{formula.epsilon:g}")
    code = formula.centre if scale == "none" else f"minus {formula.centre} over {scale}"
    if formula.centre == "mean" and re.match(r"n(-1)? \S+( root| max)?$", scale):
        code = f"z {scale}"
    finish = formula.finish.format(f"{formula.finish_number:g}")
    return f"{formula.groups}{code} {finish}".strip()


def codes_of_count(formula: Formula) -> list[str]:
    size = abs(formula.factor)
    said = [formula.count.format(formula.rows) + formula.length]
    if formula.count == "constant":
        said = [f"constant {float(f'{1 / size:.6g}'):g}{formula.length}"]
    elif abs(size - 1) > 1e-6:
        said.append(f"times {float(f'{size:.6g}'):g}")
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
    said += [f"no {kind}" for kind in ("first", "middle", "cut") if kind not in has]
    said += [f"no {edge} of turn" for edge in ("first", "last") if f"turn_{edge}" not in has]
    for whole, edges in ((("prompt", "prompt"), {"prompt_last": "last of prompt"}),
                         (("padding_rest", "padding"), {"padding_first": "first of padding"}),
                         (("reply_middle", "replies"), {"reply_first": "first of reply",
                                                        "reply_last": "last of reply"})):
        said += [whole[1]] if whole[0] in has else [edges[kind] for kind in edges if kind in has]
    return said + ([formula.choice.format(f"{formula.share:g}")] if formula.choice else [])


def code_of_ratio(formula: Formula) -> str:
    """The objective, with its bounds as distances from 1."""
    numbers = [bound_in_words(sign * (bound - 1)) for sign, bound in zip((-1, 1), formula.bounds)]
    return " ".join([formula.ratio.removesuffix(" dual"), *numbers,
                     *(f"dual {bound:g}" for bound in formula.bounds[2:])])


def bound_in_words(bound: float) -> str:
    return "none" if math.isinf(bound) else f"{round(bound, 6):g}"


def code_of_term(term: Term, formula: Formula) -> str:
    """Its counting, and that it stands on whole answers, where these are not those of the policy
    loss."""
    name, _, how = term.kind.partition(" with ")
    said = f"{name if term.is_entropy else f'kl {name}'} {term.factor:.6g}"
    said += (f" with {how}" if how else "") + term.reference
    if term.count != formula.count or term.counts_own != bool(formula.length):
        said += f" {term.count}" + (" of its own" if term.counts_own else "")
    is_part = formula.kinds != ANSWER or formula.choice
    return said + (" on answers" if is_part and term.place == "answer" else "")


def codes_of_batches(found: Found) -> list[str]:
    """What batches of some kinds show."""
    said = ["dead nan"] if found.dead_is_nan else []
    said += ["dead raises"] if DEAD in found.refused and not said else []
    said += ["raises"] if set(found.refused) - {DEAD, *MAY_BE_REFUSED} else []
    said += ["unequal groups"] if UNEQUAL in found.differs and found.understood else []
    is_other = TURNS in found.differs if found.understood else not found.asks_turns
    if is_other and "tokens" in found.formula.sure and TURNS not in found.refused:
        said.append("turns otherwise")
    return said


def remarks(found: Found) -> list[Remark]:
    """What is hardly ever meant, the worst first, and then what is sometimes meant."""
    formula, said = found.formula, codes(found)
    wrong = [(code, WRONG[code]) for code in WRONG if code in said]
    seen = [(code, UNUSUAL[name]) for name in UNUSUAL for code in said
            if is_said(code, name) and code != "temperature 1"]
    for table, name, question in ((GROUPS, formula.groups, "credit"),
                                  (SCALES, formula.scale, "credit"),
                                  (COUNTS, formula.count, "credit"),
                                  (RATIOS, formula.ratio, "ratio"),
                                  (SAMPLERS, formula.sampler, "sampler")):
        line, bare = table[name], name.removesuffix(" {}").strip()
        if question in formula.sure:
            wrong.append((bare, line.mistake))
            seen.append((bare, line.unusual))
    if not formula.is_detached and "shape" in formula.sure:
        wrong.append((f"{formula.shape} undetached", WRONG["undetached"]))
    for term in formula.terms:
        name = "entropy" if term.is_entropy else "kl"
        wrong += [(code, WRONG[code]) for code, is_so in (
            (f"{name} elsewhere", PLACES[term.place].mistake),
            (f"{name} reversed", term.factor < 0)) if is_so]
        wrong.append((f"kl {term.kind}", TERMS[term.kind].mistake))
        if term.count != formula.count:
            wrong.append((f"{name} {term.count}", COUNTS[term.count].mistake))
    seen += unusual_settings(formula)
    return [Remark(name, sentence, is_mistake)
            for pairs, is_mistake in ((wrong, True), (seen, False))
            for name, sentence in dict(pairs).items() if sentence]


def unusual_settings(formula: Formula) -> list[tuple[str, str]]:
    """Names and sentences of settings that are told by their combination or their size."""
    names = []
    if "credit" in formula.sure:
        is_counted = not formula.length and formula.count != "sum"
        if formula.choice == "no unfinished" and is_counted:
            names.append("unfinished counted")
        if formula.finish.startswith(("whitened", "over tokens")) and formula.scale != "none":
            names.append("whitened again")
        elif formula.finish.startswith("over") and not formula.groups and formula.centre != "raw":
            names.append("dead pushed")  # of the answers alone the mean is 0 already
    found = [(name, UNUSUAL[name]) for name in names]
    if "ratio" in formula.sure and formula.bounds:
        code, (low, high), is_clip = code_of_ratio(formula), formula.bounds[:2], (
            "clip" in formula.ratio)
        for name, is_so in (("one bound", is_clip and math.isinf(low - high)),
                            ("low", is_clip and 0 < low < .5),
                            ("exchanged", is_clip and .5 < low < 2 - high - 1e-4),
                            ("below 1", formula.ratio == "cispo" and high < 1)):
            found += [(code, UNUSUAL[name])] if is_so else []
    return found


@dataclass(frozen=True)
class Verdict:
    """Whether a loss passes, and why not."""
    found: Found
    status: int
    expect: str | None
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
            said.append("This formula gives the gradient of new batches to "
                        f"{size:.0e} of its size.")
        elif not found.is_zero:
            said.append("Not understood. With what holds, of the gradient differs "
                        f"{worst_of(found.differs, 4)}.")
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
                "codes": codes(found), "clauses": all_clauses(found), "missing": self.missing,
                "unexpected": self.unexpected, "unexplained": found.unexplained,
                "differs": found.differs, "refused": found.refused, "sentences": self.in_words()}


def worst_of(shares: dict[str, float], most: int) -> str:
    """The kinds of batches that differ most, and by how much."""
    worst = sorted(shares, key=shares.get, reverse=True)[:most]
    said = ("more than 200%" if shares[name] > 2 else f"{shares[name]:.1%}"
            if shares[name] > 5e-4 else f"{shares[name]:.0e}" for name in worst)
    return "; ".join(f"{share} with {name}" for share, name in zip(said, worst))


def all_clauses(found: Found) -> list[str]:
    """All that holds and is not usual, as an expectation."""
    named = [code for code in codes(found) if code not in USUAL]
    more = [remark.name for remark in remarks(found)
            if not any(is_said(code, remark.name) for code in named)]
    return [*named, *more] or ["understood"]


def judge(found: Found, expect: str | None = None) -> Verdict:
    """Whether a loss passes. `expect` has clauses, with commas between them."""
    clauses = [] if expect is None else clauses_of(expect)
    wrong = [remark.name for remark in remarks(found)
             if not any(is_said(clause, remark.name) for clause in clauses)]
    if expect is None:
        status = FAILED if wrong else PASSED if found.understood else UNKNOWN
        return Verdict(found, status, expect, [], [])
    missing = [clause for clause in clauses if not any(
        is_said(code, clause) for code in (*codes(found), *all_clauses(found)))]
    unexpected = [code for code in codes(found) if code not in USUAL and not any(
        is_said(code, clause) for clause in clauses)]
    unexpected += [name for name in wrong if not any(is_said(code, name) for code in unexpected)]
    status = FAILED if missing or unexpected else PASSED
    return Verdict(found, status, expect, missing, unexpected)


def check(loss: Loss, expect: str | None = None) -> Found:
    """What is known of a loss that passes. NotPassed is raised if it does not, and LossFailed if it
    cannot be examined."""
    verdict = judge(find_formula(loss), expect)
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
