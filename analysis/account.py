"""How a token came by its credit: a line of arithmetic for each stage, in the order in which they
happen.

`stages` has the lines; names of numbers stand in [[ ]]. `numbers_of` has the numbers of an answer.
For one token `told` puts them in, and on the page page.js. A line with a number that is not known
is left out: a run of another trainer has not every column.
"""
import inspect
import textwrap
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import numpy as np
import torch

from analysis.runs import task_of
from analysis.tally import Tokens
from engine.choices import ADVANTAGES, MITIGATIONS, Choices
from grpo import (centred, gradient_size, group_mean, group_z_score, length_scaling, policy_loss,
                  rescaling)
from harness.record import PART, Json
from harness.flags import flags_of
from harness.settings import DEFAULTS

FACTS = "engine/sampler.py: Distribution.facts"  # names: an analysis loads no sampler, no model
GRADIENT = "engine/forward.py: TokenLogProbs.backward"
EPSILON = inspect.signature(group_z_score).parameters["epsilon"].default
FORMULAS = {  # advantages that are one line of arithmetic, and the function that computes it
    "grpo": (f"([[reward]] - [[mean]]) / ([[std]] + {EPSILON})", group_z_score),
    "dr_grpo": ("[[reward]] - [[mean]]", centred),
    "rloo": ("([[reward]] - [[mean]]) x [[answers]] / ([[answers]] - 1)", ADVANTAGES["rloo"])}
LENGTHS = {  # --loss_norm: the factor of an answer's length
    "token": "m = [[m]]",
    "sequence": "m = N / (answers x tokens) = [[N]] / ([[trained]] x [[tokens]]) = [[m]]",
    "constant": "m = N / (answers x most tokens) = [[N]] / ([[batch]] x [[most]]) = [[m]]"}
NOT_TRAINED = "cut off by the limit, so it is not trained on (--drop_unfinished)"
NAMES = re.compile(r"\[\[(.+?)\]\]")
Stage = tuple[str, str, str]  # label, text, the function that computes it
Value = str | float | None
Numbers = dict[str, Value | list[Value]]  # a list has one for each token


def stages(config: Mapping[str, object]) -> list[Stage]:
    s = settings_of(config)
    is_own = not {"imported", "trainer"} & config.keys()
    task = task_of(config) if is_own else None
    score = place(getattr(task, "score", task)) if task else ""
    advantage, by_advantage = chosen("advantage", ADVANTAGES, s)
    weight, by_weight = chosen("mitigation", MITIGATIONS, s)
    formula, computes = FORMULAS.get(s.advantage, ("", None))
    if formula:  # then the other line is for records that do not follow it
        shuffled = s.placebo == "advantages"
        advantage, by_advantage = "shuffled in its group" if shuffled else "as on record", ""
    if s.placebo == "weights":
        weight += ", shuffled over the batch's tokens"
    of_kept = " of kept answers" if s.drop_unfinished else ""
    besides = "" if is_own else ", in the loss of this lab"
    besides += f", in the first of {s.epochs} updates" if s.epochs > 1 else ""
    besides += f", without the KL term (--kl {s.kl:g})" if s.kl else ""
    return [
        ("rewards", "of the [[answers]] answers to this problem: [[rewards]]", score),
        ("chance", "p = exp([[log-prob]]) = [[p]]", FACTS),
        ("entropy", "-sum p log p = [[entropy]], over all that could stand here", FACTS),
        ("reward", f"{getattr(s, 'reward', 'reward')} = [[reward]], with [[parts]]", score),
        ("group", "mean [[mean]], standard deviation [[std]]", place(group_z_score)),
        ("advantage", f"A = {formula} = [[computed]]", place(computes) if computes else ""),
        ("advantage", f"A = [[advantage]][[recorded]], {advantage}", by_advantage),
        ("dropped", "[[dropped]]", "train.py: drop_unfinished"),
        ("weight", f"[[w]], {weight}", by_weight),
        ("rescaling", f"c w = [[w]] x [[c]] = [[weight]] (--rescale {s.rescale})",
         place(rescaling)),
        ("loss norm", f"{LENGTHS[s.loss_norm]}; N = [[N]] tokens{of_kept}[[N from]] "
                      f"(--loss_norm {s.loss_norm})", place(length_scaling)),
        ("term", "-A c w m log p / N = -([[advantage]] x [[weight]] x [[m]] x [[log-prob]]) / "
                 f"[[N]] = [[term]]{besides}",
         place(policy_loss)),
        ("s", "sqrt(1 - 2 p + sum p^2) = sqrt(1 - 2 x [[p]] + [[collision]]) = [[s]]",
         place(gradient_size)),
        ("gradient", "abs(A) c w m s / N = abs([[advantage]]) x [[weight]] x [[m]] x [[s]] / [[N]] "
                     "= [[gradient]]", GRADIENT),
        ("became", "its log p changed by [[became]] in the step, after which p = [[p after]]",
         "grpo.py: update"),
        ("rank", "[[rank]] of [[tokens]] in this answer, by size (A > 0: likelier, A < 0: less)",
         place(ranks))]


def settings_of(config: Mapping[str, object]) -> SimpleNamespace:
    return SimpleNamespace(**{**DEFAULTS, **config})


