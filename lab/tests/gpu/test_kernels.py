"""The kernels of a GPU, run on the CPU by Triton's interpreter, beside torch's operations. They are
computed in float32, because the interpreter rounds to bfloat16 in another way than a GPU does.

    pip install --no-deps --target FOLDER triton==3.6.0 numpy==2.2.6
    TRITON_INTERPRET=1 PYTHONPATH=FOLDER python -m pytest lab/tests/gpu/test_kernels.py
"""
import math
import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are tested with TRITON_INTERPRET=1, which this file explains",
                allow_module_level=True)
pytest.importorskip("triton")

from lab.engine import sampler  # noqa: E402
from lab.engine.model import Qwen2  # noqa: E402
from qwen2_model import rotary, rotate  # noqa: E402
from lab.engine.sampler import Start, generate  # noqa: E402
from lab.gpu import kernels  # noqa: E402
from lab.gpu import model as model_on_gpu  # noqa: E402
from lab.gpu import sampler as gpu_sampler  # noqa: E402
from lab.gpu.cache import Cache  # noqa: E402

FLOAT = torch.float32
close = torch.testing.assert_close


def test_norm_and_mlp():
    torch.manual_seed(0)
    x, weight = torch.randn(5, 24), torch.randn(24)
    close(kernels.norm(x, weight, 0.1, FLOAT), F.rms_norm(x, (24,), weight, 0.1))
    gate_up = torch.randn(3, 2 * 1100)
    gate, up = gate_up.chunk(2, 1)
    close(kernels.silu_times_up(gate_up), F.silu(gate) * up)


