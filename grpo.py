"""GRPO (arXiv 2402.03300): one reward per answer, compared with the rewards of the other answers
to the same problem, and given to every token of the answer.

    A_i  = (R_i - mean of the group) / (std of the group + 1e-4)
    loss = - sum over answers i and tokens t of  w_it A_it log pi(y_it | prompt, y_i<t)  / N

    A_it  the advantage of a token, chosen by --advantage. In GRPO it is A_i at every token
    w_it  the weight of a token, chosen by --mitigation (mitigations.py). In GRPO it is 1
    N     the number of generated tokens in the batch

Four answers to one problem, of which the first is right:

    reward       1.1    0.1    0.1    0.1       mean 0.35, std 0.433
    advantage  +1.73  -0.58  -0.58  -0.58       at each token of the answer

If all four had the same reward, all advantages would be 0. Such a group teaches nothing.

From top to bottom: a batch and how it is made, `sample`; its advantages; the loss and why it is
right, `policy_loss`; the step, `update`; what two flags add to it; what is checked. `python
grpo.py` shows a step on four answers to one problem. Of the published GRPO this differs:

    ratio and clipping   A batch is trained on once. So a token is as likely as when it was sampled,
                         the ratio is 1, and clipping does nothing. --epochs above 1 has both.
    the KL term          --kl above 0 adds it, and keeps a frozen copy of the initial model.
    the length           The paper divides the sum over an answer's tokens by their number. Here all
                         tokens of the batch count the same.
    the reward           The paper has a reward model. Here a program checks the answer.

Everything per token is a tensor (B, T): B answers, and T positions, at most --max_new_tokens. Index
t is the t-th generated token. The model predicts it at the token before. In training
`states_before` makes this shift, and nothing else does.
"""
import copy
import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from qwen2_model import (Cache, Decoder, Qwen2, Sampled, UserError, generate, load_model,
                         load_tokenizer, spelling, stop_tokens)

Metrics = dict[str, Any]


@dataclass
class Rollouts:
    """B answers to Q problems, with everything that is known about each token. `mask` says which
    tokens belong to the answer, its stop token included; beyond it all else is 0."""
    problems: Sequence[Any]         # the Q problems
    prompt_ids: list[list[int]]     # the prompt of each
    group: Tensor                   # (B,) 0..Q-1: group g holds the answers to problem g

    # from the sampler
    ids: Tensor                     # (B, T) int64
    mask: Tensor                    # (B, T) bool
    finished: Tensor                # (B,) bool: ended with a stop token, not at the limit
    log_prob: Tensor                # (B, T)
    entropy: Tensor                 # (B, T) -sum p log p
    collision: Tensor               # (B, T) sum p^2

    # from the task
    texts: list[list[str]]          # the text of each token of each answer
    answers: list[str]              # the text of each answer
    section: Tensor                 # (B, T) uint8, codes in countdown_task.py
    kind: Tensor                    # (B, T) uint8
    scores: dict[str, Tensor]       # (B,) each part of the reward, and their sum "reward"

    # from the training loop
    step: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator)
    advantage: Tensor = field(default_factory=lambda: torch.tensor(float("nan")))  # (B, T)

    @property
    def reward(self) -> Tensor:
        """(B,)"""
        return self.scores["reward"]

    @property
    def length(self) -> Tensor:
        """(B,) the number of tokens of each answer."""
        return self.mask.sum(1)

    @property
    def written(self) -> Tensor:
        """(B, T) bool: the tokens that the model reads in an answer. They are those of the mask,
        unless an environment writes into the answer, too."""
        return self.mask


