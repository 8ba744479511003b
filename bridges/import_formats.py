"""How other trainers write the answers of a run: a table of columns for each, from theirs to ours.

A file is read line by line. A line that its table does not fit ends the import in one sentence.
"""
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bridges.http_client import one_line
from engine.errors import UserError, parse_object
from engine.tokens import CHATML

LARGEST = 3.4028234663852886e38  # of float32
PER_TOKEN = {  # the range of a column, rounding allowed for
    "log_prob": (-LARGEST, 1e-3), "entropy": (-1e-3, LARGEST), "collision": (0, 1.001),
    "weight": (0, LARGEST), "advantage": (-LARGEST, LARGEST)}


def is_number(value, low: float = -LARGEST, high: float = LARGEST) -> bool:
    return type(value) in (int, float) and low <= value <= high


def is_whole(value, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def is_text(value) -> bool:
    """Or messages; one that calls tools may have no content."""
    return isinstance(value, str) or isinstance(value, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str)
        and isinstance(one.get("content"), str | None) for one in value)


def are_ids(value) -> bool:
    return isinstance(value, list) and all(is_whole(one, 2 ** 24 - 1) for one in value)


def fits_column(value, low: float, high: float) -> bool:
    return all(is_number(one, low, high) for one in (value if isinstance(value, list) else [value]))


TEXT = is_text, "a text or a list of messages"
IDS = are_ids, "a list of token numbers"
FIELDS = {  # of a line, with a test and what that is in words; null is as if it were not there
    "step": (partial(is_whole, most=2 ** 30 - 1), "a whole number"),
    "group": (lambda value: type(value) in (int, str), "a whole number or a text"),
    "prompt": TEXT, "completion": TEXT, "prompt_ids": IDS, "token_ids": IDS,
    "reward": (is_number, "a number"),
    "parts": (lambda value: isinstance(value, dict) and all(map(is_number, value.values())),
              "numbers by name"),
    "finished": (lambda value: type(value) is bool, "true or false"),
    "solved": (lambda value: type(value) is bool, "true or false"),
    **{name: (partial(fits_column, low=low, high=high),
              "a number, or one for each token, that this column can hold")
       for name, (low, high) in PER_TOKEN.items()}}


def first(*values: object):
    """The first that is known; of a list, its first."""
    value = next((value for value in values if value is not None), None)
    return value[0] if isinstance(value, list) else value


def number_in(name: str) -> int | None:
    """The step that stands in a file's name alone."""
    found = re.search("([0-9]+)[.]jsonl", name)
    return int(found[1]) if found else None


def with_chatml(prompt):
    """verl leaves special tokens out. Those of ChatML are put back where a line names a role."""
    if not isinstance(prompt, str) or not re.match("(system|user)\n(?!\n)", prompt):
        return prompt
    begin, end = CHATML
    return re.sub("(^|\n)(system|user|assistant)\n", lambda role: (
        f"{role[1] and end}{role[1]}{begin}{role[2]}\n"), prompt)


def kept_weight(mask: list, weight, is_dropped=None) -> list:
    """Of each token; 0 where it was not trained on, what a tool said between an answer's turns."""
    every = weight if isinstance(weight, list) else [1 if weight is None else weight] * len(mask)
    return [w if kept and not dropped else 0
            for w, kept, dropped in zip(every, mask, is_dropped or [False] * len(mask))]


class Format(NamedTuple):
    name: str
    told_by: set            # the fields that tell it
    columns: dict           # ours -> theirs, or a function and those of theirs that it takes
    mask: str | None = None  # where prompt and answer are one sequence: which tokens were trained
    is_table: bool = False  # its other columns of numbers are parts of the reward


FORMATS = (
    Format("prime-rl", {"token_ids", "loss_mask"}, {
        "step": (first, "export_step", "step"), "prompt_ids": "prompt_ids",
        "token_ids": "token_ids", "reward": (first, "rewards"),
        "advantage": "advantages", "log_prob": "inference_logprobs", "entropy": "entropy",
        "weight": (kept_weight, "loss_mask", "rl_weights", "is_masked")}, "loss_mask"),
    Format("NeMo-RL", {"token_ids", "token_loss_mask"}, {
        "step": (number_in, "file"), "prompt_ids": "prompt_ids", "token_ids": "token_ids",
        "reward": (first, "filtered_rewards", "rewards"), "advantage": "advantages",
        "log_prob": "generation_logprobs",
        "weight": (kept_weight, "token_loss_mask", "sample_loss_mask")}, "token_loss_mask"),
    Format("verl", {"input", "output", "score"}, {
        "step": "step", "prompt": (with_chatml, "input"), "completion": "output",
        "reward": "score",
        "solved": (lambda acc: bool(acc) if acc in (0, 1) else None, "acc")}),  # or a score
    Format("AReaL", {"task_id", "tail_version", "prompt", "completion", "reward"}, {
        "step": "tail_version", "group": "task_id", "prompt": "prompt", "completion": "completion",
        "reward": "reward"}),
    Format("TRL", {"prompt", "completion", "advantage"}, {
        "step": "step", "prompt": "prompt", "completion": "completion", "advantage": "advantage"},
        is_table=True))


