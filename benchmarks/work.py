"""The work that speed.py measures.

Each entry of WORK makes what is needed and returns a function that does the work once. That
function returns how many tokens it made, and the operations and bytes that operations.py counts.
"""
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.cases import (Case, as_rollouts, floor_batch, last_tokens, make_batch, make_model,
                              make_prompts, shape_of)
from benchmarks.operations import rollout_work, update_work
from benchmarks.program import (optimizer_of, peak_of_process, record, shipped_lab, step_of,
                                train_on)
from benchmarks.shapes import NUMBER_BYTES, Batch
from harness.credit_file import credit_path, read_columns
from engine.errors import UserError
from harness.load import pick_device
from engine.sampler import generate


def rollout(case: Case) -> Callable:
    model = make_model(case)
    prompts = make_prompts(case, model.config.vocab_size)
    stop_ids = last_tokens(case, model.config.vocab_size)

    def work():
        mask = generate(model, prompts, answers=case.answers, max_new_tokens=case.new_tokens,
                        seed=1, stop_ids=stop_ids).mask
        floor = rollout_work(model.config, floor_batch(case, prompts, mask))
        return {"tokens": mask.sum().item(), "floor": list(floor.values())}
    return work


def updating(case: Case) -> Callable:
    model = make_model(case)
    batch = make_batch(case, model.config.vocab_size)
    optimizer = optimizer_of(model, case.device, case.offload_optimizer)
    floor = update_work(model.config, floor_batch(case, batch.prompt_ids, batch.mask))

    def work():
        train_on(model, optimizer, batch, case.micro_batch)
        return {"tokens": batch.mask.sum().item(), "floor": list(floor.values())}
    return work


def step(case: Case) -> Callable:
    """What a training step does, without a task: rewards are random, texts are not read."""
    if case.size == "shipped":
        return shipped_step(case)
    model = make_model(case)
    prompts = make_prompts(case, model.config.vocab_size)
    optimizer = optimizer_of(model, case.device)

    def work():
        sampled = generate(model, prompts, answers=case.answers, max_new_tokens=case.new_tokens,
                           seed=1, stop_ids=())
        batch = as_rollouts(prompts, case.answers, sampled.tokens, sampled.mask, sampled.log_prob,
                            sampled.entropy, sampled.collision)
        train_on(model, optimizer, batch, case.micro_batch)
        with tempfile.TemporaryDirectory() as folder:
            path = credit_path(Path(folder), 1)
            record_seconds, _ = seconds_of(lambda: record(batch, path), case)
            record_bytes = path.stat().st_size
        shape = floor_batch(case, prompts, sampled.mask)
        return {"tokens": sampled.mask.sum().item(), "record": record_seconds,
                "record_bytes": record_bytes, "floor": step_floor(model.config, shape, shape)}
    return work


def shipped_step(case: Case) -> Callable:
    """train.py's own step of the shipped model on its own task."""
    policy = shipped_lab(questions=case.questions, answers=case.answers, device=case.device,
                      micro_batch=case.micro_batch, dtype=case.dtype, threads=case.threads)

    def work():
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder)
            seconds, metrics = seconds_of(lambda: step_of(policy, run), case)
            sampled, trained = batches_on_record(case, run)
            record_bytes = credit_path(run, 1).stat().st_size
        record_share = metrics["record_seconds"] / metrics["seconds"]
        return {"tokens": metrics["tokens"], "seconds": seconds, "record": seconds * record_share,
                "record_bytes": record_bytes,
                "floor": step_floor(policy.model.config, sampled, trained)}
    return work


def step_floor(config, sampled: Batch, trained: Batch) -> list:
    return [*rollout_work(config, sampled).values(), *update_work(config, trained).values()]


def batches_on_record(case: Case, run: Path) -> tuple[Batch, Batch]:
    """What was sampled in step 1, and the part that was trained on: groups whose rewards differ."""
    columns = read_columns(run, 1)
    prompts = piece_lengths(columns["prompt_start"], len(columns["prompt_ids"]))
    answers = piece_lengths(columns["episode_start"], len(columns["token_id"]))
    sampled = Batch(prompts, answers, case.micro_batch, NUMBER_BYTES[case.dtype])
    reward, group = columns["reward"], columns["group"]
    learns = [reward[group == question].std() > 0 for question in range(len(prompts))]
    trained = replace(
        sampled,
        prompts=[length for length, yes in zip(prompts, learns) if yes],
        answers=[length for length, question in zip(answers, group) if learns[question]])
    return sampled, trained


def piece_lengths(starts, end: int) -> list[int]:
    """Lengths of pieces that stand end to end, from where each starts."""
    return torch.tensor([*starts, end]).diff().tolist()


def transformers_rollout(case: Case) -> Callable:
    """`generate` of transformers at temperature 1, with a prompt of its own for every answer."""
    import transformers
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**shape_of(case).to_json())
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, case.dtype))
    model = model.to(case.device)
    vocabulary = model.config.vocab_size
    prompts, stop_ids = make_prompts(case, vocabulary), last_tokens(case, vocabulary)
    P = max(len(prompt) for prompt in prompts)
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
    on_gpu = case.device != "cpu"
    side, width = (8192, 2 ** 16) if on_gpu else (1536, 2 ** 12)
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


WORK = {
    "rollout": rollout,
    "rollout, unequal": rollout,
    "update": updating,
    "update, unequal": updating,
    "step": step,
    "transformers": transformers_rollout,
    "transformers, unequal": transformers_rollout,
    "limits": limits,
}


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
    """Do the work once to warm up, then for about a second, at least once; return the median."""
    if case.what not in WORK or (case.size == "") != (case.what == "limits"):
        raise UserError(f"--case: there is no work {case.what!r} on the size {case.size!r}")
    device = pick_device(case.device)
    torch.set_num_threads(case.threads or torch.get_num_threads())
    if case.what.startswith("transformers"):
        import transformers  # noqa: F401: its code should not count as the model's memory
    before = 0 if device.type == "cuda" else peak_of_process(device)
    work = WORK[case.what](case)
    work()
    seconds = []
    while not seconds or sum(seconds) < 1 and len(seconds) < 9:
        duration, result = seconds_of(work, case)
        seconds.append(result.get("seconds", duration))
    return {**result, "seconds": median(seconds), "memory": peak_of_process(device) - before}
