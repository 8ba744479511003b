"""What is true of the model and its task, measured: one probe a file, `python -m truth.NAME`."""
