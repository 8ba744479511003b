"""Does phase 1 measure credit? A gradient that never saw a reward, and the controls that expose it.

Question. An earlier experiment wanted to know which tokens earn the reward. Its phase 1 took the
answers of a trained model and computed, answer by answer, the gradient of the cross-entropy at the
tokens' embeddings (phase1_gradient.py). The size of that gradient was published as the credit of a
token: early tokens get 4 times what late ones get, filler 1.75 times what reasoning gets, and at
83% of the positions abs(t) is above 3, with t = mean / (std / sqrt(answers)).

Measurement. The same gradient for a batch of answers, beside the second attempt (phase 2, A log p)
and beside the gradient that GRPO applies at the logits, abs(A) s; then again where there is no
credit to find: rewards shuffled, random text, an untrained model, one loss term at a time.

Reading it. If phase 1 measured credit, it would change with the rewards, its pattern would vanish
in the controls, and it would rank tokens as the gradient at the logits does. If it measures
something else, the pattern stays: tokens that more loss terms reach have larger gradients, and a
size, which is never negative, has a large t in any model.

It is not on record which number of a token went into t. Both candidates are shown: the size
norm(g), and a number with a sign, the mean of g over the embedding's dimensions. The last token of
an answer, whose g is always 0, is left out; the table on position shows what counting it would do.

The earlier experiment's model had been trained with GRPO. To ask such a one, add
--model runs/none-grpo-s0/checkpoints/step_000100.
"""
from dataclasses import replace

import numpy as np
import torch

from harness.flags import Flag
from engine.lab import Lab, derived_seed
from harness.progress import Progress
from engine.rollouts import Rollouts
from research.probes.common import Findings, Probe, run_probe, sample_batch
from research.probes.phase1_gradient import (
    analysed, phase_one, random_text, shuffled_rewards, single_terms, untrained)
from research.probes.phase1_statistics import (
    NEXT_TERM, TERM_SIZE, Account, Places, account, accounts_of_terms, locate, three_accounts)
from research.probes.phase1_tables import (
    classes_table, controls_table, distance_table, draw, kinds_table, phases_table,
    position_table, reward_table, t_table, tenths_table, training_table)

FLAGS = {
    "questions": Flag(32, "problems", least=2, most=10_000, quick=6),
    "answers": Flag(16, "answers to each problem", least=2, most=1000, quick=5),
    "single": Flag(2, "answers to each problem whose loss terms are taken one at a time",
                   least=1, most=1000)}


def measure(probe: Probe) -> Findings:
    args, lab = probe.args, probe.lab()
    progress = Progress(answers=2, phase_1=3, shuffled_rewards=3, controls=9, single_terms=30,
                        tables=6)
    progress("answers")
    rollouts = sample_batch(lab, 1, args.questions, args.answers)
    places = locate(lab, rollouts, analysed(rollouts))

    progress("phase_1")
    size, signed = phase_one(lab, rollouts)
    accounts = three_accounts(places, rollouts, size, signed)
    zero_counted = account(locate(lab, rollouts, rollouts.mask), signed, size)

    progress("shuffled_rewards")
    shuffled_rollouts = shuffled_rewards(rollouts)
    shuffled = three_accounts(places, shuffled_rollouts, *phase_one(lab, shuffled_rollouts))

    progress("controls")
    controls = {"real answers, trained model": accounts["phase 1"],
                **make_controls(lab, rollouts, places, args.seed)}

    rows = torch.arange(len(rollouts.mask), device=rollouts.mask.device)
    chosen = rows[rows % args.answers < args.single]
    norms = single_terms(lab, rollouts, chosen, lambda share: progress("single_terms", share))
    terms = accounts_of_terms(lab, rollouts, chosen, norms)

    progress("tables")
    five = {"phase 1": accounts["phase 1"], TERM_SIZE: terms[TERM_SIZE],
            NEXT_TERM: terms[NEXT_TERM], **accounts}
    distance = distance_table(rollouts, chosen, norms)
    tenths = tenths_table(five)
    tables = [phases_table(accounts), reward_table(accounts, shuffled),
              position_table(accounts["phase 1"], zero_counted, terms), distance,
              classes_table(five, rollouts), kinds_table(accounts, rollouts),
              t_table(accounts["phase 1"], controls["random text, trained model"],
                      np.random.default_rng(args.seed)),
              training_table(accounts, rollouts), controls_table(controls), tenths]
    intro = [f"{args.model}: {args.questions} problems x {args.answers} answers, "
             f"{len(places.answer):,} tokens without the last of each answer.",
             "Phase 1 is the gradient of an answer's mean cross-entropy at its tokens' embeddings."]
    short = ("phases", "wrong gradient", "position", "classes", "t", "after the fact", "controls")
    return Findings("Phase 1: a gradient that never saw a reward", intro, tables, short,
                    checks=("wrong gradient",), takes="some minutes",
                    pictures=[draw(tenths, distance, probe.folder)],
                    places={"tenths": ("size_by_place",)})


def make_controls(lab: Lab, rollouts: Rollouts, places: Places, seed: int) -> dict[str, Account]:
    """Phase 1 where nothing can have been earned, or learned."""
    fresh = replace(lab, model=untrained(lab.model, derived_seed("untrained", seed)))
    text = random_text(lab, rollouts)
    text_places = locate(lab, text, places.inside)

    def phase_one_account(some_lab, some_rollouts, some_places):
        size, signed = phase_one(some_lab, some_rollouts)
        return account(some_places, signed, size)

    return {"random text, trained model": phase_one_account(lab, text, text_places),
            "real answers, untrained model": phase_one_account(fresh, rollouts, places),
            "random text, untrained model": phase_one_account(fresh, text, text_places)}


def main(argv: list[str]) -> None:
    run_probe("phase1", __doc__, FLAGS, measure, argv)
