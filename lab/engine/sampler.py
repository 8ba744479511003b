"""Sampling answers: every prompt is computed once, and then all answers grow by one token in each
step. This is `generate` of qwen2_model.py, for models that are laid out for it (fused.py) and with
four more arguments:

starts        An answer may continue a sequence from a position within it. The sequence is still
              computed once, and its hidden state at that position predicts the first token. With
              `starts=[Start(1, 5), Start(1, 2, without=7)]` the first row continues sequence 1
              after its first five tokens. The second row sees only two of them, and its first token
              may be any but 7.

reply         After a stop token `reply` is asked what the environment writes, or None if the answer
              has ended. A token of the reply takes the place of the token that would be drawn
              there. As long as all rows have such tokens next, the model reads them in one call.
              With a player who guesses and an environment that says too big or too small,

    tokens    4 <|im_end|> big . \\n 2 <|im_end|> small . \\n 3 <|im_end|>
    mask      1     1       0  0  0  1     1        0   0  0  1     1        what the model drew
    written   1     1       1  1  1  1     1        1   1  1  1     1        what is in the answer

temperature   Tokens are drawn at this temperature. Log-prob, entropy and collision are recorded at
              temperature 1, at which training computes.

limits        Each answer may have a limit of its own.
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import qwen2_model
from lab.engine.errors import UserError
from lab.engine.fused import FusedQwen2
from lab.engine.model import Qwen2, attention
from lab.engine.packing import pack, to_rows

# With a vocabulary longer than this, a CPU draws the tokens of only 4 rows at a time. Their logits
# are read several times, and those of 4 rows stay in the CPU's cache meanwhile.
LONG_VOCABULARY, ROWS_IN_CACHE = 4096, 4
FIRST_SLOTS = 64  # room for new tokens that the cache begins with; most answers end far below the
#                   limit

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
    """The sampled tokens: index t is the t-th generated token. Beyond the mask log-prob, entropy
    and collision are 0, and beyond what is written the tokens are."""
    tokens: Tensor     # (B, T) int64
    mask: Tensor       # (B, T) bool, what the model drew, the stop token included
    finished: Tensor   # (B,) bool, the answer ended with a stop token
    log_prob: Tensor   # (B, T) float32
    entropy: Tensor    # (B, T) float32, -sum p log p
    collision: Tensor  # (B, T) float32, sum p^2
    written: Tensor    # (B, T) bool, the mask and what an environment wrote


class Sampling(NamedTuple):
    """Settings: how tokens are drawn, and which tokens end an answer."""
    stop: Tensor  # ids of the stop tokens
    temperature: float
    greedy: bool


class Cache:
    """The keys and values of all earlier tokens, laid out as in qwen2_model.py: a row's prompt is
    in the slots from 0 on, and the row sees `seen` tokens of it. Its new tokens are in the slots
    from P on. A layer has one tensor (R, 2 K, slots, head_dim): K heads of keys, then K of values.
    """

    def __init__(self, seen: Tensor, P: int, dtype: torch.dtype):
        self.seen, self.P, self.dtype = seen, P, dtype
        self.stored: list[Tensor] = []
        self.end = P  # slots in use
        self.new = 1  # how many of them are of the tokens that each row reads now

    def open_slots(self, new: int, most: int) -> None:
        """Make room for some tokens in each row; there will be at most `most` new tokens. If no
        slot is left, double the slots for new tokens."""
        slots = self.stored[0].shape[2]
        self.new = new
        self.end += new
        if self.end > slots:
            wanted = max(slots - self.P, FIRST_SLOTS, self.end - slots)
            more = min(wanted, self.P + most - slots)
            for layer, stored in enumerate(self.stored):
                self.stored[layer] = F.pad(stored, (0, 0, 0, more))
            slot = torch.arange(slots + more, device=self.seen.device)
            is_seen = (slot < self.seen[:, None]) | (slot >= self.P)
            mask = torch.zeros(is_seen.shape, dtype=self.dtype, device=self.seen.device)
            self.mask = mask.masked_fill_(~is_seen, float("-inf"))[:, None, None]

    def attend(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """Store the newest token of each row, kv (R, 2 K, head_dim), and let it see the row. The
        query heads of a key head stand as rows of one query: (R, K, H / K, head_dim)."""
        if self.new > 1:
            return self.attend_to_several(layer, q, kv)
        stored = self.stored[layer]
        stored[:, :, self.end - 1] = kv
        keys, values = stored[:, :, :self.end].chunk(2, 1)
        return F.scaled_dot_product_attention(q.unflatten(1, (keys.shape[1], -1)), keys, values,
                                              self.mask[..., :self.end])

    def attend_to_several(self, layer: int, q: Tensor, kv: Tensor) -> Tensor:
        """The same for the newest M tokens of each row: q (R * M, H, head_dim)."""
        stored, M, first = self.stored[layer], self.new, self.end - self.new
        stored[:, :, first:self.end] = kv.unflatten(0, (-1, M)).transpose(1, 2)
        keys, values = stored[:, :, :self.end].chunk(2, 1)
        is_later = torch.ones(M, self.end, dtype=torch.bool, device=q.device).triu_(first + 1)
        mask = self.mask[..., :self.end].masked_fill(is_later, float("-inf"))  # (R, 1, M, end)
        mask = mask.repeat(1, 1, q.shape[1] // keys.shape[1], 1)
        attended = attention(q.unflatten(0, (-1, M)).transpose(1, 2), keys, values, mask)
        return torch.unflatten(attended.transpose(1, 2).flatten(0, 1), 1, (keys.shape[1], -1))

    def take(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self.seen = self.seen[rows]
        for layer, stored in enumerate(self.stored):
            self.stored[layer] = stored[rows]
        if self.end > self.P:
            self.mask = self.mask[rows]


def generate(model: Qwen2, prompts: list[list[int]], *, max_new_tokens: int | list[int],
             answers: int = 1, temperature: float = 1.0, greedy: bool = False, seed: Seed = 0,
             stop_ids: tuple[int, ...] | None = None,
             starts: list[Start] | None = None, reply: Reply | None = None) -> Generation:
    """Sample `answers` continuations of every prompt; rows are in the order of the prompts.

    max_new_tokens: one number for all prompts, or one for each
    stop_ids:       tokens that end an answer, by default the model's own
    starts:         positions to continue from, each with `answers` rows, instead of the ends of the
                    prompts; max_new_tokens may have a number for each start
    seed:           the seed of the random numbers, or a generator that goes on from call to call
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
    starts = [start for start in starts for _ in range(answers)]
    limits = [limit for limit in limits for _ in range(answers)]
    # drawn on the CPU, so that they are the same on any device
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    uniform = torch.rand(len(starts), max(limits), generator=generator).to(model.device)
    stop = torch.tensor(stop_ids, dtype=torch.long, device=model.device)
    limit = torch.tensor(limits, device=model.device)

    with torch.inference_mode():  # cheaper than no_grad
        found = sample(model, prompts, starts, limit, uniform, Sampling(stop, temperature, greedy),
                       reply)
    # copies, because what inference mode has made cannot be used in a computation with gradient
    return Generation(*(values.clone() for values in vars(found).values()))


