"""Sampling answers: first every prompt is computed once, and then all answers grow by one token in
each step. If all prompts begin with the same tokens, this beginning is computed once for all.

Example: prompts p (3 tokens) and r (5 tokens) begin with the same two tokens, s. They have two
answers each, of at most 4 new tokens. The answers are R = 4 rows: rows 0 and 1 continue p, rows 2
and 3 continue r. Row 1 draws the stop token as its token 1. V is the vocabulary, D the width.

               fed to the model             at positions   hidden -> logits      sampled
    prefill    s0 s1 p2 r2 r3 r4            0 1 2 2 3 4    (6, D) -> (4, V)      token 0 of 4 rows
    step 1     token 0 of rows 0 1 2 3      3 3 5 5        (4, D) -> (4, V)      token 1 of 4 rows
    (row 1 is done and is dropped, if this is a step in which finished rows are looked for)
    step 2     token 1 of rows 0 2 3        4 6 6          (3, D) -> (3, V)      token 2 of 3 rows
    step 3     token 2 of rows 0 2 3        5 7 7          (3, D) -> (3, V)      token 3 of 3 rows

    Generation.mask (4, 4)    1 1 1 1      index t is the t-th generated token,
                              1 1 0 0      the stop token is part of the answer
                              1 1 1 1
                              1 1 1 1

Step t feeds token t - 1 and samples token t. lab/gpu/cache.py says which tokens a fed token
sees. Stop tokens are looked for every 4 steps on a CPU, and finished rows are dropped once they are
an eighth of all. On CUDA it is every 16 steps, and a quarter of all. Until then finished rows are
decoded with the others, and what they draw is cut off afterwards.

Answers may also continue a sequence from a position within it. The sequence is still computed once,
and its hidden state at that position predicts their first token. With
`starts=[Start(1, 5), Start(1, 2, without=7)]` the first row continues from r4; the second sees only
s0 and s1, and its first token may be any but 7.

Several turns: after a stop token `reply` is asked what the environment writes, or None if the
answer has ended. With a player who guesses and an environment that says too big or too small,

    tokens     4 <|im_end|> big . \n 2 <|im_end|> small . \n 3 <|im_end|>
    mask       1     1       0  0  0 1     1        0   0  0  1     1          what the model drew
    written    1     1       1  1  1 1     1        1   1  1  1     1          what is in the answer

A row that has ended its turn waits until half of the rows are done or wait. Then the replies to
them are read, each in one piece as a prompt is. From then on all that a row has read is its prompt
(`go_on`), so what follows is again the sampling of answers of one turn.

On a GPU a step is recorded as a CUDA graph and replayed (lab/gpu/cuda_graph.py). So within a
step no shape and no decision may depend on what was sampled, and tensors are changed in place. On a
CPU the step is simply called.
"""
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.gpu.cache import FIRST_SLOTS, Cache, fill_blocks, rows_of_block
from lab.engine.errors import UserError
from lab.engine.fused import FusedQwen2
from lab.engine.packing import pack, send, to_rows
from lab.engine.model import Qwen2, attention

# In a vocabulary longer than this, most of the time for drawing a token goes into reading memory,
# and not into arithmetic.
LONG_VOCABULARY = 4096
PART = 128  # a long vocabulary is cut into parts of this many tokens
# With a long vocabulary a CPU draws the tokens of only 4 rows at a time. Their logits are read
# several times, and those of 4 rows stay in the CPU's cache meanwhile.
ROWS_IN_CACHE = 4


class Pace(NamedTuple):
    """What a kind of device needs to be fast: how rarely the rows change, or the part of the cache
    that they read, because a GPU records its step again after such a change; and how the cache is
    laid out."""
    look: int    # steps between two searches for finished rows
    window: int  # tokens by which the part of the cache that steps read is enlarged at a time
    leave: int   # finished rows are dropped once they are 1 / leave of all rows. They are not
    #              dropped at once, because then the whole cache has to be moved
    slots: int   # the cache begins with room for so many tokens and grows, as most answers end far
    #              below the limit
    blocks: int  # rows share a block of the cache only if there are at least so many blocks. On an
    #              H200, with lab/gpu/kernels.py, 64 rows were fastest with a block each, 256 and
    #              1,024 rows with a block for two


