"""What a mitigation's weights would have been on the recorded tokens of a run, without training.

    python mitigations.py runs/none-grpo-s0 --mitigation entropy_weighted --entropy_temp 0.5

Reads one step's credit file, prints where the weight goes, and shows answers shaded by it. A model is loaded
only for a mitigation that looks at hidden states or attention, or samples; it is the checkpoint that sampled
the step where that was kept. Nothing is written.
"""
import argparse
import sys
import textwrap
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

import mitigations
from countdown_task import KINDS, SECTIONS
from engine.tokens import load_tokenizer, token_bytes
from engine.lab import Lab, derived_seed, make_lab, pick_device
from engine.errors import UserError
from engine.forward import Forward
from engine.rollouts import Rollouts
from engine.credit_file import read_credit
from engine.run_folder import run_config, step_of
from engine.settings import Parser, Settings, check_value, flag_kind, make_settings, mitigation_flags, parameters, underscores

SHADES = ((0.25, 255, 0), (0.5, 254, 0), (0.8, 195, 0), (1.25, 153, 0), (2.0, 111, 0), (4.0, 32, 15), (float("inf"), 18, 15))


class Recorded:
    """One step of a run, with its model at hand for whoever needs it."""

    def __init__(self, folder: Path, step: int | None, settings: Settings):
        self.folder, self.settings = folder, settings
        self.models = {0: Path(settings.model)} | {step_of(p): p for p in folder.glob("checkpoints/step_*") if step_of(p) is not None}
        steps = sorted(step_of(p) for p in folder.glob("credit/step_*.npz") if step_of(p))
        if not steps:
            raise UserError(f"{folder} has no credit files yet")
        self.step = step if step is not None else max((n for n in steps if n - 1 in self.models), default=steps[-1])
        if self.step not in steps:
            raise UserError(f"{folder} has no credit file of step {self.step}, only of {steps[0]} to {steps[-1]}")

    @cached_property
    def lab(self) -> Lab:
        at = max(step for step in self.models if step < self.step)
        say = "that sampled them" if at == self.step - 1 else f"after step {at} (the one that sampled them was not kept)"
        print(f"looking with the model {say}: {self.models[at]}")
        lab = make_lab(self.settings, self.models[at])
        state = self.models[at] / "trainer" / "state.safetensors"
        if state.is_file() and run_config(self.folder)["mitigation"] == self.settings.mitigation:
            lab.load_trainer_tensors(state)
        elif hasattr(lab.mitigation, "state_dict") and self.step > 1:
            print(f"{self.settings.mitigation} as it is at the start of a run: this run has no state of it from before step {self.step}")
        return lab

    def look(self, tokens: Rollouts, attention: bool = False) -> dict:
        return self.forward.look(tokens, attention)

    @cached_property
    def forward(self) -> Forward:
        return Forward(self.lab.model, self.settings.micro_batch)

    def tokens(self) -> Rollouts:
        s, chosen = self.settings, mitigations.MITIGATIONS[self.settings.mitigation]
        problems = self.lab.problems.training(s.seed, self.step, s.questions) if isinstance(chosen, type) else []
        generator = torch.Generator().manual_seed(derived_seed("credit", s.seed, self.step))
        found = read_credit(self.folder, self.step, load_tokenizer(self.folder), problems=problems, forward=self, generator=generator)
        return found.to(self.settings.device)

    def weights(self, tokens: Rollouts) -> tuple[torch.Tensor, dict]:
        s = self.settings
        lab = self.lab if isinstance(mitigations.MITIGATIONS[s.mitigation], type) else None
        chosen = lab.mitigation if lab else mitigations.make(s.mitigation, s.own, None)
        if s.drop_unfinished:
            tokens = replace(tokens, mask=tokens.mask & tokens.finished[:, None])
        return mitigations.token_weight(chosen, s.mitigation, tokens, lab, s.rescale)


