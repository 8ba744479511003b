"""Settings of a large model, if its folder has no recipe.json: they suit a laptop.

Unless other settings are typed, the model learns Countdown with two numbers, and its answer is an
expression without any thinking, because this is what it can learn within minutes. On a GPU it is
the same task, so that the same command shows the same learning, only faster. For other prompts and
tasks a GPU has the usual settings, for which it is fast enough, but larger micro-batches.
"""
from pathlib import Path

import torch

from engine.model_folder import read_config
from harness.record import Json
from qwen2_model import ModelConfig, is_fast_in_bfloat16

# for any other prompt, and for any other task, on a CPU
LAPTOP: Json = {
    "questions": 4, "answers": 8, "max_new_tokens": 128, "micro_batch": 4, "eval_every": 50,
    "eval_tasks": 64, "eval_modes": "sampled", "checkpoint_every": 50}
TWO_NUMBERS: Json = {
    "numbers": "2", "min_number": 2, "max_number": 30, "max_target": 900, "examples": 4,
    "reward_form": "right", "questions": 8, "answers": 8, "micro_batch": 64, "steps": 48,
    "eval_every": 24, "eval_tasks": 250, "eval_modes": "sampled", "checkpoint_every": 0,
    "save_model": True}
# Methods are compared over the first half of these steps. By then plain GRPO solves about two
# thirds of the problems. Later most groups have equal rewards, and then no method can differ.
STEPS_COMPARED = TWO_NUMBERS["steps"] // 2
LAPTOP_BY_PROMPT: Json = {
    "expression": {**TWO_NUMBERS, "max_new_tokens": 12},
    "brief": {**TWO_NUMBERS, "max_new_tokens": 64, "questions": 4, "micro_batch": 32}}
LONGER: Json = {"expression": 32, "brief": 192}  # max_new_tokens with more numbers than two
# In bfloat16 most of a small update is rounded away, so in float32 the same rate moves a model
# several times as far (docs/how_a_run_fails.md).
LAPTOP_RATE: Json = {"bfloat16": 2e-6, "float32": 5e-7}


# Of a GPU's memory the activations of a micro-batch take this share at most. The rest is for the
# weights and AdamW's state, for the sampler, and for other programs.
SHARE_OF_GPU = 1 / 4


def answers_at_once(folder: Path, values: Json) -> int:
    """--micro_batch for a large model on a GPU: as many answers of full length as fit, but at least
    the usual number. A GPU needs as long to start the kernels of few answers as those of many."""
    usual: int = values["micro_batch"]
    tokens, device = values["max_new_tokens"], values["device"]
    gpus = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    is_known = gpus and device in ("cuda", *gpus) and type(tokens) is int and tokens > 0
    if not is_known:
        return usual  # the run is refused later
    of_token = bytes_of_token(read_config(folder), values["dtype"], values["checkpointing"])
    return max(usual, answers_that_fit(device, tokens * of_token))


def answers_that_fit(device: str, of_answer: int) -> int:
    """How many answers a micro-batch on this GPU can have, if each takes so many bytes."""
    memory: int = torch.cuda.get_device_properties(device).total_memory
    return int(SHARE_OF_GPU * memory / of_answer)


def bytes_of_token(config: ModelConfig, dtype: str, checkpointing: bool) -> int:
    """Bytes that an update keeps of a token for its backward pass. A layer keeps about 8 tensors as
    wide as the hidden states and 4 as wide as its MLP. Runs of a 0.5B with 768 to 2,048 tokens at a
    time took what this function says, to half a gigabyte, and 33,000 tokens on a GPU 2% more."""
    of_layer = 8 * config.hidden_size + 4 * config.intermediate_size
    kept: int = config.num_hidden_layers * of_layer
    if checkpointing:
        kept = config.num_hidden_layers * config.hidden_size + of_layer
    return kept * (2 if dtype == "bfloat16" else 4)


def laptop_recipe(given: Json, is_countdown: bool, on_gpu: bool) -> Json:
    """The recipe that suits the settings that are given."""
    dtype = "bfloat16" if on_gpu or is_fast_in_bfloat16() else "float32"
    usual = {} if on_gpu else LAPTOP
    if not is_countdown:
        return {"dtype": dtype, **usual}
    prompt = given.get("prompt", "expression")
    recipe = {"dtype": dtype, "prompt": "expression", **LAPTOP_BY_PROMPT.get(prompt, usual)}
    if prompt in LAPTOP_BY_PROMPT:
        computed_in = given.get("dtype", dtype)
        if computed_in in LAPTOP_RATE:
            recipe["learning_rate"] = LAPTOP_RATE[computed_in]
        if "data" in given or given.get("numbers", "2") != "2":
            recipe["max_new_tokens"] = LONGER[prompt]
    return recipe
