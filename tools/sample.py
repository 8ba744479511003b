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
from engine.policy import derived_seed
from engine.rollouts import Rollouts
from harness.record import checkpoint_folders, find_folder, read_json
from harness.screen import BOLD, put, right_or_wrong, run_as_program, styled, visible
from harness.load import load_policy
from harness.settings import Flag, make_parser, make_settings, with_defaults
from harness.tasks import make_task
from tools.terminal import legend, shaded

SHADES = ((0.1, "48;5;26;38;5;231"), (0.5, "48;5;75;38;5;16"), (0.9, "48;5;153;38;5;16"),
          (float("inf"), ""))
MARKED_BELOW = 0.5  # where there is no colour
FLAGS = {
    "answers": Flag(1, "answers of each model", least=1, most=1000),
    "seed": Flag(0, "of the sampling", least=0),
    "task": Flag(None, "by default that of the run, or of the model's recipe.json"),
    "device": Flag("cpu", "cpu, cuda or cuda:N")}
WITHOUT_TRAINING = {"mitigation": "none", "advantage": "grpo", "loss": "policy",
                    "placebo": "none", "kl": 0.0, "offload_optimizer": False, "shard": False}


def main(argv: list[str]) -> None:
    parser = make_parser("python -m tools.sample RUN PROBLEM [flags]", __doc__, FLAGS)
    parser.add_argument("run", metavar="RUN", help="a run folder, or the folder of a model")
    parser.add_argument("problem", metavar="PROBLEM", nargs="+", help="such as 3 5 7 22")
    flags = with_defaults(parser.read(argv), FLAGS)
    folder = find_folder(flags.run)
    source = {"config": folder / "config.json"} if is_run(folder) else {"model": str(folder)}
    asked = {"task": flags.task} if flags.task else {}
    settings = make_settings({**source, **WITHOUT_TRAINING, **asked, "device": flags.device})
    task = make_task(settings.task, settings.method_flags)
    if not hasattr(task, "read"):
        raise UserError(f"the task {settings.task} cannot read problems: its class Task needs the "
                        "method `read` (docs/your_own_task.md)")
    problem = task.read(" ".join(flags.problem).split())  # before models are loaded
    policies = {"before training" if is_run(folder) else str(folder): load_policy(settings)}
    for step, checkpoint in sorted(checkpoint_folders(folder).items())[-1:]:
        policies[f"after step {step}"] = load_policy(settings, checkpoint)
    put(visible(f"{folder}, sampled at temperature {settings.temperature:g}, seed {flags.seed}"))
    at = "" if settings.temperature == 1 else " at temperature 1"
    put(f"probability of a token{at}: {legend(SHADES) or '13% behind it, where below 50%'}\n")
    put(styled(visible(task.show(problem)), BOLD))
    seed, widest = derived_seed("sample", flags.seed), max(map(len, policies))
    for title, policy in policies.items():
        print_answers(f"{title:{widest}}", policy.ask([problem], flags.answers, seed))


def is_run(folder: Path) -> bool:
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    if "mitigation" not in config and "model_type" not in config:
        raise UserError(f"{folder} is neither a run folder nor a model folder: it has no "
                        "config.json that names a mitigation or a model_type")
    return "mitigation" in config


def print_answers(title: str, rollouts: Rollouts) -> None:
    right = int((rollouts.scores["answer"] > 0).sum())
    put(f"\n{styled(visible(title), BOLD)}   {right} of {len(rollouts.answers)} right")
    for b, texts in enumerate(rollouts.texts):
        cut_off = "" if rollouts.finished[b] else ", cut off"
        put(f"\n  {right_or_wrong(rollouts.scores['answer'][b] > 0)}   "
            f"reward {rollouts.reward[b]:.2f}   {rollouts.length[b]} tokens{cut_off}")
        probability = rollouts.log_prob[b, :len(texts)].exp().tolist()
        put("  " + shaded(texts, probability, SHADES, percent).replace("\n", "\n  "))


def percent(probability: float) -> str:
    """Written behind an unsure token; nothing behind a sure one."""
    if probability >= MARKED_BELOW:
        return ""
    return f"\u00b7{probability:.0%}" if probability >= 0.005 else "\u00b7<1%"


if __name__ == "__main__":
    run_as_program("sample", main)
