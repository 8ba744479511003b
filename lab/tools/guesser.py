"""Make models/guesser, the player of examples/guess.py: 0.1 million parameters, 20 seconds.

    python -m lab guesser models/my_guesser

It learns from games of a teacher of whom half of the guesses listen to the replies: they are drawn
from the numbers that are still possible, and the others from all numbers. So the model knows the
rules and wins 48% of its games, where one that halves the range wins all. The replies are not
trained on, as later in GRPO.

Its matrices are updated by Muon, as those of models/tiny. With AdamW alone, at rates from 0.003 to
0.02, the model did not learn to listen in these games (36 to 37%). GRPO cannot teach it, either:
whoever does not read the replies gets no gradient to read them.
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python -m lab guesser")
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer

from lab.engine.errors import PROJECT
from lab.engine.tokens import load_tokenizer
from examples.guess import Game, Task
from lab.harness.flags import read
from lab.harness.record import new_folder
from lab.tools.warmup import SIZES, all_parameters, make_model, save

STEPS, GAMES, LISTENS = 250, 64, 0.5
RECIPE = {"task": "examples.guess", "questions": 8, "answers": 16, "max_new_tokens": 16,
          "learning_rate": 0.003, "micro_batch": 128, "threads": 1, "steps": 30, "eval_every": 10,
          "eval_tasks": 490, "checkpoint_every": 10}
Parts = list[tuple[str, bool]]  # of an answer: texts, and whether the player wrote them


def game_of_the_teacher(task: Task, rng: random.Random) -> Parts:
    """The parts of an answer, and whether the player wrote them."""
    game = Game(rng.randint(1, task.highest), "")
    every = list(range(1, task.highest + 1))
    possible, turns, parts = every, [], []
    while True:
        guess = rng.choice(possible if rng.random() < LISTENS else every)
        turns.append(f" {guess}")
        reply = task.reply(game, turns)
        parts.append((f" {guess}<|im_end|>", True))
        if reply is None:
            return parts
        parts.append((reply, False))
        possible = [number for number in possible
                    if number != guess and (number < guess) == (game.secret < guess)]


def rows_of(parts: Parts, prompt: list[int], tokenizer: Tokenizer,
            length: int) -> tuple[list[int], list[int]]:
    """The tokens of a game, filled up to this length, and 1 where the player drew them."""
    ids, mask = list(prompt), [0] * len(prompt)
    for text, is_own in parts:
        tokens = tokenizer.encode(text).ids
        ids += tokens
        mask += [int(is_own)] * len(tokens)
    missing = length - len(ids)
    return ids + [0] * missing, mask + [0] * missing


def make(folder: Path) -> None:
    """Train a small model on games of the teacher, and write its folder."""
    task, rng, tokenizer = Task(), random.Random(0), load_tokenizer(PROJECT / "models/tiny")
    torch.manual_seed(0)
    model = make_model(tokenizer.get_vocab_size(), *SIZES["small"])
    update = all_parameters(model)
    prompt_ids = tokenizer.encode(task.prompt_for(Game(1, ""))).ids
    length = len(prompt_ids) + RECIPE["max_new_tokens"]
    for step in range(STEPS):
        rows = [rows_of(game_of_the_teacher(task, rng), prompt_ids, tokenizer, length)
                for _ in range(GAMES)]
        ids, mask = (torch.tensor(part) for part in zip(*rows))          # (B, L) each
        log_p = model(ids[:, :-1]).log_softmax(-1)
        log_prob = log_p.gather(2, ids[:, 1:, None]).squeeze(2)          # (B, L - 1)
        loss = -(log_prob * mask[:, 1:]).sum() / mask.sum()
        model.zero_grad()
        loss.backward()
        update(min(1, 2 * (1 - step / STEPS)))  # the rate falls in the second half
        if step % 50 == 0:
            print(f"step {step}, loss {loss:.3f}", flush=True)
    save(folder, model, tokenizer, RECIPE)


def main(argv: list[str]) -> None:
    given = read(argv, "python -m lab guesser FOLDER", __doc__, {}, {"FOLDER": "a new folder"})
    folder = Path(given.folder)
    torch.set_num_threads(1)
    with new_folder(folder) as unfinished:
        make(unfinished)
    print(f"The model is in {folder}")
