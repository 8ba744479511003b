"""What a mitigation's weights would have been on the recorded tokens of a run, without training.

    python -m tools.preview runs/none-grpo-s0 --mitigation entropy_weighted --entropy_temp 0.5

Reads one step's credit file, prints where the weight goes, and shows answers shaded by it. A
model is loaded only for a mitigation that looks at hidden states or attention, or samples: the
checkpoint that sampled the step, where it was kept. Nothing is written. """
import inspect
import sys
import textwrap
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from countdown_task import KINDS, SECTIONS
from engine.credit_file import credit_steps, read_credit, step_of
from engine.errors import UserError
from engine.files import find_folder
from engine.flags import Flag, Parser, add_flag, add_flags, check_value, run_as_program, with_defaults
from engine.forward import Forward
from engine.lab import Lab, derived_seed, make_lab, pick_device
from engine.registry import MITIGATIONS, NEVER_RESCALED, choice_flags, make
from engine.rollouts import Rollouts
from engine.run_folder import run_config
from engine.settings import Settings, make_settings
from engine.tokens import load_tokenizer, token_bytes
from mitigations import token_weight

FLAGS = {
    "mitigation": Flag(None, "by default the run's own"),
    "rescale": Flag("mean", "how weights are scaled", choices=("mean", "gradient", "none")),
    "step": Flag(None, "by default the last one whose model was kept", kind=int),
    "show": Flag(4, "answers to show", least=0),
    "numbers": Flag(False, "weights as numbers, as when this is not a terminal"),
    "device": Flag("cpu", "where a model is asked, if one is")}

# weights below a limit, the colour behind the text, and the colour of the text (of a terminal's
# 256)
SHADES = ((0.25, 255, 0), (0.5, 254, 0), (0.8, 195, 0), (1.25, 153, 0), (2.0, 111, 0), (4.0, 32, 15),
          (float("inf"), 18, 15))


class Recorded:
    """One step of a run, with its model at hand for whoever needs it."""

    def __init__(self, folder: Path, step: int | None, settings: Settings):
        self.folder, self.settings = folder, settings
        self.models = {0: find_folder(settings.model)}  # by the number of steps they were trained
        for checkpoint in folder.glob("checkpoints/step_*"):
            if step_of(checkpoint) is not None:
                self.models[step_of(checkpoint)] = checkpoint
        self.step = self.choose_step(step)

    def choose_step(self, wanted: int | None) -> int:
        steps = credit_steps(self.folder)
        if not steps:
            raise UserError(f"{self.folder} has no credit files yet")
        if wanted is None:
            return max((step for step in steps if step - 1 in self.models), default=steps[-1])
        if wanted not in steps:
            raise UserError(f"{self.folder} has no credit file of step {wanted}, only of {steps[0]} to "
                            f"{steps[-1]}")
        return wanted

    @cached_property
    def lab(self) -> Lab:
        """The model that sampled the step, or the last one before it that was kept."""
        trained = max(steps for steps in self.models if steps < self.step)
        which = "that sampled them"
        if trained != self.step - 1:
            which = f"after step {trained} (the one that sampled them was not kept)"
        print(f"looking with the model {which}: {self.models[trained]}")
        lab = make_lab(self.settings, self.models[trained])
        state = self.models[trained] / "trainer" / "state.safetensors"
        name = self.settings.mitigation
        if state.is_file() and run_config(self.folder)["mitigation"] == name:
            lab.load_trainer_tensors(state)
        elif hasattr(lab.mitigation, "state_dict") and self.step > 1:
            print(f"{name} as it is at the start of a run: this run has no state of it from before step "
                  f"{self.step}")
        return lab

    @cached_property
    def forward(self) -> Forward:
        return self.lab.look_with()

    def look(self, tokens: Rollouts, attention: bool = False) -> dict:
        """What a batch calls when somebody looks at hidden states: only now is a model loaded."""
        return self.forward.look(tokens, attention)

    @property
    def is_class(self) -> bool:
        return inspect.isclass(MITIGATIONS[self.settings.mitigation])

    def tokens(self) -> Rollouts:
        s, problems = self.settings, []
        if self.is_class:  # it may sample answers and have them scored
            problems = self.lab.task.training_problems(s.seed, self.step, s.questions)
        generator = torch.Generator().manual_seed(derived_seed("credit", s.seed, self.step))
        tokens = read_credit(self.folder, self.step, load_tokenizer(self.folder), problems=problems,
                             forward=self, generator=generator)
        return tokens.to(s.device)

    def weights(self, tokens: Rollouts) -> tuple[torch.Tensor, dict]:
        s, lab = self.settings, None
        if self.is_class:
            lab = self.lab
            chosen = lab.mitigation
        else:
            function = MITIGATIONS[s.mitigation]
            chosen = make(function, s.flags_for(function), None)
        if s.drop_unfinished:
            tokens = replace(tokens, mask=tokens.mask & tokens.finished[:, None])
        return token_weight(chosen, s.mitigation, tokens, lab, s.rescale)


def print_summary(tokens: Rollouts, weight: np.ndarray, mask: np.ndarray) -> None:
    """Where the weight goes, by section, by kind, and the tokens that get most and least of it."""
    print(f"{'':24s}{'tokens':>9s}{'of all':>8s}{'of weight':>11s}{'mean weight':>13s}")
    for title, codes, names in (("section", tokens.section, SECTIONS), ("kind", tokens.kind, KINDS)):
        codes = codes.cpu().numpy()[mask]
        for code, name in enumerate(names):
            part = weight[codes == code]
            if len(part):
                print(f"  {title:9s}{name:13s}{len(part):9d}{len(part) / len(weight):8.1%}"
                      f"{part.sum() / max(weight.sum(), 1e-30):11.1%}{part.mean():13.3f}")
    common = mean_weights([text for row in tokens.texts for text in row], weight)
    for words, rows in (("heaviest", common[:10]), ("lightest", common[::-1][:10])):
        print(f"  {words} tokens:  " + "  ".join(f"{text!r} {value:.2f}" for value, text in rows))


