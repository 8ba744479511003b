"""The training loop: sample answers, score them, compute advantages and weights, update the model,
record the step; evaluate and save a checkpoint when that is due.

    python train.py --mitigation none
    python train.py --resume runs/none-grpo-s0

Read `train` first. Where the numbers of token 17 of answer 3 are computed:

    ids[3, 17]         grpo.py: sample; qwen2_model.py: generate
    reward[3]          countdown_task.py: Task.score
    advantage[3, 17]   grpo.py: advantages, grpo
    weight[3, 17]      mitigations.py: weights, none
    the loss           grpo.py: update, policy_loss
    its log-prob       grpo.py: log_probs, states_before
    the gradient       grpo.py: one_step

All random numbers of a step follow from the seed and the step alone. So a run that was killed goes
on from its checkpoint as if nothing had happened: on the same CPU it samples the same tokens, bit
for bit, if your functions take random numbers from `rollouts.generator` alone and keep nothing from
call to call. All is float32 on a CPU. Other devices, types, tasks and methods are in lab/.
"""
import math
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # new memory for tensors in larger pages
# Threads that wait for each other spin. Where other programs run, two threads that spin took more
# than twice the processor time of one. With this value they spin for a moment, and then sleep.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

try:
    from safetensors import SafetensorError

    import grpo
    import mitigations
    from grpo import Metrics, Rollouts, generator_of
    from qwen2_model import UserError
    from run import HERE, Run, Unknown, printable, read_settings
except ModuleNotFoundError as error:
    is_known = error.name in ("torch", "numpy", "safetensors", "tokenizers")
    sys.exit(f"train.py: {error}. To install what it needs: pip install "
             f"{'-r requirements.txt' if is_known else error.name}")
except KeyboardInterrupt:
    sys.exit(130)

OF_ONE_SEED = 256  # this many held-out problems in a row share one random seed


class Training(Run):
    """A run (run.py) holds the settings, the model, its optimizer, the tokenizer and the task, and
    writes its folder (record, log, save). These four functions are the stages of a step. A run of
    the lab has others."""
    sample = grpo.sample
    advantages = grpo.advantages
    weights = mitigations.weights
    update = grpo.update


def train(run: Training) -> None:
    s = run.settings
    if run.done == 0 and s.eval_every:
        evaluate(run, 0)
    for step in range(run.done + 1, s.steps + 1):
        run.step, start = step, time.perf_counter()

        # New problems and new answers: the last step's answers are samples of an older model.
        problems = run.task.training_problems(s.seed, step, s.questions)
        rollouts = run.sample(problems, s.answers, generator_of("train", s.seed, step))

        # How good was each token, and how much does it count? Both are computed for the whole
        # batch, before it is cut into micro-batches. The loss uses their product.
        rollouts.step, rollouts.generator = step, generator_of("credit", s.seed, step)
        rollouts.advantage = run.advantages(rollouts)                                # (B, T)
        weight, of_weight = run.weights(rollouts)                                    # (B, T)

        # Push tokens up whose advantage is positive, and down whose advantage is negative. Every
        # few steps, also measure how far each token has really moved.
        is_measured = s.change_every and ((step - 1) % s.change_every == 0 or step == s.steps)
        metrics, columns = run.update(rollouts, weight, bool(is_measured))

        run.record(rollouts, weight, columns)
        run.log({"step": step} | means_of(rollouts) | of_weight | metrics | {
            "seconds": time.perf_counter() - start})

        is_last = step == s.steps or run.stopping
        if s.eval_every and (step % s.eval_every == 0 or step == s.steps):
            evaluate(run, step)
        if is_last or (s.checkpoint_every and step % s.checkpoint_every == 0):
            run.save(step)  # after all else, so the record is complete up to every checkpoint
        if is_last:
            break


def means_of(rollouts: Rollouts) -> Metrics:
    """Means over all sampled answers and tokens."""
    tokens, by_group = int(rollouts.mask.sum()), rollouts.reward.view(len(rollouts.prompt_ids), -1)
    parts = {part if part == "reward" else f"reward_{part}": score.mean().item()
             for part, score in rollouts.scores.items()}
    return {**parts, "success": parts.get("reward_answer", math.nan), "tokens": tokens,
            "length": tokens / len(rollouts.group),
            "finished": rollouts.finished.float().mean().item(),
            "groups_without_spread": (by_group.amin(1) == by_group.amax(1)).float().mean().item(),
            "entropy": rollouts.entropy.sum().item() / tokens,
            "collision": rollouts.collision.sum().item() / tokens}


