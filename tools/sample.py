"""Ask a trained model: one problem, answered before training and after it.

    python -m tools.sample runs/none-grpo-s0 3 5 7 22
    python -m tools.sample runs/none-grpo-s0          problems are typed here, or come from stdin
    python -m tools.sample models/tiny 3 5 7 22       a model folder answers once

The answers show which tokens the model was unsure of: shaded at a terminal, elsewhere with their
probability behind them. The same seed gives the same answers; --seed 1 gives others. Nothing is
written.
"""
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import mitigations  # noqa: F401  fills the lists of choices that settings are checked with
from harness.credit_file import checkpoint_folders
from engine.errors import UserError
from harness.files import find_folder, is_file, read_json
from harness.flags import Flag, Parser, add_flags, with_defaults
from engine.policy import Policy, derived_seed
from harness.load import load_policy
from harness.program import run_as_program, visible
from harness.progress import show_status
from engine.rollouts import Rollouts
from harness.settings import Settings, make_settings
from harness.tasks import make_task
from engine.tokens import token_bytes
from tools.terminal import (BOLD, GREEN, RED, Screen, print_legend, print_letters, print_text, put,
                            shaded, token_texts)

FLAGS = {
    "answers": Flag(1, "answers of each model", least=1, most=1000),
    "temperature": Flag(None, "of the sampling, by default that of the run", kind=float),
    "greedy": Flag(False, "take the likeliest token every time"),
    "seed": Flag(0, "of the sampling", least=0),
    "max_new_tokens": Flag(None, "an answer is cut off here, by default as in the run", kind=int),
    "step": Flag(None, "ask the checkpoint of this step, by default the newest", kind=int),
    "task": Flag(None, "by default that of the run, or of the model's recipe.json"),
    "device": Flag("cpu", "cpu, cuda or cuda:N"),
    "threads": Flag(None, "CPU threads, by default as in the run", kind=int)}
ABOUT_SAMPLING = ("temperature", "max_new_tokens", "task", "device", "threads")  # are settings
WITHOUT_TRAINING = {"mitigation": "none", "advantage": "grpo", "loss": "policy",
                    "placebo": "none", "kl": 0.0, "offload_optimizer": False,
                    "shard": False}


def print_answers(title: str, policy: Policy, rollouts: Rollouts, screen: Screen) -> None:
    """What one model answered: a single answer beside the title, several below a summary."""
    count = len(rollouts.responses)
    heading = screen.styled(visible(title), BOLD)
    put(f"\n{heading}   {verdict(rollouts, 0, screen) if count == 1 else summary(rollouts)}")
    for row in range(count):
        if count > 1:
            put(f"\n  {verdict(rollouts, row, screen)}")
        length = int(rollouts.length[row])
        texts = token_texts(token_bytes(policy.tokenizer, rollouts.ids[row, :length].tolist()))
        letters = shaded(texts, rollouts.log_prob[row, :length].exp().tolist(), screen)
        if letters[:1] == [(" ", "")]:
            del letters[0]
        print_letters(letters, screen, "  ")


def verdict(rollouts: Rollouts, row: int, screen: Screen) -> str:
    """right   reward 1.10   31 tokens"""
    is_right = rollouts.scores["answer"][row] > 0
    word = screen.styled("right", GREEN) if is_right else screen.styled("wrong", RED)
    length = int(rollouts.length[row])
    tokens = "1 token" if length == 1 else f"{length} tokens"
    cut_off = "" if rollouts.finished[row] else ", cut off"
    return f"{word}   reward {rollouts.reward[row]:.2f}   {tokens}{cut_off}"


def summary(rollouts: Rollouts) -> str:
    """3 of 8 right   mean reward 0.47   61 tokens on average"""
    right = int((rollouts.scores["answer"] > 0).sum())
    cut_off = int((~rollouts.finished).sum())
    return (f"{right} of {len(rollouts.responses)} right   mean reward "
            f"{rollouts.reward.mean():.2f}   {rollouts.length.float().mean():.0f} tokens on average"
            + (f", {cut_off} cut off" if cut_off else ""))


def is_run(folder: Path) -> bool:
    """Whether it is the folder of a run, not that of a model."""
    if not is_file(folder / "config.json"):
        raise UserError(f"{folder} is neither a run folder nor a model folder: it has no "
                        "config.json")
    config = read_json(folder / "config.json")
    if "mitigation" not in config and "model_type" not in config:
        raise UserError(f"{folder} is neither a run folder nor a model folder: its config.json "
                        "names no mitigation and no model_type")
    return "mitigation" in config


def read_settings(folder: Path, flags: SimpleNamespace) -> Settings:
    """Those of the run, or of the model's recipe.json, without all that only training needs."""
    source = {"config": folder / "config.json"} if is_run(folder) else {"model": str(folder)}
    typed = {name: getattr(flags, name) for name in ABOUT_SAMPLING
             if getattr(flags, name) is not None}
    return make_settings({**source, **WITHOUT_TRAINING, **typed})


def load_labs(folder: Path, settings: Settings, step: int | None) -> dict[str, Policy]:
    """The models to ask, each by what stands above its answers."""
    if not is_run(folder):
        if step is not None:
            raise UserError(f"--step {step} needs a run: {folder} is the folder of one model")
        return {str(folder): load_policy(settings)}
    checkpoints = checkpoint_folders(folder)
    step = choose_step(folder, checkpoints, step)
    labs = {"before training": load_policy(settings)}
    if step:
        labs[f"after step {step}"] = load_policy(settings, checkpoints[step])
    return labs


