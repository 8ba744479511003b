"""Flash attention needs a GPU, and here a loop over the sequences stands in its place. So these
tests show how the sequences are cut, which keys each has, and the gradient of keys that several
have."""
import pytest
import torch

from lab.engine import packing
from lab.gpu import flash
from lab.engine.packing import pack
from lab.engine.model import attention

PROMPTS = [[9] * 20 + [1, 2], [9] * 20 + [3, 4, 5, 6]]  # the first 20 tokens are shared
SINGLE = [[5, 6, 7]]


def by_loop(q, k, v, cut):
    parts = []
    ends = zip(cut.query_ends.tolist(), cut.query_ends[1:].tolist(), cut.key_ends.tolist(),
               cut.key_ends[1:].tolist())
    for q_start, q_end, k_start, k_end in ends:
        queries, keys = q_end - q_start, k_end - k_start
        assert queries <= cut.most_queries and keys <= cut.most_keys
        sees = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
        mask = torch.zeros(sees.shape, dtype=q.dtype).masked_fill(~sees, float("-inf"))
        heads = q.shape[1] // k.shape[1]
        rows = (x[start:end].transpose(0, 1)[None] for x, start, end in
                ((q, q_start, q_end), (k, k_start, k_end), (v, k_start, k_end)))
        parts.append(attention(*rows, mask.repeat(heads, 1))[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("prompts, answers, prompt_of", [
    (PROMPTS, [[1, 2, 3], [], [4], [5, 6]], [0, 0, 1, 1]),  # an answer of one token feeds none
    (SINGLE, [[1], [2, 3]], [0, 0]),
    (PROMPTS, [], []),
])
def test_sequences_are_the_padded_rows(prompts, answers, prompt_of, monkeypatch):
    ids, shared = pack(prompts, answers, torch.tensor(prompt_of, dtype=torch.long))
    assert (shared.prefix > 0) == (prompts is PROMPTS)
    torch.manual_seed(0)
    inputs = [torch.randn(len(ids), heads, 8, dtype=torch.float64, requires_grad=True)
              for heads in (4, 2, 2)]
    factor = torch.randn(len(ids), 4, 8, dtype=torch.float64)

    def gradients(result):
        return torch.autograd.grad((result * factor).sum(), inputs)

    expected = shared(0, *inputs)
    monkeypatch.setattr(flash, "uses_flash", lambda q: True)
    monkeypatch.setattr(flash, "attention_of_sequences", by_loop)
    monkeypatch.setattr(packing, "SharedPrompts", flash.FlashPrompts)
    _, on_gpu = pack(prompts, answers, torch.tensor(prompt_of, dtype=torch.long))
    found = on_gpu(0, *inputs)
    torch.testing.assert_close(found, expected)
    # keys that several sequences have are added in float32
    torch.testing.assert_close(gradients(found), gradients(expected), rtol=1e-6, atol=1e-6)


def test_each_token_is_the_query_of_one_sequence():
    prompt_of = torch.tensor([0, 1])
    ids, shared = pack(PROMPTS, [[1, 2], [3]], prompt_of)
    cut = flash.Sequences(shared.prefix, *shared.lengths, lambda x: x)
    # the prefix, two rests of prompts, two answers
    assert cut.query_ends.tolist() == [0, 20, 22, 26, 28, 29]
    assert cut.key_ends.tolist() == [0, 20, 42, 66, 90, 115]
    assert (cut.most_queries, cut.most_keys) == (20, 25)
    # the keys of the last answer: the prefix, the second prompt's rest, its own token
    assert cut.index[90:].tolist() == [*range(20), 22, 23, 24, 25, 28]
