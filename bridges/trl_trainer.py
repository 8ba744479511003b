"""TRL's GRPOTrainer, with a record of where the credit went, and a weighting if one is asked for.

    from bridges.trl_trainer import CreditGRPOTrainer

    trainer = CreditGRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=problems,
                                credit="runs/mine")
    trainer.train()               # at any time: python analyze.py runs/mine

TRL samples, rewards, compares and updates. Where it knows the advantage (B,) of each answer, this
file makes it (B, T), and TRL's loss takes that:

    TRL's batch -> Rollouts (engine/rollouts.py) -> weight (B, T) -> weight * advantage -> its loss
                                                        |
                                                        +-> credit file -> analyze.py

A weighting sees the whole batch of all processes, as in train.py. One forward pass more a batch
tells log_prob, entropy and collision, at the temperature of TRL's sampling. With `none` nothing of
TRL's is touched. Evaluations are not weighted. Refused are answers with tokens that the model did
not write (tools, environments) or with images, and weightings that sample or compute with this
lab's own model.
"""
import inspect
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from engine.choices import MITIGATIONS, NEVER_RESCALED
from bridges.import_run import labelled, named_parts
from engine.errors import PROJECT, UserError
from engine.processes import refuse_undefined
from engine.policy import derived_seed
from engine.rollouts import Rollouts
from engine.tokens import load_tokenizer
from grpo import to_every_token
from harness.record import RunFolder, credit_path, make_run, provenance, run_config, write_credit
from harness.screen import python_command, say
from harness.flags import Flag, check_value, check_values, flags_of
from harness.metrics import batch_metrics
from harness.load import CheckedTask, make
from harness.settings import load_task
from mitigations import rescaled_weight

INSTALL = "pip install trl==1.16.0 transformers==5.23.0"
try:
    import transformers
    import trl
    from trl import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head
    from accelerate.utils import gather_object
except (ImportError, RuntimeError) as error:
    raise UserError("bridges.trl_trainer needs TRL, which is not among this project's packages: "
                    f"{INSTALL} ({' '.join(str(error).split())})") from None

KNOWN = {  # what a batch of TRL holds of answers that are text of the model alone
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages",
    "num_items_in_batch", "old_per_token_logps", "importance_sampling_ratio",
    "sampling_per_token_logps", "ref_per_token_logps"}
STATE = "mitigation.safetensors"  # in TRL's checkpoints


class CreditGRPOTrainer(GRPOTrainer):
    """TRL's trainer, whose arguments it takes, and five more.

    mitigation        a choice of --mitigation, or a function like those in mitigations.py
    mitigation_flags  its flags that are not at their defaults, by name
    rescale           as --rescale
    credit            a folder that does not exist yet, for analyze.py
    task              a module as of --task, whose Task names the tokens; without it <think> and
                      <answer> make sections, and a token's own text says what kind it is
    """

    def __init__(self, *arguments, mitigation="none", mitigation_flags=None, rescale="mean",
                 credit=None, task=None, **more):
        refuse_other_trl()
        function = weighting_of(mitigation)
        values = flag_values(function, mitigation_flags or {})
        check_value("rescale", rescale, Flag("mean", choices=("mean", "gradient", "none")))
        super().__init__(*arguments, **more)
        self.is_weighted = function is not MITIGATIONS["none"]
        self.is_watched = self.is_weighted or credit is not None
        if self.is_weighted and self.importance_sampling_level != "token":
            raise UserError(f"importance_sampling_level {self.importance_sampling_level!r} gives "
                            "the tokens of an answer one ratio, so only the mean of their weights "
                            "would count: weights need 'token', with luspo too")
        if self.is_watched:
            rescale = "none" if function.__name__ in NEVER_RESCALED else rescale
            self.credit = Credit(self, function, values, rescale, credit, task)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """Keep what TRL forgets: the rewards, of all processes, and the answers' lengths."""
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        self.scored = SimpleNamespace(rewards=rewards, problems=inputs,
                                      lengths=list(map(len, completion_ids_list)))
        return rewards

    def _generate_and_score_completions(self, inputs):
        """TRL's batch, with weight * advantage (B, T) in place of the advantage (B,)."""
        output = super()._generate_and_score_completions(inputs)
        if self.is_watched and self.model.training:
            product = self.credit.spread(output, self.scored)
            if self.is_weighted:
                output["advantages"] = product
        return output

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        if self.is_watched and self.args.should_save:
            folder = Path(self._get_output_dir(trial=trial))
            self.credit.save_state(folder / f"checkpoint-{self.state.global_step}" / STATE)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.is_watched and checkpoint is not None:
            self.credit.load_state(Path(checkpoint) / STATE)


