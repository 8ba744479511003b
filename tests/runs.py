"""What a run leaves behind, and what a program prints."""
import itertools
import json
import multiprocessing
import os
import resource
import runpy
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from unittest.mock import patch

import numpy as np
from safetensors.torch import load_file

TIME = ("seconds", "tokens_per_second", "memory")


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def edit_config(folder, **changed):
    """A value of KeyError takes the key out."""
    config = {key: value for key, value in {**config_of(folder), **changed}.items()
              if value is not KeyError}
    (folder / "config.json").write_text(json.dumps(config))


def timeless(line):
    return {key: value for key, value in line.items() if not any(word in key for word in TIME)}


def arrays(path):
    """Of a credit file or a file of weights, by name."""
    if path.suffix == ".npz":
        with np.load(path) as file:
            return dict(file)
    return {name: tensor.float().numpy() for name, tensor in load_file(path).items()}


def everything(folder):
    return {path.relative_to(folder): path.read_bytes()
            for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same_run(a: Path, b: Path):
    """Bit for bit, times and memory aside."""
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        assert list(map(timeless, lines(a / name))) == list(map(timeless, lines(b / name))), name
    names, others = (sorted(p.relative_to(folder) for p in folder.rglob("*")
                            if p.suffix in (".npz", ".safetensors")) for folder in (a, b))
    assert names == others
    for name in names:
        x, y = arrays(a / name), arrays(b / name)
        assert list(x) == list(y) and all(np.array_equal(x[key], y[key]) for key in x), name


def status_of(path, *argv):
    """The status of a file that is started as a program, in this process."""
    argv = [str(path), *map(str, argv)]
    with patch.object(sys, "argv", argv):
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as ended:
            if isinstance(ended.code, str):
                print(ended.code, file=sys.stderr)
                return 1
            return ended.code or 0
        except BaseException:
            traceback.print_exc()
            return 1
    return 0


COPIES = multiprocessing.get_context("forkserver")
COPIES.set_forkserver_preload([  # the last is what a model on torch's device meta imports
    "torch", "safetensors.torch", "tokenizers", "sqlite3", "torch.fx.experimental.symbolic_shapes"])


def typed(folder, *words, **given):
    """The status and the text of a command that is typed in this folder. Its process is the copy of
    one that has imported PyTorch, because the import takes seconds."""
    with tempfile.NamedTemporaryFile() as text:
        process = COPIES.Process(target=become, kwargs=given, args=(
            str(folder), [*map(str, words)], text.name))
        process.start()
        process.join()
        return process.exitcode, text.read().decode()


def become(folder, words, text, has_reader=True, largest_file=None, **watched):
    """Be this program, which has no module of ours. Without a reader it prints to a closed pipe."""
    sys.modules.pop(__name__)
    read, write = os.pipe()
    os.close(read)
    said = os.open(text, os.O_WRONLY | os.O_APPEND)
    os.dup2(said if has_reader else write, 1)
    os.dup2(said, 2)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)
    os.chdir(folder)
    project, first = str(Path(__file__).parent.parent), os.path.dirname(os.path.abspath(words[0]))
    sys.path[:] = [first, *(path for path in sys.path if "site-packages" in path
                            or not path.startswith(project))]
    if largest_file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    watch(**watched)
    code = status_of(*words)
    sys.stdout.flush()
    os._exit(code)


def watch(place="", signals=(), copy=None):
    """Before the first change of a file or folder that has `place` in its path, this process sends
    itself signals. Or before every change, the folder `copy` is copied into `copy`_1 and so on, as
    kill -9 would leave it."""
    def look(event, given):
        is_change = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir") or (
            event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR))
        if busy or not is_change or place not in str(given[0]):
            return
        while left:
            os.kill(os.getpid(), left.pop())
        if copy and os.path.exists(copy):
            busy.append(True)
            shutil.copytree(copy, f"{copy}_{next(numbers)}", copy_function=linked)
            busy.clear()

    left, busy, numbers = [*signals], [], itertools.count(1)
    sys.addaudithook(look)


def linked(source, target):
    """Copy a file; one of weights, which is never changed in place, only gets a second name."""
    (os.link if source.endswith(".safetensors") else shutil.copy)(source, target)
