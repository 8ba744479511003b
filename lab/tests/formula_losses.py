"""Losses for lab/tests/test_formula.py: right ones, wrong ones, and pairs of mistakes, each with
what the tool has to say of it."""
import math

import torch


def log_probs(logits, batch, temperature=1.0, shift=1):
    """(B, L): column j is for token j."""
    log_p = (logits / temperature).log_softmax(-1)
    if shift == 0:
        return log_p.gather(2, batch.ids[:, :, None]).squeeze(2)
    value = log_p[:, :-shift].gather(2, batch.ids[:, shift:, None]).squeeze(2)
    return torch.cat([value.new_zeros(len(value), shift), value], 1)


def by_group(batch, function):
    """(B, 1) function(rewards of a group) for each group."""
    result = torch.zeros_like(batch.reward)
    for number in batch.group.unique():
        rows = batch.group == number
        result[rows] = function(batch.reward[rows])
    return result[:, None]


def z(correction, epsilon):
    return lambda batch: by_group(batch, lambda r: (r - r.mean()) / (
        r.std(correction=correction) + epsilon))


def mean(batch):
    return by_group(batch, lambda r: r - r.mean())


def mixed(batch):
    groups = int(batch.group.max()) + 1
    label = torch.arange(len(batch.group)) % groups
    return z(1, 1e-4)(type(batch)(**{**vars(batch), "group": label}))


def whitened(batch):
    a = z(0, 1e-4)(batch)
    return (a - a.mean()) / (a.std() + 1e-8)


def token(x, mask, batch):
    return (x * mask).sum() / mask.sum()


def answer(x, mask, batch):
    return ((x * mask).sum(1) / mask.sum(1)).mean()


def constant(number):
    return lambda x, mask, batch: (x * mask).sum() / (len(mask) * number)


def width(x, mask, batch):
    return (x * mask).mean()


def total(x, mask, batch):
    return (x * mask).sum()


def micro_batch(rows):
    def count(x, mask, batch):
        parts = [(a * m).sum() / m.sum() for a, m in zip(x.split(rows), mask.split(rows))]
        return sum(parts) / len(parts)
    return count


def twice_divided(x, mask, batch):
    return answer(x, mask, batch) / len(mask)


def no_ratio(log_prob, batch, a):
    return log_prob * a


def ratio(log_prob, batch, a):
    return (log_prob - batch.old_log_prob).exp() * a


def clip(low, high, dual=None):
    def objective(log_prob, batch, a):
        r = (log_prob - batch.old_log_prob).exp()
        value = torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a)
        return value if dual is None else torch.where(a < 0, torch.maximum(value, dual * a), value)
    return objective


def wrong_side(log_prob, batch, a):
    r = (log_prob - batch.old_log_prob).exp()
    return torch.maximum(r * a, r.clamp(.8, 1.2) * a)


def without_minimum(log_prob, batch, a):
    return (log_prob - batch.old_log_prob).exp().clamp(.8, 1.2) * a


def cispo(log_prob, batch, a):
    return (log_prob - batch.old_log_prob).exp().clamp(.5, 3).detach() * a * log_prob


def cispo_undetached(least, most):
    return lambda log_prob, batch, a: (log_prob - batch.old_log_prob).exp().clamp(
        least, most) * a * log_prob


