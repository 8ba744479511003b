"""Ask a trained model: one problem, answered before training and after it.

    python -m tools.sample runs/none-grpo-s0 3 5 7 22
    python -m tools.sample models/tiny 3 5 7 22       a model folder answers once

The answers show which tokens the model was unsure of: shaded at a terminal, elsewhere with their
probability behind them. The same seed gives the same answers; --seed 1 gives others. Nothing is
written.
"""
if not __package__:
    raise SystemExit("start it with: python -m tools.sample")
from pathlib import Path

import mitigations  # noqa: F401  fills the lists of choices that settings are checked with
from engine.errors import UserError
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts
from harness.credit_file import checkpoint_folders
from harness.files import find_folder, is_there, read_json
from harness.flags import Flag, Parser, add_flags, with_defaults
from harness.load import load_policy
from harness.program import run_as_program
from harness.progress import BOLD, put, right_or_wrong, styled, visible
from harness.settings import make_settings
from harness.tasks import make_task
from tools.terminal import legend, shaded

SHADES = ((0.1, "48;5;26;38;5;231"), (0.5, "48;5;75;38;5;16"), (0.9, "48;5;153;38;5;16"),
          (float("inf"), ""))
MARKED_BELOW = 0.5  # where there is no colour

SETTINGS = {  # of the run that may be changed
    "temperature": Flag(None, "of the sampling, by default that of the run", kind=float),
    "max_new_tokens": Flag(None, "an answer is cut off here, by default as in the run", kind=int),
    "task": Flag(None, "by default that of the run, or of the model's recipe.json"),
    "device": Flag("cpu", "cpu, cuda or cuda:N"),
    "threads": Flag(None, "CPU threads, by default as in the run", kind=int)}
FLAGS = {
    "answers": Flag(1, "answers of each model", least=1, most=1000),
    "greedy": Flag(False, "take the likeliest token every time"),
    "seed": Flag(0, "of the sampling", least=0),
    "step": Flag(None, "ask the checkpoint of this step, by default the newest", kind=int),
    **SETTINGS}
WITHOUT_TRAINING = {"mitigation": "none", "advantage": "grpo", "loss": "policy",
                    "placebo": "none", "kl": 0.0, "offload_optimizer": False, "shard": False}


def main(argv: list[str]) -> None:
    parser = add_flags(Parser("python -m tools.sample RUN PROBLEM [flags]", __doc__), FLAGS)
    parser.add_argument("run", metavar="RUN", help="a run folder, or the folder of a model")
    parser.add_argument("problem", metavar="PROBLEM", nargs="+", help="such as 3 5 7 22")
    given = parser.read(argv)
    flags = with_defaults(given, FLAGS)
    for name in ("answers", "temperature", "seed"):
        if flags.greedy and name in given:
            raise UserError(f"--{name} has no effect with --greedy: its answer is always the same")
    folder = find_folder(flags.run)
    source = {"config": folder / "config.json"} if is_run(folder) else {"model": str(folder)}
    typed = {name: getattr(flags, name) for name in SETTINGS if getattr(flags, name) is not None}
    settings = make_settings({**source, **WITHOUT_TRAINING, **typed})
    task = make_task(settings)
    if not hasattr(task, "read"):
        raise UserError(f"the task {settings.task} cannot read problems: its class Task needs the "
                        "method `read` (docs/your_own_task.md)")
    problem = task.read(" ".join(flags.problem).split())  # before models are loaded
    policies = load_policies(folder, settings, flags.step)
    how = f"sampled at temperature {settings.temperature:g}, seed {flags.seed}"
    put(visible(f"{folder}, {'the likeliest token every time' if flags.greedy else how}"))
    at = "" if settings.temperature == 1 or flags.greedy else " at temperature 1"
    put(f"probability of a token{at}: {legend(SHADES) or '13% behind it, where below 50%'}\n")
    put(styled(visible(task.show(problem)), BOLD))
    seed, widest = derived_seed("sample", flags.seed), max(map(len, policies))
    for title, policy in policies.items():
        print_answers(f"{title:{widest}}", policy.ask([problem], flags.answers, seed, flags.greedy))


def is_run(folder: Path) -> bool:
    """Whether it is the folder of a run, not that of a model."""
    config = read_json(folder / "config.json") if is_there(folder / "config.json") else {}
    if "mitigation" not in config and "model_type" not in config:
        raise UserError(f"{folder} is neither a run folder nor a model folder: it has no "
                        "config.json that names a mitigation or a model_type")
    return "mitigation" in config


def load_policies(folder: Path, settings, step: int | None) -> dict[str, Policy]:
    """The models to ask, each by what stands above its answers."""
    if not is_run(folder):
        if step is not None:
            raise UserError(f"--step {step} needs a run: {folder} is the folder of one model")
        return {str(folder): load_policy(settings)}
    checkpoints = checkpoint_folders(folder)
    if step is None:
        step = max(checkpoints, default=0)
    if step and step not in checkpoints:
        raise UserError(f"{folder} kept no model of step {step}, only of "
                        f"{', '.join(map(str, checkpoints)) or 'none'}")
    policies = {"before training": load_policy(settings)}
    if step:
        policies[f"after step {step}"] = load_policy(settings, checkpoints[step])
    return policies


def print_answers(title: str, rollouts: Rollouts) -> None:
    """What one model answered: a single answer beside the title, several below a summary."""
    count = len(rollouts.answers)
    first = verdict(rollouts, 0) if count == 1 else summary(rollouts)
    put(f"\n{styled(visible(title), BOLD)}   {first}")
    for b, texts in enumerate(rollouts.texts):
        if count > 1:
            put(f"\n  {verdict(rollouts, b)}")
        probability = rollouts.log_prob[b, :len(texts)].exp().tolist()
        put("  " + shaded(texts, probability, SHADES, percent).replace("\n", "\n  "))


def percent(probability: float) -> str:
    """Written behind an unsure token; nothing behind a sure one."""
    if probability >= MARKED_BELOW:
        return ""
    return f"\u00b7{probability:.0%}" if probability >= 0.005 else "\u00b7<1%"


def verdict(rollouts: Rollouts, b: int) -> str:
    """right   reward 1.10   31 tokens"""
    cut_off = "" if rollouts.finished[b] else ", cut off"
    return (f"{right_or_wrong(rollouts.scores['answer'][b] > 0)}   "
            f"reward {rollouts.reward[b]:.2f}   {rollouts.length[b]} tokens{cut_off}")


def summary(rollouts: Rollouts) -> str:
    """3 of 8 right   mean reward 0.47   61 tokens on average"""
    right, cut_off = int((rollouts.scores["answer"] > 0).sum()), int((~rollouts.finished).sum())
    return (f"{right} of {len(rollouts.answers)} right   mean reward "
            f"{rollouts.reward.mean():.2f}   {rollouts.length.float().mean():.0f} tokens on average"
            + (f", {cut_off} cut off" if cut_off else ""))


if __name__ == "__main__":
    run_as_program("sample", main)
