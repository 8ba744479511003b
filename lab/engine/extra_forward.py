"""An extra forward pass over a batch: hidden states and attention, for methods that use them."""
import torch
from torch import Tensor

from lab.engine.model import Qwen2, tensors_on
from lab.engine.rollouts import Rollouts
from qwen2_model import Cache


class Forward:
    """An extra forward pass over a batch, made only if a method needs it, and only once."""

    def __init__(self, model: Qwen2, micro_batch: int):
        self.model, self.micro_batch = model, micro_batch
        self.results: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: object) -> "Forward":
        """Copies of a batch share it, so the pass is made once for all methods."""
        return self

    def look(self, rollouts: Rollouts, attention: bool = False) -> dict[str, Tensor]:
        """hidden (B, T, D), and attention (B, T, T) if it is wanted; see Rollouts."""
        if ("attention" if attention else "hidden") not in self.results:
            with torch.no_grad(), tensors_on(rollouts.ids.device):
                self.results = self.look_inside(rollouts, attention)
        return self.results

    def look_inside(self, rollouts: Rollouts, attention: bool) -> dict[str, Tensor]:
        B, T = rollouts.mask.shape
        results = {"hidden": torch.zeros(B, T, self.model.config.hidden_size)}
        if attention:
            results["attention"] = torch.zeros(B, T, T)
        rows = (rollouts.length > 0).nonzero().squeeze(1)
        for part in rows.split(self.micro_batch) if len(rows) else ():
            ids, mask = rollouts.ids[part][:, :-1], rollouts.mask[part]
            groups, prompt_of = rollouts.group[part].unique(return_inverse=True)
            prompts = [rollouts.prompt_ids[group] for group in groups.tolist()]
            cache = Looking(self.model.model, prompts, prompt_of)
            hidden = torch.cat([cache.last_states()[:, None], cache.read(ids)], 1).float()
            results["hidden"][part] = hidden * mask[..., None]
            if attention:
                # what token t - 1 pays is recorded at token t, which it predicts
                paid = cache.attention_within() * mask[:, 1:, None]
                results["attention"][part, 1:, :-1] = paid
        return results


class Looking(Cache):
    """A cache that keeps the queries of the last layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.layer, self.q = layer, q
        return super().attend(layer, q, k, v)

    def attention_within(self) -> Tensor:
        """(R, S, S): [r, i, j] is the attention that token i of answer r pays to its token j,
        averaged over heads; 0 if j > i. Beyond the answer's length the numbers mean nothing. It is
        computed here again, because the kernel that `attend` calls does not return it."""
        kept = self.kept[self.layer][:, :self.end].transpose(1, 2)
        q, keys = self.q.transpose(1, 2), kept.chunk(2, 1)[0]
        score = q @ keys.repeat_interleave(q.shape[1] // keys.shape[1], 1).transpose(-1, -2)
        score = (score.float() * q.shape[-1] ** -0.5).masked_fill(~self.sees[:, None], -torch.inf)
        weight: Tensor = score.softmax(-1).mean(1)
        return weight[..., self.P:]  # the keys before are those of the prompt
