"""Makes the tiny model that ships in models/tiny: synthetic demonstrations, then supervised
training.

A demonstration thinks aloud: it tries one expression after the other, states each result, says
whether it hits, goes on or gives up, and then answers with the last thing it tried.

    <think> okay. first 7 * 3 = 21 and 21 + 5 = 26 too big. wait, second try 5 * 3 = 15, 15 + 7 = 22 yes!</think>
    <answer> ( 5 * 3 ) + 7</answer>

The teacher never looks at a solution. It draws legal expressions, those near the target more
often, and finds out only by computing. (A teacher that peeks teaches to write "= target" over
wrong arithmetic.) It often gives up early, which leaves reinforcement learning something to find:
trying longer pays. Matrices are trained with Muon (Jordan et al. 2024), the rest with Adam.

    python -m tools.warmup              # about 20 minutes on two cores; writes models/new
"""
import hashlib
import json
import random
import re
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from countdown_task import Problem, Task, held_out, operations
from qwen2_model import ModelConfig, Qwen2
from engine.errors import UserError
from engine.files import whole_folder
from engine.flags import Flag, Parser, add_flags, run_as_program, with_defaults
from engine.rollouts import sample_answers, score_answers

TASK = Task(prompt="short", numbers="3", min_number=1, max_number=15, max_target=99, max_result=150)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OPENERS = ["", " okay.", " let us see.", " hmm.", " the goal is {target}.", " we need {target}."]
ORDINALS = [" first", " second", " third", " fourth", " fifth", " sixth", " seventh", " last"]
STARTERS = ["", "", " try", " maybe", " take", " what about"]
CONTINUE = [" wait,", " next,", " again,", " or", " then", " now", " but"]
JOINERS = [",", ",", " and", " so"]
MISS = [" no.", " not {target}.", " too {size}.", " wrong."]
HIT = [" yes!", " good, that is {target}.", " hit.", " exactly."]
GIVE_UP = [" enough.", " stop here.", " cannot find it."]
RECIPE = {  # what suits this model: the defaults of the default run, flags override them
    "prompt": TASK.prompt, "numbers": TASK.numbers, "min_number": TASK.min_number,
    "max_number": TASK.max_number, "max_target": TASK.max_target, "max_result": TASK.max_result,
    "learning_rate": 5e-4, "questions": 16, "answers": 16,
    "max_new_tokens": 176, "micro_batch": 32, "steps": 100, "eval_every": 50, "eval_tasks": 1500, "checkpoint_every": 25}
README = """# The tiny model

A Qwen2 of {parameters:,} parameters ({layers} layers, width {width}) that plays Countdown with three numbers from
{low} to {high} and targets up to {target}: one token a word or number, {vocabulary} tokens in all. It thinks aloud, tries
expressions one after the other and often gives up early. `recipe.json` holds the short prompt it was made with
and the settings of the default run.

Made by `{command}` in {minutes:.0f} minutes on {threads} CPU threads (seed {seed}, torch {torch}).
On {problems} problems that no demonstration used, sampled at temperature 1: {results}.

`sha256sum model.safetensors` prints `{checksum}`.
"""
RESULT_WEIGHT, VERDICT_WEIGHT, ANSWER_WEIGHT, COUNT_WEIGHT = 4.0, 6.0, 2.0, 2.0
PATIENCE = len(ORDINALS)  # no demonstration tries more often: counting aloud keeps answers short of the limit
PATIENT_SHARE = 0.2    # of demonstrations go on to the last try; the others lose heart earlier
GIVE_UP_RATE = 0.4     # chance of the others to stop after each miss
NEARNESS = 10.0        # weight of a candidate is 1 / (NEARNESS + distance to the target)


@dataclass(frozen=True)
class Candidate:
    steps: tuple[tuple[int, str, int, int], ...]
    expression: str
    value: int


@lru_cache(maxsize=None)
def candidates(numbers: tuple[int, ...]) -> tuple[Candidate, ...]:
    """Every legal way through the (sorted) numbers, sums and products written larger number
    first."""
    found = {}

    def combine(items, steps):
        if len(items) == 1:
            found[items[0][1]] = Candidate(tuple(steps), items[0][1], items[0][0])
            return
        for i, (x, left) in enumerate(items):
            for j, (y, right) in enumerate(items):
                rest = [item for k, item in enumerate(items) if k not in (i, j)]
                for a, operator, b, result in operations(x, y, TASK.max_result) if i != j else ():
                    if (a, b) == (x, y) and not (operator in "+*" and a < b):
                        text = f"{parenthesised(left)} {operator} {parenthesised(right)}"
                        combine([*rest, (result, text)], [*steps, (a, operator, b, result)])

    combine([(n, str(n)) for n in numbers], [])
    return tuple(found.values())


