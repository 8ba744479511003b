"""The analysis note's claims about phase 1, its own first attempt. For each answer of a trained
model it took the gradient of the cross-entropy with respect to the embeddings of its tokens, g_j =
d loss / d embedding_j, and it took the size of g_j for the credit of token j.

It is measured at the run's last model, on four answers to each problem, beside controls without
credit: random text (answers of the same lengths with tokens drawn evenly), and the same answers by
an untrained model. If phase 1 measured credit, its pattern would vanish there. The notes did not
say from which number they computed t. Here it is the size of g, which is never negative, and beside
it the mean of g over its dimensions, which has a sign. The last token of an answer predicts nothing
and is left out.
"""
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from grpo import grpo
from mitigations import gradient_size
from lab.analysis.statistics import Estimate, jackknife, over_problems, within
from lab.analysis.tables import Table
from lab.analysis.token_table import TokenTable, table_of_frames
from lab.credit.of_2026 import at_embeddings
from lab.engine.model import Qwen2
from lab.engine.policy import Policy, derived_seed
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import WORD
from lab.probes.claim_rules import (HOLDS, NOT, NOT_SEEN, ONE_READING, THRESHOLDS, CannotBeSeen,
                                    Evidence, Found, above, claim, decided, mean_ratio)
from lab.probes.common import sample_batch
from lab.probes.run_tokens import CLASSES, FILLER, REASONING, class_codes, t_numbers

FIFTHS = 5
CONTROLS = "random text", "untrained", "untrained, random text"
MEASURES = "abs(t) above 3", "abs(t) below 1.5", "early over late", "filler over reasoning"
THEIR_PHASE_1, THEIR_PHASE_2 = ("0.83", "0.019", "4", "1.75"), ("0.20", "0.39", "1.6", "1.31")
MORE = "lab/results/phase1.txt"


@claim(1, "Phase 1 measured the wrong gradient: that of cross-entropy does not see the reward",
       "fatal flaw", MORE)
def phase_1_ignores_rewards(seen: Evidence) -> Found:
    """How much of GRPO's gradient changes if the rewards are shuffled, as a share of its size. The
    gradient of phase 1 does not contain the reward, so nothing of it changes."""
    of = seen.of_model(phases)
    changed = np.abs(of["shuffled"]["signed"] - of["gradient"]["signed"])
    size = of["gradient"]["size"]
    if not size.any():
        raise CannotBeSeen("all answers to the same problem have equal rewards")
    return decided(above(0), {"of GRPO's gradient": over_problems(
        of["gradient"]["problem"], [changed, size], lambda a, b: a / b)}, of_phase_1=(0.0, ".0f"))


@claim(1, "Phase 1's high t is so by construction, and says nothing of importance",
       "0.83 above 3; 0.019 below 1.5", MORE)
def high_t_by_construction(seen: Evidence) -> Found:
    """Holds if random text, which earned nothing, has as many positions above 3. The reason is not
    the notes': a size is never negative, so its mean is far from 0. With a sign few are above
    3."""
    of = seen.of_model(phases)
    x = jackknife(lambda kept: t_of(of["phase 1"].where(kept), "size")[0],
                  of["phase 1"]["problem"])
    random = t_of(of["random text"], "size")[0]
    return Found(HOLDS if random >= x.low else NOT, {
        "above 3": within(x, 0, 1), "below 1.5": t_of(of["phase 1"], "size")[1],
        "above 3 in random text": random, "above 3 with a sign": t_of(of["phase 1"])[0]},
        by_interval=True)


@claim(1, "In phase 1 early tokens get 4 times as much, because more terms of the loss reach them",
       "4", MORE)
def early_by_loss_terms(seen: Evidence) -> Found:
    """Random text of the same lengths has as many terms of the loss at each position. So it would
    have the same ratio if they were the reason."""
    of = seen.of_model(phases)
    x = jackknife(lambda kept: first_over_last_fifth(of["phase 1"].where(kept)),
                  of["phase 1"]["problem"], log=True)
    is_known = x.high < THRESHOLDS["a ratio"].number * x.low
    is_more = above(1)(x) if is_known else NOT_SEEN
    controls = {name: first_over_last_fifth(of[name]) for name in ("random text", "loss terms")}
    is_reason = controls["random text"] > x.low
    return Found(is_more if is_reason or is_more != HOLDS else ONE_READING, {
        "times": x, "in random text": controls["random text"],
        "from the number of terms alone": controls["loss terms"]}, ".1f", by_interval=True)


@claim(1, "The position dominates in phase 1: its pattern needs no trained model", "fatal flaw",
       MORE)
