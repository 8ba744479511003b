"""Copy a few steps of a run into a folder that is small enough to send: no model, no checkpoints.

    python -m research excerpt runs/none-grpo-s0 few-steps --steps 1,100

analyze.py, tools.preview and tools.follow can read it. Its tokenizer has only the tokens that
occur, with new numbers, so it can spell these answers and nothing else.
"""
import json
from pathlib import Path

import numpy as np

from engine.errors import UserError, read_json
from harness.record import (Columns, Json, credit_path, credit_steps, read_columns, read_lines,
                            run_config, whole)
from harness.flags import Flag
from harness.parser import make_parser, with_defaults

FLAGS = {"steps": Flag(None, "the steps to copy, such as 1,100. By default they are the first and "
                       "the last", kind=str),
         "model": Flag(None, "the name of the model in the copy. By default it is that of the run",
                             kind=str)}
IDS = ("token_id", "prompt_ids")
LEFT_OUT = ("run_id", "code", "made_of")  # entries of config.json that no reader of it needs


def main(argv: list[str]) -> None:
    parser = make_parser("python -m research excerpt RUN OUT [flags]", __doc__, FLAGS)
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    parser.add_argument("out",
                        metavar="OUT", type=Path, help="the folder to write; it must not exist")
    flags = with_defaults(parser.read(argv), FLAGS)
    config, known = run_config(flags.run), credit_steps(flags.run)
    chosen = flags.steps.split(",") if flags.steps else sorted({*known[:1], *known[-1:]})
    missing = [step for step in chosen if str(step) not in map(str, known)]
    if missing or not known:
        raise UserError(f"{flags.run} has no credit file of step {missing[0] if missing else 1}")
    if flags.out.exists():
        raise UserError(f"{flags.out} exists already: name another folder")
    steps = {int(step): read_columns(flags.run, int(step)) for step in chosen}
    write_excerpt(flags.run, flags.out, steps, config | (
        {"model": flags.model} if flags.model else {}))
    size = sum(path.stat().st_size for path in flags.out.rglob("*") if path.is_file())
    print(f"{flags.out} has the steps {', '.join(map(str, steps))}, in {size / 1e3:.0f} kB")


def write_excerpt(run: Path, out: Path, steps: dict[int, Columns], config: Json) -> None:
    ids = np.unique(np.concatenate([columns[name] for columns in steps.values() for name in IDS]))
    kept = {name: value for name, value in config.items() if name not in LEFT_OUT}
    kept |= {"steps": max(steps), "eval_every": 0, "checkpoint_every": 0, "out": None}
    with whole(out) as unfinished:
        (unfinished / "credit").mkdir(parents=True)
        for step, columns in steps.items():
            new = {name: np.searchsorted(ids, columns[name]).astype(np.int32) for name in IDS}
            np.savez_compressed(credit_path(unfinished, step), **{**columns, **new})
        (unfinished / "config.json").write_text(json.dumps(kept, indent=2) + "\n")
        lines = [line for line in read_lines(run / "metrics.jsonl") if line["step"] in steps]
        (unfinished / "metrics.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines))
        tokenizer = reduced_tokenizer(read_json(run / "tokenizer.json"), ids.tolist())
        (unfinished / "tokenizer.json").write_text(json.dumps(tokenizer) + "\n")


def reduced_tokenizer(tokenizer: Json, ids: list[int]) -> Json:
    """A tokenizer with these tokens alone, numbered from 0, and no merges: for reading."""
    number = {old: new for new, old in enumerate(ids)}
    added = []
    for token in tokenizer["added_tokens"]:
        if token["id"] in number:
            added.append({**token, "id": number[token["id"]]})
    vocabulary = {word: number[i] for word, i in tokenizer["model"]["vocab"].items() if i in number}
    for token in added:
        vocabulary[token["content"]] = token["id"]
    model = {**tokenizer["model"], "vocab": vocabulary, "merges": []}
    return {**tokenizer, "added_tokens": added, "model": model}
