"""TRL's trainer with a weighting of ours: TRL's own run without one, our gradient with one. It is
skipped where TRL is not installed; .ci/run installs it."""
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import lab.tools.page as analyze
from lab.tests.with_trl import INSTALL
from conftest import ROOT
from small import (ASKED, StateIdea, copied, facts_behind, log_probs_behind, put_in, spoken)
from lab.countdown import Problem
from lab.credit.turns import turn_mean
from lab.engine.methods import ADVANTAGES, MITIGATIONS, checked_credit, make
from lab.engine.errors import UserError
from lab.engine.forward import response_log_probs
from lab.engine.policy import Forward, derived_seed
from lab.engine.tokens import THINK
from lab.engine.update import length_scaling
from grpo import policy_loss
from lab.analysis.run_folders import read_columns, read_credit
from lab.harness.build import load_policy
from lab.harness.flags import flags_of
from lab.harness.settings import make_settings
from lab.tests.with_trl import guess_rows
from lab.engine.credited import rescaled_weight
from lab_runs import block, copy_project, program
from runs import lines

trl = pytest.importorskip("trl", reason=INSTALL)

from datasets import Dataset
from lab.trl import trl_trainer
from lab.trl.trl_trainer import CreditGRPOTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

pytestmark = pytest.mark.slow
TINY = str(ROOT / "models/tiny")
PROBLEMS = [ASKED[0], Problem((2, 4, 6, 8), 20), ASKED[1]]  # one prompt is longer


class Gradients(TrainerCallback):
    """Keeps the gradient of each update, before it is forgotten."""

    def __init__(self):
        self.kept = []

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        self.kept.append({name: p.grad.clone() for name, p in model.named_parameters()
                          if p.requires_grad})


def length_reward(completions, **_):
    """It differs within groups."""
    return [len(text) / 100 for text in completions]


def has_hit(completions, **_):
    """1 or None: it says nothing of most answers."""
    return [1.0 if "hit" in text else None for text in completions]


def trained(policy, out, kind=None, steps=1, resume=None, dropout=0.0, model=TINY, rows=None,
            **given):
    """A trainer after so many steps of three problems with four answers each, in two micro-batches,
    and the gradient of each step. What is given is an argument of the trainer or of GRPOConfig."""
    names = ("mitigation", "mitigation_flags", "rescale", "credit", "task", "reward_funcs",
             "peft_config", "advantage", "rollout_func")
    of_trainer = {name: given.pop(name) for name in names if name in given}
    usual = dict(max_steps=steps, per_device_train_batch_size=6, gradient_accumulation_steps=2,
                 num_generations=4, max_completion_length=60, learning_rate=1e-3, use_cpu=True,
                 bf16=False, seed=0, report_to=[], logging_steps=1, save_strategy="no",
                 disable_tqdm=True, shuffle_dataset=False, max_grad_norm=0.0)
    if rows is None:
        rows = [{"prompt": policy.task.prompt_for(problem)} for problem in PROBLEMS * steps]
    gradients = Gradients()
    trainer = (kind or CreditGRPOTrainer)(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attention_dropout=dropout),
        args=trl.GRPOConfig(output_dir=str(out), **usual | given), callbacks=[gradients],
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(model),
        **{"reward_funcs": [length_reward, has_hit], **of_trainer})
    trainer.train(resume_from_checkpoint=resume)
    return trainer, gradients.kept


def with_facts(model, batch):
    """The batch with what this model says of each token: each answer alone, in one forward pass."""
    facts = torch.zeros(3, *batch.mask.shape)
    for row, (group, ids) in enumerate(zip(*batch.groups_and_ids)):
        facts[:, row, :len(ids)] = facts_behind(model, batch.prompt_ids[group], ids)
    log_prob, entropy, collision = facts * batch.mask
    return replace(batch, log_prob=log_prob, entropy=entropy, collision=collision)


