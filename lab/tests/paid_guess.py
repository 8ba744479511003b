"""The game of examples/guess.py as a task that pays turns: every guess costs 0.125, the right one
wins 1."""
import dataclasses

from examples import guess

PRICE = 0.125


@dataclasses.dataclass
class Task(guess.Task):
    def score(self, problem, turns):
        of_turns = [float(self.number_in(turn) == problem.secret) - PRICE for turn in turns]
        return {**super().score(problem, turns), "reward": of_turns}
