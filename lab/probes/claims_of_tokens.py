"""The claims of the analysis note that a run's own record decides: how large each token's term is,
which class has the larger terms, and whether the run learned."""
import re
from collections import Counter

import numpy as np

from lab.analysis.statistics import mean_over, over_problems, paired_difference, within
from lab.engine.tokens import ANSWER, WORD
from lab.probes.claim_rules import (ARITHMETIC, HOLDS, NOT, NOT_SEEN, ONE_READING, REAL, SAMPLES,
                                    THRESHOLDS, CannotBeSeen, Evidence, Found, above, below, claim,
                                    correlation, decided, difference_of_means, mean_difference,
                                    stored, stored_gain, together)
from lab.probes.run_tokens import FILLER, REASONING, t_numbers

NUMBER = re.compile("[0-9]+")
PLACE = re.compile("\0([0-9]+)\0")  # a place in a rule; no answer has this character
POLICY_GRADIENT = "docs/reference/policy_gradient.md#which-tokens-get-a-large-gradient"


@claim(1, "What a token contributes to the gradient is A log p",
       "mean 0.079, std 1.168, mean size 0.307, range -28.0 to 33.3", POLICY_GRADIENT)
def contribution_is_the_gradient(seen: Evidence) -> Found:
    """A log p is the token's term of the objective. Its gradient at the logits has the length
    abs(A) s, with s = norm(onehot - p), and the sign of A. A log p has the sign of -A, and it grows
    without limit as p goes to 0."""
    value, size, gradient = (seen[name] for name in (
        "contribution", "abs contribution", "abs gradient"))
    used = seen["advantage"] != 0
    if not used.any():
        raise CannotBeSeen("no token of this run has an advantage")
    r = correlation(seen["problem"][used], size[used], gradient[used])
    same_sign = over_problems(seen["problem"][used], [value[used] * seen["gradient"][used] > 0,
                                                      np.ones(used.sum())], lambda a, n: a / n)
    return Found(above(0.5)(same_sign), {
        "mean": value.mean(), "std": value.std(ddof=1), "mean size": size.mean(),
        "range": ((value.min(), value.max()), ".1f"),
        "of the tokens have the gradient's sign": (same_sign, ".0%"),
        "correlation of the two sizes": r}, ".3f")


@claim(1, "The signs are right: good answers have a negative contribution, bad ones a positive one",
       "-0.560; +0.242", POLICY_GRADIENT)
def signs_are_right(seen: Evidence) -> Found:
    """They are right whatever the model has learned, because log p is never above 0. So they show
    nothing."""
    means = [seen["contribution"][seen["sign"] == sign] for sign in (1, -1)]
    if not all(map(len, means)):
        raise CannotBeSeen("all rewards are alike")
    return Found(ARITHMETIC, {"in good answers": means[0].mean(), "in bad ones": means[1].mean()},
                 "+.3f")


@claim(1, "GRPO has no semantic credit assignment: an answer's tokens have one advantage (also 3 "
          "and 4)", "one number", "docs/reference/policy_gradient.md, lab/reports/noise.md")
def one_advantage(seen: Evidence) -> Found:
    """That all tokens of an answer get one number does not mean that they get no credit: averaged
    over answers, the gradient is that of the tokens' true credits. A single batch is noisy."""
    advantage, answer = seen["advantage"], seen["answer"]
    first = advantage[np.unique(answer, return_index=True)[1]]
    spread = np.abs(advantage - first[answer]).max()
    return Found(ARITHMETIC if spread < 1e-6 else NOT,
                 {"is the largest difference within an answer": spread}, ".2g")


@claim(1, "Within an answer, tokens differ by log p alone", "",
       "docs/course/7_why_did_the_minus_fall.md")
def only_log_prob(seen: Evidence) -> Found:
    """Their own terms differ by p alone. But all tokens share the weights of the model, so what a
    step does to a token comes from the whole batch: its own push tells little of its change."""
    known = np.isfinite(seen["change"])
    if not known.any():
        raise CannotBeSeen("this run did not measure the change (--change_every)")
    r = correlation(seen["problem"][known], seen["push"][known], seen["change"][known])
    is_all = r.low > THRESHOLDS["push is the change"].number
    return Found(HOLDS if is_all else ONE_READING,
                 {"correlation of a token's own push with its change": r})


@claim(1, "Early tokens get more gradient than late ones", "1.63", "lab notes RUN")
def early_over_late(seen: Evidence) -> Found:
    """The first tenth of the answers over the last, and the notes' other definition: the first
    fifth of all positions over the last, where only long answers have late tokens. A number by one
    says nothing beside a number by the other. Both say how sure the model is of an answer's ending,
    and not what its beginning earned."""
    tenth, numbers = seen.tokens.cells["bin"], {}
    for name, ends in (("", (tenth == 0, tenth == 9)), (", positions", seen.tokens.ends())):
        numbers |= {f"{unit}{name}": x for unit, x in seen.ratios_of_sizes(*ends).items()}
    return decided(above(1), numbers)


