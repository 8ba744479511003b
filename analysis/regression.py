"""Regression of a token's size on position, class and advantage, with errors clustered by group."""
import numpy as np

from analysis.sizes import size_label
from analysis.statistics import FEWEST, Estimate, estimate, verdicts
from analysis.tables import Table
from analysis.vocabulary import CLASSES
from engine.labels import KINDS

COMMON = ("constant", *(f"tenth {i}" for i in range(2, 11)), "abs(A)")
TERMS = {  # tenths against the first, the regex's classes against reasoning, kinds against words
    "contribution": (*COMMON, "filler", "structure"),
    "gradient": (*COMMON, *KINDS[1:]),
    "weighted gradient": (*COMMON, *KINDS[1:])}


class Regression:
    """Least squares with errors clustered by group (Liang and Zeger 1986), from sums alone.

    The error needs sum_g u_g u_g', where u_g = h_g - M_g b, h_g = X_g'y_g, M_g = X_g'X_g. The
    coefficients b are known only at the end, so the products of h and M are summed up to fourth
    order instead of keeping each group.
    """

    def __init__(self, terms):
        k = len(terms)
        self.terms = list(terms)
        self.groups = np.zeros(k, np.int64)  # in which a term occurs and y is not all 0
        self.squares = 0.0
        self.m, self.h = np.zeros((k, k)), np.zeros(k)
        self.hh, self.hm = np.zeros((k, k)), np.zeros((k, k, k))
        self.mm = np.zeros((k, k, k, k))

    def add(self, x: np.ndarray, y: np.ndarray, group: np.ndarray) -> None:
        """x (n, k), y (n,), group (n,) in 0..Q-1: whole groups."""
        members = [np.flatnonzero(group == g) for g in np.unique(group)]
        m = np.stack([x[i].T @ x[i] for i in members])
        h = np.stack([x[i].T @ y[i] for i in members])
        live = np.array([y[i].any() for i in members])
        self.groups += (np.diagonal(m, axis1=1, axis2=2)[live] > 0).sum(0)
        self.squares += float(y @ y)
        self.m += m.sum(0)
        self.h += h.sum(0)
        self.hh += np.einsum("gi,gj->ij", h, h)
        self.hm += np.einsum("gi,gjl->ijl", h, m)
        self.mm += np.einsum("gil,gjm->iljm", m, m)

    def estimates(self) -> dict[str, Estimate]:
        """Of the terms that occur and are not sums of those before them. The first term is the
        constant, which is in every group."""
        used, n, groups = self.independent_terms(), self.m[0, 0], self.groups[0]
        if groups < 2 or n <= len(used):
            return {}
        inverse = np.linalg.inv(self.m[np.ix_(used, used)])
        b = inverse @ self.h[used]
        few = groups / (groups - 1) * (n - 1) / (n - len(used))
        variance = few * np.diag(inverse @ self.meat(used, b) @ inverse)
        errors = np.sqrt(variance.clip(0))
        return {self.terms[i]: self.estimate_of(i, value, error)
                for i, value, error in zip(used, b.tolist(), errors.tolist())}

    def independent_terms(self) -> list[int]:
        used, scale = [], np.sqrt(np.diag(self.m))
        for i in np.flatnonzero(scale):
            tried = [*used, i]
            correlations = self.m[np.ix_(tried, tried)] / np.outer(scale[tried], scale[tried])
            if np.linalg.matrix_rank(correlations, tol=1e-9) == len(tried):
                used = tried
        return used

    def meat(self, used: list[int], b: np.ndarray) -> np.ndarray:
        """sum_g u_g u_g'"""
        cross = self.hm[np.ix_(used, used, used)] @ b
        fourth = self.mm[np.ix_(used, used, used, used)]
        products = self.hh[np.ix_(used, used)]
        return products - cross - cross.T + np.einsum("iljm,l,m->ij", fourth, b, b)

    def estimate_of(self, i: int, value: float, error: float) -> Estimate:
        if abs(value) * np.sqrt(self.m[i, i]) < 1e-6 * np.sqrt(self.squares):  # rounding, no effect
            return Estimate(value, value, value, 1.0)
        known = self.groups[i] >= FEWEST
        return estimate(value, error if known else np.nan, int(self.groups[i]) - 1)


def empty_regressions() -> dict[str, Regression]:
    return {unit: Regression(terms) for unit, terms in TERMS.items()}


def design(tokens: dict, unit: str) -> np.ndarray:
    """(tokens, terms)"""
    tenth = np.minimum(10 * tokens["position"] // tokens["length"][tokens["answer"]], 9)
    columns = [np.ones(len(tenth))]
    columns += [tenth == i for i in range(1, 10)]
    columns.append(np.abs(tokens["advantage"]))
    if unit == "contribution":
        columns += [tokens["class"] == CLASSES.index(name) for name in ("filler", "structure")]
    else:
        columns += [tokens["kind"] == kind for kind in range(1, len(KINDS))]
    return np.stack(columns, axis=1).astype(np.float64)


def regression_tables(tally) -> list[Table]:
    return [regression_table(tally, unit) for unit in tally.units if unit in tally.regressions]


def regression_table(tally, unit: str) -> Table:
    mean, label = tally.mean("all", f"abs {unit}")[0], size_label(unit)
    estimates = tally.regressions[unit].estimates()
    tested = [term for term in estimates if term not in ("constant", "abs(A)")]
    verdict = dict(zip(tested, verdicts([estimates[term] for term in tested], null=0.0)))
    values = [e.value for e in estimates.values()]
    columns = {"term": ("", list(estimates)),
               "coefficient": ("+.4f", values),
               "95%": ("+.4f", [e.interval for e in estimates.values()]),
               "of the mean": ("+.1%", [value / mean if mean else None for value in values]),
               "difference": ("", [verdict.get(term, "") for term in estimates])}
    different = [f"{term} {estimates[term].value / mean:+.0%}" for term in tested
                 if mean and verdict[term] in ("more", "less")]
    finding = "no term is clearly different from 0."
    if different:
        finding = f"in shares of the mean {label}: {', '.join(different)}."
    against = "reasoning" if unit == "contribution" else "a word"
    title = f"Regression of {label} on position, class and advantage; classes against {against}"
    return Table(f"regression of {unit}", title, columns,
                 f"With position, class and abs(A) side by side: {finding}",
                 ["tenths of the answer against the first one; errors clustered by group; Holm's "
                  "correction over tenths and classes"],
                 {"95%": "95% interval", "of the mean": "share of the mean size"})
