"""The change of a batch's log-probs in one step: what `python -m research change` measures.

A batch of a finished run is sampled again by the checkpoint before the step. From that model one
step is made on the batch, or on a part of it, and the model is put back. The columns of a batch:

    push, push in groups of 4   A s^2 of plain GRPO, with advantages from groups of all answers to a
                                problem or of 4
    credit 1, credit 2          the credit by each half of its continuations
    each of STEPS               the change of the log-prob in that step; NaN where it was not made
"""
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from analysis.tokens import TokenTable, table_of_frames
from engine.errors import UserError
from engine.model_folder import read_model_folder
from engine.optimizer import AdamW
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts
from grpo import gradient_size, group_z_score, update_with_change
from harness.memory import return_memory
from harness.load import load_policy
from harness.record import checkpoint_folders, run_config, whole
from harness.settings import settings_of_run
from research.publish.results import fingerprint
from research.probes.credit import true_credit

STEP_LENGTH = 0.02  # of a plain step: the limit of the gradient's norm
CERTAIN = 0.01      # where 1 - p is less, credit counts as 0
ALONE = 4           # problems that are trained on alone
SEED_NAME = "became"  # names the random numbers: those of the published result
PUSH, PLAIN_STEP, ADAMW_STEP = "push", "plain step", "AdamW's first"
SMALL_GROUPS, BETTER_ONLY, ONE_PROBLEM = "groups of 4", "better answers only", "one problem alone"
STEPS = (PLAIN_STEP, ADAMW_STEP, SMALL_GROUPS, BETTER_ONLY, ONE_PROBLEM)
SIZES_IN_NAME = ("questions", "answers", "new_tokens", "measured", "continuations")  # of a file


@dataclass
class MeasuredBatch:
    tokens: TokenTable   # of the first problems, so many as are measured
    spent: int           # tokens sampled for their credit


def load_or_measure_batch(run: Path, step: int, flags: dict) -> MeasuredBatch:
    """The batch as it was measured before, or measured now and kept. Its file is named after the
    run's settings, too, so that it is measured again when another run has the folder's name."""
    sizes = "x".join(str(flags[name]) for name in SIZES_IN_NAME)
    settings = fingerprint(run_config(run))[:12]
    path = Path(flags["kept"]) / f"{run.name}-{settings}-{step}-{sizes}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        found = measure_batch(run, step, flags)
        with whole(path) as unfinished, open(unfinished, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, spent=found.spent,
                                **found.tokens.columns)
    with np.load(path, allow_pickle=False) as file:
        columns = dict(file)
    spent = int(columns.pop("spent"))
    return MeasuredBatch(TokenTable(columns), spent)


def measure_batch(run: Path, step: int, flags: dict) -> MeasuredBatch:
    torch.set_num_threads(flags["threads"] or 1)
    policy = policy_before(run, step, flags)
    s = policy.settings
    problems = policy.task.training_problems(s.seed, step, s.questions)
    rollouts = policy.ask(problems, s.answers, derived_seed("train", s.seed, step))
    generator = torch.Generator().manual_seed(derived_seed(SEED_NAME, s.seed, step))
    rollouts = with_groups(replace(rollouts, step=step, generator=generator), s.answers)
    measured = rollouts.mask & (rollouts.group < flags["measured"])[:, None]

    credit, spent = torch.zeros(2, *rollouts.mask.shape), 0
    if flags["continuations"]:
        found = true_credit(policy, rollouts, flags["continuations"], certain=CERTAIN, parts=2,
                            wanted=measured)
        credit, spent = found.parts, found.spent
    s_squared = gradient_size(rollouts.log_prob, rollouts.collision).square().double()
    in_groups_of_4 = with_groups(rollouts, 4).advantage.double()
    frames = {
        "token_id": rollouts.ids, "kind": rollouts.kind,
        "push": rollouts.advantage.double() * s_squared,
        "push in groups of 4": in_groups_of_4 * s_squared,
        "credit 1": credit[0], "credit 2": credit[1],
        **changes(policy, rollouts)}
    return MeasuredBatch(table_of_frames(measured, rollouts.group, frames), spent)


def policy_before(run: Path, step: int, flags: dict) -> Policy:
    """The model that sampled this step, at temperature 1."""
    asked = {"temperature": 1.0, "questions": flags["questions"], "answers": flags["answers"]}
    if flags["new_tokens"]:
        asked["max_new_tokens"] = flags["new_tokens"]
    return load_policy(settings_of_run(run, **asked), sampled_by(run, step))


def sampled_by(run: Path, step: int) -> Path | None:
    """The checkpoint whose model sampled this step; None is the model that the run began with."""
    run_config(run)  # an error where this is no run
    if step == 1:
        return None
    checkpoints = checkpoint_folders(run)
    if step - 1 not in checkpoints:
        raise UserError(f"{run} has no checkpoint of step {step - 1}, whose model sampled step "
                        f"{step}; it has {', '.join(map(str, checkpoints)) or 'none'}")
    return checkpoints[step - 1]


def with_groups(rollouts: Rollouts, size: int) -> Rollouts:
    """The batch with plain GRPO's advantages from groups of so many answers to one problem."""
    group = torch.arange(len(rollouts.group), device=rollouts.group.device) // size
    advantage = group_z_score(rollouts.reward, group)[:, None] * rollouts.mask
    return replace(rollouts, advantage=advantage)


def changes(policy: Policy, rollouts: Rollouts) -> dict[str, torch.Tensor]:
    """(B, T) for each of STEPS: the change of each log-prob in that step, from the same model."""
    better_only = replace(rollouts, advantage=rollouts.advantage.clamp(min=0))
    some_problems = range(min(ALONE, len(rollouts.prompt_ids)))
    return {
        PLAIN_STEP: change_in_a_step(policy, rollouts),
        ADAMW_STEP: change_in_a_step(policy, rollouts, is_plain=False),
        SMALL_GROUPS: change_in_a_step(policy, with_groups(rollouts, 4)),
        BETTER_ONLY: change_in_a_step(policy, better_only),
        ONE_PROBLEM: change_alone(policy, rollouts, some_problems)}


def change_alone(policy: Policy, rollouts: Rollouts, problems: Iterable[int]) -> torch.Tensor:
    """(B, T): the change at the answers to each of these problems in a step on them alone; NaN at
    all others."""
    change = torch.full(rollouts.mask.shape, float("nan"))
    for problem in problems:
        alone = range(problem, problem + 1)
        change[rollouts.rows_of(alone)] = change_in_a_step(policy, rollouts.of_problems(alone))
    return change


def change_in_a_step(policy: Policy, batch: Rollouts, is_plain: bool = True) -> torch.Tensor:
    """(B, T): each token's log-prob after a step on the batch minus before. The step is one of
    plain gradient descent, or AdamW's first. The model is put back."""
    model, s = policy.model, policy.settings
    if is_plain:
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        s = replace(s, max_grad_norm=STEP_LENGTH)
    else:
        optimizer = AdamW(model.parameters(), s.learning_rate)
    _, columns = update_with_change(model, optimizer, batch, batch.mask.float(), s)
    optimizer.zero_grad()
    del optimizer  # a large model has no room for a second copy beside its state and gradient
    return_memory()
    model.load_state_dict(read_model_folder(policy.folder, "cpu").state_dict())
    return columns["change"]
