"""What was measured and stands on a page: docs/results/NAME.json, made once, never by hand.

    python -m research publish results/study-control   # what a report or a probe has written
    python -m research pages                           # write its numbers into the pages
    python -m research check                           # what has changed in the code since then

A result holds its tables, the command that made them, the commit, the versions and the day.
"""
import json
import shlex
import shutil
import subprocess
from collections import Counter
from datetime import date
from pathlib import Path

from engine.errors import UserError
from harness.files import (PROJECT, is_file, make_folder, paths_in, read_json,
                           replace_text)
from harness.flags import Flag, Parser, add_flags, shortened, with_defaults
from harness.progress import say

RESULTS = PROJECT / "docs/results"
KEPT = ("measured", "command", "git_commit", "versions", "seconds", "in_short", "tables")
FLAGS = {"name": Flag(None, "of the result, by default that of the experiment or the probe")}
# what every number comes from, beside the file of its probe or experiment
SOURCES = ("countdown_task.py", "qwen2_model.py", "grpo.py", "mitigations.py", "train.py",
           "analyze.py", "engine", "credit", "models/tiny")


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


def publish(folder: Path, name: str | None = None) -> Path:
    """Take the numbers of a report or a probe, and its pictures that pages show, in the place of
    those before."""
    numbers = read_json(folder / "numbers.json")
    missing = [key for key in (*KEPT, "settings", "quick_look") if key not in numbers]
    if missing:
        raise UserError(f"{folder}/numbers.json has no {missing[0]}: publish what an experiment or "
                        "a probe of python -m research wrote")
    if numbers["quick_look"]:
        raise UserError(f"{folder} is a quick look: its numbers say nothing")
    made = numbers["settings"].get("made_by", [])
    for line in about_code(made):
        say(line)
    result = {**{key: numbers[key] for key in KEPT}, "day": date.today().isoformat(),
              "command": as_anyone_types(numbers["command"]), "made_by": made}
    make_folder(RESULTS)
    name = name or numbers.get("name") or result["measured"].removeprefix("study-")
    path = RESULTS / f"{name}.json"
    replace_text(path, json.dumps(result, indent=1, allow_nan=False) + "\n")
    shown = "".join(page.read_text(encoding="utf-8") for page in pages())
    for picture in with_suffix(folder, ".png"):
        kept = RESULTS / f"{path.stem}-{picture.name}"
        if f"results/{kept.name}" in shown:
            shutil.copy(picture, kept)
    return path


def code_of(config: dict) -> dict:
    """What a run's config.json has on record of the code that made it."""
    return {name: config.get(name) for name in ("git_commit", "versions")}


def made_by(configs: dict[str, dict]) -> list[dict]:
    """The codes that made these runs, each with the names of its runs."""
    made = []
    for name, config in configs.items():
        code = code_of(config)
        same = next((part for part in made if code_of(part) == code), None)
        if same is None:
            made.append(same := {**code, "runs": []})
        same["runs"].append(name)
    return made


def about_code(made: list[dict]) -> list[str]:
    """A finished run is passed over, also when the formula of its arm has changed since. So whoever
    publishes runs of several codes is told which are whose."""
    if len(made) < 2:
        return []
    lines = ["The runs were made by several codes or versions: is what they compute the same?"]
    for part in made:
        commit, torch = (part["git_commit"] or "unknown")[:7], (part["versions"] or {}).get("torch")
        lines.append(f"  commit {commit}, torch {torch}: {', '.join(part['runs'])}")
    return lines


def pages() -> list[Path]:
    return [PROJECT / "README.md", *with_suffix(PROJECT / "docs", ".md")]


def as_anyone_types(command: str) -> str:
    """Without the path of an interpreter, and without what changes no number."""
    words = shlex.split(command)[1:]
    while "--out" in words:
        place = words.index("--out")
        del words[place:place + 2]
    return shlex.join(["python", *(word for word in words if word != "--report_only")])


def with_suffix(folder: Path, suffix: str) -> list[Path]:
    return [path for path in paths_in(folder) if path.suffix == suffix]


def read_result(path: Path) -> dict:
    if not is_file(path):
        raise UserError(f"there is no {path}: python -m research publish FOLDER makes it")
    return read_json(path)


def check(argv: list[str]) -> None:
    """Of every result its command, and what has changed since in what its numbers come from."""
    Parser("python -m research check", check.__doc__).read(argv)
    for path in with_suffix(RESULTS, ".json"):
        result = read_result(path)
        commit = result["git_commit"]
        print(f"{path.stem}: {result['command']} ({result['day']}, commit {(commit or '-')[:7]})")
        print(f"    {changes_in_words(commit, (*SOURCES, own_source(result['measured'])))}")


def own_source(measured: str) -> str:
    if measured.startswith("study-"):
        return "research/experiments/experiments.py"
    return f"research/probes/{measured}.py"


def changes_in_words(commit: str | None, sources: tuple[str, ...]) -> str:
    """Files of a folder are counted, the others named."""
    changed = changed_files(sources, commit)
    if changed is None:
        return "what has changed since is unknown: git does not know that commit here"
    parts = Counter(next(source for source in sources if path == source
                         or path.startswith(f"{source}/")) for path in changed)
    named = [source if source in changed else f"{source} ({count} files)"
             for source, count in parts.items()]
    return f"changed since: {', '.join(named)}" if named else "nothing has changed since"


def changed_files(sources, *commits: str | None) -> list[str] | None:
    """Between two commits, or one and today's files; None without git, or where it does not know a
    commit."""
    if not all(commits) or not shutil.which("git"):
        return None
    found = subprocess.run(["git", "diff", "--name-only", *commits, "--", *sources], cwd=PROJECT,
                           capture_output=True, text=True)
    return None if found.returncode else found.stdout.splitlines()
