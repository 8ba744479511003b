"""A gradient that never saw a reward, and the controls that expose it.

An earlier experiment took the answers of a trained model and computed, answer by answer, the gradient of the cross-entropy
at the input embeddings. For token j of an answer of n tokens that is

    g_j = d loss / d embedding_j,    loss = - 1/n sum_i log pi(y_i | prompt, y_<i)

It took the size of g_j for the credit of token j, found t = mean / (std / sqrt(answers)) at each position, and published
this as its phase 1. Here it is done again, beside the second attempt (phase 2, A log p) and the gradient that GRPO applies
at the logits, abs(A) s (grpo.gradient_size), for the same tokens; then again where nothing was learned or earned: with
shuffled rewards, one loss term at a time, on random text, in an untrained model.

- Only tokens of answers are analysed. The last token of an answer predicts nothing, so no loss reaches it and its g is 0
  by construction: it is left out everywhere. One row of the table on position shows what counting it would do.
- Which number of a token went into t is not on record. Both are shown: the size norm(g), which is never negative, so that
  its t grows with the number of answers, and a number with a sign, the mean of g over the embedding's dimensions.
- A token stands at (t + 1/2) / length; early and late are the first and the last fifth. Intervals leave out each question
  in turn (jackknife), as answers to one question are not independent. For shares of positions they are rough.
- The earlier experiment's model had been trained with GRPO: --model runs/none-grpo-s0/checkpoints/step_000100 is such a one.
"""
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from countdown_task import BRACKET, KINDS, NUMBER, OPERATOR, WORD
from analysis.earlier import PUBLISHED
from grpo import gradient_size, grpo
from analysis.statistics import FEWEST, Estimate, jackknife, mean_over, rank_correlation, verdicts
from engine.lab import Lab, derived_seed
from analysis.plots import COLOURS, panels, save
from qwen2_model import Qwen2
from analysis.tables import Table, by_row, shown
from engine.forward import lay_out, response_log_probs
from engine.rollouts import Rollouts
from analysis.positions import t_statistics
from analysis.ratios import mean_ratio, standardised
from analysis.sizes import end_of
from analysis.sums import SIGNS
from analysis.vocabulary import CLASSES, Vocabulary
from truth.common import Findings, Flag, Probe, Progress, sample_batch

FLAGS = {"questions": Flag(32, 6, "questions", 2), "answers": Flag(16, 5, "answers to each question", 2),
         "single": Flag(2, 1, "answers to each question whose loss terms are taken one at a time")}
EARLY_OVER_LATE, FILLER_OVER_REASONING = 4.0, 1.75  # published of phase 1
T_FIGURES = {"abs(t) > 3": lambda t: t > 3, "abs(t) < 1.5": lambda t: t < 1.5, "mean abs(t)": lambda t: t}  # means over positions
FIGURES = (*(f"{number}: {figure}" for number in ("size", "signed") for figure in T_FIGURES), "early over late", "filler over reasoning")
REACH, CERTAIN, TERM, NEXT = "loss terms that reach it", "mean s of these terms", "mean size of one term", "next token's term alone"
BINS, DRAWS = 20, 20  # of relative position, as in tally.py; random subsets of the answers


@contextmanager
def embeddings_cut_off(model: Qwen2):
    """While this lasts, the embeddings of a forward pass are leaves of its graph: they are put into the list."""
    leaves = []

    def cut(module, inputs, output):
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    hook = model.model.embed_tokens.register_forward_hook(cut)
    try:
        yield leaves
    finally:
        hook.remove()


def analysed(rollouts: Rollouts) -> torch.Tensor:
    """(B, T): all tokens of an answer but its last."""
    return torch.arange(rollouts.mask.shape[1], device=rollouts.mask.device) < rollouts.length[:, None] - 1


