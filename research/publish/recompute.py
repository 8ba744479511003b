"""Do the published intervals follow from the raw numbers that are stored beside them?

    python -m research recompute          # a line for each result
    python -m research recompute --all    # a line for each interval

The results in research/results keep the raw numbers that their tables were made of. This program
computes the tables again: each gain from the runs, each ratio from the inner products, each share
from the sums over problems. It is a second implementation in plain Python, with statistics of its
own (plain_statistics.py), so an error would have to be made twice. A bootstrap has own draws, so
its intervals agree up to the chance of the draws.

What has no raw numbers is listed at the end.
"""
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from engine.errors import UserError, read_json
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from research.boards.later import TESTED
from research.boards.price import CONTROL as CHOICE_THAT_WORKS
from research.boards.price import REAL as REAL_CHOICES
from research.boards.price import TINY as TINY_CHOICES
from research.boards.price import Form as FormOfChoices
from research.publish.checks import Check, Result, ends, table
from research.publish.plain_statistics import (Numbers, covariance, cut, fieller, holm, interval,
                                               jackknife, mean, median_interval, rank_correlation,
                                               t_interval, t_test, two_way, variance)
from research.publish.recompute_earlier import check_phase1, check_rank
from research.publish.results import RESULTS, read_result

FLAGS = {"all": Flag(False, "print every interval, and not only those that differ")}
OF_DRAWS = 0.12       # a bootstrap's interval may differ by this share of its width
DRAWS = 4000


def main(argv: list[str]) -> None:
    flags = with_defaults(make_parser("python -m research recompute [flags]", __doc__,
                                      FLAGS).read(argv), FLAGS)
    differs = 0
    for name, checks_of in CHECKED.items():
        if not (RESULTS / f"{name}.json").exists():
            continue
        checks = list(checks_of(read_result(RESULTS / f"{name}.json")))
        wrong = [check for check in checks if not check.agrees]
        differs += len(wrong)
        word = f"{len(wrong)} differ" if wrong else "all agree"
        print(f"{name}: {len(checks)} computed again, {word}")
        for check in checks if flags.all else wrong:
            print(f"  {'agrees ' if check.agrees else 'differs'} {check.what}: published "
                  f"{in_short(check.published)}, again {in_short(check.again)}")
    others = sorted(path.stem for path in RESULTS.glob("*.json") if path.stem not in CHECKED)
    without = [name for name in others
               if has_intervals(read_result(RESULTS / f"{name}.json")["tables"])]
    print(f"not computed again, because raw numbers are not stored: {', '.join(without) or 'none'}")
    single = [name for name in others if name not in without]
    print(f"single numbers without intervals: {', '.join(single)}")
    if differs:
        raise UserError(f"{differs} published numbers do not follow from what is stored")


def has_intervals(part: object) -> bool:
    """Whether a part of a result has an interval anywhere."""
    if isinstance(part, dict):
        return "low" in part or any(map(has_intervals, part.values()))
    return isinstance(part, list) and any(map(has_intervals, part))


def in_short(values: Numbers) -> str:
    return " ".join(f"{value:.5g}" for value in values)


# leaderboards

def success(run: list) -> float:
    """Of a run in short: answers to a step, seconds, right answers of each step."""
    answers, _, right = run
    return sum(right) / (answers * len(right))


def gains_and_p(gains: dict[str, Numbers], rows: list[dict],
                not_corrected: Sequence[str]) -> Iterator[Check]:
    """The rows of a leaderboard from the gains of every pair."""
    p = {arm: t_test(of_arm) for arm, of_arm in gains.items()}
    corrected = holm({arm: value for arm, value in p.items() if arm not in not_corrected})
    for row in rows:
        arm = row["arm"]
        yield Check(f"gain of {arm}", ends(row["gain"]), t_interval(gains[arm]))
        yield Check(f"p of {arm}", [row["p"]], [corrected.get(arm, p[arm])])


def check_board(result: Result) -> Iterator[Check]:
    """The tiny model's leaderboard: seeds 40 to 51, or 40 to 45 of an arm that was stopped."""
    runs, rows, gains = result["values"]["runs"], table(result, "board"), {}
    plain_rate = next(row["rate"] for row in table(result, "rates") if row["arm"] == "none")
    for row in rows:
        seeds = range(40, 40 + row["pairs"])
        gains[row["arm"]] = [success(runs[f"{row['arm']} {row['rate']} {seed}"])
                             - success(runs[f"none {plain_rate} {seed}"]) for seed in seeds]
    yield from gains_and_p(gains, rows, ("measured", "none-16x8", "none-32x8"))


