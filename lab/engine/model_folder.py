"""Reads and writes a model's folder for a run beyond the book: on any device, and in other types.

The folder is that of qwen2_model.py, which refuses what it does not compute.
"""
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor

import qwen2_model
from lab.engine.errors import UserError
from lab.engine.model import Qwen2, exchange_classes
from qwen2_model import ModelConfig, save_config

LARGE = 200_000_000  # bytes of weights; on a CPU such a model takes minutes for a step


def is_large(folder: Path) -> bool:
    """Whether a model is large, by its files of weights: nothing else of the folder is read yet."""
    files = folder.glob("*.safetensors")
    return sum(file.stat().st_size for file in files) > LARGE


def read_config(folder: Path) -> ModelConfig:
    """The config of a model's folder, whose numbers are such as a model can have."""
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


def read_model_folder(folder: Path | str, device: torch.device | str = "cpu") -> Qwen2:
    """Load the model of a folder that has its weights."""
    read_config(Path(folder))
    model = qwen2_model.load_model(Path(folder))
    exchange_classes(model)
    for parameter in model.parameters():  # out of the file, which may be written meanwhile
        parameter.data = parameter.data.clone()
    return cast(Qwen2, model.to(device))


def write_model_folder(model: Qwen2, folder: Path | str,
                       parameters: Mapping[str, Tensor] | None = None) -> None:
    """Write config and weights. If `parameters` are given, they are written instead of the model's
    own: those of a trained model that is kept are rounded."""
    tensors = parameters or model.state_dict()
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    save_config(model.config, Path(folder), dtype)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, Path(folder) / "model.safetensors", {"format": "pt"})
