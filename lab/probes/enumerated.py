"""A synthetic task so small that every answer is listed, with its probability and its gradient.

A Qwen2 of a few hundred parameters writes answers of a few tokens out of three: "1", "<answer>" and
the end. An answer is right when a "1" follows its first <answer>. V of every prefix is a short sum,
and so is the gradient of J, the probability of a right answer.

Every group of answers that training could draw here is listed, too (`Batches`). So the mean and the
covariance of any estimate of the gradient are exact sums (`estimator`).
"""
import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch.nn.utils.rnn import pad_sequence

from lab.countdown import annotate
from lab.engine.errors import UserError
from lab.engine.policy import Forward
from lab.engine.rollouts import Rollouts
from lab.engine.model import ModelConfig, Qwen2

TEXTS = ("1", "<answer>", "<|im_end|>")
ONE, OPENING, END = range(3)
PROMPT = [ONE]
RATE, MOST_STEPS = 0.003, 5000  # of a policy that is trained before it is measured
ROUNDING = 1e-6  # entropies this close are equal: float32 knows a sum of a few terms to about 1e-7

Tokens = tuple[int, ...]


@dataclass
class EnumeratedTask:
    """A policy with all its answers. A choice is a prefix and a token that may follow. The model is
    float32, sums are float64."""
    model: Qwen2
    rollouts: Rollouts          # every answer once, with its true credit
    probability: torch.Tensor   # (n,) of each answer
    node: torch.Tensor          # (n, T) which choice each token is
    score: torch.Tensor         # (choices, P): gradient of the log-prob of each choice
    worth: torch.Tensor         # (n, T + 1): V of the answer's first t tokens, then its reward
    gradient: torch.Tensor      # (P,): of J

    @property
    def J(self) -> float:
        return (self.probability @ self.rollouts.reward.double()).item()

    @property
    def credit(self) -> torch.Tensor:
        """(n, T): V after each token minus V before it."""
        return self.worth.diff()


def make_enumerated(seed: int, length: int, success: float = 0.0) -> EnumeratedTask:
    """A random policy, or one that was trained until it has this success."""
    model, answers = make_policy(seed), all_answers(length)
    train_until(success, model, answers)
    T = max(map(len, answers))
    # beyond its end a prefix is all of the answer
    number: dict[Tokens, int] = {}  # of each choice, in the order in which they are met
    nodes = []
    for answer in answers:
        row = []
        for t in range(T):
            row.append(number.setdefault(answer[:t + 1], len(number)))
        nodes.append(row)

    log_prob, scores = {}, []
    for choice in number:
        log_prob[choice] = log_prob_of(model, choice)
        scores.append(parameter_gradient(model, log_prob[choice]))

    rollouts = every_answer(model, answers)
    V = values_of_prefixes(answers, rollouts.reward.tolist(), log_prob)
    totals, worths = [], []  # of each answer: its log-prob; V of each of its prefixes
    for answer in answers:
        totals.append(sum(log_prob[answer[:t + 1]] for t in range(len(answer))))
        worths.append([V[answer[:t]] for t in range(T + 1)])
    total, worth = torch.stack(totals), torch.tensor(worths).double()
    J = (total.exp() * rollouts.reward).sum()
    return EnumeratedTask(
        model=model,
        rollouts=replace(rollouts, true_credit=worth.diff().float()),
        probability=total.detach().exp(),
        node=torch.tensor(nodes),
        score=torch.stack(scores).double(),
        worth=worth,
        gradient=parameter_gradient(model, J).double())


def make_policy(seed: int) -> Qwen2:
    config = ModelConfig(vocab_size=len(TEXTS), hidden_size=6, intermediate_size=8, head_dim=6,
                         num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
                         tie_word_embeddings=True, eos_token_id=(END,))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2(config)
        for parameter in model.parameters():  # fresh weights would choose every token alike
            is_norm = parameter.dim() == 1
            torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.5)
    return model


