"""Controls for the leaderboard of a real model: what else could explain its verdicts?

    python -m research real_controls --model FOLDER --device cuda --processes 8
    python -m research real_controls --model FOLDER --device cuda --report_only

The leaderboard (real_board.py) compares every arm with plain GRPO in one setting: gradients longer
than 1 are scaled down to 1 (they are *clipped*), the learning rate is 2e-6, and success is that of
sampled answers in training. Here one of these is changed at a time. Each arm is compared with an
arm that differs from it in one thing, for pairs of runs with the same seed:

    clipping      three weightings without clipping, beside plain GRPO without clipping
    the rate      two weightings at 5e-7 and at 1e-6, beside plain GRPO at the same rate
    temperature   every run ends with 250 held-out problems, answered once by sampling and once
                  greedily. A weighting that leaves the model unsure loses success by sampling
                  without losing it by greedy answers
    the middle    plain GRPO with twice the answers, between one and four times
    the seeds     plain GRPO, twice the answers and `measured` with sixteen continuations on seeds
                  that the leaderboard does not have
    LATER         five methods that came after the leaderboard, in its own setting: four that were
                  behind on the tiny model (later.py), and the one that was nearest to a gain at no
                  cost. They are a family of their own: p is corrected over these five

The runs are made in ROUNDS, in the order of what they decide, and those of the published result are
used again. So --dry_run lists what is still open: first the seeds. When time is out,
the finished ones count. A run's folder is ARM-sSEED. On one H200 eleven runs at a time filled the
memory several times, so start eight, as above.
"""
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from analysis.experiment import Arms, Experiment, Key
from analysis.gains import Gain, final_lines, gains, mean_success
from analysis.runs import Run
from analysis.statistics import Floats, mean_over, paired_difference
from analysis.tables import WITH_INTERVAL, Row, Table, by_row
from harness.flags import Flag
from harness.settings import make_settings, read_flags
from research.boards.leaderboard import (AFRESH, Stages, by_run_name, flags_of_runs, pairs_table,
                                         planner, published_runs, require_two, run_name,
                                         short_form, write_report)
from research.boards.real_board import ARMS as ARMS_OF_BOARD
from research.boards.real_board import FORMS, PLAIN, model_name
from research.dial.gains import FEWEST_SEEDS, ArmsOfTask
from research.probes.common import Findings
from research.publish.results import RESULTS, read_result

PROMPT, QUESTIONS = "brief", 8
STEPS = FORMS[PROMPT].steps
HELD_OUT = 250
MODES = ("sampled", "greedy")
IN_STEPS = ("entropy", "gradient_norm", "reward_format")  # what is kept of every step
COMMON = (f"--prompt {PROMPT} --dtype bfloat16 --save_model no --sample_every 0 --change_every 0 "
          f"--eval_every {STEPS} --eval_tasks {HELD_OUT} --eval_modes both")
RATE, LOWER_RATES = "2e-6", ("1e-6", "5e-7")
UNCLIPPED = "--max_grad_norm 0"
CONTROLS = ("twice", "measured 16")
LATER = {"negative_only": "--mitigation negative_only", "sc_grpo": "--mitigation sc_grpo",
         "rlsd": "--mitigation rlsd", "dpo": "--loss dpo",
         "optimal_token_baseline": "--advantage optimal_token_baseline"}


@dataclass
class Arm:
    flags: str                 # of train.py, beside COMMON
    beside: str | None = PLAIN  # the arm that it is compared with


def controlled_arms() -> dict[str, Arm]:
    """Every arm by its name."""
    equal, inverse = "equal_gradient", "inverse_logprob"
    weighting = {name: ARMS_OF_BOARD[name] for name in (equal, inverse, "random")}
    at_rate, eight = f"--learning_rate {RATE}", f"--questions {QUESTIONS}"
    usual = f"{eight} {at_rate}"
    arms = {
        PLAIN: Arm(usual, None),
        equal: Arm(f"{usual} {weighting[equal]}"),
        inverse: Arm(f"{usual} {weighting[inverse]}"),
        "twice": Arm(f"--questions {2 * QUESTIONS} {at_rate}"),
        "measured 16": Arm(f"{usual} {ARMS_OF_BOARD['measured 16']}"),
        f"{PLAIN} unclipped": Arm(f"{usual} {UNCLIPPED}")}
    for name, flags in weighting.items():
        arms[f"{name} unclipped"] = Arm(f"{usual} {UNCLIPPED} {flags}", f"{PLAIN} unclipped")
    for rate in LOWER_RATES:
        slower = f"{eight} --learning_rate {rate}"
        arms[f"{PLAIN} {rate}"] = Arm(slower)
        for name in (equal, inverse):
            arms[f"{name} {rate}"] = Arm(f"{slower} {weighting[name]}", f"{PLAIN} {rate}")
    for name, flags in LATER.items():
        arms[name] = Arm(f"{usual} {flags}")
    return arms


