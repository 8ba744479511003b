"""See what a weighting would have weighed on the recorded tokens of a run, without training.

    python -m tools.preview runs/none-grpo-s0 --mitigation entropy_weighted --entropy_temp 0.5

Reads the credit file of one step, prints where the weight goes, and shows answers shaded by it.
A model is loaded only for a weighting that looks at hidden states or attention, or samples more.
It is the checkpoint that sampled the step if that was kept, else the last one before it. Nothing is
written.
"""
if not __package__:
    raise SystemExit("start it with: python -m tools.preview")
import inspect
import textwrap
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from engine.choices import MITIGATIONS, NEVER_RESCALED
import mitigations  # noqa: F401  fills the lists of choices that settings are checked with
from analysis.tables import Table, by_row
from credit.weight import rescaled_weight
from engine.errors import UserError
from engine.forward import Forward
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts
from engine.tokens import KINDS, SECTIONS, load_tokenizer, token_bytes
from harness.credit_file import checkpoint_folders
from harness.credit_reading import credit_steps, read_credit
from harness.files import find_folder
from harness.flags import (Flag, Parser, add_flag, add_flags, check_value, some_text,
                           with_defaults)
from harness.load import load_policy, make_weighting
from harness.program import run_as_program
from harness.identity import run_config
from harness.settings import Settings, choice_flags, make_settings
from harness.progress import put, visible
from tools.terminal import legend, shaded

FLAGS = {
    "mitigation": Flag(None, "by default the run's own"),
    "rescale": Flag("mean", "how weights are scaled", choices=("mean", "gradient", "none")),
    "step": Flag(None, "by default the last one whose model was kept", kind=int),
    "show": Flag(4, "answers to show", least=0, most=1_000_000)}
SHADES = ((0.25, "48;5;255;38;5;0"), (0.5, "48;5;254;38;5;0"), (0.8, "48;5;195;38;5;0"),
          (1.25, "48;5;153;38;5;0"), (2.0, "48;5;111;38;5;0"), (4.0, "48;5;32;38;5;15"),
          (float("inf"), "48;5;18;38;5;15"))


class Recorded:
    """One step of a run. Its model is loaded when somebody asks for it."""

    def __init__(self, folder: Path, step: int | None, settings: Settings):
        self.folder, self.settings = folder, settings
        # by the number of steps they were trained
        self.models = {0: find_folder(settings.model), **checkpoint_folders(folder)}
        steps = credit_steps(folder)
        if not steps:
            raise UserError(f"{folder} has no credit files yet")
        kept = [known for known in steps if known - 1 in self.models]
        self.step = step or max(kept, default=steps[-1])
        if self.step not in steps:
            raise UserError(f"{folder} has no credit file of step {step}, only of {steps[0]} to "
                            f"{steps[-1]}")

    @cached_property
    def policy(self) -> Policy:
        """The model that sampled the step, or the last one before it that was kept."""
        trained = max(steps for steps in self.models if steps < self.step)
        which = "that sampled them"
        if trained != self.step - 1:
            which = f"after step {trained} (the one that sampled them was not kept)"
        print(f"looking with the model {which}: {self.models[trained]}")
        return load_policy(self.settings, self.models[trained])

    @cached_property
    def forward(self) -> Forward:
        return self.policy.extra_forward()

    def look(self, rollouts: Rollouts, attention: bool = False) -> dict:
        """For `Rollouts.forward`: hidden states and attention, if a weighting looks at them."""
        return self.forward.look(rollouts, attention)

    @property
    def needs_policy(self) -> bool:
        """A weighting that is a class may keep a state, or sample answers and have them scored."""
        return inspect.isclass(MITIGATIONS[self.settings.mitigation])

    def rollouts(self) -> Rollouts:
        s, problems = self.settings, []
        if self.needs_policy:
            problems = self.policy.task.training_problems(s.seed, self.step, s.questions)
        generator = torch.Generator().manual_seed(derived_seed("credit", s.seed, self.step))
        return read_credit(self.folder, self.step, load_tokenizer(self.folder), problems=problems,
                           forward=self, generator=generator)

    def weights(self, rollouts: Rollouts) -> tuple[torch.Tensor, dict]:
        """(B, T) and the metrics, as training would have made them of this batch."""
        s, policy = self.settings, self.policy if self.needs_policy else None
        weighting = make_weighting(s, policy)
        if hasattr(weighting, "state_dict") and self.step > 1:
            print(f"{s.mitigation} as it is at the start of a run")
        if s.drop_unfinished:
            rollouts = replace(rollouts, mask=rollouts.mask & rollouts.finished[:, None])
        return rescaled_weight(weighting, s.mitigation, rollouts, policy, s.rescale)