def ours(policy, folder, name, flags={}, rescale="mean", loss_norm="token", step=1):
    """Weight and gradient that this lab gives the answers of a TRL run: its own log-probs,
    entropies and weights; TRL's ids, rewards and advantages."""
    model = copied(policy.model)
    forward = Forward(model, 64)
    generator = torch.Generator().manual_seed(derived_seed("credit", 0, step))
    batch = read_credit(folder, step, policy.tokenizer, forward=forward, generator=generator)
    batch = with_facts(model, batch)
    function = MITIGATIONS[name]
    values = {flag: known.default for flag, known in flags_of(function).items()} | flags
    weight, _ = rescaled_weight(make(function, values, policy), name, batch, policy, rescale)
    length_scale = length_scaling(batch.length, loss_norm, 60)
    log_prob = response_log_probs(model, batch, torch.arange(len(batch.ids)))
    policy_loss(log_prob, batch.advantage, weight * length_scale, batch.mask,
                int(batch.mask.sum())).backward()
    return batch, weight, {name: p.grad for name, p in model.named_parameters()}


def flat(gradient):
    return torch.cat([gradient[name].flatten() for name in sorted(gradient)])


def assert_same_vector(found, wanted):
    """Compare all gradients as one vector. Two forward passes agree on few digits of a tiny 1 - p,
    and some weightings use it."""
    assert (flat(found) - flat(wanted)).norm() < 1e-3 * flat(wanted).norm()


def weights_on_file(folder, step=1):
    return read_columns(folder, step)["weight"]


@pytest.mark.numerics
@pytest.mark.parametrize("name, flags, more, norm", [
    ("none", {}, {}, "token"), ("entropy_ratio", {"entropy_beta": 2.0}, {}, "token"),
    ("entropy_ratio", {}, {"loss_type": "grpo"}, "sequence"),
    ("equal_gradient", {}, {"loss_type": "dr_grpo"}, "constant"),
    ("equal_gradient", {}, {"rescale": "gradient"}, "token"),
    ("outcome_conditional", {}, {}, "token"), ("by_kind", {}, {}, "token"),
    ("inverse_logprob_as_published", {}, {}, "token"),
    ("learned_importance", {"importance_warmup": 0}, {}, "token")])
def test_the_gradient_is_ours_on_the_same_batch(policy, tmp_path, name, flags, more, norm):
    """Weights from TRL's numbers and from ours are the same, and so is the gradient of TRL's loss,
    its answers shuffled and cut into micro-batches."""
    _, [found] = trained(policy, tmp_path / "out", mitigation=name, mitigation_flags=flags,
                         credit=tmp_path / "run", **more)
    rescale = "none" if "published" in name else more.get("rescale", "mean")
    batch, weight, wanted = ours(policy, tmp_path / "run", name, flags, rescale, norm)
    assert name == "none" or weight[batch.mask].std() > 0.01
    torch.testing.assert_close(torch.from_numpy(weights_on_file(tmp_path / "run")),
                               weight[batch.mask], rtol=0.01, atol=1e-3)  # 1 - p near 1, squared
    assert_same_vector(found, wanted)


def played(policy, rows, seed):
    """Answers to these rows by our sampler, in TRL's form, and the reward of each."""
    batch = policy.ask(rows, 1, seed=seed)
    _, ids = batch.groups_and_ids
    own = [mask[:len(one)].tolist() for mask, one in zip(batch.mask.int(), ids)]
    return {"prompt_ids": batch.prompt_ids, "completion_ids": ids, "env_mask": own,
            "logprobs": [[0.0] * len(one) for one in ids]}, batch


