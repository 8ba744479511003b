"""What speed.py and memory.py measure: each case is one kind of work on one model, done in a process of its own."""
import json
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent

import torch

from benchmarks.floor import NUMBER, SHAPES, Batch, rollout_work, update_work
from grpo import grpo, update
from engine.lab import make_lab, pick_device
from engine.optimizer import make_optimizer
from engine.errors import UserError
from qwen2_model import ModelConfig, Qwen2
from engine.rollouts import Rollouts
from engine.credit_file import read_columns, write_credit
from engine.run_folder import RunFolder
from engine.sampler import generate
from engine.settings import Settings, make_settings
from train import peak_memory, train_step

SIZES, ENDS = ("tiny", "small", "shipped", "0.5B"), 40  # unequal answers: one token in so many is the last


@dataclass(frozen=True)
class Case:
    """One thing to measure; a process is told it as JSON."""
    size: str
    what: str  # a name in WORK
    questions: int = 8
    answers: int = 8
    new_tokens: int = 128
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    micro_batch: int = 8
    checkpointing: bool = False
    offload_optimizer: bool = False


def make_model(case: Case) -> Qwen2:
    torch.manual_seed(0)
    if case.size == "shipped":
        model = Qwen2.from_pretrained(ROOT / "models/tiny", case.device)
    else:
        with torch.device(case.device):
            model = Qwen2(SHAPES[case.size])
    model.model.checkpointing = case.checkpointing
    return model.compute_in(getattr(torch, case.dtype))


def make_prompts(case: Case, vocabulary: int) -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(3, vocabulary) for _ in range(chance.randint(60, 100))] for _ in range(case.questions)]


def last_tokens(case: Case, vocabulary: int) -> tuple[int, ...]:
    """With random weights all tokens are about as likely, so these end one answer in ENDS at each token."""
    return tuple(range(3, 3 + round(vocabulary / ENDS))) if case.what.endswith("unequal") else ()


def as_rollouts(prompts, answers: int, tokens, mask, log_prob, entropy, collision) -> Rollouts:
    """A batch with rewards that somebody threw."""
    B, (chance, none) = len(tokens), (torch.Generator().manual_seed(0), torch.zeros_like(tokens, dtype=torch.uint8))
    reward = torch.rand(B, generator=chance).to(tokens.device)
    batch = Rollouts(problems=[None] * len(prompts), prompt_ids=prompts, responses=[""] * B, texts=[[]] * B, ids=tokens, mask=mask,
                     group=torch.arange(B, device=tokens.device) // answers, finished=torch.ones(B, dtype=torch.bool, device=tokens.device),
                     log_prob=log_prob, entropy=entropy, collision=collision, section=none, kind=none,
                     scores=dict.fromkeys(("reward", "format", "answer", "reasoning"), reward))
    return replace(batch, advantage=grpo(batch))


def make_batch(case: Case, vocabulary: int) -> Rollouts:
    """As if sampled: the lengths of `unequal` have the same chances as those of its rollout."""
    chance, B, T = torch.Generator().manual_seed(0), case.questions * case.answers, case.new_tokens
    lengths = torch.full((B,), T)
    if case.what.endswith("unequal"):
        lengths = torch.empty(B).geometric_(1 / ENDS, generator=chance).long().clamp(max=T)
    mask = torch.arange(T) < lengths[:, None]
    tokens = torch.randint(3, vocabulary, (B, T), generator=chance) * mask
    return as_rollouts(make_prompts(case, vocabulary), case.answers, *(x.to(case.device) for x in (tokens, mask, *torch.zeros(3, B, T))))


def floor_batch(case: Case, prompts, mask) -> Batch:
    return Batch([len(prompt) for prompt in prompts], mask.sum(1).tolist(), case.micro_batch, NUMBER[case.dtype], case.checkpointing,
                 case.offload_optimizer, torch.device(case.device).type)


# Each of the following makes what is needed and returns a function that does the work once, and says how many tokens and how much
# work of floor.py that was.

def rollout(case: Case):
    model = make_model(case)
    prompts, ends = make_prompts(case, model.config.vocab_size), last_tokens(case, model.config.vocab_size)

    def work():
        mask = generate(model, prompts, answers=case.answers, max_new_tokens=case.new_tokens, seed=1, stop_ids=ends).mask
        return {"tokens": mask.sum().item(), "floor": list(rollout_work(model.config, floor_batch(case, prompts, mask)).values())}
    return work


def updating(case: Case):
    model = make_model(case)
    batch, settings = make_batch(case, model.config.vocab_size), Settings(micro_batch=case.micro_batch)
    optimizer = make_optimizer(model, 1e-12, 0.0, case.offload_optimizer, case.device)
    floor = list(update_work(model.config, floor_batch(case, batch.prompt_ids, batch.mask)).values())

    def work():
        update(model, optimizer, batch, batch.mask.float(), settings)
        return {"tokens": batch.mask.sum().item(), "floor": floor}
    return work


def step(case: Case):
    """What train_step does, without a task: rewards are drawn, texts are not read."""
    model, settings = make_model(case), Settings(micro_batch=case.micro_batch)
    prompts, optimizer = make_prompts(case, model.config.vocab_size), make_optimizer(model, 1e-12, 0.0, False, case.device)

    def work():
        g = generate(model, prompts, answers=case.answers, max_new_tokens=case.new_tokens, seed=1, stop_ids=())
        batch = as_rollouts(prompts, case.answers, g.tokens, g.mask, g.log_prob, g.entropy, g.collision)
        weight, shape = g.mask.float(), floor_batch(case, prompts, g.mask)
        update(model, optimizer, batch, weight, settings)
        with tempfile.TemporaryDirectory() as folder:
            path = RunFolder(folder).credit(1)
            record, _ = seconds_of(lambda: write_credit(path, batch, weight), case)
            size = path.stat().st_size
        return {"tokens": g.mask.sum().item(), "record": record, "record_bytes": size,
                "floor": [*rollout_work(model.config, shape).values(), *update_work(model.config, shape).values()]}
    return work