def check_real_board(result: Result) -> Iterator[Check]:
    runs = {name: success(run) for name, run in result["values"]["runs"].items()}
    rows, gains = table(result, "board"), {}
    for row in rows:
        gains[row["arm"]] = [runs[f"{row['arm']}-s{seed}"] - runs[f"none-s{seed}"]
                             for seed in range(row["pairs"])]
    controls = ("four times", "twice", "half", "measured", "measured 16", "its placebo",
                "shuffled")
    yield from gains_and_p(gains, rows, controls)
    for row in table(result, "pairs"):
        arm, *published = row.values()
        yield Check(f"pairs of {arm}", published, list(gains[arm]))
    plain = [runs[f"none-s{seed}"] for seed in range(len(runs)) if f"none-s{seed}" in runs]
    middle = (sorted(plain)[(len(plain) - 1) // 2] + sorted(plain)[len(plain) // 2]) / 2
    farthest = max(range(len(plain)), key=lambda seed: abs(plain[seed] - middle))
    without = {arm: [gain for seed, gain in enumerate(of_arm) if seed != farthest]
               for arm, of_arm in gains.items()}
    renamed = [{"arm": row["arm"], "gain": row["without"], "p": row["p without"]}
               for row in table(result, "without")]
    for check in gains_and_p(without, renamed, controls):
        yield replace(check, what=f"{check.what}, without seed {farthest}")


def check_real_controls(result: Result) -> Iterator[Check]:
    """Gains in training, each arm beside the one that its row names. The later methods are a family
    of their own."""
    runs = {name: success(run["in_short"]) for name, run in result["values"]["runs"].items()}
    for rows in (one["rows"] for one in result["tables"] if one["name"] in ("training", "later")):
        gains = {}
        for row in rows:
            seeds = [seed for seed in range(100) if f"{row['arm']}-s{seed}" in runs
                     and f"{row['beside']}-s{seed}" in runs]
            gains[row["arm"]] = [runs[f"{row['arm']}-s{seed}"] - runs[f"{row['beside']}-s{seed}"]
                                 for seed in seeds]
        plain = [arm for arm in gains if arm.startswith("none")]
        yield from gains_and_p(gains, rows, ("twice", "measured 16", *plain))
    first = {name: run["in_short"][2][0] / run["in_short"][0]
             for name, run in result["values"]["runs"].items()}
    yield from check_rates(runs, first, table(result, "rates"))
    for row in table(result, "held_out"):
        solved: dict[str, list[list[float]]] = {}
        for mode in ("sampled", "greedy"):
            answers = {name: list(map(int, run[mode]))
                       for name, run in result["values"]["runs"].items()}
            solved[mode] = [
                [one - two for one, two in zip(answers[f"{row['arm']}-s{seed}"],
                                               answers[f"{row['beside']}-s{seed}"])]
                for seed in range(100) if f"{row['arm']}-s{seed}" in answers
                and f"{row['beside']}-s{seed}" in answers]
        solved["rest"] = [[one - two for one, two in zip(*pair)]
                          for pair in zip(solved["sampled"], solved["greedy"])]
        for name, differences in solved.items():
            yield Check(f"{row['arm']}, {name}", ends(row[name]), two_way(differences))


def check_choices(form: FormOfChoices, result: Result) -> Iterator[Check]:
    """Gains of the choices, each beside the one that it is compared with. A planned choice without
    runs counts in Holm's correction with p = 1."""
    runs = {name: success(run) for name, run in result["values"]["runs"].items()}
    arm_of = {arm.words: name for name, arm in form.arms.items()}
    gains = {}
    for row in table(result, "price"):
        arm, beside = arm_of[row["choice"]], arm_of[row["compared"]]
        gains[arm] = [runs[f"{arm}-s{seed}"] - runs[f"{beside}-s{seed}"] for seed in range(200)
                      if f"{arm}-s{seed}" in runs and f"{beside}-s{seed}" in runs]
    p = {arm: t_test(of_arm) for arm, of_arm in gains.items()}
    planned = [arm for arm, choice in form.arms.items()
               if choice.compared and arm != CHOICE_THAT_WORKS]
    corrected = holm({arm: p.get(arm, 1.0) for arm in planned})
    for row in table(result, "price"):
        arm = arm_of[row["choice"]]
        yield Check(f"gain of {arm}", ends(row["gain"]), t_interval(gains[arm]))
        published = [row["p"]] if row["corrected"] is None else [row["p"], row["corrected"]]
        yield Check(f"p of {arm}", published, [p[arm], corrected.get(arm, 0.0)][:len(published)])


def check_rates(runs: dict[str, float], first_success: dict[str, float],
                rows: list[dict]) -> Iterator[Check]:
    """Success at three rates; each half of the seeds takes the rate that is best for the other."""
    rates = {"5e-7": " 5e-7", "1e-6": " 1e-6", "2e-6": ""}
    names = [row["arm"] for row in rows]
    seeds = [seed for seed in range(100) if all(f"{arm}{rate}-s{seed}" in runs for arm in names
                                                for rate in rates.values())]
    at_own: dict[str, list[float]] = {}
    first = mean([first_success[f"{arm}{rate}-s{seed}"] for arm in names
                  for rate in rates.values() for seed in seeds])
    for row in rows:
        yield Check(f"{row['arm']}, first step", [row["first"]], [first])
        arm = row["arm"]
        by_rate = [[runs[f"{arm}{rate}-s{seed}"] for seed in seeds] for rate in rates.values()]
        yield Check(f"{arm} by rate", [row[rate] for rate in rates], list(map(mean, by_rate)))
        middle = len(seeds) // 2
        of_first = [mean(rate[:middle]) for rate in by_rate]
        of_second = [mean(rate[middle:]) for rate in by_rate]
        at_own[arm] = [*by_rate[of_second.index(max(of_second))][:middle],
                       *by_rate[of_first.index(max(of_first))][middle:]]
        if row["gain"] is not None:
            gains = [mine - plain for mine, plain in zip(at_own[arm], at_own["none"])]
            yield Check(f"{arm}, own rates", ends(row["gain"]), t_interval(gains))


def at_cost(curve: dict, price: str, cost: float) -> float:
    """Success at a cost, on the straight line between two evaluations."""
    costs, values = curve[price], curve["success"]
    for (c0, c1), (s0, s1) in zip(zip(costs, costs[1:]), zip(values, values[1:])):
        if cost <= c1:
            return s0 + (s1 - s0) * (cost - c0) / (c1 - c0)
    return values[-1]


def check_price(result: Result) -> Iterator[Check]:
    """Success at equal cost: the largest that both arms have paid in every seed."""
    names = {"processor seconds": "seconds", "sampled tokens": "tokens",
             "scored answers": "rewards"}
    curves = result["values"]
    plain = next(curves[arm] for arm in curves if arm.startswith("none"))
    for row in table(result, "versus"):
        price, mine = names[row["price"]], curves[row["arm"]]
        cost = min(curve[price][-1] for curve in [*mine.values(), *plain.values()])
        gains = [at_cost(mine[seed], price, cost) - at_cost(plain[seed], price, cost)
                 for seed in mine]
        found = row["difference"]
        published = ends(found) if isinstance(found, dict) else [found, *row["95%"]]
        yield Check(f"{row['arm']} by {row['price']}", published, t_interval(gains))


def check_evaluations(result: Result) -> Iterator[Check]:
    """Held-out success minus plain GRPO's, in the middle of the training and at the end."""
    curves = result["values"]
    for row in table(result, "differences"):
        for when in ("middle", "end"):
            gains = []
            for seed, curve in curves[row["arm"]].items():
                plain = curves["none"][seed]
                place = len(curve["success"]) // 2 if when == "middle" else -1
                gains.append(curve["success"][place] - plain["success"][place])
            yield Check(f"{row['arm']}, {when}", ends(row[when]), t_interval(gains))
    yield from check_price(result)


def check_notes(result: Result) -> Iterator[Check]:
    curves, rows = result["values"]["curves"], table(result, "arms")
    for row in rows:
        if row["gain"] is None:
            continue
        gains = [mean(curves[name][0]) - mean(curves[f"none {seed}"][0])
                 for name, arm, seed in ((name, *name.rsplit(" ", 1)) for name in curves)
                 if arm == row["arm"]]
        yield Check(f"gain of {row['arm']}", ends(row["gain"]), t_interval(gains))


# the noise of a batch's gradient

Products = list[list[float]]


def products_of(stored: list | dict, scale: tuple[Numbers, Numbers] | None = None) -> Products:
    """The inner products (N, N), or from their sums some that have the same sums."""
    if isinstance(stored, list):
        rows = [[float(number) for number in row.split()] for row in stored]
        if scale is not None:
            rows = [[value * scale[0][i] * scale[1][j] for j, value in enumerate(row)]
                    for i, row in enumerate(rows)]
        return rows
    raise UserError("these are sums")


class Sums:
    """What the jackknife needs of inner products: for each batch the product of its own two
    gradients, and the sums of its row and of its column."""

    def __init__(self, stored: list | dict, scale: tuple[Numbers, Numbers] | None = None):
        if isinstance(stored, dict):
            self.same, self.rows, self.columns = (
                [float(number) for number in stored[part].split()]
                for part in ("same", "rows", "columns"))
        else:
            products = products_of(stored, scale)
            self.same = [row[i] for i, row in enumerate(products)]
            self.rows = [math.fsum(row) for row in products]
            self.columns = [math.fsum(column) for column in zip(*products)]
        self.n, self.total, self.trace = len(self.same), sum(self.rows), sum(self.same)

    def signal(self, left_out: int | None) -> float:
        """The mean product of two different batches."""
        n, total, trace = self.n, self.total, self.trace
        if left_out is not None:
            i, n = left_out, n - 1
            total -= self.rows[i] + self.columns[i] - self.same[i]
            trace -= self.same[i]
        return (total - trace) / (n * (n - 1))

    def log_ratio(self, left_out: int | None) -> float:
        n, trace = self.n, self.trace
        if left_out is not None:
            n, trace = n - 1, trace - self.same[left_out]
        signal = self.signal(left_out)
        return math.log((trace / n - signal) / signal)


def numbers_of_signal(plain: Sums, own: Sums, both: Sums) -> list[list[float]]:
    """Ratio, factor and cosine of a method, with intervals."""
    ratio = jackknife(own.n, own.log_ratio)
    factor = jackknife(own.n, lambda i: plain.log_ratio(i) - own.log_ratio(i))
    cosine = jackknife(own.n, lambda i: both.signal(i) / math.sqrt(plain.signal(i)
                                                                     * own.signal(i)))
    return [list(map(math.exp, ratio)), list(map(math.exp, factor)), cut(cosine, -1, 1)]


def sums_of_method(stored: dict, name: str, limit: float = 0.0) -> tuple[Sums, Sums, Sums]:
    """Those of plain GRPO, of the method, and of the two together; clipped at the limit."""
    plain = "plain GRPO"
    keys = f"{plain} x {plain}", f"{name} x {name}", f"{plain} x {name}"
    if not limit:
        of_plain, own, both = (Sums(stored[key]) for key in keys)
        return of_plain, own, both
    scales = []
    for key in keys[:2]:
        norms = [math.sqrt(square) for square in Sums(stored[key]).same]
        scales.append([min(1.0, limit / norm) if norm else 1.0 for norm in norms])
    pairs = ((scales[0],) * 2, (scales[1],) * 2, (scales[0], scales[1]))
    of_plain, own, both = (Sums(stored[key], scale) for key, scale in zip(keys, pairs))
    return of_plain, own, both


def check_signal(result: Result) -> Iterator[Check]:
    """To the six digits that the inner products are stored with."""
    stored = result["values"]["inner_products"]
    for row in table(result, "signal"):
        name, *published = row.values()
        found = numbers_of_signal(*sums_of_method(stored, name))
        for what, cell, again in zip(("ratio", "factor", "cosine"), published, found):
            if cell is not None:
                yield Check(f"{what} of {name}", ends(cell), again, 2e-3)


def check_signal_split(result: Result) -> Iterator[Check]:
    """The noise of plain GRPO in two parts, from the products of two batches with the same
    problems."""
    yield from check_signal(result)
    plain = Sums(result["values"]["inner_products"]["plain GRPO x plain GRPO"])
    same = result["values"]["same_problems"]

    def of_problems(left_out: int | None) -> float:
        kept = [value for i, value in enumerate(same) if i != left_out]
        return mean(kept) / plain.signal(left_out) - 1

    def of_answers(left_out: int | None) -> float:
        return math.exp(plain.log_ratio(left_out)) - of_problems(left_out)

    def share(left_out: int | None) -> float:
        return of_problems(left_out) / math.exp(plain.log_ratio(left_out))

    [row] = table(result, "split")
    for name, statistic in (("problems", of_problems), ("answers", of_answers), ("share", share)):
        yield Check(f"noise, {name}", ends(row[name]), jackknife(plain.n, statistic), 2e-3)


def check_signal_steps(result: Result) -> Iterator[Check]:
    """The same with every gradient scaled down to norm 1 where it is longer."""
    for row in table(result, "steps"):
        if row["ratio"] is None:
            continue
        stored = read_result(RESULTS / f"{row['result']}.json")["values"]["inner_products"]
        limit = 1.0 if row["clipped"] else 0.0
        sums = sums_of_method(stored, row["method"], limit or other_limit(stored))
        for what, again in zip(("ratio", "factor", "cosine"), numbers_of_signal(*sums)):
            if row[what] is not None:
                yield Check(f"{what} of {row['method']}, {row['result']}", ends(row[what]), again,
                            2e-3)


def other_limit(stored: dict) -> float:
    """1, if plain GRPO is clipped, although the method is not; 0 where there are only sums."""
    return 1.0 if isinstance(stored["plain GRPO x plain GRPO"], list) else 0.0


# shares of what is decided

def share_of_problems(part: Numbers, whole: Numbers) -> list[float]:
    """A share of sums over problems, with the jackknife over them."""
    def share(left_out: int | None) -> float:
        kept = [i for i in range(len(part)) if i != left_out]
        return math.fsum(part[i] for i in kept) / math.fsum(whole[i] for i in kept)

    return jackknife(len(part), share)


def as_a_share(again: list[float], published: list[float]) -> list[float]:
    """Cut at 0 and 1, unless the published interval goes beyond, as older ones do."""
    return cut(again, 0, 1) if 0 <= published[1] and published[2] <= 1 else again


def checks_of_parts(rows: list[dict], values: dict, partition: str = "kind") -> Iterator[Check]:
    """The shares of each kind in what is decided, and in the gradient where that is stored."""
    for column in ("decided", "gradient"):
        by_part = values.get(f"{column}_by_problem")
        if by_part is None:
            continue
        whole = [math.fsum(of_problem) for of_problem in zip(*by_part.values())]
        for row in rows:
            published = ends(row[column])
            again = share_of_problems(by_part[row[partition]], whole)
            yield Check(f"{row[partition]}, {column}", published, as_a_share(again, published))


def check_decided(result: Result) -> Iterator[Check]:
    """Kinds, and where they are stored also sections, classes, methods and whole answers."""
    values = result["values"]
    yield from checks_of_parts(table(result, "kind"), values)
    for partition in ("section", "class"):
        if partition in values:
            yield from checks_of_parts(table(result, partition), values[partition], partition)
    if "methods" in values:
        yield from check_scores(result)


def check_scores(result: Result) -> Iterator[Check]:
    values = result["values"]
    squared = values["answers"]["squared credit"]
    for row in table(result, "scores"):
        if row["index"] is not None:
            sums = values["methods"][row["arm"]]
            index = cut(share_of_problems(sums["ranked"], squared), -1, 1)
            yield Check(f"index of {row['arm']}", ends(row["index"]), index)
            top = as_a_share(share_of_problems(sums["top tenth"], squared), ends(row["top tenth"]))
            yield Check(f"top tenth of {row['arm']}", ends(row["top tenth"]), top)
    explained, added_up = (row["found"] for row in table(result, "answers"))
    again = jackknife(len(squared), lambda i: explained_by_V(values["answers"], i))
    yield Check("explained by V", ends(explained), cut(again, 0, 1))
    yield Check("squared credits over variance", ends(added_up),
                share_of_problems(squared, values["answers"]["variance"]))


def explained_by_V(sums: dict[str, list[float]], left_out: int | None) -> float:
    """Cov(R, V) / Var(R) over tokens, from sums by problem."""
    n, R, RR, V, RV = (math.fsum(value for i, value in enumerate(sums[name]) if i != left_out)
                       for name in ("tokens", "R", "R R", "V", "R V"))
    return (RV - R * V / n) / (RR - R * R / n)


def check_exact_real(result: Result) -> Iterator[Check]:
    for model, values in result["values"]["by_model"].items():
        yield from checks_of_parts([row for row in table(result, "kind") if row["model"] == model],
                                   values)


def check_change(result: Result) -> Iterator[Check]:
    """Of the tokens that have a push. A problem without such tokens counts as none."""
    for row in table(result, "kinds"):
        sums = result["values"]["kinds_by_problem"][str(row["step"])]
        problems = [i for i, size in enumerate(sums["push"]["all"]) if size]
        for measure in ("push", "plain step", "AdamW", "credit"):
            part, whole = ([sums[measure][name][i] for i in problems]
                           for name in (row["kind"], "all"))
            published = ends(row[measure])
            yield Check(f"{row['kind']}, {measure}, step {row['step']}", published,
                        as_a_share(share_of_problems(part, whole), published))


# synthetic tasks

class Task:
    """The arms of a synthetic task: success by rate and seed."""

    def __init__(self, cells: list[dict]):
        self.success = {cell["arm"]: cell["success"] for cell in cells}
        self.seeds = len(cells[0]["success"][0])
        self.middle = self.seeds // 2
        half = range(self.middle), range(self.middle, self.seeds)
        self.mean = {arm: self.at_best_rate(arm, *half) for arm in self.success}
        self.draws = self.drawn(random.Random(1))

    def at_best_rate(self, arm: str, first: Sequence[int], second: Sequence[int]) -> float:
        """Each half of the seeds takes the rate that is best for the other."""
        of_first = [mean([rate[seed] for seed in first]) for rate in self.success[arm]]
        of_second = [mean([rate[seed] for seed in second]) for rate in self.success[arm]]
        mine = of_first[of_second.index(max(of_second))]
        other = of_second[of_first.index(max(of_first))]
        return (self.middle * mine + (self.seeds - self.middle) * other) / self.seeds

    def drawn(self, generator: random.Random) -> dict[str, list[float]]:
        """The mean of each arm in every draw. A half of n seeds is drawn from n - 1 times."""
        draws: dict[str, list[float]] = {arm: [] for arm in self.success}
        for _ in range(DRAWS):
            first = generator.choices(range(self.middle), k=self.middle - 1)
            rest = self.seeds - self.middle
            second = generator.choices(range(self.middle, self.seeds), k=rest - 1)
            for arm in draws:
                draws[arm].append(self.at_best_rate(arm, first, second))
        return draws

    def difference(self, one: str, two: str) -> list[float]:
        drawn = self.draws_of(one, two)
        return interval(self.mean[one] - self.mean[two], math.sqrt(variance(drawn)),
                        self.seeds - 2)

    def share(self, one: str) -> list[float] | None:
        above, below = self.draws_of(one, "plain GRPO"), self.draws_of("true credit", "plain GRPO")
        base = self.mean["plain GRPO"]
        return fieller(self.mean[one] - base, self.mean["true credit"] - base, variance(above),
                       variance(below), covariance(above, below), self.seeds - 2)

    def draws_of(self, one: str, two: str) -> list[float]:
        return [a - b for a, b in zip(self.draws[one], self.draws[two])]


def check_dial(result: Result) -> Iterator[Check]:
    """Gains and shares with rates chosen by the other half of the seeds. The ends of an interval
    agree up to a share of its width, because the draws are others."""
    cells = result["values"]["cells"]
    tasks = {name: Task([cell for cell in cells if cell["world"] == name])
             for name in dict.fromkeys(cell["world"] for cell in cells)}
    for row in table(result, "board"):
        task, arm = tasks[row["world"]], row["arm"]
        yield Check(f"mean of {arm}, {row['world']}", [row["mean"]], [task.mean[arm]])
        if arm == "plain GRPO":
            continue
        for what, cell, again in (("gain", row["gain"], task.difference(arm, "plain GRPO")),
                                  ("share", row["share"], task.share(arm))):
            if cell is None or again is None:
                continue
            width = cell["high"] - cell["low"]
            yield Check(f"{what} of {arm}, {row['world']}", ends(cell), again,
                        OF_DRAWS * width / max(1.0, min(map(abs, ends(cell)))))


def check_one_rate(result: Result) -> Iterator[Check]:
    """Gains in synthetic tasks in which every arm has one learning rate, paired by seed."""
    means = {(cell["world"], cell["arm"]): cell["mean"] for cell in result["values"]["cells"]}
    for row in table(result, "board"):
        if row["arm"] != "plain GRPO":
            gains = [mine - plain for mine, plain in zip(means[row["world"], row["arm"]],
                                                         means[row["world"], "plain GRPO"])]
            yield Check(f"gain of {row['arm']}, {row['world']}", ends(row["gain"]),
                        t_interval(gains))


def check_later(result: Result) -> Iterator[Check]:
    """Gains of methods whose direction was measured before they were trained, and how well that
    ordered them."""
    runs = {name: success(run["in_short"]) for name, run in result["values"]["runs"].items()}
    gains = {row["arm"]: [runs[f"{row['arm']}-s{seed}"] - runs[f"none-s{seed}"]
                          for seed in range(100) if f"{row['arm']}-s{seed}" in runs]
             for row in table(result, "gains")}
    tested = [row for row in table(result, "gains") if row["pairs"] > 1]
    yield from gains_and_p({row["arm"]: gains[row["arm"]] for row in tested}, tested, ())
    before = {row["method"]: row for name in ("signal_later", "signal_later_2", "signal_later_3")
              for row in table(read_result(RESULTS / f"{name}.json"), "signal")}
    cosine, noise = ({arm: before[arm][f"{column} (95% interval)"]["value"] for arm in gains}
                     for column in ("cosine", "factor"))
    arms = [arm for arm in gains if arm in TESTED]
    measured = [mean(gains[arm]) for arm in arms]
    by_name = {"cosine": cosine, "noise as that of a batch": noise}
    for row in table(result, "rules"):
        if row["by"] in by_name:
            known = [by_name[row["by"]][arm] for arm in arms]
            yield Check(f"rank correlation by {row['by']}", [row["rank"]["value"]],
                        [rank_correlation(known, measured)])
    for row in table(result, "looks"):
        seeds = range(40, 46) if row["seeds"] == "40 to 45" else {*range(100)} - {*range(40, 46)}
        of_look = {arm: [runs[f"{arm}-s{seed}"] - runs[f"none-s{seed}"] for seed in seeds
                         if f"{arm}-s{seed}" in runs] for arm in arms}
        seen = [arm for arm in arms if of_look[arm]]
        again = rank_correlation([cosine[arm] for arm in seen],
                                 [mean(of_look[arm]) for arm in seen])
        yield Check(f"rank correlation in seeds {row['seeds']}", [row["rank"]["value"]], [again])
    for row in table(result, "predicted"):
        yield Check(f"predicted for {row['arm']}", [row["direction"], row["gain"]["value"]],
                    [-0.008 - 0.086 * (1 - cosine[row["arm"]]), mean(gains[row["arm"]])])


# the enumerated models

def check_exact_policies(result: Result) -> Iterator[Check]:
    for name, of_methods in result["values"].items():
        for row in table(result, name):
            method, *published = row.values()
            for column, cell, values in zip(list(row)[1:], published, zip(*of_methods[method])):
                if None not in values:  # an estimate without a direction has no ratio
                    yield Check(f"{column} of {method}", ends(cell), median_interval(values))


# shares of push and change

def check_change_parts(result: Result) -> Iterator[Check]:
    """Means over seeds of the shares of words, numbers and operators."""
    values = result["values"]
    kinds = values["kinds"]
    for row in table(result, "parts"):
        number = kinds.index(row["kind"])
        for measure in ("push", "plain step", "AdamW's first"):
            shares = [seed[number] for seed in values["parts"][row["part"]][measure]]
            yield Check(f"{row['part']}, {row['kind']}, {measure}", ends(row[measure]),
                        t_interval(shares))
    words = values["relations"]
    for row in table(result, "relations"):
        name = row["moved by"]
        for number, kind in enumerate(kinds):
            yield Check(f"{name}, {kind}", ends(row[kind]),
                        t_interval([seed[number] for seed in words[name]]))
        for column, other in (("minus itself", "itself"), ("minus all", "all")):
            if row[column] is not None:
                differences = [one[0] - two[0] for one, two in zip(words[name], words[other])]
                yield Check(f"{name}, {column}", ends(row[column]), t_interval(differences))


# predictions from the noise of a gradient

def gain_of_noise(ratio: float, curve: dict[str, float]) -> float:
    """Plain GRPO's gain with a batch that has so many times its noise: straight by the logarithm of
    the size between two batches, and by the noise from the largest to the exact gradient."""
    sizes = sorted(map(float, curve))
    gain = {float(size): value for size, value in curve.items()}
    size = min(max(1 / ratio if ratio > 0 else math.inf, sizes[0]), sizes[-1])
    if size in gain:
        return gain[size]
    above = next(known for known in sizes if known > size)
    below = sizes[sizes.index(above) - 1]
    if above == math.inf:
        share = 1 - below / size
    else:
        share = (math.log(size) - math.log(below)) / (math.log(above) - math.log(below))
    return gain[below] + share * (gain[above] - gain[below])


def check_law(result: Result) -> Iterator[Check]:
    """The mean noise of each method from that of every policy, where it is stored, and the gain
    that follows from it."""
    noise = result["values"].get("noise", {})
    for row in table(result, "predictions"):
        name = f"{row['arm']}, {row['world']}"
        for state, of_policies in noise.get(row["world"], {}).get(row["arm"], {}).items():
            ratios, cosines = zip(*of_policies)
            cosine = row["cosine" if state == "untrained" else "cosine half"]
            yield Check(f"noise and cosine of {name}, {state}", [row[state], cosine],
                        [math.exp(mean([math.log(ratio) for ratio in ratios])), mean(cosines)])
        known = [row[state] for state in ("untrained", "half") if row[state] is not None]
        ratio = math.exp(mean([math.log(of_state) for of_state in known]))
        yield Check(f"predicted gain of {name}", [row["ratio"], row["gain"]],
                    [ratio, gain_of_noise(ratio, result["values"]["curves"][row["world"]])])


def check_law_rules(predictions: str, measured: str) -> Callable[[Result], Iterator[Check]]:
    """How well each rule predicted the gains of synthetic tasks, from these two results."""
    def check(result: Result) -> Iterator[Check]:
        said = read_result(RESULTS / f"{predictions}.json")
        curves = said["values"]["curves"]
        gains = {(row["world"], row["arm"]): row["gain"]
                 for row in table(read_result(RESULTS / f"{measured}.json"), "board")}
        rules: dict[str, Callable[[dict], float]] = {
            "the prediction": lambda row: row["gain"],
            "its gain times 0.6": lambda row: 0.6 * row["gain"],
            "the prediction, arithmetic mean": lambda row: gain_of_noise(
                mean([row[state] for state in ("untrained", "half") if row[state]]),
                curves[row["world"]]),
            "as the exact gradient": lambda row: max(curves[row["world"]].items(),
                                                     key=lambda pair: float(pair[0]))[1],
            "no gain": lambda row: 0.0}
        for row in table(result, "rules"):
            of_arm = [one for one in table(said, "predictions") if one["arm"] == row["arm"]
                      and not one["world"].endswith(" all") and (one["world"], one["arm"]) in gains]
            x = [rules[row["rule"]](one) for one in of_arm]
            cells = [gains[one["world"], one["arm"]] for one in of_arm]
            y = [cell["value"] for cell in cells]
            inside = [cell["low"] <= value <= cell["high"] for value, cell in zip(x, cells)]
            published = [row["worlds"], row["inside"], row["deviation"]]
            again = [len(x), sum(inside), mean([abs(a - b) for a, b in zip(x, y)])]
            if any(x):
                published += [row["rank"], row["slope"]]
                again += [rank_correlation(x, y),
                          math.fsum(a * b for a, b in zip(x, y)) / math.fsum(a * a for a in x)]
            yield Check(f"{row['arm']}, {row['rule']}", published, again)
    return check


def check_law_board(result: Result) -> Iterator[Check]:
    """The same on the tiny model's leaderboard: the gain of a batch with a method's noise."""
    noise = read_json(RESULTS / "board/noise.json")["ratio"]
    before = read_json(RESULTS / "board/predictions.json")
    gain = {row["arm"]: row["gain"]["value"]
            for row in table(read_result(RESULTS / "board.json"), "board")}
    curve = [0.0, gain.pop("none-16x8"), gain.pop("none-32x8")]
    predicted: list[list[float]] = [[], [], []]
    for row in table(result, "arms"):
        doublings = math.log2(noise[row["arm"]])
        first = 0 if doublings <= 1 else 1
        by_curve = curve[first] + (doublings - first) * (curve[first + 1] - curve[first])
        yield Check(f"{row['arm']}", [row["times"], row["before"], row["afterwards"], row["gain"]],
                    [noise[row["arm"]], before[row["arm"]], by_curve, gain[row["arm"]]])
        for numbers, value in zip(predicted, (before[row["arm"]], by_curve, 0.0)):
            numbers.append(value)
    measured = [gain[row["arm"]] for row in table(result, "arms")]
    for row, numbers in zip(table(result, "rules"), predicted):
        off = [abs(one - other) for one, other in zip(numbers, measured)]
        again = [len(off), sum(size <= 0.015 for size in off), mean(off)]
        published = [row["arms"], row["close"], row["deviation"]]
        if any(numbers):
            published.append(row["rank"])
            again.append(rank_correlation(numbers, measured))
        yield Check(row["rule"], published, again)


CHECKED: dict[str, Callable[[Result], Iterator[Check]]] = {
    "board": check_board,
    **dict.fromkeys(("real_board_expression", "real_board_brief", "real_board_brief_8_gpu"),
                    check_real_board),
    "real_controls": check_real_controls, "price": check_price,
    "choices": partial(check_choices, TINY_CHOICES),
    **dict.fromkeys(("choices_real", "choices_real_gpu"), partial(check_choices, REAL_CHOICES)),
    **dict.fromkeys(("signal_tiny", "signal_tiny_half", "signal_real", "signal_real_brief",
                     "signal_real_brief_16", "signal_real_later", "signal_later", "signal_later_2",
                     "signal_later_3"), check_signal),
    "signal_steps": check_signal_steps, "signal_split": check_signal_split,
    **dict.fromkeys(("large", "real_brief", "real_large", "scoreboard_24", "scoreboard_24_1",
                     "scoreboard_24_2", "scoreboard_20_steps"), check_decided),
    "change_steps": check_change, "exact_real_start": check_exact_real,
    **dict.fromkeys(("dial", "dial_test"), check_dial),
    **dict.fromkeys(("dial_methods", "dial_clipped"), check_one_rate),
    **dict.fromkeys(("notes_1", "notes_2", "notes_3"), check_notes),
    **dict.fromkeys(("inverse", "short_steps"), check_evaluations),
    **dict.fromkeys(("exact_policies", "exact_half", "exact_late"), check_exact_policies),
    "change_parts": check_change_parts, "phase1": check_phase1, "rank": check_rank,
    **dict.fromkeys(("law", "law_test"), check_law), "law_board": check_law_board,
    "later": check_later, "law_rules": check_law_rules("law", "dial"),
    "law_test_rules": check_law_rules("law_test", "dial_test")}
