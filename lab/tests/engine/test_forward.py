"""Answers behind a prompt that is computed once, against rows of their own."""
import pytest
import torch

from small import hand_made, log_probs_behind
from lab.engine.forward import response_log_probs
from properties import draw, few, given

pytestmark = pytest.mark.numerics


@draw.composite
def batches(choose):
    """Prompts, answers and the number of each answer's prompt, which may have no other answer."""
    def tokens(least, most):
        return draw.lists(draw.integers(5, 7), min_size=least, max_size=most)

    head = choose(tokens(0, 4))
    prompts = [head + rest for rest in choose(draw.lists(tokens(1, 4), min_size=1, max_size=3))]
    one = draw.tuples(draw.integers(0, len(prompts) - 1), tokens(1, 5))
    answers = choose(draw.lists(one, min_size=1, max_size=12))
    return prompts, [answer for _, answer in answers], [prompt for prompt, _ in answers]


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
    found = response_log_probs(small_model, rollouts, torch.arange(len(answers)))
    shared = torch.autograd.grad((found * factor).sum(), parameters)
    small_model.model.checkpointing = False

    expected = torch.zeros(mask.shape)
    for row, (answer, number) in enumerate(zip(answers, prompt_of)):
        log_p = log_probs_behind(small_model, prompts[number], answer)
        expected[row, :len(answer)] = log_p[range(len(answer)), answer]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    alone = torch.autograd.grad((expected * factor).sum(), parameters)
    for mine, theirs in zip(shared, alone):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
