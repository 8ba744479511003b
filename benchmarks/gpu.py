"""Ten minutes for whoever has a GPU: is it right, how fast is it, how much memory does it take?

    python -m benchmarks.gpu
    python -m benchmarks.gpu --device cpu --size tiny --new_tokens 8 --out try.json  # only a trial

It asks, in this order: what do a large product and reading from memory reach; does models/tiny
sample the same answers as on the CPU, and get the same gradient; how many tokens a second does a
model of the size of 0.5B, with random weights in bfloat16, sample and train on, in how much memory;
how many kernels does that start. Below that stands what `benchmarks.speed --count` expects of a GPU
with these rates.

Each part is a process of its own, with a limit on its time. If one fails, its line says why, and
the others go on. All of it is also in a file, to send in.
"""
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import mitigations  # noqa: F401  fills the lists of choices
from analysis.tables import Table, by_row
from benchmarks import speed
from benchmarks.cases import DTYPES, MEBIBYTE, SIZES, Case, in_a_process, run_quietly
from benchmarks.count import ROWS
from engine.errors import UserError
from engine.optimizer import AdamW
from engine.policy import Policy
from engine.rollouts import Rollouts
from grpo import grpo
from harness.files import is_there, replace_text
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.identity import provenance
from harness.load import load_policy, pick_device
from harness.program import run_as_program
from harness.progress import say, show_status
from harness.settings import make_settings

LONGEST = 150  # seconds of a part
# how far a gradient may be from the CPU's, as a share of its norm: both round, bfloat16 to 8 bits
SAME = {"float32": 1e-3, "bfloat16": 0.05}
SLOWEST = 10  # kernels that the file names


def agreement(case: Case) -> Callable:
    """models/tiny there and on the CPU, with the same problems and random numbers."""
    on_cpu, there = (load_policy(make_settings({"device": device, "dtype": case.dtype}))
                     for device in ("cpu", case.device))
    expected, found = ask(on_cpu, case), ask(there, case).to("cpu")
    equal = (expected.ids == found.ids).all(1)
    gradient = gradient_of(on_cpu, expected, case)
    difference = gradient_of(there, expected, case) - gradient
    result = {"answers": len(equal), "equal": int(equal.sum()),
              "log_prob": (expected.log_prob - found.log_prob)[equal].abs().sum().item(),
              "tokens": int(expected.mask[equal].sum()),
              "gradient": (difference.norm() / gradient.norm()).item()}
    return lambda: result


def ask(policy: Policy, case: Case) -> Rollouts:
    problems = policy.task.training_problems(0, 1, case.questions)
    rollouts = policy.ask(problems, case.answers, seed=1)
    return replace(rollouts, advantage=grpo(rollouts))


def gradient_of(policy: Policy, batch: Rollouts, case: Case) -> torch.Tensor:
    """That of all parameters, on the CPU."""
    model = policy.model
    optimizer = AdamW(model.parameters(), speed.NO_LEARNING)
    speed.train_on(model, optimizer, batch.to(model.device), case)
    return torch.cat([p.grad.flatten().double().cpu() for p in model.parameters()])


def kernels(case: Case) -> Callable:
    """How many a token step and an update start, by the profiler, and which take longest. What a
    rollout of 65 tokens has beyond one of 33 is 32 token steps."""
    short, long = (profiled(replace(case, what="rollout", new_tokens=T)) for T in (33, 65))
    update = profiled(replace(case, what="update"))
    result = {"token step": (len(long) - len(short)) / 32, "update": len(update),
              "slowest of a rollout": slowest(long), "slowest of an update": slowest(update)}
    return lambda: result


def profiled(case: Case) -> list:
    """What the device did: kernels and copies; on a CPU operations of torch."""
    kind = "CPU" if case.device == "cpu" else "CUDA"
    work = speed.WORK[case.what](case)
    work()
    with profile(activities=[getattr(ProfilerActivity, kind)]) as profiler:
        work()
        speed.wait_for(case.device)
    wanted = getattr(DeviceType, kind)
    return [event for event in profiler.events() if event.device_type == wanted]


def slowest(events: list) -> dict[str, float]:
    """Milliseconds of the kernels that take most, all calls together."""
    times = Counter()
    for event in events:
        times[event.name] += event.time_range.elapsed_us() / 1000
    return dict(times.most_common(SLOWEST))


speed.WORK |= {"agreement": agreement, "kernels": kernels}


