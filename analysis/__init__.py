"""What run folders say: sums over credit files, statistics, comparison of runs, tables, pictures,
the page."""
