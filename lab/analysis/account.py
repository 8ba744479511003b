"""The account of a token: how it came by its gradient, a line of arithmetic for each stage, in the
order in which the stages happen.

`stages` has the lines, in which names of numbers are written as [[name]]. `numbers_of` has the
numbers of an answer. `with_numbers` puts those of one token into the lines; on the page, page.js
does this. A line with a number that is not known is left out, because a record need not have every
number.
"""
import inspect
import textwrap
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import torch

import countdown_task
import grpo
import qwen2_model
from analyze import tokens_of
from grpo import centred, group_mean, group_z_score, policy_loss
from mitigations import gradient_size, weights
from lab.analysis.run_folders import task_of
from lab.analysis.token_table import StepRecord, TokenTable
from lab.credit.monte_carlo import continuation_rewards
from lab.engine.credited import drop_unfinished
from lab.engine.methods import ADVANTAGES, MITIGATIONS, Choices
from lab.engine.update import length_scaling, rescaling
from lab.harness.record import PART, Json
from lab.harness.flags import flags_of
from lab.harness.settings import DEFAULTS

EPSILON = inspect.signature(group_z_score).parameters["epsilon"].default
FORMULAS = {  # advantages that are one line of arithmetic, and the function that computes it
    "grpo": (f"([[reward]] - [[mean]]) / ([[std]] + {EPSILON})", group_z_score),
    "dr_grpo": ("[[reward]] - [[mean]]", centred),
    "rloo": ("([[reward]] - [[mean]]) x [[answers]] / ([[answers]] - 1)", ADVANTAGES["rloo"])}
LENGTHS = {  # --loss_norm: the factor of an answer's length
    "token": "m = [[m]]",
    "sequence": "m = N / (trained answers x tokens of this one) = [[N]] / ([[trained]] x "
                "[[tokens]]) = [[m]]",
    "constant": "m = N / (answers x max_new_tokens) = [[N]] / ([[batch]] x [[most]]) = [[m]]"}
NOT_TRAINED = "cut off by the limit, so it is not trained on (--drop_unfinished)"
ONE_UPDATE = ("of new to old probability: 1 in the only update with this batch, so PPO's clipped "
              "ratio has the gradient of log p (--epochs 1)")
NAMES = re.compile(r"\[\[(.+?)\]\]")
Stage = tuple[str, str, str]  # label, text, the function that computes it
Value = str | float | None
Numbers = dict[str, Value | list[Value]]  # a list has one for each token


def stages(config: Mapping[str, object]) -> list[Stage]:
    s = SimpleNamespace(**{**DEFAULTS, **config})
    of_book = "numbers" in config and "task" not in config  # its only task, by one of its settings
    task = countdown_task.Task if of_book else task_of(config)
    return [
        *sampling_stages(s, task),
        *advantage_stages(s),
        *weight_stages(s),
        *loss_stages(s),
        ("change", "the step changed its log p by [[change]], so that p = [[p after]] after it",
         where(grpo.update)),
        ("credit", "[[credit in words]]", where(continuation_rewards))]


def sampling_stages(s: SimpleNamespace, task: type | None) -> list[Stage]:
    score = where(getattr(task, "score", task)) if task else ""
    reward = getattr(s, "reward", "reward")
    return [("rewards", "of the [[answers]] answers to this problem, [[rewards]]", score),
            ("p", "its probability: exp(log p) = exp([[log-prob]]) = [[p]]",
             where(qwen2_model.draw)),
            ("entropy", "-sum p log p = [[entropy]], summed over all tokens that could stand here",
             where(qwen2_model.draw)),
            ("reward", f"{reward} = [[reward]], where [[parts]]", score)]


def advantage_stages(s: SimpleNamespace) -> list[Stage]:
    formula, function = FORMULAS.get(s.advantage, ("", None))
    if function:
        computed_by = where(function)
        # the line with the recorded advantage is for records that do not follow the formula
        recorded, recorded_by = "as recorded", ""
        if s.placebo.startswith("advantages"):
            recorded = "after the shuffle within its group"
    else:
        computed_by = ""
        recorded, recorded_by = chosen("advantage", ADVANTAGES, s)
    return [("group", "their mean is [[mean]], and their standard deviation [[std]]",
             where(group_z_score) if function else ""),
            ("advantage", f"A = {formula} = [[computed]]", computed_by),
            ("advantage", f"A = [[advantage]][[recorded]], {recorded}", recorded_by),
            ("dropped", "[[dropped]]", where(drop_unfinished))]


def weight_stages(s: SimpleNamespace) -> list[Stage]:
    weight, computed_by = chosen("mitigation", MITIGATIONS, s)
    if s.placebo.startswith("weights"):
        weight += ", shuffled over the batch's tokens"
    return [("weight", f"w = [[w]], from {weight}", computed_by),
            ("rescaling", f"c w = [[w]] x [[c]] = [[weight]] (--rescale {s.rescale})",
             where(rescaling if s.rescale == "gradient" else weights))]


