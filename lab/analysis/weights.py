"""What do these weights do to these tokens? Sentences about a batch, sampled or recorded; and the
weights that a weighting would have given the recorded tokens of a run (`lab idea --look`).

The gradient's size at the logits is abs(A) w s for each token (grpo.gradient_size). So it is said
which kinds of token get more of the gradient than in plain GRPO, and how much of all weight the
heaviest tokens have.

For --look nothing is trained or written, and no model is loaded. So a weighting that needs hidden
states, attention or further samples is refused: `lab idea` first describes its weights in a few
batches.
"""
import inspect
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from grpo import gradient_size
from lab.analysis.answers import groups_in_order
from lab.analysis.run_folders import check_exists, existing, read_credit, read_tokenizer
from lab.analysis.shading import legend, one_line, shaded
from lab.analysis.shares import shares_by
from lab.engine.credited import drop_unfinished, rescaled_weight
from lab.engine.errors import UserError
from lab.engine.methods import ADVANTAGES, MITIGATIONS, make
from lab.engine.policy import derived_seed
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import KINDS, token_bytes, without_earlier_turns
from lab.harness.flags import flags_of
from lab.harness.read_record import credit_steps
from lab.harness.record import Json
from lab.harness.screen import put
from lab.harness.settings import LabSettings, settings_of_run

SHOWN = 4  # answers
TENTH = 0.1
ROUNDING = 1e-5  # weights that differ by no more than this share are equal
RARE = 0.005  # share of the gradient: a kind of token that has less is left out
SHADES = ((0.25, "48;5;255;38;5;0"), (0.5, "48;5;254;38;5;0"), (0.8, "48;5;195;38;5;0"),
          (1.25, "48;5;153;38;5;0"), (2.0, "48;5;111;38;5;0"), (4.0, "48;5;32;38;5;15"),
          (float("inf"), "48;5;18;38;5;15"))


def look_at_run(name: str, run: str, step: int | None, typed: Json) -> None:
    """Print what a weighting would have made of the recorded tokens of a step, and some answers
    shaded by their weights. `typed` has its flags and --rescale."""
    if name in ADVANTAGES:
        raise UserError(f"{name} is an advantage, and --look shows weights. Without --look what an "
                        "advantage does to the gradient is printed first")
    own = {"rescale", *flags_of(MITIGATIONS[name])}
    for flag in typed:
        if flag not in own:
            raise UserError(f"--{flag} has no effect with --look, because all else is as in the "
                            f"run. {name} takes {', '.join(f'--{one}' for one in sorted(own))}")
    folder = existing(run)
    steps = credit_steps(folder)
    if not steps:
        raise UserError(f"{folder} has no credit files yet")
    step = steps[-1] if step is None else step
    check_exists("step", step, steps, folder)
    # the run's own settings, with another weighting; its advantages are on record
    settings = settings_of_run(folder, advantage="grpo", placebo="none", device="cpu",
                               mitigation=name, **typed)
    rollouts, weight, metrics = weighed(folder, step, settings)
    print(headline(folder, rollouts, settings, metrics))
    print("\n".join(f"  {line}" for line in about_weights(rollouts, weight)))
    groups = groups_in_order(rollouts.group.numpy(), rollouts.reward.numpy())
    answers = np.concatenate(groups)[:SHOWN].tolist()
    show_answers(rollouts, weight, read_tokenizer(folder), answers)


def about_weights(rollouts: Rollouts, weight: torch.Tensor) -> list[str]:
    """Lines about what these weights do to the gradient of recorded tokens."""
    size = gradient_size(rollouts.log_prob, rollouts.collision)
    kind, s, advantage, given = (frame[rollouts.mask].numpy() for frame in (
        rollouts.kind, size, rollouts.advantage, weight))
    return about_gradient(True, kind, s, advantage, advantage, given,
                          differs_within(weight, rollouts.mask))


def weighed(folder: Path, step: int, s: LabSettings) -> tuple[Rollouts, torch.Tensor, Json]:
    """The batch of a step, its weights (B, T) as training would have made them, and the metrics."""
    weighting = MITIGATIONS[s.mitigation]
    if inspect.isclass(weighting):
        raise UserError(f"{s.mitigation} keeps a state or samples answers, which a record does not "
                        "have. Without --look it is looked at in a few batches of the model")
    generator = torch.Generator().manual_seed(derived_seed("credit", s.seed, step))
    rollouts = read_credit(folder, step, read_tokenizer(folder), generator=generator)
    method = make(weighting, s.keywords_of(weighting), None)
    batch = drop_unfinished(rollouts) if s.drop_unfinished else rollouts
    return rollouts, *rescaled_weight(method, s.mitigation, batch, None, s.rescale)


