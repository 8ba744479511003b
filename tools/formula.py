"""What does a GRPO loss optimise? Its formula is read off its gradient, and its code is not read.

    python -m tools.formula MY_LOSS.py
    python -m tools.formula MY_LOSS.py --expect "z n-1 1e-4, token, clip 0.2 0.28"

MY_LOSS.py has one function:

    def loss(logits, batch):      # logits (B, L, V) with a gradient; logits[:, t] predict token t+1
        ...                       # returns the number that you call backward on

    batch.ids (B, L)              prompt and answer, padded at the end
    batch.prompt_length (B,)      tokens of each prompt
    batch.mask (B, L)             1 at the tokens of the answer, its end included
    batch.reward (B,)
    batch.group (B,)              the number of the problem; the rows of a group lie together
    batch.old_log_prob (B, L)     of these tokens under the model that sampled them; 0 at the prompt
    batch.reference_log_prob (B, L)   the same under the reference model, for a loss with a KL term
    batch.end_id, batch.pad_id

The gradient of one token's log-prob has a known direction at the logits, so its size can be read
off: one number for each token, in small batches with other rewards, lengths and ratios each. The
known formulas are compared with these numbers. One is named only if it gives the gradient of new
batches to a millionth; all else is called not understood.

It prints the formula in sentences, the flags of train.py with the same gradient, and what each
token of one answer gets. With --expect the exit status is 1 if a clause does not hold.
"""
if not __package__:
    raise SystemExit("start it with: python -m tools.formula")
import importlib.util
import json
import sys
import textwrap
from pathlib import Path

from engine.errors import UserError
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from harness.screen import run_as_program, say
from tools.helpers.formula_decode import Loss, LossFailed
from tools.helpers.formula_fit import Formula, find_formula
from tools.helpers.formula_flags import about_flags, table_of_tokens
from tools.helpers.formula_report import as_json, sentences, unmet

FLAGS = {
    "expect": Flag(None, "clauses that have to hold, with commas between them, such as: z n-1 "
                         "1e-4, token, clip 0.2 0.28, no kl. Otherwise the exit status is 1",
                   kind=str),
    "json": Flag(False, "print what was found as JSON"),
    "function": Flag("loss", "name of the function in the file"),
    "traceback": Flag(False, "if the loss raises, print its traceback, too")}


def main(argv: list[str]) -> None:
    parser = make_parser("python -m tools.formula MY_LOSS.py", __doc__, FLAGS)
    parser.add_argument("FILE", help="a file with a function loss(logits, batch)")
    flags = with_defaults(parser.read(argv), FLAGS)
    loss = load_loss(Path(flags.FILE), flags.function)
    try:
        formula = find_formula(loss)
    except LossFailed as error:
        if flags.traceback and error.traceback:
            print(error.traceback, file=sys.stderr)
        hint = "" if flags.traceback or not error.traceback else " (--traceback shows where)"
        raise UserError(f"the loss of {flags.FILE} cannot be examined: {error}{hint}") from None
    missing = unmet(formula, flags.expect) if flags.expect else []
    if flags.json:
        print(json.dumps(as_json(formula) | {"unmet": missing}, indent=2))
    else:
        print_formula(formula, flags.FILE)
    if missing and not flags.json:
        say(f"Expected, and not so: {', '.join(missing)}")
    if missing:
        sys.exit(1)


def print_formula(formula: Formula, name: str) -> None:
    print(f"{name}, read off its gradient\n")
    for sentence in sentences(formula):
        print(textwrap.fill(sentence, 100, subsequent_indent="  "))
    if not formula.is_zero and formula.temperature is not None:
        print()
        for line in about_flags(formula):
            print(textwrap.fill(line, 100, subsequent_indent="  "))
        print()
        print(table_of_tokens(formula))


def load_loss(path: Path, name: str = "loss") -> Loss:
    """The function of this name in a Python file. Files beside it can be imported by it."""
    if not path.is_file():
        raise UserError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} cannot be loaded, because it raises {type(error).__name__}: "
                        f"{error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{path} has no function {name}(logits, batch)")
    return function


if __name__ == "__main__":
    run_as_program("formula", main)
