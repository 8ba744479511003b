"""What does a GRPO loss optimise? Its formula is read off its gradient, and its code is not read.

    python -m lab.formula MY_LOSS.py
    python -m lab.formula MY_LOSS.py --expect "z n-1 1e-4, token, clip 0.2 0.28"

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
off: one number for each token, in small batches with other rewards, lengths and ratios each. A
search proposes lines of six tables (tables.py). The loss that these lines make is differentiated,
and the formula is believed only if this gives the gradient of new batches to a millionth.

It prints mistakes first, then choices, then what each token of one answer gets. With --expect the
exit status is 1 if a clause does not hold. This folder needs torch and nothing else: it can be
copied into another project as it is.
"""
if not __package__:
    raise SystemExit("start it with: python -m lab.formula")
import argparse
import json
import sys
import textwrap
from pathlib import Path

import torch

from .batches import make_case
from .calling import Examined, LossFailed, load_loss
from .ours import Formula, View, gradient_of
from .reading import read
from .search import Found, find_formula
from .tables import kinds
from .words import as_json, sentences, unmet

PLAIN = Formula(scale="n", epsilon=1e-4)


class WrongInput(Exception):
    """What is asked for cannot be done; the sentence says why."""


def main(argv: list[str]) -> None:
    flags = parser().parse_args(argv)
    try:
        loss = load_loss(Path(flags.FILE), flags.function)
    except LossFailed as error:
        raise WrongInput(str(error)) from None
    try:
        found = find_formula(loss)
    except LossFailed as error:
        if flags.traceback and error.traceback:
            print(error.traceback, file=sys.stderr)
        hint = "" if flags.traceback or not error.traceback else " (--traceback shows where)"
        raise WrongInput(f"the loss of {flags.FILE} cannot be examined: {error}{hint}") from None
    try:
        missing = unmet(found, flags.expect) if flags.expect is not None else []
    except ValueError as error:
        raise WrongInput(str(error)) from None
    if flags.json:
        print(json.dumps(as_json(found) | {"unmet": missing}, indent=2))
    else:
        print_found(found, loss, flags.FILE)
        if missing:
            print(f"\nExpected, and not so: {', '.join(missing)}")
    if missing:
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m lab.formula", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("FILE", help="a file with a function loss(logits, batch)")
    made.add_argument("--expect", help="clauses that have to hold, with commas between them, such "
                      "as: z n-1 1e-4, token, clip 0.2 0.28, no kl. Otherwise the exit status is 1")
    made.add_argument("--json", action="store_true", help="print what was found as JSON")
    made.add_argument("--function", default="loss", help="name of the function in the file")
    made.add_argument("--traceback", action="store_true",
                      help="if the loss raises, print its traceback, too")
    return made


def print_found(found: Found, loss, name: str) -> None:
    print(f"{name}, read off its gradient\n")
    for sentence in sentences(found):
        print(textwrap.fill(sentence, 100, subsequent_indent="  "))
    if not found.is_zero and "lens" in found.formula.sure:
        print()
        print(table_of_tokens(found, loss))


def table_of_tokens(found: Found, loss) -> str:
    """What each token of one answer gets, beside what plain GRPO gives it."""
    case = make_case(2, lens=found.formula.lens)
    examined = Examined(loss)
    examined.choose_dtype(case)
    push = read(examined.gradient(case), case, found.formula.lens).push
    plain = read(gradient_of(PLAIN, case), case, PLAIN.lens).push
    view = View(case.logits, case.batch(), found.formula.lens)
    row = int(plain.abs().sum(1).argmax())
    scale = plain.abs().max()
    rows = [f"one answer, reward {float(case.reward[row]):.2f}", "",
            f"{'token':16s}{'its p':>8s}{'your push':>12s}{'plain GRPO':>12s}"]
    names = kinds(view)
    for place in range(int(case.prompt_length[row] + case.length[row]) + 1):
        kind = next((name for name, where in names.items()
                     if where.expand_as(case.mask)[row, place]), "")
        if kind:
            p = float(view.log_prob[row, place].exp())
            yours, theirs = (float(value[row, place] / scale) for value in (push, plain))
            rows.append(f"{kind.replace('_', ' '):16s}{p:8.3f}{yours:12.3f}{theirs:12.3f}")
    return "\n".join(rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main(sys.argv[1:])
    except WrongInput as error:
        sys.exit(f"formula: {error}")