# --------------------------------------------------------------------------------------- the batch
def sample(model: Qwen2, tokenizer: Tokenizer, task: Any, problems: Sequence[Any], answers: int,
           max_new_tokens: int, generator: torch.Generator, greedy: bool = False,
           generate: Callable[..., Sampled] = generate) -> Rollouts:
    """Sample answers to each problem, score them, and label their tokens. `generate` draws them;
    another function may do it in a way of its own."""
    prompts = [encode(tokenizer, task.prompt_for(problem)) for problem in problems]
    most = model.config.max_position_embeddings
    if (longest := max(map(len, prompts)) + max_new_tokens) > most:
        raise UserError(f"prompt and answer can have {longest} tokens, and the model takes {most}")
    drawn = generate(model, prompts, answers, max_new_tokens, stop_tokens(model, tokenizer),
                     generator, greedy)
    if not drawn.log_prob.isfinite().all():
        raise UserError("the model's probabilities are not finite")
    # answers to the first problem come first: 0 0 ... 1 1 ...
    group = torch.arange(len(problems)).repeat_interleave(answers)                   # (B,)
    asked = [problems[number] for number in group.tolist()]
    return Rollouts(problems, prompts, group, **drawn._asdict(),
                    **from_task(task, tokenizer, asked, drawn.ids, drawn.mask))


def from_task(task: Any, tokenizer: Tokenizer, asked: Sequence[Any], ids: Tensor, mask: Tensor
              ) -> dict[str, Any]:
    """The fields of a batch that come from the task. `asked` has the problem of each answer."""
    section, kind = torch.zeros(2, *mask.shape, dtype=torch.uint8)                   # (B, T)
    texts, answers, scores = [], [], []
    for row, length in enumerate(mask.sum(1).tolist()):
        tokens = ids[row, :length].tolist()
        texts.append([spelling(tokenizer, token) for token in tokens])
        answers.append(tokenizer.decode(tokens, skip_special_tokens=False))
        scores.append(task.score(asked[row], answers[row]))
        codes = torch.tensor(task.label(texts[row]), dtype=torch.uint8)
        section[row, :length], kind[row, :length] = codes
    columns = {part: torch.tensor([float(score[part]) for score in scores]) for part in scores[0]}
    return {"texts": texts, "answers": answers, "section": section, "kind": kind,
            "scores": columns}


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    if tokenizer.decode(ids, skip_special_tokens=False) != prompt:
        raise UserError(f"the tokenizer cannot spell the prompt {prompt[-80:]!r}: take another "
                        "--prompt, or smaller numbers")
    return ids


def generator_of(*parts: object) -> torch.Generator:
    """A random generator whose seed depends on these parts alone."""
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------------------------- the advantages
Method = Callable[..., Tensor]      # rollouts -> (B, T)
ADVANTAGES: dict[str, Method] = {}  # the choices of --advantage


def advantage(function: Method) -> Method:
    """Make a function a choice of --advantage: values (B, T), which may be negative."""
    return add_choice(ADVANTAGES, function)


def add_choice(choices: dict[str, Method], function: Method) -> Method:
    """Add a function to the choices. A second one of the same name is refused, but not in a
    notebook, whose cells are run again."""
    known = choices.get(function.__name__)
    is_in_file = "__file__" in getattr(function, "__globals__", {})
    if known and is_in_file and place_of(known) != place_of(function):
        raise SystemExit(f"there are two functions {place_of(known)} and {place_of(function)}: one "
                         "needs another name")
    choices[function.__name__] = function
    return function


def place_of(function: Any) -> str:
    """A function with its file and line, as "my_idea (mitigations.py:57)"."""
    if not hasattr(function, "__code__"):  # a class
        return str(function.__name__)
    code = function.__code__
    return f"{function.__name__} ({Path(code.co_filename).name}:{code.co_firstlineno})"


@advantage
def grpo(rollouts: Rollouts) -> Tensor:
    """The z-score of the reward within its group: (reward - mean) / (standard deviation +
    0.0001)."""
    return to_every_token(group_z_score(rollouts.reward, rollouts.group), rollouts)


@advantage
def dr_grpo(rollouts: Rollouts) -> Tensor:
    """The reward minus the group's mean (arXiv 2503.20783). It is not divided by the standard
    deviation, because this division makes problems with nearly equal rewards count more."""
    return to_every_token(centred(rollouts.reward, rollouts.group), rollouts)


