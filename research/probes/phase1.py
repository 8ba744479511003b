"""Does phase 1 measure credit? A gradient that never saw a reward, and what exposes it.

    python -m research phase1 --model runs/none-grpo-s0/checkpoints/step_000100

An earlier experiment took the answers of a trained model and computed of each the gradient of the
cross-entropy at the embeddings of its tokens, g_j = d loss / d embedding_j. Its size counted as the
credit of token j, and t = mean / (std / sqrt n) of a position over answers as its consistency: a
token with abs(t) < 1.5 was filler, with abs(t) > 3 reasoning. Its second attempt, phase 2, is the
contribution A log p of each token of a training. Both stand here in one table, beside

    random text     answers of the same lengths, their tokens drawn evenly: no credit is in it
    untrained       the same answers by a model with fresh weights; and random text by it
    loss terms      how many terms of the loss reach a token, from its position alone
    abs(A) s        the size of GRPO's gradient at the logits

Which number went into the t of phase 1 is not on record: here are that of the size, which is never
negative, and that of the mean of g over its dimensions, which has a sign. Early and late are the
first and the last fifth of an answer; filler and reasoning are by the notes' regular expressions,
at like positions: every fifth counts the same for both. The last token of an answer, which
predicts nothing, is left out. If phase 1 measured credit, its pattern would vanish in the controls.

Phase 2 is of the credit files of the run that the checkpoint lies in, all its steps; of another
model, of the same answers as phase 1.
"""
import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from analysis.notes import CLASSES, FILLER, REASONING, class_codes
from analysis.plots import COLOURS, legend_below, plt, save
from analysis.statistics import t_values
from analysis.tables import Table, by_row
from analysis.tally import Tokens, read_tokens
from engine.forward import lay_out, log_probs_of_each, micro_batches
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts
from engine.tokens import KINDS, WORD
from grpo import gradient_size, grpo
from harness.record import credit_steps
from harness.flags import Flag
from qwen2_model import Qwen2
from research.probes.common import (OF_A_MODEL, Findings, Progress, jackknifed, policy_of, run_of,
                                    sample_batch)

FLAGS = {
    **OF_A_MODEL,
    "questions": Flag(25, "problems", least=2, most=10_000),
    "answers": Flag(4, "answers to each problem", least=2, most=1000)}
FIFTHS = 5
PHASE_1, PHASE_2, GRADIENT = "phase 1", "phase 2", "abs(A) s"
NOTES = {  # what the notes say of phase 1 and phase 2
    "t of the size above 3": ("0.83", "-"), "t of the size below 1.5": ("0.019", "-"),
    "abs(t) above 3": ("-", "0.20"), "abs(t) below 1.5": ("-", "0.39"),
    "mean abs(t)": ("-", "1.92"), "early over late": ("4", "1.6"),
    "filler over reasoning": ("1.75", "1.31"),
    "the same at like positions": ("-", "1.24")}  # from their table of five bins


@dataclass
class Account:
    """What each token gets and where it stands, (n,) each."""
    signed: np.ndarray
    size: np.ndarray
    problem: np.ndarray
    answer: np.ndarray
    position: np.ndarray
    fifth: np.ndarray      # of its answer, 0 to 4
    code: np.ndarray       # of CLASSES

    def of(self, kept: np.ndarray) -> "Account":
        return Account(**{name: values[kept] for name, values in vars(self).items()})


