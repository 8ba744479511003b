"""Every way of spreading credit in a world small enough to be enumerated: bias, direction and noise without chance.

    python exact.py                  # under a minute
    python exact.py --seed 1         # another policy

The world (truth/world.py): a Qwen2 of a few hundred parameters, answers of at most four tokens out of three. True is the
gradient of J, the probability to be right. Each pair of --advantage and --mitigation makes from a batch the estimate

    sum over the group's answers and their tokens of  weight * advantage * grad log pi / G

(--loss_norm constant up to a factor), by the same functions that train. Shown are, over all batches that can be drawn:
    bias     size of (mean estimate - true), over that of the true gradient
    cosine   between mean estimate and true gradient: 1 is the right direction, whatever the length
    noise    trace of the covariance over the squared part of the mean along the true gradient: so many batches until noise
             and signal are alike
"""
import argparse
import math

import torch

from grpo import gradient_size
from analysis.plots import COLOURS, panels, save
from analysis.tables import Table, by_row
from engine.settings import Parser, run_as_program, underscores
from truth.common import COMMON, Findings, Flag, Probe, Progress, add_flags, carry_out, with_defaults
from truth.world import Batches, Estimator, World, advantages, all_weights, estimator, make_world, placebo, scattered

FLAGS = {"length": Flag(4, 3, "most tokens of an answer", 2), "answers": Flag(3, 2, "answers in a group", 2),
         "seed": COMMON["seed"], "threads": COMMON["threads"]}
CROSSED = ("grpo", "rloo", "critic", "one-step", "vine", "span")
NOT_HERE = {"causal_ablation": "samples replacements", "learned_importance": "is trained on the way"}


def measure(probe: Probe) -> Findings:
    args, progress = probe.args, Progress(advantages=1, weights=20, sums=4)
    torch.set_num_threads(args.threads or torch.get_num_threads())
    world = make_world(args.seed, args.length)
    progress("advantages")
    batches = Batches.all(world, args.answers)
    advantage = advantages(world, batches, args.seed)
    weight = all_weights(world, batches, lambda share: progress("weights", share))
    progress("sums")
    crossed = {(a, m): cross(world, batches, advantage[a], weight[m], m) for a in CROSSED for m in weight}
    tables = [identities(world, batches, advantage, crossed), advantage_table(world, batches, advantage),
              *(cross_table(world, crossed, list(weight), key) for key in ("cosine", "bias", "noise")),
              placebos(world, batches, advantage["rloo"], weight, crossed), norms(world, batches, advantage["rloo"]), mix()]
    described = (f"{len(world.probability)} answers, {len(world.score)} choices, {world.score.shape[1]} parameters; J = {true_J(world):.3f}, "
                 f"{mean_length(world):.2f} tokens an answer; {len(batches.which):,} different groups of {args.answers} answers, with their probabilities.")
    return Findings("A world that can be enumerated", [described, LEGEND], tables, ("identities", "advantages", "cosine", "placebos"),
                    [draw(world, crossed, list(weight), probe.folder)], {"noise": ("cosine_and_noise",)})


LEGEND = ("bias: size of (mean estimate - true gradient) over that of the true gradient; cosine: between the two; noise: trace of the covariance over the "
          "squared part of the mean that lies along the true gradient, the number of batches until noise and signal are alike. Critics know V exactly (wrong ones a random number for each "
          "index); vine has segments of two tokens and exact values; weights are rescaled to mean 1 over a batch, which here is one "
          "group (as published: never).")


def true_J(world: World) -> float:
    return (world.probability @ world.rollouts.reward.double()).item()


def mean_length(world: World) -> float:
    return (world.probability @ world.rollouts.length.double()).item()


def cross(world: World, batches: Batches, advantage: torch.Tensor, weight: torch.Tensor | None, name: str) -> Estimator | None:
    G = batches.which.shape[1]
    if name == "random":  # gamma of shape 1, divided by its mean: flat on the simplex
        N = world.rollouts.mask[batches.which].sum((1, 2)).double()
        return scattered(world, batches, advantage, torch.ones_like(N), N / (N + 1), 2 * N / (N + 1))
    return None if weight is None else estimator(world, batches, weight * advantage / G)


