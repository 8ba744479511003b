"""What "rank" can mean for a gradient, and the matrices that can have one: A, B and C of rank.py, question by question.

An answer's gradient has as many entries as the model has parameters, a group of answers few rows. So singular values come
from Gram matrices, float32 gradients summed up in float64, and no large matrix is ever decomposed.
"""
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.nn as nn

from grpo import ADVANTAGES, shuffled_advantage
from analysis.statistics import Estimate, mean_over
from engine.lab import Lab
from qwen2_model import Qwen2
from engine.rollouts import Rollouts
from truth.common import answer_gradients

SIZES, AT_ONCE = (2, 4, 8, 16, 32), 2 ** 20
Z, ONES = "z-score", "all ones"


def entropy_rank(s: torch.Tensor) -> float:
    """exp(-sum p log p), p = s / sum s (Roy and Vetterli 2007): of the singular values, not of their squares."""
    return torch.special.entr(s / s.sum()).sum().exp().item()


def stable_rank(s: torch.Tensor) -> float:
    return (s.square().sum() / s[0].square()).item()


def participation_ratio(s: torch.Tensor) -> float:
    return (s.square().sum().square() / s.pow(4).sum()).item()


def energy_count(s: torch.Tensor, share: float) -> int:
    """The fewest singular values that hold this share of sum s^2."""
    energy = s.square().cumsum(0)
    return int((energy < (share - 1e-9) * energy[-1]).sum()) + 1


def numerical_rank(s: torch.Tensor) -> int:
    """Float32 leaves about 1e-7 where there should be nothing."""
    return int((s > 1e-5 * s[0]).sum())


RANKS = {"entropy rank": entropy_rank, "stable rank": stable_rank, "participation": participation_ratio,
         "for 90%": partial(energy_count, share=0.9), "for 99%": partial(energy_count, share=0.99), "numerical": numerical_rank}
DEFINITIONS = ("With the singular values s, largest first: entropy rank exp(-sum p log p), p = s / sum s (Roy and Vetterli 2007; of s, not of s^2); "
               "stable rank sum s^2 / s_1^2; participation ratio (sum s^2)^2 / sum s^4; for 90% and 99%: how many hold that share of sum s^2; "
               "numerical: how many are above 1e-5 of the largest.")


def ranks(s: torch.Tensor) -> dict[str, float]:
    """By every definition; of a matrix of zeros they are undefined."""
    return {name: rank(s) if s[0] > 0 else np.nan for name, rank in RANKS.items()}


def gram(rows: torch.Tensor) -> torch.Tensor:
    """(n, P) float32 -> (n, n) float64, a part at a time: there may be very many parameters."""
    return sum(part.double() @ part.double().T for part in rows.split(AT_ONCE, dim=1))


def singular_values(gram: torch.Tensor) -> torch.Tensor:
    """Of any matrix with this Gram matrix, largest first."""
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(0)


def matrix_ranks(matrix: torch.Tensor) -> dict[str, float]:
    return ranks(singular_values(gram(matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T)))


class LinearSums:
    """While it is entered: of every linear layer, in each backward pass, the sum over positions of the gradient at its output,
    and sum and number of its inputs at the positions where that gradient is not 0."""

    def __init__(self, model: Qwen2):
        self.layers = {f"model.{name}.weight": module for name, module in model.model.named_modules() if isinstance(module, nn.Linear)}
        self.seen = defaultdict(list)

    def __enter__(self) -> "LinearSums":
        self.handles = [module.register_forward_hook(partial(self.note, name)) for name, module in self.layers.items()]
        return self

    def __exit__(self, *_) -> None:
        for handle in self.handles:
            handle.remove()

    def note(self, name: str, module, inputs, output) -> None:
        x = inputs[0].detach().flatten(0, -2)

        def backward(gradient):
            gradient = gradient.flatten(0, -2)
            carries = gradient.any(-1)
            self.seen[name].append((gradient.sum(0), x[carries].sum(0), carries.sum()))

        output.register_hook(backward)


@dataclass
class Gradients:
    """Of each answer to a question. A kind says what the log-probs were multiplied with; inputs are those of the first kind."""
    rows: dict[str, torch.Tensor]                # kind -> (G, P)
    pushes: dict[str, dict[str, torch.Tensor]]   # kind -> weight -> (G, out)
    inputs: dict[str, torch.Tensor]              # weight -> (G, in)
    places: dict[str, torch.Tensor]              # weight -> (G,)


