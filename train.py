"""The loop: sample, score, spread credit, update; evaluate, write everything down, and never lose a run.

    python train.py --mitigation none
    python train.py --resume runs/none-grpo-s0

Every random draw of step n follows from (seed, n) alone, so a resumed run needs no random state: it samples
what the uninterrupted run would have sampled, bit for bit on the same CPU.
"""
import argparse
import difflib
import hashlib
import json
import math
import os
import signal
import sys
import textwrap
import time
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

try:
    import resource
except ImportError:  # Windows keeps no record of peak memory
    resource = None

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from countdown_task import PROMPTS, Problem, Problems, Ranges, encode_prompt, load_tokenizer
from grpo import ADVANTAGES, collect, token_advantage, update, write_credit
from mitigations import MITIGATIONS, token_weight
from qwen2_model import Qwen2, UserError, read_json
from run_folder import RunFolder, provenance, step_of, writing

NOT_SETTINGS = ("versions", "git_commit", "model_config")  # in config.json beside the settings


def option(topic: str, default, text: str, least=None, above=None, choices=None):
    return field(default=default, metadata=dict(topic=topic, text=text, least=least, above=above, choices=choices))


@dataclass
class Settings:
    """Every flag. A model folder's recipe.json overrides these defaults, flags override both."""
    model: str = option("model and machine", "models/tiny", "folder of a Qwen2, Qwen2.5 or Qwen3 model")
    device: str = option("model and machine", "cpu", "cpu, cuda or cuda:N")
    dtype: str = option("model and machine", "float32", "numbers to compute with; parameters stay float32",
                        choices=("float32", "bfloat16"))
    threads: int = option("model and machine", 0, "CPU threads, 0 for what PyTorch finds", least=0)

    data: str | None = option("problems", None, 'JSON lines {"nums": [3, 5, 7], "target": 22}; without it they are made')
    prompt: str = option("problems", "full", "wording of the prompt", choices=tuple(PROMPTS))
    numbers: str = option("problems", "3,4", "how many numbers a made problem has", choices=("3", "4", "3,4"))
    min_number: int = option("problems", 1, "smallest number", least=1)
    max_number: int = option("problems", 99, "largest number", least=1)
    max_target: int = option("problems", 99, "largest target", least=1)
    max_result: int = option("problems", 10_000, "largest intermediate result of the known solution", least=1)

    mitigation: str = option("credit", "none", "how an answer's advantage is spread over its tokens",
                             choices=tuple(MITIGATIONS))
    advantage: str = option("credit", "grpo", "how rewards become advantages", choices=tuple(ADVANTAGES))

    steps: int = option("training", 100, "updates; 0 evaluates and stops", least=0)
    questions: int = option("training", 8, "questions a step", least=1)
    answers: int = option("training", 8, "answers to each question", least=2)
    max_new_tokens: int = option("training", 512, "an answer is cut off here", least=1)
    temperature: float = option("training", 1.0, "of the sampling", above=0)
    learning_rate: float = option("training", 5e-6, "of AdamW", above=0)
    weight_decay: float = option("training", 0.0, "of AdamW", least=0)
    micro_batch: int = option("training", 8, "answers in memory at once during the update; changes no result", least=1)
    max_grad_norm: float = option("training", 1.0, "the gradient is clipped to this norm, 0 for never", least=0)
    seed: int = option("training", 0, "of problems and sampling", least=0)

    eval_every: int = option("record", 25, "steps between evaluations (also at the start and end), 0 for never", least=0)
    eval_tasks: int = option("record", 500, "held-out problems of an evaluation", least=1)
    sample_every: int = option("record", 10, "steps between sample answers kept in samples.jsonl, 0 for never", least=0)
    checkpoint_every: int = option("record", 25, "steps between checkpoints (also at the end), 0 for never", least=0)
    out: str | None = option("record", None, "run folder, by default runs/<mitigation>-<advantage>-s<seed>")

    @property
    def folder(self) -> Path:
        return Path(self.out or f"runs/{self.mitigation}-{self.advantage}-s{self.seed}")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message} (python train.py --help lists the flags)")


