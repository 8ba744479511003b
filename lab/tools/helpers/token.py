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
from lab.analysis.kept_credit import Measured, file_of, keep, kept_answers
from lab.analysis.run_folders import Run
from lab.analysis.token_table import StepRecord
from lab.credit.monte_carlo import continuation_rewards
from lab.engine.errors import UserError
from lab.engine.model_folder import read_model_folder
from lab.engine.policy import Policy, derived_seed, encode_prompts
from lab.engine.rollouts import Rollouts, double
from lab.engine.tokens import KINDS, token_bytes
from lab.harness.build import load_policy
from lab.harness.read_record import read_credit, read_tokenizer
from lab.harness.record import Json, find_folder
from lab.harness.screen import say, show_status
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
def log_probs_at(places: range, b: int, model: Qwen2, record: StepRecord, config: Json,
                 folder: Path) -> Tensor:
    """(n, V) log-probs of all tokens at these places of answer b, by the model of a folder."""
    tokens = record.tokens_of(b)["token_id"][:places.stop - 1]
    prompt = record.prompts[int(record.answers["group"][b])]
    ids = np.concatenate([prompt, tokens])
    vocabulary = model.config.vocab_size
    if ids.max() >= vocabulary:
        raise UserError(f"{folder} knows {vocabulary} tokens, and the record has a token "
                        f"{ids.max()}, so another model sampled it")
    states = model.model(torch.from_numpy(ids)[None].long())[0, len(prompt) - 1 + places.start:]
    temperature = config.get("columns_temperature", 1)  # of what is on record
    return (model.logits(states).float() / temperature).log_softmax(-1)


def likeliest_others(run: Run, sampled_by: str | None, record: StepRecord, tokenizer: Tokenizer,
                     b: int, places: range) -> list[str]:
    """A clause for each of these places of answer b. `sampled_by` is the folder of the model that
    sampled the step, if it was kept."""
    if sampled_by is None:
        return len(places) * [f"not known: the model after step {record.step - 1}, which sampled "
                              "it, was not kept"]
    tokens = record.tokens_of(b)
    try:
        folder = find_folder(sampled_by)
        model = read_model_folder(folder)
        log_probs = log_probs_at(places, b, model, record, run["config"], folder)
    except UserError as error:
        return len(places) * [f"not known: {error}"]
    found = []
    for place, log_prob in zip(places, log_probs):
        chosen = int(tokens["token_id"][place])
        p = log_prob.exp()
        if abs(log_prob[chosen] - tokens["log_prob"][place]) > SAME_MODEL:
            found.append(f"not known: for {folder} p is {p[chosen]:.4g}, so another model sampled "
                         "it")
            continue
        others = [token for token in p.topk(NAMED + 1).indices.tolist() if token != chosen]
        found.append(f"the likeliest are {with_probabilities(p, others[:NAMED], tokenizer)} "
                     f"(by {sampled_by})")
    return found


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
    seed = derived_seed("credit of a token", step, b, t)
    [credit] = measure_credits(run, sampled_by, step, b, range(t, t + 1), k, seed)
    return credit


def measure_credits(run: Path, sampled_by: str, step: int, b: int, places: range, k: int,
                    seed: int) -> list[CreditOfToken]:
    """The credit of the tokens at these places of answer b. V after a token is V before the next
    one, so the same continuations serve for both."""
    policy, rollouts = replayed_step(run, sampled_by, step, seed)
    problem, ids = int(rollouts.group[b]), rollouts.ids[b].tolist()
    prefixes = [(problem, tuple(ids[:t])) for t in range(places.start, places.stop + 1)]
    rewards, _ = continuation_rewards(policy, rollouts, prefixes, k, show_share)
    show_status("")
    rewards = double(rewards)  # (places + 1, k)
    last = int(rollouts.length[b]) - 1
    return [credit_of(rewards[i:i + 2], t == last, rollouts.reward) for i, t in enumerate(places)]


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


def measure_and_keep(run: Run, model: str, record: StepRecord, tokenizer: Tokenizer, b: int,
                     continuations: int) -> None:
    """Measure answer b of a step, unless that was done with as many continuations. `model` is the
    folder of the model that sampled the step."""
    folder, step = run["folder"], record.step
    tokens = record.tokens_of(b)["token_id"].tolist()
    kept = kept_answers(folder).get((step, b))
    if kept and kept["token_id"] == tokens and kept["continuations"] >= continuations:
        say(f"measured before, with {kept['continuations']:,} continuations for each value, and "
            f"kept in {file_of(folder, step, b)}")
        return
    others = likeliest_others(run, model, record, tokenizer, b, range(len(tokens)))
    credits = measure_credits(folder, model, step, b, range(len(tokens)), continuations,
                              derived_seed("credit of an answer", step, b))
    measured: Measured = {
        "step": step, "answer": b, "continuations": continuations, "token_id": tokens,
        "credit": [credit.after - credit.before for credit in credits],
        "low": [credit.interval[0] for credit in credits],
        "high": [credit.interval[1] for credit in credits],
        "credit in words": [credit.in_words() for credit in credits],
        "others": others}
    keep(folder, measured)
    say(f"measured, and kept in {file_of(folder, step, b)}")


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
