"""Given, became, earned: does what a step does to the tokens follow what they earned?

    python -m research became --runs runs/none-grpo-s0,runs/none-grpo-s1 --steps 1,51,101

Every answer gets one number, and no token keeps what it is given: tokens share weights, so each is
moved by all others. Of batches of finished runs, sampled again by the checkpoint before each step:

    given    A s^2: what a token's own gradient at the logits would make of its log-prob
    became   the change of its log-prob in one step: of plain gradient descent, or AdamW's first
    earned   its credit, V(after) - V(before), by Monte Carlo

Shares are of sums of sizes. The size of the credit is its value from one half of its continuations
times its sign from the other half, and its variance a product of halves, so that noise adds
nothing. By type: correlation of sums with their sign. Intervals: jackknife over problems.

Then worlds in which all is exact (research/dial/world.py): the cosine of what becomes of each
context and symbol with its credit, and the share of what is given that equal tokens in equal
contexts cancel among each other.
"""
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from analysis.statistics import Estimate, jackknife
from analysis.tables import Table, by_row
from credit.measured import chain, probability_of_others, deviations
from engine.optimizer import AdamW
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts
from engine.tokens import KINDS, load_tokenizer
from grpo import gradient_size, group_z_score, update_with_change
from harness.memory import return_memory
from harness.record import checkpoint_folders, whole
from harness.load import load_policy
from harness.flags import Flag
from harness.settings import make_settings
from qwen2_model import Qwen2
from research.dial.arms import EXACT, PLAIN, TRUE, arm_of
from research.dial.training import by_context, gradients, random_numbers
from research.dial.world import Dials, World
from research.experiments.published import table_rows
from research.probes.common import COMMON, Findings, rank_correlation

WORLDS = ("128/3", "128/12", "128/42", "128/128", "512/12", "512/48", "512/170", "512/48 own",
          "128/42 own", "512/48 sure 4", "512/48 sure 6", "128/12 found")  # no context is a prefix
FLAGS = {
    **COMMON,
    "runs": Flag(None, "folders of runs of plain GRPO, separated by commas"),
    "steps": Flag("1,51,101", "whose batches are sampled again, each by the checkpoint before it"),
    "questions": Flag(16, "problems of a batch", least=1, most=1000),
    "answers": Flag(16, "answers to each of them", least=4, most=1000),
    "new_tokens": Flag(0, "most tokens of an answer; 0 is what the run had", least=0, most=10_000),
    "measured": Flag(8, "problems whose credit is measured, and of whose tokens is told",
                     least=2, most=1000),
    "continuations": Flag(8, "behind the credit of a token that is a free choice; 0 leaves the "
                             "credit out", least=0, most=1000),
    "kept": Flag("results/became-batches", "folder of what was measured of each batch: the same "
                 "command goes on from there"),
    "processes": Flag(1, "batches that are measured at a time", least=1, most=64),
    "batches": Flag(16, "of each world; 0 leaves the worlds out", least=0, most=1000)}
LENGTH = 0.02    # of a plain step
SURE = 0.01      # where 1 - p is less, credit counts as 0
COMMON_TYPE = 20  # tokens of one type, in each run
TYPES = 6        # that are shown
ALONE = 4        # problems that are trained on alone
SHOWN = ("word", "number", "operator")
SMALL, POSITIVE, ONE = "groups of 4", "better answers only", "one problem alone"
ARMS = ("given", "plain step", "AdamW's first", SMALL, POSITIVE, ONE)


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    runs = [Path(run) for run in args.runs.split(",")] if args.runs else []
    units = [(run, int(step), vars(args)) for step in args.steps.split(",") for run in runs]
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        found = list(pool.map(batch_of, *zip(*units))) if units else []
    stages = {step: [one for (_, of, _), one in zip(units, found) if of == step]
              for step in dict.fromkeys(step for _, step, _ in units)}
    tables = [kinds_table(stages), arms_table(stages), types_table(stages, load_tokenizer(runs[0]))
              ] if units else []
    tables += [worlds_table(args)] if args.batches else []
    intro = [f"{len(units)} batches of {args.questions} x {args.answers} answers, "
             f"{sum(int(one['spent']) for one in found):,} tokens sampled for their credit."]
    return Findings("Given, became, earned", intro, tables)


