"""The leaderboard of a real model: which weighting or advantage trains it better than plain GRPO?

    python -m research real_board --model models/Qwen2.5-0.5B-Instruct
    python -m research real_board --model FOLDER --prompt expression    # answers without thinking
    python -m research real_board --model FOLDER --arms "none, four times"    # these alone
    python -m research real_board --model FOLDER --report_only

The task is Countdown of two numbers with four solved examples in the prompt, with the settings that
train.py has for a large model on a CPU. Training is short, because once plain GRPO is right in most
answers, most groups have equal rewards, and there is nothing to compare. Each arm is
compared with plain GRPO by the mean success of all trained answers, paired by seed, six seeds an
arm. The arms are made one after the other, so each is whole before the next one begins.

    method    it differs from plain GRPO if its p, corrected by Holm over all methods that have
              their six seeds, is below 0.05; of the others the table says how far they may be
    control   `measured`, credit by Monte Carlo, which must be ahead, with two continuations a token
              and with sixteen; four times the answers; and the advantages shuffled within each
              group, which must not learn. No methods: their p is not corrected
    predicted from research/results/real_board/predictions.json, written before any run

A run's folder is ARM-sSEED. Runs that are finished are taken as they are, and so are those of the
published leaderboard, so that one machine goes on where another stopped.
"""
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from analysis.compare import IN_TRAINING, difference, mean_success, success_by_step, verdict
from analysis.runs import Run
from analysis.statistics import Estimate, holm
from analysis.tables import Table, by_row
from engine.errors import UserError, read_json
from harness.record import find_folder
from harness.screen import python_command, say
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from research.experiments.pictures import draw, draw_leads
from research.experiments.protocol import OF_RUNS, end_with, finished_run
from research.experiments.published import RESULTS, made_by, read_result
from research.probes.common import Findings, command_of, print_all, write_findings
from harness.planned import PlannedRun, make_runs, usable_cores

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
    "random": "--mitigation random",
    SHUFFLED: "--placebo advantages",
    "four times": "--questions {four_times}"}
CONTROLS = {"four times": "larger batches", "measured": "the control", "measured 16": "the control",
            SHUFFLED: "the control"}
FEWEST = 6  # pairs of an arm that counts
BY_SECTION = ("outcome_conditional 0.5", "outcome_conditional 0.25", "by_kind without words")
FORMS = {  # of --prompt: problems a step, steps, and the arms that say nothing there
    "brief": SimpleNamespace(questions=4, steps=24, without=("measured 16",)),
    "expression": SimpleNamespace(questions=8, steps=16, without=BY_SECTION)}
COMMON = ("--dtype bfloat16 --learning_rate 2e-6 --eval_every 0 --save_model no --sample_every 0 "
          "--change_every 0")
FLAGS = {
    "model": Flag("models/Qwen2.5-0.5B-Instruct", "folder of a model"),
    "prompt": Flag("brief", "brief has a short thinking, expression none", choices=tuple(FORMS)),
    "seeds": Flag(6, "of each arm, from seed 0 on", least=FEWEST, most=1000),
    "arms": Flag("", "only these are made, in this order: names with commas between them"),
    "runs": Flag("runs/real_board", "folder of the runs"),
    "afresh": Flag(False, "make runs that were published, too"),
    "dry_run": Flag(False, "list what is missing, and start nothing"),
    **OF_RUNS}
Arms = dict[str, dict[int, Run]]  # by name and seed


def main(argv: list[str]) -> None:
    typed = make_parser("python -m research real_board [flags]", __doc__, FLAGS).read(argv)
    args, failed = with_defaults(typed, FLAGS), {}
    planned, wanted = planned_runs(args), wanted_arms(args)
    known = {} if args.afresh else kept_runs(args)
    unfinished = [run for run in planned if (run.arm, run.seed) not in known
                  and not finished_run(run)]
    say(f"{len(planned) - len(unfinished)} of {len(planned)} runs are finished")
    missing = [run for run in unfinished if run.arm in wanted]
    missing.sort(key=lambda run: wanted.index(run.arm))
    if args.dry_run:
        for run in missing:
            print(f"  {run.folder}\n    {python_command(*run.command)}")
        return
    if missing and not args.report_only:
        command = python_command("-m", "research", "real_board", *argv)
        failed = make_runs(missing, at_a_time(args), command)
    report(args, finished(planned, known), command_of("real_board", typed))
    end_with(failed)


