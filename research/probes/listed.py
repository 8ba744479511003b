"""Exact credit on a real model: what `python -m research exact --model` measures.

Answers that are short enough have few paths. So all of them that are not too unlikely can be listed
with their probability (tree.py), and V of each prefix is known without Monte Carlo. Measured are

- the share of the reward's variance that each kind of token and each position in the answer
  decides: its squared credit, in expectation over the listed answers;
- the gradient that plain GRPO gives them: abs(A) s, also in expectation. A is the mean over all
  groups of --answers answers that an answer may stand in;
- whether a step follows the credit. A batch is sampled as in training, and one step is made on it:

    push     A s^2, what a token's own term of the loss would do to its log-prob
    change   its log-prob after the step minus before, at the same prefix
    credit   V with the token minus V before it
"""
import json
import math
import re
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from analysis.tokens import TokenTable, table_of_frames
from engine.errors import UserError
from engine.policy import Policy, derived_seed
from engine.tokens import load_tokenizer
from grpo import gradient_size, group_z_score
from harness.load import load_policy
from harness.record import checkpoint_folders, find_folder, replace_text, run_config
from harness.settings import Settings, make_settings
from research.probes.change_batches import ADAMW_STEP, PLAIN_STEP, change_in_a_step, with_groups
from research.probes.common import Findings, Progress, flags_of_model, run_of
from research.probes.decided import sums_of
from research.probes.listed_tables import MeasuredModel, draw_shares, listed_model_tables
from research.probes.tree import Listing, list_answers

MOST_GROUPS = 10 ** 6


def measure_model(args: SimpleNamespace, folder: Path) -> Findings:
    models, config = named_models(args.model), args.config or config_of(args.model)
    progress = Progress(**{name: 1.0 for name in models})
    found: dict[str, MeasuredModel] = {}
    for name, model in models.items():
        policy = load_policy(settings_for(args, model, config))
        found[name] = measure_one(policy, args, lambda share: progress(name, share))
        write_answers(folder / f"{name}.jsonl", policy, found[name].listing)
        del policy  # the next model needs its memory
    draw_shares(found, folder)
    tables = listed_model_tables(found, load_tokenizer(model), args.answers)
    known = min(one.known for one in found.values())
    count = len(found[name].listing.listed)
    kind = "training" if args.training else "held-out"
    intro = [f"For {count} {kind} problems, every answer with a probability of {args.above:g} or "
             f"more was listed. The models are {', '.join(models)}.",
             f"Each model also sampled a batch of {args.answers} answers to each problem. The "
             f"credit of at least {known:.1%} of its tokens is known."]
    values = {name: sums_of(one.tokens, "kind") for name, one in found.items()}
    return Findings("Exact credit on a real model", intro, tables, {"by_model": values})


def named_models(text: str) -> dict[str, Path]:
    """The folders that --model names, separated by commas, by what they are called."""
    models: dict[str, Path] = {}
    for part in text.split(","):
        path = find_folder(part)
        named = models_of_run(path) if is_run_folder(path) else {name_of_model(path): path}
        for name, folder in named.items():
            if not (folder / "config.json").exists():
                raise UserError(f"--model {folder}: there is no model in this folder")
            if models.setdefault(name, folder) != folder:
                raise UserError(f"--model: {models[name]} and {folder} would both be called "
                                f"{name}, so ask for one at a time")
    return models


def name_of_model(path: Path) -> str:
    found = re.fullmatch("step_([0-9]+)", path.name)
    return f"step {int(found[1])}" if found else path.name


def models_of_run(run: Path) -> dict[str, Path]:
    """The model that it began from, the checkpoint in its middle, and its last one."""
    checkpoints = checkpoint_folders(run)
    if not checkpoints:
        raise UserError(f"{run} has no checkpoints: train with --checkpoint_every above 0")
    last = max(checkpoints)
    middle = min(checkpoints, key=lambda step: abs(step - last / 2))
    models = {"untrained": find_folder(run_config(run)["model"])}
    for step in (middle, last):
        models[name_of_model(checkpoints[step])] = checkpoints[step]
    return models


def is_run_folder(path: Path) -> bool:
    return (path / "checkpoints").is_dir() and (path / "config.json").exists()


def config_of(text: str) -> str | None:
    """The settings of the first run among the folders, which has the task and its flags."""
    paths = [find_folder(part) for part in text.split(",")]
    runs = [path if is_run_folder(path) else run_of(path) for path in paths]
    return next((str(run / "config.json") for run in runs if run), None)


def settings_for(args: SimpleNamespace, model: Path, config: str | None) -> Settings:
    """The settings of a model, at temperature 1: a probe asks about the policy itself."""
    of_model = SimpleNamespace(**vars(args) | {"model": str(model), "config": config})
    return make_settings({**flags_of_model(of_model), "answers": args.answers,
                          "dtype": args.dtype})