def batch_of(run: Path, step: int, flags: dict) -> dict[str, np.ndarray]:
    sizes = "x".join(str(flags[name]) for name in ("questions", "answers", "new_tokens",
                                                   "measured", "continuations"))
    path = Path(flags["kept"]) / f"{run.name}-{step}-{sizes}.npz"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        found = measure_batch(run, step, flags)
        with whole(path) as unfinished, open(unfinished, "wb") as file:
            np.savez_compressed(file, allow_pickle=False, **found)
    return dict(np.load(path))


def measure_batch(run: Path, step: int, flags: dict) -> dict[str, np.ndarray]:
    """Of one batch: columns, a value a token; what became of them by arm."""
    torch.set_num_threads(flags["threads"] or 1)
    s = make_settings({"config": str(run / "config.json"), "temperature": 1.0,
                       "questions": flags["questions"], "answers": flags["answers"],
                       **({"max_new_tokens": flags["new_tokens"]} if flags["new_tokens"] else {})})
    folder = checkpoint_folders(run)[step - 1] if step > 1 else None
    policy = load_policy(s, folder)
    problems = policy.task.training_problems(s.seed, step, s.questions)
    rollouts = policy.ask(problems, s.answers, derived_seed("train", s.seed, step))
    generator = torch.Generator().manual_seed(derived_seed("became", s.seed, step))
    rollouts = with_groups(replace(rollouts, step=step, generator=generator), s.answers)
    mask, k = rollouts.mask, flags["continuations"]
    measured = mask & (rollouts.group < flags["measured"])[:, None]
    credit, spent = torch.zeros(2, *mask.shape), 0
    if k:
        credit, spent = credit_halves(policy, rollouts, measured, k)
    size = gradient_size(rollouts.log_prob, rollouts.collision) ** 2
    frames = {"advantage": rollouts.advantage, "size": size, "kind": rollouts.kind,
              "id": rollouts.ids, "credit 1": credit[0], "credit 2": credit[1],
              "problem": rollouts.group[:, None].expand(mask.shape)}
    frames |= changes(policy, rollouts)
    return {name: frame[measured].double().numpy()
            for name, frame in frames.items()} | {"spent": spent}


def with_groups(rollouts: Rollouts, size: int) -> Rollouts:
    """Plain GRPO's advantages, of groups of so many answers to one problem."""
    group = torch.arange(len(rollouts.group)) // size
    return replace(rollouts, advantage=group_z_score(rollouts.reward, group)[:, None]
                   * rollouts.mask)


def credit_halves(policy: Policy, rollouts: Rollouts, wanted: torch.Tensor,
                  k: int) -> tuple[torch.Tensor, int]:
    """(2, B, T): the credit of the wanted tokens, from each half of the continuations."""
    other = probability_of_others(rollouts)
    places = (wanted & (other > SURE)).nonzero().tolist()
    counts = [2 * int(np.ceil(k * other[b, t].item() / 2)) for b, t in places]
    rewards, spent = deviations(policy, rollouts, places, counts)
    others = torch.full((2, *rollouts.mask.shape), float("nan"), dtype=torch.float64)
    for (b, t), reward in zip(places, rewards):
        others[:, b, t] = reward.view(-1, 2).mean(0)
    halves = [chain(rollouts, other, half, torch.zeros_like(half))[0] for half in others]
    return torch.stack(halves), spent["extra_tokens"]


def change_in_a_step(policy: Policy, batch: Rollouts, is_plain: bool = True) -> torch.Tensor:
    """(B, T): each token's log-prob after a step on the batch minus before. The step is one of
    plain gradient descent, or AdamW's first. The model is put back."""
    model, s = policy.model, policy.settings
    optimizer = (torch.optim.SGD(model.parameters(), 1.0) if is_plain
                 else AdamW(model.parameters(), s.learning_rate))
    limit = LENGTH if is_plain else s.max_grad_norm
    _, columns = update_with_change(model, optimizer, batch, batch.mask.float(),
                                    replace(s, max_grad_norm=limit))
    optimizer.zero_grad()
    del optimizer  # a large model has no room for a second copy beside its state and gradient
    return_memory()
    model.load_state_dict(Qwen2.from_pretrained(policy.folder, "cpu").state_dict())
    return columns["change"]


