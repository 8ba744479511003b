"""What is it worth to know where an answer is decided, and nothing else?

A pointer says which tokens decide, not whether they were good: they get plain GRPO's one number
with weight 1, all others with a smaller weight. On the planted task (planted.py) three places of an
answer decide, so a pointer of any quality can be had: it misses one or two of the three, has 12 or
40 wrong places beside them, the same through a run, and the others weigh 0, 0.1 or 0.33. Beside it
plain GRPO; the true credit of every token, with sign and size; as many places at random, fixed or
drawn anew in each step; and two pointers that look at the token which was drawn:

    size of its credit   a deciding token weighs abs(credit) over the mean of what could be drawn
    one symbol, drawn    the other tokens weigh 1 where they are an "a"
    one symbol, chance   its mean, which the prefix alone decides: the probability of an "a"

Each has at each length the learning rate of its own, the best on other seeds. Success is the
expected reward of the policy, computed, not sampled, its mean over the tokens spent; the lead is
minus plain GRPO with the same seed. Weights have mean 1 over a batch; the policy knows from the
start where its keys are. The last table is about a world where all batches are listed
(listed_pointers.py).

If the pointer's lead is near that of the true credit, where is enough. If it goes on with wrong
places beside, precision matters little. If that of random places is as large, it was not the
pointing. Trainings are kept in results/pointer-runs.jsonl: a second call goes on from there.
"""
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from analysis.statistics import mean_over, verdicts
from analysis.tables import Table, by_row
from engine.errors import UserError
from engine.policy import derived_seed
from grpo import group_z_score, policy_loss
from harness.files import is_file, make_folder
from harness.flags import shortened
from research.experiments.pictures import draw, draw_worth, means_of
from research.probes.common import COMMON, Findings, Flag, Probe
from research.probes.contexts import Contexts
from research.probes.listed_pointers import listed_table
from research.probes.planted import KEYS, PlantedPolicy, planted_policy
from research.probes.progress import Progress

FLAGS = {
    **COMMON,
    "lengths": Flag("32,128,512", "tokens of an answer", quick="8,16"),
    "steps": Flag(60, "of 8 x 8 answers", least=1, most=1_000_000, quick=2),
    "seeds": Flag(12, "policies and tasks, the same for every arm and length", least=2, most=1000,
                  quick=2),
    "rates": Flag("1e-3,3e-3,1e-2,3e-2,1e-1", "learning rates of AdamW to choose from",
                  quick="1e-3,1e-2"),
    "rate_seeds": Flag(4, "other seeds on which they are chosen", least=1, most=1000, quick=1),
    "policies": Flag(20, "of the world of 31 answers", least=2, most=1000, quick=2),
    "runs": Flag("results/pointer-runs.jsonl", "file of trainings that are done",
                 quick="results/pointer-quick-runs.jsonl")}
QUESTIONS, ANSWERS = 8, 8
RATE_SEEDS_FROM, SEEDS_FROM = 1000, 2000  # others than any table before has
LONG = 256


@dataclass(frozen=True)
class Pointer:
    """Places of weight 1; the others have the weight `elsewhere`."""
    elsewhere: float
    found: int = KEYS    # of the places that decide
    wrong: int = 0       # beside them
    anew: bool = False   # drawn in each step, instead of once
    looks_at: str = ""   # the drawn token


def pointers() -> dict[str, Pointer]:
    kinds = {"3 of 3": {}, "3 of 3, 12 wrong": {"wrong": 12}, "3 of 3, 40 wrong": {"wrong": 40},
             "2 of 3": {"found": 2}, "1 of 3": {"found": 1}}
    arms = {f"{name} ({elsewhere:g})": Pointer(elsewhere, **kind)
            for name, kind in kinds.items() for elsewhere in (0, 0.1, 0.33)}
    return {**arms, "3 at random (0.1)": Pointer(0.1, 0, 3),
            "3 at random, anew (0.1)": Pointer(0.1, 0, 3, anew=True),
            "3 at random, anew (0)": Pointer(0, 0, 3, anew=True),
            **{f"{name} (0.1)": Pointer(0.1, looks_at=name)
               for name in ("size of its credit", "one symbol, drawn", "one symbol, chance")}}


