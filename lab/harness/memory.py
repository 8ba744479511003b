"""Memory that was freed: it is kept for the next tensor, or returned to the system. By itself
glibc returns a large tensor's memory at once."""
import ctypes
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from lab.engine.model import Qwen2

BYTES_TO_KEEP = 40  # freed memory is kept if the machine has more bytes than this a parameter
GROWTH = 1.1        # how many times the memory that a step needs a process may hold after a step
# parameters of mallopt, from glibc's <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
STATM = Path("/proc/self/statm")  # of Linux


def after_steps_of(model: Qwen2) -> Callable[[], None]:
    """What a run should call after each step, for the memory of a large model."""
    if not model.is_large:
        return lambda: None
    if should_keep_memory(model):
        keep_memory()
    return FreedMemory().after_step


def should_keep_memory(model: Qwen2) -> bool:
    """Whether it is worth it to keep freed memory, and there is room for that.

    In bfloat16 each micro-batch makes a copy of each matrix that is kept in float32, and kept
    memory saves a part of an update's time. In float32 it would save little. LoRA keeps
    the matrices in bfloat16, so nothing is copied; there it saves nothing, and takes memory.
    """
    on_cpu = model.device.type != "cuda"  # on meta it is only counted
    if sys.platform != "linux" or not on_cpu or not model.is_large:
        return False
    size = sum(parameter.numel() for parameter in model.parameters())
    of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kept_in = model.output_matrix.dtype
    is_copied = model.compute_dtype == torch.bfloat16 and kept_in != torch.bfloat16
    return is_copied and of_machine > BYTES_TO_KEEP * size


def keep_memory() -> None:
    """Keep freed memory in this process from now on, until `return_memory` is called."""
    never = -1
    call_glibc("mallopt", M_MMAP_MAX, 0)  # no tensor gets memory of its own from the system
    call_glibc("mallopt", M_TRIM_THRESHOLD, never)


def return_memory() -> None:
    """Return to the system all memory that is free."""
    call_glibc("malloc_trim", 0)


class FreedMemory:
    """What the steps of a run have freed. The next step can use it without waiting for the system,
    which fills new memory with zeros: with memory that is returned after every step, this took a
    sixth of a 0.5B's run. But glibc also keeps gaps that the next step's tensors do not fit into.
    Where nothing was returned, 14 steps grew from 9 to 15 GB.

    So memory is returned when the process holds GROWTH times what a step needs. This need is what
    the process held after a step that began without free memory.
    """

    def __init__(self) -> None:
        self.needed = 0          # bytes
        self.was_returned = True  # before the step that is being made

    def after_step(self) -> None:
        held = bytes_held()
        if self.was_returned:
            self.needed = max(self.needed, held)
        self.was_returned = not held or held > GROWTH * self.needed
        if self.was_returned:
            return_memory()


def bytes_held() -> int:
    """Bytes of this process in the machine's memory; 0 if the system does not say it."""
    try:
        pages = int(STATM.read_text().split()[1])
    except OSError:  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_memory(device: torch.device) -> int | None:
    """The most bytes so far, of the GPU or of the process; None on Windows, which has no
    `resource`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ModuleNotFoundError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def call_glibc(name: str, *values: int) -> None:
    """Call a function of glibc. Other C libraries do not have these functions, nor need them."""
    if sys.platform == "linux":
        function = getattr(ctypes.CDLL(None), name, None)
        if function:
            function(*values)
