"""The loop: sample, score, advantage, weight, loss, update, record; evaluate, and never lose a run.

    python train.py --mitigation none
    python train.py --resume runs/none-grpo-s0

`train_step` is the algorithm, on one screen. Every random draw of step n follows from (seed, n)
alone, so a resumed run needs no random state: it samples what the uninterrupted run would have
sampled, bit for bit on the same CPU.

Left out: a replay buffer, a reward model, and sampling while training goes on. Every answer is
sampled from the weights that are updated with it (unless --rollouts_every says less often).
"""
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import engine  # noqa: F401  before torch: it sets how torch's threads wait
import torch

import mitigations  # noqa: F401  fills the lists of choices
from analysis.statistics import wilson_interval
from credit.placebo import shuffled_advantage
from credit.preferences import update_preferences
from credit.weight import token_weight
from engine import processes
from engine.checked import call_choice, joined, metrics_of
from engine.clock import Clock, Pace
from engine.command_line import read_flags
from engine.credit_file import step_of
from engine.errors import UserError
from engine.files import is_there
from engine.finite import NotFinite, where_to_look
from engine.hints import python_command
from engine.identity import run_id_of
from engine.lab import Lab, derived_seed, make_lab, try_problems
from engine.program import run_as_program
from engine.progress import print_evaluation, print_step, say, show_status
from engine.provenance import code_files, fingerprints, provenance
from engine.registry import WHOLE_ANSWERS
from engine.remote_rollouts import connect
from engine.resume import (changes_among, check_what_is_there, how_far, is_finished, keep_changes,
                           refuse_changes, refuse_to_erase, refuse_to_overwrite, what_differs)
from engine.rollouts import Rollouts
from engine.run_folder import RunFolder, open_run, run_config
from engine.settings import Settings, make_settings, refuse_unprintable
from engine.stopping import StopRequest
from grpo import update


def train_step(lab: Lab, run: RunFolder, step: int) -> dict:
    """One step of the algorithm; returns its line of metrics.jsonl."""
    s, clock = lab.settings, Clock(step)
    with clock("rollout"):
        rollouts = sample(lab, run, step)
        rollouts = lab.score(rollouts)                                          # rewards (B,)
    with clock("credit"):
        rollouts = add_advantage(lab, rollouts, step)                           # (B, T)
        trained = drop_unfinished(rollouts) if s.drop_unfinished else rollouts
        weight, weight_metrics = token_weight(                                  # (B, T)
            lab.mitigation, s.mitigation, trained, lab, s.rescale, s.placebo)
    columns = {}  # further (B, T) for the record
    with clock("update"):
        if s.loss == "policy":
            result, ratio = update(lab.model, lab.optimizer, trained, weight, s, lab.reference)
            columns = {"ratio": ratio} if s.epochs > 1 else {}
        else:
            result, advantage = update_preferences(
                lab.model, lab.optimizer, trained, s, lab.reference)
            rollouts = replace(rollouts, advantage=advantage)
    with clock("record"):
        record(run, step, rollouts, weight, columns)
        if s.sample_every and step % s.sample_every == 0:
            keep_samples(lab, run, step, rollouts)
    batch = batch_metrics(rollouts)
    speed = clock.metrics(batch["tokens"], result["trained_tokens"], lab.model.device)
    return joined({"step": step}, credit_metrics(lab, weight_metrics), batch, result, speed)


def sample(lab: Lab, run: RunFolder, step: int) -> Rollouts:
    """Answers to the problems of this step: the model's own, a server's, or pairs from a file."""
    s = lab.settings
    if lab.pairs:
        return lab.pairs.of_step(lab, step)
    problems = lab.task.training_problems(s.seed, step, s.questions)
    seed = derived_seed("train", s.seed, step)
    if lab.server:
        return lab.server.sample(run, problems, step, seed)
    return lab.sample(problems, s.answers, seed)


def add_advantage(lab: Lab, rollouts: Rollouts, step: int) -> Rollouts:
    """Add the advantage (B, T) that --advantage makes from the rewards. It may ask for random
    numbers, and look into the model once more."""
    s = lab.settings
    generator = torch.Generator().manual_seed(derived_seed("credit", s.seed, step))
    rollouts = replace(rollouts, step=step, generator=generator, forward=lab.look_with())
    advantage = call_choice(lab.advantage, f"the advantage {s.advantage}", rollouts, lab)
    rollouts = replace(rollouts, advantage=advantage)
    if s.placebo == "advantages":
        shuffled = shuffled_advantage(rollouts, s.advantage in WHOLE_ANSWERS)
        rollouts = replace(rollouts, advantage=shuffled)
    return rollouts


def drop_unfinished(rollouts: Rollouts) -> Rollouts:
    """Answers that the limit cut off stay in their group's statistics, and are not trained on."""
    return replace(rollouts, mask=rollouts.mask & rollouts.finished[:, None])


