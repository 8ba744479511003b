"""List the bridges to other programs."""
from tools.__main__ import list_programs

print("Bridges to other programs; each says with --help what it takes:\n")
list_programs("bridges")
print("\ntrain.py --rollouts takes its answers from a server; bridges/trl_trainer.py is a trainer "
      "for TRL:\nbridges/README.md")
