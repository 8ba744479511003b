"""A world so small that every answer, and every group of answers that training could draw, can be written down.

A Qwen2 of a few hundred parameters writes answers of a few tokens out of three: "1", "<answer>" and the end. An answer is
right when a "1" follows its first <answer>. The functions of grpo.py, critic.py and mitigations.py are given each possible
batch; expectation and covariance of the gradient they make are sums.
"""
import itertools
import math
from collections import Counter
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

from countdown_task import annotate
from credit.critic import generalised_advantage
from credit.monte_carlo import segment_starts
from engine.registry import ADVANTAGES
from engine.registry import MITIGATIONS, NEVER_RESCALED
from mitigations import token_weight
from qwen2_model import ModelConfig, Qwen2
from engine.forward import Forward
from engine.rollouts import Rollouts

TEXTS = ("1", "<answer>", "<|im_end|>")
ONE, OPENING, END = range(3)
PROMPT = [ONE]

@dataclass
class World:
    """`nodes` are the choices: every prefix with every token that can follow. Sums are in float64, the model computes in float32."""
    model: Qwen2
    rollouts: Rollouts          # every answer once
    probability: torch.Tensor   # (n,) of each answer
    node: torch.Tensor          # (n, T) which choice each token is; beyond the mask 0
    score: torch.Tensor         # (nodes, P): gradient of the log-prob of each choice
    worth: torch.Tensor         # (n, T + 1): V of the answer's first t tokens, then its reward
    gradient: torch.Tensor      # (P,): of J


def make_world(seed: int, length: int) -> World:
    config = ModelConfig(vocab_size=len(TEXTS), hidden_size=6, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                         num_key_value_heads=1, head_dim=6, tie_word_embeddings=True, eos_token_id=(END,))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2(config)
        for parameter in model.parameters():  # fresh weights would choose every token alike
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.5)
    answers = all_answers(length)
    nodes = {choice: i for i, choice in enumerate(dict.fromkeys(answer[:t + 1] for answer in answers for t in range(len(answer))))}
    log_prob = {choice: model(torch.tensor([PROMPT + list(choice[:-1])]))[0, -1].double().log_softmax(-1)[choice[-1]] for choice in nodes}
    parameters = list(model.parameters())
    score = torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(log_prob[choice], parameters, retain_graph=True)]) for choice in nodes])
    rollouts = describe(model, answers)
    total = torch.stack([sum(log_prob[answer[:t + 1]] for t in range(len(answer))) for answer in answers])
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad((total.exp() * rollouts.reward).sum(), parameters)])
    V = prefix_values(answers, rollouts.reward.tolist(), {choice: value.exp().item() for choice, value in log_prob.items()})
    T = rollouts.mask.shape[1]
    worth = torch.tensor([[V[answer[:t]] for t in range(len(answer))] + [V[answer]] * (T + 1 - len(answer)) for answer in answers])
    node = torch.tensor([[nodes[answer[:t + 1]] for t in range(len(answer))] + [0] * (T - len(answer)) for answer in answers])
    return World(model, rollouts, total.detach().exp(), node, score.double(), worth.double(), gradient.double())


def all_answers(length: int) -> list[tuple[int, ...]]:
    """All that end with the end, and all that the limit cuts off."""
    bodies = [body for n in range(length) for body in itertools.product((ONE, OPENING), repeat=n)]
    return [(*body, END) for body in bodies] + list(itertools.product((ONE, OPENING), repeat=length))


def prefix_values(answers: list, rewards: list[float], probability: dict) -> dict:
    """V from the end: an answer's own reward, or the mean over what may follow."""
    V = dict(zip(answers, rewards))
    for prefix in sorted({answer[:t] for answer in answers for t in range(len(answer))}, key=len, reverse=True):
        V[prefix] = sum(probability[(*prefix, v)] * V[(*prefix, v)] for v in range(len(TEXTS)))
    return V


