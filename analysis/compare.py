"""Which differences between runs are real: arms paired by seed, on the same held-out problems.

An arm is what runs have in common that differ in nothing but their seed. Runs that differ in model, data, length of
training, sampling or reward are not comparable: they are said so, and not averaged.
"""
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from countdown_task import KINDS, SECTIONS
from engine.tokens import load_tokenizer
from analysis.statistics import Estimate, holm, mean_reach, paired_difference
from mitigations import NEVER_RESCALED
from engine.errors import UserError
from analysis.tables import LETTERS, Table, by_row
from engine.files import read_lines
from engine.credit_file import read_columns
from engine.run_folder import run_config
from engine.settings import NOT_SETTINGS, OPTIONS
from analysis.tally import PARTITIONS, Vocabulary, credit_steps, end_of, lay_flat, units

SETTING = ("model", "data", "reward", "steps", "prompt", "numbers", "min_number", "max_number", "max_target", "max_result",
           "questions", "answers", "max_new_tokens", "temperature")  # what has to agree before two runs are compared
ASIDE = ("seed", "out", "own", "eval_tasks", "device", "threads", "checkpointing", "offload_optimizer", "micro_batch", "eval_every", "sample_every", "checkpoint_every",
         *NOT_SETTINGS)
NUMBER = (int, float)
NEEDED = {"metrics": {"step": int, "success": NUMBER, "entropy": (*NUMBER, type(None))},
          "evaluations": {"step": int, "mode": str, "success": NUMBER, "success_low": NUMBER, "success_high": NUMBER, "answer": list}}
PUBLISHED_ARMS = ("published (Qwen2.5-0.5B, another model, one seed, 128 problems): plain GRPO 15%, outcome_conditional 12% with discounts of "
                  "0.5 and 0.75, inverse_logprob_as_published 0% at step 60; filler over reasoning 1.31, and 1.41 with 0.75, in the old unit. "
                  "12% against 15% of 128 is z = 0.74")
PRIMARY = "final success, sampled"  # what is decided; the other measures are exploratory
SEEN = 0.05


def read_run(folder: str) -> dict:
    folder = Path(folder)
    run = {"folder": folder, "config": run_config(folder), "metrics": read_lines(folder / "metrics.jsonl"),
           "evaluations": read_lines(folder / "evaluations.jsonl"), "steps": credit_steps(folder)}
    for name, needed in NEEDED.items():
        for number, line in enumerate(run[name], 1):
            wrong = [key for key, kind in needed.items() if not isinstance(line, dict) or not isinstance(line.get(key), kind)]
            if wrong:
                value = line.get(wrong[0]) if isinstance(line, dict) else line
                raise UserError(f"{folder}/{name}.jsonl, line {number} is not of this program: its {wrong[0]} is {value}")
    for number, line in enumerate(run["evaluations"], 1):
        count, first = len(line["answer"]), len(run["evaluations"][0]["answer"])
        if count != first or not count:
            raise UserError(f"{folder}/evaluations.jsonl, line {number} has {count} answers, line 1 has {first}: the held-out problems should be "
                            "the same")
    if missing := [key for key in ("steps", "seed") if type(run["config"].get(key)) is not int]:
        raise UserError(f"{folder}/config.json says nothing of {missing[0]}")
    return run


def evaluations(run: dict, mode: str) -> list[dict]:
    return sorted((line for line in run["evaluations"] if line["mode"] == mode), key=lambda line: line["step"])


def settings_of(run: dict) -> dict:
    """The settings that had an effect."""
    config = {**{name: f.default for name, f in OPTIONS.items()}, **run["config"]}
    view = SimpleNamespace(**config)
    idle = [name for name, f in OPTIONS.items() if f.metadata["only"] and not f.metadata["only"][0](view)]
    idle += ["rescale"] * (config["mitigation"] in NEVER_RESCALED)
    floats = [name for name, f in OPTIONS.items() if f.type is float]  # 1 and 1.0 are the same
    return {name: float(value) if name in floats else value for name, value in config.items() if name not in idle}


