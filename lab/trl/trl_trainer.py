"""TRL's GRPOTrainer with a record of where the credit went, and a weighting if one is asked for.

    from lab.trl.trl_trainer import CreditGRPOTrainer

    trainer = CreditGRPOTrainer(model, reward_funcs=reward, args=args, train_dataset=problems,
                                credit="runs/mine")
    trainer.train()               # at any time: python -m lab page runs/mine

TRL samples, rewards, compares and updates. Once it has the advantage (B,) of each answer, this file
makes it (B, T), and TRL's loss takes that:

    TRL's batch -> Rollouts (lab/engine/rollouts.py) -> weight (B, T) -> weight * advantage -> its
    loss                                                     |
                                                        +-> credit file -> analyze.py

A weighting sees the whole batch of all processes, as in train.py. One more forward pass for each
batch computes log_prob, entropy and collision, at the temperature of TRL's sampling. With `none`
TRL trains as it does alone. Evaluations are not weighted. In answers of several turns, the mask
(TRL's `tool_mask`) has only the model's own tokens. Answers with images are refused, and so are
methods that use attention, or sample or compute with this lab's own model.
"""
import inspect
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from lab.engine.methods import ADVANTAGES, MITIGATIONS, NEVER_RESCALED, checked_credit, make
from lab.engine.errors import PROJECT, UserError
from lab.engine.errors import refuse_undefined
from lab.harness.tasks import CheckedTask, load_task
from lab.engine.policy import derived_seed
from lab.engine.rollouts import Rollouts, has_turns, score_answers
from lab.engine.tokens import OTHER, THINK, load_tokenizer, spelt_by
from lab.countdown import annotate
from grpo import to_every_token
from lab.harness.read_record import run_config
from lab.harness.record import credit_path, provenance, write_credit
from lab.harness.screen import python_command, say
from lab.harness.flags import Flag, check_value, flags_of, settle
from lab.engine.credited import rescaled_weight
from run import append, forget_after, make_run, own_files
from train import means_of

INSTALL = "pip install trl==1.16.0 transformers==5.23.0"
try:
    import transformers
    import trl
    from trl import GRPOTrainer
    from trl.trainer.utils import add_fused_lm_head
    from accelerate.utils import gather_object
except (ImportError, RuntimeError) as error:
    raise UserError("lab.trl.trl_trainer needs TRL, which is not among this project's packages: "
                    f"{INSTALL} ({' '.join(str(error).split())})") from None

KNOWN = {  # what a batch of TRL holds when its answers are text
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages",
    "num_items_in_batch", "old_per_token_logps", "importance_sampling_ratio",
    "sampling_per_token_logps", "ref_per_token_logps", "tool_mask"}
STATE = "mitigation.safetensors"  # in TRL's checkpoints


