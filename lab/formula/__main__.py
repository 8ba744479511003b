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

It prints mistakes first, then choices. With --expect the exit status is 1 if a clause does not
hold. This folder needs torch and nothing else: it can be copied into another project as it is.
"""
if not __package__:
    raise SystemExit("start it with: python -m lab.formula")
import argparse
import sys
import textwrap
from pathlib import Path

import torch

from .calling import LossFailed, load_loss
from .search import find_formula
from .words import codes, sentences, unmet


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
    print(f"{flags.FILE}, read off its gradient\n")
    for sentence in sentences(found):
        print(textwrap.fill(sentence, 100, subsequent_indent="  "))
    if missing:
        print(f"\nExpected, and not so: {', '.join(missing)}")
        print(f"What holds: {', '.join(sorted(codes(found)))}")
        sys.exit(1)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m lab.formula", description=__doc__,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("FILE", help="a file with a function loss(logits, batch)")
    made.add_argument("--expect", help="clauses that have to hold, with commas between them, such "
                      "as: z n-1 1e-4, token, clip 0.2 0.28, no kl. Otherwise the exit status is 1")
    made.add_argument("--function", default="loss", help="name of the function in the file")
    made.add_argument("--traceback", action="store_true",
                      help="if the loss raises, print its traceback, too")
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        main(sys.argv[1:])
    except WrongInput as error:
        sys.exit(f"formula: {error}")
