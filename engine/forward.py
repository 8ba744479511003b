"""The training forward pass in the frame of a batch: log-probs, hidden states and attention of every token."""
import torch
import torch.nn.functional as F

from engine import processes
from engine.packing import SharedPrompts
from engine.rollouts import Rollouts
from qwen2_model import Qwen2

LOGITS_AT_ONCE = 2 ** 26  # so many numbers at most are there for a whole vocabulary


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
            own = rollouts.rows_of(processes.share(len(rollouts.prompt_ids)))
            for rows in micro_batches(rollouts, own[rollouts.length[own] > 0], self.micro_batch):
                self.look_at(rollouts, rows, attention)
            processes.add_up(*self.seen.values())
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
