"""What every weighting, advantage and loss costs on the default run: time, tokens, memory.

    python -m benchmarks.cost                # all arms, which takes minutes
    python -m benchmarks.cost gae oracle     # some of them

Run it from the project's folder. Every arm is a process of its own, because that is how its peak
memory is known. It makes a few steps of the default run with a learning rate of practically zero,
so that all arms sample the same answers. Arms take turns, and the table shows medians over all
steps but each process's first. Extra time is that of credit and update beyond plain GRPO's, as a
share of plain GRPO's whole step.
"""
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.program import parameters_beside
from engine.errors import UserError
from harness.files import PROJECT, read_lines
from harness.flags import Parser, shortened
from harness.program import run_as_program
from harness.progress import show_status
from harness.registry import MITIGATIONS

MEBIBYTE = 2 ** 20
ARMS = {name: ["--mitigation", name] for name in MITIGATIONS} | {
    **{name: ["--advantage", name]
       for name in ("dr_grpo", "rloo", "gae", "vine", "span", "hindsight", "belief",
                    "prefix_tree", "ktae", "gtpo")},
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
ARMS["learned_importance"] += ["--importance_warmup", "0"]
BARE = ["--eval_every", "0", "--checkpoint_every", "0", "--sample_every", "0",
        "--learning_rate", "1e-12"]
STEPS = 4
ROUNDS = 2
SLOW = ("oracle", "vine, every 16")  # these make two steps, once


def measure(name: str) -> list[dict]:
    """Train an arm for a few steps; its lines of metrics.jsonl after the first."""
    steps = 2 if name in SLOW else STEPS
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "train.py", *ARMS[name], *BARE, "--steps", str(steps),
                   "--out", str(run)]
        subprocess.run(command, cwd=PROJECT, check=True, stdout=subprocess.DEVNULL)
        return read_lines(run / "metrics.jsonl")[1:]


def middle(steps: list[dict], key: str) -> float:
    return median(step[key] for step in steps)


def middle_work(steps: list[dict]) -> float:
    return median(step["credit_seconds"] + step["update_seconds"] for step in steps)


def peak_memory(steps: list[dict]) -> float:
    """MiB."""
    return max(step["peak_memory_bytes"] for step in steps) / MEBIBYTE


HEADINGS = ("arm", "credit, ms", "beyond plain", "update, ms", "extra time of a step",
            "tokens generated per token trained on", "extra parameters", "peak memory, MiB")


def row(name: str, steps: list[dict], plain: list[dict]) -> str:
    """An arm's row, beside the steps of plain GRPO."""
    whole = middle(plain, "seconds")
    credit = middle(steps, "credit_seconds")
    beyond_plain = (credit - middle(plain, "credit_seconds")) / whole
    extra = (middle_work(steps) - middle_work(plain)) / whole
    generated = middle(steps, "extra_tokens") / middle(steps, "tokens")
    memory = peak_memory(steps) - peak_memory(plain)
    cells = (name, f"{1000 * credit:.1f}", f"{beyond_plain:+.1%}",
             f"{1000 * middle(steps, 'update_seconds'):.0f}", f"{extra:+.0%}", f"{generated:.1f}",
             f"{parameters_beside(ARMS[name]):,}", f"{memory:+.0f}")
    return f"| {' | '.join(cells)} |"


def take_turns(names: list[str]) -> dict[str, list[dict]]:
    steps = {name: [] for name in names}
    for turn in range(ROUNDS):
        for name in names:
            if turn == 0 or name not in SLOW:
                show_status(f"round {turn + 1} of {ROUNDS}: {name}")
                steps[name] += measure(name)
    show_status("")
    return steps


def read_arms(argv: list[str]) -> list[str]:
    """The arms that were named, plain GRPO first."""
    parser = Parser("python -m benchmarks.cost [ARM ...]", __doc__)
    parser.add_argument("arms", nargs="*", default=[], help="; ".join(ARMS))
    names = parser.read(argv)["arms"] or list(ARMS)
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        raise UserError(f"no arm {shortened(unknown[0])}; there are: {', '.join(ARMS)}")
    return ["none", *(name for name in names if name != "none")]


def main(argv: list[str]) -> None:
    names = read_arms(argv)
    steps = take_turns(names)
    plain = steps["none"]
    print(f"plain GRPO: {1000 * middle(plain, 'seconds'):.0f} ms a step, "
          f"of which rollout {1000 * middle(plain, 'rollout_seconds'):.0f}, "
          f"peak memory {peak_memory(plain):.0f} MiB\n")
    print(f"| {' | '.join(HEADINGS)} |")
    print("|---" * len(HEADINGS) + "|")
    for name in names:
        print(row(name, steps[name], plain))


if __name__ == "__main__":
    run_as_program("benchmarks.cost", main)
