"""List the tools."""
import ast

from harness.record import PROJECT

if __name__ == "__main__":
    print("Tools; each says with --help what it takes:\n")
    for path in sorted((PROJECT / "tools").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "\nif not __package__" in source:  # it is a program: how it begins
            says = " ".join(ast.get_docstring(ast.parse(source)).split("\n\n")[0].split())
            print(f"  python -m tools.{path.stem:11s} {says.partition(':')[0].rstrip('.')}")
    print("\nexamples/ has a task to start from: python train.py --task examples.largest_last")
