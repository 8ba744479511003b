"""A game of several turns in which the true credit of every turn is known: guess a number from 1 to
7 in three tries. After each guess the environment says whether it was too big or too small.

    python examples/guess.py                             # a game told, and GRPO: under a minute
    python examples/guess.py --advantage without_luck    # a method beside GRPO: two minutes
    python -m lab train --task examples.guess --model models/guesser    # the same, with its record

     4<|im_end|> big.\n 2<|im_end|> small.\n 3<|im_end|>        an answer when the secret is 3

Read train.py first. New here is `Task.reply`, which makes an answer have several turns. The model
draws the guesses and the ends of turns; the words of the environment are in its context, and in
nothing else: no loss, no weight and no advantage has them.

What the model knows is the history, its guesses and the replies to them. There are 115 histories.
So the probability of winning from each of them, its value, is computed and not sampled (`Tree`),
and what a won game was worth can be taken apart, with nothing left over:

    reward = value of the beginning + credit of each guess + luck of each reply

The credit of a guess is the value after it, before the reply, minus the value before it. The luck
is what the reply then adds. No guess causes the luck, but GRPO pays it to the guesses.

`--advantage NAME` and `--mitigation NAME` take any method of this project, also your own, with its
flags. The gradient that it gives is compared with the true one, and its training with that of GRPO.
"""
import random
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it can be started from any folder

import lab.engine  # noqa: F401  before torch
import torch
from tokenizers import Tokenizer
from torch import Tensor

from lab.analysis.statistics import mean_over
from lab.engine.credited import credited
from lab.engine.errors import UserError
from lab.engine.methods import ADVANTAGES, make, metrics_of
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import Rollouts
from examples.histories import BIG, SMALL, Tree, estimated_gradient, gradient_of_success
from lab.engine.update import update
from lab.harness.flags import Flag, option, read
from lab.harness.build import Parts, build
from lab.harness.screen import python_command
from lab.harness.settings import LabSettings, make_settings


class Game(NamedTuple):
    """A problem. The model does not see the secret, so games with one secret differ in luck alone;
    the name tells held-out games from those that are trained on."""
    secret: int
    name: str


@dataclass
class Task:
    highest: int = option(7, "the secret is a number from 1 to this one", least=2, most=9)
    tries: int = option(3, "how many guesses there are", least=1, most=4)

    solved, rewarded = "the number is guessed", "guessed"

    def training_problems(self, seed: int, step: int, count: int) -> list[Game]:
        rng = random.Random(f"train {seed} {step}")
        return [Game(rng.randint(1, self.highest), f"{seed}.{step}.{i}") for i in range(count)]

    def held_out_problems(self, count: int) -> list[Game]:
        return [Game(1 + i % self.highest, f"held out {i}") for i in range(count)]

    def extreme_problems(self) -> list[Game]:
        return [Game(self.highest, "")]

    def prompt_for(self, problem: Game) -> str:
        return f"<|im_start|>user\n 1 {self.highest}<|im_end|>\n<|im_start|>assistant\n"

    def show(self, problem: Game) -> str:
        return f"the secret {problem.secret} in game {problem.name}"

    def read(self, words: list[str]) -> Game:
        """The game that somebody has typed for lab sample: a secret."""
        if len(words) != 1 or self.number_in(f" {words[0]}") is None:
            raise UserError(f"expected a secret from 1 to {self.highest}")
        return Game(int(words[0]), "typed")

    def reply(self, problem: Game, turns: list[str]) -> str | None:
        """What the environment writes after these turns of the model; None if the game is over. It
        follows from its arguments alone."""
        guess = self.number_in(turns[-1])
        if guess in (None, problem.secret) or len(turns) == self.tries:
            return None
        return BIG if guess > problem.secret else SMALL

    def score(self, problem: Game, turns: list[str]) -> dict[str, float]:
        won = float(self.number_in(turns[-1]) == problem.secret)
        return {"reward": won, "format": 0.0, "answer": won, "reasoning": 0.0}

    def label(self, pieces: list[str]) -> tuple[list[int], list[int]]:
        return [0] * len(pieces), [0] * len(pieces)

    def number_in(self, turn: str) -> int | None:
        """The guess of a turn; None if it is anything else, which loses the game."""
        found = re.fullmatch(r" (\d)", turn)
        return int(found[1]) if found and 1 <= int(found[1]) <= self.highest else None

    def tree(self, tokenizer: Tokenizer) -> Tree:
        prompt = self.prompt_for(self.extreme_problems()[0])
        return Tree(prompt, self.highest, self.tries, tokenizer)

    def true_credit(self, rollouts: Rollouts, policy: Policy) -> Tensor:
        """(B, T): what each token gets from --advantage turn_credit (lab/credit/turns.py), the
        value after the token minus the value before it, where no reply is there yet."""
        with torch.no_grad():
            tree = self.tree(policy.tokenizer).evaluate(policy.model)
        found = torch.zeros_like(rollouts.log_prob)
        for row in range(len(rollouts.ids)):
            for place in tree.places(rollouts, row):
                before, after = tree.values_at(place)
                found[row, place.t] = after - before
        return found