PLAIN, TRUE, BEST = "plain GRPO", "true credit", "3 of 3 (0.1)"
ARMS = {PLAIN: None, TRUE: None, **pointers()}
PAIRS = (("3 of 3 (0.1)", TRUE), ("3 of 3 (0)", "3 of 3 (0.1)"), ("3 of 3 (0.33)", "3 of 3 (0.1)"),
         ("3 of 3 (0.1)", "3 at random (0.1)"), ("3 of 3, 12 wrong (0.1)", "2 of 3 (0.1)"),
         ("size of its credit (0.1)", "3 of 3 (0.1)"),
         ("one symbol, drawn (0.1)", "one symbol, chance (0.1)"))


def measure(probe: Probe) -> Findings:
    args = probe.args
    torch.set_num_threads(1)  # a step is too small for more
    lengths = read_numbers("lengths", args.lengths, int, 2 * KEYS, 100_000)
    rates = read_numbers("rates", args.rates, float, 1e-9, 10)
    cells = [(arm, length) for length in lengths for arm in ARMS if is_asked(arm, length)]
    others, seeds = (range(first + args.seed, first + args.seed + count) for first, count in (
        (RATE_SEEDS_FROM, args.rate_seeds), (SEEDS_FROM, args.seeds)))
    progress = Progress(listed=args.policies, training=60 * len(cells))
    worlds = range(args.seed, args.seed + args.policies)
    listed = listed_table(worlds, 3 if args.quick else 4, lambda share: progress("listed", share))
    values, done = [], Done(Path(args.runs), args.steps)
    for i, (arm, length) in enumerate(cells):
        progress("training", i / len(cells), f"{length} tokens: {arm}")
        tuned = {f"{rate:g}": [run["mean"] for run in done.runs(arm, length, rate, others)]
                 for rate in rates}
        rate = max(rates, key=lambda rate: np.mean(tuned[f"{rate:g}"]))  # the lowest of equals
        values.append({"arm": arm, "length": length, "rate": rate, "tuned": tuned,
                       "runs": done.runs(arm, length, rate, seeds),
                       "given": {f"{rate:g}": done.known_runs(arm, length, rate, seeds)
                                 for rate in rates}})
    intro = [f"{args.seeds} seeds, the rate of each chosen on {args.rate_seeds} others; "
             f"{args.steps} steps of {QUESTIONS} x {ANSWERS} answers."]
    return Findings("What a pointer to the deciding tokens is worth", intro,
                    [worth_table(values), pairs_table(values), stuck_table(values),
                     given_table(values), listed],
                    draw(draw_worth, probe.folder / "worth.png", {"cells": values}),
                    "three quarters of an hour of one core", values={"cells": values})


def read_numbers(flag: str, text: str, kind: type, least: float, most: float) -> list:
    try:
        numbers = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(least <= number <= most for number in numbers):
        raise UserError(f"--{flag} {shortened(text)} should be numbers from {least:g} to {most:g}, "
                        "with commas between them")
    return numbers


def is_asked(arm: str, length: int) -> bool:
    """There is room for its wrong places. Long answers take long: there only the perfect pointer
    is asked with all weights elsewhere, the others with 0.1."""
    pointer = ARMS[arm]
    if pointer is None or pointer == Pointer(pointer.elsewhere):
        return True
    return pointer.wrong <= length - KEYS and (length < LONG or pointer.elsewhere == 0.1)


