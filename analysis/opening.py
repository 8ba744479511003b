"""What a run did, in a few sentences for somebody who sees it for the first time."""
import numpy as np

from analysis.runs import evaluations, is_done, steps_done
from analysis.tally import Tally


def opening(run: dict) -> list[str]:
    if "imported" in run["config"]:
        return run["config"]["imported"]
    sentences = []
    if not is_done(run):
        sentences.append(f"This run is not finished: step {steps_done(run)} of "
                         f"{run['config']['steps']} so far.")
    lines = evaluations(run, "sampled") or evaluations(run, "greedy")
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
