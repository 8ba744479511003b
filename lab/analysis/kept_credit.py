"""What was measured of single training answers after the run, and is kept with it.

`python -m lab follow RUN --step S --answer A --credit K --keep` measures, for each token of one
answer, its credit and the likeliest other tokens at its place. That takes a model and some minutes,
so the result is written into the run's folder `analysis`, a file for each answer, and read from
there ever after.
"""
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypedDict, cast

from lab.engine.errors import UserError, read_json
from lab.harness.record import replace_text

FOLDER = "analysis"
NUMBER = (int, float)
LISTS: dict[str, tuple[type, ...]] = {  # one value for each token, and of which type it is
    "token_id": (int,), "credit": NUMBER, "low": NUMBER, "high": NUMBER, "credit in words": (str,),
    "others": (str,)}
Measured = TypedDict("Measured", {
    "step": int,
    "answer": int,
    "continuations": int,         # for each value
    "token_id": list[int],        # the answer's tokens, by which it is known again
    "credit": list[float],
    "low": list[float],           # its 95% interval
    "high": list[float],
    "credit in words": list[str],
    "others": list[str]})         # the likeliest other tokens, in words


def file_of(run: Path, step: int, answer: int) -> Path:
    return run / FOLDER / f"answer_{step:06d}_{answer:05d}.json"


def keep(run: Path, measured: Measured) -> None:
    path = file_of(run, measured["step"], measured["answer"])
    path.parent.mkdir(exist_ok=True)
    replace_text(path, json.dumps(measured, ensure_ascii=True) + "\n")


def kept_answers(run: Path) -> dict[tuple[int, int], Measured]:
    """What was measured, by step and answer."""
    found = {}
    for path in sorted((run / FOLDER).glob("answer_*.json")):
        measured = read_json(path)
        if wrong := next(damages(measured), ""):
            raise UserError(f"{path} is damaged, because {wrong}: remove it, and lab follow "
                            "--keep measures the answer again")
        found[measured["step"], measured["answer"]] = cast(Measured, measured)
    return found


def damages(measured: Mapping[str, object]) -> Iterator[str]:
    lengths = set()
    for name in ("step", "answer", "continuations", *LISTS):
        value = measured.get(name)
        values = value if isinstance(value, list) else [value]
        is_list, kind = name in LISTS, LISTS.get(name, (int,))
        if is_list != isinstance(value, list) or not all(isinstance(one, kind) for one in values):
            yield f"its {name} is {value!r:.80}"
        if is_list:
            lengths.add(len(values))
    if len(lengths) != 1:
        yield "its lists have different lengths"
