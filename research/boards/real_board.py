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
              sixteen, and must be better. `four times` is plain GRPO with four times the answers.
              `its placebo` takes the weight from as many tokens as `by_kind without words`, but
              from random ones. The arm whose advantages are shuffled within each group must not
              learn. These are not methods, so their p is not corrected
    predicted the gain that was predicted, in research/results/real_board/predictions.json, before
              any run was made

A run's folder is ARM-sSEED. Finished runs are used as they are, and so are those of the published
leaderboard, so one machine can continue where another stopped. Runs on a GPU round differently from
those on a CPU, and runs with another number of problems a step are another experiment, so these
have a leaderboard of their own.
"""
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from analysis.gains import Gain, gains, mean_success, over_baseline
from analysis.runs import Run
from analysis.statistics import mean_over
from analysis.tables import WITH_INTERVAL, Row, Table, by_row
from engine.errors import UserError
from harness.record import find_folder
from harness.screen import python_command, say
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from research.boards.common import (FLAGS_OF_LEADERBOARD, FLAGS_OF_RUNS, Arms, by_run_name,
                                         end_with, finished_arms, finished_run, from_short_form,
                                         leaderboard, list_missing, mean_step_seconds, pairs_table,
                                         power_table, predictions, require_same_plan, short_form,
                                         success_by_parts, total_seconds, write_report)
from research.publish.pictures import draw_gains, draw_published
from research.publish.results import RESULTS, read_result
from research.probes.common import Findings, command_of
from harness.planned import PlannedRun, kinds_of, make_runs, side_by_side

PLAIN, SHUFFLED = "none", "shuffled"
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
    "four times": "--questions {four_times}"}
CONTROLS = {"four times": "larger batches", "measured": "the control", "measured 16": "the control",
            "its placebo": "the control", SHUFFLED: "the control"}
FEWEST_PAIRS = 6  # an arm with fewer is not in the table yet
BY_SECTION = ("outcome_conditional 0.5", "outcome_conditional 0.25", "by_kind without words",
              "its placebo")
FORMS = {  # for each --prompt: problems a step, steps, and the arms that say nothing there
    "brief": SimpleNamespace(questions=4, steps=24, without=()),
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
    "runs": Flag("runs/real_board", "folder in which the runs are kept"),
    **FLAGS_OF_LEADERBOARD,
    **FLAGS_OF_RUNS}


def main(argv: list[str]) -> None:
    typed = make_parser("python -m research real_board [flags]", __doc__, FLAGS).read(argv)
    args, failed = with_defaults(typed, FLAGS), {}
    planned, wanted = real_runs(args), chosen_arms(args)
    known = {} if args.afresh else published_real_runs(args)
    missing, finished = [], 0
    for run in planned:
        if (run.arm, run.seed) in known or finished_run(run):
            finished += 1
        elif run.arm in wanted:
            missing.append(run)
    missing.sort(key=lambda run: wanted.index(run.arm))
    say(f"{finished} of {len(planned)} runs are finished")
    if args.dry_run:
        list_missing(missing)
        return
    if missing and not args.report_only:
        command = python_command("-m", "research", "real_board", *argv)
        processes, threads = side_by_side(kinds_of(missing), args.processes)
        missing = [replace(run, threads=threads) for run in missing]
        failed = make_runs(missing, processes, command)
    command = command_of("real_board", typed, ["runs"])
    report_real_board(args, finished_arms(planned, known), command)
    end_with(failed)


def flags_of_arms(args: SimpleNamespace) -> dict[str, str]:
    """The flags of each arm, by its name."""
    form = FORMS[args.prompt]
    questions = args.questions or form.questions
    of_arms = {}
    for arm, flags in ARMS.items():
        if arm not in form.without:
            of_arms[arm] = flags.format(four_times=4 * questions)
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


def chosen_arms(args: SimpleNamespace) -> list[str]:
    """The arms that --arms names, or all."""
    known = flags_of_arms(args)
    if not args.arms:
        return list(known)
    wanted = [name.strip() for name in args.arms.split(",")]
    for name in wanted:
        if name not in known:
            raise UserError(f"--arms: there is no arm {name!r}. The arms of --prompt "
                            f"{args.prompt} are {', '.join(known)}")
    return wanted


def model_name(args: SimpleNamespace) -> str:
    """The model's name, wherever its folder lies."""
    return find_folder(args.model).absolute().name


