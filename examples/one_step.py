"""One step of GRPO from top to bottom: one problem, sixteen answers, one update of the model.

    python examples/one_step.py                    # models/tiny: a few seconds
    python examples/one_step.py FOLDER             # any Qwen2, Qwen2.5 or dense Qwen3 model; one of
                                                   # 0.5 billion parameters takes a minute or two
    python examples/one_step.py models/tiny 2      # another problem, that of train.py's step 2

It uses the model (qwen2_model.py), the task (countdown_task.py), the formulas (grpo.py) and a plain
sampler (examples/sampler.py), and writes no file. Its gradient is the one that
`python train.py --questions 1 --answers 16` computes in its first step; a test compares the two.
The group is that of README's table, but there fifteen other problems are trained on with it: here
the minus of *8 - 2* rises by 0.18, and there it falls by 0.024 (docs/one_group.md).
It takes 16 bytes of memory a parameter (the weights, their gradient, AdamW's two moments), and more
for the logits and for what the backward pass needs. A whole training of such steps is
examples/loop.py.

What the lab adds to such a step, and why:

    evaluation       answers to held-out problems, because the rewards of a batch are partly luck
                     and the problems change from step to step
    a record         advantage, weight and log-prob of each token in a file, because questions come
                     up after the training
    resuming         checkpoints, and random numbers that follow from the step alone, because a run
                     that is killed should go on as if nothing had happened
    micro-batches    because the answers to many problems do not fit into memory at once
    a fast sampler   because the plain one computes a prompt for each of its answers
    shared prompts   because sixteen answers need the prompt computed once, not sixteen times
    choices          weightings, advantages, a KL term, several updates with a batch: ideas to try
"""
import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it can be started from any folder

# This import sets two environment variables that make torch faster. Torch reads them when it is
# imported, so the line stands before the next one. Nothing below uses the name.
import lab.engine  # noqa: F401
import torch
from torch import Tensor

from lab.countdown import Task
from lab.engine.errors import UserError
from lab.engine.model_folder import read_model_folder
from lab.engine.policy import derived_seed, stop_ids
from lab.engine.tokens import encode_prompt, load_tokenizer
from examples.sampler import sample
from grpo import group_z_score, policy_loss
from lab.engine.model import Qwen2

ANSWERS = 16
SEED = 0
MAX_GRAD_NORM = 1.0
SHOWN_TOKENS = 12
# The settings of a model whose folder has no recipe.json: problems of two numbers, four of them
# solved in the prompt, and an answer that is the bare expression.
WITHOUT_RECIPE: dict[str, Any] = {
    "prompt": "expression", "examples": 4, "numbers": "2", "min_number": 2, "max_number": 30,
    "max_target": 900, "reward_form": "right", "learning_rate": 5e-7, "max_new_tokens": 12}


