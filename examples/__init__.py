"""Files to read and to copy from, for who learns GRPO or has a task: one step, a whole training, a
plain sampler, a second task; and an exercise, to write the loss.

They keep no record and cannot be continued: that is train.py, with lab/harness/.
"""
import lab.engine  # noqa: F401  before torch: it says how threads wait
