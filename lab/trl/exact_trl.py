"""What does an update of TRL's trainer do on average? Computed where all batches are listed.

    python -m lab exact --trainer trl                               # its defaults
    python -m lab exact --trainer trl my_config.json --beta 0.04    # GRPOConfig's fields
    python -m lab exact --trainer trl my_config.json --alone        # which of the settings does it

The installed TRL's GRPOTrainer is made, with a tiny model that has no say. Three of its methods are
replaced, so answers, rewards and log-probs are those of a small world (lab/worlds.py), in which the
policy is a table of logits. All else is TRL's own: advantages, masks, ratios, losses, corrections.
For each batch that the world can draw all optimizer steps are made, as plain gradient descent, and
the mean of their sum is compared with the gradient of the expected reward:

    cosine    between the two. 1 is the right direction, and below 0 the reward falls
    length    of the mean along the true gradient, of one optimizer step at a rate of 1
    noise     of a batch's update. 1 is that of dr_grpo without scaling, which is right on average

A file may also hold several configurations, {"name": {fields}, ...}. The exit status is 1 if one is
biased. Groups have num_generations answers, and a batch as many groups as can be listed.
"""
import itertools
import json
import math
import os
import textwrap
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lab import gate
from lab.engine.errors import UserError, did_you_mean_name
from lab.exact import (ACCEPTED, HEADINGS, RIGHT, Mean, Verdict, compared, in_words, of_each_kind,
                       row)
from lab.harness.flags import Flag, read
from lab.harness.screen import show_status
from lab.worlds import BELOW_0, LONG, THREE, TWO, WORLDS, Kind, Numbers, World, worlds_of

TRIED = "1.16.0"  # the replaced methods are private, and another version may have others
NAME = "TRL's update"
NOT_JUDGED = (
    "Plain gradient descent on one micro-batch: not judged are Adam, max_grad_norm, weight decay, "
    "micro-batches, several processes or reward functions, and what changes the drawn answers, "
    "such as top_p. max_completion_length is the world's.")
KINDS = {
    "two rewards": Kind("7. xA7.", TWO),
    "rewards below 0": Kind("7. xA7. xx.", BELOW_0),
    "up to 10 tokens, or cut off": Kind("7. xxxA7xxx7. xxxA7xxx77.", THREE, limit=10),
    "3 tokens, many cut off": Kind("7. xA7. xx7.", BELOW_0, limit=3),
    "two turns with luck": WORLDS["two turns with luck"],
    "2 to 61 tokens": Kind(f"7. xA7. {LONG}7.", THREE, limit=64)}
MOST_BATCHES, MOST_OF_ONE_GROUP = 100, 3000  # a hundred take a second
NEUTRAL: dict[str, Any] = {  # right on average; each setting with a value of no effect
    "loss_type": "dr_grpo", "scale_rewards": "none", "importance_sampling_level": "token",
    "num_iterations": 1, "beta": 0.0, "mask_truncated_completions": False, "use_vllm": False,
    "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "off_policy_mask_threshold": None,
    "multi_objective_aggregation": "sum_then_normalize"}
JUDGED = {*NEUTRAL, *"""num_generations use_bias_correction_kl epsilon epsilon_high delta
    sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
    vespo_lambda_neg vllm_importance_sampling_correction vllm_importance_sampling_mode
    vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min""".split()}
FLAGS = {
    "trainer": Flag("", "whose configuration it is", choices=("trl",)),
    "seeds": Flag(1, "worlds of each kind", least=1, most=100),
    "alone": Flag(False, "judge each setting by itself, too"),
    "at_least": Flag(None, "the lowest cosine that is accepted", kind=float, most=1),
    "write": Flag("", "a file for a later --baseline"),
    "baseline": Flag("", "a file of --write: say what changed, with its status (lab/gate.py)")}
DRIFT = 0.1      # how far the first of several optimizer steps moves a log-prob
ENGINE = 0.1     # with use_vllm: the std of the engine's logits around the trainer's
REFERENCE = 0.5  # with beta: the std of the reference's logits around the policy's
T = TypeVar("T", bound=Hashable)


class Setup(NamedTuple):
    """A configuration, and the size of a batch."""
    config: Mapping[str, Any]  # fields of GRPOConfig
    groups: int = 0            # in a batch; 0: as many as can be listed


class Updates(NamedTuple):
    """Those of all batches."""
    groups: int
    chances: dict[tuple[Numbers, ...], float]
    found: Tensor              # (M, P)
    along_kl: float            # cosine of the mean with the gradient that has beta's KL, too


def multisets(chances: Mapping[T, float], count: int) -> dict[tuple[T, ...], float]:
    """The probability of each choice of `count` with replacement, in whatever order."""
    found = {}
    for chosen in itertools.combinations_with_replacement(chances, count):
        orders = math.factorial(count)
        for times in Counter(chosen).values():
            orders //= math.factorial(times)
        found[chosen] = orders * math.prod(chances[one] for one in chosen)
    return found