def parenthesised(expression: str) -> str:
    return f"( {expression} )" if " " in expression else expression


def patience(rng: random.Random) -> int:
    if rng.random() < PATIENT_SHARE:
        return PATIENCE
    tries = 1
    while tries < PATIENCE and rng.random() > GIVE_UP_RATE:
        tries += 1
    return tries


def order_of_tries(problem: Problem, rng: random.Random) -> list[Candidate]:
    """Without repetition, near ones earlier more often (a weighted shuffle by exponential
    races)."""
    def arrival(candidate):
        return rng.expovariate(1.0) * (NEARNESS + abs(candidate.value - problem.target))
    return sorted(candidates(tuple(sorted(problem.numbers))), key=arrival)


def demonstration(problem: Problem, rng: random.Random) -> list[tuple[str, float]]:
    """The response as (text, loss weight) pieces."""
    pieces, target = [(rng.choice(OPENERS).format(target=problem.target), 1.0)], problem.target
    tries = order_of_tries(problem, rng)[:patience(rng)]
    for number, candidate in enumerate(tries):
        pieces += [(ORDINALS[number], COUNT_WEIGHT), (rng.choice(STARTERS), 1.0)]
        for index, (a, operator, b, result) in enumerate(candidate.steps):
            pieces += [(rng.choice(JOINERS) if index else "", 1.0), (f" {a} {operator} {b} =", 1.0),
                       (f" {result}", RESULT_WEIGHT)]
        hit = candidate.value == target
        size = "big" if candidate.value > target else "small"
        pieces.append((rng.choice(HIT if hit else MISS).format(target=target, size=size), VERDICT_WEIGHT))
        if hit:
            break
        if number + 1 < PATIENCE:  # after the last try there is nothing left to decide: the thinking just ends
            pieces.append((rng.choice(GIVE_UP if number + 1 == len(tries) else CONTINUE), 1.0))
    pieces.append((f"</think>\n<answer> {candidate.expression}</answer><|im_end|>", ANSWER_WEIGHT))
    return pieces


def make_tokenizer() -> Tokenizer:
    """One token a word or number, its leading space included.

    The words are added tokens over an empty byte-level vocabulary: that is the one form that
    keeps them whole when `transformers` rebuilds a Qwen tokenizer, which splits all other numbers
    into digits. """
    phrases = [*OPENERS, *ORDINALS, *STARTERS, *CONTINUE, *JOINERS, *MISS, *HIT, *GIVE_UP, " make", " big", " small"]
    words = re.findall(r" ?[a-z]+|[.,!]", "".join(phrases).replace(" {target}", "").replace(" {size}", ""))
    words += [f" {n}" for n in range(TASK.max_result + 1)] + [f" {sign}" for sign in "+-*/=()"]
    tokenizer = Tokenizer(models.BPE({}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    ordinary = dict.fromkeys(["<think>", "</think>", "<answer>", "</answer>", "\n", "user", "assistant", *words])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ordinary])
    return tokenizer


def make_example(tokenizer, rng: random.Random) -> tuple[list[int], list[float]]:
    """Ids and the loss weight of predicting each of them; the prompt weighs 0."""
    problem = TASK.make_problem(rng, lambda problem: not held_out(problem))
    ids = tokenizer.encode(TASK.prompt_for(problem), add_special_tokens=False).ids
    weights = [0.0] * len(ids)
    for text, weight in demonstration(problem, rng):
        piece = tokenizer.encode(text).ids
        ids += piece
        weights += [weight] * len(piece)
    return ids, weights


def batches(tokenizer, rng: random.Random, rows: int, pool: int = 16):
    """Endless (ids, weights), each (rows, L). Examples of like length share a batch: less
    padding."""
    while True:
        examples = sorted((make_example(tokenizer, rng) for _ in range(pool * rows)), key=lambda e: len(e[0]))
        for start in rng.sample(range(0, pool * rows, rows), pool):
            batch = examples[start:start + rows]
            L = len(batch[-1][0])
            yield (torch.tensor([ids + [0] * (L - len(ids)) for ids, _ in batch]),
                   torch.tensor([weights + [0.0] * (L - len(weights)) for _, weights in batch]))


