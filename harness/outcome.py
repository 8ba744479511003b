"""What a run says at its end: what changed, how long it took, and what to type next."""
import time

from engine import processes
from harness.files import read_lines
from harness.progress import say
from harness.terminal import python_command


def tell_outcome(run) -> None:
    if not processes.is_main_process():
        return
    path, s = run.folder.path, run.settings
    lines = read_lines(path / "evaluations.jsonl") if s.eval_every else []
    sampled, greedy = ([line for line in lines if line["mode"] == mode]
                       for mode in ("sampled", "greedy"))
    since = f" since step {run.done}" if run.done else ""
    minutes, seconds = divmod(round(time.monotonic() - run.start), 60)
    took = (f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s") + since
    say(f"  {change(sampled[0], sampled[-1])}, {took}" if len(sampled) > 1 else f"  {took}")
    say("What every token got, and what one of them got:")
    say(f"  {python_command('analyze.py', path)}")
    say(f"  {python_command('-m', 'tools.follow', path)}")
    if len(greedy) > 1 and s.checkpoint_every and hasattr(run.policy.task, "read"):
        tell_what_turned(run, greedy[0]["answer"], greedy[-1]["answer"])


def change(before: dict, after: dict) -> str:
    """23.1% (95% interval 21.0% to 25.3%) -> 48.9% (46.4% to 51.5%) of 1,500 held-out problems"""
    first, low, high, last, lowest, highest = (
        f"{line[name]:.1%}" for line in (before, after)
        for name in ("success", "success_low", "success_high"))
    return (f"{first} (95% interval {low} to {high}) -> {last} ({lowest} to {highest}) of "
            f"{len(after['answer']):,} held-out problems")


def tell_what_turned(run, before: list, after: list) -> None:
    """The first held-out problem whose greedy answer turned from wrong to right."""
    turned = [place for place, (was, is_now) in enumerate(zip(before, after)) if was < is_now]
    if not turned:
        return
    task = run.policy.task
    problem = task.show(task.held_out_problems(run.settings.eval_tasks)[turned[0]])
    command = python_command("-m", "tools.sample", run.folder.path, *problem.split(), "--greedy")
    lost = sum(was > is_now for was, is_now in zip(before, after))
    say(f"The first held-out problem whose likeliest answer turned from wrong to right "
        f"({len(turned):,} did, {lost:,} the other way):\n  {command}")
