"""How fast is an update of a real model on a CPU, next to plain torch and next to the limit?

    python -m lab.speed.against_torch --model FOLDER

The lab keeps parameters and AdamW's state in float32 and multiplies in bfloat16. Plain torch is a
loop without any of the lab's own kernels or its optimizer. It keeps parameters, gradients and
AdamW's state in bfloat16, so it never rounds a matrix and moves half as many bytes. Both compute
the same tokens in the same micro-batches, with the same prompts shared, and keep freed memory.

They take turns, each in a process of its own. A ratio above 1 means that the lab is faster. With
one thread, which is the default, seconds are the processor's, so that other programs disturb less.
The limit is the time of the matrix products and of AdamW's bytes (lab/speed/cases.py).
"""
from dataclasses import replace
from statistics import median

from lab.speed import cases
from lab.speed.cases import Case, in_a_process
from engine.errors import UserError
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from harness.screen import run_as_program, show_status

DEFAULTS = {"model": "", "dtype": "bfloat16", "threads": 1, "questions": 4, "answers": 4,
            "new_tokens": 40, "prompt_tokens": 0, "prefix": 0, "micro_batch": 8}
FLAGS = {name: replace(cases.FLAGS[name], default=default) for name, default in DEFAULTS.items()}
TURNS = Flag(2, "how often each of the two is measured", least=1, most=100)


def sentence_of(found: dict) -> str:
    return (f"{found['tokens'] / found['seconds']:.1f} tokens a second, "
            f"{found['system']:.0%} of the time in the system, "
            f"{found['memory'] / 2 ** 20:,.0f} MiB")


def main(argv: list[str]) -> None:
    parser = make_parser("python -m lab.speed.against_torch --model FOLDER [flags]", __doc__,
                         FLAGS | {"turns": TURNS})
    given = vars(with_defaults(parser.read(argv), FLAGS | {"turns": TURNS}))
    turns = given.pop("turns")
    if not given["model"]:
        raise UserError("--model FOLDER is needed: the folder of a real model")
    ratios, shares = [], []
    for turn in range(turns):
        found = {}
        for what in ("update", "plain"):
            show_status(f"turn {turn + 1} of {turns}: {what}")
            found[what] = in_a_process(Case(what, **given))
            show_status("")
            print(f"{what:8}{sentence_of(found[what])}", flush=True)
        ratios.append(found["plain"]["seconds"] / found["update"]["seconds"])
        shares.append(found["update"]["limit"] / found["update"]["seconds"])
    print(f"the lab's update: {median(ratios):.2f} of plain torch's speed, "
          f"{median(shares):.0%} of the limit")


if __name__ == "__main__":
    run_as_program("lab.speed.against_torch", main)
