"""What every mitigation, advantage and loss costs on the default run: time, tokens, parameters, memory.

    python benchmarks/cost.py                # all arms, about ten minutes on two cores
    python benchmarks/cost.py gae oracle     # some of them

Every arm is a process of its own (that is how its peak memory is known) that makes a few steps of the default
run with a learning rate of practically zero, so that all arms sample the same answers. Arms take turns;
medians over all steps but each process's first. Extra time is that of credit and update beyond plain GRPO's,
as a share of plain GRPO's whole step.
"""
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent

from engine.lab import make_lab
from mitigations import MITIGATIONS
from engine.settings import make_settings, read_flags

ARMS = {name: ["--mitigation", name] for name in MITIGATIONS} | {
    **{name: ["--advantage", name] for name in ("dr_grpo", "rloo", "gae", "vine", "span")},
    "vine, every 16": ["--advantage", "vine", "--values_every", "16"],
    "rescale gradient": ["--mitigation", "equal_gradient", "--rescale", "gradient"],
    "placebo weights": ["--mitigation", "equal_gradient", "--placebo", "weights"], "placebo advantages": ["--placebo", "advantages"],
    "loss_norm sequence": ["--loss_norm", "sequence"], "epochs 2": ["--epochs", "2"], "kl 0.1": ["--kl", "0.1"], "loss dpo": ["--loss", "dpo"]}
ARMS["learned_importance"] += ["--importance_warmup", "0"]
STEPS, ROUNDS, SLOW = 4, 2, ("oracle", "vine, every 16")  # the slow ones make two steps, once


def measure(name: str, steps: int) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        bare = ["--eval_every", "0", "--checkpoint_every", "0", "--sample_every", "0", "--learning_rate", "1e-12"]
        subprocess.run([sys.executable, ROOT / "train.py", *ARMS[name], *bare, "--steps", str(steps), "--out", f"{folder}/run"],
                       cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()][1:]


def extra_parameters(name: str) -> int:
    return make_lab(make_settings(read_flags(["--model", str(ROOT / "models/tiny"), *ARMS[name]]))).extra_parameters


def row(name: str, lines: list[dict], plain: list[dict]) -> str:
    def middle(key, of=lines):
        return median(line[key] for line in of)

    work = median(line["credit_seconds"] + line["update_seconds"] for line in lines)
    extra = (work - median(line["credit_seconds"] + line["update_seconds"] for line in plain)) / middle("seconds", plain)
    arithmetic = (middle("credit_seconds") - middle("credit_seconds", plain)) / middle("seconds", plain)
    memory = (max(line["peak_memory_bytes"] for line in lines) - max(line["peak_memory_bytes"] for line in plain)) / 2 ** 20
    return (f"| {name} | {1000 * middle('credit_seconds'):.1f} | {arithmetic:+.1%} | {1000 * middle('update_seconds'):.0f} | {extra:+.0%} | "
            f"{middle('extra_tokens') / middle('tokens'):.1f} | {extra_parameters(name):,} | {memory:+.0f} |")


def main(names: list[str]) -> None:
    unknown = [name for name in names if name not in ARMS]
    if unknown:
        sys.exit(f"cost.py: no arm {unknown[0]}; there are: {', '.join(ARMS)}")
    names = ["none", *(name for name in names or ARMS if name != "none")]
    found = {name: [] for name in names}
    for turn in range(ROUNDS):
        for name in names:
            if turn == 0 or name not in SLOW:
                print(f"\rround {turn + 1} of {ROUNDS}: {name:40s}", end="", file=sys.stderr, flush=True)
                found[name] += measure(name, 2 if name in SLOW else STEPS)
    plain = found["none"]
    step, rollout = (1000 * median(line[key] for line in plain) for key in ("seconds", "rollout_seconds"))
    memory = max(line["peak_memory_bytes"] for line in plain) / 2 ** 20
    print(f"\r\nplain GRPO: {step:.0f} ms a step, of which rollout {rollout:.0f}, peak memory {memory:.0f} MiB\n")
    print("| arm | credit, ms | beyond plain | update, ms | extra time of a step | tokens generated per token trained on | extra parameters | "
          "peak memory, MiB |\n" + "|---" * 8 + "|")
    for name in names:
        print(row(name, found[name], plain))


if __name__ == "__main__":
    main(sys.argv[1:])
