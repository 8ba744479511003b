"""What a game of examples/guess.py is worth, computed: all histories, the value of each to a model,
and the true gradient of the probability of winning.

A history is what the model has read: its guesses, and whether each was too big. With 7 numbers and
3 tries there are 1 + 12 + 102 = 115. A model that has read one draws a guess and then ends its
turn, and the rules say what follows. So the values come out backwards, from the last level on:

    W(history, guess)   after the end of a turn, before the reply: the mean over the secrets that
                        are still possible of 1 if the guess is right, else of the value of the
                        history that follows, which is 0 if no try is left
    Q(history, guess)   after the guess: the probability that the turn ends now, times W
    V(history)          the sum over guesses of their probability times Q

Credit is Q - V at a guess and W - Q at the end of a turn, and luck is what follows minus W.
"""
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lab.engine.rollouts import Rollouts
from lab.engine.model import Qwen2

BIG, SMALL = " big.\n", " small.\n"  # for a chat model it would be a whole turn of the user
History = tuple[tuple[int, bool], ...]  # guesses, counted from 0, and whether they were too big
UNKNOWN = torch.zeros(0)


@dataclass
class Level:
    """The n histories after so many turns. N are the guesses that can follow, S the secrets."""
    histories: list[History]
    possible: Tensor           # (n, S) the probability of each secret, after what was read
    child: Tensor              # (n, N, S) the next level's history; -1 if the game is over
    ids: Tensor                # (n, N, L) the prompt, the history, and a guess
    # filled in by `evaluate`, for a model
    p_guess: Tensor = UNKNOWN  # (n, N) the probability of a guess
    p_end: Tensor = UNKNOWN    # (n, N) the probability that the turn ends after it
    V: Tensor = UNKNOWN        # (n,) the value of a history
    Q: Tensor = UNKNOWN        # (n, N) after a guess
    W: Tensor = UNKNOWN        # (n, N) after the end of the turn
    later: Tensor = UNKNOWN    # (n, N, S) after the reply: of the history that follows

    def logits_of(self, model: Qwen2) -> Tensor:
        """(n, N, 2, vocabulary): those that predict the guess, and those that predict the end of
        the turn. They are computed where the model is, and all that follows on the CPU."""
        ids = self.ids.flatten(0, 1).to(next(model.parameters()).device)
        logits = model(ids)[:, -2:].float().cpu()
        by_guess: Tensor = logits.unflatten(0, self.ids.shape[:2])
        return by_guess


class Place(NamedTuple):
    """A token of an answer in the tree: the one that follows a history, if `guess` is -1, or else
    the one that follows this guess. Guesses are counted from 0."""
    t: int
    depth: int
    history: int
    guess: int
    token: int