def print_summary(rollouts: Rollouts, weight: np.ndarray, mask: np.ndarray) -> None:
    """Where the weight goes, by section, by kind, and the tokens that get most and least of it."""
    rows = []
    for names, codes in ((SECTIONS, rollouts.section), (KINDS, rollouts.kind)):
        for code, name in enumerate(names):
            part = weight[codes.numpy()[mask] == code]
            if len(part):
                rows.append([name, len(part), len(part) / len(weight),
                             part.sum() / max(weight.sum(), 1e-30), part.mean()])
    formats = {"section or kind": "", "tokens": "d", "of all": ".1%", "of weight": ".1%",
               "mean weight": ".3f"}
    print(Table("weight", "", by_row(formats, rows)).to_text())
    texts = [text for row in rollouts.texts for text in row]
    heaviest_first = mean_weights(texts, weight)
    for words, found in (("heaviest", heaviest_first), ("lightest", heaviest_first[::-1])):
        listed = "  ".join(f"{text!r} {mean:.2f}" for mean, text in found[:10])
        print(f"  {words} tokens:  {listed}")


def mean_weights(texts: list[str], weight: np.ndarray) -> list[tuple[float, str]]:
    """The mean weight of each text that is not rare, the heaviest first."""
    weights = {}
    for text, value in zip(texts, weight):
        weights.setdefault(text, []).append(value)
    often = max(2, len(texts) // 1000)
    means = [(np.mean(values), text) for text, values in weights.items() if len(values) >= often]
    return sorted(means, reverse=True)


def choose_answers(rollouts: Rollouts, count: int) -> list[int]:
    """The best and the worst answer to each problem; problems whose rewards differ come first."""
    different, alike = [], []
    for group in range(len(rollouts.prompt_ids)):
        rows = (rollouts.group == group).nonzero().squeeze(1)
        reward = rollouts.reward[rows]
        best, worst = int(rows[reward.argmax()]), int(rows[reward.argmin()])
        if reward.max() > reward.min():
            different += [best, worst]
        else:
            alike.append(best)
    return (different + alike)[:count]


def show_answers(rollouts: Rollouts, weight: torch.Tensor, prompts: list[str],
                 rows: list[int]) -> None:
    put(f"\nweight: {legend(SHADES) or '0.25 behind a token'}")
    for row in rows:
        length = len(rollouts.texts[row])
        prompt = textwrap.shorten(prompts[int(rollouts.group[row])], 400, placeholder=" ...")
        advantage = rollouts.advantage[row, :length]
        low, high = advantage.min(), advantage.max()
        span = f"{low:+.2f}" if low == high else f"{low:+.2f} to {high:+.2f}"
        print(f"\nanswer {row}: reward {rollouts.reward[row]:.2f}, advantage {span}; {prompt}")
        texts = [visible(text) for text in rollouts.texts[row]]
        put(shaded(texts, weight[row, :length].tolist(), SHADES,
                   lambda number: f"\u00b7{number:.2f}"))


def make_parser() -> Parser:
    parser = Parser("python -m tools.preview RUN --mitigation NAME [its flags]", __doc__)
    parser.add_argument("run", metavar="RUN", type=some_text, help="a run folder")
    add_flags(parser, FLAGS)
    for name, flag in choice_flags().items():
        add_flag(parser, name, flag)
    return parser


def chosen_settings(folder: Path, given: dict) -> Settings:
    """The run's own, with the weighting that was asked for."""
    config = run_config(folder)
    name = given.get("mitigation", config["mitigation"])
    check_value("mitigation", name, Flag("none", choices=MITIGATIONS))
    weighting = {key: value for key, value in given.items() if key in ("rescale", *choice_flags())}
    if name in NEVER_RESCALED:
        weighting.setdefault("rescale", "none")
    return make_settings({"config": folder / "config.json", "mitigation": name, "loss": "policy",
                          "placebo": "none", "device": "cpu", "shard": False,
                          **weighting})


def main(argv: list[str]) -> None:
    given = make_parser().read(argv)
    flags = with_defaults({name: given[name] for name in FLAGS if name in given}, FLAGS)
    folder = Path(given["run"])
    recorded = Recorded(folder, flags.step, chosen_settings(folder, given))
    rollouts = recorded.rollouts()
    weight, metrics = recorded.weights(rollouts)
    mask = rollouts.mask.numpy()
    print(headline(recorded, mask, metrics))
    print_summary(rollouts, weight.numpy()[mask], mask)
    tokenizer = load_tokenizer(folder)
    prompts = [b"".join(token_bytes(tokenizer, ids)).decode(errors="replace")
               for ids in rollouts.prompt_ids]
    show_answers(rollouts, weight, prompts, choose_answers(rollouts, flags.show))


def headline(recorded: Recorded, mask: np.ndarray, metrics: dict) -> str:
    """runs/none-grpo-s0, step 100: 256 answers, 12345 tokens; random --placebo_std 0.5, ..."""
    s = recorded.settings
    mitigation_flags = s.flags_for(MITIGATIONS[s.mitigation])
    typed = "".join(f" --{name} {value}" for name, value in mitigation_flags.items())
    factor = metrics["weight_factor"]
    note = f"; {metrics['weight_note']}" if metrics["weight_note"] else ""
    return (f"{recorded.folder}, step {recorded.step}: {len(mask)} answers, {mask.sum()} tokens; "
            f"{s.mitigation}{typed}, rescale {s.rescale} (factor {factor:.3g}){note}")


if __name__ == "__main__":
    run_as_program("preview", main)