PACE = {"cpu": Pace(4, 4, 8, FIRST_SLOTS, 1), "cuda": Pace(16, 128, 4, 256, 128)}


# an answer's row, its tokens up to a stop token, and which of them were drawn -> the tokens that
# the environment writes then, or None if the answer has ended
Reply = Callable[[int, list[int], list[bool]], list[int] | None]
Seed = int | torch.Generator  # of the random numbers of some answers


class Start(NamedTuple):
    """The position that an answer continues from: after the first `seen` tokens of a prompt."""
    prompt: int
    seen: int
    without: int = -1  # a token that may not come first; -1 is none


@dataclass
class Generation:
    """The sampled tokens, in answer coordinates: index t is the t-th generated token. Log-prob,
    entropy -sum p log p and collision sum p^2 are those at temperature 1, at which training
    computes. Beyond the mask these three are 0, and beyond what is written the tokens are."""
    tokens: Tensor     # (B, T) int64
    mask: Tensor       # (B, T) bool, what the model drew, the stop token included
    finished: Tensor   # (B,) bool, the row ended with a stop token
    log_prob: Tensor   # (B, T) float32
    entropy: Tensor    # (B, T) float32
    collision: Tensor  # (B, T) float32
    written: Tensor    # (B, T) bool, the mask and what an environment wrote

    @classmethod
    def of_tokens(cls, tokens: Tensor, facts: Tensor, limits: Tensor, stop: Tensor) -> "Generation":
        """Cut each row of tokens (B, T) and of facts (3, B, T) after its first stop token, or at
        its limit (B,)."""
        is_stop = torch.isin(tokens, stop)
        stopped_before = is_stop.cumsum(1) > is_stop.long()
        below_limit = torch.arange(tokens.shape[1], device=tokens.device) < limits[:, None]
        mask = below_limit & ~stopped_before
        log_prob, entropy, collision = facts.masked_fill(~mask, 0)
        finished = (is_stop & mask).any(1)
        return cls(tokens * mask, mask, finished, log_prob, entropy, collision, mask)

    @property
    def facts(self) -> Tensor:
        return torch.stack([self.log_prob, self.entropy, self.collision])  # (3, B, T)

    def to(self, device: torch.device | str) -> "Generation":
        return Generation(*(values.to(device, copy=True) for values in vars(self).values()))


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


@dataclass(frozen=True)
class Sampling:
    """Settings: how tokens are drawn, and which tokens end an answer."""
    stop: Tensor     # ids of the stop tokens
    temperature: float
    greedy: bool


@dataclass
class Rows:
    """The R answers that are still growing, in the order of their prompts. Some rows are copies,
    which fill up a block of the cache: they are computed like the others, and nobody reads what
    they draw."""
    answer: Tensor    # (R,) which row of the Generation it is; B for a copy
    prompt: Tensor    # (R,) the number of its prompt, ascending
    seen: Tensor      # (R,) how many tokens of its prompt it sees
    limit: Tensor     # (R,) the most tokens it may have
    token: Tensor     # (R,) the token that was sampled last
    position: Tensor  # (R,) the position of that token
    done: Tensor      # (R,) bool, True for copies


