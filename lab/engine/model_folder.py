"""Reads and writes a model's folder for a run beyond the book: on any device, and in other types.

The folder is that of qwen2_model.py, which refuses what it does not compute.
"""
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

import qwen2_model
from lab.engine.errors import UserError, read_json
from lab.engine.model import Qwen2, of_lab
from qwen2_model import ModelConfig, save_model
from run import of_steps

LARGE = 200_000_000  # bytes of weights; on a CPU such a model takes minutes for a step


def is_large(folder: Path) -> bool:
    """Whether a model is large, by its files of weights: nothing else of the folder is read yet."""
    files = folder.glob("*.safetensors")
    return sum(file.stat().st_size for file in files) > LARGE


def read_config(folder: Path) -> ModelConfig:
    """The config of a model's folder, whose numbers are such as a model can have."""
    refuse_other_folder(folder)
    try:
        config = qwen2_model.read_config(folder)
    except (AttributeError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{folder}/config.json: {type(error).__name__}: {error}") from None
    for one in fields(config):
        value = getattr(config, one.name)
        is_right = True
        if one.type in (int, float):
            is_right = type(value) in (int, one.type) and 0 < value < float("inf")
        elif one.type is bool:
            is_right = type(value) is bool
        elif one.name == "eos_token_id":
            is_right = all(type(token) is int and 0 <= token < config.vocab_size
                           for token in value)
        if not is_right:
            raise UserError(f"{folder}/config.json: {one.name} should not be {value!r:.80}")
    if config.num_hidden_layers > 1000:  # a million would take hours to make
        raise UserError(f"{folder}: no model has {config.num_hidden_layers} layers")
    return config


def refuse_other_folder(folder: Path) -> None:
    """Refuse what people take for a model's folder, and say what it is and what they can do."""
    if folder.is_file():
        raise UserError(f"{folder} is a file: --model takes its folder, {folder.parent}")
    path = folder / "config.json"
    if path.exists() and "mitigation" in read_json(path):
        checkpoints = of_steps(folder.glob("checkpoints/*"))
        newest = "It has no checkpoint"
        if checkpoints:
            newest = f"Its newest model is {checkpoints[max(checkpoints)]}"
        raise UserError(f"{folder} is the folder of a run. {newest}")
    index = folder / "model.safetensors.index.json"
    if index.exists() and not (folder / "model.safetensors").exists():
        named = {str(name) for name in read_json(index).get("weight_map", {}).values()}
        missing = sorted(name for name in named if not (folder / name).exists())
        if missing:
            raise UserError(f"{folder} lacks {len(missing)} of the {len(named)} files that "
                            f"{index.name} names, such as {missing[0]}: download them again")
    weights = sorted(folder.glob("*.safetensors"))
    for file in filter(Path.is_file, (folder / "tokenizer.json", *weights)):
        with open(file, "rb") as opened:
            if opened.read(8) == b"version ":
                raise UserError(f"{file} is a Git LFS pointer and not the file itself: `git lfs "
                                "pull` in its folder brings the file")
    for file in filter(Path.is_file, weights):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            raise UserError(f"{file} is damaged, or its download was cut: download it again "
                            f"({error})") from None


def read_model_folder(folder: Path | str, device: torch.device | str = "cpu") -> Qwen2:
    """Load the model of a folder that has its weights."""
    read_config(Path(folder))
    model = of_lab(qwen2_model.load_model(Path(folder)))
    for parameter in model.parameters():  # out of the file, which may be written meanwhile
        parameter.data = parameter.data.clone()
    return model.to(device)


def write_model_folder(model: Qwen2, folder: Path | str,
                       parameters: Mapping[str, Tensor] | None = None) -> None:
    """Write config and weights, as the book does. If `parameters` are given, they are written
    instead of the model's own: those of a trained model that is kept are rounded."""
    tensors = parameters or dict(model.named_parameters())
    written: Any = SimpleNamespace(config=model.config, named_parameters=tensors.items)
    save_model(written, Path(folder))
