"""What needs `transformers`, where it is installed: the chat template of a model folder, and the
numbers of models that are not implemented here. Nothing is downloaded, no code of a folder runs.
"""
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from engine.errors import UserError
from engine.forward import LOGITS_AT_ONCE
from engine.rollouts import Rollouts
from engine.sampler import Distribution


def is_installed() -> bool:
    return find_spec("transformers") is not None


def chat_template(folder: Path) -> Callable[..., str] | None:
    """What makes a text of messages, and of the beginning of an answer if `asks`; or None."""
    if not is_installed():
        return None
    from transformers import AutoTokenizer
    tokenizer = loaded(AutoTokenizer, folder)
    if tokenizer.chat_template is None:
        return None

    def write(messages: list[dict], asks: bool) -> str:
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False,
                                                 add_generation_prompt=asks)
        except Exception as error:  # a template may raise what it likes
            raise UserError(f"the chat template of {folder} takes no such messages: "
                            f"{error}") from None

    return write


def load_model(folder: Path, device):
    from transformers import AutoModelForCausalLM
    return loaded(AutoModelForCausalLM, folder, dtype=torch.float32).to(device).eval()


def loaded(kind, folder: Path, **more):
    from transformers.utils import logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return kind.from_pretrained(str(folder), local_files_only=True, **more)
    except Exception as error:  # of many kinds, by what a folder lacks
        raise UserError(f"transformers cannot load {folder}: "
                        f"{' '.join(str(error).split())}") from None


@torch.no_grad()
def with_facts(model, rollouts: Rollouts) -> Rollouts:
    """The batch with log-prob, entropy and collision of each token, an answer at a time."""
    facts = torch.zeros(3, *rollouts.mask.shape, device=rollouts.mask.device)
    size = max(1, LOGITS_AT_ONCE // model.config.get_text_config().vocab_size)
    for b, length in enumerate(rollouts.length.tolist()):
        ids, prompt = rollouts.ids[b, :length], rollouts.prompt_ids[int(rollouts.group[b])]
        whole = torch.cat([ids.new_tensor(prompt), ids])
        logits = model(whole[None], logits_to_keep=length + 1).logits[0, :-1]
        parts = [torch.stack(Distribution(z).facts(y))
                 for z, y in zip(logits.split(size), ids.split(size))]
        facts[:, b, :length] = torch.cat(parts, 1)
    return replace(rollouts, log_prob=facts[0], entropy=facts[1], collision=facts[2])
