"""What keeps a run's promises, for train.py and each tool: flags, settings, tasks, the record on
disk, a run and its continuation, the screen.

Nothing here computes a gradient (lab/engine/) or knows a method of credit (mitigations.py,
lab/credit/).
"""
