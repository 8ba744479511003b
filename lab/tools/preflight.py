"""Will GRPO learn here, and what will it learn instead? Answered untrained.

    python -m lab preflight                                        # models/tiny and Countdown
    python -m lab preflight --model models/Qwen2.5-0.5B-Instruct --task my_task

It samples answers to problems of the task, trains nothing, and ends in one of four verdicts:

    learns                      enough groups have answers with different rewards, because some are
                                right and some are wrong
    learns the form only        the rewards differ, but not because an answer is right
    has a hole that one answer  an answer that is the same for every problem earns nearly as much as
    can use                     the best that was sampled: whether it will be learned is not said
    cannot                      hardly a group has answers with different rewards

All other flags are those of train.py, and mean the training that is planned. Nothing is written.
What a training shows once it has begun, lab diagnose says.
"""
if __name__ == "__main__":
    raise SystemExit("start it with: python -m lab preflight")
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lab.engine.errors import UserError
from lab.engine.methods import CLIP_KINDS
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import Rollouts, has_turns
from lab.engine.tokens import encode_prompt
from lab.harness.flags import Flag, flags_of, read
from lab.harness.tasks import make_task, score_again
from lab.harness.build import load_policy
from lab.harness.screen import show_status
from lab.harness.settings import Settings, make_settings
from lab.tools.helpers.blind import Answers
from lab.tools.helpers.prospects import Findings, Plan, Replies

FEWEST_PROBLEMS = 4
NOT_ASKED = 400  # problems that no model is asked, to try answers on that ignore the problem

FLAGS = {
    "problems": Flag(32, "number of problems that are asked", least=FEWEST_PROBLEMS,
                     most=10_000),
    "answers": Flag(64, "number of answers that are sampled to each", least=4, most=10_000),
    "group": Flag(None, "number of answers in a group of the planned training. By default it is "
                        "that of train.py", kind=int, least=2, most=10_000)}


def main(argv: list[str]) -> None:
    asked: dict[str, Any] = {}  # flags of train.py
    own = read(argv, "python -m lab preflight [flags of train.py, or of this list]", __doc__,
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
    print(find(policy, settings, *sample(policy, settings, own)).in_words())


def sample(policy: Policy, s: Settings, own: SimpleNamespace) -> tuple[list[Answers], Replies]:
    """Sample the answers, to as many problems at once as an update of the training has answers; and
    count the tokens of the environment."""
    problems, found, replies = problems_to_ask(policy, s, own.problems), [], Replies(0, 0, 0)
    at_once = max(1, s.questions * s.answers // own.answers)
    for first in range(0, len(problems), at_once):
        show_status(f"sampled answers to {first} of {len(problems)} problems")
        part = problems[first:first + at_once]
        batch = policy.ask(part, own.answers, derived_seed("preflight", s.seed, first))
        if policy.environment and not first:
            score_again(batch, policy.task, s.task, policy.environment)
        found += [answers_to(batch, policy, group) for group in range(len(part))]
        counted = zip(replies, replies_in(batch, s), strict=True)
        replies = Replies(*(before + more for before, more in counted))
    return found, replies


def replies_in(batch: Rollouts, s: Settings) -> Replies:
    """Whether the loss of this project, as it is now, has a gradient at what an environment wrote:
    every token gets the advantage 1 and the weight 1, as if nothing but the loss left it out."""
    log_prob = batch.log_prob.clone().requires_grad_()
    ones = torch.ones_like(log_prob)
    old = batch.log_prob if s.epochs > 1 else None
    loss = CLIP_KINDS[s.clip_kind](log_prob, ones, ones, batch.mask, int(batch.mask.sum()), old,
                                   (s.clip_low, s.clip_high))
    gradient, = torch.autograd.grad(loss, log_prob)
    foreign = batch.written & ~batch.mask
    return Replies(int(batch.written.sum()), int(foreign.sum()),
                   int((gradient[foreign] != 0).sum()))


def problems_to_ask(policy: Policy, s: Settings, count: int) -> list[Any]:
    """Different problems that training may use; fewer if the task has no more."""
    found: dict[str, Any] = {}
    for step in range(1, 51):
        for problem in policy.task.training_problems(s.seed, step, count):
            found.setdefault(policy.task.show(problem), problem)
        if len(found) >= count:
            break
    if len(found) < FEWEST_PROBLEMS:
        raise UserError(f"the task has {len(found)} different problems for training, and at least "
                        f"{FEWEST_PROBLEMS} are needed: of fewer the answers are learned by heart")
    return list(found.values())[:count]


def answers_to(batch: Rollouts, policy: Policy, group: int) -> Answers:
    """The answers to one problem of a batch."""
    rows = (batch.group == group).nonzero().squeeze(1).tolist()
    columns = {"reward": batch.reward, "right": batch.scores["answer"],
               "format": batch.scores["format"], "finished": batch.finished}
    numbers = {name: [float(column[row]) for row in rows] for name, column in columns.items()}
    return Answers(policy.task.show(batch.problems[group]), [batch.answers[row] for row in rows],
                   turns=[batch.turns[row] for row in rows] if batch.turns else (), **numbers)


def find(policy: Policy, s: Settings, sampled: list[Answers], replies: Replies) -> Findings:
    """All that is computed of the answers, and of problems that were not asked."""
    show_status("trying answers that ignore the problem")
    asked = {one.problem for one in sampled}
    others: dict[str, Any] = {}
    # one text can be tried on any problem; turns depend on what an environment replied to them
    for step in range(1001, 1051) if not has_turns(policy.task) else ():
        for problem in policy.task.training_problems(s.seed, step, NOT_ASKED):
            if policy.task.show(problem) not in asked:
                others.setdefault(policy.task.show(problem), problem)
        if len(others) >= NOT_ASKED:
            break
    plan = Plan(s.questions, s.answers, s.max_new_tokens,
                "examples" in flags_of(type(policy.task.task)) and can_spell(policy, s))
    return Findings(sampled, plan, policy.task, list(others.values())[:NOT_ASKED],
                    replies, unequal=scored_otherwise(policy, s, sampled))


def scored_otherwise(policy: Policy, s: Settings, sampled: list[Answers]) -> int:
    """How many of the answers earn something else when they are scored once more. Sampled answers
    have their rewards in float32."""
    problems = {policy.task.show(problem): problem
                for problem in problems_to_ask(policy, s, len(sampled))}
    return sum(np.float32(policy.task.score(problems[one.problem], given)["reward"]) != reward
               for one in sampled if one.problem in problems
               for given, reward in zip(one.scored, one.reward))


def can_spell(policy: Policy, s: Settings) -> bool:
    """Whether the model's tokenizer can spell a prompt with solved examples."""
    try:
        changed = make_settings({"task": s.task, "model": s.model, "examples": 4})
        task = make_task(changed.task, changed.method_flags)
        text = task.prompt_for(problems_to_ask(policy, s, FEWEST_PROBLEMS)[0])
        encode_prompt(policy.tokenizer, text, "")
        return True
    except UserError:
        return False
