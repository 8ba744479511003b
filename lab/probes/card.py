"""The card of a method: what is known of it before it is trained, and what training has shown.

    python -m lab card my_idea --strength 10

The card of NAME is a table whose rows are the same for every method, below a verdict in one
sentence. Beside each number stand plain GRPO's, that of a control which knows more than any method
can, and what the measurement could have seen. Nothing is trained but
very small models of synthetic tasks, and for the default model 30 steps of plain GRPO. That takes
one or two minutes of processor time; with a large model as long as about sixteen steps of its
training, and then the noise rests on 8 batches instead of 32. The last rows are read from the runs
that `python -m tools.idea NAME`, typed with the same flags, has finished.

The table is printed, and written into the folder of --cards as card.json and report.html.
"""
import json
import textwrap
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import numpy as np

from tools.helpers.experiment import Arms
from analysis.gains import gain_over
from analysis.page import paragraphs, section_of, write_page
from analysis.shares import shares_by
from analysis.statistics import Estimate
from analysis.sureness import sureness
from analysis.tables import WITH_INTERVAL, Table, by_row, in_json, shown
from engine.optimizer import AdamW
from engine.policy import Policy
from engine.tokens import KINDS
from grpo import gradient_size, update
from harness.load import load_optimizer, load_policy, make_advantage, make_weighting
from tools.helpers.planned import PlannedRun, make_runs
from harness.flags import Flag, make_parser, with_defaults
from harness.record import find_folder, provenance, replace_text
from harness.screen import python_command, say, show_status
from harness.settings import Settings, is_large
from lab.probes.card_rows import gradient_noise, in_planted_tasks, in_the_enumerated_task
from tools import idea as tool
from tools.helpers.look import BATCHES, RARE, credited, sample, share_gains

Row = dict[str, object]
Rows = dict[str, Row]
BATCHES_OF_NOISE, BATCHES_OF_LARGE = 32, 8
HALF = 30  # steps of plain GRPO: half of a run of tools.idea
TRIES = 5  # of a step, of which the fastest counts
SURE = (0.0, 0.5, 0.9, 0.99)  # edges of the bins of p
TURNED = 0.9  # a smaller cosine is called a turn
# The rows: the question, and the format of their numbers.
QUESTIONS = {
    "bias": ("all answers listed: bias", ".2f"),
    "direction": ("all answers listed: cosine with the true gradient", ".4f"),
    "noise": ("all answers listed: noise over signal, times plain GRPO's", ".2f"),
    "batch_start": ("untrained: as little noise as a batch times", ".2f"),
    "cosine_start": ("untrained: cosine with plain GRPO", ".2f"),
    "batch_half": ("half trained: as little noise as a batch times", ".2f"),
    "cosine_half": ("half trained: cosine with plain GRPO", ".2f"),
    "kinds": ("share of the gradient by category", ""),
    "sure": ("share of the gradient by probability", ""),
    "cost": ("seconds of a step", ".2f"),
    "few": ("gain where 3 of 128 tokens decide", "points"),
    "some": ("gain where 12 of 128 decide", "points"),
    "many": ("gain where 42 of 128 decide", "points"),
    "training": ("gain in training", "points"),
    "placebo": ("gain in training over its placebo", "points"),
    "able": ("less able? gain of greedy answers", "points"),
    "sure_end": ("less sure? gain of sampled answers minus that", "points")}
LEGEND = (
    "Plain GRPO has the same answers, and all weights 1. The control is each token's true credit "
    "in tasks where that is known, and else `measured`, which samples for it. The bias is "
    "relative, and a wrong length counts, too. `As little noise as a batch times` counts plain "
    "GRPO's answers, and the noise along its mean gradient. By chance an estimated cosine can be "
    "above 1. Shares are divided by those of plain GRPO. Gains are in points of success over plain "
    "GRPO. `Could see` is the smallest difference that 80 of 100 such experiments would find.")


FLAGS = {
    "cards": Flag("cards", "folder of the cards, in which each method has its own"),
    "seeds": tool.FLAGS["seeds"],
    "quick": tool.FLAGS["quick"],
    "runs": tool.FLAGS["runs"]}


def main(argv: list[str]) -> None:
    parser = make_parser("python -m lab card NAME [flags of NAME, of train.py, or of this "
                         "list]", __doc__, FLAGS)
    parser.add_argument("name", metavar="NAME", help="a weighting or an advantage. It comes first")
    given, typed = parser.parse_known_args(argv)
    own = with_defaults(parser.values(given), FLAGS)
    show_card(given.name, typed, own, python_command("-m", "lab", "card", *argv),
              python_command("-m", "tools.idea", *tool.without(argv, {"cards": FLAGS["cards"]})))


def show_card(name: str, typed: list[str], own: SimpleNamespace, command: str,
              trains: str) -> None:
    """Make the card of a method and print it. `command` is what was typed, `trains` the command
    that makes the runs of its last rows."""
    idea = tool.Idea(name, typed, own, command)
    keys = [(arm, seed) for seed in range(own.seeds) for arm in idea.flags]
    make_card(idea.with_its_flags(), idea.own_flags(), idea.settings, idea.experiment.arms(keys),
              Path(own.cards) / name, command, trains, idea.flags["plain"])


