"""The other answers to "compared with what?": a value for every prefix of an answer, learned or sampled.

    gae    V(prefix) is a linear function of the policy's own hidden state, trained beside it (PPO's critic)
    vine   V(prefix) is the mean reward of fresh answers that go on from there (VinePPO, 2410.01679)

Both have the form of a mitigation with state: made once a run, called with each batch, saved in checkpoints.
A critic of its own size, the usual PPO, would be a second model in memory; the head here is one number for
each hidden unit, at the price of features that are trained for something else.
"""
import torch
import torch.nn as nn

import ranks
from qwen2_model import UserError
from rollouts import LOGITS_AT_ONCE, Rollouts, stop_ids
from sampler import Distribution, generate


class Trained:
    """A small module with an AdamW of its own; all of it goes into checkpoints."""

    def __init__(self, module: nn.Module, learning_rate: float, device):
        self.module = module.to(device)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=learning_rate, weight_decay=0.0, fused=True)

    def descend(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for parameter in self.module.parameters():  # one that had no part gets its state all the same, so that checkpoints are whole
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        self.optimizer.step()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.module.state_dict() | optimizer_tensors(self.optimizer, dict(self.module.named_parameters()))

    def load_state_dict(self, tensors: dict[str, torch.Tensor]) -> None:
        own = self.module.state_dict()
        if not set(own) <= set(tensors):
            raise UserError(f"the checkpoint lacks {sorted(set(own) - set(tensors))[0]}")
        self.module.load_state_dict({name: tensors[name] for name in own})
        load_optimizer_tensors(self.optimizer, dict(self.module.named_parameters()), {k: v for k, v in tensors.items() if k not in own})


ADAM = ("step", "exp_avg", "exp_avg_sq")


def optimizer_tensors(optimizer, parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """AdamW's state under the names of the parameters; empty before its first step."""
    return {f"{key}.{name}": value for name, parameter in parameters.items() for key, value in optimizer.state[parameter].items()}


def load_optimizer_tensors(optimizer, parameters: dict[str, nn.Parameter], tensors: dict[str, torch.Tensor]) -> None:
    wanted = {f"{key}.{name}" for name in parameters for key in ADAM}
    if tensors and set(tensors) != wanted:
        raise UserError(f"the checkpoint does not fit the model: {sorted(set(tensors) ^ wanted)[0]}")
    for name, parameter in parameters.items() if tensors else ():
        optimizer.state[parameter] = {key: tensors[f"{key}.{name}"].clone().to(parameter.device) for key in ADAM}


def generalised_advantage(value: torch.Tensor, reward: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """GAE (1506.02438): delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}.

    The reward (B,) comes with the last token, and nothing is worth anything after it: an answer cut off by the
    limit ends there like any other. gamma = lam = 1 gives R - V_t.
    """
    B, T = mask.shape
    advantage, following, value = torch.zeros_like(value), torch.zeros(B, device=value.device), value * mask
    last = mask.sum(1) - 1
    for t in range(T - 1, -1, -1):
        next_value = value[:, t + 1] if t + 1 < T else 0.0
        delta = reward * (last == t) + gamma * next_value - value[:, t]
        following = (delta + gamma * lam * following) * mask[:, t]
        advantage[:, t] = following
    return advantage


class gae:
    """A critic: linear in the direction of the hidden state that predicted the token (its length would only make the
    learning rate depend on the model). The critic's loss never reaches the policy."""

    def __init__(self, lab):
        s = lab.settings
        head = nn.Linear(lab.model.config.hidden_size, 1)
        nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
        self.gamma, self.lam = s.gamma, s.gae_lambda
        self.critic, self.metrics = Trained(head, s.critic_lr, lab.model.device), {}

    def __call__(self, rollouts: Rollouts, lab) -> torch.Tensor:
        """Advantages by the critic as it was; then it learns from this batch, in eight steps."""
        state = nn.functional.normalize(rollouts.hidden, dim=-1)
        with torch.no_grad():
            value = self.critic.module(state).squeeze(-1)
        advantage = generalised_advantage(value, rollouts.reward, rollouts.mask, self.gamma, self.lam)
        target, mask = advantage + value, rollouts.mask
        error, spread = (target - value)[mask].var(correction=0), target[mask].var(correction=0)
        self.metrics = {"explained_variance": (1 - error / spread).item() if spread > 0 else None,
                        "value_loss": (target - value)[mask].square().mean().item()}
        order = torch.randperm(len(mask), generator=rollouts.generator).to(mask.device)
        for rows in order.chunk(8):
            predicted = self.critic.module(state[rows][mask[rows]]).squeeze(-1)
            self.critic.descend((predicted - target[rows][mask[rows]]).square().mean())
        return advantage

    def state_dict(self):
        return self.critic.state_dict()

    def load_state_dict(self, tensors):
        self.critic.load_state_dict(tensors)


@torch.no_grad()
def continuation_rewards(lab, rollouts: Rollouts, prefixes: list[tuple[int, tuple[int, ...]]], k: int,
                         progress=lambda share: None) -> tuple[torch.Tensor, int]:
    """Rewards (n, k) of k fresh answers that go on from each (question, first tokens), and the tokens that took.

    A prefix that has ended, or that has reached the limit, is worth its own reward. Random numbers follow from
    the batch's generator alone.
    """
    s, ends = lab.settings, set(stop_ids(lab.model, lab.tokenizer))
    seed = int(torch.randint(2 ** 62, (1,), generator=rollouts.generator))
    rewards, spent = torch.zeros(len(prefixes), k), 0
    room = [0 if ids and ids[-1] in ends else s.max_new_tokens - len(ids) for _, ids in prefixes]
    over = [i for i, left in enumerate(room) if left <= 0]
    open_ones = sorted((i for i in range(len(prefixes)) if room[i] > 0), key=lambda i: room[i])  # like lengths together
    size = max(1, s.questions * s.answers // k)  # as many rows as a batch of training
    for start in range(0, len(open_ones), size)[ranks.rank()::ranks.count()]:
        progress(start / len(open_ones))
        part = open_ones[start:start + size]
        fresh = generate(lab.model, [rollouts.prompt_ids[prefixes[i][0]] + list(prefixes[i][1]) for i in part], answers=k,
                         max_new_tokens=[room[i] for i in part], temperature=s.temperature, seed=seed + start, stop_ids=tuple(ends))
        lengths = fresh.mask.sum(1).tolist()
        spent += sum(lengths)
        for row, (ids, n) in enumerate(zip(fresh.tokens.tolist(), lengths)):
            g, prefix = prefixes[part[row // k]]
            rewards[part[row // k], row % k] = lab.reward_of(rollouts.problems[g], (*prefix, *ids[:n]))
    counted = torch.tensor(float(spent))
    ranks.add_up(rewards, counted)
    for i in over:
        rewards[i] = lab.reward_of(rollouts.problems[prefixes[i][0]], prefixes[i][1])
    return rewards.to(rollouts.mask.device), int(counted)


@torch.no_grad()
def other_tokens(lab, rollouts: Rollouts, at: torch.Tensor) -> list[int]:
    """For each place (answer, index) of `at` (n, 2): a token from the policy without the one that stands there."""
    uniform, found = torch.rand(len(at), generator=rollouts.generator).to(at.device), []
    chunk = max(1, LOGITS_AT_ONCE // lab.model.config.vocab_size)
    for (row, t), u in zip((part.T for part in at.split(chunk)), uniform.split(chunk)):
        logits = lab.model.logits(rollouts.hidden[row, t]).float() / lab.settings.temperature
        logits.scatter_(1, rollouts.ids[row, t][:, None], float("-inf"))
        found += Distribution(logits).pick(u).tolist()
    return found


def prefix_values(lab, rollouts: Rollouts, cuts: list[list[int]], k: int) -> tuple[list[list[float]], int]:
    """Monte Carlo values of answer b's first cuts[b][j] tokens. Equal prefixes of one question share theirs."""
    wanted = {}
    rows = [row[:n] for row, n in zip(rollouts.ids.tolist(), rollouts.length.tolist())]
    groups = rollouts.group.tolist()
    for g, row, at in zip(groups, rows, cuts):
        for n in at:
            wanted.setdefault((g, tuple(row[:n])), len(wanted))
    if not wanted:
        return [[] for _ in cuts], 0
    rewards, spent = continuation_rewards(lab, rollouts, list(wanted), k)
    mean = rewards.mean(1).tolist()
    return [[mean[wanted[g, tuple(row[:n])]] for n in at] for g, row, at in zip(groups, rows, cuts)], spent


class vine:
    """Monte Carlo values: a segment's advantage is the value after it minus the value before it, the last segment ends
    with the reward itself. Unbiased for any number of continuations; the noise is about 2 p (1 - p) / k."""

    def __init__(self, lab):
        self.k, self.every, self.metrics = lab.settings.values_k, lab.settings.values_every, {}

    def __call__(self, rollouts: Rollouts, lab) -> torch.Tensor:
        cuts = [segment_starts(texts, self.every) for texts in rollouts.texts]
        values, spent = prefix_values(lab, rollouts, cuts, self.k)
        self.metrics = {"extra_tokens": spent}
        advantage = torch.zeros_like(rollouts.log_prob)
        for b, (starts, value, length) in enumerate(zip(cuts, values, rollouts.length.tolist())):
            ends, after = [*starts[1:], length], [*value[1:], rollouts.reward[b].item()]
            for start, end, before, then in zip(starts, ends, value, after):
                advantage[b, start:end] = then - before
        return advantage


def segment_starts(texts: list[str], every: str) -> list[int]:
    """0 and then every so many tokens, or after each token with a new line in it."""
    if every != "line":
        return list(range(0, len(texts), int(every)))
    return [0] + [t + 1 for t, text in enumerate(texts[:-1]) if "\n" in text]


CRITICS = {"gae": gae, "vine": vine}