class Done:
    """Trainings by arm, length, rate and seed. Each is a line of the file, the first the number of
    steps; a line that was cut off is made again."""

    def __init__(self, path: Path, steps: int):
        self.path, self.steps, self.known = path, steps, {}
        begun = path.read_text(encoding="utf-8") if is_file(path) else ""
        whole, _, _ = begun.rpartition("\n")
        lines = whole.splitlines() or [json.dumps(steps)]
        if json.loads(lines[0]) != steps:
            raise UserError(f"{path} has trainings of {lines[0]} steps: name another with --runs")
        make_folder(path.parent)
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        for job, run in map(json.loads, lines[1:]):
            self.known[tuple(job)] = run

    def runs(self, arm: str, length: int, rate: float, seeds: range) -> list[dict]:
        for seed in seeds:
            job = (arm, length, rate, seed)
            if job not in self.known:
                self.known[job] = train(*job, self.steps)
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([job, self.known[job]]) + "\n")
        return self.known_runs(arm, length, rate, seeds)

    def known_runs(self, arm: str, length: int, rate: float, seeds: range) -> list[dict]:
        """Of all the seeds; none where some are missing."""
        jobs = [(arm, length, rate, seed) for seed in seeds]
        return [self.known[job] for job in jobs] if self.known.keys() >= set(jobs) else []


def train(arm: str, length: int, rate: float, seed: int, steps: int) -> dict:
    """Success over the tokens and at the end, and with how many keys it is stuck."""
    policy = planted_policy(seed, length, rate)
    contexts, group = Contexts(policy), torch.arange(QUESTIONS * ANSWERS) // ANSWERS
    curve = []
    for step in range(1, steps + 1):
        chances = contexts.chances()
        values = contexts.values(chances)
        curve.append(values[0].item())
        ids, log_prob, chance = contexts.sample(chances, step, len(group))
        credit, size = credit_at_keys(chances, values, ids[:, policy.keys])
        reward = values[-1][tuple(ids[:, policy.keys].T)].float()
        advantage = group_z_score(reward, group)[:, None].expand(ids.shape)
        weight = torch.ones(ids.shape)
        if arm == TRUE:
            advantage = torch.zeros(ids.shape).index_copy(1, torch.tensor(policy.keys), credit)
        elif ARMS[arm]:
            weight = weigh(ARMS[arm], policy, step, ids, chance, size)
        policy.optimizer.zero_grad()
        policy_loss(log_prob, advantage, weight / weight.mean(), torch.ones(ids.shape),
                    ids.numel()).backward()
        policy.optimizer.step()
    curve.append(contexts.values(contexts.chances())[0].item())
    return {"mean": float(np.trapezoid(curve) / steps), "end": curve[-1],
            "stuck": stuck_at(reward)}


def stuck_at(reward: torch.Tensor) -> int | None:
    """How many keys all answers have right, if that is the same number and not all."""
    return round(KEYS * reward[0].item()) if reward.min() == reward.max() < 1 else None