def setting_of(run: dict) -> dict:
    settings = settings_of(run)
    held_out = len(run["evaluations"][0]["answer"]) if run["evaluations"] else None
    return {name: settings.get(name) for name in SETTING} | {"model": str(Path(settings["model"]).resolve()), "held-out problems": held_out}


def arm_of(run: dict) -> dict:
    return {name: value for name, value in settings_of(run).items() if name not in (*SETTING, *ASIDE)}


def alike(runs: list[dict], of) -> list[list[dict]]:
    """The runs in parts that agree in `of`, in the order in which they came."""
    parts = {}
    for run in runs:
        parts.setdefault(json.dumps(of(run), sort_keys=True), []).append(run)
    return list(parts.values())


def what_differs(parts: list[list[dict]]) -> str:
    """Why these parts are not compared with each other."""
    settings = [setting_of(part[0]) for part in parts]
    names = [name for name in settings[0] if len({json.dumps(s[name]) for s in settings}) > 1]
    sets = "; ".join(f"set {i}: {', '.join(f'{name} {s[name]}' for name in names)} ({', '.join(run['folder'].name for run in part)})"
                     for i, (s, part) in enumerate(zip(settings, parts), 1))
    return f"Not comparable, so each set is compared by itself and nothing is averaged over them. {sets}."


def name_arms(arms: list[list[dict]]) -> tuple[list[str], dict]:
    """The mitigation, and what else tells the arms apart. A common setting (a learning rate, say) is only told where it is not
    what most runs have; that is given back as well."""
    settings = [arm_of(arm[0]) for arm in arms]
    usual = {}
    for key in OPTIONS:
        values = [json.dumps(s[key]) for s, arm in zip(settings, arms) if key in s for _ in arm]
        if key != "mitigation" and len(set(values)) > 1:
            usual[key] = json.loads(max(values, key=lambda value: (values.count(value), value == json.dumps(OPTIONS[key].default))))
    names = []
    for mine in settings:
        twins = [s for s in settings if s["mitigation"] == mine["mitigation"]]
        own = [key for key in mine if key not in OPTIONS and any(s.get(key) != mine[key] for s in twins)]
        names.append(" ".join([mine["mitigation"], *(f"{key} {mine[key]}" for key in own),
                               *(f"{key} {mine[key]}" for key, value in usual.items() if key in mine and mine[key] != value)]))
    return names, usual


class Comparison:
    """Comparable runs, arm by arm; the baseline is the arm that all others are compared with."""

    def __init__(self, runs: list[dict], baseline: str | None):
        arms = alike(runs, arm_of)
        names, self.usual = name_arms(arms)
        assert len(set(names)) == len(arms), "two arms would have the same name"
        self.arms = dict(zip(names, arms))
        for name, arm in self.arms.items():
            by_seed = {}
            for run in arm:
                twin = by_seed.setdefault(run["config"]["seed"], run)
                if twin is not run:
                    raise UserError(f"{twin['folder']} and {run['folder']} are the same arm and seed: one of them is enough")
        self.baseline_was_named = False
        self.baseline = self.find_baseline(baseline)
        self.arms = {self.baseline: self.arms[self.baseline], **self.arms}  # it comes first
        self.keys = dict(zip(self.arms, LETTERS))

    def find_baseline(self, wanted: str | None) -> str:
        """By name or by one of its runs, otherwise plain GRPO, otherwise the first arm."""
        for name, arm in self.arms.items():
            folders = [run["folder"] for run in arm]
            if wanted and (wanted in (name, *(folder.name for folder in folders)) or Path(wanted).resolve() in map(Path.resolve, folders)):
                self.baseline_was_named = True
                return name
        plain = [name for name, arm in self.arms.items() if is_plain(arm[0])]
        usual = [name for name in plain if name == "none"]  # the one with the settings that most runs have
        if len(plain) > 1 and not usual and not wanted:
            raise UserError(f"which arm is the baseline: {' or '.join(plain)}? Say so with --baseline and the name of a run or an arm")
        return (usual or plain or list(self.arms))[0]

    def seeds(self, name: str) -> dict[int, dict]:
        return {run["config"]["seed"]: run for run in self.arms[name] if is_done(run)}

    def shown(self, name: str) -> list[dict]:
        """The runs that curves and means are made of: finished ones, or what there is."""
        return list(self.seeds(name).values()) or self.arms[name]

    def others(self) -> list[str]:
        return [name for name in self.arms if name != self.baseline]

    def placebo_of(self, name: str) -> list[str]:
        """The arms that are this one with something shuffled."""
        mine = {key: value for key, value in arm_of(self.arms[name][0]).items() if key != "placebo"}
        if arm_of(self.arms[name][0]).get("placebo", "none") != "none":
            return []
        return [other for other in self.arms if other != name and (theirs := arm_of(self.arms[other][0])).get("placebo", "none") != "none"
                and {key: value for key, value in theirs.items() if key != "placebo"} == mine]


