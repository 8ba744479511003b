"""The sentences and the code words in which tools/formula.py says what it has found."""
import math
import re
from difflib import get_close_matches
from typing import Any

from engine.errors import UserError
from tools.helpers.formula_advantages import ORDERS
from tools.helpers.formula_batches import END, PAD
from tools.helpers.formula_measured import Formula
from tools.helpers.formula_ratio_words import name_of
from tools.helpers.formula_shapes import FLAT
from tools.helpers.formula_terms import KINDS, OF_ANSWER, Counted, Term

PLACES = {"prompt": "the prompt", "prompt_last": "the last token of the prompt",
          "first": "the first token of an answer", "middle": "the middle of an answer",
          "end": "the end token of an answer",
          "cut": "the last token of an answer that was cut at the limit",
          "padding_first": "the first padding token", "padding_rest": "the rest of the padding",
          "unfinished": "answers that were cut at the limit"}
ANSWER = ("first", "middle", "end", "cut", "unfinished")
OUTSIDE = ("prompt", "prompt_last", "padding_first", "padding_rest")
VOCABULARY = [  # what --expect takes
    r"(batch )?z n(-1)?( [\d.e-]+)?( root| max)?", "mean", "batch mean", "leave one out", "raw",
    "token", "answer", "group", "constant", "sum", r"micro-batch \d+", "no ratio", "ratio",
    "no clip",
    r"(gspo |gmpo )?clip( [\d.]+| none){2}( dual [\d.]+)?",
    r"(gspo )?(cispo|mask)( [\d.]+| none){2}", r"sapo [\d.]+ [\d.]+", r"vespo( [\d.]+){4}",
    r"kl (k1|k2|k3) [\d.e-]+", "no kl", r"entropy [\d.e-]+", "no entropy",
    r"temperature [\d.]+",
    r"no (first|last) \d+",
    r"(highest|lowest) (entropy|probability) [\d.]+ of (batch|answer)", r"shift -?\d", "end",
    "understood"]


def codes(formula: Formula) -> set[str]:
    """All that was found, in the words of --expect."""
    if formula.is_zero:
        return {"zero"}
    found = codes_of_policy(formula) | codes_of_tokens(formula.kinds)
    found |= {formula.selection.code} if formula.selection else set()
    found |= {code_of_term(term) for term in formula.terms}
    if formula.terms and other_places(formula.term_kinds):
        found.add("kl elsewhere")
    if formula.entropy is not None and other_places(formula.entropy_kinds):
        found.add("entropy elsewhere")
    if formula.temperature:
        found |= {f"temperature {formula.temperature:g}", f"shift {formula.shift}"}
        found |= {f"without {listed(formula.absent)}"} if formula.absent else set()
    if formula.entropy is not None:
        found.add(f"entropy {shown(formula.entropy.factor)}")
    if formula.is_complete:
        found.add("understood")
        found |= {"no kl"} if not formula.terms and not formula.advantage.cost else set()
        found |= set() if formula.entropy else {"no entropy"}
    return found


def codes_of_policy(formula: Formula) -> set[str]:
    found = set()
    if formula.advantage is not None and formula.count is not None:
        found |= {formula.advantage.code, *codes_of_count(formula.count)}
    if formula.shape is not None and formula.shape is not FLAT:
        found.add(formula.shape.code)
    if formula.weighs_by_entropy:
        found.add("entropy undetached")
    if formula.ratio is not None:
        found.add(name_of(formula.ratio)[0])
        if name_of(formula.ratio)[0] in ("no ratio", "ratio"):
            found.add("no clip")
    found |= {f"old misplaced {formula.misplaced}"} if formula.misplaced else set()
    if math.isnan(formula.dead) and formula.advantage is not None:
        found.add("dead nan")
    return found


def codes_of_tokens(kinds: dict[str, str]) -> set[str]:
    if not kinds:
        return set()
    if any(how == "some" for how in kinds.values()):
        return {"some tokens"}
    has = {kind for kind, how in kinds.items() if how == "all"}
    if "first" not in has and "padding_first" in has and "padding_rest" not in has:
        return {"mask late"}
    if "prompt_last" in has and "prompt" not in has and "end" not in has:
        return {"mask early"}
    found = set()
    found |= {"prompt"} if "prompt" in has else set()
    found |= {"padding"} if "padding_rest" in has else set()
    found |= {"end"} if "end" in has else {"no end"}
    if "unfinished" not in has:
        found.add("no unfinished")
    elif "cut" not in has:
        found.add("no last token")
    if "first" not in has:
        found.add("no first")
    return found


