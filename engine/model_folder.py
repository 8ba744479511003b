"""Reading a Hugging Face folder of a Qwen2, Qwen2.5 or dense Qwen3 model; writing its tensors.

`read_config` returns the values of config.json that the transformer is built from, each checked.
`read_headers` reads names and shapes from the files of weights, and `check_headers` compares: every
tensor must have its parameter in the model, and every parameter its tensor. Only then is memory
taken, and `load_weights` copies the numbers. What is not implemented (rope scaling, sliding
windows, other activations, quantized weights) is refused with a sentence that names it.
`write_tensors` writes one tensor after the other, so that with --shard no process ever holds the
whole model.
"""
import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import UserError
from engine.files import is_file, read_json
from engine.sharded import holds_for_all, is_part, own_part, part_for, whole

MODEL_TYPES = ("qwen2", "qwen3")
OUTPUT = "lm_head.weight"
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads")
OPTIONAL = ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "bos_token_id",
            "pad_token_id")
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")  # of safetensors
NAME_OF_TYPE = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16",
                torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
                torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
EXACT = 2 ** 24  # float32 has every whole number up to here: tokens and positions pass through it
MOST_UNITS = 2 ** 20
MOST_LAYERS = 1000
MOST_HEADS = 4096
MOST_HEAD_DIM = 4096
MOST_ROPE_THETA = 1e12


def read_config(folder: Path) -> dict:
    """The arguments of ModelConfig, from config.json and generation_config.json."""
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get("model_type") not in MODEL_TYPES:
        kind = shortened(raw.get("model_type"))
        raise UserError(f"{path}: model_type {kind} is not implemented here")
    check_values(raw, path)
    refuse_what_is_not_implemented(raw, path)
    values = {name: raw[name] for name in (*REQUIRED, *OPTIONAL) if name in raw}
    rope_theta = rope_of(raw).get("rope_theta", raw.get("rope_theta", 10000.0))
    return {**values, "model_type": raw["model_type"], "head_dim": head_dim_of(raw, path),
            "rope_theta": float(rope_theta), "eos_token_id": read_stop_tokens(raw, folder)}


def head_dim_of(raw: dict, path: Path) -> int:
    """head_dim of config.json; without it, what `transformers` takes. It is even, because rotations
    need pairs of numbers."""
    size = raw.get("head_dim")
    if size is None and raw["model_type"] == "qwen3":
        size = 128
    if size is None:
        size = raw["hidden_size"] // raw["num_attention_heads"]
    if size < 2 or size % 2:
        raise UserError(f"{path}: the size of a head, {size}, should be an even number")
    return size


def rope_of(raw: dict) -> dict:
    """The rotary settings, in the older or the newer spelling."""
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def check_values(raw: dict, path: Path) -> None:
    """Stop before anything is built, if a value that the model is built from makes no sense."""
    rope = rope_of(raw)
    checks = {
        "vocab_size": is_whole(raw.get("vocab_size"), EXACT),
        "hidden_size": is_whole(raw.get("hidden_size"), MOST_UNITS),
        "intermediate_size": is_whole(raw.get("intermediate_size"), MOST_UNITS),
        "num_hidden_layers": is_whole(raw.get("num_hidden_layers"), MOST_LAYERS),
        "num_attention_heads": is_whole(raw.get("num_attention_heads"), MOST_HEADS),
        "num_key_value_heads": is_whole(raw.get("num_key_value_heads"), MOST_HEADS),
        "head_dim": raw.get("head_dim") is None or is_whole(raw["head_dim"], MOST_HEAD_DIM),
        "rms_norm_eps": is_between(raw.get("rms_norm_eps", 1e-6), 1e-30, 1),
        "max_position_embeddings": is_whole(raw.get("max_position_embeddings", 1), EXACT),
        "tie_word_embeddings": type(raw.get("tie_word_embeddings", False)) is bool,
        "rope_theta": is_between(raw.get("rope_theta", 1.0), 1, MOST_ROPE_THETA),
        "rope_scaling": isinstance(raw.get("rope_scaling") or {}, dict),
        "rope_parameters": isinstance(raw.get("rope_parameters") or {}, dict)}
    refuse_wrong(checks, raw, path)
    checks = {
        "rope_parameters": is_between(rope.get("rope_theta", 1.0), 1, MOST_ROPE_THETA),
        "layer_types": are_texts(raw.get("layer_types") or []),
        "max_window_layers": type(raw.get("max_window_layers", 0)) is int,
        "bos_token_id": is_token(raw.get("bos_token_id"), raw),
        "pad_token_id": is_token(raw.get("pad_token_id"), raw)}
    refuse_wrong(checks, raw, path)


