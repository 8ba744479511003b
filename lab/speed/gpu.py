"""A check of three minutes on a GPU: is it right, how fast is it, how much memory does it take?

    python -m lab.speed.gpu
    python -m lab.speed.gpu --device cpu --model FOLDER --dtype float32 --new_tokens 40

The first command measures a GPU, and the second a CPU. Does models/tiny sample the same answers
there as on the CPU, and get the same gradient? How many tokens a second does a model of 0.5 billion
parameters sample and train on, with random weights in bfloat16, and how much memory does it take?
Beside the update stands one in plain torch, whose parameters are bfloat16, too.

With --model the model is a real one. The last lines then have short answers to long prompts. In
some of these lines the prompts have no tokens in common, and in others most of their tokens, as
where the same examples stand before each problem.

Each part is a process of its own, with a limit on its time. If one fails, its line says why, and
the others go on.
"""
from dataclasses import replace

import torch

from lab.speed import cases
from lab.speed.cases import DTYPES, Case, in_a_process
from lab.engine.errors import UserError
from lab.harness.flags import read
from lab.harness.build import pick_device
from lab.harness.screen import run_as_program, show_status

MANY = 32      # answers in a micro-batch of a large model, unless another number is typed
LONGEST = 150  # seconds of a part
ROWS = (64, 256, 1024)  # answers that are sampled at the same time
# answers as short as a number, prompts with examples; of a prompt the tokens that all have
SHORT, PREFIX = {"new_tokens": 6, "prompt_tokens": 110}, 95
# how far a gradient may be from the CPU's, as a share of its norm: both round, bfloat16 to 8 bits
SAME = {"float32": 1e-3, "bfloat16": 0.05}
DEFAULTS = {"device": "cuda", "size": "0.5B", "new_tokens": 512, "dtype": "bfloat16", "threads": 0,
            "model": ""}
FLAGS = {name: replace(cases.FLAGS[name], default=default) for name, default in DEFAULTS.items()}


def parts_of(case: Case) -> dict[str, Case]:
    """The cases to measure, by what is printed before each."""
    return parts_of_real_model(case) if case.model else parts_of_random_model(case)


def parts_of_random_model(case: Case) -> dict[str, Case]:
    parts = {}
    for dtype in DTYPES:
        parts[f"models/tiny, {dtype}"] = replace(case, what="agreement", dtype=dtype)
    for rows in ROWS:
        answers = rows // case.questions
        parts[f"sample, {rows:,} answers"] = replace(case, what="rollout", answers=answers)
    update = replace(case, what="update")
    parts[f"update, micro-batches of {case.micro_batch}"] = update
    if case.device.startswith("cuda"):
        case = replace(case, micro_batch=max(case.micro_batch, MANY))
        many = f"micro-batches of {case.micro_batch}"
        parts[f"update, {many}"] = replace(case, what="update")
        parts[f"plain torch, {many}"] = replace(case, what="plain")
    parts["update --checkpointing"] = replace(update, checkpointing=True)
    parts["step"] = replace(case, what="step")
    return parts


def parts_of_real_model(case: Case) -> dict[str, Case]:
    """Cases with few answers, because each takes minutes on a CPU."""
    few = replace(case, what="rollout", questions=4, answers=4)
    parts = {
        "sample, 16 answers": few,
        "sample, 64 answers": replace(few, questions=8, answers=8),
        "update, 16 answers": replace(few, what="update")}
    short = replace(case, questions=8, answers=8, micro_batch=64, **SHORT)
    for name, what in (("sample", "rollout"), ("update", "update")):
        for prefix in (0, PREFIX):
            parts[f"{name}, short, {prefix} shared"] = replace(short, what=what, prefix=prefix)
    return parts


def outcome(case: Case) -> str:
    """The sentence of a case, or the error that its process ended with. That process may also have
    printed nothing, or something that is no JSON."""
    try:
        found = in_a_process(case, None if case.model else LONGEST)
    except (ValueError, LookupError) as error:
        return f"FAILED: {error}"
    if case.what == "agreement":
        is_same = found["equal"] and found["gradient"] < SAME[case.dtype]
        gap = found["log_prob"] / max(1, found["tokens"])
        return (f"{'the same as' if is_same else 'NOT THE SAME AS'} on the CPU: {found['equal']} "
                f"of {found['answers']} answers are equal, log-probs differ by {gap:.0e}, and the "
                f"gradient by {found['gradient']:.0e} of its norm")
    return (f"{found['tokens'] / found['seconds']:,.0f} tokens a second, "
            f"{found['memory'] / 2 ** 20:,.0f} MiB")


def main(argv: list[str]) -> None:
    given = read(argv, "python -m lab.speed.gpu [flags]", __doc__, FLAGS)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU here, so there is nothing to measure. --device cpu "
                        "--model FOLDER measures this CPU")
    device = pick_device(given.device)
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else "no GPU"
    print(f"PyTorch {torch.__version__}, {gpu}\n")
    parts = parts_of(Case("", **{name: vars(given)[name] for name in FLAGS}))
    for number, (name, case) in enumerate(parts.items()):
        show_status(f"{number + 1} of {len(parts)}: {name}")
        said = outcome(case)
        show_status("")
        print(f"{name:32}  {said}")


if __name__ == "__main__":
    run_as_program("lab.speed.gpu", main)
