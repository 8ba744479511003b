"""Which tokens earned the reward, and which way of spreading credit knows it?

The true credit of every token of a batch is measured: what the answer is worth with it minus what it was worth before, from
many continuations (truth/credit.py). Its square is what is decided at the token. Each --mitigation and --advantage is scored:

    index       where in an answer's order of weights the deciding lies: 1 if all of it at the token with most weight, 0 by
                chance, -1 if all at the token with least
    top tenth   share of what is decided that lies in the tenth of an answer's tokens with most weight
    aligned     cosine of weight times advantage with the credit, over all tokens
    idle        share of the gradient that is known to go to tokens without credit (95% interval contains 0, narrower than 0.1)

All but idle are linear in what was measured of a token, so that noise does not bias them. A rank correlation with measured
credit, or with its size, would: noise is largest where the model was unsure, which is what entropy looks at. Squares are
products of independent estimates, for the same reason. The arms are scored

as well against the true gradient, the mean of leave-one-out gradients over many batches:

    cosine      of the arm's mean gradient with it: what the weighting does to the direction
    one batch   of a single batch's gradient with it
    noise       variance of a batch over the squared part of the mean along the true gradient: batches until they are alike

What can be reached is told by the credit itself, measured a second time. `oracle`, `vine` and `causal_ablation` sample
continuations of their own. Weights in random order are every weighting's placebo. The batch is written as a run folder, with
columns true_credit and true_credit_se, for analyze.py and for the page of this probe.
"""
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from countdown_task import KINDS, REWARD, SECTIONS
from credit.critic import CRITICS
from engine.registry import ADVANTAGES
from grpo import gradient_size
from analysis.statistics import Estimate, average_ranks, holm, jackknife, mean_over, ratio_of_sums, verdicts
from engine.lab import Lab
from engine.registry import MITIGATIONS, NEVER_RESCALED, make
from mitigations import token_weight
from analysis.plots import BLUE, GREY, ORANGE, panels, save
from analysis.page import episodes_of
from analysis.tables import Table, by_row
from engine.rollouts import Rollouts
from engine.credit_file import write_credit
from engine.run_folder import RunFolder, provenance
from engine.settings import parameters
from analysis.vocabulary import CLASSES, Vocabulary
from truth.common import Findings, Flag, Probe, Progress, gradients, sample_batch
from truth.credit import Credit, true_credit
from truth.direction import Directions
from truth.planted import planted_lab, sample_planted

FLAGS = {"questions": Flag(12, 2, "whose answers' credit is measured", 2), "answers": Flag(8, 2, "to each of them", 2),
         "continuations": Flag(32, 4, "behind the credit of a token that is a free choice; fewer where it is nearly certain", 2),
         "batches": Flag(50, 4, "for the true gradient", 4), "batch_questions": Flag(3, 1, "in each of them"),
         "batch_answers": Flag(8, 2, "to each of those", 2), "oracle_k": Flag(8, 1, "continuations behind each value of the oracle")}
NEEDS_TIME = ("causal_ablation", "oracle")  # sample so much that they are scored on the measured batch alone
NARROW, EVEN = 0.1, 0.01  # of an interval of credit; of a difference of shares that is too small to matter


@dataclass
class Arms:
    """All mitigations (with plain GRPO's advantage) and all advantages (without weights), as a run would have them. dr_grpo is
    a multiple of rloo and stands there with it."""
    mitigations: dict
    advantages: dict

    @classmethod
    def made(cls, lab: Lab, oracle_k: int) -> "Arms":
        own = {name: {flag: p.default for flag, p in parameters(function).items()} for name, function in MITIGATIONS.items()}
        own["oracle"] = {"oracle_k": oracle_k}
        advantages = {name: (lambda rollouts, lab, function=function: function(rollouts)) for name, function in ADVANTAGES.items() if name not in ("grpo", "dr_grpo")}
        return cls({name: make(name, own[name], lab) for name in MITIGATIONS}, advantages | {name: critic(lab) for name, critic in CRITICS.items()})

    def weights(self, lab: Lab, rollouts: Rollouts, without=(), placebo: str = "none") -> dict[str, torch.Tensor]:
        return {name: token_weight(chosen, name, rollouts, lab, "none" if name in NEVER_RESCALED else "mean", placebo)[0]
                for name, chosen in self.mitigations.items() if name not in without}

    def advantage(self, lab: Lab, rollouts: Rollouts) -> dict[str, torch.Tensor]:
        return {name: advantage(rollouts, lab) for name, advantage in self.advantages.items()}


