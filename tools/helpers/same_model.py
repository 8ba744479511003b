"""Which model sampled a recorded step, and whether a folder still has that model.

It need not have it: a folder can hold other weights by now, and an excerpt of a run numbers its
tokens anew, so that the model would read other words.
"""
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from analysis.tokens import StepRecord
from engine.errors import UserError
from harness.record import Json
from qwen2_model import Qwen2

SAME_MODEL = 0.1  # if log-probs differ by more from the record, another model sampled it
COMPARED = 50     # tokens of an answer, of which the mean difference is taken
NAMED_STEPS = 8   # if more models were kept, only some of their steps are named


def where_kept(steps: Iterable[int]) -> str:
    """A sentence that names the steps for which the model that sampled them was kept."""
    names = [str(step) for step in sorted(steps)]
    if not names:
        return "It was kept for no step"
    if len(names) > NAMED_STEPS:
        names = [*names[:3], "...", names[-1]]
        return f"It was kept for {' '.join(['--step', *names])}"
    return f"It was kept for --step {' or '.join(names)}"


@torch.no_grad()
def log_probs_after(model: Qwen2, ids: np.ndarray, first: int, temperature: float,
                    folder: Path) -> Tensor:
    """(n, V) log-probs of all tokens after each of the `ids`, from number `first` on."""
    vocabulary = model.config.vocab_size
    if ids.max() >= vocabulary:
        raise UserError(f"{folder} knows {vocabulary} tokens, and the record has a token "
                        f"{ids.max()}, so another model sampled it")
    states = model.model(torch.from_numpy(ids)[None].long())[0, first:]
    return (model.logits(states).float() / temperature).log_softmax(-1)


def refuse_other_model(model: Qwen2, record: StepRecord, config: Json, folder: Path) -> None:
    """Raise an error if the first answer of a step has other log-probs under this model."""
    temperature = config.get("columns_temperature", 1)
    prompt, tokens = record.prompts[int(record.answers["group"][0])], record.tokens_of(0)
    tokens = tokens.where(slice(COMPARED))
    ids = tokens["token_id"]
    read = np.concatenate([prompt, ids[:-1]])
    log_prob = log_probs_after(model, read, len(prompt) - 1, temperature, folder)
    own = log_prob.gather(1, torch.from_numpy(ids)[:, None])[:, 0]
    gap = np.abs(own.numpy() - tokens["log_prob"]).mean()
    if gap > SAME_MODEL:
        raise UserError(f"the log-probs of {folder} differ by {gap:.2g} on average from those on "
                        f"record, so another model sampled step {record.step}, or its tokens have "
                        "other numbers there")
