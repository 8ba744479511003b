"""Train a Qwen2 on synthetic demonstrations: a small new model, like models/tiny, or a real one.

    python -m lab warmup                                         # writes models/new
    python -m lab warmup --size large --out models/tiny-large    # 2.9 times as many parameters
    python -m lab warmup --model models/Qwen2.5-Coder-0.5B-Instruct --right --out models/warm

The demonstrations are made in lab/tools/demonstrations.py; this file trains, evaluates and
saves. Matrices are trained with Muon (Jordan et al. 2024), all other parameters with Adam. The
result is a model folder like any other; its recipe.json has the settings with which it
trains well.

A real model rarely solves a problem, so its answers hardly differ in reward, and GRPO learns from
such differences. After this cold start the answers to a problem differ in reward more often. Unless
flags say otherwise, a real model gets 120 updates with AdamW, of 8 demonstrations each. Only the
upper half of its layers is trained: on a CPU this saves a third of the time and much memory. To
train such a model further, give its folder to --model, and another --seed.
"""
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from lab.engine.model_folder import read_model_folder, write_model_folder
from lab.engine.tokens import load_tokenizer
from lab.harness.record import find_folder, new_folder
from lab.harness.flags import MOST_THREADS, Flag, read
from lab.engine.policy import Policy
from lab.engine.model import Qwen2
from lab.tools.demonstrations import TASK, batches, make_tokenizer
from qwen2_model import ModelConfig, small_files

SIZES = {"small": (2, 64), "medium": (3, 128), "large": (4, 192)}  # blocks, hidden size
FLAGS = {
    "size": Flag("medium", "size of a new model. That of models/tiny is medium", choices=SIZES,
                 requires=(lambda values: values.model is None, "a new model")),
    "model": Flag(None, "folder of a model to start from, instead of a new one of --size. It is "
                        "one that this program has made, or a real one"),
    "right": Flag(False, "use only demonstrations whose answer is right and well formed"),
    "out": Flag("models/new", "folder to write. It must not exist yet"),
    "steps": Flag(2000, "number of updates", least=1, most=10_000_000),
    "batch": Flag(128, "number of demonstrations in an update", least=1, most=10_000),
    "seed": Flag(0, "seed of the initial weights and of the demonstrations"),
    "dtype": Flag("float32", "type of the numbers to compute with. The parameters stay float32",
                  choices=("float32", "bfloat16")),
    "threads": Flag(2, "CPU threads", least=1, most=MOST_THREADS)}
MUON_RATE, ADAM_RATE = 0.02, 3e-3  # learning rates of the matrices, and of all else
REAL_RATE = 5e-5                   # and of a real model

RECIPE: dict = {  # the settings of a run that suit this model; flags override them
    **{name: getattr(TASK, name) for name in (
        "prompt", "numbers", "min_number", "max_number", "max_target", "max_result")},
    "learning_rate": 2.5e-4, "questions": 16, "answers": 16, "max_new_tokens": 80,
    "micro_batch": 64, "threads": 1,
    "steps": 100, "eval_every": 50, "eval_tasks": 1500, "checkpoint_every": 25}

TOKENIZER_CONFIG = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>",
                    "pad_token": "<|endoftext|>"}

# for a real model, which takes a thousand times the operations of a tiny one
REAL_FLAGS = {"steps": 120, "batch": 8}
REAL_RECIPE = {"learning_rate": 5e-6, "questions": 4, "answers": 8, "max_new_tokens": 96,
               "micro_batch": 4, "threads": 0, "eval_tasks": 64}


def main(argv: list[str]) -> None:
    flags = read(argv, "python -m lab warmup [flags]", __doc__, FLAGS)
    start = find_folder(flags.model) if flags.model else None
    tokenizer = load_tokenizer(start) if start else make_tokenizer()
    is_real = tokenizer.to_str() != make_tokenizer().to_str()
    if is_real:
        flags = SimpleNamespace(**{**vars(flags), **REAL_FLAGS, **flags.typed})
    torch.set_num_threads(flags.threads)
    out = Path(flags.out)
    with new_folder(out) as unfinished:
        torch.manual_seed(flags.seed)
        model = (read_model_folder(start) if start else
                 make_model(tokenizer.get_vocab_size(), *SIZES[flags.size]))
        model.compute_in(getattr(torch, flags.dtype))
        recipe = {**RECIPE, **REAL_RECIPE} if is_real else RECIPE
        update = upper_half(model) if is_real else all_parameters(model)
        train(model, tokenizer, update, flags)
        evaluate(model, tokenizer, recipe)
        save(unfinished, model, tokenizer, recipe, start if is_real else None)


