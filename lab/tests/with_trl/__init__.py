REQUIREMENTS = "lab/trl/requirements.txt"
INSTALL = f"to run it: pip install -r {REQUIREMENTS}"  # why a test is skipped
