"""Messages of other trainers as texts: a prompt by the chat template of the model's folder, which
transformers fills in. Nothing is downloaded, no code of a folder runs."""
from functools import cache
from pathlib import Path

from bridges.http_client import one_line
from engine.errors import UserError


@cache
def tokenizer_of(folder: Path):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def prompt_text(messages: list[dict], folder: Path) -> str:
    """With the beginning of an answer."""
    try:
        return tokenizer_of(folder).apply_chat_template(messages, tokenize=False,
                                                        add_generation_prompt=True)
    except Exception as error:  # a folder may lack, and a template raise, what it likes
        raise UserError(f"the chat template of {folder}, which transformers fills in, takes no "
                        f"such messages: {one_line(error)}") from None


def own_text(messages: list[dict], where: str) -> str:
    """Of an answer that is one text of the model. Between several turns stands what a template made
    of them, and nobody knows which of it was sampled."""
    known = [{key for key, value in message.items() if value is not None} for message in messages]
    if known != [{"role", "content"}] or messages[0]["role"] != "assistant":
        raise UserError(f"{where}: its answer is more than one text of the model; turns, thoughts "
                        "and calls of tools that stand beside it are not imported")
    return messages[0]["content"]
