"""Which flags of train.py have the gradient of a loss, and what each token of one answer gets.

The project's own gradient is computed by the functions of grpo.py on the same batches.
"""
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch
from torch import Tensor

import mitigations  # noqa: F401  fills the list of advantages
from credit.clips import clipped_loss
from engine.choices import ADVANTAGES
from grpo import divergence, length_scaling, policy_loss
from tools.helpers.formula_batches import Case, make_case, noise_like
from tools.helpers.formula_decode import Examined
from tools.helpers.formula_measured import Formula
from tools.helpers.formula_ratio_words import name_of
from tools.helpers.formula_shapes import FLAT

PLAIN = ("grpo", "dr_grpo", "rloo", "batch_mean")
CLIPS = {"dual": "dual", "gspo": "gspo", "cispo": "cispo", "sapo": "sapo",  # by a word of the name
         "gmpo": "gmpo"}
SAME = 1e-6


@dataclass(frozen=True)
class Flags:
    advantage: str = "grpo"
    loss_norm: str = "token"
    max_new_tokens: float = 0.0
    clip: tuple[float, float] | None = None
    clip_kind: str = "ppo"
    temperature: float = 1.0       # the log-probs of a case have that of its lens
    kl: float = 0.0
    kl_kind: str = "k3"

    def words(self) -> str:
        said = [f"--advantage {self.advantage} --loss_norm {self.loss_norm}"]
        if self.loss_norm == "constant":
            said.append(f"--max_new_tokens {self.max_new_tokens:g}")
        if self.clip:
            said.append(f"--epochs 2 --clip_low {self.clip[0]:g} --clip_high {self.clip[1]:g}")
        if self.clip and self.clip_kind != "ppo":
            said.append(f"--clip_kind {self.clip_kind}")
        if self.temperature != 1:
            said.append(f"--temperature {self.temperature:g}")
        if self.kl:
            said.append(f"--kl {self.kl:g} --kl_kind {self.kl_kind}")
        return " ".join(said)

    def push(self, case: Case) -> Tensor:
        """(B, L) the push of each token, from grpo.py."""
        rollouts = SimpleNamespace(reward=case.reward, group=case.group, mask=case.mask,
                                   length=case.length)
        advantage = ADVANTAGES[self.advantage](rollouts)
        scale = length_scaling(case.length, self.loss_norm, self.max_new_tokens).double()
        weight = scale * torch.ones_like(case.log_prob)
        log_prob = case.log_prob.clone().requires_grad_(True)
        old = case.log_prob - case.log_ratio if self.clip else None
        N = int(case.mask.sum())
        loss_of = policy_loss if self.clip_kind == "ppo" else clipped_loss(self.clip_kind)
        loss = loss_of(log_prob, advantage.double(), weight, case.mask, N, old,
                       self.clip or (0.2, 0.28))
        if self.kl:
            kl = divergence(log_prob, case.log_prob + case.log_reference, self.kl_kind)
            loss = loss + self.kl * (scale * kl * case.mask).sum() / N
        loss.backward()
        return -log_prob.grad


def tries(formula: Formula) -> Iterator[Flags]:
    """Combinations of flags, with the numbers that were found."""
    kl, kind = 0.0, "k3"
    name = name_of(formula.ratio)[0] if formula.ratio is not None else "no ratio"
    bounds = re.findall(r"\d[\d.e-]*", name)
    clip = (float(bounds[0]), float(bounds[1])) if len(bounds) > 1 else None
    clip_kind = next((known for word, known in CLIPS.items() if word in name), "ppo")
    if len(formula.terms) == 1 and formula.terms[0].kind in ("k2", "k3"):
        kl, kind = formula.terms[0].weight.factor, formula.terms[0].kind
    limit = 1.0
    if formula.count is not None and formula.count.count.code == "flat":
        limit = 1 / abs(formula.count.factor)
    for advantage, norm in itertools.product(PLAIN, ("token", "sequence", "constant")):
        yield Flags(advantage, norm, limit, clip, clip_kind, formula.temperature, kl, kind)