def evaluate(run: Training, step: int) -> None:
    """Answer every held-out problem, first with a sampled answer, then with a greedy one: the
    rewards of a batch are partly luck, and its problems change from step to step."""
    for mode in ("sampled", "greedy"):
        begin = time.perf_counter()
        line = answer_held_out(run, step, mode)
        run.log_evaluation(line, time.perf_counter() - begin)


def answer_held_out(run: Training, step: int, mode: str) -> dict[str, Any]:
    """The line of evaluations.jsonl. The random numbers of a problem follow from its index, so they
    are the same at every step, for every --seed and for every size of a batch."""
    problems, at_a_time = run.held_out, run.settings.questions * run.settings.answers
    found: dict[str, list[float]] = {name: [] for name in (
        "reward", "answer", "format", "length", "finished")}
    shown: list[dict[str, Any]] = []
    for start in range(0, len(problems), OF_ONE_SEED):
        generator = generator_of("evaluation", start)
        of_seed = problems[start:start + OF_ONE_SEED]
        for first in range(0, len(of_seed), at_a_time):
            part = run.sample(of_seed[first:first + at_a_time], 1, generator, mode == "greedy")
            known = part.scores | {"length": part.length, "finished": part.finished}
            for name, values in found.items():
                values += known[name].double().tolist()
            rows = range(min(3 - len(shown), len(part.ids)))
            shown += [example(run, part, row) for row in rows]
    means = {f"{name}_mean": sum(values) / len(values) for name, values in found.items()}
    low, high = wilson_interval(sum(found["answer"]), len(problems))
    del found["finished"]
    return {"step": step, "mode": mode, "success": means.pop("answer_mean"), "success_low": low,
            "success_high": high, **means, **found, "shown": shown}


def example(run: Training, rollouts: Rollouts, row: int) -> dict[str, Any]:
    """An answer for the record, with the log-prob of each of its tokens."""
    texts = rollouts.texts[row]
    return {"problem": run.task.show(rollouts.problems[row]), "text": rollouts.answers[row],
            "texts": texts, "answer": int(rollouts.scores["answer"][row]),
            "reward": rollouts.reward[row].item(),
            "log_prob": [round(x, 4) for x in rollouts.log_prob[row, :len(texts)].tolist()]}


def wilson_interval(hits: float, count: int) -> tuple[float, float]:
    """The 95% interval of a proportion (Wilson 1927); unlike the usual one it stays inside 0..1."""
    z = 1.959964
    p, spread = hits / count, z * z / count
    centre, half = p + spread / 2, z * math.sqrt(p * (1 - p) / count + spread / (4 * count))
    return max(0.0, (centre - half) / (1 + spread)), min(1.0, (centre + half) / (1 + spread))


def carry_out(run: Training) -> None:
    """Train, unless the run is finished. Whatever happens, its folder is unlocked."""
    failed = True
    try:
        if run.is_finished:
            return
        run.begin()
        train(run)
        run.end()
        failed = False
    finally:
        run.close(failed)
    if run.stopping:
        raise SystemExit(130)


def main(argv: list[str]) -> None:
    try:
        run = Training(*read_settings(argv))
    except Unknown as unknown:  # the lab may know it
        if not (HERE / "lab" / "run.py").exists():
            raise UserError(f"{unknown}. More is in lab/, which is not here") from None
        from lab.run import main as beyond
        return beyond(argv)
    carry_out(run)


def in_own_function(error: BaseException) -> str:
    """Where an error arose, if in a file that people edit, as "my_idea (mitigations.py:57): ...";
    otherwise empty."""
    own = {str(HERE / name) for name in ("mitigations.py", "countdown_task.py")}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own]
    if not frames:
        return ""
    last = frames[-1]
    place = f"{last.name} ({Path(last.filename).name}:{last.lineno})"
    return f"{place}: {type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.modules["train"] = sys.modules["__main__"]  # for code that imports train while it runs
    try:
        main(sys.argv[1:])
    except (UserError, OSError, SafetensorError) as error:  # a full disk raises the last two
        sys.exit(f"train.py: {printable(str(error))}")
    except KeyboardInterrupt:
        sys.exit("\ntrain.py: stopped at once; --resume goes on from a run's last checkpoint, if "
                 "it has one")
    except (Exception, SystemExit) as error:  # an own function may call exit()
        if not (line := in_own_function(error)):
            raise
        sys.exit(f"train.py: {printable(line)}")
