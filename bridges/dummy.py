"""A crash-test dummy for a whole trainer: one step of it is compared with the exact one.

A loss can be right, and the trainer around it wrong: answers sampled at another temperature than
they are trained at, groups that the loader mixes, gradients divided twice, frozen parameters, rows
that are filtered. The dummy is a reward function. It gives each answer a random number as reward,
and writes down which answers it saw. After one step of SGD the change of the parameters is a sum
over these answers,

    change = learning rate * sum over answers b of k_b * (gradient of the log-prob of answer b)

and least squares finds the numbers k_b. They say how the trainer made advantages and counted, as
in tools/formula.py; and what they do not explain says that something else was trained.

    dummy = Dummy("models/tiny")
    trainer = ...          # your trainer: this model, dummy.prompts, dummy.reward, SGD without
                           # clipping, momentum or warm-up, one step
    trainer.train()
    print("\\n".join(dummy.report(trainer.model, learning_rate)))

bridges/codes.md shows it with TRL.
"""
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import UserError
from tools.helpers.formula_advantages import Advantage, hypotheses
from tools.helpers.formula_batches import END, PAD, Case
from tools.helpers.formula_counts import counts
from tools.helpers.formula_fit import divided
from tools.helpers.formula_terms import Counted, fit_counted

PROBLEMS = ((3, 5, 7, 22), (2, 4, 9, 17), (1, 6, 8, 15), (5, 5, 6, 31), (2, 3, 10, 16),
            (4, 7, 8, 19), (1, 9, 12, 20), (3, 3, 8, 14))  # three numbers, and what they make
PROMPT = "<|im_start|>user\n{} {} {} make {}<|im_end|>\n<|im_start|>assistant\n<think>"
TEMPERATURES = (1.0, .9, .8, .7, .6, .5, 1.2, 1.5)
ROUNDING = 1e-3  # of the change: float32 leaves less over than this
ANSWER = frozenset(("first", "middle", "end", "cut", "unfinished"))


@dataclass(frozen=True)
class Seen:
    """An answer that the trainer has shown to the reward function."""
    prompt: int            # its number
    ids: tuple[int, ...]
    reward: float


