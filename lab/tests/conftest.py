"""The lab's tests stand on the same small models and run folders as the other tests."""
from conftest import (bare_model, learner, policy, recorded, rollouts, small_model,  # noqa: F401
                      stopped, undrawn, whole)
