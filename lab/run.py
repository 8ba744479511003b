"""A run beyond the book. train.py hands a command line over to here if a flag, a task, a weighting
or an advantage is not in the files at the root: then the same loop trains with the lab's parts."""
if __name__ == "__main__":
    raise SystemExit("start it with: python train.py")
import lab.engine  # noqa: F401  before torch: it sets how torch's threads wait
from lab.harness.run import open_lab_run
from lab.harness.screen import run_as_program
from train import carry_out


def train_beyond(argv: list[str]) -> None:
    carry_out(open_lab_run(argv))


def main(argv: list[str]) -> None:
    run_as_program("train.py", lambda _: train_beyond(argv),
                   interrupted="stopped at once; --resume continues a run from its last "
                   "checkpoint, if it has one")
