"""What a run did, in a few sentences for somebody who sees it for the first time."""
import numpy as np

from analysis.runs import evaluations, is_done, steps_done


def opening(run: dict) -> list[str]:
    sentences = [unfinished(run), success(run), cut_off(run)]
    return [sentence for sentence in sentences if sentence]


def unfinished(run: dict) -> str:
    if is_done(run):
        return ""
    return (f"This run is not finished: {so_far(run)}. All that follows is about the steps that "
            "are there.")


def so_far(run: dict) -> str:
    return f"step {steps_done(run)} of {run['config']['steps']} so far"


def success(run: dict) -> str:
    """Of held-out problems where they were evaluated, otherwise of training batches."""
    for mode in ("sampled", "greedy"):
        lines = evaluations(run, mode)
        if lines:
            return held_out(lines[0], lines[-1], mode)
    solved = [line["success"] for line in run["metrics"]]
    if not solved:
        return "Nothing is on record of which problems it solved."
    return (f"It solved {np.mean(solved[:10]):.1%} of the problems in its first ten training "
            f"batches and {np.mean(solved[-10:]):.1%} in its last ten; it was not evaluated on "
            "held-out problems.")


def held_out(start: dict, end: dict, mode: str) -> str:
    """Two evaluations, or one."""
    problems, how = f"{len(end['answer']):,} held-out problems", f"{mode} answers"
    interval = f"95% interval {end['success_low']:.1%} to {end['success_high']:.1%}"
    if end["step"] == start["step"]:
        return (f"With {how} it solved {end['success']:.1%} ({interval}) of {problems} "
                f"{time_of(end)}. There is no other evaluation.")
    return (f"With {how} it solved {start['success']:.1%} of {problems} {time_of(start)}, and "
            f"{end['success']:.1%} ({interval}) {time_of(end)}.")


def time_of(line: dict) -> str:
    step = line["step"]
    return f"after {step} step{'s' * (step != 1)}" if step else "before training"


def cut_off(run: dict) -> str:
    """An answer that was not finished ran into the limit."""
    shares = []
    lines = evaluations(run, "sampled") or evaluations(run, "greedy")
    if lines and lines[-1].get("finished_mean") is not None:
        end = lines[-1]
        shares.append(f"{1 - end['finished_mean']:.1%} of the held-out answers {time_of(end)}")
    finished = [line["finished"] for line in run["metrics"] if line.get("finished") is not None]
    if finished:
        shares.append(f"{1 - np.mean(finished):.1%} of all training answers")
    if not shares:
        return ""
    tokens = run["config"].get("max_new_tokens")
    limit = f"the limit of {tokens} tokens" if tokens else "the limit of tokens"
    return f"{' and '.join(shares)} were cut off by {limit}."
