"""The leaderboard of a real model: which weighting or advantage trains it better than plain GRPO?

    python -m research real_board --model models/Qwen2.5-0.5B-Instruct
    python -m research real_board --model FOLDER --prompt expression    # answers without thinking
    python -m research real_board --model FOLDER --arms "none, four times"    # these alone
    python -m research real_board --model FOLDER --report_only    # what the finished runs show
    python -m research real_board --model FOLDER --device cuda --questions 8 --seeds 8

The task is Countdown of two numbers, with four solved examples in the prompt and the settings that
train.py has for a large model on a CPU. Training is short, because once most answers of plain GRPO
are right, most groups have equal rewards, and there is nothing to compare. Each arm has six seeds.
It is compared with plain GRPO by the mean success over all answers in training, for pairs of runs
with the same seed. The arms are made one after the other, so each is complete before the next one
begins.

    method    it is better or worse in this one look if its p is below 0.05, after Holm's
              correction over all methods that have their six seeds. No second look is made, so none
              is called ahead (analysis/gains.py). For the others the interval says how large a
              difference may still be
    control   `measured` is credit by Monte Carlo, with two continuations for each token and with
              sixteen, and must be better. `four times`, `twice` and `half` are plain GRPO with
              four times, twice and half as many problems in a step. `its placebo` takes the weight
              from as many tokens as `by_kind without words`, but from random ones. The arm whose
              advantages are shuffled within each group must not learn. These are not methods, so
              their p is not corrected
    predicted the gain that was predicted, in research/results/real_board/predictions.json, before
              any run was made

A run's folder is ARM-sSEED. Finished runs are used as they are, and so are those of the published
leaderboard, so one machine can continue where another stopped. Runs on a GPU round differently from
those on a CPU, and runs with another number of problems a step are another experiment, so these
have a leaderboard of their own.
"""
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from analysis.experiment import Arms, Experiment, Key
from analysis.gains import Gain, gains, mean_success, over_baseline
from analysis.statistics import mean_over
from analysis.tables import WITH_INTERVAL, Row, Table, by_row
from harness.flags import Flag
from harness.planned import PlannedRun
from harness.record import find_folder
from research.boards.leaderboard import (AFRESH, Stages, by_run_name, flags_of_runs, leaderboard,
                                         mean_step_seconds, named_arms, pairs_table, planner,
                                         power_table, predictions, published_runs, require_two,
                                         short_form, success_by_parts, write_report)
from research.probes.common import Findings
from research.publish.pictures import draw_gains

PLAIN, SHUFFLED = "none", "shuffled"
# methods that came after the leaderboard was published, with fewer seeds and a table of their own
LATER = {"rlsd": "--mitigation rlsd", "negative_only": "--mitigation negative_only"}
LATER_SEEDS = 4
ARMS = {  # in the order in which they are made
    PLAIN: "",
    "measured": "--advantage measured --measured_k 2",
    "measured 16": "--advantage measured --measured_k 16",
    "outcome_conditional 0.5": "--mitigation outcome_conditional --think_discount 0.5",
    "outcome_conditional 0.25": "--mitigation outcome_conditional --think_discount 0.25",
    "inverse_logprob_as_published": "--mitigation inverse_logprob_as_published",
    "inverse_logprob": "--mitigation inverse_logprob",
    "attention_credit": "--mitigation attention_credit",
    "entropy_weighted": "--mitigation entropy_weighted",
    "entropy_masking": "--mitigation entropy_masking",
    "equal_gradient": "--mitigation equal_gradient",
    "by_kind without words": "--mitigation by_kind --word_weight 0",
    "its placebo": "--mitigation by_kind --word_weight 0 --placebo weights",
    "random": "--mitigation random",
    SHUFFLED: "--placebo advantages",
    "four times": "--questions {four_times}",
    "half": "--questions {half}",
    "twice": "--questions {twice}",
    **LATER}
CONTROLS = {"four times": "larger batches", "twice": "larger batches", "half": "the control",
            "measured": "the control", "measured 16": "the control",
            "its placebo": "the control", SHUFFLED: "the control"}
FEWEST_PAIRS = 6  # an arm with fewer is not in the table yet
BY_SECTION = ("outcome_conditional 0.5", "outcome_conditional 0.25", "by_kind without words",
              "its placebo")
