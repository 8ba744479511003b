"""What was found, in words: short codes for tests, and sentences for people.

The codes are what `--expect` asks for: *z n 0.0001*, *token*, *clip 0.2 0.28*. The sentences begin
with mistakes, and choices come after them.
"""
import math
import re

from .ours import Formula
from .search import Found
from .tables import ANSWER, BY_RATE, BY_TRYING

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
    said |= {f"no {kind}" for kind in ("first", "middle") if kind not in has}
    said |= {"prompt"} if "prompt" in has else set()
    said |= {"padding"} if "padding_rest" in has else set()
    said |= {"no cut"} if "cut" not in has else set()
    if formula.choice:
        said.add(code_of_choice(formula))
    return said


def code_of_choice(formula: Formula) -> str:
    least, name = formula.least, formula.choice
    if name == "finished":
        return "no unfinished"
    if name == "place from the start":
        return f"no first {least:g}"
    if name == "place from the end":
        return f"last {1 - least:g}"
    if name.endswith("below"):
        least = -least
    if name.endswith("of batch"):
        return f"{name[:-9]} {1 - least:.6g} of batch"
    return f"{name} {least:g}"


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
    if formula.cost:
        code += f" of reward - {formula.price:g} {formula.cost}"
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
    """The objective, with its bounds as distances from 1, and the gate."""
    name, bounds = formula.ratio.removesuffix(" dual"), formula.bounds
    if name in (*BY_RATE, *BY_TRYING, "topr"):
        numbers = [f"{bound:g}" for bound in bounds]
    else:
        numbers = [away(sign * (bound - 1)) for sign, bound in zip((-1, 1), bounds)]
        numbers += [f"dual {bound:g}" for bound in bounds[2:]]
    said = {" ".join([name, *numbers])}
    said |= {"no clip"} if name.endswith("ratio") else set()
    return said | ({f"{formula.gate} {formula.gate_bound:g}"} if formula.gate else set())


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
def mistakes(found: Found) -> list[str]:
    """What is hardly ever meant, the worst first."""
    formula = found.formula
    if found.is_zero:
        return ["The gradient is zero on every batch: nothing is trained."]
    said = codes(found)
    ratio = formula.ratio if "ratio" in formula.sure else ""
    rows = [
        (not found.has_reward, "The reward trains nothing: no push depends on it" + (
            ", only the terms without reward act." if formula.kls or formula.entropy else ".")),
        ("sign reversed" in said, "The sign is reversed: good answers are made less probable."),
        ("shift 0" in said, "The shift is missing: the logits at a token are taken for that token, "
                            "and they predict the next one."),
        ("shift 2" in said, "The shift is made twice: logits are taken for the token after next."),
        ("shift -1" in said, "The shift goes the wrong way: logits stand for the token before."),
        (formula.groups == "mixed" and "credit" in formula.sure,
         "Groups are mixed: an answer is compared with answers to other problems, as where rows "
         "are taken for columns."),
        (bool(formula.order) and "credit" in formula.sure,
         f"An answer has the advantage{formula.order}, and not its own."),
        ({"no first", "no middle", "no end"} <= said, "Only what is no answer is trained: the mask "
                                                      "is inverted."),
        ("prompt" in said, "The prompt is trained."),
        ("padding" in said, "The padding is trained."),
        ("mask late" in said, "The mask is one place late: the first token of an answer is not "
                              "trained, and what follows its end is."),
        ("mask early" in said, "The mask is one place early: the last token of the prompt is "
                               "trained, and the end of the answer is not."),
        ("no end" in said, "The token that ends an answer is not trained."),
        (bool(formula.late), "The old log-probs are one place off: the ratio of a token is formed "
                             "with that of its neighbour."),
        (ratio.startswith("inverse"), "The ratio is upside down: old over new."),
        ("wrong side" in ratio, "The clip is on the wrong side: the larger of both terms is taken "
                                "(max for min), so it bounds where it should let through."),
        (ratio.endswith("mask"), "The minimum is missing: outside the bounds there is no gradient, "
                                 "whichever the sign, so a bad answer that became likely stays. "
                                 "(With wide bounds it may be meant, as in IcePop.)"),
        (not formula.is_detached and "shape" in formula.sure,
         f"The weight is not detached, so it is trained itself ({code_of_shape(formula)})."),
        (formula.scale.startswith("variance") and "credit" in formula.sure,
         "The variance stands where the std belongs."),
        (found.dead_is_nan, "Groups with equal rewards give 0 / 0, which is not a number."),
        (pushes_dead(formula), "Groups with equal rewards are pushed, although they say nothing."),
        ("divided by the number" in formula.count and "credit" in formula.sure,
         "The number of answers divides twice."),
        (any(term.factor < 0 for term in formula.kls),
         "A KL term has the wrong sign: it drives the policy away from the reference."),
        (any(term.place in ("prompt and answer", "answer and padding", "all")
             for term in formula.kls),
         "A KL term stands outside the answers, too, at their prompt or padding."),
        (formula.cost.startswith("kl") and formula.price < 0,
         "The KL is added to the reward, and not taken off it: an answer earns more the further it "
         "is from the reference."),
        (any(term.kind == "k1" and not term.reference for term in formula.kls),
         "The KL is k1 in the loss: its gradient pushes all tokens down alike, and its mean is 0."),
        (any(term.kind == "k3 exchanged" for term in formula.kls),
         "In the k3 the policy and the reference are exchanged."),
        (formula.entropy is not None and formula.entropy.factor < 0,
         "The entropy bonus has the wrong sign: it lowers the entropy.")]
    return [sentence for holds, sentence in rows if holds]


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
    where = f", all of it in {' and in '.join(found.places)}" if found.places else ""
    on = "; ".join(f"{percent(by_name[name])} with {name}" for name in worst[:4])
    said.append(f"Not understood. The nearest formula is the one above{': ' if on else ''}"
                f"{on}{' of the gradient differs' if on else ''}{where}.")
    if "ordinary batches" in by_name and by_name[worst[0]] < 1e-3:  # float16 has 11 binary digits
        said.append("Such a difference may be rounding: an advantage of numpy or of a short float.")
    return said


