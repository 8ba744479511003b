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

from research.experiments import prices

# the arms that occur in several experiments
PLAIN = {"none": ""}
MEASURED = prices.MEASURED  # credit of every undecided token, at every step
CONTROLS = {"measured": MEASURED,
            "shuffled": f"{MEASURED} --placebo advantages"}  # at other tokens of the group
ENTROPY = "--mitigation entropy_weighted"
MASKING = "--mitigation entropy_masking"
ATTENTION = "--mitigation attention_credit"
DISCOUNTED = "--mitigation outcome_conditional --think_discount"
INVERSE = {name: f"--mitigation {name}"
           for name in ("inverse_logprob", "inverse_logprob_as_published")}

# where an answer is decided (research/pointers.py), with plain GRPO's advantage
POINTER = "--mitigation pointer"
FEWER_WORDS = "--mitigation by_kind --word_weight 0.1"
BY_TRUTH = {"measured_pointer": "--mitigation measured_pointer --pointer_k 4",
            "measured4": "--advantage measured"}

# of answers that were there before training; research/experiments.md has the commands that make it
PAIRS = "runs/study/pairs.jsonl"

SAMPLED_ONLY = "--eval_modes sampled --checkpoint_every 0"
ONE_BATCH = {"common": f"--questions 8 --answers 8 --steps 60 --eval_every 30 {SAMPLED_ONLY}",
             "seeds": 5, "shared": "8x8"}
TWO_ANSWERS = ("--questions 8 --answers 8 --steps 60 --eval_every 40 --eval_answers 2 "
               f"{SAMPLED_ONLY}")
TUNED_ON = 100  # the seed on which learning rates are chosen; no reported run has it
RATES = ("1.2e-4", "2.5e-4", "5e-4")

# plain GRPO and what was within two points of it when the leaderboard was first made (dr_grpo, a
# multiple of rloo, left out), each with the rate that ended highest in `finals_rates`
FINAL_RATES = dict.fromkeys((
    "none", "outcome_conditional", "low_probability", "covariance", "attention_credit", "rloo",
    "lambda_grpo", "gae-trunk", "ktae", "gae", "taco", "shared_prefix", "belief", "gtpo"), "2.5e-4")
FINAL_RATES |= {"outcome_conditional": "5e-4", "taco": "5e-4"}

# made as docs/results.md says; an arm without a size is of the medium one, which ships
OF_SIZES = {"small": "models/small", "large": "models/large"}


@dataclass(frozen=True)
class Experiment:
    name: str
    question: str          # one sentence
    common: str            # flags of train.py that all its runs have
    arms: dict[str, str]   # name of an arm -> the flags that make it
    seeds: int             # 0, 1, ... of each arm
    first_seed: int = 0
    shared: str = ""       # the folder of runs that it shares with others; else it has its own
    is_board: bool = False  # all its arms are tested as one family (leaderboard.py)
    pairs: tuple[tuple[str, str], ...] = ()  # arms that are held against each other, too

    @property
    def place(self) -> str:
        return self.shared or self.name

    def numbers(self, seeds: int) -> range:
        return range(self.first_seed, self.first_seed + seeds)

    def plain_of(self, arm: str) -> str:
        """The arm that this one is compared with: none-4x8-1e-4 for measured-4x8-1e-4, where there
        is one, else the first."""
        parts = arm.split("-")
        places = ["-".join(["none", *parts[count:]]) for count in range(1, len(parts))]
        return next((plain for plain in places if plain in self.arms), next(iter(self.arms)))


def leaderboard_arms() -> dict[str, str]:
    """All choices that take less than five times a plain step, so without oracle, causal_ablation
    and vine."""
    weights = {name: f"--mitigation {name}" for name in (
        "entropy_weighted", "entropy_masking", "entropy_ratio", "inverse_logprob",
        "inverse_logprob_as_published", "equal_gradient", "attention_credit", "lambda_grpo",
        "learned_importance", "random", "by_kind", "low_probability", "taco", "planning",
        "covariance", "shared_prefix", "future_attention", "outcome_gradient")}
    advantages = {name: f"--advantage {name}" for name in (
        "dr_grpo", "rloo", "batch_mean", "span", "deletion", "gae", "prefix_tree", "ktae", "gtpo",
        "belief", "hindsight")}
    placebos = {f"{name}-placebo": f"{weights[name]} --placebo weights" for name in (
        "entropy_weighted", "inverse_logprob", "entropy_masking", "attention_credit",
        "inverse_logprob_as_published", "by_kind")}
    placebos |= {f"{name}-placebo": f"{advantages[name]} --placebo advantages"
                 for name in ("hindsight", "span")}
    return {**PLAIN, **CONTROLS, **weights, "outcome_conditional": f"{DISCOUNTED} 0.5",
            **advantages, "gae-trunk": "--advantage gae --critic trunk", **placebos}


