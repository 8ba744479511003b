"""Prompts that stand once for all their answers: who sees whom when tokens stand end to end."""
import torch

from qwen2_model import mix


class SharedPrompts:
    """Each prompt stands once, however many answers go on from it: their tokens see the prompt's, and their own up to themselves.

    All tokens stand end to end, (N,): prompt after prompt, then answer after answer. Only for attention are they put into
    rows, (Q, P) prompts and blocks of (r, S) answers of like length, padded on the right. The gradient is exact: a prompt's
    keys and values collect it from all answers.
    """
    ROWS = 8  # of a block

    def __init__(self, prompt_lengths: list[int], answer_lengths: list[int], prompt_of: torch.Tensor):
        device, lengths = prompt_of.device, torch.tensor(answer_lengths, dtype=torch.long, device=prompt_of.device)
        self.prompt_of = prompt_of                                                      # (R,) rows of self.prompts
        self.prompts, asked = places(prompt_lengths, 0, device)                         # (Q, P) indices of tokens
        self.answers, answered = places(answer_lengths, sum(prompt_lengths), device)    # (R, S)
        self.positions = torch.cat([torch.arange(n) for n in prompt_lengths]
                                   + [prompt_lengths[g] + torch.arange(n) for g, n in zip(prompt_of.tolist(), answer_lengths)]).to(device)
        before = torch.ones(self.answers.shape[1], self.answers.shape[1], dtype=torch.bool, device=device).tril()
        self.blocks, stand, inside = [], [self.prompts.flatten()], [asked.flatten()]
        for rows in lengths.argsort(stable=True)[int((lengths == 0).sum()):].split(self.ROWS) if lengths.any() else ():
            S = int(lengths[rows[-1]])
            own = before[:S, :S].expand(len(rows), -1, -1)
            self.blocks.append((rows, self.answers[rows, :S], torch.cat([asked[prompt_of[rows]][:, None].expand(-1, S, -1), own], -1)[:, None]))
            stand.append(self.answers[rows, :S].flatten()), inside.append(answered[rows, :S].flatten())
        stand, inside = torch.cat(stand), torch.cat(inside).nonzero().squeeze(1)
        self.back = torch.empty_like(inside).index_copy_(0, stand[inside], inside)  # from rows to end to end

    def rows(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(N, heads, head_dim) -> (rows, heads, length, head_dim)"""
        return x.index_select(0, places.flatten()).unflatten(0, places.shape).transpose(1, 2)

    def __call__(self, layer: int, q, k, v) -> torch.Tensor:
        asked, keys, values = (self.rows(x, self.prompts) for x in (q, k, v))
        mixed = [mix(asked, keys, values)]
        for rows, places, mask in self.blocks:
            seen = (torch.cat([prompt[self.prompt_of[rows]], self.rows(x, places)], 2) for prompt, x in ((keys, k), (values, v)))
            mixed.append(mix(self.rows(q, places), *seen, mask))
        return torch.cat([rows.transpose(1, 2).flatten(0, 1) for rows in mixed]).index_select(0, self.back)

    def received(self, q, k) -> torch.Tensor:
        """(R, S, S): how much each token of an answer looks at each one up to itself, mean over heads; 0 beyond its length or
        not earlier. For looking at only: `mix` never has these numbers."""
        R, S = self.answers.shape
        found = torch.zeros(R, S, S, device=q.device)
        for rows, places, mask in self.blocks:
            keys = torch.cat([self.rows(k, self.prompts)[self.prompt_of[rows]], self.rows(k, places)], 2)
            keys = keys.repeat_interleave(q.shape[1] // k.shape[1], 1)
            score = (self.rows(q, places) @ keys.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
            n = places.shape[1]
            found[rows, :n, :n] = score.masked_fill(~mask, float("-inf")).softmax(-1).mean(1)[..., -n:]
        return found


def places(lengths: list[int], start: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in a flat sequence that begins at `start` the tokens of each row stand, (rows, longest), and which are no padding."""
    length = torch.tensor(lengths, dtype=torch.long, device=device)[:, None]
    step = torch.arange(max(lengths, default=0), device=device)
    inside = step < length
    return torch.where(inside, start + length.cumsum(0) - length + step, 0), inside
