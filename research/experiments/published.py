"""What was measured and stands on a page: docs/results/NAME.json, made once, never by hand.

    python -m research publish results/study-control      # what a report or a probe has written
    python -m research pages                              # write its numbers into the pages

A result holds its tables, the command that made them, the commit, the versions and the day. It also
holds what the lab did that day in a few numbers (witness.py).
"""
import json
import shlex
import shutil
from datetime import date
from pathlib import Path

from engine.errors import UserError
from harness.files import PROJECT, is_file, make_folder, paths_in, read_json, replace_text
from harness.flags import Flag, Parser, add_flags, shortened, with_defaults
from harness.progress import say
from harness.provenance import fingerprint
from research.experiments.experiments import EXPERIMENTS
from research.experiments.witness import (every_arm, made_by_other_code, sources_of, what_differs,
                           witness_of)

RESULTS = PROJECT / "docs/results"
KEPT = ("measured", "command", "git_commit", "versions", "seconds", "in_short", "tables")


def publish(folder: Path, name: str | None = None) -> Path:
    """Take the numbers of a report or a probe, and its pictures that pages show, in the place of
    those before."""
    numbers = read_json(folder / "numbers.json")
    missing = [key for key in (*KEPT, "settings", "quick_look") if key not in numbers]
    if missing:
        raise UserError(f"{folder}/numbers.json has no {missing[0]}: publish what python -m research "
                        "NAME or a probe of python -m research wrote")
    if numbers["quick_look"]:
        raise UserError(f"{folder} is a quick look: its numbers say nothing")
    result = {key: numbers[key] for key in KEPT}
    result["command"] = as_anyone_types(result["command"])
    arms = arms_of(result["measured"])
    refuse_other_runs(folder, arms, numbers["settings"].get("first_steps") or {})
    commit = numbers["git_commit"]  # the probe may have changed since
    result |= {"day": date.today().isoformat(),
               "made_by": made_by(result["measured"], arms, commit)}
    make_folder(RESULTS)
    name = name or numbers.get("name") or short_name(result["measured"])
    path = RESULTS / f"{name}.json"
    replace_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
    shown = "".join(page.read_text(encoding="utf-8") for page in pages())
    for picture in paths_in(folder):
        kept = RESULTS / f"{path.stem}-{picture.name}"
        if picture.suffix == ".png" and f"results/{kept.name}" in shown:
            shutil.copy(picture, kept)
    return path


def refuse_other_runs(folder: Path, arms: dict[str, str], first_steps: dict[str, list]) -> None:
    """A run that is finished is passed over, also when the formula of its arm has changed since."""
    others = made_by_other_code(arms, first_steps)
    if others:
        raise UserError(f"{folder}: the runs of {', '.join(others)} were made by other code than "
                        "today's, as their first step is another. Remove them, and the experiment "
                        "makes them again")


def pages() -> list[Path]:
    docs = [path for path in paths_in(PROJECT / "docs") if path.suffix == ".md"]
    return [PROJECT / "README.md", *docs]


def as_anyone_types(command: str) -> str:
    """Without the path of an interpreter, and without what changes no number."""
    words = shlex.split(command)[1:]
    while "--out" in words:
        place = words.index("--out")
        del words[place:place + 2]
    return shlex.join(["python", *(word for word in words if word != "--report_only")])


def short_name(measured: str) -> str:
    return measured.removeprefix("study-")


def made_by(measured: str, arms: dict[str, str], commit: str | None = None) -> dict:
    """What the numbers depend on: model, recipe, the arms' doings, the source of a probe, today or
    in a commit."""
    return {"model": fingerprint(PROJECT / "models/tiny"),
            "recipe": read_json(PROJECT / "models/tiny/recipe.json"),
            "arms": witness_of(arms), "source": sources_of(module_of(measured), commit)}


def arms_of(measured: str) -> dict[str, str]:
    """Name -> flags of train.py, of every arm whose doings the numbers depend on."""
    if not measured.startswith("study-"):
        return every_arm()
    name = short_name(measured)
    if name not in EXPERIMENTS:
        raise UserError(f"there is no experiment {name} any more, whose arms this measured: put it "
                        "back into research/experiments/experiments.py")
    experiment = EXPERIMENTS[name]
    return {arm: f"{experiment.common} {flags}" for arm, flags in experiment.arms.items()}


def module_of(measured: str) -> str | None:
    """The probe. A report has none: it only counts what the runs did."""
    return None if measured.startswith("study-") else f"research.probes.{measured}"


FLAGS = {"name": Flag(None, "of the result, by default that of the experiment or the probe")}


def main(argv: list[str]) -> None:
    parser = add_flags(Parser("python -m research publish FOLDER [flags]", __doc__), FLAGS)
    parser.add_argument("folder", help="results/study-NAME, or what a probe has written")
    typed = parser.read(argv)
    folder = Path(typed.pop("folder"))
    name = with_defaults(typed, FLAGS).name
    if name is not None and not name.isidentifier():
        raise UserError(f"--name {shortened(name)} should be letters, digits and _")
    say(f"published: {publish(folder, name)}; python -m research pages writes its numbers into the "
        "pages")


def out_of_date(path: Path) -> list[str]:
    """Why the result is not what would be measured today; empty if nothing speaks against it. Arms
    that came later change nothing in it."""
    result = read_result(path)
    before, arms = result["made_by"], arms_of(result["measured"])
    still_there = {arm: arms[arm] for arm in before["arms"] if arm in arms}
    return what_differs(before, made_by(result["measured"], still_there))


def read_result(path: Path) -> dict:
    if not is_file(path):
        raise UserError(f"there is no {path}: python -m research publish FOLDER makes it")
    return read_json(path)
