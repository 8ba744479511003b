"""What harness/program.py asks for until it goes: torchrun tells of a process that is lost."""
import os
import time
from typing import NoReturn

PATIENCE = 10  # seconds that rank 0 may be behind another process


def hard_exit(sentence: str) -> NoReturn:
    os.write(2, f"{sentence}\n".encode())
    os._exit(1)


def wait_for_rank0_error() -> bool:
    time.sleep(PATIENCE)  # torchrun stops all as soon as one has ended, rank 0 in its sentence
    return True


def end_after_signal(readable: int) -> None:
    pass