def is_plain(run: dict) -> bool:
    c = run["config"]
    return (c["mitigation"], c.get("advantage", "grpo"), c.get("loss", "policy"), c.get("placebo", "none")) == ("none", "grpo", "policy", "none")


def is_done(run: dict) -> bool:
    return max((line["step"] for line in run["metrics"]), default=0) >= run["config"]["steps"]


def final_answers(run: dict, at: list[int], mode: str) -> np.ndarray:
    """Of each held-out problem, whether it is solved at the end."""
    return np.array([line["answer"] for line in evaluations(run, mode) if line["step"] == at[-1]][0], float)


def area(run: dict, at: list[int], mode: str) -> np.ndarray:
    """Of each held-out problem, the mean of its curve over training: straight lines between the evaluations at these steps."""
    curve = [line["answer"] for line in evaluations(run, mode) if line["step"] in at]
    return np.trapezoid(np.array(curve, float), at, axis=0) / (at[-1] - at[0])


def training_mean(run: dict, at: list[int], mode: str) -> np.ndarray:
    """Success over all training batches, as one item."""
    return np.array([np.mean([line["success"] for line in run["metrics"]])])


def evaluated(run: dict, mode: str) -> list[int]:
    """At which steps; none if not at the end."""
    steps = sorted({line["step"] for line in evaluations(run, mode)})
    return steps if steps and steps[-1] == run["config"]["steps"] else []


MEASURES = {  # what is computed, from evaluations of which mode, and at how many steps at least
    PRIMARY: (final_answers, "sampled", 1), "final success, greedy": (final_answers, "greedy", 1),
    "area under the held-out curve, sampled": (area, "sampled", 2), "mean success in training batches": (training_mean, None, 0)}


def difference(comparison: Comparison, one: str, other: str, measure: str, tests: int = 1) -> tuple[list[int], Estimate | None]:
    """The seeds that both arms have, and how far arm `one` is ahead, on the evaluations that both have."""
    of, mode, least = MEASURES[measure]
    mine, theirs, rows = comparison.seeds(one), comparison.seeds(other), {}
    for seed in sorted(set(mine) & set(theirs)):
        pair = mine[seed], theirs[seed]
        at = sorted(set.intersection(*(set(evaluated(run, mode)) for run in pair))) if mode else []
        if len(at) >= least and all(run["metrics"] or mode for run in pair):
            rows[seed] = of(pair[0], at, mode) - of(pair[1], at, mode)
    return list(rows), paired_difference(np.stack(list(rows.values())), tests) if rows else None


def verdict(seeds: list[int], e: Estimate | None, p: float) -> str:
    """`better` or `worse` only where the interval excludes 0, and still does among all arms (p is Holm's)."""
    if e is None:
        return "nothing in common"
    if len(seeds) == 1:
        return "one seed: no verdict"
    return "no difference seen" if not p < SEEN else "better" if e.value > 0 else "worse"


