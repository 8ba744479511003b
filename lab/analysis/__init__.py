"""The analysis of run folders, for `python -m lab page` and whoever compares runs: statistics,
gains, tables, pictures, the page. The sums over credit files are those of analyze.py.

Nothing here trains or samples; a model is never loaded.
"""