def untrained_shows_it_too(seen: Evidence) -> Found:
    """The same answers, and random text, by a model with fresh weights, which knows nothing. Its
    early tokens get more, too, where the control is above 1."""
    of = seen.of_model(phases)
    names = "untrained", "untrained, random text"
    early = [jackknife(lambda kept, name=name: first_over_last_fifth(of[name].where(kept)),
                       of[name]["problem"], log=True) for name in names]
    trained = first_over_last_fifth(of["phase 1"])
    return decided(above(1), {"untrained": early[0], "and random text": early[1]}, ".1f",
                   trained=trained, filler_over_reasoning_untrained=(
                       class_ratio(of["untrained"]), ".2f"))


@claim(1, "In phase 1 filler's 1.75 is early over late in disguise", "1.75", MORE)
def filler_in_disguise(seen: Evidence) -> Found:
    """Holds if filler has more, and clearly less of it where both classes are counted alike in each
    fifth of the answer."""
    tokens = seen.of_model(phases)["phase 1"]

    def estimated(statistic: Callable[[TokenTable], float]) -> Estimate:
        return jackknife(lambda kept: statistic(tokens.where(kept)), tokens["problem"], log=True)

    raw, like = estimated(class_ratio), estimated(lambda some: class_ratio(some, FIFTHS))
    part = estimated(lambda some: class_ratio(some) / class_ratio(some, FIFTHS))
    verdict = NOT if raw.high < 1 or like.low > 1 else NOT_SEEN
    if raw.low > 1 and part.low > 1:
        verdict = HOLDS
    return Found(verdict, {"times": raw, "at like positions": like}, by_interval=True)


@claim(1, "An analysis after training misses what training weighs", "", MORE)
def after_the_fact(seen: Evidence) -> Found:
    """The share of phase 1's sizes that lies in answers from which training learns nothing, because
    their advantage is 0."""
    of = seen.of_model(phases)
    x = of["phase 1"].share(of["gradient"]["size"] == 0, of["phase 1"]["size"])
    return Found(HOLDS if x.value > 0 else NOT_SEEN, {"": x}, ".0%")


@claim(1, "The classes of tokens are crude", "", "lab notes RUN")
def classes_are_crude(seen: Evidence) -> Found:
    """The share of filler tokens that are not words: pieces of a tag, spaces, brackets and ends of
    answers."""
    filler = seen.is_of(FILLER)
    x = seen.tokens.table.where(filler).share(seen["kind"][filler] != WORD, np.ones(filler.sum()))
    return decided(above(THRESHOLDS["crude"].number), {"of filler": x}, ".1%")


@claim(1, "Measured correctly, phase 2 finds the opposite of phase 1: other shares of high t, and "
          "early over late reversed",
       "in the table", "lab notes RUN")
def phase_2_is_the_opposite(seen: Evidence) -> Found:
    """Phase 2 is A log p over all steps, and the controls have no credit. In the notes, too, early
    tokens have more in both phases, so nothing is reversed; and t of a size cannot be compared with
    t of a signed number."""
    of, record = seen.of_model(phases), seen.tokens
    phase_2 = TokenTable({"size": record["abs contribution"], "signed": record["contribution"],
                          **{name: record[name] for name in ("answer", "problem", "position",
                                                             "length")},
                          "class": record.cells["class"]})
    columns = {"phase 1": (of["phase 1"], "size"), "phase 2": (phase_2, "signed"),
               **{name: (of[name], "size") for name in CONTROLS}}
    rows = {name: [*t_of(phase, column)[:2], first_over_last_fifth(phase), class_ratio(phase)]
            for name, (phase, column) in columns.items()}
    early = []
    for phase in (of["phase 1"], phase_2):
        fifth = phase.part_of_answer(FIFTHS)
        early.append(mean_ratio(phase["problem"], phase["size"], fifth == 0, fifth == FIFTHS - 1))
    verdicts = [above(1)(x) for x in early]
    is_known = NOT_SEEN not in verdicts
    return Found(NOT_SEEN if not is_known else HOLDS if verdicts[0] != verdicts[1] else NOT, {
        "early over late in phase 1": early[0], "in phase 2": early[1]}, by_interval=True,
        table=Table("phases", "", {"": ("", MEASURES), "notes' phase 1": ("", THEIR_PHASE_1),
                           "notes' phase 2": ("", THEIR_PHASE_2),
                           **{name: (".2f", row) for name, row in rows.items()}}))


# ------------------------------------------------------------------- what phase 1 measured