@claim(1, "Filler comes early, and calculations come late", "", "lab notes RUN")
def filler_comes_early(seen: Evidence) -> Found:
    """The mean place in the answer, from 0 to 1, minus that of reasoning: of words, which the notes
    speak of (*let me think*), and of all that their classes call filler, which includes the tags
    and the end. The notes needed it for their sentence that filler's share is early over late in
    disguise."""
    place = (seen["position"] + 0.5) / seen["length"]
    filler, reasoning = seen.filler_and_reasoning()
    numbers = {"of all filler": mean_difference(seen["problem"], place, filler, reasoning)}
    words = filler & (seen["kind"] == WORD)
    if words.any():
        numbers |= {"of words": mean_difference(seen["problem"], place, words, reasoning)}
    return decided(below(0), numbers, "+.3f")


@claim(1, "Filler gets 31% more gradient than reasoning (also note 2)",
       "1.31, from 0.333 and 0.254; filler is 68% of the tokens", "lab notes RUN")
def filler_over_reasoning(seen: Evidence) -> Found:
    """It depends on the model: after a cold start of a real one the gradient's ratio was 0.98
    (lab/results/notes/claims.txt)."""
    filler, reasoning = seen.filler_and_reasoning()
    size = seen["abs contribution"]
    return decided(above(1), seen.ratios_of_sizes(filler, reasoning),
                   of_filler=(size[filler].mean(), ".3f"),
                   of_reasoning=(size[reasoning].mean(), ".3f"),
                   of_the_tokens_are_filler=(filler.mean(), ".0%"))


@claim(1, "Filler gets more also at like positions: in 4 of 5 fifths", "4 of 5", "lab notes RUN")
def at_like_positions(seen: Evidence) -> Found:
    """Both classes are counted alike in each fifth of the answer. So the position is not the whole
    reason."""
    fifth = seen.tokens.bins(5)
    parts = []
    for number in range(5):
        both = [seen.is_of(name) & (fifth == number) for name in (FILLER, REASONING)]
        if both[0].any() and both[1].any():
            parts.append(both)
    if not parts:
        raise CannotBeSeen("no fifth of the answers has both classes")
    ratios, ahead = {}, []
    for name, unit in (("by A log p", "abs contribution"), ("by the gradient", "abs gradient")):
        columns = []
        for inside in [filler for filler, _ in parts] + [reasoning for _, reasoning in parts]:
            columns += [seen[unit] * inside, inside.astype(float)]

        def ratio(*sums: float) -> float:
            means = np.array(sums[::2]) / np.array(sums[1::2])
            return float(means[:len(parts)].sum() / means[len(parts):].sum())
        ratios[name] = over_problems(seen["problem"], columns, ratio, log=True)
        ahead.append(sum(seen[unit][a].mean() > seen[unit][b].mean() for a, b in parts))
    return decided(above(1), ratios, **{
        f"of {len(parts)} fifths by A log p": (ahead[0], "d"), "by_it": (ahead[1], "d")})


@claim(1, "The model is less sure of filler than of reasoning", "log p -0.555; -0.489",
       "lab notes RUN")
def less_sure_of_filler(seen: Evidence) -> Found:
    """The mean log p of filler minus that of reasoning."""
    log_prob, (filler, reasoning) = seen["log_prob"], seen.filler_and_reasoning()
    x = mean_difference(seen["problem"], log_prob, filler, reasoning)
    return decided(below(0), {"": x}, "+.3f", log_p_of_filler=log_prob[filler].mean(),
                   log_p_of_reasoning=log_prob[reasoning].mean())


@claim(1, "Filler gets more because the model is less sure of it", "1.13 of 1.31", "lab notes RUN")
def sureness_explains_it(seen: Evidence) -> Found:
    """The share of the log of the ratio, filler over reasoning, that would be left if every token
    had the same abs(A). The notes' own table has the ratios 1.13 and 1.31, so the share is 0.45.
    The rest comes from abs(A), which varies with log p."""
    log_prob, size = np.abs(seen["log_prob"]), seen["abs contribution"]
    columns = []
    for inside in seen.filler_and_reasoning():
        columns += [log_prob * inside, size * inside, inside.astype(float)]

    def part(lf: float, sf: float, nf: float, lr: float, sr: float, nr: float) -> float:
        return np.log(lf / nf * nr / lr) / np.log(sf / nf * nr / sr)
    x = over_problems(seen["problem"], columns, part)
    reason, none = THRESHOLDS["the reason"].number, THRESHOLDS["no reason"].number
    return Found(HOLDS if x.low > reason else NOT if x.high < none else ONE_READING,
                 {"of it": x}, by_interval=True)