@np.errstate(invalid="ignore", divide="ignore")  # of few answers some shares are of nothing: NaN
def measure(args: SimpleNamespace, folder: Path) -> Findings:
    policy = policy_of(args)
    progress = Progress(answers=2, phase_1=2, random_text=2, untrained=4)
    progress("answers")
    rollouts = sample_batch(policy, args.questions, args.answers)
    progress("phase_1")
    phase_1 = phase_one(policy, rollouts)
    progress("random_text")
    text = random_text(policy, rollouts)
    accounts = {PHASE_1: phase_1, "random text": phase_one(policy, text)}
    progress("untrained")
    forget(policy.model, derived_seed("untrained", args.seed))
    accounts |= {"untrained": phase_one(policy, rollouts),
                 "untrained, random text": phase_one(policy, text)}
    s = gradient_size(rollouts.log_prob.double(), rollouts.collision.double())
    places = torch.arange(rollouts.mask.shape[1], device=rollouts.mask.device)
    accounts |= {"loss terms": account(policy, rollouts, rollouts.length[:, None] - 1 - places),
                 GRADIENT: account(policy, rollouts, rollouts.advantage * s)}
    run = run_of(policy.folder)
    run = run if run and credit_steps(run) else None
    accounts[PHASE_2] = phase_two(run, policy) if run else account(
        policy, rollouts, rollouts.advantage * rollouts.log_prob)
    draw(accounts, folder)
    source = f"the credit files of {run}" if run else "the same answers"
    intro = [f"{policy.folder}: {args.questions} problems x {args.answers} answers, "
             f"{len(phase_1.size):,} tokens; phase 2 is of {source}."]
    return Findings("Phase 1: a gradient that never saw a reward", intro,
                    [phases_table(accounts), flaws_table(policy, rollouts, accounts)])


def phase_one(policy: Policy, rollouts: Rollouts) -> Account:
    """The gradient of each answer's mean cross-entropy at its tokens' embeddings: the mean over its
    dimensions, and its norm."""
    size, signed = torch.zeros(2, *rollouts.mask.shape, device=rollouts.mask.device)
    seen: dict[str, torch.Tensor] = {}
    hook = policy.model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: seen.update(embeddings=output))
    for rows in micro_batches(rollouts, rollouts.rows_of_rank(), policy.settings.micro_batch):
        log_prob = log_probs_of_each(policy.model, rollouts, rows)
        loss = -(log_prob.sum(1) / rollouts.length[rows]).sum()
        gradient, = torch.autograd.grad(loss, seen["embeddings"])
        _, _, predicts = lay_out(rollouts, rows)
        g = gradient.float()[predicts.roll(-1, 1)]  # token t stands where t + 1 is predicted
        size[rows], signed[rows] = g.norm(dim=-1), g.mean(-1)
    hook.remove()
    return account(policy, rollouts, signed, size)


def account(policy: Policy, rollouts: Rollouts, signed: torch.Tensor,
            size: torch.Tensor | None = None) -> Account:
    """Of numbers (B, T), without the last token of each answer; without a size it is abs."""
    length = rollouts.length.cpu().numpy()
    counts = rollouts.mask.clone()
    counts[torch.arange(len(counts)), rollouts.length - 1] = False
    answer, position = counts.cpu().numpy().nonzero()
    size = signed.abs() if size is None else size
    return Account(
        signed[counts].double().cpu().numpy(), size[counts].double().cpu().numpy(),
        rollouts.group.cpu().numpy()[answer], answer, position,
        fifth=FIFTHS * (2 * position + 1) // (2 * length[answer]),
        code=class_codes(policy.tokenizer, rollouts.ids[counts].cpu().numpy()))


def phase_two(run: Path, policy: Policy) -> Account:
    """A log p of all tokens of a training, from its credit files. A problem is one of a step."""
    steps = [of_step(read_tokens(run, step)) for step in credit_steps(run)]
    columns = {name: np.concatenate([step[name] for step in steps]) for name in steps[0]}
    for name in ("problem", "answer"):  # each step counts from 0
        counts = np.array([step[name].max() + 1 for step in steps])
        before = np.repeat(np.cumsum(counts) - counts, [len(step[name]) for step in steps])
        columns[name] += before
    return Account(**{name: values for name, values in columns.items() if name != "id"},
                   code=class_codes(policy.tokenizer, columns["id"]))


