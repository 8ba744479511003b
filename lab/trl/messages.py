"""Messages of other trainers as texts: a prompt by the chat template of the model's folder, which
`transformers` fills in. Nothing is downloaded, and no code of a folder runs."""
from functools import cache
from pathlib import Path

from engine.errors import UserError


def one_line(text: object) -> str:
    """The words of another program, short enough to be shown."""
    return " ".join(str(text).split())[:200]


@cache
def tokenizer_of(folder: Path):
    from transformers import AutoTokenizer
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def prompt_text(messages: list[dict], folder: Path) -> str:
    """The text of a prompt, up to where the answer begins."""
    try:
        return tokenizer_of(folder).apply_chat_template(messages, tokenize=False,
                                                        add_generation_prompt=True)
    except Exception as error:  # a folder may lack, and a template raise, what it likes
        raise UserError(f"the chat template of {folder}, which transformers fills in, takes no "
                        f"such messages: {one_line(error)}") from None


def own_text(messages: list[dict], where: str) -> str:
    """The text of an answer that is a single message of the model. Between several turns stands
    what a template made of them, and nobody knows which of it was sampled."""
    message = messages[0] if len(messages) == 1 else {}
    known = {key for key, value in message.items() if value is not None}
    if known != {"role", "content"} or message["role"] != "assistant":
        raise UserError(f"{where}: its answer is more than one text of the model. Turns, thoughts "
                        "and calls of tools that stand beside it are not imported")
    return message["content"]
