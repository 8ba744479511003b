"""Writes a model with additions (lab/engine/lora.py) as an ordinary model, in which each W is
W + (alpha / r) B A. A run goes on from the A and B in its trainer/."""
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lab.engine.lora import merged_parameter
from lab.engine.model import Qwen2
from qwen2_model import save_config

ROWS = 4096  # of a tensor, which `write_float32` converts at a time


def write_lora_folder(model: Qwen2, folder: Path) -> None:
    """Write an ordinary model that computes the same. It is in float32, because rounded to bfloat16
    most of a small addition would be lost."""
    save_config(model.config, folder)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()
              if not name.endswith((".A", ".B"))}
    write_float32(folder / "model.safetensors", shapes, partial(merged_parameter, model))


def write_float32(path: Path, shapes: Mapping[str, torch.Size],
                  tensor_of: Callable[[str], Tensor]) -> None:
    """Write a safetensors file of float32 numbers. Its tensors are asked for by name, one after the
    other, and converted a part at a time, because the library's own function would need all of them
    at once.

    The file is the header's length in 8 bytes, the header in JSON, and the numbers.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * shape.numel()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in shapes:
            for rows in tensor_of(name).split(ROWS):
                file.write(rows.float().cpu().contiguous().numpy().data)
