"""A whole training with GRPO in one file: the step of one_step.py repeated, with more problems.

    python examples/loop.py                      # models/tiny: less than a minute on one core
    python examples/loop.py --steps 5 --seed 1   # fewer steps, with other problems
    python examples/loop.py FOLDER --problems 8 --held_out 64 --save trained    # a real model

FOLDER is any Qwen2, Qwen2.5 or dense Qwen3 model. One of 0.5 billion parameters takes 12 GB of
memory, and such a step less than a minute of one core.

Read examples/one_step.py first. The stages here have the same numbers. The comments say only what
changes because a step is repeated, and because it has several problems. With models/tiny the steps
are those of `python train.py --questions 16 --answers 8`; a test compares the first two.
"""
import argparse
import math
import shutil
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it can be started from any folder

import lab.engine  # noqa: F401  before torch, as in one_step.py
import torch
import torch.nn.functional as F
from torch import Tensor

from lab.countdown import Problem
from lab.engine.errors import UserError
from lab.engine.model_folder import read_model_folder, write_model_folder
from lab.engine.policy import derived_seed, stop_ids
from lab.engine.sampler import Generation, generate
from lab.engine.tokens import encode_prompt, load_tokenizer
from examples.one_step import MAX_GRAD_NORM, settings_of
from grpo import group_z_score, policy_loss
from lab.engine.model import Qwen2

FOLDER = PROJECT / "models" / "tiny"
STEPS, PROBLEMS, ANSWERS = 30, 16, 8
HELD_OUT = 500  # problems that are never trained on


def train(folder: Path = FOLDER, steps: int = STEPS, seed: int = 0, problem_count: int = PROBLEMS,
          answers: int = ANSWERS, held_out_count: int = HELD_OUT) -> Qwen2:
    """Train the model, print a line for each step, and return the model as it is at the end.

    Shapes: B is the number of a step's answers, 16 x 8; T is the tokens of the longest of them.
    """
    # Stage 1: load the model, and make the optimizer, once. AdamW moves a parameter by the learning
    # rate * (the mean of its gradients) / (the root of the mean of their squares), and it keeps
    # these two means from step to step. An optimizer that is made anew knows one gradient alone.
    # Divided by its own size that is +1 or -1, so in each step every parameter would move by about
    # the learning rate, however small its gradient is, and the noise of batches would not average.
    model = read_model_folder(folder)
    tokenizer = load_tokenizer(folder)
    task, learning_rate, max_new_tokens = settings_of(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0)

    def ask(problems: list[Problem], answers: int, seed: int
            ) -> tuple[list[list[int]], Generation, Tensor, Tensor]:
        """Stages 3 and 4, in training and in the evaluation: sample answers to each problem. Return
        the prompts, what was sampled, the rewards (B,), and which answers are right (B,)."""
        prompts = []
        for problem in problems:
            text = task.prompt_for(problem)
            prompts.append(encode_prompt(tokenizer, text, task.show(problem)))
        sampled = generate(model, prompts, answers=answers, stop_ids=stop_ids(model, tokenizer),
                           max_new_tokens=max_new_tokens, seed=seed)
        reward, right = [], []
        for b, (ids, inside) in enumerate(zip(sampled.tokens, sampled.mask)):
            text = tokenizer.decode(ids[inside].tolist(), skip_special_tokens=False)
            score = task.score(problems[b // answers], text)  # so many answers each
            reward.append(score["reward"])
            right.append(score["answer"])
        return prompts, sampled, torch.tensor(reward), torch.tensor(right)

    # The success is measured on problems that no step trains on, once before the first step and
    # once after the last one. Both times the problems and the random numbers are the same.
    held_out = task.held_out_problems(held_out_count)
    *_, right = ask(held_out, 1, derived_seed("evaluation", 0))
    print(f"before: {success(right)}\n")
    print("step  reward  success  unequal groups  gradient norm  tokens", flush=True)

    for step in range(1, steps + 1):
        # Stage 2: draw new problems, which follow from the seed and the number of the step.
        problems = task.training_problems(seed, step, problem_count)

        # Stages 3 and 4: sample answers with random numbers of this step, and reward them. Those of
        # the step before cannot simply be used again: the mean over answers estimates the gradient
        # only for the model that sampled them, and the step has changed the model.
        prompts, sampled, reward, right = ask(problems, answers, derived_seed("train", seed, step))
        ids, mask = sampled.tokens, sampled.mask                                     # (B, T) each

        # Stage 5: compare each answer with the others to the same problem. If all answers of a
        # group have the same reward, their advantages are 0, and the group teaches nothing.
        group = torch.arange(problem_count).repeat_interleave(answers)     # (B,): 0 0 ... 1 1 ...
        advantage = group_z_score(reward, group)[:, None] * mask                     # (B, T)

        # Stage 6: weight the tokens. Your own idea would go here.
        weight = torch.ones_like(sampled.log_prob)                                   # (B, T)
        weight = weight / weight[mask].mean()

        # Stage 7: compute the loss and its gradient, group by group. `backward` adds to the
        # gradient that is there. That of the step before is removed first, and those of the groups
        # add up to the gradient of the whole loss, because each is divided by the same N. So the
        # memory is that of one group, whatever the number of problems.
        N = int(mask.sum())
        optimizer.zero_grad()
        unequal = 0
        for number, prompt in enumerate(prompts):
            rows = slice(number * answers, (number + 1) * answers)
            if advantage[rows].any():
                unequal += 1
                log_prob = log_probs(model, prompt, ids[rows])                  # (answers, T)
                loss = policy_loss(log_prob, advantage[rows], weight[rows], mask[rows], total=N)
                loss.backward()

        # Stage 8: move the parameters. If no group taught anything, there is no gradient, but AdamW
        # would still move them by its mean of earlier gradients. So the step is left out.
        norm = 0.0
        if unequal:
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM))
            optimizer.step()
        print(f"{step:4}  {reward.mean():6.3f}  {right.mean():7.1%}  {unequal:8} of {problem_count}"
              f"  {norm:13.3f}  {N:6}", flush=True)

    *_, right = ask(held_out, 1, derived_seed("evaluation", 0))
    print(f"\nafter:  {success(right)}")
    # That is all of training. What train.py adds, and why, is the list at the top of one_step.py.
    return model


