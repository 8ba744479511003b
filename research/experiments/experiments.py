"""The experiments: what each one asks, and the runs that answer it.

An experiment is made of arms. An arm is a name and the flags of train.py that make it; every arm is
run with the same seeds and the flags that all have in common:

    Experiment("control", ..., common="--steps 120", arms={"none": "", "rloo": "--advantage rloo"})

stands for `python train.py --steps 120 --seed 0`, `python train.py --steps 120 --advantage rloo
--seed 0`, the same with seed 1, and so on. What is not said is as the model's recipe.json has it.

Experiments that have the batch and the steps of `control` share their runs: an arm that occurs in
two of them has one name and one folder, and is trained once.
"""
from dataclasses import dataclass

# the arms that occur in several experiments
PLAIN = ""
MEASURED = "--advantage measured --measured_k 2"  # credit of every undecided token, at every step
SHUFFLED = f"{MEASURED} --placebo advantages"    # the same numbers at other tokens of the group

INVERSE_LOGPROB = "--mitigation inverse_logprob"
AS_PUBLISHED = "--mitigation inverse_logprob_as_published"
MASKING = "--mitigation entropy_masking"
ENTROPY = "--mitigation entropy_weighted"
ATTENTION_CREDIT = "--mitigation attention_credit"
DISCOUNTED = "--mitigation outcome_conditional --think_discount"
ONE_BATCH = "--questions 8 --answers 8 --steps 60 --eval_every 30"

# the same number of trained answers in every cell of the regime
TRAINED_ANSWERS = 3840
BATCHES = ((4, 8), (8, 8), (8, 16))              # questions x answers
LEARNING_RATES = ("1e-4", "2.5e-4", "6e-4")

# the success in training that the arms of the leaderboard race to, as the mean of the last steps:
# half of what plain GRPO gains in the control
RACE_TO, RACE_STEPS = 0.3, 10


@dataclass(frozen=True)
class Experiment:
    name: str
    question: str          # one sentence
    common: str            # flags of train.py that all its runs have
    arms: dict[str, str]   # name of an arm -> the flags that make it
    seeds: int             # 0, 1, ... of each arm
    twice: tuple[str, ...] = ()  # arms with twice as many, as all others are compared with them
    shared: str = ""       # the folder of runs that it shares with others; else it has its own
    is_board: bool = False  # all its arms are tested as one family (leaderboard.py)

    @property
    def place(self) -> str:
        return self.shared or self.name

    def seeds_of(self, arm: str, seeds: int) -> int:
        return 2 * seeds if arm in self.twice else seeds

    def plain_of(self, arm: str) -> str:
        """The arm that this one is compared with: none-4x8-1e-4 for measured-4x8-1e-4, where there
        is one, else the first."""
        _, dash, place = arm.partition("-")
        plain = f"none{dash}{place}"
        return plain if plain in self.arms else next(iter(self.arms))


def regime_arms() -> dict[str, str]:
    arms = {}
    for questions, answers in BATCHES:
        steps = TRAINED_ANSWERS // (questions * answers)
        for learning_rate in LEARNING_RATES:
            flags = (f"--questions {questions} --answers {answers} --steps {steps} "
                     f"--eval_every {steps} --learning_rate {learning_rate}")
            cell = f"{questions}x{answers}-{learning_rate}"
            arms |= {f"none-{cell}": flags, f"measured-{cell}": f"{flags} {MEASURED}"}
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
    common=ONE_BATCH,
    arms={"none": PLAIN, "measured": MEASURED, "shuffled": SHUFFLED},
    seeds=5,
    shared="8x8")

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
    common=ONE_BATCH,
    arms={
        "none": PLAIN,
        "measured": MEASURED,
        "shuffled": SHUFFLED,
        "entropy_weighted": ENTROPY,
        "entropy_weighted-placebo": f"{ENTROPY} --placebo weights",
        "entropy_masking": MASKING,
        "entropy_ratio": "--mitigation entropy_ratio",
        "inverse_logprob": INVERSE_LOGPROB,
        "inverse_logprob_as_published": AS_PUBLISHED,
        "equal_gradient": "--mitigation equal_gradient",
        "attention_credit": ATTENTION_CREDIT,
        "outcome_conditional": f"{DISCOUNTED} 0.5",
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
        "inverse_logprob-placebo": f"{INVERSE_LOGPROB} --placebo weights",
        "entropy_masking-placebo": f"{MASKING} --placebo weights",
        "attention_credit-placebo": f"{ATTENTION_CREDIT} --placebo weights",
        "inverse_logprob_as_published-placebo": f"{AS_PUBLISHED} --placebo weights",
        "by_kind-placebo": "--mitigation by_kind --placebo weights",
        "hindsight-placebo": "--advantage hindsight --placebo advantages",
        "span-placebo": "--advantage span --placebo advantages"},
    seeds=5,
    twice=("none",),
    shared="8x8",
    is_board=True)