class CreditGRPOTrainer(GRPOTrainer):
    """TRL's trainer with six more arguments.

    mitigation        a choice of --mitigation, or a function like those in mitigations.py
    mitigation_flags  its flags that are not at their defaults, by name
    rescale           as --rescale
    advantage         a choice of --advantage, or such a function, in place of TRL's own advantage
    credit            a folder that does not exist yet, for analyze.py
    task              a module as of --task, whose Task names the tokens, and replies where an
                      advantage asks it to (without_luck); without it <think> and <answer> make
                      sections, and a token's own text says what kind it is
    """

    def __init__(self, *arguments, mitigation="none", mitigation_flags=None, rescale="mean",
                 advantage=None, credit=None, task=None, **more):
        refuse_other_trl()
        function = chosen(MITIGATIONS, "mitigation", mitigation)
        values = flag_values(function, mitigation_flags or {})
        check_value("rescale", rescale, Flag("mean", choices=("mean", "gradient", "none")))
        super().__init__(*arguments, **more)
        count = self.accelerator.num_processes
        if self.accelerator.is_main_process:
            say("one process trains" if count == 1 else f"{count} processes train together")
        self.is_weighted = function is not MITIGATIONS["none"] or advantage is not None
        self.is_watched = self.is_weighted or credit is not None
        if self.is_weighted and self.importance_sampling_level != "token":
            raise UserError(f"importance_sampling_level {self.importance_sampling_level!r} gives "
                            "all tokens of an answer one ratio, so only the mean of their weights "
                            "would count. Weights need 'token', also with the loss luspo")
        if self.is_watched:
            rescale = "none" if function.__name__ in NEVER_RESCALED else rescale
            self.credit = Credit(self, function, values, rescale, advantage, credit, task)

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        """Keep what TRL forgets: the rewards, of all processes, and the answers' lengths."""
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        lengths = [len(ids) for ids in completion_ids_list]
        self.scored = SimpleNamespace(rewards=rewards, problems=inputs, lengths=lengths)
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
    """The weighting of a trainer's batches, their record, and all that both need."""

    def __init__(self, trainer, function, values: dict, rescale: str, advantage, folder, task):
        self.trainer = trainer
        self.name = function.__name__
        self.rescale = rescale
        self.tokenizer = tokenizer_of(trainer)
        self.task = CheckedTask(load_task(task)()) if task else None
        self.policy = policy_of(trainer, self.task, task)
        self.weighting = make(function, values, self.policy)
        self.advantage, self.own_advantage = None, "TRL's"
        if advantage is not None:
            of_ours = chosen(ADVANTAGES, "advantage", advantage)
            self.own_advantage = of_ours.__name__
            self.advantage = make(of_ours, flag_values(of_ours, {}), self.policy)
        self.batches: int | None = None  # how many there were
        self.record = None
        if folder:
            settings = {"mitigation": self.name, **values, "rescale": rescale}
            if self.advantage is not None:
                settings["advantage"] = self.own_advantage
            self.record = Record(trainer, Path(folder), settings, self.tokenizer)
        add_fused_lm_head(model_of(trainer), temperature=trainer.temperature,
                          cast_lm_head_to_fp32=trainer.args.cast_lm_head_to_fp32,
                          outputs=("log_probs", "entropy", "log_sum_sq_probs"))

    def spread(self, output: dict, scored) -> torch.Tensor:
        """weight * advantage (B, T) for this process's rows. The rows of all are recorded."""
        trainer = self.trainer
        if self.batches is None:  # numbered from 1, also in a run that is resumed
            self.batches = batches_in(trainer, trainer.state.global_step)
        self.batches += 1
        rollouts = self.rollouts_of(output, scored)
        if self.advantage is not None:
            found = checked_credit(self.advantage, f"--advantage {self.own_advantage}", rollouts,
                                   self.policy)
            rollouts = replace(rollouts, advantage=found)
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
            raise UserError(f"TRL's batch has {', '.join(others)}: answers with images are not "
                            "weighted here")
        trainer = self.trainer
        own_ids = output["completion_ids"]
        lengths = torch.tensor(scored.lengths, device=own_ids.device)
        place = torch.arange(own_ids.shape[1], device=own_ids.device)
        own_written = (place < lengths[:, None]).long()
        # 0 where a tool or an environment wrote
        own_mask = own_written * output.get("tool_mask", torch.ones_like(own_ids))
        look = Look(trainer, output, own_written, own_mask)
        log_prob, entropy, collision = look.facts()
        refuse_undefined("the model's probabilities are", log_prob, entropy, collision)

        ids = gathered(trainer, own_ids)                                    # (B, T)
        mask = gathered(trainer, own_mask).bool()
        written = gathered(trainer, own_written).bool()
        end = written.sum(1, keepdim=True) - 1                              # (B, 1)
        last = ids.gather(1, end)
        ends = [*trainer.eos_token_ids, trainer._tokenizer.pad_token_id]
        finished = (torch.isin(last, last.new_tensor(ends)) & mask.gather(1, end)).squeeze(1)

        size = trainer.num_generations  # of a group, whose rows have one prompt
        prompt_ids = gathered(trainer, output["prompt_ids"])[::size]
        prompt_mask = gathered(trainer, output["prompt_mask"])[::size].bool()
        prompts = [row[inside].tolist() for row, inside in zip(prompt_ids, prompt_mask)]
        seed = derived_seed("credit", trainer.args.seed, self.batches)
        rollouts = Rollouts(
            problems=gather_object(scored.problems)[::size], prompt_ids=prompts,
            group=torch.arange(len(ids), device=ids.device) // size, ids=ids * written, mask=mask,
            written=written, finished=finished,
            log_prob=log_prob, entropy=entropy, collision=collision,
            step=self.batches, generator=torch.Generator().manual_seed(seed), forward=look)
        rollouts = labelled(rollouts, self.tokenizer, self.task)
        advantage = trainer.accelerator.gather(output["advantages"]).float()
        return replace(rollouts, scores=scores_of(trainer, scored.rewards),
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
    """TRL's own forward pass of a batch, and what it computes for the rows of all processes.

    TRL makes the shift: it runs over prompt and answer, and its last T values belong to the answer.
    """

    def __init__(self, trainer, output: dict, written: torch.Tensor, mask: torch.Tensor):
        self.trainer = trainer
        self.mask = mask
        self.T = mask.shape[1]
        self.ids = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)
        self.attended = torch.cat([output["prompt_mask"], written], 1)
        self.results = {}

    @torch.no_grad()
    def run(self, module, pick):
        """Returns log-probs and entropies of a pass, and what `pick` takes from each output of the
        module. TRL's random numbers stay as they were, also if the model has dropout."""
        trainer, device = self.trainer, self.ids.device
        caught = []
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
        def pick(made):
            return made.log_sum_sq_probs[:, -self.T:]

        log_prob, entropy, log_collision = self.run(self.trainer.model, pick)
        facts = (log_prob, entropy, log_collision.exp())
        return [gathered(self.trainer, fact.float() * self.mask) for fact in facts]

    def __deepcopy__(self, memo: object) -> "Look":
        return self  # copies of a batch share it

    def look(self, rollouts: Rollouts, attention: bool = False) -> dict[str, torch.Tensor]:
        """Compute hidden (B, T, D) when somebody asks `Rollouts` for it."""
        if attention:
            raise UserError("TRL's trainer gives a weighting no attention. A weighting that uses "
                            "it needs lab train")

        def pick(made):
            return made.last_hidden_state[:, -self.T - 1:-1]  # what predicted the answer's tokens

        if not self.results:
            _, _, states = self.run(model_of(self.trainer).base_model, pick)
            self.results["hidden"] = gathered(self.trainer, states.float() * self.mask[:, :, None])
        return self.results


