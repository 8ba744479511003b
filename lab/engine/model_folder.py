"""Reads and writes a model's folder: config.json, and the weights as safetensors files.

A folder is refused, with a sentence that says why, if it asks for something that qwen2_model.py
does not compute, or if its tensors are not those that its config.json asks for. Everything that can
be checked is checked before memory is taken.
"""
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from reprlib import repr as shortened
from typing import NamedTuple, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lab.engine.errors import UserError, did_you_mean, read_json, refuse_pipe
from lab.engine.model import ModelConfig, Qwen2

Number = TypeVar("Number", bound=float)  # float, int or bool: all are floats to a type checker

# The largest number of each type that config.json may hold. For int it is 2^24, because positions
# are computed in float32, in which whole numbers are exact up to there.
LARGEST: dict[type, float] = {int: 2 ** 24, float: 1e12}
OUTPUT, EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"


def read_model_folder(folder: Path | str, device: torch.device | str = "cpu") -> Qwen2:
    """Load the model of a folder that has its weights."""
    folder = Path(folder)
    config, found = read_config(folder), stored_tensors(folder)
    last = f"model.layers.{config.num_hidden_layers - 1}."
    # checked first, because to make a million layers would take hours
    if not any(name.startswith(last) for name in found):
        raise UserError(f"{folder} lacks {last[:-1]}: config.json asks for "
                        f"{config.num_hidden_layers} layers")
    with torch.device("meta"):  # no memory until it is known that the files fit the config
        model = Qwen2(config)
    if wrong := next(faults(folder, found, model), ""):  # known before memory is taken
        raise UserError(wrong)
    if model.is_large:
        size = sum(path.stat().st_size for path in {tensor.path for tensor in found.values()})
        print(f"reading {folder}: {size / 1e9:.1f} GB", file=sys.stderr, flush=True)
    take_memory(model, device)
    load_weights(model, found)
    return model


def write_model_folder(model: Qwen2, folder: Path | str,
                       parameters: Mapping[str, Tensor] | None = None) -> None:
    """Write config and weights. If `parameters` are given, they are written instead of the model's
    own: those of a trained model that is kept are rounded."""
    tensors = parameters or model.state_dict()
    write_config(model, Path(folder), next(iter(tensors.values())).dtype)
    write_tensors(Path(folder) / "model.safetensors", tensors, format="pt")


def write_config(model: Qwen2, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json into a folder, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    name = str(dtype).removeprefix("torch.")
    config = {**model.config.to_json(), "dtype": name, "torch_dtype": name}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def how_to_get(folder: Path) -> str:
    """The way to a model that is not here. Two words with a slash are its name on a hub."""
    is_of_qwen = folder.name.startswith("Qwen")
    if len(folder.parts) == 2 and (is_of_qwen or not folder.parent.exists()):
        name = f"Qwen/{folder.name}" if is_of_qwen else folder
        return (f"to get it: hf download {name} --local-dir models/{folder.name}, and then "
                f"--model models/{folder.name}")
    return "docs/real_models.md says how to get one"


def refuse_no_model(folder: Path) -> None:
    """Raise if there is no model in this folder, and name those that lie in folders below it."""
    if not folder.is_dir():
        raise UserError(f"there is no model folder {folder}{did_you_mean(folder)} "
                        f"({how_to_get(folder)})")
    if not (folder / "config.json").exists():
        found = ", ".join(sorted(str(path.parent) for path in folder.glob("*/config.json")))
        raise UserError(f"{folder} is no model folder: it has no config.json. Model folders in it: "
                        f"{found or 'none'}")


def read_config(folder: Path) -> ModelConfig:
    """Read config.json and generation_config.json, and check each value."""
    refuse_no_model(folder)
    path = folder / "config.json"
    raw = read_json(path)
    model_type = raw.get("model_type")
    if model_type not in ("qwen2", "qwen3"):
        raise UserError(f"{path}: model_type {shortened(model_type)} is not implemented here")
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}  # older, newer spelling
    if not isinstance(rope, dict):
        rope = {"no object": rope}  # which is not implemented
    if "rope_theta" in rope:
        raw["rope_theta"] = rope["rope_theta"]

    def number(key: str, wanted: type[Number]) -> Number:
        default = getattr(ModelConfig, key, None)
        value = raw.get(key, default)
        allowed = (int, float) if wanted is float else (wanted,)
        if isinstance(value, (int, float)) and type(value) in allowed:
            is_sensible = wanted is bool or 0 < value <= LARGEST[wanted]
            if is_sensible:
                return wanted(value)
        raise UserError(f"{path} has no sensible value for {key} {shortened(value)}")

    hidden_size, heads = number("hidden_size", int), number("num_attention_heads", int)
    if raw.get("head_dim") is None:  # the same default as in `transformers`
        raw["head_dim"] = 128 if model_type == "qwen3" else hidden_size // heads
    config = ModelConfig(
        number("vocab_size", int), hidden_size, number("intermediate_size", int),
        number("num_hidden_layers", int), heads, number("num_key_value_heads", int),
        number("head_dim", int), str(model_type), number("rms_norm_eps", float),
        number("rope_theta", float), number("max_position_embeddings", int),
        number("tie_word_embeddings", bool))
    if key := not_implemented(raw, rope, config):
        raise UserError(f"{path}: {key} {shortened(raw[key])} is not implemented here")
    return with_tokens(config, raw, folder)


