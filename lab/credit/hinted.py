"""Self-distilled credit: the same model reads its answers once more, with a hint in the prompt.

    p_t    probability of token t, given the problem and the tokens before it
    q_t    the same, if the prompt also holds a hint: another answer of the group, a right one

Where q is larger than p the hint makes the token likelier, so the token belongs to what the hint
shows. One pass costs as much as the forward half of an update. The hint's tokens are put at the end
of the last question; a task may write them otherwise, by a method `hinted_prompt(problem, hint)`.
In a group without another right answer nothing is known, and every token has the same weight; so it
is if answer and hint are longer than what the model takes.
"""
from dataclasses import replace

import torch
from torch import Tensor

from lab.engine.methods import mitigation
from lab.engine.errors import result_of
from lab.engine.forward import LOGITS_AT_ONCE, lay_out, micro_batches
from lab.engine.policy import Policy
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import ANSWER, CHATML, encode_prompt

# The largest weight; the smallest is 1 divided by it. The authors' weights stay within 0.9 to 1.1
# (see rlsd). This number is from no paper, and all runs here had it.
HINT_LIMIT = 2.0


@mitigation
class rlsd:
    """The weight is exp(sign(A) (log q - log p)), clipped to [1 / 2, 2], where q is the model's
    probability of the token if a right answer of the group stands in the prompt
    (after arXiv 2604.03128, which takes the reference answer). In an answer that is pushed up,
    tokens that the hint makes likelier get more weight; in one that is pushed down, they get less.

    Compared with the authors' code (iie-ycx/RLSD on GitHub, commit 93e46f7a): before it is clipped,
    the weight is the same. There it is clipped to [0.8, 1.2] and averaged with 1, and in 60 steps
    its part of the average falls from a half to 0. So no weight leaves 0.9 to 1.1, where here it
    may be 0.5 to 2. There q is that of a model which is up to 20 steps old."""

    def __init__(self, policy: Policy):
        self.metrics: dict[str, float | None] = {"hinted_share": None}

    def __call__(self, rollouts: Rollouts, policy: Policy) -> Tensor:
        hints = [hint_that_fits(policy, rollouts, row) for row in range(len(rollouts.texts))]
        self.metrics["hinted_share"] = sum(hint is not None for hint in hints) / len(hints)
        gap = gap_under_hints(policy, rollouts, hints)  # 0 without a hint, which is the weight 1
        return (rollouts.advantage.sign() * gap).exp().clamp(1 / HINT_LIMIT, HINT_LIMIT)


def hint_for(rollouts: Rollouts, row: int) -> list[int] | None:
    """The tokens of the answer section of another answer of the group that is right: the first one
    after this row, round the group. All its tokens if it has no such section."""
    same = (rollouts.group == rollouts.group[row]).nonzero().squeeze(1).tolist()
    start = same.index(row)
    for other in same[start + 1:] + same[:start]:
        length = int(rollouts.length[other])
        if length and rollouts.scores["answer"][other] > 0:
            ids = rollouts.ids[other, :length]
            inside = ids[rollouts.section[other, :length] == ANSWER].tolist()
            return inside or ids.tolist()
    return None


def hint_that_fits(policy: Policy, rollouts: Rollouts, row: int) -> list[int] | None:
    """The hint of an answer; None also if the model does not take so many tokens."""
    hint = hint_for(rollouts, row)
    if hint is None:
        return None
    prompt = hinted_prompt(policy, rollouts, int(rollouts.group[row]), hint)
    tokens = len(prompt) + int(rollouts.length[row])
    return hint if tokens <= policy.model.config.max_position_embeddings else None


def hinted_prompt(policy: Policy, rollouts: Rollouts, group: int, hint: list[int]) -> list[int]:
    """The tokens of the prompt with the hint in it: at the end of its last turn but the answer's,
    or as the task's own method `hinted_prompt` writes it."""
    own, problem = getattr(policy.task, "hinted_prompt", None), rollouts.problems[group]
    if own is not None:
        text = result_of(own, "a text", lambda found: isinstance(found, str), problem,
                         policy.tokenizer.decode(hint))
        return encode_prompt(policy.tokenizer, text, policy.task.show(problem))
    prompt = rollouts.prompt_ids[group]
    end = policy.tokenizer.token_to_id(CHATML[1])
    place = len(prompt)
    if end in prompt:
        place -= prompt[::-1].index(end) + 1
    return prompt[:place] + hint + prompt[place:]


@torch.no_grad()
def gap_under_hints(policy: Policy, rollouts: Rollouts, hints: list[list[int] | None]) -> Tensor:
    """(B, T) log q - log p, from one pass with the hints and one without. Answers that have no hint
    are not read, and have 0."""
    prompts = []
    for hint, group in zip(hints, rollouts.group.tolist()):
        usual = rollouts.prompt_ids[group]
        prompts.append(usual if hint is None else hinted_prompt(policy, rollouts, group, hint))
    device = rollouts.mask.device
    each_alone = torch.arange(len(prompts), device=device)  # prompts differ between answers
    hinted = replace(rollouts, prompt_ids=prompts, group=each_alone,
                     problems=[rollouts.problems[group] for group in rollouts.group.tolist()])
    plain = replace(hinted, prompt_ids=[rollouts.prompt_ids[group]
                                        for group in rollouts.group.tolist()])
    gap = torch.zeros(rollouts.mask.shape, device=device)
    rows = torch.tensor([row for row, hint in enumerate(hints) if hint is not None],
                        dtype=torch.long, device=device)
    for part in micro_batches(hinted, rows, policy.settings.micro_batch):
        mask, targets = rollouts.mask[part], rollouts.ids[part][rollouts.mask[part]]
        of_rows = torch.zeros_like(gap[part])
        of_rows[mask] = compare(policy, states_of(policy, hinted, part),
                                states_of(policy, plain, part), targets)
        gap[part] = of_rows
    return gap


def states_of(policy: Policy, rollouts: Rollouts, rows: Tensor) -> Tensor:
    """The hidden state that predicts each token of these rows, (tokens, D)."""
    ids, shared, predicts = lay_out(rollouts, rows)
    hidden = policy.model.model(ids, shared.positions, shared)
    return hidden[predicts[rollouts.mask[rows]]]


def compare(policy: Policy, with_hint: Tensor, without: Tensor, targets: Tensor) -> Tensor:
    """log q_y - log p_y of each token, in chunks that bound the logits."""
    size = max(1, LOGITS_AT_ONCE // policy.model.config.vocab_size)
    gaps = []
    for h, plain, y in zip(with_hint.split(size), without.split(size), targets.split(size)):
        log_q = policy.model.logits(h).float().log_softmax(-1)
        log_p = policy.model.logits(plain).float().log_softmax(-1)
        gaps.append((log_q - log_p).gather(1, y[:, None]).squeeze(1))
    return torch.cat(gaps)
