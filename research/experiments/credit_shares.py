"""Where the credit of the untrained model lies, and what a discount of the thinking changes."""
from pathlib import Path

import numpy as np
import torch

from analysis.statistics import Estimate, mean_over, ratio_of_sums
from countdown_task import ANSWER, NUMBER, OPERATOR, THINK
from harness.credit_file import read_columns, read_credit
from harness.files import read_json
from engine.lab import make_lab
from harness.settings import Settings
from engine.tokens import load_tokenizer
from mitigations import outcome_conditional
from research.experiments.experiments import GRADIENT_BATCHES
from research.experiments.tries import tries_of
from research.probes.common import gradients, sample_batch

DISCOUNT = 0.5  # of the thinking


def credit_shares(scores: Path) -> dict[str, Estimate]:
    """What each class of tokens has of the squared credit, in the runs that the scoreboard wrote
    with several seeds, put together in the folder `scores`."""
    parts, wholes = {}, []
    for folder in read_json(scores / "numbers.json")["folders"]:
        run = Path(folder, "run")
        columns = read_columns(run, 1)
        decided = columns["decided"].astype(float)
        lengths = np.diff([*columns["episode_start"], len(decided)])
        question = np.repeat(columns["group"], lengths)
        wholes.append(np.bincount(question, decided))
        for name, inside in classes_of(run, columns).items():
            parts.setdefault(name, []).append(np.bincount(question, decided * inside))
    whole = np.concatenate(wholes)
    return {name: ratio_of_sums(np.concatenate(part), whole) for name, part in parts.items()}


def classes_of(run: Path, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """(tokens,) whether each token belongs to a class; no token belongs to two."""
    verdict = verdict_tokens(run)
    thinking = (columns["section"] == THINK) & ~verdict
    return {"operators": thinking & (columns["kind"] == OPERATOR),
            "numbers": thinking & (columns["kind"] == NUMBER),
            "verdict words": verdict,
            "answer tokens": columns["section"] == ANSWER}


def verdict_tokens(run: Path) -> np.ndarray:
    """(tokens,) from the result of a try to the end of its sentence."""
    inside = []
    for texts in read_credit(run, 1, load_tokenizer(run)).texts:
        begins = np.cumsum([0, *map(len, texts)])[:-1]
        of_answer = np.zeros(len(texts), bool)
        for attempt in tries_of("".join(texts)):
            first, last = attempt.verdict
            of_answer |= (begins >= first) & (begins < last)
        inside.append(of_answer)
    return np.concatenate(inside)


def discount_cosine(settings: Settings) -> Estimate:
    """Between the gradient of plain GRPO and the same with discounted thinking, in batches of the
    untrained model."""
    lab, cosines = make_lab(settings), []
    for number in range(1, GRADIENT_BATCHES + 1):
        batch = sample_batch(lab, number, settings.questions, settings.answers)
        plain = batch.advantage * batch.mask
        discounted = plain * outcome_conditional(batch, think_discount=DISCOUNT)
        found = gradients(lab, batch, {"plain": plain, "discounted": discounted})
        cosines.append(cosine(found["plain"].double(), found["discounted"].double()))
    return mean_over(cosines)


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one @ other / (one.norm() * other.norm())).item()