def answers_apart(lab: Lab, rollouts: Rollouts, kinds: dict[str, torch.Tensor]) -> Gradients:
    """Of one question's answers, for each (G, T) of coefficients. This takes kinds * G * parameters * 4 bytes."""
    n, G, P = len(kinds), len(rollouts.mask), sum(p.numel() for p in lab.model.parameters())
    rows = torch.empty(n, G, P, device=lab.model.device)
    with LinearSums(lab.model) as sums:
        for b, found in enumerate(answer_gradients(lab, rollouts, list(kinds.values()))):
            for row, gradient in zip(rows[:, b], found):
                row.copy_(gradient)
    # answer by answer, and for each answer kind by kind: that is the order in which the hooks were called
    seen = {name: [torch.stack(values).unflatten(0, (G, n)) for values in zip(*calls)] for name, calls in sums.seen.items()}
    pushes = {kind: {name: push[:, i] for name, (push, _, _) in seen.items()} for i, kind in enumerate(kinds)}
    return Gradients(dict(zip(kinds, rows)), pushes, {name: x[:, 0] for name, (_, x, _) in seen.items()},
                     {name: places[:, 0] for name, (_, _, places) in seen.items()})


def weight_matrices(model: Qwen2, update: torch.Tensor) -> dict[str, torch.Tensor]:
    """A flat gradient, cut into those of the weight matrices."""
    parts = zip(model.named_parameters(), update.split([p.numel() for p in model.parameters()]))
    return {name: part.view_as(parameter) for (name, parameter), part in parts if parameter.dim() == 2}


def centred_matrices(found: Gradients, matrices: dict[str, torch.Tensor], kind: str, a: torch.Tensor) -> dict[str, torch.Tensor]:
    """sum_t delta_t (x_t - mean x)' = gradient - (sum_t delta_t) mean x', for the first R answers with factors a (R,).
    What has no inputs, an embedding, stays as it is."""
    R, changed = len(a), dict(matrices)
    for name, push in found.pushes[kind].items():
        middle = found.inputs[name][:R].sum(0) / found.places[name][:R].sum()
        changed[name] = matrices[name] - torch.outer(a @ push[:R], middle)
    return changed


def mean_gradients(rows: torch.Tensor, reward: torch.Tensor) -> torch.Tensor:
    """(m, P): matrix C, one row for each reward that occurs, the lowest first."""
    which = reward.unique(return_inverse=True)[1]
    return torch.stack([rows[which == j].mean(0) for j in range(int(which.max()) + 1)])


def span_of(rows: torch.Tensor) -> torch.Tensor:
    """(P, n) orthonormal columns, in float64."""
    return torch.linalg.qr(rows.double().T).Q


def outside(vector: torch.Tensor, span: torch.Tensor) -> float:
    """The share of the vector's length that is not in the span."""
    vector = vector.double()
    return ((vector - span @ (span.T @ vector)).norm() / vector.norm()).item()


def off_the_line(update: torch.Tensor, means: torch.Tensor, reward: torch.Tensor) -> float:
    """Of two rewards, k times the higher, the z-score makes  sqrt(k (R - k)) (mean of the winners - mean of the losers),
    times std / (std + 1e-4). By how much the update differs, relative to its length."""
    k, R, std = (reward == reward.max()).sum(), len(reward), reward.double().std(correction=0)
    expected = (k * (R - k)).sqrt() * std / (std + 1e-4) * (means[1] - means[0]).double()
    return ((update - expected).norm() / update.norm()).item()


