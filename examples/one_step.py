"""One step of GRPO from top to bottom: one problem, sixteen answers, one update of the model.

    python examples/one_step.py                    # models/tiny: a few seconds
    python examples/one_step.py FOLDER             # any Qwen2, Qwen2.5 or dense Qwen3 model; one of
                                                   # 0.5 billion parameters takes a minute or two
    python examples/one_step.py models/tiny 2      # another problem, that of train.py's step 2

It takes every part from the files at the root, writes no file, and says what happens. Its gradient
is the one that `python train.py --questions 1 --answers 16` computes in its first step; a test
compares the two. The group is that of README's table, but there fifteen other problems are trained
on with it: here the minus of *8 - 2* rises by 0.18, and there it falls by 0.024
(docs/course/7_why_did_the_minus_fall.md). It takes 16 bytes of memory a parameter (the weights,
their gradient, AdamW's two means), and more for the logits and for what the backward pass needs.
train.py repeats such steps, and its first lines say what it adds to them, and why.
"""
import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it can be started from any folder

import torch
from torch import Tensor

from countdown_task import END_OF_TURN, Task
from grpo import AdamW, Rollouts, generator_of, group_z_score, log_probs, policy_loss
from qwen2_model import Qwen2, UserError, generate, load_model, load_tokenizer, read_json, spelling

ANSWERS = 16
SEED = 0
MAX_GRAD_NORM = 1.0
SHOWN_TOKENS = 12
# the settings of a model whose folder has no recipe.json: problems of two numbers
WITHOUT_RECIPE: dict[str, Any] = {"numbers": "2", "max_number": 30, "learning_rate": 5e-7,
                                  "max_new_tokens": 128}


def one_step(folder: Path, step: int = 1) -> Qwen2:
    """Print what happens in a step, and return the model as it is afterwards.

    Shapes: B is 16, the number of answers, and T the tokens of the longest answer.
    """
    # Stage 1: load the model and its tokenizer, and make the task in a form that suits the model.
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    task, learning_rate, max_new_tokens = settings_of(folder)
    ends = [tokenizer.token_to_id(token) for token in END_OF_TURN]
    stop = tuple({*model.config.eos_token_id, *filter(None, ends)})

    # Stage 2: draw a problem, and write the prompt, which ends where the answer begins.
    [problem] = task.training_problems(SEED, step, count=1)
    prompt = tokenizer.encode(task.prompt_for(problem), add_special_tokens=False).ids

    # Stage 3: sample the answers. An answer ends with a stop token (<|im_end|>, which is its last
    # token) or at the limit. Shorter answers are filled up to T positions, and the mask is True
    # only at the tokens of an answer. The seed is made from a word, the run's seed and the step, so
    # each step of each run has random numbers of its own.
    sampled = generate(model, [prompt], ANSWERS, max_new_tokens, stop,
                       generator_of("train", SEED, step))
    ids, mask = sampled.ids, sampled.mask                                            # (B, T)

    # Stage 4: reward each answer by its text.
    texts, rewards = [], []
    for b in range(ANSWERS):
        ids_of_answer = ids[b, mask[b]].tolist()
        texts.append([spelling(tokenizer, token) for token in ids_of_answer])
        text = tokenizer.decode(ids_of_answer, skip_special_tokens=False)
        rewards.append(task.score(problem, text)["reward"])
    reward = torch.tensor(rewards)                                                   # (B,)

    # Stage 5: compare the answers with each other. An answer's advantage is (its reward - the mean
    # reward of its group) / (the standard deviation of the group's rewards + 0.0001). All sixteen
    # answer problem number 0, so they are one group. Every token gets its answer's advantage.
    group = torch.zeros(ANSWERS, dtype=torch.long)                                   # (B,)
    advantage_of_answer = group_z_score(reward, group)                               # (B,)
    advantage = advantage_of_answer[:, None] * mask                                  # (B, T)

    # Stage 6: weight the tokens. In plain GRPO each has weight 1. Your own idea would go here.
    weight = torch.ones_like(sampled.log_prob)                                       # (B, T)
    weight = weight / weight[mask].mean()  # whatever the weights were, their mean is 1 now

    # Stage 7: compute the loss and its gradient. The sampler has computed the log-probs as well,
    # but it keeps nothing for a backward pass, so they are computed again. `policy_loss` says why a
    # step against this gradient raises the expected reward.
    no_label = torch.zeros_like(ids)
    rollouts = Rollouts([problem], [prompt], group, **sampled._asdict(), texts=texts, answers=[],
                        section=no_label, kind=no_label, scores={"reward": reward})
    every = torch.arange(ANSWERS)
    log_prob = log_probs(model, rollouts, every)                                     # (B, T)
    # Both must agree. If logits are read one position too late, no error is raised, but this gap
    # is large.
    gap = (log_prob - sampled.log_prob).abs().max()
    N = int(mask.sum())
    policy_loss(log_prob, advantage, weight, mask, N).backward()

    # Stage 8: limit the gradient to the norm MAX_GRAD_NORM, and move the parameters. `norm` is the
    # gradient's norm before it was limited. A training makes the optimizer once, before its first
    # step, because AdamW keeps means of the gradients of earlier steps.
    optimizer = AdamW(model.parameters(), learning_rate)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()

    # Stage 9: compute how probable the same tokens are after the update.
    log_prob = log_prob.detach()
    with torch.no_grad():
        log_prob_after = log_probs(model, rollouts, every)                           # (B, T)

    print(f"problem {task.show(problem)}: rewards have mean {reward.mean():.4f} and standard "
          f"deviation {reward.std(correction=0):.4f}")
    print(f"the log-probs of training differ from those of the sampler by at most {gap:.2g}")
    print(f"the gradient has norm {norm:.3g} (limited to {MAX_GRAD_NORM:g}), and AdamW's learning "
          f"rate is {learning_rate:g}\n")
    show_answers(mask, reward, advantage_of_answer, log_prob, log_prob_after)
    best = int(reward.argmax())
    show_tokens(best, texts[best], {
        "log-prob before": log_prob[best],
        "advantage": advantage[best],
        "weight": weight[best],
        "term of the loss": -weight[best] * advantage[best] * log_prob[best] / N,
        "log-prob after": log_prob_after[best],
        "change": log_prob_after[best] - log_prob[best]})
    if reward.max() == reward.min():
        print("\nAll answers have the same reward, so this problem teaches nothing. Take another: "
              f"python examples/one_step.py {folder} {step + 1}")
    return model


