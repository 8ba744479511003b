"""What is read and said of run folders, for the commands of lab/tools and lab/probes: the reader of
a run, arms and their comparison, statistics, tables, pictures, the page. Plain sums over credit
files are those of analyze.py. Nothing here trains or samples."""