class Credit:
    """What a trainer gives the tokens of its batches, and all that it needs for that."""

    def __init__(self, trainer, function, values: dict, rescale: str, folder, task):
        self.trainer, self.name, self.rescale = trainer, function.__name__, rescale
        self.tokenizer = tokenizer_of(trainer)
        self.task = CheckedTask(load_task(task)()) if task else None
        self.policy = policy_of(trainer)
        self.weighting = make(function, values, self.policy)
        self.batches: int | None = None  # how many there were
        settings = {"mitigation": self.name, **values, "rescale": rescale}
        self.record = Record(trainer, Path(folder), settings, self.tokenizer) if folder else None
        add_fused_lm_head(model_of(trainer), temperature=trainer.temperature,
                          cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32,
                          outputs=("log_probs", "entropy", "log_sum_sq_probs"))

    def spread(self, output: dict, scored) -> torch.Tensor:
        """weight * advantage (B, T) of this process's rows. All rows go on record."""
        trainer = self.trainer
        if self.batches is None:  # numbered from 1, also where a run is resumed
            self.batches = batches_in(trainer, trainer.state.global_step)
        self.batches += 1
        rollouts = self.rollouts_of(output, scored)
        # mask_truncated_completions trains on no answer that the limit cut off
        is_trained = gathered(trainer, output["completion_mask"]).bool()
        batch = replace(rollouts, mask=rollouts.mask & is_trained)
        weight, numbers = rescaled_weight(self.weighting, self.name, batch, self.policy,
                                          self.rescale)
        if self.record and trainer.accelerator.is_main_process:
            self.record.write(self.batches, rollouts, weight, numbers)
        rows, T = output["completion_ids"].shape
        first = trainer.accelerator.process_index * rows
        return (weight * rollouts.advantage)[first:first + rows, :T]

    def rollouts_of(self, output: dict, scored) -> Rollouts:
        """TRL's batch in the frame of this lab, with the rows of all processes."""
        if others := sorted(set(output) - KNOWN):
            raise UserError(f"TRL's batch has {', '.join(others)}: answers with images, or with "
                            "tokens of tools or an environment, are not weighted here")
        trainer, ids = self.trainer, output["completion_ids"]
        lengths = torch.tensor(scored.lengths, device=ids.device)
        mask = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()
        look = Look(trainer, output, mask)
        facts = look.facts()
        refuse_undefined("the model's probabilities are", *facts)
        prompts, given = (gathered(trainer, output[name]) for name in ("prompt_ids", "prompt_mask"))
        ids, mask = gathered(trainer, ids), gathered(trainer, mask).bool()
        last = ids.gather(1, mask.sum(1, keepdim=True) - 1)
        ends = [*trainer.eos_token_ids, trainer._tokenizer.pad_token_id]
        group = torch.arange(len(ids), device=ids.device) // trainer.num_generations
        first = slice(None, None, trainer.num_generations)  # of each group
        seed = derived_seed("credit", trainer.args.seed, self.batches)
        rollouts = Rollouts(
            gather_object(scored.problems)[first],
            [prompt[is_given.bool()].tolist()
             for prompt, is_given in zip(prompts[first], given[first])],
            group, ids * mask, mask, torch.isin(last, last.new_tensor(ends)).squeeze(1), *facts,
            step=self.batches, generator=torch.Generator().manual_seed(seed), forward=look)
        advantage = trainer.accelerator.gather(output["advantages"]).float()
        return replace(labelled(rollouts, self.tokenizer, self.task),
                       scores=scores_of(trainer, scored.rewards),
                       advantage=to_every_token(advantage, rollouts))

    def save_state(self, path: Path) -> None:
        if hasattr(self.weighting, "state_dict"):
            tensors = self.weighting.state_dict()
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    def load_state(self, path: Path) -> None:
        if hasattr(self.weighting, "load_state_dict"):
            if not path.exists():
                raise UserError(f"{path} does not exist: {self.name} cannot go on without its "
                                "state")
            self.weighting.load_state_dict(load_file(path))


