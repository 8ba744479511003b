"""Hindsight credit: the log-likelihood ratio of a token with success given, and without.

    A_t = log pi(y_t | prefix, success) - log pi(y_t | prefix)

By Bayes' rule this is log V(after y_t) - log V(before y_t), V being the probability to succeed.
Others make pi(. given success) by writing a right answer or feedback into the prompt (SDPO,
2601.20802; OPPO, 2605.21851, known here from summaries). Here it is a copy of the policy that is
taught the right answers of the batch and thrown away afterwards. It is judged by answers that it
was taught, so the tokens of right answers look better than they should, all of them.
After enough steps a copy follows Bayes' rule, where the rule can be computed
(tests/credit/test_hindsight.py).
"""
import copy
import typing

import torch

from engine import processes
from engine.choices import advantage
from engine.forward import frozen_log_probs, micro_batches, response_log_probs
from engine.optimizer import clip_and_step
from engine.policy import Policy
from engine.rollouts import Rollouts
from engine.sharded import whole_model
from harness.flags import Flag
from qwen2_model import Qwen2

Rate = typing.Annotated[float, Flag(1e-3, "learning rate of the copy that is taught right answers",
                                    above=0, most=10)]
Steps = typing.Annotated[int, Flag(3, "steps of the copy on the batch's right answers", least=1,
                                   most=1000)]


@advantage
class hindsight:
    """log p of the token under a copy of the policy fine-tuned on the batch's right answers, minus
    log p under the policy.

    0 where no answer of the batch is right. Needs memory for a second model with its optimizer.
    """

    def __init__(self, policy: Policy, *, hindsight_lr: Rate = 1e-3, hindsight_steps: Steps = 3):
        self.rate, self.steps = hindsight_lr, hindsight_steps

    def __call__(self, rollouts: Rollouts, policy: Policy) -> torch.Tensor:
        right = rollouts.scores["answer"]
        if not right.any():
            return torch.zeros_like(rollouts.log_prob)
        size = policy.settings.micro_batch
        after_success = taught(policy.model, rollouts, right, self.rate, self.steps, size)
        rows = rollouts.rows_of_rank()
        difference = (frozen_log_probs(after_success, rollouts, rows, size)
                      - frozen_log_probs(policy.model, rollouts, rows, size))
        processes.all_reduce(difference)
        return difference


@torch.enable_grad()
def taught(model: Qwen2, rollouts: Rollouts, share: torch.Tensor, rate: float, steps: int,
           size: int) -> Qwen2:
    """A copy of the model after some steps up the likelihood of the answers, each of which counts
    as much as its share (B,) says."""
    student = copy.deepcopy(whole_model(model, torch.float32)).float().requires_grad_()
    optimizer = torch.optim.AdamW(student.parameters(), lr=rate, weight_decay=0.0)
    rows = rollouts.rows_of_rank()
    rows, total = rows[share[rows] > 0], (share * rollouts.length).sum()
    for _ in range(steps):
        optimizer.zero_grad()
        for part in micro_batches(rollouts, rows, size):
            log_prob = response_log_probs(student, rollouts, part).sum(1)
            (-(share[part] * log_prob).sum() / total).backward()
        clip_and_step(optimizer, max_grad_norm=0.0)
    return student
