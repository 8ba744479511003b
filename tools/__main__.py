"""List the tools."""
import ast

from engine.errors import PROJECT

if __name__ == "__main__":
    print("The tools. Each of them explains itself and its flags with --help:\n")
    folder = PROJECT / "tools"
    names = {path.stem: path for path in folder.glob("*.py")}
    names |= {path.parent.name: path for path in folder.glob("*/__main__.py")}
    for name, path in sorted(names.items()):
        source = path.read_text(encoding="utf-8")
        if "\nif not __package__" in source:  # every program begins so
            first_paragraph = ast.get_docstring(ast.parse(source)).split("\n\n")[0]
            sentence = " ".join(first_paragraph.split()).rstrip(".")
            print(f"  python -m tools.{name:11s} {sentence}")
    print("\nPrograms to read and to copy:\n\n"
          "  python examples/one_step.py                     one step of GRPO, from top to bottom\n"
          "  python examples/loop.py                         this step, thirty times\n"
          "  python examples/dpo.py                          the same with pairs of answers: DPO\n"
          "  python train.py --task examples.largest_last    a second task")
