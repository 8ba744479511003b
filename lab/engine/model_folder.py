"""Reads and writes a model's folder for a run beyond the book: on any device, and in other types.

The folder is that of qwen2_model.py, which refuses what it does not compute.
"""
from collections.abc import Mapping
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
    """The config of a model's folder, which is one."""
    refuse_other_folder(folder)
    return qwen2_model.read_config(folder)


def refuse_other_folder(folder: Path) -> None:
    """Refuse what people take for a model's folder, and say what it is and what they can do. What
    its files of weights lack is said when they are loaded (qwen2_model.py)."""
    if folder.is_file() and folder.suffix != ".gguf":
        raise UserError(f"{folder} is a file: --model takes its folder, {folder.parent}")
    if reason := another_kind(folder):
        raise UserError(f"{folder} {reason}")
    index = folder / "model.safetensors.index.json"
    if index.exists() and not (folder / "model.safetensors").exists():
        named = {str(name) for name in read_json(index).get("weight_map", {}).values()}
        missing = sorted(name for name in named if not (folder / name).exists())
        if missing:
            raise UserError(f"{folder} lacks {len(missing)} of the {len(named)} files that "
                            f"{index.name} names, such as {missing[0]}: download them again")
    for file in (folder / "tokenizer.json", *sorted(folder.glob("*.safetensors"))):
        if file.is_file():
            refuse_damaged(file)


def another_kind(folder: Path) -> str:
    """What this is, if it is no folder with a model's config and weights; else empty."""
    def has(pattern: str) -> bool:
        return any(folder.glob(pattern))

    if folder.suffix == ".gguf" or has("*.gguf") and not has("*.safetensors"):
        return ("is GGUF, a format for inference whose weights are rounded. The folder of the same "
                "model with model.safetensors is needed, which its publisher has under another "
                "name, often without -GGUF at its end")
    if has("adapter_config.json") and not has("config.json"):
        return ("is an adapter of PEFT, which is no whole model: merge it into its model with "
                "merge_and_unload() of PEFT and save_pretrained, and name that folder")
    config = read_json(folder / "config.json") if has("config.json") else {}
    if "mitigation" in config or of_steps(folder.glob("*")):
        checkpoints = of_steps([*folder.glob("*"), *folder.glob("checkpoints/*")])
        if not checkpoints:
            return "is the folder of a run. It has no checkpoint"
        return f"is the folder of a run. Its newest model is {checkpoints[max(checkpoints)]}"
    if "quantization_config" in config:
        return ("is quantised, and rounded weights cannot be trained here. The folder of the model "
                "that was quantised is needed")
    has_weights = any(map(has, ("*.safetensors", "*.index.json")))
    if has("pytorch_model*.bin") and not has_weights:
        return ("has its weights as pytorch_model.bin, which is a pickle, and such a file can run "
                "code, so it is not opened. from_pretrained and save_pretrained of transformers "
                "write it as model.safetensors")
    return ""  # the book says what else is missing


def refuse_damaged(file: Path) -> None:
    with open(file, "rb") as opened:
        if opened.read(8) == b"version ":
            raise UserError(f"{file} is a Git LFS pointer and not the file itself: `git lfs "
                            "pull` in its folder brings the file")
    if file.suffix != ".safetensors":
        return
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
    instead of the model's own of these names: those of a trained model that is kept are rounded.
    Where somebody trains some layers alone, the others are written, too."""
    tensors = dict(model.named_parameters()) | dict(parameters or {})
    written: Any = SimpleNamespace(config=model.config, named_parameters=tensors.items)
    save_model(written, Path(folder))
