"""Reading a Hugging Face folder of a Qwen2, Qwen2.5 or dense Qwen3 model.

`read_config` returns the values of config.json that the transformer is built from, each checked.
`load_weights` fills a module: every tensor of the files must have its place in it, and every place
its tensor. What is not implemented (rope scaling, sliding windows, other activations, quantized
weights) is refused with a sentence that names it.
"""
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import UserError
from engine.files import read_json

MODEL_TYPES = ("qwen2", "qwen3")
OUTPUT = "lm_head.weight"
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads")
OPTIONAL = ("rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "bos_token_id",
            "pad_token_id")


def read_config(folder: Path) -> dict:
    """The arguments of ModelConfig, from config.json and generation_config.json."""
    path = folder / "config.json"
    raw = read_json(path)
    if raw.get("model_type") not in MODEL_TYPES:
        raise UserError(f"{path}: model_type {raw.get('model_type')!r} is not implemented here")
    check_values(raw, path)
    refuse_what_is_not_implemented(raw, path)
    head_dim = raw["hidden_size"] // raw["num_attention_heads"]
    if raw["model_type"] == "qwen3":
        head_dim = 128
    values = {name: raw[name] for name in (*REQUIRED, *OPTIONAL) if name in raw}
    rope_theta = rope_of(raw).get("rope_theta", raw.get("rope_theta", 10000.0))
    return {**values, "model_type": raw["model_type"], "head_dim": raw.get("head_dim") or head_dim,
            "rope_theta": float(rope_theta), "eos_token_id": read_stop_tokens(raw, folder)}


def rope_of(raw: dict) -> dict:
    """The rotary settings, in the older or the newer spelling."""
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def check_values(raw: dict, path: Path) -> None:
    """Before anything is built: is every value that the model is built from of its kind?"""
    def whole(value, least=1):
        return type(value) is int and least <= value < 2 ** 31

    def positive(value):
        return type(value) in (int, float) and 0 < value < float("inf")

    def token(value):
        return value is None or whole(value, 0)

    rope = rope_of(raw)
    right = {key: whole(raw.get(key)) for key in REQUIRED}
    right |= {
        "head_dim": raw.get("head_dim") is None or whole(raw["head_dim"]),
        "rms_norm_eps": positive(raw.get("rms_norm_eps", 1e-6)),
        "max_position_embeddings": whole(raw.get("max_position_embeddings", 1)),
        "tie_word_embeddings": type(raw.get("tie_word_embeddings", False)) is bool,
        "rope_theta": positive(raw.get("rope_theta", 1.0)),
        "rope_parameters": isinstance(rope, dict) and positive(rope.get("rope_theta", 1.0)),
        "layer_types": isinstance(raw.get("layer_types") or [], list),
        "bos_token_id": token(raw.get("bos_token_id")),
        "pad_token_id": token(raw.get("pad_token_id"))}
    for key, fine in right.items():
        if not fine:
            raise UserError(f"{path} has no sensible value for {key} {raw.get(key)!r}")


def refuse_what_is_not_implemented(raw: dict, path: Path) -> None:
    window, full_layers = raw.get("sliding_window", 4096), raw.get("max_window_layers", 28)
    has_window = window and full_layers < raw["num_hidden_layers"]
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
            raise UserError(f"{path}: {key} {raw.get(key)!r} is not implemented here")


def is_plain_rope(rope: dict | None) -> bool:
    """Whether these rotary settings ask for nothing but a base frequency."""
    rope = rope or {}
    return (set(rope) <= {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
            and rope.get("rope_type", rope.get("type", "default")) == "default"
            and rope.get("partial_rotary_factor", 1.0) == 1.0)


def read_stop_tokens(raw: dict, folder: Path) -> tuple[int, ...]:
    """eos_token_id of the generation config: in instruct models it lists more than config.json."""
    path = folder / "generation_config.json"
    ids = read_json(path).get("eos_token_id") if path.is_file() else None
    if ids is None:
        ids = raw.get("eos_token_id")
    if ids is None:
        ids = []
    listed = ids if isinstance(ids, list) else [ids]
    if not all(type(token) is int and token >= 0 for token in listed):
        raise UserError(f"{folder}: eos_token_id {ids!r} should be a token number or a list of "
                        "them")
    return tuple(listed)


def weight_files(folder: Path) -> list[Path]:
    """The files of weights: a single one, or those that an index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(f"{folder} has neither {single.name} nor {index.name} (weights in pickle "
                        "files are not read)")
    file_of = read_json(index).get("weight_map")
    is_map = isinstance(file_of, dict) and len(file_of) > 0
    if not is_map or not all(isinstance(name, str) for name in file_of.values()):
        raise UserError(f"{index} has no weight_map of tensors to files")
    return [folder / name for name in sorted(set(file_of.values()))]


def load_weights(model: torch.nn.Module, folder: Path, embeddings: torch.Tensor | None) -> None:
    """Copy the folder's tensors into the model's parameters of the same name.

    `embeddings` is given for a model that uses them as its output matrix, too. Its files may then
    hold that matrix a second time, but not another one.
    """
    places = dict(model.named_parameters())
    needed = set(places)
    output = None if embeddings is None else torch.empty_like(embeddings)
    if output is not None:
        places[OUTPUT] = output
    copied, extra = set(), []
    for path in weight_files(folder):
        in_places, others = copy_tensors(path, places)
        copied |= in_places
        extra += others
    if output is not None and OUTPUT in copied and not torch.equal(output, embeddings):
        extra.append(f"{OUTPUT} (not the embeddings, although tie_word_embeddings is true)")
    refuse_names(sorted(needed - copied), f"{folder} lacks")
    refuse_names(extra, f"{folder} has, beyond what config.json asks for,")


def copy_tensors(path: Path, places: dict[str, torch.Tensor]) -> tuple[set[str], list[str]]:
    """Copy a file's tensors to their places; the names of those, and of tensors without a place."""
    copied, extra = set(), []
    try:
        with safe_open(path, "pt") as file:
            for name in file.keys():
                if name in places:
                    copy_tensor(places[name], file.get_tensor(name), name, path)
                    copied.add(name)
                else:
                    extra.append(name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read, it may be cut off: {error}") from None
    return copied, extra


def refuse_names(names: list[str], what: str) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise UserError(f"{what} {', '.join(names[:5])}{more}")


@torch.no_grad()
def copy_tensor(place: torch.Tensor, tensor: torch.Tensor, name: str, path: Path) -> None:
    if place.shape != tensor.shape:
        raise UserError(f"{path}: {name} has shape {tuple(tensor.shape)}, config.json asks for "
                        f"{tuple(place.shape)}")
    place.copy_(tensor)