def coefficients(arms: Arms, lab: Lab, rollouts: Rollouts, without=()) -> dict[str, torch.Tensor]:
    """weight * advantage of each arm, over the number of answers."""
    weighted = {name: weight * rollouts.advantage for name, weight in arms.weights(lab, rollouts, without).items()}
    return {name: value / len(rollouts.mask) for name, value in (weighted | arms.advantage(lab, rollouts)).items()}


def measure(probe: Probe) -> Findings:
    args, lab = probe.args, probe.lab()
    progress = Progress(planted=2, true_gradient=50, credit=50, scores=6)
    planted = planted_table(args, progress)
    arms, directions = Arms.made(lab, args.oracle_k), Directions("rloo", min(10, args.batches // 2))
    for n in range(args.batches):
        progress("true_gradient", n / args.batches)
        batch = sample_batch(lab, n + 1, args.batch_questions, args.batch_answers)
        directions.add(n * directions.blocks // args.batches, gradients(lab, batch, coefficients(arms, lab, batch, NEEDS_TIME)))
    progress("credit")
    rollouts = sample_batch(lab, args.batches + 1, args.questions, args.answers)
    credit = true_credit(lab, rollouts, args.continuations, lambda share: progress("credit", share))
    progress("scores")
    tokens = Tokens(lab, rollouts, credit)
    weight, advantage = arms.weights(lab, rollouts), arms.advantage(lab, rollouts)
    shuffled = shuffled_weights(weight, rollouts)
    batch_gradients = gradients(lab, rollouts, {**{name: w * rollouts.advantage for name, w in weight.items()}, **advantage, TRUE: credit.value})
    tables = [matters(tokens, "kind"), matters(tokens, "section"), matters(tokens, "class"), largest(tokens, lab),
              scores(tokens, weight, advantage, shuffled), directions_table(directions, batch_gradients), identity(tokens, credit), planted]
    run = write_run(probe.folder / "run", lab, rollouts, credit)
    intro = [f"{lab.folder}: {args.questions} questions x {args.answers} answers, {int(rollouts.mask.sum()):,} tokens, credit from {credit.spent:,} sampled tokens; "
             f"the true gradient from {args.batches} batches of {args.batch_questions} x {args.batch_answers} answers.",
             "Credit is V(after) - V(before). What is decided at a token is its squared credit: summed over an answer it is on average the variance of the "
             "reward. Intervals are over questions (gradients: over blocks of batches). One policy, one set of problems: another may differ."]
    return Findings("Which tokens earned the reward, and who knows it", intro, tables, ("kind", "section", "class", "scores", "directions", "identity", "planted"),
                    [draw_classes(tables[0], probe.folder), draw_scores(tables[4], tables[5], probe.folder)],
                    {"kind": ("decided",), "scores": ("scores",)}, episodes_of(run, lab.tokenizer, [1], 12_000))


TRUE, AGAIN = "the true credit itself", "the credit measured again"


class Tokens:
    """All tokens end to end, in numpy, with their question and answer."""

    def __init__(self, lab: Lab, rollouts: Rollouts, credit: Credit):
        self.mask, (row, _) = rollouts.mask, rollouts.mask.nonzero(as_tuple=True)
        self.answer = row.cpu().numpy()
        self.question = rollouts.group[row].cpu().numpy()
        self.questions, self.rollouts = len(rollouts.prompt_ids), rollouts
        self.credit, self.error, self.before = (self.flat(values) for values in (credit.value, credit.error, credit.before))
        quarters = np.stack([self.flat(quarter) for quarter in credit.quarters])
        self.decided = (quarters.sum(0) ** 2 - (quarters ** 2).sum(0)) / 12  # mean of the products of different quarters
        self.again, self.decided_again = quarters[:2].mean(0), quarters[2] * quarters[3]  # the credit of one half, and what the other says
        self.size = self.flat(gradient_size(rollouts.log_prob, rollouts.collision))
        self.advantage, self.ids = self.flat(rollouts.advantage), rollouts.ids[rollouts.mask].cpu().numpy()
        self.idle = (np.abs(self.credit) <= 1.96 * self.error) & (2 * 1.96 * self.error < NARROW)
        self.codes = {"kind": self.flat(rollouts.kind).astype(int), "section": self.flat(rollouts.section).astype(int),
                      "class": Vocabulary(lab.tokenizer).classes(self.ids)}

    def flat(self, frame: torch.Tensor) -> np.ndarray:
        return frame[self.mask].detach().double().cpu().numpy()

    def credit_for(self, decided: np.ndarray) -> np.ndarray:
        """The credit from the same continuations as these squares."""
        return self.credit if decided is self.decided else 2 * self.credit - self.again

    def by_question(self, values: np.ndarray) -> np.ndarray:
        return np.bincount(self.question, values, self.questions)

    def order(self, size: np.ndarray) -> np.ndarray:
        """Each token's place in its answer by `size`, from -1 for the least to 1 for the most; equal ones share theirs."""
        place = average_ranks(self.answer + 0.5 * average_ranks(size) / max(len(size), 1))  # answer by answer
        count, first = np.bincount(self.answer), np.searchsorted(self.answer, np.arange(self.answer[-1] + 1))
        return 2 * (place - first[self.answer]) / np.maximum(count - 1, 1)[self.answer] - np.where(count > 1, 1, 0)[self.answer]


NAMES = {"kind": KINDS, "section": SECTIONS, "class": CLASSES}
TITLES = {"kind": "What is decided at each kind of token, and what gradient it gets", "section": "The same by section of the answer",
          "class": "The same by the earlier experiment's classes: is filler wasted?"}


def matters(tokens: Tokens, partition: str) -> Table:
    """Shares of what is decided, of plain GRPO's gradient, and of the tokens. Ratio: gradient over decided."""
    gradient, rows, found = np.abs(tokens.advantage) * tokens.size, [], {}
    whole = {"decided": tokens.by_question(tokens.decided), "gradient": tokens.by_question(gradient)}
    for code, name in enumerate(NAMES[partition]):
        here = tokens.codes[partition] == code
        if here.any():
            decided, given = (ratio_of_sums(tokens.by_question(values * here), whole[key]) for key, values in (("decided", tokens.decided), ("gradient", gradient)))
            excess = difference_of_shares(tokens, here, gradient, whole)
            idle = ratio_of_sums(tokens.by_question(gradient * here * tokens.idle), tokens.by_question(gradient * here))
            rows.append([name, int(here.sum()), here.mean(), decided.value, decided.interval, given.value, given.interval, excess.value, excess.interval,
                         idle.value])
            found[name] = (decided, given, excess, idle)
    said = verdicts([e[2] for e in found.values()], ("too much", "too little"), null=0.0)
    said = ["about even" if max(abs(e[2].low), abs(e[2].high)) < EVEN else word for e, word in zip(found.values(), said)]
    formats = {partition: "", "tokens": ",d", "of all": ".1%", "decided": ".1%", "95%": ".1%", "gradient": ".1%", "95% ": ".1%", "minus": "+.1%", "95%  ": "+.1%",
               "idle": ".0%", "verdict": ""}
    rows = [[*row, word] for row, word in zip(rows, said)]
    return Table(partition, TITLES[partition], by_row(formats, rows), matters_in_words(partition, found, dict(zip(found, said)), whole),
                 ["decided: share of the sum of squared credits (products of independent estimates); gradient: share of abs(A) s of plain GRPO; minus: "
                  "the difference; idle: of this class's gradient, what is known to go to tokens without credit, most of the rest cannot be told apart from a little; "
                  "too much and too little after Holm's correction, about even where the interval is within a point"])


def matters_in_words(partition: str, found: dict, said: dict, whole: dict) -> str:
    if whole["decided"].sum() <= 0 or not whole["gradient"].any():
        return "The answers of each question got the same reward, or nearly: there is nothing to decide."
    most = max(found, key=lambda name: found[name][0].value)
    if not found[most][0].high - found[most][0].low < 1:
        return "Too few questions and continuations to say where the reward is decided."
    if partition != "class" or "filler" not in found:
        return f"Most is decided at {most} tokens: {percent(found[most][0])} of the variance of the reward; they get {percent(found[most][1])} of plain GRPO's gradient."
    decided, given, excess, idle = found["filler"]
    words = {"too much": "more than it decides", "too little": "less than it decides", "about even": "what it decides"}.get(said["filler"], "no clear difference")
    return (f"Filler decides {percent(decided)} of the reward's variance and gets {percent(given)} of plain GRPO's gradient: {words}, by {100 * excess.value:+.0f} points "
            f"({100 * excess.low:+.0f} to {100 * excess.high:+.0f}). At least {idle.value:.0%} of its gradient goes to tokens known to have no credit to speak of.")


def percent(e: Estimate) -> str:
    return f"{e.value:.0%} ({e.low:.0%} to {e.high:.0%})"


def difference_of_shares(tokens: Tokens, here: np.ndarray, gradient: np.ndarray, whole: dict) -> Estimate:
    pairs = [(tokens.by_question(gradient * here), whole["gradient"]), (tokens.by_question(tokens.decided * here), whole["decided"])]
    with np.errstate(invalid="ignore", divide="ignore"):
        value = [above.sum() / below.sum() for above, below in pairs]
        left = [(above.sum() - above) / (below.sum() - below) for above, below in pairs]
    return jackknife(value[0] - value[1], left[0] - left[1])


def largest(tokens: Tokens, lab: Lab) -> Table:
    """The words at which most is decided."""
    count, decided = np.bincount(tokens.ids), np.bincount(tokens.ids, tokens.decided)
    given = np.bincount(tokens.ids, np.abs(tokens.advantage) * tokens.size)
    first, all_decided = np.argsort(-decided)[:12], max(decided.sum(), 1e-300)
    rows = [[repr(lab.tokenizer.decode([int(i)], skip_special_tokens=False)), int(count[i]), decided[i] / all_decided, given[i] / max(given.sum(), 1e-300)] for i in first]
    return Table("words", "The words at which most is decided", by_row({"token": "", "times": ",d", "decided": ".1%", "gradient": ".1%"}, rows),
                 f"The {len(rows)} words at which most is decided hold {sum(row[2] for row in rows):.0%} of it and get {sum(row[3] for row in rows):.0%} of the gradient.",
                 ["chosen and told by the same measurement, so the share is somewhat too high; others can be below 0 by chance"])


def shuffled_weights(weight: dict[str, torch.Tensor], rollouts: Rollouts) -> dict[str, torch.Tensor]:
    """Each weighting's own weights, in random order over the batch's tokens."""
    order = torch.randperm(int(rollouts.mask.sum()), generator=rollouts.generator).to(rollouts.mask.device)
    return {name: torch.zeros_like(values).masked_scatter(rollouts.mask, values[rollouts.mask][order]) for name, values in weight.items()}


def scores(tokens: Tokens, weight: dict, advantage: dict, shuffled: dict) -> Table:
    found = {name: score(tokens, tokens.flat(values.abs()), tokens.flat(values * tokens.rollouts.advantage if name in weight else values),
                         tokens.flat(shuffled[name]) if name in shuffled else None) for name, values in {**weight, **advantage}.items()}
    found[AGAIN] = score(tokens, np.abs(tokens.again), tokens.again, None, tokens.decided_again)
    varied = {name: e["index"] for name, e in found.items() if e["varies"]}
    said = dict(zip(varied, verdicts(list(varied.values()), ("knows", "misleads"), null=0.0)))
    rows = [[name, e["index"].value, e["index"].interval, e["placebo"] and e["placebo"].value, e["top tenth"].value, e["aligned"].value, e["idle"].value,
             said.get(name, "constant")] for name, e in found.items()]
    formats = {"arm": "", "index": "+.2f", "95%": "+.2f", "placebo": "+.2f", "top tenth": ".0%", "aligned": "+.2f", "idle": ".0%", "verdict": ""}
    return Table("scores", "Weights and advantages against the true credit", by_row(formats, rows), scores_in_words(found, varied),
                 [f"placebo: the same weights in random order; constant: the same for all tokens of an answer, equal ones share their place; {AGAIN}: one half of the "
                  "continuations as a weight, judged by the other half; knows and misleads after Holm's correction; the intervals of such ratios held 91 to 94% "
                  "instead of 95 in simulations of 12 questions"])


def scores_in_words(found: dict, varied: dict) -> str:
    own = sorted((name for name in varied if name not in ("oracle", AGAIN)), key=lambda name: -varied[name].value)
    if not own or not np.isfinite(varied[own[0]].value):
        return "No weight differs within answers, or there is nothing to decide."
    told = [f"{name} {varied[name].value:+.2f} ({varied[name].low:+.2f} to {varied[name].high:+.2f})" for name in (*own[:2], own[-1])]
    placebos = [e["placebo"] for e in found.values() if e["placebo"] and np.isfinite(e["placebo"].p)]
    off = sum(p < 0.05 for p in holm([e.p for e in placebos])) if placebos else 0
    top = {name: f"{found[name]['top tenth'].value:.0%}" for name in (own[0], "oracle", AGAIN, "none")}
    return (f"Best at finding where the reward is decided, without sampling it: {', '.join(told[:-1])}; worst {told[-1]}; the oracle {varied['oracle'].value:+.2f}, {AGAIN} "
            f"{varied[AGAIN].value:+.2f}. In the tenth of the tokens with most weight lies {top[own[0]]} of what is decided for {own[0]}, {top['oracle']} for the oracle, "
            f"{top[AGAIN]} for {AGAIN}, {top['none']} by chance. Of {len(placebos)} placebos {off} {'differs' if off == 1 else 'differ'} from chance.")


def score(tokens: Tokens, size: np.ndarray, signed: np.ndarray, shuffled: np.ndarray | None, decided: np.ndarray | None = None) -> dict:
    """Of one arm: `size` is what it thinks of a token, `signed` what multiplies its gradient."""
    decided = tokens.decided if decided is None else decided
    gradient, by, whole = np.abs(signed) * tokens.size, tokens.by_question, tokens.by_question(decided)
    place = tokens.order(size)
    return {"index": ratio_of_sums(by(decided * place), whole), "varies": bool(np.abs(place).max() > 1e-9),
            "placebo": None if shuffled is None else ratio_of_sums(by(decided * tokens.order(shuffled)), whole),
            "top tenth": ratio_of_sums(by(decided * top_tenth(tokens.answer, size)), whole),
            "aligned": cosine_of_sums(by(signed * tokens.credit_for(decided)), by(signed ** 2), whole),
            "idle": ratio_of_sums(by(gradient * tokens.idle), by(gradient))}


def cosine_of_sums(product: np.ndarray, one: np.ndarray, other: np.ndarray) -> Estimate:
    """sum of products / sqrt(sum of squares * sum of squares), from three numbers a question."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return jackknife(product.sum() / np.sqrt(one.sum() * other.sum()), (product.sum() - product) / np.sqrt((one.sum() - one) * (other.sum() - other)))


def top_tenth(answer: np.ndarray, size: np.ndarray) -> np.ndarray:
    """How much of each token is in the tenth of its answer with most of `size`: of equal ones at the border, each a share."""
    inside = np.zeros(len(size))
    for b in np.unique(answer):
        here = answer == b
        mine, n = size[here], max(1, round(here.sum() / 10))
        border = np.sort(mine)[-n]
        above, equal = mine > border, mine == border
        inside[here] = above + equal * (n - above.sum()) / equal.sum()
    return inside


def directions_table(directions: Directions, batch_gradients: dict) -> Table:
    found = {name: directions.estimates(name) for name in batch_gradients if name in directions.sums}
    others = [name for name in found if name != directions.reference]
    said = dict(zip(others, verdicts([found[name]["off"] for name in others], ("beyond", "off"), null=0.0)))
    rows = [[name, *((e["cosine"].value, e["cosine"].interval, said.get(name, ""), e["one batch"].value, e["noise"].value) if (e := found.get(name)) else (None, None, "", None, None)),
             directions.batch_cosine(gradient)] for name, gradient in batch_gradients.items()]
    formats = {"arm": "", "cosine": ".2f", "95%": ".2f", "is it 1?": "", "one batch": ".2f", "noise": ".1f", "measured batch": ".2f"}
    return Table("directions", "Gradients against the true gradient", by_row(formats, rows), directions_in_words(found, said),
                 ["cosine and noise from pairs of different batches, so that noise does not shorten them: estimates can exceed 1; off: below 1 after Holm's correction; "
                  "measured batch: the cosine of the one batch whose credit was measured, where the true credit itself can stand beside the others; all with "
                  "--loss_norm constant. Arms with a state learn on the way: learned_importance weighs 1 in its first ten batches, gae starts from a critic of 0"])


def directions_in_words(found: dict, said: dict) -> str:
    known = {name: e for name, e in found.items() if np.isfinite(e["cosine"].value)}
    quiet = [name for name in known if said.get(name) == "none seen" and np.isfinite(e["noise"].value)] if (e := known.get("none")) else []
    if not quiet:
        return "Too few batches to tell directions apart from noise."
    off = [f"{name} ({known[name]['cosine'].value:.2f})" for name, word in said.items() if word == "off"]
    least = min((name for name in quiet if np.isfinite(known[name]["noise"].value)), key=lambda name: known[name]["noise"].value)
    cosine, noise = e["cosine"], known[least]["noise"]
    return (f"Plain GRPO's mean gradient has a cosine of {cosine.value:.2f} ({cosine.low:.2f} to {cosine.high:.2f}) with the true one; clearly off {'are' if len(off) != 1 else 'is'} "
            f"{', '.join(off) or 'none'}. It takes {e['noise'].value:.0f} batches until signal and noise are alike ({e['noise'].low:.0f} to {e['noise'].high:.0f}); of the arms that "
            f"are not clearly off {least} takes fewest, {noise.value:.0f} ({noise.low:.0f} to {noise.high:.0f}).")


def identity(tokens: Tokens, credit: Credit) -> Table:
    """Two checks of the measurement against theory."""
    reward = tokens.rollouts.reward.double().cpu().numpy().reshape(tokens.questions, -1)
    variance, decided = reward.var(1, ddof=1), tokens.by_question(tokens.decided) / reward.shape[1]
    first = np.flatnonzero(np.diff(tokens.answer, prepend=-1))
    start = tokens.before[first].reshape(tokens.questions, -1).mean(1)
    both, off, gap = ratio_of_sums(decided, variance), ratio_of_sums(decided - variance, variance), mean_over(start - reward.mean(1))
    rows = [["sum of squared credits of an answer over variance of the reward", decided.mean(), variance.mean(), both.value, both.interval],
            ["V before the first token minus mean reward", start.mean(), reward.mean(), gap.value, gap.interval]]
    word = "are too imprecise to be compared" if not both.high - both.low < 1 else "do not agree" if min(holm([off.p, gap.p])) < 0.05 else "agree"
    return Table("identity", "Checks: what theory says of the measured credit", by_row({"": "", "left": ".4f", "right": ".4f", "ratio or gap": ".3f", "95%": ".3f"}, rows),
                 f"Measured credit and theory {word}: squared credits add up to {both.value:.2f} ({both.low:.2f} to {both.high:.2f}) of the reward's variance."
                 if variance.any() else "The answers of each question got the same reward: there is no variance to add up to.",
                 ["the batch's own rewards enter both sides, its continuations the left one alone"])


def planted_table(args, progress: Progress) -> Table:
    """The same measurement where the truth is known, from four times as many continuations: its answers are cheap."""
    lab = planted_lab(args.seed, 12 if args.quick else 24)
    rollouts = sample_planted(lab, 1, 4, 2 if args.quick else 8)
    credit = true_credit(lab, rollouts, 4 * args.continuations, lambda share: progress("planted", share))
    true, mine = rollouts.true_credit[:, lab.keys].double(), credit.value[:, lab.keys].double()
    top = credit.value.abs().topk(len(lab.keys)).indices
    exact_top = torch.where(rollouts.true_credit.abs() > 2 * credit.error, rollouts.true_credit.abs(), 0.0)
    sure = (exact_top[:, lab.keys] > 0)
    hit = sum(key in top[b].tolist() for b in range(len(top)) for j, key in enumerate(lab.keys) if sure[b, j])
    z = ((credit.value - rollouts.true_credit) / credit.error)[rollouts.mask & (credit.error > 0)].double()
    correlation = torch.corrcoef(torch.stack([true.flatten(), mine.flatten()]))[0, 1].item()
    rows = [["keys whose credit exceeds two errors, found among the three largest", hit / max(int(sure.sum()), 1)],
            ["correlation of measured and exact credit at the keys", correlation], ["(measured - exact) / error: mean", z.mean().item()],
            ["(measured - exact) / error: mean square", z.square().mean().item()]]
    return Table("planted", "Checks: the measurement where the truth is planted", by_row({"": "", "found": ".3f"}, rows),
                 f"On the planted task {hit} of {int(sure.sum())} keys with credit beyond two errors are among the three tokens with most measured credit; measured and exact "
                 f"credit correlate {correlation:.2f}, their difference over its error has a mean square of {rows[3][1]:.2f}.")


def write_run(path: Path, lab: Lab, rollouts: Rollouts, credit: Credit) -> Path:
    config = {**lab.settings.to_json(), "steps": 1, **provenance(), "reward": REWARD, "model_config": lab.model.config.to_json()}
    run = RunFolder.create(path, config, lab.folder / "tokenizer.json")
    write_credit(run.credit(1), rollouts, rollouts.mask.float(), true_credit=credit.value, true_credit_se=credit.error)
    return path


def draw_classes(table: Table, folder: Path) -> tuple[Path, str]:
    figure, axis = panels(1)
    rows = table.rows
    for i, (value, interval, colour, name) in enumerate(((3, 4, BLUE, "decided there"), (5, 6, ORANGE, "plain GRPO's gradient"), (2, None, GREY, "tokens"))):
        heights = np.array([row[value] for row in rows])
        reach = None if interval is None else np.abs(np.array([row[interval] for row in rows], float).T - heights)
        axis.bar(np.arange(len(rows)) + 0.27 * (i - 1), heights, 0.25, color=colour, label=name, yerr=reach, error_kw=dict(lw=0.8, capsize=2))
    axis.set(xticks=range(len(rows)), xticklabels=[row[0] for row in rows], ylabel="share", title="Where the reward is decided, and where the gradient goes")
    axis.legend()
    return save(figure, folder, "decided", "Shares of the squared true credit, of plain GRPO's gradient and of the tokens, with 95% intervals over questions")


def draw_scores(scored: Table, directed: Table, folder: Path) -> tuple[Path, str]:
    figure, axes = panels(2)
    for axis, table, value, interval, title, at in ((axes[0], scored, 1, 2, "Where the deciding lies in the order of weights", 0),
                                                    (axes[1], directed, 1, 2, "Cosine of the mean gradient with the true one", 1)):
        rows = [row for row in table.rows if row[value] is not None and np.isfinite(row[value])][::-1]
        for y, row in enumerate(rows):
            axis.plot(row[interval], [y, y], color=GREY, lw=2)
            axis.plot(row[value], y, "o", color=BLUE, ms=4)
        axis.axvline(at, color="#000000", lw=0.8)
        axis.set(yticks=range(len(rows)), yticklabels=[row[0] for row in rows], title=title)
        axis.tick_params(axis="y", labelsize=7.5)
    return save(figure, folder, "scores", "Every arm against the true credit and against the true gradient, with 95% intervals")
