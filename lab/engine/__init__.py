"""The computations of a training step, on top of the book's model, cache and losses. Flags, files
and the screen are not here (lab/harness/).

Import this package before torch, because torch and oneDNN, with which it multiplies on a CPU, read
three settings when they begin, and this package sets them:

    GOMP_SPINCOUNT         how torch's threads wait for each other, as in train.py
    THP_MEM_ALLOC_ENABLE   makes Linux give large tensors memory in pages of 2 MB instead of 4 KB,
                           so that filling a new one takes a quarter of the time
    ONEDNN_PRIMITIVE_CACHE_CAPACITY
                           how many products oneDNN keeps compiled, one for each shape. By default
                           it keeps 1,024. But nearly every step has new shapes, so after 48 steps
                           of a 0.5B those of old steps took 0.36 GB for nothing.
"""
import os

os.environ.setdefault("GOMP_SPINCOUNT", "1000")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
