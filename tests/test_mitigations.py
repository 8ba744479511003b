"""Every weighting: what must hold for all of them, and each one by hand on a few tokens."""
import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mitigations
from conftest import SPOKEN, copied, gradients, hand_made, spoken
from countdown_task import ANSWER
from grpo import gradient_size, update
from engine.flags import parameters_as_flags
from engine.registry import MITIGATIONS, NEVER_RESCALED
from engine.registry import make as make_choice
from mitigations import token_weight
from engine.errors import UserError
from engine.packing import SharedPrompts
from engine.forward import Forward

ALL = sorted(MITIGATIONS)


def make(name, own, lab):
    """The mitigation with these flags, the others at their defaults."""
    defaults = {flag: meta.default for flag, meta in parameters_as_flags(MITIGATIONS[name]).items()}
    return make_choice(MITIGATIONS[name], defaults | own, lab)


FLAGS = {"learned_importance": {"importance_warmup": 0}, "oracle": {"oracle_k": 1}}


def weights(lab, name, tokens, own=None, **how):
    return token_weight(make(name, FLAGS.get(name, {}) if own is None else own, lab), name, tokens, lab, **how)[0]


@pytest.mark.parametrize("name", ALL)
def test_shape_finite_not_negative_no_gradient_and_nothing_beyond_the_mask(lab, name):
    tokens = spoken(lab)
    for value in (tokens.log_prob, tokens.entropy):
        value.requires_grad_()
    weight = weights(lab, name, tokens)
    assert weight.shape == tokens.mask.shape and weight.dtype == torch.float32 and not weight.requires_grad
    assert weight.isfinite().all() and (weight >= 0).all() and not weight[~tokens.mask].any() and weight.any()


