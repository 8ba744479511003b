"""The chat template of a model's folder: messages become the text of a prompt.

    [{"role": "user", "content": "Is 3 odd?"}] -> "<|im_start|>user\\nIs 3 odd?<|im_end|>\\n
    <|im_start|>assistant\\n"

A template is written in Jinja. The package jinja2 came with torch, so nothing else is installed,
and its sandbox lets a template compute texts and nothing more. The text is the one that
`transformers` makes of the same folder.
"""
import datetime
import json
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lab.engine.errors import UserError, read_json, read_text

Message = dict[str, Any]  # {"role": "user", "content": "..."}
QWEN = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def chat_template(folder: Path | None) -> str:
    """The template of a folder. One that has none, such as models/tiny, gets Qwen's format, without
    a message of the system."""
    path = folder / "chat_template.jinja" if folder else None
    if path and path.exists():
        return read_text(path)
    known: object = config_of(folder).get("chat_template")
    if isinstance(known, list):  # several, by name
        known = {one.get("name"): one.get("template") for one in known}.get("default")
    return known if isinstance(known, str) else QWEN


def config_of(folder: Path | None) -> Message:
    path = folder / "tokenizer_config.json" if folder else None
    return read_json(path) if path and path.exists() else {}


def is_messages(prompt: object) -> TypeGuard[list[Message]]:
    return (isinstance(prompt, list) and len(prompt) > 0
            and all(isinstance(one, dict) and {"role", "content"} <= one.keys() for one in prompt))


def prompt_of(messages: list[Message], folder: Path | None) -> str:
    """The text of a prompt, up to where the answer begins. If the last message is the assistant's,
    the answer goes on from it. What is None in a message is left out, because a table has every
    field in every row."""
    config = config_of(folder)
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        tokens[name] = token.get("content") if isinstance(token, dict) else token
    try:
        known = []
        for message in messages:
            filled = message | {"content": message.get("content") or ""}
            known.append({name: value for name, value in filled.items() if value is not None})
        begun = known[-1]["content"] if known and known[-1].get("role") == "assistant" else ""
        text = compiled(chat_template(folder)).render(
            messages=known, tools=None, documents=None, add_generation_prompt=not begun, **tokens)
        if begun:  # without what ends a message; a template may strip what it writes
            begun = begun if begun in text else begun.strip()
            text = text[:text.rindex(begun) + len(begun)]
        return text
    except Exception as error:  # a template may raise what it likes
        said = " ".join(str(error).split())[:200]
        raise UserError(f"the chat template of {folder} takes no such messages: {said}") from None


@cache  # a task asks for thousands of prompts
def compiled(template: str) -> Template:
    room = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                         extensions=["jinja2.ext.loopcontrols"])
    room.filters["tojson"] = as_json
    room.globals["raise_exception"] = refuse
    room.globals["strftime_now"] = datetime.datetime.now().strftime
    return room.from_string(template)


def as_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def refuse(message: str) -> None:
    raise TemplateError(message)