class Tree:
    """All histories of the game, and what they are worth to a model. No prompt tells a secret, so
    one stands for all."""

    def __init__(self, prompt: str, highest: int, tries: int, tokenizer: Tokenizer):
        self.N = highest
        self.end = tokenizer.token_to_id("<|im_end|>")
        self.numbers = [tokenizer.encode(f" {number + 1}").ids[0] for number in range(self.N)]
        self.levels: list[Level] = []
        secret = torch.arange(self.N)
        histories: list[History] = [()]
        possible = torch.ones(1, self.N)
        for depth in range(tries):
            ids = torch.tensor([[tokenizer.encode(prompt + written(history) + f" {number + 1}").ids
                                 for number in range(self.N)] for history in histories])
            child = torch.full((len(histories), self.N, self.N), -1)
            later: dict[History, Tensor] = {}
            for h, history in enumerate(histories):
                for guess in range(self.N) if depth < tries - 1 else ():
                    for is_big, fits in ((True, secret < guess), (False, secret > guess)):
                        fits = fits & (possible[h] > 0)
                        if fits.any():
                            following = (*history, (guess, is_big))
                            later[following] = fits.float()
                            child[h, guess, fits] = len(later) - 1
            share = possible / possible.sum(1, keepdim=True)
            self.levels.append(Level(histories, share, child, ids))
            histories = list(later)
            possible = torch.stack(list(later.values())) if later else possible

    def evaluate(self, model: Qwen2) -> "Tree":
        """Compute all values for a model. `success` is the probability of winning."""
        return self.evaluate_from([level.logits_of(model) for level in self.levels])

    def evaluate_from(self, logits: list[Tensor]) -> "Tree":
        """The same from the logits (n, N, 2, vocabulary) of each level: those that predict the
        guess, which are equal for all N, and those that predict the end of the turn."""
        right = torch.eye(self.N)
        value = torch.zeros(0, self.N)  # (n, S) of the level after this one, for each secret
        for level, of_level in zip(reversed(self.levels), reversed(logits)):
            p = of_level.softmax(-1)
            level.p_guess = p[:, 0, 0, self.numbers]                             # (n, N)
            level.p_end = p[:, :, 1, self.end]                                   # (n, N)
            level.later = right.expand(len(p), -1, -1)                           # (n, N, S)
            if len(value):
                following = value[level.child.clamp(min=0), torch.arange(self.N)]
                level.later = torch.where(level.child >= 0, following, level.later)
            value = torch.einsum("ng,ng,ngs->ns", level.p_guess, level.p_end, level.later)
            level.W = torch.einsum("ns,ngs->ng", level.possible, level.later)
            level.Q = level.p_end * level.W
            level.V = (level.p_guess * level.Q).sum(1)
        self.success = self.levels[0].V[0]
        return self

    def places(self, rollouts: Rollouts, row: int) -> Iterator[Place]:
        """The places of the model's tokens, up to the first one that loses the game at once."""
        game: Any = rollouts.problems[int(rollouts.group[row])]
        history, guess, depth = 0, -1, 0
        drawn = rollouts.drawn[row].nonzero().squeeze(1).tolist()
        for t, token in zip(drawn, rollouts.ids[row, drawn].tolist()):
            yield Place(t, depth, history, guess, token)
            if guess < 0 and token in self.numbers:
                guess = self.numbers.index(token)
            elif guess >= 0 and token == self.end:
                child = self.levels[depth].child[history, guess, game.secret - 1]
                history, guess, depth = int(child), -1, depth + 1
            else:
                return

    def values_at(self, place: Place) -> tuple[float, float]:
        """The values before and after the token of a place. After a wrong token it is 0."""
        level, h, g = self.levels[place.depth], place.history, place.guess
        if g < 0:
            is_guess = place.token in self.numbers
            after = level.Q[h, self.numbers.index(place.token)] if is_guess else 0.0
            return float(level.V[h]), float(after)
        return float(level.Q[h, g]), float(level.W[h, g]) if place.token == self.end else 0.0

    def account(self) -> list[tuple[float, float]]:
        """For each turn, the variance that the credit of the guess and of its end contributes to
        the reward, and that of the luck of the reply. All of them add up to V (1 - V)."""
        parts = []
        reach = torch.full((1, self.N), 1 / self.N)                              # (n, S)
        for level, following in zip(self.levels, [*self.levels[1:], None]):
            of_history = reach.sum(1)                                            # (n,)
            guesses = of_history[:, None] * level.p_guess                        # (n, N)
            ends = guesses * level.p_end
            other = of_history * (1 - level.p_guess.sum(1))  # what is no guess ends at the value 0
            credit = ((guesses * (level.Q - level.V[:, None]).square()).sum()
                      + (other * level.V.square()).sum()
                      + (ends * (level.W - level.Q).square()).sum()
                      + ((guesses - ends) * level.Q.square()).sum())
            # each secret of a history comes with its own reply, or with the end of the game
            taken = torch.einsum("ns,ng,ng->ngs", reach, level.p_guess, level.p_end)
            is_over = level.child < 0
            # the value of the history that follows
            known = following.V[level.child.clamp(min=0)] if following else level.later
            luck = (taken * (torch.where(is_over, level.later, known)
                             - level.W[..., None]).square()).sum()
            parts.append((float(credit), float(luck)))
            reach = torch.zeros(int(level.child.max()) + 1, self.N)
            reach.index_put_((level.child[~is_over], torch.arange(self.N).expand_as(taken)[
                ~is_over]), taken[~is_over], accumulate=True)
        return parts


def written(history: History) -> str:
    """The text of an answer with these turns."""
    return "".join(f" {guess + 1}<|im_end|>{BIG if is_big else SMALL}" for guess, is_big in history)


def gradient_of_success(tree: Tree, model: Qwen2) -> tuple[list[Tensor], list[Tensor]]:
    """The true gradient of the probability of winning at the logits of each level, and the
    probabilities that these logits stand for."""
    logits = []
    with torch.no_grad():
        for level in tree.levels:
            logits.append(level.logits_of(model))
    leaves = [of_level.requires_grad_() for of_level in logits]
    gradient = torch.autograd.grad(tree.evaluate_from(leaves).success, leaves)
    return list(gradient), [of_level.detach().softmax(-1) for of_level in leaves]


def estimated_gradient(tree: Tree, p: list[Tensor], batch: Rollouts, weight: Tensor) -> Tensor:
    """What the policy loss of a batch asks for at the same logits, as one long vector: each token
    adds its weight times its advantage times (onehot - p)."""
    found = [torch.zeros_like(of_level) for of_level in p]
    coefficient = (weight * batch.advantage / batch.mask.sum()).cpu()
    for row in range(len(batch.ids)):
        for place in tree.places(batch, row):
            at = (place.history, max(place.guess, 0), int(place.guess >= 0))
            c = coefficient[row, place.t]
            found[place.depth][at] -= c * p[place.depth][at]
            found[place.depth][at][place.token] += c
    return torch.cat([of_level.flatten() for of_level in found])