class Decoding:
    """Answers that are being sampled: `prefill` samples the first token of every row, and each
    `step` one more. What is drawn is written into tables of T lines and B + 1 columns: a line for
    each token index, a column for each answer, and the last column for copies. The tables are flat,
    and `line` is where the line of the present token begins."""

    def __init__(self, model: FusedQwen2, rows: Rows, cache: Cache, uniform: Tensor,
                 sampling: Sampling, pace: Pace, waits: bool = False):
        """`waits` is True if rows that have ended a turn are kept, because a reply may follow."""
        B, T = uniform.shape
        self.model, self.rows, self.cache, self.sampling = model, rows, cache, sampling
        self.pace, self.waits = pace, waits
        self.columns = B + 1
        self.line = torch.zeros(1, dtype=torch.long, device=uniform.device)
        self.uniform = F.pad(uniform.t(), (0, 1)).flatten()  # random numbers in [0, 1), a table
        self.tokens = torch.zeros(T * self.columns, dtype=torch.long, device=uniform.device)
        self.facts = torch.zeros(T * self.columns, 3, device=uniform.device)

    def prefill(self, prompts: list[list[int]], without: Tensor | None = None) -> None:
        """Compute each prompt once, keep its keys and values, and sample token 0 of every row.
        `without` (B + 1,) has for each answer a token that may not come first, or -1."""
        rows, device = self.rows, self.uniform.device
        ids, packed = pack(prompts, [], torch.zeros(0, dtype=torch.long))
        ids, packed = send(ids, device), packed.to(device)

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            self.cache.add_prompts(to_rows(kv, packed.prompts), rows.prompt)
            k, v = kv.chunk(2, 1)
            attended = packed(layer, q, k, v)                               # (N, H, head_dim)
            return torch.unflatten(attended, 1, (k.shape[1], -1))           # by key head

        hidden = self.model.hidden(ids, packed.positions, attend)           # (N, D)
        last_seen = packed.prompts[rows.prompt, rows.seen - 1]              # (R,)
        self.sample(hidden[last_seen], None if without is None else without[rows.answer])

    def read(self, fed: list[list[int]], before: Cache, at: Tensor, seen: Tensor) -> None:
        """Like `prefill`, for rows that stand at the places `at` of another cache, where they have
        seen so many tokens of their prompt. `fed` are the tokens that each reads now. All that it
        has read, with these at the end, becomes its prompt."""
        rows, P, device = self.rows, self.cache.P, self.uniform.device
        count = torch.tensor(list(map(len, fed)), device=device)               # (R,)
        row = torch.arange(len(fed), device=device).repeat_interleave(count)   # (N,)
        end = count.cumsum(0)                                                  # (R,)
        within = torch.arange(len(row), device=device) - (end - count)[row]    # (N,)
        first = rows.seen - count                                              # (R,)
        position = first[row] + within                                         # (N,)
        block, column = before.indices(at, seen, P)
        # a fed token sees all tokens up to itself
        latest = first[:, None] + torch.arange(int(count.max()), device=device)  # (R, M)
        unseen = torch.arange(P, device=device) > latest[..., None]              # (R, M, P)
        mask = torch.zeros(unseen.shape, dtype=self.model.dtype, device=device)
        mask = mask.masked_fill_(unseen, float("-inf"))[:, None]
        mask = mask.repeat(1, 1, self.cache.heads, 1)  # for each of a key head's query heads

        def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
            known = before.stored[layer][block, :, column].transpose(1, 2)  # (R, 2 K, P, head_dim)
            known[row, :, position] = kv
            self.cache.add_prompts(known, rows.prompt)
            queries = q.new_zeros(*latest.shape, *q.shape[1:])              # (R, M, H, head_dim)
            queries[row, within] = q
            k, v = known.chunk(2, 1)
            attended = attention(queries.transpose(1, 2), k, v, mask)
            attended = attended.transpose(1, 2)[row, within]                # (N, H, head_dim)
            return torch.unflatten(attended, 1, (k.shape[1], -1))          # by key head

        ids = torch.tensor(sum(fed, []), device=device)
        self.sample(self.model.hidden(ids, position, attend)[end - 1])

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
        """Draw and record the next token of every row, from the state (R, D) that predicts it."""
        logits = self.model.logits(hidden)  # (R, V)
        R, V = logits.shape
        if self.model.has_kernels and without is None:
            from lab.gpu import kernels
            rows, sampling = self.rows, self.sampling
            kernels.draw(logits, self.uniform, self.line, rows.answer, rows.token, self.tokens,
                         self.facts, sampling.temperature, sampling.greedy)
            self.line += self.columns
            return
        size = ROWS_IN_CACHE if V > LONG_VOCABULARY and logits.is_cpu else R
        for start in range(0, R, size):
            self.draw(logits, slice(start, start + size), without)
        self.line += self.columns

    def draw(self, logits: Tensor, some: slice, without: Tensor | None) -> None:
        """Draw and record the next token of some rows, from the logits (R, V) of all rows."""
        rows, sampling, logits = self.rows, self.sampling, logits[some]
        distribution = Distribution(logits)
        # Without the excluded tokens the others keep their proportions. What is recorded are the
        # facts of the whole distribution.
        drawn_from = distribution
        if without is not None:
            every = torch.arange(logits.shape[1], device=logits.device)
            logits = logits.masked_fill(every == without[some, None], float("-inf"))
            drawn_from = Distribution(logits)
        cell = self.line + rows.answer[some]  # in the flat tables
        uniform = self.uniform.index_select(0, cell)
        if sampling.greedy:
            token = logits.argmax(-1)
        else:
            token = drawn_from.pick(uniform, sampling.temperature)
        rows.token[some] = token
        self.tokens.index_copy_(0, cell, token)
        self.facts.index_copy_(0, cell, torch.stack(distribution.facts(token), 1))

    def find_done(self, t: int, count: int) -> None:
        """Mark rows that drew a stop token in the last `count` steps, or reached their limit."""
        rows = self.rows
        drawn = self.tokens.view(-1, self.columns)[t - count:t, rows.answer]  # (count, R)
        rows.done |= torch.isin(drawn, self.sampling.stop).any(0) | (rows.limit <= t)

    def arrange(self, slots: int, written: int) -> None:
        """Drop the rows that are done, if none waits for a reply, and put the others into blocks of
        the cache, with room for `slots` tokens each, of which `written` are there already."""
        is_copy = self.rows.answer == self.columns - 1
        stay = (~(is_copy if self.waits else self.rows.done)).nonzero().squeeze(1)
        _, rows_of_prompt = self.rows.prompt[stay].unique_consecutive(return_counts=True)
        G = rows_of_block(rows_of_prompt.tolist(), self.cache.P, slots, self.pace.blocks)
        row, is_copy = fill_blocks(rows_of_prompt, G)
        self.rows = Rows(*(values[stay[row]] for values in vars(self.rows).values()))
        self.rows.answer[is_copy] = self.columns - 1
        self.rows.done |= is_copy
        self.cache.arrange(stay[row], self.rows.seen, G, slots, written)

    def result(self, limits: Tensor) -> Generation:
        """All that was sampled. limits (B,): the most tokens of each answer."""
        tokens = self.tokens.view(-1, self.columns)[:, :-1].t()                # (B, T)
        facts = self.facts.view(-1, self.columns, 3)[:, :-1].permute(2, 1, 0)  # (3, B, T)
        return Generation.of_tokens(tokens, facts, limits, self.sampling.stop)


