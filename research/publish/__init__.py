"""The published results, and the pages and pictures that show their numbers."""
import engine  # noqa: F401  before torch: it says how threads wait
import mitigations  # noqa: F401  fills the lists of choices, which pictures show
