"""The pictures of first_look.ipynb."""
import io
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from tokenizers import Tokenizer

from analyze import columns_in, tokens_of
from lab.analysis.plots import BLUE, ORANGE, plt
from run import read_lines

WIDTH = 84  # letters in a line of a shaded answer


class Picture:
    """A figure, as a notebook shows it."""

    def __init__(self, figure: Figure):
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=72)
        plt.close(figure)
        self.png = file.getvalue()

    def _repr_png_(self) -> bytes:
        return self.png


def draw_success(run: str) -> Picture:
    """Success of each step, and of the held-out problems with their 95% intervals."""
    metrics = read_lines(Path(run) / "metrics.jsonl")
    held_out = [line for line in read_lines(Path(run) / "evaluations.jsonl")
                if line["mode"] == "sampled"]
    figure, axis = plt.subplots(figsize=(8, 3.2))
    axis.plot([line["step"] for line in metrics], [line["success"] for line in metrics],
              color=BLUE, alpha=0.5, label="answers of the step")
    middle = np.array([line["success"] for line in held_out])
    low = np.array([line["success_low"] for line in held_out])
    high = np.array([line["success_high"] for line in held_out])
    axis.errorbar([line["step"] for line in held_out], middle, [middle - low, high - middle],
                  fmt="o", color="black", label="held-out problems, with 95% interval")
    axis.set(xlabel="step", ylabel="share of answers with a reward", ylim=(0, 1))
    axis.legend()
    return Picture(figure)


def answer_of(run: str, answer: int) -> tuple[list[str], dict[str, Any]]:
    """The texts of an answer's tokens in step 1, and the columns of its credit file."""
    columns = tokens_of(columns_in(Path(run) / "credit/step_000001.npz"))
    here = columns["answer"] == answer
    tokenizer = Tokenizer.from_file(str(Path(run) / "tokenizer.json"))
    own = {name: values[here] for name, values in columns.items()}
    texts = [tokenizer.decode([token], skip_special_tokens=False).replace("\n", " ")
             for token in own["token_id"]]
    return texts, own


def shade(run: str, answer: int, *names: str) -> Picture:
    """An answer of step 1 once for each column: blue where it is positive, orange where it is
    negative, darker where it is larger."""
    texts, columns = answer_of(run, answer)
    figure = plt.figure(figsize=(10, 1.1 * len(names)), layout="none")
    axis = figure.add_axes((0, 0, 1, 1))
    letter, line = 10 * 72 / WIDTH / 0.61, 0.0  # a letter is 0.6 times as wide as it is high
    for name in names:
        largest = max(abs(columns[name]).max(), 1e-9)
        axis.text(0.5, line, f"{name}: at most {largest:.2f}", va="center", fontsize=11)
        line, column = line + 1.2, 0
        for text, value in zip(texts, columns[name]):
            if column + len(text) > WIDTH:
                line, column = line + 1, 0
            axis.add_patch(Rectangle((column, line - 0.5), len(text), 0.95, lw=0,
                                     color=BLUE if value > 0 else ORANGE,
                                     alpha=min(1.0, abs(value) / largest)))
            axis.text(column, line, text, family="monospace", va="center", fontsize=letter)
            column += len(text)
        line += 1.4
    axis.set(xlim=(0, WIDTH), ylim=(line - 0.6, -0.7))
    axis.axis("off")
    return Picture(figure)


def print_tokens(run: str, answer: int, count: int = 8) -> None:
    """The tokens of an answer that were pushed most, in numbers."""
    texts, columns = answer_of(run, answer)
    print("token        probability    push    change")
    for t in sorted(np.argsort(-abs(columns["push"]))[:count]):
        print(f"{texts[t]!r:12} {np.exp(columns['log_prob'][t]):11.2f} {columns['push'][t]:+7.2f} "
              f"{columns['change'][t]:+9.3f}")
