"""What was found, in words: short codes for tests, and sentences for people.

The codes are what `--expect` asks for: *z n 0.0001*, *token*, *clip 0.2 0.28*. The sentences begin
with mistakes, and choices come after them.
"""
import math
import re

from .ours import Formula, Term
from .search import Found
from .tables import (ANSWER, CENTRES, CHOICES, COUNTS, GROUPS, KLS, ORDERS, PLACES, RATIOS, SCALES)

PLAIN_SCALES = ("n", "n-1", "n root", "n-1 root", "n max", "n-1 max")


# ------------------------------------------------------------------ codes
def codes(found: Found) -> set[str]:
    """All that holds of a loss. A question without an exact answer has no code."""
    if found.is_zero:
        return {"zero"}
    formula = found.formula
    said = codes_of_lens(formula) if "lens" in formula.sure else set()
    said |= codes_of_tokens(formula) if "tokens" in formula.sure else set()
    said |= {code_of_shape(formula)} if "shape" in formula.sure and formula.shape else set()
    if "credit" in formula.sure:
        said |= {code_of_advantage(formula), *codes_of_count(formula)}
    said |= codes_of_ratio(formula) if "ratio" in formula.sure else set()
    said |= codes_of_terms(formula)
    said |= {"dead nan"} if found.dead_is_nan else set()
    if found.trains_replies is not None:
        said.add("replies" if found.trains_replies else "no replies")
    if found.understood:
        said |= {"understood"} | ({"no kl"} if not formula.kls else set())
        said |= {"no entropy"} if not formula.entropy else set()
    return said


def codes_of_lens(formula: Formula) -> set[str]:
    lens = formula.lens
    return {f"temperature {lens.temperature:g}", f"shift {lens.shift}"}


def codes_of_terms(formula: Formula) -> set[str]:
    """Of the KL terms and the entropy bonus, and of a misplaced old log-prob."""
    said = {f"old misplaced {formula.late}"} if formula.late else set()
    for term in formula.kls:
        kind, _, how = term.kind.partition(" with ")
        how = f" with {how}" if how else ""
        said.add(f"kl {kind} {term.factor:.6g}{how}{term.reference}")
        if term.place not in ("trained", "answer"):
            said.add("kl elsewhere")
    return said | ({f"entropy {formula.entropy.factor:.6g}"} if formula.entropy else set())


def codes_of_tokens(formula: Formula) -> set[str]:
    has = formula.kinds
    if "first" not in has and "padding_first" in has and "padding_rest" not in has:
        return {"mask late"}
    if "first" in has and "prompt_last" in has and "prompt" not in has and "cut" not in has:
        return {"mask early"}
    said = {"end"} if "end" in has else {"no end"}
    said |= set() if has & ANSWER else {"mask inverted"}
    said |= {f"no {kind}" for kind in ("first", "middle") if kind not in has}
    said |= {"prompt"} if "prompt" in has else set()
    said |= {"padding"} if "padding_rest" in has else set()
    said |= {"no cut"} if "cut" not in has else set()
    if formula.choice:
        said.add(code_of_choice(formula))
    return said


def code_of_choice(formula: Formula) -> str:
    return CHOICES[formula.choice].words.format(least=formula.least, rest=1 - formula.least)


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
    code += f" {formula.finish}" if formula.finish else ""
    code += formula.order
    if formula.reward:
        code += f" of reward {formula.reward}"
    return code


def codes_of_count(formula: Formula) -> set[str]:
    size = abs(formula.factor)
    if formula.count == "constant":
        said = {"constant", f"constant {float(f'{1 / size:.6g}'):g}"}
    else:
        said = {formula.count + (f" ({formula.length})" if formula.length else "")}
        if abs(size - 1) > 1e-6:
            said.add(f"times {float(f'{size:.6g}'):g}")
    return said | ({"sign reversed"} if formula.factor < 0 else set())


def codes_of_ratio(formula: Formula) -> set[str]:
    """The objective, with its bounds as distances from 1."""
    name, bounds = formula.ratio.removesuffix(" dual"), formula.bounds
    numbers = [away(sign * (bound - 1)) for sign, bound in zip((-1, 1), bounds)]
    numbers += [f"dual {bound:g}" for bound in bounds[2:]]
    if name == "topr":
        numbers = [f"{bounds[0]:g}"]
    return {" ".join([name, *numbers])} | ({"no clip"} if name.endswith("ratio") else set())