def sample(model: Qwen2, prompts: list[list[int]], starts: list[Start], limit: Tensor,
           uniform: Tensor, sampling: Sampling, reply: Reply | None) -> Generation:
    """Sample an answer from each start. limit (B,) has the most tokens of each, uniform (B, T) a
    random number in [0, 1) for each token."""
    B, T = uniform.shape
    fused = FusedQwen2(model, max(*map(len, prompts), *(start.seen + T for start in starts)))
    cache, hidden = read_prompts(fused, prompts, starts)
    without = None  # the tokens that may not come first
    if any(start.without >= 0 for start in starts):
        without = torch.tensor([start.without for start in starts], device=uniform.device)
    tokens = torch.zeros(B, T, dtype=torch.long, device=uniform.device)
    replied = torch.full_like(tokens, -1) if reply else None  # tokens of the environment
    facts = torch.zeros(3, B, T, device=uniform.device)
    length = torch.zeros(B, dtype=torch.long, device=uniform.device)
    finished = torch.zeros(B, dtype=torch.bool, device=uniform.device)
    row = torch.arange(B, device=uniform.device)  # rows of the result that are still growing
    done = finished[row]
    t = 0
    while True:
        token, facts[:, row, t] = draw_rows(fused.logits(hidden), uniform[row, t], sampling,
                                            without if t == 0 else None)
        ends_turn = torch.isin(token, sampling.stop) & ~done
        if replied is not None:
            ends_turn &= replied[row, t] < 0
            token = torch.where(replied[row, t] < 0, token, replied[row, t])
        tokens[row, t] = token
        length[row] += ~done
        if reply and replied is not None:
            ends_turn = ask(reply, row, ends_turn, tokens[:, :t + 1], replied)
        finished[row] |= ends_turn
        done = done | ends_turn | (limit[row] <= t + 1)
        ended = int(done.sum())
        if ended == len(done):
            break
        if 8 * ended >= len(done):  # once an eighth of the rows has ended, drop them
            stay = (~done).nonzero()[:, 0]
            cache.take(stay)
            row, done = row[stay], done[stay]
        count = 1  # tokens that each row reads now
        if replied is not None:
            count += read_at_once(replied[row], ~done, limit[row], t)
            place = slice(t + 1, t + count)
            tokens[row, place] = replied[row, place].clamp(min=0)
            length[row] += (count - 1) * ~done
        positions = (cache.seen + t)[:, None] + torch.arange(count, device=row.device)
        cache.open_slots(count, T - 1)
        hidden = fused.hidden(tokens[row, t:t + count].flatten(), positions.flatten(), cache.attend)
        hidden = hidden[count - 1::count]
        t += count
    written = torch.arange(T, device=row.device) < length[:, None]
    mask = written if replied is None else written & (replied < 0)
    log_prob, entropy, collision = facts.masked_fill(~mask, 0)
    return Generation(tokens * written, mask, finished, log_prob, entropy, collision, written)


