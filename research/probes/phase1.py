"""Does phase 1 measure credit? A gradient that never saw a reward, and the controls that expose it.

Question. An earlier experiment wanted to know which tokens earn the reward. Its phase 1 took the
answers of a trained model and computed, answer by answer, the gradient of the cross-entropy at the
embeddings of the answer's tokens. For token j of an answer of n tokens that is

    g_j = d loss / d embedding_j,    loss = - 1/n sum_i log pi(y_i | prompt, y_<i)

The size of g_j was published as the credit of a token: early tokens get 4 times what late ones get,
filler 1.75 times what reasoning gets, and at 83% of the positions abs(t) is above 3, with
t = mean / (std / sqrt(answers)).

Measurement. The same gradient for a batch of answers, beside the second attempt (phase 2, A log p)
and beside the gradient that GRPO applies at the logits, abs(A) s; then again where there is no
credit to find: rewards shuffled, random text, an untrained model, the mere number of loss terms.

Reading it. If phase 1 measured credit, shuffled rewards would change it and its pattern over
positions and classes would vanish in the controls. Five flaws are looked for: the wrong gradient
(no reward enters it), position (more loss terms reach early tokens), t (a size, which is never
negative, has a large one wherever answers are many), a look after the fact (training learns nothing
of answers whose group has equal rewards), crude classes (a regex calls tags and spaces filler).

It is not on record which number of a token went into t: the size norm(g), or a number with a sign,
the mean of g over the embedding's dimensions. Both are shown. The last token of an answer, whose g
is always 0, is left out. The earlier experiment's model had been trained with GRPO; to ask such a
one, add --model runs/none-grpo-s0/checkpoints/step_000100.
"""
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from analysis.plots import COLOURS, legend_below, panels, save
from analysis.earlier_sums import t_statistics
from analysis.statistics import FEWEST, Estimate
from analysis.tables import Table, by_row, shown
from analysis.tally import Vocabulary
from engine.tokens import BRACKET, KINDS, NUMBER, OPERATOR, WORD
from harness.flags import Flag
from engine.forward import lay_out, response_log_probs
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts
from grpo import gradient_size, grpo
from qwen2_model import Qwen2
from research.probes.common import OF_A_MODEL, Findings, Probe, sample_batch
from research.probes.progress import Progress
from research.statistics import jackknife

FLAGS = {
    **OF_A_MODEL,
    "questions": Flag(32, "problems", least=2, most=10_000, quick=6),
    "answers": Flag(16, "answers to each problem", least=2, most=1000, quick=5)}
T_MEASURES = {"abs(t) > 3": lambda t: t > 3, "abs(t) < 1.5": lambda t: t < 1.5,
              "mean abs(t)": lambda t: t}
EARLY, FILLER, WORDS = "early over late", "filler over reasoning", "words over numbers"
SHUFFLED, NO_SIGN = "change by shuffled rewards", "share of A = 0"


@dataclass
class Account:
    """What each token gets, and where it stands. A class is a code, 0 or 1, or 2 for neither.
    All tokens of an answer count but its last, which predicts nothing."""
    size: np.ndarray
    signed: np.ndarray
    advantage: np.ndarray
    question: np.ndarray
    position: np.ndarray
    relative: np.ndarray   # 0 at the start of the answer, 1 at its end
    end: np.ndarray        # 0 in its first fifth, 1 in its last
    regex: np.ndarray      # 0 filler, 1 reasoning, as the earlier experiment told them apart
    span: np.ndarray       # 0 words, 1 numbers, operators and brackets, by the spans of the text


def measure(probe: Probe) -> Findings:
    args, policy = probe.args, probe.policy()
    progress = Progress(answers=2, phase_1=3, shuffled_rewards=3, controls=9, tables=3)
    progress("answers")
    rollouts = sample_batch(policy, 1, args.questions, args.answers)
    progress("phase_1")
    accounts = three_accounts(policy, rollouts)
    progress("shuffled_rewards")
    shuffled = three_accounts(policy, shuffled_rewards(rollouts))
    progress("controls")
    text = random_text(policy, rollouts)
    fresh = replace(policy, model=untrained(policy.model, derived_seed("untrained", args.seed)))
    controls = {"real answers, trained model": accounts["phase 1"],
                "random text, trained model": phase_one(policy, text),
                "real answers, untrained model": phase_one(fresh, rollouts),
                "random text, untrained model": phase_one(fresh, text),
                "no gradient: the loss terms that reach it": term_count(policy, rollouts)}
    progress("tables")
    tables = [phases_table(accounts, shuffled), controls_table(controls)]
    intro = [f"{args.model}: {args.questions} problems x {args.answers} answers, "
             f"{len(accounts['phase 1'].size):,} tokens without the last of each answer.",
             "Phase 1 is the gradient of an answer's mean cross-entropy at its tokens' embeddings."]
    picture = draw({"the gradient at the logits": accounts["abs(A) s"], **controls}, probe.folder)
    return Findings("Phase 1: a gradient that never saw a reward", intro, tables, picture,
                    "some minutes")


