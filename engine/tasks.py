"""Find the task that --task names: the class Task of a module in the project's folder."""
import dataclasses
import importlib
import inspect

from engine.errors import UserError
from engine.files import PROJECT
from engine.flags import fields_as_flags

SHIPPED = "countdown_task and tools.descending ship with it"


def load_task(name: str) -> type:
    """The class Task of a module of the project's folder. Its fields are flags."""
    if not isinstance(name, str):
        raise UserError(f"--task {name!r} should be a text")
    if not is_module(name):
        raise UserError(f"--task {name}: there is no such module in the project's folder (the file "
                        f"tools/my_task.py is the module tools.my_task); {SHIPPED}")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"--task {name} cannot be imported: {error}") from None
    task = getattr(module, "Task", None)
    if not inspect.isclass(task) or task.__module__ != name:  # a Task that it imports is another's
        raise UserError(f"--task {name}: this module has no class Task of its own; {SHIPPED}")
    if not dataclasses.is_dataclass(task):
        raise UserError(f"--task {name}: its class Task should be a dataclass of flags")
    return task


def make_task(settings):
    task = load_task(settings.task)
    return task(**{name: settings.own[name] for name in fields_as_flags(task)})


def is_module(name: str) -> bool:
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return False
    return PROJECT.joinpath(*parts).with_suffix(".py").is_file()