def finalist(name: str, rate: str) -> str:
    return f"{leaderboard_arms()[name]} --learning_rate {rate}".strip()


def finals() -> dict[str, str]:
    """Each finalist at the learning rate that suits it, with the control that has to succeed."""
    arms = {name: finalist(name, rate) for name, rate in FINAL_RATES.items()}
    return {"none": arms["none"], "measured": MEASURED, **arms}


def in_sizes(arms: dict[str, str]) -> dict[str, str]:
    return arms | {f"{name}-{size}": f"{flags} --model {folder}".strip()
                   for size, folder in OF_SIZES.items() for name, flags in arms.items()}


LEADERBOARD = Experiment(
    "leaderboard",
    "Which way of spreading credit is ahead of plain GRPO?",
    arms=leaderboard_arms(), is_board=True, **ONE_BATCH)

ALL = (
    Experiment(
        "subject", "Does the default run learn, and how much do its seeds differ?",
        common="", arms=PLAIN, seeds=10),
    Experiment(
        "control", "Is credit by token worth anything here, when it is measured at every step?",
        arms={**PLAIN, **CONTROLS}, **ONE_BATCH),
    LEADERBOARD,
    Experiment(
        "finals_rates", "Which learning rate suits each of those that are near plain GRPO?",
        common=f"--questions 8 --answers 8 --steps 60 --eval_every 60 --eval_tasks 1000 "
               f"{SAMPLED_ONLY}",
        arms={f"{name}-{rate}": finalist(name, rate) for rate in RATES for name in FINAL_RATES},
        seeds=1, first_seed=TUNED_ON),
    Experiment(
        "finals", "Is one of those near plain GRPO ahead, each at a learning rate that suits it?",
        common=TWO_ANSWERS,
        arms=finals(), seeds=6, first_seed=10, is_board=True),
    Experiment(
        "price", "What is credit by token worth at its price, in time, tokens and rewards?",
        common=f"--eval_tasks 1000 {SAMPLED_ONLY}", arms=prices.chosen(), seeds=5),
    Experiment(
        "price_talk", "And where answers are long and mostly irrelevant?",
        common=f"--model {prices.TALK} --eval_tasks 1000 {SAMPLED_ONLY}",
        arms=prices.chosen_for_talk(), seeds=3),

    Experiment(
        "pointer_rates", "Which learning rate suits a pointer to the deciding tokens?",
        common=f"--questions 8 --answers 8 --steps 60 --eval_every 30 {SAMPLED_ONLY}",
        arms={f"{name}-{rate}": f"{flags} --learning_rate {rate}".strip() for rate in RATES
              for name, flags in {**PLAIN, "pointer": POINTER,
                                  "by_kind": "--mitigation by_kind"}.items()},
        seeds=2, first_seed=TUNED_ON),
    Experiment(
        "pointers", "Is it worth more to know where an answer is decided, or how much?",
        common=TWO_ANSWERS,
        arms={**PLAIN, "pointer": POINTER, "pointer-placebo": f"{POINTER} --placebo weights",
              "free_pointer": "--mitigation free_pointer", "by_kind": "--mitigation by_kind",
              "low_probability": "--mitigation low_probability", "none-16x8": "--questions 16",
              **BY_TRUTH},
        seeds=5, first_seed=20, is_board=True,
        pairs=(("measured_pointer", "measured4"), ("measured_pointer", "none-16x8"),
               ("pointer", "none-16x8"), ("pointer", "free_pointer"))),

    Experiment(
        "pointers_ceiling", "Is a pointer worth more when it is measured better, or added to more?",
        common=TWO_ANSWERS,
        arms={**PLAIN, "none-16x8": "--questions 16", "none-32x8": "--questions 32",
              "oracle4": "--mitigation oracle --oracle_k 4", **BY_TRUTH,
              "measured_pointer8": "--mitigation measured_pointer --pointer_k 8",
              "measured_pointer-16x8": f"{BY_TRUTH['measured_pointer']} --questions 16",
              "measured8": "--advantage measured --measured_k 8"},
        seeds=5, first_seed=20, shared="pointers", is_board=True,
        pairs=(("measured_pointer8", "measured_pointer"), ("measured8", "measured4"),
               ("measured_pointer8", "measured8"), ("oracle4", "measured_pointer"),
               ("measured_pointer-16x8", "none-16x8"), ("measured_pointer-16x8", "none-32x8"))),

    Experiment(
        "pointers_talk", "And where answers are long and most of their tokens decide nothing?",
        common=f"--model {prices.TALK} --questions 8 --answers 8 --steps 45 --eval_every 30 "
               f"--eval_tasks 1000 --eval_answers 2 {SAMPLED_ONLY}",
        arms={**PLAIN, "words0.1": FEWER_WORDS,
              "words0.1-placebo": f"{FEWER_WORDS} --placebo weights"},
        seeds=5, first_seed=20, is_board=True),

    # the three that an earlier experiment proposed
    Experiment(
        "discount", "Experiment 1: does it hurt to discount the tokens before the answer?",
        arms={**PLAIN, "discount0.25": f"{DISCOUNTED} 0.25",
              "outcome_conditional": f"{DISCOUNTED} 0.5", "discount0.75": f"{DISCOUNTED} 0.75"},
        **ONE_BATCH),
    Experiment(
        "inverse", "Experiment 2: do inverse log-probs break training, detached or as published?",
        arms={**PLAIN, "epsilon0.01": f"{INVERSE['inverse_logprob']} --epsilon 0.01",
              "epsilon0.5": f"{INVERSE['inverse_logprob']} --epsilon 0.5", **INVERSE},
        **ONE_BATCH),
    Experiment(
        "attention", "Experiment 3: do attention and entropy know which tokens to train on?",
        arms={**PLAIN, "attention_credit": ATTENTION,
              "attention_credit-placebo": f"{ATTENTION} --placebo weights",
              "entropy_weighted": ENTROPY, "masking70": f"{MASKING} --mask_percentile 70",
              "entropy_masking": MASKING,  # of 80 in 100
              "masking90": f"{MASKING} --mask_percentile 90",
              "masking-unscaled": f"{MASKING} --rescale none"},
        **ONE_BATCH),

    # what it proposed beside these, and what lecture notes on PPO set beside GRPO
    Experiment(
        "proposals", "Do the other proposals of the documents at the start train a better model?",
        arms={**PLAIN, "batch_mean": "--advantage batch_mean", "deletion": "--advantage deletion",
              "by_kind": "--mitigation by_kind", "span": "--advantage span",
              "reasoning0.5": "--reasoning_weight 0.5", "gae": "--advantage gae",
              "process0.5": "--advantage gae --process_reward 0.5", "dpo": "--loss dpo",
              "dpo_offline": f"--loss dpo --pairs {PAIRS} --answers 2",
              "dpo_offline5e-5": f"--loss dpo --pairs {PAIRS} --answers 2 --learning_rate 5e-5"},
        **ONE_BATCH),

    Experiment(
        "short_steps", "Is it the length of the step that breaks training by inverse log-probs?",
        common="--questions 8 --answers 8 --steps 300 --eval_every 50 --learning_rate 5e-5 "
               f"{SAMPLED_ONLY}",
        arms={**PLAIN, **INVERSE}, seeds=3),
    Experiment(
        "sizes", "Does it pay more in a larger model to train on the tokens of highest entropy?",
        arms=in_sizes({**PLAIN, "masking-unscaled": f"{MASKING} --rescale none",
                       "entropy_weighted": ENTROPY}), **ONE_BATCH),
    Experiment(
        "updates", "What do the loss, its norm, several updates of a batch and the divergence do?",
        arms={**PLAIN, "sequence": "--loss_norm sequence", "constant": "--loss_norm constant",
              "epochs2": "--epochs 2",
              "epochs2-unclipped": "--epochs 2 --clip_low 1 --clip_high 1000",
              "kl0.02": "--kl 0.02", "dpo": "--loss dpo",
              "gradient-rescaled": f"{ENTROPY} --rescale gradient"},
        **ONE_BATCH))

EXPERIMENTS = {experiment.name: experiment for experiment in ALL}
