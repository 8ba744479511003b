"""Sampling answers: every prompt is computed once, and then all its answers grow side by side, a token a step.

What came before is kept as keys and values: the prompts' once per question, shared by its answers, and each answer's own.
Rows that are done leave the batch. On a GPU a step is recorded as a CUDA graph and replayed, so nothing in it may
have a size or a decision that depends on what was sampled: it changes tensors in place, and rows leave between
recordings. On a CPU the same step is simply called.
"""
from copy import deepcopy
from dataclasses import dataclass

import torch

from engine.errors import UserError

from engine.packing import SharedPrompts

from qwen2_model import Qwen2

STEPS_BETWEEN_DEPARTURES = {"cpu": 1, "cuda": 64}


@dataclass
class Generation:
    """What was sampled, in response coordinates: index t is the t-th generated token. Beyond the mask all is 0.

    log_prob, entropy -sum p log p and collision sum p^2 are of the temperature-1 distribution, the one
    that training sees, whatever the sampling temperature was. finished: the row ended itself.
    """
    tokens: torch.Tensor     # (B, T) int64
    mask: torch.Tensor       # (B, T) bool, the stop token included
    finished: torch.Tensor   # (B,) bool
    log_prob: torch.Tensor   # (B, T) float32
    entropy: torch.Tensor
    collision: torch.Tensor

    @classmethod
    def empty(cls, B: int, T: int, device) -> "Generation":
        return cls(torch.zeros(B, T, dtype=torch.long, device=device), torch.zeros(B, T, dtype=torch.bool, device=device),
                   torch.zeros(B, dtype=torch.bool, device=device), *torch.zeros(3, B, T, device=device))

    def record(self, rows, live, t, token, drawn: "Distribution", stop) -> None:
        """Token t of each of these rows that are still live; the others stay as they are."""
        self.tokens[rows, t], self.mask[rows, t] = token * live, live
        self.log_prob[rows, t], self.entropy[rows, t], self.collision[rows, t] = (x * live for x in drawn.facts(token))
        self.finished[rows] |= (token[:, None] == stop).any(1) & live


class Distribution:
    """softmax(logits), a row each, with few passes over the vocabulary: e_v = exp(z_v - max z) and Z = sum e."""

    def __init__(self, logits: torch.Tensor):
        self.z = logits.float() - logits.amax(-1, keepdim=True).float()
        self.e = self.z.exp()
        self.Z = self.e.sum(-1)

    def pick(self, uniform, temperature: float = 1.0, greedy: bool = False) -> torch.Tensor:
        """One token a row by inverting the cumulative distribution at that row's own random number."""
        if greedy:
            return self.z.argmax(-1)
        cumulative = (self.e if temperature == 1 else (self.z / temperature).exp()).cumsum(-1)
        # `right` skips tokens of probability zero
        return torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True).squeeze(1).clamp(max=self.z.shape[-1] - 1)

    def facts(self, token) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """log p of the token, entropy -sum p log p = log Z - sum(e z) / Z, and collision sum p^2."""
        log_prob = self.z.gather(1, token[:, None]).squeeze(1) - self.Z.log()
        return log_prob, self.Z.log() - torch.linalg.vecdot(self.e, self.z) / self.Z, torch.linalg.vecdot(self.e, self.e) / self.Z.square()


