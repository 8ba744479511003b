"""The loop: sample, score, spread credit, update; evaluate, write everything down, and never lose a run.

    python train.py --mitigation none
    python train.py --resume runs/none-grpo-s0

Every random draw of step n follows from (seed, n) alone, so a resumed run needs no random state: it samples
what the uninterrupted run would have sampled, bit for bit on the same CPU.
"""
import json
import math
import os
import shutil
import signal
import sys
import textwrap
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

try:
    import resource
except ImportError:  # Windows keeps no record of peak memory
    resource = None

import torch

import mitigations
from engine import processes as ranks
from countdown_task import REWARD
from grpo import WHOLE_ANSWERS, shuffled_advantage, update, update_preferences
from engine.lab import Lab, derived_seed, make_lab, sample
from engine.errors import UserError
from engine.files import read_json
from engine.forward import Forward
from engine.rollouts import Rollouts
from engine.files import writing
from engine.credit_file import write_credit
from engine.run_folder import Bystander, RunFolder, provenance, run_config, step_of
from engine.settings import Settings, make_settings, read_flags


def train_step(lab: Lab, run: RunFolder, step: int) -> dict:
    """One step of the algorithm; returns its line of metrics.jsonl."""
    s, clock = lab.settings, [time.perf_counter()]
    show_status(f"step {step}: sampling")
    rollouts = sample(lab, lab.problems.training(s.seed, step, s.questions), s.answers, derived_seed("train", s.seed, step))
    if not rollouts.log_prob.isfinite().all():
        raise UserError(f"the model's probabilities are not finite any more after step {step - 1}: is --learning_rate {s.learning_rate} too high?")
    clock.append(time.perf_counter())
    show_status(f"step {step}: spreading credit")
    rollouts, kept, weight, said = spread_credit(lab, rollouts, step)
    clock.append(time.perf_counter())
    show_status(f"step {step}: updating")
    if s.loss == "dpo":
        result, advantage = update_preferences(lab.model, lab.optimizer, kept, s, lab.reference)
        rollouts = replace(rollouts, advantage=advantage)
    else:
        result = update(lab.model, lab.optimizer, kept, weight, s, lab.reference)
    clock.append(time.perf_counter())
    record(run, step, rollouts, weight)
    if s.sample_every and step % s.sample_every == 0:
        keep_samples(run, step, rollouts)
    clock.append(time.perf_counter())
    return {**said, "step": step, **batch_metrics(rollouts), **result, **speed_metrics(lab, rollouts, result, clock)}


def record(run: RunFolder, step: int, rollouts: Rollouts, weight: torch.Tensor) -> None:
    """What every token was given; each rank writes of its own questions. Rank 0's file comes last: where it is, all are."""
    own, path = ranks.share(len(rollouts.prompt_ids)), run.credit(step, ranks.rank())
    if ranks.rank() == 0:
        ranks.wait()
    with writing(path):
        write_credit(path, rollouts.of_questions(own), weight[rollouts.rows_of(own)])
    if ranks.rank() != 0:
        ranks.wait()


def spread_credit(lab: Lab, rollouts: Rollouts, step: int) -> tuple[Rollouts, Rollouts, torch.Tensor, dict]:
    """The two axes: advantage (B, T), then weight (B, T). Also the batch without answers that are not trained on,
    and what those who computed have to say."""
    s = lab.settings
    rollouts = replace(rollouts, step=step, generator=torch.Generator().manual_seed(derived_seed("credit", s.seed, step)),
                       forward=Forward(lab.model, s.micro_batch))
    rollouts = replace(rollouts, advantage=lab.advantage(rollouts, lab))
    if s.placebo == "advantages":
        rollouts = replace(rollouts, advantage=shuffled_advantage(rollouts, s.advantage in WHOLE_ANSWERS))
    kept = replace(rollouts, mask=rollouts.mask & rollouts.finished[:, None]) if s.drop_unfinished else rollouts
    weight, said = mitigations.token_weight(lab.mitigation, s.mitigation, kept, lab, s.rescale, s.placebo)
    critic = getattr(lab.advantage, "metrics", {})
    extra = critic.get("extra_tokens", 0) + said.get("extra_tokens", 0)
    return rollouts, kept, weight, {**said, **critic, "extra_tokens": extra}


