"""One step of a whole trainer, read off the change of the parameters: the work of dummy.py.

After one step of SGD the change of the parameters is a sum over the answers that were rewarded,

    change = learning rate * sum over answers b of k_b * (gradient of the log-prob of answer b)

and least squares finds the numbers k_b. They say how the trainer made advantages and counted, as in
lab/formula; and what they do not explain says that something else was trained.
"""
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.errors import UserError
from lab.formula.batches import END, PAD, Batch
from lab.formula.credit import advantages_of, every, usual
from lab.formula.ours import Formula
from lab.formula.tables import COUNTS
from lab.formula.words import about_advantage, about_count

TEMPERATURES = (1.0, .9, .8, .7, .6, .5, 1.2, 1.5)
TEMPLATES = {  # what a trainer may put around a prompt
    "as it is": "{}", "a turn of a conversation, once more": "<|im_start|>user\n{}<|im_end|>\n"
    "<|im_start|>assistant\n", "a user's turn without the assistant's": "<|im_start|>user\n{}"
    "<|im_end|>\n", "a line break after it": "{}\n", "a space after it": "{} ",
    "an end token before it": "<|im_end|>{}"}
UNTRAINED = {  # tokens of an answer that a trainer may leave out, as lab/formula names them
    "": (), "the end token of an answer has no gradient": ("end",),
    "the first token of an answer has no gradient": ("first",),
    "the first and the end token of an answer have no gradient": ("first", "end")}
ROUNDING = 1e-3  # of the change: float32 leaves less over than this
SHOWN = 1e-5     # a smaller epsilon does not show in one step
PLACES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # so many first tokens are tried


@dataclass(frozen=True)
class Seen:
    """An answer that the trainer has shown to the reward function."""
    prompt: int            # its number
    ids: tuple[int, ...]
    reward: float


@dataclass(frozen=True)
class Found:
    """How advantage and counting explain the answers' numbers, under what is said in `remarks`."""
    formula: Formula
    remarks: tuple[str, ...] = ()


