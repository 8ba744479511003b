"""What the tests of the lab share, for these as well; pyproject.toml says where Python finds it."""
from conftest import (  # noqa: F401
    learner, one_thread, policy, rollouts, small_model, undrawn)