def identities(world: World, batches: Batches, advantage: dict, crossed: dict) -> Table:
    """What theory says, each with both sides."""
    p, mask = world.probability, world.rollouts.mask.double()
    credit = (world.worth[:, 1:] - world.worth[:, :-1]) * mask
    J, c = true_J(world), z_score_factor(true_J(world), batches.which.shape[1])
    G = batches.which.shape[1]

    def on_choices(values):  # (n, T) a number for each choice -> the gradient with it
        return torch.zeros(len(world.score), dtype=torch.float64).index_add(0, world.node.flatten(), (p[:, None] * values * mask).flatten()) @ world.score

    entropy, sure = 1 + world.rollouts.entropy.double(), 1 / (world.rollouts.log_prob.double().abs() + 0.1)
    V, collision = world.worth[:, :-1], world.rollouts.collision.double()
    size = gradient_size(world.rollouts.log_prob.double(), collision)
    weighted = {name: estimator(world, batches, w[batches.which] * advantage["rloo"] / G).mean for name, w in (("prefix", entropy), ("token", sure))}
    rows = [["gradient of J by autograd = E[sum A_t grad log pi], A_t = V(after) - V(before)", *sides(world.gradient, on_choices(credit))],
            ["sum_t E[A_t^2] = Var(R) = p (1 - p)", *sides((p @ credit.square().sum(1)), torch.tensor(J * (1 - J)))],
            *([f"{name}: mean estimate = true gradient", *sides(crossed[name, "none"].mean, world.gradient)] for name in ("rloo", "critic", "one-step", "vine")),
            ["dr_grpo = (G - 1) / G of it", *sides(estimator(world, batches, advantage["dr_grpo"] / G).mean, world.gradient * (G - 1) / G)],
            ["a critic that is wrong, lambda 1: still the true gradient", *sides(estimator(world, batches, advantage["wrong critic"] / G).mean, world.gradient)],
            [f"z-score: c(p, G) times the true gradient, c({J:.2f}, {G}) = {c:.3f}", *sides(crossed["grpo", "none"].mean, c * world.gradient)],
            ["weight by the prefix alone (1 + entropy): E[sum w A_t grad log pi]", *sides(weighted["prefix"], on_choices(entropy * credit))],
            ["weight by the token (1 / (abs(log p) + 0.1)): that + E[sum w (V - b) grad log pi]",
             *sides(weighted["token"], on_choices(sure * (credit + V - J)))],
            ["E[s^2] of a token = 1 - sum p^2: the unsure ones get the larger gradients", *sides(p @ (size.square() * mask).sum(1), p @ ((1 - collision) * mask).sum(1))],
            ["probabilities of all groups add up to 1", *sides(batches.probability.sum(), torch.tensor(1.0))], ["and of all answers", *sides(p.sum(), torch.tensor(1.0))]]
    worst = max(row[3] for row in rows)
    return Table("identities", "What theory says", by_row({"identity": "", "left": ".6f", "right": ".6f", "difference": ".1e"}, rows),
                 f"All {len(rows)} identities hold: the largest relative difference is {worst:.0e}." if worst < 1e-5 else
                 f"{sum(row[3] >= 1e-5 for row in rows)} of {len(rows)} identities do not hold: a relative difference of {worst:.0e}.",
                 ["left and right: sizes, where both are vectors; difference: size of the difference over that of the right side"])


def sides(left: torch.Tensor, right: torch.Tensor) -> tuple[float, float, float]:
    left, right = torch.atleast_1d(left).double(), torch.atleast_1d(right).double()
    return left.norm().item(), right.norm().item(), ((left - right).norm() / right.norm()).item()