@pytest.mark.parametrize("H, K, size, programs, is_normed", [
    (14, 2, 32, 1, False),
    (4, 4, 32, 128, False),   # four parts of the keys
    (4, 2, 64, 128, True),    # eight, of which some are empty; Qwen3's norms
    (2, 1, 128, 16, True),
])
def test_attention(small_model, monkeypatch, H, K, size, programs, is_normed):
    """Beside the cache's own, with its mask. Each row sees another part of its prompt."""
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    monkeypatch.setattr(kernels, "KEYS", 32 * size)
    torch.manual_seed(0)
    R, P, slots, written = 8, 37, 60, 21
    config = replace(small_model.config, num_attention_heads=H, num_key_value_heads=K,
                     head_dim=size)
    seen = torch.randint(1, P + 1, (R,))
    qkv = torch.randn(R, (H + 2 * K) * size)
    stored = torch.randn(R, 2 * K, P + slots, size)
    caches = []
    for has_mask in (True, False):
        cache = Cache(config, FLOAT, P, has_mask)
        cache.stored, cache.slots = [stored.clone()], slots
        cache.column = torch.tensor([P + written - 1])
        if has_mask:
            cache.make_mask(seen, written)
        cache.set_window(written + 3)
        cache.open_slot()
        caches.append(cache)
    position = torch.randint(0, 90, (R,))
    cos_sin = torch.stack(rotary(torch.arange(90), config), 1)
    norm = None
    heads = qkv.view(R, -1, size).clone()
    if is_normed:
        norm = torch.cat([torch.rand(size).expand(H, -1), torch.rand(size).expand(K, -1)])
        heads[:, :H + K] = F.rms_norm(heads[:, :H + K], (size,), None, 0.1) * norm
    found = kernels.attend(caches[1], 0, qkv, norm, 0.1, cos_sin, position, seen, H, K)
    heads[:, :H + K] = rotate(heads[:, :H + K], *cos_sin[position].unbind(1))
    expected = caches[0].attend(0, heads[:, :H].contiguous(), heads[:, H:].contiguous())
    close(found, expected.reshape(R, -1), atol=1e-5, rtol=1e-5)
    close(caches[1].stored[0], caches[0].stored[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("temperature, greedy", [(1.0, False), (0.6, False), (1.0, True)])
def test_draw(monkeypatch, temperature, greedy):
    """Line 1 of tables for 4 rows, whose answers stand in another order. Row 0 has a token of
    probability 0 at the end of a part, row 1 two largest logits, row 2 draws the last token."""
    monkeypatch.setattr(kernels, "VOCABULARY_PART", 16)
    torch.manual_seed(0)
    R, V = 4, 50
    logits = 3 * torch.randn(R, V)
    logits[0, 10:20] = -1e4
    logits[1, [7, 33]] = 9.0
    answer, line = torch.tensor([2, 0, 3, 1]), torch.tensor([R + 1])
    uniform = torch.rand(2 * (R + 1))
    uniform[R + 1 + 3] = 1 - 2 ** -24
    token, tokens = torch.zeros(R, dtype=torch.long), torch.zeros(2 * (R + 1), dtype=torch.long)
    facts = torch.zeros(2 * (R + 1), 3)
    kernels.draw(logits, uniform, line, answer, token, tokens, facts, temperature, greedy)
    expected = gpu_sampler.Distribution(logits)
    cell = line + answer
    picked = logits.argmax(-1) if greedy else expected.pick(uniform[cell], temperature)
    assert token.tolist() == picked.tolist() == tokens[cell].tolist()
    assert not tokens[:R + 1].any() and not tokens[-1]  # no other cell is written
    close(facts[cell], torch.stack(expected.facts(token), 1))


def test_a_token_without_probability_is_never_drawn(monkeypatch):
    monkeypatch.setattr(kernels, "VOCABULARY_PART", 4)
    logits = torch.full((3, 12), -1e4)
    logits[:, [3, 8]] = 0.0  # the last of a part, and the first of another
    tables = torch.zeros(3, dtype=torch.long), torch.zeros(4, dtype=torch.long), torch.zeros(4, 3)
    uniform = torch.tensor([0.0, 0.5, 1 - 2 ** -24, 0.0])
    kernels.draw(logits, uniform, torch.tensor([0]), torch.arange(3), *tables, 1.0, False)
    assert tables[0].tolist() == [3, 8, 8]
    of_two = torch.tensor([-math.log(2), math.log(2), 0.5])  # log p, entropy, sum of p^2
    close(tables[2][:3], of_two.expand(3, -1))


@pytest.mark.parametrize("kept", [1000, 3])
def test_log_probs(monkeypatch, kept):
    """All logits are kept, or those of three tokens at a time."""
    monkeypatch.setattr(kernels, "LOGIT_BYTES", kept * 4 * 70)
    torch.manual_seed(0)
    hidden, matrix = torch.randn(7, 6, requires_grad=True), torch.randn(70, 6, requires_grad=True)
    targets, factor = torch.randint(0, 70, (7,)), torch.randn(7)

    def of(function):
        log_prob = function(hidden, matrix, targets)
        return log_prob, *torch.autograd.grad((log_prob * factor).sum(), [hidden, matrix])

    def by_torch(hidden, matrix, targets):
        return (hidden @ matrix.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]

    for found, expected in zip(of(kernels.LogProbsByKernels.apply), of(by_torch)):
        close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reply", [None, lambda row, ids, drawn: [9, 10] if len(ids) < 4 else None])
def test_answers_are_those_of_torch(small_model, monkeypatch, reply):
    """Rows leave, the cache grows, one answer continues from within its prompt; and an environment
    replies."""
    model = Qwen2(replace(small_model.config, head_dim=32)).requires_grad_(False)
    request = dict(answers=2, max_new_tokens=[6, 2, 4], seed=3, temperature=0.8, stop_ids=(7, 11),
                   starts=[Start(0, 3), Start(1, 2), Start(0, 2, without=5)], reply=reply)
    prompts = [[5, 6, 8], [8, 9]]
    expected = generate(model, prompts, **request)
    assert (expected.written & ~expected.mask).any() == (reply is not None)
    monkeypatch.setattr(model_on_gpu, "has_kernels", lambda dtype, device: True)
    monkeypatch.setattr(kernels, "VOCABULARY_PART", 32)
    monkeypatch.setattr(gpu_sampler, "PACE", gpu_sampler.Pace(1, 1, 4, 2))
    monkeypatch.setattr(sampler, "sample", gpu_sampler.sample_on_gpu)
    found = generate(model, prompts, **request)
    for name, values in vars(expected).items():
        close(vars(found)[name], values, atol=1e-5, rtol=1e-5)
