"""Which tokens earned the reward, and which way of spreading credit finds them?

    python -m research scoreboard
    python -m research scoreboard --model runs/x/checkpoints/step_000100

The true credit of a token is what the answer is worth with it, minus what it was worth before it:
A_t = V(after) - V(before). Here it is measured for every token of a batch, from many continuations
(credit.py). Summed over an answer, the squares of the credits are on average the variance of
the reward: so the square says how much of the reward is decided at the token. An answer of four
tokens:

    credit     0.0    0.5   -0.1    0.0
    decided    0%     96%     4%    0%       0.25 and 0.01 of 0.26
    weight     1.0    3.0    0.5    0.5      of some weighting

Every weighting and every advantage (an arm) gets four scores. They ask how well it knows the tokens
at which the reward is decided:

    index       Order the tokens of each answer by weight, from -1 (least) to 1 (most). The index is
                the mean place of what is decided: 1 if all of it is at the token with most weight,
                0 by chance, -1 if all of it is at the token with least. Above 0.96 - 0.04 * 0.67.
    top tenth   The share of what is decided that lies in the tenth of an answer's tokens with most
                weight. By chance it is a tenth.
    aligned     The cosine of weight times advantage with the true credit, over all tokens: are sign
                and size right?
    idle        The share of the gradient that goes to tokens known to have no credit (the 95%
                interval contains 0 and is narrower than 0.1): what the arm wastes.

and three numbers from many batches, against the true gradient (the mean of leave-one-out
gradients):

    cosine      of the arm's mean gradient with it: what the arm does to the direction
    one batch   cosine of a single batch's gradient with it
    noise       variance of a batch over the squared part of the mean along the true gradient:
                after so many batches noise and signal are alike

Noise in the measured credit does not bias the scores (idle apart), as they are linear in it. A
rank correlation with measured credit is biased: the noise is largest where the model was unsure,
which is what entropy looks at. agreement.py reports it all the same, and the agreement of
signs, in a table of its own, since others do; decide by the scores above. Squares are products of
independent estimates, for the same reason. What can be reached is shown by the credit measured a
second time, and what chance gives by each weighting's own weights in random order, its placebo.
oracle, vine and causal_ablation sample continuations of their own.

The batch is written as a run folder for analyze.py, with columns true_credit, true_credit_se and
decided, the square.
"""
from pathlib import Path
from types import SimpleNamespace

from analysis.answers import answers_of
from analysis.tables import Table
from harness.credit_file import write_credit
from engine.lab import Lab
from harness.progress import Progress
from engine.rollouts import Rollouts
from harness.provenance import provenance
from harness.run_folder import RunFolder
from research.probes.agreement import agreement_table
from research.probes.arm_scores import directions_table, draw_scores, score_arms, scores_table
from research.probes.arms import Arms, make_arms
from research.probes.checks import identity_table, planted_table
from research.probes.common import Findings, Flag, Probe, gradients, run_probe, sample_batch
from research.probes.credit import Credit, true_credit
from research.probes.direction import Directions
from research.probes.measured_tokens import mean_product, measured_tokens
from research.probes.where_decided import decided_table, draw_decided, words_table

FLAGS = {
    "questions": Flag(12, "problems whose credit is measured", least=2, most=10_000, quick=2),
    "answers": Flag(8, "answers to each of them", least=2, most=1000, quick=2),
    "continuations": Flag(32, "behind the credit of a token that is a free choice; fewer where it "
                              "is nearly certain", least=2, most=10_000, quick=4),
    "batches": Flag(50, "batches for the true gradient", least=4, most=1_000_000, quick=4),
    "batch_questions": Flag(3, "problems in each of them", least=1, most=10_000, quick=1),
    "batch_answers": Flag(8, "answers to each of those", least=2, most=1000, quick=2),
    "oracle_k": Flag(8, "the same for the oracle, which measures for itself", least=1,
                     most=10_000, quick=1),
}
SLOW = ("causal_ablation", "oracle")  # sample so much that only the measured batch is for them
TRUE = "the true credit itself"


