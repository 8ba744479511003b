"""Short runs of the project, perhaps with a changed function (edited.py). They are forks of one
process, which has imported PyTorch: it answers a line of JSON with a line of JSON.
"""
import gc
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from edited import ROOT, import_edited

TIMED = ("seconds", "tokens_per_second", "memory")  # in the names of what differs from run to run


def write_brief_model(folder):
    """Two layers of models/tiny, which learn to say no more than " 3 + 5<answer> 3 + 5</answer>",
    with any operator. So short answers are right and wrong, and of several lengths."""
    from countdown_task import Task
    from grpo import AdamW, encode
    from qwen2_model import Qwen2, load_model, load_tokenizer, save_model
    tiny = ROOT / "models/tiny"
    whole, tokenizer, rng = load_model(tiny), load_tokenizer(tiny), random.Random(0)
    model = Qwen2(replace(whole.config, num_hidden_layers=2))
    model.load_state_dict(whole.state_dict(), strict=False)
    task, optimizer = Task("short", "2", max_number=9), AdamW(model.parameters(), 2e-3)
    for step in range(40):
        rows = []
        for problem in task.training_problems(0, step, 16):
            x, y = problem.numbers
            made = f" {x} {rng.choice('+-*/')} {y}"
            begin, end = rng.choice(["", " hmm.", " okay. first"]), rng.choice(["</think>\n", ""])
            text = f"{begin}{made}{end}<answer>{made}</answer><|im_end|>"
            rows.append(encode(tokenizer, task.prompt_for(problem) + text))
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        start = len(encode(tokenizer, task.prompt_for(problem)))
        log_p = model(ids)[:, start - 1:-1].log_softmax(-1)
        chosen = log_p.gather(2, ids[:, start:, None])[..., 0]
        model.zero_grad()
        (-chosen[ids[:, start:] > 0].mean()).backward()
        optimizer.step()
    save_model(model, folder)
    for name in ("tokenizer.json", "recipe.json"):
        shutil.copy(tiny / name, folder)
    return folder


# ------------------------------------------------------------------------------------- in a fork
def digest(content):
    return hashlib.sha256(content).hexdigest()[:12]


def numbers_of(folder):
    """What a run has left, by name: a number as it is, and all else as a digest. Of a column of
    numbers there is also the sum of their sizes."""
    found = {}
    for log in sorted(folder.glob("*.jsonl")):
        for i, text in enumerate(log.read_text().splitlines()):
            for name, value in json.loads(text).items():
                if not any(word in name for word in TIMED):
                    is_number = isinstance(value, float)
                    found[f"{log.stem} {i} {name}"] = (
                        value if is_number else digest(json.dumps(value).encode()))
    for path in sorted(folder.glob("credit/*.npz")):
        for name, values in np.load(path).items():
            found[f"{path.stem} {name}"] = digest(values.tobytes())
            if values.dtype.kind == "f":
                found[f"{path.stem} size of {name}"] = float(np.abs(values.astype(float)).sum())
    for path in sorted(folder.rglob("checkpoints/**/*")):
        if path.is_file() and path.name != "state.json":  # it has the digests of other files
            found[str(path.relative_to(folder))] = digest(path.read_bytes())
    return found


def import_once(is_book):
    """Import what a run needs, before the forks that make the runs. Their folders get no code/:
    to look for its files takes longer than such a run."""
    import run
    run.own_files = dict
    import train  # noqa: F401
    if not is_book:
        from lab.harness import made_of
        made_of.files_of_run = lambda *_: {}
        import lab.run  # noqa: F401


def run_in(folder, is_book, flags):
    argv = [*flags, "--out", str(folder)]
    if is_book:
        import run
        import train
        train.train(run.read_settings(argv))
    else:
        import lab.run
        lab.run.main(argv)


def outcome(is_book, flags):
    """The numbers of a run, or how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_in(Path(folder, "run"), is_book, flags)
        except (Exception, SystemExit) as error:
            return {"ended": f"{type(error).__name__}: {error}"}
        return numbers_of(Path(folder, "run"))


def in_a_fork(function, *given):
    """What the function returns in a process of its own, which may have a minute of a processor:
    what was changed may never end."""
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        import resource  # which Windows has not
        resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
        try:
            with os.fdopen(send, "w") as file:
                json.dump(function(*given), file)
        except BaseException:
            traceback.print_exc()
        os._exit(0)
    os.close(send)
    with os.fdopen(receive) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text or '{"ended": "without an answer"}')


def answer(request):
    """{name: its numbers} of the runs. Those of the book come first, without the lab."""
    found = {}
    if request["edit"]:
        import_edited(*request["edit"])
    for name, is_book, flags in sorted(request["runs"], key=lambda run: not run[1]):
        import_once(is_book)
        found[name] = in_a_fork(outcome, is_book, flags)
    return found


class Forks:
    """The process that answers. A run is (name, is_book, flags)."""

    def __init__(self):
        self.process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)

    def ask(self, edit, runs):
        """{name: its numbers} of runs with this edit of a function."""
        self.process.stdin.write(json.dumps(dict(edit=edit, runs=runs)) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def warm_up():
    """The first run of a process takes three times as long as the others: PyTorch gets ready. Then
    the project is forgotten, so that each fork imports its own."""
    short = "--steps 1 --questions 1 --answers 2 --max_new_tokens 4 --eval_every 0".split()
    import_once(is_book=False)
    for flags in ([], ["--lora", "1"], ["--dtype", "bfloat16"]):
        outcome(is_book=not flags, flags=short + flags)
    own = {path.stem for path in ROOT.iterdir()}
    for name in [*sys.modules]:
        if name.split(".")[0] in own:
            del sys.modules[name]
    gc.collect()
    gc.freeze()  # a fork shares the memory of what was there, as long as nobody looks through it


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    warm_up()
    for line in sys.stdin:
        print(json.dumps(in_a_fork(answer, json.loads(line))), file=answers, flush=True)
