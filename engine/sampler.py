"""Sampling: every prompt is computed once, then its answers grow side by side, a token a step.

Start at `generate`. Two prompts of 3 and 5 tokens, two answers each, a model with K = 2 key heads:

    rows R = 4          0 1 | 2 3        two answers to question 0, two to question 1
    prefill             the 8 tokens of both prompts, once; their keys (Q, K, 5, head_dim) stay
    step t              4 tokens in, one a row; each sees its prompt and its own row's first t slots
    leave               rows that are done go, the others move together

Each row keeps its own keys and values in a cache with one line for each pair of row and key head,
R * K = 8 lines, and one slot for each token of the answer. The lines are sorted by question, then
key head, then answer, so that those which look at the same keys of a prompt are neighbours:

    line           0      1      2      3      4      5      6      7
    row and head   0, 0   1, 0   0, 1   1, 1   2, 0   3, 0   2, 1   3, 1

The products with the prompts are then one batched product over (Q, K), G answers at a time, where G
is the largest number of answers that any question still has. A question with fewer leaves places
empty.

On a GPU a step is recorded as a CUDA graph and played again, so nothing in it may have a size, or
make a decision, that depends on what was sampled: it changes tensors in place, and rows leave
between recordings. On a CPU the same step is simply called.
"""
import copy
from dataclasses import dataclass

import torch

from engine.errors import UserError
from engine.packing import SharedPrompts, in_rows
from qwen2_model import Qwen2

STEPS_BETWEEN_DEPARTURES = {"cpu": 1, "cuda": 64}
LEAVE_AT = 1 / 8  # of the rows are done: every departure moves the cache, so a few go at a time


@dataclass
class Generation:
    """What was sampled: index t is the t-th generated token. Beyond the mask all is 0.

    log_prob, entropy -sum p log p and collision sum p^2 are of the temperature-1 distribution, the
    one that training sees, whatever the sampling temperature was.
    """
    tokens: torch.Tensor     # (B, T) int64
    mask: torch.Tensor       # (B, T) bool, the stop token included
    finished: torch.Tensor   # (B,) bool: the row ended itself
    log_prob: torch.Tensor   # (B, T) float32
    entropy: torch.Tensor    # (B, T)
    collision: torch.Tensor  # (B, T)

    @classmethod
    def empty(cls, B: int, T: int, device) -> "Generation":
        tokens = torch.zeros(B, T, dtype=torch.long, device=device)
        mask = torch.zeros(B, T, dtype=torch.bool, device=device)
        finished = torch.zeros(B, dtype=torch.bool, device=device)
        return cls(tokens, mask, finished, *torch.zeros(3, B, T, device=device))

    def record(self, rows, live, t, token, distribution: "Distribution", stop_ids) -> None:
        """Write token t of each of these rows that are still live; the others stay as they are."""
        log_prob, entropy, collision = distribution.facts(token)
        self.tokens[rows, t] = token * live
        self.mask[rows, t] = live
        self.log_prob[rows, t] = log_prob * live
        self.entropy[rows, t] = entropy * live
        self.collision[rows, t] = collision * live
        self.finished[rows] |= (token[:, None] == stop_ids).any(1) & live


class Distribution:
    """softmax(logits), a row each, with few passes over the vocabulary:
    z_v = logit_v - max, e_v = exp(z_v), Z = sum of e."""

    def __init__(self, logits: torch.Tensor):
        self.z = logits.float() - logits.amax(-1, keepdim=True).float()
        self.e = self.z.exp()
        self.Z = self.e.sum(-1)

    def pick(self, uniform, temperature: float = 1.0, greedy: bool = False) -> torch.Tensor:
        """A token for each row: where the cumulative distribution passes its own random number."""
        if greedy:
            return self.z.argmax(-1)
        e = self.e if temperature == 1 else (self.z / temperature).exp()
        cumulative = e.cumsum(-1)
        threshold = uniform[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, threshold, right=True)  # right skips probability 0
        return token.squeeze(1).clamp(max=self.z.shape[-1] - 1)

    def facts(self, token) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """log p of the token, entropy = log Z - sum(e z) / Z, collision = sum e^2 / Z^2."""
        log_Z = self.Z.log()
        log_prob = self.z.gather(1, token[:, None]).squeeze(1) - log_Z
        entropy = log_Z - torch.linalg.vecdot(self.e, self.z) / self.Z
        collision = torch.linalg.vecdot(self.e, self.e) / self.Z.square()
        return log_prob, entropy, collision


