"""Five ideas of other people, each as one function, for the rule to say what it is worth.

Choices of --advantage in the runs of an experiment: python -m research.train has them. Each is the
part of its paper that fits one function; its docstring says what is left out.
"""
from dataclasses import replace
from types import SimpleNamespace

import torch

from credit.belief import forced_texts
from credit.critic import gae, generalised_advantage
from credit.monte_carlo import continuation_rewards
from engine.choices import advantage
from engine.forward import frozen_log_probs
from engine.policy import derived_seed
from engine.rollouts import Rollouts
from engine.tokens import THINK
from grpo import gradient_size, grpo
from harness.flags import CountOrNone, Positive

NAMES = ("optimal_token_baseline", "peer_hindsight", "contrastive_hindsight", "answer_probes",
         "calibrated_gae")


@advantage
def optimal_token_baseline(rollouts: Rollouts) -> torch.Tensor:
    """Reward minus the baseline of least variance at each place (2602.07078).

        A_t = R - B_t,   B_t = sum R_i W_it / sum W_it  over the group's answers that have a token t
        W_t = sum over j = 1..t of (1 - 2 p_j + sum of p^2)  the gradient's squared size at logits

    Where one answer alone has a token t, it gets 0. Left out: importance weights, turns.
    """
    reward = rollouts.reward.double()[:, None]
    size = gradient_size(rollouts.log_prob, rollouts.collision).double().square()
    W = (size * rollouts.mask).cumsum(1) * rollouts.mask
    total, weighted = W.new_zeros(2, len(rollouts.prompt_ids), W.shape[1])
    total.index_add_(0, rollouts.group, W)
    weighted.index_add_(0, rollouts.group, W * reward)
    baseline = weighted / total.clamp(min=1e-12)
    return ((reward - baseline[rollouts.group]) * rollouts.mask).float()


@advantage
def peer_hindsight(rollouts: Rollouts) -> torch.Tensor:
    """log p of the token behind a prompt that shows another right answer of the group, minus log p.

        A_t = log pi(y_t | x, peer, x, prefix) - log pi(y_t | x, prefix)

    2606.15576, known here from its abstract. The peer is shown as an earlier turn; without one it
    is 0. Left out: the teacher's whole distribution; the known answer where there is no peer.
    """
    return said_by_peer(rollouts, 0)


@advantage
def contrastive_hindsight(rollouts: Rollouts) -> torch.Tensor:
    """What a right peer says of a token, minus what it says when another problem x' is asked.

        A_t = log pi(y_t | x, peer, x, prefix)   - log pi(y_t | x, prefix)
            - log pi(y_t | x', peer, x', prefix) + log pi(y_t | x', prefix)

    2605.11613, known here from its abstract: its baseline is the teacher's term, times a factor not
    known here; so both terms, factor 1. x' is the next problem. Left out: other feedback, more x'.
    """
    return said_by_peer(rollouts, 0) - said_by_peer(rollouts, 1)


def said_by_peer(rollouts: Rollouts, shift: int) -> torch.Tensor:
    """(B, T): the difference, if the problem were the one `shift` further on in the batch."""
    prompts, peers, forward = rollouts.prompt_ids, right_peers(rollouts), rollouts.forward
    asked = [prompts[(group + shift) % len(prompts)] for group in rollouts.lists[0]]
    shown = [prompt + peer + prompt for prompt, peer in zip(asked, peers)]
    every = torch.arange(len(asked), device=rollouts.mask.device)
    rows = every[[bool(peer) for peer in peers]]
    with_peer, without = (frozen_log_probs(  # each answer has a prompt of its own
        forward.model, replace(rollouts, prompt_ids=of_answers, group=every), rows,
        forward.micro_batch) for of_answers in (shown, asked))
    return with_peer - without


