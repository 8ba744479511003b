"""Which number to subtract from the reward, and what the group's mean costs beside the best one.

Let g be the gradient of an answer's log-prob, R its reward. E[g] = 0, so (R - b) g has the same expectation, the gradient of
E[R], for every b that is made without this answer, and its noise is least at one b* (Greensmith et al. 2004, JMLR 5):

    E|(R - b) g|^2 = E|(R - b*) g|^2 + (b - b*)^2 E|g|^2,   b* = E[|g|^2 R] / E|g|^2,   b* - E[R] = Cov(|g|^2, R) / E|g|^2

The mean is the best baseline exactly where that covariance is 0. Two cheap stand-ins for |g|^2: the answer's length (OPO,
2505.23585), and the sizes at the logits (verl, 2602.07078), which give every place t a number of its own:

    b = sum_i l_i R_i / sum_i l_i,   b_t = sum_i W_it R_i / sum_i W_it,   W_it = sum_{j<=t} s_ij^2, over the answers that reach t

Every baseline is made from other answers than the one it is scored on: from all the others, or from 7 or 15 of them, as in a
training group of 8 or 16, where the mean of the others is RLOO and, times (G-1)/G, the group mean of Dr. GRPO. Terms of a group
share baselines; with the mean that adds |E[R g]|^2 / (G-1) to the G-fold variance of the group's gradient, nearly nothing.

Which answers have large gradients changes as a model learns, and with it what the mean costs: ask again of a checkpoint,
--model runs/x/checkpoints/step_000100.

Left out: the z-score. It divides by a number that differs from group to group, which weights questions anew and is no
baseline. The gradient is that of the whole answer's log-prob, without a division by its length or by the batch's tokens.
"""
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from grpo import gradient_size
from analysis.statistics import FEWEST, Estimate, estimate, verdicts
from engine.lab import Lab
from analysis.plots import BLUE, GREY, ORANGE, panels, save
from analysis.tables import Table, by_row
from engine.rollouts import Rollouts
from truth.common import Findings, Flag, Probe, Progress, answer_gradients, sample_batch

FLAGS = {"questions": Flag(16, 6, "how many questions", 2), "answers": Flag(64, 9, "answers to each of them", 8)}
GROUPS = (8, 16)  # sizes of a training group
DRAWS = 50        # how often fewer others than there are get drawn
NAMES = NOTHING, MEAN, BEST, LENGTH, TOKEN, OWN = "nothing", "mean", "b*", "by length (OPO)", "by token (s^2)", "b*, own answers"


@dataclass
class Answers:
    """Of Q questions with n answers each, (Q, n) in float64."""
    reward: np.ndarray
    square: np.ndarray                # |g|^2
    length: np.ndarray
    logit_square: np.ndarray          # sum of s^2: what |g|^2 would be at the logits, tokens taken one by one
    by_token: dict[int, np.ndarray]   # |sum_t (R - b_t) grad log p_t|^2, b_t made from so many others
    pull: np.ndarray                  # (Q,) |E[R g]|^2, by what all pairs of different answers agree on

    @property
    def above(self) -> np.ndarray:
        """(Q, n): answers with more than the mean reward of their question."""
        return self.reward > self.reward.mean(1, keepdims=True)

    @property
    def known(self) -> np.ndarray:
        """(Q,): questions with enough answers on either side of the mean to say something about them."""
        return np.minimum(self.above.sum(1), (~self.above).sum(1)) >= FEWEST


def measure(probe: Probe) -> Findings:
    Q, n, rng, progress = probe.args.questions, probe.args.answers, np.random.default_rng(probe.args.seed), Progress(sampling=1, gradients=6)
    progress("sampling")
    lab = probe.lab()
    rollouts = sample_batch(lab, 0, Q, n)
    sizes = sorted({n - 1, *(size - 1 for size in GROUPS if size <= n)}, reverse=True)
    others = {k: others_of(n, k, DRAWS if k < n - 1 else 1, rng) for k in sizes}
    answers = look(lab, rollouts, others, lambda share: progress("gradients", share))
    noise = noise_of(answers, others)
    questions, beside, cost = gaps(answers), beside_the_mean(noise), saving(answers, noise)
    tables = [of_claims(answers, questions, beside, cost), of_baselines(answers, noise, beside), of_questions(answers, questions), of_sizes(answers)]
    return Findings(
        "The best number to subtract from the reward, and what the group's mean costs",
        [f"{Q} questions, {n} answers each, {lab.folder}, at temperature 1. Noise is E|(R - b) g|^2, g the gradient of an answer's log-prob, "
         "summed over the questions. Intervals are 95%, by Student's t over questions unless said otherwise; a difference is named where "
         "it is clear after Holm's correction over the rows of its table."],
        tables, tuple(table.name for table in tables), [picture(answers, questions, beside, probe.folder)], {"baselines": ("baseline",)})