@dataclass
class Request:
    """Which rows of the batch to sample, and how."""
    rows: torch.Tensor       # (R,) of the B rows of the batch
    limit: torch.Tensor      # (R,) most tokens of each
    uniform: torch.Tensor    # (B, T) a random number for every token that may be drawn
    stop_ids: torch.Tensor   # tokens that end an answer
    temperature: float
    greedy: bool


def generate(model: Qwen2, prompts: list[list[int]], *, max_new_tokens: int | list[int],
             answers: int = 1, temperature: float = 1.0, greedy: bool = False, seed: int = 0,
             stop_ids: tuple[int, ...] | None = None, share: range | None = None) -> Generation:
    """Sample `answers` continuations of every prompt, rows in the order of the prompts;
    `max_new_tokens` is one number for all prompts or one for each.

    The random numbers of all (row, t) are drawn before the first token, so what a row samples does
    not depend on which other rows are still there, nor on who samples it: with a `share` of the
    prompts only theirs are answered, and the rows of the others stay 0.
    """
    limits = max_new_tokens
    if isinstance(max_new_tokens, int):
        limits = [max_new_tokens] * len(prompts)
    check_request(model, prompts, limits, answers, temperature)
    device, B, T = model.device, len(prompts) * answers, max(limits)
    share = range(len(prompts)) if share is None else share
    generation = Generation.empty(B, T, device)
    if not share:
        return generation
    rows = torch.arange(share.start * answers, share.stop * answers, device=device)
    limit = torch.tensor(limits, device=device).repeat_interleave(answers)[rows]
    uniform = torch.rand(B, T, generator=torch.Generator().manual_seed(seed)).to(device)
    stop = model.config.stop_ids if stop_ids is None else stop_ids
    stop = torch.tensor(stop, dtype=torch.long, device=device)
    request = Request(rows, limit, uniform, stop, temperature, greedy)
    quick = for_sampling(model)
    with torch.inference_mode():  # cheaper than no_grad; `generation` was made outside of it
        decoding = Decoding(quick, request, generation)
        decoding.prefill(prompts[share.start:share.stop], answers)
        decode(decoding, T)
    return generation


def decode(decoding: "Decoding", T: int) -> None:
    """A token for every row, again and again; from time to time, rows that are done leave."""
    t, device = 1, decoding.token.device
    while t < T:
        done, rows = int(decoding.done.sum()), len(decoding.done)
        if done == rows:
            break
        if done >= LEAVE_AT * rows:
            decoding.leave()
        count = min(STEPS_BETWEEN_DEPARTURES[device.type], T - t)
        decoding.look_at(slots=t + count - 1, some_are_ahead=count > 1)
        repeat(decoding.step, count, device)
        t += count


def repeat(step, count: int, device) -> None:
    """Call `step` so many times. On a GPU the second call is recorded, and from there on the
    recording is played: one launch for some hundred kernels. The first call, on a stream of its
    own, makes what cannot be made during a recording."""
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


