"""The credit of one token, measured by continuing its answer many times.

    credit = V(the answer up to and with the token) - V(the answer before the token)

V of a beginning is the expected reward of what the model writes from there on. It is estimated by
the mean reward of k sampled continuations. Both means have an error, so the credit has an interval.
"""
from dataclasses import dataclass
from pathlib import Path

import torch

from credit.monte_carlo import continuation_rewards
from engine.errors import UserError
from engine.policy import derived_seed, encode_prompts
from engine.tokens import load_tokenizer
from harness.load import load_policy
from harness.record import find_folder, read_credit
from harness.screen import show_status
from harness.settings import make_settings

MOST_CONTINUATIONS = 1_000_000
Z = 1.96  # a normal 95% interval is so many standard errors to each side


@dataclass
class CreditOfToken:
    before: float  # V before the token
    after: float   # V after it
    error: float   # the standard error of the difference
    k: int         # continuations for each of the two

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the credit."""
        credit, half = self.after - self.before, Z * self.error
        return credit - half, credit + half

    def in_words(self) -> str:
        credit, (low, high) = self.after - self.before, self.interval
        return (f"V after - V before = {self.after:.4f} - {self.before:.4f} = {credit:+.3f} (95% "
                f"interval {low:+.3f} to {high:+.3f}). Each V is the mean "
                f"reward of {self.k:,} continuations by the model that sampled the answer")


def measure_credit(run: Path, sampled_by: str, step: int, b: int, t: int, k: int) -> CreditOfToken:
    """The credit of token t of answer b. `sampled_by` is the model's folder."""
    settings = make_settings({"config": run / "config.json", "device": "cpu", "shard": False})
    policy = load_policy(settings, find_folder(sampled_by))
    problems = policy.task.training_problems(settings.seed, step, settings.questions)
    generator = torch.Generator().manual_seed(derived_seed("credit of a token", step, b, t))
    rollouts = read_credit(run, step, load_tokenizer(run), problems, generator=generator)
    if rollouts.prompt_ids != encode_prompts(policy.tokenizer, policy.task, problems):
        raise UserError(f"--credit: the prompts of step {step} in {run} are not those that its "
                        "settings make now, so its answers cannot be scored again")
    problem, ids = int(rollouts.group[b]), rollouts.ids[b].tolist()
    prefixes = [(problem, tuple(ids[:t])), (problem, tuple(ids[:t + 1]))]
    rewards, _ = continuation_rewards(policy, rollouts, prefixes, k, show_share)  # (2, k)
    before, after = rewards.double().mean(1).tolist()
    error = (rewards.double().var(1) / k).sum().sqrt().item()
    show_status("")
    return CreditOfToken(before, after, error, k)


def show_share(share: float) -> None:
    show_status(f"sampling continuations: {share:.0%}")
