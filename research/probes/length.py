"""Does credit by token pay more as answers get longer? On a task where all credit is known.

Question. Plain GRPO gives all tokens of an answer the same number. The longer the answer, the more
of its tokens have nothing to do with the reward, so one would expect credit by token to help more.

Measurement. On a planted task (planted.py) three positions of an answer decide its reward and all
others are noise. Its length doubles, and everything else stays: the policy, the keys, the number of
answers in a step. At every length each arm is trained with the same number of tokens, those it
samples to learn values included:

    grpo            one number for an answer: the z-score in its group
    critic          reward minus a learned value of the prefix (gae, lambda 1)
    critic 0.95     the same with lambda 0.95, as PPO does it
    monte carlo     segments of the answer, values from fresh continuations (vine)
    exact           the true credit V(after) - V(before), which nobody has outside such a task

Success is the expected reward of the policy, computed, not sampled.

Reading it. If credit by token pays more in longer answers, an arm's lead over plain GRPO grows with
every doubling. If the true credit's lead grows and that of the others does not, the credit is worth
having, but these ways to estimate it are not good enough. If no lead grows, length does not matter.

Only one learning rate was tried, the same for all arms.
"""
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from engine.errors import UserError
from harness.registry import ADVANTAGES, make
from harness.flags import Flag, shortened
from harness.progress import Progress
from grpo import rloo, update
from qwen2_model import ModelConfig
from research.probes.common import Findings, Probe, gradients, run_probe
from research.probes.length_tables import (
    areas_table, draw_curves, draw_scaling, noise_table, tokens_table, trend_table)
from research.probes.planted import SMALL, PlantedLab, planted_lab, sample_planted, worths

FLAGS = {
    "model": Flag("small", "a model folder whose shape (not its weights) the policy takes; small "
                           "is one layer of width 32"),
    "lengths": Flag("16,32,64,128", "tokens of an answer", quick="8,16"),
    "steps": Flag(60, "steps of plain GRPO; the others get as many tokens", least=1, most=1_000_000,
                  quick=2),
    "seeds": Flag(4, "policies and tasks, the same for every arm and length", least=2, most=1000,
                  quick=2),
    "questions": Flag(8, "groups in a step", least=1, most=10_000, quick=2),
    "answers": Flag(8, "answers in a group", least=2, most=1000, quick=4),
    "learning_rate": Flag(3e-3, "of AdamW, for all arms", least=0, most=10),
    "segments": Flag(6, "of an answer, for monte carlo", least=1, most=1000, quick=2),
    "continuations": Flag(4, "behind each value, for monte carlo", least=1, most=1000, quick=1),
    "batches": Flag(16, "of the fresh policy, to measure the noise of the gradient", least=2,
                    most=100_000, quick=2)}
MOST_LENGTH = 100_000
ARMS = {"grpo": None, "critic": ("gae", {}), "critic 0.95": ("gae", {"gae_lambda": 0.95}),
        "monte carlo": ("vine", {}), "exact": None}  # --advantage and its flags


def measure(probe: Probe) -> Findings:
    args = probe.args
    lengths, config = read_lengths(args.lengths), read_shape(args.model)
    if args.device != "cpu":
        raise UserError(f"--device {args.device}: the planted task is made for the CPU")
    torch.set_num_threads(args.threads or torch.get_num_threads())
    progress = Progress(noise=0.1, training=1)
    noise = measure_noise(args, config, lengths, progress)
    curves = train_arms(args, config, lengths, progress)
    tables = [areas_table(curves, lengths), trend_table(curves, lengths),
              tokens_table(curves, lengths, args.steps * args.questions * args.answers),
              noise_table(noise, lengths)]
    policy = f"of the shape of {args.model}"
    if args.model == "small":
        policy = "a Qwen2 of one layer and width 32"
    lengths_in_words = ", ".join(map(str, lengths))
    intro = [f"Answers of {lengths_in_words} tokens; {args.seeds} seeds; {args.steps} steps of "
             f"{args.questions} x {args.answers} answers for plain GRPO, and as many tokens for "
             f"the other arms; the policy is {policy}.",
             "critic: gae at lambda 1, critic 0.95: at 0.95; monte carlo: values from "
             "continuations, which count as tokens spent; exact: the true credit."]
    return Findings("Credit by token and the length of the answer", intro, tables,
                    short=("trend", "area", "tokens", "noise"), takes="about 5 minutes",
                    pictures=[draw_curves(curves, lengths, probe.folder),
                              draw_scaling(curves, noise, lengths, probe.folder)],
                    places={"area": ("curves",), "noise": ("scaling",)})