def groups_of(world: World, size: int, log_prob: Tensor) -> dict[Numbers, float]:
    """All groups of answers, as rows of the world, and their probabilities for this sampler."""
    chances, found = log_prob.sum(1).exp().tolist(), dict[Numbers, float]()
    for problem in range(world.kind.problems):
        own = {row: chances[row] for row, answer in enumerate(world.answers)
               if answer.problem == problem}
        forms = math.comb(len(own) + size - 1, size)
        if forms > MOST_OF_ONE_GROUP:
            raise UserError(f"num_generations {size}: a group has {forms} forms in {world.about}, "
                            f"and at most {MOST_OF_ONE_GROUP} are listed")
        for rows, chance in multisets(own, size).items():
            found[rows] = chance / world.kind.problems
    return found


def moved(world: World, distance: float, seed: int) -> Tensor:
    """(P, V): the policy's logits, each of them a bit different."""
    generator = torch.Generator().manual_seed(1000 * seed + world.task.seed)
    noise = torch.randn(world.logits.shape, generator=generator).double()
    return world.logits.detach() + distance * noise * (world.logits > -1e3)


def log_probs(world: World, logits: Tensor) -> Tensor:
    """(n, T) of all answers of the world."""
    log_p = logits.log_softmax(-1)[world.rows]
    return log_p.gather(2, world.rollouts.ids[..., None])[..., 0] * world.rollouts.mask


def table_trainer(setup: Setup, world: World) -> Any:
    """TRL's trainer, with answers, rewards and log-probs of this world."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    class TableTrainer(GRPOTrainer):  # type: ignore[misc, unused-ignore]
        """A prompt's only token is the row of its answer in the world."""
        rows: Numbers                  # the answers of the batch
        at: Tensor                     # (P, V): the policy's logits now
        reference_logits: Tensor
        engine_log_prob: Tensor        # (n, T): of the engine that draws the answers

        def _generate(self, prompts: Any) -> Any:
            columns = world.rollouts.ids, world.rollouts.mask.int(), self.engine_log_prob
            ids, own, log_prob = ([column[row, world.rollouts.written[row]].tolist()
                                   for row in self.rows] for column in columns)
            return ([[row] for row in self.rows], ids, own if world.kind.replies else None,
                    [""] * len(ids), log_prob if self.use_vllm else None, {}, None, [])

        def _calculate_rewards(self, *_: Any) -> Tensor:
            return world.rollouts.reward[[*self.rows]][:, None].float()

        def _get_per_token_logps_and_entropies(self, model: Any, input_ids: Tensor, _: Any,
                                               logits_to_keep: int, **more: Any) -> Any:
            logits = self.reference_logits if model is self.ref_model else self.at
            rows = input_ids[:, 0]
            log_p = logits.log_softmax(1)[world.rows[rows, :logits_to_keep]]
            ids = world.rollouts.ids[rows, :logits_to_keep, None]
            entropy = -(log_p.exp() * log_p).sum(2).float()  # its quantile is a float32 in TRL
            return log_p.gather(2, ids)[..., 0], entropy, None

    size, stop = setup.config["num_generations"], sorted(world.policy.model.config.eos_token_id)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, pad_token_id=5, bos_token_id=None,
        eos_token_id=stop[0]))
    model.generation_config.eos_token_id = stop
    tokens = Tokenizer(models.BPE(vocab={f"t{n}": n for n in range(6)}, merges=[]))
    judged_fields = {name: value for name, value in setup.config.items() if name in JUDGED}
    own: dict[str, Any] = {
        "output_dir": "exact_trl", "use_cpu": True, "bf16": False, "report_to": [],
        "gradient_checkpointing": False, "max_completion_length": world.kind.limit,
        "per_device_train_batch_size": size * setup.groups, "use_vllm": False, "beta": 0.0}
    trainer: Any = TableTrainer(
        model, args=GRPOConfig(**judged_fields | own), reward_funcs=[len],
        train_dataset=Dataset.from_list([{"prompt": "x"}] * size * setup.groups),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="t5",
                                                 eos_token=f"t{stop[0]}"))
    # for these TRL would start an engine and load a second model
    trainer.use_vllm, trainer.ref_model = setup.config["use_vllm"], object()
    trainer.beta = trainer.args.beta = float(setup.config["beta"])
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    trainer.reference_logits = moved(world, REFERENCE, 1)
    return trainer


