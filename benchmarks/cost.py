"""What every weighting, advantage and loss costs on the default run: time, tokens, memory.

    python -m benchmarks.cost                # all methods, which takes minutes
    python -m benchmarks.cost gae oracle     # some of them

Run it from the project's folder. Every method is a process of its own, because that is how its
peak memory is known. It makes a few steps of the default run with a learning rate of practically
zero, so that all sample the same answers. The table shows medians over all steps but each process's
first. Extra time is that of credit and update beyond plain GRPO's, as a share of its whole step.
"""
import sys
import tempfile
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import median

from engine.choices import ADVANTAGES, MITIGATIONS
import mitigations  # noqa: F401  fills the lists of choices
from analysis.tables import Table, by_row
from benchmarks.cases import MEBIBYTE, NO_LEARNING, run_quietly, take_turns
from engine.errors import UserError
from harness.files import read_lines
from harness.flags import Flag, Parser, add_flags, shortened, with_defaults
from harness.program import run_as_program

METHODS = {
    **{name: ["--mitigation", name] for name in MITIGATIONS},
    **{name: ["--advantage", name] for name in ADVANTAGES if name != "grpo"},
    "gae, trunk": ["--advantage", "gae", "--critic", "trunk"],
    "vine, every 16": ["--advantage", "vine", "--values_every", "16"],
    "rescale gradient": ["--mitigation", "equal_gradient", "--rescale", "gradient"],
    "placebo weights": ["--mitigation", "equal_gradient", "--placebo", "weights"],
    "placebo advantages": ["--placebo", "advantages"],
    "loss_norm sequence": ["--loss_norm", "sequence"],
    "epochs 2": ["--epochs", "2"],
    "kl 0.1": ["--kl", "0.1"],
    "loss dpo": ["--loss", "dpo"],
}
METHODS["learned_importance"] += ["--importance_warmup", "0"]
BARE = ["--eval_every", "0", "--checkpoint_every", "0", "--sample_every", "0",
        "--learning_rate", str(NO_LEARNING)]
SLOW = ("oracle", "measured", "vine, every 16")  # these make two steps
FLAGS = {
    "steps": Flag(4, "steps of each process, the first not counted", least=2, most=1000),
    "repeats": Flag(2, "processes of each method", least=1, most=1000),
}


def measure(name: str, steps: int) -> list[dict]:
    """Train with a method for a few steps; its lines of metrics.jsonl after the first."""
    with tempfile.TemporaryDirectory() as folder:
        run, most = Path(folder, "run"), 2 if name in SLOW else steps
        run_quietly([sys.executable, "train.py", *METHODS[name], *BARE, "--steps", str(most),
                     "--out", str(run)], name)
        return read_lines(run / "metrics.jsonl")[1:]


def middle(lines: list[dict], key: str) -> float:
    return median(line[key] for line in lines)


def middle_work(lines: list[dict]) -> float:
    return median(line["credit_seconds"] + line["update_seconds"] for line in lines)


def peak_memory(lines: list[dict]) -> float:
    """MiB."""
    return max(line["peak_memory_bytes"] for line in lines) / MEBIBYTE


COLUMNS = {"method": "", "credit, ms": ".1f", "update, ms": ".0f", "extra time of a step": "+.0%",
           "tokens generated per token trained on": ".1f", "extra memory, MiB": "+.0f"}


def row_of(name: str, lines: list[dict], plain: list[dict]) -> list:
    """A method's row, beside the steps of plain GRPO."""
    extra = (middle_work(lines) - middle_work(plain)) / middle(plain, "seconds")
    return [name, 1000 * middle(lines, "credit_seconds"), 1000 * middle(lines, "update_seconds"),
            extra, middle(lines, "extra_tokens") / middle(lines, "tokens"),
            peak_memory(lines) - peak_memory(plain)]


def main(argv: list[str]) -> None:
    parser = Parser("python -m benchmarks.cost [METHOD ...] [flags]", __doc__)
    parser.add_argument("methods", nargs="*", default=[], help="; ".join(METHODS))
    typed = add_flags(parser, FLAGS).read(argv)
    names, given = typed.pop("methods") or list(METHODS), with_defaults(typed, FLAGS)
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise UserError(f"no method {shortened(unknown[0])}; there are: {', '.join(METHODS)}")
    names = ["none", *(name for name in names if name != "none")]
    turns = take_turns({name: partial(measure, name, given.steps) for name in names}, given.repeats)
    lines = {name: list(chain(*found)) for name, found in turns.items()}
    plain = lines["none"]
    print(f"plain GRPO: {1000 * middle(plain, 'seconds'):.0f} ms a step, "
          f"of which rollout {1000 * middle(plain, 'rollout_seconds'):.0f}, "
          f"peak memory {peak_memory(plain):.0f} MiB\n")
    rows = [row_of(name, lines[name], plain) for name in names]
    print(Table("cost", "", by_row(COLUMNS, rows)).to_text())


if __name__ == "__main__":
    run_as_program("benchmarks.cost", main)
