"""What a run of the lab computes, over several shapes, against others that compute it in another
way: autograd through W + B A, a model whose matrices are rounded. That the book's model and its
log-probs are those of transformers and of the formulas is tested in tests/test_qwen2_model.py."""
from dataclasses import replace

import pytest
import torch

import grpo
import qwen2_model
from conftest import untidy_model
from grpo import generator_of
from lab.engine.forward import response_log_probs
from lab.engine.lora import add_lora, additions, keep_less, keep_rounded
from lab.engine.model_folder import read_model_folder
from lab.engine.rollouts import Rollouts
from lab.engine.sampler import generate

SIZES = dict(vocab_size=60, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=12, eos_token_id=(2, 23, 41),
             max_position_embeddings=256, tie_word_embeddings=True)
SHAPES = {  # what differs from SIZES
    "grouped queries, tied": {},
    "untied head": dict(tie_word_embeddings=False),
    "as many keys as queries": dict(num_key_value_heads=4),
    "one key head": dict(num_key_value_heads=1, rope_theta=1e6),
    "Qwen3": dict(model_type="qwen3", head_dim=16, rms_norm_eps=1e-5),
    "6.8 million parameters": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=8,
                                   head_dim=64, vocab_size=500)}
PROMPTS = [[7, 8, 9], [11], list(range(10, 47)), [7, 8, 9, 9, 3]]  # ragged; two begin alike
NEW = 14


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] if "million" in
                                               name else []) for name in SHAPES])
def folder(request, tmp_path_factory):
    """A model with random weights, large enough that its logits differ. The wider the model, the
    smaller they are: otherwise each layer would multiply the rounding of the one before it."""
    model = untidy_model(**SIZES | SHAPES[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_((SIZES["hidden_size"] / model.config.hidden_size) ** 0.5)
    path = tmp_path_factory.mktemp("model")
    qwen2_model.save_model(model, path)
    return path


def batch(model, answers=5):
    """Answers to PROMPTS with advantages of both signs, and a group that teaches nothing."""
    found = qwen2_model.generate(model, PROMPTS, answers, NEW, model.config.eos_token_id,
                                 generator_of("tied", 1))
    B, T = found.ids.shape
    advantage = torch.randn(B, 1, generator=torch.Generator().manual_seed(0)) * found.mask
    advantage[:answers] = 0
    code = torch.zeros(B, T, dtype=torch.uint8)
    texts = [["x"] * n for n in found.mask.sum(1).tolist()]
    reward = advantage[:, 0]
    return Rollouts(PROMPTS, PROMPTS, torch.arange(len(PROMPTS)).repeat_interleave(answers),
                    **found._asdict(), texts=texts, answers=[""] * B, section=code, kind=code,
                    scores={"reward": reward}, advantage=advantage)


def close(one, other, **more):
    torch.testing.assert_close(one, other, **{"atol": 2e-4, "rtol": 1e-4, **more})


def test_lora_is_the_books_model_with_b_a_in_its_matrices(folder, monkeypatch):
    """The same log-probs of the tokens that it draws, and for A and B the gradient that autograd
    finds through W + (32 / r) B A in the plain forward pass. Logits of four tokens at a time."""
    fast, plain = add_lora(read_model_folder(folder), 3, seed=1), qwen2_model.load_model(folder)
    monkeypatch.setattr("lab.engine.log_probs.LOGITS_OF_FROZEN", 4 * plain.config.vocab_size)
    pairs, generator = [], torch.Generator().manual_seed(2)
    for name, module in additions(fast):
        module.B.data.copy_(0.01 * torch.randn(module.B.shape, generator=generator))
        A, B = (part.detach().clone().requires_grad_() for part in (module.A, module.B))
        linear = plain.get_submodule(name)
        W = linear.weight.detach() + 32 / 3 * B @ A
        del linear.weight  # a parameter, in whose place there is a tensor with a history
        linear.weight = W
        pairs += [(module.A, A), (module.B, B)]
    keep_less(keep_rounded(fast))
    rows = torch.tensor([0, 3, 7, 8, 19])
    drawn = generate(fast, PROMPTS, answers=5, max_new_tokens=NEW,
                          stop_ids=plain.config.eos_token_id, seed=generator_of("tied", 1))
    rollouts = replace(batch(plain), ids=drawn.ids, mask=drawn.mask)
    log_probs = [of(model, rollouts, rows) for of, model in (
        (response_log_probs, fast), (grpo.log_probs, plain))]
    close(*log_probs)
    close(log_probs[0], drawn.log_prob[rows])
    for log_prob in log_probs:
        log_prob.square().sum().backward()
    for one, other in pairs:
        close(one.grad, other.grad, atol=1e-4 * other.grad.abs().max().item(), rtol=1e-3)


def rounded(x):
    return x.bfloat16().float()


def test_bfloat16_rounds_as_the_books_model_with_rounded_products_does(folder):
    """Each token's log-prob differs from float32's by rounding, so tokens may differ, and numbers
    in the last digits. How large rounding is, the plain model says: its matrices are rounded, and
    what goes into a product and comes out of it. Sampler and update round attention, too. So
    neither of their errors, nor what lies between the two, should be sqrt(2) times as large, which
    is how far two numbers lie apart that are rounded independently."""
    fast = read_model_folder(folder).compute_in(torch.bfloat16)
    exact, plain = qwen2_model.load_model(folder), qwen2_model.load_model(folder)
    drawn = generate(fast, PROMPTS, answers=5, max_new_tokens=NEW, stop_ids=(),
                          seed=generator_of("tied", 1))
    own = replace(batch(exact), ids=drawn.ids, mask=drawn.mask, written=drawn.mask)
    output = rounded(plain.logits(torch.eye(plain.config.hidden_size)).T)
    plain.logits = lambda h: rounded(torch.nn.functional.linear(rounded(h), output))
    for module in plain.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = rounded(module.weight.data)
            module.register_forward_pre_hook(lambda _, given: rounded(given[0]))
            module.register_forward_hook(lambda _, given, found: rounded(found))
    with torch.no_grad():
        e, r, update = (of(model, own, torch.arange(len(own.ids))) for of, model in (
            (grpo.log_probs, exact), (grpo.log_probs, plain), (response_log_probs, fast)))
    size, sampler = (r - e).square().mean().sqrt(), drawn.log_prob
    for difference in (sampler - e, update - e, sampler - update):
        assert 0 < difference.square().mean().sqrt() < 2 ** 0.5 * size
