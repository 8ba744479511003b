"""How long the stages of a step take, how long the run will take, and the memory of the process."""
import sys
import time
from collections import deque
from contextlib import contextmanager
from statistics import mean, median

try:
    import resource
except ImportError:  # Windows keeps no record of peak memory
    resource = None

import torch

from harness.progress import show_status


class Clock:
    """`with clock("update"):` measures a stage and shows its name to people at a terminal."""

    def __init__(self, step: int):
        self.step = step
        self.begin = time.perf_counter()
        self.seconds = {}  # of each stage

    @contextmanager
    def __call__(self, stage: str):
        show_status(f"step {self.step}: {stage}")
        start = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - start

    def metrics(self, sampled: int, trained: int, device: torch.device) -> dict:
        """Seconds of each stage and of the step, tokens a second, peak memory."""
        seconds = {f"{stage}_seconds": value for stage, value in self.seconds.items()}
        return {**seconds, "seconds": time.perf_counter() - self.begin,
                "rollout_tokens_per_second": sampled / self.seconds["rollout"],
                "update_tokens_per_second": trained / self.seconds["update"],
                "peak_memory_bytes": peak_memory(device)}


class Pace:
    """Seconds of the last steps: how long the rest will take, and a word where one step took far
    longer than usual."""

    def __init__(self):
        self.seconds = deque(maxlen=20)  # of the last steps
        self.quiet = 0                   # for so many steps no comment is made

    def left(self, steps: int) -> float:
        """Seconds that so many steps will take."""
        return mean(self.seconds) * steps

    def add(self, seconds: float) -> str | None:
        """A comment, at most every twenty steps, if this step took five times the median."""
        usual = median(self.seconds or [seconds])
        is_known = len(self.seconds) >= 5
        self.seconds.append(seconds)
        self.quiet = max(0, self.quiet - 1)
        if self.quiet or not is_known or seconds < 5 * usual:
            return None
        self.quiet = 20
        return (f"this step took {seconds:.0f} s, {seconds / usual:.0f} times the usual "
                f"{usual:.1f} s. Is something else running here, or the memory full? Ctrl-C stops "
                "after this step, --resume goes on later, as if nothing had been")


def peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