def measure_one(policy: Policy, args: SimpleNamespace,
                progress: Callable[[float], None]) -> MeasuredModel:
    task = policy.task
    if args.training:
        problems = task.training_problems(args.seed, 1, args.questions)
    else:
        problems = task.held_out_problems(args.questions)
    listing = list_answers(policy, problems, args.above, lambda share: progress(share / 2))
    batch = policy.ask(problems, args.answers, derived_seed("exact", args.seed))
    batch = with_groups(batch, args.answers)
    credit = listing.credit(batch)
    progress(0.6)
    plain_step = change_in_a_step(policy, batch)
    progress(0.8)
    adamw_step = change_in_a_step(policy, batch, is_plain=False)
    progress(1.0)
    known = batch.mask.cpu() & ~credit.isnan()
    s_squared = gradient_size(batch.log_prob, batch.collision).square().double()
    frames = {
        "token_id": batch.ids, "kind": batch.kind, "push": batch.advantage.double() * s_squared,
        "credit 1": credit, "credit 2": credit,  # exact: both halves are the same
        PLAIN_STEP: plain_step, ADAMW_STEP: adamw_step}
    frames = {name: frame.cpu() for name, frame in frames.items()}
    return MeasuredModel(
        listing=listing,
        tokens=listed_tokens(listing, args.answers),
        sampled=table_of_frames(known, batch.group, frames),
        known=float(known.sum() / batch.mask.sum()))


def listed_tokens(listing: Listing, answers: int) -> TokenTable:
    """The tokens of the listed answers. Each counts by its answer's share of the probability."""
    rollouts = listing.rollouts
    tokens = table_of_frames(rollouts.mask, rollouts.group, {
        "kind": rollouts.kind, "s": gradient_size(rollouts.log_prob, rollouts.collision),
        "credit": listing.credit(rollouts)})
    count = listing.share[tokens["answer"]]
    advantage = advantage_sizes(listing, answers)[tokens["answer"]]
    return tokens.having({"count": count, "advantage": count * advantage,
                          "squared credit": count * tokens["credit"] ** 2,
                          "index": tokens["position"]})


def advantage_sizes(listing: Listing, answers: int) -> np.ndarray:
    """(n,) the mean size of plain GRPO's advantage of each listed answer, over the groups that it
    may stand in."""
    reward = listing.rollouts.reward.double().numpy()
    sizes = np.zeros(len(reward))
    for problem in range(len(listing.listed)):
        own = listing.problem == problem
        rewards, which = np.unique(reward[own], return_inverse=True)
        probability = np.bincount(which, listing.share[own])
        sizes[own] = mean_sizes(rewards, probability, answers)[which]
    return sizes


def mean_sizes(rewards: np.ndarray, probability: np.ndarray, answers: int) -> np.ndarray:
    """(m,) the mean abs(A) of an answer with each of m rewards, each of its probability. Every
    group that the other answers may make is listed with its probability, which is multinomial."""
    m, others = len(rewards), answers - 1
    if math.comb(m + others - 1, others) > MOST_GROUPS:
        raise UserError(f"--answers {answers}: the answers to a problem have {m} different "
                        f"rewards, so in a group of {answers} there are more than "
                        f"{MOST_GROUPS:,} combinations of them. Ask for smaller groups")
    groups = torch.tensor(list(combinations_with_replacement(range(m), others)))  # (n, G - 1)
    counts = F.one_hot(groups, m).sum(1).double()  # (n, m)
    log_probability = torch.tensor(probability, dtype=torch.float64).log()
    orders = math.lgamma(answers) - torch.lgamma(counts + 1).sum(1)
    of_group = (orders + counts @ log_probability).exp()
    values, sizes = torch.tensor(rewards), []
    for own in range(m):
        group = torch.cat([torch.full_like(groups[:, :1], own), groups], 1)  # (n, G)
        number = torch.arange(len(group)).repeat_interleave(answers)
        advantage = group_z_score(values[group].flatten(), number).view(group.shape)
        sizes.append(float(of_group @ advantage[:, 0].abs().double()))
    return np.array(sizes)


def write_answers(path: Path, policy: Policy, listing: Listing) -> None:
    """Write a line for each listed answer, the likely ones of a problem first."""
    rollouts, (groups, ids) = listing.rollouts, listing.rollouts.groups_and_ids
    rewards, credit = rollouts.reward.tolist(), listing.credit(rollouts).tolist()
    likely_first = sorted(range(len(ids)), key=lambda row: (groups[row], -listing.probability[row]))
    lines = []
    for row in likely_first:
        problem, answer = groups[row], ids[row]
        values, bounds = [], []
        for t in range(len(answer) + 1):
            prefix = problem, tuple(answer[:t])
            low, high = listing.bounds[prefix]
            values.append(round(listing.value[prefix], 6))
            bounds.append([round(low, 6), round(high, 6)])
        line = {
            "problem": policy.task.show(rollouts.problems[problem]),
            "tokens": rollouts.texts[row],
            "probability": round(listing.probability[row], 6),
            "reward": rewards[row],
            "credit": [round(value, 6) for value in credit[row][:len(answer)]],
            "V": values,
            "bounds": bounds}
        lines.append(json.dumps(line) + "\n")
    replace_text(path, "".join(lines))