def batch_metrics(rollouts: Rollouts) -> dict:
    mean = {name: value.mean().item() for name, value in rollouts.scores.items()}
    total = rollouts.mask.sum().item()
    reward = rollouts.reward.view(len(rollouts.prompt_ids), -1)
    return {"reward": mean["reward"], "reward_format": mean["format"], "reward_answer": mean["answer"],
            "reward_reasoning": mean["reasoning"], "success": mean["answer"], "tokens": total,
            "length": total / len(rollouts.texts), "finished": rollouts.finished.float().mean().item(),
            "groups_without_spread": (reward == reward[:, :1]).all(1).float().mean().item(),
            "entropy": rollouts.entropy.sum().item() / total, "collision": rollouts.collision.sum().item() / total}


def speed_metrics(lab, rollouts, result, clock: list[float]) -> dict:
    rollout, credit, update, record = (later - earlier for earlier, later in zip(clock, clock[1:]))
    return {"rollout_seconds": rollout, "credit_seconds": credit, "update_seconds": update, "record_seconds": record,
            "seconds": clock[-1] - clock[0], "rollout_tokens_per_second": rollouts.mask.sum().item() / rollout,
            "update_tokens_per_second": result["trained_tokens"] / update, "peak_memory_bytes": peak_memory(lab.model.device)}


def peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def keep_samples(run: RunFolder, step: int, rollouts) -> None:
    for i in sorted({0, int(rollouts.reward.argmax())}):
        run.append("samples.jsonl", {"step": step, "episode": i, "reward": rollouts.reward[i].item(),
                                     "answer": rollouts.scores["answer"][i].item(), "text": rollouts.responses[i]})


def evaluate(lab: Lab, run: RunFolder, step: int, greedy: bool) -> tuple[dict, str]:
    """All held-out problems, one answer each, in parts no larger than a training batch. Also the first answer."""
    s, mode = lab.settings, "greedy" if greedy else "sampled"
    problems, rows = lab.problems.evaluation(s.eval_tasks), s.questions * s.answers
    answer, well_formed, length, finished, texts = [], [], [], [], []
    for start in range(0, len(problems), rows):
        show_status(f"held-out problems, {mode}: {start} of {len(problems)}")
        rollouts = sample(lab, problems[start:start + rows], 1, derived_seed("evaluation", start), greedy)
        answer += [int(value) for value in rollouts.scores["answer"].tolist()]
        well_formed += [round(value, 3) for value in rollouts.scores["format"].tolist()]
        length += rollouts.length.tolist()
        finished += rollouts.finished.int().tolist()
        texts += rollouts.responses[:1]
    low, high = wilson_interval(sum(answer), len(answer))
    line = {"step": step, "mode": mode, "success": sum(answer) / len(answer), "success_low": low, "success_high": high,
            "format_mean": sum(well_formed) / len(well_formed), "length_mean": sum(length) / len(length),
            "finished_mean": sum(finished) / len(finished), "answer": answer, "format": well_formed, "length": length}
    run.append("evaluations.jsonl", line)
    return line, f"{' '.join(map(str, problems[0].numbers))} make {problems[0].target}: {texts[0]}"


