"""The claims about weightings of tokens, of the analysis note and of the note on four mitigations.

Whether a weighting gains needs many seeds, so these verdicts are those of stored experiments. What
a weighting does to the sizes of tokens is seen in a run of it, or by weighting this run's tokens.
"""
import numpy as np

from lab.analysis.statistics import Estimate, mean_over, over_problems
from lab.analysis.token_table import read_step
from lab.engine.tokens import ANSWER
from lab.probes.claim_rules import (ARITHMETIC, HOLDS, NOT, NOT_SEEN, REAL, REAL_SHORT, SAMPLES,
                                    THRESHOLDS, TINY, CannotBeSeen, Evidence, Found, above, below,
                                    claim, decided, mean_ratio, pair, stored, stored_gain,
                                    stored_results, together, tokens_of)
from lab.probes.run_tokens import (CLASSES, FILLER, REASONING, UNITS, RunTokens,
                                   has_advantages_of_grpo, z_scores)

BOARDS = "lab/reports/board.md, lab/reports/real_board.md"


def class_ratio(tokens: RunTokens, unit: str) -> Estimate:
    filler, reasoning = (tokens.cells["class"] == CLASSES.index(name)
                         for name in (FILLER, REASONING))
    return mean_ratio(tokens["problem"], tokens[f"abs {unit}"], filler, reasoning)


@claim(1, "With 0.75 on the thinking, filler gets 41% more, in place of 31%", "1.41; 1.31",
       "lab notes RUN RUN2")
def discount_and_filler(seen: Evidence) -> Found:
    """The terms contain the weight, and the two runs wrote other texts. So a larger ratio would not
    say that credit moved."""
    mine, plain = tokens_of(seen.arm("outcome_conditional")), tokens_of(seen.arm("none"))
    numbers, verdicts = {"weight on the thinking": discount_of(mine)}, []
    for unit, name in zip(UNITS, ("by A w log p", "by the gradient")):
        ours, theirs = class_ratio(mine, unit), class_ratio(plain, unit)
        numbers |= {name: ours, f"plain, {name}": theirs}
        verdicts.append(HOLDS if ours.low > theirs.high else
                        NOT if ours.high < theirs.low else NOT_SEEN)
    return Found(together(verdicts), numbers, by_interval=True)


@claim(1, "With 0.75 on the thinking the position effect flips: late tokens get 3 times as much",
       "early over late 1/3", "lab notes RUN RUN2")
def discount_and_position(seen: Evidence) -> Found:
    """The notes' own table of that run has 0.386 early and 0.235 late. The 3 comes from another
    definition, by absolute positions, where only long answers have late tokens."""
    tokens = tokens_of(seen.arm("outcome_conditional"))
    tenth, problem, size = tokens.cells["bin"], tokens["problem"], tokens["abs contribution"]
    return decided(below(1), {
        "early over late": mean_ratio(problem, size, tenth == 0, tenth == 9),
        "by absolute position": mean_ratio(problem, size, *tokens.ends())},
        weight_on_the_thinking=discount_of(tokens))


def discount_of(tokens: RunTokens) -> float:
    return float(tokens.run.config.get("think_discount", np.nan))


@claim(2, "A discount on the thinking gives more credit to the answer", "expected",
       "lab notes RUN RUN2")
def discount_moves_gradient(seen: Evidence) -> Found:
    """The answer's share of the gradient, plain, and with 0.5 on all other tokens of this run. It
    is more gradient by arithmetic, and whether it is credit is another question."""
    inside = seen["section"] == ANSWER
    size = seen["abs gradient"]
    weighted = over_problems(seen["problem"], [size * inside, size * np.where(inside, 1, 0.5)],
                             lambda mine, whole: mine / whole)
    return Found(ARITHMETIC, {"plain": seen.share(inside), "weighted": weighted}, ".1%")


@claim(1, "The gradient's norm collapsed, a sign of the break", "0.6 to 0.7 in place of 2 to 3",
       "lab notes RUN RUN2")
def small_norm_breaks(seen: Evidence) -> Found:
    """Do norm and success both fall with this weighting, over the steps that both runs have? It is
    one pair. AdamW divides by the gradient's size, so a small norm is no reason for a failure."""
    mine, plain = seen.pair_of("inverse_logprob", "inverse_logprob_as_published")
    found = {name: mean_over(mine[name] - plain[name]) for name in mine}
    return Found(together([below(0)(x) for x in found.values()]), {
        "of norm": (found["gradient_norm"], "+.3f"),
        f"points, {len(plain['success'])} steps": (found["success"], "points")}, by_interval=True)


