"""The one frame: a batch of sampled answers, and all that is known about each of their tokens.

Everything per token is (B, T) in response coordinates: index t is the t-th generated token. The sampler
writes in this frame, `lay_out` makes the one shift that brings a training forward pass into it, and nobody
else does arithmetic with positions.
"""
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import ranks
from countdown_task import END_OF_TURN, Problem, annotate, encode_prompt, score, token_bytes
from qwen2_model import Qwen2, SharedPrompts
from sampler import generate

LOGITS_AT_ONCE = 2 ** 26  # so many numbers at most are there for a whole vocabulary


@dataclass(frozen=True)
class Rollouts:
    """A batch of B answers to Q questions, group g holding the answers to question g: `tokens` to a mitigation.

    log_prob, entropy (-sum p log p) and collision (sum p^2) are the sampler's, the numbers on record.
    """
    problems: list[Problem]         # of each question
    prompt_ids: list[list[int]]     # of each question
    responses: list[str]            # of each answer, whole
    texts: list[list[str]]          # of each answer, token by token
    group: torch.Tensor             # (B,) 0..Q-1
    ids: torch.Tensor               # (B, T) int64, 0 beyond the mask
    mask: torch.Tensor              # (B, T) bool
    finished: torch.Tensor          # (B,) bool, ended itself before the limit
    log_prob: torch.Tensor          # (B, T) at temperature 1
    entropy: torch.Tensor           # (B, T)
    collision: torch.Tensor         # (B, T)
    section: torch.Tensor           # (B, T) uint8, codes in countdown_task.py
    kind: torch.Tensor              # (B, T) uint8
    scores: dict[str, torch.Tensor]  # reward, format, answer, reasoning: (B,) float32
    advantage: torch.Tensor | None = None    # (B, T), once it is known
    step: int = 0
    generator: torch.Generator | None = None  # on the CPU, for whoever needs random numbers
    forward: "Forward | None" = None          # where hidden and attention come from
    true_credit: torch.Tensor | None = None   # (B, T), where it is known

    def to(self, device) -> "Rollouts":
        moved = {key: value.to(device) for key, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved, scores={name: value.to(device) for name, value in self.scores.items()})

    def of_questions(self, share: range) -> "Rollouts":
        """The batch of the answers to these questions alone, which are numbered from 0."""
        rows = self.rows_of(share)
        moved = {name: value[rows] for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        listed = {name: [getattr(self, name)[i] for i in rows.tolist()] for name in ("responses", "texts")}
        asked = {name: getattr(self, name)[share.start:share.stop] for name in ("problems", "prompt_ids")}
        return replace(self, **{**moved, **listed, **asked, "group": moved["group"] - share.start},
                       scores={name: value[rows] for name, value in self.scores.items()})

    def rows_of(self, share: range) -> torch.Tensor:
        return ((self.group >= share.start) & (self.group < share.stop)).nonzero().squeeze(1)

    @property
    def length(self) -> torch.Tensor:
        return self.mask.sum(1)

    @property
    def reward(self) -> torch.Tensor:
        return self.scores["reward"]

    @property
    def hidden(self) -> torch.Tensor:
        """(B, T, D): the state that predicted token t. Looking costs one extra forward pass."""
        return self.forward.look(self)["hidden"]

    @property
    def attention(self) -> torch.Tensor:
        """(B, T, T): [b, i, j] is what token j received when token i was predicted, 0 unless j < i.
        Last layer, mean over heads. Looking costs one extra forward pass."""
        return self.forward.look(self, attention=True)["attention"]


def collect(model: Qwen2, tokenizer, problems: list[Problem], prompt_form: str, answers: int, **sampling) -> Rollouts:
    """Sample `answers` answers to each problem, label every token, score every answer."""
    prompts = [encode_prompt(tokenizer, problem, prompt_form) for problem in problems]
    generation = generate(model, prompts, answers=answers, stop_ids=stop_ids(model, tokenizer), share=ranks.share(len(prompts)), **sampling)
    ranks.add_up(*vars(generation).values())
    rows = [row[:n] for row, n in zip(generation.tokens.tolist(), generation.mask.sum(1).tolist())]
    return label(tokenizer, rows, problems=problems, prompt_ids=prompts, group=torch.arange(len(rows)) // answers,
                 ids=generation.tokens, **{k: v for k, v in vars(generation).items() if k != "tokens"})


def stop_ids(model: Qwen2, tokenizer) -> tuple[int, ...]:
    ends = [tokenizer.token_to_id(token) for token in END_OF_TURN]  # a base model's own list lacks <|im_end|>
    return tuple({*model.config.stop_ids, *(i for i in ends if i is not None)})


def label(tokenizer, rows: list[list[int]], *, problems, group, ids, **known) -> Rollouts:
    """What follows from the tokens alone: the section and kind of each, and the scores of each answer."""
    section, kind = torch.zeros(2, *ids.shape, dtype=torch.uint8)
    texts, responses, scores = [], [], []
    for i, (row, g) in enumerate(zip(rows, group.tolist())):
        pieces = token_bytes(tokenizer, row)
        section[i, :len(row)], kind[i, :len(row)] = torch.tensor(annotate(pieces), dtype=torch.uint8)
        texts.append([piece.decode(errors="replace") for piece in pieces])
        responses.append(b"".join(pieces).decode(errors="replace"))
        scores.append(score(responses[-1], problems[g].numbers, problems[g].target))
    device = ids.device
    return Rollouts(problems=problems, group=group.to(device), ids=ids, responses=responses, texts=texts,
                    section=section.to(device), kind=kind.to(device),
                    scores={name: torch.tensor([s[name] for s in scores], device=device) for name in scores[0]}, **known)


class TokenLogProbs(torch.autograd.Function):
    """log softmax(W h)_y of n tokens: (n, D), (V, D), (n,) -> (n,).

    The gradient at the logits is g (onehot(y) - p), so p (n, V) is all that has to be kept. Where that is more than
    LOGITS_AT_ONCE it is made for some tokens at a time, forgotten, and made again in the backward pass.
    """

    @staticmethod
    def forward(ctx, hidden, matrix, targets):
        ctx.chunk, found = max(1, LOGITS_AT_ONCE // len(matrix)), []
        for h, y in zip(hidden.split(ctx.chunk), targets.split(ctx.chunk)):
            log_prob, p = token_distribution(h, matrix, y)
            found.append(log_prob)
        ctx.save_for_backward(hidden, matrix, targets, p if len(found) == 1 else None)
        return torch.cat(found)

    @staticmethod
    def backward(ctx, gradient):
        hidden, matrix, targets, kept = ctx.saved_tensors
        at_hidden, at_matrix = [], torch.zeros_like(matrix)
        for h, y, g in zip(*(x.split(ctx.chunk) for x in (hidden, targets, gradient))):
            # what was kept may be asked for again, by another backward pass
            scaled = token_distribution(h, matrix, y)[1].mul_(-g[:, None]) if kept is None else kept * -g[:, None]
            at_logits = scaled.scatter_add_(1, y[:, None], g[:, None]).type_as(h)
            at_hidden.append(at_logits @ matrix.to(h.dtype))
            at_matrix += at_logits.T @ h
        return torch.cat(at_hidden), at_matrix, None


def token_distribution(hidden, matrix, targets) -> tuple[torch.Tensor, torch.Tensor]:
    logits = F.linear(hidden, matrix.to(hidden.dtype)).float()
    normaliser = logits.logsumexp(-1, keepdim=True)
    return (logits.gather(1, targets[:, None]) - normaliser).squeeze(1), logits.sub_(normaliser).exp_()


def lay_out(rollouts: Rollouts, rows: torch.Tensor) -> tuple[torch.Tensor, SharedPrompts, torch.Tensor]:
    """Some rows' tokens (N,), each of their prompts once; who sees whom; and which position predicts token t, (rows, T).

    The one place where the shift is made: token 0 is predicted at the end of the prompt, token t at token t - 1. The last
    token predicts nothing and is left out. Beyond the mask the index is 0.
    """
    lengths, groups = rollouts.mask[rows].sum(1).tolist(), rollouts.group[rows].tolist()
    asked = sorted(set(groups))
    prompts = [rollouts.prompt_ids[g] for g in asked]
    answers = [row[:n - 1] for n, row in zip(lengths, rollouts.ids[rows].tolist())]
    device = rollouts.ids.device
    shared = SharedPrompts([len(prompt) for prompt in prompts], [len(answer) for answer in answers],
                           torch.tensor([asked.index(g) for g in groups], device=device))
    ends = torch.tensor([len(prompt) for prompt in prompts], device=device).cumsum(0) - 1
    predicts = torch.zeros(rollouts.mask[rows].shape, dtype=torch.long, device=device)
    predicts[:, 0] = ends[shared.prompt_of]
    predicts[:, 1:1 + shared.answers.shape[1]] = shared.answers
    return torch.tensor(sum(prompts + answers, []), device=device), shared, predicts


def micro_batches(rollouts: Rollouts, rows: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Cut as the rows come, since answers to one question stand next to each other and share its prompt; then the largest
    first, so that the others fit into the memory it leaves."""
    def tokens(part):
        return sum(len(rollouts.prompt_ids[g]) for g in rollouts.group[part].unique().tolist()) + int(rollouts.length[part].sum())

    return sorted((part for part in rows.split(size) if len(part)), key=tokens, reverse=True)


def response_log_probs(model: Qwen2, rollouts: Rollouts, rows: torch.Tensor) -> torch.Tensor:
    """The training forward pass of some rows in response coordinates: (rows, T), 0 beyond the mask."""
    ids, shared, predicts = lay_out(rollouts, rows)
    mask = rollouts.mask[rows]
    hidden = model.model(ids, shared.positions, shared)  # (N, D)
    log_prob = TokenLogProbs.apply(hidden.index_select(0, predicts[mask]), model.output_matrix, rollouts.ids[rows][mask])
    return torch.zeros(mask.shape, device=ids.device).masked_scatter(mask, log_prob)


class Forward:
    """One extra forward pass of the policy over a batch, made when somebody looks, and kept for the next one who does."""

    def __init__(self, model: Qwen2, micro_batch: int):
        self.model, self.micro_batch, self.seen = model, micro_batch, {}

    @torch.no_grad()
    def look(self, rollouts: Rollouts, attention: bool = False) -> dict[str, torch.Tensor]:
        if attention and "attention" not in self.seen or not self.seen:
            (B, T), device = rollouts.mask.shape, rollouts.ids.device
            self.seen = {"hidden": torch.zeros(B, T, self.model.config.hidden_size, device=device)}
            if attention:
                self.seen["attention"] = torch.zeros(B, T, T, device=device)
            own = rollouts.rows_of(ranks.share(len(rollouts.prompt_ids)))
            for rows in micro_batches(rollouts, own[rollouts.length[own] > 0], self.micro_batch):
                self.look_at(rollouts, rows, attention)
            ranks.add_up(*self.seen.values())
        return self.seen

    def look_at(self, rollouts: Rollouts, rows: torch.Tensor, attention: bool) -> None:
        ids, shared, predicts = lay_out(rollouts, rows)
        last, S = self.model.config.num_hidden_layers - 1, shared.answers.shape[1]

        def attend(layer, q, k, v):
            if attention and layer == last:  # token t - 1 looks when token t is predicted
                seen = shared.received(q, k) * rollouts.mask[rows][:, 1:S + 1, None]
                self.seen["attention"][rows, 1:S + 1, :S] = seen
            return shared(layer, q, k, v)

        hidden = self.model.model(ids, shared.positions, attend).float()
        self.seen["hidden"][rows] = hidden[predicts] * rollouts.mask[rows][..., None]
