"""What train.py asks before it goes on: is this the run that is meant, is it finished, is all there
that it needs, and would anything be lost?"""
import json
import shlex
from contextlib import ExitStack
from pathlib import Path

import torch

from engine import processes
from engine.errors import UserError
from harness.credit_file import checkpoint_folders, credit_files, credit_path, step_of
from harness.credit_reading import credit_steps
from harness.files import (Json, is_file, is_there, lines_in, paths_in, read_json, remove, writing)
from harness.identity import (CHANGEABLE, CHANGES_ROUNDING, Evaluation, Line, code_in_use,
                              fingerprint)
from harness.log_reading import (NAMES, Code, RunConfig, StepLine, check_seal, last_step,
                                 lines_of_run, missing_evaluations, refuse_gaps, run_config)
from harness.progress import say
from harness.run import Run
from harness.run_folder import RunFolder, open_folder
from harness.settings import Settings, flags_beside, make_settings


class ResumedRun(Run):
    code: Code  # by which the steps before were made

    def prepare(self) -> None:
        if self.checkpoint:
            self.state.load(self.checkpoint)
        processes.barrier()  # until all have read what is changed now
        keep_changes(self.folder, self.code, self.settings, self.done)
        if processes.rank() == 0:
            truncate(self.folder, self.done or -1)  # the evaluation at step 0 is made again, too
        processes.barrier()  # until there is nothing left of what is made again


def truncate(run: RunFolder, step: int) -> None:
    """Remove what a stopped run wrote past its last checkpoint: it will be written again."""
    with writing(run.path):
        for kind, name in NAMES.items():
            texts = zip(lines_in(run.path / name), lines_of_run(run.path, kind))
            kept = [text.rstrip("\n") + "\n" for text, line in texts if line["step"] <= step]
            if is_there(run.path / name):
                run.replace(name, "".join(kept))  # letter for letter
        for known, rank in credit_files(run.path):
            if known > step:
                remove(credit_path(run.path, known, rank))
        for known, path in checkpoint_folders(run.path).items():
            if known > step:
                say(f"{path} has no trainer/state.json to go on from: it is made again, and so are "
                    f"all steps after {max(step, 0)}")
                remove(path)
        for folder in ("", "credit", "checkpoints"):
            for path in paths_in(run.path / folder):
                if path.name.startswith((".", "step_")) and path.suffix == ".tmp":
                    remove(path)


def continued(settings: Settings, given: Json, may_continue: bool) -> Run:
    """The run that is in the folder of these settings, if it is the one and may be gone on with."""
    difference, folder = what_differs(settings), settings.folder
    if difference or not may_continue:
        way_out = difference or f": go on with --resume {shlex.quote(str(folder))}, or"
        raise UserError(f"{folder} exists already{way_out} name another with --out")
    return resumed(settings.folder, {name: given[name] for name in CHANGEABLE if name in given},
                   is_planned=True)


def resumed(path: Path, given: Json, is_planned: bool = False) -> Run:
    """The run of a folder. `given` are the flags typed now; few may be changed. `is_planned`: all
    flags were typed, and make it again if it has to begin again."""
    for name in sorted(set(given) - set(CHANGEABLE)):
        flags = ", ".join(f"--{name}" for name in CHANGEABLE)
        raise UserError(f"--{name} cannot be changed in a resumed run, only {flags} can")
    config = run_config(path)
    settings = make_settings({"config": path / "config.json", **given})
    processes.start(settings.device)  # who is rank 0, and locks the folder, is known from here on
    with ExitStack() as opened:
        folder = opened.enter_context(open_folder(path))
        run = checked_run(folder, config, settings, is_planned)
        run.cleanup = opened.pop_all()
    return run


def checked_run(folder: RunFolder, config: RunConfig, settings: Settings, is_planned: bool) -> Run:
    """From the last checkpoint, or from the start where nothing can be lost."""
    folder.remove_old_states()  # a kill may have come before the run did this
    checkpoints = folder.checkpoints()
    run = ResumedRun(settings, checkpoints[-1] if checkpoints else None)
    run.folder, run.code = folder, config.get("code") or {}
    before = make_settings({"config": folder.path / "config.json"})
    if run.checkpoint:
        refuse_gaps(folder.path, config, lines_of_run(folder.path, StepLine),
                    lines_of_run(folder.path, Evaluation), run.done)
    if is_finished(folder, config, before, settings, run.done):
        done = max(run.done, last_step(folder.path))
        say(f"{folder.path} has {done} of its {before.steps} steps, and no more were asked for: "
            "--steps N goes on to N")
        run.is_finished = True
        return run
    # by the metrics, and by the credit files if those were lost: a kill may cost one line
    steps = max([last_step(folder.path), *(step - 1 for step, _ in credit_files(folder.path))])
    kept = before.checkpoint_every
    if not run.checkpoint and steps > kept and (kept or not is_planned):
        # until the first checkpoint is due, to start again loses nothing: the same steps are made;
        # nor does it where none ever was, and a plan asks for the whole run
        raise UserError(f"{folder.path} holds a record of {steps} steps, and no checkpoint to go "
                        "on from. Remove it, or name another folder with --out")
    check_what_is_there(folder, settings, config, run.checkpoint)
    say(f"going on after step {run.done}" if run.done else
        "no checkpoint to go on from: starting again at step 1")
    return run


