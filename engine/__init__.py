"""What makes the lab fast and safe: sampling, packing, folders, settings, resume, processes.

Import it before torch. Two threads that share an operation wait for each other, hundreds of times a
training step. OpenMP lets them spin while they wait. On a core that another process wants, the one
that spins keeps the one that works from working, and a run beside a busy process becomes thirty
times slower. Threads that sleep cost next to nothing, alone or not: python -m benchmarks.neighbours
"""
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # is read once, when torch is imported
