"""All that the seven files at the root are not: a run beyond them (run.py, harness/), what it adds
to their model and their step (engine/), a GPU's own way to compute (gpu/), more methods of credit
(credit/), the page of a run (analysis/), commands for whoever has a run or an idea (tools/), and
what was found with the project, with the commands that find it again. It imports the seven files,
and they import nothing of it.

`python -m lab` lists the commands by the question that they answer. README.md is the article,
LOG.md what was asked once.
"""
