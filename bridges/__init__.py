"""Doors to other programs: a server that answers, files of other trainers, TRL's trainer."""
import engine  # noqa: F401  before torch: it says how threads wait