def codes_of_count(count: Counted) -> set[str]:
    code = count.count.code
    factor = abs(count.factor)
    sizes = count.sizes
    if code == "flat" and sizes.answers == -1 and sizes.cost == 3 and abs(factor - 1) < 1e-6:
        code = "answer sum"
    elif code == "flat" and not sizes.cost:
        code = "sum"
    elif code == "flat" and sizes.answers == -1 and sizes.cost == 3:
        code, factor = f"constant {shown(1 / factor)}", 1.0
    elif code.startswith("over ") and sizes.answers == -1 and sizes.cost == 3:
        code = "constant " + code
    elif sizes.cost:
        code += " " + sizes.words()
    found = {code, code.split()[0] if code.startswith("constant") else code}
    if abs(factor - 1) > 1e-6:
        found.add(f"times {shown(factor)}")
    if count.factor < 0:
        found.add("sign reversed")
    return found


def code_of_term(term: Term) -> str:
    if term.kind == "constant":
        return f"constant push {shown(term.weight.factor)}"
    if term.kind in OF_ANSWER:
        return f"{term.kind} {shown(-term.weight.factor)}"
    source = " to old" if term.source == "old" else ""
    factor = -term.weight.factor if term.kind == "k1" else term.weight.factor
    if term.with_ratio and term.kind == "k2":  # the derivative of ratio * k3
        return f"kl k3 {shown(factor)}{source} with ratio"
    bounds = f" between {term.low:.3g} and {term.high:.3g}" if is_bounded(term) else ""
    return f"kl {term.kind} {shown(factor)}{source}{bounds}" + " with ratio" * term.with_ratio


def is_bounded(term: Term) -> bool:
    return min(-term.low, term.high) < math.inf


def shown(value: float) -> str:
    return f"{float(f'{value:.6g}'):g}"


def sentences(formula: Formula) -> list[str]:
    if formula.is_zero:
        return ["The gradient is exactly zero, on every batch that was tried: this loss trains "
                "nothing."]
    said = []
    if formula.temperature:
        said.append(about_lens(formula))
    said += about_tokens(formula)
    if formula.advantage is not None and formula.count is not None:
        said += about_policy(formula)
    if formula.ratio is not None:
        said.append(f"Ratio: {name_of(formula.ratio)[1]}.")
    if formula.misplaced:
        way = "early" if formula.misplaced > 0 else "late"
        said.append(f"Ratio: that of two different tokens. old_log_prob is read "
                    f"{abs(formula.misplaced)} place(s) too {way}.")
    said += [about_term(term) for term in formula.terms]
    if formula.terms:
        said += other_places(formula.term_kinds)
    if formula.entropy is not None:
        said += [about_entropy(formula.entropy), *other_places(formula.entropy_kinds)]
    if formula.weighs_by_entropy:
        said.append("Entropy: the gradient flows through an entropy that weighs the reward's term: "
                    "it is not detached.")
    said += about_parts(formula)
    said += [f"Note: {note}." for note in formula.notes]
    said += [f"Not understood: {what}." for what in formula.not_understood]
    said.append(about_the_whole(formula))
    return said


def about_lens(formula: Formula) -> str:
    shift = {1: "the logits of a place predict the next token",
             0: "the logits of a place are taken for the token that stands there, and not for the "
                "next one: the shift is missing",
             2: "the logits of a place are taken for the token after the next: shifted twice"}
    without = f" over the vocabulary without {listed(formula.absent)}" if formula.absent else ""
    return (f"Log-probs: at temperature {formula.temperature:g}{without}; "
            f"{shift[formula.shift]}.")


def listed(tokens: tuple[int, ...]) -> str:
    names = {END: "batch.end_id", PAD: "batch.pad_id"}
    return ", ".join(names.get(token, f"token {token}") for token in tokens)


def about_tokens(formula: Formula) -> list[str]:
    kinds = formula.kinds
    if not kinds:
        return []
    if formula.selection:
        return [f"Tokens: not all of an answer have a gradient: {formula.selection.words}."]
    code = codes_of_tokens(kinds)
    if "mask late" in code:
        return ["Tokens: the mask is one place late. The first token of an answer has no gradient, "
                "and the token after its end has one."]
    if "mask early" in code:
        return ["Tokens: the mask is one place early. The last token of the prompt has a gradient, "
                "and the last one of the answer has none."]
    missing = [PLACES[kind] for kind in ANSWER if kinds.get(kind) == "none"]
    added = [PLACES[kind] for kind in OUTSIDE if kinds.get(kind) == "all"]
    partly = [PLACES[kind] for kind, how in kinds.items() if how == "some"]
    if not (missing or added or partly):
        return ["Tokens: all tokens of an answer have a gradient, its end included; the prompt and "
                "the padding have none."]
    said = []
    if missing:
        said.append(f"Tokens: without a gradient: {', '.join(missing)}.")
    if added:
        said.append(f"Tokens: with a gradient that they should not have: {', '.join(added)}.")
    if partly:
        said.append(f"Tokens: only some have a gradient: {', '.join(partly)}.")
    return said


