"""The likeliest other tokens at the places of an answer, by the model that sampled it, in words."""
import numpy as np
import torch
from tokenizers import Tokenizer

from analysis.runs import Run
from analysis.tokens import StepRecord
from engine.errors import UserError
from engine.model_folder import read_model_folder
from engine.tokens import token_bytes
from harness.record import find_folder
from tools.helpers.same_model import SAME_MODEL, log_probs_after

NAMED = 4  # so many others


@torch.no_grad()
def likeliest_others(run: Run, sampled_by: str | None, record: StepRecord, tokenizer: Tokenizer,
                     b: int, places: range) -> list[str]:
    """A clause for each of these places of answer b. `sampled_by` is the folder of the model that
    sampled the step, if it was kept."""
    temperature = run["config"].get("columns_temperature", 1)  # of what is on record
    if sampled_by is None:
        return len(places) * [f"not known: the model after step {record.step - 1}, which sampled "
                              "it, was not kept"]
    tokens = record.tokens_of(b)
    prompt = record.prompts[int(record.answers["group"][b])]
    read = np.concatenate([prompt, tokens["token_id"][:places.stop - 1]])
    try:
        folder = find_folder(sampled_by)
        model = read_model_folder(folder)
        first = len(prompt) - 1 + places.start
        log_probs = log_probs_after(model, read, first, temperature, folder)
    except UserError as error:
        return len(places) * [f"not known: {error}"]
    found = []
    for place, log_prob in zip(places, log_probs):
        chosen = int(tokens["token_id"][place])
        p = log_prob.exp()
        if abs(log_prob[chosen] - tokens["log_prob"][place]) > SAME_MODEL:
            found.append(f"not known: for {folder} p is {p[chosen]:.4g}, so another model sampled "
                         "it")
            continue
        others = [token for token in p.topk(NAMED + 1).indices.tolist() if token != chosen]
        found.append(f"the likeliest are {in_words(p, others[:NAMED], tokenizer)} "
                     f"(by {sampled_by})")
    return found


def in_words(p: torch.Tensor, tokens: list[int], tokenizer: Tokenizer) -> str:
    """' 8' 0.3, ' 2' 0.01"""
    pieces = [piece.decode(errors="replace") for piece in token_bytes(tokenizer, tokens)]
    return ", ".join(f"{text!r} {p[token]:.2g}" for text, token in zip(pieces, tokens))