def refuse_wrong(checks: dict[str, bool], raw: dict, path: Path) -> None:
    for key, is_right in checks.items():
        if not is_right:
            raise UserError(f"{path} has no sensible value for {key} {shortened(raw.get(key))}")


def is_whole(value, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def is_between(value, least: float, most: float) -> bool:
    return type(value) in (int, float) and least <= value <= most


def are_texts(values) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def is_token(value, raw: dict) -> bool:
    """Whether it is a token number of this vocabulary, or none at all."""
    return value is None or type(value) is int and 0 <= value < raw["vocab_size"]


def refuse_what_is_not_implemented(raw: dict, path: Path) -> None:
    """Stop at settings of other models, which would change what is computed."""
    full_layers = raw.get("max_window_layers", 28)
    has_window = raw.get("sliding_window", 4096) and full_layers < raw["num_hidden_layers"]
    refused = {
        "rope_scaling": not is_plain_rope(raw.get("rope_scaling")),
        "rope_parameters": not is_plain_rope(raw.get("rope_parameters")),
        "partial_rotary_factor": raw.get("partial_rotary_factor", 1.0) != 1.0,
        "layer_types": set(raw.get("layer_types") or []) - {"full_attention"},
        "use_sliding_window": raw.get("use_sliding_window") and has_window,
        "hidden_act": raw.get("hidden_act", "silu") != "silu",
        "attention_dropout": raw.get("attention_dropout"),
        "attention_bias": raw.get("attention_bias") and raw["model_type"] == "qwen3",
        "quantization_config": raw.get("quantization_config"),
        "num_key_value_heads": raw["num_attention_heads"] % raw["num_key_value_heads"]}
    for key, is_refused in refused.items():
        if is_refused:
            raise UserError(f"{path}: {key} {shortened(raw.get(key))} is not implemented here")


def is_plain_rope(rope: dict | None) -> bool:
    """Whether these rotary settings ask for nothing but a base frequency."""
    rope = rope or {}
    return (set(rope) <= {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
            and rope.get("rope_type", rope.get("type", "default")) == "default"
            and rope.get("partial_rotary_factor", 1.0) == 1.0)


def read_stop_tokens(raw: dict, folder: Path) -> tuple[int, ...]:
    """eos_token_id of the generation config: in instruct models it lists more than config.json."""
    path = folder / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if is_file(path) else None
    if ids is None:
        ids = raw.get("eos_token_id")
    if ids is None:
        ids = []
    listed = ids if isinstance(ids, list) else [ids]
    if not all(is_token(token, raw) and token is not None for token in listed):
        raise UserError(f"{folder}: eos_token_id {shortened(ids)} should be a token number below "
                        f"vocab_size {raw['vocab_size']}, or a list of them")
    return tuple(listed)


def weight_files(folder: Path) -> list[Path]:
    """The files of weights: a single one, or those that an index names."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if is_file(single):
        return [single]
    if not is_file(index):
        raise UserError(f"{folder} has neither {single.name} nor {index.name} (weights in pickle "
                        "files are not read)")
    file_of = read_json(index).get("weight_map")
    is_map = isinstance(file_of, dict) and len(file_of) > 0
    if not is_map or not are_texts(list(file_of.values())):
        raise UserError(f"{index} has no weight_map of tensors to files")
    paths = [folder / name for name in sorted(set(file_of.values()))]
    for path in paths:
        if path.parent != folder or not is_file(path):
            raise UserError(f"{index} names {shortened(path.name)}, and no such file is beside it")
    return paths


@dataclass(frozen=True)
class Header:
    """What the header of a file says of one of its tensors."""
    path: Path
    shape: tuple[int, ...]
    kind: str  # F32, BF16, ...


def read_headers(folder: Path) -> dict[str, Header]:
    """The header of every tensor of the folder, by name."""
    headers = {}
    for path in weight_files(folder):
        for name, header in headers_of(path).items():
            if name in headers:
                raise UserError(f"{folder} has {name} twice, in {headers[name].path.name} and in "
                                f"{path.name}")
            headers[name] = header
    return headers


def headers_of(path: Path) -> dict[str, Header]:
    headers = {}
    with opened(path) as file:
        for name in file.keys():
            part = file.get_slice(name)
            headers[name] = Header(path, tuple(part.get_shape()), part.get_dtype())
    return headers


@contextmanager
def opened(path: Path):
    """The safetensors file; `with` turns what is wrong with it into one sentence."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read, it may be cut off: {error}") from None


def check_layers(headers: dict[str, Header], layers: int, folder: Path) -> None:
    """Stop before a module is made for each layer, if there are more layers than tensors."""
    if layers > len(headers):
        raise UserError(f"{folder}: config.json asks for {layers} layers, the files have no more "
                        f"than {len(headers)} tensors")


def check_headers(headers: dict[str, Header], model: torch.nn.Module, folder: Path) -> None:
    """Stop before memory is taken, unless every tensor has a parameter of its name and shape, and
    every parameter a tensor."""
    shapes = {name: tuple(place.shape) for name, place in model.named_parameters()}
    refuse_names(sorted(set(shapes) - set(headers)), f"{folder} lacks")
    if model.lm_head is None:  # the embeddings may be in the files a second time, as output matrix
        shapes[OUTPUT] = tuple(model.output_matrix.shape)
    refuse_names(sorted(set(headers) - set(shapes)),
                 f"{folder} has, beyond what config.json asks for,")
    for name, header in headers.items():
        if header.shape != shapes[name]:
            raise UserError(f"{header.path}: {name} has shape {header.shape}, config.json asks for "
                            f"{shapes[name]}")
        if header.kind not in FLOAT_TYPES:
            raise UserError(f"{header.path}: {name} holds {header.kind}, only float64, float32, "
                            "float16 and bfloat16 are read")


def refuse_names(names: list[str], what: str) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        listed = ", ".join(name[:100] for name in names[:5])
        raise UserError(f"{what} {listed}{more}")


def take_memory(model: torch.nn.Module, device, dtype: torch.dtype) -> None:
    """Give a model on the meta device parameters with memory that is not filled yet.

    Module.to_empty does that, too, but first imports a library of symbolic mathematics. So only
    --shard uses it.
    """
    if any(map(is_part, model.parameters())):
        model.to_empty(device=device).to(dtype)
        return
    for module in model.modules():
        for name, place in module.named_parameters(recurse=False):
            memory = torch.empty(place.shape, device=device, dtype=dtype)
            setattr(module, name, torch.nn.Parameter(memory))


def load_weights(model: torch.nn.Module, headers: dict[str, Header], folder: Path) -> None:
    """Copy the folder's tensors into the model's parameters of the same name.

    If the model uses its embeddings as output matrix, the files may hold them a second time under
    that name. The two have to be equal.
    """
    places = dict(model.named_parameters())
    has_second_copy = model.lm_head is None and OUTPUT in headers
    if has_second_copy:
        places[OUTPUT] = torch.empty_like(model.output_matrix)
    for path in {header.path: None for header in headers.values()}:
        with opened(path) as file:
            for name in file.keys():
                copy_tensor(places[name], file.get_tensor(name), name, path)
    if has_second_copy and not are_equal(places[OUTPUT], model.output_matrix):
        raise UserError(f"{folder} has, beyond what config.json asks for, {OUTPUT} (not the "
                        "embeddings, although tie_word_embeddings is true)")


@torch.no_grad()
def copy_tensor(place: torch.Tensor, tensor: torch.Tensor, name: str, path: Path) -> None:
    """Copy a tensor to its place; with --shard, this process's rows of it. Numbers are refused if
    they are not finite in the type of the place."""
    part = own_part(place)
    part.copy_(part_for(place, tensor))
    is_finite = True
    if part.numel():
        ends = torch.stack(torch.aminmax(part))  # needs no memory; both are NaN if a number is
        is_finite = bool(ends.isfinite().all())
    if not holds_for_all(is_finite, place):
        raise UserError(f"{path}: {name} holds numbers that are not finite in {place.dtype}")


def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return holds_for_all(torch.equal(own_part(one), own_part(other)), one)


def write_tensors(path: Path | None, tensors: dict[str, torch.Tensor], **metadata: str) -> None:
    """Write a safetensors file: the length of the header, the header, all bytes. With --shard all
    processes have to call this; those without a path only give their parts."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # all aligned
    tensors = {name: tensors[name] for name in names}
    with open(path or os.devnull, "wb") as file:
        contents = header_of(tensors, metadata)
        header = json.dumps(contents, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors.values():
            numbers = whole(tensor.detach())
            if path:
                numbers = numbers.cpu().contiguous().reshape(-1)
                file.write(numbers.view(torch.uint8).numpy())


def header_of(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> dict:
    """What the file says of each tensor: its type, its shape, and where its bytes stand."""
    header = {}
    if metadata:
        header["__metadata__"] = metadata
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in NAME_OF_TYPE:
            raise UserError(f"{name} holds {tensor.dtype}, which is not written to a file")
        start = end
        end += tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAME_OF_TYPE[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [start, end]}
    return header
