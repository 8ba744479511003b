"""What was measured and stands on a page: research/results/NAME.json, made once, never by hand.

    python -m research publish results/board   # what the board or a probe has written

A result holds its tables, the command that made them, the commit, the versions, the day and a seal.
"""
import hashlib
import json
from datetime import date
from pathlib import Path

from engine.errors import PROJECT, UserError, read_json
from harness.record import replace_text
from harness.screen import say
from harness.flags import Flag
from harness.parser import make_parser, with_defaults

RESULTS = PROJECT / "research/results"
KEPT = ("measured", "command", "git_commit", "versions", "seconds", "in_short", "tables", "values")
NOT_KEPT = ("made_by", "out")  # of the settings
FLAGS = {"name": Flag(None, "of the result, by default that of the board or the probe")}


def main(argv: list[str]) -> None:
    parser = make_parser("python -m research publish FOLDER [flags]", __doc__, FLAGS)
    parser.add_argument("folder", help="results/board, or what a probe has written")
    typed = parser.read(argv)
    folder = Path(typed.pop("folder"))
    name = with_defaults(typed, FLAGS).name
    if name is not None and not name.isidentifier():
        raise UserError(f"--name {name:.80} should be letters, digits and _")
    say(f"published: {publish(folder, name)}; python -m research pages writes its numbers into the "
        "pages, python -m research pictures draws them")


def fingerprint(*content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_result(path: Path, result: dict) -> None:
    """Sealed: with a fingerprint of what it holds, which whoever reads it compares."""
    sealed = {**result, "sha256": fingerprint(result)}
    replace_text(path, json.dumps(sealed, indent=1, allow_nan=False) + "\n")


def read_result(path: Path) -> dict:
    """As it was written, without its seal."""
    if not path.exists():
        raise UserError(f"there is no {path}: python -m research publish FOLDER makes it")
    result = read_json(path)
    if result.pop("sha256", None) != fingerprint(result):
        raise UserError(f"{path} was changed by hand or damaged: it does not fit its sha256. Take "
                        "it back from git, or publish it again")
    return result


def table_rows(name: str, table: str) -> list[dict]:
    """Of a table of a published result."""
    return next(one["rows"] for one in read_result(RESULTS / f"{name}.json")["tables"]
                if one["name"] == table)


def publish(folder: Path, name: str | None = None) -> Path:
    """Take the numbers of a report or a probe, in the place of those before."""
    numbers = read_json(folder / "numbers.json")
    if not {"measured", "tables"} <= numbers.keys():
        raise UserError(f"{folder} was not written by python -m research")
    settings = {key: value for key, value in numbers["settings"].items() if key not in NOT_KEPT}
    result = {**{key: numbers[key] for key in KEPT if key in numbers}, "settings": settings,
              "day": date.today().isoformat(), "made_by": numbers["settings"].get("made_by", [])}
    path = RESULTS / f"{name or result['measured']}.json"
    write_result(path, result)
    return path


def made_by(made: dict[str, dict]) -> list[dict]:
    """The codes that made these runs, each with their names. `made` has the runs' settings."""
    codes = []
    for name, record in made.items():
        code = {key: record.get(key) for key in ("git_commit", "versions")}
        same = next((known for known in codes if code.items() <= known.items()), None)
        if same is None:
            codes.append(same := {**code, "runs": []})
        same["runs"].append(name)
    return codes


def pages() -> list[Path]:
    """README, the pages of the lab and those of this book."""
    rooms = [sorted((PROJECT / room).glob("*.md")) for room in ("docs", "research")]
    return [PROJECT / "README.md", *sum(rooms, [])]
