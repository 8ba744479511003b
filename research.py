"""Says where `python -m research NAME` is now: `python -m lab NAME`.

The folders research/, bridges/ and benchmarks/ have become lab/. docs/CHANGELOG.md lists each of
their commands with its present one.
"""
import sys

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "NAME"
    print(f"research: this is now `python -m lab {name}`, or was taken away after commit f19f84f4: "
          "lab/LOG.md and docs/CHANGELOG.md say what has become of it", file=sys.stderr)
    sys.exit(2)
