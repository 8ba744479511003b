"""Credit of turns, for answers in which an environment replies to the model (lab/engine/turns.py).

    value before a turn  ->  the model's turn  ->  value  ->  the reply to it  ->  value
                         \\____ credit ____/          \\____ luck ____/

The credit of a turn is what the model added to the reward that can be expected, and the luck is
what the reply added. On average over the replies luck is 0. So a gradient without it is right on
average, and less noisy.

What a reply may be depends on what the problem hides. To a model that has read "4 too big" the
secrets 1, 2 and 3 look the same, so its next guess should be judged by all three, and not by the
one that it happens to be. `Redraw` draws such problems.
"""
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any

import torch
from torch import Tensor

from lab.credit.monte_carlo import Prefix, continuation_rewards
from lab.engine.errors import UserError, location_of, result_of
from lab.engine.methods import Metrics, advantage
from lab.engine.policy import Policy
from lab.engine.rollouts import OF_TURNS, Problem, Rollouts
from qwen2_model import stop_tokens
from lab.engine.declared import Flag
from lab.engine.errors import say

Redraws = Annotated[int, Flag(16, "how many problems are drawn again for each turn of an answer, "
                              "to ask the environment again", least=1, most=10_000)]
Continuations = Annotated[int, Flag(
    0, "how many answers are sampled for each value; with 0 the task has to know its values",
    least=0, most=10_000)]
EVERYTHING = "all answers of the batch"
# what a model has read: its prompt, its turns so far, and the replies to them
Read = tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]

Place = tuple[Prefix, tuple[int, ...]]  # the beginning of an answer, and its edges of turns


