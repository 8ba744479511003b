"""How noisy is the gradient of one batch, and how much less noisy does a method make it?

    python -m lab signal
    python -m lab signal --only "measured --measured_k 16, by_kind --word_weight 0"
    python -m lab signal --model models/Qwen2.5-0.5B-Instruct --batches 12
    python -m lab signal --model runs/none-grpo-s0/checkpoints/step_000050  # half trained

A step of training follows the gradient g of one batch. It has a part that all batches share, which
is the mean E[g], and a part that is different in each. The noise-to-signal ratio compares them:

    noise     E|g - E[g]|^2, the variance of one batch's gradient, added up over all parameters
    signal    |E[g]|, the length of the mean gradient
    ratio     noise / signal^2. Its unit is batches: with a ratio of 8, the mean of 8 batches has as
              much noise as squared signal

A method that halves plain GRPO's ratio has as little noise as a batch twice as large. This number
is measured here before anything is trained. Such a method need not gain as much as such a batch,
above all if its mean gradient points elsewhere. So the cosine of the two mean gradients is
measured, too. Both can change while a model learns, so measure a checkpoint as well.

How it is estimated: N batches of problems and answers are sampled, each independent of the others,
and every method computes its gradient g_1, ..., g_N from the same batches.

    signal^2    the mean of the inner products <g_i, g_j> over all pairs i != j, because two batches
                share nothing but E[g]
    noise       the mean of |g_i|^2, minus signal^2

Each gradient is folded into a million numbers (lab/probes/gradients.py). Those of all methods in
all batches are kept until the end, which takes 4 MB of memory for each method and batch: twenty
methods in 16 batches take 1.3 GB.

What is not measured: training scales gradients down that are longer than --max_grad_norm, and AdamW
divides each parameter's gradient by its usual size. So in training batches and parameters have
other weights than here.
"""
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from lab.probes.gradients import (FOLDED, Unmoved, folded, inner_products, mean_of_pairs,
                                noise_to_signal)
from analysis.statistics import Estimate, Floats, jackknife, within
from lab.probes.estimates import jackknife_of_log
from analysis.tables import WITH_INTERVAL, Row, Table, by_row
from engine.choices import METHODS
from engine.errors import UserError
from engine.optimizer import AdamW
from engine.policy import Policy
from engine.rollouts import Rollouts
from grpo import update
from harness.flags import Flag, flags_of
from harness.load import make_advantage, make_weighting
from harness.memory import FreedMemory
from harness.record import Json
from harness.settings import Settings, make_settings, read_flags
from mitigations import rescaled_weight
from lab.probes.common import (CONFIG, MODEL_FLAGS, Findings, Progress, flags_of_model,
                                    policy_from_flags, sample_batch)
from train import drop_unfinished, with_advantage

PLAIN = "plain GRPO"
# The flags of train.py that a method may be typed with, beside its own. All others would change
# what is sampled, which is the same for all methods, or what a step does with its gradient.
OF_A_METHOD = {*METHODS, "rescale", "placebo", "loss", "dpo_beta", "loss_norm", "drop_unfinished",
               "entropy_bonus"}

FLAGS = {
    **MODEL_FLAGS,
    **CONFIG,
    "only": Flag("measured", "the weightings and advantages to compare with plain GRPO, separated "
                             "by commas, each with its own flags"),
    "questions": Flag(0, "problems in a batch; 0 means as many as train.py has in a step",
                      least=0, most=10_000),
    "answers": Flag(0, "answers to each problem; 0 means as many as train.py has",
                    least=0, most=1000),
    "batches": Flag(16, "number of batches", least=4, most=10_000)}


@dataclass
class Compared:
    """A method, and the folded gradients that it had in each batch so far."""
    settings: Settings
    gradients: list[Tensor]


def measure(args: SimpleNamespace, folder: Path) -> Findings:
    names, inner, intro = measure_gradients(args)
    return Findings("How noisy is a batch's gradient?", [intro], [ratio_table(names, inner)])


def measure_gradients(args: SimpleNamespace) -> tuple[list[str], Floats, str]:
    """The methods, of which the first is plain GRPO; the inner products (methods, methods, N, N) of
    their gradients in N batches; and a sentence about the batches."""
    policy = policy_from_flags(args)
    methods = {PLAIN: Compared(policy.settings, [])}
    for typed in args.only.split(","):
        methods[typed.strip()] = Compared(settings_of(typed.strip(), args), [])
    refuse_beyond_memory(len(methods), args.batches)
    s = policy.settings
    questions, answers = args.questions or s.questions, args.answers or s.answers
    progress, right, freed = Progress(batches=1), [], FreedMemory()
    optimizer = Unmoved(policy.model.parameters(), learning_rate=0.0)
    for number in range(args.batches):
        progress("batches", number / args.batches, f"{number} of {args.batches} batches")
        with torch.no_grad():
            batch = sample_batch(policy, questions, answers, step=number + 1)
        right += batch.scores["answer"].tolist()
        for compared in methods.values():
            gradient = folded_gradient(policy, optimizer, batch, compared.settings, number + 1)
            compared.gradients.append(gradient)
            if policy.model.is_large:  # as a run does after each step, else its memory grows
                freed.after_step()
    inner = inner_products([compared.gradients for compared in methods.values()])
    if not inner[0, 0].any():
        raise UserError("in no batch any answers to the same problem had different rewards, so all "
                        "gradients are 0. More --questions or --answers may help")
    intro = (f"{policy.folder} gave {answers} answers to each of {questions} problems in each of "
             f"{args.batches} batches. {np.mean(right):.1%} of the answers are right.")
    return list(methods), inner, intro


