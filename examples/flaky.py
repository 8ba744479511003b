"""A game that pays each turn, in which all values are known: a tool that fails.

    python examples/flaky.py                                # three traps
    python examples/flaky.py --turns 3 --works 0.6          # in another game
    python examples/flaky.py --advantage turn_mean          # a method beside GRPO

     try<|im_end|> wrong.\\n try<|im_end|> good.\\n take<|im_end|> good.\\n ...

In each turn the player may call a cheap tool (try), which works three times in ten, or a dear one
(take), which always works. Anything else ends the game. When half of the turns have worked, it wins
1. A call is paid for in its own turn: all dear calls that are needed cost 0.6 together, and a cheap
one a tenth of a dear one. So rewards are small and negative, until one is large. Which cheap calls
fail is hidden in the problem.

A history is what was called and what worked. Of each the value is computed: what is paid from there
on, on average. The first call makes a player of 0.1 million parameters in runs/. `--advantage` and
`--mitigation` take any method, as in guess.py. Afterwards `python train.py --model
runs/flaky-8-0.3` trains it with a record.
"""
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

PROJECT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(PROJECT))  # so that it can be started from any folder

import lab.engine  # noqa: F401  before torch, as in one_step.py
import torch
from tokenizers import Tokenizer
from torch import Tensor

from examples import histories
from examples.guess import FLAGS, beside_grpo, judged_by, learn, step_of
from examples.histories import UNKNOWN, Place, estimated_gradient, gradient_of_success
from grpo import centred, group_z_score, rloo
from lab.credit.turns import mt_grpo, turn_mean
from lab.engine.errors import UserError
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.harness.build import build
from lab.harness.flags import option
from lab.harness.flags import read
from lab.harness.record import new_folder
from lab.harness.settings import make_settings
from lab.tools.guesser import Parts, make_player

CHEAP, DEAR, _ = ACTIONS = (" try", " take", " no")
GOOD, WRONG = " good.\n", " wrong.\n"
PRICE = 0.6  # of all dear calls that are needed
ODDS = (0.55, 0.35, 0.1)  # of the actions in half of the turns of the first player's teacher
CALLS = ((0, False), (0, True), (1, True))  # actions, and whether they worked
History = tuple[tuple[int, bool], ...]


class Game(NamedTuple):
    works: tuple[bool, ...]  # whether the cheap tool works, in each turn
    name: str


@dataclass
class Task:
    turns: int = option(8, "how many turns there are", least=1, most=9)
    works: float = option(0.3, "how often the cheap tool works", least=0, most=1)

    solved, rewarded, has_format = "enough calls have worked", "the prize minus prices", False

    def __post_init__(self) -> None:
        self.needed = (self.turns + 1) // 2  # calls that have to work
        self.prices = {CHEAP: 0.1 * PRICE / self.needed, DEAR: PRICE / self.needed}

    def game(self, seed: str) -> Game:
        rng = random.Random(seed)
        return Game(tuple(rng.random() < self.works for _ in range(self.turns)), seed)

    def training_problems(self, seed: int, step: int, count: int) -> list[Game]:
        return [self.game(f"train {seed} {step} {i}") for i in range(count)]

    def held_out_problems(self, count: int) -> list[Game]:
        return [self.game(f"held out {i}") for i in range(count)]

    def extreme_problems(self) -> list[Game]:
        return [Game((False,) * self.turns, "")]

    def prompt_for(self, problem: Game) -> str:
        return f"<|im_start|>user\n {self.turns} {self.needed}<|im_end|>\n<|im_start|>assistant\n"

    def show(self, problem: Game) -> str:
        return f"{''.join('01'[works] for works in problem.works)} in game {problem.name}"

    def good(self, problem: Game, turns: list[str]) -> list[bool]:
        """Whether each turn is a call that worked."""
        return [turn == DEAR or (turn == CHEAP and works)
                for turn, works in zip(turns, problem.works)]

    def reply(self, problem: Game, turns: list[str]) -> str | None:
        good = self.good(problem, turns)
        if turns[-1] not in self.prices or len(turns) == self.turns or sum(good) == self.needed:
            return None
        return GOOD if good[-1] else WRONG

    def redraw(self, problem: Game, turns: list[str], rng: random.Random) -> Game:
        """What cheap calls have told stays, and all else is drawn anew."""
        works = list(self.game(str(rng.random())).works)
        for d, turn in enumerate(turns):
            if turn == CHEAP:
                works[d] = problem.works[d]
        return Game(tuple(works), "redrawn")

    def paid(self, turn: str, wins: bool) -> float:
        return float(wins) - self.prices.get(turn, 0.0)

    def score(self, problem: Game, turns: list[str]) -> dict[str, Any]:
        good = self.good(problem, turns)
        paid = [self.paid(turn, good[d] and sum(good[:d + 1]) == self.needed)
                for d, turn in enumerate(turns)]
        return {"reward": paid, "format": 0.0, "answer": float(sum(good) == self.needed),
                "reasoning": 0.0}

    def label(self, pieces: list[bytes]) -> tuple[list[int], list[int]]:
        return [0] * len(pieces), [0] * len(pieces)

    def tree(self, tokenizer: Tokenizer) -> "Tree":
        return Tree(self, tokenizer)

    def true_credit(self, rollouts: Rollouts, policy: Policy, turn_gets: str) -> Tensor:
        """(B, T): what each token gets from --advantage turn_credit."""
        with torch.no_grad():
            tree = self.tree(policy.tokenizer).evaluate(policy.model)
        found = torch.zeros_like(rollouts.log_prob)
        for row, to_go in enumerate(rollouts.to_go.tolist()):
            places = list(tree.places(rollouts, row))
            # before each turn: the value, and what is paid from there on; and both at the end
            values = [(tree.values_at(place)[0], to_go[place.t])
                      for place in places if place.guess < 0] + [(0.0, 0.0)]
            turn = -1
            for place in places:
                turn += place.guess < 0
                before, after = tree.values_at(place)
                if turn_gets == "with_luck":
                    before, after = values[turn][0], (values[turn][1] - values[turn + 1][1]
                                                      + values[turn + 1][0])
                elif turn_gets == "baseline":
                    before, after = values[turn]
                found[row, place.t] = after - before
        return found