def make_model(vocabulary: int, layers: int, width: int) -> Qwen2:
    return Qwen2(ModelConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=layers, num_attention_heads=width // 32, num_key_value_heads=width // 64,
        head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        eos_token_id=(2,)))


def all_parameters(model: Qwen2) -> Callable[[float], None]:
    """A function that updates all parameters, at a share of their learning rates."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "embed" not in name:
            matrices.append(parameter)
        else:
            others.append(parameter)
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)

    def update(share: float) -> None:
        adam.param_groups[0]["lr"] = ADAM_RATE * share
        adam.step()
        muon.step(MUON_RATE * share)
    return update


def upper_half(model: Qwen2) -> Callable[[float], None]:
    """A function that updates the upper half of the layers; all other parameters are frozen."""
    layers = model.requires_grad_(False).model.layers
    trained = list(layers[len(layers) // 2:].requires_grad_(True).parameters())
    adam = torch.optim.AdamW(trained, betas=(0.9, 0.98), weight_decay=0.0)

    def update(share: float) -> None:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        adam.param_groups[0]["lr"] = REAL_RATE * share
        adam.step()
    return update


def train(model: Qwen2, tokenizer: Tokenizer, update: Callable[[float], None],
          flags: SimpleNamespace) -> None:
    data = batches(tokenizer, random.Random(flags.seed), flags.batch, flags.right)
    start = time.time()
    rise, report = min(50, flags.steps / 10), min(100, -(-flags.steps // 20))
    for step in range(1, flags.steps + 1):
        ids, weights = next(data)
        loss = weighted_loss(model, ids, weights)
        model.zero_grad()
        loss.backward()
        # the rate rises for at most 50 steps, stays, and falls to 0 over the last half
        update(min(1.0, step / rise, 2 * (1 - (step - 1) / flags.steps)))
        if step % report == 0 or step == flags.steps:
            print(f"step {step:6d}/{flags.steps}  loss {loss.item():.4f}  "
                  f"{time.time() - start:6.0f} s", flush=True)


def weighted_loss(model: Qwen2, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The mean of the tokens' cross-entropy by these weights, without the first token."""
    counts = weights[:, 1:] > 0  # with a real vocabulary, logits at other positions are expensive
    positions = torch.arange(ids.shape[1] - 1, device=ids.device)
    logits = model.logits(model.model(ids[:, :-1], positions)[counts])
    losses = F.cross_entropy(logits.float(), ids[:, 1:][counts], reduction="none")
    return losses @ weights[:, 1:][counts] / weights.sum()


class Muon:
    """Momentum for matrices, each update replaced by the nearest orthogonal matrix."""

    def __init__(self, matrices: list[torch.nn.Parameter], momentum: float = 0.95):
        self.matrices, self.momentum = matrices, momentum
        self.buffers = [torch.zeros_like(p) for p in matrices]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for p, buffer in zip(self.matrices, self.buffers):
            buffer.lerp_(p.grad, 1 - self.momentum)
            update = orthogonal(p.grad.lerp(buffer, self.momentum))
            rows, columns = p.shape
            p.mul_(1 - 0.1 * learning_rate)  # weight decay
            p.sub_(update, alpha=learning_rate * max(1, rows / columns) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """An approximation of U V^T for a matrix U S V^T: five Newton-Schulz steps bring S near 1."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if is_tall else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if is_tall else x


def evaluate(model: Qwen2, tokenizer: Tokenizer, recipe: dict) -> None:
    """Answer each held-out problem once, and print the results and three answers."""
    settings = SimpleNamespace(max_new_tokens=recipe["max_new_tokens"], temperature=1.0)
    policy = Policy(model, tokenizer, TASK, settings, Path())
    rollouts = policy.ask(TASK.held_out_problems(recipe["eval_tasks"]), 1, seed=0)
    mean = {name: values.mean().item() for name, values in rollouts.scores.items()}
    results = (f"{len(rollouts.answers):,} held-out problems: success {mean['answer']:.1%}, "
               f"format {mean['format']:.2f}, right steps {mean['reasoning']:.1%}, "
               f"length {rollouts.length.float().mean().item():.0f} tokens, "
               f"finished {rollouts.finished.float().mean().item():.1%}")
    print("\n    ".join([f"  {results}. Three answers:", *rollouts.answers[:3]]), flush=True)


def save(folder: Path, model: Qwen2, tokenizer: Tokenizer, recipe: dict,
         source: Path | None = None) -> None:
    """Write a model folder. The chat template of a real model, its end of a turn and so on come
    from the folder `source`."""
    write_model_folder(model, folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    for name, content in (("tokenizer_config", TOKENIZER_CONFIG), ("recipe", recipe)):
        text = json.dumps(content, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    if source:
        for name, content in small_files(source).items():
            if name not in ("recipe.json", "README.md"):
                (folder / name).write_bytes(content)
