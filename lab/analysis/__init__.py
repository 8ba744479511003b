"""The analysis of run folders, for `python -m lab page` and whoever compares runs: sums over credit
files, statistics, gains, tables, pictures, the page.

Nothing here trains or samples; a model is never loaded.
"""
