"""The experiments: what each one asks, and the runs that answer it.

An experiment is made of arms. An arm is a name and the flags of train.py that make it; every arm is
run with the same seeds and the flags that all have in common:

    Experiment("control", ..., common="--steps 120", arms={"none": "", "rloo": "--advantage rloo"})

stands for `python train.py --steps 120 --seed 0`, `python train.py --steps 120 --advantage rloo
--seed 0`, the same with seed 1, and so on. What is not said is as the model's recipe.json has it.
"""
from dataclasses import dataclass

# the arms that occur in several experiments
PLAIN = ""
MEASURED = "--advantage measured --measured_k 2"  # credit of every undecided token, at every step
SHUFFLED = f"{MEASURED} --placebo advantages"    # the same numbers at other tokens of the group

# what the subject has promised
MOST_SPREAD = 2.5        # points: standard deviation of the final success over seeds
MOST_CUT_OFF = 1.0       # percent of the answers at the end
LEAST_FORMAT = 0.98      # at the end, of the worst seed
LEAST_GAIN = 25.0        # points of held-out success
GRADIENT_BATCHES = 4     # behind the cosine of two gradients of the untrained model

# the same number of trained answers in every cell of the regime
TRAINED_ANSWERS = 3840
BATCHES = ((4, 8), (8, 8), (8, 16))              # questions x answers
LEARNING_RATES = ("1e-4", "2.5e-4", "6e-4")

# the success in training that the arms of the leaderboard race to, as the mean of the last steps:
# half of what plain GRPO gains in the control
RACE_TO = 0.3
RACE_STEPS = 10


@dataclass(frozen=True)
class Experiment:
    name: str
    question: str          # one sentence
    common: str            # flags of train.py that all its runs have
    arms: dict[str, str]   # name of an arm -> the flags that make it
    seeds: int             # 0, 1, ... of each arm
    twice: tuple[str, ...] = ()  # arms with twice as many, as all others are compared with them

    def seeds_of(self, arm: str, seeds: int) -> int:
        return 2 * seeds if arm in self.twice else seeds


def cell(arm: str, questions: int, answers: int, learning_rate: str) -> str:
    """The name of an arm in one cell of the regime: measured-4x8-1e-4."""
    return f"{arm}-{questions}x{answers}-{learning_rate}"


def regime_arms() -> dict[str, str]:
    arms = {}
    for questions, answers in BATCHES:
        steps = TRAINED_ANSWERS // (questions * answers)
        for learning_rate in LEARNING_RATES:
            flags = (f"--questions {questions} --answers {answers} --steps {steps} "
                     f"--eval_every {steps} --learning_rate {learning_rate}")
            arms[cell("none", questions, answers, learning_rate)] = f"{flags} {PLAIN}"
            arms[cell("measured", questions, answers, learning_rate)] = f"{flags} {MEASURED}"
    return arms


SUBJECT = Experiment(
    name="subject",
    question="Does the default run keep what a subject of experiments has to promise?",
    common="",
    arms={"none": PLAIN},
    seeds=10)

CONTROL = Experiment(
    name="control",
    question="Is credit by token worth anything here, when it is measured at every step?",
    common="--questions 8 --answers 8 --steps 60 --eval_every 30",
    arms={"none": PLAIN, "measured": MEASURED, "shuffled": SHUFFLED},
    seeds=5)

REGIME = Experiment(
    name="regime",
    question="At which batch sizes and learning rates is measured credit worth something?",
    common="",
    arms=regime_arms(),
    seeds=2)