@claim(1, "Filler does not wash out: both classes have the same positive mean", "0.0786; 0.0793",
       "lab notes RUN")
def does_not_wash_out(seen: Evidence) -> Found:
    """The mean of A log p is how A varies with log p in the class, because the mean of A is 0. A
    mean above 0 says that bad answers were less sure there, and not that the class earned
    something. The same: the smaller mean over the larger is near enough to 1."""
    means, columns = {}, []
    for name, inside in zip((FILLER, REASONING), seen.filler_and_reasoning()):
        columns += [seen["contribution"] * inside, inside]
        means[f"of {name}"] = over_problems(seen["problem"], columns[-2:], lambda a, n: a / n)

    def smaller_over_larger(a: float, n: float, b: float, m: float) -> float:
        return min(a / n, b / m) / max(a / n, b / m)
    ratio = over_problems(seen["problem"], columns, smaller_over_larger)
    verdicts = [*(above(0)(x) for x in means.values()), above(THRESHOLDS["the same"].number)(ratio)]
    return Found(together(verdicts), {**means, "of one to the other": (ratio, ".2f")}, "+.4f",
                 by_interval=True)


@claim(1, "At 20% of the positions abs(t) is above 3, so the direction of credit varies more than "
          "phase 1 said", "0.20; 0.39 below 1.5; mean 1.92", "lab notes RUN")
def t_says_how_much_it_varies(seen: Evidence) -> Found:
    """t grows with the root of the number of answers, so such a share says how many answers there
    were. The same tokens give another share in a sixteenth of the problems."""
    problem = seen["problem"]
    if problem.max() < 16:
        raise CannotBeSeen(f"{problem.max() + 1} problems are too few for a sixteenth of them")
    numbers: dict[str, float] = {}
    for where, kept in (("", problem >= 0), (" in a sixteenth of them", problem % 16 == 0)):
        t = t_numbers(seen["position"][kept], seen["contribution"][kept])
        for name, value in zip(("above 3", "below 1.5", "on average"), t):
            numbers[name + where] = value
    growth = numbers["on average"] / numbers["on average in a sixteenth of them"]
    grows = growth > THRESHOLDS["grows with answers"].number
    return Found(NOT if grows else NOT_SEEN, numbers)


@claim(1, "The answer should get more credit than it does", "",
       "lab decided --model RUN/checkpoints/...")
def answer_deserves_more(seen: Evidence) -> Found:
    """The share of the gradient that it gets, beside the share of the reward that it decides on the
    untrained tiny model, measured by continuations."""
    seen.like_stored()
    gets, decides = seen.share(seen["section"] == ANSWER), stored("scoreboard_24", "answer decides")
    return Found(HOLDS if decides.low > gets.high else NOT if decides.high < gets.low else NOT_SEEN,
                 {"of the gradient": gets, "of the reward (stored, tiny)": decides}, ".1%",
                 by_interval=True)


@claim(1, "Filler's gradient is spent on tokens that decide nothing", "",
       "lab/reports/decided.md; lab decided --model RUN/checkpoints/...")
def filler_is_wasted(seen: Evidence) -> Found:
    """On the untrained tiny model filler decides little, so most of its gradient is noise. A real
    model that thinks first judges in words: without their gradient it learns much less."""
    seen.like_stored()
    gets, words = seen.share(seen.is_of(FILLER)), seen["kind"][seen.is_of(FILLER)] == WORD
    decides = {f"of the reward is decided by it (stored, tiny, sample {number})":
               stored(name, "filler decides") for number, name in enumerate(SAMPLES, 1)}
    real = stored_gain(REAL, "by_kind without words")
    verdicts = [HOLDS if x.high < gets.low else NOT for x in decides.values()]
    return Found(together([*verdicts, above(0)(real)]), {
        "of the gradient": gets, "of filler is words": words.mean(), **decides,
        "points without words (stored, real that thinks first)": (real, "points")}, ".1%",
        by_interval=True)


@claim(1, "It learns: success rises from 0% to 15%", "0.00; 0.15",
       "python analyze.py RUN; lab/results/blind.txt")
def it_learns(seen: Evidence) -> Found:
    """Held-out success at the end minus at the start, and the success of the best answer that
    ignores the problem. Of 128 of the notes' problems one such answer, a - b + c - d, solves 16
    (lab/results/blind.txt), so their 15% may be blind."""
    lines = seen.run.evaluated()
    if len(lines) < 2:
        raise CannotBeSeen("this run was not evaluated twice")
    first, last = lines[0], lines[-1]
    gain = paired_difference(np.array(last["answer"]) - np.array(first["answer"]))
    blind = best_blind_answer(seen)
    is_blind = blind is not None and last["success_low"] < blind
    verdict = above(0)(gain)
    return Found(ONE_READING if verdict == HOLDS and is_blind else verdict, {
        "points": (gain, "points"), "at first": first["success"], "at the end": last["success"],
        "by the best blind answer": blind}, ".1%", by_interval=True)


