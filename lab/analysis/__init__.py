"""The analysis of run folders, for analyze.py and whoever compares runs: sums over credit files,
statistics, gains, tables, pictures, the page.

Nothing here trains or samples; a model is never loaded.
"""
