"""What is known of a recorded token beyond its record, by the model that sampled it: the likeliest
other tokens at its place, and its credit. And what happened to it, in short.

    credit = V(the answer up to and with the token) - V(the answer before the token)

V of a beginning is the expected reward of what the model writes from there on. It is estimated by
the mean reward of k sampled continuations. Both means have an error, so the credit has an interval.

A rare reward may be missing from all continuations. Then their rewards are all equal, and the usual
interval, which follows from their variance alone, has no width. So the interval is that of Agresti
and Caffo (2000): before mean and variance are computed, each sample gets two rewards more, the
lowest and the highest one that may come. For rewards of 0 and 1 these are one failure and one
success. After the last token of an answer V is its reward, which has no error; then the other
sample gets two of each, as in Agresti and Coull (1998).

The model need not be the one that sampled the step: a folder can hold other weights by now, and an
excerpt of a run numbers its tokens anew, so that the model would read other words.
"""
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from lab.analysis.answers import ShownAnswer
from lab.analysis.run_folders import Run, read_credit, read_tokenizer
from lab.analysis.token_table import StepRecord
from lab.credit.monte_carlo import continuation_rewards
from lab.engine.errors import UserError
from lab.engine.model_folder import read_model_folder
from lab.engine.policy import Policy, derived_seed, encode_prompts
from lab.engine.rollouts import Rollouts, double
from lab.engine.tokens import KINDS, token_bytes
from lab.harness.build import load_policy
from lab.harness.record import Json, find_folder
from lab.harness.screen import show_status
from lab.harness.settings import settings_of_run
from lab.engine.model import Qwen2

SAME_MODEL = 0.1  # if log-probs differ by more from the record, another model sampled it
NAMED_STEPS = 8   # if more models were kept, only some of their steps are named
NAMED = 4         # so many of the likeliest other tokens
# with fewer than ten continuations an interval is nearly as wide as the range of rewards
FEWEST_CONTINUATIONS, MOST_CONTINUATIONS = 10, 1_000_000
Z = 1.96        # a normal 95% interval is so many standard errors to each side
HARDLY = 0.005  # a push that is smaller would be rounded to 0.00


def check_exists(name: str, value: int, known, whose) -> None:
    """Refuse a step, an answer or a token that does not exist."""
    if value not in known:
        raise UserError(f"--{name} {value}: {whose} has {name}s {known[0]} to {known[-1]}")


def where_kept(steps: Iterable[int]) -> str:
    """A sentence that names the steps for which the model that sampled them was kept."""
    names = [str(step) for step in sorted(steps)]
    if not names:
        return "It was kept for no step"
    if len(names) > NAMED_STEPS:
        names = [*names[:3], "...", names[-1]]
        return f"It was kept for {' '.join(['--step', *names])}"
    return f"It was kept for --step {' or '.join(names)}"


@torch.no_grad()
def log_probs_at(t: int, b: int, model: Qwen2, record: StepRecord, config: Json,
                 folder: Path) -> Tensor:
    """(V,) log-probs of all tokens at the place of token t of answer b, by the model of a
    folder."""
    tokens = record.tokens_of(b)["token_id"][:t]
    ids = np.concatenate([record.prompts[int(record.answers["group"][b])], tokens])
    vocabulary = model.config.vocab_size
    if ids.max() >= vocabulary:
        raise UserError(f"{folder} knows {vocabulary} tokens, and the record has a token "
                        f"{ids.max()}, so another model sampled it")
    state = model.model(torch.from_numpy(ids)[None].long())[0, -1]
    temperature = config.get("columns_temperature", 1)  # of what is on record
    return (model.logits(state).float() / temperature).log_softmax(-1)


def likeliest_others(run: Run, sampled_by: str | None, record: StepRecord, tokenizer: Tokenizer,
                     b: int, t: int) -> str:
    """A clause about the place of token t of answer b. `sampled_by` is the folder of the model that
    sampled the step, if it was kept."""
    if sampled_by is None:
        return (f"not known: the model after step {record.step - 1}, which sampled it, was not "
                "kept")
    try:
        folder = find_folder(sampled_by)
        log_prob = log_probs_at(t, b, read_model_folder(folder), record, run.config, folder)
    except UserError as error:
        return f"not known: {error}"
    tokens, p = record.tokens_of(b), log_prob.exp()
    chosen = int(tokens["token_id"][t])
    if abs(log_prob[chosen] - tokens["log_prob"][t]) > SAME_MODEL:
        return f"not known: for {folder} p is {p[chosen]:.4g}, so another model sampled it"
    others = [token for token in p.topk(NAMED + 1).indices.tolist() if token != chosen]
    return (f"the likeliest are {with_probabilities(p, others[:NAMED], tokenizer)} (by "
            f"{sampled_by})")


