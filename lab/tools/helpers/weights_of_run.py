"""The weights that a weighting would have given the recorded tokens of a run (lab idea --look).

Nothing is trained or written, and no model is loaded. So a weighting that needs hidden states,
attention or further samples is refused: `lab idea` first describes its weights in a few batches.
"""
import inspect
from pathlib import Path

import numpy as np
import torch

from grpo import gradient_size
from lab.analysis.answers import groups_in_order
from lab.analysis.run_folders import existing, read_credit, read_tokenizer
from lab.credit.weightings import drop_unfinished, rescaled_weight
from lab.engine.errors import UserError
from lab.engine.methods import ADVANTAGES, MITIGATIONS, make
from lab.engine.policy import derived_seed
from lab.engine.rollouts import Rollouts
from lab.engine.tokens import token_bytes, without_earlier_turns
from lab.harness.flags import flags_of
from lab.harness.read_record import credit_steps
from lab.harness.record import Json
from lab.harness.screen import put
from lab.harness.settings import LabSettings, settings_of_run
from lab.tools.helpers.look import about_gradient, differs_within
from lab.tools.helpers.terminal import legend, one_line, shaded
from lab.tools.helpers.token import check_exists

SHOWN = 4  # answers
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
    s = gradient_size(rollouts.log_prob, rollouts.collision)
    kind, *columns = (frame[rollouts.mask].numpy() for frame in (
        rollouts.kind, s, rollouts.advantage, rollouts.advantage, weight))
    return about_gradient(True, kind, *columns, differs_within(weight, rollouts.mask))


def weighed(folder: Path, step: int, s: LabSettings) -> tuple[Rollouts, torch.Tensor, dict]:
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


def headline(folder: Path, rollouts: Rollouts, s: LabSettings, metrics: dict) -> str:
    """Step 100 of runs/none-grpo-s0 has 256 answers and 12345 tokens. The weights of ..."""
    flags = s.keywords_of(MITIGATIONS[s.mitigation])
    typed = "".join(f" --{name} {value}" for name, value in flags.items())
    note = f"; {metrics['weight_note']}" if metrics["weight_note"] else ""
    answers, tokens = len(rollouts.mask), int(rollouts.mask.sum())
    return (f"Step {rollouts.step} of {folder} has {answers} answers and {tokens} tokens. The "
            f"weights of {s.mitigation}{typed} are multiplied by {metrics['weight_factor']:.3g} "
            f"(--rescale {s.rescale}){note}.")


def show_answers(rollouts: Rollouts, weight: torch.Tensor, tokenizer, answers: list[int]) -> None:
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