def z_score_factor(p: float, G: int, epsilon: float = 1e-4) -> float:
    """By how much the z-score stretches the gradient of one question's success p, rewards 0 and 1: the mean advantage of
    a right answer minus that of a wrong one. Without epsilon E sqrt((G-1-K)/(K+1)) + E sqrt(K/(G-K)), K ~ Bin(G-1, p)."""
    total = 0.0
    for K in range(G):
        chance = math.comb(G - 1, K) * p ** K * (1 - p) ** (G - 1 - K)
        right, wrong = (K + 1) / G, K / G  # share of right answers, this one among them or not
        total += chance * ((1 - right) / (math.sqrt(right * (1 - right)) + epsilon) + wrong / (math.sqrt(wrong * (1 - wrong)) + epsilon))
    return total


def advantage_table(world: World, batches: Batches, advantage: dict) -> Table:
    G, rows = batches.which.shape[1], []
    for name, values in advantage.items():
        found = estimator(world, batches, values / G)
        rows.append([name, *(found.against(world.gradient)[key] for key in ("bias", "cosine", "noise"))])
    unbiased = [row[0] for row in rows if row[1] < 1e-5]
    least, loss = min((row for row in rows if row[1] < 1e-5), key=lambda row: row[3]), dict((row[0], row[3]) for row in rows)
    shuffled = advantage["rloo"][..., :1].mean(1, keepdim=True).expand_as(advantage["rloo"])  # on average each answer gets the group's mean
    rows.append(["rloo, shuffled in the group", estimator(world, batches, shuffled / G).against(world.gradient)["bias"], None, None])
    return Table("advantages", "Advantages, all weights 1", by_row({"advantage": "", "bias": ".3f", "cosine": ".4f", "noise": ".2f"}, rows),
                 f"Without bias: {', '.join(unbiased)}. The least noise among them has {least[0]}: {least[3]:.2f}, against {loss['rloo']:.2f} of rloo.",
                 ["shuffled: advantages that change places within the group leave a mean estimate of nothing, a bias of 1"])


def cross_table(world: World, crossed: dict, names: list[str], key: str) -> Table:
    rows = []
    for m in names:
        rows.append([m, *("n/a" if crossed[a, m] is None else crossed[a, m].against(world.gradient)[key] for a in CROSSED)])
    known = {m: crossed["rloo", m].against(world.gradient)[key] for m in names if crossed["rloo", m] is not None}
    title = {"cosine": "Direction: cosine of the mean estimate with the true gradient", "bias": "Bias, relative to the true gradient",
             "noise": "Noise: batches until noise and signal along the true gradient are alike"}[key]
    if key == "noise":
        quiet = min(known, key=known.get)
        finding = f"With rloo the least noise has {quiet} ({known[quiet]:.2f}), none has {known['none']:.2f}."
    else:
        exact = [m for m, value in known.items() if (value if key == "bias" else 1 - value) < 1e-5]
        ends = (min, max) if key == "cosine" else (max, min)
        worst, best = (end((m for m in known if m not in exact), key=known.get) for end in ends)
        finding = (f"With rloo {', '.join(exact)} {'keep' if len(exact) > 1 else 'keeps'} the true {'direction' if key == 'cosine' else 'gradient'}; of the others "
                   f"{best} is nearest ({known[best]:.4f}), {worst} farthest ({known[worst]:.4f}).")
    notes = [f"n/a: {', '.join(f'{name} {why}' for name, why in NOT_HERE.items())}; lambda_grpo at lambda = 1; oracle knows the true credit"]
    return Table(key, title, by_row({"mitigation": "", **{a: ".4f" if key == "cosine" else ".3f" for a in CROSSED}}, rows), finding, notes)