def loss_stages(s: SimpleNamespace) -> list[Stage]:
    of_kept = " of kept answers" if s.drop_unfinished else ""
    besides = ""
    if s.epochs > 1:
        besides = f", in the first of {s.epochs} updates"
    if s.kl:
        besides += f", without the KL term (--kl {s.kl:g})"
    return [
        ("loss norm", f"the answer's length factor is {LENGTHS[s.loss_norm]}, and N = [[N]] "
                      f"tokens{of_kept}, as in metrics.jsonl (--loss_norm {s.loss_norm})",
         where(policy_loss if s.loss_norm == "token" else length_scaling)),
        ("term", "-A c w m log p / N = -([[advantage]] x [[weight]] x [[m]] x [[log-prob]]) / "
                 f"[[N]] = [[term]]{besides}. Its value moves nothing; what counts is its "
                 "gradient", where(policy_loss)),
        ("ratio", "[[ratio]]", where(policy_loss)),
        ("s", "the length of the gradient of log p at the logits: sqrt(1 - 2 p + sum p^2) = "
              "sqrt(1 - 2 x [[p]] + [[collision]]) = [[s]]", where(gradient_size)),
        ("gradient", "its size at the logits is abs(A) c w s = abs([[advantage]]) x [[weight]] x "
                     "[[s]] = [[gradient size]]. The loss takes m / N of it, which is "
                     "[[gradient size]] x [[m]] / [[N]] = [[gradient]]",
         where(grpo.log_probs)),
        ("push", "A c w s^2 = [[advantage]] x [[weight]] x [[s]]^2 = [[push]]: what this term "
                 "alone would do to log p, to first order, in a gradient step at the logits with "
                 "the rate 1", where(tokens_of)),
        # what the optimizer makes of the gradient of the whole batch
        ("clipping", "[[clipping]]", where(grpo.update)),
        ("AdamW", "it divides each parameter's gradient by the usual size of that gradient, which "
                  "in a first step is its own. So a parameter usually moves by at most about "
                  "[[rate]] (--learning_rate)", where(grpo.AdamW.step))]


def where(function: Callable[..., object]) -> str:
    """grpo.py:147 group_z_score"""
    line = ""
    with suppress(OSError, TypeError):  # it was typed at a prompt
        line = str(inspect.getsourcelines(function)[1])
    return f"{function.__module__.replace('.', '/')}.py:{line} {function.__qualname__}"


def chosen(axis: str, choices: Choices, s: SimpleNamespace) -> tuple[str, str]:
    """A method with its flags and the beginning of its help, and where it is defined."""
    name = getattr(s, axis)
    if name not in choices:  # deleted since
        return name, ""
    flags = ""
    for flag in flags_of(choices[name]):
        if hasattr(s, flag):
            flags += f" --{flag} {getattr(s, flag)}"
    paragraph = inspect.cleandoc(choices[name].__doc__ or "").split("\n\n")[0]
    help_text = textwrap.shorten(paragraph, 80, placeholder="...")
    return f"--{axis} {name}{flags}: {help_text}", where(choices[name])


def numbers_of(record: StepRecord, config: Mapping[str, object], line: Json | None,
               b: int) -> Numbers:
    """The numbers that the lines name, of answer b. `line` is the step's in metrics.jsonl."""
    s = SimpleNamespace(**{**DEFAULTS, **config})
    tokens, answers = record.tokens_of(b), record.answers
    is_dropped = s.drop_unfinished & ~answers["finished"]
    trained = torch.from_numpy(np.where(is_dropped, 0, answers["length"]))
    N, c = (line["N"], line["weight_factor"]) if line else (None, None)
    m = float(length_scaling(trained, s.loss_norm, s.max_new_tokens)[b, 0])
    each = m / (N or math.nan)  # of a token, in the mean that is the loss
    if is_dropped[b]:
        c, m, each = None, math.nan, math.nan
    return {
        "tokens": int(answers["length"][b]),
        "N": N,
        "batch": len(trained),
        "trained": int((trained > 0).sum()),
        "most": s.max_new_tokens,
        "c": rounded(c),
        "m": rounded(m),
        "dropped": NOT_TRAINED if is_dropped[b] else None,
        **numbers_of_step(line, s),
        **numbers_of_group(answers, b, getattr(s, "reward", "")),
        **numbers_of_advantage(record, s, b),
        **numbers_of_tokens(tokens, c, each),
        # the change of a dropped answer was not measured, and is on record as 0
        **({"p after": None} if is_dropped[b] else {})}


