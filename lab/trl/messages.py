"""Messages of other trainers as texts. A prompt is made of them by the chat template of the model's
folder (lab/harness/chat_template.py)."""
from lab.engine.errors import UserError


def own_text(messages: list[dict], where: str) -> str:
    """The text of an answer that is a single message of the model. Between several turns stands
    what a template made of them, and nobody knows which of it was sampled."""
    message = messages[0] if len(messages) == 1 else {}
    known = {key for key, value in message.items() if value is not None}
    if known != {"role", "content"} or message["role"] != "assistant":
        raise UserError(f"{where}: its answer is more than one text of the model. Turns, thoughts "
                        "and calls of tools that stand beside it are not imported")
    return message["content"]
