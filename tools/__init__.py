"""Asking a model, previewing a weighting, a second task to start from, making the tiny model."""
import engine  # noqa: F401  before torch: it says how threads wait