def changes(policy: Policy, rollouts: Rollouts) -> dict[str, torch.Tensor]:
    """(B, T) by arm: what becomes of each token in a step from the same model."""

    def after(batch: Rollouts, is_plain: bool = True) -> torch.Tensor:
        return change_in_a_step(policy, batch, is_plain)

    positive = replace(rollouts, advantage=rollouts.advantage.clamp(min=0))
    found = {"plain step": after(rollouts), "AdamW's first": after(rollouts, False),
             SMALL: after(with_groups(rollouts, 4)), POSITIVE: after(positive)}
    alone = torch.full(rollouts.mask.shape, float("nan"))
    for problem in range(min(ALONE, len(rollouts.prompt_ids))):
        rows = rollouts.rows_of(range(problem, problem + 1))
        alone[rows] = after(rollouts.of_problems(range(problem, problem + 1)))
    return {**found, ONE: alone, "advantage of 4": with_groups(rollouts, 4).advantage}


def live(one: dict, arm: str) -> dict[str, np.ndarray]:
    """The tokens that were given something and whose change is known, of one batch: problem, type,
    kind, given, became, and both halves of the credit."""
    given = one["advantage of 4" if arm == SMALL else "advantage"] * one["size"]
    became = given if arm == "given" else one[arm]
    known = (given != 0) & ~np.isnan(became)
    columns = {name: one[name] for name in ("problem", "id", "kind", "credit 1", "credit 2")}
    return {name: values[known] for name, values in {**columns, "given": given,
                                                     "became": became}.items()}


def pooled(batches: list[dict], arm: str) -> dict[str, np.ndarray]:
    """Of several runs, their problems numbered on."""
    parts, first = [live(one, arm) for one in batches], 0
    for part in parts:
        _, part["problem"] = np.unique(part["problem"], return_inverse=True)
        part["problem"] += first
        first = part["problem"].max() + 1
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def jackknifed(tokens: dict, values: list[np.ndarray], statistic: Callable,
               cells: np.ndarray | None = None) -> Estimate:
    """A statistic of sums of these values, (values, cells); its error from what it becomes without
    each problem."""
    problems = int(tokens["problem"].max()) + 1
    cell = np.zeros(len(tokens["problem"]), int) if cells is None else cells
    width = int(cell.max()) + 1
    sums = np.stack([np.bincount(tokens["problem"] * width + cell, value, problems * width)
                     for value in values]).reshape(len(values), problems, width)
    total = sums.sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return jackknife(statistic(total), np.array([statistic(total - sums[:, n])
                                                     for n in range(problems)]))


def ratio(sums: np.ndarray) -> float:
    return float(sums[0, 0] / sums[1, 0])


def by_token(sums: np.ndarray) -> float:
    """Correlation of change d with credit c: n, d, dd, c1, c2, c1 c2, dc; noise of c taken out."""
    n, d, dd, c1, c2, cc, dc = sums[:, 0]
    c = (c1 + c2) / 2
    return float((dc - d * c / n) / np.sqrt((dd - d * d / n) * (cc - c1 * c2 / n)))


def by_type(sums: np.ndarray) -> float:
    """Correlation of sums over types: change, and the credit's two halves."""
    d, c1, c2 = sums - sums.mean(1, keepdims=True)
    return float((d * (c1 + c2) / 2).sum() / np.sqrt((d * d).sum() * (c1 * c2).sum()))