def what_differs(settings: Settings) -> str:
    """How the run in the folder differs from the one that was asked for, as part of a sentence."""
    path = settings.folder / "config.json"
    if not is_file(path):
        return " and is not a run folder:"
    # a run that is older than a setting was made with what is now its default
    values = settings.to_json()
    defaults = {name: flag.default for name, flag in flags_beside(values).items()}
    config, may_differ = defaults | read_json(path), {"out", *CHANGEABLE} - {"steps"}
    for name, value in values.items():
        if config[name] != value and name not in may_differ:
            return f", with {name} {config[name]} instead of {value}:"
    return ""


def is_finished(run: RunFolder, config: RunConfig, before: Settings, settings: Settings,
                done: int) -> bool:
    """Whether the run has all its steps. `done` is the step of the last checkpoint, 0 without one:
    then the record decides, since the checkpoints of a finished run may have been removed."""
    if done and (before.checkpoint_every or done >= settings.steps):
        return done >= settings.steps
    missing = missing_evaluations(config, lines_of_run(run.path, Evaluation), settings.steps,
                                  settings.steps)
    return last_step(run.path) >= settings.steps and not missing


def check_what_is_there(run: RunFolder, settings: Settings, config: RunConfig,
                        checkpoint: Path | None) -> None:
    """Stop unless all is as it was when the checkpoint was written, or when the run began."""
    lines_of_run(run.path, Line)  # the samples; the other logs were read to see how far it came
    needs_model = not checkpoint or settings.kl or settings.loss == "dpo"
    # a run from before this was kept has nothing to compare with
    before = config.get("made_of") or {}
    paths = settings.paths
    for name in sorted(before.keys() & paths.keys() - (set() if needs_model else {"model"})):
        if fingerprint(paths[name]) != before[name]:
            raise UserError(f"--{name}: {paths[name]} is not what it was when this run began (its "
                            "sha256 is another). Put the old one back, or begin a run of its own "
                            "with --out")
    done = step_of(checkpoint) if checkpoint else 0
    if lost := sorted({*range(1, done + 1)} - {*credit_steps(run.path)}):
        say(f"note: {run.path / 'credit'} has lost the files of {len(lost)} steps, the first is "
            f"step {lost[0]}; training goes on without them")
    if checkpoint:
        try:
            check_seal(run.path, checkpoint)
        except UserError as error:
            raise UserError(f"{error} (move {checkpoint} away, and --resume goes on from the one "
                            "before it)") from None


def keep_changes(run: RunFolder, code: Code, settings: Settings, done: int) -> None:
    """Write what is changed into config.json, and print a note of what may change results. `code`
    is what made the steps before."""
    config = read_json(run.path / "config.json")
    code = {step: files for step, files in code.items()
            if step.isdecimal() and int(step) <= done}
    before = {name: sha256 for files in code.values() for name, sha256 in files.items()}
    now = code_in_use()
    others = {name: now[name] for name in sorted(before.keys() & now) if now[name] != before[name]}
    if others or not before:
        code[str(done + 1)] = others or now
    values = settings.to_json() | {"threads": torch.get_num_threads(), "code": code}
    changes = {name: values[name] for name in (*CHANGEABLE, "code")
               if config.get(name, values[name]) != values[name]}
    if changes:
        run.replace("config.json", json.dumps({**config, **changes}, indent=2) + "\n")
    if others:
        say(f"note: {', '.join(others)}: not the code that made the steps before, so from "
            f"step {done + 1} on this is not the run it would have been (config.json has both)")
    if flags := [f"--{name} {changes[name]}" for name in CHANGES_ROUNDING if name in changes]:
        say(f"note: {', '.join(flags)}: the same computation with other rounding, so from here on "
            "this is not bit for bit the run it would have been")