def differences(comparison: Comparison, measure: str) -> Table:
    """Each arm minus the baseline, and each arm minus its own placebo: two questions, each with its own correction."""
    against = [(name, comparison.baseline) for name in comparison.others()]
    placebos = [(name, placebo) for name in comparison.arms for placebo in comparison.placebo_of(name)]
    found, adjusted = {}, {}
    for family in (against, placebos):
        found |= {pair: difference(comparison, *pair, measure, len(family)) for pair in family}
        tested = [pair for pair in family if len(found[pair][0]) > 1]
        adjusted |= dict(zip(tested, holm([found[pair][1].p for pair in tested]))) if tested else {}
    rows, told = [], {"better": [], "worse": [], "no difference seen": [], "one seed: no verdict": []}
    for (name, other), (seeds, e) in found.items():
        pair = name, other
        said = verdict(seeds, e, adjusted.get(pair, np.nan))
        several = e is not None and len(seeds) > 1
        rows.append([name if pair in against else f"{name} - {other}", len(seeds), e.value if e else None, e.interval if e else None,
                     adjusted.get(pair), e.visible if several and len(seeds) > 2 else None, said])
        if pair in against and said in told:
            seen = f"could have seen about {100 * e.visible:.0f} points" if len(seeds) > 2 else "with two seeds only a huge one would be seen"
            told[said].append(f"{name} ({seen})" if said == "no difference seen" else name)
    sentences = {"better": f"Better than {comparison.baseline}", "worse": f"Worse than {comparison.baseline}",
                 "no difference seen": "No difference seen", "one seed: no verdict": "One seed is one seed, and no verdict"}
    finding = " ".join(f"{sentences[said]}: {', '.join(names)}." for said, names in told.items() if names)
    formats = {"arm": "", "seeds": "d", "difference": "+.1%", "95%": "+.1%", "Holm p": "p", "could see": ".1%", "verdict": ""}
    notes = ["the verdict goes by Holm's p: among several arms an interval that just excludes 0 is not enough",
             "paired by seed and, held out, by problem; bootstrap over seeds and over problems, Student's t for few seeds; with one seed the "
             "interval is about problems alone; could see: a difference of about this size would have been seen in 80 of 100 such experiments, other arms "
             "included (itself an estimate from few seeds)"]
    if placebos:
        notes.append("a row with a minus: an arm against its own placebo, with a Holm's correction of its own")
    if measure != PRIMARY:
        finding = f"Exploratory, Holm's correction does not reach over the measures. {finding}"
    return Table(measure, f"{measure.capitalize()}: each arm minus {comparison.baseline}", by_row(formats, rows), finding, notes)


def over_seeds(values) -> tuple[float | None, tuple[float, float] | None]:
    """Mean, and its interval by Student's t."""
    if len(values) < 2 or np.std(values) == 0:  # no spread is no knowledge of the spread
        return (float(values[0]) if len(values) else None), None
    mean, reach = np.mean(values), mean_reach(values)
    return float(mean), (float(mean - reach), float(mean + reach))