def update(trainer: Any, world: World, rows: Numbers, rate: float, steps: int) -> Tensor:
    """(P,): what a batch's optimizer steps add to the logits, divided by their number and rate."""
    trainer.rows, trainer._buffered_inputs, trainer.at = rows, None, world.logits.detach()
    total = torch.zeros_like(trainer.at)
    for trainer._step in range(steps):
        trainer.at = (world.logits.detach() - rate * total).requires_grad_()
        inputs = trainer._prepare_inputs([{"prompt": "x"}] * len(rows))
        loss = trainer.compute_loss(trainer.model, inputs)
        total = total + torch.autograd.grad(loss, trainer.at)[0]
    for kept in (trainer._metrics["train"], trainer._logs["rewards"]):
        kept.clear()
    return -total.flatten() / steps


def rate_for(trainer: Any, world: World, batches: Mapping[Any, float]) -> float:
    """With it a batch's first step moves a log-prob by DRIFT, on average over batches and over
    the tokens with a choice that the policy draws."""
    drawn = world.chance.detach()[:, None] * (world.log_prob.detach() < -1e-6)
    change, small = 0.0, 1e-4
    for batch, chance in batches.items():
        step = update(trainer, world, sum(batch, ()), 0.0, 1)
        logits = world.logits.detach() + small * step.view_as(world.logits)
        difference = (log_probs(world, logits) - world.log_prob.detach()).abs()
        change += chance * float((difference * drawn).sum() / drawn.sum())
    return DRIFT * small / change


def updates(setup: Setup, world: World) -> Updates:
    size, steps = setup.config["num_generations"], setup.config["num_iterations"]
    engine_log_prob = log_probs(world, moved(
        world, ENGINE if setup.config["use_vllm"] else 0.0, 2))
    of_groups, groups = groups_of(world, size, engine_log_prob), setup.groups or 1
    while not setup.groups and math.comb(len(of_groups) + groups, groups + 1) <= MOST_BATCHES:
        groups += 1
    trainer = table_trainer(setup._replace(groups=groups), world)
    trainer.engine_log_prob = engine_log_prob
    batches = multisets(of_groups, groups)
    rate = rate_for(trainer, world, batches) if steps > 1 else 1.0
    found = torch.stack([update(trainer, world, sum(batch, ()), rate, steps) for batch in batches])
    mean = torch.tensor([*batches.values()]).double() @ found
    with_kl = world.truth - trainer.beta * size / (size - 1) * kl_gradient(
        world, trainer.reference_logits)
    along_kl = float(torch.cosine_similarity(mean, with_kl, dim=0))
    return Updates(groups, batches, found, along_kl)


def kl_gradient(world: World, reference_logits: Tensor) -> Tensor:
    """(P,) of KL(policy, reference), summed over an answer's tokens, whose beginnings are drawn by
    the policy but held fixed."""
    log_p, log_ref = world.logits.log_softmax(1), reference_logits.log_softmax(1)
    of_rows = (log_p.exp() * (log_p - log_ref)).sum(1)
    of_answers = (of_rows[world.rows] * world.rollouts.mask).sum(1)
    mean = (world.chance.detach() * of_answers).sum() / world.kind.problems
    return torch.autograd.grad(mean, world.logits, retain_graph=True)[0].flatten()


@cache
def right_noise(world: World, size: int, groups: int) -> float:
    """The noise of NEUTRAL, whose mean is known. It is looked at first, because in another version
    of TRL the replaced methods may do something else."""
    neutral = Setup(NEUTRAL | {"num_generations": size}, groups)
    _, batches, found, _ = updates(neutral, world)
    mean, length = compared(world, batches, found), (1 - 1 / size) / world.kind.limit
    if mean.bias or abs(mean.length / length - 1) > 1e-4:
        raise UserError(f"with trl {version('trl')} even dr_grpo without scaling is not right "
                        f"here, as it is with {TRIED}; so nothing can be said of it")
    return mean.noise


def judged(setup: Setup, world: World) -> tuple[Mean, float]:
    """The mean update of a configuration in a world, and its cosine with the KL in the truth."""
    try:
        groups, batches, found, along_kl = updates(setup, world)
        noise = right_noise(world, setup.config["num_generations"], groups)
    except UserError:
        raise
    except Exception as error:  # of GRPOConfig or GRPOTrainer
        own_word = isinstance(error, ValueError | TypeError | ArithmeticError)
        if own_word or version("trl") != TRIED:
            raise UserError(f"trl {version('trl')} refuses it: {error}") from None
        raise
    mean = compared(world, batches, found)
    return mean._replace(noise=mean.noise / noise), along_kl


def judge(setup: Setup, worlds: list[World], name: str, at_least: float | None = None) -> Verdict:
    means, along = list[Mean](), list[float]()
    for world in worlds:
        show_status(f"{name}: {world.about}")
        mean, along_kl = judged(setup, world)
        means.append(mean)
        along.append(along_kl)
    show_status("")
    word, why = in_words(name, means, False, at_least)
    if setup.config["beta"]:
        why += (" Its cosine with the gradient of reward - beta n / (n - 1) KL(policy, reference), "
                f"the KL of each token behind a fixed beginning, is at least {min(along):.4f}.")
    return Verdict(word, why, means)