def away(distance: float) -> str:
    return "none" if math.isinf(distance) else f"{round(distance, 6):g}"


def unmet(found: Found, expected: str) -> list[str]:
    """The clauses, with commas between them, that do not hold. A number that is left out may be
    any."""
    clauses = [clause.strip() for clause in expected.split(",") if clause.strip()]
    if not clauses:
        raise ValueError("--expect names no clause, such as: z n-1 1e-4, token, clip 0.2 0.28")
    said, missing = codes(found), []
    for clause in clauses:
        normal = " ".join(short(word) for word in clause.split())
        if not any(code == normal or code.startswith(normal + " ") and starts_number(
                code[len(normal) + 1:]) for code in said):
            missing.append(clause)
    return missing


def short(word: str) -> str:
    try:
        return f"{float(word):g}" if word not in ("nan", "inf", "infinity") else word
    except ValueError:
        return word


def starts_number(text: str) -> bool:
    return bool(re.match(r"-?[\d.]", text))


# ------------------------------------------------------------------ sentences
WRONG_CODES = {  # what is hardly ever meant of the log-probs and of the tokens, the worst first
    "sign reversed": "The sign is reversed: good answers are made less probable.",
    "shift 0": "The shift is missing: the logits at a token are taken for that token, and they "
               "predict the next one.",
    "shift 2": "The shift is made twice: logits are taken for the token after next.",
    "shift -1": "The shift goes the wrong way: logits stand for the token before.",
    "mask inverted": "Only what is no answer is trained: the mask is inverted.",
    "prompt": "The prompt is trained.",
    "padding": "The padding is trained.",
    "mask late": "The mask is one place late: the first token of an answer is not trained, and "
                 "what follows its end is.",
    "mask early": "The mask is one place early: the last token of the prompt is trained, and the "
                  "end of the answer is not.",
    "no end": "The token that ends an answer is not trained."}


def mistakes(found: Found) -> list[str]:
    """What is hardly ever meant, the worst first."""
    formula = found.formula
    if found.is_zero:
        return ["The gradient is zero on every batch: nothing is trained."]
    said = codes(found)
    wrong = [] if found.has_reward else [
        "The reward trains nothing: no push depends on it"
        + (", only the terms without reward act." if formula.kls or formula.entropy else ".")]
    wrong += [sentence for code, sentence in WRONG_CODES.items() if code in said]
    if formula.late:
        wrong.append("The old log-probs are one place off: the ratio of a token is formed with "
                     "that of its neighbour.")
    lines = {"credit": [GROUPS[formula.groups], ORDERS[formula.order], SCALES[formula.scale],
                        COUNTS[formula.count]],
             "ratio": [RATIOS[formula.ratio]]}
    for question, chosen in lines.items():
        if question in formula.sure:
            wrong += [line.mistake for line in chosen]
    if not formula.is_detached and "shape" in formula.sure:
        wrong.append("The weight is not detached, so it is trained itself "
                     f"({code_of_shape(formula)}).")
    if found.dead_is_nan:
        wrong.append("Groups with equal rewards give 0 / 0, which is not a number.")
    if pushes_dead(formula):
        wrong.append("Groups with equal rewards are pushed, although they say nothing.")
    for term in formula.kls:
        wrong += mistakes_of_kl(term)
    if formula.entropy and formula.entropy.factor < 0:
        wrong.append("The entropy bonus has the wrong sign: it lowers the entropy.")
    return [sentence for sentence in dict.fromkeys(wrong) if sentence]


def mistakes_of_kl(term: Term) -> list[str]:
    wrong = [PLACES[term.place].mistake, KLS[term.kind].mistake]
    if term.factor < 0:
        wrong.append("A KL term has the wrong sign: it drives the policy away from the reference.")
    if term.kind == "k1" and not term.reference:
        wrong.append("The KL is k1 in the loss: its gradient pushes all tokens down alike, and its "
                     "mean is 0.")
    return wrong


def pushes_dead(formula: Formula) -> bool:
    """Whether a group with equal rewards has a push although only its own rewards are compared."""
    if "credit" not in formula.sure or formula.groups or formula.centre == "raw":
        return False
    return formula.finish.startswith("over")  # of the answers alone the mean is 0 already