def parts_of(given) -> dict[str, Case]:
    case = Case(given.size, "", 8, 8, given.new_tokens, given.device, "bfloat16", threads=0)
    update = replace(case, what="update")
    return {
        "rates": replace(case, what="limits"),
        **{f"models/tiny, {dtype}": replace(case, what="agreement", dtype=dtype)
           for dtype in DTYPES},
        **{f"sample, {rows:,} answers": replace(case, what="rollout", answers=rows // 8)
           for rows in ROWS},
        "update": update,
        "update --checkpointing": replace(update, checkpointing=True),
        "update --offload_optimizer": replace(update, offload_optimizer=True),
        "step": replace(case, what="step"),
        "kernels": replace(case, what="kernels")}


def expectation(given, rates: dict) -> str:
    """What `benchmarks.speed --count` prints for these rates; for its own, where they failed."""
    flags = ["--sizes", given.size, "--new_tokens", given.new_tokens]
    if "error" not in rates:
        flags += ["--bandwidth", rates["bandwidth"] / 1e12, "--rate", rates["rate"] / 1e12]
    command = [sys.executable, "-m", "benchmarks.speed", "--count", *map(str, flags)]
    return run_quietly(command, "expectation", LONGEST)


def attempt(function: Callable, *arguments):
    """What it returns, or the error that it ended with; a process may also print what is no JSON,
    or nothing."""
    try:
        return function(*arguments)
    except (UserError, ValueError, LookupError) as error:
        return {"error": str(error)}


def sentence(case: Case, found: dict) -> str:
    if "error" in found:
        return f"FAILED: {found['error']}"
    if case.what == "limits":
        return (f"{found['rate'] / 1e12:.3g} * 10^12 operations a second in a large product, "
                f"{found['bandwidth'] / 1e12:.3g} TB a second read")
    if case.what == "agreement":
        is_same = found["equal"] and found["gradient"] < SAME[case.dtype]
        return (f"{found['equal']} of {found['answers']} answers equal, their log-probs "
                f"{found['log_prob'] / max(1, found['tokens']):.0e} apart, the gradient "
                f"{found['gradient']:.0e} of its norm: {'as' if is_same else 'NOT AS'} on the CPU")
    if case.what == "kernels":
        return f"{found['token step']:,.0f} a token step, {found['update']:,} an update"
    return f"{speed.speed(found):,.0f} tokens a second, {found['memory'] / MEBIBYTE:,.0f} MiB"


def show(parts: dict[str, Case], report: dict) -> None:
    show_status("")
    rows = [[name, sentence(parts[name], found)] for name, found in report["parts"].items()]
    print("\n" + Table("gpu", "", by_row({"part": "", "found": ""}, rows)).to_text())
    print(f"\n{report['expected']}")


FLAGS = {
    "device": Flag("cuda", "cuda, cuda:N, or cpu, which only tries this program"),
    "size": Flag("0.5B", "of the model that is timed", choices=tuple(SIZES)),
    "new_tokens": Flag(512, "tokens of an answer", least=2, most=100_000),
    "out": Flag("gpu_report.json", "a new file, for all that was found"),
    "case": Flag(None, "do this one part, given as JSON, and print JSON"),
}


def main(argv: list[str]) -> None:
    parser = Parser("python -m benchmarks.gpu [flags]", __doc__)
    given = with_defaults(add_flags(parser, FLAGS).read(argv), FLAGS)
    if given.case is not None:
        print(json.dumps(speed.measure(Case(**json.loads(given.case)))))
        return
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU here, so there is nothing to measure; `python -m "
                        "benchmarks.speed --count` says what one would do, by arithmetic")
    device = pick_device(given.device)
    if is_there(given.out):
        raise UserError(f"--out {given.out}: there is such a file already")
    parts = parts_of(given)
    say(f"In about ten minutes, on {given.device}, a process each: {'; '.join(parts)}. At last "
        f"what was to be expected, by arithmetic. All of it goes into {given.out}.")
    gpu = str(torch.cuda.get_device_properties(device)) if device.type == "cuda" else "none"
    report = {**provenance(), "gpu": gpu, "parts": {}, "expected": "not counted"}
    try:
        for number, (name, case) in enumerate(parts.items()):
            show_status(f"{number + 1} of {len(parts)}: {name}")
            report["parts"][name] = attempt(in_a_process, case, "benchmarks.gpu", LONGEST)
            replace_text(Path(given.out), json.dumps(report, indent=2))
        report["expected"] = attempt(expectation, given, report["parts"]["rates"])
        replace_text(Path(given.out), json.dumps(report, indent=2))
    finally:  # after Ctrl-C, what there is
        show(parts, report)


if __name__ == "__main__":
    run_as_program("benchmarks.gpu", main)