def about_policy(formula: Formula) -> list[str]:
    count = formula.count
    said = [f"Advantage: {formula.advantage.words()}."]
    if formula.advantage.cost:
        said.insert(0, f"Reward: before all else, {formula.advantage.rate:g} times "
                       f"{formula.advantage.cost.words} is taken off the reward of an answer.")
    if formula.advantage.grouping == "mixed":
        said.append("Groups: they are mixed. Each answer is compared with answers to other "
                    "problems.")
    if formula.advantage.grouping.startswith("rows"):
        rows = formula.advantage.grouping.split()[1]
        said.append(f"Groups: each {rows} rows after each other are taken for a group, whatever "
                    "batch.group says.")
    if formula.advantage.order:
        said.append(f"Rows: {ORDERS[formula.advantage.order]}.")
    counting = f"Counting: {count.words()}"
    factor = abs(count.factor)
    if count.count.code == "flat" and not count.sizes.cost:
        counting = "Counting: the sum over all tokens, divided by nothing"
    if codes_of_count(count) & {"answer sum"}:
        counting = "Counting: the sum over an answer's tokens, and the mean over answers"
    elif count.count.code == "flat" and count.sizes.answers == -1 and count.sizes.cost == 3:
        counting = f"Counting: every token counts 1 / (answers * {shown(1 / factor)})"
        factor = 1.0
    if abs(factor - 1) > 1e-6:
        counting += f", times {shown(factor)}"
    said.append(counting + ".")
    if formula.shape is not FLAT:
        said.append(f"Weights: {formula.shape.words}.")
    direction = "good answers are made less probable: it is reversed" if count.factor < 0 else \
        "good answers are made more probable"
    said.append(f"Sign: {direction}.")
    said.append(about_dead(formula))
    return said


def about_dead(formula: Formula) -> str:
    if math.isnan(formula.dead):
        return "Dead groups: equal rewards give a gradient that is not finite."
    dead = "get nothing" if formula.dead < 1e-6 else \
        f"get up to {formula.dead:.3g} times the largest push of the others"
    return (f"Dead groups: answers with equal rewards {dead}, in float32. If one reward is "
            f"0.000001 higher, the largest push is {formula.nearly_dead:.3g} times that of the "
            "others.")


def about_term(term: Term) -> str:
    counted = term.weight.words()
    size, way = abs(term.weight.factor), "down" if term.weight.factor < 0 else "up"
    if term.kind == "constant":
        return (f"Constant push: whatever the reward, every token's log-prob is pushed {way} with "
                f"weight {shown(size)} ({counted}). A bonus on -log p of the sampled token and a "
                "constant in the advantage both do this, and a gradient cannot tell them apart.")
    if term.kind in OF_ANSWER:
        what = {"length": "number of its tokens", "sum of k1": "sum of log p - "
                "batch.reference_log_prob over its tokens", "mean of k1": "mean of log p - "
                "batch.reference_log_prob over its tokens"}[term.kind]
        return (f"Penalty: whatever the reward, all tokens of an answer are pushed {way} with "
                f"weight {shown(size)} times the {what} ({counted}), as where that is taken off "
                "its advantage.")
    if term.kind == "k1":
        return (f"KL: k1, log p - batch.reference_log_prob, weight {shown(-term.weight.factor)} "
                f"({counted}). Its gradient does not depend on the reference: every token is "
                f"pushed {way}, whatever its log-prob.")
    if term.with_ratio and term.kind == "k2":
        return (f"KL: k3 times the ratio of new to old probability, weight "
                f"{shown(term.weight.factor)} ({counted}). Its gradient is that of k2 times the "
                "ratio.")
    source = "batch.reference_log_prob" if term.source == "reference" else "batch.old_log_prob"
    return (f"KL: {term.kind}, {KINDS[term.kind][0]}, with d = {source} - log p, weight "
            f"{shown(term.weight.factor)} ({counted}).{about_bounds(term)}"
            + " A k1 that is taken off each token's own advantage has this gradient, too."
            * (term.kind == "k2" and term.source == "reference"))


