"""The book's tests stand on the lab's small models and run folders."""
from conftest import learner, one_thread, policy, rollouts, small_model, undrawn  # noqa: F401