@pytest.mark.numerics
@pytest.mark.parametrize("advantage", [None, "without_luck", turn_mean])
def test_answers_of_several_turns_are_trained_on_as_ours(tmp_path, advantage):
    """Three games with four answers each, by an environment of TRL's, whose mask has holes. The
    record has them, and the gradient is ours."""
    player, module = str(ROOT / "models/guesser"), "lab.tests.with_trl.guess_rows"
    policy = load_policy(make_settings({"model": player, "task": module, "questions": "3"}))
    rows = [dict(guess_rows.problems[i]) for i in (1, 4, 6)]
    games = [row for row in rows for _ in range(4)]
    answers, batch = played(policy, games, seed=5)
    T = int(batch.written.sum(1).max())
    _, [gradient] = trained(
        policy, tmp_path / "out", model=player, rows=rows,
        reward_funcs=lambda **_: batch.reward.tolist(), rollout_func=lambda *_: answers,
        per_device_train_batch_size=12, gradient_accumulation_steps=1, max_completion_length=16,
        advantage=advantage, task=module, credit=tmp_path / "run")
    own = read_credit(tmp_path / "run", 1, policy.tokenizer)
    for name in ("ids", "mask", "written"):
        assert getattr(own, name).equal(getattr(batch, name)[:, :T]), name
    assert own.finished.equal(batch.finished) and not own.mask.equal(own.written)
    assert own.paid.equal(batch.paid[:, :T])
    for name in ("log_prob", "entropy", "collision"):
        torch.testing.assert_close(getattr(own, name), getattr(batch, name)[:, :T], atol=1e-5,
                                   rtol=0)
    mine = replace(batch, group=torch.arange(12) // 4, problems=rows,
                   prompt_ids=batch.prompt_ids[::4], step=1,
                   generator=torch.Generator().manual_seed(derived_seed("credit", 0, 1)))
    function = "dr_grpo" if advantage is None else advantage
    function = ADVANTAGES[function] if isinstance(function, str) else function
    credit = checked_credit(make(function, {}, policy), "mine", mine, policy)
    if advantage is None:  # TRL's z-score has another deviation
        group = own.reward.view(3, 4)
        credit = credit / (group.std(1) + 1e-4).repeat_interleave(4)[:, None]
    torch.testing.assert_close(own.advantage, (credit * batch.mask)[:, :T], atol=1e-5, rtol=1e-4)
    log_prob = response_log_probs(policy.model, mine, torch.arange(12))
    policy_loss(log_prob, credit, torch.ones_like(credit), batch.mask,
                int(batch.mask.sum())).backward()
    assert_same_vector(gradient, {name: p.grad for name, p in policy.model.named_parameters()})


def numbers(trainer):
    """The log without times."""
    return [{key: value for key, value in line.items() if "time" not in key and "second" not in key}
            for line in trainer.state.log_history]


def test_without_a_weighting_the_run_is_trls_own_to_the_digit(policy, tmp_path):
    """Also where credit files are written, which takes a forward pass more. Dropout draws random
    numbers in each."""
    plain, wanted = trained(policy, tmp_path / "plain", trl.GRPOTrainer, steps=2, dropout=0.1)
    for name, credit in ("without", None), ("with", tmp_path / "run"):
        watched, found = trained(policy, tmp_path / name, steps=2, dropout=0.1, credit=credit)
        assert numbers(plain) == numbers(watched), name
        assert all(torch.equal(flat(a), flat(b)) for a, b in zip(wanted, found, strict=True)), name