def gfpo(logits, batch):
    """The shorter half of each group is trained, and ties of length are broken by the order."""
    n, kept = batch.mask.sum(1), torch.zeros_like(batch.mask)
    for number in batch.group.unique():
        rows = (batch.group == number).nonzero().squeeze(1)
        kept[rows[n[rows].argsort(stable=True)[:len(rows) // 2]]] = 1
    kept = kept * batch.mask
    return -(log_probs(logits, batch) * z(0, 1e-4)(batch) * kept).sum() / kept.sum()


def clamped_below_one(log_prob, batch, a):
    return (log_prob - batch.old_log_prob).exp().clamp(max=.2).detach() * a * log_prob


def gspo(low, high):
    def objective(log_prob, batch, a):
        mean_log_ratio = (((log_prob - batch.old_log_prob) * batch.mask).sum(1, keepdim=True)
                          / batch.mask.sum(1, keepdim=True))
        r = mean_log_ratio.exp()
        return torch.minimum(r * a, r.clamp(1 - low, 1 + high) * a).expand(log_prob.shape)
    return objective


def gmpo(log_prob, batch, a):
    log_ratio = log_prob - batch.old_log_prob
    clipped = torch.minimum(a.sign() * log_ratio, a.sign() * log_ratio.clamp(-.4, .4)) * a.sign()
    mean_clipped = (clipped * batch.mask).sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)
    return (mean_clipped.exp() * a).expand(log_prob.shape)


def sapo(log_prob, batch, a):
    r = (log_prob - batch.old_log_prob).exp()
    tau = torch.where(a > 0, 1.0, 1.05)
    return 4 / tau * torch.sigmoid(tau * (r - 1)) * a


def misaligned(log_prob, batch, a):
    old = torch.cat([batch.old_log_prob[:, :1], batch.old_log_prob[:, :-1]], 1)
    return (log_prob - old).exp() * a


def k3(log_prob, batch):
    d = batch.reference_log_prob - log_prob
    return d.exp() - d - 1


def entropy_of(logits):
    log_p = logits.log_softmax(-1)
    h = -(log_p.exp() * log_p).sum(-1)
    return torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)


def in_float32(loss):
    """The loss, computed in float32 from logits that it casts."""
    def cast(logits, batch):
        short = {name: value.float() if torch.is_tensor(value) and value.is_floating_point()
                 else value for name, value in vars(batch).items()}
        return loss(logits.float(), type(batch)(**short))
    return cast


def with_label_smoothing(logits, batch):
    spread = (logits.log_softmax(-1)[:, :-1].mean(-1) * batch.mask[:, 1:]).sum()
    return make()(logits, batch) - .01 * spread / batch.mask.sum()


def kl_per_token_mean_policy_by_token(logits, batch):
    log_prob = log_probs(logits, batch)
    return (-token(log_prob * mean(batch), batch.mask, batch)
            + .04 * answer(k3(log_prob, batch), batch.mask, batch))


def kl_everywhere(logits, batch):
    log_prob = log_probs(logits, batch)
    return -token(log_prob * mean(batch), batch.mask, batch) + .04 * k3(log_prob, batch).mean()


def nothing(logits, batch):
    return (log_probs(logits, batch).detach() * mean(batch)).sum() + (logits * 0).sum()


def sum_of_k1(batch, log_prob):
    return ((log_prob - batch.reference_log_prob) * batch.mask).sum(1).detach()


def reward_without(cost):
    def loss(logits, batch):
        log_prob = log_probs(logits, batch)
        shaped = type(batch)(**{**vars(batch), "reward": batch.reward - cost(batch, log_prob)})
        return -token(log_prob * z(1, 1e-4)(shaped), batch.mask, batch)
    return loss


def every_advantage_for_each(logits, batch):
    """(B, 1) times (B,) is (B, B): the advantages of all answers, whose sum is 0."""
    return -(mean(batch) * (log_probs(logits, batch) * batch.mask).sum(1)).mean()


def shifted_back(logits, batch):
    log_p = logits.log_softmax(-1)[:, 1:].gather(2, batch.ids[:, :-1, None]).squeeze(2)
    return -token(log_p * z(1, 1e-4)(batch), batch.mask[:, :-1], batch)


def summed_clip(log_prob, batch, a):
    """The ratio of an answer, where GSPO has the geometric mean of its tokens' ratios."""
    r = ((log_prob - batch.old_log_prob) * batch.mask).sum(1, keepdim=True).exp()
    return torch.minimum(r * a, r.clamp(.8, 1.2) * a).expand(log_prob.shape)


def by_probability(log_prob, batch, a):
    """prime-rl: a token is left out where its probability moved too far the way it is pushed."""
    moved = log_prob.exp() - batch.old_log_prob.exp()
    is_out = torch.where(a > 0, moved > .2, moved < -.2)
    return (log_prob - batch.old_log_prob).exp() * a * ~is_out


def inverted(batch):
    """But for the first token, which no logits predict."""
    return torch.cat([0 * batch.mask[:, :1], 1 - batch.mask[:, 1:]], 1)


def kl_at(mask_of):
    """The KL is averaged over other tokens than the rest of the loss."""
    def loss(logits, batch):
        log_prob = log_probs(logits, batch)
        return (make()(logits, batch)
                + .04 * token(k3(log_prob, batch), mask_of(batch), batch))
    return loss


def softcapped(logits, batch):
    return make()(3 * torch.tanh(logits / 3), batch)


def whole_answer(batch):
    return batch.mask


def without_end(batch):
    return batch.mask * (batch.ids != batch.end_id)


def with_prompt(batch):
    return (batch.ids != batch.pad_id).to(batch.mask.dtype)


def late(batch):
    return torch.cat([batch.mask[:, :1], batch.mask[:, :-1]], 1)


def finished_only(batch):
    ended = ((batch.ids == batch.end_id) * batch.mask).any(1, keepdim=True)
    return batch.mask * ended


def place(batch):
    return torch.arange(batch.ids.shape[1])[None]


def span(batch):
    """From the first token of an answer to its last, what an environment wrote in it included."""
    last = (batch.mask * place(batch)).amax(1, keepdim=True)
    return (place(batch) >= batch.prompt_length[:, None]) & (place(batch) <= last)


def one_place_early(batch):
    return batch.mask.clone() + (place(batch) == batch.prompt_length[:, None] - 1)


def one_place_too_many(batch):
    last = (batch.mask * place(batch)).amax(1, keepdim=True)
    return batch.mask + (place(batch) == last + 1)


def with_first_of_reply(batch):
    inside = batch.mask > 0
    return (inside | span(batch) & inside.roll(1, 1)).to(batch.mask.dtype)


def until_padding(batch):
    """A mask by ids: it ends before the first id of padding, which may be that of the end."""
    return batch.mask * ((batch.ids == batch.pad_id).cumsum(1) == 0)


def refusing_equal_rewards(batch):
    if any(r.min() == r.max() for r in (batch.reward[batch.group == g] for g in batch.group)):
        raise ValueError("all rewards are equal")
    return z(0, 1e-4)(batch)


def clip_to_sampler(log_prob, batch, a):
    return clip(.2, .2)(log_prob, type(batch)(**{**vars(batch),
                                                 "old_log_prob": batch.sampler_log_prob}), a)


def clip_to_reference(log_prob, batch, a):
    return clip(.2, .2)(log_prob, type(batch)(**{
        **vars(batch), "old_log_prob": batch.reference_log_prob}), a)


def without_last_of_an_odd_batch(logits, batch):
    value, n = log_probs(logits, batch) * z(0, 1e-4)(batch), len(batch.ids) // 2 * 2
    return -(value * batch.mask)[:n].sum() / batch.mask.sum()


def make(advantage=z(0, 1e-4), count=token, objective=no_ratio, temperature=1.0, shift=1, kl=None,
         beta=0.04, entropy=0.0, mask=whole_answer, sign=1.0, factor=1.0):
    def loss(logits, batch):
        log_prob = log_probs(logits, batch, temperature, shift)
        value = sign * objective(log_prob, batch, advantage(batch))
        kept = mask(batch)
        if kl is not None:
            value = value - beta * kl(log_prob, batch)
        if entropy:
            value = value + entropy * entropy_of(logits)
        return -factor * count(value, kept, batch)
    return loss


PLAIN = {"z n 0.0001", "token", "no ratio", "understood"}
# name: (loss, codes that the tool must say, the names of all that is wrong or unusual). Where
# "understood" is not among the codes, it must not be said
LOSSES = {
    "plain": (make(), PLAIN | {"end", "no kl", "no entropy", "temperature 1", "shift 1"}),
    "dr grpo with a kl": (make(mean, constant(1024), clip(.2, .2), kl=k3, entropy=.01),
                          {"mean", "constant 1024", "clip 0.2 0.2", "kl k3 0.04", "entropy 0.01",
                           "understood"}),
    "whitened": (make(whitened), {"z n 0.0001 whitened n-1 1e-08", "understood"},
                 "z n whitened n-1"),
    "groups mixed": (make(mixed), {"end"}, "groups mixed", "order of rows", "micro-batches"),
    "dual clip": (make(objective=clip(.2, .28, 3)), {"clip 0.2 0.28 dual 3", "understood"}),
    "wrong side": (make(objective=wrong_side),
                   {"clip wrong side 0.2 0.2", "understood"}, "clip wrong side"),
    "minimum missing": (make(objective=without_minimum), {"mask 0.2 0.2", "understood"}, "mask"),
    "cispo": (make(objective=cispo), {"cispo 0.5 2", "understood"}),
    "cispo undetached": (make(objective=cispo_undetached(.5, 3)),
                         {"cispo undetached 0.5 2", "token", "understood"}, "cispo undetached"),
    "without a bound": (make(objective=cispo_undetached(None, math.inf)),
                        {"cispo undetached none none", "understood"}, "cispo undetached"),
    "gfpo": (gfpo, set()),
    "clamped below one": (make(objective=clamped_below_one),
                          {"z n 0.0001", "token", "understood"}, "cispo none -0.8"),
    "sapo": (make(count=answer, objective=sapo), {"sapo 1 1.05", "understood"}),
    "gmpo": (make(count=answer, objective=gmpo),
             {"gmpo clip 0.4 0.4", "answer", "understood"}),
    "old one place off": (make(objective=misaligned),
                          PLAIN - {"no ratio"} | {"end", "ratio"}, "old misplaced 1"),
    "shifted twice": (make(shift=2), {"z n 0.0001", "understood"}, "shift 2"),
    "end untrained": (make(mask=without_end), {"token (trained)", "understood"}, "no end"),
    "prompt trained": (make(mask=with_prompt), {"z n 0.0001", "understood"}, "prompt", "replies",
                       "token (with prompt)"),
    "mask late": (make(mask=late), {"z n 0.0001", "understood"}, "mask late"),
    "unfinished dropped": (make(mask=finished_only),
                           {"no unfinished", "token (trained)", "z n 0.0001", "understood"}),
    "micro-batch": (make(count=micro_batch(2)), {"end"}, "order of rows", "micro-batches"),
    "divided twice": (make(count=twice_divided),
                      {"understood"}, "answer divided by the number of answers"),
    "hundred times": (make(factor=100.0), PLAIN, "times 100"),
    "sum for GSPO's mean": (make(mean, answer, summed_clip),
                            {"summed clip 0.2 0.2", "constant 1", "mean", "understood"},
                            "summed clip"),
    "prime-rl": (make(mean, objective=by_probability), {"dppo 0.2", "mean", "token", "understood"}),
    "no epsilon": (make(z(1, 0.0)), {"z n-1 0", "understood"}, "dead nan"),
    "casts to float32": (in_float32(make(z(1, 1e-6), answer, clip(.2, .28), kl=k3)),
                         {"z n-1 1e-06", "answer", "clip 0.2 0.28", "kl k3 0.04", "understood"}),
    "kl counted otherwise": (kl_per_token_mean_policy_by_token,
                             {"mean", "token", "kl k3 0.04 answer", "understood"}),
    "kl on all places": (kl_everywhere,
                         {"kl k3 0.04 constant over width of a row", "understood"}, "kl elsewhere",
                         "kl k3 constant over width of a row"),
    "mask inverted": (make(mask=inverted),
                      {"no middle", "understood"}, "mask inverted", "prompt", "padding", "no first",
                      "no end", "replies"),
    "shifted back": (shifted_back, set(), "shift -1"),
    "nothing": (nothing, set(), "zero"),
    "nothing but rounding": (every_advantage_for_each, set(), "zero"),
    # what is not understood, and what is right of it nevertheless
    "constant baseline": (make(lambda batch: batch.reward[:, None] - .5, objective=clip(.2, .2)),
                          {"raw", "token", "end"}),
    "label smoothing": (with_label_smoothing, {"z n 0.0001", "token", "temperature 1"}),
    "kl in the reward": (reward_without(lambda batch, log_prob: .1 * sum_of_k1(batch, log_prob)),
                         {"z n-1 0.0001", "token", "end"}),
    "softcapped": (softcapped, set()),
    "ratio to the reference": (make(objective=clip_to_reference),
                               {"reference for old", "clip 0.2 0.2", "understood"},
                               "reference for old"),
    "a clamp without the 1": (make(objective=clip(1.2, -.8)),
                              {"z n 0.0001 only negative"}, "z n only negative"),
    "kl at the prompt too": (kl_at(with_prompt),
                             {"z n 0.0001", "token", "end"}, "kl elsewhere", "pad is end",
                             "micro-batches"),
    # edges, turns, padding, samplers, and what no table has
    "last of prompt": (make(mask=one_place_early, count=answer),
                       {"end", "understood"}, "last of prompt"),
    "first of padding": (make(mask=one_place_too_many), {"end", "understood"}, "first of padding"),
    "replies": (make(mask=span), {"end", "token (trained)", "understood"}, "replies"),
    "first of reply": (make(mask=with_first_of_reply), {"understood"}, "turns otherwise"),
    "until padding": (make(mask=until_padding), PLAIN, "pad is end"),
    "refuses equal rewards": (make(refusing_equal_rewards), PLAIN, "dead raises"),
    "shift and sign": (make(shift=0, sign=-1.0, count=answer),
                       {"answer", "understood"}, "sign reversed", "shift 0"),
    "any temperature": (make(temperature=.77), PLAIN, "temperature 0.77"),
    "sampler for old": (make(objective=clip_to_sampler),
                        {"sampler for old", "clip 0.2 0.2", "understood"}),
    # pairs
    "odd batch": (without_last_of_an_odd_batch, set(), "order of rows", "micro-batches"),
    "sum for mean and k3": (make(count=total, kl=k3), {"sum", "kl k3 0.04", "understood"}),
    "reversed kl and gspo": (make(count=answer, objective=gspo(.1, .1), kl=k3, beta=-.04),
                             {"gspo clip 0.1 0.1", "kl k3 -0.04", "understood"}, "kl reversed"),
    # mirrored rewards give the same push, and it is the reward's nevertheless
    "best and worst alike": (make(lambda batch: by_group(
        batch, lambda r: ((r == r.max()) | (r == r.min())).double())), set()),
}