def main(argv: list[str]) -> int:
    typed: dict[str, Any] = {}
    args = read(argv, "python -m lab exact --trainer trl [CONFIG.json] [flags, fields]",
                f"{__doc__}\n{textwrap.fill(NOT_JUDGED, 100)}", FLAGS,
                {"[CONFIG]": "a JSON file of GRPOConfig's fields"}, typed)
    said = f"{installed()}. {NOT_JUDGED}"
    configs = configs_of(args.config, {name: as_value(text) for name, text in typed.items()})
    said += about_fields({name: value for one in configs.values() for name, value in one.items()})
    for config in [*configs.values()] if args.alone else ():
        configs |= alone(config)
    worlds = worlds_of({"loss_norm": "constant"}, args.seeds, KINDS)
    print(textwrap.fill(said, 100), "", HEADINGS, sep="\n", flush=True)
    verdicts = dict[str, Verdict]()
    for name, config in configs.items():
        verdict = verdicts[name] = judge(Setup(config), worlds, name, args.at_least)
        print(*([] if " alone" in name else of_each_kind(verdict.means)),
              row(name, verdict.means, about_means(verdict.means)), sep="\n", flush=True)
    asked = {name: verdict for name, verdict in verdicts.items() if not name.endswith(" alone")}
    for word, why, *_ in asked.values() if len(asked) == 1 else ():
        print(f"\n{textwrap.fill(f'{word.upper()}: {why}', 100)}")
    found = {name: verdict.means for name, verdict in asked.items()}
    if args.write:
        gate.write(Path(args.write), found)
    if args.baseline:
        said_of_change, status = gate.compare(Path(args.baseline), found)
        print("", *said_of_change, sep="\n")
        return status
    return int(any(verdict.word not in (RIGHT, ACCEPTED) for verdict in asked.values()))


def about_means(means: list[Mean]) -> str:
    lengths = [mean.length for mean in means]
    middle = median(mean.cosine for mean in means)
    return f"median cosine {middle:.4f}, length {min(lengths):.4f} to {max(lengths):.4f}"


def installed() -> str:
    """The versions of what is asked, which is kept off the network."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    warnings.filterwarnings("ignore")
    try:
        import trl  # noqa: F401
        found = {name: version(name) for name in ("trl", "transformers", "torch")}
    except (PackageNotFoundError, ImportError) as error:
        raise UserError(f"--trainer trl asks the installed TRL: {error}. To install it: pip "
                        "install -r lab/trl/requirements.txt") from None
    said = ", ".join(f"{name} {number}" for name, number in found.items())
    return said + (f" (tried with trl {TRIED})" if found["trl"] != TRIED else "")


def configs_of(file: str | None, typed: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """GRPOConfig's fields, by the name of a configuration."""
    try:
        given = json.loads(Path(file).read_text("utf-8")) if file else {}
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: {error}") from None
    if not isinstance(given, dict):
        raise UserError(f"{file} is no JSON object of GRPOConfig's fields")
    several = given and all(isinstance(value, dict) for value in given.values())
    return {name: with_defaults({**config, **typed})
            for name, config in (given if several else {NAME: given}).items()}


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    from trl import GRPOConfig
    fields = GRPOConfig.__dataclass_fields__
    for name, value in config.items():
        if name not in fields:
            raise UserError(f"TRL's GRPOConfig has no field {name}"
                            f"{did_you_mean_name(name, fields)}")
        if isinstance(fields[name].default, bool) and not isinstance(value, bool):
            raise UserError(f"--{name} {value!r}: should be yes or no")
    return {name: fields[name].default for name in sorted(JUDGED)} | config


def as_value(text: Any) -> Any:
    """What a text of the command line stands for."""
    words = {"yes": True, "no": False, "True": True, "False": False, "None": None}
    if text in words:
        return words[text]
    try:
        return json.loads(text)
    except (ValueError, TypeError):
        return text


def about_fields(config: Mapping[str, Any]) -> str:
    """A sentence about fields that were set and have no say."""
    from trl import GRPOConfig
    fields = GRPOConfig.__dataclass_fields__
    names = [name for name in config.keys() - JUDGED if config[name] != fields[name].default]
    return f" Nor have these fields a say: {', '.join(sorted(names))}." if names else ""


def alone(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Configurations that are right but for one setting; numbers such as epsilon stay."""
    return {f"{name} {config[name]} alone": {**config, **NEUTRAL, name: config[name]}
            for name, neutral in NEUTRAL.items() if config[name] != neutral}
