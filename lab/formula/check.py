"""Does a loss pass a check? A status, as programs that test other programs want it (__main__.py has
what each means), and why; and whether two losses have the same gradient."""
import math
from collections.abc import Collection
from dataclasses import dataclass

from .calling import Loss, LossFailed
from .codes import clauses_of, codes, facts, unmet, unnamed
from .reading import KNOWN
from .search import Found, Search, find_formula
from .words import Remark, mistakes, percent, refuse_unknown, sentences, unusual

PASSED, FAILED, UNKNOWN = 0, 1, 2


class NotPassed(AssertionError):
    """A loss does not pass; the text says why."""


@dataclass(frozen=True)
class Verdict:
    """Whether a loss passes, and why not."""
    found: Found
    status: int
    mistakes: list[Remark]    # those that are not let pass
    missing: list[str]        # clauses that do not hold
    unexpected: list[str]     # what holds, and no clause names

    def in_words(self) -> list[str]:
        said = sentences(self.found)
        if self.missing:
            said.append(f"Expected, and not so: {', '.join(self.missing)}.")
        if self.unexpected:
            said.append(f"Not expected, and so: {', '.join(self.unexpected)}.")
        if self.missing or self.unexpected:
            clauses = unnamed(self.found, []) or ["understood"]
            said.append(f'All that holds, as an expectation: "{", ".join(clauses)}"')
        return said

    def as_json(self) -> dict[str, object]:
        return {"status": self.status, "understood": self.found.understood,
                "mistakes": [remark._asdict() for remark in mistakes(self.found)],
                "unusual": [remark._asdict() for remark in unusual(self.found)],
                "facts": [fact[0] for fact in facts(self.found)],
                "codes": sorted(codes(self.found)),
                "missing": self.missing, "unexpected": self.unexpected,
                "unexplained": self.found.unexplained, "differs": self.found.differs,
                "measured": self.found.measured, "sentences": sentences(self.found)}


def judge(found: Found, expect: str | None = None, allow: Collection[str] = ()) -> Verdict:
    """Whether a loss passes. `allow` has the names of mistakes that are let pass, and `expect` has
    clauses, with commas between them."""
    refuse_unknown(allow)
    wrong = [remark for remark in mistakes(found) if remark.name not in allow]
    if expect is None:
        status = FAILED if wrong else PASSED if found.understood or found.is_zero else UNKNOWN
        return Verdict(found, status, wrong, [], [])
    clauses = clauses_of(expect)
    missing, unexpected = unmet(found, clauses), unnamed(found, [*clauses, *allow])
    return Verdict(found, FAILED if missing or unexpected else PASSED, wrong, missing, unexpected)


def check(loss: Loss, expect: str | None = None, allow: Collection[str] = ()) -> Found:
    """What is known of a loss that passes. NotPassed is raised if it does not, and LossFailed if it
    cannot be examined."""
    verdict = judge(find_formula(loss), expect, allow)
    if verdict.status != PASSED:
        raise NotPassed("\n".join(verdict.in_words()))
    return verdict.found


def differences(loss: Loss, other: Loss) -> dict[str, float]:
    """For each kind of batch the largest share by which two losses have other gradients: infinite
    where one of them alone gives none."""
    searches = [Search(one) for one in (loss, other)]
    for search in searches:
        search.prepare()
    batches = searches[0].batches_to_compare()
    gradients = [[search.tried(search.gradient, case) for search in searches]
                 for _, case in batches]
    largest = max([float(one.norm()) for pair in gradients for one in pair if one is not None],
                  default=0.0)
    if not largest:
        raise LossFailed("neither of the two losses has a gradient on any batch")
    shares: dict[str, float] = {}
    for (name, _), (first, second) in zip(batches, gradients):
        share = 0.0 if first is second is None else math.inf
        if first is not None and second is not None:
            size = max(float(first.norm()), float(second.norm()), 1e-9 * largest)
            share = float((first - second).norm()) / size
        shares[name] = max(share, shares.get(name, 0.0))
    return shares


def about_differences(shares: dict[str, float], other: str) -> str:
    """Whether two losses are the same, in a sentence."""
    different = {name: share for name, share in shares.items() if share >= KNOWN}
    if not different:
        return (f"The same gradient as {other} on {len(shares)} kinds of batches, to "
                f"{max(max(shares.values()), 1e-16):.0e} of its size.")
    worst = sorted(different, key=different.get, reverse=True)
    on = "; ".join(f"{percent(different[name])} with {name}" for name in worst)
    same = [name for name in shares if name not in different]
    return (f"Another gradient than {other}: it differs by {on}."
            + (f" The same with {', '.join(same)}." if same else ""))
