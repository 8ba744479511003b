"""Small batches with random logits, on which a loss is tried.

A `Case` is one such batch. It holds the logits and everything that is designed: the rewards, how
far the new log-probs are from the old ones and from those of the reference model, and the lengths.
`Case.batch` makes of it what the user's loss sees.

Everything per token has one column for each place of a row, the prompt and the padding included:
column j is for the token ids[j].
"""
from dataclasses import dataclass, replace

import torch
from torch import Tensor

WORDS, END, PAD = 9, 9, 10   # ids 0..8 are words
VOCABULARY = 11


@dataclass
class Batch:
    """What the loss sees: B rows of L tokens, each a prompt, an answer and then padding."""
    ids: Tensor                   # (B, L) int64
    prompt_length: Tensor         # (B,) int64
    mask: Tensor                  # (B, L) 1 at the tokens of the answer, its end included
    reward: Tensor                # (B,)
    group: Tensor                 # (B,) int64; the rows of a group lie together
    old_log_prob: Tensor          # (B, L) of the sampled tokens, 0 outside the mask
    reference_log_prob: Tensor    # (B, L) the same under the reference model of a KL term
    end_id: int
    pad_id: int


@dataclass(frozen=True)
class Lens:
    """How a loss reads log-probs: the softmax of logits[t] / temperature, at the token
    ids[t + shift]. The usual lens has temperature 1 and shift 1."""
    temperature: float = 1.0
    shift: int = 1

    def log_probs(self, logits: Tensor, ids: Tensor) -> Tensor:
        """(B, L): column j is for token j. It is 0 where no logits predict the token."""
        value = self.distribution(logits).gather(2, ids[:, :, None]).squeeze(2)
        known = self.to_tokens(torch.ones(ids.shape, dtype=value.dtype)) > 0
        return torch.where(known, value, 0.0)

    def distribution(self, logits: Tensor) -> Tensor:
        """(B, L, V) the log-probs of all tokens; column j is for token j."""
        return self.to_tokens((logits / self.temperature).log_softmax(-1))

    def to_tokens(self, by_place: Tensor) -> Tensor:
        """What stands at the logits of place t moves to the token t + shift."""
        moved = torch.zeros_like(by_place)
        length = by_place.shape[1]
        first, last = max(0, self.shift), length + min(0, self.shift)
        moved[:, first:last] = by_place[:, first - self.shift:last - self.shift]
        return moved

    def to_places(self, by_token: Tensor) -> Tensor:
        """The way back: what belongs to token t + shift moves to place t."""
        return Lens(shift=-self.shift).to_tokens(by_token)


@dataclass(frozen=True)
class Case:
    """A batch as it was designed."""
    logits: Tensor                # (B, L, V) float64
    ids: Tensor
    prompt_length: Tensor
    length: Tensor                # (B,) tokens of the answer
    reward: Tensor
    group: Tensor
    log_ratio: Tensor             # (B, L) new minus old log-prob
    log_reference: Tensor         # (B, L) log-prob of the reference minus the new one
    lens: Lens = Lens()
    fills_zeros: bool = True      # outside the mask, too, the old log-probs are such that the ratio
                                  # is as designed; otherwise they are 0 there, as in a trainer
    late: int = 0                 # the loss takes the old log-prob from so many places before
    reply: tuple[int, int] = (0, 0)  # in each answer an environment wrote from the first of these
                                     # tokens on, and not the second one: the mask has a hole there

    @property
    def mask(self) -> Tensor:
        place = torch.arange(self.ids.shape[1]) - self.prompt_length[:, None]
        first, end = self.reply
        return (place >= 0) & (place < self.length[:, None]) & ((place < first) | (place >= end))

    def batch(self, dtype: torch.dtype = torch.float64) -> Batch:
        log_prob = self.lens.log_probs(self.logits, self.ids)
        shown = self.mask | torch.tensor(self.fills_zeros)
        old = (log_prob - self.log_ratio).roll(-self.late, 1) * shown
        reference = (log_prob + self.log_reference) * shown
        return Batch(self.ids.clone(), self.prompt_length.clone(), self.mask.to(dtype),
                     self.reward.to(dtype, copy=True), self.group.clone(), old.to(dtype),
                     reference.to(dtype), END, PAD)

    def with_reward(self, reward: Tensor) -> "Case":
        return replace(self, reward=reward)

    def moved(self, seed: int, ratio: float = 0.0, reference: float = 0.0) -> "Case":
        """The case with random ratios and references, whose logarithms are at most this large."""
        return replace(self, log_ratio=noise_like(self, seed, ratio),
                       log_reference=noise_like(self, seed + 1, reference))


def make_case(seed: int, groups: int = 4, answers: int = 4, longest: int = 7,
              equal_lengths: bool = False, prompts: tuple[int, int] = (2, 4), spare: int = 1,
              lens: Lens = Lens(), late: int = 0) -> Case:
    """A batch of random logits and tokens, on policy, with rewards between 0 and 1.

    A row is as long as the longest prompt and the longest answer together, and `spare` more. With
    `equal_lengths` all prompts and all answers have the same length, and each answer ends.
    Otherwise a few answers were cut at the limit, and have no end token."""
    draw = torch.Generator().manual_seed(seed)
    B = groups * answers
    group = torch.arange(B) // answers
    low, high = prompts
    prompt_length = torch.randint(low, high + 1, (groups,), generator=draw)[group]
    length = torch.randint(3, longest + 1, (B,), generator=draw)
    length[torch.randperm(B, generator=draw)[:2]] = longest
    if equal_lengths:
        prompt_length, length = torch.full((B,), high), torch.full((B,), longest - 1)
    L = high + longest + spare
    ids = torch.randint(0, WORDS, (B, L), generator=draw)
    for b in range(B):
        stop = int(prompt_length[b] + length[b])
        if length[b] < longest:
            ids[b, stop - 1] = END
        ids[b, stop:] = PAD
    logits = 1.5 * torch.randn(B, L, VOCABULARY, generator=draw, dtype=torch.float64)
    reward = torch.rand(B, generator=draw, dtype=torch.float64)
    zero = torch.zeros(B, L, dtype=torch.float64)
    return Case(logits, ids, prompt_length, length, reward, group, zero, zero, lens, late=late)


def noise_like(case: Case, seed: int, size: float) -> Tensor:
    """(B, L) numbers between -size and size."""
    draw = torch.Generator().manual_seed(seed)
    uniform = torch.rand(case.ids.shape, generator=draw, dtype=torch.float64)
    return (2 * uniform - 1) * size


def has_a_dead_group(case: Case) -> bool:
    """Whether all rewards of a group are equal."""
    return any(len(case.reward[case.group == number].unique()) == 1
               for number in case.group.unique())


def with_a_dead_group(case: Case) -> Case:
    """All rewards of a group are equal."""
    return case.with_reward(torch.where(case.group == 1, .5, case.reward))


def stretched(case: Case, size: float, start: float) -> Case:
    return case.with_reward(start + size * case.reward)


def one_is_another(case: Case) -> list[Case]:
    """One answer is right and all others are wrong; and the other way round."""
    right = (torch.arange(len(case.reward)) == 7).double()
    return [case.with_reward(right), case.with_reward(1 - right)]


def with_other_reward(case: Case) -> Case:
    """The same answers with other rewards. They are no multiple of the first ones in another order,
    which would have the same z-scores."""
    draw = torch.Generator().manual_seed(len(case.reward))
    size = .3 + .7 * torch.rand(len(case.reward), generator=draw, dtype=torch.float64)
    return case.with_reward(case.reward.flip(0).roll(1) * size + .1)