def test_a_run_of_trl_is_read_token_by_token(policy, tmp_path):
    """Numbers in the files are those of our model; a text that TRL was rewarded for is what the
    tokens spell. analyze.py makes its tables of them."""
    seen = []

    def noted(completions, prompts, **_):
        seen.append((prompts, completions))
        return length_reward(completions)

    folder = tmp_path / "run"
    trained(policy, tmp_path / "out", steps=2, credit=folder, reward_funcs=[noted, has_hit],
            task="countdown_task", reward_weights=[1.0, 0.5])
    prompts, texts = seen[0]
    batch = read_credit(folder, 1, policy.tokenizer)
    told = with_facts(policy.model, batch)
    for name in ("log_prob", "entropy", "collision"):
        torch.testing.assert_close(getattr(batch, name), getattr(told, name), rtol=0, atol=1e-5)
    assert [text.removesuffix("<|im_end|>") for text in batch.answers] == texts
    assert batch.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4 and batch.step == 1
    spelled = [policy.tokenizer.decode(batch.prompt_ids[g], skip_special_tokens=False)
               for g in batch.group.tolist()]
    assert spelled == prompts
    hits = [0.5 * ("hit" in text) for text in texts]
    assert batch.reward.tolist() == pytest.approx(np.add(length_reward(texts), hits).tolist())
    assert batch.scores["has_hit"].tolist() == [2 * hit for hit in hits]
    assert set(batch.scores) == {"reward", "noted", "has_hit"}
    assert [line["trainer_step"] for line in lines(folder / "metrics.jsonl")] == [1, 2]
    assert batch.finished.tolist() == [text.endswith("<|im_end|>") for text in batch.answers]
    own = batch.reward.view(3, 4)
    wanted = (own - own.mean(1, keepdim=True)) / (own.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(batch.advantage[:, 0], wanted.flatten(), rtol=1e-4, atol=1e-5)
    section, kind = policy.task.label(batch.texts[0])
    n = len(section)
    assert batch.section[0, :n].tolist() == section and batch.kind[0, :n].tolist() == kind
    analyze.main([str(folder)])
    assert "Where the gradient went" in (folder / "analysis/page.html").read_text()


def test_the_record_is_at_trls_temperature_and_says_so(policy, tmp_path, capsys):
    folder = tmp_path / "run"
    trained(policy, tmp_path / "out", credit=folder, temperature=0.5)
    batch = read_credit(folder, 1, policy.tokenizer)
    ids = batch.ids[0, :int(batch.length[0])].tolist()
    wanted = log_probs_behind(policy.model, batch.prompt_ids[0], ids, 0.5)[range(len(ids)), ids]
    torch.testing.assert_close(batch.log_prob[0, :len(ids)], wanted.detach(), rtol=0, atol=1e-5)
    analyze.main([str(folder)])
    page = (folder / "analysis/page.html").read_text()
    assert "log p, entropy and s were computed at temperature 0.5" in page


def test_nothing_is_thinking_without_a_tag(policy):
    """In the answer, or at the end of the prompt."""
    batch = spoken(policy, [" hmm. 3 * 5<|im_end|>"], [Problem((3, 5, 7), 22)])
    tag = policy.tokenizer.encode("<think>").ids
    asked = batch.prompt_ids[0][:-len(tag)]
    assert batch.prompt_ids[0] == [*asked, *tag]
    assert THINK in trl_trainer.labelled(batch, policy.tokenizer).section
    other = trl_trainer.labelled(replace(batch, prompt_ids=[asked]), policy.tokenizer)
    assert THINK not in other.section


def test_reward_functions_of_one_name_keep_a_column_each():
    """By hand 0.5 * 1 + 2 * 3 + 1 * 0: a missing reward counts as 0."""
    given = SimpleNamespace(reward_func_names=["length", "length", "reward"],
                            reward_weights=torch.tensor([0.5, 2.0, 1.0]))
    scores = trl_trainer.scores_of(given, torch.tensor([[1.0, 3.0, float("nan")]]))
    assert {name: values.tolist() for name, values in scores.items()} == {
        "length": [1], "length_2": [3], "own_reward": [0], "reward": [6.5]}


def test_lora_alone_is_trained_and_the_model_with_it_on_record(policy, tmp_path, capsys):
    """Before the first step an adapter changes nothing; on the way it says what is on record."""
    peft = pytest.importorskip("peft", reason=INSTALL)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    folder = tmp_path / "run"
    _, gradients = trained(policy, tmp_path / "out", steps=3, credit=folder, peft_config=lora)
    said = capsys.readouterr().out
    assert said.count(f"{folder} keeps a record. To see at any time where the credit went: "
                      f"python {ROOT}/analyze.py {folder}\n") == 1
    assert all("lora" in name for name in gradients[0])
    batch = read_credit(folder, 1, policy.tokenizer)
    told = with_facts(policy.model, batch)
    torch.testing.assert_close(batch.log_prob, told.log_prob, rtol=0, atol=1e-5)
    later = read_credit(folder, 3, policy.tokenizer)
    assert (later.log_prob - with_facts(policy.model, later).log_prob).abs().max() > 1e-4
    analyze.main([str(folder)])
    assert "The task is not on record." in (folder / "analysis/page.html").read_text()


def test_an_answer_that_trl_leaves_out_is_on_record_with_weight_0(policy, tmp_path):
    """mask_truncated_completions; the other answers are weighted among themselves."""
    folder = tmp_path / "run"
    trained(policy, tmp_path / "out", mitigation="entropy_ratio", credit=folder,
            max_completion_length=44, mask_truncated_completions=True)
    batch = read_credit(folder, 1, policy.tokenizer)
    weight = torch.zeros(batch.mask.shape).masked_scatter(
        batch.mask, torch.from_numpy(weights_on_file(folder)))
    assert 0 < batch.finished.sum() < len(batch.finished)
    assert (batch.length[~batch.finished] == 44).all() and not weight[~batch.finished].any()
    told = with_facts(policy.model, batch)
    torch.testing.assert_close(batch.log_prob, told.log_prob, rtol=0, atol=1e-5)
    kept = batch.mask & batch.finished[:, None]
    assert weight[kept].mean() == pytest.approx(1.0, abs=1e-5)


WORKER = """
import sys
sys.path[:0] = [sys.argv[1], *(f"{sys.argv[1]}/{folder}" for folder in ("tests", "lab/tests"))]
from lab.tests.with_trl.test_trl_trainer import TINY, trained
from safetensors.torch import save_file
from lab.harness.build import load_policy
from lab.harness.settings import make_settings
FLAGS = {"importance_warmup": 0}
policy = load_policy(make_settings({"model": TINY}))
trainer, [gradient] = trained(policy, sys.argv[2], credit=f"{sys.argv[2]}/run",
                              mitigation="learned_importance", mitigation_flags=FLAGS,
                              per_device_train_batch_size=3,
                              ddp_backend="gloo")
save_file(gradient, f"{sys.argv[2]}/{trainer.accelerator.process_index}.safetensors")
"""


def test_two_processes_weigh_one_batch(policy, tmp_path):
    """A group is shared by both, prompts and answers of each are padded to their own longest."""
    (tmp_path / "worker.py").write_text(WORKER)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes",
              "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
              "--main_process_port", "0", "worker.py", str(ROOT), str(tmp_path)]
    ended = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=300,
                           env={**os.environ, "ACCELERATE_USE_CPU": "true"})
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("2 processes train together") == 1
    batch, weight, wanted = ours(policy, tmp_path / "run", "learned_importance",
                                 {"importance_warmup": 0})
    assert len(batch.ids) == 12 and weight[batch.mask].mean() == pytest.approx(1, abs=1e-5)
    torch.testing.assert_close(torch.from_numpy(weights_on_file(tmp_path / "run")),
                               weight[batch.mask], rtol=1e-3, atol=1e-4)
    for rank in range(2):
        assert_same_vector(load_file(tmp_path / f"{rank}.safetensors"), wanted)