def measure(probe: Probe) -> Findings:
    args, lab = probe.args, probe.lab()
    progress = Progress(planted=2, true_gradient=50, credit=50, scores=6)
    planted = planted_table(args, lambda share: progress("planted", share))
    arms = make_arms(lab, args.oracle_k)
    directions = measure_directions(args, lab, arms, lambda share: progress("true_gradient", share))
    progress("credit")
    rollouts = sample_batch(lab, args.batches + 1, args.questions, args.answers)
    credit = true_credit(lab, rollouts, args.continuations, lambda share: progress("credit", share))
    progress("scores")
    tables = make_tables(lab, arms, rollouts, credit, directions)
    run = write_run(probe.folder / "run", lab, rollouts, credit)
    by_kind, scores, directed = tables["kind"], tables["scores"], tables["directions"]
    return Findings("Which tokens earned the reward, and who knows it",
                    introduction(args, lab, rollouts, credit), [*tables.values(), planted],
                    ("scores", "kind", "section", "class", "directions", "identity", "planted"),
                    ("planted",), "some minutes",
                    [draw_decided(by_kind, probe.folder),
                     draw_scores(scores, directed, probe.folder)],
                    {"kind": ("decided",), "scores": ("scores",)},
                    answers_of(run, lab.tokenizer, [1], 12_000))


def make_tables(lab: Lab, arms: Arms, rollouts: Rollouts, credit: Credit,
                directions: Directions) -> dict[str, Table]:
    """Of the measured batch, by name."""
    tokens = measured_tokens(lab, rollouts, credit)
    weights, credits = arms.weights(lab, rollouts), arms.credits(lab, rollouts)
    scores = score_arms(tokens, rollouts, weights, credits)
    products = {name: weight * rollouts.advantage for name, weight in weights.items()}
    of_batch = gradients(lab, rollouts, {**products, **credits, TRUE: credit.value})
    tables = [decided_table(tokens, partition) for partition in ("kind", "section", "class")]
    tables += [words_table(tokens, lab.tokenizer), scores_table(scores),
               agreement_table(tokens, rollouts, weights, credits),
               directions_table(directions, of_batch), identity_table(tokens, rollouts)]
    return {table.name: table for table in tables}


def measure_directions(args: SimpleNamespace, lab: Lab, arms: Arms, progress) -> Directions:
    """The gradients of all arms in many batches."""
    directions = Directions("rloo", min(10, args.batches // 2))
    for n in range(args.batches):
        progress(n / args.batches)
        batch = sample_batch(lab, n + 1, args.batch_questions, args.batch_answers)
        block = n * directions.blocks // args.batches
        directions.add(block, gradients(lab, batch, arms.coefficients(lab, batch, SLOW)))
    return directions


def introduction(args: SimpleNamespace, lab: Lab, rollouts: Rollouts, credit: Credit) -> list[str]:
    return [f"{lab.folder}: {args.questions} problems x {args.answers} answers, "
            f"{int(rollouts.mask.sum()):,} tokens, credit from {credit.spent:,} sampled tokens; "
            f"the true gradient from {args.batches} batches of {args.batch_questions} x "
            f"{args.batch_answers} answers.",
            "Credit is V(after) - V(before). What is decided at a token is its squared credit: "
            "summed over an answer it is on average the variance of the reward. Intervals are "
            "over problems (gradients: over blocks of batches). One policy, one set of problems: "
            "another may differ."]


def write_run(path: Path, lab: Lab, rollouts: Rollouts, credit: Credit) -> Path:
    config = {**lab.settings.to_json(), "steps": 1, **provenance(), "reward": lab.task.reward,
              "model_config": lab.model.config.to_json()}
    run = RunFolder.create(path, config, lab.folder / "tokenizer.json")
    ones = rollouts.mask.float()
    write_credit(run.credit(1), rollouts, ones,
                 true_credit=credit.value, true_credit_se=credit.error,
                 decided=mean_product(credit.quarters))
    return path


def main(argv: list[str]) -> None:
    run_probe("scoreboard", __doc__, FLAGS, measure, argv)