def not_implemented(raw: dict[str, object], rope: dict[str, object],
                    config: ModelConfig) -> str | None:
    """The name of the first setting that this file does not implement and that would change what is
    computed, or None. A setting that is absent or empty counts as supported."""
    supported = {"partial_rotary_factor": 1.0, "use_sliding_window": False, "hidden_act": "silu",
                 "attention_dropout": 0.0, "quantization_config": None,
                 "attention_bias": config.model_type == "qwen2",
                 "layer_types": ["full_attention"] * config.num_hidden_layers}
    found = []
    for key, supported_value in supported.items():
        value = raw.get(key)
        if value and value != supported_value:
            found.append(key)
    supported_rope = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0,
                      "rope_theta": config.rope_theta}
    if not rope.items() <= supported_rope.items():
        found.append("rope_scaling" if raw.get("rope_scaling") else "rope_parameters")
    if config.num_attention_heads % config.num_key_value_heads:
        found.append("num_key_value_heads")
    if config.head_dim < 2 or config.head_dim % 2:  # rotations need pairs
        found.append("head_dim")
    return next(iter(found), None)


def with_tokens(config: ModelConfig, raw: dict[str, object], folder: Path) -> ModelConfig:
    """Add bos, pad and the tokens that end an answer. Those that end an answer are read from
    generation_config.json if it exists, because an instruct model lists more of them there than in
    config.json."""
    generation = folder / "generation_config.json"
    ends = read_json(generation).get("eos_token_id") if generation.exists() else None

    def tokens(key: str, value: object) -> tuple[int, ...]:
        """The checked token numbers in a value: a list, a single number, or null."""
        numbers = value if isinstance(value, list) else [value]
        if value is None:
            numbers = []
        if not all(type(token) is int and 0 <= token < config.vocab_size for token in numbers):
            raise UserError(f"{folder}: {key} {shortened(value)} should hold a token number below "
                            f"vocab_size {config.vocab_size}")
        return tuple(numbers)

    def first_token(key: str) -> int | None:
        return next(iter(tokens(key, raw.get(key))), None)

    bos, pad = first_token("bos_token_id"), first_token("pad_token_id")
    eos = tokens("eos_token_id", raw.get("eos_token_id") if ends is None else ends)
    return replace(config, bos_token_id=bos, pad_token_id=pad, eos_token_id=eos)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, which may be one or several with an index."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if index.exists():
        named = read_json(index).get("weight_map")
        if isinstance(named, dict) and all(isinstance(name, str) for name in named.values()):
            names = sorted(set(named.values()))
            for name in names:
                if Path(name).name != name:
                    raise UserError(f"{index} names {name!r:.80}, which is not in its folder")
            return [folder / name for name in names]
        wrong = f"{index} should say in weight_map which file has each tensor"
    else:
        wrong = (f"{folder} has neither {single.name} nor {index.name} (weights in pickle files "
                 "are not read)")
    raise UserError(wrong)


@contextmanager
def opened(path: Path) -> Iterator[safe_open]:
    refuse_pipe(path)
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    with opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file, not read yet."""
    path: Path
    shape: tuple[int, ...]
    type: str

    def read(self, name: str) -> Tensor:
        with opened(self.path) as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        found |= stored_tensors_of(path)
    return found


def stored_tensors_of(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file."""
    found: dict[str, StoredTensor] = {}
    with opened(path) as file:
        for name in file.keys():
            tensor = file.get_slice(name)
            found[name] = StoredTensor(path, tuple(tensor.get_shape()), tensor.get_dtype())
    return found


def faults(folder: Path, found: dict[str, StoredTensor], model: Qwen2) -> Iterator[str]:
    """What is wrong with the stored tensors: a name, a shape or a type that is not the model's.
    Tied embeddings may be stored a second time, as the output matrix."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if missing := sorted(set(shapes) - set(found)):
        yield f"{folder} lacks {', '.join(missing[:5])}"
    shapes.setdefault(OUTPUT, shapes[EMBEDDINGS])
    if unknown := sorted(set(found) - set(shapes)):
        yield (f"{folder} has tensors that config.json does not ask for: "
               f"{', '.join(unknown[:5])}")
    for name, tensor in found.items():
        if tensor.shape != shapes[name]:
            yield (f"{tensor.path}: {name} has shape {tensor.shape}, config.json asks for "
                   f"{shapes[name]}")
        if tensor.type not in ("F64", "F32", "F16", "BF16"):
            yield (f"{tensor.path}: {name} holds {tensor.type}, only float64, float32, float16 and "
                   "bfloat16 are read")


def take_memory(model: Qwen2, device: torch.device | str) -> None:
    """Allocate memory for the parameters. Module.to_empty does the same, but it would first import
    a library of symbolic mathematics."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                setattr(module, name, nn.Parameter(torch.empty(parameter.shape, device=device)))


def load_weights(model: Qwen2, found: dict[str, StoredTensor]) -> None:
    for name, parameter in model.named_parameters():
        copy_finite(parameter, name, found[name])
    if OUTPUT in found and model.lm_head is None:  # a second copy of tied embeddings
        matrix, embeddings = found[OUTPUT].read(OUTPUT), found[EMBEDDINGS].read(EMBEDDINGS)
        if not torch.equal(matrix, embeddings):
            raise UserError(f"{found[OUTPUT].path} has a tensor that config.json does not ask for: "
                            f"{OUTPUT}, which differs from the embeddings, although "
                            "tie_word_embeddings is true")


@torch.no_grad()
def copy_finite(parameter: Tensor, name: str, stored: StoredTensor) -> None:
    """Copy a stored tensor into a parameter, in whose type all its numbers should be finite."""
    parameter.copy_(stored.read(name))
    if not parameter.numel():
        return
    extremes = torch.stack(torch.aminmax(parameter))  # NaN if any number is
    if not extremes.isfinite().all():
        raise UserError(f"{stored.path}: {name} holds numbers that are not finite in "
                        f"{parameter.dtype}")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write a safetensors file."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(on_cpu, path, metadata or None)
    except SafetensorError as error:  # a full disk
        raise UserError(f"cannot write {path}: {error}") from None
