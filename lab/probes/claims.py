"""Which claims of the four notes hold in a run? Each with its figure there and here, and a verdict.

    python -m lab claims runs/none-grpo-s0
    python -m lab claims runs/none-grpo-s0 runs/outcome_conditional-grpo-s0
    python -m lab claims docs/qwen-steps/untrained --only filler,early

The notes are those that this project began with: the analysis of credit in GRPO
(github.com/Ja-Crispy/GRPO-Zero), its four mitigations, the paper on sparsity and rank (arXiv
2606.29238), and PPO and GRPO. A is the advantage of a token, w its weight and p its probability. A
log p is what the notes call a token's contribution, and abs(A) w s is the length of its gradient at
the logits.

The first run is asked. Further runs are there for the claims about their weightings. A verdict goes
by the 95% interval of the figure:

    holds                 the whole interval is on the side of the claim
    does not              it is on the other side, or the claim contradicts arithmetic
    in one reading        it holds by one measure, unit or model, and not by another; or its
                          verdict was another one with another seed
    by arithmetic         it is true of any run, and so says nothing about this one
    no difference seen    the interval reaches to both sides
    cannot be seen here   the run lacks what is needed, and the row says what

Verdicts of a run are of this run: another seed is another run. The intervals are over the problems
of the run, or over its steps, and they are not corrected for the number of claims. A stored number
of the tiny model is set beside a run of that model, task and advantage alone. Verdicts marked
*stored* are those of experiments with several seeds or with a large model, whose numbers are in
lab/results, because one run decides nothing about a weighting. On models/tiny all claims take about
a minute of a processor, and each is printed when it is found. On a large model choose some with
--only, and fewer --problems.
"""
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

from lab.analysis import report
from lab.analysis.run_folders import Run, existing
from lab.analysis.tables import WIDTH
from lab.engine.errors import UserError
from lab.harness.flags import Flag, read
from lab.harness.screen import show_status
from lab.probes.claim_rules import (BY_CHANCE, CANNOT, CLAIMS, NOTES, ONE_READING, THRESHOLDS,
                                    VERDICTS, CannotBeSeen, Claim, Evidence, Found,
                                    add_stored_claims)
from lab.probes.run_tokens import has_advantages_of_grpo

for part in ("tokens", "phase1", "weightings", "rank", "ppo"):  # in the order of printing
    import_module(f"lab.probes.claims_of_{part}")
add_stored_claims()
# verdicts that another run with the same settings did not have (lab/results/claims_turned.txt)
TURNED = "rank_by_token", "rank_by_critic", "filler_in_disguise", "t_says_how_much_it_varies"
FLAGS = {
    "only": Flag(None, "words of claims' names, separated by commas; by default all claims"),
    "problems": Flag(12, "problems that a model is asked, for claims about phase 1, rank, baseline "
                         "and critic", least=2, most=1000),
    "device": Flag("cpu", "device to compute on: cpu, cuda or cuda:N")}


def main(argv: list[str]) -> None:
    import mitigations  # noqa: F401  makes known the methods that a run's settings name
    flags = read(argv, "python -m lab claims RUN ... [flags]", __doc__, FLAGS,
                 {"RUN ...": "run folders"})
    runs = [Run(existing(name)) for name in flags.run]
    for run in runs:
        if not run.metrics:
            raise UserError(f"{run.folder} has no steps, so nothing was trained in it")
    evidence, found, note = Evidence(runs, flags.problems, flags.device), {}, 0
    for sentence in of_run(runs[0]):
        print(textwrap.fill(sentence, WIDTH))
    for claim in chosen(flags.only):
        show_status(claim.name)
        found[claim] = judged(claim, evidence)
        show_status("")
        if claim.note != note:
            note = claim.note
            print(f"\n## Note {note}: {NOTES[note]}")
        print("\n" + in_words(claim, found[claim]), flush=True)
    print("\n## How many of each verdict")
    for sentence in summary(found):
        print("\n" + textwrap.fill(sentence, WIDTH))
    if not flags.only:
        print("\n## What a verdict takes, where a claim names no number itself\n")
        for name, (number, reason) in THRESHOLDS.items():
            print(textwrap.fill(f"{number:g} for *{name}*: {reason}", WIDTH, initial_indent="- ",
                                subsequent_indent="  "))


def of_run(run: Run) -> list[str]:
    """What the run is, and where the rows speak of something else than what it trained."""
    sentences = [report.describe(run)]
    if run.config["mitigation"] != "none" or not has_advantages_of_grpo(run):
        sentences.append("Sizes of gradients are plain GRPO's on this run's tokens, without its "
                         "weights and with GRPO's advantages, except in rows about a weighting.")
    if run.config.get("lora"):
        sentences.append("Rows about a model take the gradient of all its parameters. This run "
                         "trained only LoRA's additions.")
    return sentences


def chosen(only: str | None) -> list[Claim]:
    words = [word.strip() for word in (only or "").split(",")]
    asked = [claim for claim in CLAIMS if any(word in claim.name for word in words)]
    if not asked:
        raise UserError(f"--only {only}: no claim has such a name. Without --only all claims are "
                        "printed, each after its name")
    return sorted(asked, key=lambda claim: claim.note)


def judged(claim: Claim, evidence: Evidence) -> Found:
    try:
        found = claim.look(evidence)
    except CannotBeSeen as reason:
        return Found(CANNOT, {"": str(reason)})
    if claim.name in TURNED and evidence.is_like_stored():
        numbers = {**found.numbers, "in this run alone": (found.verdict, "")}
        return replace(found, verdict=ONE_READING, numbers=numbers)
    return found


def summary(found: Mapping[Claim, Found]) -> list[str]:
    """How many verdicts of each kind there are, and how many could hold by chance."""
    sentences = []
    for where, is_stored in (("this run", False), ("stored experiments", True)):
        verdicts = [one.verdict for claim, one in found.items() if claim.is_stored == is_stored]
        counts = [f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS
                  if verdict in verdicts]
        if counts:
            sentences.append(f"{len(verdicts)} claims are judged on {where}: {', '.join(counts)}.")
    tested = sum(one.by_interval for claim, one in found.items() if not claim.is_stored)
    sentences.append(
        f"The verdicts of {tested} claims go by intervals of 95% over the problems or steps of one "
        "run, uncorrected for their number. If none of these claims were true and all true values "
        f"lay at the border, about {BY_CHANCE * tested:.1f} would come out as *holds* by chance.")
    return sentences


def in_words(claim: Claim, one: Found) -> str:
    """A claim with its figure in the notes, the figure here, the verdict, and what to believe."""
    theirs = f" [notes: {claim.published}]" if claim.published else ""
    stored = ", stored" if claim.is_stored else ""
    parts = [f"{claim.name}. {claim.sentence}.{theirs}",
             f"{one.verdict.upper()}{stored}: {one.figure}.", f"{claim.why} -> {claim.more}"]
    lines = []
    for part, indent in zip(parts, ("- ", "  ", "  ")):
        lines.append(textwrap.fill(part, WIDTH, initial_indent=indent, subsequent_indent="  ",
                                   break_on_hyphens=False))
    if one.table:
        lines += ["", one.table.to_text()]
    return "\n".join(lines)