def mean_weights(texts: list[str], weight: np.ndarray) -> list[tuple[float, str]]:
    """The mean weight of each text that is not rare, the heaviest first."""
    weights = {}
    for text, value in zip(texts, weight):
        weights.setdefault(text, []).append(value)
    often = max(2, len(texts) // 1000)
    return sorted(((np.mean(values), text) for text, values in weights.items() if len(values) >= often),
                  reverse=True)


def choose_answers(tokens: Rollouts, count: int) -> list[int]:
    """The best and the worst answer of each question, those where they differ first."""
    pairs = []
    for group in range(len(tokens.prompt_ids)):
        rows = (tokens.group == group).nonzero().squeeze(1)
        reward = tokens.reward[rows]
        best, worst = int(rows[reward.argmax()]), int(rows[reward.argmin()])
        pairs.append((bool(reward.max() == reward.min()), best, worst))
    pairs.sort(key=lambda pair: pair[0])
    rows = [row for _, *pair in pairs for row in dict.fromkeys(pair)]
    return rows[:count]


def show_answers(tokens: Rollouts, weight: torch.Tensor, prompts: list[str], rows: list[int],
                 colour: bool) -> None:
    if colour:
        print(f"\nweight: {legend()}")
    for row in rows:
        length = len(tokens.texts[row])
        advantage = tokens.advantage[row, :length]
        spread = f"{advantage[0]:+.2f}"
        if not bool((advantage == advantage[0]).all()):
            spread = f"{advantage.min():+.2f} to {advantage.max():+.2f}"
        prompt = textwrap.shorten(prompts[int(tokens.group[row])], 400, placeholder=" ...")
        print(f"\nepisode {row}: reward {tokens.reward[row]:.2f}, advantage {spread}; {prompt}")
        print(shaded(tokens.texts[row], weight[row, :length].tolist(), colour))


def shaded(texts: list[str], weights: list[float], colour: bool) -> str:
    if not colour:
        return "".join(f"{text}\u00b7{weight:.2f} " for text, weight in zip(texts, weights))
    return "".join(coloured(text, weight) for text, weight in zip(texts, weights))


def coloured(text: str, weight: float) -> str:
    back, ink = next((back, ink) for limit, back, ink in SHADES if weight < limit)
    return f"\033[48;5;{back}m\033[38;5;{ink}m{text}\033[0m"


def legend() -> str:
    lowest = ["0", *(f"{limit:g}" for limit, *_ in SHADES[:-1])]
    return " ".join(coloured(f" from {low} ", float(low)) for low in lowest)


def make_parser() -> Parser:
    parser = Parser("python -m tools.preview RUN --mitigation NAME [its flags]", __doc__)
    parser.add_argument("run", metavar="RUN", help="a run folder")
    add_flags(parser, FLAGS)
    parser.add_argument("--episode", type=int, nargs="+", metavar="N",
                        help="show these instead: places in the batch, from 0")
    for name, flag in choice_flags().items():
        add_flag(parser, name, flag)
    return parser


def chosen_settings(folder: Path, given: dict) -> Settings:
    """The run's own, with the mitigation that was asked for."""
    config = run_config(folder)
    name = given.get("mitigation", config["mitigation"])
    check_value("mitigation", name, Flag("none", choices=MITIGATIONS))
    asked = {key: value for key, value in given.items() if key in ("rescale", *choice_flags())}
    if name in NEVER_RESCALED:
        asked.setdefault("rescale", "none")
    return make_settings({"config": folder / "config.json", "mitigation": name, "loss": "policy",
                          "placebo": "none", "device": given.get("device", "cpu"), **asked})


def main(argv: list[str]) -> None:
    given = make_parser().read(argv)
    folder = Path(given["run"])
    flags = with_defaults({name: given[name] for name in FLAGS if name in given}, FLAGS)
    pick_device(flags.device)
    settings = chosen_settings(folder, given)
    recorded = Recorded(folder, flags.step, settings)
    tokens = recorded.tokens()
    rows = given.get("episode") or choose_answers(tokens, flags.show)
    for row in rows:
        if not 0 <= row < len(tokens.texts):
            raise UserError(f"--episode {row}: the batch has answers 0 to {len(tokens.texts) - 1}")
    weight, metrics = recorded.weights(tokens)
    mask = tokens.mask.cpu().numpy()
    own = settings.flags_for(MITIGATIONS[settings.mitigation])
    typed = "".join(f" --{name} {value}" for name, value in own.items())
    note = f"; {metrics['weight_note']}" if metrics["weight_note"] else ""
    print(f"{folder}, step {recorded.step}: {len(mask)} answers, {mask.sum()} tokens; "
          f"{settings.mitigation}{typed}, rescale {settings.rescale} "
          f"(factor {metrics['weight_factor']:.3g}){note}")
    print_summary(tokens, weight.cpu().numpy()[mask], mask)
    tokenizer = load_tokenizer(folder)
    prompts = [b"".join(token_bytes(tokenizer, ids)).decode(errors="replace") for ids in tokens.prompt_ids]
    show_answers(tokens, weight, prompts, rows, sys.stdout.isatty() and not flags.numbers)


if __name__ == "__main__":
    run_as_program("preview", main)
