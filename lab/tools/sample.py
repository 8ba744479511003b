"""Ask a problem: the model from before the training answers it, and the trained one.

    python -m lab sample runs/none-grpo-s0 4 12 10 18 --answers 8
    python -m lab sample models/tiny 4 12 10 18    (the model of this folder answers)
    python -m lab sample runs/none-grpo-s0 4 12 10 18 --answers 8 --film learning.gif

The answers show which tokens the model was unsure of. At a terminal with colours these tokens are
shaded; elsewhere their probability is printed after them. The same seed gives the same answers, and
--seed 1 gives others. With --greedy each token is the likeliest one. With --film all checkpoints of
the run answer in turn below its curve, in a moving picture.
"""
from pathlib import Path
from typing import Any

from lab.engine.errors import UserError, did_you_mean, read_json
from lab.engine.model_folder import refuse_other_folder
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import without_end_of_turn
from lab.harness.flags import Flag, read
from lab.harness.tasks import make_task
from lab.harness.build import load_policy
from lab.harness.record import checkpoint_folders, find_folder
from lab.harness.screen import BOLD, printable, put, right_or_wrong, styled
from lab.harness.settings import OPTIONS, LabSettings, make_settings
from lab.analysis.shading import legend, shaded

SHADES = ((0.1, "48;5;26;38;5;231"), (0.5, "48;5;75;38;5;16"), (0.9, "48;5;153;38;5;16"),
          (float("inf"), ""))
MARKED_BELOW = 0.5  # without colour, the probability of a token is printed if it is below this
FLAGS = {
    "answers": Flag(1, "number of answers that each model gives", least=1, most=1000),
    "seed": Flag(0, "seed of the sampling", least=0),
    "greedy": Flag(False, "take the likeliest token at every place. Each model then has one answer",
                   requires=(lambda values: values.answers == 1, "one answer of each model")),
    "film": Flag(None, "write a moving picture of the run to this file: a GIF"),
    "task": Flag(None, "the task that the problem belongs to. By default it is that of the "
                       "run, or of the recipe.json of the model"),
    "device": Flag("cpu", "device to compute on: cpu, cuda or cuda:N")}
# settings that a model which is only asked does not need
WITHOUT_TRAINING = {name: OPTIONS[name].default for name in (
    "mitigation", "advantage", "placebo", "kl", "deterministic")}


def main(argv: list[str]) -> None:
    flags = read(argv, "python -m lab sample RUN PROBLEM [flags]", __doc__, FLAGS, {
        "RUN": "a run folder, or the folder of a model",
        "PROBLEM ...": "a problem, such as 4 12 10 18"})
    folder = find_folder(flags.run)
    settings = settings_of(folder, flags.task, flags.device)
    problem = problem_of(settings, flags.problem)
    if flags.film and not is_run(folder):
        raise UserError(f"--film needs a run, and {folder} is a model")
    if flags.film and not flags.film.endswith(".gif"):
        raise UserError(f"--film {flags.film}: the picture is a GIF, so the name should end with "
                        ".gif")
    policies = policies_of(folder, settings, every=flags.film is not None)
    how = f"sampled at temperature {settings.temperature:g} with seed {flags.seed}"
    if flags.greedy:
        how = "greedy: each token is the likeliest"
    put(printable(f"{folder}: answers are {how}"))
    at = "" if settings.temperature == 1 else " at temperature 1"
    marks = legend(SHADES) or f"in brackets after the token, if it is below {MARKED_BELOW:.0%}"
    put(f"the probability of each token{at}: {marks}\n")
    put(styled(printable(next(iter(policies.values())).task.show(problem)), BOLD))
    seed, widest = derived_seed("sample", flags.seed), max(map(len, policies))
    film: dict[int, tuple[str, bool, str]] = {}
    for step, (title, policy) in zip([0, *sorted(checkpoint_folders(folder))], policies.items()):
        rollouts = policy.ask([problem], flags.answers, seed, flags.greedy)
        print_answers(f"{title:{widest}}", rollouts, policy.task.knows_success)
        knows_success, is_right = policy.task.knows_success, bool(rollouts.scores["answer"][0])
        verdict = f", {'right' if is_right else 'wrong'}" if knows_success else ""
        found = summary_of(rollouts, knows_success)
        about = f"{policy.task.show(problem)}, {title}: {found}. The first answer{verdict}:"
        film[step] = about, is_right, without_end_of_turn(rollouts.answers[0])
    if flags.film:
        from lab.analysis.film import write_film
        write_film(folder, Path(flags.film), film)
        put(printable(f"\nthe moving picture: {flags.film}"))


