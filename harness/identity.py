"""Which run a file is of. Every file of a run says it, and one function compares.

    config.json            "run_id": "9f2c61d0a8b3e457"
    metrics.jsonl, ...     the same in every line
    credit/step_N.npz      columns run_id, step and process
    a checkpoint           run_id and step in trainer/state.json

The run_id is a sha256 of all that makes a run what it is, so the same command has the same one, and
config.json can be compared with its own: a setting that was changed by hand no longer fits. A run
of an older version has none, in any of its files, and nothing of it is compared.
"""
import hashlib
import json
from pathlib import Path

from engine.errors import UserError
from harness.files import is_there, read_json

CHANGES_ROUNDING = ("threads", "device", "micro_batch", "checkpointing", "offload_optimizer",
                    "shard")
CHANGEABLE = (  # in a resumed run: how many steps it has and how it is made, not which run it is
    "steps", *CHANGES_ROUNDING, "rollouts", "rollouts_timeout", "sample_every",
    "checkpoint_every")
# a name more or less in these makes another run_id of every config.json that has it
NOT_IN_RUN_ID = (*CHANGEABLE, "out", "ranks", "versions", "git_commit", "code", "run_id")


def run_id_of(config: dict) -> str:
    """Of the settings in config.json, the model and the reward. What a path leads to counts, not
    the path: its fingerprint is in `made_of`."""
    made_of = config.get("made_of")
    paths = made_of if isinstance(made_of, dict) else ()
    known = {name: value for name, value in config.items()
             if name not in NOT_IN_RUN_ID and name not in paths}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def refuse_changed_config(path: Path, config: dict) -> None:
    """Stop if the settings in config.json are not those that the run began with."""
    if "run_id" in config and config["run_id"] != run_id_of(config):
        raise UserError(f"{path} was changed since the run began: its settings do not fit its "
                        "run_id. Put the old ones back, or begin another run with them: "
                        f"--config {path} --out NAME")
    if not is_code(config.get("code", [])):
        raise UserError(f"{path}: its code is not as this program writes it")


def is_code(record) -> bool:
    """Whether it can be the entry `code`, which provenance.py makes."""
    return isinstance(record, list) and all(
        isinstance(part, dict) and type(part.get("after_step")) is int
        and isinstance(part.get("files"), dict) for part in record)


def run_id_on_record(run: Path) -> str | None:
    """That of the run in this folder; None of an older version, and where there is no run."""
    path = Path(run) / "config.json"
    return read_json(path).get("run_id") if is_there(path) else None


def check_origin(where: str | Path, found: dict, wanted: dict) -> None:
    """Compare what a file or a line says of itself with what its place says."""
    for name, value in wanted.items():
        if found.get(name) != value:
            raise UserError(f"{where} does not belong there: its {name} is "
                            f"{found.get(name, 'missing')}, not {value}. Was something lost, "
                            "exchanged, or taken from another run?")