def describe(model: Qwen2, answers: list[tuple[int, ...]]) -> Rollouts:
    """Every answer once, with the sampler's numbers and the labels that the task would give it."""
    T = max(map(len, answers))
    ids = torch.tensor([[*answer, *[0] * (T - len(answer))] for answer in answers])
    mask = torch.arange(T)[None] < torch.tensor([len(answer) for answer in answers])[:, None]
    with torch.no_grad():
        log_probs = model(torch.cat([torch.tensor(PROMPT).expand(len(ids), 1), ids[:, :-1]], 1)).log_softmax(-1)
    texts = [[TEXTS[i] for i in answer] for answer in answers]
    labels = [annotate([text.encode() for text in row]) for row in texts]
    section, kind = (torch.tensor([[*label[i], *[0] * (T - len(label[i]))] for label in labels], dtype=torch.uint8) for i in (0, 1))
    right = torch.tensor([float(TEXTS[OPENING] in row and row[row.index(TEXTS[OPENING]) + 1:][:1] == [TEXTS[ONE]]) for row in texts])
    closed = torch.tensor([float(row[-1] == TEXTS[END] and "<answer>" in row) for row in texts])
    scores = {"reward": right, "answer": right, "format": closed, "reasoning": torch.tensor([float(row[0] == "1") for row in texts])}
    return Rollouts(problems=[None], prompt_ids=[PROMPT], responses=["".join(row) for row in texts], texts=texts, group=torch.zeros(len(ids), dtype=torch.long),
                    ids=ids, mask=mask, finished=ids.gather(1, mask.sum(1, keepdim=True) - 1).squeeze(1) == END, section=section, kind=kind,
                    log_prob=log_probs.gather(2, ids[..., None]).squeeze(-1) * mask, entropy=-(log_probs.exp() * log_probs).sum(-1) * mask,
                    collision=log_probs.exp().square().sum(-1) * mask, scores=scores, forward=Forward(model, 64))


@dataclass
class Batches:
    """Every group of G answers that can be drawn, order aside: (M, G) which answers, and (M,) how likely."""
    which: torch.Tensor
    probability: torch.Tensor

    @classmethod
    def all(cls, world: World, G: int) -> "Batches":
        which = list(itertools.combinations_with_replacement(range(len(world.probability)), G))
        orders = torch.tensor([math.factorial(G) / math.prod(map(math.factorial, Counter(group).values())) for group in which])
        which = torch.tensor(which)
        return cls(which, orders.double() * world.probability[which].prod(1))


def rows_of(rollouts: Rollouts, index: torch.Tensor, group: torch.Tensor) -> Rollouts:
    """A batch of these answers; what the model shows of them was looked at once."""
    tensors = {name: value[index] for name, value in vars(rollouts).items() if isinstance(value, torch.Tensor)}
    lists = {name: [getattr(rollouts, name)[i] for i in index.tolist()] for name in ("texts", "responses")}
    seen = rollouts.forward.look(rollouts, attention=True)
    look = SimpleNamespace(look=lambda batch, attention=False: {name: value[index] for name, value in seen.items()})
    questions = int(group.max()) + 1
    return replace(rollouts, **{**tensors, **lists, "group": group}, scores={name: value[index] for name, value in rollouts.scores.items()},
                   problems=[None] * questions, prompt_ids=[PROMPT] * questions, forward=look)


