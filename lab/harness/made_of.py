"""What a run of the lab is made of beside its code, which is copied into its folder (run.py): a
digest of each file of data that flags name, and of those of the model. What a function opens by
itself is not seen.
"""
import os
from pathlib import Path

from lab.engine.errors import PROJECT
from lab.harness.record import digest_of, find_folder
from lab.harness.settings import LabSettings
from lab.harness.tasks import file_of_task
from lab.harness.versions import START, shown, texts_of

OF_A_STEP = ("*.py", "lab/countdown.py", "lab/engine/*.py", "lab/harness/*.py", "lab/credit/*.py")


def made_of(s: LabSettings, root: Path = PROJECT) -> dict[str, str]:
    """The digest of each file by its path: from the project's folder, or the whole path of a file
    that lies elsewhere."""
    files = files_of_model(find_folder(s.model))
    for value in s.to_json().values():
        if isinstance(value, str) and value and find_folder(value).is_file():
            files.add(find_folder(value))
    for value in s.keywords.values():  # a model that a method takes, as --teacher
        if isinstance(value, str) and value and (find_folder(value) / "config.json").is_file():
            files |= files_of_model(find_folder(value))
    return {shown(Path(os.path.abspath(path)), root): digest_of(path) for path in sorted(files)}


def files_of_model(folder: Path) -> set[Path]:
    return {path for path in folder.glob("*")
            if path.suffix in (".json", ".jinja", ".safetensors") and path.is_file()}


def program(s: LabSettings, root: Path = PROJECT) -> dict[str, str]:
    """The text of each definition that a run can reach, if the project lies in `root`, and some
    more that have the same names. Of the task and what lies beside it, all."""
    task = file_of_task(s.task)
    beside = {*(root / task.relative_to(PROJECT)).parent.glob("*.py")} if (
        task.is_relative_to(PROJECT)) else {task}
    files = {path for pattern in (*OF_A_STEP, "lab/gpu/*.py") for path in root.glob(pattern)
             if s.device != "cpu" or "gpu" not in path.parts} | beside
    return texts_of(sorted(files), START | {s.mitigation, s.advantage}, root)
