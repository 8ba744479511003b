"""What does a GRPO loss optimise? Its formula is read off its gradient, and its code is not read.

    python -m lab.formula MY_LOSS.py --expect "z n-1 1e-4, token, clip 0.2 0.28"
    python -m lab.formula MY_LOSS.py --same-as BEFORE.py
    python -m lab.formula MY_LOSSES.py:name

MY_LOSS.py has one function, called loss unless its name stands behind a colon:

    def loss(logits, batch):      # logits (B, L, V) with a gradient; logits[:, t] predict token t+1
        log_p = logits.log_softmax(-1)[:, :-1].gather(2, batch.ids[:, 1:, None]).squeeze(2)
        advantage = (batch.reward - batch.reward.mean())[:, None]
        mask = batch.mask[:, 1:]
        return -(log_p * advantage * mask).sum() / mask.sum()

    batch.ids (B, L)              prompt and answer, padded at the end
    batch.prompt_length (B,)      tokens of each prompt
    batch.mask (B, L)             1 at the tokens of the answer, its end included, and 0 at what an
                                  environment wrote within it
    batch.reward (B,)
    batch.group (B,)              the number of the problem; the rows of a group lie together
    batch.old_log_prob (B, L)     of these tokens under the model that sampled them; 0 at the prompt
    batch.reference_log_prob (B, L)   the same under the reference model, for a loss with a KL term
    batch.sampler_log_prob (B, L)     the same as the engine that sampled computed it, such as vLLM
    batch.total                   answer tokens of the whole batch, if these rows are a micro-batch
    batch.end_id, batch.pad_id

It prints the formula first, or what is sure, the nearest formula and a token where it differs. Then
come mistakes, and what is unusual. The exit status is 0 if the loss is understood and nothing wrong
or unusual was seen, 1 if something was, and 2 if the loss cannot be examined or is not understood.
With --expect it is 0 if every clause is true and whatever else was found is usual, and 1 otherwise.
With --same-as it is 0 if both losses have the same gradient.
"""
if not __package__:
    raise SystemExit("start it with: python -m lab.formula")
import argparse
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

import torch

from .calling import Loss, LossFailed, load_loss
from .formula import KNOWN
from .report import FAILED, PASSED, UNKNOWN, clauses_of, judge, with_z, worst_of
from .search import differences, find_formula
from .terms import (CENTRES, COUNTS, FINISHES, LENGTHS, OLDS, RATIOS, REFERENCES, SAMPLERS, SCALES,
                    SHAPES, TERMS, TOKENS, UNFINISHED)

NAME = (__package__ or "").replace("lab.", "lab ")  # in what it says of itself


def main(argv: list[str]) -> int:
    """Print what is said of a loss, and return the exit status."""
    torch.set_num_threads(1)
    flags = parser().parse_args(argv)
    try:
        status, said = compared(flags) if flags.same_as else examined(flags)
    except (LossFailed, ValueError) as error:
        return cannot_examine(flags, str(error))
    print(f"{flags.FILE}, read off its gradient\n")
    for sentence in said:
        print(textwrap.fill(sentence, 100, subsequent_indent="  "))
    return status


def examined(flags: argparse.Namespace) -> tuple[int, list[str]]:
    """The status and the sentences of one loss."""
    if flags.expect is not None:
        clauses_of(flags.expect)  # a mistake in it is told before the search
    found = find_formula(loss_at(flags.FILE))
    verdict = judge(found, flags.expect)
    return verdict.status, verdict.in_words()


def loss_at(where: str) -> Loss:
    """The loss of FILE.py:NAME, or of FILE.py, in which its name is loss."""
    path, colon, name = where.rpartition(":")
    return load_loss(Path(path), name) if colon else load_loss(Path(where), "loss")


def compared(flags: argparse.Namespace) -> tuple[int, list[str]]:
    """The same of two losses that should have one gradient."""
    if flags.expect is not None:
        raise ValueError("--same-as compares two losses, and takes no --expect")
    losses = [loss_at(where) for where in (flags.FILE, flags.same_as)]
    shares = differences(*losses)
    different = {name: share for name, share in shares.items() if share >= KNOWN}
    if different:
        said = f"Another gradient than {flags.same_as}: it differs by {worst_of(different, 99)}."
        return FAILED, [said]
    size = max(max(shares.values()), 1e-16)
    return PASSED, [f"The same gradient as {flags.same_as} on {len(shares)} kinds of batches, to "
                    f"{size:.0e} of its size."]


def cannot_examine(flags: argparse.Namespace, why: str) -> int:
    print(f"{NAME}: the loss of {flags.FILE} cannot be examined: {why}", file=sys.stderr)
    return UNKNOWN


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(UNKNOWN, f"{NAME}: {message} (--help lists the flags)\n")


def parser() -> argparse.ArgumentParser:
    usage = (__doc__ or "").replace("lab.formula", __package__)
    z_scores = [with_z(("mean", code)) for code in SCALES if code]
    parts = {"advantage": [*CENTRES, *z_scores], "its end": FINISHES, "equal weight": COUNTS,
             "divisor": LENGTHS, "tokens": [*TOKENS, UNFINISHED, *SHAPES],
             "ratio": [*RATIOS, *OLDS], "sampler": SAMPLERS, "without reward": TERMS,
             "its reference": REFERENCES}
    clauses = "\n".join(textwrap.fill(f"{part}: {', '.join(filter(None, codes))}", 100,
                                      initial_indent="  ", subsequent_indent="      ")
                        for part, codes in parts.items())
    made = Parser(f"python -m {__package__}", description=usage,
                  epilog=f"Clauses, with braces for numbers:\n{clauses}",
                  formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("FILE", help="a file with a function loss(logits, batch), or FILE.py:NAME")
    made.add_argument("--expect", help="all that has to hold, with commas between the clauses, "
                      "such as: z n-1 1e-4, token, clip 0.2 0.28. Usual things need no clause. "
                      "A mistake that you want has the clause that is printed in brackets")
    made.add_argument("--same-as", metavar="OTHER.py", help="compare the gradient with that of the "
                      "loss in another file")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