def placebos(world: World, batches: Batches, advantage: torch.Tensor, weight: dict, crossed: dict) -> Table:
    """Each weighting beside its own weights in random order."""
    rows = []
    for name, values in weight.items():
        if values is not None and name != "none":
            own, other = (e.against(world.gradient) for e in (crossed["rloo", name], placebo(world, batches, advantage, values)))
            rows.append([name, own["cosine"], other["cosine"], own["noise"], other["noise"], own["noise"] / other["noise"]])
    formats = {"mitigation": "", "cosine": ".4f", "of placebo": ".4f", "noise": ".2f", "of its placebo": ".2f", "ratio": ".2f"}
    quieter = [row[0] for row in rows if row[5] < 1]
    plain = crossed["rloo", "none"].against(world.gradient)["noise"]
    better = [row[0] for row in rows if row[3] < plain]
    return Table("placebos", "Each weighting beside its own weights shuffled over the batch's tokens (rloo)", by_row(formats, rows),
                 f"Less noise than their placebo have {', '.join(quieter) or 'none'}; than no weighting ({plain:.2f}): {', '.join(better) or 'none'}.",
                 ["rescaled weights are 1 on average at every token once they are shuffled, so the direction stays and noise is added; those as published are not rescaled"])


def norms(world: World, batches: Batches, advantage: torch.Tensor) -> Table:
    """What the loss is divided by, everything else being without bias."""
    length, G = world.rollouts.length.double()[batches.which], batches.which.shape[1]
    shares = {"constant": torch.ones_like(length), "token": mean_length(world) * G / length.sum(1, keepdim=True), "sequence": mean_length(world) / length}
    rows = [[name, *estimator(world, batches, share[..., None] * advantage / G).against(world.gradient).values()] for name, share in shares.items()]
    return Table("norms", "What the loss is divided by (rloo, no weights)", by_row({"loss_norm": "", "bias": ".3f", "cosine": ".4f", "noise": ".2f"}, rows),
                 f"Dividing by the batch's own number of tokens has a bias of {rows[1][1]:.1%} (cosine {rows[1][2]:.4f}), by each answer's of "
                 f"{rows[2][1]:.1%} ({rows[2][2]:.4f}); by a constant {'none' if rows[0][1] < 1e-5 else format(rows[0][1], '.1e')}.",
                 ["token and sequence are scaled by the mean length, so that only what their being random does is left"])


def mix() -> Table:
    """The z-score keeps each question's direction and changes how much it counts."""
    chances, sizes = (0.02, 0.1, 0.25, 0.5, 0.75, 0.9, 0.98), (2, 4, 8, 16, 64)
    rows = [[f"{p:.2f}", *(z_score_factor(p, G) for G in sizes), 1 / math.sqrt(p * (1 - p))] for p in chances]
    at = {row[0]: row for row in rows}
    return Table("mix", "How much a question of success p counts under the z-score, c(p, G)", by_row(
        {"p": "", **{f"G = {G}": ".2f" for G in sizes}, "no limit": ".2f"}, rows),
        f"With 8 answers a question of p = 0.02 counts {at['0.02'][3]:.2f} times its gradient, one of p = 0.50 {at['0.50'][3]:.2f} times: the same direction "
        "for one question, another mix of several.", ["0/1 rewards; mean only and leave-one-out give every question the same"])


def draw(world: World, crossed: dict, names: list[str], folder) -> tuple:
    figure, axes = panels(2)
    for axis, a in zip(axes, ("rloo", "one-step")):
        for i, m in enumerate(name for name in names if crossed[a, name] is not None):
            found = crossed[a, m].against(world.gradient)
            axis.plot(found["cosine"], found["noise"], "o", color=COLOURS[i % len(COLOURS)], ms=5)
            axis.annotate(f" {m}", (found["cosine"], found["noise"]), fontsize=7)
        axis.set(xlabel="cosine with the true gradient", ylabel="noise over signal", title=f"advantage {a}", yscale="log")
        axis.margins(x=0.25)
    return save(figure, folder, "cosine_and_noise", "Direction and noise of each weighting, by enumeration: lower right is better")


def main(argv: list[str]) -> None:
    parser = Parser(usage="python exact.py [flags]", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add_flags(parser, FLAGS, "exact-s<seed>")
    carry_out("exact", with_defaults(parser.parse_args([underscores(argument) for argument in argv]), FLAGS), measure)


if __name__ == "__main__":
    run_as_program("exact.py", main)
