"""Train with any device, LoRA, a task of your own, and more flags than train.py has.

    python -m lab train --lora 1
    python -m lab train --task my_task
    python -m lab train --resume runs/none-grpo-lora1-s0
"""
import lab.engine  # noqa: F401  before torch: it sets how torch's threads wait
from lab.harness.run import open_lab_run
from lab.harness.loop import carry_out


def train_beyond(argv: list[str]) -> None:
    if run := open_lab_run(argv):
        carry_out(run)


main = train_beyond