def make_parser() -> Parser:
    parser = Parser(usage="python train.py [flags]", description=__doc__, epilog=describe_mitigations(), allow_abbrev=False,
                    argument_default=argparse.SUPPRESS, formatter_class=argparse.RawDescriptionHelpFormatter)
    topics = {topic: parser.add_argument_group(topic) for topic in dict.fromkeys(f.metadata["topic"] for f in fields(Settings))}
    for f in fields(Settings):
        meta = f.metadata
        kind, sign = {int: (int, "N"), float: (float, "X")}.get(f.type, (str, "TEXT"))
        choices = ": " + " | ".join(meta["choices"]) if meta["choices"] else ""
        default = "" if f.default is None else f" (default {f.default})"
        topics[meta["topic"]].add_argument(f"--{f.name}", type=kind, metavar=sign, help=meta["text"] + choices + default)
    again = parser.add_argument_group("going on")
    again.add_argument("--resume", metavar="RUN", help="continue this run folder; only --steps may be given with it")
    again.add_argument("--config", metavar="FILE", help="take the settings of a run's config.json; flags override them")
    return parser


def describe_mitigations() -> str:
    rows = [f"  {name:22s}{(function.__doc__ or '').strip()}" for name, function in MITIGATIONS.items()]
    recipe = ("A model folder's recipe.json sets its own defaults (models/tiny has one), flags override them, and config.json\n"
              "in the run folder shows what was used. Hyphens work as well as underscores.")
    return "\n".join(["mitigations:", *rows, "", recipe])


def read_flags(argv: list[str]) -> dict:
    """The flags that were given. --max-new-tokens is --max_new_tokens."""
    def underscores(argument):
        name, equals, value = argument.partition("=")
        return "--" + name[2:].replace("-", "_") + equals + value if name.startswith("--") else argument

    given, unknown = make_parser().parse_known_args([underscores(argument) for argument in argv])
    if unknown:
        known = [f"--{f.name}" for f in fields(Settings)] + ["--resume", "--config"]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], known, 1)
        raise UserError(f"unknown argument {unknown[0]}" + (f", did you mean {near[0]}?" if near else ""))
    return vars(given)


def make_settings(given: dict) -> Settings:
    """Defaults, then the model's recipe, then --config, then flags."""
    config = {}
    if path := given.pop("config", None):
        config = {k: v for k, v in read_json(Path(path)).items() if k not in NOT_SETTINGS}
    folder = Path(str(given.get("model", config.get("model", Settings.model))))
    recipe = read_json(folder / "recipe.json") if (folder / "recipe.json").is_file() else {}
    for source, values in ((folder / "recipe.json", recipe), (path, config)):
        unknown = set(values) - {f.name for f in fields(Settings)}
        if unknown:
            raise UserError(f"{source} has the unknown setting {sorted(unknown)[0]}")
    settings = Settings(**{**recipe, **config, **given})
    check(settings)
    return settings


def check(settings: Settings) -> None:
    for f in fields(settings):
        value, meta = getattr(settings, f.name), f.metadata
        number = type(value) in (int, f.type) and math.isfinite(value) if f.type in (int, float) else True
        text = isinstance(value, str) and value or value is None and f.default is None
        if not (number if f.type in (int, float) else text):
            raise UserError(f"--{f.name} {value!r} should be a {'number' if f.type in (int, float) else 'text'}")
        if meta["choices"] and value not in meta["choices"]:
            near = sorted(meta["choices"], key=lambda c: -difflib.SequenceMatcher(None, c, str(value)).ratio())
            raise UserError(f"--{f.name} {value} is not one of: {', '.join(near)}")
        if meta["least"] is not None and value < meta["least"]:
            raise UserError(f"--{f.name} {value} should be at least {meta['least']}")
        if meta["above"] is not None and value <= meta["above"]:
            raise UserError(f"--{f.name} {value} should be above {meta['above']}")
    if settings.min_number > settings.max_number:
        raise UserError(f"--min_number {settings.min_number} is above --max_number {settings.max_number}")


@dataclass
class Lab:
    settings: Settings
    folder: Path  # the model was read from here
    model: Qwen2
    tokenizer: Tokenizer
    optimizer: torch.optim.Optimizer
    problems: Problems
    autocast: AbstractContextManager


