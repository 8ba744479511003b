"""GRPO (2402.03300): one reward per answer, compared with the rewards of the other answers to the
same problem, and given to every token of the answer.

    A_i  = (R_i - mean of the group) / (std of the group + 1e-4)
    loss = - sum over answers i and tokens t of  w_it A_it log pi(y_it | prompt, y_i<t)  / N

    A_it  the advantage of a token, chosen by --advantage. In GRPO it is A_i at every token
    w_it  the weight of a token, chosen by --mitigation (mitigations.py). In GRPO it is 1
    N     the number of generated tokens in the batch

Four answers to one problem, of which the first is right:

    reward       1.1    0.1    0.1    0.1       mean 0.35, std 0.433
    advantage  +1.73  -0.58  -0.58  -0.58       at each token of the answer

If all four had the same reward, all advantages would be 0. Such a group teaches nothing.

Start at `policy_loss`, which says why this loss is right. Methods change its inputs, and never the
loss itself. Advantages and weights are computed for the whole batch before it is cut into
micro-batches, so --micro_batch changes nothing but rounding. `update` is the step.

Everything per token is a tensor (B, T): B answers, and T positions, at most --max_new_tokens. Index
t is the t-th generated token. Only the forward pass needs another index, because token t is
predicted at the token before it: `log_probs` makes this shift, and nothing else does.

Four parts of the published GRPO are left out. Flags bring back the first two:

    ratio and clipping   a batch is trained on once, so the ratio of new to old probability is
                         exactly 1 and clipping would do nothing; --epochs above 1 brings both back
    the KL term          --kl above 0 adds it, and a frozen copy of the initial model
    1 / length           here every token of the batch counts the same, in the paper every answer
    the reward model     a program checks the answer, so no reward has to be learned
"""
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qwen2_model import Qwen2, UserError, attention

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


Method = Callable[..., Tensor]  # rollouts -> (B, T)
ADVANTAGES: dict[str, Method] = {}
TWICE: set[str] = set()  # names that two functions have; a run refuses them


def advantage(function: Method) -> Method:
    """Offer a function as an --advantage: values (B, T), which may be negative."""
    return add_choice(ADVANTAGES, function)


def add_choice(choices: dict[str, Method], function: Method) -> Method:
    """A second `def grpo` would silently replace the first. This is wanted only in a notebook."""
    name = function.__name__
    if name in choices and function.__module__ != "__main__":
        TWICE.add(name)
    choices[name] = function
    return function


@advantage
def grpo(rollouts: Rollouts) -> Tensor:
    """The z-score of the reward within its group: (reward - mean) / (standard deviation +
    0.0001)."""
    return to_every_token(group_z_score(rollouts.reward, rollouts.group), rollouts)


@advantage
def dr_grpo(rollouts: Rollouts) -> Tensor:
    """The reward minus the group's mean (arXiv 2503.20783). There is no division by the
    standard deviation, because it makes problems with nearly equal rewards count more."""
    return to_every_token(centred(rollouts.reward, rollouts.group), rollouts)


@advantage
def rloo(rollouts: Rollouts) -> Tensor:
    """The reward minus the mean of the group's other rewards (arXiv 2402.14740). In a group of G
    answers this is G / (G - 1) * (reward - mean)."""
    size = torch.bincount(rollouts.group)[rollouts.group]
    return to_every_token(centred(rollouts.reward, rollouts.group) * size / (size - 1), rollouts)


