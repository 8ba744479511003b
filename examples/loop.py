"""GRPO until a model has learned: the step of one_step.py, thirty times, each with 16 problems.

    python examples/loop.py                      # models/tiny: less than a minute on one core
    python examples/loop.py --steps 5 --seed 1   # fewer steps, with other problems

Read examples/one_step.py first. The stages here have the same numbers. The comments say only what
changes because a step is repeated, and because it has several problems. The steps are those of
`python train.py --questions 16 --answers 8`; a test compares the first two. The trained model is
not saved, because no file is written.
"""
import argparse
import math
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it can be started from any folder

import engine  # noqa: F401  before torch, as in one_step.py
import torch
from torch import Tensor

from countdown_task import Problem
from engine.model_folder import read_model_folder
from engine.policy import derived_seed, stop_ids
from engine.sampler import Generation, generate
from engine.tokens import encode_prompt, load_tokenizer
from examples.one_step import MAX_GRAD_NORM, log_probs, settings_of
from grpo import group_z_score, policy_loss
from qwen2_model import Qwen2

FOLDER = PROJECT / "models" / "tiny"
PROBLEMS, ANSWERS = 16, 8  # of a step
HELD_OUT = 500  # problems that are never trained on


def train(steps: int, seed: int) -> Qwen2:
    """Train the model, print a line for each step, and return the model as it is at the end.

    Shapes: B is 128, the number of answers; T is the number of tokens of the longest one.
    """
    # Stage 1: load the model, and make the optimizer, once. AdamW moves a parameter by the learning
    # rate * (the mean of its gradients) / (the root of the mean of their squares), and it keeps
    # these two means from step to step. An optimizer that is made anew knows one gradient alone.
    # Divided by its own size that is +1 or -1, so in each step every parameter would move by about
    # the learning rate, however small its gradient is, and the noise of batches would not average.
    model = read_model_folder(FOLDER)
    tokenizer = load_tokenizer(FOLDER)
    task, learning_rate, max_new_tokens = settings_of(FOLDER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0)

    def ask(problems: list[Problem], answers: int, seed: int
            ) -> tuple[list[list[int]], Generation, Tensor, Tensor]:
        """Stages 3 and 4, in training and in the evaluation: sample answers to each problem. Return
        the prompts, what was sampled, the rewards (B,), and which answers are right (B,)."""
        prompts = [encode_prompt(tokenizer, task.prompt_for(problem), task.show(problem))
                   for problem in problems]
        sampled = generate(model, prompts, answers=answers, stop_ids=stop_ids(model, tokenizer),
                           max_new_tokens=max_new_tokens, seed=seed)
        scores = []
        for b, (ids, inside) in enumerate(zip(sampled.tokens, sampled.mask)):
            text = tokenizer.decode(ids[inside].tolist(), skip_special_tokens=False)
            scores.append(task.score(problems[b // answers], text))  # so many each
        reward = torch.tensor([score["reward"] for score in scores])
        right = torch.tensor([score["answer"] for score in scores])
        return prompts, sampled, reward, right

    # The success is measured on problems that no step trains on, once before the first step and
    # once after the last one. Both times the problems and the random numbers are the same.
    held_out = task.held_out_problems(HELD_OUT)
    *_, right = ask(held_out, 1, derived_seed("evaluation", 0))
    print(f"before: {success(right)}\n")
    print("step  reward  success  unequal groups  gradient norm  tokens")

    for step in range(1, steps + 1):
        # Stage 2: draw new problems, which follow from the seed and the number of the step.
        problems = task.training_problems(seed, step, PROBLEMS)

        # Stages 3 and 4: sample answers with random numbers of this step, and reward them. Those of
        # the step before cannot simply be used again: the mean over answers estimates the gradient
        # only for the model that sampled them, and the step has changed the model.
        prompts, sampled, reward, right = ask(problems, ANSWERS, derived_seed("train", seed, step))
        ids, mask = sampled.tokens, sampled.mask                                     # (B, T) each

        # Stage 5: compare each answer with the others to the same problem. If all answers of a
        # group have the same reward, their advantages are 0, and the group teaches nothing.
        group = torch.arange(PROBLEMS).repeat_interleave(ANSWERS)          # (B,): 0 0 ... 1 1 ...
        advantage = group_z_score(reward, group)[:, None] * mask                     # (B, T)
        unequal = advantage.view(PROBLEMS, -1).any(1).sum()

        # Stage 6: weight the tokens. Your own idea would go here.
        weight = torch.ones_like(sampled.log_prob)                                   # (B, T)
        weight = weight / weight[mask].mean()

        # Stage 7: compute the loss and its gradient. Prompts differ in length, so the log-probs are
        # computed group by group. `backward` adds to the gradient that is there, so that of the
        # step before is removed first.
        log_prob = torch.cat([log_probs(model, prompt, of_group)
                              for prompt, of_group in zip(prompts, ids.split(ANSWERS))])  # (B, T)
        loss = policy_loss(log_prob, advantage, weight, mask, total=int(mask.sum()))
        optimizer.zero_grad()
        loss.backward()

        # Stage 8: move the parameters. If no group taught anything, the gradient is 0, but AdamW
        # would still move them by its mean of earlier gradients. So the step is left out.
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        if unequal:
            optimizer.step()
        print(f"{step:4}  {reward.mean():6.3f}  {right.mean():7.1%}  {unequal:8} of {PROBLEMS}  "
              f"{norm:13.3f}  {mask.sum():6}", flush=True)

    *_, right = ask(held_out, 1, derived_seed("evaluation", 0))
    print(f"\nafter:  {success(right)}")
    # That is all of training. What train.py adds, and why, is the list at the top of one_step.py.
    return model


def success(right: Tensor) -> str:
    """The share of right answers with its 95% interval, that of Wilson (1927)."""
    z, count, hits = 1.96, len(right), float(right.sum())
    middle = (hits + z * z / 2) / (count + z * z)
    half = z / (count + z * z) * math.sqrt(hits * (count - hits) / count + z * z / 4)
    return (f"{hits / count:.1%} of {count} held-out problems "
            f"(95% interval {middle - half:.1%} to {middle + half:.1%})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO until models/tiny has learned.")
    parser.add_argument("--steps", type=int, default=30, help="how many; 30 if none is named")
    parser.add_argument("--seed", type=int, default=0,
                        help="decides the problems and the random numbers; 0 if none is named")
    given = parser.parse_args()
    torch.set_num_threads(1)  # so small a model is no faster with more
    train(given.steps, given.seed)
