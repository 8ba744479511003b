"""Which baseline may a turn have? A game in which the usual one pays for stopping, computed.

    python examples/stopping.py      # two seconds

The game is that of guess.py. In every turn the model may also stop, and does so one time in five,
for a small pay. Going on pays nothing now, but it may pay later. Does the advantage of a turn know
this?

Give a turn the sum, from there to the end of its answer, of each turn's reward minus its mean over
the answers that reach this turn. (verl's issue 7244 is about this.) Write S_d for the probability
that turn d is reached, and mu_d for its mean reward there. The expected reward is the sum of
S_d mu_d, so

    the true gradient             is the sum of   S_d grad mu_d  +  mu_d grad S_d
    what the summed turns give    is the sum of   S_d grad mu_d

The second part is what going on earns, since going on is how a later turn is reached. It is missing
because the sum of an answer that stops just ends: it is compared with no answer that goes on. One
term mends this, the worth of going on: what answers that reach the next turn earn from there on.
"""
import sys
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it can be started from any folder

import lab.engine  # noqa: F401  before torch, as in one_step.py
import torch
from torch import Tensor

from examples.guess import Task
from examples.histories import Tree
from lab.harness.build import load_policy
from lab.harness.settings import make_settings

STOPS = 0.2  # how often the model stops, in every turn


class Game(NamedTuple):
    name: str
    stop: float        # what stopping pays
    guess: float = 0.0  # what a guess pays, beside the 1 of a right one


GAMES = (Game("stopping pays 0", 0.0), Game("stopping pays 0.3", 0.3),
         Game("stopping pays 0.3, a guess costs 0.1", 0.3, -0.1), Game("stopping pays 0.5", 0.5))


def logits_of(tree: Tree) -> list[Tensor]:
    """For each turn (n, N + 2): the log-probabilities of N guesses, of anything that is no guess,
    which ends the game, and of a stop, after each of the n histories."""
    found = []
    for level in tree.levels:
        guesses = (level.p_guess * level.p_end).double()
        no_guess = 1 - guesses.sum(1, keepdim=True)
        stop = torch.full_like(no_guess, STOPS)
        p = torch.cat([(1 - STOPS) * guesses, (1 - STOPS) * no_guess, stop], 1)
        found.append(p.clamp(min=1e-12).log())
    return found


def by_turn(tree: Tree, game: Game, logits: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """S_d and mu_d of each turn."""
    found = []
    reach = torch.full((1, tree.N), 1 / tree.N, dtype=torch.double)   # (n, secrets)
    for level, of_level in zip(tree.levels, logits, strict=True):
        p = of_level.softmax(-1)                                      # (n, N + 2)
        taken = reach[:, None] * p[:, :tree.N, None]                  # (n, guesses, secrets)
        stopped = reach.sum(1) * p[:, -1]                             # (n,)
        right = taken.diagonal(dim1=1, dim2=2).sum()
        earned = right + game.guess * taken.sum() + game.stop * stopped.sum()
        found.append((reach.sum(), earned / reach.sum()))
        goes_on = level.child >= 0
        secret = torch.arange(tree.N).expand_as(taken)[goes_on]
        after = torch.zeros(int(level.child.max()) + 1, tree.N, dtype=torch.double)
        reach = after.index_put((level.child[goes_on], secret), taken[goes_on], accumulate=True)
    return found


def expected_gradients(tree: Tree, game: Game) -> dict[str, list[Tensor]]:
    """The true gradient at the logits of each turn, and what two sums of turns give on average."""
    logits = [of_level.requires_grad_() for of_level in logits_of(tree)]
    turns = by_turn(tree, game, logits)
    expected = torch.stack([S * mu for S, mu in turns]).sum()
    # what answers that reach a turn earn from there on, on average
    worth = [sum(S * mu for S, mu in turns[d:]) / turns[d][0] for d in range(len(turns))]
    summed, with_worth = torch.zeros(()), torch.zeros(())
    for d, (S, mu) in enumerate(turns):
        # a turn's reward minus a baseline, in all answers that reach the turn
        summed = summed + S * mu - S * mu.detach()
        with_worth = with_worth + S * mu - S * worth[d].detach()
        if d + 1 < len(turns):
            # and what going on is worth, in all answers that go on
            with_worth = with_worth + turns[d + 1][0] * worth[d + 1].detach()
    return {name: list(torch.autograd.grad(total, logits, retain_graph=True))
            for name, total in (("the truth", expected), ("summed turns", summed),
                                ("with the worth of going on", with_worth))}


def cosine(found: list[Tensor], truth: list[Tensor]) -> float:
    one, other = (torch.cat([part.flatten() for part in whole]) for whole in (found, truth))
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


def main() -> None:
    policy = load_policy(make_settings({"model": "models/guesser"}))
    tree = Task().tree(policy.tokenizer)
    with torch.no_grad():
        tree.evaluate(policy.model)
    print("The expected gradient, from which a step begins. A positive number at the logit of "
          "stopping\nin the first turn means: stop more often.\n")
    for game in GAMES:
        print(game.name)
        gradients = expected_gradients(tree, game)
        for name, found in gradients.items():
            print(f"  {name:27} cosine with the truth {cosine(found, gradients['the truth']):+.2f}"
                  f"   at stopping {float(found[0][0, -1]):+.4f}")


if __name__ == "__main__":
    main()
