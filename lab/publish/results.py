"""The store of published results: lab/results/NAME.json, made once, never by hand.

A result holds its question, its tables, the command that made them, the commit, the versions, the
day and a seal. `python -m lab show` (show.py) prints one, `python -m lab publish`
(publish.py) writes one. Results from before 28 November 2026 also had all `values` that their
tables were made of. These stand in the commit that is named in `all_values`.
"""
import hashlib
import json
from datetime import date
from pathlib import Path

from lab.engine.errors import PROJECT, UserError, read_json
from lab.harness.record import replace_text

RESULTS = PROJECT / "lab/results"
KEPT = ("measured", "question", "command", "git_commit", "versions", "seconds", "in_short",
        "tables", "values")
NOT_KEPT = ("made_by", "out")  # of the settings


def fingerprint(*content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_result(path: Path, result: dict) -> None:
    """Write a result with its seal, a fingerprint of what it holds, which is compared whenever it
    is read."""
    sealed = {**result, "sha256": fingerprint(result)}
    replace_text(path, json.dumps(sealed, indent=1, allow_nan=False) + "\n")


def read_result(path: Path) -> dict:
    """The result as it was written, without its seal."""
    if not path.exists():
        raise UserError(f"there is no {path}: python -m lab publish FOLDER makes it")
    result = read_json(path)
    if result.pop("sha256", None) != fingerprint(result):
        raise UserError(f"{path} was changed by hand or damaged: it does not fit its sha256. Take "
                        "it back from git, or publish it again")
    return result


class Results:
    """The published results by name, each of them read once."""

    def __init__(self) -> None:
        self.were_read: dict[str, dict] = {}

    def result(self, name: str) -> dict:
        if name not in self.were_read:
            self.were_read[name] = read_result(RESULTS / f"{name}.json")
        return self.were_read[name]

    def table(self, name: str, table: str) -> dict:
        tables = {one["name"]: one for one in self.result(name)["tables"]}
        if table not in tables:
            raise UserError(f"there is no table {table}, only {', '.join(tables)}")
        return tables[table]


def table_rows(name: str, table: str) -> list[dict]:
    """The rows of a table of a published result."""
    return Results().table(name, table)["rows"]


def result_of(folder: Path) -> dict:
    """What is published of the numbers that an experiment or a probe has written."""
    numbers = read_json(folder / "numbers.json")
    if not {"measured", "tables", "settings"} <= numbers.keys():
        raise UserError(f"{folder} was not written by python -m lab")
    result = {key: numbers[key] for key in KEPT if key in numbers}
    try:
        json.dumps(numbers, allow_nan=False)
    except ValueError:  # JSON has no NaN, so other programs could not read it
        raise UserError(f"{folder / 'numbers.json'} holds a NaN or an infinity, which a result may "
                        "not have: a number that is not known is null") from None
    settings = numbers["settings"]
    result["settings"] = {key: settings[key] for key in settings if key not in NOT_KEPT}
    result["day"] = date.today().isoformat()
    result["made_by"] = settings.get("made_by", [])
    return result


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
    """README and the pages of docs/ and lab/."""
    found = [PROJECT / "README.md"]
    for folder in ("docs", "lab", "lab/reports", "lab/trl"):
        found += sorted((PROJECT / folder).glob("*.md"))
    return found
