"""Doors to other programs: TRL's trainer with a weighting of this project, files of other
trainers, one step of anybody's trainer, and what codes called GRPO compute. Each file imports only
the program that it is for; requirements.txt has what they need."""
import lab.engine  # noqa: F401  before torch: it says how threads wait