def percent(share: float) -> str:
    return "more than 200%" if share > 2 else f"{share:.1%}" if share > 5e-4 else f"{share:.0e}"


def about_advantage(formula: Formula) -> str:
    among = {"": "its group", "batch": "the whole batch", "mixed": "a mixed group"}[formula.groups]
    reward = "the reward" + (f" {formula.reward}" if formula.reward else "")
    if formula.cost:
        reward += f" less {formula.price:g} times the answer's {formula.cost}"
    words = {"raw": reward, "mean": f"{reward} minus the mean of {among}",
             "leave one out": f"{reward} minus the mean of the other answers of {among}",
             "by length": f"{reward} minus the mean of {among}, weighted by length",
             "batch": f"{reward} minus the mean of the batch"}
    said = words.get(formula.centre, f"{reward} minus the {formula.centre} of {among}")
    if formula.scale != "none":
        said += f", divided by {about_scale(formula, among)}"
    if formula.finish:
        said += f", then {formula.finish}"
    if formula.order:
        said += f",{formula.order}"
    return said


def about_scale(formula: Formula, among: str) -> str:
    name, _, form = formula.scale.partition(" ")
    epsilon = f"{formula.epsilon:g}"
    if formula.scale in PLAIN_SCALES:
        std = f"the std of {among} over {'n - 1' if name == 'n-1' else 'n'}"
        return {"": f"{std} + {epsilon}", "root": f"the root of its variance (over {name}) + "
                f"{epsilon}", "max": f"{std}, at least {epsilon}"}[form]
    return f"{formula.scale} + {epsilon}"


def about_count(formula: Formula) -> str:
    size = abs(formula.factor)
    words = {"token": "every token of the batch counts the same",
             "answer": "every answer counts the same", "group": "every problem counts the same",
             "sum": "the plain sum over all tokens",
             "constant": f"a token counts 1 / (answers x {1 / size:.6g})"}
    said = words.get(formula.count, formula.count)
    said += ", by the tokens that are trained" if formula.length else ""
    if formula.count != "constant" and abs(size - 1) > 1e-6:
        said += f", times {size:.6g}"
    return said


def about_tokens(formula: Formula) -> str:
    words = {"prompt": "the prompt", "prompt_last": "the last token of the prompt",
             "first": "the first token of an answer", "middle": "its middle", "end": "its end",
             "cut": "the last token of a cut answer", "padding_first": "the token after an answer",
             "padding_rest": "the padding"}
    here = "all of an answer" if formula.kinds == ANSWER else ", ".join(
        words[kind] for kind in words if kind in formula.kinds)
    return here + (f"; of these: {code_of_choice(formula)}" if formula.choice else "")


def about_ratio(formula: Formula) -> str:
    if formula.ratio == "no ratio":
        return "none; the loss does not change with the old log-probs"
    if formula.ratio in ("ratio", "gspo ratio", "summed ratio", "inverse ratio"):
        within = f"; its logarithm is clamped at {formula.gate_bound:g}" if formula.gate else ""
        return f"{formula.ratio}, used and not clipped{within}"
    whose = "an answer" if formula.ratio.startswith(("gspo", "gmpo", "summed")) else "a token"
    how = {"clip": "is clipped as in PPO, to", "cispo": "is a detached weight, clamped to",
           "mask": "has no gradient outside"}.get(formula.ratio.split()[-1])
    if how and formula.bounds:
        low, high = (f"{bound:.6g}" for bound in formula.bounds)
        to = f"[{low}, {high}]"
        to = f"at most {high}" if low == "-inf" else f"at least {low}" if high == "inf" else to
        said = f"that of {whose} {how} {to}"
        said += f" ({formula.ratio})" if whose == "an answer" else ""
        return said + (f", and {formula.gate} {formula.gate_bound:g}" if formula.gate else "")
    return next(iter(sorted(codes_of_ratio(formula))))