def arms_table(comparison: Comparison) -> Table:
    rows = []
    for name, arm in comparison.arms.items():
        done = comparison.seeds(name)
        sampled, greedy = ([final_answers(run, at, mode).mean() for run in done.values() if (at := evaluated(run, mode))]
                           for mode in ("sampled", "greedy"))
        last = [lines[-1] for run in done.values() if (lines := evaluations(run, "sampled"))]
        means = [np.mean([line[f"{key}_mean"] for line in last]) if last else None for key in ("format", "finished", "length")]
        mean, band = over_seeds(sampled)
        going = f" ({len(arm) - len(done)} still going)" if len(arm) > len(done) else ""
        band = band and tuple(np.clip(band, 0, 1).tolist())  # of a share
        rows.append([name, (" ".join(map(str, sorted(done))) or "none") + going, mean, band, over_seeds(greedy)[0], *means])
    known = [f"{row[0]} {row[2]:.1%}" for row in rows if row[2] is not None]
    formats = {"arm": "", "seeds": "", "sampled": ".1%", "95% over seeds": ".1%", "greedy": ".1%",
               "format": ".2f", "finished": ".0%", "length": ".0f"}
    config, count = comparison.arms[comparison.baseline][0]["config"], sum(map(len, comparison.arms.values()))
    usual = "".join(f"{key} {value} where nothing else is said; " for key, value in comparison.usual.items())
    finding = f"Final held-out success, sampled: {'; '.join(known)}." if known else "No run is finished yet."
    mitigations = {arm[0]["config"]["mitigation"] for arm in comparison.arms.values()}
    published = [PUBLISHED_ARMS] if mitigations & {"outcome_conditional", "inverse_logprob_as_published"} else []
    return Table("arms", "The arms", by_row(formats, rows), finding,
                 [f"{count} runs of {config['model']}, {config['steps']} steps; finished runs only; {usual}95% over seeds: Student's t over the "
                  "seeds of an arm", *published])


def runs_table(comparison: Comparison) -> Table:
    """Each run by itself. The gain is paired: the same held-out problems at the start and at the last evaluation."""
    rows = []
    for run in (run for arm in comparison.arms.values() for run in arm):
        sampled, greedy = (evaluations(run, mode) for mode in ("sampled", "greedy"))
        if len(sampled) > 1:
            gain = paired_difference((np.array(sampled[-1]["answer"], float) - np.array(sampled[0]["answer"]))[None])
            rows.append([run["folder"].name, sampled[0]["success"], sampled[-1]["success"], gain.value, gain.interval,
                         greedy[-1]["success"] - greedy[0]["success"] if len(greedy) > 1 else None])
    formats = {"run": "", "start": ".1%", "end": ".1%", "gain": "+.1%", "95%": "+.1%", "greedy": "+.1%"}
    finding = f"Gains of single runs go from {min(row[3] for row in rows):+.1%} to {max(row[3] for row in rows):+.1%}." if rows else ""
    return Table("runs", "Each run: held-out success, sampled, at the start and at its last evaluation", by_row(formats, rows), finding,
                 ["95%: over problems, paired; greedy: the gain with greedy decoding"])


def steadiness(run: dict) -> list[float] | None:
    """How the gradient norm, the entropy and the success of a run moved."""
    norm = np.array([line["gradient_norm"] for line in run["metrics"] if line.get("gradient_norm")])
    entropy, success = ([line[key] for line in run["metrics"] if line[key] is not None] for key in ("entropy", "success"))
    if not len(norm) or not entropy:
        return None
    best = max(np.mean(success[i:i + 5]) for i in range(max(1, len(success) - 4)))
    return [norm[:10].mean(), norm[-10:].mean(), norm.std() / norm.mean(), norm.max() / np.median(norm),
            np.mean(entropy[:10]), np.mean(entropy[-10:]), best, np.mean(success[-5:])]


def stability(comparison: Comparison) -> Table:
    rows = []
    for name in comparison.arms:
        found = [values for run in comparison.shown(name) if (values := steadiness(run))]
        if found:
            rows.append([name, len(found), *np.mean(found, 0).tolist()])
    formats = {"arm": "", "runs": "d", "norm first": ".3f", "last": ".3f", "spread": ".0%", "peak": ".1f",
               "entropy": ".2f", "to": ".2f", "best": ".0%", "end": ".0%"}
    columns = by_row(formats, rows)
    finding = "; ".join(f"{row[0]} {best:.0%} and {end:.0%}" for row, best, end in zip(rows, columns["best"][1], columns["end"][1]))
    finding = f"Best five steps in a row of training, and last five: {finding}." if rows else ""
    return Table("stability", "Gradient norm before clipping, entropy, and success in training batches", columns, finding,
                 ["means over runs; norm first, last: ten steps; spread: standard deviation over steps over mean; peak: largest over median; "
                  "entropy: first ten steps to last ten; best, end: best five steps in a row and last five"])


