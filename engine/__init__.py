"""What a training step computes: sampling, the packed forward pass, the optimizer, processes.

Import it before torch, which reads two settings when it is imported:

    GOMP_SPINCOUNT         how its threads wait for each other, hundreds of times a step. By default
                           they spin, which beside a busy process makes a run many times slower,
                           and one that sleeps at once takes long to wake. Here they spin for a
                           moment and then sleep.
    THP_MEM_ALLOC_ENABLE   Linux gives large tensors memory in pages of 2 MB instead of 4 KB: to
                           fill a new one then takes a quarter of the time
"""
import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
