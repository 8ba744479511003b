"""TRL's trainer with a weighting or an advantage of this project, and a record of what each token
gets. requirements.txt has what it needs, README.md says how it is used."""
import lab.engine  # noqa: F401  before torch: it says how threads wait