def with_probabilities(p: torch.Tensor, tokens: list[int], tokenizer: Tokenizer) -> str:
    """' 8' 0.3, ' 2' 0.01"""
    pieces = [piece.decode(errors="replace") for piece in token_bytes(tokenizer, tokens)]
    return ", ".join(f"{text!r} {p[token]:.2g}" for text, token in zip(pieces, tokens))


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
    policy, rollouts = replayed_step(run, sampled_by, step,
                                     derived_seed("credit of a token", step, b, t))
    problem, ids = int(rollouts.group[b]), rollouts.ids[b].tolist()
    prefixes = [(problem, tuple(ids[:length])) for length in (t, t + 1)]
    rewards, _ = continuation_rewards(policy, rollouts, prefixes, k, show_share)
    show_status("")
    before, after = double(rewards)  # (k,) each
    is_last = t == int(rollouts.length[b]) - 1
    return CreditOfToken(before.mean().item(), after.mean().item(),
                         credit_interval(before, after, is_last, rollouts.reward), k)


def replayed_step(run: Path, sampled_by: str, step: int, seed: int) -> tuple[Policy, Rollouts]:
    """The policy that sampled a step, and the step's answers with their problems, so that they can
    be continued and scored. `seed` is that of the continuations."""
    settings = settings_of_run(run, device="cpu")
    policy = load_policy(settings, find_folder(sampled_by))
    problems = policy.task.training_problems(settings.seed, step, settings.questions)
    generator = torch.Generator().manual_seed(seed)
    rollouts = read_credit(run, step, read_tokenizer(run), problems, generator=generator)
    refuse_other_problems(run, rollouts, policy)
    return policy, rollouts


def refuse_other_problems(run: Path, rollouts: Rollouts, policy: Policy) -> None:
    """Refuse recorded answers to other problems than those that stand beside them: the task may
    have changed, and --dynamic_sampling has drawn problems of its own."""
    prompts = encode_prompts(policy.tokenizer, policy.task, rollouts.problems)
    if rollouts.prompt_ids != prompts:
        raise UserError(f"the prompts of step {rollouts.step} in {run} are not those that its "
                        "settings make now, so its answers cannot be scored again")


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


def in_short(answer: ShownAnswer, t: int, credit: CreditOfToken | None) -> str:
    """What happened to token t: its push, its change and its credit together. `credit` is None if
    it was not measured.

    A push up was deserved if the token raised the expected reward, which is a credit above 0, and a
    push down if the token lowered it. Whether the credit is above or below 0 is said only if its
    whole 95% interval is."""
    push = answer["values"]["push"][t]
    token = f"the {KINDS[answer['kind'][t]]} {answer['texts'][t]!r}"
    if push is None:  # where sum p^2 is not on record
        return f"In short: how {token} was pushed is not known from this record."
    direction = ""  # of the push
    if not answer["account"]["dropped"] and abs(push) >= HARDLY:
        direction = "up" if push > 0 else "down"
    known = (f"In short: {token} {about_push(answer, t, direction)}"
             f"{about_change(answer, t, direction)}")
    return f"{known} {about_credit(credit, direction)}" if credit else known


def about_push(answer: ShownAnswer, t: int, direction: str) -> str:
    if answer["account"]["dropped"]:
        return "was not pushed, because the step left its answer out"
    for factor in ("advantage", "weight"):
        if not answer["values"][factor][t]:
            return f"was not pushed, because its {factor} is 0"
    push = answer["values"]["push"][t]
    if not direction:
        return f"was hardly pushed ({push:+.2g})"
    return f"was pushed {direction} ({push:+.2f})"


def about_change(answer: ShownAnswer, t: int, direction: str) -> str:
    """The end of a sentence about a push."""
    values = answer["values"]
    if answer["account"]["dropped"]:
        return "."
    change = values["change"][t] if "change" in values else None
    if change is None:
        return ". How its probability then changed was not measured."
    log_prob = values["log-prob"][t]
    before, after = f"{math.exp(log_prob):.4g}", f"{math.exp(log_prob + change):.4g}"
    if before == after:
        return f", and the step left its probability at {before}."
    moved = "rose" if change > 0 else "fell"
    joined = "but" if (direction, moved) in (("up", "fell"), ("down", "rose")) else "and"
    return f", {joined} in the step its probability {moved} from {before} to {after}."


def about_credit(credit: CreditOfToken, direction: str) -> str:
    low, high = credit.interval
    interval = f"{low:+.3f} to {high:+.3f}"
    if low <= 0 <= high:
        question = f"the push {direction} was deserved" if direction else "it deserved a push"
        said = (f"The 95% interval of its credit includes 0 ({interval}), so it is open whether "
                f"{question}.")
        if 4 * credit.k > MOST_CONTINUATIONS:
            return said
        return f"{said} With --credit {4 * credit.k} the interval would be half as wide."
    effect, deserved = ("raised", "up") if low > 0 else ("lowered", "down")
    if direction:
        was = "was" if direction == deserved else "was not"
        judgement = f"the push {direction} {was} deserved"
    else:
        judgement = f"a push {deserved} would have been deserved"
    return (f"The token {effect} the expected reward: the whole 95% interval of its credit is "
            f"{'above' if low > 0 else 'below'} 0 ({interval}). So {judgement}.")
