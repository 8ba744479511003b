"""Gradients of a problem's answers, one by one, and what centring the inputs of a layer needs.

The gradient of a linear layer is sum_t delta_t x_t', with delta_t the gradient at its output and
x_t its input. The inputs have much in common whatever the advantages are. Without their mean it is

    sum_t delta_t (x_t - mean x)' = gradient - (sum_t delta_t) mean x'

so beside the gradient only sum_t delta_t and mean x have to be kept.
"""
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn

from engine.lab import Lab
from engine.rollouts import Rollouts
from qwen2_model import Qwen2
from research.probes.common import answer_gradients


@dataclass
class Gradients:
    """Of each of G answers to a problem. A kind says what the log-probs were multiplied with.

    Inputs and places are those of the first kind: sums over the positions that carry gradient, and
    how many these are.
    """
    rows: dict[str, torch.Tensor]                   # kind -> (G, P)
    delta_sums: dict[str, dict[str, torch.Tensor]]  # kind -> weight -> (G, out)
    input_sums: dict[str, torch.Tensor]             # weight -> (G, in)
    places: dict[str, torch.Tensor]                 # weight -> (G,)


def group_gradients(lab: Lab, rollouts: Rollouts, kinds: dict[str, torch.Tensor]) -> Gradients:
    """For each (G, T) of coefficients. This takes kinds * G * parameters * 4 bytes."""
    n, G = len(kinds), len(rollouts.mask)
    P = sum(p.numel() for p in lab.model.parameters())
    rows = torch.empty(n, G, P, device=lab.model.device)
    with linear_sums(lab.model) as calls:
        of_answers = answer_gradients(lab, rollouts, list(kinds.values()))
        for b, of_answer in enumerate(of_answers):
            for row, gradient in zip(rows[:, b], of_answer, strict=True):
                row.copy_(gradient)

    delta_sums, input_sums, places = {kind: {} for kind in kinds}, {}, {}
    for name, of_layer in calls.items():
        # The hooks were called answer by answer, and for each answer kind by kind.
        delta, inputs, count = (torch.stack(x).unflatten(0, (G, n)) for x in zip(*of_layer))
        for i, kind in enumerate(kinds):
            delta_sums[kind][name] = delta[:, i]
        input_sums[name], places[name] = inputs[:, 0], count[:, 0]
    return Gradients(dict(zip(kinds, rows)), delta_sums, input_sums, places)


@contextmanager
def linear_sums(model: Qwen2):
    """Inside the block, note three things of each linear layer in each backward pass.

    By the name of its weight, a list of: the sum over positions of the gradient at its output, the
    sum of its inputs at the positions where that gradient is not 0, and how many these are.
    """
    calls = defaultdict(list)

    def note(name, module, inputs, output):
        x = inputs[0].detach().flatten(0, -2)

        def backward(gradient):
            gradient = gradient.flatten(0, -2)
            carries = gradient.any(-1)
            calls[name].append((gradient.sum(0), x[carries].sum(0), carries.sum()))

        output.register_hook(backward)

    layers = {f"model.{name}.weight": module for name, module in model.model.named_modules()
              if isinstance(module, nn.Linear)}
    handles = [module.register_forward_hook(partial(note, name)) for name, module in layers.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def weight_matrices(model: Qwen2, update: torch.Tensor) -> dict[str, torch.Tensor]:
    """A flat gradient, cut into those of the weight matrices."""
    parameters = list(model.named_parameters())
    parts = update.split([p.numel() for _, p in parameters])
    return {name: part.view_as(p) for (name, p), part in zip(parameters, parts) if p.dim() == 2}


def centred_matrices(gradients: Gradients, matrices: dict[str, torch.Tensor], kind: str,
                     factors: torch.Tensor) -> dict[str, torch.Tensor]:
    """The matrices as they would be without the mean of the inputs; factors (R,) of R answers.

    An embedding has no inputs and stays as it is.
    """
    R, centred = len(factors), dict(matrices)
    for name, delta_sum in gradients.delta_sums[kind].items():
        mean_input = gradients.input_sums[name][:R].sum(0) / gradients.places[name][:R].sum()
        centred[name] = matrices[name] - torch.outer(factors @ delta_sum[:R], mean_input)
    return centred
