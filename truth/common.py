"""What every probe needs: its flags, a batch of answers, gradients of single log-probs, progress, a folder of findings."""
import argparse
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch

from grpo import grpo
from engine.lab import Lab, derived_seed, make_lab, sample
from engine.errors import UserError
from analysis.page import write_page
from analysis.tables import Table, show
from engine.progress import show_status
from engine.forward import Forward, response_log_probs
from engine.rollouts import Rollouts
from engine import flags as engine_flags
from engine.files import writing
from engine.run_folder import provenance
from engine.settings import make_settings


@dataclass(frozen=True)
class Flag:
    """A number of a probe: its default, what --quick makes of it, and the smallest that makes sense."""
    default: int | float | str | None
    quick: int | float | str | None
    text: str
    least: float = 1


COMMON = {"model": Flag("models/tiny", "models/tiny", "folder of a Qwen2, Qwen2.5 or Qwen3 model, a checkpoint of a run say"),
          "device": Flag("cpu", "cpu", "cpu, cuda or cuda:N"), "threads": Flag(0, 0, "CPU threads; 0 is what PyTorch finds", 0),
          "seed": Flag(0, 0, "of all that is drawn; the same seed gives the same numbers", 0)}


def add_flags(parser: argparse.ArgumentParser, flags: dict[str, Flag], folder: str) -> None:
    for name, f in flags.items():
        kind = str if f.default is None else type(f.default)
        said = f" (default {f.default}{f', quick {f.quick}' if f.quick != f.default else ''})" if f.default is not None else ""
        parser.add_argument(f"--{name}", type=kind, metavar={int: "N", float: "X", str: "TEXT"}[kind], default=argparse.SUPPRESS, help=f.text + said)
    parser.add_argument("--out", metavar="FOLDER", help=f"by default results/{folder}; what is there is never overwritten")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes: shows that it works, measures nothing")


def with_defaults(given: argparse.Namespace, flags: dict[str, Flag]) -> SimpleNamespace:
    args = SimpleNamespace(**{name: f.quick if given.quick else f.default for name, f in flags.items()} | vars(given))
    for name, f in flags.items():
        value = getattr(args, name)
        if type(value) in (int, float) and not f.least <= value < float("inf"):
            raise UserError(f"--{name} {value} should be at least {f.least:g}")
    return args


QUICK_TOKENS = 48  # of an answer with --quick: sampling takes as long as the longest one


@dataclass
class Findings:
    """What a probe has to show. Each table's finding is made from its own numbers; `short` names the tables whose
    findings come first."""
    title: str
    intro: list[str]
    tables: list[Table]
    short: tuple[str, ...]
    pictures: list[tuple[Path, str]] = field(default_factory=list)
    places: dict[str, tuple] = field(default_factory=dict)
    episodes: list[dict] = field(default_factory=list)


class Progress:
    """Share of the work that is done, and the time left, on stderr: a line that is overwritten at a terminal, one every
    half minute elsewhere. `parts` are the stages and about how long each takes, in any unit."""

    def __init__(self, **parts: float):
        self.parts, self.start, self.said = parts, time.monotonic(), time.monotonic()

    def __call__(self, part: str, done: float = 0.0, text: str = "") -> None:
        names, now = list(self.parts), time.monotonic()
        before = sum(self.parts[name] for name in names[:names.index(part)])
        share = (before + done * self.parts[part]) / sum(self.parts.values())
        left = (now - self.start) * (1 - share) / share if share > 0.02 else None
        line = f"{share:4.0%}  {text or part.replace('_', ' ')}" + (f", about {left / 60:.0f} min {left % 60:02.0f} s left" if left is not None else "")
        if sys.stderr.isatty():
            print(f"\r  {line[:90]:90s}\r", end="", file=sys.stderr, flush=True)
        elif now - self.said > 30:
            print(f"  {line}", file=sys.stderr, flush=True)
            self.said = now


@dataclass
class Probe:
    """One call of a probe: the flags, and where its pictures go."""
    args: SimpleNamespace
    folder: Path

    def lab(self, **settings) -> Lab:
        """The model, its problems and its recipe. Probes ask about the policy itself, so at temperature 1."""
        given = {"model": self.args.model, "device": self.args.device, "threads": self.args.threads, "seed": self.args.seed, "temperature": 1.0}
        given |= {"max_new_tokens": QUICK_TOKENS} if self.args.quick else {}
        return make_lab(make_settings({**given, **settings}))


