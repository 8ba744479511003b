"""The algorithm: advantages by hand, the loss against autograd of the formula, the record against the batch."""
import dataclasses

import numpy as np
import pytest
import torch

import grpo
from countdown_task import Problem, load_tokenizer
from grpo import Rollouts, collect, group_z_score, policy_loss, response_log_probs, token_advantage, update, write_credit
from mitigations import MITIGATIONS, token_weight
from qwen2_model import Generation, Qwen2, generate

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]


@pytest.fixture
def rollouts(small_model):
    """Two questions, three answers each, of different lengths; rewards spread in the first group only."""
    g = generate(small_model, PROMPTS, answers=3, max_new_tokens=14, seed=2, stop_ids=(2, 4, 9, 17, 30, 31, 33))
    reward = torch.tensor([1.1, 0.1, 0.06, 0.1, 0.1, 0.1])
    assert len(set(g.mask.sum(1).tolist())) > 2
    return Rollouts(prompt_ids=PROMPTS, texts=[""] * 6, group=torch.arange(6) // 3, **vars(g), section=g.mask.byte(),
                    kind=g.mask.byte(), scores={"reward": reward, "format": reward, "answer": (reward > 1).float(), "reasoning": reward})


def copied(model):
    copy = Qwen2(model.config)
    copy.load_state_dict(model.state_dict())
    return copy


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_twelve_of_sixteen_right():
    reward = torch.tensor([1.0] * 12 + [0.0] * 4)
    advantage = group_z_score(reward, torch.zeros(16, dtype=torch.long))
    assert advantage[0].item() == pytest.approx(0.577, abs=5e-4) and advantage[-1].item() == pytest.approx(-1.732, abs=5e-4)


def test_advantages_by_hand_in_two_interleaved_groups():
    # group 0: 1 and 3, mean 2, std 1; group 1: 0, 0, 3, mean 1, std sqrt(2)
    advantage = group_z_score(torch.tensor([1.0, 0.0, 3.0, 0.0, 3.0]), torch.tensor([0, 1, 0, 1, 1]))
    expected = [-1 / 1.0001, -1 / (2 ** 0.5 + 1e-4), 1 / 1.0001, -1 / (2 ** 0.5 + 1e-4), 2 / (2 ** 0.5 + 1e-4)]
    torch.testing.assert_close(advantage, torch.tensor(expected), atol=1e-6, rtol=0)


@pytest.mark.parametrize("reward", [0.06, 0.1, 1.1, 0.0, 1 / 3])
@pytest.mark.parametrize("count", [2, 3, 7, 16])
def test_groups_without_spread_get_exactly_zero(reward, count):
    """The float32 mean of seven times 0.06 is not 0.06; divided by 1e-4 the difference would be a signal."""
    assert not group_z_score(torch.full((count,), reward), torch.zeros(count, dtype=torch.long)).any()


def test_the_sampler_and_the_training_forward_agree(small_model, rollouts):
    with torch.no_grad():
        log_prob = response_log_probs(small_model, rollouts, torch.arange(6))
    torch.testing.assert_close(log_prob, rollouts.log_prob, atol=1e-4, rtol=0)


