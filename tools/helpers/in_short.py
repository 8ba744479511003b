"""What happened to a token, in a few sentences: its push, its change and its credit together. They
are the first that tools.follow says of it.

Was a push deserved? A push up was if the token raised the expected reward, which is a credit above
0, and a push down was if the token lowered it. Whether the credit is above or below 0 is said only
if its whole 95% interval is.
"""
import math

from analysis.answers import ShownAnswer
from engine.tokens import KINDS
from tools.helpers.credit_of_token import MOST_CONTINUATIONS, CreditOfToken

HARDLY = 0.005  # a push that is smaller would be rounded to 0.00


def in_short(answer: ShownAnswer, t: int, credit: CreditOfToken | None) -> str:
    """`credit` is None where it was not measured."""
    push = answer["values"]["push"][t]
    token = f"the {KINDS[answer['kind'][t]]} {answer['texts'][t]!r}"
    if push is None:  # where sum p^2 is not on record
        return f"In short: how {token} was pushed is not known from this record."
    direction = ""  # of the push
    if not answer["account"]["dropped"] and abs(push) >= HARDLY:
        direction = "up" if push > 0 else "down"
    known = (f"In short: {token} {about_push(answer, t, direction)}"
             f"{about_change(answer, t, direction)}")
    return f"{known} {about_credit(credit, direction)}" if credit else known


def about_push(answer: ShownAnswer, t: int, direction: str) -> str:
    if answer["account"]["dropped"]:
        return "was not pushed, because the step left its answer out"
    for factor in ("advantage", "weight"):
        if not answer["values"][factor][t]:
            return f"was not pushed, because its {factor} is 0"
    push = answer["values"]["push"][t]
    if not direction:
        return f"was hardly pushed ({push:+.2g})"
    return f"was pushed {direction} ({push:+.2f})"


def about_change(answer: ShownAnswer, t: int, direction: str) -> str:
    """The end of a sentence about a push."""
    values = answer["values"]
    if answer["account"]["dropped"]:
        return "."
    change = values["change"][t] if "change" in values else None
    if change is None:
        return ". How its probability then changed was not measured."
    log_prob = values["log-prob"][t]
    before, after = f"{math.exp(log_prob):.4g}", f"{math.exp(log_prob + change):.4g}"
    if before == after:
        return f", and the step left its probability at {before}."
    moved = "rose" if change > 0 else "fell"
    joined = "but" if (direction, moved) in (("up", "fell"), ("down", "rose")) else "and"
    return f", {joined} in the step its probability {moved} from {before} to {after}."


def about_credit(credit: CreditOfToken, direction: str) -> str:
    low, high = credit.interval
    interval = f"{low:+.3f} to {high:+.3f}"
    if low <= 0 <= high:
        question = f"the push {direction} was deserved" if direction else "it deserved a push"
        said = (f"The 95% interval of its credit includes 0 ({interval}), so it is open whether "
                f"{question}.")
        if 4 * credit.k > MOST_CONTINUATIONS:
            return said
        return f"{said} With --credit {4 * credit.k} the interval would be half as wide."
    effect, deserved = ("raised", "up") if low > 0 else ("lowered", "down")
    if direction:
        was = "was" if direction == deserved else "was not"
        judgement = f"the push {direction} {was} deserved"
    else:
        judgement = f"a push {deserved} would have been deserved"
    return (f"The token {effect} the expected reward: the whole 95% interval of its credit is "
            f"{'above' if low > 0 else 'below'} 0 ({interval}). So {judgement}.")