def one_step(folder: Path, step: int = 1) -> Qwen2:
    """Print what happens in a step, and return the model as it is afterwards.

    Shapes: B is 16, the number of answers; P is the prompt's tokens, T those of the longest answer.
    """
    # Stage 1: load the model and its tokenizer, and make the task in a form that suits the model.
    model = read_model_folder(folder)
    tokenizer = load_tokenizer(folder)
    task, learning_rate, max_new_tokens = settings_of(folder)

    # Stage 2: draw a problem, and write the prompt, which ends where the answer begins.
    [problem] = task.training_problems(SEED, step, count=1)
    name = task.show(problem)  # such as "10 8 2 make 60": for people, and for error messages
    prompt = encode_prompt(tokenizer, task.prompt_for(problem), name)                # P token ids

    # Stage 3: sample the answers. An answer ends with a stop token (<|im_end|>, which is its last
    # token) or at the limit. Shorter answers are filled up to T positions, and the mask is True
    # only at the tokens of an answer. The seed is made from a word, the run's seed and the step, so
    # each step of each run has random numbers of its own.
    ids, mask, sampled_log_prob = sample(                                            # (B, T) each
        model, prompt, ANSWERS, max_new_tokens, stop_ids(model, tokenizer),
        seed=derived_seed("train", SEED, step))

    # Stage 4: reward each answer by its text.
    rewards = []
    for b in range(ANSWERS):
        ids_of_answer = ids[b, mask[b]].tolist()
        text = tokenizer.decode(ids_of_answer, skip_special_tokens=False)
        score = task.score(problem, text)
        rewards.append(score["reward"])
    reward = torch.tensor(rewards)                                                   # (B,)

    # Stage 5: compare the answers with each other. An answer's advantage is (its reward - the mean
    # reward of its group) / (the standard deviation of the group's rewards + 0.0001). All sixteen
    # answer problem number 0, so they are one group. Every token gets its answer's advantage.
    group = torch.zeros(ANSWERS, dtype=torch.long)                                   # (B,)
    advantage_of_answer = group_z_score(reward, group)                               # (B,)
    advantage = advantage_of_answer[:, None] * mask                                  # (B, T)

    # Stage 6: weight the tokens. In plain GRPO each has weight 1. Your own idea would go here.
    weight = torch.ones_like(sampled_log_prob)                                       # (B, T)
    weight = weight / weight[mask].mean()  # whatever the weights were, their mean is 1 now

    # Stage 7: compute the loss and its gradient. The sampler has computed the log-probs as well,
    # but it keeps nothing for a backward pass, so they are computed again.
    log_prob = log_probs(model, prompt, ids)                                         # (B, T)
    # Both must agree. If logits are read one position too late, no error is raised, but this gap
    # is large.
    difference = (log_prob - sampled_log_prob) * mask
    gap = difference.abs().max()
    # The loss is -sum(weight * advantage * log_prob * mask) / N, with N tokens in all answers.
    # Why does a step against the gradient of this loss raise the expected reward?
    #   1. The expected reward is the sum of probability * reward over all possible answers.
    #   2. Its gradient is the sum of (gradient of probability) * reward.
    #   3. The gradient of a probability is probability * (gradient of log-prob). So the gradient of
    #      the expected reward is the sum of probability * (gradient of log-prob) * reward.
    #   4. A sum of probability * something is the mean of that something over sampled answers. So
    #      the mean of (gradient of log-prob) * reward over our answers estimates it.
    #   5. The advantage takes the place of the reward: docs/policy_gradient.md derives why it may.
    # The loss has a minus, because an optimizer makes it smaller, and the reward should be larger.
    # But its value says nothing: only the gradient counts, and only at the model that sampled these
    # answers. After the step they are no longer its samples, so each step samples new ones. That is
    # also why there is no ratio of new to old probability as in PPO, and no clipping: before the
    # first update with a batch the ratio is 1. A KL term is left out as well.
    N = int(mask.sum())
    loss = policy_loss(log_prob, advantage, weight, mask, total=N)
    loss.backward()

    # Stage 8: limit the gradient to the norm MAX_GRAD_NORM, and move the parameters. `norm` is the
    # gradient's norm before it was limited. In a training the optimizer is made once, before the
    # first step, because AdamW keeps means of the gradients of earlier steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()

    # Stage 9: compute how probable the same tokens are after the update.
    log_prob = log_prob.detach()
    with torch.no_grad():
        log_prob_after = log_probs(model, prompt, ids)                               # (B, T)

    print(f"problem {name}: rewards have mean {reward.mean():.4f} and standard "
          f"deviation {reward.std(correction=0):.4f}")
    print(f"the log-probs of training differ from those of the sampler by at most {gap:.2g}")
    print(f"the gradient has norm {norm:.3g} (limited to {MAX_GRAD_NORM:g}), and AdamW's learning "
          f"rate is {learning_rate:g}\n")
    show_answers(mask, reward, advantage_of_answer, log_prob, log_prob_after)
    best = int(reward.argmax())
    texts = []
    for token in ids[best, mask[best]].tolist():
        texts.append(tokenizer.decode([token]))
    show_tokens(best, texts, {
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
    folder's recipe.json names them, if it has one. A recipe may leave the last two out."""
    recipe = folder / "recipe.json"
    settings = WITHOUT_RECIPE
    if recipe.exists():
        settings = {"learning_rate": 5e-6, "max_new_tokens": 512}
        settings.update(json.loads(recipe.read_text()))
    # A recipe has settings of the task, such as numbers="3", and others, such as the number of
    # steps. The task gets those that it has a field for.
    of_task = {}
    for field in fields(Task):
        if field.name in settings:
            of_task[field.name] = settings[field.name]
    return Task(**of_task), settings["learning_rate"], settings["max_new_tokens"]


def show_answers(mask: Tensor, reward: Tensor, advantage: Tensor, log_prob: Tensor,
                 log_prob_after: Tensor) -> None:
    """Print a line for each answer. Its log-prob is the sum over its tokens. `mask` and the
    log-probs are (B, T), reward and advantage (B,)."""
    before = (log_prob * mask).sum(1)
    after = (log_prob_after * mask).sum(1)
    change = after - before
    length = mask.sum(1)
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


def log_probs(model: Qwen2, prompt: list[int], answers: Tensor) -> Tensor:
    """(B, T): the log-prob of each token, given the prompt and the tokens before it.

    No token of an answer sees the padding, because it comes after the answer, and attention is
    causal: each position sees those before it. The logits at a position are a prediction of the
    next token, so those at the prompt's last position belong to the answer's first token, and those
    at the answer's last one to no token.
    """
    prompts = torch.tensor([prompt] * len(answers))                                  # (B, P)
    sequences = torch.cat([prompts, answers], dim=1)                # (B, P + T)
    logits = model(sequences)                                       # (B, P + T, vocabulary)
    predictions = logits[:, len(prompt) - 1:-1]                     # (B, T, vocabulary)
    log_prob = predictions.log_softmax(-1)                          # (B, T, vocabulary)
    of_answer = log_prob.gather(2, answers[:, :, None])             # (B, T, 1)
    return of_answer.squeeze(2)                                                      # (B, T)


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
