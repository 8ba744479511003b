"""What a checkpoint knows of the run it belongs to: its own files, and the lines before it.

A run goes on from a checkpoint only if it is one of this run (identity.py), and both are still as
they were when it was written. Otherwise steps would be counted that are not on record, or another
run's state would be taken for this one's.
"""
import hashlib
from pathlib import Path

from harness.credit_file import step_of
from engine.errors import UserError
from harness.files import read_json, reading
from harness.identity import check_origin, run_id_on_record
from harness.provenance import sha256_of

LOGS = ("metrics.jsonl", "evaluations.jsonl", "samples.jsonl")
FILES = ("config.json", "model.safetensors", "tokenizer.json", "trainer/state.safetensors")


def make_seal(run: Path, checkpoint: Path, step: int) -> dict:
    """For trainer/state.json: run and step, the number of lines of every log, and a sha256 of each
    file."""
    logs = {}
    for name in LOGS:
        lines = whole_lines(run / name)
        logs[name] = {"lines": len(lines), "sha256": hash_of(lines)}
    files = {name: sha256_of(checkpoint / name) for name in FILES}
    return {"run_id": run_id_on_record(run), "step": step, "logs": logs, "files": files}


def check_seal(run: Path, checkpoint: Path) -> None:
    """Compare the seal with the files and logs as they are now. In a checkpoint of an older version
    it holds nothing to compare with."""
    seal = read_json(checkpoint / "trainer" / "state.json")
    check_origin(checkpoint, seal, {"run_id": run_id_on_record(run), "step": step_of(checkpoint)})
    for name, sha256 in part(seal, "files").items():
        if sha256_of(checkpoint / name) != sha256:
            raise UserError(f"{checkpoint / name} was changed after it was written. Move "
                            f"{checkpoint} away, and --resume goes on from the one before it")
    for name, log in part(seal, "logs").items():
        lines = whole_lines(run / name)
        count = part(log, "lines", int)
        if len(lines) < count:
            raise UserError(f"{run / name} has {len(lines)} lines; there were {count} when "
                            f"{checkpoint.name} was written")
        if hash_of(lines[:count]) != part(log, "sha256", str):
            raise UserError(f"the first {count} lines of {run / name} are not those that were "
                            f"there when {checkpoint.name} was written")


def part(seal, name: str, kind: type = dict):
    """An entry of a seal. A dict that is missing is empty; anything else has to be there."""
    value = seal.get(name, {}) if isinstance(seal, dict) else None
    if not isinstance(value, kind):
        raise UserError(f"trainer/state.json of a checkpoint has no sensible {name}")
    return value


def whole_lines(path: Path) -> list[str]:
    """The lines that end with a line break; no file is no lines."""
    try:
        with reading(path) as file:
            return file.read().split("\n")[:-1]
    except FileNotFoundError:
        return []


def hash_of(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