def print_summary(tokens: Rollouts, weight: np.ndarray, mask: np.ndarray) -> None:
    """Where the weight goes, by section, by kind, and the tokens that get most and least of it."""
    print(f"{'':24s}{'tokens':>9s}{'of all':>8s}{'of weight':>11s}{'mean weight':>13s}")
    for title, codes, names in (("section", tokens.section, SECTIONS), ("kind", tokens.kind, KINDS)):
        codes = codes.cpu().numpy()[mask]
        for code, name in enumerate(names):
            chosen = weight[codes == code]
            if len(chosen):
                print(f"  {title:9s}{name:13s}{len(chosen):9d}{len(chosen) / len(weight):8.1%}"
                      f"{chosen.sum() / max(weight.sum(), 1e-30):11.1%}{chosen.mean():13.3f}")
    by_text, texts = {}, [text for row in tokens.texts for text in row]
    for text, value in zip(texts, weight):
        by_text.setdefault(text, []).append(value)
    common = sorted(((np.mean(found), text) for text, found in by_text.items() if len(found) >= max(2, len(texts) // 1000)), reverse=True)
    for words, rows in (("heaviest", common[:10]), ("lightest", common[::-1][:10])):
        print(f"  {words} tokens:  " + "  ".join(f"{text!r} {value:.2f}" for value, text in rows))


def shaded(texts: list[str], weights, colour: bool) -> str:
    if not colour:
        return "".join(f"{text}\u00b7{weight:.2f} " for text, weight in zip(texts, weights))
    return "".join(f"\033[48;5;{background}m\033[38;5;{ink}m{text}\033[0m" for text, weight in zip(texts, weights)
                   for background, ink in [next((b, i) for limit, b, i in SHADES if weight < limit)])


def legend() -> str:
    limits = ["0", *(f"{limit:g}" for limit, *_ in SHADES[:-1])]
    return " ".join(shaded([f" from {low} "], [float(low)], True) for low in limits)


def choose_answers(tokens: Rollouts, count: int) -> list[int]:
    """The best and the worst answer of each question, those where they differ first."""
    pairs = []
    for g in range(len(tokens.prompt_ids)):
        rows = (tokens.group == g).nonzero().squeeze(1)
        reward = tokens.reward[rows]
        pairs.append((float(reward.max() - reward.min()) == 0, [int(rows[reward.argmax()]), int(rows[reward.argmin()])]))
    return [row for _, rows in sorted(pairs, key=lambda pair: pair[0]) for row in dict.fromkeys(rows)][:count]


def make_parser() -> Parser:
    parser = Parser(usage="python mitigations.py RUN --mitigation NAME [its flags]", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=argparse.SUPPRESS)
    parser.add_argument("run", metavar="RUN", help="a run folder")
    parser.add_argument("--mitigation", metavar="NAME", help="by default the run's own: " + " | ".join(mitigations.MITIGATIONS))
    parser.add_argument("--rescale", metavar="TEXT", help="mean | gradient | none (default mean)")
    parser.add_argument("--step", type=int, metavar="N", help="by default the last one whose model was kept")
    parser.add_argument("--show", type=int, default=4, metavar="N", help="answers to show (default 4)")
    parser.add_argument("--episode", type=int, nargs="+", metavar="N", help="show these instead: places in the batch, from 0")
    parser.add_argument("--numbers", action="store_true", default=False, help="weights as numbers, as when this is not a terminal")
    parser.add_argument("--device", metavar="TEXT", default="cpu", help="where a model is asked, if one is (default cpu)")
    for name, found in mitigation_flags().items():
        kind = parameters(mitigations.MITIGATIONS[found[0]])[name].kind
        parser.add_argument(f"--{name}", help=f"of {' and '.join(found)}", **flag_kind(kind))
    return parser


def main(argv: list[str]) -> None:
    args, unknown = make_parser().parse_known_args([underscores(argument) for argument in argv])
    if unknown:
        raise UserError(f"unknown argument {unknown[0]}")
    given, folder = vars(args), Path(args.run)
    check_value("show", args.show, int, mitigations.Bounds(least=0))
    pick_device(args.device)
    settings = chosen_settings(folder, given)
    recorded = Recorded(folder, given.get("step"), settings)
    tokens = recorded.tokens()
    rows = given.get("episode") or choose_answers(tokens, args.show)
    wrong = [b for b in rows if not 0 <= b < len(tokens.texts)]
    if wrong:
        raise UserError(f"--episode {wrong[0]}: the batch has answers 0 to {len(tokens.texts) - 1}")
    weight, said = recorded.weights(tokens)
    mask = tokens.mask.cpu().numpy()
    flags = "".join(f" --{name} {value}" for name, value in settings.own.items())
    print(f"{folder}, step {recorded.step}: {len(mask)} answers, {mask.sum()} tokens; {settings.mitigation}{flags}, rescale {settings.rescale} "
          f"(factor {said['weight_factor']:.3g})" + (f"; {said['weight_note']}" if said["weight_note"] else ""))
    print_summary(tokens, weight.cpu().numpy()[mask], mask)
    prompts = [b"".join(token_bytes(load_tokenizer(folder), ids)).decode(errors="replace") for ids in tokens.prompt_ids]
    show(tokens, weight, prompts, rows, sys.stdout.isatty() and not args.numbers)


def chosen_settings(folder: Path, given: dict) -> Settings:
    """The run's own, with the mitigation that was asked for."""
    name = given.get("mitigation", run_config(folder)["mitigation"])
    check_value("mitigation", name, str, mitigations.Bounds(), mitigations.MITIGATIONS)
    rescale = "none" if name in mitigations.NEVER_RESCALED else Settings.rescale
    asked = {key: given[key] for key in ("mitigation", "rescale", *mitigation_flags()) if key in given}
    return make_settings({"config": folder / "config.json", "device": given["device"], "loss": "policy", "placebo": "none",
                          "rescale": rescale, **asked})


def show(tokens: Rollouts, weight: torch.Tensor, prompts: list[str], rows: list[int], colour: bool) -> None:
    if colour:
        print(f"\nweight: {legend()}")
    for b in rows:
        n = len(tokens.texts[b])
        advantage = tokens.advantage[b, :n]
        spread = f"{advantage[0]:+.2f}" if bool((advantage == advantage[0]).all()) else f"{advantage.min():+.2f} to {advantage.max():+.2f}"
        prompt = textwrap.shorten(prompts[int(tokens.group[b])], 400, placeholder=" ...")
        print(f"\nepisode {b}: reward {tokens.reward[b]:.2f}, advantage {spread}; {prompt}")
        print(shaded(tokens.texts[b], weight[b, :n].tolist(), colour))
