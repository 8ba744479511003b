"""All that the files at the top of the project are not: the parts that they stand on (engine/,
harness/), more methods of credit (credit/), the page of a run (analysis/), commands for whoever has
a run or an idea (tools/), and what was found with the project, with the commands that find it
again.

`python -m lab` lists the commands by the question that they answer. README.md is the article,
LOG.md what was asked once.
"""
