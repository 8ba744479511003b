"""What talks to other programs: answers by a server, files of other trainers, weightings for TRL."""
import engine  # noqa: F401  before torch: it says how threads wait