def record(run: RunFolder, step: int, rollouts: Rollouts, weight: torch.Tensor,
           columns: dict[str, torch.Tensor]) -> None:
    """Write what every token was given, each process for its own problems. Rank 0 waits for the
    others before it writes: where its file is, all are."""
    is_first = processes.rank() == 0
    if is_first:
        processes.barrier()
    questions = processes.shard_of(len(rollouts.prompt_ids))
    rows = rollouts.rows_of(questions)
    own_part = {name: values[rows] for name, values in columns.items()}
    run.write_credit(step, rollouts.of_questions(questions), weight[rows], **own_part)
    if not is_first:
        processes.barrier()


def keep_samples(lab: Lab, run: RunFolder, step: int, rollouts: Rollouts) -> None:
    """The first answer of the batch, and the best."""
    for row in sorted({0, int(rollouts.reward.argmax())}):
        problem = lab.task.show(rollouts.problems[rollouts.group[row]])
        run.append("samples.jsonl", {
            "step": step, "problem": problem, "episode": row, "reward": rollouts.reward[row].item(),
            "answer": rollouts.scores["answer"][row].item(), "text": rollouts.responses[row]})


def batch_metrics(rollouts: Rollouts) -> dict:
    """Means over answers, and of entropy and collision over tokens."""
    mean = {name: value.mean().item() for name, value in rollouts.scores.items()}
    reward = rollouts.reward.view(len(rollouts.prompt_ids), -1)  # (problems, answers)
    without_spread = (reward == reward[:, :1]).all(1)
    tokens = rollouts.mask.sum().item()
    return {"reward": mean["reward"], "reward_format": mean["format"],
            "reward_answer": mean["answer"], "reward_reasoning": mean["reasoning"],
            "success": mean["answer"], "tokens": tokens, "length": tokens / len(rollouts.texts),
            "finished": rollouts.finished.float().mean().item(),
            "groups_without_spread": without_spread.float().mean().item(),
            "entropy": rollouts.entropy.sum().item() / tokens,
            "collision": rollouts.collision.sum().item() / tokens}


def credit_metrics(lab: Lab, weight_metrics: dict) -> dict:
    """The metrics of the advantage and of the mitigation; tokens that they sampled for themselves
    are added up."""
    advantage_metrics = metrics_of(lab.advantage, f"the advantage {lab.settings.advantage}")
    extra = 0
    for metrics in (advantage_metrics, weight_metrics):
        extra += metrics.pop("extra_tokens", 0)
    return joined(weight_metrics, advantage_metrics, {"extra_tokens": extra})


def evaluate(lab: Lab, run: RunFolder, step: int, greedy: bool) -> tuple[dict, str]:
    """All held-out problems, one answer each, in parts no larger than a training batch.
    Returns the line of evaluations.jsonl, and the first problem with its answer."""
    s = lab.settings
    mode = "greedy" if greedy else "sampled"
    problems = lab.task.held_out_problems(s.eval_tasks)
    rows = s.questions * s.answers
    answer, well_formed, length, finished, texts = [], [], [], [], []
    for start in range(0, len(problems), rows):
        show_status(f"held-out problems, {mode}: {start} of {len(problems)}")
        part = lab.ask(problems[start:start + rows], 1, derived_seed("evaluation", start), greedy)
        answer += [int(value) for value in part.scores["answer"].tolist()]
        well_formed += [round(value, 3) for value in part.scores["format"].tolist()]
        length += part.length.tolist()
        finished += part.finished.int().tolist()
        texts += part.responses[:1]
    count = len(problems)
    low, high = wilson_interval(sum(answer), count)
    line = {"step": step, "mode": mode, "success": sum(answer) / count, "success_low": low,
            "success_high": high, "format_mean": sum(well_formed) / count,
            "length_mean": sum(length) / count, "finished_mean": sum(finished) / count,
            "answer": answer, "format": well_formed, "length": length}
    run.append("evaluations.jsonl", line)
    return line, f"{lab.task.show(problems[0])}: {texts[0]}"


def run_evaluations(lab: Lab, run: RunFolder, step: int) -> None:
    for greedy in (False, True):
        start = time.perf_counter()
        line, answer = evaluate(lab, run, step, greedy)
        print_evaluation(line, time.perf_counter() - start)
        if not greedy:
            say("  " + textwrap.shorten(answer, 600, placeholder=" ..."))


def train(lab: Lab, run: RunFolder, done: int, stop: StopRequest) -> None:
    """Steps done + 1 to the last. The evaluation comes before the checkpoint: where there is a
    checkpoint, everything up to its step is on record."""
    s, pace = lab.settings, Pace()
    try_problems(lab, done + 1)
    if done == 0 and s.eval_every:
        run_evaluations(lab, run, 0)
    for step in range(done + 1, s.steps + 1):
        line = train_step(lab, run, step)
        run.append("metrics.jsonl", line)
        comment = pace.add(line["seconds"])
        with_header = step % 20 == 1 or step == done + 1
        print_step(line, s.steps, pace.left(s.steps - step), with_header, comment)
        is_last = step == s.steps
        if s.eval_every and (is_last or step % s.eval_every == 0):
            run_evaluations(lab, run, step)
        stopped = processes.any_of(stop.asked)
        is_due = s.checkpoint_every and (is_last or step % s.checkpoint_every == 0)
        if stopped or is_due:
            lab.refuse_broken_model()
            run.save_checkpoint(step, lab.model, lab.parameters, lab.folder, lab.trainer_tensors())
        if stopped and not is_last:
            command = python_command("train.py", "--resume", run.path)
            say(f"stopped at step {step}. Go on with: {command}")
            processes.barrier()  # torchrun stops all as soon as one has ended
            raise SystemExit(130)
    lab.refuse_broken_model()
    say(f"done. Everything is in {run.path}")