def rows_before(name: str, flags: dict, plain: Settings, idea: Settings) -> Rows:
    """The rows before training, but for those of `rows_of_noise`."""
    policy = load_policy(plain)
    show_status("the card: which tokens get the gradient, and what a step costs")
    rows = favoured(policy, plain, idea) | cost(policy, plain, idea)
    show_status("the card: the task whose answers are all listed")
    rows |= in_the_enumerated_task(name, flags)
    show_status("the card: synthetic tasks, in which it is known which tokens decide")
    return rows | in_planted_tasks(name, flags)


def rows_of_noise(method: str, plain: Settings, half: str | None, config: Path) -> Rows:
    """The noise of the method's gradient; the method is typed as in `signal --only`. `half` is the
    folder of a half trained model, `config` a file of the settings."""
    batches = BATCHES_OF_LARGE if is_large(find_folder(plain.model)) else BATCHES_OF_NOISE
    rows: Rows = {}
    for stage, model in (("start", plain.model), ("half", half)):
        if model:
            rows |= gradient_noise(method, model, plain.questions, plain.answers, batches, stage,
                                   plain.device, config)
    if not half:  # the published control is that of the tiny model
        for row in rows.values():
            row["control"] = None
    return rows


def half_trained(folder: Path, command: str) -> str:
    """The tiny model after 30 steps of plain GRPO; it is trained when it is first asked for."""
    flags = ["--questions", "8", "--answers", "8", "--threads", "1", "--eval_every", "0",
             "--checkpoint_every", str(HALF)]
    planned = PlannedRun("half trained", 1000, folder / "half-trained", flags, HALF)
    make_runs([planned], 1, command)
    return str(planned.folder / f"checkpoints/step_{HALF:06d}")


def favoured(policy: Policy, plain: Settings, idea: Settings) -> Rows:
    """Each category's share of the gradient's size abs(A) w s, divided by its share in plain GRPO;
    and the same by the token's probability."""
    methods = [(make_advantage(s, policy), make_weighting(s, policy)) for s in (plain, idea)]
    parts: dict[str, list[np.ndarray]] = {"kind": [], "p": [], "plain": [], "own": []}
    batches = 1 if policy.model.is_large else BATCHES
    for step in range(1, batches + 1):
        batch = sample(policy, plain, step)
        s = gradient_size(batch.log_prob, batch.collision)
        for arm, settings, method in (("plain", plain, methods[0]), ("own", idea, methods[1])):
            policy_of = replace(policy, settings=settings)
            found, weight, _ = credited(batch, method, policy_of, settings, step)
            parts[arm].append((found.advantage * weight * s).abs()[batch.mask].cpu().numpy())
        parts["kind"].append(batch.kind[batch.mask].cpu().numpy())
        parts["p"].append(batch.log_prob.exp()[batch.mask].cpu().numpy())
    kind, p, usual, own = (np.concatenate(part) for part in parts.values())
    by_kind = [shares_by(kind, size, len(KINDS)) for size in (usual, own)]
    which = np.digitize(p, SURE) - 1
    by_p = [shares_by(which, size, len(SURE)) for size in (usual, own)]
    labels = [f"{low:g} to {high:g}" for low, high in zip(SURE, (*SURE[1:], 1.0))]
    rests_on = f"batches: {batches}"
    return {"kinds": {"own": share_gains(by_kind[1], by_kind[0]),
                      "plain": shares(by_kind[0], list(KINDS)), "could_see": rests_on},
            "sure": {"own": ", ".join(f"{label} {mine / max(usual, 1e-9):.2f}" for label, mine,
                                      usual in zip(labels, by_p[1], by_p[0]) if usual > RARE),
                     "plain": shares(by_p[0], labels), "could_see": rests_on}}


def shares(values: np.ndarray, labels: list[str]) -> str:
    """word 60%, number 25%"""
    return ", ".join(f"{label} {value:.0%}" for label, value in zip(labels, values) if value > RARE)


def cost(policy: Policy, plain: Settings, idea: Settings) -> Rows:
    """The processor time of a step over that of a plain one, the fastest of five tries of each.
    Other programs slow both down, so it is also said how far plain GRPO's own tries differ."""
    optimizer = load_optimizer(replace(plain, learning_rate=0.0), policy)
    seconds: dict[str, list[float]] = {"plain": [], "own": []}
    for _ in range(1 if policy.model.is_large else TRIES):
        for arm, settings in (("plain", plain), ("own", idea)):
            tried = replace(policy, settings=settings)
            seconds[arm].append(seconds_of_step(tried, optimizer))
    fastest, slowest = min(seconds["plain"]), max(seconds["plain"])
    could_see = f"plain's tries differ by {slowest / fastest - 1:.0%}"
    if policy.model.is_large:
        could_see = "one try"
    return {"cost": {"own": min(seconds["own"]) / fastest, "plain": 1.0, "could_see": could_see}}