def tree_of(parts: Parts) -> Tree:
    task: Any = parts.policy.task
    tree: Tree = task.tree(parts.policy.tokenizer)
    return tree


def step_of(parts: Parts, s: LabSettings, step: int) -> tuple[Rollouts, Tensor]:
    """The batch of a step and its weights, as train.py makes them."""
    problems = parts.policy.task.training_problems(s.seed, step, s.questions)
    batch = parts.sample(problems, s.answers, derived_seed("train", s.seed, step))
    methods = parts.advantage_method, parts.weighting
    batch, weight, _ = credited(batch, methods, parts.policy, s, step)
    return batch, weight


def judged(s: LabSettings, batches: int) -> str:
    """The gradients that a method gives for batches of the first model, beside the true one. Their
    noise is their variance over the squared length of their mean along the true gradient."""
    parts = build(s, None, {})
    tree = tree_of(parts)
    gradient, p = gradient_of_success(tree, parts.policy.model)
    truth = torch.cat([of_level.flatten() for of_level in gradient])
    found = torch.stack([estimated_gradient(tree, p, *step_of(parts, s, step))
                         for step in range(1, batches + 1)])                 # (batches, P)
    along = found @ truth / truth.norm()
    signal = along.mean()
    noise = (found - found.mean(0)).square().sum(1).mean() * batches / (batches - 1)
    # the square of the mean's length, without what noise adds to it
    length = (found.mean(0).square().sum() - noise / batches).clamp(min=0).sqrt()
    error = 2 * along.std() / batches ** 0.5 / length
    return (f"noise / signal {noise / signal.square():5.2f}, cosine with the truth "
            f"{signal / length:.2f} (+- {error:.2f})")


def learn(s: LabSettings, is_told: bool = False) -> float:
    """Train as train.py does, and return the probability of winning at the end. It can be told on
    the way."""
    parts = build(s, None, {})
    tree = tree_of(parts)
    for step in range(s.steps + 1):
        if step:
            batch, weight = step_of(parts, s, step)
            update(parts.policy.model, parts.optimizer, batch, weight, s, parts.reference)
        if step == s.steps or (is_told and step % 5 == 0):
            with torch.no_grad():
                success = float(tree.evaluate(parts.policy.model).success)
            if is_told:
                print(f"step {step:3}: the model wins {success:.1%} of all games", flush=True)
    return success


def stairs(tree: Tree, batch: Rollouts, row: int) -> list[tuple[str, float, float]]:
    """A game from its value to its reward: for each guess and each reply its name, and the value
    before it and after it. The end of a turn, which is hardly ever in doubt, is part of its guess.
    """
    steps: list[tuple[str, float, float]] = []
    for place in tree.places(batch, row):
        before, after = tree.values_at(place)
        if place.guess >= 0:
            name, first, _ = steps.pop()
            steps.append((name, first, after))
            continue
        if steps:
            steps.append(("reply", steps[-1][2], before))
        guess = tree.numbers.index(place.token) + 1 if place.token in tree.numbers else "none"
        steps.append((f"guess {guess}", before, after))
    return [*steps, ("end", steps[-1][2], float(batch.reward[row]))]


