"""What was found with the project, and what finds it again; and doors to other programs.

This folder can be deleted whole, because nothing outside names it. README.md is the article, LOG.md
what was asked once. `python -m lab` lists the commands: probes, experiments, the formula of any
GRPO (formula/), other trainers (trl/), speed and memory (speed/).
"""
