"""Sums that a tool answers, as a task whose problems are rows of a data set; and the tool."""
import json

problems = [{"prompt": [{"role": "user", "content": f"{a} times 3?"}], "a": a}
            for a in range(2, 40)]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first one
        b: the second one
    """
    return a * b


def prompt_for(row):
    return row["prompt"][0]["content"]


def reply(row, turns):
    """What the tool says to the call in the last turn; None if there is no call in it."""
    _, found, rest = turns[-1].partition("<tool_call>")
    if not found:
        return None
    call = json.loads(rest.partition("</tool_call>")[0])
    return f"{multiply(**call['arguments'])}"


def reward(row, turns):
    return float(turns[-1].endswith(f" {3 * row['a']}."))
