"""What was found, in sentences: mistakes first, then what is unusual, then choices."""
import math
from collections.abc import Collection
from typing import NamedTuple

from .codes import NO_REWARD, code_of_shape, codes
from .ours import Formula, Term
from .reading import TEMPERATURES
from .search import Found
from .tables import (ANSWER, CENTRES, CHOICES, COUNTS, FINISHES, GROUPS, PLACES, RATIOS, SCALES,
                     SHAPES, TERMS, Line)


class Remark(NamedTuple):
    """A sentence about what is wrong or unusual, and the name by which it is let pass."""
    name: str
    sentence: str

    def __str__(self) -> str:
        return f"[{self.name}] {self.sentence}"


WRONG_CODES = {  # what is hardly ever meant, the worst first
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
    "no first": "The first token of an answer is not trained.",
    "no end": "The token that ends an answer is not trained.",
    "old misplaced 1": "The old log-probs are one place off: the ratio of a token is formed with "
                       "that of its neighbour.",
    "old misplaced -1": "The old log-probs are one place off: the ratio of a token is formed with "
                        "that of its neighbour.",
    "reward undetached": "A gradient goes through the reward: a KL, or another term of log-probs, "
                         "is taken off it and is not detached.",
    "dead nan": "Groups with equal rewards give 0 / 0, which is not a number."}
UNUSUAL_CODES = {
    "random": "The loss is random: each call was given the same seed, and what is said here holds "
              "for this seed alone.",
    "replies": "What an environment wrote within an answer is trained, although batch.mask leaves "
               "it out. With several turns this is a mistake."}
NARROW = (.5, 2)  # bounds without a minimum: within these they are a clip that was meant, and wider
                  # ones are those of IcePop


def mistakes(found: Found) -> list[Remark]:
    """What is hardly ever meant, the worst first."""
    formula = found.formula
    if found.is_zero:
        return [Remark("zero", "The gradient is zero on every batch: nothing is trained.")]
    said, wrong = codes(found), []
    if not found.has_reward:
        wrong.append(Remark(NO_REWARD, "The reward trains nothing: no push depends on it"
                            + (", only the terms without reward act." if formula.terms else ".")))
    wrong += [Remark(code, sentence) for code, sentence in WRONG_CODES.items() if code in said]
    for name, line in lines_of(formula):
        if not is_wide(formula, name):
            wrong.append(Remark(name, line.mistake))
    if not formula.is_detached and "shape" in formula.sure:
        wrong.append(Remark(code_of_shape(formula),
                            "The weight is not detached, so it is trained itself."))
    for term in formula.terms:
        wrong += mistakes_of_term(term, formula)
    return [remark for remark in dict.fromkeys(wrong) if remark.sentence]


def refuse_unknown(names: Collection[str]) -> None:
    """Refuse what is no name of a mistake, nor of a line of a table."""
    known = {"zero", NO_REWARD, "reversed", "elsewhere", "whitened again", "dead pushed",
             "kl to old", *WRONG_CODES, *UNUSUAL_CODES,
             *(f"temperature {number:g}" for number in TEMPERATURES)}
    known.update(GROUPS, CENTRES, SCALES, COUNTS, RATIOS, SHAPES, TERMS)
    for name in names:
        bare = name.removeprefix("kl ").removeprefix("entropy ").removesuffix(" undetached")
        if not {name, bare} & known - {""}:
            raise ValueError(f"no mistake has the name {name!r}: it is what stands in brackets, "
                             "such as: no end")


def lines_of(formula: Formula) -> list[tuple[str, Line]]:
    """The lines that were found, of the questions that have an exact answer."""
    found = [(GROUPS, formula.groups), (CENTRES, formula.centre), (SCALES, formula.scale),
             (COUNTS, formula.count)] if "credit" in formula.sure else []
    found += [(RATIOS, formula.ratio)] if "ratio" in formula.sure else []
    return [(name, table[name]) for table, name in found]


def is_wide(formula: Formula, name: str) -> bool:
    """Whether this line is a ratio without a gradient outside wide bounds."""
    return name.endswith("mask") and not (
        formula.bounds[0] > NARROW[0] and formula.bounds[1] < NARROW[1])


