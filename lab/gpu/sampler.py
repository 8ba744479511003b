"""The sampler of a GPU. Like the engine's it computes first every prompt once, and then all answers
grow by one token in each step.

Example: prompts p (3 tokens) and r (5 tokens) have two answers each, of at most 4 new tokens. The
answers are R = 4 rows: rows 0 and 1 continue p, rows 2 and 3 continue r. Row 1 draws the stop token
as its token 1. V is the vocabulary, D the width.

               fed to the model             at positions   hidden -> logits      sampled
    prefill    p0 p1 p2 r0 r1 r2 r3 r4      0 1 2 0 1 ...  (8, D) -> (4, V)      token 0 of 4 rows
    step 1     token 0 of rows 0 1 2 3      3 3 5 5        (4, D) -> (4, V)      token 1 of 4 rows
    (row 1 is done and is dropped, if this is a step in which finished rows are looked for)
    step 2     token 1 of rows 0 2 3        4 6 6          (3, D) -> (3, V)      token 2 of 3 rows
    step 3     token 2 of rows 0 2 3        5 7 7          (3, D) -> (3, V)      token 3 of 3 rows

Step t feeds token t - 1 and samples token t. lab/gpu/cache.py says which tokens a fed token sees.

A step is recorded as a CUDA graph and replayed (lab/gpu/cuda_graph.py). So within a step no shape
and no decision may depend on what was sampled, and tensors are changed in place. Between two steps
the CPU may look at what was sampled, but each look takes time. So stop tokens are looked for every
16 steps, and finished rows are dropped once they are a quarter of all. Until then finished rows are
decoded with the others, and what they draw is cut off afterwards. If an environment replies, stop
tokens are looked for after every step, because its reply is read from the next step on.

On a CPU, where this sampler is tested, a step is simply called.
"""
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.engine.model import Qwen2
from lab.gpu.packing import pack, send, to_rows
from lab.engine.sampler import Generation, Reply, Sampling, Start
from lab.gpu.cache import Cache
from lab.gpu.model import ModelOnGPU

# In a vocabulary longer than this, most of the time for drawing a token goes into reading memory,
# and not into arithmetic.
LONG_VOCABULARY = 4096
PART = 128  # a long vocabulary is cut into parts of this many tokens


class Pace(NamedTuple):
    """How rarely the rows change, or the part of the cache that they read, because a step is
    recorded again after such a change."""
    look: int    # steps between two searches for finished rows
    window: int  # tokens by which the part of the cache that steps read is enlarged at a time
    leave: int   # finished rows are dropped once they are 1 / leave of all rows. They are not
    #              dropped at once, because then the whole cache has to be moved
    slots: int   # the cache begins with room for so many tokens and grows, as most answers end far
    #              below the limit


PACE = Pace(look=16, window=128, leave=4, slots=256)


