"""How fast rollouts, updates and whole steps are, beside this machine's limit and other code.

    python -m benchmarks.speed                                # tiny and small, a few minutes
    python -m benchmarks.speed --grpo_zero FOLDER             # beside GRPO-Zero, a checkout of it
    python -m benchmarks.speed --sizes 0.5B --questions 2 --answers 4 --new_tokens 64 --repeats 1
    python -m benchmarks.speed --sizes 0.5B --device cuda --dtype bfloat16

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
from benchmarks.cases import (DTYPES, MEBIBYTE, SHARED_FLAGS, Case, as_rollouts, in_a_process,
                              make_batch, make_config, make_model, make_prompts, read_sizes,
                              stop_tokens)
from engine.errors import UserError, is_folder
from engine.optimizer import make_optimizer
from engine.sampler import generate
from grpo import update
from harness.metrics import peak_memory
from harness.credit_file import write_credit
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.load import pick_device
from harness.program import run_as_program
from harness.progress import show_status
from harness.settings import Settings
from qwen2_model import Qwen2

NO_LEARNING = 1e-12  # as good as zero: every turn does the same work on the same weights


def rollout(case: Case) -> Callable:
    model, prompts, stop_ids = make_model(case), make_prompts(case), stop_tokens(case)

    def work():
        mask = generate(model, prompts, answers=case.answers, max_new_tokens=case.new_tokens,
                        seed=1, stop_ids=stop_ids).mask
        lengths = mask.sum(1).tolist()
        return {"tokens": sum(lengths), "needs": rollout_needs(model, prompts, lengths)}
    return work


def updating(case: Case) -> Callable:
    model, batch = make_model(case), make_batch(case)
    optimizer = make_optimizer(model, NO_LEARNING, 0.0, case.offload_optimizer, case.device)
    lengths = batch.length.tolist()

    def work():
        train_on(model, optimizer, batch, case)
        return {"tokens": sum(lengths), "needs": update_needs(model, batch.prompt_ids, lengths)}
    return work


def whole_step(case: Case) -> Callable:
    """What a training step does, without a task: rewards are random, texts are not read."""
    model, prompts = make_model(case), make_prompts(case)
    optimizer = make_optimizer(model, NO_LEARNING, 0.0, case.offload_optimizer, case.device)

    def work():
        sampled = generate(model, prompts, answers=case.answers, max_new_tokens=case.new_tokens,
                           seed=1, stop_ids=())
        batch = as_rollouts(case, sampled.tokens, sampled.mask, sampled.log_prob,
                            sampled.entropy, sampled.collision)
        train_on(model, optimizer, batch, case)
        with tempfile.TemporaryDirectory() as folder:
            write_credit(Path(folder, "step.npz"), batch, batch.mask.float())
        lengths = batch.length.tolist()
        needs = [*rollout_needs(model, prompts, lengths), *update_needs(model, prompts, lengths)]
        return {"tokens": sum(lengths), "needs": needs}
    return work


def train_on(model: Qwen2, optimizer, batch, case: Case) -> None:
    """One update, every token with weight 1."""
    update(model, optimizer, batch, batch.mask.float(), Settings(micro_batch=case.micro_batch))


def rollout_needs(model: Qwen2, prompts: list, lengths: list[int]) -> list[tuple[float, float]]:
    """(operations, bytes): two operations a token for each number of the matrices, which are read
    once for every token step of all rows."""
    layers, output = matrix_numbers(model)
    tokens = sum(lengths)
    operations = 2 * (layers * (sum(map(len, prompts)) + tokens) + output * tokens)
    return [(operations, model.compute_dtype.itemsize * (layers + output) * max(lengths))]


def update_needs(model: Qwen2, prompts: list, lengths: list[int]) -> list[tuple[float, float]]:
    """Three times the operations: the backward pass takes two products where the forward pass takes
    one. AdamW reads parameters, gradients and moments, and writes all but the gradients."""
    (operations, _), = rollout_needs(model, prompts, lengths)
    return [(3 * operations, 0), (0, 28 * sum(p.numel() for p in model.parameters()))]


def matrix_numbers(model: Qwen2) -> tuple[int, int]:
    """In the layers, and in the output matrix."""
    layers = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    return layers, model.output_matrix.numel()


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


OURS = {"rollout": rollout, "ragged rollout": rollout, "update": updating, "step": whole_step}
THEIRS = "{}, transformers"
WORK = {**OURS, "limits": limits, THEIRS.format("rollout"): transformers_rollout,
        THEIRS.format("ragged rollout"): transformers_rollout}
RIVALS = ("transformers", "GRPO-Zero")


def case_of(rival: str, case: Case, grpo_zero: str | None) -> Case | None:
    """The same work done by a rival; None if it cannot."""
    if rival == "GRPO-Zero":
        return replace(case, grpo_zero=grpo_zero) if grpo_zero and case.device == "cpu" else None
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


def share_of_limit(turn: dict, limit: dict) -> float:
    """Each part of the work takes as long as the slower of its operations and its bytes."""
    least = sum(max(operations / limit["rate"], size / limit["bandwidth"])
                for operations, size in turn["needs"])
    return least / turn["seconds"]


def row_of(case: Case, results: dict[Case, list[dict]], limit: list[dict],
           grpo_zero: str | None) -> list:
    turns = results[case]
    speeds = list(map(speed, turns))
    times = []
    for rival in RIVALS:
        theirs = results.get(case_of(rival, case, grpo_zero), [])
        ratios = [ours / speed(turn) for ours, turn in zip(speeds, theirs)]
        times.append(median(ratios) if ratios else None)
    rows = case.questions * case.answers
    return [case.size, case.what, f"{rows} x {turns[0]['tokens'] / rows:.0f}", median(speeds),
            (min(speeds), max(speeds)), *times, median(map(share_of_limit, turns, limit)),
            median(turn["memory"] for turn in turns) / MEBIBYTE]


COLUMNS = {"size": "", "what": "", "answers x tokens": "", "tokens a second": ",.0f",
           "lowest to highest": ",.0f", **{f"times {rival}": ".2f" for rival in RIVALS},
           "of the limit": ".0%", "peak memory, MiB": ",.0f"}
FLAGS = {
    **SHARED_FLAGS,
    "dtype": Flag("float32", "numbers to compute with", choices=DTYPES),
    "grpo_zero": Flag(None, "folder of policy-gradient/GRPO-Zero, to measure it beside; CPU only"),
    "repeats": Flag(3, "turns of every measurement", least=1, most=1000),
    "case": Flag(None, "measure this one case, given as JSON, and print JSON: what a process of "
                       "its own is started with"),
}


def main(argv: list[str]) -> None:
    parser = Parser("python -m benchmarks.speed [flags]", __doc__)
    given = with_defaults(add_flags(parser, FLAGS).read(argv), FLAGS)
    if given.case is not None:
        print(json.dumps(measure(Case(**json.loads(given.case)))))
        return
    pick_device(given.device)
    if given.grpo_zero and not is_folder(given.grpo_zero):
        raise UserError(f"--grpo_zero: there is no folder {given.grpo_zero}")
    shared = dict(device=given.device, dtype=given.dtype, threads=given.threads)
    ours = [Case(size, what, given.questions, given.answers, given.new_tokens, **shared)
            for size in read_sizes(given.sizes) for what in OURS]
    limit_case = Case("", "limits", **shared)
    cases = [limit_case]
    for case in ours:
        theirs = [case_of(rival, case, given.grpo_zero) for rival in RIVALS]
        cases += [case, *filter(None, theirs)]
    results = take_turns(cases, given.repeats)
    limit = results[limit_case]
    rows = [row_of(case, results, limit, given.grpo_zero) for case in ours]
    print(f"{given.device}, {given.dtype}, {given.threads or 'all'} threads: "
          f"{median(turn['rate'] for turn in limit) / 1e9:,.0f} * 10^9 operations a second in a "
          f"large product, {median(turn['bandwidth'] for turn in limit) / 1e9:,.1f} GB a second "
          f"from memory; {given.repeats} turns\n")
    print(Table("speed", "", by_row(COLUMNS, rows)).to_text(limit=1000))


if __name__ == "__main__":
    run_as_program("benchmarks.speed", main)