def settings_of(folder: Path, task: str | None, device: str) -> LabSettings:
    """The settings of a run or of a model's recipe, without those that only training needs."""
    given = {**WITHOUT_TRAINING, "device": device}
    if task:
        given["task"] = task
    if is_run(folder):
        return make_settings({"config": str(folder / "config.json"), **given})
    return make_settings({"model": str(folder), **given})


def policies_of(folder: Path, settings: LabSettings, every: bool = False) -> dict[str, Policy]:
    """The model of a folder, or those of a run before training and after it, by their titles.
    `every` checkpoint is wanted, or only the last."""
    policies = {"before training" if is_run(folder) else str(folder): load_policy(settings)}
    checkpoints = checkpoint_folders(folder)
    for step in sorted(checkpoints)[0 if every else -1:]:
        policies[f"after step {step}"] = load_policy(settings, checkpoints[step])
    return policies


def problem_of(settings: LabSettings, words: list[str]) -> Any:
    """The typed problem, as the task reads it."""
    task = make_task(settings.task, settings.keywords)
    if not hasattr(task, "read"):
        raise UserError(f"{settings.task} cannot read a problem: its class Task has no method "
                        "`read` (docs/reference/your_own_task.md)")
    return task.read(" ".join(words).split())


def is_run(folder: Path) -> bool:
    if not folder.exists():
        if folder.name.isdigit():  # of a problem
            raise UserError("the folder of a run or of a model comes first: python -m lab sample "
                            f"models/tiny {folder} ...")
        raise UserError(f"{folder} does not exist{did_you_mean(folder)}")
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    if "mitigation" not in config and "model_type" not in config:
        refuse_other_folder(folder)  # if it is known what it is
        raise UserError(f"{folder} is neither a run folder nor a model folder: it has no "
                        "config.json with a mitigation (a run) or a model_type (a model)")
    return "mitigation" in config


def summary_of(rollouts: Rollouts, knows_success: bool) -> str:
    right = rollouts.scores["answer"] > 0
    if knows_success:
        return f"{int(right.sum())} of {len(right)} right"
    return f"mean reward {rollouts.reward.mean():.2f}"


def print_answers(title: str, rollouts: Rollouts, knows_success: bool) -> None:
    """Of a task that does not say which answers are right, only the rewards are told."""
    right = rollouts.scores["answer"] > 0
    put(f"\n{styled(printable(title), BOLD)}   {summary_of(rollouts, knows_success)}")
    for b, texts in enumerate(rollouts.texts):
        cut_off = "" if rollouts.finished[b] else ", cut off"
        verdict = f"{right_or_wrong(right[b])}   " if knows_success else ""
        put(f"\n  {verdict}reward {rollouts.reward[b]:.2f}   "
            f"{rollouts.length[b]} tokens{cut_off}")
        log_prob, drawn = rollouts.log_prob[b].exp().tolist(), rollouts.drawn[b].tolist()
        probability = [p if own else None for p, own, _ in zip(log_prob, drawn, texts)]
        put("  " + shaded(texts, probability, SHADES, percent).replace("\n", "\n  "))


def percent(probability: float) -> str:
    """The mark after an unsure token; none after a confident one."""
    if probability >= MARKED_BELOW:
        return ""
    return f"[{probability:.0%}]" if probability >= 0.005 else "[<1%]"