def right_peers(rollouts: Rollouts) -> list[list[int]]:
    """For each answer the tokens of the next right one of its group, in a circle; of none, if no
    other is right."""
    groups, answers = rollouts.lists
    right = (rollouts.scores["answer"] > 0).nonzero().flatten().tolist()
    return [next((answers[one] for one in sorted(right, key=lambda one: (one < row, one))
                  if one != row and groups[one] == groups[row]), []) for row in range(len(groups))]


@advantage
class answer_probes:
    """What a try changes in an answer that is forced, greedily; and plain GRPO's A where it does.

        A_t = D + (A if D is not 0, else 0)  in a try,   A  in what is no try
        D   = R(answer forced after the try) - R(answer forced before it)

    2606.30251, known here from summaries; a try is a call of a tool there, here it ends with a
    sentence that computes. Left out: weights of the terms, D's scale, other rules for a bad try.
    """

    def __init__(self, policy):
        self.metrics = {}

    def __call__(self, rollouts: Rollouts, policy) -> torch.Tensor:
        openings = [forced_texts(policy, problem)[0] for problem in rollouts.problems]
        cuts = [[0, *try_ends(texts, section)]
                for texts, section in zip(rollouts.texts, rollouts.section.tolist())]
        probes = [[(group, (*ids[:n], *openings[group])) for n in of_answer]
                  for group, ids, of_answer in zip(*rollouts.lists, cuts)]
        distinct = list(dict.fromkeys(sum(probes, [])))
        cold = SimpleNamespace(**{**vars(policy.settings), "temperature": 0.01})  # greedy
        rewards, self.metrics = continuation_rewards(replace(policy, settings=cold), rollouts,
                                                     distinct, 1)
        worth, credit = dict(zip(distinct, rewards[:, 0].tolist())), grpo(rollouts)
        for row, (prefixes, starts) in enumerate(zip(probes, cuts)):
            for k, (start, end) in enumerate(zip(starts, starts[1:])):
                D = worth[prefixes[k + 1]] - worth[prefixes[k]]
                credit[row, start:end] = D + credit[row, start:end] * (D != 0)
        return credit


def try_ends(texts: list[str], section: list[int]) -> list[int]:
    """After how many tokens a sentence of the think section ends that has an = in it."""
    ends, computed = [], False
    for t, text in enumerate(texts):
        computed |= "=" in text
        if computed and section[t] == THINK and text.endswith((".", "!")):
            ends, computed = [*ends, t + 1], False
    return ends


@advantage
class calibrated_gae(gae):
    """GAE with a critic, a copy of the model, that learns before the policy does: from R of 50
    batches of the first policy. lambda is 1 - 1 / (alpha l) for an answer of l tokens, at least 0.

    VAPO (2504.05118; its critic's part is 2503.01491), known here from summaries. The 50 batches
    are extra tokens of the first step. Left out: wider clipping, likelihood of right answers.
    """

    def __init__(self, policy, *, value_alpha: Positive = 0.05, value_batches: CountOrNone = 50):
        super().__init__(policy, critic="trunk")
        self.alpha, self.batches = value_alpha, value_batches

    def __call__(self, rollouts: Rollouts, policy) -> torch.Tensor:
        spent, questions = 0, len(rollouts.problems)
        for n in range(self.batches if rollouts.step == 1 else 0):
            seed = derived_seed("critic", policy.settings.seed, n)
            problems = policy.task.training_problems(seed, n, questions)
            batch = policy.ask(problems, len(rollouts.mask) // questions, seed)
            super().__call__(replace(batch, generator=rollouts.generator), policy)
            spent += int(batch.mask.sum())
        value = rollouts.reward[:, None] - super().__call__(rollouts, policy)  # it gave R - V
        self.metrics["extra_tokens"] = spent
        chosen = (1 - 1 / (self.alpha * rollouts.length.clamp(min=1))).clamp(min=0)
        return generalised_advantage(value, rollouts.reward, rollouts.mask, 1.0, chosen)
