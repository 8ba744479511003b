"""Reads and writes a model's folder for a run beyond the book: on any device, and in other types.

The folder is that of qwen2_model.py, which refuses what it does not compute.
"""
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch import Tensor

import qwen2_model
from lab.engine.model import Qwen2, exchange_classes
from qwen2_model import save_config


def read_model_folder(folder: Path | str, device: torch.device | str = "cpu") -> Qwen2:
    """Load the model of a folder that has its weights."""
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
    save_config(model.config, Path(folder), next(iter(tensors.values())).dtype)
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_cpu, Path(folder) / "model.safetensors", {"format": "pt"})