class Dummy:
    def __init__(self, folder: str | Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.prompts = [PROMPT.format(*problem) for problem in PROBLEMS]
        self.seen: list[Seen] = []

    def reward(self, prompts: Sequence[str], completions: Sequence[str],
               completion_ids: Sequence[Sequence[int]] | None = None, **_: object) -> list[float]:
        """The rewards of these answers, each a number between 0 and 1 that a hash gives. Equal
        answers have equal rewards, because their gradients are equal and cannot be told apart."""
        rewards = []
        for row, (prompt, text) in enumerate(zip(prompts, completions)):
            if completion_ids is None:
                ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
            else:
                ids = tuple(int(token) for token in completion_ids[row])
            if prompt not in self.prompts:
                raise UserError(f"the trainer asks for the reward of the prompt {prompt!r}, which "
                                "is none of the dummy's: a template was put around it")
            digest = hashlib.sha256(repr((prompt, ids)).encode()).digest()
            self.seen.append(Seen(self.prompts.index(prompt), ids, digest[0] / 255))
            rewards.append(self.seen[-1].reward)
        return rewards

    def report(self, trained: torch.nn.Module, learning_rate: float) -> list[str]:
        """What the step was, in sentences."""
        return Step(self, trained, learning_rate).sentences()


class Step:
    """One step of a trainer: the change of the parameters, and the answers that it was made of."""

    def __init__(self, dummy: Dummy, trained: torch.nn.Module, learning_rate: float):
        if not dummy.seen:
            raise UserError("the reward function was never called, so nothing is known of the step")
        self.dummy = dummy
        after = dict(trained.named_parameters())
        self.named = {name: parameter for name, parameter in dummy.model.named_parameters()}
        missing = self.named.keys() - after.keys()
        if missing:
            raise UserError(f"the trained model has no {sorted(missing)[0]}: it is another model")
        change = {name: (after[name].detach().cpu().double() - before.detach().double())
                  / learning_rate for name, before in self.named.items()}
        self.frozen = [name for name, value in change.items() if not value.any()]
        self.moving = [name for name in change if name not in self.frozen]
        self.is_still = not self.moving
        if not self.is_still:
            self.change = torch.cat([change[name].flatten() for name in self.moving])
            self.temperature, self.pushes, self.left_over = self.best_temperature()

    def best_temperature(self) -> tuple[float, Tensor, float]:
        tries = []
        for temperature in TEMPERATURES:
            pushes, rest = self.pushes_at(temperature)
            tries.append((rest, temperature, pushes))
            if rest < ROUNDING:
                break
        rest, temperature, pushes = min(tries, key=lambda found: found[0])
        return temperature, pushes, rest

    def pushes_at(self, temperature: float) -> tuple[Tensor, float]:
        """(k_b of each answer, share of the change that they leave over)."""
        rows = torch.stack([self.gradient_of(seen, temperature) for seen in self.dummy.seen])
        # of equal answers only the sum is known: the shortest solution gives each the same part
        solution = torch.linalg.lstsq(rows.T, self.change[:, None], driver="gelsd").solution
        pushes = solution.squeeze(1)
        rest = self.change - pushes @ rows
        return pushes, float(rest.norm() / self.change.norm())

    def gradient_of(self, seen: Seen, temperature: float) -> Tensor:
        """The gradient of the log-prob of an answer, by all parameters that moved."""
        log_prob = self.log_probs(seen, temperature)[0].sum()
        parameters = [self.named[name] for name in self.moving]
        parts = torch.autograd.grad(log_prob, parameters, allow_unused=True)
        return torch.cat([torch.zeros_like(parameter).flatten() if part is None else part.flatten()
                          for parameter, part in zip(parameters, parts)]).double()

    def log_probs(self, seen: Seen, temperature: float) -> tuple[Tensor, Tensor]:
        """(log-prob of each token of the answer, all log-probs at its places)."""
        prompt = self.dummy.tokenizer(self.dummy.prompts[seen.prompt])["input_ids"]
        ids = torch.tensor([*prompt, *seen.ids])
        logits = self.dummy.model(ids[None]).logits[0, len(prompt) - 1:-1].float()
        log_p = (logits / temperature).log_softmax(-1)
        return log_p.gather(1, ids[len(prompt):, None]).squeeze(1), log_p

    # ------------------------------------------------------------------ what it says
    def case(self) -> Case:
        """The batch as tools/formula.py describes one: its rewards, groups and lengths."""
        seen = self.dummy.seen
        length = torch.tensor([len(one.ids) for one in seen])
        end = self.dummy.tokenizer.eos_token_id
        ids = torch.full((len(seen), int(length.max()) + 1), PAD)
        for row, one in enumerate(seen):
            ids[row, 1:1 + len(one.ids)] = 0
            if one.ids[-1] == end:
                ids[row, len(one.ids)] = END
        group = torch.tensor([one.prompt for one in seen]).unique(return_inverse=True)[1]
        reward = torch.tensor([one.reward for one in seen], dtype=torch.float64)
        nothing = torch.zeros(ids.shape, dtype=torch.float64)
        return Case(nothing[..., None], ids, torch.ones_like(length), length, reward, group,
                    nothing, nothing)

    def formula(self) -> tuple[Advantage, Counted] | None:
        """Advantage and counting that explain the pushes; None if none do."""
        case, fits = self.case(), []
        for grouping in ("group", "mixed"):
            for advantage in hypotheses([case], [self.pushes], grouping):
                if advantage.epsilon > 1e-2 or advantage.form != "plus":
                    continue  # from one batch in float32 epsilon cannot be told
                number = divided(self.pushes, advantage(case))
                fits += [(advantage, fit) for fit in
                         fit_counted([case], [number], counts(ANSWER), ROUNDING)
                         if not fit.sizes.cost]
        if not fits:
            return None
        return min(fits, key=lambda fit: (abs(abs(fit[1].factor) - 1) > ROUNDING,
                                          not is_short(fit[1].factor),
                                          fit[0].cost + fit[1].count.cost))

    def sentences(self) -> list[str]:
        if self.is_still:
            return ["No parameter has changed: this step trains nothing."]
        said = [about_sampling(*self.sampling())]
        if self.frozen:
            said.append(f"Frozen: {len(self.frozen)} of {len(self.named)} tensors have not "
                        f"changed, such as {self.frozen[0]}.")
        if self.left_over > ROUNDING:
            return [*said, f"Not understood: {self.left_over:.1%} of the change is no sum of the "
                    "gradients of the answers that the reward function saw, at any temperature "
                    "that was tried."]
        said.append(f"Log-probs: at temperature {self.temperature:g}.")
        untrained = int((self.pushes.abs() < ROUNDING * self.pushes.abs().max()).sum())
        if untrained:
            said.append(f"Filtered: {untrained} of {len(self.pushes)} answers have had no effect.")
        found = self.formula()
        if found is None:
            return [*said, "Not understood: advantage and counting. The answers' numbers fit no "
                    "pair of known ones."]
        advantage, count = found
        about_epsilon = ""
        if advantage.scale != "none":
            about_epsilon = ", and an epsilon that one step does not show"
        plain = replace(advantage, epsilon=0.0).words().removesuffix(" without an epsilon")
        said.append(f"Advantage: {plain}{about_epsilon}.")
        if advantage.grouping == "mixed":
            said.append("Groups: they are mixed. Each answer is compared with answers to other "
                        "problems.")
        times = "" if abs(count.factor - 1) < ROUNDING else f", times {count.factor:.3g}"
        said.append(f"Counting: {count.words()}{times}.")
        if times and "std" in advantage.scale:
            said.append("Std over n and over n - 1 differ by a factor. As the step has another "
                        "factor than 1, which of the two it is cannot be told apart.")
        said.append(f"This explains the change of the parameters to {self.left_over:.0e} of it.")
        return said

    @torch.no_grad()
    def sampling(self) -> tuple[float, float, float]:
        """(temperature at which the answers were most likely sampled, its standard error, the
        largest probability of all tokens that are likelier than a sampled one)."""
        columns = [self.log_probs(seen, 1.0) for seen in self.dummy.seen]
        log_p = torch.cat([column[1] for column in columns]).double()
        ids = torch.tensor([token for seen in self.dummy.seen for token in seen.ids])
        p_of_likelier = torch.where(log_p > log_p.gather(1, ids[:, None]), log_p.exp(), 0.0).sum(1)
        inverse = 1.0
        for _ in range(50):  # Newton's method for the likelihood's maximum
            tilted = (inverse * log_p).log_softmax(-1).exp()
            mean = (tilted * log_p).sum(1)
            slope = (log_p.gather(1, ids[:, None]).squeeze(1) - mean).sum()
            curve = ((tilted * log_p.square()).sum(1) - mean.square()).sum()
            inverse = max(.1, inverse + float(slope / curve))
        error = float(curve) ** -.5 / inverse ** 2
        return 1 / inverse, error, float(p_of_likelier.max())


def is_short(factor: float) -> bool:
    """Whether two digits say it."""
    return abs(float(f"{factor:.2g}") / factor - 1) < ROUNDING


def about_sampling(temperature: float, error: float, likelier: float) -> str:
    said = f"Sampling: most likely at temperature {temperature:.2f} (standard error {error:.2f})"
    if likelier < .97:
        said += (f"; no token was drawn beyond the likeliest ones that have {likelier:.2f} of the "
                 "probability, as with a top-p or top-k")
    return said + "."