ARMS = controlled_arms()
OF_CLIPPING = (PLAIN, "none unclipped", "equal_gradient", "equal_gradient unclipped",
               "inverse_logprob", "inverse_logprob unclipped")
OF_RATES = tuple(f"{name} {rate}" for rate in LOWER_RATES
                 for name in (PLAIN, "equal_gradient", "inverse_logprob"))
ROUNDS = [  # which arms get which seeds, in the order in which the runs are made
    ((PLAIN, "twice"), range(8)),
    ((PLAIN, "twice", "measured 16"), range(8, 16)),
    (OF_CLIPPING, range(8)),
    (("random unclipped",), range(8)),
    (OF_RATES, range(8)),
    (tuple(LATER), range(4)),
    (tuple(LATER), range(4, 8))]
FLAGS = {
    "model": Flag("models/Qwen2.5-0.5B-Instruct", "folder of the model to train"),
    "device": Flag("cpu", "device to train on: cpu, cuda or cuda:N"),
    **flags_of_runs("runs/real_controls"), **AFRESH}


def plan(args: SimpleNamespace) -> tuple[Experiment, Stages]:
    common = ["--model", args.model, *COMMON.split()]
    if args.device != "cpu":
        common += ["--device", args.device]
    flags = {name: arm.flags for name, arm in ARMS.items()}
    plan_run = planner(Path(args.runs), flags, common, STEPS, keeps_checkpoints=False)
    known = {} if args.afresh else published(args, flags)
    return Experiment(plan_run, known=known), [("real_controls", keys_of_rounds())]


def published(args: SimpleNamespace, flags: dict[str, str]) -> dict[Key, Run]:
    """The runs of the published result. It does not have the format of their answers."""
    found = published_runs("real_controls", {"model": model_name(args), "common": COMMON}, flags)
    if not found:
        return {}
    stored = read_result(RESULTS / "real_controls.json")["values"]["runs"]
    for (arm, seed), run in found.items():
        values = stored[run_name(arm, seed)]
        settings = make_settings(read_flags(flags[arm].split()))
        run["config"] |= {"steps": STEPS, "max_grad_norm": settings.max_grad_norm}
        for name in IN_STEPS:
            for line, value in zip(run["metrics"], values.get(name, [None] * STEPS)):
                line[name] = value
        for mode in MODES:
            answers = [float(solved) for solved in values[mode]]
            run["evaluations"].append({"step": STEPS, "mode": mode, "answer": answers,
                                       "success": float(np.mean(answers))})
    return found


def keys_of_rounds() -> list[Key]:
    """All runs, in the order of ROUNDS; within a round seed by seed."""
    keys: dict[Key, None] = {}  # in order, each once
    for arms, seeds in ROUNDS:
        keys |= dict.fromkeys((arm, seed) for seed in seeds for arm in arms)
    return list(keys)


def report(args: SimpleNamespace, experiment: Experiment, command: str) -> None:
    arms = experiment.arms(keys_of_rounds())
    require_two(PLAIN, arms, args.runs)
    made = by_run_name(arms)
    settings = {"model": model_name(args), "common": COMMON,
                "arms": {name: arm.flags for name, arm in ARMS.items()}}
    tables = [training_table(arms), later_table(arms), rates_table(arms), held_out_table(arms),
              state_table(arms),
              pairs_table(compared(arms), "The gain in training of every pair, in points")]
    findings = Findings("What else could explain the verdicts of the real model's leaderboard?",
                        [f"{len(made)} runs are finished."], tables, values_of(made))
    write_report("real_controls", "real_controls", findings, settings, made, command)


