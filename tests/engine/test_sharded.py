"""--shard: parts against the whole. The same gradient, the same files, and no process keeps more
than its part."""
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from test_processes import ARMS, TOLERANCE, measured, ranks_that_agree, side_by_side

from engine import processes
from engine.errors import NotFinite, UserError
from engine.forward import frozen_log_probs
from engine.model_folder import read_config, write_model_folder
from harness.load import load_optimizer, load_policy
from engine.optimizer import clip_and_step
from harness.settings import make_settings
from engine.processes import local_shard, refuse_undefined
from qwen2_model import ModelConfig, Qwen2
from runs import lines
from train import main

ARMS = {name: ARMS[name] for name in ("plain", "kl", "dpo")}
ARMS |= {"trunk": {"advantage": "gae", "critic": "trunk"},
         "measured": {"advantage": "measured", "measured_above": 0.5, "measured_k": 1},
         "checkpointed": {"checkpointing": True}}

def sharded_policy(model: str):
    return load_policy(make_settings({"model": model, "shard": True, "threads": 1}))


def kept_by_this_process(model: str) -> torch.Tensor:
    """Numbers in parameters, in gradients and in either moment, and in the whole model."""
    policy = sharded_policy(model)
    ids = torch.tensor([[5, 6, 7]])
    policy.model.model(ids).square().sum().backward()
    optimizer = load_optimizer(policy.settings, policy)
    clip_and_step(optimizer, 1.0)
    rollouts = policy.ask(policy.task.training_problems(0, 1, 4), 2, 0)
    frozen_log_probs(policy.model, rollouts, rollouts.own_rows(), 2)  # leaves nothing whole
    parameters = list(policy.model.parameters())
    moments = [optimizer.state[p] for p in parameters if p.grad is not None]
    tensors = [parameters, [p.grad for p in parameters if p.grad is not None],
               [state["exp_avg"] for state in moments],
               [state["exp_avg_sq"] for state in moments]]
    counts = [sum(local_shard(tensor).numel() for tensor in part) for part in tensors]
    return torch.tensor([*counts, sum(p.numel() for p in parameters)])


def stops_at_a_hole(model: str) -> torch.Tensor:
    """Whether this process stops where a number is not finite that the last process keeps."""
    parameters = list(sharded_policy(model).model.parameters())
    with torch.no_grad():
        if processes.rank() == processes.count() - 1:
            local_shard(parameters[0])[0, 0] = float("nan")
    try:
        refuse_undefined("a parameter is", *parameters)
    except NotFinite:
        return torch.tensor(True)
    return torch.tensor(False)


def found_by_rank(model: str) -> dict[str, torch.Tensor]:
    found = measured(model, ARMS, shard=True)
    return found | {"kept": kept_by_this_process(model), "stopped": stops_at_a_hole(model)}


@pytest.fixture(scope="module")
def untied(learner, tmp_path_factory):
    """The learner with an output matrix of its own."""
    folder = tmp_path_factory.mktemp("untied") / "model"
    shutil.copytree(learner, folder)
    config = {**vars(read_config(learner)), "tie_word_embeddings": False}
    torch.manual_seed(1)
    write_model_folder(Qwen2(ModelConfig(**config)), folder)
    return folder


def test_parts_give_the_gradient_of_the_whole(learner, tmp_path):
    """Five questions do not divide by two: one of the processes has passes that are empty."""
    for found in ranks_that_agree(found_by_rank, ARMS, str(learner), tmp_path):
        kept = found["kept"]
        assert abs(kept[0] * 2 / kept[-1] - 1) < 0.02  # what does not divide is uneven
        assert 0 < kept[1] <= kept[0] and kept[1] == kept[2] == kept[3]
        assert found["stopped"]


def test_a_run_in_parts_leaves_the_folder_of_a_whole_one(untied, tmp_path):
    """Made by two processes, gone on with by a single one that keeps all. After the first step the
    parameters differ by rounding, and so may what is sampled with them: of the second one only the
    names and shapes are compared."""
    flags = ["--model", untied, "--checkpoint_every", 1, "--eval_every", 0, "--threads", 1]
    side_by_side(tmp_path, *flags, "--steps", 1, "--shard", "--out", tmp_path / "parts")
    main(["--resume", str(tmp_path / "parts"), "--steps", "2", "--shard", "no"])
    main([*map(str, flags), "--steps", "2", "--out", str(tmp_path / "whole")])
    assert any(line["gradient_norm"] for line in lines(tmp_path / "whole/metrics.jsonl"))
    for name, prefix, times in (("model", "model.", 1), ("trainer/state", "exp_avg.", 1),
                                ("trainer/state", "exp_avg_sq.", 2)):  # a square doubles it
        assert far_apart(tmp_path, f"step_000001/{name}.safetensors", prefix) < times * TOLERANCE
        whole, parts = (load_file(tmp_path / run / f"checkpoints/step_000002/{name}.safetensors")
                        for run in ("whole", "parts"))
        assert {key: tensor.shape for key, tensor in whole.items()} == {
            key: tensor.shape for key, tensor in parts.items()}
    configs = [json.loads((tmp_path / name / "checkpoints/step_000002/config.json").read_text())
               for name in ("whole", "parts")]
    assert configs[0] == configs[1]


def far_apart(folder, name: str, prefix: str) -> float:
    """The distance of these tensors in the two runs, all as one vector, relative to its norm. The
    keys' biases have no gradient but rounding, which AdamW makes as large as any other."""
    files = [load_file(folder / run / "checkpoints" / name) for run in ("whole", "parts")]
    assert set(files[0]) == set(files[1])
    names = [key for key in files[0] if key.startswith(prefix)]
    whole, parts = [torch.cat([file[key].double().flatten() for key in names]) for file in files]
    return float((parts - whole).norm() / whole.norm())


def test_a_process_alone_has_nothing_to_share(learner):
    said = "--shard splits a model between processes, and there is only one"
    with pytest.raises(UserError, match=said):
        sharded_policy(str(learner))