def at_embeddings(lab: Lab, rollouts: Rollouts, rows: torch.Tensor):
    """Log-probs (rows, T), and a function: the gradient of any number made of them at the embeddings of the answers' tokens,
    (rows, T, D), 0 where `analysed` is false."""
    with embeddings_cut_off(lab.model) as leaves:
        log_prob = response_log_probs(lab.model, rollouts, rows)
    inside, predicts = analysed(rollouts)[rows][..., None], lay_out(rollouts, rows)[2]
    stands = torch.cat([predicts[:, 1:], torch.zeros_like(predicts[:, :1])], 1)  # token t is what predicts token t + 1

    def gradient_of(number: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(number, leaves[0], retain_graph=True)[0].float()[stands] * inside  # (rows, T, D)

    return log_prob, gradient_of


def phase_one(lab: Lab, rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token (B, T) the norm of g, and the mean of g over its dimensions."""
    size, signed = torch.zeros(2, *rollouts.mask.shape, device=rollouts.mask.device)
    for rows in rollouts.length.nonzero().squeeze(1).split(lab.settings.micro_batch):
        log_prob, gradient_of = at_embeddings(lab, rollouts, rows)
        g = gradient_of(-(log_prob.sum(1) / rollouts.length[rows]).sum())
        size[rows], signed[rows] = g.norm(dim=-1), g.mean(-1)
    return size, signed


def single_terms(lab: Lab, rollouts: Rollouts, chosen: torch.Tensor, progress=lambda share: None) -> torch.Tensor:
    """(chosen, T, T): [b, i, j] is the norm of the gradient of -log pi(y_i | ...) at the embedding of token j, 0 unless j < i."""
    norms = torch.zeros(len(chosen), *[rollouts.mask.shape[1]] * 2, dtype=torch.float64)
    for part in torch.arange(len(chosen)).split(lab.settings.micro_batch):
        log_prob, gradient_of = at_embeddings(lab, rollouts, chosen[part])
        for i in range(1, int(rollouts.length[chosen[part]].max())):
            norms[part, i] = gradient_of(-log_prob[:, i].sum()).norm(dim=-1).double().cpu()
        progress((int(part[-1]) + 1) / len(chosen))
    return norms


def untrained(model: Qwen2, seed: int) -> Qwen2:
    """The same architecture with fresh weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2(model.config).to(model.device)


def random_text(lab: Lab, rollouts: Rollouts) -> Rollouts:
    """Answers of the same lengths to the same questions, every token drawn evenly from the vocabulary."""
    ids = torch.randint(lab.tokenizer.get_vocab_size(), rollouts.ids.shape, generator=rollouts.generator).to(rollouts.ids.device)
    return replace(rollouts, ids=ids * rollouts.mask)


def shuffled_rewards(rollouts: Rollouts) -> Rollouts:
    """Every answer gets the scores of some answer, whichever question that was for."""
    order = torch.randperm(len(rollouts.reward), generator=rollouts.generator).to(rollouts.mask.device)
    shuffled = replace(rollouts, scores={name: value[order] for name, value in rollouts.scores.items()})
    return replace(shuffled, advantage=grpo(shuffled))


class Tokens:
    """The tokens for which `inside` is true and where each of them stands; all arrays are flat, in the same order."""

    def __init__(self, lab: Lab, rollouts: Rollouts, inside: torch.Tensor):
        self.inside, self.length = inside, rollouts.length.cpu().numpy()
        self.answer, self.position = inside.cpu().numpy().nonzero()
        self.question, self.relative = rollouts.group.cpu().numpy()[self.answer], (self.position + 0.5) / self.length[self.answer]
        self.end, self.tenth, self.bin = end_of(vars(self)), (10 * self.relative).astype(int), (BINS * self.relative).astype(int)
        ids = self.flat(rollouts.ids).astype(np.int64)
        self.naive = Vocabulary(lab.tokenizer).classes(ids) if len(ids) else ids

    def flat(self, frame: torch.Tensor) -> np.ndarray:
        return frame[self.inside].double().cpu().numpy()


@dataclass
class Given:
    """What each token was given, by one account of it."""
    tokens: Tokens
    size: np.ndarray
    signed: np.ndarray


def given(tokens: Tokens, signed: torch.Tensor, size: torch.Tensor | None = None) -> Given:
    return Given(tokens, tokens.flat(signed.abs() if size is None else size), tokens.flat(signed))


def sizes(rollouts: Rollouts) -> torch.Tensor:
    return gradient_size(rollouts.log_prob.double(), rollouts.collision.double())


def three_accounts(tokens: Tokens, rollouts: Rollouts, size: torch.Tensor, signed: torch.Tensor) -> dict[str, Given]:
    A, s = rollouts.advantage, sizes(rollouts)
    return {"phase 1": given(tokens, signed, size), "phase 2": given(tokens, A * rollouts.log_prob), "abs(A) s": given(tokens, A * s)}


def controls_of(lab: Lab, rollouts: Rollouts, tokens: Tokens, seed: int) -> dict[str, Given]:
    """Phase 1 where nothing can have been earned, or learned."""
    fresh, text = replace(lab, model=untrained(lab.model, derived_seed("untrained", seed))), random_text(lab, rollouts)
    random, found = Tokens(lab, text, tokens.inside), {}
    for name, who, what, where in (("random text, trained model", lab, text, random), ("real answers, untrained model", fresh, rollouts, tokens),
                                   ("random text, untrained model", fresh, text, random)):
        size, signed = phase_one(who, what)
        found[name] = given(where, signed, size)
    return found


def terms_apart(lab: Lab, rollouts: Rollouts, chosen: torch.Tensor, norms: torch.Tensor) -> dict[str, Given]:
    """What the tokens of the chosen answers get from loss terms taken one at a time."""
    length, s = rollouts.length[chosen, None].cpu(), (sizes(rollouts) * rollouts.mask)[chosen].cpu()
    reach, total, after = (length - 1 - torch.arange(norms.shape[1])).clamp(min=1), norms.sum(1), torch.zeros(norms.shape[:2])
    after[:, :-1] = norms.diagonal(-1, 1, 2)  # [b, j]: of term j + 1 at token j
    later = s.flip(1).cumsum(1).flip(1) - s   # [b, j]: sum over the terms that reach token j
    frames = {REACH: reach, CERTAIN: later / reach, TERM: total / reach, NEXT: after, "sum of their sizes": total,
              "equal ones that would give as much": (total.square() / norms.square().sum(1)).nan_to_num(0.0)}
    inside = torch.zeros_like(rollouts.mask).index_copy(0, chosen, analysed(rollouts)[chosen])
    tokens, frame = Tokens(lab, rollouts, inside), torch.zeros(inside.shape, dtype=torch.float64)
    return {name: given(tokens, frame.index_copy(0, chosen.cpu(), x.double()).to(inside.device)) for name, x in frames.items()}


def sums(unit: np.ndarray, cell: np.ndarray, cells: int, value: np.ndarray) -> np.ndarray:
    """(units, 3, cells): count, sum and sum of squares of the values of each unit (a question, an answer) in each cell."""
    units, index = int(unit.max(initial=0)) + 1, unit * cells + cell
    return np.stack([np.bincount(index, x, units * cells).reshape(units, cells) for x in (np.ones_like(value), value, value ** 2)], axis=1)


def mean_of(total: np.ndarray, cells=slice(None)) -> np.float64:
    with np.errstate(invalid="ignore"):
        return total[1, cells].sum() / total[0, cells].sum()


def over_questions(parts: np.ndarray, statistic) -> Estimate:
    """A statistic of the sums over all questions, and of the sums without each of them."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return jackknife(statistic(parts.sum(0)), np.array([statistic(np.delete(parts, q, 0).sum(0)) for q in range(len(parts))]))


def ratio_of(parts: np.ndarray, statistic, one, other) -> Estimate:
    """A ratio of some cells to others; the interval is made for its logarithm, where both have something in FEWEST questions."""
    found = over_questions(parts, lambda total: np.log(statistic(total)))
    value, *interval = np.exp([found.value, *found.interval]).tolist()
    live = min(int((parts[:, 2, cells] > 0).any(-1).sum()) for cells in (one, other))
    return Estimate(value, *interval, found.p) if live >= FEWEST else Estimate(value, np.nan, np.nan, np.nan)


def over(parts: np.ndarray, one: int, other: int) -> Estimate:
    """The mean of one cell over that of another."""
    return ratio_of(parts, lambda total: mean_of(total, [one]) / mean_of(total, [other]), [one], [other])


def early_over_late(values: Given) -> Estimate:
    return over(sums(values.tokens.question, values.tokens.end, 3, values.size), 0, 2)


def class_ratio(values: Given, code: np.ndarray) -> tuple[Estimate, Estimate]:
    """Tokens of code 0 over those of code 1 (of 0, 1, 2): crude, and as if both stood where the two together stand, over the bins
    of relative position in which each has at least 1% of what an even spread would give it."""
    parts = sums(values.tokens.question, BINS * code + values.tokens.bin, 3 * BINS, values.size)
    sides = [slice(BINS * c, BINS * (c + 1)) for c in (0, 1)]

    def by_bin(total):
        return [(total[1, side], total[0, side]) for side in sides]

    both = [b for b in range(BINS) if all(n[b] > 0 and n[b] >= 0.01 * n.mean() for _, n in by_bin(parts.sum(0)))]
    crude = ratio_of(parts, lambda total: mean_ratio(*((x.sum(), n.sum()) for x, n in by_bin(total))), *sides)
    return crude, ratio_of(parts, lambda total: standardised(*by_bin(total), both), *sides)


def mean_figure(t: np.ndarray, figure: str) -> float:
    """One of T_FIGURES, of the t of some positions."""
    return float(T_FIGURES[figure](np.abs(t)).mean()) if len(t) else np.nan


def figures(values: Given) -> list[Estimate]:
    """What the earlier experiment told of its phase 1, in the order of FIGURES."""
    tokens = values.tokens
    parts = [sums(tokens.question, tokens.position, tokens.inside.shape[1], x) for x in (values.size, values.signed)]
    of_t = [over_questions(p, lambda total: mean_figure(t_statistics(*total), figure)) for p in parts for figure in T_FIGURES]
    return [*of_t, early_over_late(values), class_ratio(values, tokens.naive)[0]]


def within_answers(tokens: Tokens, x: np.ndarray, y: np.ndarray) -> tuple[Estimate, int]:
    """Spearman's, within answers of at least three tokens; the mean over questions of their answers' mean, and how many answers."""
    found = {}
    for rows in np.split(np.arange(len(x)), np.flatnonzero(np.diff(tokens.answer)) + 1):
        if len(rows) >= 3 and np.isfinite(r := rank_correlation(x[rows], y[rows])):
            found.setdefault(tokens.question[rows[0]], []).append(r)
    return mean_over([np.mean(of_question) for of_question in found.values()]), sum(map(len, found.values()))


def with_interval(heading: str, spec: str, found) -> dict[str, tuple]:
    return {heading: (spec, [e.value for e in found]), f"95%, {heading}": (spec, [e.interval for e in found])}


def phases_table(accounts: dict[str, Given]) -> Table:
    known = {"phase 1": [*PUBLISHED["phase 1"]] * 2 + [EARLY_OVER_LATE, FILLER_OVER_REASONING],
             "phase 2": [None] * 3 + [*PUBLISHED["phase 2"], PUBLISHED["early over late"], PUBLISHED["filler over reasoning"]]}
    found, columns = {name: figures(values) for name, values in accounts.items()}, {"": ("", FIGURES)}
    for name, estimates in found.items():
        columns |= {f"pub. {name}": (".3f", known[name])} if name in known else {}
        columns |= with_interval(name, ".3f", estimates)
    one, logits = ([shown(e.value, ".2f") for e in found[name]] for name in ("phase 1", "abs(A) s"))
    finding = (f"abs(t) of phase 1 is above 3 at a share of {one[0]} of the positions for the size and of {one[3]} for the signed number "
               f"(published: {known['phase 1'][0]:.2f}). Early tokens get {one[6]} times what late ones get (published: {EARLY_OVER_LATE:.2f}), "
               f"filler {one[7]} times what reasoning gets (published: {FILLER_OVER_REASONING:.2f}). In the gradient at the logits these ratios are "
               f"{logits[6]} and {logits[7]}.")
    notes = ["size: norm(g), abs(A log p), abs(A) s; signed: mean of g over its dimensions, A log p, A s; filler and reasoning by the earlier regex",
             "pub.: published figures of other models (phase 1: Qwen3-4B, 100 answers; phase 2: Qwen2.5-0.5B-Instruct), for orientation, not for "
             "comparison. Which number went into phase 1's t was not published; phase 2's early over late is the first tenth over the last",
             "intervals of t: rough, as late positions are reached by few answers"]
    return Table("phases", "Phase 1 beside phase 2, and beside the gradient that GRPO applies at the logits", columns, finding, notes)


def reward_table(accounts: dict[str, Given], shuffled: dict[str, Given]) -> Table:
    one, tokens, rows = accounts["phase 1"], accounts["phase 1"].tokens, []
    for name, values in accounts.items():
        rank, answers = within_answers(tokens, one.size, values.size)
        change = np.abs(shuffled[name].signed - values.signed)
        rows.append([name, rank.value, rank.interval, answers, change.max(initial=0.0), change.sum() / max(np.abs(values.signed).sum(), 1e-300)])
    rank, answers = within_answers(tokens, one.size, (tokens.length[tokens.answer] - tokens.position).astype(float))
    rows.append(["tokens still to come", rank.value, rank.interval, answers, None, None])
    formats = {"size": "", "rank correlation": "+.2f", "95%": "+.2f", "answers": ",d", "largest change": ".3g", "changes, of all sizes": ".0%"}
    finding = (f"Phase 1 was computed again after every answer had been given the reward of a random one: the largest change of a token is "
               f"{rows[0][4]:.3g}, because no reward enters it. The changes of the gradient at the logits add up to {rows[2][5]:.0%} of its size. "
               f"Within an answer the size of phase 1 has a rank correlation of {shown(rows[2][1], '+.2f')} with that gradient, and of "
               f"{shown(rank.value, '+.2f')} with the number of tokens still to come.")
    notes = ["rank correlation: Spearman's with the size of phase 1 within answers, mean over answers and then questions; within an answer phase 2 "
             "and abs(A) s rank tokens as abs(log p) and s do, where A is not 0; changes: of the signed number, when rewards are shuffled"]
    return Table("wrong gradient", "Flaw 1, the wrong gradient: phase 1 knows no reward", by_row(formats, rows), finding, notes)


def position_table(one: Given, zero_counted: Given, apart: dict[str, Given]) -> Table:
    values = {"phase 1: all terms added": one, "the same, the last token's 0 counted": zero_counted, **apart}
    early, _, late = ([v.size[v.tokens.end == end].mean() if (v.tokens.end == end).any() else None for v in values.values()] for end in range(3))
    found = [early_over_late(v) for v in values.values()]
    columns = {"of a token": ("", list(values)), "early": (".4g", early), "late": (".4g", late),
               **with_interval("early over late", ".2f", found), "difference": ("", verdicts(found, ("early more", "late more")))}
    times = {name: f"{shown(e.value, '.2f')} times" for name, e in zip(values, found)}
    finding = (f"Early tokens get {times['phase 1: all terms added']} what late ones get. They are reached by {times[REACH]} as many loss terms; "
               f"one term alone gives them {times[TERM]} as much on average, the term of the next token {times[NEXT]}. The mean s of the "
               f"terms that reach them, small where the model is sure of what follows, is {times[CERTAIN]} that of the terms that reach late ones.")
    notes = [f"from the third row on: {len(np.unique(apart[TERM].tokens.answer))} answers whose loss terms were taken one at a time, not divided by "
             "n; equal ones: (sum of sizes)^2 / sum of squared sizes; Holm's correction over the rows"]
    return Table("position", "Flaw 2, position: is early over late a matter of how many loss terms reach a token?", columns, finding, notes)


def distance_table(rollouts: Rollouts, chosen: torch.Tensor, norms: torch.Tensor) -> Table:
    there = torch.ones_like(norms).tril(-1) * rollouts.mask[chosen].cpu()[..., None]
    b, i, j = (x.numpy() for x in there.nonzero(as_tuple=True))
    power = np.ceil(np.log2(i - j)).astype(int)
    names = [f"{2 ** k // 2 + 1}-{2 ** k}" if k > 1 else str(k + 1) for k in range(int(power.max(initial=0)) + 1)]
    parts = sums(rollouts.group[chosen].cpu().numpy()[b], power, len(names), norms.numpy()[b, i, j])
    total, found = parts.sum(0), [over(parts, k, 0) for k in range(len(names))]
    shares = total[1] / max(total[1].sum(), 1e-300)
    columns = {"tokens back": ("", names), "pairs": (",.0f", total[0]), "mean size": (".4f", [mean_of(total, [k]) for k in range(len(names))]),
               **with_interval("over that at 1", ".3f", found), "of all sizes": (".1%", shares)}
    far = max([k for k, e in enumerate(found) if np.isfinite(e.low)], default=0)
    return Table("distance", "Flaw 2, position: the size of one loss term, by how far back the token stands", columns,
                 f"{shares[0]:.1%} of all that single loss terms give goes to the token just before. {names[far]} tokens back a term gives "
                 f"{shown(found[far].value, '.3f')} times as much as there.")


def classes_table(values: dict[str, Given], rollouts: Rollouts) -> Table:
    code = np.full(len(KINDS), 2)
    code[[WORD, NUMBER, OPERATOR, BRACKET]] = 0, 1, 1, 1
    ratios = [[*class_ratio(v, v.tokens.naive), *class_ratio(v, code[v.tokens.flat(rollouts.kind).astype(int)])] for v in values.values()]
    columns = {"size": ("", list(values))}
    for heading, found in zip(("regex", "like place", "spans", "spans, like place"), zip(*ratios)):
        columns |= with_interval(heading, ".2f", found)
    crude, like, spans, spans_like = (shown(e.value, ".2f") for e in ratios[0])
    return Table("classes", "Flaws 2 and 5, position and crude classes: filler over reasoning", columns,
                 f"In phase 1 filler gets {crude} times what reasoning gets, and {like} times at like positions (1 if it were early over late in "
                 f"disguise). Words over numbers, operators and brackets, by the spans of the text: {spans}, at like positions {spans_like}.",
                 [f"like place: both weighted to the same spread over {BINS} bins of relative position; spans: tags and spaces on neither side"])


def kinds_table(accounts: dict[str, Given], rollouts: Rollouts) -> Table:
    tokens = accounts["phase 1"].tokens
    kind, filler = tokens.flat(rollouts.kind).astype(int), tokens.naive == CLASSES.index("filler")
    by_regex, by_span = ({f"{name} ({way})": codes == c for c, name in enumerate(names) if (codes == c).any()}
                         for way, names, codes in (("regex", CLASSES, tokens.naive), ("span", KINDS, kind)))
    cells = by_regex | by_span
    part = {name: float((cell & filler).sum() / max(filler.sum(), 1)) for name, cell in cells.items()}
    columns = {"class": ("", list(cells)), "tokens": (",d", [int(cell.sum()) for cell in cells.values()]),
               "of the regex's filler": (".1%", list(part.values())),
               "mean place": (".2f", [tokens.relative[cell].mean() for cell in cells.values()])}
    for name, v in accounts.items():
        columns[name] = ".2f", [v.size[cell].mean() / v.size.mean() if v.size.any() else None for cell in cells.values()]
    made_of = [f"{part[name]:.1%} {name.split()[0]}" for name in sorted(by_span, key=part.get, reverse=True) if part[name] > 0]
    return Table("kinds", "Flaw 5, crude classes: what the regex calls filler, and what each kind of token gets", columns,
                 f"What the regex calls filler is, by the spans of the text, {', '.join(made_of) or 'nothing'}.",
                 ["phase 1, phase 2, abs(A) s: mean size over the mean of all tokens; mean place: 0 at the start of an answer, 1 at its end"])


def t_table(real: Given, random: Given, rng: np.random.Generator) -> Table:
    parts = [sums(v.tokens.answer, v.tokens.position, v.tokens.inside.shape[1], x) for v in (real, random) for x in (v.size, v.signed)]
    answers, rows = len(parts[0]), []
    common = parts[0][:, 0].sum(0) >= answers / 2  # with all positions, more answers would also mean more of those that few reach
    for n in [*(n for k in range(20) if (n := 25 * 2 ** k) < answers), answers]:
        subsets = [rng.permutation(answers)[:n] for _ in range(DRAWS)]
        t = [[t_statistics(*p[subset].sum(0)[:, common]) for subset in subsets] for p in parts]
        above, mean = (np.array([[mean_figure(x, figure) for x in some] for some in t]).mean(1) for figure in ("abs(t) > 3", "mean abs(t)"))
        rows.append([str(n), mean[0], mean[0] / n ** 0.5, *above])
    formats = {"answers": "", "mean abs(t), size": ".2f", "over sqrt(n)": ".2f", "size": ".1%", "signed": ".1%", "size, random text": ".1%",
               "signed, random text": ".1%"}
    few, many = ([row[0], shown(row[1], ".2f"), *(shown(share, ".1%") for share in row[3:])] for row in (rows[0], rows[-1]))
    finding = (f"From {few[0]} to {many[0]} answers the mean abs(t) of the size goes from {few[1]} to {many[1]}, and the share above 3 from {few[2]} "
               f"to {many[2]}: a size is never negative, so its t grows with the number of answers. From {many[0]} answers of random text the share "
               f"is {many[4]}; with a sign it is {many[3]} on real answers.")
    title = f"Flaw 3, t: share of abs(t) > 3, at the {int(common.sum())} positions that half of the answers reach"
    return Table("t", title, by_row(formats, rows), finding,
                 [f"n answers: mean over {DRAWS} random subsets; random text: tokens drawn evenly from the vocabulary; normal draws: 0.3% above 3"])


def flat_table(accounts: dict[str, Given], rollouts: Rollouts) -> Table:
    advantage = accounts["phase 1"].tokens.flat(rollouts.advantage), rollouts.advantage[:, 0].cpu().numpy()
    token, answer = (1 - np.sign(A).astype(int) for A in advantage)
    answers = np.bincount(answer, minlength=3)
    columns = {"with": ("", SIGNS), "answers": (",d", answers), "of all": (".1%", answers / len(answer))}
    for name, v in accounts.items():
        columns[name] = ".1%", np.bincount(token, v.size, 3) / v.size.sum() if v.size.any() else [None] * 3
    _, none, against = (shown(share, ".1%") for share in columns["phase 1"][1])
    return Table("after the fact", "Flaw 4, after the fact: what training did with these answers", columns,
                 f"{answers[1] / len(answer):.1%} of the answers belong to groups of equal rewards and get no gradient in training; phase 1 gives "
                 f"them {none} of its size. Another {against} it gives to answers with A < 0, which training makes less likely.",
                 ["phase 1, phase 2, abs(A) s: shares of summed sizes"])


def controls_table(controls: dict[str, Given]) -> Table:
    found = {name: figures(v) for name, v in controls.items()}
    of = dict(zip(FIGURES, zip(*found.values())))
    columns = {"phase 1 of": ("", list(found)), **with_interval("early over late", ".2f", of["early over late"]),
               **with_interval("filler over reasoning", ".2f", of["filler over reasoning"])}
    columns |= {name: (".2f" if "mean" in name else ".1%", [e.value for e in of[name]]) for name in FIGURES[:-2]}
    each = [f"{name} {shown(e[-2].value, '.2f')} and {shown(e[-1].value, '.2f')}" for name, e in found.items()]
    return Table("controls", "The same where nothing was earned, or nothing learned", columns,
                 f"Early over late and filler over reasoning: {'; '.join(each)}.")


def tenths_table(values: dict[str, Given]) -> Table:
    totals = {name: sums(v.tokens.question, v.tokens.tenth, 10, v.size).sum(0) for name, v in values.items()}
    means = {name: [mean_of(total, [i]) / mean_of(total) if total[1].any() else None for i in range(10)] for name, total in totals.items()}
    columns = {"tenth": ("", [str(i + 1) for i in range(10)]), **{name: (".2f", mean) for name, mean in means.items()}}
    one, logits = (", ".join(shown(means[name][i], ".2f") for i in (0, 4, 8)) for name in ("phase 1", "abs(A) s"))
    return Table("tenths", "Size by tenth of the answer, over the mean of all tokens", columns,
                 f"In the first, fifth and ninth tenth phase 1 has {one} times its mean size, the gradient at the logits {logits} times.")


def picture(tenths: Table, distance: Table, folder: Path) -> tuple[Path, str]:
    figure, (left, right) = panels(2)
    for (name, (_, values)), colour in zip(list(tenths.columns.items())[1:], COLOURS):
        left.plot(range(1, 11), np.array(values, float), color=colour, marker="o", ms=3, lw=1.4, label=name)
    left.set(xlabel="tenth of the answer", ylabel="size, over the mean of all", xticks=range(1, 11), title="Which part of an answer gets more?")
    left.legend()
    known = [row for row in distance.rows if np.isfinite(row[4][0])]  # what few questions say is in the table only
    names, values = [row[0] for row in known], [row[3] for row in known]
    right.plot(range(len(known)), values, color=COLOURS[0], marker="o", ms=3, lw=1.4)
    right.set(xlabel="tokens back", ylabel="size of one loss term, over that at 1", yscale="log", title="How far back does one loss term reach?")
    right.set_xticks(range(len(names)), names, fontsize=8)
    return save(figure, folder, "size_by_place", "Size by tenth of the answer in five accounts, and of one loss term by how far back a token stands")


def measure(probe: Probe) -> Findings:
    args, lab, progress = probe.args, probe.lab(), Progress(answers=2, phase_1=3, shuffled_rewards=3, controls=9, single_terms=30, tables=6)
    progress("answers")
    rollouts = sample_batch(lab, 1, args.questions, args.answers)
    tokens, rows = Tokens(lab, rollouts, analysed(rollouts)), torch.arange(len(rollouts.mask), device=rollouts.mask.device)
    progress("phase_1")
    size, signed = phase_one(lab, rollouts)
    accounts = three_accounts(tokens, rollouts, size, signed)
    progress("shuffled_rewards")
    other = shuffled_rewards(rollouts)
    shuffled = three_accounts(tokens, other, *phase_one(lab, other))
    progress("controls")
    controls = {"real answers, trained model": accounts["phase 1"], **controls_of(lab, rollouts, tokens, args.seed)}
    chosen = rows[rows % args.answers < args.single]
    norms = single_terms(lab, rollouts, chosen, lambda share: progress("single_terms", share))
    progress("tables")
    apart, zero_counted = terms_apart(lab, rollouts, chosen, norms), given(Tokens(lab, rollouts, rollouts.mask), signed, size)
    several = {"phase 1": accounts["phase 1"], TERM: apart[TERM], NEXT: apart[NEXT], **accounts}
    distance, tenths = distance_table(rollouts, chosen, norms), tenths_table(several)
    tables = [phases_table(accounts), reward_table(accounts, shuffled), position_table(accounts["phase 1"], zero_counted, apart), distance,
              classes_table(several, rollouts), kinds_table(accounts, rollouts),
              t_table(accounts["phase 1"], controls["random text, trained model"], np.random.default_rng(args.seed)),
              flat_table(accounts, rollouts), controls_table(controls), tenths]
    intro = [f"{len(rows):,} answers of {args.model} to {args.questions} questions, {len(tokens.answer):,} tokens: the last of each answer is "
             "left out, where phase 1 is 0 by construction. Phase 1 is the gradient of an answer's mean cross-entropy at its tokens' embeddings."]
    short = ("phases", "wrong gradient", "position", "classes", "t", "after the fact", "controls")
    return Findings("Phase 1: a gradient that never saw a reward", intro, tables, short, [picture(tenths, distance, probe.folder)],
                    {"tenths": ("size_by_place",)})