def make_lab(settings: Settings, checkpoint: Path | None = None) -> Lab:
    device = pick_device(settings.device)
    torch.set_num_threads(settings.threads or torch.get_num_threads())  # set, so that a resumed run computes alike
    folder = checkpoint or Path(settings.model)
    model, tokenizer = Qwen2.from_pretrained(folder, device), load_tokenizer(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    counts = tuple(int(n) for n in settings.numbers.split(","))
    ranges = Ranges(counts, settings.min_number, settings.max_number, settings.max_target, settings.max_result)
    autocast = nullcontext() if settings.dtype == "float32" else torch.autocast(device.type, torch.bfloat16)
    lab = Lab(settings, folder, model, tokenizer, optimizer, Problems(ranges, settings.data), autocast)
    check_problems(lab)
    if checkpoint:
        load_optimizer(lab, checkpoint / "trainer" / "state.safetensors")
    return lab


def check_problems(lab: Lab) -> None:
    """Before anything is written: are there problems, can the tokenizer spell them, do prompt and answer fit the model?"""
    s, ranges, given = lab.settings, lab.problems.ranges, lab.problems.train + lab.problems.test
    lab.problems.training(s.seed, 1, 1), lab.problems.evaluation(1)
    most = max((len(problem.numbers) for problem in given), default=max(ranges.counts))
    values = {n for problem in given for n in (*problem.numbers, problem.target)}
    extremes = [Problem((value,) * most, value) for value in values] or [Problem((ranges.max_number,) * most, ranges.max_target)]
    length = max(len(encode_prompt(lab.tokenizer, problem, s.prompt)) for problem in extremes)
    limit = lab.model.config.max_position_embeddings
    if length + s.max_new_tokens > limit:
        raise UserError(f"--max_new_tokens {s.max_new_tokens}: a prompt of {length} tokens and the answer exceed the "
                        f"{limit} that {s.model} takes")


def pick_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name} is not a device: try cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: only cpu and cuda are implemented")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: PyTorch sees {torch.cuda.device_count()} CUDA devices here")
    return device


ADAM = ("step", "exp_avg", "exp_avg_sq")


def optimizer_tensors(lab: Lab) -> dict:
    return {f"{key}.{name}": value.detach().cpu().contiguous() for name, parameter in lab.model.named_parameters()
            for key, value in lab.optimizer.state[parameter].items()}


def load_optimizer(lab: Lab, path: Path) -> None:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    wanted = {f"{key}.{name}" for name, _ in lab.model.named_parameters() for key in ADAM}
    if tensors and set(tensors) != wanted:  # empty before the first update
        raise UserError(f"{path} does not fit the model: {sorted(set(tensors) ^ wanted)[0]}")
    for name, parameter in lab.model.named_parameters() if tensors else ():
        state = {key: tensors[f"{key}.{name}"].clone() for key in ADAM}
        lab.optimizer.state[parameter] = {k: v if k == "step" else v.to(parameter.device) for k, v in state.items()}


def derived_seed(*parts) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:6], "big")


def sample(lab: Lab, problems, answers: int, seed: int, greedy: bool = False):
    s = lab.settings
    with lab.autocast:
        return collect(lab.model, lab.tokenizer, problems, s.prompt, answers, max_new_tokens=s.max_new_tokens,
                       temperature=s.temperature, greedy=greedy, seed=seed)


def train_step(lab: Lab, run: RunFolder, step: int) -> dict:
    """One step of the algorithm; returns its line of metrics.jsonl."""
    s = lab.settings
    start = time.perf_counter()
    show_status(f"step {step}: sampling")
    rollouts = sample(lab, lab.problems.training(s.seed, step, s.questions), s.answers, derived_seed("train", s.seed, step))
    sampled = time.perf_counter()
    advantage = token_advantage(s.advantage, rollouts)
    weight = token_weight(s.mitigation, rollouts)
    show_status(f"step {step}: updating")
    result = update(lab.model, lab.optimizer, rollouts, advantage, weight, s.micro_batch, s.max_grad_norm, lab.autocast)
    updated = time.perf_counter()
    with writing(run.credit(step)):
        write_credit(run.credit(step), rollouts, advantage, weight)
    if s.sample_every and step % s.sample_every == 0:
        keep_samples(run, step, rollouts)
    return {"step": step, **batch_metrics(rollouts, advantage), **result,
            **speed_metrics(lab, rollouts, result, sampled - start, updated - sampled, time.perf_counter() - start)}


