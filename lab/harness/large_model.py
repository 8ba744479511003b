"""The recipe of a large model whose folder has none: this file is imported when one is trained."""
from lab.harness.record import Json
from lab.engine.model import is_fast_in_bfloat16

# Settings of a large model whose folder has no recipe.json. With these it learns Countdown with two
# numbers within minutes, on a CPU too: its answer is an expression, or a brief thinking and one.
EASY: Json = {"numbers": "2", "min_number": 2, "max_number": 30, "max_target": 900, "examples": 4,
              "reward_form": "right", "steps": 48, "eval_every": 24, "eval_tasks": 250,
              "checkpoint_every": 0}
TWO_NUMBERS: dict[str, Json] = {  # by the prompt
    "expression": {**EASY, "questions": 8, "answers": 8, "micro_batch": 64, "max_new_tokens": 12},
    "brief": {**EASY, "questions": 4, "answers": 8, "micro_batch": 32, "max_new_tokens": 64}}
ON_A_LAPTOP: Json = {  # for any other prompt, and for any other task, on a CPU
    "questions": 4, "answers": 8, "max_new_tokens": 128, "micro_batch": 4, "eval_every": 50,
    "eval_tasks": 64, "checkpoint_every": 50}
# On a GPU, which takes as long to start the kernels of 8 answers as those of 32. 32 of 512 tokens
# take 44 GB with a 0.5B (docs/real_models.md).
FOR_A_GPU: Json = {"micro_batch": 32}


def recipe_of_large(given: Json, is_countdown: bool, on_gpu: bool) -> Json:
    """The recipe of a large model whose folder has none. In bfloat16 most of a small update is
    rounded away, so in float32 the same rate moves a model several times as far
    (docs/how_a_run_fails.md)."""
    dtype = "bfloat16" if on_gpu or is_fast_in_bfloat16() else "float32"
    prompt = given.get("prompt", "expression")
    usual = FOR_A_GPU if on_gpu else ON_A_LAPTOP
    if not is_countdown:
        return {"dtype": dtype, **usual}
    recipe = {"dtype": dtype, "prompt": "expression", **TWO_NUMBERS.get(prompt, usual)}
    if prompt not in TWO_NUMBERS:
        return recipe
    is_rounded = given.get("dtype", dtype) == "bfloat16" or str(given.get("lora", 0)) != "0"
    recipe["learning_rate"] = 2e-6 if is_rounded else 5e-7
    if "data" in given or given.get("numbers", "2") != "2":
        recipe["max_new_tokens"] *= 3  # longer expressions
    return recipe
