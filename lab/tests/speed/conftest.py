"""The lab's small models, one thread as in its tests, and nothing is downloaded."""
from conftest import learner, one_thread, rollouts, small_model  # noqa: F401