def of_frequent_types(tokens: dict) -> np.ndarray:
    """(n,): whether a token is one of a type that has enough of them."""
    _, type_of, count = np.unique(tokens["id"], return_inverse=True, return_counts=True)
    runs = max(1, (int(tokens["problem"].max()) + 1) // 16)
    return (count >= COMMON_TYPE * runs)[type_of]


def with_credit(tokens: dict) -> list[Estimate]:
    d, c1, c2 = (tokens[name] for name in ("became", "credit 1", "credit 2"))
    if not c1.any():
        return [Estimate(np.nan)] * 2
    frequent = of_frequent_types(tokens)
    part = {name: values[frequent] for name, values in tokens.items()}
    _, cells = np.unique(part["id"], return_inverse=True)
    each = [np.ones_like(d), d, d * d, c1, c2, c1 * c2, d * (c1 + c2) / 2]
    sums = [value[frequent] for value in (d, c1, c2)]
    return [jackknifed(tokens, each, by_token),
            jackknifed(part, sums, by_type, cells) if frequent.any() else Estimate(np.nan)]


def kinds_table(stages: dict[int, list[dict]]) -> Table:
    rows = []
    for step, batches in stages.items():
        arms = {arm: pooled(batches, arm) for arm in ("given", "plain step", "AdamW's first")}
        tokens = arms["given"]
        earned = tokens["credit 1"] * np.sign(tokens["credit 2"])
        sizes = [np.ones_like(earned), *(np.abs(arm["became"]) for arm in arms.values()), earned]
        for kind in SHOWN:
            inside = tokens["kind"] == KINDS.index(kind)
            shares = [jackknifed(tokens, [size * inside, size], ratio) for size in sizes]
            rows.append([step, kind, shares[0].value, *(part for one in shares[1:]
                                                        for part in (one.value, one.interval))])
    names = ("given", "plain step", "AdamW", "earned")
    formats = {"step": "d", "kind": "", "tokens": ".0%",
               **{heading: ".0%" for name in names for heading in (name, f"{name} 95%")}}
    return Table("kinds", "Shares of what is given, becomes and is earned", by_row(formats, rows),
                 "", ["became: of a plain step, and of AdamW's first; earned: the size of the "
                      "credit, its sign taken from other continuations"])


def arms_table(stages: dict[int, list[dict]]) -> Table:
    rows = []
    for step, batches in stages.items():
        for arm in ARMS:
            tokens = pooled(batches, arm)
            given, d = tokens["given"], tokens["became"]
            up, down = given > 0, given < 0
            flips = [jackknifed(tokens, [given * (up & (d < 0)), given * up], ratio),
                     jackknifed(tokens, [given * (down & (d > 0)), given * down], ratio)]
            found = flips if arm != "given" else [Estimate(np.nan)] * 2
            rows.append([step, arm, *(part for one in [*found, *with_credit(tokens)]
                                      for part in (one.value, one.interval))])
    formats = {"step": "d", "what": "", "fell": ".0%", "fell 95%": ".0%", "rose": ".0%",
               "rose 95%": ".0%", "by token": "+.2f", "by token 95%": "+.2f", "by type": "+.2f",
               "by type 95%": "+.2f"}
    return Table("arms", "Who fell and rose, and whether what became follows what was earned",
                 by_row(formats, rows), "",
                 ["fell: of what pushes up the share at tokens that fell, rose: of what pushes "
                  "down at tokens that rose; correlations with the credit: token by token, and of "
                  "sums with their sign by token type"])


def types_table(stages: dict[int, list[dict]], tokenizer) -> Table:
    """The types that earned most, up or down: sums over their tokens, as shares of all sizes."""
    rows, told = [], []
    for step, batches in stages.items():
        tokens = pooled(batches, "plain step")
        ids, cell, count = np.unique(tokens["id"], return_inverse=True, return_counts=True)
        earned = (tokens["credit 1"] + tokens["credit 2"]) / 2
        given, became, net = (np.bincount(cell, values) / np.abs(values).sum()
                              for values in (tokens["given"], tokens["became"], earned))
        known = np.flatnonzero(count >= COMMON_TYPE * len(batches))
        rows += [[step, repr(tokenizer.decode([int(ids[i])])), given[i], became[i], net[i]]
                 for i in known[np.argsort(-np.abs(net[known]))][:TYPES]]
        ranks = [rank_correlation(of[known], net[known]) for of in (became, given)]
        told.append(f"Step {step}, {len(known)} types: rank correlation with what was earned "
                    "{:+.2f} for what became, {:+.2f} for what was given.".format(*ranks))
    formats = {"step": "d", "type": "", **dict.fromkeys(("given", "became", "earned"), "+.1%")}
    return Table("types", "The types that earned most, with their sign", by_row(formats, rows),
                 "\n".join(told), ["became: of a plain step; shares of the sum of all sizes"])


def worlds_table(args: SimpleNamespace) -> Table:
    predicted, leads = ({row["world"]: row for row in table_rows(*of) if row["arm"] == TRUE}
                        for of in (("law", "predictions"), ("dial", "board")))
    rows = []
    for world in WORLDS:
        of = predicted.get(world, {"ratio": None, "lead": None})
        rows.append([world, *cancelled(world, args), of["ratio"], of["lead"], leads[world]["lead"]])
    asked = [row for row in rows if row[5] is not None]
    told = [f"{name} {rank_correlation([row[i] for row in asked], [row[-1] for row in asked]):+.2f}"
            for i, name in ((1, "share that cancels"), (3, "cosine of a batch"),
                            (5, "noise ratio"), (6, "the law"))]
    formats = {"world": "", "cancels": ".0%", "exact": ".2f", "batch": ".2f", "true": ".2f",
               "ratio": ".2g", "foretold": "points", "lead": "points"}
    return Table("worlds", "Where all is exact: what becomes of the credit", by_row(formats, rows),
                 f"Rank correlation with the true credit's lead, over {len(asked)} worlds: "
                 f"{', '.join(told)}.",
                 ["cancels: of what plain GRPO gives, among equal tokens in equal contexts; cosine "
                  "of what becomes with the credit: exact gradient, a batch of plain GRPO, of true "
                  "credit; ratio, foretold: python -m research law; lead: python -m research dial"])


def cancelled(name: str, args: SimpleNamespace) -> list[float]:
    """The share that cancels, and three cosines: means over batches of one untrained policy."""
    world = World(Dials.read(name), [args.seed] * args.batches)
    draws = [("became", args.seed, number) for number in range(args.batches)]
    steps = [gradients(world, arm_of(arm), start and start(world), 1, draws)[0]
             for arm in (EXACT, PLAIN, TRUE) for start in [arm_of(arm).start]]
    with torch.no_grad():
        _, log_prob = world.forward(world.parameters)
    p = log_prob.exp()
    places = torch.bincount(world.cue_of, minlength=p.shape[1]).view(1, -1, 1) * p
    credit = torch.zeros_like(p)  # of each context and symbol
    for j, key in enumerate(world.keys.tolist()):
        right, cue = world.right[:, j], world.cue_of[key]
        row = torch.arange(len(p))
        credit[:, cue] = -p[row, cue, right, None] / world.dials.decide
        credit[row, cue, right] += 1 / world.dials.decide
    cosines = []
    for step in steps:
        _, change = torch.func.jvp(lambda w: world.forward(w)[1], (world.parameters,), (-step,))
        change = change.nan_to_num() * (p > 0)
        inner = [(places * a * b).sum((1, 2)) for a, b in (
            (change, credit), (change, change), (credit, credit))]
        cosines.append(float((inner[0] / (inner[1] * inner[2]).sqrt()).mean()))
    sample = world.sample(log_prob, random_numbers(world, arm_of(PLAIN), 1, draws))
    group = torch.arange(sample.reward.shape[1]) // 8
    z = group_z_score(sample.reward.flatten(), (group + 8 * torch.arange(args.batches)[:, None]
                                                ).flatten()).view(args.batches, -1, 1)
    size = 1 - 2 * p + p.square().sum(-1, keepdim=True)
    net, gross = (by_context(world, sample, A.expand(sample.ids.shape)) for A in (z, z.abs()))
    return [1 - float((net.abs() * size).sum() / (gross * size).sum()), *cosines]