@advantage
def rloo(rollouts: Rollouts) -> Tensor:
    """The reward minus the mean of the group's other rewards (arXiv 2402.14740). In a group of G
    answers this is G / (G - 1) * (reward - mean)."""
    size = torch.bincount(rollouts.group)[rollouts.group]
    return to_every_token(centred(rollouts.reward, rollouts.group) * size / (size - 1), rollouts)


def group_mean(value: Tensor, group: Tensor) -> Tensor:
    """(B,) -> (B,): the mean of each answer's group. It is computed in float64, because in float32
    the mean of equal rewards can differ from them in the last digit."""
    count = torch.bincount(group)
    return (torch.zeros_like(count).double().index_add(0, group, value.double()) / count)[group]


def centred(value: Tensor, group: Tensor) -> Tensor:
    """(B,) -> (B,): value minus its group's mean; exactly 0 if the group's values are equal."""
    difference = value.double() - group_mean(value, group)
    return torch.where(difference.abs() < 1e-8, 0.0, difference).float()


def group_z_score(value: Tensor, group: Tensor, epsilon: float = 1e-4) -> Tensor:
    """(B,) -> (B,): (value - mean) / (std + epsilon) within its group, where the std divides by the
    number of answers; exactly 0 if all values of the group are equal."""
    difference = value.double() - group_mean(value, group)
    std = group_mean(difference.square(), group).sqrt()
    return torch.where(std < 1e-8, 0.0, difference / (std + epsilon)).float()


def to_every_token(value: Tensor, rollouts: Rollouts) -> Tensor:
    """(B,) -> (B, T): the same number at every token of an answer."""
    return value[:, None] * rollouts.mask


# ---------------------------------------------------------------------------------------- the loss
def policy_loss(log_prob: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor, N: int
                ) -> Tensor:
    """The formula at the top of this file, for some answers. Tensors are (answers, T).

    Why does a step against the gradient of this loss raise the expected reward?

      1. The expected reward is the sum of probability * reward over all possible answers.
      2. Its gradient is the sum of (gradient of probability) * reward.
      3. The gradient of a probability is probability * (gradient of log-prob). So the gradient of
         the expected reward is the sum of probability * (gradient of log-prob) * reward.
      4. A sum of probability * something is the mean of this something over sampled answers. So
         the mean of (gradient of log-prob) * reward over our answers estimates the gradient.
      5. The log-prob of an answer is the sum of its tokens' log-probs. So the reward of the answer
         stands at each of its tokens.
      6. The advantage takes the place of the reward. Subtracting one number from all rewards of a
         problem does not change the mean gradient, because probabilities sum to 1, and so their
         gradients sum to 0. But the estimate varies less. The group's mean is not one number for
         all G answers, because it contains the answer's own reward. Subtracting it (`dr_grpo`)
         multiplies the mean gradient by 1 - 1/G. The division by the standard deviation (`grpo`)
         changes it once more, and differently for each problem.

    This holds where all weights are 1. Other weights follow another gradient on purpose. See
    docs/reference/policy_gradient.md.

    The loss has a minus, because an optimizer makes the loss smaller, and the reward should grow.
    The value of the loss says nothing. Only its gradient counts, and only at the model that sampled
    these answers. After the step the model is another one, so each step samples new answers.
    """
    return -(weight * advantage * log_prob * mask).sum() / N


def clipped_loss(log_prob: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor,
                 N: int, low: float, high: float) -> Tensor:
    """For --epochs: the loss of PPO (arXiv 1707.06347), with the wider upper bound of DAPO (arXiv
    2503.14476).

    After the first step on a batch, its answers are no longer samples of the model. The ratio of a
    token's probability now to its probability when it was sampled (`old` is its log) corrects for
    how often this token is drawn. It does not correct for how often its prefix and the tokens after
    it are drawn.
    docs/reference/policy_gradient.md has an example.

    Once the ratio has passed a bound in the direction of the advantage, the token has no gradient.
    Where the ratio is 1, the gradient is that of `policy_loss`."""
    ratio = (log_prob - old).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    return -(weight * torch.minimum(ratio * advantage, clipped * advantage) * mask).sum() / N


