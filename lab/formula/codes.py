"""What was found, in short codes: *z n 0.0001*, *token*, *clip 0.2 0.28*.

They are what an expectation is written in. It holds as a whole: its clauses are so, and nothing
else is, but for what is usual (USUAL) and need not be written.
"""
import math
import re

from .ours import Formula, Term
from .search import Found
from .tables import ANSWER

PLAIN_SCALES = ("n", "n-1", "n root", "n-1 root", "n max", "n-1 max")
USUAL = frozenset({"end", "no kl", "no entropy", "temperature 1", "shift 1", "no replies",
                   "understood"})
NOT_UNDERSTOOD, NO_REWARD = "not understood", "no reward"


def facts(found: Found) -> list[tuple[str, ...]]:
    """All that holds of a loss, as codes; several codes of one fact say the same. A question
    without an exact answer has none."""
    if found.is_zero:
        return [("zero",)]
    formula, said = found.formula, []
    if "credit" in formula.sure:
        said += [code_of_advantage(formula), *codes_of_count(formula)]
    said += codes_of_tokens(formula) if "tokens" in formula.sure else []
    said += [code_of_shape(formula)] if "shape" in formula.sure and formula.shape else []
    ratio = [codes_of_ratio(formula)] if "ratio" in formula.sure else []
    said += codes_of_terms(found)
    if "lens" in formula.sure:
        said += [f"temperature {formula.lens.temperature:g}", f"shift {formula.lens.shift}"]
    said += ["dead nan"] if found.dead_is_nan else []
    said += ["random"] if found.is_random else []
    said += ["reward undetached"] if found.trains_reward else []
    said += [] if found.has_reward else [NO_REWARD]
    if found.trains_replies is not None:
        said.append("replies" if found.trains_replies else "no replies")
    said.append("understood" if found.understood else NOT_UNDERSTOOD)
    return [*((code,) for code in said), *ratio]


def codes(found: Found) -> set[str]:
    """The codes of all facts."""
    return {code for fact in facts(found) for code in fact}


def codes_of_terms(found: Found) -> list[str]:
    """Of the KL terms and the entropy bonus, and of a misplaced old log-prob."""
    said = [f"old misplaced {found.formula.late}"] if found.formula.late else []
    for term in found.formula.terms:
        name, _, how = term.kind.partition(" with ")
        name = name if term.is_entropy else f"kl {name}"
        how = f" with {how}" if how else ""
        said.append(f"{name} {term.factor:.6g}{how}{term.reference}"
                    + code_of_counting(term, found.formula))
        if term.place not in ("trained", "answer"):
            said.append("entropy elsewhere" if term.is_entropy else "kl elsewhere")
    if found.understood:
        has = {term.is_entropy for term in found.formula.terms}
        said += [f"no {name}" for name, kind in (("kl", False), ("entropy", True))
                 if kind not in has]
    return said


def code_of_counting(term: Term, formula: Formula) -> str:
    """How the tokens of a term are counted, and that it stands on whole answers, where this differs
    from the policy loss."""
    of_policy = formula.count + (" of its own" if formula.length else "")
    said = f" {term.count}" if term.count != of_policy else ""
    is_part = formula.kinds != ANSWER or formula.choice  # the policy loss trains other tokens
    return said + (" on answers" if is_part and term.place == "answer" else "")


def codes_of_tokens(formula: Formula) -> list[str]:
    has = formula.kinds
    if "first" not in has and "padding_first" in has and "padding_rest" not in has:
        return ["mask late"]
    if "first" in has and "prompt_last" in has and "prompt" not in has and "cut" not in has:
        return ["mask early"]
    said = ["end"] if "end" in has else ["no end"]
    said += [] if has & ANSWER else ["mask inverted"]
    said += [f"no {kind}" for kind in ("first", "middle") if kind not in has]
    said += ["prompt"] if "prompt" in has else []
    said += ["padding"] if "padding_rest" in has else []
    said += ["no cut"] if "cut" not in has else []
    return said + ([formula.choice] if formula.choice else [])


def code_of_shape(formula: Formula) -> str:
    return formula.shape if formula.is_detached else f"{formula.shape} undetached"


def code_of_advantage(formula: Formula) -> str:
    name, _, form = formula.scale.partition(" ")
    if formula.scale == "none":
        code = formula.centre
    elif formula.centre == "mean" and formula.scale in PLAIN_SCALES:
        code = f"z {name} {formula.epsilon:g}" + (f" {form}" if form else "")
    else:
        code = f"minus {formula.centre} over {formula.scale} {formula.epsilon:g}"
    code = f"batch {code}" if formula.groups == "batch" else code
    code += " by mixed" if formula.groups == "mixed" else ""
    return code + (f" {formula.finish}" if formula.finish else "")


def codes_of_count(formula: Formula) -> list[str]:
    size = abs(formula.factor)
    if formula.count == "constant":
        said = [f"constant {float(f'{1 / size:.6g}'):g}"]
    else:
        said = [formula.count + (f" ({formula.length})" if formula.length else "")]
        said += [f"times {float(f'{size:.6g}'):g}"] if abs(size - 1) > 1e-6 else []
    return said + (["sign reversed"] if formula.factor < 0 else [])


def codes_of_ratio(formula: Formula) -> tuple[str, ...]:
    """The objective, with its bounds as distances from 1."""
    name, bounds = formula.ratio.removesuffix(" dual"), formula.bounds
    numbers = [away(sign * (bound - 1)) for sign, bound in zip((-1, 1), bounds)]
    numbers += [f"dual {bound:g}" for bound in bounds[2:]]
    code = " ".join([name, *numbers])
    return (code, "no clip") if name.endswith("ratio") else (code,)


def away(distance: float) -> str:
    return "none" if math.isinf(distance) else f"{round(distance, 6):g}"


# ------------------------------------------------------------------ an expectation
def clauses_of(expected: str) -> list[str]:
    """The clauses of an expectation, which has commas between them."""
    found = [clause.strip() for clause in expected.split(",") if clause.strip()]
    if not found:
        raise ValueError("the expectation names no clause, such as: z n-1 1e-4, token, "
                         "clip 0.2 0.28")
    return found


def unmet(found: Found, clauses: list[str]) -> list[str]:
    """The clauses that do not hold."""
    said = codes(found)
    return [clause for clause in clauses if not any(is_said(code, clause) for code in said)]


def unnamed(found: Found, clauses: list[str]) -> list[str]:
    """What holds, is not usual, and stands in no clause."""
    return [fact[0] for fact in facts(found) if USUAL.isdisjoint(fact) and not any(
        is_said(code, clause) for code in fact for clause in clauses)]


def is_said(code: str, clause: str) -> bool:
    """Whether a clause has this code. Numbers at its end may be left out, and may be any then."""
    normal = " ".join(short(word) for word in clause.split())
    rest = code.removeprefix(normal)
    return code.startswith(normal) and re.fullmatch(r"( (-?[\d.]+(e[+-]?\d+)?|none))*",
                                                    rest) is not None


def short(word: str) -> str:
    try:
        return f"{float(word):g}" if word not in ("nan", "inf", "infinity") else word
    except ValueError:
        return word