class Distribution:
    """softmax(logits) of each row. With z_v = logit_v - max logit, e_v = exp(z_v) and Z = sum e,
    p_v = e_v / Z."""

    def __init__(self, logits: Tensor):
        self.z = logits - logits.amax(-1, keepdim=True).float()            # (R, V)
        self.e = self.z.exp()                                              # (R, V)
        self.Z = self.e.sum(-1)                                            # (R,)

    def pick(self, uniform: Tensor, temperature: float = 1.0) -> Tensor:
        """(R,) tokens by inverse-CDF sampling; `uniform` has a random number in [0, 1) a row."""
        e = self.e if temperature == 1 else (self.z / temperature).exp()
        if e.shape[1] > LONG_VOCABULARY:
            return pick_by_parts(uniform[:, None], e, in_parts(e).sum(-1)).squeeze(1)
        return index_at(uniform[:, None], e.cumsum(-1)).squeeze(1)

    def facts(self, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log p of the token, entropy -sum p log p = log Z - sum(e z) / Z, collision sum p^2."""
        log_prob = self.z.gather(1, token[:, None]).squeeze(1) - self.Z.log()
        entropy = self.Z.log() - torch.linalg.vecdot(self.e, self.z) / self.Z
        return log_prob, entropy, torch.linalg.vecdot(self.e, self.e) / self.Z.square()


def pick_by_parts(share: Tensor, e: Tensor, sums: Tensor) -> Tensor:
    """The same token as `index_at(share, e.cumsum(-1))`, up to rounding, without the cumulative sum
    over the whole vocabulary (R, V), for which a GPU has only a slow kernel. The vocabulary is cut
    into parts of PART tokens. First the part is found, by the sums (R, parts) of e over the parts,
    and then the token within this part."""
    cumulative = sums.cumsum(-1)                                           # (R, parts)
    part = index_at(share, cumulative)                                     # (R, 1)
    height = share * cumulative[:, -1:]
    beyond = cumulative.gather(1, part) - height     # from the height to the end of the part
    share_in_part = 1 - beyond / sums.gather(1, part)
    e_in_part = in_parts(e).gather(1, part[..., None].expand(-1, -1, PART)).squeeze(1)
    index = index_at(share_in_part, e_in_part.cumsum(-1))
    return index.add_(part, alpha=PART).clamp(max=e.shape[1] - 1)          # part * PART + index


def in_parts(p: Tensor) -> Tensor:
    """(R, V) -> (R, parts, PART), the last part filled up with zeros."""
    missing = -p.shape[-1] % PART
    if missing:
        p = F.pad(p, (0, missing))
    return torch.unflatten(p, -1, (-1, PART))


def index_at(share: Tensor, cumulative: Tensor) -> Tensor:
    """(R, 1) the first index at which the cumulative sum (R, n) is above this share of the whole
    sum. A token of probability 0 adds nothing to the sum, so its index is never returned."""
    # clamped, so that it is below the whole sum even after rounding
    height = share.clamp(0, 1 - 2 ** -23) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, height, right=True)
    return index.clamp(max=cumulative.shape[1] - 1)  # if the sum is NaN, the index found is n


@dataclass
class Rows:
    """The R answers that are still growing."""
    answer: Tensor    # (R,) which row of the Generation it is
    prompt: Tensor    # (R,) the number of its prompt
    seen: Tensor      # (R,) how many tokens of its prompt it sees
    limit: Tensor     # (R,) the most tokens it may have
    token: Tensor     # (R,) the token that was sampled last
    position: Tensor  # (R,) the position of that token
    done: Tensor      # (R,) bool


class Decoding:
    """Answers that are being sampled: `prefill` samples the first token of every row, and each
    `step` one more. What is drawn is written into tables of T lines and B columns: a line for each
    token index, a column for each answer. The tables are flat, and `line` is where the line of the
    present token begins."""

    def __init__(self, model: ModelOnGPU, rows: Rows, cache: Cache, uniform: Tensor,
                 sampling: Sampling, reply: Reply | None):
        B, T = uniform.shape
        self.model, self.rows, self.cache, self.sampling = model, rows, cache, sampling
        self.reply = reply
        self.columns = B
        self.line = torch.zeros(1, dtype=torch.long, device=uniform.device)
        self.uniform = uniform.t().flatten()  # random numbers in [0, 1), a table
        self.tokens = torch.zeros(T * B, dtype=torch.long, device=uniform.device)
        self.facts = torch.zeros(T * B, 3, device=uniform.device)
        # the tokens that an environment writes, -1 where the model draws; and at which tokens an
        # answer to an environment ended
        self.replied = torch.full_like(self.tokens, -1)
        self.ended = torch.zeros_like(self.tokens, dtype=torch.bool)

    def prefill(self, prompts: list[list[int]], without: Tensor | None = None) -> None:
        """Compute each prompt once, keep its keys and values, and sample token 0 of every row.
        `without` (B,) has for each answer a token that may not come first, or -1."""
        rows, device = self.rows, self.uniform.device
        ids, packed = pack(prompts)
        ids, packed = send(ids, device), packed.to(device)

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            self.cache.add_prompts(to_rows(kv, packed.rows), rows.prompt)
            k, v = kv.chunk(2, 1)
            attended = packed(layer, q, k, v)                               # (N, H, head_dim)
            return torch.unflatten(attended, 1, (k.shape[1], -1))           # by key head

        hidden = self.model.hidden(ids, packed.positions, attend)           # (N, D)
        last_seen = packed.rows[rows.prompt, rows.seen - 1]                 # (R,)
        self.sample(hidden[last_seen], None if without is None else without[rows.answer])

    def step(self) -> None:
        """Feed the last token of every row and sample the next one. A CUDA graph records this."""
        rows = self.rows
        rows.position += 1
        self.cache.open_slot()
        if self.model.has_kernels:
            from lab.gpu.kernels import token_states
            hidden = token_states(self.model, rows.token, rows.position, rows.seen, self.cache)
        else:
            hidden = self.model.hidden(rows.token, rows.position, self.cache.attend)
        self.sample(hidden)

    def sample(self, hidden: Tensor, without: Tensor | None = None) -> None:
        """Draw and record the next token of every row, from the state (R, D) that predicts it. A
        token that the environment has written takes the place of the one that is drawn."""
        rows, sampling, logits = self.rows, self.sampling, self.model.logits(hidden)  # (R, V)
        if self.model.has_kernels and without is None:
            from lab.gpu import kernels
            kernels.draw(logits, self.uniform, self.line, rows.answer, rows.token, self.tokens,
                         self.facts, sampling.temperature, sampling.greedy)
        else:
            self.draw(logits, without)
        if self.reply:
            cell = self.line + rows.answer
            replied = self.replied.index_select(0, cell)
            rows.token.copy_(torch.where(replied < 0, rows.token, replied))
            self.tokens.index_copy_(0, cell, rows.token)
        self.line += self.columns

    def draw(self, logits: Tensor, without: Tensor | None) -> None:
        """Draw and record the next token of every row, from its logits (R, V)."""
        rows, sampling = self.rows, self.sampling
        distribution = Distribution(logits)
        # Without the excluded tokens the others keep their proportions. What is recorded are the
        # facts of the whole distribution.
        drawn_from = distribution
        if without is not None:
            every = torch.arange(logits.shape[1], device=logits.device)
            logits = logits.masked_fill(every == without[:, None], float("-inf"))
            drawn_from = Distribution(logits)
        cell = self.line + rows.answer  # in the flat tables
        uniform = self.uniform.index_select(0, cell)
        if sampling.greedy:
            token = logits.argmax(-1)
        else:
            token = drawn_from.pick(uniform, sampling.temperature)
        rows.token.copy_(token)
        self.tokens.index_copy_(0, cell, token)
        self.facts.index_copy_(0, cell, torch.stack(distribution.facts(token), 1))

    def table(self, values: Tensor) -> Tensor:
        """A flat table as (T, B)."""
        return values.view(-1, self.columns)

    def find_done(self, t: int, count: int) -> None:
        """Mark rows whose answer ended within the last `count` steps, or reached its limit. They
        have t tokens now."""
        rows = self.rows
        if self.reply:
            self.ask(self.reply, t)
        else:
            drawn = self.table(self.tokens)[t - count:t, rows.answer]  # (count, R)
            rows.done |= torch.isin(drawn, self.sampling.stop).any(0)
        rows.done |= rows.limit <= t

    def ask(self, reply: Reply, t: int) -> None:
        """Ask the environment about each row whose token t - 1 is a stop token that the model drew,
        and write its reply into the table, as far as there is room."""
        rows, tokens, replied = self.rows, self.table(self.tokens), self.table(self.replied)
        own = replied[t - 1, rows.answer] < 0
        ends_turn = torch.isin(rows.token, self.sampling.stop) & own & ~rows.done
        for place in ends_turn.nonzero()[:, 0].tolist():
            answer = int(rows.answer[place])
            drawn = replied[:t, answer] < 0
            written = reply(answer, tokens[:t, answer].tolist(), drawn.tolist())
            if written is None:
                self.table(self.ended)[t - 1, answer] = True
                rows.done[place] = True
            else:
                room = replied[t:t + len(written), answer]
                room.copy_(torch.tensor(written[:len(room)], dtype=torch.long))

    def arrange(self, slots: int, written: int) -> None:
        """Drop the rows that are done. The others have room for `slots` tokens each, of which
        `written` are there already."""
        stay = (~self.rows.done).nonzero().squeeze(1)
        self.rows = Rows(*(values[stay] for values in vars(self.rows).values()))
        self.cache.arrange(stay, self.rows.seen, slots, written)

    def result(self, limits: Tensor) -> Generation:
        """All that was sampled: each answer up to its end, or to its limit (B,)."""
        tokens = self.table(self.tokens).t()                          # (B, T)
        facts = self.facts.view(-1, self.columns, 3).permute(2, 1, 0)  # (3, B, T)
        own = self.table(self.replied).t() < 0
        if self.reply:
            ended = self.table(self.ended).t()
        else:
            ended = torch.isin(tokens, self.sampling.stop)
        ended_before = ended.cumsum(1) > ended.long()
        below_limit = torch.arange(tokens.shape[1], device=tokens.device) < limits[:, None]
        written = below_limit & ~ended_before
        mask = written & own
        log_prob, entropy, collision = facts.masked_fill(~mask, 0)
        return Generation(tokens * written, mask, (ended & written).any(1), log_prob, entropy,
                          collision, written)


def step_until_done(decoding: Decoding, longest: int) -> None:
    """Sample tokens 1 to longest - 1, or stop when every row is done."""
    cache, device = decoding.cache, decoding.line.device
    if device.type == "cuda":
        from lab.gpu.cuda_graph import Recording
    recording: Recording | None = None
    step = decoding.step
    window = 0  # the steps read this many slots
    t = 1       # tokens that each row has: token 0 came with the prefill
    count = 1   # how many of them are new since finished rows were last looked for
    while t < longest:
        decoding.find_done(t, count)
        rows = len(decoding.rows.done)
        done = int(decoding.rows.done.sum())
        if done == rows:
            break
        look = 1 if decoding.reply else PACE.look
        count = min(look, longest - t)
        # A step stores the token that it feeds. After count steps these are all but the newest of
        # t + count tokens.
        needed_slots = t + count - 1
        slots = cache.slots
        if needed_slots > slots:  # twice as many, so that it happens rarely
            slots = min(max(needed_slots, 2 * slots), longest - 1)
        if PACE.leave * done >= rows or slots > cache.slots:
            decoding.arrange(slots, written=t - 1)
            window = 0
        if needed_slots > window:
            # kernels read what is written, so their step is recorded once for all slots
            by_kernels = decoding.model.has_kernels
            window = cache.slots if by_kernels else min(t + PACE.window - 1, cache.slots)
            cache.set_window(window)
            if device.type == "cuda":
                step = recording = Recording(decoding.step, recording)
        for _ in range(count):
            step()
        t += count
    if decoding.reply:
        decoding.find_done(t, count)


def stream_of(device: torch.device) -> AbstractContextManager[None]:
    """A context in which CUDA's steps can be recorded; elsewhere it does nothing."""
    if device.type != "cuda":
        return nullcontext()
    from lab.gpu.cuda_graph import ready_to_record
    return ready_to_record(device)


def sample_on_gpu(model: Qwen2, prompts: list[list[int]], starts: list[Start], limit: Tensor,
                  generator: torch.Generator, sampling: Sampling, reply: Reply | None
                  ) -> Generation:
    """What `sample` of lab/engine/sampler.py computes. limit (B,)."""
    T = int(limit.max())
    uniform = torch.rand(len(starts), T, generator=generator, device="cpu").to(model.device)
    on_gpu = ModelOnGPU(model, max(map(len, prompts)) + T)
    with stream_of(model.device):
        decoding = begin(on_gpu, prompts, starts, limit, uniform, sampling, reply)
        step_until_done(decoding, T)
    return decoding.result(limit)


def begin(model: ModelOnGPU, prompts: list[list[int]], starts: list[Start], limits: Tensor,
          uniform: Tensor, sampling: Sampling, reply: Reply | None) -> Decoding:
    """Sample the first token for each start. Only the prompts that the rows continue are computed.
    """
    device = uniform.device
    needed = sorted({start.prompt for start in starts})
    number_of = {prompt: number for number, prompt in enumerate(needed)}
    prompt = torch.tensor([number_of[start.prompt] for start in starts], device=device)
    seen = torch.tensor([start.seen for start in starts], device=device)
    rows = Rows(torch.arange(len(starts), device=device), prompt, seen, limits,
                token=torch.zeros_like(prompt), position=seen - 1,
                done=torch.zeros_like(prompt, dtype=torch.bool))
    prompts = [prompts[prompt] for prompt in needed]
    cache = Cache(model.config, model.dtype, max(map(len, prompts)), not model.has_kernels)
    decoding = Decoding(model, rows, cache, uniform, sampling, reply)
    decoding.arrange(min(uniform.shape[1] - 1, PACE.slots), written=0)
    without = torch.tensor([start.without for start in starts], device=device)
    decoding.prefill(prompts, without if (without >= 0).any() else None)
    return decoding