# all choices that take less than five times a plain step, so without oracle, causal_ablation, vine
LEADERBOARD = Experiment(
    name="leaderboard",
    question="Which way of spreading credit is ahead of plain GRPO, and who could have known?",
    common=CONTROL.common,
    arms={
        "none": PLAIN,
        "measured": MEASURED,
        "shuffled": SHUFFLED,
        "entropy_weighted": "--mitigation entropy_weighted",
        "entropy_weighted-placebo": "--mitigation entropy_weighted --placebo weights",
        "entropy_masking": "--mitigation entropy_masking",
        "entropy_ratio": "--mitigation entropy_ratio",
        "inverse_logprob": "--mitigation inverse_logprob",
        "inverse_logprob_as_published": "--mitigation inverse_logprob_as_published",
        "equal_gradient": "--mitigation equal_gradient",
        "attention_credit": "--mitigation attention_credit",
        "outcome_conditional": "--mitigation outcome_conditional --think_discount 0.5",
        "lambda_grpo": "--mitigation lambda_grpo",
        "learned_importance": "--mitigation learned_importance",
        "random": "--mitigation random",
        "dr_grpo": "--advantage dr_grpo",
        "rloo": "--advantage rloo",
        "span": "--advantage span",
        "gae": "--advantage gae",
        "gae-trunk": "--advantage gae --critic trunk",
        "by_kind": "--mitigation by_kind",
        "low_probability": "--mitigation low_probability",
        "taco": "--mitigation taco",
        "planning": "--mitigation planning",
        "covariance": "--mitigation covariance",
        "shared_prefix": "--mitigation shared_prefix",
        "future_attention": "--mitigation future_attention",
        "outcome_gradient": "--mitigation outcome_gradient",
        "prefix_tree": "--advantage prefix_tree",
        "ktae": "--advantage ktae",
        "gtpo": "--advantage gtpo",
        "belief": "--advantage belief",
        "hindsight": "--advantage hindsight",
        "inverse_logprob-placebo": "--mitigation inverse_logprob --placebo weights",
        "entropy_masking-placebo": "--mitigation entropy_masking --placebo weights"},
    seeds=5,
    twice=("none",))

# the three that an earlier experiment proposed, at its batch and number of steps

EARLIER = "--questions 8 --answers 8 --steps 100 --eval_every 50"

DISCOUNT = Experiment(
    name="discount",
    question="Experiment 1: does it hurt to discount the tokens before the answer?",
    common=EARLIER,
    arms={
        "none": PLAIN,  # a discount of 1
        "discount0.25": "--mitigation outcome_conditional --think_discount 0.25",
        "discount0.5": "--mitigation outcome_conditional --think_discount 0.5",
        "discount0.75": "--mitigation outcome_conditional --think_discount 0.75"},
    seeds=5)

INVERSE = Experiment(
    name="inverse",
    question="Experiment 2: do inverse log-probs break training, detached or as published?",
    common=EARLIER,
    arms={
        "none": PLAIN,
        "epsilon0.01": "--mitigation inverse_logprob --epsilon 0.01",
        "epsilon0.1": "--mitigation inverse_logprob --epsilon 0.1",
        "epsilon0.5": "--mitigation inverse_logprob --epsilon 0.5",
        "published0.1": "--mitigation inverse_logprob_as_published --epsilon 0.1"},
    seeds=5)

ATTENTION = Experiment(
    name="attention",
    question="Experiment 3: do attention and entropy know which tokens to train on?",
    common=EARLIER,
    arms={
        "none": PLAIN,
        "attention": "--mitigation attention_credit --credit_scale 2.0",
        "attention-placebo": "--mitigation attention_credit --credit_scale 2.0 --placebo weights",
        "entropy": "--mitigation entropy_weighted --entropy_temp 1.0",
        "masking70": "--mitigation entropy_masking --mask_percentile 70",
        "masking80": "--mitigation entropy_masking --mask_percentile 80",
        "masking90": "--mitigation entropy_masking --mask_percentile 90"},
    seeds=5)

EXPERIMENTS = {experiment.name: experiment for experiment in (
    SUBJECT, CONTROL, REGIME, LEADERBOARD, DISCOUNT, INVERSE, ATTENTION)}
