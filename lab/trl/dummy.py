"""A crash-test dummy for a whole trainer: is what it does with a right loss right, too?

    python -m lab.trl.dummy write OUT             a model and the prompts of one step
    python -m lab.trl.dummy step OUT TRAINED --learning_rate 0.5

A loss can be right, and the trainer around it wrong: answers sampled at another temperature than
they are trained at, groups that the loader mixes, gradients divided twice, frozen parameters, rows
that are filtered. The dummy is a reward function for any trainer that reads a Hugging Face folder.

One step of SGD, without clipping, momentum or warm-up: each answer gets a random number as reward,
and the change of the parameters is compared with the exact one (dummy_step.py).

What is not understood is located: each answer's and token's number is printed over that of the
nearest formula, and the unexplained share by tensor.

    dummy = Dummy("OUT")
    trainer = ...       # yours: the model OUT/model, the prompts dummy.prompts or OUT/step.jsonl,
                        # and dummy.reward
    trainer.train()
    print("\\n".join(dummy.report(trainer.model, learning_rate)))

The answers are also written into OUT, for a trainer that runs in another process: then `step` reads
the folder of the trained model. lab/trl/dummy.md shows it with TRL.
"""
if __name__ == "__main__" and not __package__:
    raise SystemExit("start it with: python -m lab.trl.dummy")
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any


from lab.trl.dummy_step import Seen, Step
from engine.errors import PROJECT, UserError
from harness.flags import Flag, make_parser, with_defaults
from harness.screen import run_as_program

PROBLEMS = ((3, 5, 7, 22), (2, 4, 9, 17), (1, 6, 8, 15), (5, 5, 6, 31), (2, 3, 10, 16),
            (4, 7, 8, 19), (1, 9, 12, 20), (3, 3, 8, 14))  # three numbers, and what they make
PROMPT = "<|im_start|>user\n{} {} {} make {}<|im_end|>\n<|im_start|>assistant\n<think>"
NEARLY_EQUAL = 0.01  # rewards of the first problem are so much smaller, so that epsilon shows
ANSWERS = "step_answers.jsonl"
FLAGS = {"learning_rate": Flag(None, "learning rate of the step of SGD", kind=float, above=0,
                               requires=(lambda s: s.what == "step", "the command step"))}


class Dummy:
    """The reward function of one step. `folder` is one that `write` has made, or a model's own;
    then no answers are written down in a file."""

    def __init__(self, folder: str | Path):
        written = Path(folder) / "model"
        self.record = Path(folder) / ANSWERS if written.is_dir() else None
        self.model, self.tokenizer = load(written if self.record else Path(folder))
        self.prompts = [PROMPT.format(*problem) for problem in PROBLEMS]
        self.seen: list[Seen] = []

    def reward(self, prompts: Sequence[str], completions: Sequence[str],
               completion_ids: Sequence[Sequence[int]] | None = None, **_: object) -> list[float]:
        """The rewards of these answers, each a number between 0 and 1 that a hash gives. Equal
        answers have equal rewards, because their gradients are equal and cannot be told apart."""
        first = len(self.seen)
        for row, (prompt, text) in enumerate(zip(prompts, completions)):
            if completion_ids is None:
                ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            else:
                ids = tuple(int(token) for token in completion_ids[row])
            if prompt not in self.prompts:
                raise UserError(f"the trainer asks for the reward of the prompt {prompt!r}, which "
                                "is none of the dummy's: a template was put around it")
            number = self.prompts.index(prompt)
            digest = hashlib.sha256(repr((prompt, ids)).encode()).digest()
            reward = digest[0] / 255 * (NEARLY_EQUAL if number == 0 else 1)
            self.seen.append(Seen(number, ids, reward))
        if self.record:
            with self.record.open("a", encoding="utf-8") as file:
                for seen in self.seen[first:]:
                    file.write(json.dumps(vars(seen)) + "\n")
        return [seen.reward for seen in self.seen[first:]]

    def report(self, trained: Any, learning_rate: float) -> list[str]:
        """What the step was, in sentences."""
        step = Step(self.model, self.tokenizer, self.prompts, self.seen, trained, learning_rate)
        return step.sentences()


def load(folder: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def write_folder(folder: Path) -> None:
    """Write the model, and the prompts of the step in their order."""
    if folder.exists():
        raise UserError(f"{folder} exists already: name another folder")
    shutil.copytree(PROJECT / "models/tiny", folder / "model")
    lines = [json.dumps({"prompt": PROMPT.format(*problem)}) for problem in PROBLEMS]
    (folder / "step.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(argv: list[str]) -> None:
    parser = make_parser("python -m lab.trl.dummy write|step OUT", __doc__, FLAGS)
    parser.add_argument("what", choices=("write", "step"))
    parser.add_argument("folder", help="the dummy's folder")
    parser.add_argument("trained", nargs="?", default=None, help="for step: the trained model")
    flags = with_defaults(parser.read(argv), FLAGS)
    folder = Path(flags.folder)
    if flags.trained is not None and flags.what != "step":
        raise UserError(f"{flags.what} takes no trained model: leave out {flags.trained}")
    if flags.what == "write":
        write_folder(folder)
        print(f"written: {folder}. lab/trl/codes.md says how a trainer uses it")
        return
    if not (folder / "model").is_dir():
        raise UserError(f"{folder} was not made by python -m lab.trl.dummy write")
    if flags.trained is None or flags.learning_rate is None:
        raise UserError("step needs the folder of the trained model and --learning_rate")
    if not (folder / ANSWERS).exists():
        raise UserError(f"{folder} has no {ANSWERS}: the reward function was never called")
    dummy = Dummy(folder)
    for line in (folder / ANSWERS).read_text(encoding="utf-8").splitlines():
        given = json.loads(line)
        dummy.seen.append(Seen(given["prompt"], tuple(given["ids"]), given["reward"]))
    print("\n".join(dummy.report(load(Path(flags.trained))[0], flags.learning_rate)))


if __name__ == "__main__":
    run_as_program("dummy", main)
