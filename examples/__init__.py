"""Files to read and to copy from, for who learns GRPO or has a task: one step that says what
happens, tasks, a game of several turns, DPO; and an exercise, to write the loss.
"""
import lab.engine  # noqa: F401  before torch: it says how threads wait