@dataclass
class Level(histories.Level):
    """The n histories after so many turns; the actions stand where guess.py has guesses."""
    good: Tensor = UNKNOWN   # (n,) how many calls have worked
    pays: Tensor = UNKNOWN   # (n, 3, 2) what an action is paid if it fails, and if it works
    after: Tensor = UNKNOWN  # (n, 3, 2) that, and the value of the history that follows


class Tree(histories.Tree):
    """All histories, and what is paid from each of them on, with a model that plays."""
    levels: list[Level]  # type: ignore[assignment]

    def __init__(self, task: Task, tokenizer: Tokenizer):
        self.end, self.levels = tokenizer.token_to_id("<|im_end|>"), []
        self.numbers = [tokenizer.encode(action).ids[0] for action in ACTIONS]
        self.works = torch.tensor([task.works, 1.0, 0.0]).double()
        prompt = task.prompt_for(task.extreme_problems()[0])
        at: list[History] = [()]
        for depth in range(task.turns):
            later: list[History] = []
            ids = torch.tensor([[tokenizer.encode(prompt + written(history) + action).ids
                                 for action in ACTIONS] for history in at])
            good = torch.tensor([sum(works for _, works in history) for history in at])
            child = torch.full((len(at), 3, 2), -1)
            pays = torch.zeros(len(at), 3, 2).double()
            for h, (action, works) in ((h, call) for h in range(len(at)) for call in CALLS):
                wins = bool(works and good[h] + 1 == task.needed)
                pays[h, action, int(works)] = task.paid(ACTIONS[action], wins)
                if not wins and depth + 1 < task.turns:
                    later.append((*at[h], (action, works)))
                    child[h, action, int(works)] = len(later) - 1
            self.levels.append(Level(at, UNKNOWN, child, ids, good=good, pays=pays))
            at = later

    def evaluate_from(self, logits: list[Tensor]) -> "Tree":
        value = torch.zeros(1).double()  # of the level after this one
        for level, of_level in zip(reversed(self.levels), reversed(logits)):
            p = of_level.double().softmax(-1)
            level.p_guess = p[:, 0, 0, self.numbers]                             # (n, 3)
            level.p_end = p[:, :, 1, self.end]                                   # (n, 3)
            following = torch.where(level.child >= 0, value[level.child.clamp(min=0)], 0.0)
            level.after = level.pays + following
            level.W = level.after[..., 0] + self.works * (level.after[..., 1] - level.after[..., 0])
            level.Q = level.p_end * level.W
            level.V = value = (level.p_guess * level.Q).sum(1)
        self.success = self.levels[0].V[0]
        return self

    def places(self, rollouts: Rollouts, row: int) -> Iterator[Place]:
        game: Any = rollouts.problems[int(rollouts.group[row])]
        h, action, depth = 0, -1, 0
        drawn = rollouts.drawn[row].nonzero().squeeze(1).tolist()
        for t, token in zip(drawn, rollouts.ids[row, drawn].tolist()):
            yield Place(t, depth, h, action, token)
            if action < 0 and token in self.numbers:
                action = self.numbers.index(token)
            elif action >= 0 and token == self.end:
                works = action == 1 or (action == 0 and game.works[depth])
                h = int(self.levels[depth].child[h, action, int(works)])
                action, depth = -1, depth + 1
            else:
                return

    def account(self) -> list[tuple[float, float]]:
        """For each turn, the variance that the credit of the call and of its end contributes to the
        reward, and that of the luck of the tool."""
        parts, reach = [], torch.ones(1).double()                                # (n,)
        works = torch.stack([1 - self.works, self.works], -1)                    # (3, 2)
        for level in self.levels:
            calls = reach[:, None] * level.p_guess
            ends = calls * level.p_end
            other = reach * (1 - level.p_guess.sum(1))
            credit = ((calls * (level.Q - level.V[:, None]).square()).sum()
                      + (other * level.V.square()).sum()
                      + (ends * (level.W - level.Q).square()).sum()
                      + ((calls - ends) * level.Q.square()).sum())
            taken = ends[..., None] * works                                      # (n, 3, 2)
            luck = (taken * (level.after - level.W[..., None]).square()).sum()
            parts.append((float(credit), float(luck)))
            goes_on = level.child >= 0
            reach = torch.zeros(int(level.child.max()) + 1).double().index_put_(
                (level.child[goes_on],), taken[goes_on], accumulate=True)
        return parts