def choose_step(folder: Path, checkpoints: dict[int, Path], wanted: int | None) -> int:
    """The checkpoint to ask, 0 for none: then the model that the run began with is asked alone."""
    if wanted is None and not checkpoints:
        print(f"{folder} has no checkpoint yet: this is the model it began with")
    if wanted is None:
        return max(checkpoints, default=0)
    if wanted != 0 and wanted not in checkpoints:
        nearest = min([0, *checkpoints], key=lambda step: abs(step - wanted))
        raise UserError(f"{folder} kept no model of step {wanted}, the nearest is that of step "
                        f"{nearest}")
    return wanted


def read_problem(task, words: list[str]):
    """The problem that was typed, as the task reads it."""
    try:
        return task.read(words)
    except UserError:
        raise
    except (ValueError, LookupError) as error:  # of a task whose `read` expects the right words
        raise UserError(f"the task cannot read {' '.join(words)[:60]!r}: {error}") from None


def refuse_without_read(settings: Settings, task) -> None:
    if not hasattr(task, "read"):
        raise UserError(f"the task {settings.task} cannot read problems: its class Task needs the "
                        "method `read` (docs/your_own_task.md)")


@dataclass(frozen=True)
class Interview:
    task: object           # see Task in countdown_task.py
    labs: dict[str, Policy]   # the models, each by what stands above its answers
    flags: SimpleNamespace
    screen: Screen

    def ask(self, problem, number: int = 0) -> None:
        """Print what each model answers to a problem, the `number`-th that is asked."""
        print_text(self.task.show(problem), self.screen, BOLD)
        remarks = self.task.remarks(problem) if hasattr(self.task, "remarks") else []
        for remark in remarks:
            print_text(f"note: {remark}", self.screen, indent="  ")
        seed = derived_seed("sample", self.flags.seed, number)
        widest = max(len(title) for title in self.labs)
        for title, policy in self.labs.items():
            show_status(f"{title}: answering")
            try:
                rollouts = policy.ask([problem], self.flags.answers, seed, self.flags.greedy)
            finally:
                show_status("")
            print_answers(f"{title:{widest}}", policy, rollouts, self.screen)

    def converse(self) -> None:
        """A problem a line. What is wrong with a line is said, and the next one is read."""
        example = self.task.show(self.task.held_out_problems(1)[0])
        lines = piped_lines(example)
        if sys.stdin and sys.stdin.isatty():
            print_text(f"Type a problem, such as {example}. An empty line ends.", self.screen)
            lines = typed_lines()
        for number, line in enumerate(lines):
            print()
            try:
                self.ask(read_problem(self.task, line.split()), number)
            except UserError as error:
                print_text(str(error), self.screen)


def typed_lines() -> Iterator[str]:
    """From a terminal, until a line is empty or Ctrl-D or Ctrl-C ends it."""
    while True:
        try:
            line = input("\n> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line.strip():
            return
        yield line


def piped_lines(example: str) -> Iterator[str]:
    """All of stdin but blank lines."""
    line = None
    for line in filter(str.strip, sys.stdin or ()):  # None where it is closed
        yield line
    if line is None:
        raise UserError(f"nothing to ask: type a problem behind the folder, such as {example}")


def make_parser() -> Parser:
    parser = Parser("python -m tools.sample RUN [PROBLEM] [flags]", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run folder, or the folder of a model")
    parser.add_argument("problem", metavar="PROBLEM", nargs="*", default=[],
                        help="such as 3 5 7 22; without it problems are read line by line")
    return add_flags(parser, FLAGS)


def refuse_beside_greedy(given: dict) -> None:
    for name in ("answers", "temperature", "seed"):
        if given.get("greedy") and name in given:
            raise UserError(f"--{name} has no effect with --greedy: its answer is always the same")


def introduction(folder: Path, settings: Settings, flags: SimpleNamespace) -> str:
    if flags.greedy:
        return f"{folder}, the likeliest token every time"
    how = f"{folder}, sampled at temperature {settings.temperature:g}, seed {flags.seed}"
    if settings.temperature == 1:
        return how
    return f"{how}\nnote: the probabilities shown are those of temperature 1"


def main(argv: list[str]) -> None:
    given = make_parser().read(argv)
    flags = with_defaults({name: given[name] for name in FLAGS if name in given}, FLAGS)
    refuse_beside_greedy(given)
    folder, words = find_folder(given["run"]), " ".join(given["problem"]).split()
    settings, screen = read_settings(folder, flags), Screen.of_stdout()
    task = make_task(settings)
    refuse_without_read(settings, task)
    problem = read_problem(task, words) if words else None  # before models are loaded
    interview = Interview(task, load_labs(folder, settings, flags.step), flags, screen)
    print_text(introduction(folder, settings, flags), screen)
    print_legend(screen)
    if not words:
        return interview.converse()
    print()
    interview.ask(problem)


if __name__ == "__main__":
    if sys.stdin:  # None where it is closed
        sys.stdin.reconfigure(errors="replace")
    run_as_program("sample", main)
