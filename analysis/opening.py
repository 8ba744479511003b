"""What a run did, in a few sentences for somebody who sees it for the first time."""
import inspect
import re

import numpy as np

from analysis.runs import evaluations, is_done, steps_done
from analysis.settings import PLAIN, task_of
from analysis.tally import Tally
from engine.choices import ADVANTAGES, MITIGATIONS
from harness.settings import OPTIONS


def about(run: dict) -> str:
    """The task, what solved means, and the method, in one sentence."""
    config = run["config"]
    if "imported" in config:
        return "A run of another program."
    changed = [in_words(axis, config[axis]) for axis, usual in PLAIN.items()
               if config.get(axis, usual) != usual]
    method = f"plain GRPO but for {' and '.join(changed)}" if changed else "plain GRPO"
    return f"{task_in_words(config)}; the method is {method}."


def compared(runs: list[dict]) -> str:
    """What runs that are compared have in common."""
    config, lines = runs[0]["config"], runs[0]["evaluations"]
    success = "They were not evaluated on held-out problems."
    if lines:
        success = (f"Held-out success is that on the same {len(lines[0]['answer']):,} problems, "
                   "which none of the runs trained on.")
    return (f"{len(runs)} runs of {config['model']}, {config['steps']} steps. "
            f"{task_in_words(config)}. {success}")


def task_in_words(config: dict) -> str:
    """A task says what a right answer is in its `solved`."""
    means = getattr(task_of(config), "solved", "the score that its task calls answer is 1")
    return f"Task {config.get('task', OPTIONS['task'].default)}: a problem is solved if {means}"


def in_words(axis: str, name: str) -> str:
    """A choice, with the first sentence of its docstring if it is a function that is there."""
    function = {"mitigation": MITIGATIONS, "advantage": ADVANTAGES}.get(axis, {}).get(name)
    words = " ".join((inspect.getdoc(function) or "").split()) if function else ""
    first = re.split(r"\.( |$)", words)[0]
    axis = "weighting" if axis == "mitigation" else axis
    return f"the {axis} {name}" + f" ({first})" * bool(first)


def opening(run: dict) -> list[str]:
    if "imported" in run["config"]:
        return run["config"]["imported"]
    sentences = []
    if not is_done(run):
        sentences.append(f"This run is not finished: step {steps_done(run)} of "
                         f"{run['config']['steps']} so far.")
    lines = headline(run)
    sentences += held_out_success(lines) + cut_off(run, lines)
    if not run["steps"]:
        sentences.append("There are no credit files, so nothing is known of single tokens.")
    return sentences


def held_out_success(lines: list[dict]) -> list[str]:
    """In the first evaluation and the last."""
    if not lines:
        return ["It was not evaluated on held-out problems."]
    start, end = lines[0], lines[-1]
    found = [f"{start['success']:.1%} of {len(end['answer']):,} held-out problems {time_of(start)}"]
    if len(lines) > 1:
        found.append(f"{end['success']:.1%} {time_of(end)}")
    return [f"With {end['mode']} answers it solved {', and '.join(found)} (95% interval "
            f"{end['success_low']:.1%} to {end['success_high']:.1%})."]


def headline(run: dict) -> list[dict]:
    """The evaluations that are spoken of."""
    return evaluations(run, "sampled") or evaluations(run, "greedy")


def time_of(line: dict) -> str:
    step = line["step"]
    return f"after {step} step{'s' * (step != 1)}" if step else "before training"


def cut_off(run: dict, lines: list[dict]) -> list[str]:
    """An answer that was not finished ran into the limit."""
    shares = [f"{1 - line['finished_mean']:.1%} of the held-out answers {time_of(line)}"
              for line in lines[-1:]]
    finished = [line["finished"] for line in run["metrics"] if line.get("finished") is not None]
    if finished:
        shares.append(f"{1 - np.mean(finished):.1%} of all training answers")
    limit = run["config"].get("max_new_tokens", "new")
    return [f"{' and '.join(shares)} were cut off by the limit of {limit} tokens."] * bool(shares)


def describe(run: dict, tally: Tally | None) -> str:
    """The run in a line: its settings, how many tokens are on record."""
    config = run["config"]
    made = (f"{config['mitigation']}, {config.get('advantage', 'grpo')}, seed "
            f"{config.get('seed', 0)}")
    text = (f"{run['folder']}: {'imported' if 'imported' in config else made}, "
            f"{config.get('model', 'unknown model')}")
    if tally:
        text += (f"; {tally.tokens:,} tokens of {tally.answers.sum():,} answers to "
                 f"{tally.groups:,} problems, steps {tally.steps[0]} to {tally.steps[-1]}")
    if config.get("temperature", 1) != 1:
        text += (f"; sampled at temperature {config['temperature']}, while log p, entropy and s "
                 "are those of temperature 1")
    return text
