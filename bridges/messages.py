"""Messages as the text that a model reads, and which of it the model wrote itself."""
import json
from collections.abc import Callable
from itertools import groupby

from engine.errors import UserError
from engine.tokens import CHATML


def as_chatml(messages: list[dict], asks: bool) -> str:
    """The roles between tags; `asks` begins an answer."""
    begin, end = CHATML
    turns = [f"{begin}{turn['role']}\n{content_of(turn)}{end}\n" for turn in messages]
    return "".join(turns) + f"{begin}assistant\n" * asks


def content_of(turn: dict) -> str:
    """With its thoughts and its calls of tools, as Qwen's models write them."""
    thought = turn.get("reasoning_content")
    thoughts = [f"<think>\n{thought}\n</think>\n"] * bool(thought)
    calls = [json.dumps(call.get("function", call)) for call in turn.get("tool_calls") or []]
    called = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return "\n".join(thoughts + [turn["content"]] * bool(turn["content"]) + called)


def plain(value: str | list) -> str | list[dict]:
    """Messages as they were: a table has each field in each of them, null where one lacks it."""
    if isinstance(value, str):
        return value
    return [{"content": "", **without_nulls(message)} for message in value]


def without_nulls(value):
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def pieces(prompt: list[dict], answer: list[dict], write: Callable[..., str],
           where: str) -> list[tuple[str, bool]]:
    """The answer's text in turns, and whether the model wrote it. What stands between its turns,
    tags of roles included, it did not. The end of the last turn is left out, for nobody knows
    whether that was cut off."""
    if len(answer) == 1 and answer[0].keys() == {"role", "content"} and (
            answer[0]["role"] == "assistant"):
        return [(answer[0]["content"], True)]  # no template may change what was sampled
    parts, so_far, written = [], list(prompt), write(prompt, asks=True)
    shortest = [{"role": role, "content": "x"} for role in ("user", "assistant")]
    end = write(shortest, asks=False).rpartition("x")[2]  # of a turn of the model
    for is_own, turns in groupby(answer, key=lambda turn: turn["role"] == "assistant"):
        so_far += turns
        is_last = len(so_far) == len(prompt) + len(answer)
        text = write(so_far, asks=not is_own and not is_last)
        if is_own:  # a line break behind the end of a turn is not the model's
            text = text.removesuffix(end if is_last else end[len(end.rstrip()):])
        if not text.startswith(written):
            raise UserError(f"{where}: the chat template writes earlier messages in another way "
                            "once later ones stand behind them, so nobody knows what was sampled")
        parts.append((text.removeprefix(written), is_own))
        written = text
    return parts
