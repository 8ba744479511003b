"""An extra forward pass over a batch: hidden states and attention, for methods that use them."""
import torch
from torch import Tensor

from lab.engine.forward import lay_out, micro_batches
from lab.engine.packing import SharedPrompts, to_rows
from lab.engine.rollouts import Rollouts
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
    over heads; 0 if j > i. Beyond the answer's length the numbers mean nothing. It is computed here
    again, because the kernel that `shared` calls does not return it."""
    keys = to_rows(k, shared.keys).repeat_interleave(q.shape[1] // k.shape[1], 1)
    score = to_rows(q, shared.answers) @ keys.transpose(-1, -2)
    mask = shared.make_mask(torch.float32)
    weight: Tensor = (score.float() * q.shape[2] ** -0.5 + mask).softmax(-1).mean(1)
    return weight[..., shared.prompts.shape[1]:]  # the keys before are those of the prompt