def best_blind_answer(seen: Evidence) -> float | None:
    """The success on held-out problems of one expression for all of them, with letters for their
    numbers: the best of those that are frequent in the run's last step."""
    try:
        task = seen.model.task
    except CannotBeSeen:  # without a model there are no problems
        return None
    config, tokens = seen.run.config, seen.tokens
    problems = task.training_problems(config["seed"], tokens.steps[-1], config["questions"])
    of_last = np.flatnonzero(seen["step"] == len(tokens.steps) - 1)
    first_problem, rules = seen["problem"][of_last].min(), Counter[str]()
    for answer in np.unique(seen["answer"][of_last]):
        own = of_last[seen["answer"][of_last] == answer]
        text = tokens.tokenizer.decode(seen["token_id"][own].tolist(), skip_special_tokens=False)
        inside = re.search(r"<answer>(.*?)</answer>", text, re.S)
        number = int(seen["problem"][own[0]] - first_problem)
        if inside and number < len(problems):
            rules[rule_of(inside[1], task.show(problems[number]))] += 1
    held_out = [(problem, task.show(problem)) for problem in task.held_out_problems(200)]
    best = 0.0
    for rule, _ in rules.most_common(20):
        answer = f" </think>\n<answer>{rule}</answer><|im_end|>"
        best = max(best, float(np.mean([task.score(problem, by_rule(answer, shown))["answer"]
                                        for problem, shown in held_out])))
    return best


def rule_of(text: str, problem: str) -> str:
    """The answer as a rule: each number that the problem has stands there by its place in it."""
    numbers = NUMBER.findall(problem)
    return NUMBER.sub(lambda found: f"\0{numbers.index(found[0])}\0"
                      if found[0] in numbers else found[0], text)


def by_rule(rule: str, problem: str) -> str:
    """The answer that the rule gives to another problem, without having looked at it."""
    numbers = NUMBER.findall(problem)
    return PLACE.sub(lambda found: (numbers[int(found[1]):] or [""])[0], rule)


@claim(1, "Answers become concise, a sign of learning", "183; 42 tokens",
       "docs/reference/how_a_run_fails.md#a-success-that-ignores-the-problem")
def concise(seen: Evidence) -> Found:
    """The mean length in the last fifth of the steps minus that in the first: is it shorter, and
    by half, where the notes' fell by three quarters? In a run with the notes' settings answers
    became short because the model had learned a single answer, a - b + c - d, for every problem."""
    before, after = seen.metric("length")
    x, half = difference_of_means(after, before), THRESHOLDS["concise"].number * before.mean()
    ends = {"at first": (before.mean(), ".1f"), "at the end": (after.mean(), ".1f")}
    return Found(together([below(0)(x), below(-half)(x)]), {"tokens": x, **ends}, "+.1f",
                 by_interval=True)


@claim(1, "A penalty for leaving the initial model (KL) is part of the training", "",
       "lab/reports/codes.md")
def kl_is_applied(seen: Evidence) -> Found:
    """The notes' own code, GRPO-Zero, has none, as nine of the sixteen codes that were read."""
    kl = seen.run.config.get("kl", 0.0)
    return Found(HOLDS if kl else NOT, {"times the KL in this run's loss": (kl, "g")})


@claim(4, "The group comparison is a strong signal where rewards are binary", "12 of 16",
       "lab/reports/noise.md; lab exact grpo")
def strong_for_binary(seen: Evidence) -> Found:
    """The share of the groups in which right answers are compared with wrong ones: no other teaches
    anything about right and wrong. In such a group the gradient is right on average, and noisy."""
    first = np.unique(seen["answer"], return_index=True)[1]
    problem, right = seen["problem"][first], seen["right"][first]
    if not np.isin(right, (0, 1)).all():
        raise CannotBeSeen("this run's answers are not either right or wrong")
    counts = [np.bincount(problem, right == value) > 0 for value in (0, 1)]
    return decided(above(THRESHOLDS["a strong signal"].number),
                   {"of the groups have both": within(mean_over(counts[0] & counts[1]), 0, 1)},
                   ".1%")


@claim(1, "The gradient's norm falls", "3.55; 2.38", "metrics.jsonl of RUN")
def norm_falls(seen: Evidence) -> Found:
    """The mean norm before clipping in the last fifth of the steps minus that in the first. AdamW
    divides by it, so a small norm is no sign of success or of failure."""
    before, after = seen.metric("gradient_norm")
    return decided(below(0), {"": difference_of_means(after, before)}, "+.3f",
                   at_first=(before.mean(), ".3f"), at_the_end=(after.mean(), ".3f"))