def credit_at_keys(chances: list[torch.Tensor], values: list[torch.Tensor],
                   path: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, keys): V behind each key minus V before it; and its size over the mean size of what could
    have been drawn, 1 where that is 0."""
    credit, size = [], []
    for j, chance in enumerate(chances):
        of_all = (values[j + 1] - values[j][..., None]).float()
        mean = (chance * of_all.abs()).sum(-1, keepdim=True)
        seen = tuple(path[:, :j + 1].T)
        credit.append(of_all[seen])
        size.append(torch.where(mean > 0, of_all.abs() / mean, 1.0)[seen])
    return torch.stack(credit, 1), torch.stack(size, 1)


def weigh(pointer: Pointer, policy: PlantedPolicy, step: int, ids: torch.Tensor,
          chance: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """(B, T): `elsewhere` + (1 - `elsewhere`) where it points."""
    keys, number = torch.tensor(policy.keys), step if pointer.anew else 0
    drawn = torch.Generator().manual_seed(derived_seed("pointer", policy.seed, number))
    order = torch.rand(policy.length, generator=drawn)
    order[keys] = 2.0  # behind all places that decide nothing
    points = torch.zeros(ids.shape)
    if pointer.looks_at == "one symbol, drawn":
        points = (ids == 0).float()
    elif pointer.looks_at == "one symbol, chance":
        points = chance[..., 0].clone()
    points[:, order.argsort()[:pointer.wrong]] = 1.0
    found = torch.randperm(KEYS, generator=drawn)[:pointer.found]
    points[:, keys[found]] = size[:, found] if pointer.looks_at == "size of its credit" else 1.0
    return pointer.elsewhere + (1 - pointer.elsewhere) * points


def judged(means: dict[tuple, np.ndarray], length: int, pairs) -> dict[tuple, tuple]:
    """(estimate, verdict) of each pair of arms that were trained at this length, corrected for all
    of them."""
    pairs = [pair for pair in pairs if all((arm, length) in means for arm in pair)]
    found = [mean_over(means[one, length] - means[other, length]) for one, other in pairs]
    return dict(zip(pairs, zip(found, verdicts(found, ("ahead", "behind"), null=0.0))))


def lengths_of(values: list[dict]) -> list[int]:
    return sorted({cell["length"] for cell in values})


def worth_table(values: list[dict]) -> Table:
    means, others = means_of(values), [arm for arm in ARMS if arm != PLAIN]
    columns, headings, told = {"arm": ("", others)}, {}, []
    for length in lengths_of(values):
        leads = judged(means, length, [(arm, PLAIN) for arm in others])
        found = [leads.get((arm, PLAIN), (None, "")) for arm in others]
        columns |= {f"{length}": ("points", [lead and lead.value for lead, _ in found]),
                    f"95% {length}": ("points", [lead and lead.interval for lead, _ in found]),
                    f"verdict {length}": ("", [word for _, word in found])}
        headings |= {f"{length}": f"{length} tokens", f"95% {length}": "95%",
                     f"verdict {length}": ""}
        (mine, word), (true, of_true) = leads[BEST, PLAIN], leads[TRUE, PLAIN]
        told.append(f"{length} tokens: the pointer is {100 * mine.value:+.1f} points from plain "
                    f"GRPO, {word}; the true credit {100 * true.value:+.1f}, {of_true}.")
    return Table("worth", "Mean success at equal tokens, minus plain GRPO's", columns,
                 "\n".join(told),
                 ["intervals by Student's t over pairs of a seed, verdicts by Holm over all rows; "
                  "in brackets: the weight elsewhere"], headings)


def pairs_table(values: list[dict]) -> Table:
    means, rows = means_of(values), []
    for length in lengths_of(values):
        rows += [[f"{length}", *pair, lead.value, lead.interval, word]
                 for pair, (lead, word) in judged(means, length, PAIRS).items()]
    return Table("pairs", "One against the other",
                 by_row({"length": "", "arm": "", "against": "", "lead": "points", "95%": "points",
                         "verdict": ""}, rows), "", ["the same seeds; Holm over those of a length"])


def stuck_table(values: list[dict]) -> Table:
    rows = []
    for cell in values:
        stuck = Counter(run["stuck"] for run in cell["runs"])
        rows.append([f"{cell['length']}", cell["arm"], f"{cell['rate']:g}",
                     np.mean([run["mean"] for run in cell["runs"]]),
                     np.mean([run["end"] for run in cell["runs"]]),
                     *(stuck[worth] for worth in (0, 1, 2))])
    return Table("stuck", "Success, each at its own learning rate, and runs that are stuck",
                 by_row({"length": "", "arm": "", "rate": "", "success": ".1%", "end": ".1%",
                         "at 0": "d", "at 1/3": "d", "at 2/3": "d"}, rows), "",
                 ["at 0, 1/3, 2/3: how many runs end with answers that all have this reward"],
                 {"success": "mean success", "end": "at the end"})


def given_table(values: list[dict]) -> Table:
    """What was also run at other rates than the chosen one, against plain GRPO at its chosen."""
    means, rows = means_of(values), []
    for cell in values:
        there = {rate: runs for rate, runs in cell["given"].items() if runs}
        for rate, runs in there.items() if len(there) > 1 else ():
            mean = np.array([run["mean"] for run in runs])
            lead = mean_over(mean - means[PLAIN, cell["length"]])
            rows.append([f"{cell['length']}", cell["arm"], rate, mean.mean(),
                         sum(run["stuck"] is not None for run in runs), lead.value, lead.interval])
    return Table("given", "At rates that were not chosen, on the reported seeds",
                 by_row({"length": "", "arm": "", "rate": "", "success": ".1%", "stuck": "d",
                         "lead": "points", "95%": "points"}, rows), "",
                 ["asked after the results were seen; minus plain GRPO at the rate chosen for it"],
                 {"success": "mean success", "lead": "minus plain GRPO"})