OTHER_BATCHES = ("half", "twice")  # with a thinking real_controls makes `twice` and LATER
FORMS = {  # for each --prompt: problems a step, steps, and the arms that are not made there
    "brief": SimpleNamespace(questions=4, steps=24, without=(*OTHER_BATCHES, *LATER)),
    "expression": SimpleNamespace(questions=8, steps=16, without=BY_SECTION)}
COMMON = ("--dtype bfloat16 --learning_rate 2e-6 --eval_every 0 --save_model no --sample_every 0 "
          "--change_every 0")
FLAGS = {
    "model": Flag("models/Qwen2.5-0.5B-Instruct", "folder of the model to train"),
    "prompt": Flag("brief",
                   "wording of the prompt. brief asks for a short thinking before the answer, "
                   "and expression for none",
                   choices=tuple(FORMS)),
    "seeds": Flag(6, "number of seeds of each arm, from seed 0 on", least=FEWEST_PAIRS, most=1000),
    "arms": Flag("",
                 "the arms to make, in this order, separated by commas. By default they are all"),
    "questions": Flag(0, "problems in a step. 0 means 4 with a thinking, and 8 without",
                      least=0, most=10_000),
    "device": Flag("cpu", "device to train on: cpu, cuda or cuda:N"),
    **flags_of_runs("runs/real_board"),
    **AFRESH}


def plan(args: SimpleNamespace) -> tuple[Experiment, Stages]:
    name, wanted = name_of_board(args), named_arms(args.arms, flags_of_arms(args))
    known = {}
    if not args.afresh:
        settings = {"common": common_flags(args), "steps": FORMS[args.prompt].steps,
                    "model": model_name(args)}
        known = published_runs(name, settings, flags_of_arms(args))
    experiment = Experiment(planned_run(args), known=known)
    return experiment, [(name, keys_of(args, wanted))]


def keys_of(args: SimpleNamespace, arms: Iterable[str]) -> list[Key]:
    """The runs of these arms, one arm after the other."""
    return [(arm, seed) for arm in arms
            for seed in range(LATER_SEEDS if arm in LATER else args.seeds)]


def planned_run(args: SimpleNamespace) -> Callable[[str, int], PlannedRun]:
    """What plans a run of an arm."""
    common = ["--model", args.model, "--prompt", args.prompt, *COMMON.split()]
    if args.device != "cpu":
        common += ["--device", args.device]
    if args.questions:
        common += ["--questions", str(args.questions)]
    folder = Path(args.runs) / name_of_board(args).removeprefix("real_board_")
    return planner(folder, flags_of_arms(args), common, FORMS[args.prompt].steps,
                   keeps_checkpoints=False)