def mistakes_of_term(term: Term, formula: Formula) -> list[Remark]:
    name, said = ("entropy", "The entropy bonus") if term.is_entropy else ("kl", "A KL term")
    wrong = [Remark(f"{name} elsewhere", PLACES[term.place].mistake.format(term=said)),
             Remark(f"kl {term.kind}", TERMS[term.kind].mistake)]
    count = term.count.removesuffix(" of its own")
    if term.place in ("trained", "answer") and count != formula.count and COUNTS[count].mistake:
        wrong.append(Remark(f"{name} {count}", f"{said}: {COUNTS[count].mistake}"))
    if term.factor < 0:
        effect = "lowers the entropy" if term.is_entropy else (
            "drives the policy away from the reference")
        wrong.append(Remark(f"{name} reversed", f"{said} has the wrong sign: it {effect}."))
    if term.kind == "k1" and not term.reference:
        wrong.append(Remark("kl k1", "The KL is k1 in the loss: its gradient pushes all tokens "
                                     "down alike, and its mean is 0."))
    return wrong


def unusual(found: Found) -> list[Remark]:
    """What is sometimes meant, and often not."""
    formula, said = found.formula, codes(found)
    seen = [Remark(code, sentence) for code, sentence in UNUSUAL_CODES.items() if code in said]
    temperature = formula.lens.temperature
    if temperature != 1 and "lens" in formula.sure:
        seen.append(Remark(f"temperature {temperature:g}", "The log-probs are those at temperature "
                           f"{temperature:g}, so the old ones have to be that, too."))
    for name, line in lines_of(formula):
        seen.append(Remark(name, line.unusual))
        if is_wide(formula, name):
            seen.append(Remark(name, "Outside wide bounds there is no gradient, whichever the "
                                     "sign, as in IcePop."))
    if "credit" in formula.sure and formula.finish.startswith(("whitened", "over tokens")):
        if formula.scale != "none":
            seen.append(Remark("whitened again", "The advantage is whitened again, after it was "
                               "divided by a std."))
        elif formula.finish.startswith("over") and not formula.groups and formula.centre != "raw":
            # of the answers alone the mean is 0 already
            seen.append(Remark("dead pushed", "Groups with equal rewards are pushed, although they "
                                              "say nothing."))
    if "clip" in formula.ratio and "ratio" in formula.sure and 0 < formula.bounds[0] < NARROW[0]:
        seen.append(Remark(formula.ratio, f"The lower bound is {formula.bounds[0]:g}, far below 1: "
                                          "a clip of 0.2 has the lower bound 0.8."))
    if formula.ratio == "cispo" and "ratio" in formula.sure and formula.bounds[1] < 1:
        seen.append(Remark("cispo", f"The weight is at most {formula.bounds[1]:g}, which is below "
                                    "1, so hardly a token's ratio counts."))
    references = {term.reference for term in formula.terms if not term.is_entropy}
    if references == {" to old"}:
        seen.append(Remark("kl to old", "A KL holds the model at the one that sampled, and none at "
                                        "the reference."))
    return [remark for remark in dict.fromkeys(seen) if remark.sentence]


def sentences(found: Found) -> list[str]:
    """The mistakes, what is unusual, the choices, and then how far the formula holds."""
    wrong, seen = mistakes(found), unusual(found) if not found.is_zero else []
    said = [f"Mistakes: {len(wrong) or 'none seen'}."]
    if not wrong and not found.understood:
        said = ["Not understood. Mistakes: none seen in what is."]
    said += [f"{number}. {remark}" for number, remark in enumerate(wrong, 1)]
    if seen:
        said.append("Unusual, check that you want it:")
        said += [f"- {remark}" for remark in seen]
    if not found.is_zero:
        said += choices(found)
        return said + verdict(found)
    return [*said, "So it is where each answer meets the advantages of all, by their shape: "
            "those of of_log_probs are (B, T), and (B,) with per_token=False."]


def choices(found: Found) -> list[str]:
    """The parts of the formula: those that are sure, and the nearest ones if they are near."""
    formula, said = found.formula, []
    if found.has_reward:
        of_reward = "" if found.understood else ", as far as it depends on the reward"
        parts = [("credit", "Advantage", about_advantage(formula)),
                 ("credit", "Counting", about_count(formula))]
        if formula.choice or formula.kinds != ANSWER:
            parts.append(("tokens", "Tokens", about_tokens(formula)))
        if formula.shape:
            parts.append(("shape", "Weight of a token", about_shape(formula)))
        parts.append(("ratio", "Ratio", about_ratio(formula)))
        for question, name, about in parts:
            if question in formula.sure:
                said.append(f"{name}{of_reward}: {about}.")
            elif found.is_near:
                said.append(f"{name} (nearest): {about}.")
    return said + [about_term(term) for term in formula.terms]