def train_until_done(lab: Lab, run: RunFolder, done: int) -> None:
    try:
        with StopRequest() as stop:
            train(lab, run, done, stop)
    except NotFinite as error:
        raise UserError(where_to_look(error, lab, run)) from None


def start_run(settings: Settings) -> None:
    refuse_unprintable(settings)
    lab = make_lab(settings)
    lab.server = connect(lab)
    introduce(lab)
    with create_run(lab) as run:
        try:
            train_until_done(lab, run, 0)
        except Exception:  # a first step that failed leaves nothing in the way of the next attempt
            run.remove_unless_begun()
            raise


def create_run(lab: Lab) -> RunFolder:
    """Make the run's folder with its config.json, and open it, in every process."""
    s = lab.settings
    config = {**s.to_json(), "threads": torch.get_num_threads(), "ranks": processes.count(),
              **provenance(), "reward": lab.task.reward, "model_config": lab.model.config.to_json()}
    if processes.rank() == 0:
        config["made_of"] = fingerprints(s)
        config["run_id"] = run_id_of(config)
        config["code"] = [{"after_step": 0, "files": code_files()}]
        RunFolder.create(s.folder, config, lab.folder / "tokenizer.json")
    processes.barrier()
    return open_run(s.folder)


def introduce(lab: Lab) -> None:
    """Print what is about to be trained, and where."""
    s = lab.settings
    extra = f" and {lab.extra_parameters:,} beside them" if lab.extra_parameters else ""
    millions = sum(p.numel() for p in lab.model.parameters()) / 1e6
    say(f"{s.model}: {millions:.2f} million parameters{extra} on {s.device}, "
        f"{torch.get_num_threads()} threads; {s.questions} problems x {s.answers} answers a step; "
        f"writing to {s.folder}")
    if s.temperature != 1:
        say(f"  note: answers are sampled at temperature {s.temperature}. The loss, and log_prob, "
            "entropy and collision on record, are those of temperature 1: another distribution.")


def resume(folder: Path, given: dict, restart: bool) -> None:
    """Go on with the run of a folder. `given` are the flags typed now; few may be changed."""
    refuse_changes(given)
    config = run_config(folder)
    for name in ("steps", "checkpoint_every"):
        config.setdefault(name, getattr(Settings, name))
    settings = make_settings({"config": folder / "config.json", **given})
    processes.start(settings.device)  # who is rank 0, and locks the folder, is known from here on
    with open_run(folder) as run:
        go_on(run, config, settings, restart)


def go_on(run: RunFolder, config: dict, settings: Settings, restart: bool) -> None:
    """From the last checkpoint, or from the start with `restart` or where nothing can be lost."""
    run.forget_old_states()  # a kill may have come before the run did this
    checkpoints = run.checkpoints()
    checkpoint = checkpoints[-1] if checkpoints else None
    done = step_of(checkpoint) if checkpoint else 0
    if restart and checkpoint:
        raise UserError(f"{run.path} can go on after step {done}: --restart is for runs without a "
                        "checkpoint")
    if not restart and is_finished(run, config, settings, done):
        say(how_far(run, config["steps"], done))
        return
    if not checkpoint and not restart:
        refuse_to_erase(run, config)
    check_what_is_there(run, settings, config, checkpoint)
    say(f"going on after step {done}" if done else "no checkpoint yet: starting again at step 1")
    lab = make_lab(settings, checkpoint)
    lab.server = connect(lab)
    if checkpoint:
        lab.load_trainer_tensors(checkpoint / "trainer" / "state.safetensors")
    processes.barrier()  # until all have read what is changed now
    keep_changes(run, config, settings, done)
    run.forget_after(done if done else -1)  # -1: the evaluation at step 0 is made again, too
    processes.barrier()  # until there is nothing left of what is made again
    train_until_done(lab, run, done)


def main(argv: list[str]) -> None:
    given = read_flags(argv)
    may_continue, restart = given.pop("continue", False), given.pop("restart", False)
    if "resume" in given:
        return resume(Path(given.pop("resume")), given, restart)
    if restart and not may_continue:
        raise UserError("--restart needs --resume RUN or --continue")
    settings = make_settings(given)
    if not is_there(settings.folder):
        return start_run(settings)
    difference = what_differs(settings)
    if may_continue and not difference:
        return resume(settings.folder, changes_among(given), restart)
    refuse_to_overwrite(settings.folder, difference)


if __name__ == "__main__":
    run_as_program("train.py", main, interrupted="stopped at once; --resume goes on from the last "
                   "checkpoint of a run that has one")