def settings_of(folder: Path) -> tuple[Task, float, int]:
    """The task, the learning rate and the largest number of new tokens that suit a model. Its
    folder's recipe.json names them, if it has one."""
    recipe = folder / "recipe.json"
    settings = read_json(recipe) if recipe.exists() else WITHOUT_RECIPE
    of_task = {one.name: settings[one.name] for one in fields(Task) if one.name in settings}
    return Task(**of_task), settings["learning_rate"], settings["max_new_tokens"]


def show_answers(mask: Tensor, reward: Tensor, advantage: Tensor, log_prob: Tensor,
                 log_prob_after: Tensor) -> None:
    """Print a line for each answer. Its log-prob is the sum over its tokens."""
    before, after, length = log_prob.sum(1), log_prob_after.sum(1), mask.sum(1)
    change = after - before
    print("answer  tokens  reward  advantage   log-prob before    after   change")
    rose_anyway = []
    for b in range(ANSWERS):
        print(f"{b:6}  {length[b]:6}  {reward[b]:6.2f}  {advantage[b]:+9.3f}  "
              f"{before[b]:16.3f} {after[b]:8.3f}  {change[b]:+7.3f}")
        if advantage[b] < 0 and change[b] > 0:
            rose_anyway.append(str(b))
    if rose_anyway:
        print("\nAnswers that became more probable in spite of a negative advantage: "
              f"{', '.join(rose_anyway)}.\nAll answers share the model's parameters, so "
              "each answer's term of the loss moves all of them.")


def show_tokens(answer: int, texts: list[str], columns: dict[str, Tensor]) -> None:
    """Print some of an answer's tokens: those that the model was least sure of, in the order of the
    answer. Each column has a number for each of its tokens, and after them for the padding."""
    log_prob = columns["log-prob before"][:len(texts)]
    least_sure = log_prob.argsort()[:SHOWN_TOKENS].tolist()
    print(f"\nThe {len(least_sure)} tokens of answer {answer} that the model was least sure of. A "
          "term of the loss is\n-weight * advantage * log-prob / N, with N tokens in all answers:\n"
          f"\nposition  token      {'  '.join(columns)}")
    for t in sorted(least_sure):
        line = f"{t:8}  {texts[t]!r:10}"
        for heading, values in columns.items():
            width = len(heading)
            line += f" {values[t]:+{width}.4f} "
        print(line.rstrip())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="One step of GRPO, from top to bottom.")
    parser.add_argument("folder", nargs="?", type=Path, default=PROJECT / "models" / "tiny",
                        help="a model folder; models/tiny if none is named")
    parser.add_argument("step", nargs="?", type=int, default=1,
                        help="the number of the step, which decides the problem: from 1 on")
    given = parser.parse_args()
    if given.step < 1:
        parser.error(f"steps are counted from 1, and {given.step} is no step")
    try:
        one_step(given.folder, given.step)
    except UserError as error:
        raise SystemExit(f"one_step.py: {error}") from None
