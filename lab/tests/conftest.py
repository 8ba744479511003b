"""Small models and run folders that the lab's tests stand on; nothing here is downloaded."""
import dataclasses
import json
import shutil

import pytest
import torch
from tokenizers import AddedToken

import conftest
from conftest import ROOT, SMALL, cut
from countdown_task import TAGS
from grpo import grpo
from lab.engine.model import Qwen2
from qwen2_model import ModelConfig
from lab.engine.model_folder import write_model_folder
from lab.engine.policy import Forward
from lab.engine.sampler import generate
from lab.harness.build import load_policy
from lab.harness.settings import make_settings
from lab.tools.demonstrations import make_tokenizer
from lab_runs import SHORT, WHOLE, run
from small import PROMPTS, hand_made

# fixtures of the book's tests
folder, left_as_found = conftest.folder, conftest.left_as_found


@pytest.fixture
def rollouts(small_model):
    """Two questions, three answers each, of different lengths; rewards spread in the first group
    only."""
    g = generate(small_model, PROMPTS, answers=3, max_new_tokens=14, seed=2,
                 stop_ids=(2, 4, 9, 17, 30, 31, 33))
    reward = torch.tensor([1.1, 0.1, 0.06, 0.1, 0.1, 0.1])
    assert len(set(g.mask.sum(1).tolist())) > 2
    known = {name: value for name, value in vars(g).items() if name != "mask"}
    scores = dict.fromkeys(("reward", "format", "reasoning"), reward)
    batch = hand_made(g.mask, prompt_ids=PROMPTS, group=torch.arange(6) // 3, **known,
                      scores=scores | {"answer": (reward > 1).float()}, section=g.mask.byte(),
                      kind=g.mask.byte(), forward=Forward(small_model, 4))
    return dataclasses.replace(batch, advantage=grpo(batch))


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """The shipped model, ready to be asked by a weighting."""
    return load_policy(make_settings({"model": str(ROOT / "models/tiny"), "max_new_tokens": 60,
                                      "questions": 2, "answers": 3, "threads": 1}))


@pytest.fixture(scope="session")
def small_model():
    """A model with untidy weights: biases and norms away from their defaults, logits far from
    uniform."""
    torch.manual_seed(0)
    model = Qwen2(ModelConfig(vocab_size=50, head_dim=16, tie_word_embeddings=True,
                              eos_token_id=(2,), **SMALL))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model


@pytest.fixture(scope="session")
def learner(tmp_path_factory):
    """A folder with an untrained model and the tiny model's tokenizer, quick enough to train in a
    test. Its tags are whole tokens: random answers meet one now and then, so rewards differ."""
    folder = tmp_path_factory.mktemp("learner")
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=tokenizer.get_vocab_size(), head_dim=16,
                         tie_word_embeddings=True, eos_token_id=(2,), max_position_embeddings=1024,
                         **SMALL | {"num_hidden_layers": 1})
    write_model_folder(Qwen2(config), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    recipe = dict(prompt="short", numbers="3", max_number=15, max_target=99, max_result=150,
                  threads=1, learning_rate=1e-3, questions=4, answers=4, max_new_tokens=32,
                  micro_batch=8, steps=6, eval_tasks=24, eval_every=3, checkpoint_every=2)
    (folder / "recipe.json").write_text(json.dumps(recipe))
    return folder


@pytest.fixture(scope="session")
def whole(learner, tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run("--model", learner, "--out", folder, *WHOLE)
    return folder


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """A run that the tools read: its weights differ between tokens, its answers in length, and
    those that were cut off are dropped."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    run(*SHORT, "--max_new_tokens", "40", "--mitigation", "outcome_conditional", "--loss_norm",
        "sequence", "--drop_unfinished", "--out", folder)
    (folder / "checkpoints/step_backup").mkdir()  # a name that people gave
    return folder


@pytest.fixture
def stopped(whole, tmp_path):
    """The run `whole` as a kill after the fifth of its six steps leaves it."""
    folder = shutil.copytree(whole, tmp_path / "stopped")
    shutil.rmtree(folder / "checkpoints/step_000006")
    cut(folder / "metrics.jsonl", 5)
    cut(folder / "evaluations.jsonl", 4)
    return folder