def three_accounts(policy: Policy, rollouts: Rollouts) -> dict[str, Account]:
    s = gradient_size(rollouts.log_prob.double(), rollouts.collision.double())
    return {"phase 1": phase_one(policy, rollouts),
            "phase 2": account(policy, rollouts, rollouts.advantage * rollouts.log_prob),
            "abs(A) s": account(policy, rollouts, rollouts.advantage * s)}


def phase_one(policy: Policy, rollouts: Rollouts) -> Account:
    """Of each token the norm of g, and the mean of g over its dimensions."""
    size, signed = torch.zeros(2, *rollouts.mask.shape, device=rollouts.mask.device)
    seen = {}
    hook = policy.model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: seen.update(embeddings=output))
    for rows in rollouts.length.nonzero().squeeze(1).split(policy.settings.micro_batch):
        log_prob = response_log_probs(policy.model, rollouts, rows)
        loss = -(log_prob.sum(1) / rollouts.length[rows]).sum()
        gradient, = torch.autograd.grad(loss, seen["embeddings"])
        _, _, predicts = lay_out(rollouts, rows)
        g = gradient.float()[predicts.roll(-1, 1)]  # token t stands where t + 1 is predicted
        size[rows], signed[rows] = g.norm(dim=-1), g.mean(-1)
    hook.remove()
    return account(policy, rollouts, signed, size)


def term_count(policy: Policy, rollouts: Rollouts) -> Account:
    """How many loss terms reach a token: what position alone would do."""
    positions = torch.arange(rollouts.mask.shape[1], device=rollouts.mask.device)
    return account(policy, rollouts, rollouts.length[:, None] - 1 - positions)


def account(policy: Policy, rollouts: Rollouts, signed: torch.Tensor,
            size: torch.Tensor | None = None) -> Account:
    """Of numbers (B, T); without a size it is their absolute value."""
    counts = rollouts.mask.clone()
    counts[torch.arange(len(counts)), rollouts.length - 1] = False  # the last of each answer

    def flat(frame):
        return frame[counts].cpu().numpy()

    answer, position = counts.cpu().numpy().nonzero()
    relative = (position + 0.5) / rollouts.length.cpu().numpy()[answer]
    span_of_kind = np.full(len(KINDS), 2)
    span_of_kind[WORD], span_of_kind[[NUMBER, OPERATOR, BRACKET]] = 0, 1
    return Account(
        flat((signed.abs() if size is None else size).double()), flat(signed.double()),
        flat(rollouts.advantage), rollouts.group.cpu().numpy()[answer], position, relative,
        end=np.where(relative < 0.2, 0, np.where(relative < 0.8, 2, 1)),
        regex=Vocabulary(policy.tokenizer).classes(flat(rollouts.ids)),
        span=span_of_kind[flat(rollouts.kind)])


