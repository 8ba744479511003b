"""What does a difference between codes called GRPO cost? Each is an arm, trained beside plain GRPO.

    python -m research price                          # all runs, about two hours on two cores
    python -m research price --arms plain,per_answer  # some arms
    python -m research price --arms none --runs FOLDER  # the table of finished runs alone
    python -m research price --exact                  # without runs: direction and noise, exactly

An arm is flags of train.py, or a weighting of this file, with --rescale none, so that nothing but
the named difference changes. Every arm is trained with the same seeds and so on the same problems.
The gain is the mean success of all answers sampled in training minus that of the arm it is compared
with, on the same seed. Arms that sample at temperature 0.8, or from the 4 most probable tokens, are
compared with each other, because then an untrained model, too, has another success.
research/results/price/protocol.txt has the predictions.
"""
import shutil
from pathlib import Path

import torch
from torch import Tensor

import train
from analysis.gains import mean_success
from analysis.runs import is_done, read_run
from analysis.statistics import mean_over
from engine.choices import mitigation
from engine.errors import UserError
from engine.rollouts import Rollouts
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from harness.screen import say
from research.probes.batches import Batches, estimator
from research.probes.enumerated import EnumeratedTask, make_enumerated

PLAIN = "plain"
COMMON = ("--questions 8 --answers 8 --steps 60 --eval_every 0 --checkpoint_every 0 "
          "--sample_every 0 --threads 1 --learning_rate 2.5e-4")
ARMS = {  # flags, and the arm that it is compared with
    PLAIN: ("", ""),
    "sampled_at_0.8": ("--temperature 0.8 --loss_temperature 0.8", ""),
    "sampled_at_0.8_trained_at_1": ("--temperature 0.8", "sampled_at_0.8"),
    "top_k_4": ("--top_k 4 --loss_top_k 4", ""),
    "top_k_4_trained_on_all": ("--top_k 4", "top_k_4"),
    "end_untrained": ("--mitigation end_untrained", PLAIN),
    "per_answer": ("--loss_norm sequence", PLAIN),
    "micro_batches_of_4": ("--mitigation micro_batches_of_4", PLAIN),
    "per_group": ("--mitigation per_group", PLAIN),
    "no_std": ("--advantage dr_grpo", PLAIN),
    "constant": ("--loss_norm constant", PLAIN),
    "kl_0.04": ("--kl 0.04", PLAIN),
    "kl_0.001": ("--kl 0.001", PLAIN),
    "two_epochs": ("--epochs 2", PLAIN)}
SEEDS = range(40, 52)
FLAGS = {
    "arms": Flag(",".join(ARMS), "arms to train, with commas between them", kind=str),
    "first_seed": Flag(SEEDS[0], "the first seed", least=0, most=10_000),
    "seeds": Flag(len(SEEDS), "number of seeds", least=1, most=1000),
    "runs": Flag("runs/price", "folder in which the runs are kept"),
    "exact": Flag(False, "no runs: direction and noise of the gradient with each choice, computed "
                         "exactly in a task whose answers are all listed")}


def end_untrained(rollouts: Rollouts) -> Tensor:
    """Weight 0 at the last token of an answer that ended, and 1 elsewhere: what a code does that
    pads with the end token and masks the padding."""
    weight = torch.ones_like(rollouts.log_prob)
    ended = rollouts.finished.nonzero().flatten()
    weight[ended, rollouts.length[ended] - 1] = 0
    return weight


def per_group(rollouts: Rollouts) -> Tensor:
    """Every group counts the same, and every token within it."""
    return of_parts(rollouts, rollouts.group)