def flags_of_arms(args: SimpleNamespace) -> dict[str, str]:
    """The flags of each arm, by its name."""
    form = FORMS[args.prompt]
    questions = args.questions or form.questions
    of_arms = {}
    for arm, flags in ARMS.items():
        if arm not in form.without:
            of_arms[arm] = flags.format(four_times=4 * questions, twice=2 * questions,
                                        half=questions // 2)
    return of_arms


def name_of_board(args: SimpleNamespace) -> str:
    """The name of the leaderboard, which says what differs from the usual runs: real_board_brief,
    or real_board_brief_8_gpu."""
    parts = ["real_board", args.prompt]
    if args.questions:
        parts.append(str(args.questions))
    if args.device != "cpu":
        parts.append("gpu")
    return "_".join(parts)


def common_flags(args: SimpleNamespace) -> str:
    """The flags that all runs have, besides the model, the prompt and the number of problems. Which
    of several GPUs it is makes no difference."""
    return COMMON if args.device == "cpu" else f"{COMMON} --device cuda"


def model_name(args: SimpleNamespace) -> str:
    """The model's name, wherever its folder lies."""
    return find_folder(args.model).absolute().name


def report(args: SimpleNamespace, experiment: Experiment, command: str) -> None:
    arms = experiment.arms(keys_of(args, flags_of_arms(args)))
    require_two(PLAIN, arms, args.runs)
    name, made = name_of_board(args), by_run_name(arms)
    predicted = predictions("real_board").get(name.removeprefix("real_board_"), {})
    complete = {arm: runs for arm, runs in arms.items()
                if len(runs) >= FEWEST_PAIRS and arm not in LATER}
    tables = [real_leaderboard(arms, predicted), quarters_table(arms),
              pairs_table(over_baseline(complete, PLAIN),
                          "The gain over plain GRPO in training of every pair, in points"),
              without_one_seed_table(complete),
              power_table(complete_gains(arms), list(CONTROLS))]
    if any(arms.get(arm) for arm in LATER):
        tables.append(later_table(arms, predicted))
    settings = {"prompt": args.prompt, "model": model_name(args), "common": common_flags(args),
                "arms": flags_of_arms(args), "steps": FORMS[args.prompt].steps}
    findings = Findings("Which method trains a real model better than plain GRPO?",
                        [f"{len(made)} runs of {name} are finished."], tables,
                        {"runs": {run: short_form(one) for run, one in made.items()}})
    drawing = partial(draw_gains, meanings=CONTROLS, second_look="")
    write_report(name, "real_board", findings, settings, made, command,
                 picture=("gains.png", drawing, tables[0].to_json()))


def complete_gains(arms: Arms) -> dict[str, Gain]:
    """The gains of the arms that have all of their first six pairs, but for the later methods."""
    first = {arm: runs for arm, runs in arms.items() if arm not in LATER}
    found = gains(over_baseline(first, PLAIN), controls=list(CONTROLS), fewest=FEWEST_PAIRS)
    return {arm: gain for arm, gain in found.items() if gain.pairs >= FEWEST_PAIRS}


def real_leaderboard(arms: Arms, predicted: dict[str, float]) -> Table:
    """The arms that have all of their first six pairs, the best first."""
    complete = complete_gains(arms)
    seconds_of_plain = mean_step_seconds(arms[PLAIN].values())
    cost = {arm: mean_step_seconds(arms[arm].values()) / seconds_of_plain for arm in complete}
    return leaderboard(complete, predicted, cost)


def later_table(arms: Arms, predicted: dict[str, float]) -> Table:
    """The gains of the later methods."""
    made = {arm: runs for arm, runs in arms.items() if runs and (arm == PLAIN or arm in LATER)}
    rows: list[Row] = []
    for arm, gain in gains(over_baseline(made, PLAIN)).items():
        rows.append([arm, gain.pairs, gain.estimate, gain.p, predicted.get(arm), gain.verdict])
    formats = {"arm": "", "pairs": "d", "gain": "points", "p": "p", "predicted": "points",
               "verdict": ""}
    return Table("later", "Later methods: gain in training, in points", by_row(formats, rows), "",
                 ["p has Holm's correction over these methods"], {"gain": f"gain{WITH_INTERVAL}"})


def quarters_table(arms: Arms) -> Table:
    """Success by quarters of the training, means over seeds."""
    rows: list[Row] = []
    for arm, runs in arms.items():
        success = mean_over([mean_success(run) for run in runs.values()]).value
        rows.append([arm, len(runs), success, *success_by_parts(runs, 4)])
    formats = {"arm": "", "seeds": "d", "all": ".1%", "first": ".1%", "second": ".1%",
               "third": ".1%", "last": ".1%"}
    return Table("curve", "Success in training, as a whole and in each quarter, means over seeds",
                 by_row(formats, rows), headings={
                     "all": "all steps", "first": "first quarter", "second": "second quarter",
                     "third": "third quarter", "last": "last quarter"})


def without_one_seed_table(arms: Arms) -> Table:
    """The gains with all seeds, and without the one whose run of plain GRPO is farthest from the
    others. Every gain is measured against that run."""
    success = {seed: mean_success(run) for seed, run in arms[PLAIN].items()}
    middle = float(np.median(list(success.values())))
    farthest = max(success, key=lambda seed: abs(success[seed] - middle))
    others = {arm: {seed: run for seed, run in runs.items() if seed != farthest}
              for arm, runs in arms.items()}
    with_all, without = (gains(over_baseline(part, PLAIN), controls=list(CONTROLS))
                         for part in (arms, others))
    rows: list[Row] = []
    for arm, gain in with_all.items():
        rows.append([arm, gain.estimate, gain.p, without[arm].estimate, without[arm].p])
    rest = [value for seed, value in success.items() if seed != farthest]
    return Table("without", f"Gains in points, with all seeds and without seed {farthest}",
                 by_row({"arm": "", "all": "points", "p": "p", "without": "points",
                         "p without": "p"}, rows),
                 f"Plain GRPO with seed {farthest} has a success of {success[farthest]:.1%} in "
                 f"training, with the others {min(rest):.1%} to {max(rest):.1%}.",
                 ["p has Holm's correction over the methods. Which seed is left out was decided "
                  "after the runs had been seen"],
                 {"all": f"all seeds{WITH_INTERVAL}", "p": "p",
                  "without": f"without seed {farthest}{WITH_INTERVAL}"})
