"""Small models and run folders that the tests share; nothing here is downloaded."""
import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pytest
import torch

from qwen2_model import ModelConfig, Qwen2
from warmup import make_tokenizer

SMALL = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(autouse=True, scope="session")
def two_threads():
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def small_model():
    """A model with untidy weights: biases and norms away from their defaults, logits far from uniform."""
    torch.manual_seed(0)
    model = Qwen2(ModelConfig(vocab_size=50, head_dim=16, tie_word_embeddings=True, pad_token_id=0, eos_token_id=(2,), **SMALL))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


@pytest.fixture(scope="session")
def learner(tmp_path_factory):
    """A folder with an untrained model and the tiny model's tokenizer, quick enough to train in a test."""
    folder = tmp_path_factory.mktemp("learner")
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    Qwen2(ModelConfig(vocab_size=tokenizer.get_vocab_size(), head_dim=16, tie_word_embeddings=True, pad_token_id=0,
                      eos_token_id=(2,), max_position_embeddings=1024, **SMALL)).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "recipe.json").write_text(json.dumps({
        "prompt": "short", "numbers": "3", "max_number": 15, "max_target": 99, "max_result": 150, "threads": 1,
        "learning_rate": 1e-3, "questions": 4, "answers": 4, "max_new_tokens": 40, "micro_batch": 8, "steps": 6,
        "eval_tasks": 24, "eval_every": 3, "checkpoint_every": 2, "sample_every": 2}))
    return folder