def about_flags(formula: Formula) -> list[str]:
    """Sentences: the flags with the same gradient, or what the project lacks."""
    examined = formula.examined
    cases = [make_case(seed, lens=examined.lens) for seed in (61, 62)]
    near = [moved(case, .1) for case in cases]
    far = [moved(case, size) for case in cases for size in (.8, 12.0)]
    close = None
    for flags in tries(formula) if formula.shift == 1 else ():
        factor, rest = compared(examined, flags, cases if not flags.kl and not flags.clip else near)
        if rest > SAME:
            continue
        is_same_far = compared(examined, flags, far)[1] <= SAME
        times = "" if abs(factor - 1) <= SAME else f", times {factor:.6g}"
        said = f"The same gradient here: python train.py {flags.words()}{times}."
        if not is_same_far:
            said += (" This holds as long as a batch is trained on once, and the reference model "
                     "is near. Where the ratio is far from 1, or the reference far away, the two "
                     "differ.")
        close = close or said
        if is_same_far and not times:
            return [said]
    return [close] if close else [about_missing(formula)]


def moved(case: Case, size: float) -> Case:
    return replace(case, log_ratio=noise_like(case, 63, size) * case.mask,
                   log_reference=noise_like(case, 64, size) * case.mask)


def compared(examined: Examined, flags: Flags, cases: list[Case]) -> tuple[float, float]:
    """(factor, what is left over): the loss's gradient as a multiple of that of the flags."""
    theirs = torch.cat([examined.push(case).flatten() for case in cases])
    ours = torch.cat([flags.push(case).flatten() for case in cases])
    factor = float((theirs * ours).sum() / ours.square().sum())
    return factor, float((theirs - factor * ours).norm() / theirs.norm())


def about_missing(formula: Formula) -> str:
    lacking = []
    if formula.advantage is not None and formula.advantage.code not in (
            "z n 0.0001", "mean", "leave one out", "batch mean"):
        lacking.append(f"the advantage {formula.advantage.code}")
    if formula.count is not None and formula.count.count.code not in ("token", "answer", "flat"):
        lacking.append(f"this way of counting ({formula.count.count.code})")
    if formula.selection is not None:
        lacking.append(f"this choice of tokens ({formula.selection.code}; see --mitigation "
                       "entropy_masking)" if "entropy" in formula.selection.code else
                       f"this choice of tokens ({formula.selection.code})")
    if formula.shape is not None and formula.shape is not FLAT:
        lacking.append(f"the {formula.shape.code} (see --mitigation)")
    if formula.ratio is not None and name_of(formula.ratio)[0].split()[0] not in (
            "no", "clip", "ratio", *CLIPS):
        lacking.append(f"this use of the ratio ({name_of(formula.ratio)[0]})")
    if formula.entropy is not None:
        lacking.append("an entropy term (--entropy_bonus has its gradient on average)")
    if any(term.kind not in ("k2", "k3") for term in formula.terms):
        lacking.append("this term without reward")
    what = "; it lacks " + ", ".join(lacking) if lacking else ""
    return f"No flags of train.py that were tried have this gradient{what}."


def table_of_tokens(formula: Formula) -> str:
    """What each token of one answer gets, beside plain GRPO."""
    examined = formula.examined
    case = make_case(65, lens=examined.lens)
    push, plain = examined.push(case), Flags().push(case)
    row = int((case.ended & (case.reward > .5)).nonzero()[0])
    start, stop = int(case.prompt_length[row]), int(case.prompt_length[row] + case.length[row])
    lines = [f"One answer of {stop - start} tokens, reward {case.reward[row]:.2f}: what each token "
             "gets, in thousandths", f"{'token':>16s}  {'this loss':>10s}  {'plain GRPO':>10s}"]
    for j in range(1, case.ids.shape[1]):
        name = "prompt" if j < start else f"answer {j - start + 1}" if j < stop - 1 else \
            "its end" if j < stop else "padding"
        own, other = (round(1e3 * float(value[row, j]), 3) + 0.0 for value in (push, plain))
        lines.append(f"{name:>16s}  {own:10.3f}  {other:10.3f}")
    return "\n".join(lines)
