"""One more forward pass over a batch: hidden states and attention, for methods that look inside;
log-prob, entropy and collision of answers that another program gave."""
from dataclasses import replace

import torch
from torch import Tensor

from engine import processes
from engine.forward import LOGITS_AT_ONCE, lay_out, micro_batches
from engine.packing import SharedPrompts, to_rows
from engine.processes import refuse_undefined
from engine.rollouts import Rollouts
from engine.sampler import Distribution
from qwen2_model import Qwen2


@torch.no_grad()
def look_inside(model: Qwen2, rollouts: Rollouts, micro_batch: int,
                attention: bool) -> dict[str, Tensor]:
    """hidden (B, T, D), and on request attention (B, T, T); see Rollouts."""
    B, T = rollouts.mask.shape
    widths = {"hidden": model.config.hidden_size} | ({"attention": T} if attention else {})
    results = {name: torch.zeros(B, T, width, device=rollouts.ids.device)
               for name, width in widths.items()}
    rows = rollouts.rows_of_rank()
    for part in micro_batches(rollouts, rows[rollouts.length[rows] > 0], micro_batch):
        look_at(model, rollouts, part, results)
    processes.all_reduce(*results.values())
    return results


def look_at(model: Qwen2, rollouts: Rollouts, rows: Tensor, results: dict[str, Tensor]) -> None:
    """Write what these rows give into the results."""
    ids, shared, predicts = lay_out(rollouts, rows)
    mask = rollouts.mask[rows]
    last_layer = model.config.num_hidden_layers - 1
    S = shared.answers.shape[1]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer == last_layer and "attention" in results:
            # token t - 1 looks when token t is predicted
            looks = attention_within(shared, q, k) * mask[:, 1:S + 1, None]
            results["attention"][rows, 1:S + 1, :S] = looks
        return shared(layer, q, k, v)

    hidden = model.model(ids, shared.positions, attend).float()
    results["hidden"][rows] = hidden[predicts] * mask[..., None]


def attention_within(shared: SharedPrompts, q: Tensor, k: Tensor) -> Tensor:
    """(R, S, S): [r, i, j] is the attention that token i of answer r pays to its token j, the mean
    over heads; 0 where j > i and beyond the answer's length. It is computed once more, as the
    kernel of `shared` does not return it."""
    R, longest = shared.answers.shape
    _, H, head_dim = q.shape
    attention = torch.zeros(R, longest, longest, device=q.device)
    for block in shared.blocks:
        keys = to_rows(k, block.keys).repeat_interleave(H // k.shape[1], 1)
        queries = to_rows(q, block.places)
        for window in block.windows():
            mask = block.mask(window, torch.float32)
            score = queries[:, :, window] @ keys[:, :, :mask.shape[-1]].transpose(-1, -2)
            weight = (score.float() * head_dim ** -0.5 + mask).softmax(-1).mean(1)
            attention[block.rows, window, :window.stop] = weight[..., -window.stop:]
    return attention


@torch.no_grad()
def with_facts(model: Qwen2, rollouts: Rollouts, micro_batch: int) -> Rollouts:
    """The batch with log-prob, entropy and collision of each token under this model."""
    facts = torch.zeros(3, *rollouts.mask.shape, device=rollouts.mask.device)
    size = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    for rows in micro_batches(rollouts, rollouts.rows_of_rank(), micro_batch):
        ids, shared, predicts = lay_out(rollouts, rows)
        mask = rollouts.mask[rows]
        states = model.model(ids, shared.positions, shared)[predicts[mask]]
        parts = [torch.stack(Distribution(model.logits(h)).facts(y))
                 for h, y in zip(states.split(size), rollouts.ids[rows][mask].split(size))]
        for fact, values in zip(facts, torch.cat(parts, 1)):
            fact[rows] = fact[rows].masked_scatter(mask, values)
    processes.all_reduce(facts)
    refuse_undefined("the model's probabilities are", facts)
    return replace(rollouts, log_prob=facts[0], entropy=facts[1], collision=facts[2])
