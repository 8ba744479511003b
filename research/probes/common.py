"""What every probe needs: flags, a batch of answers, gradients, a folder for its findings.

A probe is a module whose docstring says what it asks, how it measures and how to read it, with two
things; python -m research NAME runs it:

    FLAGS = {**OF_A_MODEL, "answers": Flag(8, "answers to each problem", least=2, quick=2)}

    def measure(probe: Probe) -> Findings:
        ...
"""
import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import torch

from analysis.tables import Table, item_of, show, show_in_short
from engine.errors import UserError
from harness import flags as lab
from harness.files import is_there, replace_text, whole_folder
from harness.flags import MOST_SEED, MOST_THREADS, Parser, add_flags, with_defaults
from engine.forward import response_log_probs
from engine.policy import Policy, derived_seed
from harness.load import load_policy
from harness.progress import show_status
from harness.identity import provenance
from engine.rollouts import Rollouts
from harness.run_name import path_part
from harness.settings import make_settings
from grpo import grpo
from qwen2_model import Qwen2


@dataclass(frozen=True)
class Flag(lab.Flag):
    quick: object = None  # its value with --quick, where that differs


COMMON = {
    "threads": Flag(0, "CPU threads; 0 is what PyTorch finds", least=0, most=MOST_THREADS),
    "seed": Flag(0, "of all that is drawn; the same seed gives the same numbers", least=0,
                 most=MOST_SEED)}
OF_A_MODEL = {
    "model": Flag("models/tiny", "folder of a Qwen2, Qwen2.5 or Qwen3 model, say a checkpoint"),
    "device": Flag("cpu", "cpu, cuda or cuda:N"),
    **COMMON}
QUICK_TOKENS = 48  # length limit with --quick: sampling takes as long as the longest answer


@dataclass
class Findings:
    """What a probe has to show. What its tables found, a line for each idea, is its summary."""
    title: str
    intro: list[str]
    tables: list[Table]
    picture: tuple[Path, str] | None                    # file and caption
    takes: str = ""                                     # time of the whole probe
    values: dict = field(default_factory=dict)          # that tables were made of, for whoever asks


@dataclass
class Probe:
    """One call of a probe: its flags, and the folder for its pictures."""
    args: SimpleNamespace
    folder: Path

    def policy(self) -> Policy:
        """The model with its problems. Probes ask about the policy itself, so at temperature 1."""
        chosen = {name: vars(self.args)[name] for name in OF_A_MODEL}
        short = {"max_new_tokens": QUICK_TOKENS} if self.args.quick else {}
        return load_policy(make_settings({**chosen, "temperature": 1.0, **short}))


def run_probe(name: str, doc: str, flags: dict[str, Flag], measure: Callable[[Probe], Findings],
              argv: list[str]) -> None:
    """Read the flags, measure, and write the findings into a folder, which appears whole or not at
    all."""
    quick = {flag: declared.quick for flag, declared in flags.items() if declared.quick is not None}
    told = {flag: replace(flags[flag], text=f"{flags[flag].text}, with --quick {value}")
            for flag, value in quick.items()}
    known = {**flags, **told,
             "out": Flag(None, f"a new folder, by default results/{name}-...-s<seed>"),
             "quick": Flag(False, "seconds instead of minutes: it shows that the probe works"),
             "all": Flag(False, "print every table, not only findings")}
    typed = add_flags(Parser(f"python -m research {name} [flags]", doc), known).read(argv)
    args = with_defaults(quick | typed if typed.get("quick") else typed, known)
    command, start = command_of(name, typed), time.monotonic()
    folder = choose_folder(name, args)
    with whole_folder(folder) as unfinished:
        findings = measure(Probe(args, unfinished))
        show_status("")
        if args.quick:
            findings.intro.insert(0, "A quick look: its numbers show that the probe works, and "
                                  f"nothing else. A real answer takes {findings.takes}: {command}")
        seconds = time.monotonic() - start
        write_findings(unfinished, name, args, findings, seconds, command)
    if args.all:
        print_all(findings)
    else:
        print(f"{findings.title}\n")
        show_in_short([*findings.intro[:1 + args.quick], *summary_of(findings)],
                      findings.tables[:1])
    print(f"\n{seconds:.0f} s; numbers: {folder / 'numbers.json'}")
    if not args.all:
        print("--all prints every table")


def command_of(name: str, typed: dict) -> str:
    """The command that was typed, without what changes no number, and without --quick."""
    flags = [f" --{flag} {shlex.quote(str(value))}" for flag, value in typed.items()
             if flag not in ("quick", "all", "out", "runs", "processes", "report_only")]
    return f"python -m research {name}{''.join(flags)}"


def choose_folder(name: str, args: SimpleNamespace) -> Path:
    """The one asked for, or one named by probe, model and seed. It must not exist yet."""
    model = [path_part(args.model)] if hasattr(args, "model") else []
    parts = [name, *model, f"s{args.seed}", *["quick"] * args.quick]
    folder = Path(args.out or f"results/{'-'.join(parts)}")
    if is_there(folder):
        raise UserError(f"{folder} exists already: name another with --out, or remove it")
    return folder


def write_findings(folder: Path, name: str, args: SimpleNamespace, findings: Findings,
                   seconds: float, command: str) -> None:
    """`command` is the one that measures in earnest."""
    numbers = {"measured": name, "quick_look": args.quick, "command": command,
               "settings": vars(args), **provenance(),
               "seconds": round(seconds, 1), "in_short": summary_of(findings),
               "tables": [table.to_json() for table in findings.tables],
               "values": findings.values}
    replace_text(folder / "numbers.json", json.dumps(numbers, indent=1, allow_nan=False) + "\n")


def print_all(findings: Findings) -> None:
    show([findings.title, *findings.intro], [])
    if summary := summary_of(findings):
        print("\n".join(["In short", *(line for text in summary for line in item_of(text)), ""]))
    show([], findings.tables)


def summary_of(findings: Findings) -> list[str]:
    """One idea a line, in the order of the tables."""
    return list(dict.fromkeys(line for table in findings.tables
                              for line in table.finding.splitlines()))


def sample_batch(policy: Policy, step: int, questions: int, answers: int) -> Rollouts:
    """Sample as training does, with plain GRPO's advantages; `step` numbers a probe's batches."""
    s = policy.settings
    problems = policy.task.training_problems(s.seed, step, questions)
    rollouts = policy.ask(problems, answers, derived_seed("probe", s.seed, step))
    generator = torch.Generator().manual_seed(derived_seed("probe credit", s.seed, step))
    rollouts = replace(rollouts, step=step, generator=generator, forward=policy.extra_forward())
    return replace(rollouts, advantage=grpo(rollouts))


def gradients(policy: Policy, rollouts: Rollouts,
              coefficients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradient of  sum_bt c_bt log pi(y_bt | ...)  for each c (B, T), as a flat vector.

    One forward pass serves them all.
    """
    total = {}
    for rows in rollouts.length.nonzero().squeeze(1).split(policy.settings.micro_batch):
        log_prob = response_log_probs(policy.model, rollouts, rows)
        for name, coefficient in coefficients.items():
            gradient = gradient_of(policy.model, (coefficient[rows] * log_prob).sum())
            total[name] = total[name] + gradient if name in total else gradient
    return total


def gradient_of(model: Qwen2, number: torch.Tensor) -> torch.Tensor:
    """(P,): at all its parameters; the graph stays, for the next number."""
    parts = torch.autograd.grad(number, list(model.parameters()), retain_graph=True,
                                materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])