class Decoding:
    """The rows that are on their way, and their cache. `prefill` gives each its first token, `step`
    the next one, `leave` sends away those that are done."""

    def __init__(self, model: Qwen2, request: Request, generation: Generation):
        config, device, R = model.config, model.device, len(request.rows)
        self.model, self.request, self.generation = model, request, generation
        self.rows, self.limit = request.rows, request.limit           # of those still on their way
        self.done = torch.zeros(R, dtype=torch.bool, device=device)
        self.token = torch.zeros(R, dtype=torch.long, device=device)  # the last one of each row
        self.t = torch.zeros(1, dtype=torch.long, device=device)      # index of the next token
        lines, slots = R * config.num_key_value_heads, request.uniform.shape[1] - 1
        shape = (2, config.num_hidden_layers, lines, slots, config.head_dim)
        self.keys, self.values = torch.zeros(shape, dtype=model.compute_dtype, device=device)
        self.prompt_keys, self.prompt_values = [], []                 # of each layer
        self.look_at(slots=0, some_are_ahead=False)

    def prefill(self, prompts: list[list[int]], answers: int) -> None:
        """Run all prompts through the model, keep their keys and values, draw the first tokens."""
        device, lengths = self.token.device, [len(prompt) for prompt in prompts]
        alone = SharedPrompts(lengths, [], torch.zeros(0, dtype=torch.long, device=device))

        def attend(layer, q, k, v):
            self.prompt_keys.append(in_rows(k, alone.prompts).contiguous())  # (Q, K, P, head_dim)
            self.prompt_values.append(in_rows(v, alone.prompts).contiguous())
            return alone(layer, q, k, v)

        ids = torch.tensor(sum(prompts, []), device=device)
        hidden = self.model.model(ids, alone.positions, attend)
        last = torch.tensor(lengths, device=device).cumsum(0) - 1        # of each prompt
        padding = torch.zeros(alone.in_prompt.shape, device=device)
        padding = padding.masked_fill(~alone.in_prompt, float("-inf"))
        self.prompt_padding = padding[:, None, None]                     # (Q, 1, 1, P)
        self.question = torch.arange(len(prompts), device=device).repeat_interleave(answers)
        self.prompt_length = torch.tensor(lengths, device=device)[self.question]
        self.arrange()
        self.choose(hidden[last][self.question])

    def choose(self, hidden: torch.Tensor) -> None:
        """Token t of every row, from the state (R, D) that predicts it."""
        request, distribution = self.request, Distribution(self.model.logits(hidden))  # (R, V)
        uniform = request.uniform[self.rows, self.t]
        self.token.copy_(distribution.pick(uniform, request.temperature, request.greedy))
        self.generation.record(self.rows, ~self.done, self.t, self.token, distribution,
                               request.stop_ids)
        reached_limit = self.t + 1 >= self.limit
        self.done.copy_(self.generation.finished[self.rows] | reached_limit)
        self.t += 1

    def look_at(self, slots: int, some_are_ahead: bool) -> None:
        """The coming steps look at so many slots of the cache. When several steps follow without a
        break, some of these slots are not written yet, and a mask hides them."""
        self.slots, self.some_are_ahead = slots, some_are_ahead

    def step(self) -> None:
        self.slot = self.t - 1  # where the keys and values of each row's last token are written
        if self.some_are_ahead:
            slots = torch.arange(self.slots, device=self.t.device)
            hidden = torch.zeros_like(slots, dtype=torch.float32)
            self.unwritten = hidden.masked_fill(slots > self.slot, float("-inf"))
        positions = self.prompt_length + self.slot
        self.choose(self.model.model(self.token, positions, self.attend))

    def attend(self, layer: int, q, k, v) -> torch.Tensor:
        """One query a row and head, (R, H, head_dim): one softmax over the prompt's keys and the
        row's own. A line of the cache has n = H / K queries."""
        grid, slots, (R, H, size) = self.grid, self.slots, q.shape
        q, k, v = grid.sort(q * size ** -0.5), grid.sort(k), grid.sort(v)  # (lines, n or 1, size)
        keys, values = self.keys[layer][:len(k)], self.values[layer][:len(k)]
        keys.index_copy_(1, self.slot, k)
        values.index_copy_(1, self.slot, v)
        own = q @ keys[:, :slots].transpose(1, 2)                           # (lines, n, slots)
        if self.some_are_ahead:
            own = own + self.unwritten
        prompt = grid.together(q) @ self.prompt_keys[layer].transpose(2, 3)  # (Q, K, G * n, P)
        prompt = grid.apart(prompt + self.prompt_padding)                   # (lines, n, P)
        P = prompt.shape[-1]
        weight = torch.cat([prompt, own], -1).softmax(-1, dtype=torch.float32).type_as(v)
        mixed = weight[..., P:] @ values[:, :slots]
        mixed = mixed + grid.apart(grid.together(weight[..., :P]) @ self.prompt_values[layer])
        return grid.unsort(mixed).view(R, H, size)

    def arrange(self) -> None:
        """Number the questions that still have rows from 0, forget the others, sort the lines."""
        asked, self.question = self.question.unique(return_inverse=True)
        if len(asked) < len(self.prompt_padding):
            self.prompt_keys = [keys[asked] for keys in self.prompt_keys]
            self.prompt_values = [values[asked] for values in self.prompt_values]
            self.prompt_padding = self.prompt_padding[asked]
        self.grid = Grid(self.question, self.model.config.num_key_value_heads)

    def leave(self) -> None:
        """Rows that are done go. The cache stays allocated; its last lines are not used again."""
        stay = ~self.done
        lines = stay[self.grid.row_of_line].nonzero().squeeze(1)
        for cache in (*self.keys, *self.values):
            cache[:len(lines), :self.slots] = cache[:, :self.slots].index_select(0, lines)
        self.rows, self.limit, self.done = self.rows[stay], self.limit[stay], self.done[stay]
        self.token, self.question = self.token[stay], self.question[stay]
        self.prompt_length = self.prompt_length[stay]
        self.arrange()