def untrained(model: Qwen2, seed: int) -> Qwen2:
    """The same architecture with fresh weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2(model.config).to(model.device)


def random_text(policy: Policy, rollouts: Rollouts) -> Rollouts:
    """Answers of the same lengths to the same problems, their tokens drawn evenly."""
    vocabulary = policy.tokenizer.get_vocab_size()
    ids = torch.randint(vocabulary, rollouts.ids.shape, generator=rollouts.generator)
    return replace(rollouts, ids=ids.to(rollouts.ids.device) * rollouts.mask)


def shuffled_rewards(rollouts: Rollouts) -> Rollouts:
    """Give every answer the scores of a random answer, whichever problem that one was for."""
    order = torch.randperm(len(rollouts.reward), generator=rollouts.generator)
    scores = {name: value[order.to(value.device)] for name, value in rollouts.scores.items()}
    shuffled = replace(rollouts, scores=scores)
    return replace(shuffled, advantage=grpo(shuffled))


def by_question(values: Account, cell: np.ndarray, number: np.ndarray) -> np.ndarray:
    """(problems, 3, cells): count, sum and sum of squares of a number in each cell."""
    problems, cells = values.question.max() + 1, max(3, cell.max() + 1)
    index = values.question * cells + cell
    sums = [np.bincount(index, x, problems * cells).reshape(problems, cells)
            for x in (np.ones_like(number), number, number ** 2)]
    return np.stack(sums, axis=1)


def jackknifed(sums: np.ndarray, statistic: Callable) -> Estimate:
    """A statistic of the sums over all problems, its interval from the sums without each one, as
    the answers to a problem are not independent."""
    with np.errstate(invalid="ignore", divide="ignore"):
        without = [statistic(np.delete(sums, q, 0).sum(0)) for q in range(len(sums))]
        return jackknife(statistic(sums.sum(0)), np.array(without))


def class_ratio(values: Account, code: np.ndarray) -> Estimate:
    """Mean size of the tokens of code 0 over that of code 1; the interval is of the logarithm."""
    sums = by_question(values, code, values.size)

    def logarithm(sums):
        mean = sums[1] / sums[0]
        return np.log(mean[0] / mean[1])

    e = jackknifed(sums, logarithm)
    value, low, high = np.exp([e.value, *e.interval]).tolist()
    if (sums[:, 1, :2] > 0).sum(0).min() < FEWEST:  # problems on the emptier side
        low = high = np.nan
    return Estimate(value, low, high, e.p)


def t_measure(values: Account, number: np.ndarray, name: str) -> Estimate:
    """One of T_MEASURES of the t at each position."""
    def mean(sums):
        t = t_statistics(*sums)
        return T_MEASURES[name](np.abs(t)).mean() if len(t) else np.nan

    return jackknifed(by_question(values, values.position, number), mean)


def phases_table(accounts: dict[str, Account], shuffled: dict[str, Account]) -> Table:
    measures = {name: measures_of(values, shuffled[name].signed)
                for name, values in accounts.items()}
    names = list(measures["phase 1"])
    columns, headings = {"": ("", names)}, {"": "measure"}
    for name, of_account in measures.items():
        columns[name] = (".3f", [e.value for e in of_account.values()])
        columns[f"95%, {name}"] = (".3f", [e.interval for e in of_account.values()])
        headings[f"95%, {name}"] = f"95% interval of {name}"
    one, logits = ({name: shown(e.value, ".2f") for name, e in measures[account].items()}
                   for account in ("phase 1", "abs(A) s"))
    beside = [f"{name}: {one[name]} (gradient at the logits {logits[name]})"
              for name in (SHUFFLED, EARLY, FILLER, WORDS)]
    finding = (f"{beside[0]}.\n{', '.join(beside[1:])}.\n"
               f"Share of phase 1 in answers of which training learns nothing: {one[NO_SIGN]}.")
    notes = ["size: norm(g), abs(A log p), abs(A) s; signed: mean of g over its dimensions, "
             "A log p, A s. Early and late: the first and the last fifth of an answer. Filler and "
             "reasoning by the earlier experiment's regex, words and numbers (with operators and "
             "brackets) by spans. Intervals leave out each problem in turn."]
    title = "Phase 1 beside phase 2, and beside the gradient that GRPO applies at the logits"
    return Table("phases", title, columns, finding, notes, headings)


def measures_of(values: Account, shuffled: np.ndarray) -> dict[str, Estimate]:
    """`shuffled` are the signed numbers with shuffled rewards."""
    size, signed = values.size, values.signed
    shares = {SHUFFLED: np.abs(shuffled - signed).sum() / max(np.abs(signed).sum(), 1e-300),
              NO_SIGN: size[values.advantage == 0].sum() / max(size.sum(), 1e-300)}
    return {**{f"{which}: {name}": t_measure(values, number, name) for which, number in
               (("size", size), ("signed", signed)) for name in T_MEASURES},
            EARLY: class_ratio(values, values.end), FILLER: class_ratio(values, values.regex),
            WORDS: class_ratio(values, values.span),
            **{name: Estimate(float(share), np.nan, np.nan, np.nan)
               for name, share in shares.items()}}


def controls_table(controls: dict[str, Account]) -> Table:
    rows = []
    for name, values in controls.items():
        early, filler = (class_ratio(values, code) for code in (values.end, values.regex))
        t = t_measure(values, values.size, "abs(t) > 3").value
        rows.append((name, early.value, early.interval, filler.value, filler.interval, t))
    formats = {"phase 1 of": "", EARLY: ".2f", f"95%, {EARLY}": ".2f", FILLER: ".2f",
               f"95%, {FILLER}": ".2f", "size: abs(t) > 3": ".1%"}
    finding = "\n".join(f"{name[0].upper()}{name[1:]}: early over late {shown(early, '.2f')}, "
                        f"filler over reasoning {shown(filler, '.2f')}, abs(t) > 3 at "
                        f"{shown(t, '.1%')}." for name, early, _, filler, _, t in rows)
    headings = {f"95%, {name}": f"95% interval of {name}" for name in (EARLY, FILLER)}
    return Table("controls", "The same where nothing was earned, or nothing learned",
                 by_row(formats, rows), finding, headings=headings)


def draw(accounts: dict[str, Account], folder: Path) -> tuple[Path, str]:
    figure, axis = panels(1)
    for (name, values), colour in zip(accounts.items(), COLOURS):
        tenth = (10 * values.relative).astype(int)
        with np.errstate(invalid="ignore"):
            mean = np.bincount(tenth, values.size, 10) / np.bincount(tenth, minlength=10)
            axis.plot(range(1, 11), mean / values.size.mean(), color=colour, marker="o", ms=3,
                      lw=1.4, label=name)
    axis.set(xlabel="tenth of the answer", ylabel="size, over the mean of all", xticks=range(1, 11),
             title="Which part of an answer gets more?")
    legend_below(figure, axis, ncols=2)
    return save(figure, folder, "size_by_place", "Size by tenth of the answer: phase 1, its "
                "controls, and the gradient that GRPO applies")
