"""The advantage of a teacher: its log-probs minus the policy's, and which gradient that is."""
import shutil

import pytest
import torch
from conftest import ROOT, refusal
from small import copied, facts_behind, gradients, spoken

from lab.credit.teacher import teacher
from lab.engine.forward import response_log_probs
from lab.engine.model_folder import write_model_folder
from grpo import policy_loss
from lab.engine.update import divergence_k2
from lab.harness.build import make_advantage
from lab.harness.made_of import made_of
from lab.harness.settings import make_settings

TINY = ROOT / "models/tiny"


@pytest.fixture
def other(policy, tmp_path):
    """The folder of a model that differs from the policy a little."""
    model = copied(policy.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.05
    folder = tmp_path / "teacher"
    write_model_folder(model, folder)
    shutil.copy(TINY / "tokenizer.json", folder)
    return folder, model


def test_it_is_log_q_minus_log_p_of_each_token(policy, other):
    """By plain passes over each answer. The mean, with the other sign, is the divergence."""
    folder, model = other
    batch = spoken(policy)
    chosen = teacher(policy, teacher=str(folder))
    found = chosen(batch, policy)
    for b, group in enumerate(batch.group.tolist()):
        n = int(batch.length[b])
        log_q, *_ = facts_behind(model, batch.prompt_ids[group], batch.ids[b, :n].tolist())
        torch.testing.assert_close(found[b, :n], log_q - batch.log_prob[b, :n], atol=2e-5, rtol=0)
    assert not found[~batch.mask].any() and found.abs().max() > 0.1
    assert chosen.metrics["teacher_kl"] == pytest.approx(-float(found[batch.mask].mean()))


def test_its_gradient_is_that_of_the_k2_divergence_from_the_teacher(policy, other):
    """As of --kl 1 --kl_kind k2, had that the teacher in the place of the initial model."""
    folder, _ = other
    batch = spoken(policy)
    gap = teacher(policy, teacher=str(folder))(batch, policy)
    model = copied(policy.model)
    one, N = torch.ones_like(gap), float(batch.mask.sum())
    log_prob = response_log_probs(model, batch, batch.rows, 1.0)
    policy_loss(log_prob, gap, one, batch.mask, N).backward(retain_graph=True)
    by_advantage = gradients(model)
    model.zero_grad()
    kl = divergence_k2(log_prob, (log_prob + gap).detach())
    ((kl * batch.mask).sum() / N).backward()
    torch.testing.assert_close(by_advantage, gradients(model), atol=1e-6, rtol=1e-4)


def test_what_is_refused(policy, tmp_path):
    assert "needs --teacher FOLDER" in refusal(lambda: teacher(policy))
    folder = shutil.copytree(TINY, tmp_path / "other")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("wrong", "wrung"))
    assert "has other tokens than the one that is trained" in refusal(
        lambda: teacher(policy, teacher=str(folder)))
    assert "nowhere" in refusal(lambda: teacher(policy, teacher="nowhere"))


def test_a_run_is_made_of_its_teacher(policy, other):
    folder, _ = other
    s = make_settings({"model": str(TINY), "advantage": "teacher", "teacher": str(folder)})
    assert str(folder / "model.safetensors") in made_of(s)
    assert type(make_advantage(s, policy)).__name__ == "teacher"
