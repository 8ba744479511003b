"""Who answers the problems of a step: the policy's own sampler, a server, or pairs from a file."""
from engine.optimizer import AdamW
from engine.policy import Policy
from harness.given_pairs import GivenPairs
from harness.remote_rollouts import connect
from harness.settings import OWN_SAMPLER


def answers_from(run, policy: Policy, optimizer: AdamW):
    """Something with the method `sample(problems, answers, seed) -> Rollouts`."""
    s = policy.settings
    if s.pairs:
        return GivenPairs(s.pairs, policy, run)
    if s.rollouts != OWN_SAMPLER:
        return connect(policy, optimizer, run)
    return policy