def log_probs(model: Qwen2, prompt: list[int], answers: Tensor) -> Tensor:
    """(G, T): the log-prob of each token of G answers to one prompt, as in one_step.py. Only, the
    prompt is computed once, and not once for each answer: with a long prompt that is the most work.

    Prompt and answers are laid end to end in one row. In it a token sees the tokens up to itself,
    but of those only the prompt and its own answer. Each answer begins at the position after the
    prompt.

        prompt p q, answers x y and z w     row        p q x y z w
                                            position   0 1 2 3 2 3
                                            w sees     p q     z w
    """
    G, T = answers.shape
    P = len(prompt)
    row = torch.cat([torch.tensor(prompt), answers.flatten()])                       # (P + G T,)
    positions = torch.cat([torch.arange(P), (P + torch.arange(T)).repeat(G)])
    number = torch.arange(1, G + 1).repeat_interleave(T)             # that of the token's answer
    answer_of = torch.cat([torch.zeros(P, dtype=torch.long), number])         # 0 is the prompt
    order = torch.arange(len(row))
    is_before = order[:, None] >= order
    is_own = (answer_of == 0) | (answer_of[:, None] == answer_of)
    sees = is_before & is_own                                        # (P + G T, P + G T)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), sees, enable_gqa=True)
        return heads.transpose(1, 2)

    hidden = model.model(row[None], positions, attend)[0]                            # (P + G T, D)
    # The prompt's last token predicts the first token of every answer, and each token of an answer
    # predicts the one after it.
    first = hidden[P - 1].expand(G, 1, -1)                                           # (G, 1, D)
    later = hidden[P:].view(G, T, -1)[:, :-1]                                        # (G, T - 1, D)
    logits = model.logits(torch.cat([first, later], dim=1))          # (G, T, vocabulary)
    return logits.log_softmax(-1).gather(2, answers[:, :, None]).squeeze(2)          # (G, T)


def success(right: Tensor) -> str:
    """The share of right answers with its 95% interval, that of Wilson (1927)."""
    z, count, hits = 1.96, len(right), float(right.sum())
    middle = (hits + z * z / 2) / (count + z * z)
    half = z / (count + z * z) * math.sqrt(hits * (count - hits) / count + z * z / 4)
    return (f"{hits / count:.1%} of {count} held-out problems "
            f"(95% interval {middle - half:.1%} to {middle + half:.1%})")


def save(model: Qwen2, folder: Path, made_from: Path) -> None:
    """Write a folder that this program and `transformers` can open."""
    write_model_folder(model, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "recipe.json"):
        if (made_from / name).exists():
            shutil.copyfile(made_from / name, folder / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A whole training with GRPO in one file.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="a model folder")
    parser.add_argument("--steps", type=int, default=STEPS, help="how many steps")
    parser.add_argument("--seed", type=int, default=0,
                        help="decides the problems and the random numbers")
    parser.add_argument("--problems", type=int, default=PROBLEMS, help="problems of a step")
    parser.add_argument("--answers", type=int, default=ANSWERS, help="answers to each problem")
    parser.add_argument("--held_out", type=int, default=HELD_OUT,
                        help="problems of the evaluations, which are never trained on")
    parser.add_argument("--save", type=Path, help="a new folder for the trained model")
    given = parser.parse_args()
    if given.save and given.save.exists():
        parser.error(f"{given.save} exists already")
    if min(given.steps, given.problems, given.held_out) < 1 or given.answers < 2:
        parser.error("--steps, --problems and --held_out should be at least 1, "
                     "--answers at least 2")
    if given.folder == FOLDER:
        torch.set_num_threads(1)  # so small a model is no faster with more
    try:
        trained = train(given.folder, given.steps, given.seed, given.problems, given.answers,
                        given.held_out)
        if given.save:
            save(trained, given.save, given.folder)
    except UserError as error:
        raise SystemExit(f"loop.py: {error}") from None