class Look:
    """What TRL's own forward pass of a batch can tell, of the rows of all processes.

    TRL makes the shift: it runs over prompt and answer, and its last T values belong to the answer.
    """

    def __init__(self, trainer, output: dict, mask: torch.Tensor):
        self.trainer, self.mask, self.T = trainer, mask, mask.shape[1]
        self.ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        self.attended = torch.cat([output["prompt_mask"], mask], 1)
        self.results = {}

    @torch.no_grad()
    def run(self, module, pick):
        """One pass. Returns log-probs and entropies, and what `pick` takes from each output of the
        module. TRL's random numbers stay as they were, should the model have dropout."""
        trainer, caught, device = self.trainer, [], self.ids.device
        devices = [device] if device.type == "cuda" else []
        hook = module.register_forward_hook(lambda *parts: caught.append(pick(parts[-1])))
        try:
            with torch.random.fork_rng(devices):
                log_prob, entropy, _ = trainer._get_per_token_logps_and_entropies(
                    trainer.model, self.ids, self.attended, self.T, compute_entropy=True,
                    batch_size=trainer.args.per_device_train_batch_size)
        finally:
            hook.remove()
        return log_prob, entropy, torch.cat(caught)

    def facts(self) -> list[torch.Tensor]:
        """log_prob, entropy and collision (B, T)."""
        log_prob, entropy, log_collision = self.run(
            self.trainer.model, lambda made: made.log_sum_sq_probs[:, -self.T:])
        return [gathered(self.trainer, fact.float() * self.mask)
                for fact in (log_prob, entropy, log_collision.exp())]

    def look(self, rollouts: Rollouts, attention: bool = False) -> dict[str, torch.Tensor]:
        """For `Rollouts.forward`: hidden (B, T, D) or attention (B, T, T), when somebody asks."""
        name = "attention" if attention else "hidden"
        if name not in self.results:
            values = self.attention() if attention else self.hidden()
            self.results[name] = gathered(self.trainer, values.float() * self.mask[:, :, None])
        return self.results

    def hidden(self) -> torch.Tensor:
        return self.run(model_of(self.trainer).base_model,
                        lambda made: made.last_hidden_state[:, -self.T - 1:-1])[2]

    def attention(self) -> torch.Tensor:
        """Of the last layer. Only transformers' slowest way of computing it shows the matrix."""
        model, T = model_of(self.trainer), self.T
        layers = [module for name, module in model.named_modules() if name.endswith("self_attn")]
        before = model.config._attn_implementation

        def pick(made):
            if not isinstance(made, tuple) or made[1] is None:
                raise UserError(f"{type(model).__name__} shows no attention to a weighting")
            return made[1].mean(1)[:, -T - 1:-1, -T:]

        if not layers:
            raise UserError(f"{type(model).__name__} has no attention that a weighting could see")
        model.set_attn_implementation("eager")
        try:
            return self.run(layers[-1], pick)[2]
        finally:
            model.set_attn_implementation(before)


class Record:
    """The run folder: written by the main process, with the first batch."""

    def __init__(self, trainer, path: Path, settings: dict, tokenizer):
        self.trainer, self.path, self.settings = trainer, path, settings
        self.tokenizer, self.run = tokenizer, None

    def write(self, batch: int, rollouts: Rollouts, weight: torch.Tensor, numbers: dict) -> None:
        if self.run is None:
            self.run = self.begin(batch)
            say(f"{self.path} keeps a record. To see at any time where the credit went: "
                f"{python_command(PROJECT / 'analyze.py', self.path)}")
        steps = {"step": batch, "trainer_step": self.trainer.state.global_step + 1}  # its update
        write_credit(credit_path(self.run.path, batch), rollouts, weight,
                     {"trainer_step": steps["trainer_step"]})  # one file for all processes
        self.run.append("metrics.jsonl", numbers | steps | batch_metrics(rollouts))

    def begin(self, batch: int) -> RunFolder:
        """Make the folder; where the run was resumed, forget what will be made again."""
        config = self.config()
        if batch > 1 and self.path.exists():
            known, aside = run_config(self.path), {"git_commit", "versions"}
            if any(known.get(name) != config[name] for name in config.keys() - aside):
                raise UserError(f"{self.path} is of a run with other settings: name another folder")
            run = RunFolder(self.path)
            run.forget_after(batch - 1)
            return run
        with TemporaryDirectory() as folder:
            self.tokenizer.save(f"{folder}/tokenizer.json")
            make_run(self.path, config, Path(folder, "tokenizer.json"))
        return RunFolder(self.path)

    def config(self) -> dict:
        """config.json: the flags of train.py where TRL has the same, and what made it."""
        trainer, args = self.trainer, self.trainer.args
        config = {
            **self.settings, "advantage": f"trl_{trainer.scale_rewards}",
            "trainer": f"trl {trainer.loss_type}",
            "model": model_of(trainer).config._name_or_path or type(model_of(trainer)).__name__,
            "seed": args.seed, "steps": batches_in(trainer, trainer.state.max_steps),
            "questions": args.generation_batch_size // trainer.num_generations,
            "answers": trainer.num_generations, "max_new_tokens": trainer.max_completion_length,
            "temperature": float(trainer.temperature), "learning_rate": args.learning_rate,
            "columns_temperature": float(trainer.temperature),
            "eval_every": 0, "reward": " + ".join(trainer.reward_func_names), **provenance()}
        config["versions"] |= {"trl": trl.__version__, "transformers": transformers.__version__}
        return config