def micro_batches_of_4(rollouts: Rollouts) -> Tensor:
    """Each four answers after each other count the same: a token is divided by the number of tokens
    of its micro-batch, and not by that of the batch."""
    return of_parts(rollouts, torch.arange(len(rollouts.group)) // 4)


def of_parts(rollouts: Rollouts, part: Tensor) -> Tensor:
    """(B, T): N / (number of parts * tokens of the answer's part)."""
    length = rollouts.length.double()
    parts = int(part.max()) + 1
    tokens = torch.zeros(parts, dtype=torch.float64).index_add(0, part, length)[part]
    weight = (length.sum() / (parts * tokens)).float()
    return weight[:, None] * rollouts.mask


def main(argv: list[str]) -> None:
    for weighting in (end_untrained, per_group, micro_batches_of_4):
        mitigation(rescaled=False)(weighting)  # choices of --mitigation in this program alone
    flags = with_defaults(make_parser("python -m research price", __doc__, FLAGS).read(argv), FLAGS)
    if flags.exact:
        print_exact()
        return
    folder = Path(flags.runs)
    seeds = range(flags.first_seed, flags.first_seed + flags.seeds)
    for arm in flags.arms.split(",") if flags.arms != "none" else ():
        if arm not in ARMS:
            raise UserError(f"--arms: there is no arm {arm}, only {', '.join(ARMS)}")
        for seed in seeds:
            if success_of(folder, arm, seed) is None:
                train_arm(arm, seed, run_folder(folder, arm, seed))
    print_gains(folder)


def train_arm(arm: str, seed: int, out: Path) -> None:
    """Train, and keep the settings and metrics alone. An unfinished run begins again."""
    shutil.rmtree(out, ignore_errors=True)
    train.main([*COMMON.split(), *ARMS[arm][0].split(), "--seed", str(seed), "--out", str(out)])
    shutil.rmtree(out / "credit", ignore_errors=True)


def run_folder(folder: Path, arm: str, seed: int) -> Path:
    return folder / f"{arm}-s{seed}"


def success_of(folder: Path, arm: str, seed: int) -> float | None:
    """The mean success of a finished run; None if it is not finished."""
    path = run_folder(folder, arm, seed)
    if not (path / "metrics.jsonl").exists():
        return None
    run = read_run(path)
    return mean_success(run) if is_done(run) else None


def print_gains(folder: Path) -> None:
    for arm, (flags, compared) in ARMS.items():
        pairs = []
        for seed in range(200):
            own, other = success_of(folder, arm, seed), success_of(folder, compared, seed)
            if compared and own is not None and other is not None:
                pairs.append(100 * (own - other))
        if len(pairs) > 1:
            gain = mean_over(pairs)
            say(f"{arm:30s} {gain.value:+5.1f} ({gain.low:+.1f} to {gain.high:+.1f}) points over "
                f"{compared}, {len(pairs)} seeds")


def print_exact(policies: int = 10, answers: int = 4) -> None:
    """The median over policies of each choice's cosine with the true gradient, and of its noise."""
    found: dict[str, list[tuple[float, float]]] = {}
    for seed in range(1, policies + 1):
        task = make_enumerated(seed, 4)
        batches = Batches.all(task, answers)
        for name, factor in choices_of(task, batches).items():
            numbers = estimator(task, batches, factor).against(task.gradient)
            found.setdefault(name, []).append((numbers["cosine"], numbers["noise"]))
    say(f"{'choice':34s} {'cosine':>8s} {'noise':>8s}   medians of {policies} policies, groups of "
        f"{answers}")
    for name, pairs in found.items():
        cosine, noise = torch.tensor(pairs, dtype=torch.float64).median(0).values.tolist()
        say(f"{name:34s} {cosine:8.4f} {noise:8.2f}")


def choices_of(task: EnumeratedTask, batches: Batches) -> dict[str, Tensor]:
    """(M, G, T) the factor of each token's gradient, by choice, for all groups of answers."""
    rollouts, which = task.rollouts, batches.which
    mask = rollouts.mask[which].double()                             # (M, G, T)
    length = mask.sum(2, keepdim=True)                               # (M, G, 1)
    reward = rollouts.reward.double()[which][..., None]              # (M, G, 1)
    above = reward - reward.mean(1, keepdim=True)
    z_score = above / (reward.std(1, keepdim=True, correction=0) + 1e-4)
    by_token = mask / length.sum(1, keepdim=True)
    place = torch.arange(mask.shape[2])
    is_end = (place == length - 1) & rollouts.finished[which][..., None]
    return {"mean, sum": above * mask,
            "mean, token": above * by_token,
            "mean, answer": above * mask / length,
            "z, sum": z_score * mask,
            "z, token (plain GRPO)": z_score * by_token,
            "z, answer": z_score * mask / length,
            "z, token, its end untrained": z_score * by_token * ~is_end,
            "no baseline, token": reward * by_token}