class Record:
    """The run folder, which the main process makes with the first batch."""

    def __init__(self, trainer, path: Path, settings: dict, tokenizer):
        self.trainer = trainer
        self.path = path
        self.settings = settings
        self.tokenizer = tokenizer
        self.has_begun = False

    def write(self, batch: int, rollouts: Rollouts, weight: torch.Tensor, numbers: dict) -> None:
        if not self.has_begun:
            self.begin(batch)
            self.has_begun = True
            say(f"{self.path} keeps a record. To see at any time where the credit went: "
                f"{python_command(PROJECT / 'analyze.py', self.path)}")
        update = self.trainer.state.global_step + 1  # the first of TRL's that uses this batch
        # one file for all processes
        write_credit(credit_path(self.path, batch), replace(rollouts, step=batch), weight)
        steps = {"step": batch, "trainer_step": update}
        append(self.path / "metrics.jsonl", numbers | steps | means_of(rollouts))

    def begin(self, batch: int) -> None:
        """Make the folder. A resumed run forgets the steps from here on."""
        config = self.config()
        if batch > 1 and self.path.exists():
            known = run_config(self.path)
            compared = config.keys() - {"git_commit", "versions"}
            if any(known.get(name) != config[name] for name in compared):
                raise UserError(f"{self.path} has a run with other settings: name another folder")
            forget_after(self.path, batch - 1)
            return
        with TemporaryDirectory() as folder:
            self.tokenizer.save(f"{folder}/tokenizer.json")
            make_run(self.path, config, Path(folder, "tokenizer.json"), own_files())

    def config(self) -> dict:
        """What config.json holds: flags of lab train that TRL has too, and what made the run."""
        trainer, args = self.trainer, self.trainer.args
        model = model_of(trainer)
        config = {
            "advantage": f"trl_{trainer.scale_rewards}_{trainer.loss_type}",
            **self.settings,
            "model": model.config._name_or_path or type(model).__name__,
            "seed": args.seed,
            "steps": batches_in(trainer, trainer.state.max_steps),
            "questions": args.generation_batch_size // trainer.num_generations,
            "answers": trainer.num_generations,
            "max_new_tokens": trainer.max_completion_length,
            "temperature": float(trainer.temperature),
            "learning_rate": args.learning_rate,
            "columns_temperature": float(trainer.temperature),
            "eval_every": 0,
            "reward": " + ".join(trainer.reward_func_names)}
        config |= provenance()
        config["versions"] |= {"trl": trl.__version__, "transformers": transformers.__version__}
        return config


class Only:
    """The known part of a policy. Asking for anything else is an error that says so."""

    def __init__(self, what: str, **known):
        vars(self).update(known, what=what)

    def __getattr__(self, name: str):
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(name)
        raise UserError(f"TRL's trainer gives a weighting no {self.what}.{name}. A weighting that "
                        "samples answers, or computes with this lab's model, needs lab train")


