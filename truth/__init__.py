"""What is true of the model and its task, measured: one probe a file, run by `probes.py`."""
