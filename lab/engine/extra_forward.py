"""Extra forward passes over a batch: hidden states and attention, for methods that use them; or
log-prob, entropy and collision, for answers that another program has sampled."""
from dataclasses import replace

import torch
from torch import Tensor

from lab.engine.errors import refuse_undefined
from lab.engine.forward import LOGITS_AT_ONCE, lay_out, micro_batches
from lab.engine.packing import SharedPrompts, to_rows
from lab.engine.rollouts import Rollouts
from lab.engine.sampler import Distribution
from lab.engine.model import Qwen2


@torch.no_grad()
def look_inside(model: Qwen2, rollouts: Rollouts, micro_batch: int,
                attention: bool) -> dict[str, Tensor]:
    """Compute hidden (B, T, D), and attention (B, T, T) if it is wanted; see Rollouts."""
    B, T = rollouts.mask.shape
    device = rollouts.ids.device
    results = {"hidden": torch.zeros(B, T, model.config.hidden_size, device=device)}
    if attention:
        results["attention"] = torch.zeros(B, T, T, device=device)
    rows = (rollouts.length > 0).nonzero().squeeze(1)
    for part in micro_batches(rollouts, rows, micro_batch):
        look_at(model, rollouts, part, results)
    return results


def look_at(model: Qwen2, rollouts: Rollouts, rows: Tensor, results: dict[str, Tensor]) -> None:
    """Compute these rows and write them into the results."""
    ids, shared, predicts = lay_out(rollouts, rows)
    mask = rollouts.mask[rows]
    last_layer = model.config.num_hidden_layers - 1
    S = shared.answers.shape[1]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer == last_layer and "attention" in results:
            # the attention that token t - 1 pays is recorded at token t, which it predicts
            paid = attention_within(shared, q, k) * mask[:, 1:S + 1, None]
            results["attention"][rows, 1:S + 1, :S] = paid
        return shared(layer, q, k, v)

    hidden = model.model(ids, shared.positions, attend).float()
    results["hidden"][rows] = hidden[predicts] * mask[..., None]


def attention_within(shared: SharedPrompts, q: Tensor, k: Tensor) -> Tensor:
    """(R, S, S): [r, i, j] is the attention that token i of answer r pays to its token j, averaged
    over heads; 0 if j > i and beyond the answer's length. It is computed here again, because the
    kernel that `shared` calls does not return it."""
    R, longest = shared.answers.shape
    _, H, head_dim = q.shape
    attention = torch.zeros(R, longest, longest, device=q.device)
    for block in shared.blocks:
        keys = to_rows(k, block.keys).repeat_interleave(H // k.shape[1], 1)
        queries = to_rows(q, block.indices)
        for window in block.windows():
            mask = block.mask(window, torch.float32)
            score = queries[:, :, window] @ keys[:, :, :mask.shape[-1]].transpose(-1, -2)
            weight = (score.float() * head_dim ** -0.5 + mask).softmax(-1).mean(1)
            end = window.stop
            of_answer = weight[..., -end:]  # the keys before are those of the prompt
            attention[block.rows, window, :end] = of_answer
    return attention


@torch.no_grad()
def with_facts(model: Qwen2, rollouts: Rollouts, micro_batch: int) -> Rollouts:
    """Add log-prob, entropy and collision of each token under this model."""
    facts = torch.zeros(3, *rollouts.mask.shape, device=rollouts.mask.device)
    size = max(1, LOGITS_AT_ONCE // model.config.vocab_size)
    for rows in micro_batches(rollouts, rollouts.rows, micro_batch):
        ids, shared, predicts = lay_out(rollouts, rows)
        mask = rollouts.mask[rows]
        states = model.model(ids, shared.positions, shared)[predicts[mask]]
        targets = rollouts.ids[rows][mask]
        parts = []
        for h, y in zip(states.split(size), targets.split(size)):
            parts.append(torch.stack(Distribution(model.logits(h)).facts(y)))
        for fact, values in zip(facts, torch.cat(parts, 1)):  # (B, T), (tokens,)
            of_rows = torch.zeros_like(fact[rows])
            of_rows[mask] = values
            fact[rows] = of_rows
    refuse_undefined("the model's probabilities are", facts)
    return replace(rollouts, log_prob=facts[0], entropy=facts[1], collision=facts[2])