def seconds_of_step(policy: Policy, optimizer: AdamW) -> float:
    """The processor time of a step of these settings."""
    s = policy.settings
    methods = make_advantage(s, policy), make_weighting(s, policy)
    begun = time.process_time()
    batch, weight, _ = credited(sample(policy, s, 1), methods, policy, s, 1)
    update(policy.model, optimizer, batch, weight, replace(s, kl=0.0))
    return time.process_time() - begun


def rows_after(arms: Arms) -> Rows:
    """The rows that training has shown, from pairs of finished runs."""
    level = fmean(line["success"] for run in arms["plain"].values() for line in run["metrics"])
    gains = {"training": gain_over(arms["idea"], arms["plain"]),
             "placebo": gain_over(arms["idea"], arms["placebo"])}
    rows: Rows = {}
    for key, gain in gains.items():
        rows[key] = {"own": gain.estimate, "plain": level if key == "training" else None,
                     "could_see": gain.could_see}
    found = sureness(arms["idea"], arms["plain"])
    if found:
        rows["able"] = {"own": found.greedy.estimate, "could_see": found.greedy.could_see}
        rows["sure_end"] = {"own": found.difference, "could_see": found.difference.visible}
    return rows


def as_table(name: str, rows: Rows) -> Table:
    cells = []
    for key, (question, spec) in QUESTIONS.items():
        row = rows.get(key)
        if row is None:
            continue
        if "reason" in row:
            cells.append([question, "-", "-", "-", str(row["reason"])])
            continue
        plain, control = (one.value if isinstance(one, Estimate) else one
                          for one in (row.get("plain"), row.get("control")))
        in_percent = spec == "points" and isinstance(plain, float)
        cells.append([question, shown(row.get("own"), spec),
                      f"{plain:.1%} right" if in_percent else shown(plain, spec),
                      shown(control, spec),
                      shown(row.get("could_see"), "size" if spec == "points" else spec)])
    formats = dict.fromkeys(("question", "own", "plain", "control", "could_see"), "")
    return Table("card", f"The card of {name}", by_row(formats, cells), "", [LEGEND],
                 {"own": f"{name}{WITH_INTERVAL}", "plain": "plain GRPO",
                  "could_see": "could see"})


def to_json(card: dict) -> dict:
    rows = {key: {part: in_json(value) for part, value in row.items()}
            for key, row in card["rows"].items()}
    return card | {"rows": rows}


def verdict(name: str, rows: Rows) -> str:
    """The first line of a card, from the rows that are exact; "" where there are none."""
    cosine, noise = (rows.get(key, {}).get("own") for key in ("direction", "noise"))
    if not isinstance(cosine, Estimate) or not isinstance(noise, Estimate):
        return ""
    if cosine.value < TURNED:
        return (f"{name} turns the gradient away from the true one: where all answers are listed "
                f"their cosine is {cosine.value:.2f}, and the noise is {noise.value:.1f} times "
                "plain GRPO's. It is not expected to learn what the reward asks for.")
    size = f"{noise.value:.2f} times plain GRPO's noise, exactly, where all answers are listed"
    if noise.value < 0.95:
        return f"{name} keeps the direction, with less noise: {size}."
    if noise.value > 1.05:
        return f"{name} keeps the direction, with more noise: {size}."
    return f"{name} is as plain GRPO: it keeps the direction, with {size}."


def write_card(folder: Path, card: dict) -> None:
    """card.json, and report.html with the same table below the verdict."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(to_json(card), indent=1, allow_nan=False)
    replace_text(folder / "card.json", text + "\n")
    table = as_table(card["method"], card["rows"])
    write_page(folder / "report.html", f"The card of {card['method']}",
               [paragraphs([card["verdict"]]), section_of(table)])


def make_card(method: str, flags: dict, settings: dict[str, Settings], arms: Arms, folder: Path,
              command: str, trains: str, given: dict) -> dict:
    """Measure the rows, write the card, and print it. `settings` and `arms` are those of plain,
    idea and placebo. `given` are the flags of plain GRPO, `command` is what was typed, and `trains`
    the command that makes the runs of the last rows."""
    plain, idea = settings["plain"], settings["idea"]
    name = method.split(" ")[0]
    is_tiny = plain.model == Settings.model and plain.task == Settings.task
    half = half_trained(folder.parent, command) if is_tiny else None
    rows = rows_before(name, flags, plain, idea)
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "settings.json"
    replace_text(config, json.dumps(given, indent=1) + "\n")
    rows |= rows_of_noise(method, plain, half, config)
    is_trained = len(arms.get("idea", {})) >= 2
    if is_trained:
        rows |= rows_after(arms)
    card = {"method": method, "name": name, "flags": flags, "model": plain.model,
            "day": date.today().isoformat(), **provenance(), "verdict": verdict(name, rows),
            "rows": rows}
    write_card(folder, card)
    show_status("")
    say(card["verdict"])
    say(as_table(method, rows).to_text())
    say("\n" + textwrap.fill(LEGEND, 100))
    if not is_trained:
        say(f"\n{trains} trains it beside its placebo. The card, made again, then has these rows.")
    say(f"\nThe card is {folder / 'card.json'}, and {folder / 'report.html'} shows it.")
    return card
