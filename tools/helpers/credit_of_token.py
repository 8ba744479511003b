"""The credit of one token, measured by continuing its answer many times.

    credit = V(the answer up to and with the token) - V(the answer before the token)

V of a beginning is the expected reward of what the model writes from there on. It is estimated by
the mean reward of k sampled continuations. Both means have an error, so the credit has an interval.

A rare reward may be missing from all continuations. Then their rewards are all equal, and the usual
interval, which follows from their variance alone, has no width. So the interval is that of Agresti
and Caffo (2000): before mean and variance are computed, each sample gets two rewards more, the
lowest and the highest one that may come. For rewards of 0 and 1 these are one failure and one
success. After the last token of an answer V is its reward, which has no error; then the other
sample gets two of each, as in Agresti and Coull (1998).
"""
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from credit.monte_carlo import continuation_rewards
from engine.errors import UserError
from engine.policy import Policy, derived_seed, encode_prompts
from engine.rollouts import Rollouts, double
from harness.load import load_policy
from harness.read_record import read_credit, read_tokenizer
from harness.record import find_folder
from harness.screen import show_status
from harness.settings import settings_of_run

# with fewer than ten continuations an interval is nearly as wide as the range of rewards
FEWEST_CONTINUATIONS, MOST_CONTINUATIONS = 10, 1_000_000
Z = 1.96  # a normal 95% interval is so many standard errors to each side


@dataclass
class CreditOfToken:
    before: float  # V before the token
    after: float   # V after it
    interval: tuple[float, float]  # the 95% interval of the credit
    k: int         # continuations for each of the two

    def in_words(self) -> str:
        credit, (low, high) = self.after - self.before, self.interval
        return (f"V after - V before = {self.after:.4f} - {self.before:.4f} = {credit:+.3f} (95% "
                f"interval {low:+.3f} to {high:+.3f}). Each V is the mean "
                f"reward of {self.k:,} continuations by the model that sampled the answer")


def measure_credit(run: Path, sampled_by: str, step: int, b: int, t: int, k: int) -> CreditOfToken:
    """The credit of token t of answer b. `sampled_by` is the model's folder."""
    seed = derived_seed("credit of a token", step, b, t)
    policy, rollouts = replayed_step(run, sampled_by, step, seed)
    problem, ids = int(rollouts.group[b]), rollouts.ids[b].tolist()
    prefixes = [(problem, tuple(ids[:t])), (problem, tuple(ids[:t + 1]))]
    rewards, _ = continuation_rewards(policy, rollouts, prefixes, k, show_share)  # (2, k)
    show_status("")
    is_last = t == int(rollouts.length[b]) - 1
    return credit_of(double(rewards), is_last, rollouts.reward)


def measure_all(run: Path, sampled_by: str, step: int, b: int, k: int) -> list[CreditOfToken]:
    """The credit of each token of answer b. V after a token is V before the next one, so the same
    continuations serve for both."""
    seed = derived_seed("credit of an answer", step, b)
    policy, rollouts = replayed_step(run, sampled_by, step, seed)
    problem, length = int(rollouts.group[b]), int(rollouts.length[b])
    ids = rollouts.ids[b, :length].tolist()
    prefixes = [(problem, tuple(ids[:t])) for t in range(length + 1)]
    rewards, _ = continuation_rewards(policy, rollouts, prefixes, k, show_share)
    show_status("")
    rewards = double(rewards)  # (length + 1, k)
    return [credit_of(rewards[t:t + 2], t == length - 1, rollouts.reward) for t in range(length)]


def replayed_step(run: Path, sampled_by: str, step: int, seed: int) -> tuple[Policy, Rollouts]:
    """The policy that sampled a step, and the step's answers with their problems, so that they can
    be continued and scored. `seed` is that of the continuations."""
    settings = settings_of_run(run, device="cpu")
    policy = load_policy(settings, find_folder(sampled_by))
    problems = policy.task.training_problems(settings.seed, step, settings.questions)
    generator = torch.Generator().manual_seed(seed)
    rollouts = read_credit(run, step, read_tokenizer(run), problems, generator=generator)
    if rollouts.prompt_ids != encode_prompts(policy.tokenizer, policy.task, problems):
        raise UserError(f"--credit: the prompts of step {step} in {run} are not those that its "
                        "settings make now, so its answers cannot be scored again")
    return policy, rollouts


def credit_of(rewards: Tensor, is_last: bool, recorded: Tensor) -> CreditOfToken:
    """The credit that follows from rewards (2, k) before and after a token."""
    before, after = rewards
    return CreditOfToken(before.mean().item(), after.mean().item(),
                         credit_interval(before, after, is_last, recorded), rewards.shape[1])


def credit_interval(before: Tensor, after: Tensor, is_last: bool,
                    recorded: Tensor) -> tuple[float, float]:
    """The 95% interval of the difference of two expected rewards, from samples of both (k,).

    It needs the lowest and the highest reward that may come. These are taken from the samples and
    from the rewards on record, and they are at least as far apart as 0 and 1, the usual rewards of
    a wrong and a right answer."""
    recorded = double(recorded[recorded.isfinite()])  # some may not be known
    seen = torch.cat([before, after, recorded])
    ends = torch.tensor([min(0.0, seen.min().item()), max(1.0, seen.max().item())],
                        dtype=torch.float64)
    if is_last:
        sample = torch.cat([before, ends, ends])
        middle = after[0] - sample.mean()
        variance = variance_of_mean(sample)
    else:
        samples = [torch.cat([rewards, ends]) for rewards in (before, after)]
        middle = samples[1].mean() - samples[0].mean()
        variance = variance_of_mean(samples[0]) + variance_of_mean(samples[1])
    half = Z * variance ** 0.5
    return middle.item() - half, middle.item() + half


def variance_of_mean(sample: Tensor) -> float:
    return sample.var(correction=0).item() / len(sample)


def show_share(share: float) -> None:
    show_status(f"sampling continuations: {share:.0%}")