def batch_metrics(rollouts, advantage) -> dict:
    mean = {name: value.mean().item() for name, value in rollouts.scores.items()}
    total = rollouts.mask.sum().item()
    by_group = advantage.abs().sum(1).view(len(rollouts.prompt_ids), -1).sum(1)
    return {"reward": mean["reward"], "reward_format": mean["format"], "reward_answer": mean["answer"],
            "reward_reasoning": mean["reasoning"], "success": mean["answer"], "tokens": total,
            "length": total / len(rollouts.texts), "finished": rollouts.finished.float().mean().item(),
            "groups_without_spread": (by_group == 0).float().mean().item(),
            "entropy": rollouts.entropy.sum().item() / total, "collision": rollouts.collision.sum().item() / total}


def speed_metrics(lab, rollouts, result, rollout_seconds: float, update_seconds: float, seconds: float) -> dict:
    return {"rollout_seconds": rollout_seconds, "update_seconds": update_seconds, "seconds": seconds,
            "rollout_tokens_per_second": rollouts.mask.sum().item() / rollout_seconds,
            "update_tokens_per_second": result["trained_tokens"] / update_seconds,
            "peak_memory_bytes": peak_memory(lab.model.device)}


def peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def keep_samples(run: RunFolder, step: int, rollouts) -> None:
    for i in sorted({0, int(rollouts.scores["reward"].argmax())}):
        run.append("samples.jsonl", {"step": step, "episode": i, "reward": rollouts.scores["reward"][i].item(),
                                     "answer": rollouts.scores["answer"][i].item(), "text": rollouts.texts[i]})


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
        texts += rollouts.texts[:1]
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
    if line["skipped"]:
        say(f"          no update: {line['skipped']}")


def say(text: str, end: str = "\n") -> None:
    """Print at once. When nobody reads any more (`| head`), the run goes on in silence."""
    try:
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
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        os.write(1, b"\nstopping after this step (once more: at once, back to the last checkpoint)\n")  # print may be busy


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
        if interrupt.asked or s.checkpoint_every and (last or step % s.checkpoint_every == 0):
            run.save_checkpoint(step, lab.model, lab.folder, optimizer_tensors(lab))
        if interrupt.asked and not last:
            say(f"stopped at step {step}. Go on with: python train.py --resume {run.path}")
            raise SystemExit(130)
    say(f"done. Everything is in {run.path}")


def create_run(lab: Lab) -> RunFolder:
    config = {**asdict(lab.settings), "threads": torch.get_num_threads(), **provenance(),
              "model_config": lab.model.config.to_json()}
    return RunFolder.create(lab.settings.folder, config, lab.folder / "tokenizer.json")


def resume(folder: Path, given: dict) -> None:
    if set(given) - {"steps"}:
        raise UserError(f"--{sorted(set(given) - {'steps'})[0]} cannot be changed in a resumed run, only --steps can")
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} is not a run folder: it has no config.json")
    with RunFolder(folder) as run:
        go_on(run, read_json(folder / "config.json"), make_settings({"config": folder / "config.json", **given}))


def go_on(run: RunFolder, config: dict, settings: Settings) -> None:
    checkpoints = run.checkpoints()
    done = step_of(checkpoints[-1]) if checkpoints else 0
    if is_finished(run, settings, done):
        say(f"{run.path} is finished after {max(done, config['steps'])} steps (--steps N goes on to N)")
        return
    say(f"going on after step {done}" if done else "no checkpoint yet: starting again at step 1")
    lab = make_lab(settings, checkpoints[-1] if checkpoints else None)
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
    settings = make_settings(given)
    with writing(settings.folder):
        exists = settings.folder.exists()
    if exists:
        raise UserError(f"{settings.folder} exists already: go on with --resume {settings.folder}, or name another with --out")
    lab = make_lab(settings)
    count = sum(p.numel() for p in lab.model.parameters())
    say(f"{settings.model}: {count / 1e6:.2f} million parameters on {settings.device}, {torch.get_num_threads()} threads; "
        f"{settings.questions} questions x {settings.answers} answers a step; writing to {settings.folder}")
    with create_run(lab) as run, Interrupt() as interrupt:
        train(lab, run, 0, interrupt)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # an answer may hold characters that the terminal cannot show
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"train.py: {error}")
    except KeyboardInterrupt:
        sys.exit("train.py: stopped at once; --resume goes on from the last checkpoint of a run that has one")