def in_our_fields(row: dict, where: str, path: Path) -> tuple[str, dict]:
    """Who wrote a line, and what it says, without the fields that are null."""
    is_table = ".parquet" in path.suffixes  # or was one
    form = next((form for form in FORMATS
                 if form.told_by <= row.keys() and form.is_table <= is_table), None)
    name = form.name if form else "JSON lines"
    try:
        line = translated(row | {"file": path.name}, form) if form else row
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise UserError(f"{where} is no line of {name}: "
                        f"{type(error).__name__}: {error!s:.80}") from None
    if not form and row.keys().isdisjoint(("reward", "advantage")):
        raise UserError(f"{where} is no answer: it has neither a reward nor an advantage, "
                        f"but {', '.join(row):.80}")
    return name, checked({ours: value for ours, value in line.items() if value is not None}, where)


def translated(row: dict, form: Format) -> dict:
    if form.mask:
        row = trained_part(row, form.mask)
    line = {}
    for ours, source in form.columns.items():
        function, *names = source if isinstance(source, tuple) else (None, source)
        values = [row.get(name) for name in names]
        line[ours] = function(*values) if function else values[0]
    if form.is_table:  # None and nan are 0, as they are there
        others = {name: value for name, value in row.items()
                  if name not in (*form.columns, "file") and type(value) in (int, float)}
        line["parts"] = {name: value if is_number(value) else 0 for name, value in others.items()}
        line["reward"] = sum(line["parts"].values()) if others else None
    return line


def trained_part(row: dict, mask_name: str) -> dict:
    """Where prompt and answer are one sequence, the answer goes from the first token that was
    trained on to the last. NeMo-RL has each field in a list of one, prime-rl a null for a number
    that is not finite: then the column is not known."""
    if isinstance(row["token_ids"][0], list):
        row = {name: value[0] if isinstance(value, list) else value for name, value in row.items()}
    ids, mask = row["token_ids"], row[mask_name]
    trained = [t for t, kept in enumerate(mask) if kept]
    dropped = row.get("is_masked")  # of prime-rl
    masks = [mask] if dropped in (None, [None] * len(ids)) else [mask, dropped]
    if not trained or any(len(m) != len(ids) or not set(m) <= {0, 1} for m in masks):
        raise ValueError(f"its {mask_name}, and is_masked if there is one, should be as many yes "
                         "and no as it has token_ids, with a token that was trained on")
    span = slice(trained[0], trained[-1] + 1)
    parts = {name: None if None in value else value[span]
             for name, value in row.items() if isinstance(value, list) and len(value) == len(ids)}
    return {**row, **parts, "prompt_ids": ids[:trained[0]]}


def checked(line: dict, where: str) -> dict:
    for name in line.keys() & FIELDS.keys():
        is_right, words = FIELDS[name]
        if not is_right(line[name]):
            raise UserError(f"{where}: its {name} should be {words}, " f"not {line[name]!r:.80}")
    if "step" not in line or line.keys().isdisjoint(("reward", "advantage")):
        lacks = "reward and no advantage" if "step" in line else "step"
        raise UserError(f"{where} has no {lacks}")
    return line


def lines_of(files: list[Path]) -> Iterator[tuple[str, str, dict]]:
    """Where a line stands, who wrote it, and what it says in our own fields; one at a time."""
    for path in files:
        if not path.is_file():
            raise UserError(f"cannot read {path}: there is no such file")
        if sum(map(path.samefile, filter(Path.is_file, files))) > 1:
            raise UserError(f"{path} is named twice: its answers would count twice")
        for where, row in read_table(path) if path.suffix == ".parquet" else read_lines(path):
            yield where, *in_our_fields(row, where, path)


def read_lines(path: Path) -> Iterator[tuple[str, dict]]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield f"{path}, line {number}", parse_object(text, f"{path}, line {number}")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not text") from None


def read_table(path: Path) -> Iterator[tuple[str, dict]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{path}: parquet needs pyarrow (pip install pyarrow), or JSON lines "
                        "instead: pandas.read_parquet(FILE).to_json(FILE + '.jsonl', "
                        "orient='records', lines=True)") from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=64):
            for number, row in enumerate(batch.to_pylist(), number + 1):
                yield f"{path}, line {number}", row
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise UserError(f"cannot read {path} as parquet: {one_line(error)}") from None