def read_prompts(model: FusedQwen2, prompts: list[list[int]], starts: list[Start]
                 ) -> tuple[Cache, Tensor]:
    """Compute each prompt that is needed once. Returns a cache with a row for each start, and the
    state that predicts its first token (B, D)."""
    needed = sorted({start.prompt for start in starts})
    device = model.embeddings.device
    prompt = torch.tensor([needed.index(start.prompt) for start in starts], device=device)
    seen = torch.tensor([start.seen for start in starts], device=device)
    ids, packed = pack([prompts[number] for number in needed], [], torch.zeros(0, dtype=torch.long))
    packed = packed.to(device)
    cache = Cache(seen, packed.prompts.shape[1], model.dtype)

    def attend(layer: int, q: Tensor, kv: Tensor) -> Tensor:
        cache.stored.append(to_rows(kv, packed.prompts)[prompt])
        k, v = kv.chunk(2, 1)
        attended = packed(layer, q, k, v)                                   # (N, H, head_dim)
        return torch.unflatten(attended, 1, (k.shape[1], -1))               # by key head

    hidden = model.hidden(ids.to(device), packed.positions, attend)         # (N, D)
    return cache, hidden[packed.prompts[prompt, seen - 1]]


def ask(reply: Reply, row: Tensor, ends_turn: Tensor, tokens: Tensor, replied: Tensor) -> Tensor:
    """Ask the environment about each row that has just ended a turn, and put what it writes into
    `replied` (B, T), as far as there is room. `tokens` (B, t + 1) are those until now. Returns
    which rows' answers have ended."""
    so_far, ended = tokens.shape[1], torch.zeros_like(ends_turn)
    for place in ends_turn.nonzero()[:, 0].tolist():
        answer = int(row[place])
        drawn = replied[answer, :so_far] < 0
        written = reply(answer, tokens[answer].tolist(), drawn.tolist())
        if written is None:
            ended[place] = True
        else:
            room = replied[answer, so_far:so_far + len(written)]
            room.copy_(torch.tensor(written[:len(room)], dtype=torch.long))
    return ended


def read_at_once(replied: Tensor, growing: Tensor, limit: Tensor, t: int) -> int:
    """How many tokens after token t are known in all growing rows, because an environment has
    written them. replied (R, T), growing (R,), limit (R,). No row reaches its limit within them."""
    is_known = (replied[:, t + 1:] >= 0) | ~growing[:, None]
    known = int(is_known.all(0).long().cumprod(0).sum())
    return min(known, int(limit[growing].min()) - t - 2)


def draw_rows(logits: Tensor, uniform: Tensor, sampling: Sampling, without: Tensor | None
              ) -> tuple[Tensor, Tensor]:
    """A token for each row of logits (R, V), and (3, R) its log-prob, entropy and collision at
    temperature 1. `without` (R,) has a token that may not be drawn, or -1."""
    R, V = logits.shape
    size = ROWS_IN_CACHE if V > LONG_VOCABULARY and logits.is_cpu else R
    found = []
    for start in range(0, R, size):
        some = slice(start, start + size)
        excluded = None if without is None else without[some]
        found.append(draw(logits[some].float(), uniform[some], sampling, excluded))
    tokens, facts = zip(*found)
    return torch.cat(tokens), torch.cat(facts, 1)


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling, without: Tensor | None
         ) -> tuple[Tensor, Tensor]:
    """`draw_rows` for rows whose logits fit into the CPU's cache."""
    token, facts = qwen2_model.draw(logits, uniform, sampling.greedy)
    if sampling.temperature == 1 and without is None:
        return token, facts
    drawn_from = logits / sampling.temperature
    if without is not None:  # the other tokens keep their proportions
        every = torch.arange(logits.shape[1], device=logits.device)
        drawn_from.masked_fill_(every == without[:, None], float("-inf"))
    token, _ = qwen2_model.draw(drawn_from, uniform, sampling.greedy)
    facts[0] = logits.log_softmax(-1).gather(1, token[:, None])[:, 0]
    return token, facts