def test_the_shift_is_right_where_an_error_of_one_would_show(small_model, rollouts):
    """Each row against its own plain forward pass: logits at position P - 1 + t predict token t."""
    rows = torch.tensor([4, 1])
    with torch.no_grad():
        log_prob = response_log_probs(small_model, rollouts, rows)
        for i, row in enumerate(rows.tolist()):
            prompt, n = PROMPTS[row // 3], int(rollouts.mask[row].sum())
            response = rollouts.tokens[row, :n]
            logits = small_model(torch.tensor([prompt + response.tolist()]))[0]
            for t in range(n):
                expected = logits[len(prompt) - 1 + t].log_softmax(-1)[response[t]]
                assert log_prob[i, t].item() == pytest.approx(expected.item(), abs=1e-5)
    assert not log_prob[~rollouts.mask[rows]].any()


def test_the_loss_by_hand():
    log_prob = torch.tensor([[-1.0, -2.0], [-3.0, -9.0]])
    advantage = torch.tensor([[2.0, 2.0], [-1.0, -1.0]])
    weight = torch.tensor([[1.0, 0.5], [1.0, 7.0]])
    mask = torch.tensor([[True, True], [True, False]])
    assert policy_loss(log_prob, advantage, weight, mask, 3).item() == pytest.approx(-(-2 - 2 + 3) / 3)


class Observer:
    """An optimizer that only looks: the gradient after clipping stays in the model."""
    def __init__(self, model):
        self.model, self.steps = model, 0

    def zero_grad(self, set_to_none=True):
        self.model.zero_grad(set_to_none=set_to_none)

    def step(self):
        self.steps += 1


def run_update(model, rollouts, micro_batch=64, max_grad_norm=0.0, weight=None):
    copy = copied(model)
    observer = Observer(copy)
    weight = token_weight("none", rollouts) if weight is None else weight
    result = update(copy, observer, rollouts, token_advantage("grpo", rollouts), weight, micro_batch, max_grad_norm)
    return copy, observer, result


def test_the_gradient_is_autograd_of_the_formula(small_model, rollouts):
    copy, _, result = run_update(small_model, rollouts)
    other = copied(small_model)
    z = group_z_score(rollouts.scores["reward"], rollouts.group)
    loss = 0
    for row in range(6):
        prompt, n = PROMPTS[row // 3], int(rollouts.mask[row].sum())
        ids = torch.tensor([prompt + rollouts.tokens[row, :n].tolist()])
        log_probs = other(ids)[0, len(prompt) - 1:-1].log_softmax(-1)
        loss = loss - z[row] * log_probs[range(n), ids[0, len(prompt):]].sum()
    (loss / rollouts.mask.sum()).backward()
    torch.testing.assert_close(gradients(copy), gradients(other), atol=1e-6, rtol=1e-4)
    assert result["loss"] == pytest.approx(loss.item() / int(rollouts.mask.sum()), abs=1e-6)
    assert result["gradient_norm"] == pytest.approx(gradients(other).norm().item(), rel=1e-4)
    assert result["sampler_gap"] < 1e-5


def test_the_micro_batch_size_changes_nothing(small_model, rollouts):
    weight = torch.rand(rollouts.mask.shape, generator=torch.Generator().manual_seed(0)) * rollouts.mask
    whole, _, expected = run_update(small_model, rollouts, 64, weight=weight)
    for size in (1, 2, 5):
        part, _, result = run_update(small_model, rollouts, size, weight=weight)
        torch.testing.assert_close(gradients(part), gradients(whole), atol=1e-6, rtol=0)
        assert result["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert result["gradient_norm"] == pytest.approx(expected["gradient_norm"], abs=1e-5)


def test_logits_in_chunks_change_nothing(small_model, rollouts, monkeypatch):
    whole, _, expected = run_update(small_model, rollouts)
    monkeypatch.setattr(grpo, "LOGITS_AT_ONCE", 50 * 4)
    chunked, _, result = run_update(small_model, rollouts)
    torch.testing.assert_close(gradients(chunked), gradients(whole), atol=1e-6, rtol=0)
    assert result["loss"] == pytest.approx(expected["loss"], abs=1e-6)


def test_padding_never_counts(small_model, rollouts):
    whole, _, expected = run_update(small_model, rollouts)
    junk = {name: torch.where(rollouts.mask, getattr(rollouts, name), value)
            for name, value in (("tokens", 3), ("log_prob", -7.0), ("entropy", 5.0), ("collision", 1.0))}
    other, _, result = run_update(small_model, dataclasses.replace(rollouts, **junk))
    assert torch.equal(gradients(whole), gradients(other)) and result == expected


def test_the_norm_reported_is_the_one_before_clipping(small_model, rollouts):
    free, _, expected = run_update(small_model, rollouts)
    clipped, _, result = run_update(small_model, rollouts, max_grad_norm=0.01)
    assert result["gradient_norm"] == pytest.approx(expected["gradient_norm"]) and result["gradient_norm"] > 0.01
    torch.testing.assert_close(gradients(clipped), gradients(free) * 0.01 / result["gradient_norm"], atol=1e-6, rtol=1e-3)


def test_answers_without_advantage_are_not_computed_but_count(small_model, rollouts):
    _, _, result = run_update(small_model, rollouts)
    assert result["trained_tokens"] == rollouts.mask[:3].sum() < rollouts.mask.sum()


def test_a_batch_where_nothing_is_left_is_skipped_and_said(small_model, rollouts):
    rollouts.scores["reward"] = torch.full((6,), 0.06)
    copy, observer, result = run_update(small_model, rollouts)
    assert observer.steps == 0 and result["skipped"] == "every group's answers had equal rewards"
    assert result["gradient_norm"] is None and result["loss"] == 0.0
    rollouts.scores["reward"] = torch.tensor([1.1, 0.1, 0.06, 0.1, 0.1, 0.1])
    _, observer, result = run_update(small_model, rollouts, weight=torch.zeros_like(rollouts.log_prob))
    assert observer.steps == 0 and result["skipped"] == "all weights are 0"


def test_a_gradient_that_is_not_finite_changes_nothing(small_model, rollouts):
    _, observer, result = run_update(small_model, rollouts, weight=torch.full_like(rollouts.log_prob, float("inf")))
    assert observer.steps == 0 and result["skipped"] == "the gradient was not finite"


def test_weights_have_no_gradient_and_none_is_one(rollouts):
    rollouts.log_prob.requires_grad_()
    weight = token_weight("none", rollouts)
    assert not weight.requires_grad and torch.equal(weight, rollouts.mask.float())


def test_the_credit_file_is_the_batch(small_model, rollouts, tmp_path):
    advantage = token_advantage("grpo", rollouts)
    weight = torch.rand(rollouts.mask.shape) * rollouts.mask
    write_credit(tmp_path / "credit" / "step_000001.npz", rollouts, advantage, weight)
    with np.load(tmp_path / "credit" / "step_000001.npz", allow_pickle=False) as file:
        columns = dict(file)
    lengths = rollouts.mask.sum(1).tolist()
    assert columns["episode_start"].tolist() == np.cumsum([0, *lengths[:-1]]).tolist()
    for b, (start, n) in enumerate(zip(columns["episode_start"], lengths)):
        for name, source in (("token_id", rollouts.tokens), ("log_prob", rollouts.log_prob), ("entropy", rollouts.entropy),
                             ("collision", rollouts.collision), ("weight", weight), ("advantage", advantage),
                             ("section", rollouts.section), ("kind", rollouts.kind)):
            np.testing.assert_array_equal(columns[name][start:start + n], source[b, :n].numpy())
    assert columns["reward"].tolist() == rollouts.scores["reward"].tolist()  # as given, not normalised
    assert columns["group"].tolist() == [0, 0, 0, 1, 1, 1] and columns["finished"].dtype == bool
    assert columns["prompt_ids"].tolist() == PROMPTS[0] + PROMPTS[1] and columns["prompt_start"].tolist() == [0, 3]
    dtypes = {name: str(columns[name].dtype) for name in ("token_id", "log_prob", "weight", "advantage", "section", "kind")}
    assert dtypes == {"token_id": "int32", "log_prob": "float32", "weight": "float32", "advantage": "float32",
                      "section": "uint8", "kind": "uint8"}
    assert [p.name for p in (tmp_path / "credit").iterdir()] == ["step_000001.npz"]


def test_a_token_costs_at_most_28_bytes_on_disk(tmp_path):
    generator = torch.Generator().manual_seed(0)
    B, T = 64, 100
    mask = torch.ones(B, T, dtype=torch.bool)
    noise = {name: torch.rand(B, T, generator=generator) for name in ("log_prob", "entropy", "collision")}
    batch = Rollouts([[1] * 14] * 8, [""] * B, torch.arange(B) // 8, torch.randint(0, 150_000, (B, T), generator=generator),
                     mask, mask[:, 0], **noise, section=mask.byte(), kind=torch.randint(0, 7, (B, T), generator=generator).byte(),
                     scores={name: torch.rand(B, generator=generator) for name in ("reward", "format", "answer", "reasoning")})
    path = tmp_path / "credit" / "step_000001.npz"
    write_credit(path, batch, torch.rand(B, T), torch.rand(B, T))
    assert path.stat().st_size / (B * T) <= 28


def test_collect_scores_and_labels_what_was_sampled(learner, monkeypatch):
    """Two problems, two answers each, put in the sampler's mouth: each is scored against its own problem."""
    model, tokenizer = Qwen2.from_pretrained(learner), load_tokenizer(learner)
    texts = [" 3 + 5 = 8</think>\n<answer> 3 + 5</answer><|im_end|>", " no</think>\n<answer> 2 + 4</answer><|im_end|>",
             " no</think>\n<answer> 2 + 4</answer><|im_end|>", " 3 + 5 = 8"]
    ids = [tokenizer.encode(text).ids for text in texts]
    T = max(map(len, ids))
    tokens = torch.tensor([row + [0] * (T - len(row)) for row in ids])
    mask = torch.tensor([[True] * len(row) + [False] * (T - len(row)) for row in ids])
    asked = {}

    def speak(model, prompts, **sampling):
        asked.update(sampling, prompts=prompts)
        return Generation(tokens, mask, torch.tensor([True, True, True, False]), *torch.zeros(3, 4, T))
    monkeypatch.setattr(grpo, "generate", speak)
    rollouts = collect(model, tokenizer, [Problem((3, 5), 8), Problem((2, 4), 6)], "short", 2, max_new_tokens=T, seed=9)
    assert rollouts.scores["answer"].tolist() == [1, 0, 1, 0] and rollouts.group.tolist() == [0, 0, 1, 1]
    assert rollouts.scores["reasoning"].tolist() == [1, 0, 0, 0] and rollouts.texts == texts
    assert rollouts.section[1][mask[1]].tolist() == [1, 0, 0, 0, 2, 2, 2, 0, 0]
    assert rollouts.kind[1][mask[1]].tolist() == [0, 5, 1, 5, 2, 3, 2, 5, 6]
    assert not rollouts.section[3][~mask[3]].any() and asked["seed"] == 9 and len(asked["prompts"]) == 2


def test_the_end_of_turn_stops_also_a_model_whose_own_list_lacks_it(learner, monkeypatch):
    model, tokenizer, asked = Qwen2.from_pretrained(learner), load_tokenizer(learner), {}
    monkeypatch.setattr(model, "config", dataclasses.replace(model.config, eos_token_id=(7,), pad_token_id=None))
    monkeypatch.setattr(grpo, "generate", lambda *args, **sampling: asked.update(sampling) or generate(*args, **sampling))
    collect(model, tokenizer, [Problem((3, 5, 7), 22)], "short", 2, max_new_tokens=3)
    assert set(asked["stop_ids"]) == {7, tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")}


def test_a_weighting_that_is_infinite_beyond_the_mask_or_negative(rollouts, monkeypatch):
    monkeypatch.setitem(MITIGATIONS, "inverse", lambda tokens: 1 / tokens.entropy)
    assert not token_weight("inverse", rollouts)[~rollouts.mask].any()
    monkeypatch.setitem(MITIGATIONS, "negative", lambda tokens: -torch.ones_like(tokens.entropy))
    with pytest.raises(AssertionError, match="negative"):
        token_weight("negative", rollouts)