def step_until_done(decoding: Decoding, longest: int) -> int:
    """Sample tokens 1 to longest - 1, or stop when every row is done; if rows wait for replies,
    also when enough of them are done. Returns how many tokens each row has."""
    cache, device, pace = decoding.cache, decoding.line.device, decoding.pace
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
        if done == rows or (decoding.waits and 2 * done >= rows):
            break
        count = min(pace.look, longest - t)
        # A step stores the token that it feeds. After count steps these are all but the newest of
        # t + count tokens.
        needed_slots = t + count - 1
        slots = cache.slots
        if needed_slots > slots:  # twice as many, so that it happens rarely
            slots = min(max(needed_slots, 2 * slots), longest - 1)
        if pace.leave * done >= rows or slots > cache.slots:
            decoding.arrange(slots, written=t - 1)
            window = 0
        if needed_slots > window:
            # kernels read what is written, so their step is recorded once for all slots
            by_kernels = decoding.model.has_kernels
            window = cache.slots if by_kernels else min(t + pace.window - 1, cache.slots)
            cache.set_window(window)
            if device.type == "cuda":
                step = recording = Recording(decoding.step, recording)
        for _ in range(count):
            step()
        t += count
    return t


def stream_of(device: torch.device) -> AbstractContextManager[None]:
    """A context in which CUDA's steps can be recorded; elsewhere it does nothing."""
    if device.type != "cuda":
        return nullcontext()
    from lab.gpu.cuda_graph import ready_to_record
    return ready_to_record(device)