def test_the_program_on_the_page_works_as_it_stands_there(tmp_path):
    """Pasted with two steps instead of 60."""
    pasted = block("lab/trl/README.md", "max_steps=60")
    folder = copy_project(tmp_path)
    (folder / "models").symlink_to(ROOT / "models")
    (folder / "pasted.py").write_text(pasted.replace("max_steps=60", "max_steps=2"))
    program(folder, "pasted.py")
    assert [line["step"] for line in lines(folder / "runs/trl/metrics.jsonl")] == [1, 2]
    assert len(list((folder / "runs/trl/credit").iterdir())) == 2


@pytest.mark.parametrize("more", [
    {"loss_type": "cispo", "epsilon_high": 5.0}, {"loss_type": "sapo"}, {"loss_type": "bnpo"},
    {"top_entropy_quantile": 0.2}, {"beta": 0.1},
    {"off_policy_mask_threshold": 0.1, "num_iterations": 2}, {"scale_rewards": "batch"},
    {"temperature": 1.5}, {"delta": 2.0, "steps_per_generation": 4}],
    ids=lambda more: "-".join(map(str, more.values())))
def test_what_else_trl_can_do_goes_on_working(policy, tmp_path, monkeypatch, more):
    """A weighting of 3 everywhere, rescaled to 1, is TRL's own run: in each loss, with each mask.
    One that leaves out tokens is another."""
    put_in(monkeypatch, lambda rollouts: torch.full_like(rollouts.log_prob, 3.0), "threes")
    put_in(monkeypatch, lambda rollouts: (rollouts.kind > 1).float(), "some")
    gradients = {}
    # in the first step no answer is of an earlier policy, and the KL is 0
    needs_two = {"beta", "num_iterations", "steps_per_generation"} & more.keys()
    for name in ("none", "threes", "some"):
        gradients[name] = trained(policy, tmp_path / name, steps=2 if needs_two else 1,
                                  mitigation=name, **more)[1]
    for plain, threes, some in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(flat(threes), flat(plain), rtol=1e-4, atol=1e-7)
    assert not torch.allclose(flat(some), flat(plain), rtol=0.1, atol=1e-4)


