"""Variants of a few choices, each minus plain GRPO: the report of the smaller experiments.

What is compared, and how sure it is, is decided as on the leaderboard (leaderboard.py).
"""
from analysis.tables import Table, by_row
from research.experiments.finished import Study
from research.experiments.leaderboard import Entry, could_be_seen, draw, make_entries, told_apart
from research.experiments.ratios import ratios_table
from research.probes.common import Findings


def report(study: Study) -> Findings:
    plain = next(iter(study.experiment.arms))
    entries = make_entries(study, plain)
    tables = [variants_table(entries, plain)]
    return Findings(study.experiment.question, study.intro(), tables, ("variants",),
                    pictures=[draw(study, entries, plain)], places={"variants": ("board",)})


def with_ratios(study: Study) -> Findings:
    """The same, and what early tokens and filler were given."""
    findings = report(study)
    findings.tables.append(ratios_table(study))
    return findings


def variants_table(entries: list[Entry], plain: str) -> Table:
    rows = []
    for entry in entries:
        racer, ahead = entry.racer, [None] * 3
        if entry.ahead:
            ahead = [entry.ahead.value, entry.ahead.interval, entry.p]
        rows.append([racer.arm, racer.seeds, racer.success, racer.ends, *ahead,
                     entry.verdict if entry.ahead else ""])
    formats = {"arm": "", "seeds": "d", "end": ".1%", "ends": ".1%", "ahead": "points",
               "95%": "points", "p": "p", "verdict": ""}
    headings = {"end": "success at the end", "ends": "of the seeds", "ahead": f"minus {plain}",
                "95%": "95% interval", "p": "Holm's p"}
    return Table("variants", "Held-out success at the end", by_row(formats, rows),
                 "\n".join([*told_apart(entries, plain), *could_be_seen(entries)]),
                 [f"open: not told apart from {plain}"], headings)