def real_runs(args: SimpleNamespace) -> list[PlannedRun]:
    """All runs of the plan, arm by arm."""
    folder = Path(args.runs) / name_of_board(args).removeprefix("real_board_")
    common = ["--model", args.model, "--prompt", args.prompt, *COMMON.split()]
    if args.device != "cpu":
        common += ["--device", args.device]
    planned = []
    for arm, flags_of_arm in flags_of_arms(args).items():
        own_flags = flags_of_arm.split()
        if args.questions and "--questions" not in own_flags:
            own_flags += ["--questions", str(args.questions)]
        for seed in range(args.seeds):
            planned.append(PlannedRun(
                arm,
                seed,
                folder / f"{arm.replace(' ', '-')}-s{seed}",
                flags=[*common, *own_flags],
                steps=FORMS[args.prompt].steps,
                keeps_checkpoints=False))
    return planned


def report_real_board(args: SimpleNamespace, arms: Arms, command: str) -> None:
    """Write the report into a folder of results/ with the name of this leaderboard. It takes the
    place of the one before."""
    if len(arms.get(PLAIN, {})) < 2:
        raise UserError(f"{args.runs} does not yet have two finished seeds of plain GRPO ({PLAIN})")
    name = name_of_board(args)
    folder = Path("results") / name
    folder.mkdir(parents=True, exist_ok=True)
    predicted = predictions("real_board").get(name.removeprefix("real_board_"), {})
    complete = {arm: runs for arm, runs in arms.items() if len(runs) >= FEWEST_PAIRS}
    tables = [real_leaderboard(arms, predicted), quarters_table(arms),
              pairs_table(over_baseline(complete, PLAIN),
                          "The gain over plain GRPO in training of every pair, in points"),
              without_one_seed_table(complete),
              power_table(complete_gains(arms), list(CONTROLS))]
    drawing = partial(draw_gains, meanings=CONTROLS, second_look="")
    draw_published(drawing, folder / "gains.png", tables[0].to_json())
    made = by_run_name(arms)
    settings = {"prompt": args.prompt, "model": model_name(args), "common": common_flags(args),
                "arms": flags_of_arms(args), "steps": FORMS[args.prompt].steps}
    findings = Findings("Which method trains a real model better than plain GRPO?",
                        [f"{len(made)} runs of {name} are finished."], tables,
                        real_values(arms))
    write_report(folder, "real_board", findings, settings, made, total_seconds(made.values()),
                 command)


def complete_gains(arms: Arms) -> dict[str, Gain]:
    """The gains of the arms that have all of their first six pairs."""
    found = gains(over_baseline(arms, PLAIN), controls=list(CONTROLS), fewest=FEWEST_PAIRS)
    return {arm: gain for arm, gain in found.items() if gain.pairs >= FEWEST_PAIRS}


def real_leaderboard(arms: Arms, predicted: dict[str, float]) -> Table:
    """The arms that have all of their first six pairs, the best first."""
    complete = complete_gains(arms)
    seconds_of_plain = mean_step_seconds(arms[PLAIN].values())
    cost = {arm: mean_step_seconds(arms[arm].values()) / seconds_of_plain for arm in complete}
    return leaderboard(complete, predicted, cost)


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


def real_values(arms: Arms) -> dict:
    """Every run in short, by its name."""
    runs = {}
    for name, run in by_run_name(arms).items():
        answers = run["config"]["questions"] * run["config"]["answers"]
        runs[name] = short_form(run, answers)
    return {"runs": runs}


def published_real_runs(args: SimpleNamespace) -> dict[tuple[str, int], Run]:
    """The runs of the published leaderboard whose flags are still those of the plan."""
    name = name_of_board(args)
    if not (RESULTS / f"{name}.json").exists():
        return {}
    result = read_result(RESULTS / f"{name}.json")
    steps = FORMS[args.prompt].steps
    require_same_plan(name, result, {"common": common_flags(args), "steps": steps,
                                     "model": model_name(args)})
    flags_then, flags_now = result["settings"]["arms"], flags_of_arms(args)
    runs = {}
    for run_name, stored in result["values"]["runs"].items():
        arm, _, number = run_name.rpartition("-s")
        seed = int(number)
        if flags_now.get(arm) == flags_then.get(arm) and seed < args.seeds:
            runs[arm, seed] = from_short_form(stored, result, run_name)
    return runs