def test_a_state_goes_on_where_it_was(policy, tmp_path, monkeypatch):
    """A class may keep a state; it lies in TRL's checkpoint, and so does the number of the step."""
    put_in(monkeypatch, StateIdea, "state_idea")
    given = dict(mitigation="state_idea", mitigation_flags={"speed": 0.25}, save_strategy="steps",
                 save_steps=1, max_steps=2, credit=tmp_path / "run")
    whole, _ = trained(policy, tmp_path / "out", steps=2, **given)
    wanted = weights_on_file(tmp_path / "run", 2)
    resumed, _ = trained(policy, tmp_path / "out", steps=2, **given,
                         resume=str(tmp_path / "out/checkpoint-1"))
    assert np.array_equal(weights_on_file(tmp_path / "run", 2), wanted)
    for trainer in (whole, resumed):
        assert trainer.credit.batches == 2 and trainer.credit.weighting.mean > 0
    assert [line["step"] for line in lines(tmp_path / "run/metrics.jsonl")] == [1, 2]


@pytest.mark.parametrize("given, said", [
    ({"mitigation": "entropy_ration"}, "'entropy_ration': choose from none"),
    ({"mitigation": "entropy_ratio", "mitigation_flags": {"beta": 1}},
     "entropy_ratio has no flag beta, it has entropy_beta"),
    ({"mitigation": "entropy_ratio", "importance_sampling_level": "sequence"}, "need 'token'"),
    ({"mitigation": "causal_ablation"}, "needs lab train"),
    ({"mitigation": "attention_credit"}, "no attention. A weighting that uses it needs lab train"),
    ({"mitigation": lambda rollouts: -rollouts.log_prob.abs()}, "is negative"),
    ({"rescale": "sum"}, "'sum': choose from mean")])
def test_what_cannot_be_is_refused_in_a_sentence(policy, tmp_path, given, said):
    with pytest.raises(UserError, match=re.escape(said)):
        trained(policy, tmp_path, **given)


def test_images_are_refused(policy, tmp_path, monkeypatch):
    made = trl.GRPOTrainer._generate_and_score_completions

    def with_images(self, inputs):
        output = made(self, inputs)
        return output | {"pixel_values": output["completion_mask"]}

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_and_score_completions", with_images)
    with pytest.raises(UserError, match="has pixel_values"):
        trained(policy, tmp_path, mitigation="entropy_ratio")


def test_another_trl_is_refused_in_a_sentence(monkeypatch):
    trl_trainer.refuse_other_trl()
    with monkeypatch.context() as patch:
        patch.delattr(trl.GRPOTrainer, "_calculate_rewards")
        with pytest.raises(UserError, match="has no _calculate_rewards"):
            trl_trainer.refuse_other_trl()
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", Gradients.__init__)
    with pytest.raises(UserError, match="only one advantage for each answer"):
        trl_trainer.refuse_other_trl()
