"""Writes a model with additions (lab/engine/lora.py) as an ordinary model, and its additions for
other programs. This project never reads adapter/: a run goes on from the A and B in its trainer/.

    config.json, model.safetensors         an ordinary model, in which each W is W + (alpha / r) B A
    adapter/adapter_model.safetensors      A and B, under the names of `peft`
    adapter/adapter_config.json            their rank, and the name of the model they were added to

The additions have a folder of their own, because `transformers` adds those that it finds beside a
model: they would count twice.
"""
import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lab.engine.errors import read_json
from lab.engine.lora import ALPHA, additions, frozen_parameters, merged_parameter, rank_of
from lab.engine.model_folder import write_config, write_tensors
from lab.engine.model import Qwen2

ROWS = 4096  # of a tensor, which `write_float32` converts at a time


def write_lora_folder(model: Qwen2, folder: Path, base: str) -> None:
    """Write an ordinary model that computes the same, and below it the additions. `base` is the
    name of the model that they were added to. The model is in float32, because rounded to bfloat16
    most of a small addition would be lost."""
    write_config(model, folder, torch.float32)
    shapes = {name: parameter.shape for name, parameter in frozen_parameters(model).items()}
    write_float32(folder / "model.safetensors", shapes, partial(merged_parameter, model))
    write_adapter(model, folder / "adapter", base)


def write_adapter(model: Qwen2, folder: Path, base: str) -> None:
    """Write A and B, and the names that `peft` gives them."""
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, module in additions(model):
        tensors[f"base_model.model.{name}.lora_A.weight"] = module.A
        tensors[f"base_model.model.{name}.lora_B.weight"] = module.B
    write_tensors(folder / "adapter_model.safetensors", tensors)
    names = sorted({name.rpartition(".")[2] for name, _ in additions(model)})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
              "r": rank_of(model), "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none",
              "target_modules": names, "inference_mode": True}
    text = json.dumps(config, indent=2) + "\n"
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def name_of_model(folder: Path) -> str:
    """The name of a model on a hub, such as Qwen/Qwen2.5-0.5B, if its folder tells it; else the
    folder's name. It is no path, because other machines have other ones."""
    folder = folder.resolve()
    for part in folder.parts:  # the hub's cache: models--Qwen--Qwen2.5-0.5B/snapshots/7ae55760
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/", 1)
    name = read_json(folder / "config.json").get("_name_or_path")
    if isinstance(name, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        return name
    return f"Qwen/{folder.name}" if folder.name.startswith("Qwen") else folder.name


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
