"""The analysis of run folders: sums over credit files, statistics, comparison of runs, tables,
pictures, the page."""