class Found:
    """Numbers with a name, mostly a definition of rank, by (matrix, arm, R) and question; intervals are over questions."""

    def __init__(self, answers: int):
        self.sizes = [R for R in SIZES if R <= answers]
        self.main = max(R for R in self.sizes if R <= 8)  # the size at which arms are compared
        self.values, self.explained, self.shapes = defaultdict(dict), [], {}

    def add(self, matrix: str, arm: str, R: int, q: int, values: dict[str, float]) -> None:
        self.values[matrix, arm, R][q] = values

    def arms(self) -> list[str]:
        return list(dict.fromkeys(arm for matrix, arm, _ in self.values if matrix == "A"))

    def mean(self, matrix: str, arm: str, R: int, name: str = "entropy rank") -> Estimate:
        return mean_over([values[name] for values in self.values.get((matrix, arm, R), {}).values()])

    def change(self, one: tuple, other: tuple, name: str = "entropy rank") -> Estimate:
        """The first of two entries minus the second, over the questions that both have."""
        first, second = (self.values.get(key, {}) for key in (one, other))
        return mean_over([first[q][name] - second[q][name] for q in first if q in second])

    def against_z(self, matrix: str, arm: str) -> Estimate:
        return self.change((matrix, arm, self.main), (matrix, Z, self.main))


def answer_arms(rollouts: Rollouts, R: int) -> dict[str, torch.Tensor]:
    """(R,) for each arm that gives all tokens of an answer the same, as training would to a group of the first R answers."""
    device = rollouts.mask.device
    apart = replace(rollouts, group=(torch.arange(len(rollouts.mask), device=device) >= R).long())
    advantage = {name: ADVANTAGES[flag](apart) for name, flag in ((Z, "grpo"), ("mean only", "dr_grpo"), ("rloo", "rloo"))}
    advantage["shuffled rewards"] = shuffled_advantage(replace(apart, advantage=advantage[Z]), True)
    noise = torch.randn(R, generator=rollouts.generator).to(device)
    return {**{name: value[:R, 0] for name, value in advantage.items()}, "random zero-sum": noise - noise.mean(),
            "raw reward": rollouts.reward[:R], ONES: torch.ones(R, device=device)}


def study(lab: Lab, rollouts: Rollouts, q: int, tokens: dict[str, torch.Tensor], most: dict[str, int], found: Found) -> None:
    """One question at every group size. `tokens`: the arms with an advantage (G, T) for each token; `most`: those of them
    that only the first so many answers have. A group without spread says nothing about any arm."""
    gradients = answers_apart(lab, rollouts, {ONES: rollouts.mask.float(), **tokens})
    grams = {kind: gram(rows) for kind, rows in gradients.rows.items()}
    for R in found.sizes:
        arms = {name: (ONES, a) for name, a in answer_arms(rollouts, R).items()}
        arms |= {kind: (kind, arms[ONES][1]) for kind in tokens if R <= most.get(kind, R)}
        if not arms[Z][1].any():
            continue
        means = mean_gradients(gradients.rows[ONES][:R], rollouts.reward[:R])
        spans = {"means": span_of(means), "differences": span_of(means[1:] - means[0])}
        found.add("C", "", R, q, {"rewards": len(means), **matrix_ranks(means)})
        for arm, (kind, a) in arms.items():
            weighted = grams[kind][:R, :R] * torch.outer(a, a)
            found.add("A", arm, R, q, ranks(singular_values(weighted)))
            found.add("A null", arm, R, q, ranks(weighted.diagonal().sqrt().sort(descending=True).values))
            update = a @ gradients.rows[kind][:R]
            found.add("outside", arm, R, q, {name: outside(update, span) for name, span in spans.items()})
            study_update(lab, gradients, update, kind, a, (arm, R, q), found)
        if len(means) == 2:
            found.add("line", Z, R, q, {"off": off_the_line(arms[Z][1] @ gradients.rows[ONES][:R], means, rollouts.reward[:R])})


def study_update(lab: Lab, gradients: Gradients, update: torch.Tensor, kind: str, a: torch.Tensor, place: tuple, found: Found) -> None:
    """Matrix B: the median over weight matrices, and for the z-score each of them."""
    arm, R, q = place
    plain = weight_matrices(lab.model, update)
    by_matrix = {name: matrix_ranks(matrix) for name, matrix in plain.items()}
    found.add("B", arm, R, q, medians(by_matrix))
    if R == found.main:
        centred = centred_matrices(gradients, plain, kind, a)
        found.add("B centred", arm, R, q, medians({name: matrix_ranks(matrix) for name, matrix in centred.items()}))
        for name, values in by_matrix.items() if arm == Z else ():
            found.add("B each", name, R, q, values)


def medians(by_matrix: dict[str, dict[str, float]]) -> dict[str, float]:
    return {name: float(np.median([values[name] for values in by_matrix.values()])) for name in RANKS}
