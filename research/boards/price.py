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
from analysis.experiment import Experiment
from analysis.gains import gain_over
from engine.choices import mitigation
from engine.rollouts import Rollouts
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from harness.planned import PlannedRun
from harness.screen import say
from research.boards.leaderboard import named_arms, planner
from research.probes.enumerated import Batches, EnumeratedTask, estimator, make_enumerated

PLAIN = "plain"
STEPS = 60
COMMON = ("--questions 8 --answers 8 --eval_every 0 --checkpoint_every 0 "
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
    register_weightings()
    args = with_defaults(make_parser("python -m research price", __doc__, FLAGS).read(argv), FLAGS)
    if args.exact:
        print_exact()
        return
    experiment = experiment_in(Path(args.runs))
    for arm in named_arms(args.arms, ARMS) if args.arms != "none" else ():
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        for planned in experiment.missing([(arm, seed) for seed in seeds]):
            train_here(planned)
    print_gains(experiment)


def register_weightings() -> None:
    """Make the weightings above choices of --mitigation, in this program alone."""
    for weighting in (end_untrained, per_group, micro_batches_of_4):
        mitigation(rescaled=False)(weighting)


def experiment_in(folder: Path) -> Experiment:
    flags = {arm: flags for arm, (flags, _) in ARMS.items()}
    return Experiment(planner(folder, flags, COMMON.split(), STEPS))


def train_here(planned: PlannedRun) -> None:
    """Train in this process, which knows the weightings above, and keep the settings and metrics
    alone. An unfinished run begins again."""
    shutil.rmtree(planned.folder, ignore_errors=True)
    train.main(planned.command[1:])
    shutil.rmtree(planned.folder / "credit", ignore_errors=True)


def print_gains(experiment: Experiment) -> None:
    """The gain of each arm over all seeds that its folder has."""
    arms = experiment.arms((arm, seed) for arm in ARMS for seed in range(200))
    for arm, (_, compared) in ARMS.items():
        gain = gain_over(arms.get(arm, {}), arms.get(compared, {}))
        if gain.pairs > 1:
            value, low, high = (100 * end for end in (gain.estimate.value, *gain.estimate.interval))
            say(f"{arm:30s} {value:+5.1f} ({low:+.1f} to {high:+.1f}) points over {compared}, "
                f"{gain.pairs} seeds")


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
