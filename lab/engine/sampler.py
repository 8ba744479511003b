"""Sampling answers: every prompt is computed once, and then all answers grow by one token in each
step. This calls `generate` of qwen2_model.py, and adds four arguments:

starts        An answer may continue a sequence from a position within it. The sequence is still
              computed once, and its hidden state at that position predicts the first token. With
              `starts=[Start(1, 5), Start(1, 2, without=7)]` the first row continues sequence 1
              after its first five tokens. The second row sees only two of them, and its first token
              may be any but 7.

reply         After a stop token `reply` is asked what the environment writes, or None if the answer
              has ended. A token of the reply takes the place of the token that would be drawn
              there. With a player who guesses and an environment that says too big or too small,

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
from lab.engine.model import Qwen2, tensors_on
from qwen2_model import Cache

# With a vocabulary longer than this, a CPU draws the tokens of only 4 rows at a time. Their logits
# are read several times, and those of 4 rows stay in the CPU's cache meanwhile.
LONG_VOCABULARY, ROWS_IN_CACHE = 4096, 4

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
    ids: Tensor        # (B, T) int64
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
    """
    starts = starts or [Start(number, len(prompt)) for number, prompt in enumerate(prompts)]
    limits = max_new_tokens
    if isinstance(limits, int):
        limits = [limits] * len(starts)
    stop_ids = model.config.eos_token_id if stop_ids is None else stop_ids
    starts = [start for start in starts for _ in range(answers)]
    limits = [limit for limit in limits for _ in range(answers)]
    # on the CPU, so that the random numbers are the same on any device
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    stop = torch.tensor(stop_ids, dtype=torch.long, device=model.device)
    limit = torch.tensor(limits, device=model.device)

    with torch.inference_mode(), tensors_on(model.device):  # cheaper than no_grad
        found = sample(model, prompts, starts, limit, generator,
                       Sampling(stop, temperature, greedy), reply)
    # copies, because what inference mode has made cannot be used in a computation with gradient
    return Generation(*(values.clone() for values in vars(found).values()))


def sample(model: Qwen2, prompts: list[list[int]], starts: list[Start], limit: Tensor,
           generator: torch.Generator, sampling: Sampling, reply: Reply | None) -> Generation:
    """An answer from each start, by the book's `generate`. limit (B,) has the most tokens of each.
    """
    needed = sorted({start.prompt for start in starts})
    cache = Cache(model.model, [prompts[number] for number in needed],
                  torch.tensor([needed.index(start.prompt) for start in starts]))
    cache.length = torch.tensor([start.seen for start in starts])  # of the prompt, for this row
    first = [torch.tensor([start.without for start in starts])]  # tokens that may not come first

    def choose(logits: Tensor, uniform: Tensor, greedy: bool) -> tuple[Tensor, Tensor]:
        without = first.pop() if first else None
        return draw_rows(logits, uniform, sampling._replace(greedy=greedy), without)

    turns = Turns(limit, reply)
    stop = tuple(sampling.stop.tolist())
    found = qwen2_model.generate(model, prompts, 1, int(limit.max()), stop, generator,
                                 sampling.greedy, cache, choose, turns.follow)
    beyond = turns.replied.shape[1] - found.ids.shape[1]  # the book cuts what no answer reaches
    ids, written, *facts = (F.pad(one, (0, beyond)) for one in found if one.dim() == 2)
    mask = written & (turns.replied < 0)
    log_prob, entropy, collision = (fact.masked_fill(~mask, 0) for fact in facts)
    return Generation(ids, mask, turns.finished, log_prob, entropy, collision, written)


class Turns:
    """What `follow` of the book's `generate` does here: an answer ends at its own limit, and what
    an environment writes takes the place of tokens that were drawn."""

    def __init__(self, limit: Tensor, reply: Reply | None):
        self.limit, self.reply = limit, reply
        self.tokens = torch.zeros(len(limit), int(limit.max()), dtype=torch.long)
        self.replied = torch.full_like(self.tokens, -1)  # tokens of the environment
        self.finished = torch.zeros(len(limit), dtype=torch.bool)  # ended by a stop token
        self.done = torch.zeros_like(self.finished)                # or at their limit

    def follow(self, row: Tensor, t: int, token: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        ends, known = ends & ~self.done[row], 0
        if self.reply:
            is_own = self.replied[row, t] < 0
            token = torch.where(is_own, token, self.replied[row, t])
            self.tokens[row, t] = token
            ends = self.ended(self.reply, row, t, ends & is_own)
        self.finished[row] |= ends
        self.done[row] |= ends | (self.limit[row] <= t + 1)
        if self.reply and not self.done[row].all():
            known = self.known_after(row, t)
        place = slice(t + 1, t + 1 + known)
        self.tokens[row, place] = self.replied[row, place].clamp(min=0)
        return torch.cat([token[:, None], self.tokens[row, place]], 1), self.done[row]

    def ended(self, reply: Reply, row: Tensor, t: int, ends_turn: Tensor) -> Tensor:
        """Ask the environment about each row that ends a turn with its token t, and keep what it
        writes, as far as there is room. Returns which rows' answers have ended."""
        ended = torch.zeros_like(ends_turn)
        for place in ends_turn.nonzero()[:, 0].tolist():
            answer = int(row[place])
            replied = self.replied[answer]
            written = reply(answer, self.tokens[answer, :t + 1].tolist(),
                            (replied[:t + 1] < 0).tolist())
            if written is None:
                ended[place] = True
            else:
                room = replied[t + 1:t + 1 + len(written)]
                room.copy_(torch.tensor(written[:len(room)], dtype=torch.long))
        return ended

    def known_after(self, row: Tensor, t: int) -> int:
        """How many tokens after token t are known in all growing rows, because an environment has
        written them. No row reaches its limit within them."""
        growing = row[~self.done[row]]
        is_known = (self.replied[growing, t + 1:] >= 0).all(0)
        return min(int(is_known.long().cumprod(0).sum()), int(self.limit[growing].min()) - t - 2)


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
    if sampling.temperature == 1 and (without is None or not (without >= 0).any()):
        return token, facts
    drawn_from = logits / sampling.temperature
    if without is not None:  # the other tokens keep their proportions
        every = torch.arange(logits.shape[1], device=logits.device)
        drawn_from.masked_fill_(every == without[:, None], float("-inf"))
    other, _ = qwen2_model.draw(drawn_from, uniform, sampling.greedy)
    # log-probs at temperature 1 differ as logits do
    facts[0] += (logits.gather(1, other[:, None]) - logits.gather(1, token[:, None]))[:, 0]
    return other, facts
