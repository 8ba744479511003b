"""What a run did, in a few sentences for somebody who sees it for the first time."""
import numpy as np

from analysis.runs import evaluations, is_done, steps_done

SEVERAL_STEPS = 10  # whose mean is told


def opening(run: dict) -> list[str]:
    sentences = [unfinished(run), other_code(run), held_out_success(run), training_success(run),
                 cut_off(run)]
    if not run["steps"]:
        sentences.append("There are no credit files, so nothing is known of single tokens.")
    return [sentence for sentence in sentences if sentence]


def unfinished(run: dict) -> str:
    if is_done(run):
        return ""
    return (f"This run is not finished: {so_far(run)}. All that follows is about the steps that "
            "are there.")


def so_far(run: dict) -> str:
    done, steps = steps_done(run), run["config"]["steps"]
    return f"step {done} of {steps} so far" + (", not evaluated yet" if done == steps else "")


def other_code(run: dict) -> str:
    changes = [f"after step {part['after_step']} ({', '.join(part['files'])})"
               for part in run["config"].get("code", [])[1:]]
    return f"The code was changed {' and '.join(changes)}." if changes else ""


def held_out_success(run: dict) -> str:
    """In the first evaluation and the last."""
    lines = evaluations(run, "sampled") or evaluations(run, "greedy")
    if not lines:
        return "It was not evaluated on held-out problems."
    start, end = lines[0], lines[-1]
    problems = f"{len(end['answer']):,} held-out problems"
    interval = f"95% interval {end['success_low']:.1%} to {end['success_high']:.1%}"
    if len(lines) == 1:
        return (f"With {end['mode']} answers it solved {end['success']:.1%} ({interval}) of "
                f"{problems} {time_of(end)}. There is no other evaluation.")
    return (f"With {end['mode']} answers it solved {start['success']:.1%} of {problems} "
            f"{time_of(start)}, and {end['success']:.1%} ({interval}) {time_of(end)}.")


def training_success(run: dict) -> str:
    """For a run without two evaluations to compare."""
    solved = [line["success"] for line in run["metrics"]]
    if not solved or len(evaluations(run, "sampled") or evaluations(run, "greedy")) > 1:
        return ""
    count = min(len(solved), SEVERAL_STEPS)
    steps = f"{count} training batch{'es' * (count != 1)}"
    return (f"It solved {np.mean(solved[:count]):.1%} of the problems in its first {steps} and "
            f"{np.mean(solved[-count:]):.1%} in its last {count}.")


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