def all_answers(length: int) -> list[Tokens]:
    """All answers that stop by themselves, and all that are cut off."""
    answers: list[Tokens] = []
    for n in range(length):
        answers += [(*body, END) for body in itertools.product((ONE, OPENING), repeat=n)]
    return answers + list(itertools.product((ONE, OPENING), repeat=length))


def train_until(success: float, model: Qwen2, answers: list[Tokens]) -> None:
    """Follow the true gradient of J with Adam until J is as large as this. Nothing is sampled."""
    ids, rewards = padded(answers), rewards_of(answers)["reward"]
    mask = lengths_of(answers)[:, None] > torch.arange(ids.shape[1])
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(MOST_STEPS):
        log_probs = all_log_probs(model, ids).gather(2, ids[..., None]).squeeze(-1)
        J = (log_probs * mask).sum(1).exp() @ rewards
        if J.item() >= success:
            return
        optimizer.zero_grad()
        (-J).backward()
        optimizer.step()
    raise UserError(f"after {MOST_STEPS} steps along the true gradient the policy is right with "
                    f"the probability {J.item():.3f}, and not {success}: take another --seed")


def log_prob_of(model: Qwen2, choice: Tokens) -> torch.Tensor:
    """The log-prob of a choice's last token, with its graph."""
    ids = torch.tensor([PROMPT + list(choice[:-1])])
    return model(ids)[0, -1].double().log_softmax(-1)[choice[-1]]


def values_of_prefixes(answers: list[Tokens], rewards: list[float],
                       log_prob: dict[Tokens, torch.Tensor]) -> dict[Tokens, float]:
    """V of each prefix, from the end: an answer's own reward, or the mean over what may follow."""
    V = dict(zip(answers, rewards))
    prefixes = set()
    for answer in answers:
        prefixes |= {answer[:t] for t in range(len(answer))}
    for prefix in sorted(prefixes, key=len, reverse=True):
        value = 0.0
        for token in range(len(TEXTS)):
            choice = (*prefix, token)
            value += log_prob[choice].exp().item() * V[choice]
        V[prefix] = value
    return V


def every_answer(model: Qwen2, answers: list[Tokens]) -> Rollouts:
    """Every answer once, with the sampler's numbers and the labels that the task would give it."""
    texts, sections, kinds = [], [], []
    for answer in answers:
        pieces = [TEXTS[i] for i in answer]
        section, kind = annotate([piece.encode() for piece in pieces])
        texts.append(pieces)
        sections.append(section)
        kinds.append(kind)
    ids = padded(answers)
    mask = lengths_of(answers)[:, None] > torch.arange(ids.shape[1])
    last = torch.tensor([answer[-1] for answer in answers])
    with torch.no_grad():
        log_probs = all_log_probs(model, ids)
    p = log_probs.exp()
    log_prob = log_probs.gather(2, ids[..., None]).squeeze(-1)  # (n, T)
    entropy = -(p * log_probs).sum(-1) * mask
    return Rollouts(
        problems=[None],
        prompt_ids=[PROMPT],
        group=torch.zeros(len(ids), dtype=torch.long),
        ids=ids,
        mask=mask,
        finished=last == END,
        log_prob=log_prob * mask,
        entropy=without_rounding(entropy),
        collision=p.square().sum(-1) * mask,
        texts=texts,
        answers=list(map("".join, texts)),
        section=padded(sections).to(torch.uint8),
        kind=padded(kinds).to(torch.uint8),
        scores=rewards_of(answers),
        forward=Forward(model, 64))


def all_log_probs(model: Qwen2, ids: torch.Tensor) -> torch.Tensor:
    """(n, T, V) of every token that could stand where these answers (n, T) have theirs."""
    inputs = torch.cat([torch.tensor(PROMPT).expand(len(ids), 1), ids[:, :-1]], 1)
    return model(inputs).log_softmax(-1)


def lengths_of(answers: list[Tokens]) -> torch.Tensor:
    return torch.tensor(list(map(len, answers)))