def undeserved(tree: Tree, batch: Rollouts) -> tuple[Any, list[tuple[str, float, float]]]:
    """Of the longest games that were won, the one whose guesses earned the least; and its stairs.
    """
    found = []
    for row, turns in enumerate(batch.turns):
        steps = stairs(tree, batch, row)
        earned = sum(after - before for name, before, after in steps if name.startswith("guess"))
        found.append((float(batch.reward[row]), len(turns), -earned, row))
    row = max(found)[-1]
    return batch.problems[int(batch.group[row])], stairs(tree, batch, row)


def tell(steps: list[tuple[str, float, float]]) -> list[str]:
    lines = [f"  value {steps[0][1]:.3f} before the first guess"]
    for name, before, after in steps:
        what = "credit" if name.startswith("guess") else "luck"
        lines.append(f"  {name:8} {what} {after - before:+.3f}, so the value is {after:.3f}")
    return lines


FLAGS = {
    "pairs": Flag(4, "how many seeds a method is trained with, and plain GRPO beside it", least=2,
                  most=1000),
    "batches": Flag(100, "from how many batches its gradient is judged", least=10, most=100_000)}
USAGE = "python examples/guess.py [flags of lab train, or of this list]"


def main(argv: list[str]) -> None:
    typed: dict[str, str] = {}
    own = read(argv, USAGE, __doc__, FLAGS, others=typed)
    s = make_settings({"model": "models/guesser", **typed}, beside=FLAGS)
    plain = replace(s, mitigation="none", advantage="grpo", rescale="mean", placebo="none")
    parts = build(plain, None, {})
    tree = tree_of(parts)
    batch, _ = step_of(parts, plain, 1)
    with torch.no_grad():
        tree.evaluate(parts.policy.model)
    game, steps = undeserved(tree, batch)
    account = tree.account()
    print(f"A game of the first model; the secret is {game.secret}.")
    print("\n".join(tell(steps)))
    print("\nWhat the reward's variance consists of:")
    variance = float(tree.success * (1 - tree.success))
    for turn, (credit, luck) in enumerate(account, 1):
        print(f"  turn {turn}   credit of the guess {credit / variance:6.1%}   luck of the reply "
              f"{luck / variance:6.1%}")
    method = make(ADVANTAGES["without_luck"], {}, parts.policy)
    method(batch, parts.policy)
    print(f"  As far as it can be seen in {len(batch.ids)} games, without the values: luck "
          f"{metrics_of(method)['luck_share']:.1%} (--advantage without_luck)")
    if (s.mitigation, s.advantage) == ("none", "grpo"):
        print("\nPlain GRPO:")
        learn(s, is_told=True)
        print("\n" + python_command("examples/guess.py", "--advantage", "without_luck")
              + "  takes the luck out; with turn_credit it trains on the true credit")
        return
    beside_grpo(s, plain, own.pairs, own.batches)


def beside_grpo(s: LabSettings, plain: LabSettings, pairs: int, batches: int) -> None:
    """Print how noisy the gradient of a method is, and how often a model wins that it trained."""
    print("\nThe gradient of a batch of the first model:", flush=True)
    name = " and ".join({s.mitigation, s.advantage} - {"none", "grpo"})
    for label, of_method in (("plain GRPO", plain), (name, s)):
        print(f"  {label:16} {judged(of_method, batches)}", flush=True)
    print(f"\nThe probability of winning after {s.steps} steps, by seed:", flush=True)
    gains = []
    for seed in range(s.seed, s.seed + pairs):
        one, other = (learn(replace(each, seed=seed)) for each in (s, plain))
        gains.append(one - other)
        print(f"  seed {seed}   {name} {one:.1%}   plain GRPO {other:.1%}", flush=True)
    gain = mean_over(gains)
    print(f"{name} minus plain GRPO: {100 * gain.value:+.1f} points ({100 * gain.low:+.1f} to "
          f"{100 * gain.high:+.1f}, 95% interval of {len(gains)} pairs)")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        raise SystemExit(f"guess.py: {error}") from None