def generate(model: Qwen2, prompts: list[list[int]], *, max_new_tokens: int | list[int],
             answers: int = 1, temperature: float = 1.0, greedy: bool = False, seed: Seed = 0,
             stop_ids: tuple[int, ...] | None = None,
             starts: list[Start] | None = None, reply: Reply | None = None) -> Generation:
    """Sample `answers` continuations of every prompt; rows are in the order of the prompts.

    max_new_tokens: one number for all prompts, or one for each
    stop_ids:       tokens that end an answer, by default the model's own
    starts:         positions to continue from, each with `answers` rows, instead of the ends of the
                    prompts; max_new_tokens may have a number for each start
    seed:           that of the random numbers, or a generator that goes on from call to call
    reply:          what an environment writes after a stop token. max_new_tokens counts it, too

    The random numbers for all tokens of all rows are drawn before the first token. So what a row
    samples does not depend on which other rows are still growing.
    """
    starts = starts or [Start(number, len(prompt)) for number, prompt in enumerate(prompts)]
    limits = max_new_tokens
    if isinstance(limits, int):
        limits = [limits] * len(starts)
    most = model.config.max_position_embeddings
    longest = max(start.seen + limit for start, limit in zip(starts, limits, strict=True))
    if longest > most:
        raise UserError(f"prompt and answer can reach {longest} tokens, and the model takes "
                        f"{most}")
    stop_ids = model.config.eos_token_id if stop_ids is None else stop_ids
    # rows that wait go on meanwhile, beyond their limit, and nobody reads what they draw
    most_steps = max(limits) if reply is None else 2 * max(limits)
    fused = FusedQwen2(model, longest=max(map(len, prompts)) + most_steps)
    starts = [start for start in starts for _ in range(answers)]
    limits = [limit for limit in limits for _ in range(answers)]
    # drawn on the CPU, so that they are the same on any device
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    uniform = torch.rand(len(starts), max(limits), generator=generator).to(model.device)
    stop = torch.tensor(stop_ids, dtype=torch.long, device=model.device)
    limit = torch.tensor(limits, device=model.device)
    sampling = Sampling(stop, temperature, greedy)
    with stream_of(model.device), torch.inference_mode():  # cheaper than no_grad
        decoding = begin(fused, prompts, starts, limit, uniform, sampling, reply is not None)
        if reply is None:
            step_until_done(decoding, uniform.shape[1])
        else:
            several = with_replies(decoding, uniform, limits, reply)
    return decoding.result(limit) if reply is None else several.to(model.device)


def begin(model: FusedQwen2, prompts: list[list[int]], starts: list[Start], limits: Tensor,
          uniform: Tensor, sampling: Sampling, waits: bool) -> Decoding:
    """Sample the first token for each start. Only the prompts that the rows continue are computed.
    """
    device = uniform.device
    needed = sorted({start.prompt for start in starts})
    number_of = {prompt: number for number, prompt in enumerate(needed)}
    lines = []  # for each row: answer, prompt, seen
    for row in sorted(range(len(starts)), key=lambda row: starts[row].prompt):
        start = starts[row]
        lines.append((row, number_of[start.prompt], start.seen))
    answer, prompt, seen = torch.tensor(lines, device=device).unbind(1)
    prompts = [prompts[prompt] for prompt in needed]
    decoding = arranged(model, answer, prompt, seen, limits[answer], max(map(len, prompts)),
                        uniform, sampling, waits)
    without = torch.tensor([start.without for start in starts] + [-1], device=device)
    decoding.prefill(prompts, without if (without >= 0).any() else None)
    return decoding