def padded(rows: list) -> torch.Tensor:
    """(n, T), 0 beyond the end of a row."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def without_rounding(values: torch.Tensor) -> torch.Tensor:
    """Make values equal that differ by rounding alone.

    The prompt is "1", so the model has the same distribution after "1", "1 1" and "1 1 1", and
    entropy_masking puts its threshold between their tokens. Without this the last bit, which
    differs from one kind of CPU to the next, would decide which of them are kept.
    """
    result, order = values.flatten().sort()
    is_new = result.diff(prepend=result[:1] - 1) >= ROUNDING
    result = result[is_new][is_new.cumsum(0) - 1]
    return torch.zeros_like(result).scatter(0, order, result).view_as(values)


def rewards_of(answers: list[Tokens]) -> dict[str, torch.Tensor]:
    """(n,) of each part: right is a "1" after the first tag; the format wants a tag and the
    end."""
    right, formatted, reasoning = [], [], []
    for answer in answers:
        right.append(float(has_right_end(answer)))
        formatted.append(float(OPENING in answer and answer[-1] == END))
        reasoning.append(float(answer[0] == ONE))
    return {"reward": torch.tensor(right),
            "answer": torch.tensor(right),
            "format": torch.tensor(formatted),
            "reasoning": torch.tensor(reasoning)}


def has_right_end(answer: Tokens) -> bool:
    if OPENING not in answer:
        return False
    after = answer.index(OPENING) + 1
    return answer[after:after + 1] == (ONE,)


def parameter_gradient(model: Qwen2, number: torch.Tensor) -> torch.Tensor:
    """(P,) the gradient of a number at all parameters; the graph stays, for the next number."""
    parts = torch.autograd.grad(number, list(model.parameters()), retain_graph=True,
                                materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


@dataclass
class Batches:
    """Every group of G answers that can be drawn, order aside."""
    which: torch.Tensor         # (M, G) the answers' numbers
    probability: torch.Tensor   # (M,)

    @classmethod
    def all(cls, task: EnumeratedTask, G: int) -> "Batches":
        groups = list(itertools.combinations_with_replacement(range(len(task.probability)), G))
        which = torch.tensor(groups)
        orders = torch.tensor([orders_of(group) for group in groups])
        return cls(which, orders.double() * task.probability[which].prod(1))


def orders_of(group: tuple[int, ...]) -> float:
    """The number of orders in which these numbers can be drawn."""
    repeated = [math.factorial(count) for count in Counter(group).values()]
    return math.factorial(len(group)) / math.prod(repeated)


@dataclass
class Estimator:
    """The mean of a batch's gradient, and its variance."""
    mean: torch.Tensor      # (P,)
    variance: float         # trace of the covariance

    def against(self, true: torch.Tensor) -> dict[str, float]:
        size = self.mean.norm().item()
        along = (self.mean @ true / true.norm()).item()
        bias = (self.mean - true).norm() / true.norm()
        found = {"bias": bias.item(), "cosine": math.nan, "noise": math.inf}
        if size >= 1e-9 * true.norm().item():
            found["cosine"] = along / size
            if along > 0:
                found["noise"] = self.variance / along ** 2
        return found


def estimator(task: EnumeratedTask, batches: Batches, factor: torch.Tensor) -> Estimator:
    """The estimator  sum factor * grad log pi  over a batch's tokens, with `factor` (M, G, T). A
    batch is a vector over the choices, of which there are few."""
    mask = task.rollouts.mask[batches.which]
    vectors = torch.zeros(len(batches.which), len(task.score), dtype=torch.float64)
    choices = task.node[batches.which].flatten(1)  # (M, G T)
    vectors.scatter_add_(1, choices, (factor * mask).flatten(1))
    mean = batches.probability @ vectors
    second = vectors.T @ (batches.probability[:, None] * vectors)
    gram = task.score @ task.score.T
    variance = (second * gram).sum() - mean @ gram @ mean
    return Estimator(mean @ task.score, variance.item())