class Step:
    """One step of a trainer: the change of the parameters, and the answers that it was made of.
    `before` is the model before the step, and `prompts` are those that `seen` numbers."""

    def __init__(self, before: Any, tokenizer: Any, prompts: list[str], seen: list[Seen],
                 trained: torch.nn.Module, learning_rate: float):
        if not seen:
            raise UserError("the reward function was never called, so nothing is known of the step")
        self.model, self.tokenizer, self.prompts, self.seen = before, tokenizer, prompts, seen
        after = dict(trained.named_parameters())
        self.named = dict(before.named_parameters())
        missing = self.named.keys() - after.keys()
        if missing:
            raise UserError(f"the trained model has no {sorted(missing)[0]}: it is another model")
        change = {name: (after[name].detach().cpu().double() - start.detach().double())
                  / learning_rate for name, start in self.named.items()}
        self.frozen = [name for name, value in change.items() if not value.any()]
        self.moving = [name for name in change if name not in self.frozen]
        self.is_still = not self.moving
        self.untrained = ""
        self.has_dropout = differs_between_passes(trained, tokenizer(prompts[0])["input_ids"])
        if not self.is_still:
            self.change = torch.cat([change[name].flatten() for name in self.moving])
            self.explain()

    def explain(self) -> None:
        """Find the temperature, or else the template, with which the answers' gradients explain
        most of the change."""
        self.template, self.temperature, self.left_over = "as it is", 1.0, float("inf")
        tries = [("as it is", temperature) for temperature in TEMPERATURES]
        tries += [(template, 1.0) for template in TEMPLATES]
        for template, temperature in tries:
            pushes, rest = self.pushes_at(temperature, TEMPLATES[template])
            if rest < self.left_over:
                self.template, self.temperature = template, temperature
                self.pushes, self.left_over = pushes, rest
            if rest < ROUNDING:
                return
        self.template = "as it is"  # none fits, so the sampler is read without one
        for words in UNTRAINED:
            pushes, rest = self.pushes_at(1.0, untrained=words)
            if rest < ROUNDING:
                self.temperature, self.untrained = 1.0, words
                self.pushes, self.left_over = pushes, rest
                return

    def pushes_at(self, temperature: float, template: str = "{}",
                  untrained: str = "") -> tuple[Tensor, float]:
        """(k_b of each answer, share of the change that they leave over)."""
        rows = torch.stack([self.gradient_of(seen, temperature, template, untrained)
                            for seen in self.seen])
        # of equal answers only the sum is known: the shortest solution gives each the same part
        solution = torch.linalg.lstsq(rows.T, self.change[:, None], driver="gelsd").solution
        pushes = solution.squeeze(1)
        rest = self.change - pushes @ rows
        return pushes, float(rest.norm() / self.change.norm())

    def gradient_of(self, seen: Seen, temperature: float, template: str, untrained: str,
                    places: slice = slice(None)) -> Tensor:
        """The gradient of the log-prob of an answer, by all parameters that moved."""
        log_probs = self.log_probs(seen, temperature, template)[0]
        start = 1 if "first" in UNTRAINED[untrained] else 0
        has_end = seen.ids[-1] == self.tokenizer.eos_token_id
        leaves_out_end = "end" in UNTRAINED[untrained] and has_end
        log_prob = log_probs[start:len(log_probs) - leaves_out_end][places].sum()
        parameters = [self.named[name] for name in self.moving]
        parts = torch.autograd.grad(log_prob, parameters, allow_unused=True)
        return torch.cat([torch.zeros_like(parameter).flatten() if part is None else part.flatten()
                          for parameter, part in zip(parameters, parts)]).double()

    def log_probs(self, seen: Seen, temperature: float,
                  template: str = "{}") -> tuple[Tensor, Tensor]:
        """(log-prob of each token of the answer, all log-probs at its places)."""
        text = template.format(self.prompts[seen.prompt])
        prompt = self.tokenizer(text)["input_ids"]
        ids = torch.tensor([*prompt, *seen.ids])
        logits = self.model(ids[None]).logits[0, len(prompt) - 1:-1].float()
        log_p = (logits / temperature).log_softmax(-1)
        return log_p.gather(1, ids[len(prompt):, None]).squeeze(1), log_p

    # ------------------------------------------------------------------ advantage and counting
    def batch(self) -> Batch:
        """The batch as lab/formula describes one: its rewards, groups and lengths."""
        length = torch.tensor([len(one.ids) for one in self.seen])
        end = self.tokenizer.eos_token_id
        ids = torch.full((len(self.seen), int(length.max()) + 1), PAD)
        for row, one in enumerate(self.seen):
            ids[row, 1:1 + len(one.ids)] = 0
            if one.ids[-1] == end:
                ids[row, len(one.ids)] = END
        place = torch.arange(ids.shape[1])
        mask = ((place >= 1) & (place < 1 + length[:, None])).double()
        group = torch.tensor([one.prompt for one in self.seen]).unique(return_inverse=True)[1]
        reward = torch.tensor([one.reward for one in self.seen], dtype=torch.float64)
        nothing = torch.zeros(ids.shape, dtype=torch.float64)
        return Batch(ids, torch.ones_like(length), mask, reward, group, nothing, nothing, END, PAD)

    def find(self) -> Found | None:
        """The first reading of the batch in which known advantages and counts explain the
        pushes."""
        for batch, pushes, remarks in self.readings():
            formula = explained(batch, pushes, UNTRAINED[self.untrained],
                                usual_alone=bool(remarks))
            if formula and formula.groups == "mixed":
                remarks += ("Groups: they are mixed. Each answer is compared with answers to other "
                            "problems.",)
            if formula:
                return Found(formula, remarks)
        return None

    def readings(self) -> Iterator[tuple[Batch, Tensor, tuple[str, ...]]]:
        """The batch as it was seen, and as some mistakes change it: answers that are left out, and
        rewards that go to other answers."""
        batch, pushes = self.batch(), self.pushes
        B, groups = len(pushes), int(batch.group.max()) + 1
        trained = self.trained()
        if trained.all():
            yield batch, pushes, ()
        else:
            yield (rows_of(batch, trained), pushes[trained],
                   ("Baseline: it is that of the answers that had an effect.",))
            yield (batch, torch.where(trained, pushes, torch.nan),
                   ("Baseline: the answers without an effect are part of it.",))
        rows = torch.arange(B)
        orders = {"row by row where they were made column by column":
                  rows.view(groups, -1).T.flatten() if B % groups == 0 else rows,
                  "column by column where they were made row by row":
                  rows.view(-1, groups).T.flatten() if B % groups == 0 else rows,
                  "one row too late": rows.roll(1), "one row too early": rows.roll(-1),
                  "in reverse order": rows.flip(0)}
        for parts, way in itertools.product((2, 4), (1, -1)):
            name = "before" if way == 1 else "after"
            orders[f"those of the part {name} theirs, if the batch has {parts} parts"] = \
                rows.roll(way * B // parts)
        for words, order in orders.items():
            yield (replace(batch, reward=batch.reward[order]), pushes,
                   (f"Rewards: they go to other answers, {words}.",))
        for size in (batch.mask.sum(1), torch.ones(B)):  # counted by answer, or by token
            reward = sorted_as(batch.reward, pushes * size, batch.group)
            yield (replace(batch, reward=reward), pushes,
                   ("Rewards: within each group they go to other answers.",))

    def trained(self) -> Tensor:
        """(B,) whether an answer had an effect."""
        return self.pushes.abs() > .1 * ROUNDING * self.pushes.abs().max()

    # ------------------------------------------------------------------ what it says
    def sentences(self) -> list[str]:
        if self.is_still:
            return ["No parameter has changed: this step trains nothing."]
        said = [about_sampling(*self.sampling())]
        if self.frozen:
            said.append(f"Frozen: {len(self.frozen)} of {len(self.named)} tensors have not "
                        f"changed, such as {self.frozen[0]}.")
        if self.has_dropout:
            said.append("Dropout: in training mode two passes over the same tokens differ. So the "
                        "step is that of another model at each pass, and cannot be read to all "
                        "digits; the log-probs of sampler and loss differ, too.")
        if self.left_over > ROUNDING:
            return [*said, f"Not understood: {self.left_over:.1%} of the change is no sum of the "
                    "gradients of the answers that the reward function saw, at any temperature "
                    "and in any template that was tried.", *self.measured()]
        said.append(f"Log-probs: at temperature {self.temperature:g}.")
        if self.template != "as it is":
            said.append("Template: the trainer puts something around the prompts. What it has "
                        f"trained on fits {self.template}.")
        if self.untrained:
            said.append(f"Tokens: {self.untrained}.")
        if not self.trained().all():
            said.append(f"Filtered: {int((~self.trained()).sum())} of {len(self.pushes)} answers "
                        "have had no effect.")
        found = self.find()
        if found is None:
            return [*said, "Not understood: advantage and counting. The answers' numbers fit no "
                    "pair of known ones.", *self.measured()]
        said += about_formula(found)
        norm = float(self.change.norm())
        if not is_short(found.formula.factor) and abs(float(f"{norm:.2g}") / norm - 1) < 1e-4:
            said.append(f"Clipped: the step has a norm of {norm:.2g}, as where the norm of the "
                        "gradient is clipped to that.")
        return [*said,
                f"This explains the change of the parameters to {self.left_over:.0e} of it."]

    # ------------------------------------------------------------------ what was measured
    def measured(self) -> list[str]:
        """Where the step differs from a known formula: by tensor, by the place of a token in its
        answer, and by answer. A number is over that of the other tensors, or of the nearest
        formula: 1 is as it should be, 0 is not trained, 2 is counted twice."""
        self.rows = torch.stack([self.gradient_of(seen, 1.0, "{}", "") for seen in self.seen])
        by_tensor = self.numbers_by_tensor()
        whole = [number for number, rest in by_tensor.values() if rest < ROUNDING]
        if whole:
            self.pushes = torch.stack(whole).median(0).values
            return ["What was measured:", *self.by_tensor(by_tensor), self.by_answer()]
        return ["What was measured:", *self.by_place()]

    def numbers_by_tensor(self) -> dict[str, tuple[Tensor, float]]:
        """For each tensor the answers' numbers by its change alone, and the share that they leave
        over."""
        found, start = {}, 0
        for name in self.moving:
            size = self.named[name].numel()
            rows, change = self.rows[:, start:start + size], self.change[start:start + size]
            start += size
            if size > 20 * len(self.seen):
                number = torch.linalg.lstsq(rows.T, change[:, None], driver="gelsd").solution[:, 0]
                rest = float((change - number @ rows).norm() / change.norm())
                found[name] = (number, rest)
        return found

    def by_tensor(self, by_tensor: dict[str, tuple[Tensor, float]]) -> list[str]:
        """The tensors that have another number than the rest, or another step."""
        usual, said = self.pushes, []
        for name, (number, rest) in by_tensor.items():
            times = float(number @ usual / usual.square().sum())
            if rest > ROUNDING:
                said.append(f"  {name}: {rest:.1%} of its change is no sum of the answers' "
                            "gradients")
            elif abs(times - 1) > .01:
                said.append(f"  {name}: {times:.2f} times the step of the other tensors")
        return said or [f"  all {len(by_tensor)} large tensors have the same step"]

    def by_answer(self) -> str:
        """How often each quotient of an answer's number and that of the nearest formula occurs."""
        batch, best = self.batch(), (0, -math.inf, "", torch.ones(1))
        n, formulas = batch.mask.sum(1), usual(Formula())
        advantages = advantages_of(formulas, batch)
        for formula, advantage in zip(formulas, advantages):
            for count in ("token", "answer", "group"):
                quotient = self.pushes / (advantage * COUNTS[count](n, batch))
                quotient = torch.where(advantage.abs() > 1e-3, quotient, torch.nan)
                typical = float(quotient.nanmedian())
                same = int(((quotient / typical - 1).abs() < .01).sum())
                words = f"{about_advantage(formula)}; {about_count(replace(formula, count=count))}"
                best = max(best, (same, -abs(typical - 1), words, quotient),
                           key=lambda one: one[:2])
        rows: dict[str, list[int]] = {}
        for row, value in enumerate(best[3].tolist()):
            if not math.isnan(value):
                rows.setdefault(f"{value:.2f}", []).append(row)
        parts = [f"{value} for {len(given)} answers ({span(given)})"
                 for value, given in sorted(rows.items(), key=lambda pair: -len(pair[1]))]
        return (f"  each answer's number over that of the nearest formula ({best[2]}): "
                f"{', '.join(parts[:6])}" + (", ..." if len(parts) > 6 else ""))

    def by_place(self) -> list[str]:
        """How much of the change the first tokens of each answer explain, of so many."""
        longest = max(len(one.ids) for one in self.seen)
        rest = {count: self.left_over_by_first(count)
                for count in sorted({*(p for p in PLACES if 0 < p < longest), longest})}
        best = min(rest, key=rest.get)
        near = [count for count in range(best - 8, best + 8) if 0 < count <= longest]
        rest |= {count: self.left_over_by_first(count) for count in near}
        best = min(rest, key=rest.get)
        if rest[best] < ROUNDING:
            return [f"  the first {best} tokens of each answer alone explain the change, to "
                    f"{rest[best]:.0e}: what comes after them has no gradient"]
        shown = ", ".join(f"{count} tokens: {rest[count]:.1%}" for count in PLACES if count in rest)
        return [f"  left over by the first tokens of each answer alone: {shown}"]

    def left_over_by_first(self, count: int) -> float:
        rows = torch.stack([self.gradient_of(one, 1.0, "{}", "", slice(0, count))
                            for one in self.seen])
        fit = torch.linalg.lstsq(rows.T, self.change[:, None], driver="gelsd").solution[:, 0]
        return float((self.change - fit @ rows).norm() / self.change.norm())

    @torch.no_grad()
    def sampling(self) -> tuple[float, float, float]:
        """(temperature at which the answers were most likely sampled, its standard error, the
        largest probability of all tokens that are likelier than a sampled one)."""
        template = TEMPLATES[self.template]
        columns = [self.log_probs(seen, 1.0, template) for seen in self.seen]
        log_p = torch.cat([column[1] for column in columns]).double()
        ids = torch.tensor([token for seen in self.seen for token in seen.ids])
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


def differs_between_passes(model: torch.nn.Module, ids: list[int]) -> bool:
    """Whether two passes over the same tokens in training mode differ, as with dropout."""
    was_training = model.training
    device = next(model.parameters()).device
    model.train()
    with torch.no_grad():
        first, second = (model(torch.tensor([ids], device=device)).logits for _ in range(2))
    model.train(was_training)
    return not torch.equal(first, second)


def rows_of(batch: Batch, kept: Tensor) -> Batch:
    """The batch of these rows alone. Groups are numbered from 0 again."""
    by_row = ("ids", "prompt_length", "mask", "reward", "old_log_prob", "reference_log_prob")
    taken = {name: getattr(batch, name)[kept] for name in by_row}
    return replace(batch, **taken, group=batch.group[kept].unique(return_inverse=True)[1])


def explained(batch: Batch, pushes: Tensor, untrained: tuple[str, ...],
              usual_alone: bool) -> Formula | None:
    """The simplest advantage and counting that explain the pushes. A push that is NaN may be
    anything."""
    known = torch.isfinite(pushes)
    wanted = torch.where(known, pushes, 0.0)
    whole = batch.mask.sum(1)
    lengths = {"": whole, "trained": whole - trained_less(batch, untrained)}
    counts = [count for count in COUNTS if not usual_alone or count in ("token", "answer", "group",
                                                                        "constant")]
    fits = []
    known_first = [*usual(Formula()), *usual(Formula(groups="mixed"))]
    for formulas in [known_first] if usual_alone else [known_first, every(Formula())]:
        formulas = [formula for formula in formulas
                    if formula.epsilon <= 1e-2 and not formula.scale.endswith(("root", "max"))]
        table = advantages_of(formulas, batch)
        for count, (length, n) in itertools.product(counts, lengths.items()):
            weight = torch.where(known, COUNTS[count](n, batch), 0.0)
            columns = table * weight
            factors = columns @ wanted / columns.square().sum(1).clamp(min=1e-300)
            rest = (wanted - factors[:, None] * columns).norm(dim=1) / wanted.norm()
            for which in (rest < ROUNDING).nonzero().flatten().tolist():
                fits.append((float(rest[which]), replace(
                    formulas[which], count=count, length=length, factor=float(factors[which]))))
        if fits:
            break
    if not fits:
        return None
    return min(fits, key=lambda fit: (abs(abs(fit[1].factor) - 1) > ROUNDING,
                                      not is_short(fit[1].factor), fit[1].groups != "",
                                      list(COUNTS).index(fit[1].count), fit[1].length,
                                      round(fit[0], 5)))[1]


def trained_less(batch: Batch, untrained: tuple[str, ...]) -> Tensor:
    """(B,) how many tokens of each answer have no gradient."""
    has_end = (batch.ids == END).any(1).double()
    return has_end * ("end" in untrained) + float("first" in untrained)


def span(rows: list[int]) -> str:
    return f"row {rows[0]}" if len(rows) == 1 else (
        f"rows {rows[0]} to {rows[-1]}" if rows == list(range(rows[0], rows[-1] + 1))
        else f"rows {', '.join(str(row) for row in rows[:4])}{', ...' if len(rows) > 4 else ''}")


def sorted_as(reward: Tensor, number: Tensor, group: Tensor) -> Tensor:
    """The rewards of each group, in the order of the numbers of its answers."""
    result = torch.empty_like(reward)
    for name in group.unique():
        rows = (group == name).nonzero().flatten()
        result[rows[number[rows].argsort()]] = reward[rows].sort().values
    return result


def is_short(factor: float) -> bool:
    """Whether two digits say it."""
    return abs(float(f"{factor:.2g}") / factor - 1) < ROUNDING


def about_formula(found: Found) -> list[str]:
    formula, factor = found.formula, found.formula.factor
    about_epsilon = ""
    if formula.scale != "none":
        about_epsilon = f" + {formula.epsilon:.1g}" if formula.epsilon > SHOWN else \
            f" and an epsilon below {SHOWN:f}".rstrip("0")
    plain = about_advantage(replace(formula, groups="", epsilon=0.0)).removesuffix(" + 0")
    said = [f"Advantage: {plain}{about_epsilon}.", *found.remarks]
    times = "" if abs(factor - 1) < ROUNDING else f", times {factor:.3g}"
    count = about_count(replace(formula, factor=1.0))
    said.append(f"Counting: {count[:1].lower()}{count[1:]}{times}.")
    if factor < 0:
        said.append("Sign: good answers are made less probable: it is reversed.")
    steps = 1 / abs(factor)
    if times and round(steps) > 1 and abs(steps - round(steps)) < ROUNDING * steps:
        said.append(f"If the trainer adds up {round(steps)} batches for an update, it divides by "
                    "their number twice.")
    if times and formula.scale in ("n", "n-1"):
        said.append("Std over n and over n - 1 differ by a factor. As the step has another "
                    "factor than 1, which of the two it is cannot be told apart.")
    return said


def about_sampling(temperature: float, error: float, likelier: float) -> str:
    likely = f"most likely at temperature {temperature:.2f} (standard error {error:.2f})."
    if likelier >= .97:
        return f"Sampling: {likely}"
    return (f"Sampling: no token was drawn beyond the likeliest ones that have {likelier:.2f} of "
            f"the probability, as with a top-p or top-k. If there is none, it is {likely}")