def written(history: History) -> str:
    """The text of an answer with these calls."""
    return "".join(f"{ACTIONS[action]}<|im_end|>{GOOD if works else WRONG}"
                   for action, works in history)


def best_actions(task: Task) -> tuple[dict[tuple[int, int], int], float]:
    """The best action by turn and by calls that have worked; and what playing so is worth."""
    value: dict[tuple[int, int], float] = {}
    best = {}
    for d in reversed(range(task.turns)):
        for good in range(task.needed):
            after = 1.0 if good + 1 == task.needed else value.get((d + 1, good + 1), 0.0)
            worth = [chance * after + (1 - chance) * value.get((d + 1, good), 0.0)
                     - task.prices.get(action, 0.0) for action, chance in zip(
                         ACTIONS, (task.works, 1.0))] + [0.0]
            value[d, good] = max(worth)
            best[d, good] = worth.index(max(worth))
    return best, value[0, 0]


def game_of_the_teacher(task: Task, rng: random.Random) -> Parts:
    """The parts of an answer in which half of the turns are the best ones."""
    best, _ = best_actions(task)
    game, turns, parts = task.game(str(rng.random())), list[str](), Parts()
    while True:
        is_best = rng.random() < 0.5
        action = best[len(turns), sum(task.good(game, turns))]
        turns.append(ACTIONS[action] if is_best else rng.choices(ACTIONS, ODDS)[0])
        parts.append((turns[-1] + "<|im_end|>", True))
        reply = task.reply(game, turns)
        if reply is None:
            return parts
        parts.append((reply, False))


def make(folder: Path, task: Task) -> None:
    """A player that has seen games of the teacher."""
    recipe = {"task": "examples.flaky", "turns": task.turns, "works": task.works, "questions": 8,
              "answers": 16, "max_new_tokens": 5 * task.turns + 2, "learning_rate": 0.003,
              "micro_batch": 128, "threads": 1, "steps": 30, "eval_every": 10, "eval_tasks": 400,
              "checkpoint_every": 10}
    rng = random.Random(0)
    torch.set_num_threads(1)
    with new_folder(folder) as unfinished:
        make_player(unfinished, task.prompt_for(task.extreme_problems()[0]),
                    lambda: game_of_the_teacher(task, rng), recipe)


# ------------------------------------------------------------------- the traps


def summed_turns(batch: Rollouts) -> Tensor:
    """Each turn's own reward minus its mean over the answers of the group that reach the turn,
    summed over the turn and the later ones (verl's issue 7244)."""
    return by_turns(batch, batch.paid, centred)