def sentences(found: Found) -> list[str]:
    """The mistakes, then the choices, then how far the formula holds."""
    wrong = mistakes(found)
    said = [f"Mistakes: {len(wrong) or 'none seen'}."]
    if not wrong and not found.understood:
        said = ["Mistakes: none seen in what is understood."]
    said += [f"{number}. {sentence}" for number, sentence in enumerate(wrong, 1)]
    if not found.is_zero:
        said += choices(found)
        said += verdict(found)
    return said


def choices(found: Found) -> list[str]:
    formula = found.formula
    said = [f"Log-probs: at temperature {formula.lens.temperature:g}."] \
        if formula.lens.temperature != 1 and "lens" in formula.sure else []
    if found.has_reward:
        likely = "" if "credit" in formula.sure else " (nearest)"
        said += [f"Advantage{likely}: {about_advantage(formula)}.",
                 f"Counting{likely}: {about_count(formula)}."]
        if formula.choice or formula.kinds != ANSWER:
            said.append(f"Tokens: {about_tokens(formula)}.")
        if found.trains_replies:
            said.append("Replies: what an environment wrote within an answer is trained, although "
                        "batch.mask leaves it out. With several turns this is a mistake.")
        if formula.shape:
            said.append(f"Weight of a token: {code_of_shape(formula)}.")
        likely = "" if "ratio" in formula.sure else " (nearest)"
        said.append(f"Ratio{likely}: {about_ratio(formula)}.")
    for term in formula.kls:
        where = "" if term.place in ("trained", "answer") else f", at: {term.place}"
        said.append(f"KL{term.reference}: {term.kind}, {term.factor:.4g}, counted by "
                    f"{term.count}{where}.")
    if formula.entropy:
        said.append(f"Entropy bonus: {formula.entropy.factor:.4g}, counted by "
                    f"{formula.entropy.count}.")
    return said


def verdict(found: Found) -> list[str]:
    said = [f"Note: {note}." for note in found.notes]
    if found.understood:
        size = max(found.unexplained, 1e-16)
        return [*said, f"This formula gives the gradient of new batches to {size:.0e} of its size."]
    by_name: dict[str, float] = {}
    for name, share in found.differs:
        by_name[name] = max(share, by_name.get(name, 0.0))
    worst = sorted(by_name, key=by_name.get, reverse=True)
    on = "; ".join(f"{percent(by_name[name])} with {name}" for name in worst[:4])
    said.append(f"Not understood. The nearest formula is the one above{': ' if on else ''}"
                f"{on}{' of the gradient differs' if on else ''}.")
    if "ordinary batches" in by_name and by_name[worst[0]] < 1e-3:  # float16 has 11 binary digits
        said.append("Such a difference may be rounding: an advantage of numpy or of a short float.")
    return said


def percent(share: float) -> str:
    return "more than 200%" if share > 2 else f"{share:.1%}" if share > 5e-4 else f"{share:.0e}"


def about_advantage(formula: Formula) -> str:
    given = {"among": GROUPS[formula.groups].words, "epsilon": f"{formula.epsilon:g}"}
    said = "the reward" + (f" {formula.reward}" if formula.reward else "")
    if formula.centre != "raw":
        said += f" minus {CENTRES[formula.centre].words.format(**given)}"
    if formula.scale != "none":
        words = SCALES[formula.scale].words or formula.scale + " + {epsilon}"
        said += f", divided by {words.format(**given)}"
    if formula.finish:
        said += f", then {formula.finish}"
    return said + (f",{formula.order}" if formula.order else "")


def about_count(formula: Formula) -> str:
    size = abs(formula.factor)
    words = COUNTS[formula.count].words or formula.count
    said = words.format(constant=f"{1 / size:.6g}" if size else "")
    said += ", by the tokens that are trained" if formula.length else ""
    if formula.count != "constant" and abs(size - 1) > 1e-6:
        said += f", times {size:.6g}"
    return said


def about_tokens(formula: Formula) -> str:
    here = "all of an answer" if formula.kinds == ANSWER else ", ".join(sorted(formula.kinds))
    return here + (f"; of these: {code_of_choice(formula)}" if formula.choice else "")


def about_ratio(formula: Formula) -> str:
    words = RATIOS[formula.ratio].words
    if not words:
        return next(iter(sorted(codes_of_ratio(formula))))
    return words.format(name=formula.ratio, bounds=about_bounds(*formula.bounds))


def about_bounds(low: float = -math.inf, high: float = math.inf) -> str:
    if math.isinf(low):
        return f"at most {high:.6g}"
    if math.isinf(high):
        return f"at least {low:.6g}"
    return f"[{low:.6g}, {high:.6g}]"