def k3(log_prob: Tensor, reference: Tensor) -> Tensor:
    """For --kl: KL(policy || reference) at each position, estimated from the token that was sampled
    there: exp(d) - d - 1, d = reference - log_prob (Schulman, "Approximating KL divergence").

    Its value is right on average. Its mean gradient is that of KL(reference || policy), where the
    two models are exchanged. It leaves out that a step also changes which prefixes are reached.
    """
    d = reference - log_prob
    return d.exp() - d - 1


Divergence = Callable[[Tensor, Tensor], Tensor]  # log_prob, reference -> at each position


def log_probs(model: Qwen2, rollouts: Rollouts, rows: Tensor) -> Tensor:
    """(rows, T): the log-probs of these answers' tokens, with gradient; 0 beyond the answer."""
    mask, ids = rollouts.mask[rows], rollouts.ids[rows]
    states = states_before(model.model, rollouts, rows)                              # (tokens, D)
    chosen = model.log_probs(states, ids[mask])                                      # (tokens,)
    return chosen.new_zeros(mask.shape).masked_scatter(mask, chosen)


def states_before(decoder: Decoder, rollouts: Rollouts, rows: Tensor) -> Tensor:
    """(tokens, D): the hidden states that predict the tokens of these answers, answer after answer.

    The state at a token predicts the next token. So the state at the prompt's last token predicts
    the answer's first, and the answer's last token is not read, as nothing follows it:

        states at   q x y        prompt p q, answer x y z
        predict     x y z
    """
    T = int(rollouts.written[rows].sum(1).max())
    ids, mask = rollouts.ids[rows, :T], rollouts.mask[rows, :T]
    groups, prompt_of = rollouts.group[rows].unique(return_inverse=True)
    # each prompt is computed once, and its gradient is the sum over its answers
    cache = Cache(decoder, [rollouts.prompt_ids[g] for g in groups.tolist()], prompt_of)
    # token t is read where token t + 1 follows
    is_read = rollouts.written[rows, 1:T]
    read = cache.read(ids[:, :-1], is_token=is_read)                           # (rows, T - 1, D)
    return torch.cat([cache.last_states()[:, None], read], 1)[mask]


@torch.no_grad()
def frozen_log_probs(model: Qwen2, rollouts: Rollouts, micro_batch: int) -> Tensor:
    """(B, T): the log-probs of all tokens, without gradient."""
    found = torch.zeros_like(rollouts.log_prob)
    for rows in torch.arange(len(found)).split(micro_batch):
        found[rows] = log_probs(model, rollouts, rows)
    return found


