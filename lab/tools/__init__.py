"""Programs beside training, for whoever has a run or an idea: ask a model, follow a token, preview
or try an idea, make a model. `python -m lab` lists them.

What answers a question about credit in general, and not about your run, is in lab/.
"""
import lab.engine  # noqa: F401  before torch: it says how threads wait