def compared(arms: Arms) -> dict[str, tuple[dict[int, Run], dict[int, Run]]]:
    """The runs of each arm that has two pairs, and those of the arm beside it."""
    found = {}
    for name, arm in ARMS.items():
        if arm.beside is None or not {name, arm.beside} <= arms.keys():
            continue
        if len(arms[name].keys() & arms[arm.beside].keys()) > 1:
            found[name] = arms[name], arms[arm.beside]
    return found


def training_table(arms: Arms) -> Table:
    """Gains in training of all arms but the later methods. p has Holm's correction over the
    weightings."""
    family = {name: pair for name, pair in compared(arms).items() if name not in LATER}
    plain = [name for name in family if name.startswith(PLAIN)]
    found = gains(family, controls=[*CONTROLS, *plain])
    return gains_table("training", "Mean success in training, in points", found,
                       "p has Holm's correction over the weightings, whatever their rate and "
                       "clipping. That of plain GRPO in another setting and that of a control is "
                       "not corrected")


def later_table(arms: Arms) -> Table:
    """Gains in training of the later methods. p has Holm's correction over them."""
    family = {name: pair for name, pair in compared(arms).items() if name in LATER}
    return gains_table("later", "Later methods: mean success in training, in points",
                       gains(family), "p has Holm's correction over these methods")


def gains_table(name: str, title: str, found: Mapping[str, Gain], correction: str) -> Table:
    rows: list[Row] = []
    for arm, gain in found.items():
        rows.append([arm, ARMS[arm].beside, gain.pairs, gain.estimate, gain.p, gain.verdict])
    formats = {"arm": "", "beside": "", "pairs": "d", "gain": "points", "p": "p", "verdict": ""}
    return Table(name, title, by_row(formats, rows), "",
                 ["Each arm is compared with the one beside it, for pairs of runs with the same "
                  f"seed, by Student's t over these pairs. {correction}"],
                 {"beside": "compared with", "gain": f"gain{WITH_INTERVAL}",
                  "p": "p, Holm's correction"})


def rates_table(arms: Arms) -> Table:
    """Success in training by rate, and the gain over plain GRPO where each arm has its own rate.
    The rate is chosen by the other half of the seeds (cross-fitting), so luck with a rate does not
    look like a gain."""
    rates = (*LOWER_RATES[::-1], RATE)
    names = [PLAIN, "equal_gradient", "inverse_logprob"]
    runs = [[arms.get(name if rate == RATE else f"{name} {rate}", {}) for rate in rates]
            for name in names]
    seeds = sorted(set.intersection(*(set(at_rate) for of_arm in runs for at_rate in of_arm)))
    success = np.array([[[mean_success(at_rate[seed]) for seed in seeds] for at_rate in of_arm]
                        for of_arm in runs])  # (arms, rates, seeds)
    at_own_rate = ArmsOfTask(names, success).at_chosen_rate if len(seeds) >= FEWEST_SEEDS else None
    rows: list[Row] = []
    for number, name in enumerate(names):
        gain = None
        if name != PLAIN and at_own_rate is not None:
            gain = mean_over(at_own_rate[number] - at_own_rate[0])
        means = success[number].mean(1) if seeds else [None] * len(rates)
        rows.append([name, len(seeds), first_step(runs, seeds), *means, gain])
    formats = {"arm": "", "seeds": "d", "first": ".1%", **dict.fromkeys(rates, ".1%"),
               "gain": "points"}
    return Table("rates", "Success in training at three learning rates", by_row(formats, rows), "",
                 ["The gain is over plain GRPO, each arm at the best of its three rates. One half "
                  "of the seeds chooses the rate of the other half. The interval is Student's t "
                  "over pairs, and does not cover the choice"],
                 {"first": "in the first step, all runs",
                  "gain": f"gain with own rates{WITH_INTERVAL}"})


def first_step(runs: list[list[dict[int, Run]]], seeds: list[int]) -> float | None:
    """Success in the first step, which all arms make with the untrained model. Means over all."""
    found = [at_rate[seed]["metrics"][0]["success"]
             for of_arm in runs for at_rate in of_arm for seed in seeds]
    return float(np.mean(found)) if found else None