# ---------------------------------------------------------------------------------------- the step
def update(model: Qwen2, optimizer: "AdamW", rollouts: Rollouts, weight: Tensor, s: Any,
           reference: Tensor | None = None, divergence: Divergence = k3,
           largest_gap: float = 0.01, is_older: bool = False
           ) -> tuple[Metrics, dict[str, Tensor]]:
    """Train the model on the whole batch; `s` are the Settings of run.py. Returns metrics, and
    columns (B, T) for the file of the step's tokens.

    With --epochs above 1 there are several steps, with the ratio and the clipping of the published
    GRPO. With --kl above 0 the loss has a KL term, for which `reference` (B, T) has the log-probs
    of the initial model, and `divergence` estimates the KL at each token: another estimate than
    `k3` is one more argument. `largest_gap` is the largest mean difference between the log-probs of
    the sampler and those computed here that can be rounding. A larger one ends the run, because one
    of the two is wrong. Types with fewer digits than float32 round more, and need a larger one.
    `is_older`: an older model has sampled the answers, so the ratio counts from the first step."""
    A, mask, N = rollouts.advantage, rollouts.mask, int(rollouts.mask.sum())
    has_gradient = mask & ((weight * A != 0) | (s.kl > 0))
    rows = has_gradient.any(1).nonzero()[:, 0]      # the answers that have a gradient
    metrics: Metrics = {"N": N, "trained_tokens": int(mask[rows].sum()), "loss": 0.0,
                        "gradient_norm": None, "sampler_gap": None, "skipped": None}
    if not len(rows):  # AdamW would move the parameters by its mean of earlier gradients
        return metrics | {"skipped": why_skipped(rollouts)}, {}
    old = torch.zeros_like(rollouts.log_prob)   # log-probs before the first update, (B, T)
    last = torch.zeros_like(rollouts.log_prob)  # log-probs before the last one
    for epoch in range(s.epochs):
        model.zero_grad()
        for part in rows.split(s.micro_batch):  # as many answers at a time as memory allows
            log_prob = log_probs(model, rollouts, part)                              # (part, T)
            last[part] = log_prob.detach()
            if epoch == 0:
                old[part] = rollouts.log_prob[part] if is_older else last[part]
            inputs = A[part], weight[part], mask[part], N
            if s.epochs == 1 and not is_older:
                loss = policy_loss(log_prob, *inputs)
            else:
                loss = clipped_loss(log_prob, old[part], *inputs, s.clip_low, s.clip_high)
            if reference is not None:
                kl = divergence(log_prob, reference[part])
                loss = loss + s.kl * (kl * mask[part]).sum() / N
            # This adds to the gradient so far. The sum over micro-batches is the gradient of the
            # whole loss, because each part is divided by the same N.
            loss.backward()
            if epoch == 0:
                metrics["loss"] += loss.item()
        norm = clip_gradient(model, s.max_grad_norm)
        metrics["gradient_norm_last" if epoch else "gradient_norm"] = norm
        optimizer.step()
    metrics["sampler_gap"] = sampler_gap(old, rollouts, rows, largest_gap)
    if reference is not None:
        metrics["kl"] = float((divergence(last, reference) * mask).sum()) / N
    if s.epochs == 1 and not is_older:
        return metrics, {}
    ratio = (last - old).exp()
    return metrics | about_ratio(ratio, rollouts, rows, s), {"ratio": ratio}


def clip_gradient(model: Qwen2, most: float) -> float:
    """Scale the gradient down to the norm `most` if it is larger; 0 means never. Returns the norm
    before."""
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), most or math.inf))
    if not math.isfinite(norm):
        raise UserError("the gradient is not finite: a smaller --learning_rate may help")
    return norm


def sampler_gap(old: Tensor, rollouts: Rollouts, rows: Tensor, largest: float = 0.01) -> float:
    """Sampler and update compute the same log-probs. Their mean difference a token is rounding. If
    a state is read one position too late, torch notices nothing, but the difference is large."""
    gap = (old - rollouts.log_prob)[rows][rollouts.mask[rows]].abs().mean().item()
    if gap > largest:
        raise UserError(f"log-probs of sampler and update differ by {gap:.2g} a token: one of the "
                        "two is wrong")
    return gap


def about_ratio(ratio: Tensor, rollouts: Rollouts, rows: Tensor, s: Any) -> Metrics:
    """With --epochs: the mean ratio of the trained tokens, and the share of those clipped."""
    A, mask, trained = rollouts.advantage, rollouts.mask, int(rollouts.mask[rows].sum())
    beyond = torch.where(A > 0, ratio > 1 + s.clip_high, ratio < 1 - s.clip_low) & (A != 0)
    return {"ratio_mean": float((ratio * mask)[rows].sum()) / trained,
            "clipped_share": float((beyond & mask).sum()) / trained}


