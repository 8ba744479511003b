"""List the tools."""
import ast

from harness.files import PROJECT, paths_in


def list_programs(room: str) -> None:
    """A line for each file of a room that is a program: how it begins."""
    for path in paths_in(PROJECT / room):
        source = path.read_text(encoding="utf-8") if path.suffix == ".py" else ""
        if "\nif not __package__" in source:
            says = " ".join(ast.get_docstring(ast.parse(source)).split("\n\n")[0].split())
            print(f"  python -m {room}.{path.stem:11s} {says.partition(':')[0].rstrip('.')}")


if __name__ == "__main__":
    print("Tools; each says with --help what it takes:\n")
    list_programs("tools")
    print("\ntools/largest_last.py is a task to start from: python train.py --task "
          "tools.largest_last")
