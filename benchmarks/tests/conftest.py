"""One thread, as in the lab's tests, and nothing is downloaded."""
from conftest import one_thread  # noqa: F401