class AdamW:
    """AdamW (arXiv 1711.05101). A parameter moves by

        learning rate * (mean of its gradients) / (root of the mean of their squares + epsilon)

    so by about the learning rate where the gradients of many steps agree, and by less where they
    are noise. A step multiplies the first mean by 0.9 and adds 0.1 times the gradient; it
    multiplies the second by 0.999 and adds 0.001 times the square. Both begin at 0, so at first
    they are too small, by the factors `known`. An optimizer is made once and keeps its means. A new
    one in each step would know a single gradient, which divided by its own size is +1 or -1."""

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float,
                 weight_decay: float = 0.0):
        self.parameters = list(parameters)
        self.learning_rate, self.weight_decay = learning_rate, weight_decay
        self.steps = 0
        self.mean = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]
        self.square = [torch.zeros_like(p, requires_grad=False) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        known, known_square = 1 - 0.9 ** self.steps, 1 - 0.999 ** self.steps
        for p, mean, square in zip(self.parameters, self.mean, self.square):
            if p.grad is None:
                continue
            p.mul_(1 - self.learning_rate * self.weight_decay)
            mean.lerp_(p.grad, 1 - 0.9)
            square.mul_(0.999).addcmul_(p.grad, p.grad, value=1 - 0.999)
            root = square.sqrt().div_(known_square ** 0.5).add_(1e-8)
            p.addcdiv_(mean, root, value=-self.learning_rate / known)


# ---------------------------------------------------------------------------------- what is checked
def values_of(function: Method, rollouts: Rollouts, keywords: dict[str, Any]) -> Tensor:
    """The values (B, T) of an advantage or a weighting, called with its flags. The function gets a
    copy of the batch, so what it changes in place has no effect elsewhere. Only the random
    generator is not copied, so that the next function draws other numbers."""
    batch = copy.deepcopy(rollouts, {id(rollouts.generator): rollouts.generator})
    return checked(function(batch, **keywords), rollouts, place_of(function))


def checked(values: Any, rollouts: Rollouts, name: str) -> Tensor:
    """Refuse values that are not finite or not (B, T). A number for each answer (B, 1) or for each
    position (1, T) becomes (B, T). (B,) is refused, because torch would spread it over T."""
    B, T = rollouts.mask.shape
    if not isinstance(values, Tensor) or values.shape not in ((B, T), (B, 1), (1, T)):
        found = tuple(values.shape) if isinstance(values, Tensor) else repr(values)[:80]
        raise UserError(f"{name} should return a tensor (B, T) = ({B}, {T}), got {found}. "
                        "value[:, None] makes (B, 1) of a number for each answer (B,)")
    credit: Tensor = values.detach().float().expand(B, T).masked_fill(~rollouts.mask, 0.0)
    is_small = credit.abs() <= 1e12  # with larger values a squared gradient can overflow
    if not is_small.all():
        row, t = (~is_small).nonzero()[0].tolist()
        raise UserError(f"{name} is {credit[row, t]:g} at token {t} of answer {row}. Such a number "
                        "often comes from 0 / 0, 0 * log 0 or the mean of no tokens")
    return credit


def why_skipped(rollouts: Rollouts) -> str:
    """Why no token has a gradient."""
    by_group = rollouts.reward.view(len(rollouts.prompt_ids), -1)
    reason = "every group's answers had equal rewards"
    if rollouts.advantage.any():
        reason = "no token has both a weight and an advantage"
    elif by_group.amin(1).ne(by_group.amax(1)).any():
        reason = "every advantage is 0, although answers of a group had different rewards"
    if not rollouts.finished.any():
        reason += ", and none was finished within --max_new_tokens"
    return reason


# ---------------------------------------------------------------------------------- python grpo.py
def show() -> None:
    """Four answers of models/tiny to a problem: their rewards and advantages, and the log-prob of
    each before and after one update on them."""
    from countdown_task import Problem, Task
    folder = Path(__file__).parent / "models/tiny"
    model, tokenizer = load_model(folder), load_tokenizer(folder)
    rollouts = sample(model, tokenizer, Task(prompt="short"), [Problem((3, 5, 7), 22)], 4, 80,
                      generator_of("a group"))
    rollouts.advantage, weight = grpo(rollouts), rollouts.mask.float()               # (4, T)
    s = SimpleNamespace(epochs=1, kl=0, micro_batch=4, max_grad_norm=1)
    update(model, AdamW(model.parameters(), 2.5e-4), rollouts, weight, s)
    after = frozen_log_probs(model, rollouts, 4).sum(1)
    print("reward  advantage  log-prob before  after   answer")
    for row, answer in enumerate(rollouts.answers):
        print(f"{rollouts.reward[row]:6.2f} {rollouts.advantage[row, 0]:+10.2f} "
              f"{rollouts.log_prob[row].sum():16.2f} {after[row]:7.2f}  {answer[-50:]!r}")


if __name__ == "__main__":
    show()
