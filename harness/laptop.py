"""Settings of a large model, if its folder has no recipe.json: they suit a laptop.

Unless other settings are typed, the model learns Countdown with two numbers, and its answer is an
expression without any thinking, because this is what it can learn within minutes. On a GPU it is
the same task, so that the same command shows the same learning, only faster. For other prompts and
tasks a GPU has no such settings: it is fast enough for the usual ones.
"""
from harness.record import Json
from qwen2_model import is_fast_in_bfloat16

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
