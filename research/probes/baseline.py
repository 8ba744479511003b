"""Which number is best to subtract from the reward, and what does the group's mean cost beside it?

Question. Let g be the gradient of an answer's log-prob and R its reward. As E[g] = 0, (R - b) g has
the same expectation, the gradient of E[R], for every b that is made without this answer. Its noise
is least at one b* (Greensmith et al. 2004, JMLR 5):

    E|(R - b) g|^2 = E|(R - b*) g|^2 + (b - b*)^2 E|g|^2
    b* = E[|g|^2 R] / E|g|^2,    b* - E[R] = Cov(|g|^2, R) / E|g|^2

So the mean is the best baseline exactly where that covariance is 0. How far off is it, and is
anything that one could use instead better?

Measurement. Many answers to each problem, the gradient of each answer alone, and the noise of six
baselines. Two of them are cheap stand-ins for |g|^2: the answer's length (OPO, 2505.23585), and the
sizes at the logits (verl, 2602.07078), which give every place t a number of its own:

    by length   b   = sum_i l_i R_i / sum_i l_i
    by token    b_t = sum_i W_it R_i / sum_i W_it,    W_it = sum_{j<=t} s_ij^2,
                over the answers that reach t

Every baseline is made from other answers than the one it is scored on: from all the others, or from
7 or 15 of them, as in a training group of 8 or 16. There the mean of the others is RLOO and, times
(G-1)/G, the group mean of Dr. GRPO. The terms of a group share baselines; with the mean that adds
|E[R g]|^2 / (G-1) to the G-fold variance of the group's gradient, nearly nothing.

Reading it. If the mean is good enough, b* and the mean agree in most problems and the exact b*
would save little of the noise. If not, b* lies to one side of the mean and a baseline weighted by
|g|^2, or by a stand-in, has less noise. Which answers have large gradients changes as a model
learns, so ask again of a checkpoint: --model runs/x/checkpoints/step_000100.

Left out: the z-score. It divides by a number that differs from group to group, which weights
problems anew and is no baseline. The gradient is that of the whole answer's log-prob, without a
division by its length or by the batch's tokens.
"""
import numpy as np

from harness.flags import Flag
from harness.progress import Progress
from research.probes.baseline_noise import (
    GROUPS, against_mean, draw_others, exact_saving, gaps, measure_answers, noise_of_baselines)
from research.probes.baseline_tables import baselines_table, claims_table, draw, questions_table, sizes_table
from research.probes.common import Findings, Probe, run_probe, sample_batch

FLAGS = {"questions": Flag(16, "problems", least=2, most=10_000, quick=6),
         "answers": Flag(64, "answers to each of them", least=8, most=1000, quick=9)}
DRAWS = 50  # how often others are drawn, where these are not all there are


def measure(probe: Probe) -> Findings:
    Q, n = probe.args.questions, probe.args.answers
    rng = np.random.default_rng(probe.args.seed)
    progress = Progress(sampling=1, gradients=6)
    progress("sampling")
    lab = probe.lab()
    rollouts = sample_batch(lab, 0, Q, n)
    in_groups = {size - 1 for size in GROUPS if size <= n}
    others = {k: draw_others(n, k, DRAWS if k < n - 1 else 1, rng)
              for k in sorted({n - 1} | in_groups, reverse=True)}
    answers = measure_answers(lab, rollouts, others, lambda share: progress("gradients", share))

    noise = noise_of_baselines(answers, others)
    of_questions, beside = gaps(answers), against_mean(noise)
    saving = exact_saving(answers, noise)
    tables = [claims_table(answers, of_questions, beside, saving),
              baselines_table(answers, noise, beside),
              questions_table(answers, of_questions), sizes_table(answers)]
    intro = [f"{lab.folder}: {Q} problems x {n} answers, at temperature 1.",
             "Noise is E|(R - b) g|^2, g the gradient of an answer's log-prob, summed over the "
             "problems. Intervals are 95%, by Student's t over problems unless said otherwise. A "
             "difference is named where it is clear after Holm's correction over the rows of its "
             "table."]
    return Findings(
        "The best number to subtract from the reward, and what the group's mean costs", intro,
        tables, short=tuple(table.name for table in tables), takes="some minutes",
        pictures=[draw(answers, of_questions, beside, probe.folder)],
        places={"baselines": ("baseline",)})


def main(argv: list[str]) -> None:
    run_probe("baseline", __doc__, FLAGS, measure, argv)
