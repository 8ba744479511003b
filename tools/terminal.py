"""What a model wrote, in a terminal: tokens shaded by their probability, in rows that fit.

    first 7 * 3 = 21 wrong       tokens with their probabilities, here without colour:
    -> first·47% 7 * 3·46% = 21 wrong·37%
"""
import codecs
import itertools
import os
import re
import shutil
import sys
import unicodedata
from dataclasses import dataclass

from harness.program import visible

# A token less likely than the limit gets this style, in numbers of ANSI escape sequences: 48;5 is
# the colour behind the text and 38;5 the one in it, of a terminal's 256. Sure tokens stay plain.
SHADES = ((0.1, "48;5;26;38;5;231", "below 10%"), (0.5, "48;5;75;38;5;16", "10 to 50%"),
          (0.9, "48;5;153;38;5;16", "50 to 90%"), (float("inf"), "", "90% and more"))
MARKED_BELOW = 0.5  # where there is no colour
BOLD, GREEN, RED = "1", "1;32", "1;31"
WIDEST = 100
WORD = re.compile(r"\n| *[^ \n]+")
Letters = list[tuple[str, str]]  # characters, each with its style


@dataclass(frozen=True)
class Screen:
    width: int
    colour: bool

    @classmethod
    def of_stdout(cls) -> "Screen":
        width = shutil.get_terminal_size((WIDEST, 24)).columns
        wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        return cls(max(20, min(width, WIDEST)), sys.stdout.isatty() and wanted)

    def styled(self, text: str, style: str) -> str:
        return f"\033[{style}m{text}\033[0m" if self.colour and style else text


def put(line: str) -> None:
    """Print a line whose escape sequences are ours. stdout itself spells them out
    (harness/program.py): all that a model wrote goes through `visible` first."""
    print(line, file=getattr(sys.stdout, "stream", sys.stdout))


def token_texts(pieces: list[bytes]) -> list[str]:
    """The text of each token. A character spread over several tokens stands at its last one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts = [decoder.decode(piece) for piece in pieces]
    texts[-1] += decoder.decode(b"", final=True)
    return [visible(text).replace("\t", "\\t") for text in texts]


def shaded(texts: list[str], probabilities: list[float], screen: Screen) -> Letters:
    """The characters of an answer. The space before a word stays plain: so words stand apart."""
    letters = []
    for text, probability in zip(texts, probabilities):
        style = style_of(probability)
        if not screen.colour:
            text = marked(text, probability)
        letters += [(letter, "" if place == 0 and letter == " " and len(text) > 1 else style)
                    for place, letter in enumerate(text)]
    return letters


def style_of(probability: float) -> str:
    return next(style for limit, style, _ in SHADES if probability < limit)


def marked(text: str, probability: float) -> str:
    """An unsure token with its probability behind it, before the line break if it has one."""
    if probability >= MARKED_BELOW:
        return text
    body = text.rstrip("\n")
    percent = f"{probability:.0%}" if probability >= 0.005 else "<1%"
    return f"{body}\u00b7{percent}{text[len(body):]}"


def wrapped(letters: Letters, width: int) -> list[Letters]:
    """Rows no wider than that, broken before words and where the model broke them."""
    rows = [[]]
    for word in WORD.finditer("".join(letter for letter, _ in letters)):
        if word[0] == "\n":
            rows.append([])
        else:
            add_word(rows, letters[word.start():word.end()], width)
    return rows


def add_word(rows: list[Letters], word: Letters, width: int) -> None:
    """Put it on the last row or begin a new one; cut what is longer than a row."""
    if rows[-1] and columns(rows[-1]) + columns(word) > width:
        rows.append([])
        word = list(itertools.dropwhile(lambda letter: letter[0] == " ", word))
    if columns(word) <= width:
        rows[-1] += word
        return
    for letter in word:
        if columns(rows[-1]) + columns([letter]) > width:
            rows.append([])
        rows[-1].append(letter)


def columns(letters: Letters) -> int:
    """How wide a terminal shows them: Chinese takes two columns, an accent of its own none."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter, _ in letters)
    above_others = sum(unicodedata.category(letter) in ("Mn", "Me") for letter, _ in letters)
    return len(letters) + wide - above_others


def print_letters(letters: Letters, screen: Screen, indent: str) -> None:
    for row in wrapped(letters, screen.width - len(indent)):
        runs = itertools.groupby(row, key=lambda letter: letter[1])
        line = "".join(screen.styled("".join(letter for letter, _ in run), style)
                       for style, run in runs)
        put(f"{indent}{line}")


def print_text(text: str, screen: Screen, style: str = "", indent: str = "") -> None:
    print_letters([(letter, style) for letter in visible(text)], screen, indent)


def print_legend(screen: Screen) -> None:
    if screen.colour:
        shades = [screen.styled(f" {words} ", style) for _, style, words in SHADES]
        put("probability of a token: " + " ".join(shades))
    else:
        put("\u00b713% behind a token is its probability, written where it is below "
              f"{MARKED_BELOW:.0%}")