def place(function: Callable[..., object]) -> str:
    """grpo.py: group_z_score"""
    return f"{function.__module__.replace('.', '/')}.py: {function.__qualname__}"


def chosen(axis: str, choices: Choices, s: SimpleNamespace) -> tuple[str, str]:
    """A method with its flags and the beginning of its help, and its place."""
    name = getattr(s, axis)
    if name not in choices:  # deleted since, or that of another trainer
        return name, ""
    flags = "".join(f" --{flag} {getattr(s, flag)}" for flag in flags_of(choices[name])
                    if hasattr(s, flag))
    paragraph = inspect.cleandoc(choices[name].__doc__ or "").split("\n\n")[0]
    help_text = textwrap.shorten(paragraph, 80, placeholder="...")
    return f"--{axis} {name}{flags}: {help_text}", place(choices[name])


def numbers_of(tokens: Tokens, config: Mapping[str, object], line: Json | None, b: int) -> Numbers:
    """What the lines name, of answer b. `line` is the step's in metrics.jsonl."""
    s, start, length = settings_of(config), tokens["episode_start"][b], tokens["length"][b]
    of = {name: tokens[name][start:start + length]
          for name in ("log_prob", "advantage", "weight", "gradient", "s", "collision")}
    reward, group = torch.from_numpy(tokens["reward"]), torch.from_numpy(tokens["group"])
    mean = group_mean(reward, group)
    std = group_mean((reward - mean).square(), group).sqrt()
    is_dropped = s.drop_unfinished & ~tokens["finished"]
    trained = torch.from_numpy(np.where(is_dropped, 0, tokens["length"]))
    N, c = (line["N"], line["weight_factor"]) if line else (None, None)
    m = float(length_scaling(trained, s.loss_norm, s.max_new_tokens)[b, 0])
    each = m / (N or int(trained.sum()) or math.nan)  # of a token, in the mean that is the loss
    if is_dropped[b]:
        c, m, each = None, math.nan, math.nan
    computed = torch.tensor(math.nan)
    if s.advantage in FORMULAS:
        one_token = SimpleNamespace(reward=reward, group=group, mask=torch.ones(len(reward), 1))
        computed = torch.as_tensor(ADVANTAGES[s.advantage](one_token))[b, 0]
    is_computed = np.allclose(of["advantage"], computed, atol=1e-5)
    in_group = tokens["group"] == tokens["group"][b]
    parts = [f"{name.removeprefix(PART)} {rounded(values[b])}" for name, values
             in sorted(tokens.items()) if name.startswith(PART) and np.isfinite(values[b])]
    rewards = Counter(map(rounded, tokens["reward"][in_group]))
    if "change" in tokens:
        after = np.exp(of["log_prob"] + tokens["change"][start:start + length])
        of["p after"] = after
    return {"answers": rewards.total(), "tokens": int(length),
            "N": N or int(trained.sum()), "N from": ", as in metrics.jsonl" if N else "",
            "c": rounded(c), "batch": len(trained), "trained": int((trained > 0).sum()),
            "most": s.max_new_tokens,
            "rewards": ", ".join(f"{count} x {value}" for value, count in rewards.most_common()),
            "mean": rounded(mean[b]), "std": rounded(std[b]),
            "m": rounded(m), "dropped": NOT_TRAINED if is_dropped[b] else None,
            "reward": rounded(tokens["reward"][b]), "parts": ", ".join(parts) or None,
            "computed": rounded(computed) if is_computed else None,
            "recorded": None if is_computed else "", "rank": ranks(abs(of["gradient"])),
            "p": list(map(rounded, np.exp(of["log_prob"]))),
            **{name: list(map(rounded, of[name])) for name in ("s", "collision", "p after")
               if name in of},
            **{name: [rounded(value, 3) for value in result] for name, result in {
                "w": of["weight"] / (c or math.nan),  # results of a reader's rounded numbers
                "term": -of["advantage"] * of["weight"] * of["log_prob"] * each,
                "gradient": abs(of["gradient"]) * each}.items()}}


def ranks(sizes: np.ndarray) -> list[Value]:
    """1 for the largest; None where there is no gradient."""
    not_larger = np.searchsorted(np.sort(sizes), sizes, side="right")
    return [len(sizes) - int(count) + 1 if size > 0 else None
            for size, count in zip(sizes, not_larger)]


def rounded(value: float | torch.Tensor | None, digits: int = 4) -> float | None:
    """Four digits are enough for the eye and keep the page small."""
    if value is None or not math.isfinite(value):
        return None
    number = float(f"{value:.{digits}g}")
    return int(number) if number.is_integer() else number


def told(lines: list[Stage], answer: Mapping[str, Numbers], t: int) -> list[Stage]:
    """The lines with the numbers of token t of an answer (answers.answers_of) put in."""
    known, filled = answer["account"] | answer["values"], []
    for label, text, where in lines:
        values = {name: known.get(name) for name in NAMES.findall(text)}
        values |= {name: value[t] for name, value in values.items() if isinstance(value, list)}
        if None not in values.values():
            filled.append((label, NAMES.sub(lambda found: str(values[found[1]]), text), where))
    return filled
