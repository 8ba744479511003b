"""Says where `tools.formula` is now: python -m lab.formula."""
if not __package__:
    raise SystemExit("start it with: python -m tools.formula")
from engine.errors import UserError
from harness.screen import run_as_program


def main(argv: list[str]) -> None:
    raise UserError("tools.formula is now lab.formula: python -m lab.formula my_loss.py")


if __name__ == "__main__":
    run_as_program("tools.formula", main)
