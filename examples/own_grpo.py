"""All of GRPO in 40 lines, without the imports: the parts of page 5 of the course, and a training.

    python examples/own_grpo.py                 # 25 steps of models/tiny, in a quarter of a minute
    python examples/write_the_loss.py train     # the same with your functions

There is no cache for the gradient, no file and no flag, and one group is computed at a time. Each
number printed is that of `python train.py --questions 8 --answers 8`. In step 26 the two round
differently, an answer gets another token, and from there on they differ.
"""
# mypy: allow-untyped-defs, allow-untyped-calls
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it can be started from any folder

import torch

from countdown_task import Task
from grpo import AdamW, generator_of
from qwen2_model import generate, load_model, load_tokenizer, stop_tokens


def advantages(reward, group):
    result = torch.empty_like(reward)
    for g in group.unique():
        own = reward[group == g]
        result[group == g] = (own - own.mean()) / (own.std(correction=0) + 0.0001)
    return result


def log_prob_of(logits, ids):
    return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]


def policy_loss(log_prob, advantage, weight, mask, total):
    return -(weight * advantage * log_prob * mask).sum() / total


def train(advantages, log_prob_of, policy_loss, steps=25):
    model, tokenizer = load_model(PROJECT / "models/tiny"), load_tokenizer(PROJECT / "models/tiny")
    task = Task("short", numbers="3", max_number=15, max_result=150)
    optimizer = AdamW(model.parameters(), learning_rate=0.00025)
    group = torch.arange(8).repeat_interleave(8)  # 8 answers to each of 8 problems
    for step in range(1, steps + 1):
        problems = task.training_problems(0, step, 8)
        prompts = [tokenizer.encode(task.prompt_for(problem)).ids for problem in problems]
        drawn = generate(model, prompts, 8, 80, stop_tokens(model, tokenizer),
                         generator_of("train", 0, step))
        reward = torch.zeros(64)
        for row, ids in enumerate(drawn.ids):
            text = tokenizer.decode(ids[drawn.mask[row]].tolist(), skip_special_tokens=False)
            reward[row] = task.score(problems[group[row]], text)["reward"]
        advantage, N, losses = advantages(reward, group), int(drawn.mask.sum()), []
        model.zero_grad()
        for g, prompt in enumerate(prompts):
            own = group == g
            ids = torch.cat([torch.tensor([prompt] * 8), drawn.ids[own]], 1)
            log_prob = log_prob_of(model(ids), ids)[:, len(prompt) - 1:]  # of the answers alone
            loss = policy_loss(log_prob, advantage[own, None], torch.ones_like(log_prob),
                               drawn.mask[own], N)
            loss.backward()  # adds to the gradient so far
            losses.append(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        print(f"{step:2}  reward {reward.mean():.3f}  right {(reward > 1).float().mean():5.1%}  "
              f"length {N / 64:.1f}  loss {sum(losses):+.4f}  norm {norm:.3f}", flush=True)


if __name__ == "__main__":
    train(advantages, log_prob_of, policy_loss)
