"""What is said of a loss's use of the ratio: in the words of --expect, and in a sentence."""
import math

from tools.helpers.formula_ratio import Constant, Gamma, Gate, Ratio, Side


def name_of(ratio: Ratio) -> tuple[str, str]:
    """(the words of --expect, a sentence)."""
    if ratio.level == "product":
        return (f"product clip {ratio.good.high:g}", "not the ratio is clipped but ratio times "
                f"advantage, at {ratio.good.high:g}: an answer with a large advantage has no "
                "gradient, even where its ratio is 1")
    if ratio.level == "undetached":
        low, high = ratio.good.low, ratio.good.high
        return (f"cispo undetached {from_one(low, 'low')} {from_one(high, 'high')}",
                f"the ratio of a token is clamped to {between(low, high)} and multiplies log p, as "
                "in CISPO, but it is not detached: between the bounds the gradient flows through "
                "it, too")
    of = {"token": "", "answer": "gspo ", "answer sum": "answer ratio ",
          "geometric": "gmpo "}[ratio.level]
    whose = {"token": "the ratio of a token",
             "answer": "the ratio of an answer, exp of the mean log-ratio of its tokens (GSPO),",
             "answer sum": "the ratio of an answer, exp of the summed log-ratios of its tokens,",
             "geometric": "the ratio of an answer is the geometric mean of its tokens' ratios "
             "(GMPO), and before it the ratio of a token"}[ratio.level]
    if ratio.upside_down:
        of += "inverse "
        whose += " is upside down, old over new, and"
    good, bad = ratio.good, ratio.bad
    if isinstance(good, Constant) and isinstance(bad, Constant):
        return "no ratio", "old_log_prob is not used: there is no ratio, and nothing to clip"
    if isinstance(good, Gate) and isinstance(bad, Gate):
        return (of + f"sapo {good.tau:g} {bad.tau:g}",
                f"{whose} goes through SAPO's gate, with tau {good.tau:g} for positive advantages "
                f"and {bad.tau:g} for negative ones")
    if isinstance(good, Gamma) and isinstance(bad, Gamma):
        return (f"vespo {good.k:g} {good.lam:g} {bad.k:g} {bad.lam:g}",
                f"{whose} goes through VESPO's weight w^k exp(lambda (1 - w)), with k {good.k:g} "
                f"and lambda {good.lam:g} for positive advantages, {bad.k:g} and {bad.lam:g} for "
                "negative ones")
    if not (isinstance(good, Side) and isinstance(bad, Side)):
        return of + "other clip", by_sign(good, bad, whose)
    return clip_name(good, bad, of, whose)


def clip_name(good: Side, bad: Side, of: str, whose: str) -> tuple[str, str]:
    bounds = [good.low, good.high, bad.low, bad.high]
    if bounds == [None] * 4:
        return of + "ratio", f"{whose} is used and not clipped"
    if good == bad:
        low, high = good.low, good.high
        kept = [(low is None or good.low_is_zero), (high is None or good.high_is_zero)]
        said = f"{from_one(low, 'low')} {from_one(high, 'high')}"
        if all(kept):
            return (of + f"mask {said}", f"{whose} has no gradient outside {between(low, high)}, "
                    "whichever sign the advantage has: it is clamped, and PPO's minimum is missing")
        if not any(kept) or None in (low, high):
            return (of + f"cispo {said}", f"{whose} is clamped to {between(low, high)} and "
                    "multiplies log p without a gradient of its own (CISPO)")
    usual = good.low is None and good.high_is_zero and bad.low_is_zero and bad.high_is_zero
    if usual and (good.high is not None or bad.low is not None):
        said = f"{from_one(bad.low, 'low')} {from_one(good.high, 'high')}"
        words = f"{whose} is clipped as in PPO, to {between(bad.low, good.high)}"
        if bad.high is None:
            return of + f"clip {said}", words
        return (of + f"clip {said} dual {bad.high:g}",
                words + f", and for negative advantages also above {bad.high:g} (dual clip)")
    if good.high is None and bad.low is None and good.low_is_zero and bad.high_is_zero:
        said = f"{from_one(good.low, 'low')} {from_one(bad.high, 'high')}"
        return (of + f"clip wrong side {said}", f"{whose} is clipped on the wrong side: where the "
                f"minimum of PPO has a gradient, this has none, beyond "
                f"{between(good.low, bad.high)}")
    return of + "other clip", by_sign(good, bad, whose)


def by_sign(good: object, bad: object, whose: str) -> str:
    return (f"{whose}: for positive advantages {described(good)}; for negative ones "
            f"{described(bad)}")


def from_one(bound: float | None, side: str) -> str:
    if bound is None:
        return "none"
    distance = 1 - bound if side == "low" else bound - 1
    return f"{round(distance, 6):g}"


def between(low: float | None, high: float | None) -> str:
    return (f"[{'0' if low is None else bound_in_words(low)}, "
            f"{'infinity' if high is None else bound_in_words(high)}]")


def bound_in_words(bound: float) -> str:
    """As a power of e, if it is a bound of the log-ratio."""
    power = round(math.log(bound), 4)
    of_log = abs(math.exp(power) - bound) < 1e-8 * bound and round(bound, 4) != bound
    return f"exp({power:g})" if of_log else f"{bound:g}"


def described(side: object) -> str:
    if isinstance(side, Constant):
        return "not used"
    if not isinstance(side, Side):
        return f"it goes through {side}"
    said = []
    if side.low is not None:
        said.append(f"{'nothing' if side.low_is_zero else 'constant'} below {side.low:g}")
    if side.high is not None:
        said.append(f"{'nothing' if side.high_is_zero else 'constant'} above {side.high:g}")
    return " and ".join(said) or "not clipped"