def price_by_turn(batch: Rollouts, score: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The prize compared among all answers, and prices by turn, as in MT-GRPO (2505.11821)."""
    prize = score((batch.paid > 0.5).any(1).float(), batch.group)
    prices = batch.paid - (batch.paid > 0.5).float()
    return prize[:, None] * batch.mask + by_turns(batch, prices, score)


def by_turns(batch: Rollouts, paid: Tensor, score: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    last, total = batch.turn.amax(1), torch.zeros_like(batch.log_prob)
    for d in range(int(last.max()) + 1):
        reaches = last >= d
        own = (paid * (batch.turn == d)).sum(1)
        own[reaches] = score(own[reaches], batch.group[reaches])
        total += own[:, None] * (batch.turn <= d) * reaches[:, None]
    return total * batch.mask


WAYS: dict[str, Callable[[Rollouts], Tensor]] = {
    "the sum of all rewards (rloo)": rloo,
    "what is still to come (turn_mean)": turn_mean,
    "each turn's own, centred, summed (verl 7244)": summed_turns,
    "each turn's own, z-scored, summed (mt_grpo)": mt_grpo,
    "prize by answer, prices by turn": lambda batch: price_by_turn(batch, centred),
    "the same, both as z-scores": lambda batch: price_by_turn(batch, group_z_score)}


def show_ways(parts: Any, s: Any, tree: Tree, batches: int) -> None:
    """What each way of paying turns makes of the same batches of the first model."""
    gradient, p = gradient_of_success(tree, parts.policy.model)
    truth = torch.cat([of_level.flatten() for of_level in gradient])
    played = [step_of(parts, s, step)[0] for step in range(1, batches + 1)]
    tokens = sum(float(batch.mask.sum()) for batch in played) / len(played)
    stop = tree.numbers[2]  # the logit in the first turn
    print(f"\nThe mean gradient of {batches} batches of the first model. A positive number at "
          "stopping means:\nstop more often in the first turn. In truth it is "
          f"{float(truth[stop]) * len(played[0].ids) / tokens:+.4f}.\n")
    for name, way in WAYS.items():
        found = torch.stack([estimated_gradient(tree, p, replace(batch, advantage=way(batch)),
                                                torch.ones_like(batch.log_prob))
                             for batch in played])
        one = judged_by(truth, found)
        print(f"  {name:46} cosine with the truth {one.cosine:+.2f} (+- {one.error:.2f})   at "
              f"stopping {float(found.mean(0)[stop]):+.4f}", flush=True)


OWN_FLAGS = {"pairs": FLAGS["pairs"], "batches": replace(FLAGS["batches"], default=40)}
USAGE = "python examples/flaky.py [flags of train.py, or of this list]"


def main(argv: list[str]) -> None:
    typed: dict[str, str] = {}
    own = read(argv, USAGE, __doc__, OWN_FLAGS, others=typed)
    typed["model"] = typed.get("model") or made_for(typed)
    s = make_settings(typed, beside=OWN_FLAGS)
    plain = replace(s, mitigation="none", advantage="grpo", rescale="mean", placebo="none")
    parts = build(plain, None, {})
    task: Any = parts.policy.task
    with torch.no_grad():
        tree: Tree = task.tree(parts.policy.tokenizer).evaluate(parts.policy.model)
    account = tree.account()
    variance = sum(map(sum, account))
    luck = sum(of_tool for _, of_tool in account) / variance
    print(f"The first player earns {float(tree.success):.3f} on average, the best one "
          f"{best_actions(task)[1]:.3f}. Luck of the tool is {luck:.0%} of the reward's variance:")
    for turn, (of_call, of_tool) in enumerate(account, 1):
        print(f"  turn {turn}   credit of the call {of_call / variance:6.1%}   luck of the tool "
              f"{of_tool / variance:6.1%}")
    if (s.mitigation, s.advantage) != ("none", "grpo"):
        beside_grpo(s, plain, own.pairs, own.batches, "mean reward")
        return
    show_ways(parts, plain, tree, own.batches)
    for flags in ({"advantage": "grpo"}, {"advantage": "gae", "gae_lambda": "0"}):
        print("\nTrained with " + " ".join(f"--{name} {value}" for name, value in flags.items()))
        learn(make_settings(typed | flags), told="the model earns {:.3f} on average")


def made_for(typed: dict[str, str]) -> str:
    """The folder of the player of this game, which is made if it is not there."""
    flags = make_settings({**typed, "task": "examples.flaky"}, beside=OWN_FLAGS).keywords
    task = Task(flags["turns"], flags["works"])
    folder = Path(f"runs/flaky-{task.turns}-{task.works:g}")
    if not folder.exists():
        print(f"Making a player in {folder}", flush=True)
        make(folder, task)
    return str(folder)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        raise SystemExit(f"flaky.py: {error}") from None