@pytest.mark.parametrize("name", [name for name in ALL if name not in NEVER_RESCALED])
def test_the_mean_is_one_after_rescaling(lab, name):
    tokens = spoken(lab)
    assert weights(lab, name, tokens)[tokens.mask].mean().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_padding_never_counts(lab, name):
    junk = spoken(lab)
    for tensor, value in ((junk.log_prob, -9.0), (junk.entropy, 50.0), (junk.collision, 0.7), (junk.advantage, 4.0), (junk.ids, 7),
                          (junk.section, ANSWER), (junk.kind, 3)):
        tensor.masked_fill_(~junk.mask, value)
    torch.testing.assert_close(weights(lab, name, junk), weights(lab, name, spoken(lab)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ALL)
def test_the_micro_batch_size_changes_nothing(lab, name):
    weight = weights(lab, name, spoken(lab))
    for size in (1, 4):
        torch.testing.assert_close(weights(lab, name, spoken(lab, micro_batch=size)), weight, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("texts", [["<|im_end|>", "<|im_end|>"], [" hmm", " okay."], [SPOKEN[0], "<|im_end|>"], ["</think>\n<answer></answer>", " 3"]])
def test_odd_batches(lab, name, texts):
    """Answers of one token, without <answer>, with nothing in it; rewards all equal, or not."""
    from conftest import ASKED
    tokens = spoken(lab, texts, ASKED[:1])
    weight = weights(lab, name, tokens)
    assert weight.isfinite().all() and weight[tokens.mask].sum() > 0
    nothing = dataclasses.replace(tokens, mask=torch.zeros_like(tokens.mask))
    assert not weights(lab, name, nothing).any()


@pytest.mark.parametrize("name", ["lambda_grpo", "learned_importance", "attention_credit", "causal_ablation", "oracle", "entropy_masking"])
def test_an_answer_that_was_dropped_has_no_part_in_it(lab, name):
    """Its mask is empty: the others get what they would get without it."""
    tokens = spoken(lab)
    tokens = dataclasses.replace(tokens, mask=tokens.mask & (torch.arange(6) != 2)[:, None])
    weight = weights(lab, name, tokens)
    assert not weight[2].any() and weight.isfinite().all() and weight[tokens.mask].mean().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_the_same_generator_gives_the_same_weights(lab, name):
    assert torch.equal(weights(lab, name, spoken(lab)), weights(lab, name, spoken(lab)))


def one_row(**known):
    T = len(next(iter(known.values())))
    return hand_made([[True] * T], **{name: torch.tensor([values]) for name, values in known.items()})


def raw(name, tokens, **own):
    return token_weight(make(name, own, None), name, tokens, rescale="none")[0]


def test_none_is_one():
    assert torch.equal(raw("none", hand_made([[True, True], [True, False]])), torch.tensor([[1.0, 1], [1, 0]]))


@pytest.mark.parametrize("texts, weight", [
    (["a", "<answer>", " 3", "</answer>", "end"], [0.5, 0.5, 1, 1, 1]),
    (["a", "<", "answer", ">", " 3", "</answer>"], [0.5, 0.5, 0.5, 0.5, 1, 1]),   # as real tokenizers cut it
    (["a", "<answer", ">\n", "3"], [0.5, 0.5, 0.5, 1]),                           # a token that touches the tag
    (["<answer>", "</answer>", "<answer>"], [0.5, 1, 1]),                         # the first one counts
    (["a", "b", "<answer>"], [0.5, 0.5, 0.5]), (["a", "b", "</think>"], [0.5, 0.5, 0.5]),
])
def test_outcome_conditional_by_hand(texts, weight):
    tokens = hand_made([[True] * len(texts)], texts=[texts])
    assert raw("outcome_conditional", tokens, think_discount=0.5)[0].tolist() == weight
    assert raw("outcome_conditional", tokens, think_discount=1.0)[0].tolist() == [1] * len(texts)


def test_inverse_logprob_by_hand():
    tokens = one_row(log_prob=[-0.01, -3.0, 0.0])
    torch.testing.assert_close(raw("inverse_logprob", tokens, epsilon=0.1)[0], torch.tensor([1 / 0.11, 1 / 3.1, 10.0]))
    # the numbers of the published form: 8.3 at -0.01 and 0.010 at -3
    torch.testing.assert_close(raw("inverse_logprob_as_published", tokens, epsilon=0.1)[0], torch.tensor([0.1 / 0.11 ** 2, 0.1 / 3.1 ** 2, 10.0]))


def test_the_published_form_is_the_gradient_of_the_weight_that_was_not_detached():
    log_prob = torch.tensor([-0.01, -0.5, -3.0], requires_grad=True)
    (log_prob / (log_prob.abs() + 0.1)).sum().backward()
    torch.testing.assert_close(raw("inverse_logprob_as_published", one_row(log_prob=log_prob.tolist()), epsilon=0.1)[0], log_prob.grad)


def test_the_published_form_is_never_rescaled(lab):
    tokens = spoken(lab)
    name = "inverse_logprob_as_published"
    expected = torch.where(tokens.mask, 0.1 / (tokens.log_prob.abs() + 0.1).square(), 0.0)
    torch.testing.assert_close(weights(lab, name, tokens, {"epsilon": 0.1}, rescale="none"), expected)


def test_the_gradient_size_is_that_of_autograd_also_where_p_is_nearly_one():
    logits = torch.tensor([[3.0, 1.0, -2.0], [18.0, 0.0, 0.0], [-9.0, 0.0, 0.5]], dtype=torch.double, requires_grad=True)
    log_probs = logits.log_softmax(-1)
    log_probs[:, 0].sum().backward()
    collision = log_probs.exp().square().sum(-1)
    size = gradient_size(log_probs[:, 0].detach().float(), collision.detach().float())
    torch.testing.assert_close(size, logits.grad.norm(dim=1).float(), rtol=0.2, atol=0)  # the middle one: float32 knows no better
    torch.testing.assert_close(size[[0, 2]], logits.grad.norm(dim=1)[[0, 2]].float())


def test_equal_gradient_by_hand():
    # two words: p = 0.8, sum p^2 = 0.68, s = sqrt(1 - 1.6 + 0.68) = 0.2 sqrt 2
    weight = raw("equal_gradient", one_row(log_prob=[math.log(0.8)], collision=[0.68]), epsilon=0.1)
    assert weight.item() == pytest.approx(1 / (0.2 * 2 ** 0.5 + 0.1), rel=1e-5)


def looking(tokens, **seen):
    return dataclasses.replace(tokens, forward=SimpleNamespace(look=lambda *_, **__: seen))


def test_attention_credit_by_hand():
    """Five tokens, the last two the answer. Token 0 receives 0.2 and 0.4, token 1 nothing, 2 gets 0.6 and 0, 3 gets 0.3 from the last."""
    attention = torch.zeros(2, 5, 5)
    attention[0, 3, :3], attention[0, 4, :4] = torch.tensor([0.2, 0.0, 0.6]), torch.tensor([0.4, 0.0, 0.0, 0.3])
    tokens = hand_made([[True] * 5, [True, True, False, False, False]], section=torch.tensor([[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]], dtype=torch.uint8))
    received = torch.tensor([0.3, 0.0, 0.3, 0.3, 0.0])
    expected = (0.5 + 2 * received / received.mean()).clamp(0.1, 6.5)
    weight = raw("attention_credit", looking(tokens, attention=attention), credit_scale=2.0)
    torch.testing.assert_close(weight[0], expected)
    torch.testing.assert_close(weight[1, :2], expected.mean().expand(2))  # no answer section: the mean of the others
    high = raw("attention_credit", looking(tokens, attention=attention * 0 + torch.eye(5)[0]), credit_scale=0.5)
    assert high.max() <= 0.5 + 3 * 0.5 and high[tokens.mask].min() >= 0.1


def test_what_is_looked_at_is_zero_beyond_the_mask_and_for_answers_that_were_dropped(lab):
    tokens = spoken(lab)
    seen = tokens.forward.look(tokens, attention=True)
    assert not seen["hidden"][~tokens.mask].any() and not seen["attention"][~tokens.mask].any()
    assert all(not seen["attention"][b, :, n - 1:].any() for b, n in enumerate(tokens.length.tolist()))  # the last token is looked at by none
    dropped = dataclasses.replace(tokens, mask=tokens.mask & (torch.arange(6) != 1)[:, None], forward=Forward(lab.model, 64))
    again = dropped.forward.look(dropped, attention=True)
    for name in ("hidden", "attention"):
        assert not again[name][1].any()
        torch.testing.assert_close(again[name][[0, 2, 3, 4, 5]], seen[name][[0, 2, 3, 4, 5]], atol=1e-5, rtol=0)


def test_attention_planted_on_one_position_credits_that_token_and_not_its_neighbour(lab, monkeypatch):
    """Planted where the answer's tokens look, so that an error of one in the shift would show."""
    tokens, place = spoken(lab), 4

    def planted(self, q, k):
        received = torch.zeros(*self.answers.shape, self.answers.shape[1])
        received[:, :, place] = 1
        return received.tril()
    monkeypatch.setattr(SharedPrompts, "received", planted)
    weight = weights(lab, "attention_credit", tokens, {"credit_scale": 2.0}, rescale="none")
    assert weight[0].argmax() == place and weight[0, place] == 6.5 and (weight[0, :place] == 0.5).all()
    assert (weight[0, place + 1:][tokens.mask[0, place + 1:]] == 0.5).all()


def test_hidden_and_attention_are_those_of_a_plain_forward_pass(lab):
    """hidden[b, t] predicts token t; attention[b, i, j] is what token j received when token i was predicted."""
    transformers = pytest.importorskip("transformers")
    from conftest import ROOT
    referee = transformers.AutoModelForCausalLM.from_pretrained(ROOT / "models/tiny", attn_implementation="eager")
    tokens = spoken(lab, micro_batch=4)
    for b, n in enumerate(tokens.length.tolist()):
        prompt = tokens.prompt_ids[tokens.group[b]]
        with torch.no_grad():
            out = referee(torch.tensor([prompt + tokens.ids[b, :n].tolist()]), output_attentions=True, output_hidden_states=True)
        states, received = out.hidden_states[-1][0], out.attentions[-1][0].mean(0)
        for i in range(n):
            torch.testing.assert_close(tokens.hidden[b, i], states[len(prompt) - 1 + i], atol=1e-4, rtol=0)
            for j in range(n):
                expected = received[len(prompt) - 1 + i, len(prompt) + j].item() if j < i else 0.0
                assert tokens.attention[b, i, j].item() == pytest.approx(expected, abs=1e-5)
    assert not tokens.hidden[~tokens.mask].any()


def test_the_extra_forward_pass_is_made_only_when_somebody_looks_and_once(lab, monkeypatch):
    passes, forward = [], lab.model.model.forward
    monkeypatch.setattr(lab.model.model, "forward", lambda *args: passes.append(1) or forward(*args))
    for name, expected in (("none", 0), ("equal_gradient", 0), ("entropy_weighted", 0), ("attention_credit", 1), ("learned_importance", 1)):
        tokens = spoken(lab)
        passes.clear()
        weights(lab, name, tokens)
        assert len(passes) == expected, name


def test_entropy_weightings_by_hand():
    tokens = one_row(entropy=[0.0, math.log(2), math.log(3)])
    torch.testing.assert_close(raw("entropy_weighted", tokens, entropy_temp=1.0)[0], torch.tensor([1.0, 2, 3]) / 6 * 3)
    torch.testing.assert_close(raw("entropy_weighted", tokens, entropy_temp=0.5)[0], torch.tensor([1.0, 4, 9]) / 14 * 3)
    tokens = one_row(entropy=[0.0, 1.0, 5.0])
    torch.testing.assert_close(raw("entropy_ratio", tokens, entropy_beta=1.0)[0], torch.tensor([0.0, 0.5, 2.5]))
    torch.testing.assert_close(raw("entropy_ratio", tokens, entropy_beta=2.0)[0], torch.tensor([0.0, 0.0, 4.0]))
    assert raw("entropy_ratio", one_row(entropy=[0.0, 0.0]), entropy_beta=1.0).tolist() == [[1, 1]]


def test_entropy_masking_by_hand():
    tokens = one_row(entropy=[float(n) for n in range(11)])
    assert raw("entropy_masking", tokens, mask_percentile=80.0)[0].tolist() == [0] * 8 + [1] * 3  # at or above
    assert raw("entropy_masking", tokens, mask_percentile=0.0)[0].tolist() == [1] * 11
    assert raw("entropy_masking", tokens, mask_percentile=100.0)[0].tolist() == [0] * 10 + [1]
    assert token_weight(make("entropy_masking", {"mask_percentile": 80.0}, None), "", tokens)[0][0, 8:].tolist() == pytest.approx([11 / 3] * 3)
    two = hand_made([[True, True], [True, False]], entropy=torch.tensor([[1.0, 2.0], [3.0, 99.0]]))
    assert raw("entropy_masking", two, mask_percentile=50.0).tolist() == [[0, 1], [1, 0]]  # 99 is beyond the mask


def test_random_has_mean_one_and_the_spread_that_was_asked_for():
    tokens = hand_made(torch.ones(100, 1000, dtype=torch.bool))
    weight = raw("random", tokens, placebo_std=0.5)
    assert weight.mean().item() == pytest.approx(1, abs=0.01) and weight.std().item() == pytest.approx(0.5, abs=0.01)


def lambda_batch():
    mask = torch.tensor([[True] * n + [False] * (4 - n) for n in (1, 3, 2, 4)])
    advantage = torch.tensor([1.0, -1.0, 2.0, 0.5])[:, None] * mask
    return hand_made(mask, group=torch.tensor([0, 0, 1, 1]), advantage=advantage, log_prob=-torch.rand(4, 4))


def test_lambda_grpo_by_hand(lab):
    """Lengths 1 and 3, 2 and 4: z is -1 and 1 in both groups."""
    tokens, mitigation = lambda_batch(), make("lambda_grpo", {"lambda_init": 2.0, "lambda_lr": 0.1}, lab)
    low, high = math.exp((8 / 9) ** 2), math.exp((10 / 9) ** 2)
    weight = mitigation(tokens, lab)
    expected = torch.tensor([low, high, low, high]) * 2 / (low + high)
    torch.testing.assert_close(weight[:, 0], expected)
    assert make("lambda_grpo", {"lambda_init": 0.0, "lambda_lr": 0.1}, lab)(tokens, lab).unique().tolist() == [1.0]
    # Adam's first step is the learning rate against the sign of the derivative of the surrogate
    def surrogate(lam):
        w = torch.tensor([math.exp((8 / 9) ** lam), math.exp((10 / 9) ** lam)])
        w = (2 * w / w.sum()).repeat(2)[:, None]
        return -(w * tokens.advantage * tokens.log_prob * tokens.mask).sum().item() / 10
    slope = (surrogate(2.01) - surrogate(1.99)) / 0.02
    assert mitigation.scalar.module["lambda"].item() == pytest.approx(2.0 - 0.1 * math.copysign(1, slope), abs=1e-4)


def test_lambda_stays_where_nothing_is_to_be_learned_and_follows_the_normalisation_of_the_loss(lab):
    tokens, mitigation = lambda_batch(), make("lambda_grpo", {"lambda_init": 1.0, "lambda_lr": 0.1}, lab)
    mitigation(tokens, lab)
    before = mitigation.scalar.module["lambda"].item()
    mitigation(dataclasses.replace(tokens, advantage=torch.zeros(4, 4)), lab)  # momentum alone would move it
    assert mitigation.scalar.module["lambda"].item() == before != 1.0
    slopes = []
    for norm in ("token", "sequence"):
        other = SimpleNamespace(settings=SimpleNamespace(loss_norm=norm, max_new_tokens=4), model=lab.model)
        fresh = make("lambda_grpo", {"lambda_init": 1.0, "lambda_lr": 0.1}, other)
        fresh(tokens, other)
        slopes.append(fresh.scalar.module["lambda"].grad.item())
    by_answer = [(tokens.advantage * tokens.log_prob * tokens.mask)[b].sum().item() / n / 4 for b, n in enumerate((1, 3, 2, 4))]

    def surrogate(lam):
        w = torch.tensor([math.exp((8 / 9) ** lam), math.exp((10 / 9) ** lam)])
        return -sum(w * a for w, a in zip((2 * w / w.sum()).tolist() * 2, by_answer))
    assert slopes[1] == pytest.approx((surrogate(1.01) - surrogate(0.99)) / 0.02, rel=1e-2) and slopes[0] != slopes[1]


def test_lambda_grpo_in_a_group_of_equal_lengths_is_one(lab):
    tokens = dataclasses.replace(lambda_batch(), mask=torch.ones(4, 4, dtype=torch.bool))
    assert torch.equal(make("lambda_grpo", {"lambda_init": 5.0, "lambda_lr": 0.1}, lab)(tokens, lab), torch.ones(4, 4))


def test_learned_importance_waits_then_learns(lab):
    """Hidden states of which one direction tells the outcome, and stands at one token: that token comes to weigh more."""
    torch.manual_seed(0)
    D, mitigation = lab.model.config.hidden_size, make("learned_importance", {"importance_warmup": 300, "importance_lr": 3e-3}, lab)
    advantage = torch.tensor([1.0, -1.0] * 8)
    hidden = torch.randn(16, 4, D) * 0.3
    hidden[:, 2, :8] += 3 * advantage[:, None]
    hidden[:, 2, 8:16] += 3
    tokens = looking(hand_made(torch.ones(16, 4, dtype=torch.bool), advantage=advantage[:, None].expand(16, 4)), hidden=hidden)
    losses = []
    for step in range(1, 301):
        assert torch.equal(mitigation(dataclasses.replace(tokens, step=step), lab), torch.ones(16, 4))
        losses.append(mitigation.metrics["importance_loss"])
    weight = mitigation(dataclasses.replace(tokens, step=301), lab)
    assert losses[-1] < 0.1 * losses[0] and weight[:, 2].mean() > 1.5 * weight[:, [0, 1, 3]].mean()


def test_the_loss_of_the_importance_net_by_hand(lab):
    """Row by row without padding: the reading of the weighted mean state against the answer's advantage."""
    tokens, net = spoken(lab), make("learned_importance", {}, lab)
    module, errors = net.net.module, []
    with torch.no_grad():
        for b, n in enumerate(tokens.length.tolist()):
            states = tokens.hidden[b, :n]
            importance = torch.nn.functional.softplus(module.outer(torch.nn.functional.silu(module.inner(states)))).flatten()
            mean = (importance[:, None] * states).sum(0) / importance.sum()
            errors.append(((mean @ module.read.weight[0] + module.read.bias[0] - tokens.advantage[b, 0]) ** 2).item())
    assert net.loss(tokens).item() == pytest.approx(sum(errors) / len(errors), rel=1e-5)


def test_learned_importance_takes_true_credit_where_it_is_known(lab):
    torch.manual_seed(0)
    hidden, credit = torch.randn(4, 3, lab.model.config.hidden_size), torch.tensor([[2.0, 0.1, 0.5]] * 4)
    tokens = looking(hand_made(torch.ones(4, 3, dtype=torch.bool), true_credit=-credit), hidden=hidden)
    mitigation = make("learned_importance", {"importance_warmup": 0, "importance_lr": 1e-2}, lab)
    for _ in range(200):
        weight = mitigation(tokens, lab)
    again = make("learned_importance", {"importance_warmup": 0, "importance_lr": 1e-2}, lab)
    again.load_state_dict(mitigation.state_dict())  # also of the part that had no gradient
    torch.testing.assert_close(weight, credit, atol=0.1, rtol=0)


def test_causal_ablation_by_hand(lab, monkeypatch):
    """Every second of five tokens: the reward changes by 1, 0 and 0.5, linear in between."""
    asked = []

    def rewards(lab, tokens, prefixes, k):
        asked.extend(prefixes)
        return torch.tensor([[0.0], [1.0], [0.5]] + [[1.0]])[:len(prefixes)], 17
    monkeypatch.setattr("credit.causal_ablation.continuation_rewards", rewards)
    hidden = torch.randn(2, 5, lab.model.config.hidden_size)
    mask = torch.tensor([[True] * 5, [True] + [False] * 4])
    tokens = looking(hand_made(mask, ids=torch.tensor([[4, 5, 6, 7, 8], [9, 0, 0, 0, 0]]), group=torch.tensor([0, 1]),
                               scores={"reward": torch.tensor([1.0, 0.25])}), hidden=hidden)
    mitigation = make("causal_ablation", {"ablate_every": 2}, lab)
    weight = mitigation(tokens, lab)
    torch.testing.assert_close(weight, torch.tensor([[1, 0.5, 0, 0.25, 0.5], [0.75, 0, 0, 0, 0]]))
    assert [(g, ids[:-1]) for g, ids in asked] == [(0, ()), (0, (4, 5)), (0, (4, 5, 6, 7)), (1, ())]
    assert all(ids[-1] != own for (_, ids), own in zip(asked, (4, 6, 8, 9))) and mitigation.metrics == {"extra_tokens": 17}


def test_the_replacement_comes_from_the_policy_without_the_token(lab, monkeypatch):
    """A thousand times the same token: the others are drawn in proportion to their probabilities."""
    asked = []
    monkeypatch.setattr("credit.causal_ablation.continuation_rewards", lambda lab, tokens, prefixes, k: asked.extend(prefixes) or (torch.zeros(len(prefixes), 1), 0))
    hidden = torch.randn(1, 1, lab.model.config.hidden_size, generator=torch.Generator().manual_seed(0)).expand(4000, 1, -1) * 0.5
    probs = lab.model.logits(hidden[0, 0]).softmax(-1).detach()
    taken = int(probs.argmax())
    tokens = looking(hand_made(torch.ones(4000, 1, dtype=torch.bool), ids=torch.full((4000, 1), taken)), hidden=hidden)
    make("causal_ablation", {"ablate_every": 1}, lab)(tokens, lab)
    drawn = np.bincount([ids[-1] for _, ids in asked], minlength=len(probs)) / 4000
    expected = probs.clone().index_fill(0, torch.tensor([taken]), 0) / (1 - probs[taken])
    assert drawn[taken] == 0 and np.abs(drawn - expected.numpy()).sum() < 0.35 and np.corrcoef(drawn, expected.numpy())[0, 1] > 0.95


def test_oracle_by_hand(lab, monkeypatch):
    """Values 0.5, 0.75, then the reward 1; the middle token of the second answer was certain."""
    table = {(): 0.5, (4,): 0.75, (4, 5): 0.25}
    monkeypatch.setattr("credit.monte_carlo.continuation_rewards", lambda lab, tokens, prefixes, k: (torch.tensor([[table[ids]] * k for _, ids in prefixes]), 5))
    tokens = hand_made([[True, True, False], [True, True, True]], ids=torch.tensor([[4, 6, 0], [4, 5, 6]]),
                       log_prob=torch.tensor([[-1.0, -1, 0], [-1.0, -1e-4, -1]]), scores={"reward": torch.tensor([1.0, 0.0])})
    mitigation = make("oracle", {"oracle_k": 3}, lab)
    torch.testing.assert_close(mitigation(tokens, lab), torch.tensor([[0.25, 0.25, 0], [0.25, 0, 0.25]]))
    assert mitigation.metrics == {"extra_tokens": 5}


def test_hotter_sampling_leaves_the_oracle_no_token_for_sure(lab, monkeypatch):
    monkeypatch.setattr("credit.monte_carlo.continuation_rewards", lambda lab, tokens, prefixes, k: (torch.arange(1.0 * len(prefixes))[:, None].expand(-1, k), 5))
    tokens, hot = one_row(log_prob=[-1e-4, -1e-4]), SimpleNamespace(settings=SimpleNamespace(temperature=1.5))
    assert make("oracle", {}, hot)(tokens, hot).tolist() == [[1, 1]]
    assert make("oracle", {}, lab)(tokens, lab).tolist() == [[0, 0]]


def test_rescaling_by_hand():
    tokens = hand_made([[True, True], [True, False]], log_prob=torch.log(torch.tensor([[0.8, 0.5], [0.8, 0.1]])),
                       collision=torch.tensor([[0.68, 0.5], [0.68, 0.9]]), advantage=torch.tensor([[1.0, 1.0], [-2.0, 9.0]]))
    s = torch.tensor([[0.08, 0.5], [0.08, 0.0]]).sqrt()
    weight = torch.tensor([[2.0, 0.5], [4.0, 7.0]])

    def how(rescale):
        return token_weight(lambda tokens, lab: weight, "by hand", tokens, rescale=rescale)[0]
    torch.testing.assert_close(how("none"), weight * tokens.mask)
    torch.testing.assert_close(how("mean"), weight * tokens.mask * 3 / 6.5)
    before, after = (tokens.advantage.abs() * s * tokens.mask).sum(), (how("gradient") * tokens.advantage.abs() * s).sum()
    assert before.item() == pytest.approx(after.item(), rel=1e-5)


def test_weights_that_cannot_be_rescaled_to_the_gradient_are_left_and_it_is_said():
    tokens = hand_made([[True, True], [True, True]], advantage=torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    for tiny in (0.0, 1e-42):
        weight, said = token_weight(lambda tokens, lab: torch.tensor([[tiny, tiny], [2.0, 1.0]]), "", tokens, rescale="gradient")
        assert weight[1].tolist() == [2, 1] and "not rescaled" in said["weight_note"]
    nothing = dataclasses.replace(tokens, advantage=torch.zeros(2, 2))
    assert token_weight(lambda tokens, lab: torch.ones(2, 2), "", nothing, rescale="gradient")[1]["weight_note"] is None


def test_weights_that_are_all_zero_become_one_and_it_is_said():
    tokens = hand_made([[True, True], [True, False]])
    weight, said = token_weight(lambda tokens, lab: tokens.log_prob * 0, "nothing", tokens)
    assert torch.equal(weight, tokens.mask.float()) and "all weights were 0" in said["weight_note"]


def test_the_placebo_of_the_weights_permutes_them_over_the_tokens():
    mask = torch.rand(20, 30, generator=torch.Generator().manual_seed(0)) < 0.7
    tokens = hand_made(mask, entropy=torch.rand(20, 30))
    plain = token_weight(make("entropy_ratio", {"entropy_beta": 1.0}, None), "", tokens)[0]
    permuted = token_weight(make("entropy_ratio", {"entropy_beta": 1.0}, None), "", tokens, placebo="weights")[0]
    assert not permuted[~mask].any() and not torch.equal(plain, permuted)
    torch.testing.assert_close(permuted[mask].sort().values, plain[mask].sort().values)
    assert abs(np.corrcoef(permuted[mask], tokens.entropy[mask])[0, 1]) < 0.15


@pytest.mark.parametrize("wrong, words", [
    (lambda t: -torch.ones_like(t.entropy), "negative"), (lambda t: t.entropy / 0, "not finite"), (lambda t: torch.ones(3), r"should return a tensor \(B, T\)"),
    (lambda t: 1.0, "should return a tensor"), (lambda t: 1 / t.length, "should return a tensor"), (lambda t: t.reward.add_(1)[:, None] * 0, "changed a tensor of the batch in place"), (lambda t: t.entropy.mul_(2), "changed a tensor of the batch in place"),
])
def test_an_idea_that_is_wrong_gets_one_clear_line(wrong, words):
    with pytest.raises(UserError, match=words) as error:
        token_weight(lambda tokens, lab: wrong(tokens), "my_idea", hand_made([[True, True], [True, False]]))
    assert "my_idea" in str(error.value) and "\n" not in str(error.value)


def test_what_is_odd_beyond_the_mask_does_not_matter_and_one_number_an_answer_is_enough():
    tokens = hand_made([[True, True], [True, False]], entropy=torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    assert token_weight(lambda t, lab: 1 / t.entropy, "", tokens)[0].tolist() == [[1, 1], [1, 0]]
    assert token_weight(lambda t, lab: 1 / t.length[:, None], "", tokens, rescale="none")[0].tolist() == [[0.5, 0.5], [1, 0]]


@pytest.mark.parametrize("name", ALL)
def test_weights_reach_the_gradient(lab, name):
    """One update with them is autograd of  - sum weight * advantage * log_prob / N  written out row by row."""
    tokens = spoken(lab)
    weight = weights(lab, name, tokens)
    copy, other = copied(lab.model), copied(lab.model)
    s = SimpleNamespace(micro_batch=4, max_grad_norm=0.0, epochs=1, loss_norm="token", max_new_tokens=60, kl=0.0, kl_kind="k3", clip_low=0.2, clip_high=0.28)
    update(copy, torch.optim.SGD(copy.parameters(), lr=0.0), tokens, weight, s)
    loss = 0
    for b, n in enumerate(tokens.length.tolist()):
        prompt, row = tokens.prompt_ids[tokens.group[b]], tokens.ids[b, :n]
        log_probs = other(torch.tensor([prompt + row.tolist()]))[0, len(prompt) - 1:-1].log_softmax(-1)
        loss = loss - (weight[b, :n] * tokens.advantage[b, :n] * log_probs[range(n), row]).sum()
    (loss / tokens.mask.sum()).backward()
    torch.testing.assert_close(gradients(copy), gradients(other), atol=1e-6, rtol=1e-4)