def read_lengths(text: str) -> list[int]:
    parts = text.split(",")
    are_lengths = all(is_length(part.strip()) for part in parts)
    if not are_lengths or len(set(parts)) < 2:
        raise UserError(f"--lengths {shortened(text)} should be at least two different numbers of "
                        f"tokens, 6 to {MOST_LENGTH}, with commas between them")
    return sorted({int(part) for part in parts})


def is_length(text: str) -> bool:
    return text.isdecimal() and len(text) < 10 and 6 <= int(text) <= MOST_LENGTH


def read_shape(model: str) -> ModelConfig:
    return SMALL if model == "small" else ModelConfig.from_folder(Path(model))


def measure_noise(args: SimpleNamespace, config: ModelConfig, lengths: list[int],
                  progress: Progress) -> dict[int, list[dict[str, float]]]:
    """By length, one measurement a seed."""
    noise = {}
    for i, length in enumerate(lengths):
        noise[length] = [gradient_noise(args, config, args.seed + seed, length)
                         for seed in range(args.seeds)]
        progress("noise", (i + 1) / len(lengths))
    return noise


def gradient_noise(args: SimpleNamespace, config: ModelConfig, seed: int,
                   length: int) -> dict[str, float]:
    """Of a batch's gradient at the fresh policy: its variance over the squared size of its mean.

    Plain and exact advantages give the same mean. It is estimated from pairs of different batches
    of the quieter, exact one. With few batches it may come out as nothing: then noise is undefined.
    """
    lab = make_lab(args, config, seed, length)
    mean_square, total, sum_of_squares = {"grpo": 0.0, "exact": 0.0}, 0, 0.0
    for batch in range(1, args.batches + 1):
        rollouts = sample_planted(lab, -batch, args.questions, args.answers)
        advantages = {"grpo": rloo(rollouts), "exact": rollouts.true_credit}
        of_batch = gradients(lab, rollouts, advantages)
        for name, gradient in of_batch.items():
            mean_square[name] += gradient.square().sum().item() / args.batches
        total = total + of_batch["exact"]
        sum_of_squares += of_batch["exact"].square().sum().item()
    pairs = args.batches * (args.batches - 1)
    signal = (total.square().sum().item() - sum_of_squares) / pairs
    return {name: square / signal - 1 if square > signal > 0 else np.nan
            for name, square in mean_square.items()}


def make_lab(args: SimpleNamespace, config: ModelConfig, seed: int, length: int) -> PlantedLab:
    """`questions` and `answers` are for sampling values, which wants many rows at once."""
    return planted_lab(seed, length, config=config, learning_rate=args.learning_rate,
                       questions=64, answers=64)


def make_advantage(args: SimpleNamespace, lab: PlantedLab, arm: str, length: int):
    """The arm's --advantage; None where the rewards or the exact credit are enough."""
    if ARMS[arm] is None:
        return None
    name, flags = ARMS[arm]
    if name == "vine":
        segment = max(1, -(-length // args.segments))
        flags = {"values_k": args.continuations, "values_every": str(segment)}
    return make(ADVANTAGES[name], flags, lab)


def train_arms(args: SimpleNamespace, config: ModelConfig, lengths: list[int],
               progress: Progress) -> dict[tuple[str, int], list]:
    """By arm and length, one curve a seed."""
    done, whole = 0, sum(lengths) * len(ARMS) * args.seeds
    curves = {(arm, length): [] for length in lengths for arm in ARMS}
    for (arm, length), of_seeds in curves.items():
        for seed in range(args.seed, args.seed + args.seeds):
            progress("training", done / whole, f"length {length}, {arm}, seed {seed}")
            of_seeds.append(train_arm(args, config, arm, seed, length))
            done += length
    return curves


def train_arm(args: SimpleNamespace, config: ModelConfig, arm: str, seed: int,
              length: int) -> list[tuple[int, float]]:
    """(tokens spent, expected reward of the policy), from the start until the tokens are spent."""
    lab = make_lab(args, config, seed, length)
    budget = args.steps * args.questions * args.answers * length
    advantage = make_advantage(args, lab, arm, length)
    spent, step, curve = 0, 0, [(0, worths(lab)[()])]
    while spent < budget:
        step += 1
        rollouts = sample_planted(lab, step, args.questions, args.answers)
        spent += int(rollouts.mask.sum())
        if advantage:
            rollouts = replace(rollouts, advantage=advantage(rollouts, lab))
            spent += advantage.metrics.get("extra_tokens", 0)
        elif arm == "exact":
            rollouts = replace(rollouts, advantage=rollouts.true_credit)
        weight = torch.ones_like(rollouts.log_prob)
        update(lab.model, lab.optimizer, rollouts, weight, lab.settings)
        curve.append((spent, worths(lab)[()]))
    return curve


def main(argv: list[str]) -> None:
    run_probe("length", __doc__, FLAGS, measure, argv)