def at_a_time(args: SimpleNamespace) -> int:
    """A run of a large model takes half of a laptop's memory, so by default it is alone."""
    return args.processes or 1


def arms_of(args: SimpleNamespace) -> dict[str, str]:
    """The flags of each arm, by its name."""
    form = FORMS[args.prompt]
    return {arm: flags.format(four_times=4 * form.questions) for arm, flags in ARMS.items()
            if arm not in form.without}


def wanted_arms(args: SimpleNamespace) -> list[str]:
    """Those of --arms, or all."""
    known = arms_of(args)
    if not args.arms:
        return list(known)
    wanted = [name.strip() for name in args.arms.split(",")]
    for name in wanted:
        if name not in known:
            raise UserError(f"--arms: there is no arm {name!r}; the arms of --prompt "
                            f"{args.prompt} are {', '.join(known)}")
    return wanted


def name_of(args: SimpleNamespace) -> str:
    """The model's, wherever its folder lies."""
    return find_folder(args.model).absolute().name


def planned_runs(args: SimpleNamespace) -> list[PlannedRun]:
    """Arm by arm."""
    steps = FORMS[args.prompt].steps
    planned = []
    for arm, flags in arms_of(args).items():
        for seed in range(args.seeds):
            name = f"{arm.replace(' ', '-')}-s{seed}"
            planned.append(PlannedRun(
                arm, seed, Path(args.runs) / args.prompt / name,
                ["--model", args.model, "--prompt", args.prompt, *COMMON.split(), *flags.split()],
                steps, threads=max(1, usable_cores() // at_a_time(args)),
                keeps_checkpoints=False))
    return planned


def finished(planned: list[PlannedRun], known: dict[tuple[str, int], Run]) -> Arms:
    arms: Arms = {}
    for run in planned:
        if found := known.get((run.arm, run.seed)) or finished_run(run):
            arms.setdefault(run.arm, {})[run.seed] = found
    return arms


def report(args: SimpleNamespace, arms: Arms, command: str) -> None:
    """Into results/real_board_PROMPT, where it takes the place of the one before."""
    if len(arms.get(PLAIN, {})) < 2:
        raise UserError(f"{args.runs} has no two finished seeds of {PLAIN} yet")
    name = f"real_board_{args.prompt}"
    folder, path = Path("results") / name, RESULTS / "real_board/predictions.json"
    folder.mkdir(parents=True, exist_ok=True)
    predicted = read_json(path)[args.prompt] if path.exists() else {}
    tables = [board_table(arms, predicted), curve_table(arms)]
    draw(partial(draw_leads, meanings=CONTROLS, ahead=""), folder / "leads.png",
         tables[0].to_json())
    made = {f"{arm}-s{seed}": run["config"] for arm, runs in arms.items()
            for seed, run in runs.items()}
    seconds = sum(line["processor_seconds"] for runs in arms.values() for run in runs.values()
                  for line in run["metrics"])
    settings = SimpleNamespace(
        prompt=args.prompt, model=name_of(args), common=COMMON, arms=arms_of(args),
        steps=FORMS[args.prompt].steps, made_by=made_by(made))
    findings = Findings("Who trains a real model better than plain GRPO?",
                        [f"{len(made)} runs are finished, --prompt {args.prompt}."], tables,
                        values_of(arms))
    write_findings(folder, "real_board", settings, findings, seconds, command)
    print_all(findings)
    print(f"picture and numbers: {folder}; python -m research publish {folder} --name {name} keeps "
          "them")


def board_table(arms: Arms, predicted: dict[str, float]) -> Table:
    """The arms that have all of their first six pairs, the best first."""
    leads = {arm: difference(runs, arms[PLAIN], IN_TRAINING) for arm, runs in arms.items()
             if arm != PLAIN}
    known = {arm: (len(seeds), lead) for arm, (seeds, lead) in leads.items()
             if len(seeds) >= FEWEST}
    methods = [arm for arm in known if arm not in CONTROLS]
    corrected = dict(zip(methods, holm([known[arm][1].p for arm in methods])))
    plain_seconds = seconds_a_step(arms[PLAIN])
    rows = []
    for arm, (pairs, lead) in known.items():
        p = corrected.get(arm, lead.p)
        rows.append([arm, pairs, lead.value, lead.interval, p, predicted.get(arm),
                     seconds_a_step(arms[arm]) / plain_seconds, word_for(lead, p)])
    rows.sort(key=lambda row: -row[2])
    formats = {"arm": "", "pairs": "d", "lead": "points", "95%": "points", "p": "p",
               "predicted": "points", "seconds": ".2f", "verdict": ""}
    return Table("board", "Mean success of all trained answers, each arm minus plain GRPO, in "
                 "points", by_row(formats, rows), "",
                 ["by seed, Student's t; p and verdict by Holm's correction over the methods, of "
                  "the controls alone; seconds: of a step, over plain GRPO's"],
                 {"95%": "95% interval", "p": "p, Holm's correction", "seconds": "cost of a step"})


def word_for(lead: Estimate, p: float) -> str:
    said = verdict(lead, p)
    return {"better": "ahead", "worse": "behind"}.get(said, said)


def curve_table(arms: Arms) -> Table:
    """Success by quarters of the training, means over seeds."""
    rows = []
    for arm, runs in arms.items():
        curve = np.mean([success_by_step(run) for run in runs.values()], 0)
        success = float(np.mean([mean_success(run) for run in runs.values()]))
        rows.append([arm, len(runs), success,
                     *(float(part.mean()) for part in np.array_split(curve, 4))])
    formats = {"arm": "", "seeds": "d", "all": ".1%", "first": ".1%", "second": ".1%",
               "third": ".1%", "last": ".1%"}
    return Table("curve", "Success of the trained answers by quarters of the training, means over "
                 "seeds", by_row(formats, rows))


def seconds_a_step(runs: dict[int, Run]) -> float:
    return float(np.mean([line["processor_seconds"] for run in runs.values()
                          for line in run["metrics"]]))


def values_of(arms: Arms) -> dict:
    """Of each run, by its name: how many answers a step has, seconds a step, and how many answers
    of each step were right. From them the leaderboard goes on elsewhere (kept_runs)."""
    runs = {}
    for arm, of_arm in arms.items():
        for seed, run in of_arm.items():
            answers = run["config"]["questions"] * run["config"]["answers"]
            right = [round(answers * success) for success in success_by_step(run).tolist()]
            seconds = np.mean([line["processor_seconds"] for line in run["metrics"]])
            runs[f"{arm}-s{seed}"] = [answers, round(float(seconds), 2), right]
    return {"runs": runs}


def kept_runs(args: SimpleNamespace) -> dict[tuple[str, int], Run]:
    """Those of the published leaderboard whose flags are still those of the plan."""
    path = RESULTS / f"real_board_{args.prompt}.json"
    if not path.exists():
        return {}
    result, runs, now = read_result(path), {}, arms_of(args)
    same = {"common": COMMON, "steps": FORMS[args.prompt].steps, "model": name_of(args)}
    for name, wanted in same.items():
        if result["settings"][name] != wanted:
            raise UserError(f"{path.name} was made with another {name}: --afresh makes all runs "
                            "anew")
    config = {key: result["made_by"][0][key] for key in ("git_commit", "versions")}
    for name, (answers, seconds, right) in result["values"]["runs"].items():
        arm, _, seed = name.rpartition("-s")
        if now.get(arm) == result["settings"]["arms"].get(arm) and int(seed) < args.seeds:
            metrics = [{"success": count / answers, "processor_seconds": seconds}
                       for count in right]
            runs[arm, int(seed)] = {"metrics": metrics, "config": {
                **config, "questions": answers, "answers": 1}}
    return runs