def about_term(term: Term) -> str:
    size, name = f"{term.factor:.4g} times", term.count.removesuffix(" of its own")
    said = f"Entropy bonus: {size} the entropy"
    if not term.is_entropy:
        reference = "the old model" if term.reference else "the reference"
        said = f"KL to {reference}: {size} {term.kind}"
    said += f"; {COUNTS[name].words.format(constant=1)}"
    return said + (" (by the number of its own tokens)." if name != term.count else ".")


def verdict(found: Found) -> list[str]:
    said = [f"Note: {note}." for note in found.notes]
    if found.understood:
        size = max(found.unexplained, 1e-16)
        return [*said, f"This formula gives the gradient of new batches to {size:.0e} of its size."]
    worst = sorted(found.differs, key=found.differs.get, reverse=True)
    is_everywhere = "ordinary batches" in worst
    on = "; ".join(f"{percent(found.differs[name])} with {name}"
                   for name in (worst[:4] if is_everywhere else worst))
    on += f"; {len(worst)} kinds in all, ordinary batches among them" if is_everywhere else ""
    if not on:
        return [*said, "Not understood."]
    nearest = "The nearest formula is the one above" if found.is_near else (
        "No formula of the tables is near")
    said.append(f"Not understood. {nearest}: of the gradient differs {on}.")
    said += what_was_measured(found)
    if is_everywhere and found.differs[worst[0]] < 1e-3:  # float16 has 11 bits
        said.append("Such a difference may be rounding: an advantage of numpy or of a short float.")
    return said


def what_was_measured(found: Found) -> list[str]:
    """The pushes of answers with the rewards 1, 0.5, 0 and 0, by the ratio of all tokens."""
    if found.is_near or not found.measured:
        return []
    said = ["What was measured: the push of an answer, summed over its tokens and times the number "
            "of answers, in groups with the rewards 1, 0.5, 0 and 0."]
    for ratio, pushes in found.measured:
        numbers = ", ".join(f"{push:+.3g}" for push in pushes)
        said.append(f"  - where the ratio of every token is {ratio}: {numbers}.")
    return said


def percent(share: float) -> str:
    return "more than 200%" if share > 2 else f"{share:.1%}" if share > 5e-4 else f"{share:.0e}"


def about_advantage(formula: Formula) -> str:
    given = {"among": GROUPS[formula.groups].words, "epsilon": f"{formula.epsilon:g}"}
    said = "the reward"
    if formula.centre != "raw":
        said += f" minus {CENTRES[formula.centre].words.format(**given)}"
    if formula.scale != "none":
        said += f", divided by {SCALES[formula.scale].words.format(**given)}"
    if formula.finish:
        said += f", then {FINISHES[formula.finish].words}"
    return said


def about_count(formula: Formula) -> str:
    size = abs(formula.factor)
    said = COUNTS[formula.count].words.format(constant=f"{1 / size:.6g}" if size else "")
    said += ", by the tokens that are trained" if formula.length else ""
    if formula.count != "constant" and abs(size - 1) > 1e-6:
        said += f", times {size:.6g}"
    return said


def about_tokens(formula: Formula) -> str:
    here = "all of an answer" if formula.kinds == ANSWER else ", ".join(sorted(formula.kinds))
    return here + (f"; of these: {CHOICES[formula.choice].words}" if formula.choice else "")


def about_shape(formula: Formula) -> str:
    return SHAPES[formula.shape].words + ("" if formula.is_detached else ", not detached")


def about_ratio(formula: Formula) -> str:
    is_of_answer = formula.ratio.startswith(("gspo", "summed", "vespo"))
    return RATIOS[formula.ratio].words.format(
        of="an answer" if is_of_answer else "a token", bounds=about_bounds(*formula.bounds[:2]),
        most=formula.bounds[2] if len(formula.bounds) > 2 else 0)


def about_bounds(low: float = -math.inf, high: float = math.inf) -> str:
    if math.isinf(low):
        return f"at most {high:.6g}"
    if math.isinf(high):
        return f"at least {low:.6g}"
    return f"[{low:.6g}, {high:.6g}]"