def bytes_of_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def refuse_beyond_memory(methods: int, batches: int) -> None:
    """Refuse more folded gradients than half of this machine's memory can hold: the system would
    end the program after hours, without a word."""
    needed, memory = 4 * FOLDED * methods * batches, bytes_of_machine()
    if needed > memory / 2:
        raise UserError(f"the gradients of {methods} methods in --batches {batches} take "
                        f"{needed / 1e9:,.0f} GB of memory, and this machine has "
                        f"{memory / 1e9:.0f} GB: name fewer batches, or fewer methods in --only")


def settings_of(typed: str, args: SimpleNamespace) -> Settings:
    """The settings of a method that is typed as `measured --measured_k 16`, or by a name alone."""
    try:
        name, *flags = shlex.split(typed) or [""]
    except ValueError as error:  # a quotation mark without a second one
        raise UserError(f"--only {typed!r}: {error}") from None
    for axis, choices in METHODS.items():
        if name in choices:
            given = read_flags([f"--{axis}", name, *flags])
            s = make_settings(flags_of_model(args) | given)
            if getattr(s, axis) != name:
                raise UserError(f"--only {typed!r} names two choices of --{axis}")
            refuse_others(typed, given, s)
            return s
    raise UserError(f"--only: there is no weighting or advantage {name!r}")


def refuse_others(typed: str, given: Json, s: Settings) -> None:
    """Refuse a flag that the gradient of one batch does not depend on."""
    known = set(OF_A_METHOD)
    for axis, choices in METHODS.items():
        known |= flags_of(choices[getattr(s, axis)]).keys()
    for name in given:
        if name not in known:
            raise UserError(f"--only {typed!r}: --{name} makes no other method here, because every "
                            "method gets the same batches of the same model, and its gradient is "
                            "measured without a step. A method may have its own flags and "
                            f"{', '.join(f'--{flag}' for flag in sorted(OF_A_METHOD))}")


def folded_gradient(policy: Policy, optimizer: AdamW, batch: Rollouts, s: Settings,
                    step: int) -> Tensor:
    """The gradient that a step of training with these settings follows, folded, before clipping."""
    policy = replace(policy, settings=s)
    rollouts = with_advantage(batch, make_advantage(s, policy), policy, s, step)
    if s.drop_unfinished:
        rollouts = drop_unfinished(rollouts)
    weight, _ = rescaled_weight(make_weighting(s, policy), s.mitigation, rollouts, policy,
                                s.rescale, s.placebo)
    optimizer.zero_grad()
    update(policy.model, optimizer, rollouts, weight, replace(s, kl=0.0, max_grad_norm=0.0))
    return folded(policy.model.parameters())


def cosine(inner: np.ndarray) -> float:
    """The cosine of the mean gradients of two methods, from (2, 2, N, N) inner products."""
    one, two = mean_of_pairs(inner[0, 0]), mean_of_pairs(inner[1, 1])
    return float(mean_of_pairs(inner[0, 1]) / np.sqrt(one * two)) if min(one, two) > 0 else np.nan


def estimates(pair: np.ndarray) -> list[Estimate]:
    """The ratio of a method, its factor and its cosine, with intervals over batches, from the inner
    products (2, 2, N, N) of plain GRPO and this method."""
    batches = np.arange(pair.shape[-1])

    def of_batches(kept: np.ndarray) -> np.ndarray:
        return np.asarray(pair[:, :, kept][:, :, :, kept])

    def ratio(kept: np.ndarray) -> float:
        return noise_to_signal(of_batches(kept)[1, 1])

    def factor(kept: np.ndarray) -> float:
        return noise_to_signal(of_batches(kept)[0, 0]) / ratio(kept)

    of_cosine = jackknife(lambda kept: cosine(of_batches(kept)), batches)
    return [jackknife_of_log(ratio, batches), jackknife_of_log(factor, batches),
            within(of_cosine, -1, 1)]


def ratio_table(names: list[str], inner: np.ndarray) -> Table:
    """A row for each method; the first is plain GRPO, which is not compared with itself."""
    rows: list[Row] = []
    sentences = []
    for m, name in enumerate(names):
        own = estimates(inner[[0, m]][:, [0, m]])
        if m > 0:
            low, high = own[1].interval
            sentences.append(f"{name}: its gradient is as noisy as that of plain GRPO with a batch "
                             f"{own[1].value:.2f} times as large (95% interval {low:.2f} to "
                             f"{high:.2f}).")
        else:
            sentences.append(f"{name}: {own[0].value:.1f} batches have to be averaged until the "
                             "noise of their gradient is as large as its squared signal.")
        rows.append([name, *own] if m > 0 else [name, own[0], None, None])
    formats = {"method": "", f"ratio{WITH_INTERVAL}": ".1f", f"factor{WITH_INTERVAL}": ".2f",
               f"cosine{WITH_INTERVAL}": "+.2f"}
    return Table("signal", "The noise-to-signal ratio of one batch's gradient",
                 by_row(formats, rows), "\n".join(sentences),
                 ["`ratio` is in batches. `factor`: how many times as large a batch of plain GRPO "
                  "has this ratio. `cosine`: that of the angle between the method's mean gradient "
                  "and plain GRPO's. Intervals are by the jackknife over batches; those of the "
                  "ratio and the factor were computed for their logarithms. Those of the cosine "
                  "are cut at -1 and 1"],
                 headings={f"ratio{WITH_INTERVAL}": f"noise-to-signal ratio{WITH_INTERVAL}",
                           f"factor{WITH_INTERVAL}": f"as a batch so many times as large"
                                                     f"{WITH_INTERVAL}",
                           f"cosine{WITH_INTERVAL}": f"cosine with plain GRPO{WITH_INTERVAL}"})
