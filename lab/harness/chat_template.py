"""The chat template of a model's folder: messages become the text of a prompt.

A template is written in Jinja. The package jinja2 came with torch, so nothing else is installed,
and its sandbox lets a template compute texts and nothing more. The text is the one that
`transformers` makes of the same folder.
"""
import datetime
import json
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lab.engine.errors import UserError, read_json, read_text

Message = dict[str, Any]  # {"role": "user", "content": "..."}


def chat_template(folder: Path) -> str | None:
    """The template of a folder; None if it has none."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    known: object = config_of(folder).get("chat_template")
    if isinstance(known, list):  # several, by name
        known = {one.get("name"): one.get("template") for one in known}.get("default")
    return known if isinstance(known, str) else None


def config_of(folder: Path) -> Message:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}


def prompt_of(messages: list[Message], folder: Path) -> str:
    """The text of a prompt, up to where the answer begins. What is None in a message is left out,
    because a table has every field in every row."""
    template, config = chat_template(folder), config_of(folder)
    if template is None:
        raise UserError(f"{folder} has no chat template, which would turn messages into a prompt: "
                        "neither chat_template.jinja nor chat_template in tokenizer_config.json")
    tokens = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        tokens[name] = token.get("content") if isinstance(token, dict) else token
    room = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                         extensions=["jinja2.ext.loopcontrols"])
    room.filters["tojson"] = as_json
    room.globals["raise_exception"] = refuse
    room.globals["strftime_now"] = datetime.datetime.now().strftime
    try:
        known = []
        for message in messages:
            filled = message | {"content": message.get("content") or ""}
            known.append({name: value for name, value in filled.items() if value is not None})
        return room.from_string(template).render(messages=known, tools=None, documents=None,
                                                 add_generation_prompt=True, **tokens)
    except Exception as error:  # a template may raise what it likes
        said = " ".join(str(error).split())[:200]
        raise UserError(f"the chat template of {folder} takes no such messages: {said}") from None


def as_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def refuse(message: str) -> None:
    raise TemplateError(message)