def wilson_interval(hits: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """95% interval of a proportion (Wilson 1927); unlike the plain one it stays inside 0..1."""
    p, spread = hits / count, z * z / count
    centre, half = p + spread / 2, z * math.sqrt(p * (1 - p) / count + spread / (4 * count))
    return max(0.0, (centre - half) / (1 + spread)), min(1.0, (centre + half) / (1 + spread))


HEADER = "    step  reward  success  format  length  finished  entropy  grad norm  tokens/s      left"


def print_step(settings: Settings, line: dict, left: float, header: bool) -> None:
    if header:
        say(HEADER)
    norm = f"{line['gradient_norm']:9.3f}" if line["gradient_norm"] is not None else "  skipped"
    minutes, seconds = divmod(round(left), 60)
    say(f"{line['step']:4d}/{settings.steps:<4d}{line['reward']:7.3f}{line['success']:9.1%}{line['reward_format']:8.2f}"
        f"{line['length']:8.1f}{line['finished']:10.1%}{line['entropy']:9.3f}  {norm}"
        f"{line['tokens'] / line['seconds']:10.0f}{minutes:7d}:{seconds:02d}")
    for said in (line["skipped"] and f"no update: {line['skipped']}", line.get("weight_note")):
        if said:
            say(f"          {said}")


def say(text: str, end: str = "\n") -> None:
    """Print at once, on rank 0. When nobody reads any more (`| head`), the run goes on in silence."""
    try:
        if ranks.speaks():
            print(text, end=end, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def show_status(text: str) -> None:
    """A line that the next one overwrites, for people at a terminal only."""
    if sys.stdout.isatty():
        say(f"\r  {text:70s}\r", end="")


def run_evaluations(lab: Lab, run: RunFolder, step: int) -> None:
    for greedy in (False, True):
        start = time.perf_counter()
        line, answer = evaluate(lab, run, step, greedy)
        say(f"  held-out, {line['mode']:7s} {line['success']:6.1%}  95% interval {line['success_low']:.1%} to "
            f"{line['success_high']:.1%}  ({len(line['answer'])} problems, format {line['format_mean']:.2f}, length "
            f"{line['length_mean']:.0f}, finished {line['finished_mean']:.0%}, {time.perf_counter() - start:.0f} s)")
        if not greedy:
            say("  " + textwrap.shorten(answer, 600, placeholder=" ..."))


class Interrupt:
    """While it is entered, the first Ctrl-C asks for an end after the current step and the second ends at once."""

    def __enter__(self) -> "Interrupt":
        self.asked = False
        self.before = {name: signal.signal(name, self.handle) for name in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_) -> None:
        for name, handler in self.before.items():
            signal.signal(name, handler)

    def handle(self, *_) -> None:
        if self.asked and ranks.count() == 1:  # torchrun passes on what the terminal has sent already
            raise KeyboardInterrupt
        if not self.asked and ranks.speaks():
            os.write(1, b"\nstopping after this step (once more: at once, back to the last checkpoint)\n")  # print may be busy
        self.asked = True


def train(lab: Lab, run: RunFolder, done: int, interrupt: Interrupt) -> None:
    """Steps done + 1 to the last; evaluation comes before the checkpoint, so that what a checkpoint says is complete."""
    s, seconds = lab.settings, deque(maxlen=20)
    if done == 0 and s.eval_every and not run.lines("evaluations.jsonl"):
        run_evaluations(lab, run, 0)
    for step in range(done + 1, s.steps + 1):
        line = train_step(lab, run, step)
        run.append("metrics.jsonl", line)
        seconds.append(line["seconds"])
        print_step(s, line, sum(seconds) / len(seconds) * (s.steps - step), header=step % 20 == 1 or step == done + 1)
        last = step == s.steps
        if s.eval_every and (last or step % s.eval_every == 0):
            run_evaluations(lab, run, step)
        asked = ranks.any_of(interrupt.asked)
        if asked or s.checkpoint_every and (last or step % s.checkpoint_every == 0):
            run.save_checkpoint(step, lab.model, lab.parameters, lab.folder, lab.trainer_tensors())
        if asked and not last:
            say(f"stopped at step {step}. Go on with: python train.py --resume {run.path}")
            raise SystemExit(130)
    say(f"done. Everything is in {run.path}")


def create_run(lab: Lab) -> RunFolder:
    config = {**lab.settings.to_json(), "threads": torch.get_num_threads(), "ranks": ranks.count(), **provenance(), "reward": REWARD,
              "model_config": lab.model.config.to_json()}
    if ranks.rank() == 0:
        RunFolder.create(lab.settings.folder, config, lab.folder / "tokenizer.json")
    ranks.wait()
    return run_at(lab.settings.folder)


def run_at(folder: Path) -> RunFolder:
    return RunFolder(folder) if ranks.rank() == 0 else Bystander(folder)


def resume(folder: Path, given: dict) -> None:
    if set(given) - {"steps"}:
        raise UserError(f"--{sorted(set(given) - {'steps'})[0]} cannot be changed in a resumed run, only --steps can")
    config = run_config(folder)
    with run_at(folder) as run:
        go_on(run, config, make_settings({"config": folder / "config.json", **given}))


def go_on(run: RunFolder, config: dict, settings: Settings) -> None:
    checkpoints = run.checkpoints()
    done = step_of(checkpoints[-1]) if checkpoints else 0
    if is_finished(run, settings, done):
        say(f"{run.path} is finished after {max(done, config['steps'])} steps (--steps N goes on to N)")
        return
    say(f"going on after step {done}" if done else "no checkpoint yet: starting again at step 1")
    lab = make_lab(settings, checkpoints[-1] if checkpoints else None)
    if checkpoints:
        lab.load_trainer_tensors(checkpoints[-1] / "trainer" / "state.safetensors")
    ranks.wait()  # until all have read what is changed now
    if config["steps"] != settings.steps:
        run.replace("config.json", json.dumps({**config, "steps": settings.steps}, indent=2) + "\n")
    run.forget_after(done if done else -1)  # without a checkpoint the evaluation at step 0 is made again too
    with Interrupt() as interrupt:
        train(lab, run, done, interrupt)


def is_finished(run: RunFolder, settings: Settings, done: int) -> bool:
    if settings.checkpoint_every and settings.steps:
        return done >= settings.steps
    last = max((line["step"] for line in run.lines("metrics.jsonl")), default=0)
    evaluated = [line["mode"] for line in run.lines("evaluations.jsonl") if line["step"] == settings.steps]
    return last >= settings.steps and (not settings.eval_every or len(evaluated) == 2)


def main(argv: list[str]) -> None:
    given = read_flags(argv)
    if "resume" in given:
        return resume(Path(given.pop("resume")), given)
    go_on_with_it = given.pop("continue", False)
    settings = make_settings(given)
    with writing(settings.folder):
        exists = settings.folder.exists()
    if exists:
        other = what_it_is(settings)
        if go_on_with_it and not other:
            return resume(settings.folder, {})
        raise UserError(f"{settings.folder} exists already{other or f': go on with --resume {settings.folder}, or'} name another with --out")
    lab = make_lab(settings)
    count = sum(p.numel() for p in lab.model.parameters())
    beside = f" and {lab.extra_parameters:,} beside them" if lab.extra_parameters else ""
    say(f"{settings.model}: {count / 1e6:.2f} million parameters{beside} on {settings.device}, {torch.get_num_threads()} threads; "
        f"{settings.questions} questions x {settings.answers} answers a step; writing to {settings.folder}")
    with create_run(lab) as run, Interrupt() as interrupt:
        try:
            train(lab, run, 0, interrupt)
        except Exception:  # a first step that failed leaves nothing that would stand in the way of the next attempt
            if ranks.rank() == 0 and not run.lines("metrics.jsonl"):
                shutil.rmtree(run.path)
            raise


def what_it_is(settings: Settings) -> str:
    """How what is in the folder differs from the run that was asked for; empty if it is that run."""
    if not (settings.folder / "config.json").is_file():
        return " and is not a run folder:"
    config, wanted = read_json(settings.folder / "config.json"), settings.to_json()
    usual = Settings(mitigation=settings.mitigation).to_json()  # what a run from before a setting existed had
    before = {name: config.get(name, usual.get(name, value)) for name, value in wanted.items()}
    other = [name for name, value in wanted.items() if before[name] != value and name not in ("threads", "out")]
    return f", with {other[0]} {before[other[0]]} instead of {wanted[other[0]]}:" if other else ""


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # an answer may hold characters that the terminal cannot show
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"train.py: {error}" if ranks.speaks() or isinstance(error, ranks.LostRank) else 1)
    except KeyboardInterrupt:
        sys.exit("train.py: stopped at once; --resume goes on from the last checkpoint of a run that has one")
    finally:
        ranks.stop()
