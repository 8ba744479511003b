"""Write the logs of TRL's trainer that the tests of lab preflight read: healthy, and with one
mistake each.

    python -m lab.tests.trl.trl_logs                 # all of them, about ten minutes
    python -m lab.tests.trl.trl_logs dead destroyed  # these alone

TRL trains models/tiny on Countdown. What it writes into log_history is kept, rounded to four
digits, in lab/tests/trl/trl_logs/NAME-VERSION.json.
"""
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

from lab.countdown import Task

FOLDER = Path(__file__).parent / "trl_logs"
TINY = str(Path(__file__).parents[2] / "models/tiny")
TASK = Task(prompt="short", numbers="3", max_number=15)
STEPS, QUESTIONS, ANSWERS = 24, 4, 8


def right(completions, problem, **_):
    return [TASK.score(TASK_OF[key], text + "<|im_end|>")["answer"]
            for key, text in zip(problem, completions)]


def divides(completions, **_):
    """The reward of examples/own_reward.py: 1 for an answer that divides."""
    answers = [text.partition("<answer>")[2].partition("</answer>")[0] for text in completions]
    return [float("/" in answer) for answer in answers]


def constant(completions, **_):
    return [0.5] * len(completions)


def length(completions, **_):
    return [min(len(text), 400) / 400 for text in completions]


def without_loss(trainer):
    """The loss is multiplied by 0."""
    usual = trainer.compute_loss
    trainer.compute_loss = lambda *given, **named: 0 * usual(*given, **named)


def surer(trainer):
    """An entropy bonus with the wrong sign: the loss has five times the entropy on top."""
    usual = trainer.compute_loss

    def with_entropy(model, inputs, **named):
        mask = inputs["completion_mask"]
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        seen = torch.cat([inputs["prompt_mask"], mask], 1)
        logits = model(input_ids=ids, attention_mask=seen).logits[:, -mask.shape[1] - 1:-1]
        log_prob = logits.log_softmax(-1)
        entropy = -(log_prob.exp() * log_prob).sum(-1)
        return usual(model, inputs, **named) + 5 * (entropy * mask).sum() / mask.sum()

    trainer.compute_loss = with_entropy


TASK_OF = {TASK.show(problem): problem
           for problem in TASK.training_problems(seed=0, step=1, count=STEPS * QUESTIONS)}
LOGS = {  # what is different from the healthy one: reward functions, settings, a patch
    "healthy": ([right], {}, None),
    "destroyed": ([right], {"learning_rate": 1e-2}, None),
    "dead": ([constant], {}, None),
    "hacked": ([divides, right], {"reward_weights": [1.0, 0.0], "learning_rate": 1e-3}, None),
    "no_rate": ([right], {"learning_rate": 0.0}, None),
    "no_gradient": ([right], {}, without_loss),
    "collapsed": ([right], {"learning_rate": 1e-3, "max_steps": 60}, surer),
    "cut_off": ([right], {"max_completion_length": 24}, None),
    "length": ([length], {}, None),
    "passes": ([right], {"num_iterations": 4, "learning_rate": 2e-3}, None)}


def write(name):
    import trl
    from datasets import Dataset
    functions, changed, patch = LOGS[name]
    rows = [{"prompt": TASK.prompt_for(problem), "problem": key}
            for key, problem in TASK_OF.items()]
    with tempfile.TemporaryDirectory() as folder:
        settings = dict(
            output_dir=folder, per_device_train_batch_size=QUESTIONS * ANSWERS,
            num_generations=ANSWERS, max_steps=STEPS, learning_rate=2.5e-4,
            lr_scheduler_type="constant", max_completion_length=80, use_cpu=True, bf16=False,
            report_to="none", save_strategy="no", logging_steps=1, seed=1, top_k=0,
            disable_tqdm=True, gradient_checkpointing=False)
        trainer = trl.GRPOTrainer(
            model=TINY, reward_funcs=functions, args=trl.GRPOConfig(**settings | changed),
            train_dataset=Dataset.from_list(rows))
        if patch:
            patch(trainer)
        trainer.train()
        lines = [{key: float(f"{value:.4g}") for key, value in line.items()
                  if key not in ("step_time", "epoch")} for line in trainer.state.log_history
                 if "reward" in line]
    FOLDER.mkdir(exist_ok=True)
    text = ",\n  ".join(json.dumps(line) for line in lines)
    path = FOLDER / f"{name}-{version('trl')}.json"
    path.write_text('{"log_history": [\n  ' + text + "]}\n")


if __name__ == "__main__":
    for chosen in sys.argv[1:] or LOGS:
        write(chosen)
