"""Small batches, methods and models that the lab's tests share."""
import dataclasses
import functools
import os
import re
from types import SimpleNamespace

import pytest
import torch

import conftest
from conftest import ROOT
from countdown_task import Problem
import lab.credit.weightings  # noqa: F401  fills the lists of choices
from lab.engine.methods import ADVANTAGES, MITIGATIONS, make
from grpo import grpo
from lab.engine.model import Qwen2
from lab.engine.model_folder import LARGE
from lab.harness.flags import check_value, flags_of
from lab.engine.errors import UserError
from lab.engine.policy import Forward
from lab.engine.rollouts import Rollouts, score_answers
from lab.engine.tokens import ANSWER, NUMBER, encode_prompt

# The tests are of the project's own methods. What a user has added to them is tested for what it
# returns (test_every_method.py), and is in no other test's way.
LISTED = set(re.findall(r"^\| `(\w+)` \|",
                        (ROOT / "docs/reference/methods.md").read_text("utf-8"), re.M))
OWN = [(choices, name, known.pop(name)) for choices in (MITIGATIONS, ADVANTAGES)
       for known in choices.data.maps  # the lab's, and the book's
       for name in known.keys() - LISTED
       if getattr(known[name], "__module__", "credit") in ("mitigations", "grpo", "credit")]

if torch.backends.cpu.get_cpu_capability() != "AVX512":
    # Attention in bfloat16 takes oneDNN's matrix products where the CPU has AMX, and fails unless
    # torch's own kernels use AVX512. ATEN_CPU_CAPABILITY lowers only torch's: lower oneDNN's, too.
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"

PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12]]

hand_made = functools.partial(conftest.hand_made, kind_of_batch=Rollouts)
one_row = functools.partial(conftest.one_row, kind_of_batch=Rollouts)


def one_of(count, cases):
    """One of so many cases of a long table; the others are slow tests, which .ci/run runs."""
    found = []
    for number, case in enumerate(cases):
        given = case if isinstance(case, tuple) else (case,)
        found.append(pytest.param(*given, marks=[pytest.mark.slow] if number % count else []))
    return found


def looking(rollouts, **seen):
    """The batch with these hidden states or this attention to look at."""
    return dataclasses.replace(rollouts, forward=SimpleNamespace(look=lambda *_, **__: seen))


def fill_beyond_the_mask(rollouts):
    """With numbers that would be noticed."""
    for name, value in dict(log_prob=-9.0, entropy=50.0, collision=0.7, advantage=4.0, ids=7,
                            section=ANSWER, kind=NUMBER).items():
        getattr(rollouts, name).masked_fill_(~rollouts.mask, value)


def make_weighting(name, flags, policy):
    """The weighting with these flags, the others at their defaults."""
    function = MITIGATIONS[name]
    defaults = {flag: meta.default for flag, meta in flags_of(function).items()}
    return make(function, defaults | flags, policy)


class StateIdea:
    """An idea with a state."""

    def __init__(self, policy, *, speed: float = 0.5):
        self.mean, self.speed, self.metrics = torch.zeros(1), speed, {}

    def __call__(self, rollouts, policy):
        self.mean = self.mean + self.speed * (rollouts.entropy.mean() - self.mean)
        return 1 + (rollouts.entropy - self.mean).abs()

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, tensors):
        self.mean = tensors["mean"]


def put_in(monkeypatch, function, name):
    """Make it a choice of --mitigation for the time of a test."""
    function.__name__ = name
    monkeypatch.setitem(MITIGATIONS, name, function)


def assert_bounded(flags):
    """Every number among these flags, by program and name, has bounds, and its defaults lie
    within."""
    for name, flag in flags.items():
        if flag.type not in (int, float):
            continue
        largest = 10 ** 18 if flag.type is int else 1e30
        for value in (largest, -largest, float("inf"), float("nan")):
            with pytest.raises(UserError, match="should be"):
                check_value(name, value, flag)
        for value in (flag.default, getattr(flag, "quick", None)):
            check_value(name, value, dataclasses.replace(flag, default=None, kind=flag.type))


def large_folder(folder):
    """A file of zeros that takes no room on the disk has the size of a large model's weights."""
    with open(folder / "model.safetensors", "wb") as file:
        os.truncate(file.fileno(), LARGE + 1)
    return folder


def copied(model, noise=0.0):
    """A model of the same shape, whose parameters lie about so far from those of the other."""
    copy, generator = Qwen2(model.config), torch.Generator().manual_seed(5)
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return copy


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def log_probs_behind(model, prompt, ids, temperature=1.0):
    """(n, V): the log-probs that the model gives at each of these tokens behind the prompt, by a
    pass over this row alone. The position before a token predicts it."""
    logits = model(torch.tensor([[*prompt, *ids]]))[0, len(prompt) - 1:-1]
    return (logits / temperature).log_softmax(-1)


@torch.no_grad()
def facts_behind(model, prompt, ids):
    """(3, n): of each of these tokens the log-prob, the entropy and the collision."""
    log_p = log_probs_behind(model, prompt, ids)
    p = log_p.exp()
    return torch.stack([log_p[range(len(ids)), ids], -(p * log_p).sum(-1), p.square().sum(-1)])


# two questions, three answers each: right, wrong, without an answer; one token, no tags, right
SPOKEN = [
    " 3 + 5 = 8, 8 + 7 = 15 hit.</think>\n<answer> ( 3 + 5 ) + 7</answer><|im_end|>",
    " first 3 * 5 = 15, 15 - 7 = 8 wrong.</think>\n<answer> ( 3 * 5 ) - 7</answer><|im_end|>",
    " first 3 * 5 = 15, 15 - 7 = 8 wrong. now second 3 + 7 = 10", "<|im_end|>",
    " hmm. stop here.<|im_end|>",
    " hmm. 4 * 2 = 8, 8 - 6 = 2 hit.</think>\n<answer> ( 4 * 2 ) - 6</answer><|im_end|>"]
ASKED = [Problem((3, 5, 7), 15), Problem((2, 4, 6), 2)]


def spoken(policy, texts=SPOKEN, problems=ASKED, micro_batch=64, **known):
    """These texts as if the model had sampled them, with its own numbers at every token."""
    ids = [policy.tokenizer.encode(text).ids for text in texts]
    T = max(map(len, ids))
    mask = torch.tensor([[True] * len(row) + [False] * (T - len(row)) for row in ids])
    group = torch.arange(len(ids)) // (len(ids) // len(problems))
    prompts = [encode_prompt(policy.tokenizer, policy.task.prompt_for(problem), "")
               for problem in problems]
    facts = torch.zeros(3, *mask.shape)
    for b, row in enumerate(ids):
        facts[:, b, :len(row)] = facts_behind(policy.model, prompts[group[b]], row)
    padded = torch.tensor([row + [0] * (T - len(row)) for row in ids])
    sampled = Rollouts(problems, prompts, group, padded, mask, torch.ones_like(mask[:, 0]),
                       *facts)
    batch = score_answers(sampled, policy.tokenizer, policy.task)
    usual = dict(advantage=grpo(batch), step=20, generator=torch.Generator().manual_seed(3),
                 forward=Forward(policy.model, micro_batch))
    return dataclasses.replace(batch, **{**usual, **known})