@claim(2, "A mitigation makes training more stable, seen in the gradient's norm", "to be measured",
       "lab notes RUN RUN2")
def steadier_norm(seen: Evidence) -> Found:
    """The standard deviation of the norm over its mean, over the steps that both runs have: with a
    weighting, divided by that without. It is one pair, and a norm says nothing of success."""
    weighted = [run for run in (seen.run, *seen.others) if run.config["mitigation"] != "none"]
    if not weighted:
        raise CannotBeSeen("needs a run with a --mitigation, beside one without")
    mine, plain = (one["gradient_norm"] for one in seen.pair_of(weighted[0].config["mitigation"]))
    return decided(below(1), {"times as much": over_problems(
        np.arange(len(mine)), [np.ones_like(mine), mine, mine ** 2, plain, plain ** 2],
        lambda n, a, aa, b, bb: variation(n, a, aa) / variation(n, b, bb), log=True)},
        steps=(len(mine), "d"))


@claim(2, "Inverse log-prob weights equalise the gradient across token types", "expected",
       "lab/results/inverse.txt")
def inverse_equalises(seen: Evidence) -> Found:
    """The standard deviation of the sizes over their mean, with 1 / (abs(log p) + 0.1) on this
    run's tokens, over that of plain sizes. They become more equal, and stay far from equal, because
    a sure token has next to no gradient."""
    used, weight = seen["advantage"] != 0, 1 / (np.abs(seen["log_prob"]) + 0.1)
    ratios = {}
    for unit, name in zip(UNITS, ("by A log p", "by the gradient")):
        size = seen[f"abs {unit}"][used]
        weighted = size * weight[used]
        ratios[name] = over_problems(
            seen["problem"][used], [np.ones(used.sum()), size, size ** 2, weighted, weighted ** 2],
            lambda n, a, aa, b, bb: variation(n, b, bb) / variation(n, a, aa), log=True)
    return decided(below(1), ratios)


def variation(n: float, total: float, squares: float) -> float:
    """The standard deviation over the mean."""
    return (squares / n - (total / n) ** 2) ** 0.5 / (total / n)


@claim(1, "Filler in the thinking helps to learn the format", "",
       "lab/results/real/filler_and_form.txt", stored=True)
def filler_and_format(seen: Evidence) -> Found:
    """The mean format in steps 6 to 10 without the gradient of words, minus that with it, in three
    pairs of a real model."""
    runs = stored_results("claims")["filler_and_form"]["values"]
    x = mean_over([np.mean(runs[f"without words-s{seed}"][5:]) - np.mean(runs[f"plain-s{seed}"][5:])
                   for seed in range(3)])
    return decided(below(0), {"without words": x}, "+.3f")


# ------------------------------------------------------------------- what finds the tokens


def index(method: str) -> dict[str, tuple[Estimate, str]]:
    """How well a method finds the tokens that decide, on four samples of tiny's answers: 1 if its
    largest weight is at the token that decides everything, and 0 if the two are unrelated."""
    return {f"index in sample {number}": (stored(name, f"index of {method}"), "+.2f")
            for number, name in enumerate(SAMPLES, 1)}


def finds(method: str) -> list[str]:
    return [above(0)(x) for x, _ in index(method).values()]


@claim(1, "Attention from the answer tells which tokens matter (experiment 3; also note 2)",
       "not run", "lab experiment notes_3", stored=True)
def attention(seen: Evidence) -> Found:
    """It finds the deciding tokens a little, on three samples of four, and no gain is seen."""
    gains = {f"points on {name}": stored_gain(board, "attention_credit") for board, name in (
        (TINY, "tiny"), (REAL, "real that thinks first"), (REAL_SHORT, "real without thinking"))}
    gained = together([above(0)(x) for x in gains.values()])
    return Found(together([gained, *finds("attention_credit")]), {
        **gains, **index("attention_credit"), **pair(seen, ["attention_credit"])}, "points",
        by_interval=True)


@claim(1, "Attention is not causal importance", "", "lab/reports/decided.md", stored=True)
def attention_is_not_causal(seen: Evidence) -> Found:
    """It is not if the index stays below a half. It would be 1 if attention were largest where the
    reward is decided."""
    least = THRESHOLDS["follows credit"].number
    found = index("attention_credit")
    return Found(together([below(least)(x) for x, _ in found.values()]), found, by_interval=True)