def held_out_table(arms: Arms) -> Table:
    """The differences in held-out success after the last step, by sampled and by greedy answers,
    and the difference between the two."""
    rows: list[Row] = []
    for name, (mine, theirs) in compared(arms).items():
        sampled, greedy = (differences_at_the_end(mine, theirs, mode) for mode in MODES)
        rest = paired_difference(sampled - greedy)
        rows.append([name, ARMS[name].beside, len(sampled), paired_difference(sampled),
                     paired_difference(greedy), rest, rest.p])
    formats = {"arm": "", "beside": "", "pairs": "d", "sampled": "points", "greedy": "points",
               "rest": "points", "p": "p"}
    return Table("held_out", f"Held-out success after the last step, on {HELD_OUT} problems, in "
                 "points", by_row(formats, rows), "",
                 ["Sampled and greedy: the difference from the arm beside it. The last difference "
                  "is the first minus the second: where it is below 0, the arm lost more success "
                  "by sampling than by greedy answers, so it is less sure rather than less able. "
                  "Intervals are over seeds and problems; p is not corrected"],
                 {"beside": "compared with", "sampled": f"sampled{WITH_INTERVAL}",
                  "greedy": f"greedy{WITH_INTERVAL}",
                  "rest": f"sampled minus greedy{WITH_INTERVAL}", "p": "p of the last"})


def differences_at_the_end(mine: dict[int, Run], theirs: dict[int, Run], mode: str) -> Floats:
    """(pairs, problems) how much more often a held-out problem is solved at the end."""
    pairs = []
    for seed in sorted(mine.keys() & theirs.keys()):
        [my_line] = final_lines([mine[seed]], mode)
        [their_line] = final_lines([theirs[seed]], mode)
        pairs.append(np.array(my_line["answer"]) - np.array(their_line["answer"]))
    return np.array(pairs)


def state_table(arms: Arms) -> Table:
    """What the runs of each arm looked like: means over seeds."""
    rows: list[Row] = []
    for name in ARMS:
        runs = list(arms.get(name, {}).values())
        if not runs:
            continue
        ends = [mean_over([line["success"] for line in final_lines(runs, mode)]) for mode in MODES]
        norms = np.array([column(run, "gradient_norm") for run in runs], float)
        norms = norms[np.isfinite(norms)]  # a step without an update has none
        limit = runs[0]["config"]["max_grad_norm"]
        clipped = float(np.mean(norms > limit)) if limit and len(norms) else 0.0
        entropy, right_format = (last_quarter(runs, name) for name in ("entropy", "reward_format"))
        rows.append([name, len(runs), mean_over(list(map(mean_success, runs))), *ends, entropy,
                     right_format,
                     float(np.median(norms)) if len(norms) else None, clipped])
    formats = {"arm": "", "seeds": "d", "training": ".1%", "sampled": ".1%", "greedy": ".1%",
               "entropy": ".2f", "format": ".0%", "norm": ".2f", "clipped": ".0%"}
    return Table("state", "Success, entropy and gradient norm of each arm", by_row(formats, rows),
                 "", ["Entropy and format are means over the last quarter of the training, the "
                      "format in the runs that keep it. The norm is the median over all steps, "
                      "before clipping"],
                 {"training": f"success in training{WITH_INTERVAL}",
                  "sampled": f"held out, sampled{WITH_INTERVAL}",
                  "greedy": f"held out, greedy{WITH_INTERVAL}", "norm": "gradient norm",
                  "format": "right format", "clipped": "steps clipped"})


def last_quarter(runs: list[Run], name: str) -> float | None:
    """The mean of a metric over the last quarter of the training, in the runs that have it."""
    values = np.array([column(run, name)[-STEPS // 4:] for run in runs], float)
    return float(np.nanmean(values)) if np.isfinite(values).any() else None


def column(run: Run, name: str) -> list[float]:
    """A metric of every step; nan where it is not known, as the norm of a step without update."""
    return [np.nan if line[name] is None else line[name] for line in run["metrics"]]


def values_of(made: dict[str, Run]) -> dict:
    """Every run as far as the tables need it: its steps in short, and for each held-out problem
    whether it was solved, as a text of 0 and 1."""
    runs = {}
    for name, run in made.items():
        found: dict = {"in_short": short_form(run)}
        for mode in MODES:
            [line] = final_lines([run], mode)
            found[mode] = "".join(str(int(answer)) for answer in line["answer"])
        for metric in IN_STEPS:
            found[metric] = [None if value is None else float(f"{value:.4g}")
                             for value in (line[metric] for line in run["metrics"])]
        runs[name] = found
    return {"runs": runs}