@np.errstate(invalid="ignore", divide="ignore")  # of few answers some shares are of nothing: NaN
def phases(policy: Policy, seen: Evidence) -> dict[str, TokenTable]:
    """Phase 1, its controls, and GRPO's gradient of the same answers."""
    rollouts = sample_batch(policy, seen.problems, 4)
    text = random_text(policy, rollouts)
    untrained = replace(policy, model=fresh(policy.model, policy.settings.seed))
    s = gradient_size(rollouts.log_prob.double(), rollouts.collision.double())
    positions = torch.arange(rollouts.mask.shape[1], device=rollouts.mask.device)
    found = {
        "phase 1": phase_one(policy, rollouts),
        "random text": phase_one(policy, text),
        "untrained": phase_one(untrained, rollouts),
        "untrained, random text": phase_one(untrained, text),
        "loss terms": sizes_of(policy, rollouts, rollouts.length[:, None] - 1 - positions),
        "gradient": sizes_of(policy, rollouts, rollouts.advantage * s),
        "shuffled": sizes_of(policy, rollouts, shuffled_advantages(rollouts) * s)}
    if not len(found["phase 1"]):
        raise CannotBeSeen("every answer has a single token, and the last one predicts nothing")
    return found


def phase_one(policy: Policy, rollouts: Rollouts) -> TokenTable:
    """The gradient of each answer's mean cross-entropy at its tokens' embeddings: the mean over its
    dimensions, and its norm."""
    size, signed = torch.zeros(2, *rollouts.mask.shape, device=rollouts.mask.device)
    for rows in rollouts.rows.split(policy.settings.micro_batch):
        length = rollouts.length[rows]
        _, g = at_embeddings(policy, rollouts, rows,
                             lambda log_prob: -(log_prob.sum(1) / length).sum())
        size[rows], signed[rows] = g.norm(dim=-1), g.mean(-1)
    return sizes_of(policy, rollouts, signed, size)


def sizes_of(policy: Policy, rollouts: Rollouts, signed: torch.Tensor,
             size: torch.Tensor | None = None) -> TokenTable:
    """The tokens with two quantities: `signed` (B, T), and `size`, which is abs(signed) if it is
    not given. The last token of each answer is left out."""
    size = signed.abs() if size is None else size
    tokens = table_of_frames(rollouts.mask, rollouts.group, {
        "token_id": rollouts.ids, "signed": signed.double(), "size": size.double()})
    tokens = tokens.where(tokens["position"] < tokens["length"] - 1)
    return tokens.having({"class": class_codes(policy.tokenizer, tokens["token_id"])})


def shuffled_advantages(rollouts: Rollouts) -> torch.Tensor:
    """GRPO's advantages (B, T) of rewards that are shuffled over all answers."""
    order = torch.randperm(len(rollouts.reward), generator=rollouts.generator)
    scores = {name: value[order.to(value.device)] for name, value in rollouts.scores.items()}
    return grpo(replace(rollouts, scores=scores))


def fresh(model: Qwen2, seed: int) -> Qwen2:
    """The same model with weights drawn anew."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed("untrained", seed))
        new = Qwen2(model.config)
    return new.to(model.device)


def random_text(policy: Policy, rollouts: Rollouts) -> Rollouts:
    """Answers of the same lengths to the same problems, their tokens drawn evenly."""
    ids = torch.randint(policy.tokenizer.get_vocab_size(), rollouts.ids.shape,
                        generator=rollouts.generator)
    return replace(rollouts, ids=ids.to(rollouts.ids.device) * rollouts.mask)


def t_of(tokens: TokenTable, column: str = "signed") -> list[float]:
    return t_numbers(tokens["position"], tokens[column])


def mean_of(values: np.ndarray) -> float:
    """The mean, or NaN where there is none, as in a fifth of very short answers."""
    return float(values.mean()) if len(values) else math.nan


def class_ratio(tokens: TokenTable, parts: int = 1) -> float:
    """The mean size of filler over that of reasoning, with each of so many equal parts of the
    answers counted the same for both classes."""
    part, means = tokens.part_of_answer(parts), []
    for name in (FILLER, REASONING):
        inside = tokens["class"] == CLASSES.index(name)
        means.append(sum(mean_of(tokens["size"][inside & (part == number)])
                         for number in range(parts)))
    return means[0] / means[1] if means[1] else math.nan


def first_over_last_fifth(tokens: TokenTable) -> float:
    fifth = tokens.part_of_answer(FIFTHS)
    first, last = (mean_of(tokens["size"][fifth == number]) for number in (0, FIFTHS - 1))
    return first / last if last else math.nan