def others_of(n: int, k: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """(draws, n, k): for each of n answers k of the others, drawn at random: those that follow it in a shuffled circle."""
    chosen = np.empty((draws, n, k), int)
    for draw in chosen:
        order = rng.permutation(n)
        draw[order] = order[(np.arange(n)[:, None] + np.arange(1, k + 1)) % n]
    return chosen


def look(lab: Lab, rollouts: Rollouts, others: dict[int, np.ndarray], progress: Callable[[float], None]) -> Answers:
    """Gradients answer by answer; only their squares and one sum a question are kept."""
    Q, n = len(rollouts.prompt_ids), len(rollouts.mask) // len(rollouts.prompt_ids)
    reward = rollouts.reward.double().cpu().numpy().reshape(Q, n)
    advantage = (reward - reward.mean(1, keepdims=True)) * n / (n - 1)
    logit_square = gradient_size(rollouts.log_prob, rollouts.collision).double().square() * rollouts.mask
    coefficients = [rollouts.mask.float(), *(token_advantage(rollouts, logit_square, chosen[0]) for chosen in others.values())]
    squares, pull, total = np.zeros((len(coefficients), Q, n)), np.zeros(Q), 0
    for b, found in enumerate(answer_gradients(lab, rollouts, coefficients)):
        q, i = divmod(b, n)
        squares[:, q, i] = [float(gradient @ gradient) for gradient in found]
        total = advantage[q, i] * found[0] + (total if i else 0)
        if i == n - 1:
            pull[q] = square_of_expectation(float(total @ total), advantage[q] ** 2 * squares[0, q])
        progress((b + 1) / (Q * n))
    length, logit_square = (x.cpu().numpy().reshape(Q, n).astype(float) for x in (rollouts.length, logit_square.sum(1)))
    return Answers(reward, squares[0], length, logit_square, dict(zip(others, squares[1:])), pull)


def square_of_expectation(total_square: float, squares: np.ndarray) -> float:
    """|E x|^2 from the square of the sum of n terms x_i = (R_i - mean of the others) g_i and their own squares: what is left
    are the products of different answers. Each of the two is in the other's mean, which adds a (n-1)^2-th part."""
    n = len(squares)
    return (total_square - squares.sum()) / (n * (n - 1)) / (1 + 1 / (n - 1) ** 2)


def token_advantage(rollouts: Rollouts, logit_square: torch.Tensor, others: np.ndarray) -> torch.Tensor:
    """(B, T): R - b_t, from the others (n, k) of the same question."""
    n, reward, advantage = len(others), rollouts.reward.double(), torch.zeros_like(rollouts.log_prob)
    for b in range(len(advantage)):
        rows = b // n * n + torch.as_tensor(others[b % n], device=reward.device)
        advantage[b] = reward[b] - token_baseline(reward[rows], logit_square[rows], rollouts.mask[rows])
    return advantage * rollouts.mask


def token_baseline(reward: torch.Tensor, logit_square: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(k,), (k, T), (k, T) -> (T,): b_t of the formula above, 0 where no answer gets that far."""
    weight = logit_square.cumsum(1) * mask
    return torch.where(weight.sum(0) > 0, reward @ weight / weight.sum(0), 0.0)


def weighted_mean(reward: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Over the last axis. With |g|^2 as the weight it is b*."""
    return (weight * reward).sum(-1) / weight.sum(-1)


def second_moment(reward: np.ndarray, square: np.ndarray, baseline) -> np.ndarray:
    """(Q, ..., n) -> (Q,): the mean of |(R - b) g|^2."""
    moment = (reward - baseline) ** 2 * square
    return moment.reshape(len(moment), -1).mean(1)


def noise_of(answers: Answers, others: dict[int, np.ndarray]) -> dict[tuple[str, int], np.ndarray]:
    """(Q,) for each baseline and number of others it is made from."""
    reward, square, found = answers.reward, answers.square, {}
    weights = {MEAN: np.ones_like(reward), BEST: square, LENGTH: answers.length}
    for k, chosen in others.items():  # (draws, n, k)
        for name, weight in weights.items():
            baseline = weighted_mean(reward[:, chosen], weight[:, chosen])  # (Q, draws, n)
            found[name, k] = second_moment(reward[:, None], square[:, None], baseline)
        found[TOKEN, k] = answers.by_token[k].mean(1)
    found[NOTHING, max(others)] = second_moment(reward, square, 0.0)
    found[OWN, max(others)] = second_moment(reward, square, weighted_mean(reward, square)[:, None])
    return {row: found[row] for row in sorted(found, key=lambda row: (-row[1], NAMES.index(row[0])))}


def beside_the_mean(noise: dict[tuple, np.ndarray]) -> dict[tuple, Estimate]:
    """What each baseline adds to the noise of the mean of as many others, as a share of it."""
    return {(name, k): over_questions(moment - noise[MEAN, k], noise[MEAN, k]) for (name, k), moment in noise.items()}


def saving(answers: Answers, noise: dict[tuple, np.ndarray]) -> Estimate:
    """(mean - b*)^2 E|g|^2, as a share of the mean's noise: what would be saved if mean and b* were known exactly.

    The exact mean lacks Var(R) E|g|^2 / k. On the answers it was made from b* looks as much too good as it is too bad on others,
    up to terms in 1 / n^2: exact is half-way. (The square of Cov(|g|^2, R) from the same answers would be too large.)
    """
    k = max(k for _, k in noise)
    mean = noise[MEAN, k] - answers.reward.var(1, ddof=1) * answers.square.mean(1) / k
    return over_questions(mean - (noise[BEST, k] + noise[OWN, k]) / 2, noise[MEAN, k])


def over_questions(amount: np.ndarray, whole: np.ndarray | None = None) -> Estimate:
    """(Q,): sum of the amounts over sum of the wholes, or their mean; its error from how much questions differ."""
    whole = np.ones_like(amount) if whole is None else whole
    with np.errstate(invalid="ignore", divide="ignore"):
        value = amount.sum() / whole.sum()
        error = (amount - value * whole).std(ddof=1) * np.sqrt(len(amount)) / whole.sum() if len(amount) >= FEWEST else np.nan
    return estimate(float(value), float(error), len(amount) - 1)


def gaps(answers: Answers) -> list[Estimate]:
    """b* - mean of each question. Its error is the spread of each answer's influence on it, by Student's t over answers."""
    found = []
    for reward, square, known in zip(answers.reward, answers.square, answers.known):
        best, n = weighted_mean(reward, square), len(reward)
        influence = square * (reward - best) / square.mean() - (reward - reward.mean())
        found.append(estimate(float(best - reward.mean()), float(influence.std(ddof=1) / np.sqrt(n)) if known else np.nan, n - 1))
    return found


def sides(questions: list[Estimate]) -> list[str]:
    return verdicts(questions, ("higher", "lower"), 0.0)


def differences(beside: dict[tuple, Estimate]) -> dict[tuple, str]:
    """Of all baselines that are scored on answers they were not made from."""
    tested = {row: e for row, e in beside.items() if row[0] not in (MEAN, OWN)}
    return {**dict.fromkeys(beside, "-"), **dict(zip(tested, verdicts(list(tested.values()), ("more noise", "less noise"), 0.0)))}


def percent(e: Estimate) -> str:
    return f"{e.value:+.1%} ({e.low:+.1%} to {e.high:+.1%})" if np.isfinite(e.low) else f"{e.value:+.1%}" if np.isfinite(e.value) else "unknown"


def of_claims(answers: Answers, questions: list[Estimate], beside: dict[tuple, Estimate], cost: Estimate) -> Table:
    """What is claimed of the mean, and of what others put in its place."""
    said, clear, known = differences(beside), sum(side in ("higher", "lower") for side in sides(questions)), int(answers.known.sum())
    answer = {"less noise": "holds", "more noise": "the opposite", "none seen": "not seen", "too few": "too few"}
    average = over_questions(np.array([e.value for e in questions]))
    most, group, less = max(k for _, k in beside), max(k for _, k in beside if k + 1 in GROUPS), "less noise than the mean"
    rows = [("nothing need be subtracted", less, percent(beside[NOTHING, most]), answer[said[NOTHING, most]]),
            ("the group's mean is the best", "Cov(|g|^2, R) = 0", f"clearly not in {clear} of {known} questions",
             "refuted" if clear else "not refuted"),
            ("the zero sum makes it the best", "sum of R - b = 0", f"true of the mean in all {len(questions)}", "no condition"),
            ("the mean is good enough", "(mean - b*)^2 E|g|^2 small", percent(cost),
             f"at least {cost.low:.1%}" if cost.low > 0 else f"at most {cost.high:.1%}" if np.isfinite(cost.high) else "too few"),
            *((f"{name} is better, {k} others", less, percent(beside[name, k]), answer[said[name, k]])
              for name in (BEST, LENGTH, TOKEN) for k in sorted({most, group}, reverse=True))]
    headings = dict.fromkeys(("claim", "which asks for", "measured", "verdict"), "")
    return Table("claims", "Is the group's mean the best baseline?", by_row(headings, rows),
                 f"The mean is clearly not the best baseline in {clear} of {known} questions; on average b* - mean is {average.value:+.3f} "
                 f"({average.low:+.3f} to {average.high:+.3f}). The exact b* would save {percent(cost)} of the mean's noise.",
                 ["Advantages R - b sum to zero over a group exactly when b is its mean, whatever |g|^2 does: that says which baseline was chosen, "
                  "and cannot say that it is the best. What the exact b* would save is an estimate that chance can put below 0."])


def of_baselines(answers: Answers, noise: dict[tuple, np.ndarray], beside: dict[tuple, Estimate]) -> Table:
    most, fewest, said = max(k for _, k in noise), min(k for _, k in noise), differences(beside)
    mean = noise[MEAN, most]
    extra = {row: over_questions(moment - mean, mean) for row, moment in noise.items()}
    variance = [over_questions(moment - mean, mean - answers.pull) for moment in noise.values()]
    return Table("baselines", f"Noise of each baseline, over that of the mean of all {most} others", {
        "baseline": ("", [name for name, _ in noise]), "others": ("d", [None if name in (NOTHING, OWN) else k for name, k in noise]),
        "second moment": ("+.1%", [e.value for e in extra.values()]), "variance": ("+.1%", [e.value for e in variance]),
        "95%": ("+.1%", [e.interval for e in variance]), "against a mean": ("", [said[row] for row in noise])},
        f"Subtracting nothing changes the noise by {percent(beside[NOTHING, most])}. Made from all {most} others, b* changes it by "
        f"{percent(beside[BEST, most])}, the length-weighted mean by {percent(beside[LENGTH, most])}, the baseline by token by "
        f"{percent(beside[TOKEN, most])}. In a group of {fewest + 1} the mean of the others has {percent(extra[MEAN, fewest])}.",
        [f"The squared expectation is {over_questions(answers.pull, mean).value:.1%} of the second moment. It is the same for all of them, so what "
         "one adds to the second moment it adds to the variance. A mean of k others has Var(R) E|g|^2 / k more noise than the exact one. The last "
         "column: against the mean of as many others.",
         f"{OWN}: scored on the answers it was made from, which is how a best baseline looks better than it is."])


def of_questions(answers: Answers, questions: list[Estimate]) -> Table:
    side, mean, best = sides(questions), answers.reward.mean(1), weighted_mean(answers.reward, answers.square)
    return Table("questions", "b* and the mean, question by question", {
        "question": ("d", list(range(1, len(mean) + 1))), "mean": (".3f", mean.tolist()), "b*": (".3f", best.tolist()),
        "b* - mean": ("+.3f", [e.value for e in questions]), "95%": ("+.3f", [e.interval for e in questions]), "p": ("p", [e.p for e in questions]),
        "cor(|g|^2, R)": ("+.2f", correlations(answers.square, answers.reward).tolist()), "b* is": ("", side)},
        f"b* is clearly higher than the mean in {side.count('higher')} questions and clearly lower in {side.count('lower')}; clearly or not, it is "
        f"lower in {sum(e.value < -1e-9 for e in questions)} of {len(side)}.",
        ["Intervals and p by Student's t over answers, p before Holm's correction. Too few: fewer than "
         f"{FEWEST} answers on one side of the mean."])


def correlations(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(Q, n), (Q, n) -> (Q,)"""
    with np.errstate(invalid="ignore", divide="ignore"):
        return ((x - x.mean(1, keepdims=True)) * y).mean(1) / (x.std(1) * y.std(1))


def of_sizes(answers: Answers) -> Table:
    """Do the stand-ins grow as |g|^2 does, and do they differ between good and bad answers as it does?"""
    found, known, mean = {}, np.flatnonzero(answers.known), answers.reward.mean(1)
    for name, size in (("|g|^2", answers.square), ("length", answers.length), ("sum s^2", answers.logit_square)):
        alike = correlations(answers.square, size)
        ratio = [np.log(size[q, ~answers.above[q]].mean() / size[q, answers.above[q]].mean()) for q in known]
        found[name] = [over_questions(x) for x in (alike[np.isfinite(alike)], np.array(ratio), weighted_mean(answers.reward, size) - mean)]
    like, ratio, shift = zip(*found.values())
    times, few = [np.exp(e.value) for e in ratio], "Too few questions have answers on both sides of their mean reward."
    said = (f"Answers below their question's mean reward have {times[0]:.2f} times the |g|^2 of those above, {times[1]:.2f} times the length and "
            f"{times[2]:.2f} times the sum of s^2.") if len(known) >= FEWEST else few
    return Table("sizes", "The length and the sizes at the logits in the place of |g|^2", {
        "size": ("", list(found)), "correlation": (".2f", [e.value for e in like]), "95%": (".2f", [e.interval for e in like]),
        "worse/better": (".2f", times), "95% ": (".2f", [tuple(np.exp(e.interval)) for e in ratio]),
        "b - mean": ("+.3f", [e.value for e in shift]), "95%  ": ("+.3f", [e.interval for e in shift])},
        f"{said} Within a question |g|^2 correlates with the length at {like[1].value:.2f}, with the sum of s^2 at {like[2].value:.2f}.",
        [f"Means over questions. Worse/better: geometric mean over the {len(known)} questions with at least {FEWEST} answers on either side of "
         "the mean reward. b - mean: where the baseline lies that weights answers by this size."])


def picture(answers: Answers, questions: list[Estimate], beside: dict[tuple, Estimate], folder: Path) -> tuple[Path, str]:
    figure, (left, right) = panels(2)
    mean, side, said = answers.reward.mean(1), sides(questions), differences(beside)
    for x, e, word in zip(mean, questions, side):
        colour = {"higher": BLUE, "lower": ORANGE}.get(word, GREY)
        left.errorbar(x, x + e.value, [[e.value - e.low], [e.high - e.value]], fmt="o", ms=4, lw=1.2, capsize=2, color=colour)
    left.axline((mean[0], mean[0]), slope=1, color="#000000", lw=0.8, ls="--", label="b* = mean")
    left.set(xlabel="mean reward of the question", ylabel="b*",
             title=f"b* is clearly not the mean in {side.count('higher') + side.count('lower')} of {len(side)} questions")
    left.legend(loc="upper left")
    shown = [row for row in beside if row[0] not in (NOTHING, MEAN, OWN)][::-1]
    for y, row in enumerate(shown):
        value, low, high = (100 * x for x in (beside[row].value, *beside[row].interval))
        colour = {"less noise": BLUE, "more noise": ORANGE}.get(said[row], GREY)
        right.barh(y, value, 0.7, xerr=[[value - low], [high - value]], color=colour, error_kw=dict(lw=0.9, capsize=2))
    right.axvline(0, color="#000000", lw=0.8)
    right.set(yticks=range(len(shown)), yticklabels=[f"{name}, {k} others" for name, k in shown], xlabel="% more noise",
              title="Noise beside the mean of as many others")
    return save(figure, folder, "baseline", "Left: the best baseline of each question against its mean reward, intervals over answers. Right: "
                                            "noise of the other baselines, intervals over questions. Grey: no clear difference")