def credit_shares(run: dict, status) -> list[float]:
    """Of the gradient, weights included: the share of each kind, of think and answer, filler over reasoning, early over late."""
    words = Vocabulary(load_tokenizer(run["folder"]))
    sums = {name: np.zeros((2, len(PARTITIONS[name]))) for name in ("kind", "section", "class", "ends")}  # sizes, tokens
    for step in run["steps"]:
        status(f"{run['folder'].name}: step {step} of {run['steps'][-1]}")
        tokens = lay_flat(read_columns(run["folder"], step))
        size = np.abs(tokens["advantage"]) * units(tokens)["weighted gradient"]
        cells = {"kind": tokens["kind"], "section": tokens["section"], "class": words.classes(tokens["token_id"]), "ends": end_of(tokens)}
        for name, total in sums.items():
            total += [np.bincount(cells[name], weight, total.shape[1]) for weight in (size, None)]
    with np.errstate(invalid="ignore", divide="ignore"):
        kind, section = (sums[name][0] / sums[name][0].sum() for name in ("kind", "section"))
        naive, end = (sums[name][0] / sums[name][1] for name in ("class", "ends"))
        return [*kind, *section[1:], naive[0] / naive[1], end[0] / end[2]]


def credit_by_class(comparison: Comparison, status) -> list[Table]:
    """Where the gradient lies in each arm; and two ratios of sizes with intervals over seeds, which those of one run are not."""
    found = {name: [credit_shares(run, status) for run in comparison.shown(name) if run["steps"]] for name in comparison.arms}
    found, finding = {name: np.array(values) for name, values in found.items() if values}, ""
    kinds = {name: values[:, :len(KINDS)].mean(0) for name, values in found.items()}
    if comparison.baseline in kinds and len(kinds) > 1:
        moved = {name: np.abs(share - kinds[comparison.baseline]).sum() / 2 for name, share in kinds.items() if name != comparison.baseline}
        finding = (f"Share of the gradient that lies on other kinds of tokens than in {comparison.baseline}: "
                   f"{', '.join(f'{name} {share:.0%}' for name, share in moved.items())}.")
    formats = {"arm": "", **{kind: ".0%" for kind in KINDS}, **{section: ".0%" for section in SECTIONS[1:]}}
    shares = by_row(formats, [[name, *values[:, :-2].mean(0).tolist()] for name, values in found.items()])
    ratios = [[name, len(values), *over_seeds(values[:, -2]), *over_seeds(values[:, -1])] for name, values in found.items()]
    formats = {"arm": "", "runs": "d", "filler/reasoning": ".2f", "95%": ".2f", "early/late": ".2f", "95% of it": ".2f"}
    told = "; ".join(f"{row[0]} {row[2]:.2f} and {row[4]:.2f}" for row in ratios)
    return [Table("credit by class", "Share of the gradient abs(A) w s by kind and section", shares, finding,
                  ["means over the runs of an arm; policies that learned other things write other texts, so this is not the weighting alone"]),
            Table("credit over seeds", "Filler over reasoning and early over late, abs(A) w s, over the seeds of an arm", by_row(formats, ratios),
                  f"Filler over reasoning, and first fifth over last: {told}." if ratios else "",
                  ["filler and reasoning by the earlier regex; 95%: Student's t over seeds"])]


def all_tables(comparison: Comparison, status=lambda text: None) -> list[Table]:
    tables = [arms_table(comparison), runs_table(comparison)]
    if len(comparison.arms) > 1:
        tables += [differences(comparison, measure) for measure in MEASURES]
    tables += [stability(comparison), *credit_by_class(comparison, status)]
    for table in tables:
        table.keys = comparison.keys if "arm" in table.columns else {}
    return tables
