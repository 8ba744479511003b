"""What a training step computes: sampling, the packed forward pass, the optimizer, processes.

Import it before torch, which reads two settings when it is imported:

    GOMP_SPINCOUNT          how its threads wait for each other, hundreds of times a step. By default
                            they spin, which beside a busy process makes a run many times slower,
                            and one that sleeps at once takes long to wake. Here they spin for a
                            moment and then sleep.
    THP_MEM_ALLOC_ENABLE    Linux hands out new memory in pages of 2 MB, not 4 KB: tensors of that
                            size are made anew in every product, four times as fast
"""
import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