def numbers_of_step(line: Json | None, s: SimpleNamespace) -> Numbers:
    """What happened to the gradient of the whole batch, if it is on record. With several updates
    for each batch the ratio is a column of the credit file."""
    if not line or line["N"] is None:
        return {"ratio": None, "clipping": None, "rate": None}
    ratio = ONE_UPDATE if s.epochs == 1 else None
    norm, limit = line["gradient_norm"], s.max_grad_norm
    if norm is None:
        return {"ratio": ratio, "clipping": f"the step made no update: {line['skipped']}",
                "rate": None}
    clipping = ("the gradient of the whole batch, with respect to all parameters, has the norm "
                f"{rounded(norm)}")
    if limit and norm > limit:
        clipping += (f", above --max_grad_norm {limit:g}, so it is multiplied by {limit:g} / "
                     f"{rounded(norm)} = {rounded(limit / norm, 3)}")
    else:
        clipping += ", which is not clipped" + (f" (--max_grad_norm {limit:g})" if limit else "")
    return {"ratio": ratio, "clipping": clipping, "rate": rounded(s.learning_rate)}


def numbers_of_group(answers: dict[str, np.ndarray], b: int, formula: str) -> Numbers:
    """The rewards of the answer's group, and the parts of its own that the formula names."""
    reward, group = torch.from_numpy(answers["reward"]), torch.from_numpy(answers["group"])
    mean = group_mean(reward, group)
    std = group_mean((reward - mean).square(), group).sqrt()
    of_group = answers["reward"][answers["group"] == answers["group"][b]]
    rewards = Counter(map(rounded, of_group))
    parts = []
    for name, values in sorted(answers.items()):
        part = name.removeprefix(PART)
        is_named = not formula or re.search(rf"\b{re.escape(part)}\b", formula)
        if name.startswith(PART) and is_named and np.isfinite(values[b]):
            parts.append(f"{part} = {rounded(values[b])}")
    return {
        "answers": rewards.total(),
        "rewards": ", ".join(f"{count} got {value}" for value, count in rewards.most_common()),
        "mean": rounded(mean[b]),
        "std": rounded(std[b]),
        "reward": rounded(answers["reward"][b]),
        "parts": ", ".join(parts) or None}


def numbers_of_advantage(record: StepRecord, s: SimpleNamespace, b: int) -> Numbers:
    """The advantage by its formula, if that is what the record has."""
    computed = torch.tensor(math.nan)
    if s.advantage in FORMULAS:
        answers = record.answers
        one_token_each = SimpleNamespace(reward=torch.from_numpy(answers["reward"]),
                                         group=torch.from_numpy(answers["group"]),
                                         mask=torch.ones(len(answers["reward"]), 1))
        advantage = torch.as_tensor(ADVANTAGES[s.advantage](one_token_each))  # (B, 1)
        computed = advantage[b, 0]
    tokens = record.tokens_of(b)
    if np.allclose(tokens["advantage"][tokens["own"]], computed, atol=1e-5):
        return {"computed": rounded(computed), "recorded": None}
    return {"computed": None, "recorded": ""}


def numbers_of_tokens(tokens: TokenTable, c: float | None, each: float) -> Numbers:
    """Lists with one number for each token of the answer."""
    known: dict[str, np.ndarray] = {"p": np.exp(tokens["log_prob"]), "s": tokens["s"],
                                    "collision": tokens["collision"]}
    if "change" in tokens:
        known["p after"] = np.exp(tokens["log_prob"] + tokens["change"])
    # These get three digits. A reader who checks them computes with the rounded numbers above, so
    # a fourth digit would often differ.
    results = {
        "w": tokens["weight"] / (c or math.nan),
        "term": -tokens["advantage"] * tokens["weight"] * tokens["log_prob"] * each,
        "gradient": tokens["abs gradient"] * each}
    numbers: Numbers = {}
    for name, values in known.items():
        numbers[name] = list(map(rounded, values))
    for name, values in results.items():
        numbers[name] = [rounded(value, 3) for value in values]
    return {name: only_of_own(values, tokens) for name, values in numbers.items()}


def only_of_own(values: Value | list[Value], tokens: TokenTable) -> list[Value]:
    """The values of an answer's tokens; None at those that an environment wrote, because the model
    did not draw them."""
    of_tokens = values if isinstance(values, list) else []
    return [value if own else None for value, own in zip(of_tokens, tokens["own"])]


def rounded(value: float | torch.Tensor | None, digits: int = 4) -> float | None:
    """Four digits are enough for the eye and keep the page small."""
    if value is None or not math.isfinite(value):
        return None
    number = float(f"{value:.{digits}g}")
    return int(number) if number.is_integer() else number


def with_numbers(lines: list[Stage], answer: Mapping[str, Numbers], t: int) -> list[Stage]:
    """The lines, with the numbers of token t of an answer (answers.answer_of) put in."""
    known, filled = answer["account"] | answer["values"], []
    for label, text, function in lines:
        values = {}
        for name in NAMES.findall(text):
            value = known.get(name)
            values[name] = value[t] if isinstance(value, list) else value
        if None not in values.values():
            line = NAMES.sub(lambda found: str(values[found[1]]), text)
            filled.append((label, line, function))
    return filled
