"""Find the task that --task names: the class Task of a module in the project's folder."""
import dataclasses
import importlib
import inspect
import os
import traceback
from types import ModuleType

from engine.errors import UserError
from engine.files import PROJECT
from engine.flags import fields_as_flags, shortened

SHIPPED_TASKS = ("countdown_task", "tools.descending")
SHIPPED = f"{' and '.join(SHIPPED_TASKS)} ship with it"


def load_task(name: str) -> type:
    """The class Task of a module of the project's folder. Its fields are flags."""
    if not isinstance(name, str):
        raise UserError(f"--task {name!r} should be a text")
    if not is_module(name):
        raise UserError(f"--task {shortened(name)}: there is no such module in the project's "
                        "folder (the file tools/my_task.py is the module tools.my_task); "
                        f"{SHIPPED}")
    module = import_task(name)
    task = getattr(module, "Task", None)
    if not inspect.isclass(task) or task.__module__ != name:  # a Task that it imports is another's
        raise UserError(f"--task {name}: this module has no class Task of its own; {SHIPPED}")
    if not dataclasses.is_dataclass(task):
        raise UserError(f"--task {name}: its class Task should be a dataclass of flags")
    return task


def import_task(name: str) -> ModuleType:
    """Import the module; what goes wrong in it is said with its place."""
    try:
        return importlib.import_module(name)
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"--task {name} cannot be imported: {error}") from None
    except SyntaxError as error:
        raise UserError(f"--task {name} cannot be imported: {error.filename}, line {error.lineno}: "
                        f"{error.msg}") from None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(f"--task {name} cannot be imported: {place.filename}, line {place.lineno}: "
                        f"{type(error).__name__}: {error}") from None


def about_flag_of_another(name: str, task: str) -> str:
    """A sentence about a flag that this task lacks, and a task that ships with it has; else an
    empty one."""
    for other in SHIPPED_TASKS:
        if other != task and is_module(other) and name in fields_as_flags(load_task(other)):
            return f"--{name} is no flag of --task {task}, it belongs to --task {other}"
    return ""


def make_task(settings):
    task = load_task(settings.task)
    return task(**{name: settings.own[name] for name in fields_as_flags(task)})


def is_module(name: str) -> bool:
    parts = name.split(".")
    if not all(part.isidentifier() and not part.startswith("__") for part in parts):
        return False
    return os.path.isfile(PROJECT.joinpath(*parts).with_suffix(".py"))
