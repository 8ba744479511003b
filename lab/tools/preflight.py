"""Will GRPO learn here, and what will it learn instead? Answered untrained.

    python -m lab preflight                                        # models/tiny and Countdown
    python -m lab preflight --model models/Qwen2.5-Coder-0.5B-Instruct --task my_task

It samples answers to problems of the task, trains nothing, and ends in one of six verdicts:

    learns                      enough groups have answers with different rewards, because some are
                                right and some are wrong
    learns the form only        the rewards differ, but not because an answer is right
    has a hole that one answer  an answer that is the same for every problem earns nearly as much as
    can use                     the best that was sampled: whether it will be learned is not said
    cannot                      hardly a group has answers with different rewards
    is too easy                 nearly all answers are right already
    pays by chance              a blank or a word more, and an answer's reward is another: as by a
                                hash

All other flags are those of `lab train`, and mean the training that is planned. Nothing is written,
and the learning rate is not part of the verdict. What a training shows once it has begun, lab
diagnose says. The exit status is 0 if it learns, 1 at another verdict, and 2 if there is none.
"""
import textwrap
from statistics import mean
from typing import Any

import mitigations  # noqa: F401  fills the lists of choices that settings are checked with
from lab.analysis.statistics import Estimate, within
from lab.analysis.tables import WITH_INTERVAL, Row, Table, by_row, shown
from lab.credit.turns import at_turns
from lab.engine.errors import UserError
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import has_turns
from lab.harness.build import load_policy
from lab.harness.flags import Flag, read
from lab.harness.screen import show_status
from lab.harness.settings import LabSettings, make_settings
from lab.harness.tasks import score_again
from lab.tools.prospects import (CANNOT, CHANCE, EASY, FORM, HOLE, LEARNS, Answers, Findings,
                                 best_blind, shown_rule)

FEWEST_PROBLEMS = 4
NOT_ASKED = 400     # problems that no model is asked, to try answers on that ignore the problem
FEWEST_OTHERS = 20  # such problems
SIZES = (2, 4, 8, 16, 32)  # of groups
WITH_MORE = 16      # answers to a problem that are scored again with a blank or a word more
WORD = "so"         # before an answer it leaves what is answered as it is
ENDS = 0.9          # so large a share of answers that end needs no more tokens

FLAGS = {
    "problems": Flag(32, "number of problems that are asked", least=FEWEST_PROBLEMS,
                     most=10_000),
    "answers": Flag(64, "number of answers that are sampled to each", least=4, most=10_000),
    "group": Flag(None, "number of answers in a group of the planned training. By default it is "
                        "that of lab train", kind=int, least=2, most=10_000)}


def main(argv: list[str]) -> int:
    """Print what was found, and return the exit status."""
    asked: dict[str, Any] = {}  # flags of lab train
    own = read(argv, "python -m lab preflight [flags of lab train, or of this list]", __doc__,
               FLAGS, others=asked)
    for name in ("out", "resume", "continue"):
        if name in asked:
            raise UserError(f"--{name} has no effect, because nothing is trained or written")
    planned = asked if own.group is None else {**asked, "answers": own.group}
    settings = make_settings(planned, beside=FLAGS)
    if settings.answers > own.answers:
        raise UserError(f"groups of {settings.answers} answers are planned (--group), and only "
                        f"--answers {own.answers} would be sampled to a problem: sample as many at "
                        "least")
    policy = load_policy(settings)
    found = find(policy, settings, sample(policy, settings, own.problems, own.answers))
    for part in in_words(found, settings):
        print(part if part.startswith("|") else textwrap.fill(part, 100), end="\n\n")
    return int(found.word != LEARNS)


# ------------------------------------------------------------------- the answers