# the three that an earlier experiment proposed

DISCOUNT = Experiment(
    name="discount",
    question="Experiment 1: does it hurt to discount the tokens before the answer?",
    common=ONE_BATCH,
    arms={
        "none": PLAIN,  # a discount of 1
        "discount0.25": f"{DISCOUNTED} 0.25",
        "outcome_conditional": f"{DISCOUNTED} 0.5",
        "discount0.75": f"{DISCOUNTED} 0.75"},
    seeds=5,
    shared="8x8")

INVERSE = Experiment(
    name="inverse",
    question="Experiment 2: do inverse log-probs break training, detached or as published?",
    common=ONE_BATCH,
    arms={
        "none": PLAIN,
        "epsilon0.01": f"{INVERSE_LOGPROB} --epsilon 0.01",
        "inverse_logprob": INVERSE_LOGPROB,  # epsilon 0.1
        "epsilon0.5": f"{INVERSE_LOGPROB} --epsilon 0.5",
        "inverse_logprob_as_published": AS_PUBLISHED},
    seeds=5,
    shared="8x8")

ATTENTION = Experiment(
    name="attention",
    question="Experiment 3: do attention and entropy know which tokens to train on?",
    common=ONE_BATCH,
    arms={
        "none": PLAIN,
        "attention_credit": ATTENTION_CREDIT,
        "attention_credit-placebo": f"{ATTENTION_CREDIT} --placebo weights",
        "entropy_weighted": ENTROPY,
        "masking70": f"{MASKING} --mask_percentile 70",
        "entropy_masking": MASKING,  # of 80 in 100
        "masking90": f"{MASKING} --mask_percentile 90",
        "masking-unscaled": f"{MASKING} --rescale none"},
    seeds=5,
    shared="8x8")

SHORT_STEPS = Experiment(
    name="short_steps",
    question="Is it the length of the step that breaks training by inverse log-probs?",
    common=f"{ONE_BATCH} --learning_rate 5e-5",
    arms={
        "none": PLAIN,
        "inverse_logprob": INVERSE_LOGPROB,
        "inverse_logprob_as_published": AS_PUBLISHED,
        "equal_gradient": "--mitigation equal_gradient"},
    seeds=5)

UPDATES = Experiment(
    name="updates",
    question="What do the loss, its norm, several updates of a batch and the divergence do?",
    common=ONE_BATCH,
    arms={
        "none": PLAIN,
        "sequence": "--loss_norm sequence",
        "constant": "--loss_norm constant",
        "epochs2": "--epochs 2",
        "epochs2-unclipped": "--epochs 2 --clip_low 1 --clip_high 1000",
        "kl0.02": "--kl 0.02",
        "dpo": "--loss dpo",
        "gradient-rescaled": f"{ENTROPY} --rescale gradient"},
    seeds=5,
    shared="8x8")

EXPERIMENTS = {experiment.name: experiment for experiment in (
    SUBJECT, CONTROL, REGIME, LEADERBOARD, DISCOUNT, INVERSE, ATTENTION, SHORT_STEPS, UPDATES)}
