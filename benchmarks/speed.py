"""How fast rollouts, updates and whole steps are, beside this machine's limit and other code.

    python -m benchmarks.speed                                # tiny and small, a few minutes
    python -m benchmarks.speed --sizes 0.5B --questions 2 --answers 4 --new_tokens 64 --repeats 1
    python -m benchmarks.speed --sizes 0.5B --device cuda --dtype bfloat16
    python -m benchmarks.speed --count                        # what a GPU would do: count.py

Run it from the project's folder. Every measurement is a process of its own, and they take turns,
so that a busy minute of the machine hits all alike. The table shows medians over the turns; a ratio
is the median of the ratios within a turn.

    rollout          all answers have the same length
    ragged rollout   each token ends its answer with a chance of 1 in 40
    update           one, of random answers
    step             rollout, advantage, update, credit file; rewards are random
    of the limit     the seconds that the products with matrices take at the machine's measured
                     rates, as a share of the seconds taken; attention is left out
"""
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch

from analysis.tables import Table, by_row
from benchmarks.cases import (DTYPES, MEBIBYTE, SIZES, Case, as_rollouts, in_a_process, make_batch,
                              make_config, make_model, make_prompts, read_sizes, stop_tokens)
from benchmarks.count import least_seconds, rollout_needs, show_counted, update_needs
from engine.offload import OffloadedAdamW
from engine.optimizer import AdamW
from engine.sampler import generate
from grpo import update
from harness.metrics import peak_memory
from harness.credit_file import write_credit
from harness.flags import MOST_THREADS, Flag, Parser, add_flags, with_defaults
from harness.load import pick_device
from harness.program import run_as_program
from harness.progress import show_status
from harness.settings import Settings
from qwen2_model import Qwen2

NO_LEARNING = 1e-12  # as good as zero: every turn does the same work on the same weights


def work_of(case: Case) -> Callable:
    """A rollout, an update of random answers, or both and a credit file, as a training step has
    them, without a task: rewards are random, texts are not read."""
    model, prompts, stop_ids = make_model(case), make_prompts(case), stop_tokens(case)
    batch = make_batch(case) if case.what == "update" else None
    optimizer = None if "rollout" in case.what else optimizer_of(model, case)

    def work():
        rollouts, needs = batch, []
        if batch is None:
            sampled = generate(model, prompts, answers=case.answers, stop_ids=stop_ids,
                               max_new_tokens=case.new_tokens, seed=1)
            rollouts = as_rollouts(case, sampled.tokens, sampled.mask, sampled.log_prob,
                                   sampled.entropy, sampled.collision)
        lengths = rollouts.length.tolist()
        if batch is None:
            needs += rollout_needs(model, prompts, lengths)
        if optimizer:
            train_on(model, optimizer, rollouts, case)
            needs += update_needs(model, prompts, lengths)
        if case.what == "step":
            with tempfile.TemporaryDirectory() as folder:
                write_credit(Path(folder, "step.npz"), rollouts, rollouts.mask.float())
        return {"tokens": sum(lengths), "needs": needs}
    return work


def optimizer_of(model: Qwen2, case: Case) -> AdamW:
    if case.offload_optimizer:
        return OffloadedAdamW(model, case.device, NO_LEARNING, 0.0)
    return AdamW(model.parameters(), NO_LEARNING)


def train_on(model: Qwen2, optimizer, batch, case: Case) -> None:
    """One update, every token with weight 1."""
    update(model, optimizer, batch, batch.mask.float(), Settings(micro_batch=case.micro_batch))