class Only:
    """The part of a policy that there is. Whatever else is asked for is an error that says so."""

    def __init__(self, what: str, **known):
        vars(self).update(known, what=what)

    def __getattr__(self, name: str):
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(name)
        raise UserError(f"TRL's trainer has no {self.what}.{name} for a weighting: one that "
                        "samples, or computes with this lab's model, needs train.py")


def scores_of(trainer, rewards: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weighted sum that TRL compares, and each function's own. An answer that no function could
    score is nan in TRL, has no advantage, and gets 0 here."""
    parts = rewards.float().nan_to_num(nan=0.0)
    summed = (parts * trainer.reward_weights.to(parts.device)).sum(1)
    return named_parts(trainer.reward_func_names, parts.T) | {"reward": summed}


def gathered(trainer, tensor: torch.Tensor) -> torch.Tensor:
    """The rows of all processes, padded to the longest."""
    accelerator = trainer.accelerator
    for dim in range(1, tensor.dim()):
        tensor = accelerator.pad_across_processes(tensor, dim=dim)
    return accelerator.gather(tensor)


def batches_in(trainer, updates: int) -> int:
    """How many batches of answers so many updates take, rounded up. A batch may serve several
    updates (num_iterations), and several batches one."""
    for_each = trainer.args.steps_per_generation * trainer.num_iterations
    return -(-updates * trainer.args.gradient_accumulation_steps // for_each)


def model_of(trainer):
    """The model of transformers, without what accelerate and PEFT wrap around it."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def policy_of(trainer) -> Only:
    """What a weighting that is a class gets beside the batch."""
    settings = {"seed": trainer.args.seed, "temperature": trainer.temperature,
                "max_new_tokens": trainer.max_completion_length}
    config = Only("policy.model.config", **model_of(trainer).config.get_text_config().to_dict())
    model = Only("policy.model", config=config, device=trainer.accelerator.device)
    return Only("policy", model=model, tokenizer=tokenizer_of(trainer),
                settings=Only("policy.settings", **settings))


def tokenizer_of(trainer):
    """The tokenizers.Tokenizer inside that of transformers."""
    tokenizer = getattr(trainer._tokenizer, "backend_tokenizer", None)
    if tokenizer is None:
        raise UserError(f"{type(trainer._tokenizer).__name__} has no tokenizer.json")
    with TemporaryDirectory() as folder:  # can it be read again?
        tokenizer.save(f"{folder}/tokenizer.json")
        return load_tokenizer(folder)


def weighting_of(mitigation):
    """The function or class of a choice of --mitigation; or the one that was given."""
    if callable(mitigation):
        return mitigation
    check_value("mitigation", mitigation, Flag("none", choices=MITIGATIONS))
    return MITIGATIONS[mitigation]


def flag_values(function, given: dict) -> dict:
    flags = flags_of(function)
    if unknown := [name for name in given if name not in flags]:
        raise UserError(f"mitigation_flags: {function.__name__} has no flag {unknown[0]}, it has "
                        f"{', '.join(flags) or 'none'}")
    values = {name: given.get(name, flag.default) for name, flag in flags.items()}
    check_values(values, flags)
    return values


def refuse_other_trl() -> None:
    """In a TRL that never calls what stands in for a method of its own, or whose loss spreads an
    advantage over the tokens once more, something else would be trained. Other changes show."""
    here = f"trl {trl.__version__} is not as this file knows it ({INSTALL}): its GRPOTrainer"
    for name in vars(CreditGRPOTrainer):
        if not hasattr(GRPOTrainer, name):
            raise UserError(f"{here} has no {name}")
    if "advantages.dim() == 1" not in inspect.getsource(GRPOTrainer._compute_loss):
        raise UserError(f"{here} takes one advantage an answer, none for each token")
