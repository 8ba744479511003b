"""The folder of a model with additions (engine/lora.py): it has A and B, and names the model.

    config.json                  of the model, as in its own folder
    adapter_model.safetensors    A and B, under the names of `peft`, which opens the folder
    adapter_config.json          the rank, and where the model is: its base

The base is read from its own folder. A digest in adapter_model.safetensors tells whether it is the
model to which A and B were added. `write_merged_folder` writes an ordinary model that computes the
same.
"""
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import UserError, read_json
from engine.lora import ALPHA, add_lora, additions, frozen_parameters, merged_parameter, rank_of
from engine.model_folder import (ADAPTER, ADAPTER_CONFIG, base_of, copy_finite, has_adapter, opened,
                                 read_model_folder, stored_tensors_of, write_config, write_tensors)
from qwen2_model import Qwen2

ROWS = 4096  # of a tensor, which `write_float32` converts at a time


def rank_in(folder: Path) -> int:
    """The rank in adapter_config.json, if it is of additions that this program computes."""
    path = folder / ADAPTER_CONFIG
    config = read_json(path)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is int and rank >= 1 and alpha == ALPHA:
        return rank
    wrong = f"lora_alpha {alpha!r:.80} is not implemented here, only {ALPHA:g}"
    if alpha == ALPHA:
        wrong = f"the rank r {rank!r:.80} should be a whole number of at least 1"
    raise UserError(f"{path}: {wrong}")


def read_with_adapter(folder: Path, device: torch.device | str) -> Qwen2:
    """Load the base of a folder, and its additions."""
    rank, base, path = rank_in(folder), base_of(folder), folder / ADAPTER
    if not base.is_dir() or has_adapter(base):
        raise UserError(f"{folder} has only what LoRA adds to the model {base}, and there is no "
                        "such model folder. Put it back, or write its new place into "
                        f"base_model_name_or_path of {folder / ADAPTER_CONFIG}")
    model = read_model_folder(base, device)
    if metadata_of(path).get("base") != digest_of_model(model):
        raise UserError(f"{path} was added to another model than the one in {base}")
    add_lora(model, rank)
    found, wanted = stored_tensors_of(path), adapter_tensors(model)
    shapes = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    if {name: tensor.shape for name, tensor in found.items()} != shapes:
        raise UserError(f"{path} does not have the tensors of rank {rank} for the model in "
                        f"{base}")
    for name, tensor in wanted.items():
        copy_finite(tensor, name, found[name])
    return model


def metadata_of(path: Path) -> dict[str, str]:
    """The texts that `write_tensors` wrote beside the tensors."""
    with opened(path) as file:
        return dict(file.metadata() or {})


def write_adapter_folder(model: Qwen2, folder: Path, base: Path) -> None:
    """Write the additions of a model, and the names that `peft` gives them. `base` is the folder of
    the model."""
    write_config(model, folder, torch.float32)
    names = sorted({name.rpartition(".")[2] for name, _ in additions(model)})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM",
              "base_model_name_or_path": str(base.absolute()), "r": rank_of(model),
              "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none", "target_modules": names,
              "inference_mode": True}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_tensors(folder / ADAPTER, adapter_tensors(model), base=digest_of_model(model))


def write_merged_folder(model: Qwen2, folder: Path) -> None:
    """Write an ordinary model that computes the same, as any program opens it. It is in float32,
    because rounded to bfloat16 most of a small addition would be lost."""
    write_config(model, folder, torch.float32)
    shapes = {name: parameter.shape for name, parameter in frozen_parameters(model).items()}
    write_float32(folder / "model.safetensors", shapes, partial(merged_parameter, model))


def adapter_tensors(model: Qwen2) -> dict[str, Tensor]:
    """A and B under the names of `peft`."""
    tensors: dict[str, Tensor] = {}
    for name, module in additions(model):
        tensors[f"base_model.model.{name}.lora_A.weight"] = module.A
        tensors[f"base_model.model.{name}.lora_B.weight"] = module.B
    return tensors


def digest_of_model(model: Qwen2) -> str:
    """A digest of one row of each of the model's own parameters, rounded to bfloat16. It is enough
    to tell two models apart, and does not depend on the type in which they are kept."""
    digest = hashlib.sha256()
    for parameter in frozen_parameters(model).values():
        row = parameter.detach()[:1] if parameter.dim() > 1 else parameter.detach()
        digest.update(row.bfloat16().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


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