def headline(folder: Path, rollouts: Rollouts, s: LabSettings, metrics: Json) -> str:
    """Step 100 of runs/none-grpo-s0 has 256 answers and 12345 tokens. The weights of ..."""
    flags = s.keywords_of(MITIGATIONS[s.mitigation])
    typed = "".join(f" --{name} {value}" for name, value in flags.items())
    note = f"; {metrics['weight_note']}" if metrics["weight_note"] else ""
    answers, tokens = len(rollouts.mask), int(rollouts.mask.sum())
    return (f"Step {rollouts.step} of {folder} has {answers} answers and {tokens} tokens. The "
            f"weights of {s.mitigation}{typed} are multiplied by {metrics['weight_factor']:.3g} "
            f"(--rescale {s.rescale}){note}.")


def show_answers(rollouts: Rollouts, weight: torch.Tensor, tokenizer: Tokenizer,
                 answers: list[int]) -> None:
    put(f"\nthe weight of each token: {legend(SHADES) or 'it stands in brackets after the token'}")
    for b in answers:
        length = len(rollouts.texts[b])
        prompt = b"".join(token_bytes(tokenizer, rollouts.prompt_ids[int(rollouts.group[b])]))
        asked = one_line(without_earlier_turns(prompt.decode(errors="replace")))
        low, high = rollouts.advantage[b, :length].aminmax()
        span = f"{low:+.2f}" if low == high else f"{low:+.2f} to {high:+.2f}"
        print(f"\nanswer {b}, reward {rollouts.reward[b]:.2f}, advantage {span}, to {asked}")
        put(shaded(rollouts.texts[b], weight[b, :length].tolist(), SHADES,
                   lambda number: f"[{number:.2f}]"))


def differs_within(weight: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether some answer's tokens have different weights."""
    return bool(((weight != weight[:, :1]) & mask).any())


def share_gains(mine: np.ndarray, plain: np.ndarray) -> str:
    """word 1.50, number 0.67: by which factor each kind's share has grown, the largest first."""
    gains = {KINDS[k]: mine[k] / plain[k] for k in np.flatnonzero(plain > RARE)}
    largest_first = sorted(gains.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {gain:.2f}" for name, gain in largest_first)


def about_gradient(is_weighting: bool, kind: np.ndarray, s: np.ndarray, usual: np.ndarray,
                   advantage: np.ndarray, weight: np.ndarray,
                   tells_tokens_apart: bool = True,
                   as_returned: np.ndarray | None = None) -> list[str]:
    """Lines about some tokens, (n,) each: their kind, s, plain GRPO's advantage, and the idea's
    advantage and weight. `as_returned` are the weights before they were rescaled, if the tokens
    come from several batches: each batch has another factor, and with it equal weights would no
    longer be equal."""
    size, usual_size = np.abs(advantage * weight * s), np.abs(usual * s)
    gains = share_gains(shares_by(kind, size, len(KINDS)), shares_by(kind, usual_size, len(KINDS)))
    amount = weight if is_weighting else np.abs(advantage)
    order = amount if as_returned is None or not is_weighting else as_returned
    heaviest = amount[is_heaviest(order)]
    share = in_percent(len(heaviest) / len(amount))
    of_all = heaviest.sum() / max(amount.sum(), 1e-30)
    heaviest_tokens, sum_of_all = f"the heaviest {share} of the tokens", "all weight"
    if not is_weighting:
        heaviest_tokens = f"the {share} of the tokens with the largest advantages"
        sum_of_all = "the sum of abs(A)"
    if not usual_size.any():
        return ["no token has a gradient in plain GRPO, because all its advantages are 0: there is "
                "nothing to compare with"]
    lines = [f"each kind's share of the gradient, divided by its share in plain GRPO: {gains}",
             f"{heaviest_tokens} have {in_percent(of_all)} of {sum_of_all}"]
    if len(heaviest) == len(amount):
        lines[1] = "all tokens have the same share of " + sum_of_all
    if not is_weighting:
        both = (advantage != 0) & (usual != 0)
        turned = np.mean((advantage * usual)[both] < 0) if both.any() else 0.0
        return [*lines, "the sign of the new advantage differs from that of plain GRPO's at "
                        f"{turned:.0%} of the tokens where neither is 0"]
    if not tells_tokens_apart:
        return [*lines, "all tokens of an answer have the same weight, so no credit is moved "
                        "between them"]
    return lines


def is_heaviest(weight: np.ndarray) -> np.ndarray:
    """(n,) bool: about a tenth of the tokens, the heaviest. Those that have the same weight as the
    last of the tenth stay together: they are all in, or all out if that comes closer to a tenth,
    as it does where few tokens are lifted above all others."""
    of_last = np.sort(weight)[::-1][max(1, round(TENTH * len(weight))) - 1]
    with_equals = np.asarray(weight >= of_last * (1 - ROUNDING))
    without_equals = np.asarray(weight > of_last * (1 + ROUNDING))
    is_closer = TENTH - without_equals.mean() < with_equals.mean() - TENTH
    return without_equals if without_equals.any() and is_closer else with_equals


def in_percent(share: float) -> str:
    """A share below one percent has a digit more: it is not 0."""
    return f"{share:.1%}" if 0 < share < 0.01 else f"{share:.0%}"