def of_step(tokens: Tokens) -> Tokens:
    contribution, answer = tokens["advantage"] * tokens["log_prob"], tokens["answer"]
    position = np.arange(len(answer)) - tokens["episode_start"][answer]
    return {"id": tokens["token_id"], "signed": contribution, "size": np.abs(contribution),
            "problem": tokens["group"][answer], "answer": answer.copy(), "position": position,
            "fifth": FIFTHS * (2 * position + 1) // (2 * tokens["length"][answer])}


def forget(model: Qwen2, seed: int) -> None:
    """Draw its weights anew, in place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.draw_parameters()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not name.endswith("bias"):
            torch.nn.init.ones_(parameter)


def random_text(policy: Policy, rollouts: Rollouts) -> Rollouts:
    """Answers of the same lengths to the same problems, their tokens drawn evenly."""
    ids = torch.randint(policy.tokenizer.get_vocab_size(), rollouts.ids.shape,
                        generator=rollouts.generator)
    return replace(rollouts, ids=ids.to(rollouts.ids.device) * rollouts.mask)


def t_by_position(tokens: Account, of: str = "signed") -> np.ndarray:
    """abs(t) of each position that several answers have."""
    number = getattr(tokens, of)
    n, total, square = (np.bincount(tokens.position, values) for values in (
        np.ones(len(number)), number, number ** 2))
    return np.abs(t_values(*(values[n > 1] for values in (n, total, square))))


def mean_of(values: np.ndarray) -> np.float64:
    """NaN where there is none, as of a fifth of very short answers."""
    return values.mean() if len(values) else np.float64(math.nan)


def class_ratio(tokens: Account) -> float:
    filler, reasoning = (mean_of(tokens.size[tokens.code == CLASSES.index(name)])
                         for name in (FILLER, REASONING))
    return float(filler / reasoning)


def ratio_at_like_positions(tokens: Account) -> float:
    """Every fifth of the answers counts the same, for both classes."""
    filler, reasoning = (sum(mean_of(tokens.size[(tokens.code == CLASSES.index(name))
                                                 & (tokens.fifth == fifth)])
                             for fifth in range(FIFTHS)) for name in (FILLER, REASONING))
    return float(filler / reasoning)


def early_over_late(tokens: Account) -> float:
    early, late = (mean_of(tokens.size[tokens.fifth == fifth]) for fifth in (0, FIFTHS - 1))
    return float(early / late)


MEASURES = {
    "t of the size above 3": lambda tokens: mean_of(t_by_position(tokens, "size") > 3),
    "t of the size below 1.5": lambda tokens: mean_of(t_by_position(tokens, "size") < 1.5),
    "abs(t) above 3": lambda tokens: mean_of(t_by_position(tokens) > 3),
    "abs(t) below 1.5": lambda tokens: mean_of(t_by_position(tokens) < 1.5),
    "mean abs(t)": lambda tokens: mean_of(t_by_position(tokens)),
    "early over late": early_over_late, "filler over reasoning": class_ratio,
    "the same at like positions": ratio_at_like_positions}


def value_of(tokens: Account, name: str) -> float:
    return float(MEASURES[name](tokens))


def phases_table(accounts: dict[str, Account]) -> Table:
    controls = [name for name in accounts if name not in (PHASE_1, PHASE_2)]
    rows, found = [], {}
    for name, statistic in MEASURES.items():
        found[name] = [value_of(accounts[one], name) for one in (PHASE_1, "random text")]
        row = [name]
        for said, one in zip(NOTES.get(name, ("-", "-")), (PHASE_1, PHASE_2)):
            tokens = accounts[one]
            # of a whole training the problems are too many to leave out one by one
            e = jackknifed(lambda kept: statistic(tokens.of(kept)), tokens.problem) if (
                one == PHASE_1) else None
            row += [said, value_of(tokens, name), *([e.interval] if e else [])]
        rows.append([*row, *(value_of(accounts[one], name) for one in controls)])
    formats = {"measure": "", "notes 1": "", PHASE_1: ".3g", "95%": ".3g", "notes 2": "",
               PHASE_2: ".3g", **dict.fromkeys(controls, ".3g")}
    lines = [f"{name}: phase 1 {real:.3g}, random text {other:.3g}."
             for name, (real, other) in found.items() if "over" in name or "above 3" in name]
    return Table("phases", "Phase 1 beside phase 2 and what holds no credit",
                 by_row(formats, rows), "\n".join(lines),
                 ["interval: over problems (jackknife). t by position; ratios of mean sizes"],
                 {"notes 1": "phase 1 in the notes", "notes 2": "phase 2 in the notes",
                  "95%": "95% interval"})


def flaws_table(policy: Policy, rollouts: Rollouts, accounts: dict[str, Account]) -> Table:
    phase_1, given = accounts[PHASE_1], accounts[GRADIENT]
    order = torch.randperm(len(rollouts.reward), generator=rollouts.generator)
    scores = {name: value[order.to(value.device)] for name, value in rollouts.scores.items()}
    shuffled = grpo(replace(rollouts, scores=scores))
    other = account(policy, rollouts, shuffled * gradient_size(rollouts.log_prob,
                                                               rollouts.collision))
    changed = np.abs(other.signed - given.signed).sum() / given.size.sum()
    untouched = given.size == 0
    kinds = rollouts.kind.cpu().numpy()[phase_1.answer, phase_1.position]
    filler = kinds[phase_1.code == CLASSES.index(FILLER)]
    half = phase_1.of(phase_1.answer % 2 == 0)
    rows = [
        ["wrong gradient: shuffled rewards change what GRPO gives by this share, phase 1 by 0",
         changed],
        ["correlation of its size with abs(A) s", correlation(phase_1.size, given.size)],
        ["position: early over late where there is nothing to credit, untrained and random text",
         value_of(accounts["untrained, random text"], "early over late")],
        ["correlation of its size with the number of loss terms",
         correlation(phase_1.size, accounts["loss terms"].size)],
        ["t: share above 3 of the size, which is never negative",
         value_of(phase_1, "t of the size above 3")],
        ["the same number with a sign", value_of(phase_1, "abs(t) above 3")],
        ["t grows with the answers: mean t of the size with all over that with half of them",
         mean_of(t_by_position(phase_1, "size")) / mean_of(t_by_position(half, "size"))],
        ["after the fact: share of it in answers of which training learns nothing (A = 0)",
         phase_1.size[untouched].sum() / phase_1.size.sum()],
        ["crude classes: share of filler that is no word but a tag, a space, an end",
         mean_of(filler != WORD)]]
    lines = [f"{rows[place][0]}: {rows[place][1]:.3g}." for place in (0, 2, 4, 7, 8)]
    return Table("flaws", "The five flaws, each with the number that shows it",
                 by_row({"flaw": "", "found": ".3g"}, rows), "\n".join(lines),
                 [f"kinds: {', '.join(KINDS)}"])


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one, other)[0, 1])


def draw(accounts: dict[str, Account], folder: Path) -> None:
    """Mean size by tenths of the answers, over the mean of all."""
    figure, axis = plt.subplots()
    for (name, tokens), colour in zip(accounts.items(), COLOURS):
        means = [mean_of(tokens.size[tokens.fifth == fifth]) for fifth in range(FIFTHS)]
        axis.plot(np.arange(1, FIFTHS + 1), np.array(means) / tokens.size.mean(), "o-",
                  color=colour, label=name)
    axis.set(xlabel="fifth of the answer", ylabel="mean size over that of all tokens",
             title="By position: phase 1, phase 2, and what holds no credit", yscale="log")
    legend_below(figure, axis, ncols=4)
    save(figure, folder, "positions", "Mean size by place in the answer")