def scores_of(trainer, rewards: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weighted sum of rewards that TRL compares, and the reward of each function. An answer
    that no function could score is nan in TRL, has no advantage, and gets 0 here."""
    parts = rewards.float().nan_to_num(nan=0.0)
    summed = (parts * trainer.reward_weights.to(parts.device)).sum(1)
    return named_parts(trainer.reward_func_names, parts.T) | {"reward": summed}


def named_parts(names: Iterable[str], columns: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rewards by the names of their functions.

    `reward` is the lab's name for the sum, and `answer` for whether an answer is right, which a
    function called `answer` says by 1 or more: the functions' own values get the names own_reward
    and own_answer. When several functions share a name, the later ones get a number.
    """
    parts = {}
    for number, (name, values) in enumerate(zip(names, columns), 1):
        if name == "answer":
            parts["answer"] = torch.where(values.isnan(), values, (values >= 1).float())
        own = f"own_{name}" if name in ("reward", "answer") else name
        parts[f"{own}_{number}" if own in parts else own] = values
    return parts


def labelled(batch: Rollouts, tokenizer: Tokenizer, task=None) -> Rollouts:
    """The batch with section and kind of each token: by a task, or by tags and text alone. Without
    a tag, in the answer or at the end of the prompt, nothing is called thinking."""
    prompt = spelt_by(tokenizer, batch.prompt_ids[0])  # all prompts end alike
    opens_thinking = prompt.rstrip().endswith("<think>")

    def by_tags(pieces: list[str]) -> tuple[list[int], list[int]]:
        sections, kinds = annotate(pieces)
        if not opens_thinking and "think>" not in "".join(pieces):
            sections = [OTHER if code == THINK else code for code in sections]
        return sections, kinds

    names = SimpleNamespace(label=task.label if task else by_tags, score=lambda problem, text: {})
    # an environment may reply, or has replied
    if (task and has_turns(task)) or not batch.mask.equal(batch.written):
        names.reply = None
    return score_answers(batch, tokenizer, names)


def gathered(trainer, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the rows of all processes, padded to the longest."""
    accelerator = trainer.accelerator
    for dim in range(1, tensor.dim()):
        tensor = accelerator.pad_across_processes(tensor, dim=dim)
    return accelerator.gather(tensor)


def batches_in(trainer, updates: int) -> int:
    """The number of batches of answers that so many updates take, rounded up. A batch may serve
    several updates (num_iterations), and an update may take several batches."""
    passes = updates * trainer.args.gradient_accumulation_steps
    passes_of_batch = trainer.args.steps_per_generation * trainer.num_iterations
    return math.ceil(passes / passes_of_batch)


def model_of(trainer):
    """The model of transformers, without what accelerate and PEFT wrap around it."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def policy_of(trainer, task=None, name=None) -> Only:
    """The policy that a method which is a class is given, as far as it exists here."""
    settings = {"seed": trainer.args.seed, "temperature": trainer.temperature,
                "max_new_tokens": trainer.max_completion_length, "dynamic_sampling": 1,
                "questions": trainer.args.generation_batch_size // trainer.num_generations}
    known = {}
    if task is not None:
        known["task"] = task
        settings["task"] = name
    of_model = model_of(trainer).config.get_text_config().to_dict()
    ends = of_model.get("eos_token_id")
    stop = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    config = Only("policy.model.config", **{**of_model, "eos_token_id": stop})
    model = Only("policy.model", config=config, device=trainer.accelerator.device)
    return Only("policy", model=model, tokenizer=tokenizer_of(trainer),
                settings=Only("policy.settings", **settings), **known)


def tokenizer_of(trainer):
    """The tokenizers.Tokenizer inside that of transformers."""
    tokenizer = getattr(trainer._tokenizer, "backend_tokenizer", None)
    if tokenizer is None:
        raise UserError(f"{type(trainer._tokenizer).__name__} has no tokenizer.json")
    with TemporaryDirectory() as folder:  # can it be read again?
        tokenizer.save(f"{folder}/tokenizer.json")
        return load_tokenizer(folder)


def chosen(choices, flag: str, given):
    """The function or class behind a name of --mitigation or --advantage, or that was given."""
    if callable(given):
        return given
    check_value(flag, given, Flag("none", choices=choices))
    return choices[given]


def flag_values(function, given: dict) -> dict:
    flags = flags_of(function)
    for name in given:
        if name not in flags:
            raise UserError(f"mitigation_flags: {function.__name__} has no flag {name}, it has "
                            f"{', '.join(flags) or 'none'}")
    return settle(given, flags)


def refuse_other_trl() -> None:
    """Refuse a TRL that would silently train something else: because it never calls a method that
    is replaced here, or because its loss spreads an advantage over the tokens once more. Other
    changes end in an error by themselves."""
    here = f"trl {trl.__version__} is not as this file knows it ({INSTALL}): its GRPOTrainer"
    for name in vars(CreditGRPOTrainer):
        if not hasattr(GRPOTrainer, name):
            raise UserError(f"{here} has no {name}")
    if "advantages.dim() == 1" not in inspect.getsource(GRPOTrainer._compute_loss):
        raise UserError(f"{here} takes only one advantage for each answer, and not one for each "
                        "token")