def transformers_rollout(case: Case) -> Callable:
    """`generate` of transformers at temperature 1, with a prompt of its own for every answer."""
    import transformers
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**make_config(case).to_json())
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype))
    model = model.to(case.device)
    prompts, stop_ids = make_prompts(case), stop_tokens(case)
    P = max(map(len, prompts))
    ids = torch.tensor([[0] * (P - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (P - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ids, mask = ids.to(case.device), mask.to(case.device)
    model.generation_config.eos_token_id = list(stop_ids) or None
    model.generation_config.pad_token_id = 0

    def work():
        torch.manual_seed(1)
        sampled = model.generate(input_ids=ids, attention_mask=mask, do_sample=True, top_k=0,
                                 num_return_sequences=case.answers, max_new_tokens=case.new_tokens)
        ends = torch.isin(sampled[:, P:], torch.tensor(stop_ids, device=case.device)).long()
        ended_before = ends.cumsum(1) - ends
        return {"tokens": (ended_before == 0).sum().item()}
    return work


def limits(case: Case) -> Callable:
    """Operations a second of a large product, bytes a second read from memory: best of seven."""
    side, width = (1536, 2 ** 12) if case.device == "cpu" else (8192, 2 ** 16)
    square = torch.randn(side, side, device=case.device).to(getattr(torch, case.dtype))
    matrix = torch.randn(2 ** 14, width, device=case.device)
    vector = torch.randn(width, device=case.device)

    def best_seconds(function):
        return min(seconds_of(function, case)[0] for _ in range(7))

    def work():
        product = best_seconds(lambda: square @ square)
        reading = best_seconds(lambda: matrix @ vector)
        return {"rate": 2 * side ** 3 / product, "bandwidth": 4 * matrix.numel() / reading}
    return work


OURS = dict.fromkeys(("rollout", "ragged rollout", "update", "step"), work_of)
THEIRS = "{}, transformers"
WORK = {**OURS, "limits": limits, THEIRS.format("rollout"): transformers_rollout,
        THEIRS.format("ragged rollout"): transformers_rollout}


def rival_of(case: Case) -> Case | None:
    """The same work done by transformers; None if it cannot."""
    what = THEIRS.format(case.what)
    return replace(case, what=what) if what in WORK and find_spec("transformers") else None


def seconds_of(function: Callable, case: Case) -> tuple[float, object]:
    """Seconds that the function takes, and what it returns.

    With one CPU thread the clock is the processor's time of this process: what others do on a
    shared machine then counts only by what it does to caches and memory.
    """
    alone = case.device == "cpu" and case.threads == 1
    clock = time.process_time if alone else time.perf_counter
    wait_for(case.device)
    start = clock()
    result = function()
    wait_for(case.device)
    return clock() - start, result


def wait_for(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def measure(case: Case) -> dict:
    """Do the work once to warm up, then for about a second, at least once: tokens, the median of
    the seconds, and the most bytes beyond those of the program itself."""
    device = pick_device(case.device)
    torch.set_num_threads(case.threads or torch.get_num_threads())
    if "transformers" in case.what:
        import transformers  # noqa: F401  its code should not count as the model's memory
    before = 0 if device.type == "cuda" else peak_memory(device)
    work = WORK[case.what](case)
    work()
    seconds = []
    while not seconds or sum(seconds) < 1 and len(seconds) < 9:
        duration, result = seconds_of(work, case)
        seconds.append(duration)
    memory = peak_memory(device) - before
    return {**result, "seconds": median(seconds), "memory": memory}


def take_turns(cases: list[Case], repeats: int) -> dict[Case, list[dict]]:
    results = {case: [] for case in cases}
    for turn in range(repeats):
        for case in cases:
            show_status(f"turn {turn + 1} of {repeats}: {case.size}, {case.what}")
            results[case].append(in_a_process(case))
    show_status("")
    return results


def speed(turn: dict) -> float:
    return turn["tokens"] / turn["seconds"]


def row_of(case: Case, results: dict[Case, list[dict]], limit: list[dict]) -> list:
    turns = results[case]
    speeds = list(map(speed, turns))
    theirs = results.get(rival_of(case), [])
    ratios = [ours / speed(turn) for ours, turn in zip(speeds, theirs)]
    rows = case.questions * case.answers
    return [case.size, case.what, f"{rows} x {turns[0]['tokens'] / rows:.0f}", median(speeds),
            (min(speeds), max(speeds)), median(ratios) if ratios else None,
            median(least_seconds(turn["needs"], rates) / turn["seconds"]
                   for turn, rates in zip(turns, limit)),
            median(turn["memory"] for turn in turns) / MEBIBYTE]


COLUMNS = {"size": "", "what": "", "answers x tokens": "", "tokens a second": ",.0f",
           "lowest to highest": ",.0f", "times transformers": ".2f",
           "of the limit": ".0%", "peak memory, MiB": ",.0f"}
FLAGS = {
    "sizes": Flag("tiny,small", f"some of {', '.join(SIZES)}"),
    "questions": Flag(8, "problems in a batch", least=1, most=10_000),
    "answers": Flag(8, "answers to each", least=1, most=1000),
    "new_tokens": Flag(128, "tokens of an answer", least=2, most=100_000),
    "device": Flag("cpu", "cpu, cuda or cuda:N"),
    "dtype": Flag("float32", "numbers to compute with", choices=DTYPES),
    "threads": Flag(1, "CPU threads; 0 is what PyTorch finds", least=0, most=MOST_THREADS),
    "micro_batch": Flag(8, "answers in memory at once during the update", least=1, most=10_000),
    "checkpointing": Flag(False, "as in train.py"),
    "offload_optimizer": Flag(False, "as in train.py; on a CPU it saves nothing"),
    "repeats": Flag(3, "turns of every measurement", least=1, most=1000),
    "count": Flag(False, "measure nothing, count what a GPU would do: 0.5B, bfloat16, 512 tokens "
                         "unless others are given"),
    "bandwidth": Flag(3.35, "with --count: TB a second; that of an H100 SXM", above=0, most=1000),
    "rate": Flag(989.0, "with --count: 10^12 operations a second in products, likewise", above=0,
                 most=1e6),
    "case": Flag(None, "measure this one case, given as JSON, and print JSON: what a process of "
                       "its own is started with"),
}
COUNTED = {"sizes": "0.5B", "dtype": "bfloat16", "new_tokens": 512}


def main(argv: list[str]) -> None:
    typed = add_flags(Parser("python -m benchmarks.speed [flags]", __doc__), FLAGS).read(argv)
    given = with_defaults({**(COUNTED if typed.get("count") else {}), **typed}, FLAGS)
    if given.case is not None:
        print(json.dumps(measure(Case(**json.loads(given.case)))))
        return
    pick_device(given.device)
    flags = {name: getattr(given, name) for name in vars(Case("", "")).keys() & FLAGS.keys()}
    cases = [Case(size, "", **flags) for size in read_sizes(given.sizes)]
    if given.count:
        for case in cases:
            show_counted(case, {"bandwidth": given.bandwidth * 1e12, "rate": given.rate * 1e12})
    else:
        show_measured(cases, given)


def show_measured(sizes: list[Case], given) -> None:
    limit_case = replace(sizes[0], what="limits")
    ours = [replace(case, what=what) for case in sizes for what in OURS]
    cases = [limit_case]
    for case in ours:
        cases += filter(None, (case, rival_of(case)))
    results = take_turns(cases, given.repeats)
    limit = results[limit_case]
    rows = [row_of(case, results, limit) for case in ours]
    print(f"{given.device}, {given.dtype}, {given.threads or 'all'} threads: "
          f"{median(turn['rate'] for turn in limit) / 1e9:,.0f} * 10^9 operations a second in a "
          f"large product, {median(turn['bandwidth'] for turn in limit) / 1e9:,.1f} GB a second "
          f"from memory; {given.repeats} turns\n")
    print(Table("speed", "", by_row(COLUMNS, rows)).to_text(limit=1000))


if __name__ == "__main__":
    run_as_program("benchmarks.speed", main)