def shipped_step(case: Case):
    lab = make_lab(make_settings({"model": str(ROOT / "models/tiny"), "questions": case.questions, "answers": case.answers, "micro_batch": case.micro_batch,
                                  "device": case.device, "dtype": case.dtype, "threads": case.threads, "learning_rate": 1e-12, "sample_every": 0}))

    def work():
        with tempfile.TemporaryDirectory() as folder:
            run = RunFolder(Path(folder))
            seconds, line = seconds_of(lambda: train_step(lab, run, 1), case)
            (sampled, trained), size = batches_on_record(case, run), run.credit(1).stat().st_size
        floor = [*rollout_work(lab.model.config, sampled).values(), *update_work(lab.model.config, trained).values()]
        return {"tokens": line["tokens"], "seconds": seconds, "record": seconds * line["record_seconds"] / line["seconds"],
                "record_bytes": size, "floor": floor}
    return work


def batches_on_record(case: Case, run: RunFolder) -> tuple[Batch, Batch]:
    """What was sampled in step 1, and the part of it that was trained on: groups whose rewards differ."""
    columns = read_columns(run.path, 1)
    prompts, answers = (torch.tensor([*columns[start], len(columns[value])]).diff().tolist()
                        for start, value in (("prompt_start", "prompt_ids"), ("episode_start", "token_id")))
    learns = [columns["reward"][columns["group"] == q].std() > 0 for q in range(len(prompts))]
    sampled = Batch(prompts, answers, case.micro_batch, NUMBER[case.dtype])
    return sampled, replace(sampled, prompts=[p for p, yes in zip(prompts, learns) if yes],
                            answers=[n for n, q in zip(answers, columns["group"]) if learns[q]])


def transformers_rollout(case: Case):
    """`generate` of transformers: sampling at temperature 1 and nothing else, every answer with a prompt of its own."""
    import transformers
    transformers.logging.set_verbosity_error()
    config = ModelConfig.from_folder(ROOT / "models/tiny") if case.size == "shipped" else SHAPES[case.size]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config.to_json()), dtype=getattr(torch, case.dtype)).to(case.device)
    prompts, ends = make_prompts(case, model.config.vocab_size), last_tokens(case, model.config.vocab_size)
    P = max(map(len, prompts))
    ids, mask = (torch.tensor([[0] * (P - len(p)) + one(p) for p in prompts], device=case.device) for one in (list, lambda p: [1] * len(p)))
    model.generation_config.eos_token_id = list(ends) or None
    model.generation_config.pad_token_id = 0

    def work():
        torch.manual_seed(1)
        found = model.generate(input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, num_return_sequences=case.answers, max_new_tokens=case.new_tokens)
        last = torch.isin(found[:, P:], torch.tensor(ends, device=case.device))
        return {"tokens": (last.cumsum(1) - last.long() == 0).sum().item()}  # those without a last one before them
    return work


def limits(case: Case):
    """Operations a second of a large product, and bytes a second read from memory, the best of several times."""
    cuda = case.device != "cpu"
    side, width = (8192, 2 ** 16) if cuda else (1536, 2 ** 12)
    square = torch.randn(side, side, device=case.device).to(getattr(torch, case.dtype))
    matrix, vector = torch.randn(2 ** 14, width, device=case.device), torch.randn(width, device=case.device)

    def work():
        product, reading = (min(seconds_of(function, case)[0] for _ in range(7)) for function in (lambda: square @ square, lambda: matrix @ vector))
        return {"rate": 2 * side ** 3 / product, "bandwidth": 4 * matrix.numel() / reading}
    return work


def seconds_of(function, case: Case) -> tuple[float, object]:
    """And what the function returns."""
    clock = time.process_time if (case.device, case.threads) == ("cpu", 1) else time.perf_counter
    wait = (lambda: None) if case.device == "cpu" else lambda: torch.cuda.synchronize(case.device)
    wait()
    start = clock()
    found = function()
    wait()
    return clock() - start, found


WORK = {"rollout": rollout, "rollout, unequal": rollout, "update": updating, "update, unequal": updating, "step": step,
        "transformers": transformers_rollout, "transformers, unequal": transformers_rollout, "limits": limits}


def measure(case: Case) -> dict:
    """In a process of its own: once to warm up, then for about a second or at least once; the median."""
    device = pick_device(case.device)
    torch.set_num_threads(case.threads or torch.get_num_threads())
    if case.what.startswith("transformers"):
        import transformers  # noqa: F401: a library is no memory of the model's
    before = 0 if device.type == "cuda" else peak_memory(device)
    work = (shipped_step if (case.size, case.what) == ("shipped", "step") else WORK[case.what])(case)
    work()
    seconds = []
    while not seconds or sum(seconds) < 1 and len(seconds) < 9:
        took, found = seconds_of(work, case)
        seconds.append(found.get("seconds", took))
    return {**found, "seconds": median(seconds), "memory": peak_memory(device) - before}


def in_a_process(case: Case, script: str) -> dict:
    """What `script` says of the case, as JSON in its last line."""
    result = subprocess.run([sys.executable, script, "--case", json.dumps(asdict(case))], capture_output=True, text=True)
    if result.returncode:
        raise UserError(f"{case.size}, {case.what}: {(result.stderr.strip() or f'ended with {result.returncode}').splitlines()[-1]}")
    return json.loads(result.stdout.splitlines()[-1])