class Muon:
    """Momentum whose matrix is replaced by the nearest orthogonal one, by five Newton-Schulz
    steps."""

    def __init__(self, matrices, momentum: float = 0.95):
        self.matrices, self.momentum = list(matrices), momentum
        self.buffers = [torch.zeros_like(p) for p in self.matrices]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for p, buffer in zip(self.matrices, self.buffers):
            buffer.lerp_(p.grad, 1 - self.momentum)
            update = orthogonal(p.grad.lerp(buffer, self.momentum))
            p.mul_(1 - 0.1 * learning_rate).sub_(update, alpha=learning_rate * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if (tall := x.shape[0] > x.shape[1]) else x
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.T if tall else x


def train(model: Qwen2, tokenizer, args) -> None:
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() < 2 or "embed" in name]
    muon, adam = Muon(matrices), torch.optim.AdamW(others, lr=args.adam_rate, betas=(0.9, 0.98), weight_decay=0.0)
    data, start = batches(tokenizer, random.Random(args.seed), args.batch), time.time()
    for step in range(args.steps):
        fade = min(1.0, (step + 1) / 50, 2 * (1 - step / args.steps))  # warm up, hold, then decay to 0
        ids, weights = next(data)
        logits = model(ids[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights[:, 1:].flatten()).sum() / weights.sum()
        model.zero_grad()
        loss.backward()
        adam.param_groups[0]["lr"] = args.adam_rate * fade
        adam.step()
        muon.step(args.muon_rate * fade)
        if step % 100 == 99 or step + 1 == args.steps:
            print(f"step {step + 1:6d}/{args.steps}  loss {loss.item():.4f}  {time.time() - start:6.0f} s", flush=True)
        if step % args.test_every == args.test_every - 1:
            report(model, tokenizer, 500)


def report(model: Qwen2, tokenizer, count: int) -> str:
    """How it does on held-out problems, one answer each, and three of the answers to look at."""
    problems = TASK.held_out_problems(count)
    rollouts = sample_answers(model, tokenizer, TASK, problems, 1, max_new_tokens=RECIPE["max_new_tokens"])
    rollouts = score_answers(rollouts, tokenizer, TASK)
    mean = {name: values.mean().item() for name, values in rollouts.scores.items()}
    claims = [any(hit.split("{")[0] in text for hit in HIT) for text in rollouts.responses]
    true = sum(right for claim, right in zip(claims, rollouts.scores["answer"].tolist()) if claim) / max(1, sum(claims))
    results = (f"success {mean['answer']:.1%}, format {mean['format']:.2f}, right steps {mean['reasoning']:.1%}, true claims "
               f"of success {true:.1%}, {sum(text.count('=') for text in rollouts.responses) / 2 / len(problems):.1f} tries, "
               f"{rollouts.length.float().mean().item():.0f} tokens, finished {rollouts.finished.float().mean().item():.1%}")
    print(f"  {results}", *rollouts.responses[:3], sep="\n    ", flush=True)
    return results


FLAGS = {
    "out": Flag("models/new", "folder to write; must not exist"),
    "steps": Flag(2400, "updates", least=1),
    "batch": Flag(128, "demonstrations an update", least=1),
    "layers": Flag(3, "blocks", least=1),
    "width": Flag(128, "hidden size, a multiple of 64", least=64),
    "muon_rate": Flag(0.02, "learning rate of the matrices", above=0),
    "adam_rate": Flag(3e-3, "learning rate of embeddings, biases and norms", above=0),
    "seed": Flag(0, "of the initial weights and the demonstrations", least=0),
    "threads": Flag(2, "CPU threads", least=1),
    "test_every": Flag(1000, "updates between tests on held-out problems", least=1)}


def main(argv: list[str]) -> None:
    parser = add_flags(Parser("python -m tools.warmup [flags]", __doc__), FLAGS)
    args = with_defaults(parser.read(argv), FLAGS)
    if Path(args.out).exists():
        raise UserError(f"{args.out} exists already: name another folder with --out")
    if args.width % 64:
        raise UserError(f"--width {args.width} should be a multiple of 64")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer, start = make_tokenizer(), time.time()
    model = Qwen2(ModelConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=args.width, intermediate_size=3 * args.width,
        num_hidden_layers=args.layers, num_attention_heads=args.width // 32, num_key_value_heads=args.width // 64,
        head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=0, eos_token_id=(2,)))
    train(model, tokenizer, args)
    results = report(model, tokenizer, 1500)
    save(Path(args.out), model, tokenizer, args, results, (time.time() - start) / 60)


def save(folder: Path, model: Qwen2, tokenizer, args, results: str, minutes: float) -> None:
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    for name, content in (("tokenizer_config.json", special), ("recipe.json", RECIPE)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "README.md").write_text(README.format(
        parameters=sum(p.numel() for p in model.parameters()), layers=args.layers, width=args.width, low=TASK.min_number,
        high=TASK.max_number, target=TASK.max_target, vocabulary=tokenizer.get_vocab_size(), minutes=minutes,
        command="python " + " ".join(sys.argv), threads=args.threads, seed=args.seed, torch=torch.__version__, problems=1500,
        results=results, checksum=hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()))


if __name__ == "__main__":
    run_as_program("warmup", main)