class Answering:
    """Rows on their way: their cache, and the step that gives a token to each of them.

    R rows are left, with K pairs each of the row and a key head. In the cache the pairs stand by question, then head, then
    answer, so that those which meet the same keys of a prompt are neighbours. Slot t of a pair is its token t.
    """

    def __init__(self, model: Qwen2, prompts: list[list[int]], answers: int, rows, result: Generation, uniform, limit, stop, temperature, greedy):
        device, config, R = model.device, model.config, len(rows)
        self.model, self.K, self.stop, self.temperature, self.greedy = model, config.num_key_value_heads, stop, temperature, greedy
        self.rows, self.result, self.uniform, self.limit = rows, result, uniform, limit  # rows of result and uniform
        shape = (2, config.num_hidden_layers, R * self.K, uniform.shape[1] - 1, config.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=model.model.norm.compute, device=device)
        self.prompt_keys, self.prompt_values = [], []
        self.done, self.token = torch.zeros(R, dtype=torch.bool, device=device), torch.zeros(R, dtype=torch.long, device=device)
        self.t = torch.zeros(1, dtype=torch.long, device=device)  # the token to come
        self.question = torch.arange(len(prompts), device=device).repeat_interleave(answers)
        self.look_at(0, ahead=False)
        hidden = self.prefill(prompts)[self.question]
        self.arrange()
        self.choose(hidden)

    def prefill(self, prompts: list[list[int]]) -> torch.Tensor:
        """The state after each prompt (Q, D); their keys and values stay."""
        lengths, device = [len(prompt) for prompt in prompts], self.model.device
        alone = SharedPrompts(lengths, [], torch.zeros(0, dtype=torch.long, device=device))
        padding = torch.arange(max(lengths), device=device) >= torch.tensor(lengths, device=device)[:, None]  # (Q, P)
        self.padding = torch.zeros(padding.shape, device=device).masked_fill(padding, float("-inf"))[:, None, None]
        self.length = torch.tensor(lengths, device=device)[self.question]

        def attend(layer, q, k, v):
            self.prompt_keys.append(alone.rows(k, alone.prompts).contiguous())  # (Q, K, P, head_dim), read at every step
            self.prompt_values.append(alone.rows(v, alone.prompts).contiguous())
            return alone(layer, q, k, v)

        hidden = self.model.model(torch.tensor(sum(prompts, []), device=device), alone.positions, attend)
        return hidden[torch.tensor(lengths, device=device).cumsum(0) - 1]

    def look_at(self, end: int, ahead: bool) -> None:
        """The coming steps look at so many slots, of which some are `ahead` of the row."""
        self.end, self.ahead = end, ahead

    def step(self) -> None:
        self.slot = self.t - 1  # where what each row had last is written
        if self.ahead:
            slots = torch.arange(self.end, device=self.t.device)
            self.unwritten = torch.zeros_like(slots, dtype=torch.float32).masked_fill(slots > self.slot, float("-inf"))
        self.choose(self.model.model(self.token, self.length + self.slot, self.attend))

    def choose(self, hidden: torch.Tensor) -> None:
        """Token t of every row, from the state (R, D) that predicts it."""
        drawn = Distribution(self.model.logits(hidden))  # (R, V)
        self.token.copy_(drawn.pick(self.uniform[self.rows, self.t], self.temperature, self.greedy))
        self.result.record(self.rows, ~self.done, self.t, self.token, drawn, self.stop)
        self.done.copy_(self.result.finished[self.rows] | (self.t + 1 >= self.limit))
        self.t += 1

    def arrange(self) -> None:
        """Where the pairs stand: in a grid of Q questions, K heads and as many answers as any question still has."""
        asked, self.question, count = self.question.unique(return_inverse=True, return_counts=True)
        for tensors in (self.prompt_keys, self.prompt_values):
            tensors[:] = [tensor[asked] for tensor in tensors] if len(asked) < len(tensors[0]) else tensors
        self.padding, self.G = self.padding[asked], int(count.max())
        answer = torch.arange(len(self.question), device=asked.device) - (count.cumsum(0) - count)[self.question]
        head = torch.arange(self.K, device=asked.device)
        place = ((self.question[:, None] * self.K + head) * self.G + answer[:, None]).flatten()
        self.order = place.argsort()     # from rows and heads to pairs as they stand
        self.back = self.order.argsort()
        self.place = place[self.order]   # of each pair in the grid
        self.pair = torch.zeros(len(asked) * self.K * self.G, dtype=torch.long, device=asked.device)  # what stands in no place is not looked at
        self.pair[self.place] = torch.arange(len(place), device=asked.device)

    def attend(self, layer: int, q, k, v) -> torch.Tensor:
        """One query a row and head, (R, H, head_dim), at the prompt's keys and the row's own: one softmax over both."""
        (R, H, size), E = q.shape, len(self.order)
        q, k, v = (x.reshape(E, -1, size).index_select(0, self.order) for x in (q * size ** -0.5, k, v))  # (E, H / K or 1, head_dim)
        keys, values = self.keys[layer][:E], self.values[layer][:E]
        keys.index_copy_(1, self.slot, k)
        values.index_copy_(1, self.slot, v)
        own = q @ keys[:, :self.end].transpose(1, 2)  # (E, H / K, end)
        if self.ahead:
            own = own + self.unwritten
        shared = self.together(q) @ self.prompt_keys[layer].transpose(2, 3) + self.padding  # (Q, K, G * H / K, P)
        P = shared.shape[-1]
        weight = torch.cat([self.apart(shared), own], -1).softmax(-1, dtype=torch.float32).type_as(v)
        mixed = weight[..., P:] @ values[:, :self.end]
        mixed = mixed + self.apart(self.together(weight[..., :P]) @ self.prompt_values[layer])
        return mixed.index_select(0, self.back).view(R, H, size)

    def together(self, x: torch.Tensor) -> torch.Tensor:
        """(E, n, m) -> (Q, K, G * n, m): what meets the same prompt."""
        grid = x if len(x) == len(self.pair) else x.index_select(0, self.pair)
        return grid.unflatten(0, (-1, self.K, self.G)).flatten(2, 3)

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """(Q, K, G * n, m) -> (E, n, m)"""
        grid = x.unflatten(2, (self.G, -1)).flatten(0, 2)
        return grid if len(self.place) == len(grid) else grid.index_select(0, self.place)

    def leave(self) -> None:
        """Rows that are done go; the memory of their cache stays allocated and is not touched again."""
        stay = ~self.done
        pairs = stay[self.order // self.K].nonzero().squeeze(1)
        for tensor in (*self.keys, *self.values):
            tensor[:len(pairs), :self.end] = tensor[:, :self.end].index_select(0, pairs)
        for name in ("rows", "limit", "done", "length", "question", "token"):
            setattr(self, name, getattr(self, name)[stay])
        self.arrange()


def repeated(step, count: int, device) -> None:
    """Call `step` so many times. On a GPU the second call is recorded, and from there on the recording is played: one
    launch for some hundred kernels. The first, on a stream of its own, makes what cannot be made during a recording."""
    if device.type != "cuda" or count < 3:
        for _ in range(count):
            step()
        return
    beside = torch.cuda.Stream(device)
    beside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(beside):
        step()
    torch.cuda.current_stream(device).wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()  # recorded, not carried out
    for _ in range(count - 1):
        graph.replay()


def for_sampling(model: Qwen2) -> Qwen2:
    """The same model with its matrices as they are multiplied fastest: in the type of products, converted once a batch instead
    of at every step, and on a CPU lying in memory column by column, which suits products with few rows."""
    instead = {}
    for p in model.parameters():
        fast = p.detach().to(model.model.norm.compute) if p.dim() == 2 else p.detach()
        if p.dim() == 2 and p.device.type == "cpu" and p is not model.model.embed_tokens.weight:  # there, rows are looked up
            fast = fast.t().contiguous().t()
        instead[id(p)] = torch.nn.Parameter(fast, requires_grad=False)
    return deepcopy(model, instead)  # what the memo has is taken as it is


def generate(model: Qwen2, prompts: list[list[int]], *, max_new_tokens: int | list[int], answers: int = 1,
             temperature: float = 1.0, greedy: bool = False, seed: int = 0, stop_ids: tuple[int, ...] | None = None,
             share: range | None = None) -> Generation:
    """`answers` continuations of every prompt, rows in the order of the prompts; `max_new_tokens` for all or one for each.

    The random numbers of all (row, t) are drawn before the first token, so what a row samples does not
    depend on which other rows are still there, nor on who samples it: with a `share` of the prompts only theirs are
    answered, and the rows of the others stay 0. Rows that are done leave a few at a time, since every departure moves
    the cache.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    check_generate(model, prompts, limits, answers, temperature)
    device, share, B, T = model.device, range(len(prompts)) if share is None else share, len(prompts) * answers, max(limits)
    result = Generation.empty(B, T, device)
    if not share:
        return result
    rows = torch.arange(share.start * answers, share.stop * answers, device=device)
    uniform = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)).to(device)
    limit = torch.tensor(limits, device=device).repeat_interleave(answers)[rows]
    stop = torch.tensor(model.config.stop_ids if stop_ids is None else stop_ids, dtype=torch.long, device=device)
    quick, t, every = for_sampling(model), 1, STEPS_BETWEEN_DEPARTURES[device.type]
    with torch.inference_mode():  # cheaper than no_grad; what is returned was made outside and is like any tensor
        batch = Answering(quick, prompts[share.start:share.stop], answers, rows, result, uniform, limit, stop, temperature, greedy)
        while t < T and (done := int(batch.done.sum())) < len(batch.done):
            if 8 * done >= len(batch.done):
                batch.leave()
            count = min(every, T - t)
            batch.look_at(t + count - 1, ahead=count > 1)
            repeated(batch.step, count, device)
            t += count
    return result


def check_generate(model, prompts, limits, answers, temperature) -> None:
    if not prompts or not all(prompts) or len(limits) != len(prompts):
        raise UserError("generate needs at least one prompt, no empty one, and one max_new_tokens for all or one for each")
    if min(limits) < 1 or answers < 1 or not temperature > 0:
        raise UserError(f"max_new_tokens {min(limits)} and answers {answers} must be at least 1, "
                        f"temperature {temperature} above 0 (greedy=True takes the likeliest token)")
    longest, limit = max(len(p) + n for p, n in zip(prompts, limits)), model.config.max_position_embeddings
    if longest > limit:
        raise UserError(f"prompt and answer can reach {longest} tokens, the model's limit is {limit}")
