"""Tokens in a terminal, each shaded by a number that it has, such as its probability.

    first 7 * 3 = 21 wrong       tokens with their probabilities, here without colour:
    -> first[47%] 7 * 3[46%] = 21 wrong[37%]
"""
import textwrap
from collections.abc import Callable, Sequence

from lab.harness.screen import has_colour, printable, styled

# A token whose number is below the limit gets this style, in numbers of ANSI escape sequences: 48;5
# is the colour behind the text and 38;5 the one in it, of a terminal's 256.
Shades = tuple[tuple[float, str], ...]
GREY = "38;5;245"  # of what an environment wrote


def shaded(texts: list[str], numbers: Sequence[float | None], shades: Shades,
           mark: Callable[[float], str]) -> str:
    """The tokens, each in the colour of its number; what an environment wrote has none, and is
    grey. A terminal without colours gets `mark(number)` after the token instead, before its line
    break if it has one. Control characters are written out."""
    result = ""
    for text, number in zip(map(printable, texts), numbers):
        body = text.rstrip("\n")
        if number is None:
            result += (styled(body, GREY) if has_colour() else body) + text[len(body):]
            continue
        style = next(style for limit, style in shades if number < limit)
        shown = styled(body, style) if has_colour() else f"{body}{mark(number)}"
        result += shown + text[len(body):]
    return result


def legend(shades: Shades) -> str:
    """The meaning of the colours; empty where there are none."""
    if not has_colour():
        return ""
    *below, (_, most) = shades
    colours = [styled(f" below {limit:g} ", style) for limit, style in below]
    return " ".join([*colours, styled(" more ", most)])


def one_line(text: str) -> str:
    return textwrap.shorten(text, 400, placeholder=" ...")