def sample(policy: Policy, s: LabSettings, problems: int, count: int) -> list[Answers]:
    """Answers to different problems of the training, to as many problems at once as an update of
    the training has answers."""
    asked, found, is_fixed = problems_to_ask(policy, s, problems), [], True
    at_once = max(1, s.questions * s.answers // count)
    for first in range(0, len(asked), at_once):
        show_status(f"sampled answers to {first} of {len(asked)} problems")
        part = asked[first:first + at_once]
        batch = policy.ask(part, count, derived_seed("preflight", s.seed, first))
        if is_fixed and not score_again(batch, policy.task, s.task, policy.environment):
            raise UserError("a reward that changes from one scoring to the next cannot be judged")
        pays = batch.of_turns.dim() > 0
        for group, problem in enumerate(part):
            rows = batch.group == group
            columns = (batch.reward, batch.scores["answer"], batch.scores["format"],
                       batch.finished)
            paid = at_turns(batch.of_turns[rows], batch.ends_turn[rows]) if pays else []
            texts = [batch.answers[row] for row in rows.nonzero().flatten().tolist()]
            found.append(Answers(policy.task.show(problem), texts,
                                 *(column[rows].float().tolist() for column in columns), paid))
            if not has_turns(policy.task):
                found[-1].with_more.extend(with_more(policy, problem, found[-1]))
    return found


def with_more(policy: Policy, problem: Any, answers: Answers) -> list[tuple[float, float, float]]:
    """The rewards of different answers, and those with a blank behind or a word before them."""
    rewards = dict(zip(answers.texts, answers.reward))
    return [(reward, *(float(policy.task.score(problem, more)["reward"])
                       for more in (f"{text} ", f"{WORD} {text}")))
            for text, reward in [*rewards.items()][:WITH_MORE]]


def problems_to_ask(policy: Policy, s: LabSettings, count: int) -> list[Any]:
    """Different problems that training may use; fewer if the task has no more."""
    found = different_problems(policy, s, count, range(1, 51))
    if len(found) < FEWEST_PROBLEMS:
        raise UserError(f"the task has {len(found)} different problems for training, and at least "
                        f"{FEWEST_PROBLEMS} are needed: of fewer the answers are learned by heart")
    return found


def different_problems(policy: Policy, s: LabSettings, count: int, steps: range,
                       without: frozenset[str] = frozenset()) -> list[Any]:
    found: dict[str, Any] = {}
    idle = 0  # steps in a row that brought nothing new
    for step in steps:
        before = len(found)
        for problem in policy.task.training_problems(s.seed, step, count):
            if policy.task.show(problem) not in without:
                found.setdefault(policy.task.show(problem), problem)
        idle = 0 if len(found) > before else idle + 1
        if len(found) >= count or idle == 3:  # the task has no more
            break
    return list(found.values())[:count]


def find(policy: Policy, s: LabSettings, sampled: list[Answers]) -> Findings:
    """All that is computed of the answers, and of problems that were not asked."""
    found = Findings(sampled, s.questions, s.answers, knows_success=policy.task.knows_success)
    if has_turns(policy.task):  # what an environment replied is no answer to another problem
        return found
    show_status("trying answers that ignore the problem")
    asked = frozenset(one.problem for one in sampled)
    others = different_problems(policy, s, NOT_ASKED, range(1001, 1051), asked)
    if len(others) >= FEWEST_OTHERS:
        found.blind = best_blind(sampled, others, policy.task.show, policy.task.score)
    return found


# ------------------------------------------------------------------- and in words


def in_words(found: Findings, s: LabSettings) -> list[str]:
    """Success, groups that teach, the form, the best blind answer, and the verdict."""
    average = f"Success: {percent(within(found.mean('right'), 0, 1))} of the answers are right"
    teach = f"{found.living:.1f} of them teach"
    if found.knows_success:
        teach += f", {found.living_by_success:.1f} to be right"
    else:
        average = f"Reward: {shown(found.mean('reward'), '.3f')} on average"
    said = [f"{average}, {found.sampled} answers to each of {len(found.problems)} problems. "
            f"{found.mean('finished').value:.0%} end before the limit of new tokens.",
            "A group teaches only if the rewards of its answers differ:",
            groups_table(found).to_text(),
            f"The planned step has {s.questions} groups of {s.answers}: {teach}."]
    if not found.knows_success:
        said.append("The reward is neither 0 nor 1, and the task does not say which answers are "
                    "right. So it is judged by its reward alone.")
    elif found.form is None:
        said.append("No answer's reward differs from that of another answer to the same problem.")
    else:
        said.append(f"Form: {found.form:.0%} of the rewards' variance within groups lies between "
                    "answers that are equally right. That part teaches the form, and the rest the "
                    "task.")
    if found.knows_success and found.form is not None and found.right_if_formed is not None:
        said[-1] += f" Of the well formed answers {found.right_if_formed:.0%} are right."
    if found.problems[0].paid:
        said.append(about_turns([paid for one in found.problems for paid in one.paid]))
    return [*said, about_blind(found), f"{found.word.upper()}: {reason(found)}"]


def groups_table(found: Findings) -> Table:
    rows: list[Row] = []
    formats = {"size": "d", "teach": ".0%", "right": ".0%"}
    for size in SIZES:
        if size <= found.sampled:
            rows.append([size, found.living_share("reward", size),
                         found.living_share("right", size).value])
    if not found.knows_success:
        rows, formats = [row[:2] for row in rows], {"size": "d", "teach": ".0%"}
    return Table("groups", "", by_row(formats, rows),
                 headings={"size": "group of", "teach": f"rewards differ{WITH_INTERVAL}",
                           "right": "right and wrong answers"})


def about_turns(paid: list[list[float]]) -> str:
    """How many answers reach each turn, and what it is paid on average."""
    said = []
    for d in range(max(map(len, paid))):
        of_turn = [of_answer[d] for of_answer in paid if len(of_answer) > d]
        said.append(f"turn {d + 1} {len(of_turn) / len(paid):.0%} ({mean(of_turn):+.3f})")
    return f"Turns, how often they are reached, and what they are paid then: {', '.join(said)}."


def about_blind(found: Findings) -> str:
    if found.blind is None:
        return ("Without the task: not computed, because the task has too few other problems, or "
                "an environment replies, so that no answer can be tried on another problem.")
    mean = found.mean("reward").value
    return (f"Without the task: a sampled answer earns {mean:.2f} on average. Of answers that are "
            f"the same for every problem the best is {one_answer(found)}. It earns "
            f"{found.blind.reward:.2f}"
            + (f" and is right {found.blind.right:.1%} of the time." if found.knows_success
               else "."))


def one_answer(found: Findings) -> str:
    """The best answer that ignores the problem: a constant text, or a rule over its numbers."""
    shown = " ".join(shown_rule(found.blind.rule).split())
    if not shown:
        return "the empty text"
    if not found.blind.is_rule:
        return f"the constant text `{shown}`"
    return f"the rule `{shown}`, where a, b, ... are the numbers of the problem"


def reason(found: Findings) -> str:
    """Why the verdict is this one."""
    if found.word == EASY:
        right = found.mean("right").value
        return (f"{right:.0%} of the answers are right, so at most {100 * (1 - right):.0f} points "
                "can be gained. Take harder problems.")
    if found.word == CANNOT:
        rows = "Row 3" if found.mean("finished").value >= ENDS else "Rows 3 and 7"
        return (f"in a step {found.living:.2f} groups have answers with different rewards. {rows} "
                f"of docs/reference/how_a_run_fails.md say{'s' * (rows == 'Row 3')} what to try.")
    if found.word == CHANCE:
        return ("an answer's reward says nothing about that of the same answer with a blank behind "
                f"or the word `{WORD}` before it (their correlation is {found.follows_text:+.2f}). "
                "So it does not depend on what an answer says.")
    if found.word == FORM:
        return ("the rewards of a group differ, but hardly ever because one answer is right and "
                "another wrong, or being right is not paid. Rows 3 and 9 of "
                "docs/reference/how_a_run_fails.md say what to try.")
    if found.word == HOLE:
        return (f"{one_answer(found)}, which is the same for every problem, earns "
                f"{found.blind.reward:.2f}, nearly as much as the best sampled answers or more. "
                "What helps is a reward under which it earns less, unless it is what you want to "
                "be learned.")
    if not found.knows_success:
        return (f"in a step {found.living:.1f} groups have answers with different rewards. Begin "
                "with a short run, and see whether the held-out reward rises.")
    if found.living_by_success < found.fewest:
        return (f"the form first: hardly a group has right and wrong answers, but "
                f"{found.right_if_formed:.0%} of the well formed ones are right, and "
                f"{found.mean('right').value:.1%} of all.")
    return (f"in a step {found.living_by_success:.1f} groups have right and wrong answers. Begin "
            "with a short run, and with the same run under --placebo advantages: if the reward is "
            "what teaches, that one does not learn.")


def percent(found: Estimate) -> str:
    return f"{found.value:.0%} ({found.low:.0%} to {found.high:.0%})"
