"""Which mistake does a training show? Read from its log, ours or that of another trainer.

    python -m lab diagnose runs/none-grpo-s0     # a run of this project
    python -m lab diagnose checkpoint-500        # a folder with TRL's trainer_state.json
    python -m lab diagnose log.jsonl             # JSON lines, CSV as of W&B, what verl prints

It says which rows of docs/reference/how_a_run_fails.md the metrics show, with the numbers, and
which single run would decide. TRL, verl, OpenRLHF, slime and prime-rl are read under their names.

The exit status is 0 if nothing was found, 1 if a mistake was, and 2 if the log cannot be read or
has too few steps. Nothing is written.
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python -m lab diagnose")
import sys
from pathlib import Path

from lab.engine.errors import UserError
from lab.harness.flags import read
from lab.tools.helpers.diagnosis import faults_of, filled, in_words
from lab.tools.helpers.log import FEWEST, read_log


def main(argv: list[str]) -> int:
    """Print what the log shows, and return the exit status."""
    flags = read(argv, "python -m lab diagnose LOG", __doc__, {}, {
        "LOG": "a run folder, or the log of another trainer"})
    try:
        log = read_log(Path(flags.log))
    except UserError as error:
        print(f"diagnose: {error}", file=sys.stderr)
        return 2
    found = faults_of(log) if log.steps >= FEWEST else []
    print(filled([f"{log.path}: {log.steps} steps.", *in_words(log, found)]))
    return 2 if log.steps < FEWEST else int(bool(found))
