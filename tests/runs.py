"""What a run leaves behind, and what a program prints."""
import io
import json
import runpy
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
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


def program(folder: Path, *argv, expect=0) -> str:
    """What a command prints that is typed in this folder."""
    result = subprocess.run([sys.executable, *map(str, argv)], cwd=folder, capture_output=True,
                            text=True)
    assert result.returncode == expect, result.stdout + result.stderr
    return result.stdout + result.stderr


def ended_here(path, *argv):
    """The status and the text of a file that is started as a program, in this process, which has
    imported PyTorch."""
    said, code, argv = io.StringIO(), 0, [str(path), *map(str, argv)]
    with redirect_stdout(said), redirect_stderr(said), patch.object(sys, "argv", argv):
        try:
            runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as ended:
            code = ended.code or 0
            if isinstance(code, str):
                print(code)
                code = 1
        except BaseException:
            traceback.print_exc()
            code = 1
    return code, said.getvalue()


def program_here(path: Path, *argv, expect=0) -> str:
    """What such a program prints, and the sentence it ends with."""
    code, said = ended_here(path, *argv)
    assert code == expect, said
    return said
