"""What talks to other programs: answers by a server, runs and settings of other trainers, pairs
of preferences, weightings for TRL."""
import engine  # noqa: F401  before torch: it says how threads wait