@advantage
def batch_mean(rollouts: Rollouts) -> Tensor:
    """The reward minus the mean of the whole batch, as if there were no groups. So answers to easy
    problems are pushed up, and answers to hard ones down."""
    one_group = torch.zeros_like(rollouts.group)
    return to_every_token(centred(rollouts.reward, one_group), rollouts)


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
      5. The advantage takes the place of the reward. Subtracting one number from all rewards of a
         problem does not change the mean gradient, because probabilities sum to 1, and so their
         gradients sum to 0. But the estimate varies less (docs/reference/policy_gradient.md).

    The loss has a minus, because an optimizer makes the loss smaller, and the reward should grow.
    The value of the loss says nothing. Only its gradient counts, and only at the model that sampled
    these answers. After the step the model is another one, so each step samples new answers.
    """
    return -(weight * advantage * log_prob * mask).sum() / N


def clipped_loss(log_prob: Tensor, old: Tensor, advantage: Tensor, weight: Tensor, mask: Tensor,
                 N: int, low: float, high: float) -> Tensor:
    """For --epochs: the loss of PPO (1707.06347), with a wider upper bound as in DAPO (2503.14476).

    From the second update on, the answers are no longer samples of the model. This is corrected by
    the ratio of the token's probability now to its probability when it was sampled (`old`). Once
    the ratio has passed a bound in the direction of the advantage, the token has no gradient. Where
    the ratio is 1, the gradient is that of `policy_loss`."""
    ratio = (log_prob - old).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    return -(weight * torch.minimum(ratio * advantage, clipped * advantage) * mask).sum() / N


def divergence(log_prob: Tensor, reference: Tensor) -> Tensor:
    """For --kl: KL(policy || reference) at each position, estimated from the token that was sampled
    there: exp(d) - d - 1, d = reference - log_prob (k3 of Schulman, "Approximating KL divergence").
    """
    d = reference - log_prob
    return d.exp() - d - 1


def gradient_size(log_prob: Tensor, collision: Tensor) -> Tensor:
    """s = norm(onehot - p) = sqrt(1 - 2 p_y + sum p^2): the length of the gradient that the
    log-prob of a token y has with respect to the logits. This gradient is onehot - p, where p are
    the probabilities of all tokens. `collision` is sum p^2.

    When p_y is near 1, the formula subtracts numbers that are nearly equal, and few right digits
    are left. So the result is clamped to its exact range [1 - p_y, sqrt2 (1 - p_y)].
    """
    rest = -torch.expm1(log_prob)  # 1 - p_y
    square = 1 - 2 * log_prob.exp() + collision
    return square.clamp(rest.square(), 2 * rest.square()).sqrt()


def log_probs(model: Qwen2, rollouts: Rollouts, rows: Tensor) -> Tensor:
    """(rows, T): the log-probs of these answers' tokens, with gradient; 0 beyond the answer. `rows`
    ascend.

    Problems are computed one by one. The state at a token predicts the next token. So the state at
    the prompt's last token predicts the answer's first token, and the answer's last token is left
    out, because it predicts nothing. For a prompt p q with answers x y z and u v:

        computed   p   q   x y   u _      the prompt once, then all answers, of one length
        predicts       x   y z
                       u         v _
    """
    result = []
    for problem in rollouts.group[rows].unique().tolist():
        own = rows[rollouts.group[rows] == problem]
        G, T = len(own), int(rollouts.length[own].max())
        answers, inside = rollouts.ids[own, :T], rollouts.mask[own, :T]              # (G, T)
        prompt = torch.tensor(rollouts.prompt_ids[problem])                          # (P,)
        P = len(prompt)
        computed = torch.cat([prompt, answers[:, :-1].flatten()])           # (P + G (T - 1),)
        positions = torch.cat([torch.arange(P), torch.arange(P, P + T - 1).repeat(G)])

        def behind_prompt(x: Tensor) -> Tensor:
            """Each answer behind its prompt: (P + G (T - 1), ...) -> (G, P + T - 1, ...)."""
            own_prompt = x[:P].expand(G, *x[:P].shape)
            return torch.cat([own_prompt, x[P:].unflatten(0, (G, T - 1))], 1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen = attention(behind_prompt(q), behind_prompt(k), behind_prompt(v))
            return torch.cat([seen[0, :P], seen[:, P:].flatten(0, 1)])

        states = behind_prompt(model.model(computed, positions, attend))[:, P - 1:]  # (G, T, D)
        log_p = model.logits(states[inside]).log_softmax(-1)                # (tokens, V)
        found = torch.zeros(rollouts.ids[own].shape)
        found[:, :T][inside] = log_p.gather(1, answers[inside][:, None])[:, 0]
        result.append(found)
    return torch.cat(result)


class AdamW:
    """AdamW (1711.05101). A parameter moves by

        learning rate * (mean of its gradients) / (root of the mean of their squares + epsilon)

    so by about the learning rate where the gradients of many steps agree, and by less where they
    are noise. A step multiplies the first mean by 0.9 and the second by 0.999, and adds its part.
    Both begin at 0, so at first they are too small, by the factors `known`. An optimizer is made
    once and keeps its means. A new one would know a single gradient. Divided by its own size this
    is +1 or -1, so all parameters would move equally far."""

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


class Trainer(Protocol):
    """The parts of a run that an update needs (run.py)."""
    settings: Any
    model: Qwen2
    reference: Qwen2 | None  # the model that the KL term compares with
    optimizer: AdamW

    def last_checkpoint(self) -> str: ...


def update(run: Trainer, rollouts: Rollouts, weight: Tensor) -> tuple[Metrics, dict[str, Tensor]]:
    """Train the model on the whole batch: one step of the optimizer, or with --epochs several.
    Returns metrics, and columns (B, T) for the credit file.

    Answers without a gradient are left out. If none is left, the step is skipped, because AdamW
    would move the parameters by its mean of earlier gradients."""
    s = run.settings
    # the answers that have a gradient at some token; with the KL term all have one
    has_gradient = (weight * rollouts.advantage != 0) | (s.kl > 0)                   # (B, T)
    rows = (has_gradient & rollouts.mask).any(1).nonzero()[:, 0]
    trained = int(rollouts.mask[rows].sum())
    metrics: Metrics = {"N": int(rollouts.mask.sum()), "trained_tokens": trained, "loss": 0.0,
                        "gradient_norm": None, "sampler_gap": None, "skipped": None}
    columns = {"ratio": torch.ones_like(weight)} if s.epochs > 1 else {}
    if not trained:
        return metrics | {"skipped": why_skipped(rollouts)}, columns
    reference = frozen_log_probs(run.reference, rollouts, s.micro_batch) if run.reference else None

    old = None
    for epoch in range(s.epochs):
        run.model.zero_grad()
        now, sums = backward(run, rollouts, weight, rows, old, reference)            # (B, T)
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), s.max_grad_norm or float("inf"))
        if not norm.isfinite():
            raise UserError("the gradient is not finite: a smaller --learning_rate may help. "
                            f"{run.last_checkpoint()}")
        if old is None:
            old = now
            # Sampler and update have computed the same log-probs, and differ by rounding alone. If
            # a state is read one position too late, no error is raised, but this gap is large.
            gap = float((now - rollouts.log_prob)[rows].abs().sum()) / trained
            if gap > 0.01:
                raise UserError(f"log-probs of sampler and update differ by {gap:.2g} a token: one "
                                "of the two is wrong")
            metrics |= {"loss": sums["loss"], "gradient_norm": float(norm), "sampler_gap": gap}
            metrics |= {"kl": sums["kl"] / trained} if s.kl else {}
        run.optimizer.step()
    if old is not None and s.epochs > 1:
        columns["ratio"][rows] = (now - old)[rows].exp()
        metrics |= metrics_of_ratio(columns["ratio"], rollouts, rows, s)
    return metrics, columns


def why_skipped(rollouts: Rollouts) -> str:
    reason = "every group's answers had equal rewards"
    if rollouts.advantage.any():
        reason = "no token has both a weight and an advantage"
    if not rollouts.finished.any():
        reason += ", and none was finished within --max_new_tokens"
    return reason


def backward(run: Trainer, rollouts: Rollouts, weight: Tensor, rows: Tensor, old: Tensor | None,
             reference: Tensor | None) -> tuple[Tensor, dict[str, float]]:
    """Compute the gradient of the loss, as many answers at a time as memory allows. Returns the
    log-probs (B, T) as they are now, and sums for the metrics.

    `old` are the log-probs at the first update from this batch. The log-probs of the sampler differ
    from them by rounding, so with those no ratio would be exactly 1."""
    s, N = run.settings, int(rollouts.mask.sum())
    now, sums = torch.zeros_like(weight), {"loss": 0.0, "kl": 0.0}
    for part in rows.split(s.micro_batch):
        log_prob = log_probs(run.model, rollouts, part)                              # (part, T)
        now[part] = log_prob.detach()
        mask = rollouts.mask[part]
        inputs = rollouts.advantage[part], weight[part], mask, N
        if s.epochs == 1:
            loss = policy_loss(log_prob, *inputs)
        else:
            before = now[part] if old is None else old[part]
            loss = clipped_loss(log_prob, before, *inputs, s.clip_low, s.clip_high)
        if reference is not None:
            kl = (divergence(log_prob, reference[part]) * mask).sum()
            loss = loss + s.kl * kl / N
            sums["kl"] += kl.item()
        # This adds to the gradient so far. The sum over micro-batches is the gradient of the whole
        # loss, because each part is divided by the same N.
        loss.backward()
        sums["loss"] += loss.item()
    return now, sums


def metrics_of_ratio(ratio: Tensor, rollouts: Rollouts, rows: Tensor, s: Any) -> Metrics:
    """For --epochs: clipped is a ratio above its bound if A > 0, and below its bound if A < 0."""
    A, mask = rollouts.advantage, rollouts.mask
    beyond = torch.where(A > 0, ratio > 1 + s.clip_high, ratio < 1 - s.clip_low) & (A != 0) & mask
    count = int(mask[rows].sum())
    return {"ratio_mean": float((ratio * mask)[rows].sum()) / count,
            "clipped_share": float(beyond.sum()) / count}


def update_with_change(run: Trainer, rollouts: Rollouts, weight: Tensor
                       ) -> tuple[Metrics, dict[str, Tensor]]:
    """Call `update`, and add the column `change`: each token's log-prob after the update minus
    before, at the same prefix. All answers share the model's parameters, so the term of one answer
    moves every answer, also those without a gradient of their own. This costs one forward pass
    before the update and one after."""
    before = frozen_log_probs(run.model, rollouts, run.settings.micro_batch)
    metrics, columns = update(run, rollouts, weight)
    after = frozen_log_probs(run.model, rollouts, run.settings.micro_batch)
    return metrics, columns | {"change": after - before}


@torch.no_grad()
def frozen_log_probs(model: Qwen2, rollouts: Rollouts, micro_batch: int) -> Tensor:
    """(B, T): the log-probs of all tokens, without gradient."""
    rows = torch.arange(len(rollouts.ids)).split(micro_batch)
    return torch.cat([log_probs(model, rollouts, part) for part in rows])