def advantages(world: World, batches: Batches, seed: int) -> dict[str, torch.Tensor]:
    """(M, G, T) for each way of making them, all batches in one call: they know of nothing but their own group."""
    (M, G), T = batches.which.shape, world.node.shape[1]
    rows = rows_of(world.rollouts, batches.which.flatten(), torch.arange(M * G) // G)
    worth = world.worth[batches.which.flatten()]
    wrong = torch.rand(world.worth.shape[1], generator=torch.Generator().manual_seed(seed)).expand_as(worth)  # knows the index of the token only

    def critic(value, lam):
        return generalised_advantage(value[:, :T].float(), rows.reward, rows.mask, 1.0, lam)

    found = {name: ADVANTAGES[name](rows) for name in ("grpo", "dr_grpo", "rloo")}
    found |= {"critic": critic(worth, 1.0), "one-step": critic(worth, 0.0), "vine": by_segments(worth, rows, "2"),
              "wrong critic": critic(wrong, 1.0), "wrong, one-step": critic(wrong, 0.0), "span": ADVANTAGES["span"](rows)}
    return {name: value.view(M, G, T).double() for name, value in found.items()}


def by_segments(worth: torch.Tensor, rows: Rollouts, every: str) -> torch.Tensor:
    """What vine would give with continuations without end: V after a segment minus V before it."""
    advantage = torch.zeros_like(rows.log_prob)
    for b, (texts, V) in enumerate(zip(rows.texts, worth.tolist())):
        starts = segment_starts(texts, every)
        for start, end in zip(starts, [*starts[1:], len(texts)]):
            advantage[b, start:end] = V[end] - V[start]
    return advantage


def weightings(world: World) -> dict[str, object]:
    """The mitigations, as they see a batch. None where an expectation would need what is not listed here."""
    found = {name: (lambda tokens, lab, chosen=chosen: chosen(tokens)) for name, chosen in MITIGATIONS.items() if not isinstance(chosen, type)}
    found["random"] = found["causal_ablation"] = found["learned_importance"] = None
    credit = (world.worth[:, 1:] - world.worth[:, :-1]).abs().float()
    found["oracle"] = lambda tokens, lab: credit[tokens.generator]  # the batch's answers by number, see below
    found["lambda_grpo"] = lambda tokens, lab: MITIGATIONS["lambda_grpo"].answer_weights(None, tokens, torch.tensor(1.0))[:, None]
    return {name: found[name] for name in MITIGATIONS}


def all_weights(world: World, batches: Batches, progress=lambda share: None) -> dict[str, torch.Tensor | None]:
    """(M, G, T), rescaled as in training: batch by batch, since many weightings look at all tokens of a batch."""
    chosen, group = weightings(world), torch.zeros(batches.which.shape[1], dtype=torch.long)
    result = {name: torch.zeros(*batches.which.shape, world.node.shape[1]) if weigh else None for name, weigh in chosen.items()}
    for m, index in enumerate(batches.which):
        tokens = replace(rows_of(world.rollouts, index, group), generator=index)
        for name, weigh in chosen.items():
            if weigh:
                result[name][m] = token_weight(weigh, name, tokens, None, "none" if name in NEVER_RESCALED else "mean")[0]
        if m % 100 == 0:
            progress(m / len(batches.which))
    return {name: None if value is None else value.double() for name, value in result.items()}


@dataclass
class Estimator:
    """What a batch's gradient is on average, and how it scatters."""
    mean: torch.Tensor      # (P,)
    variance: float         # trace of the covariance

    def against(self, true: torch.Tensor) -> dict[str, float]:
        size, along = self.mean.norm().item(), (self.mean @ true / true.norm()).item()
        silent = size < 1e-9 * true.norm().item()
        return {"bias": ((self.mean - true).norm() / true.norm()).item(), "cosine": math.nan if silent else along / size,
                "noise": math.inf if silent or along <= 0 else self.variance / along ** 2}


def estimator(world: World, batches: Batches, factor: torch.Tensor, doubled: torch.Tensor | None = None) -> Estimator:
    """Of  sum factor * grad log pi  over a batch's tokens. A batch is a vector over the choices, of which there are few.
    `doubled` (M, choices) is added to the diagonal of the second moment: chance inside the batch."""
    flat = torch.zeros(len(batches.which), len(world.score), dtype=torch.float64)
    flat.scatter_add_(1, world.node[batches.which].flatten(1), (factor * world.rollouts.mask[batches.which]).flatten(1))
    mean = batches.probability @ flat
    second = flat.T @ (batches.probability[:, None] * flat)
    if doubled is not None:
        second = second + doubled
    gram = world.score @ world.score.T
    return Estimator(mean @ world.score, ((second * gram).sum() - mean @ gram @ mean).item())


def placebo(world: World, batches: Batches, advantage: torch.Tensor, weight: torch.Tensor) -> Estimator:
    """The weights of each batch change places at random: E[w_i] = m, E[w_i w_j] = (N m^2 - E[w^2]) / (N - 1)."""
    mask = world.rollouts.mask[batches.which].double()
    N = mask.sum((1, 2))
    m, square = (weight * mask).sum((1, 2)) / N, (weight.square() * mask).sum((1, 2)) / N
    together = torch.where(N > 1, (N * m * m - square) / (N - 1).clamp(min=1), square)
    return scattered(world, batches, advantage, m, together, square)


def scattered(world: World, batches: Batches, advantage, mean, together, square) -> Estimator:
    """Exchangeable random weights with these moments in each batch (M,)."""
    G, mask = batches.which.shape[1], world.rollouts.mask[batches.which].double()
    plain = estimator(world, batches, advantage * mean[:, None, None] / G)
    alone, node = torch.zeros(len(world.score), dtype=torch.float64), world.node[batches.which]
    alone.index_add_(0, node.flatten(), ((square - together) * batches.probability)[:, None, None].mul((advantage * mask / G).square()).flatten())
    both = estimator(world, batches, advantage * together.clamp(min=0).sqrt()[:, None, None] / G, torch.diag(alone))
    second = both.variance + both.mean.square().sum().item()
    return Estimator(plain.mean, second - plain.mean.square().sum().item())