def arranged(model: FusedQwen2, answer: Tensor, prompt: Tensor, seen: Tensor, limit: Tensor, P: int,
             uniform: Tensor, sampling: Sampling, waits: bool) -> Decoding:
    """Rows of which nothing is computed yet. The longest prompt has P tokens."""
    rows = Rows(answer, prompt, seen, limit, token=torch.zeros_like(answer), position=seen - 1,
                done=torch.zeros_like(answer, dtype=torch.bool))
    pace = PACE["cuda" if uniform.device.type == "cuda" else "cpu"]
    cache = Cache(model.config, model.dtype, P, not model.has_kernels)
    decoding = Decoding(model, rows, cache, uniform, sampling, pace, waits)
    decoding.arrange(min(uniform.shape[1] - 1, pace.slots), written=0)
    return decoding


def with_replies(decoding: Decoding, uniform: Tensor, limit: list[int], reply: Reply) -> Generation:
    """Sample the rest of all answers, with what an environment replies. uniform (B, T) has a random
    number for each token, `limit` the most tokens of each answer. The result is on the CPU."""
    B, T = uniform.shape
    tokens = torch.zeros(B, T, dtype=torch.long)
    drawn = torch.zeros(B, T, dtype=torch.bool)
    facts = torch.zeros(3, B, T)
    finished = torch.zeros(B, dtype=torch.bool)
    length = [0] * B
    growing = list(range(B))  # the answer of each row
    while True:
        room = torch.tensor([limit[row] - length[row] for row in growing])
        t = step_until_done(decoding, int(room.max()))
        part = decoding.result(room.clamp(max=t).to(uniform.device)).to("cpu")
        own, facts_of_part = part.mask.sum(1).tolist(), part.facts
        fed = {}  # by their number: the tokens that the rows that go on read next
        for number, row in enumerate(growing):
            # what the model drew
            start, end = length[row], length[row] + own[number]
            tokens[row, start:end] = part.tokens[number, :own[number]]
            facts[:, row, start:end] = facts_of_part[:, number, :own[number]]
            drawn[row, start:end] = True
            # what the environment writes next, as far as there is room for it
            written: list[int] | None = []
            if part.finished[number]:
                written = reply(row, tokens[row, :end].tolist(), drawn[row, :end].tolist())
            finished[row] = written is None
            fitting = (written or [])[:limit[row] - end]
            length[row] = end + len(fitting)
            tokens[row, end:length[row]] = torch.tensor(fitting, dtype=torch.long)
            if written is not None and length[row] < limit[row]:
                fed[number] = [int(tokens[row, end - 1]), *fitting]
        if not fed:
            there = torch.arange(T) < torch.tensor(length)[:, None]
            log_prob, entropy, collision = facts
            return Generation(tokens, drawn, finished, log_prob, entropy, collision, there)
        growing = [growing[number] for number in fed]
        left = [limit[row] - length[row] for row in growing]
        index = torch.tensor(length)[growing, None] + torch.arange(max(left))
        uniform_left = uniform[growing].gather(1, index.clamp(max=T - 1).to(uniform.device))
        decoding = go_on(decoding, own, fed, left, uniform_left)


def go_on(before: Decoding, own: list[int], fed: dict[int, list[int]], left: list[int],
          uniform: Tensor) -> Decoding:
    """Sample the first token after a reply. By their numbers the rows have drawn `own` tokens, and
    those that go on read the tokens `fed`, of which the first is the last that they drew. `left`
    are the most tokens that each may still get."""
    device = uniform.device
    place = torch.zeros(before.columns, dtype=torch.long, device=device)
    place[before.rows.answer] = torch.arange(len(before.rows.answer), device=device)
    at = place[torch.tensor(list(fed), device=device)]
    stored = torch.tensor([own[number] - 1 for number in fed], device=device)
    count = torch.tensor([len(ids) for ids in fed.values()], device=device)
    seen = before.rows.seen[at]
    number = torch.arange(len(fed), device=device)
    decoding = arranged(before.model, number, number, seen + stored + count,
                        torch.tensor(left, device=device), int((seen + stored + count).max()),
                        uniform, before.sampling, waits=True)
    decoding.read(list(fed.values()), before.cache, at, seen)
    return decoding
