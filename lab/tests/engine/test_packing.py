"""Packed prompts and answers against rows of their own: states, gradients, who sees whom; with a
prefix that prompts share, and without."""
from contextlib import contextmanager

import pytest
import torch

from small import hand_made
from lab.engine import packing
from lab.engine.forward import response_log_probs
from lab.engine.packing import SharedPrompts, common_prefix, pack
from properties import draw, few, given

pytestmark = pytest.mark.numerics


def docstring_example(prefix):
    return SharedPrompts([3, 5], [2, 1, 1, 3], torch.tensor([0, 0, 1, 1]), prefix)


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_who_sees_whom_is_what_the_docstring_draws(prefix):
    """Equal scores and one-hot values: a token's result is 1/n at each of the n tokens it sees.
    The picture has a prefix of 2 tokens. With a shorter one both prompts have tokens that are one
    in the picture; a prompt sees its own."""
    lines = [line.split()[1:] for line in packing.__doc__.splitlines()]
    picture = [line for line in lines if len(line) == 13 and {*line} <= {"x", "."}]
    sees = torch.tensor([[mark == "x" for mark in line] for line in picture])
    shared = docstring_example(prefix)
    drawn = torch.empty(len(shared.positions), dtype=torch.long)  # where each token is drawn
    drawn[shared.prompts[0, :3]] = torch.tensor([0, 1, 2])
    drawn[shared.prompts[1]] = torch.tensor([0, 1, 3, 4, 5])
    drawn[-7:] = torch.arange(6, 13)
    zeros, one_hot = torch.zeros(len(drawn), 1, 13), torch.eye(13)[drawn, None]
    expected = (sees / sees.sum(1, keepdim=True))[drawn, None]
    torch.testing.assert_close(shared(0, zeros, zeros, one_hot), expected)


def test_a_mask_has_a_line_for_each_query_of_each_head():
    assert docstring_example(2).make_mask(torch.bfloat16, heads=2).shape == (4, 1, 2 * 3, 5 + 3)


@draw.composite
def batches(choose):
    """Prompts, answers and the number of each answer's prompt. There are few tokens, so prompts
    share the first ones, and equal answers are frequent."""
    def tokens(least, most):
        return draw.lists(draw.integers(5, 7), min_size=least, max_size=most)

    head = choose(tokens(0, 4))
    prompts = [head + rest for rest in choose(draw.lists(tokens(1, 4), min_size=1, max_size=3))]
    one = draw.tuples(draw.integers(0, len(prompts) - 1), tokens(1, 5))
    answers = choose(draw.lists(one, min_size=1, max_size=12))
    return prompts, [answer for _, answer in answers], [prompt for prompt, _ in answers]


@contextmanager
def any_prefix():
    """A prefix of one token is shared, too."""
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(packing, "LEAST_PREFIX", 1)
        yield


@given(batch=batches())
def test_each_token_sees_what_is_before_it_and_nothing_else(batch):
    """That is its prompt and its own row up to itself: with equal scores and one-hot values, its
    result is 1/n at each of the n tokens that it sees."""
    prompts, answers, prompt_of = batch
    with any_prefix():
        _, shared = pack(prompts, answers, torch.tensor(prompt_of))
    P = shared.prefix
    places = iter(range(len(shared.positions)))
    prefix, *others = [[next(places) for _ in row] for row in (
        prompts[0][:P], *(prompt[P:] for prompt in prompts), *answers)]
    rests, of_answers = others[:len(prompts)], others[len(prompts):]
    before = before_each([], prefix)
    for rest in rests:
        before |= before_each(prefix, rest)
    for row, prompt in zip(of_answers, prompt_of):
        before |= before_each(prefix + rests[prompt], row)
    N = len(shared.positions)
    zeros, one_hot = torch.zeros(N, 1, N), torch.eye(N)[:, None]
    found = shared(0, zeros, zeros, one_hot)[:, 0]
    assert {token: row.nonzero()[:, 0].tolist() for token, row in enumerate(found)} == {
        token: sorted(seen) for token, seen in before.items()}


def before_each(context, row):
    """What each token of a row may see."""
    return {token: context + row[:number + 1] for number, token in enumerate(row)}


@pytest.mark.parametrize("prompts, length", [
    ([[5] * 16 + [6], [5] * 16 + [7, 8]], 16), ([[5] * 15 + [6], [5] * 15 + [7, 8]], 0),
    ([[5] * 20, [5] * 30], 19), ([[5] * 20, [5] * 20], 19),  # each keeps a token to itself
    ([[5] * 16, [5] * 20], 0), ([[4] + [5] * 20, [5] * 20], 0), ([[5] * 20], 0), ([], 0),
    ([[5] * 20, [5] * 18 + [6], [5] * 17 + [6, 5, 5]], 17)])
def test_the_prefix_of_prompts_by_hand(prompts, length):
    assert common_prefix(prompts) == length


def test_the_prefix_stands_once_in_the_flat_sequence(monkeypatch):
    """That of the docstring; s is 1, p 2, r 3, a to d are 4 to 7."""
    monkeypatch.setattr(packing, "LEAST_PREFIX", 2)
    prompts, answers = [[1, 1, 2], [1, 1, 3, 3, 3]], [[4, 4], [5], [6], [7, 7, 7]]
    ids, shared = pack(prompts, answers, torch.tensor([0, 0, 1, 1]))
    assert ids.tolist() == [1, 1, 2, 3, 3, 3, 4, 4, 5, 6, 7, 7, 7]
    assert shared.positions.tolist() == [0, 1, 2, 2, 3, 4, 3, 4, 3, 5, 5, 6, 7]
    assert ids[shared.prompts][shared.prompt_mask].tolist() == sum(prompts, [])


@few
@given(batch=batches(), checkpointing=draw.booleans())
def test_log_probs_and_gradients_are_those_of_each_answer_in_a_row_of_its_own(
        small_model, batch, checkpointing):
    """The gradient is that of any function of the log-probs: here their products with fixed
    numbers."""
    prompts, answers, prompt_of = batch
    length = torch.tensor([len(answer) for answer in answers])
    mask = torch.arange(int(length.max())) < length[:, None]
    ids = mask.long().masked_scatter(mask, torch.tensor(sum(answers, [])))
    rollouts = hand_made(mask, ids=ids, prompt_ids=prompts, group=torch.tensor(prompt_of))
    factor = torch.randn(mask.shape, generator=torch.Generator().manual_seed(5)) * mask
    parameters = list(small_model.parameters())

    small_model.model.checkpointing = checkpointing
    with any_prefix():
        found = response_log_probs(small_model, rollouts, torch.arange(len(answers)))
        packed = torch.autograd.grad((found * factor).sum(), parameters)
    small_model.model.checkpointing = False

    expected = torch.zeros(mask.shape)
    for row, (answer, number) in enumerate(zip(answers, prompt_of)):
        prompt = prompts[number]
        logits = small_model(torch.tensor([prompt + answer]))[0, len(prompt) - 1:-1]
        expected[row, :len(answer)] = logits.log_softmax(-1)[range(len(answer)), answer]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    alone = torch.autograd.grad((expected * factor).sum(), parameters)
    for mine, theirs in zip(packed, alone):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