def sample_batch(lab: Lab, step: int, questions: int, answers: int) -> Rollouts:
    """A batch as training makes it, with the advantages of plain GRPO; `step` numbers the batches of a probe."""
    s = lab.settings
    rollouts = sample(lab, lab.problems.training(s.seed, step, questions), answers, derived_seed("probe", s.seed, step))
    rollouts = replace(rollouts, step=step, generator=torch.Generator().manual_seed(derived_seed("probe credit", s.seed, step)),
                       forward=Forward(lab.model, s.micro_batch))
    return replace(rollouts, advantage=grpo(rollouts))


def gradients(lab: Lab, rollouts: Rollouts, coefficients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of  sum_bt coefficient_bt log pi(y_bt | ...)  for each (B, T) of coefficients: flat vectors, from one forward pass."""
    parameters, total = list(lab.model.parameters()), {}
    for rows in rollouts.length.nonzero().squeeze(1).split(lab.settings.micro_batch):
        log_prob = response_log_probs(lab.model, rollouts, rows)
        for name, coefficient in coefficients.items():
            found = flat(torch.autograd.grad((coefficient[rows] * log_prob).sum(), parameters, retain_graph=True, materialize_grads=True))
            total[name] = total[name] + found if name in total else found
    return total


def answer_gradients(lab: Lab, rollouts: Rollouts, coefficients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The same, answer by answer."""
    parameters = list(lab.model.parameters())
    for b in range(len(rollouts.mask)):
        log_prob = response_log_probs(lab.model, rollouts, torch.tensor([b], device=rollouts.mask.device))[0]
        yield [flat(torch.autograd.grad((c[b] * log_prob).sum(), parameters, retain_graph=True, materialize_grads=True)) for c in coefficients]


def flat(tensors) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def folder_of(name: str, args: SimpleNamespace) -> Path:
    """Named by probe, model and seed."""
    model = Path(getattr(args, "model", ""))
    if model.name.startswith("step_"):  # a checkpoint is called after its run
        model = Path(f"{model.resolve().parent.parent.name}-{model.name}")
    parts = [name, *filter(None, [model.name]), f"s{args.seed}", *["quick"] * args.quick]
    folder = Path(args.out or f"results/{'-'.join(parts)}")
    if folder.exists():
        raise UserError(f"{folder} exists already: name another with --out, or remove it")
    return folder


def carry_out(name: str, args: SimpleNamespace, measure) -> None:
    """Measure, and write down what was found: a folder appears whole, or not at all."""
    folder, start = folder_of(name, args), time.monotonic()
    unfinished = folder.with_name(f".{folder.name}.tmp")
    with writing(unfinished):
        shutil.rmtree(unfinished, ignore_errors=True)  # of one that was stopped
        unfinished.mkdir(parents=True)
    try:
        found = measure(Probe(args, unfinished))
        show_status("")
        write(unfinished, name, args, found, time.monotonic() - start)
        with writing(folder):
            unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    print(f"\n{time.monotonic() - start:.0f} s; page: {folder / 'report.html'}; numbers: {folder / 'numbers.json'}; {len(found.pictures)} pictures beside them")


def write(folder: Path, name: str, args: SimpleNamespace, found: Findings, seconds: float) -> None:
    said = [line for table in found.tables if table.name in found.short for line in table.finding.splitlines()]
    intro = ["Made with --quick: these numbers show that it works, and nothing else."] * args.quick + found.intro
    write_page(folder / "report.html", found.title, intro, said, found.tables, found.pictures, found.places, found.episodes)
    numbers = {"measured": name, "settings": vars(args), **provenance(), "seconds": round(seconds, 1), "in_short": said,
               "tables": [table.to_json() for table in found.tables]}
    with writing(folder / "numbers.json"):
        (folder / "numbers.json").write_text(json.dumps(numbers, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    print("\n\n".join(textwrap.fill(text, 100) for text in [found.title, *intro]))
    show(said, found.tables)


# INTEGRATOR: a stand-in. Take the run_probe of the other version of truth/common.py.
def run_probe(name: str, doc: str, flags: dict, measure, argv: list[str] | None = None) -> None:
    def main(argv: list[str]) -> None:
        parser = engine_flags.Parser(f"python -m truth.{name} [flags]", doc)
        engine_flags.add_flags(parser, known)
        parser.add_argument("--out", metavar="FOLDER")
        parser.add_argument("--quick", action="store_true")
        given = parser.read(argv)
        out, quick = given.pop("out", None), given.pop("quick", False)
        args = engine_flags.with_defaults(given, known, quick)
        args.out, args.quick = out, quick
        carry_out(name, args, measure)

    common = {flag: engine_flags.Flag(f.default, f.text, least=0 if type(f.default) is int else None)
              for flag, f in COMMON.items()}
    known = {**common, **flags}
    if argv is None:
        engine_flags.run_as_program(f"truth.{name}", main)
    else:
        main(argv)
