"""Small batches with random logits, on which a loss is tried.

A `Case` is one such batch. It holds the logits and everything that is designed: the rewards, the
lengths, and how far the new log-probs are from the old ones and from those of the reference model.
`Case.batch` makes of it what the user's loss sees.

Everything per token has one column for each place of a row, the prompt and the padding included:
column j is for the token ids[j].
"""
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

WORDS, END, PAD = 9, 9, 10   # ids 0..8 are words
VOCABULARY = 11
REPLY = 3  # tokens that an environment writes between two turns


@dataclass
class Batch:
    """What the loss sees: B rows of L tokens, each a prompt, an answer and then padding."""
    ids: Tensor                   # (B, L) int64
    prompt_length: Tensor         # (B,) int64
    mask: Tensor                  # (B, L) 1 at the tokens of the answer, its end included, and 0 at
                                  # what an environment wrote within it
    reward: Tensor                # (B,)
    group: Tensor                 # (B,) int64; the rows of a group lie together
    old_log_prob: Tensor          # (B, L) of the sampled tokens, 0 outside the mask
    reference_log_prob: Tensor    # (B, L) the same under the reference model of a KL term
    sampler_log_prob: Tensor      # (B, L) the same as the engine that sampled them computed it
    total: Tensor                 # () answer tokens of the whole batch, of which these rows may be
                                  # a micro-batch
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
        return self.distribution(logits).gather(2, ids[:, :, None]).squeeze(2)

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


@dataclass(frozen=True, eq=False)
class Case:
    """A batch as it was designed. It equals only itself, so what was computed of it can be kept."""
    logits: Tensor                # (B, L, V) float64
    ids: Tensor
    prompt_length: Tensor
    mask: Tensor                  # (B, L) bool
    reward: Tensor
    group: Tensor
    log_ratio: Tensor             # (B, L) new minus old log-prob
    log_reference: Tensor         # (B, L) log-prob of the reference minus the new one
    log_sampler: Tensor           # (B, L) old log-prob minus that of the sampler
    lens: Lens = Lens()
    fills_zeros: bool = True      # outside the mask, too, the old log-probs are such that the ratio
                                  # is as designed; otherwise they are 0 there, as in a trainer
    late: int = 0                 # the loss takes the old log-prob from so many places before
    pad: int = PAD                # the id that stands in the padding
    whole: float = 0.0            # answer tokens of the batch of which this one is a part

    def batch(self, dtype: torch.dtype = torch.float64) -> Batch:
        log_prob = self.lens.log_probs(self.logits, self.ids)
        shown = self.mask | torch.tensor(self.fills_zeros)
        old = log_prob - self.log_ratio
        given = [values * shown for values in (
            old.roll(-self.late, 1), log_prob + self.log_reference, old - self.log_sampler)]
        total = torch.tensor(self.whole or self.mask.sum().item(), dtype=dtype)
        return Batch(self.ids.clone(), self.prompt_length.clone(), self.mask.to(dtype),
                     self.reward.to(dtype, copy=True), self.group.clone(),
                     *(values.to(dtype) for values in given), total, END, self.pad)

    def with_reward(self, reward: Tensor) -> "Case":
        return replace(self, reward=reward)

    def moved(self, seed: int, ratio: float = 0.0, reference: float = 0.0,
              sampler: float = 0.0) -> "Case":
        """The case with random ratios, references and samplers, whose logarithms are at most this
        large."""
        return replace(self, log_ratio=noise_like(self, seed, ratio),
                       log_reference=noise_like(self, seed + 1, reference),
                       log_sampler=noise_like(self, seed + 2, sampler))

    def rows(self, kept: Tensor) -> "Case":
        """These rows of the case, in this order."""
        changed = {name: value[kept] for name, value in vars(self).items()
                   if isinstance(value, Tensor)}
        return replace(self, **changed)

    def widened(self, more: int) -> "Case":
        """The case with more places of padding, at which the logits are other ones."""
        def longer(value: Tensor) -> Tensor:
            return torch.cat([value, value[:, :more] * 0], 1)

        by_place = ("mask", "log_ratio", "log_reference", "log_sampler")
        return replace(self, logits=torch.cat([self.logits, self.logits[:, :more]], 1),
                       ids=torch.cat([self.ids, self.ids[:, :more] * 0 + self.pad], 1),
                       **{name: longer(getattr(self, name)) for name in by_place})


@cache
def make_case(seed: int, groups: int = 4, answers: int = 4, longest: int = 7,
              equal_lengths: bool = False, prompts: tuple[int, int] = (2, 4), spare: int = 1,
              sizes: tuple[int, ...] = (), has_turns: bool = False, lens: Lens = Lens(),
              late: int = 0) -> Case:
    """A batch of random logits and tokens, on policy, with rewards between 0 and 1.

    A row is as long as the longest prompt and the longest answer together, and `spare` more. With
    `equal_lengths` all prompts and all answers have the same length, and each answer ends.
    Otherwise a few answers were cut at the limit, and have no end token. Groups have `answers`
    answers each, or as many as `sizes` say. With `has_turns` the answers of a group have 1, 2, 3, 1
    ... turns, and an environment wrote between these."""
    draw = torch.Generator().manual_seed(seed)
    sizes = sizes or (answers,) * groups
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    B, (low, high) = len(group), prompts
    prompt_length = torch.randint(low, high + 1, (len(sizes),), generator=draw)[group]
    length = torch.randint(3, longest + 1, (B,), generator=draw)
    length[torch.randperm(B, generator=draw)[:2]] = longest
    if equal_lengths:
        prompt_length, length = torch.full((B,), high), torch.full((B,), longest - 1)
    is_cut = length == longest
    turns = torch.randint(2, 5, (B, 3), generator=draw)
    if has_turns:
        ends = (turns + REPLY).cumsum(1) - REPLY
        length = ends.gather(1, (torch.arange(B) % 3)[:, None])[:, 0]
    L = high + int(length.max()) + spare
    place = torch.arange(L) - prompt_length[:, None]
    mask = (place >= 0) & (place < length[:, None])
    if has_turns:
        for end in ends.T[:2]:
            mask &= (place < end[:, None]) | (place >= end[:, None] + REPLY)
    ids = torch.randint(0, WORDS, (B, L), generator=draw)
    ids[(place == length[:, None] - 1) & ~is_cut[:, None]] = END
    ids[place >= length[:, None]] = PAD
    logits = 1.5 * torch.randn(B, L, VOCABULARY, generator=draw, dtype=torch.float64)
    reward = torch.rand(B, generator=draw, dtype=torch.float64)
    zero = torch.zeros(B, L, dtype=torch.float64)
    return Case(logits, ids, prompt_length, mask, reward, group, zero, zero, zero, lens, late=late)


def noise_like(case: Case, seed: int, size: float) -> Tensor:
    """(B, L) numbers between -size and size."""
    draw = torch.Generator().manual_seed(seed)
    uniform = torch.rand(case.ids.shape, generator=draw, dtype=torch.float64)
    return (2 * uniform - 1) * size


def with_a_dead_group(case: Case) -> Case:
    """All rewards of a group are equal."""
    return case.with_reward(torch.where(case.group == 1, .5, case.reward))


def stretched(case: Case, size: float, start: float = 0.0) -> Case:
    return case.with_reward(start + size * case.reward)


def mirrored(case: Case) -> Case:
    """The rewards are reflected at the mean of their group, so centred ones change their sign, and
    a std stays."""
    mean = torch.stack([case.reward[case.group == number].mean() for number in case.group])
    return case.with_reward(2 * mean - case.reward)


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
