"""The book's tests stand on the lab's small models and run folders."""
from conftest import (learner, policy, recorded, rollouts, small_model,  # noqa: F401
                      undrawn)