class Redraw:
    """Problems that look the same to a model that has read the beginning of an answer: they have
    the same prompt, and the environment's replies would have been the same.

    A task can draw them itself, in a method `redraw(problem, turns, rng)`: another problem whose
    replies to these turns are those of this problem. Otherwise problems of the step are drawn, as
    for training, and those that fit are kept. If none fits, the problem itself stands for them.
    """

    def __init__(self, policy: Policy, rollouts: Rollouts, redraws: int):
        self.policy, self.rollouts, self.redraws = policy, rollouts, redraws
        self.task = task_of(policy)
        seed = int(torch.randint(2 ** 62, (1,), generator=rollouts.generator))
        self.rng = random.Random(seed)
        self.problem_of = [rollouts.problems[group] for group in rollouts.group.tolist()]
        self.fitting: dict[Read, list[Problem]] = {}
        self.alone = 0  # turns for which no other problem was found
        replies: list[list[str]] = []  # of each answer, to all turns but the last
        for problem, turns in zip(self.problem_of, rollouts.turns, strict=True):
            replies.append([self.task.reply(problem, turns[:d]) for d in range(1, len(turns))])
        self.read = [[self.read_before(row, d, replies[row]) for d in range(len(turns))]
                     for row, turns in enumerate(rollouts.turns)]
        # how many answers come to the same place
        self.count = Counter(read for of_answer in self.read for read in of_answer)

    def read_before(self, row: int, d: int, replies: list[str]) -> Read:
        prompt = self.rollouts.prompt_ids[int(self.rollouts.group[row])]
        return tuple(prompt), tuple(self.rollouts.turns[row][:d]), tuple(replies[:d])

    def problems(self, places: list[tuple[int, int]], each: int) -> list[Problem]:
        """Problems that look like those of answers before a turn: places are answers and a turn of
        each, before which all have read the same. There are at most `each` for a place."""
        row, d = places[0]
        if hasattr(self.task, "redraw"):
            turns, read = self.rollouts.turns[row][:d], self.read[row][d]
            return [self.redrawn(self.problem_of[other], turns, read)
                    for other, _ in places for _ in range(each)]
        found = self.that_fit(self.read[row][d])
        self.alone += not found
        count = min(each * len(places), len(found))
        return self.rng.sample(found, count) or [self.problem_of[row]]

    def redrawn(self, problem: Problem, turns: list[str], read: Read) -> Problem:
        """A problem that the task draws itself, after a look at whether it fits."""
        other = result_of(self.task.redraw, "a problem", lambda found: found is not None, problem,
                          list(turns), self.rng)
        wrong = ""
        if self.task.prompt_for(other) != self.task.prompt_for(problem):
            wrong = "has another prompt"
        for d, reply in enumerate(read[2], 1):
            if (found := self.task.reply(other, turns[:d])) != reply:
                wrong = wrong or f"replies {found!r} to the turns {turns[:d]}, and not {reply!r}"
        if wrong:
            raise UserError(
                f"redraw ({location_of(self.task.redraw)}) should return a problem that looks the "
                f"same to a model that has read this far. It returned "
                f"{self.task.show(other)!r} for {self.task.show(problem)!r}, which {wrong}")
        return other

    def that_fit(self, read: Read) -> list[Problem]:
        """Problems of the step that fit what was read, as many as are needed there."""
        if read not in self.fitting:
            prompt, turns, replies = read
            if not turns:
                found = self.drawn.get(prompt, [])
            else:
                before = self.that_fit((prompt, turns[:-1], replies[:-1]))
                found = [other for other in before
                         if self.task.reply(other, list(turns)) == replies[-1]]
            self.fitting[read] = found[:self.redraws * self.count[read]]
        return self.fitting[read]

    @cached_property
    def drawn(self) -> dict[tuple[int, ...], list[Problem]]:
        """Problems of the step by their prompt: so many for each answer of the batch."""
        s = self.policy.settings
        ids_of = {self.task.prompt_for(problem): tuple(ids) for problem, ids in zip(
            self.rollouts.problems, self.rollouts.prompt_ids, strict=True)}
        found: dict[tuple[int, ...], list[Problem]] = defaultdict(list)
        for _ in range(-(-self.redraws * len(self.problem_of) // s.questions)):
            for problem in self.task.training_problems(self.rng.getrandbits(32),
                                                       self.rollouts.step, s.questions):
                if (ids := ids_of.get(self.task.prompt_for(problem))) is not None:
                    found[ids].append(problem)
        return found


def task_of(policy: Policy) -> Any:
    """The task, with the methods that not every task has."""
    return policy.task


def refuse_without_replies(name: str, policy: Policy) -> None:
    """Refuse a task whose answers have one turn, and a batch that was chosen by its rewards."""
    s = policy.settings
    if not hasattr(policy.task, "reply"):
        raise UserError(f"--advantage {name} needs answers of several turns, and --task {s.task} "
                        "has no method reply (docs/reference/turns.md)")
    if s.dynamic_sampling > 1:
        raise UserError(f"--advantage {name} draws problems as training does, and with "
                        "--dynamic_sampling the batch has others: those whose answers differ")


class Worth:
    """What reaching a turn was worth in this batch: the mean, over answers that reach it, of what
    they were paid from there on. If a task pays once, at the end, that is the reward."""

    def __init__(self, rollouts: Rollouts):
        self.group = rollouts.group.tolist()
        self.prompts = [tuple(rollouts.prompt_ids[group]) for group in self.group]
        self.paid = at_turns(rollouts.paid, rollouts.ends_turn)  # for each turn
        self.to_go = at_turns(rollouts.to_go, rollouts.ends_turn)  # for it and the later ones
        # the number of answers that reach a turn, and what they were paid from there on, by what
        # they have in common
        self.reached: dict[tuple[object, int], tuple[int, float]] = defaultdict(lambda: (0, 0.0))
        for row, to_go in enumerate(self.to_go):
            for shared in (self.group[row], self.prompts[row], EVERYTHING):
                for d, value in enumerate(to_go):
                    count, total = self.reached[shared, d]
                    self.reached[shared, d] = count + 1, total + value

    def at(self, row: int, d: int) -> float:
        """A baseline: the mean of the other answers to this prompt that reach turn d, or the latest
        turn before it that one of them reaches."""
        count, total = self.reached[self.prompts[row], d]
        if d < len(self.to_go[row]):
            count, total = count - 1, total - self.to_go[row][d]
        if not count:
            return self.at(row, d - 1) if d else 0.0
        return total / count

    def for_others(self, row: int, d: int) -> float:
        """The same for answers to other problems, those with this prompt if there are any. It knows
        nothing of what this answer's problem hides."""
        own_count, own_total = self.reached[self.group[row], d]
        for shared in (self.prompts[row], EVERYTHING):
            count, total = self.reached[shared, d]
            if count > own_count:
                return (total - own_total) / (count - own_count)
        return self.for_others(row, d - 1) if d else 0.0


def at_turns(values: Tensor, ends: Tensor) -> list[list[float]]:
    """Of each answer the values at the ends of its turns."""
    return [of_answer[at_end].tolist() for of_answer, at_end in zip(values.cpu(), ends.cpu())]


def to_turns(values: Sequence[Sequence[float]], rollouts: Rollouts) -> Tensor:
    """(B, T): each token gets the value of its turn."""
    table = torch.zeros(len(values), max(map(len, values)))
    for row, of_turns in enumerate(values):
        table[row, :len(of_turns)] = torch.tensor(of_turns)
    return table.to(rollouts.mask.device).gather(1, rollouts.turn) * rollouts.mask


@advantage
class without_luck:
    """The reward minus that of other answers, without the luck of the replies. No token is sampled
    for it: only the environment is asked again, for problems that look the same to a model that has
    read this far (`Redraw`).

        G_d       what is paid for turn d and the later ones: the reward, if it is paid at the end
        worth_d   the mean G_d of the other answers to this prompt that reach turn d
        other_d   the same for the answers to other problems
        X_d       what is paid for turn d, and other_{d+1} if the answer goes on
        luck_d    X_d minus its mean over the problems that were drawn again
        A_d       G_d minus worth_d, minus the luck of turn d and of the later ones

    Luck is 0 on average after every turn, whatever number X has where the answer goes on, so the
    gradient is the same on average. The number may only not know what the problem hides: answers to
    the same problem do, so it is taken from others. In poker this is AIVAT (arXiv 1612.06915).
    Where a task hides nothing, A is G_d minus worth_d.

    An answer also ends where max_new_tokens leaves no room behind the reply for another token.
    Redrawn problems are judged by the same rule, each with the length of its own reply.
    """

    def __init__(self, policy: Policy, *, redraws: Redraws = 16):
        refuse_without_replies("without_luck", policy)
        self.redraws, self.metrics = redraws, Metrics()

    def __call__(self, rollouts: Rollouts, policy: Policy) -> Tensor:
        redraw, worth = Redraw(policy, rollouts, self.redraws), Worth(rollouts)
        stop = stop_tokens(policy.model, policy.tokenizer)
        # answers that are equal up to the end of a turn, by (answer, turn). `room` is the number of
        # tokens that the limit leaves for the reply; none if the turn itself was cut off
        equal: dict[tuple[Read, str, int], list[tuple[int, int]]] = defaultdict(list)
        for row, edges in enumerate(edges_of_turns(rollouts)):
            for d, end in enumerate(edges[1::2]):
                has_ended = int(rollouts.ids[row, end - 1]) in stop
                room = policy.settings.max_new_tokens - end if has_ended else 0
                equal[redraw.read[row][d], rollouts.turns[row][d], room].append((row, d))
        luck = [[0.0] * len(turns) for turns in rollouts.turns]
        for (_, _, room), places in equal.items():
            row, d = places[0]
            others = redraw.problems(places, self.redraws)
            paid, going_on = self.after(others, rollouts.turns[row][:d + 1], room, policy,
                                        pays_turns=rollouts.of_turns.dim() > 0)
            for row, d in places:
                is_last = d == len(luck[row]) - 1
                if_it_goes_on = worth.for_others(row, d + 1)
                X = worth.paid[row][d] + (0.0 if is_last else if_it_goes_on)
                luck[row][d] = X - (paid + going_on * if_it_goes_on) / len(others)
        values = []
        for row, to_go in enumerate(worth.to_go):
            values.append([G - worth.at(row, d) - sum(luck[row][d:])
                           for d, G in enumerate(to_go)])
        self.tell(rollouts, luck, redraw)
        return to_turns(values, rollouts)

    def after(self, problems: list[Problem], turns: list[str], room: int, policy: Policy, *,
              pays_turns: bool) -> tuple[float, int]:
        """What these problems pay for the last of these turns, summed, and the number of those for
        which the answer goes on: the reply to it leaves room for a token of the next turn."""
        task = task_of(policy)
        paid, going_on = 0.0, 0
        for problem in problems:
            reply = task.reply(problem, turns) if room else None
            goes_on = reply is not None and tokens_in(reply, policy) < room
            going_on += goes_on
            if pays_turns:
                paid += task.score(problem, turns)[OF_TURNS][-1]
            elif not goes_on:  # the reward is paid at the end
                paid += float(task.score(problem, turns)["reward"])
        return paid, going_on

    def tell(self, rollouts: Rollouts, luck: list[list[float]], redraw: Redraw) -> None:
        """Record the share of the reward's variance that was taken out: 1 minus the variance of
        the reward without luck divided by that of the reward."""
        reward = rollouts.reward.cpu()
        of_answers = torch.tensor([sum(of_turns) for of_turns in luck])
        variance = float(reward.var(correction=0))
        without = float((reward - of_answers).var(correction=0))
        self.metrics["luck_share"] = 1 - without / variance if variance else None
        if redraw.alone and rollouts.step == 1:
            say(f"--advantage without_luck: for {redraw.alone} of "
                f"{sum(map(len, luck))} turns in step 1 no other problem was found that looks "
                "the same. Their replies keep their luck, which is right where nothing is hidden")


def edges_of_turns(rollouts: Rollouts) -> list[list[int]]:
    """Of each answer: where its first turn begins and ends, where the second begins, and so on."""
    edges = []
    for drawn in rollouts.drawn.int():
        steps = torch.nn.functional.pad(drawn, (1, 1)).diff()
        edges.append(steps.nonzero().squeeze(1).tolist())
    return edges


def tokens_in(reply: str, policy: Policy) -> int:
    return len(policy.tokenizer.encode(reply, add_special_tokens=False).ids)


@advantage
class turn_credit:
    """The true credit of each turn: the expected reward after the turn and before the reply to it,
    minus that before the turn. A task may know both (its method `true_credit`, as in
    examples/guess.py). With --continuations each of them is the mean reward of so many sampled
    continuations, for each of which a problem is drawn again that looks the same to a model that
    has read this far (`Redraw`)."""

    def __init__(self, policy: Policy, *, continuations: Continuations = 0):
        if continuations:
            refuse_without_replies("turn_credit", policy)
        elif not hasattr(policy.task, "true_credit"):
            raise UserError("--advantage turn_credit needs a task that knows the true credit of a "
                            f"turn, as examples.guess does: --task {policy.settings.task} has no "
                            "method true_credit. --continuations 4 samples it")
        self.k, self.metrics = continuations, Metrics()

    def __call__(self, rollouts: Rollouts, policy: Policy) -> Tensor:
        if not self.k:
            credit: Tensor = task_of(policy).true_credit(rollouts, policy)
            return credit
        values, self.metrics = redrawn_values(rollouts, policy, self.k)
        return to_turns([[after - before for before, after in of_answer] for of_answer in values],
                        rollouts)


def redrawn_values(rollouts: Rollouts, policy: Policy, k: int
                   ) -> tuple[list[list[tuple[float, float]]], Metrics]:
    """For each turn of each answer its values before and after it, with k continuations each. Those
    of answers that are equal so far are put together."""
    redraw = Redraw(policy, rollouts, k)
    edges = edges_of_turns(rollouts)
    # what the model has read, and where turns began and ended: the places in answers that are
    # equal. The tokens alone do not tell a long reply from a short one and a turn after it
    places: dict[Place, list[tuple[int, int]]] = defaultdict(list)
    first_with: dict[tuple[int, ...], int] = {}  # a group for each prompt
    for row, (group, answer) in enumerate(zip(*rollouts.groups_and_ids, strict=True)):
        prompt = first_with.setdefault(tuple(rollouts.prompt_ids[group]), group)
        for number, edge in enumerate(edges[row]):
            before = tuple(edges[row][:number + 1])
            places[(prompt, tuple(answer[:edge])), before].append((row, number))
    problems: list[Problem] = []
    prompts: list[list[int]] = []
    prefixes: list[Prefix] = []
    owner: list[Place] = []
    for place, equal in places.items():
        (group, ids), _ = place
        others = redraw.problems([(row, number // 2) for row, number in equal], k)
        for i in range(k * len(equal)):
            prefixes.append((len(problems), ids))
            owner.append(place)
            problems.append(others[i % len(others)])
            prompts.append(rollouts.prompt_ids[group])
    imagined = replace(rollouts, problems=problems, prompt_ids=prompts)
    rewards, price = continuation_rewards(policy, imagined, prefixes, 1)
    found: dict[Place, list[float]] = defaultdict(list)
    for place, reward in zip(owner, rewards.flatten().tolist(), strict=True):
        found[place].append(reward)
    at = {}
    for place, equal in places.items():
        mean = sum(found[place]) / len(found[place])
        at.update({edge: mean for edge in equal})
    values = [[(at[row, 2 * d], at[row, 2 * d + 1]) for d in range(len(of_answer) // 2)]
              for row, of_answer in enumerate(edges)]
    return values, price


@advantage
def turn_mean(rollouts: Rollouts) -> Tensor:
    """What is paid from the turn on, minus the mean of that over the other answers to the prompt
    that reach the same turn: a baseline for each turn, which is unbiased. It is the reward that is
    paid, unless a task pays turns."""
    worth = Worth(rollouts)
    return to_turns([[G - worth.at(row, d) for d, G in enumerate(to_go)]
                     for row, to_go in enumerate(worth.to_go)], rollouts)