class Grid:
    """Where each pair of row and key head stands: the lines of the cache, and the grid (Q, K, G)
    that they fill, in which a question with fewer answers leaves places empty."""

    def __init__(self, question: torch.Tensor, K: int):
        """`question` (R,) of each row, rows of one question side by side."""
        device, R = question.device, len(question)
        count = torch.bincount(question)                                   # (Q,) rows of each
        self.K, self.G = K, int(count.max())
        first_row = count.cumsum(0) - count
        answer = torch.arange(R, device=device) - first_row[question]      # of its question
        head = torch.arange(K, device=device)
        place = (question[:, None] * K + head) * self.G + answer[:, None]  # (R, K) in the grid
        self.order = place.flatten().argsort()    # (lines,) which pair of row and head is a line
        self.back = self.order.argsort()          # (lines,) which line a pair is
        self.place = place.flatten()[self.order]  # (lines,) in the grid
        self.line = torch.zeros(len(count) * K * self.G, dtype=torch.long, device=device)
        self.line[self.place] = torch.arange(R * K, device=device)  # empty places: any line will do
        self.is_full = len(self.line) == R * K

    @property
    def row_of_line(self) -> torch.Tensor:
        return self.order // self.K

    def sort(self, x: torch.Tensor) -> torch.Tensor:
        """(R, heads, head_dim) -> (lines, heads / K, head_dim)"""
        return x.reshape(len(self.order), -1, x.shape[-1]).index_select(0, self.order)

    def unsort(self, x: torch.Tensor) -> torch.Tensor:
        """(lines, n, head_dim), as they were before they were sorted."""
        return x.index_select(0, self.back)

    def together(self, x: torch.Tensor) -> torch.Tensor:
        """(lines, n, m) -> (Q, K, G * n, m): all that meets the same prompt's keys."""
        grid = x if self.is_full else x.index_select(0, self.line)
        return grid.unflatten(0, (-1, self.K, self.G)).flatten(2, 3)

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """(Q, K, G * n, m) -> (lines, n, m)"""
        grid = x.unflatten(2, (self.G, -1)).flatten(0, 2)
        return grid if self.is_full else grid.index_select(0, self.place)


def for_sampling(model: Qwen2) -> Qwen2:
    """The same model with its matrices as few rows multiply them fastest: converted once to the
    type of products instead of at every step, and on a CPU lying in memory column by column."""
    embeddings = model.model.embed_tokens.weight

    def fast(parameter: torch.Tensor) -> torch.Tensor:
        if parameter.dim() != 2:
            return parameter.detach()
        matrix = parameter.detach().to(model.compute_dtype)
        if matrix.device.type != "cpu" or parameter is embeddings:  # there, rows are looked up
            return matrix
        return matrix.t().contiguous().t()

    return with_tensors(model, fast)


def with_tensors(module: torch.nn.Module, change) -> torch.nn.Module:
    """A copy of a module, and of those inside it, in which every parameter is `change(parameter)`.
    Hooks and all else are shared."""
    other = copy.copy(module)
    other._modules = {name: with_tensors(child, change) if child is not None else None
                      for name, child in module._modules.items()}
    other._parameters = {}
    for name, parameter in module._parameters.items():
        changed = None if parameter is None else change(parameter)
        other._parameters[name] = changed if changed is None else torch.nn.Parameter(changed, False)
    return other


def check_request(model: Qwen2, prompts: list[list[int]], limits: list[int], answers: int,
                  temperature: float) -> None:
    if not prompts or not all(prompts) or len(limits) != len(prompts):
        raise UserError("generate needs at least one prompt, no empty one, and one max_new_tokens "
                        "for all or one for each")
    if min(limits) < 1 or answers < 1 or not temperature > 0:
        raise UserError(f"max_new_tokens {min(limits)} and answers {answers} must be at least 1, "
                        f"temperature {temperature} above 0 (greedy=True takes the likeliest)")
    longest = max(len(prompt) + limit for prompt, limit in zip(prompts, limits))
    most = model.config.max_position_embeddings
    if longest > most:
        raise UserError(f"prompt and answer can reach {longest} tokens, the model's limit is "
                        f"{most}")
