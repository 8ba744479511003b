"""Self-distilled credit: the same model reads its answers once more, with a hint in the prompt.

    p_t    probability of token t, given the problem and the tokens before it
    q_t    the same, if the prompt also holds a hint: another answer of the group, right or wrong

Where q is larger than p the hint makes the token likelier, so the token belongs to what the hint
shows. One pass costs as much as the forward half of an update. The hint's tokens are put at the end
of the last question; a task may write them otherwise, by a method `hinted_prompt(problem, hint)`.
In a group without a right answer (or a wrong one, where one is needed) nothing is known, and every
token has the same weight; so it is if answer and hint are longer than what the model takes.
"""
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.choices import mitigation
from engine.errors import wrong_result
from engine.forward import LOGITS_AT_ONCE, lay_out, micro_batches
from engine.policy import Policy
from engine.rollouts import Rollouts
from engine.tokens import ANSWER, CHATML, encode_prompt
from harness.flags import Positive


@dataclass
class Hinted:
    """Two numbers of each token (B, T): log q - log p, and KL(q || p); 0 where `known` is False."""
    gap: Tensor
    divergence: Tensor
    known: Tensor      # (B,)


class WithHints:
    """What the three weightings below share: the hints of a batch, and the pass with them."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.metrics: dict[str, float | None] = {"hinted_share": None}

    def look(self, rollouts: Rollouts, right: bool) -> Hinted:
        """The pass in which each answer is read with a right, or a wrong, answer of its group as
        the hint; never with itself."""
        hints = [hint_that_fits(self.policy, rollouts, row, right)
                 for row in range(len(rollouts.texts))]
        known = torch.tensor([hint is not None for hint in hints])
        found = read_with_hints(self.policy, rollouts, hints)
        self.metrics["hinted_share"] = known.float().mean().item()
        return replace(found, known=known.to(rollouts.mask.device))


@mitigation
class rlsd(WithHints):
    """The weight is exp(sign(A) (log q - log p)), clipped to [1 / hint_limit, hint_limit], where q
    is the model's probability of the token if a right answer of the group stands in the prompt
    (after the abstract of arXiv 2604.03128, which takes the reference answer). In an answer that is
    pushed up, tokens that the hint makes likelier get more weight; in one that is pushed down, they
    get less."""

    def __init__(self, policy: Policy, *, hint_limit: Positive = 2.0):
        super().__init__(policy)
        self.limit = hint_limit

    def __call__(self, rollouts: Rollouts, policy: Policy) -> Tensor:
        seen = self.look(rollouts, right=True)
        return clipped_weight(seen.gap, seen.known, rollouts, self.limit)


@mitigation
class rlcsd(WithHints):
    """As `rlsd`, with the difference of two gaps: that under a right answer of the group as the
    hint, minus that under a wrong one (after the abstract of arXiv 2606.11709). What every hint
    does to a token, such as making it copy the form, falls out."""

    def __init__(self, policy: Policy, *, hint_limit: Positive = 2.0):
        super().__init__(policy)
        self.limit = hint_limit

    def __call__(self, rollouts: Rollouts, policy: Policy) -> Tensor:
        wrong, right = self.look(rollouts, right=False), self.look(rollouts, right=True)
        return clipped_weight(right.gap - wrong.gap, right.known & wrong.known, rollouts,
                              self.limit)


@mitigation
class sc_grpo(WithHints):
    """The weight is KL(q || p), where q is the model's distribution at this token if a right answer
    of the group stands in the prompt (after the abstract of arXiv 2606.18810). Tokens at which the
    hint changes what the model would write get the weight, whatever was written."""

    def __call__(self, rollouts: Rollouts, policy: Policy) -> Tensor:
        seen = self.look(rollouts, right=True)
        usual = seen.divergence[rollouts.mask & seen.known[:, None]]
        mean = usual.mean() if len(usual) else torch.tensor(1.0)
        return torch.where(seen.known[:, None], seen.divergence, mean.clamp(min=1e-12))


def clipped_weight(gap: Tensor, known: Tensor, rollouts: Rollouts, limit: float) -> Tensor:
    weight = (rollouts.advantage.sign() * gap).exp().clamp(1 / limit, limit)
    return torch.where(known[:, None], weight, 1.0)


def hint_for(rollouts: Rollouts, row: int, right: bool) -> list[int] | None:
    """The tokens of the answer section of another answer of the group that is right, or wrong: the
    first one after this row, round the group. All its tokens if it has no such section."""
    same = (rollouts.group == rollouts.group[row]).nonzero().squeeze(1).tolist()
    start = same.index(row)
    for other in same[start + 1:] + same[:start]:
        length = int(rollouts.length[other])
        if length and bool(rollouts.scores["answer"][other] > 0) == right:
            ids = rollouts.ids[other, :length]
            inside = ids[rollouts.section[other, :length] == ANSWER].tolist()
            return inside or ids.tolist()
    return None


def hint_that_fits(policy: Policy, rollouts: Rollouts, row: int, right: bool) -> list[int] | None:
    """The hint of an answer; None also if the model does not take so many tokens."""
    hint = hint_for(rollouts, row, right)
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
        text = own(problem, policy.tokenizer.decode(hint))
        if not isinstance(text, str):
            raise wrong_result(own, "a text", text)
        return encode_prompt(policy.tokenizer, text, policy.task.show(problem))
    prompt = rollouts.prompt_ids[group]
    end = policy.tokenizer.token_to_id(CHATML[1])
    place = len(prompt)
    if end in prompt:
        place -= prompt[::-1].index(end) + 1
    return prompt[:place] + hint + prompt[place:]


@torch.no_grad()
def read_with_hints(policy: Policy, rollouts: Rollouts, hints: list[list[int] | None]) -> Hinted:
    """The two numbers of each token, from one pass with the hints and one without. Answers that
    have no hint are not read."""
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
    gap, divergence = torch.zeros(2, *rollouts.mask.shape, device=device)
    rows = torch.tensor([row for row, hint in enumerate(hints) if hint is not None],
                        dtype=torch.long, device=device)
    for part in micro_batches(hinted, rows, policy.settings.micro_batch):
        mask, targets = rollouts.mask[part], rollouts.ids[part][rollouts.mask[part]]
        numbers = compare(policy, states_of(policy, hinted, part), states_of(policy, plain, part),
                          targets)
        for frame, values in zip((gap, divergence), numbers):
            of_rows = torch.zeros_like(frame[part])
            of_rows[mask] = values
            frame[part] = of_rows
    return Hinted(gap, divergence, torch.zeros(len(prompts), dtype=torch.bool))


def states_of(policy: Policy, rollouts: Rollouts, rows: Tensor) -> Tensor:
    """The hidden state that predicts each token of these rows, (tokens, D)."""
    ids, shared, predicts = lay_out(rollouts, rows)
    hidden = policy.model.model(ids, shared.positions, shared)
    return hidden[predicts[rollouts.mask[rows]]]


def compare(policy: Policy, with_hint: Tensor, without: Tensor,
            targets: Tensor) -> tuple[Tensor, Tensor]:
    """log q_y - log p_y and KL(q || p) of each token, in chunks that bound the logits."""
    size = max(1, LOGITS_AT_ONCE // policy.model.config.vocab_size)
    gaps, divergences = [], []
    for h, plain, y in zip(with_hint.split(size), without.split(size), targets.split(size)):
        log_q = policy.model.logits(h).float().log_softmax(-1)
        log_p = policy.model.logits(plain).float().log_softmax(-1)
        difference = log_q - log_p
        gaps.append(difference.gather(1, y[:, None]).squeeze(1))
        divergences.append((log_q.exp() * difference).sum(-1).clamp(min=0))
    return torch.cat(gaps), torch.cat(divergences)
