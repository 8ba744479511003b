"""One answer of the last recorded step, token by token, each shaded by the size of its gradient."""
import textwrap
from pathlib import Path

import numpy as np
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Rectangle

from analysis.answers import answer_of
from analysis.plots import BLUE, DPI, plt, save
from analysis.sizes import lay_flat, size_label
from analysis.tally import Tally
from harness.credit_file import read_columns

WIDTH = 900 / DPI          # inches: 900 pixels
MONOSPACE = FontProperties(family="DejaVu Sans Mono", size=10)
CHARACTER = 0.602 * 10 / 72  # inches: how far this font goes on with every character
ROW, MARGIN = 0.25, 0.15     # inches
COLUMNS = int((WIDTH - 2 * MARGIN) / CHARACTER)
MOST_PROMPT_ROWS, MOST_ROWS = 12, 40
RETURN, DOTS = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", "\N{HORIZONTAL ELLIPSIS}"


def draw_answer(tally: Tally, folder: Path) -> tuple[Path, str]:
    step = tally.steps[-1]
    tokens = lay_flat(read_columns(tally.run, step))
    answer = answer_of(tokens, tally.tokenizer, step, choose_answer(tokens))
    sizes = answer["values"]["gradient size"]
    rows = lay_out(answer["texts"], sizes)
    cut = len(rows) > MOST_ROWS
    prompt = wrapped(answer["prompt"])
    if len(prompt) > MOST_PROMPT_ROWS:
        prompt = [DOTS, *prompt[1 - MOST_PROMPT_ROWS:]]
    picture = Picture(len(prompt) + min(len(rows), MOST_ROWS) + cut + 3)
    picture.write(heading(answer, tokens), weight="bold")
    for line in prompt:
        picture.write(line, color="#6a6a6a")
    picture.skip(0.5)
    largest = max(sizes) or 1.0
    for row in rows[:MOST_ROWS]:
        picture.write_shaded(row, largest)
    if cut:
        picture.write(DOTS, color="#6a6a6a")
    picture.skip(0.5)
    picture.write_key(size_label(tally.final), largest)
    return save(picture.figure, folder, "answer", caption(answer, tally, cut))


def choose_answer(tokens: dict) -> int:
    """A solved answer from a group with different rewards, if there is one; of several the one of
    median length, of equally long ones the first."""
    reward, group = tokens["reward"], tokens["group"]
    spread = np.array([np.ptp(reward[group == g]) > 0 for g in group])
    solved = tokens["reward_answer"] > 0
    everything = np.ones(len(group), bool)
    for condition in (solved & spread, spread, everything):
        candidates = np.flatnonzero(condition)
        if len(candidates):
            in_order = candidates[np.argsort(tokens["length"][candidates], kind="stable")]
            return int(in_order[(len(in_order) - 1) // 2])


def heading(answer: dict, tokens: dict) -> str:
    members = tokens["reward"][tokens["group"] == answer["group"]]
    return (f"step {answer['step']}: reward {answer['reward']:.3g}, mean over the {len(members)} "
            f"answers to this prompt {members.mean():.3g}")


def caption(answer: dict, tally: Tally, cut: bool) -> str:
    kind = "A solved answer" if answer["answer"] > 0 else "An answer"
    return (f"{kind} of step {answer['step']} (problem {answer['group']}, answer "
            f"{answer['episode']}), below its prompt. The darker a token, the larger its gradient "
            f"{size_label(tally.final)}; full colour is the largest of this answer"
            f"{', of which only the beginning is drawn' if cut else ''}.")


def lay_out(texts: list[str], sizes: list[float]) -> list[list[tuple[int, str, float]]]:
    """Rows of (column, text, size). A token that does not fit goes to the next row; one with a line
    break in it ends its row; one longer than a row is cut into pieces."""
    rows, column = [[]], 0
    for text, size in zip(texts, sizes):
        for piece in pieces_of(text):
            if column + len(piece) > COLUMNS:
                rows.append([])
                column = 0
            rows[-1].append((column, piece, size))
            column += len(piece)
            if piece.endswith(RETURN):
                rows.append([])
                column = 0
    return [row for row in rows if row]


def pieces_of(text: str) -> list[str]:
    """A token's text as it is drawn: line breaks as arrows, and no piece longer than a row."""
    lines = printable(text).split("\n")
    lines = [line + RETURN for line in lines[:-1]] + lines[-1:]
    pieces = []
    for line in lines:
        pieces += [line[i:i + COLUMNS] for i in range(0, len(line), COLUMNS)]
    return pieces


def wrapped(prompt: str) -> list[str]:
    rows = []
    for line in printable(prompt).strip("\n").split("\n"):
        rows += textwrap.wrap(line, COLUMNS) or [""]
    return rows


def printable(text: str) -> str:
    """A square for every character that the font does not have."""
    font = get_font(findfont(MONOSPACE))
    known = [character == "\n" or font.get_char_index(ord(character)) for character in text]
    return "".join(character if is_known else "\N{WHITE SQUARE}"
                   for character, is_known in zip(text, known))


class Picture:
    """Rows of text in a fixed font, written from top to bottom; lengths are inches."""

    def __init__(self, rows: int):
        height = rows * ROW + 2 * MARGIN
        self.figure = plt.figure(figsize=(WIDTH, height))
        self.axis = self.figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
        self.axis.axis("off")
        self.top = MARGIN

    def skip(self, rows: float) -> None:
        self.top += rows * ROW

    def text_at(self, column: float, text: str, **more) -> None:
        self.axis.text(MARGIN + column * CHARACTER, self.top + ROW / 2, text, parse_math=False,
                       fontproperties=MONOSPACE, va="center_baseline", **more)

    def fill(self, column: float, columns: float, strength: float) -> None:
        corner = MARGIN + column * CHARACTER, self.top + 0.02
        self.axis.add_patch(Rectangle(corner, columns * CHARACTER, ROW - 0.04, color=BLUE, lw=0,
                                      alpha=0.8 * strength))

    def write(self, text: str, **more) -> None:
        self.text_at(0, text, **more)
        self.skip(1)

    def write_shaded(self, row: list[tuple[int, str, float]], largest: float) -> None:
        for column, text, size in row:
            self.fill(column, len(text), size / largest)
            self.text_at(column, text)
        self.skip(1)

    def write_key(self, label: str, largest: float) -> None:
        """From no colour at 0 to full colour at the largest."""
        self.text_at(0, f"{label}: 0")
        start, steps = len(label) + 4, 60
        for i in range(steps):
            self.fill(start + 16 * i / steps, 16 / steps, i / (steps - 1))
        self.text_at(start + 17, f"{largest:.3g}")
        self.skip(1)
