"""Programs beside training: ask a model, follow a token, preview or try an idea, make a model."""
import engine  # noqa: F401  before torch: it says how threads wait