def about_bounds(term: Term) -> str:
    if not is_bounded(term):
        return ""
    return (f" It is clamped: where d is not between {term.low:.3g} and {term.high:.3g}, it has no "
            "gradient.")


def other_places(kinds: frozenset[str]) -> list[str]:
    """What is said of a term that acts at other tokens than those of the answers."""
    added = [PLACES[kind] for kind in OUTSIDE if kind in kinds]
    missing = [PLACES[kind] for kind in ANSWER if kind not in kinds]
    said = []
    if added:
        said.append(f"This term acts at tokens outside the answers, too: {', '.join(added)}.")
    if missing:
        said.append(f"This term does not act at {', '.join(missing)}.")
    return said


def about_entropy(entropy: Counted) -> str:
    way = "raised" if entropy.factor > 0 else "lowered"
    return (f"Entropy: that of the whole distribution is {way}, with weight "
            f"{shown(abs(entropy.factor))} ({entropy.words()}).")


def about_parts(formula: Formula) -> list[str]:
    said = []
    for parts, (by_sum, by_mean) in formula.parts.items():
        text = f"In {parts} parts: "
        if min(by_sum, by_mean) < 1e-6:
            way = "sum" if by_sum < by_mean else "mean"
            text += f"the {way} of the parts' gradients is that of the whole batch."
        else:
            text += ("neither the sum nor the mean of the parts' gradients is that of the whole "
                     f"batch (the mean is {by_mean:.1%} off, the sum {by_sum:.1%}).")
        said.append(text)
    if formula.order == "other":
        said.append("Order of rows: it matters. Where the rows of a group do not lie together, the "
                    "gradient is another one.")
    if formula.order == "refused":
        said.append("Order of rows: a batch whose groups do not lie together is refused.")
    if formula.loses_end:
        said.append("Padding that is the end token: then the end of an answer has no gradient.")
    return said


def about_the_whole(formula: Formula) -> str:
    if formula.is_complete:
        return (f"This formula gives the gradient of new batches to {formula.unexplained:.0e} of "
                f"its size ({formula.digits}).")
    return f"Of the gradient of new batches, {formula.unexplained:.2%} is not explained."


def as_json(formula: Formula) -> dict[str, Any]:
    return {"codes": sorted(codes(formula)), "sentences": sentences(formula),
            "not_understood": formula.not_understood, "unexplained": formula.unexplained,
            "digits": formula.digits, "temperature": formula.temperature, "shift": formula.shift,
            "tokens": formula.kinds,
            "advantage": formula.advantage.code if formula.advantage else None,
            "count": sorted(codes_of_count(formula.count)) if formula.count else None,
            "ratio": name_of(formula.ratio)[0] if formula.ratio else None,
            "no_ratio": formula.ratio is not None and name_of(formula.ratio)[0] == "no ratio",
            "kl": [code_of_term(term) for term in formula.terms],
            "parts": formula.parts, "order_of_rows": formula.order}


def unmet(formula: Formula, expected: str) -> list[str]:
    """The clauses of --expect that do not hold."""
    found = codes(formula)
    missing = []
    for clause in filter(None, (part.strip() for part in expected.split(","))):
        check_clause(clause)
        holds = clause in found
        if clause.startswith(("z ", "batch z ")):  # the epsilon may be left out
            holds = any(same_clause(clause, code) for code in found)
        else:
            holds = holds or any(same_number(clause, code) for code in found)
        if not holds:
            missing.append(clause)
    return missing


def check_clause(clause: str) -> None:
    if not any(re.fullmatch(pattern, clause) for pattern in VOCABULARY):
        plain = [pattern for pattern in VOCABULARY if re.fullmatch("[a-z -]+", pattern)]
        near = get_close_matches(clause, plain, 1)
        raise UserError(f"--expect does not know {clause!r}"
                        f"{f', did you mean {near[0]}?' if near else '.'} It takes such clauses as "
                        "z n-1 1e-4, mean, leave one out, token, answer, group, constant, "
                        "clip 0.2 0.28, no clip, kl k3 0.04, no kl, no entropy, temperature 1, "
                        "end, understood")


def same_clause(clause: str, code: str) -> bool:
    """z n-1 holds for z n-1 1e-06; numbers are compared as numbers."""
    words, others = clause.split(), code.split()
    if len(words) < len(others) and words == others[:len(words)]:
        return True
    return same_number(clause, code)


def same_number(clause: str, code: str) -> bool:
    words, others = clause.split(), code.split()
    return len(words) == len(others) and all(map(same_word, words, others))


def same_word(word: str, other: str) -> bool:
    try:
        return math.isclose(float(word), float(other), rel_tol=1e-6)
    except ValueError:
        return word == other