@claim(1, "Entropy tells which tokens matter (GTPO)", "", "lab/reports/decided.md", stored=True)
def entropy_finds_them(seen: Evidence) -> Found:
    """Tokens of low entropy decide nothing, so entropy finds where something is decided. But the
    tenth with the most entropy is mostly words, and decides no more than its share."""
    tops = {f"of the reward is decided by its top tenth in sample {number}": (
        stored(name, "top tenth of entropy_weighted"), ".1%")
        for number, name in enumerate(SAMPLES, 1)}
    verdicts = [above(0.1)(x) for x, _ in tops.values()]
    return Found(together([*finds("entropy_weighted"), *verdicts]),
                 {**index("entropy_weighted"), **tops}, by_interval=True)


@claim(1, "Ablation measures causal importance directly", "", BOARDS, stored=True)
def ablation(seen: Evidence) -> Found:
    """A text without one token is a text that the model would not have written. Continuations with
    another token (`measured`) do measure it."""
    numbers = index("causal_ablation")
    return Found(together(finds("causal_ablation")), {
        **numbers, "points by deletion, tiny": (stored_gain(TINY, "deletion"), "points"),
        "index of measured": (stored(SAMPLES[0], "index of measured"), "+.2f")}, by_interval=True)


@claim(2, "A hard entropy mask makes the gradient explode, because such tokens have the lowest "
          "log p", "explodes", "lab notes RUN RUN2")
def hard_mask_explodes(seen: Evidence) -> Found:
    """They have the lowest log p. But the gradient's length is bounded by s, so the norm grows by a
    factor, and clipping holds it. The factor is that of this run's sizes if a fifth of the tokens
    has all the weight."""
    top = seen.most_entropy()
    grows = mean_ratio(seen["problem"], seen["abs gradient"], top, np.ones_like(top))
    numbers = {"times the size": grows, "log p in the top fifth": seen["log_prob"][top].mean(),
               "below": seen["log_prob"][~top].mean()}
    others = {run.config["mitigation"]: run for run in (seen.run, *seen.others)}
    for name, arm in (("norm with the mask", "entropy_masking"), ("norm without", "none")):
        if "entropy_masking" in others and arm in others:
            norms = [line["gradient_norm"] or 0 for line in others[arm].metrics]
            numbers |= {name: np.mean(norms), f"at most, {name}": max(norms)}
    verdicts = [above(least)(grows) for least in (1, THRESHOLDS["explodes"].number)]
    return Found(together(verdicts), numbers, by_interval=True)


@claim(2, "A lower entropy_temp focuses more on tokens of high entropy", "1.0 is the default",
       "docs/reference/methods.md")
def lower_temperature(seen: Evidence) -> Found:
    """The share of the weight that the fifth with the most entropy gets, if the weights are
    exp(entropy / entropy_temp). It grows as the temperature falls, whatever the entropies are.
    Whether more focus there helps is the question of `forking_tokens`."""
    top, shares = seen.most_entropy(), {}
    for temperature in (2.0, 1.0, 0.5):
        weight = np.exp((seen["entropy"] - seen["entropy"].max()) / temperature)
        shares[f"at {temperature:g}"] = seen.tokens.table.share(top, weight)
    return Found(ARITHMETIC, shares, ".1%")


@claim(1, "A learned importance is a chicken-and-egg problem", "",
       "lab/credit/learned_importance.py")
def chicken_and_egg(seen: Evidence) -> Found:
    """It holds if the network cannot predict the advantages that it learns from, because then its
    weights rest on nothing: the share that it explains of each new batch's advantages, over the
    last fifth of the steps."""
    run, explained = seen.arm("learned_importance"), []
    if not has_advantages_of_grpo(run):
        raise CannotBeSeen("its network did not learn from GRPO's advantages")
    for step in run.steps[-max(2, len(run.steps) // 5):]:
        answers = read_step(run.folder, step).answers
        size = np.square(np.nan_to_num(z_scores(answers))).mean()
        loss = {line["step"]: line for line in run.metrics}[step]["importance_loss"]
        explained.append(1 - loss / size if size and loss is not None else None)
    return decided(below(THRESHOLDS["no reason"].number), {"of it": mean_over(explained)})


@claim(2, "Gains of forking tokens grow with size: 32B +11, 14B +5, 8B 0", "+11; +5; 0", BOARDS,
       stored=True)
def gains_grow_with_size(seen: Evidence) -> Found:
    """From tiny's 0.6 million parameters to half a billion, losses become smaller, with the paper's
    hard mask as with soft weights; a gain is not seen."""
    figures = ", ".join(f"{stored_gain(board, 'entropy_masking').value * 100:+.1f}"
                        for board in (TINY, REAL, REAL_SHORT))
    raise CannotBeSeen(f"needs models of 8 to 32 billion parameters; stored: {figures} points of "
                       "the hard mask on tiny, on real that thinks first and without thinking")
