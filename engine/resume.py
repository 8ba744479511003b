"""What train.py asks before it goes on: is this the run that is meant, and is it finished?"""
from engine.errors import UserError
from engine.files import read_json
from engine.run_folder import RunFolder
from engine.settings import OPTIONS, Settings, own_flags

CHANGEABLE = {"steps"}               # in a resumed run
WITHOUT_EFFECT = ("threads", "out")  # on what a run is


def refuse_changes(given: dict) -> None:
    wrong = sorted(set(given) - CHANGEABLE)
    if wrong:
        raise UserError(f"--{wrong[0]} cannot be changed in a resumed run, only --steps can")


def what_differs(settings: Settings) -> str:
    """What in the run folder differs from the run that was asked for; empty if nothing does."""
    path = settings.folder / "config.json"
    if not path.is_file():
        return " and is not a run folder:"
    # a run from before a setting existed had what is its default now
    defaults = {name: flag.default for name, flag in {**OPTIONS, **own_flags(settings)}.items()}
    config = defaults | read_json(path)
    for name, value in settings.to_json().items():
        before = config[name]
        if before != value and name not in WITHOUT_EFFECT:
            return f", with {name} {before} instead of {value}:"
    return ""


def is_finished(run: RunFolder, settings: Settings, done: int) -> bool:
    """`done` is the step of the last checkpoint."""
    if settings.checkpoint_every and settings.steps:
        return done >= settings.steps
    last = max((line["step"] for line in run.lines("metrics.jsonl")), default=0)
    evaluations = run.lines("evaluations.jsonl")
    modes = [line["mode"] for line in evaluations if line["step"] == settings.steps]
    return last >= settings.steps and (not settings.eval_every or len(modes) == 2)
