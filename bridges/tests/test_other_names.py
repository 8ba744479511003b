"""The files of settings that an earlier experiment and GRPO-Zero have."""
import pytest

from bridges.other_names import IN_FILES
from conftest import ROOT, refusal
from harness.command_line import read_flags
from harness.settings import OPTIONS, make_settings


def settings_of(*argv):
    return make_settings(read_flags(list(map(str, argv))))


PUBLISHED = """\
model:
  # a comment
  pretrained_model_path: "Qwen3-0.6B"
  device: "cuda"
  dtype: bfloat16
data:
  path: "Countdown-Tasks-3to4"
  test_size: 128

training:
  random_seed: 1337
  max_prompt_len: 256
  max_gen_len: 512  # Shorter
  batch_size: 64
  num_questions_per_batch: 8
  micro_batch_size: 4
  max_grad_norm: 1.0
  learning_rate: 5.0e-6  # Lower
  weight_decay: 0.0
  betas: [0.9, 0.999]
  ckpt_dir: "ckpt_instrumented"
  log_dir: "logs_instrumented"
  skip_unfinished_episodes: true
  ckpt_save_interval: 50
  eval_interval: 10
  memory_efficient_adamw: true
  credit_log_dir: "credit_logs"
  credit_save_interval: 10
  max_steps: 100
"""


@pytest.fixture
def yaml(tmp_path):
    """Writes a file of settings."""
    def write(text):
        (tmp_path / "config.yaml").write_text(text)
        return tmp_path / "config.yaml"
    return write


def test_a_published_file_is_read_as_it_stands(yaml):
    settings = settings_of("--config", yaml(PUBLISHED))
    expected = {
        "model": "Qwen3-0.6B", "device": "cuda", "dtype": "bfloat16", "eval_tasks": 128,
        "seed": 1337, "max_new_tokens": 512, "questions": 8, "answers": 8, "micro_batch": 4,
        "max_grad_norm": 1.0, "learning_rate": 5e-6, "weight_decay": 0.0, "drop_unfinished": True,
        "checkpoint_every": 50, "eval_every": 10, "offload_optimizer": True, "steps": 100}
    assert {name: getattr(settings, name) for name in expected} == expected
    assert settings.method_flags["prompt"] == "original"
    assert settings.method_flags["data"] == "Countdown-Tasks-3to4.jsonl"


def test_every_name_is_one_of_a_setting():
    ours = [name for name in IN_FILES.values() if name]
    assert set(ours) <= {*OPTIONS, "data"} and len(set(ours)) == len(ours)


@pytest.mark.parametrize("text, said", [
    ("training:\n  warmup: 3", "line 2: 'warmup: 3' is no setting that is known here"),
    ("training:\n  - 1", "line 2: '- 1' is no setting"), ("seed: 3", "line 1: 'seed: 3' is no"),
    ("training:\n  betas: [0.9, 0.95]", "training.betas should be [0.9, 0.999]"),
    ("training:\n  batch_size: 64", "64 should be a multiple of num_questions_per_batch None"),
    ("training:\n  batch_size: 20\n  num_questions_per_batch: 8", "20 should be a multiple of"),
    ("training:\n  max_gen_len: many", "--max_new_tokens 'many' should be a whole number")])
def test_what_cannot_be_taken_over_is_named(yaml, text, said):
    assert said in refusal(settings_of, "--config", yaml(text))


@pytest.mark.parametrize("name, differs", [
    ("qwen2.5-0.5b", {"data": None, "model": "models/Qwen2.5-0.5B-Instruct",
                      "drop_unfinished": False, "offload_optimizer": False}),
    ("qwen2.5-3b", {"data": None, "model": "models/Qwen2.5-3B-Instruct", "questions": 32,
                    "max_new_tokens": 1024, "learning_rate": 1e-5, "micro_batch": 2, "steps": 300,
                    "checkpoint_every": 100, "checkpointing": True, "drop_unfinished": False})])
def test_the_settings_that_ship_are_those_of_the_published_runs(yaml, name, differs):
    """Beside the file above, what is said here and nothing else; a model can still be named."""
    published = settings_of("--config", yaml(PUBLISHED)).to_json()
    shipped = settings_of("--config", ROOT / f"models/{name}.json").to_json()
    assert {key: value for key, value in shipped.items() if value != published[key]} == differs
    other = settings_of("--config", ROOT / f"models/{name}.json", "--model", ROOT / "models/tiny")
    assert (other.model, other.seed) == (str(ROOT / "models/tiny"), 1337)
