"""Does phase 1 measure credit? A gradient that never saw a reward, and what exposes it.

    python -m lab phase1 --model runs/none-grpo-s0/checkpoints/step_000100

Phase 1 is what an earlier experiment did first. It took the answers of a trained model, and for
each answer the gradient of the cross-entropy with respect to the embeddings of its tokens,
g_j = d loss / d embedding_j. The size of g_j was taken for the credit of token j. For each position
it computed t = mean / (std / sqrt n) over the answers. A token with abs(t) < 1.5 was called filler,
and one with abs(t) > 3 reasoning. Phase 2 is its second attempt: the contribution A log p of each
token in a training. Both are measured here, and compared with

    random text     answers of the same lengths with tokens drawn evenly: there is no credit in them
    untrained       the same answers by a model with fresh weights; and random text by it
    loss terms      how many terms of the loss reach a token, from its position alone
    abs(A) s        the size of GRPO's gradient at the logits

The earlier experiment did not record from which number it computed the t of phase 1. So there are
two here: one of the size of g, which is never negative, and one of the mean of g over its
dimensions, which has a sign. Early and late mean the first and the last fifth of an answer. Filler
and reasoning are told apart by the earlier experiment's regular expressions. "At like positions"
means that both classes are averaged with the same weight for each fifth of the answer. The last
token of an answer predicts nothing and is left out. If phase 1 measured credit, its pattern would
vanish in the controls.

Phase 2 is measured on the credit files of the run that the checkpoint lies in, on all its steps;
for another model, on the same answers as phase 1.
"""
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from lab.probes.notes import class_codes
from analysis.tokens import TokenTable, joined_tables, read_tokens, table_of_frames
from engine.errors import UserError
from engine.forward import lay_out, log_probs_of_each, micro_batches
from engine.policy import Policy, derived_seed
from engine.rollouts import Rollouts
from grpo import gradient_size, grpo
from harness.record import credit_steps
from harness.flags import Flag
from qwen2_model import Qwen2
from lab.probes.common import (MODEL_FLAGS, Findings, Progress, policy_from_flags, run_of,
                                    sample_batch)
from lab.probes.phase1_tables import (GRADIENT, LOSS_TERMS, PHASE_1, PHASE_2, RANDOM_TEXT,
                                            UNTRAINED, UNTRAINED_RANDOM, flaws_table,
                                            phases_table)

FLAGS = {
    **MODEL_FLAGS,
    "questions": Flag(25, "number of problems", least=2, most=10_000),
    "answers": Flag(4, "answers to each problem", least=2, most=1000)}


@np.errstate(invalid="ignore", divide="ignore")  # of few answers some shares are of nothing: NaN
def measure(args: SimpleNamespace, folder: Path) -> Findings:
    policy = policy_from_flags(args)
    progress = Progress(answers=2, phase_1=2, random_text=2, untrained=4)
    progress("answers")
    rollouts = sample_batch(policy, args.questions, args.answers)
    progress("phase_1")
    found = {PHASE_1: phase_one(policy, rollouts)}
    if not len(found[PHASE_1]):
        raise UserError("every answer has a single token, and the last token of an answer predicts "
                        "nothing: phase 1 needs longer answers")
    progress("random_text")
    text = random_text(policy, rollouts)
    found[RANDOM_TEXT] = phase_one(policy, text)
    progress("untrained")
    forget(policy.model, derived_seed("untrained", args.seed))
    found[UNTRAINED] = phase_one(policy, rollouts)
    found[UNTRAINED_RANDOM] = phase_one(policy, text)

    positions = torch.arange(rollouts.mask.shape[1], device=rollouts.mask.device)
    found[LOSS_TERMS] = sizes_of(policy, rollouts, rollouts.length[:, None] - 1 - positions)
    s = gradient_size(rollouts.log_prob.double(), rollouts.collision.double())
    found[GRADIENT] = sizes_of(policy, rollouts, rollouts.advantage * s)
    run = run_of(policy.folder)
    if run and credit_steps(run):
        found[PHASE_2] = phase_two(run, policy)
        source = f"the credit files of {run}"
    else:
        found[PHASE_2] = sizes_of(policy, rollouts, rollouts.advantage * rollouts.log_prob)
        source = "the same answers"

    with_shuffled_rewards = gradient_of_shuffled_rewards(policy, rollouts)
    intro = [f"{policy.folder} gave {args.answers} answers to each of {args.questions} problems, "
             f"with {len(found[PHASE_1]):,} tokens in all. Phase 2 is measured on {source}.",
             "Phase 1 is the size of each token's gradient at its embedding, and phase 2 is A log "
             "p. The other columns are controls, explained by python -m lab phase1 --help."]
    return Findings("Phase 1: a gradient that never saw a reward", intro,
                    [phases_table(found), flaws_table(found, with_shuffled_rewards)])


def phase_one(policy: Policy, rollouts: Rollouts) -> TokenTable:
    """The gradient of each answer's mean cross-entropy at its tokens' embeddings: the mean over its
    dimensions, and its norm."""
    size, signed = torch.zeros(2, *rollouts.mask.shape, device=rollouts.mask.device)
    seen: dict[str, torch.Tensor] = {}
    hook = policy.model.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: seen.update(embeddings=output))
    for rows in micro_batches(rollouts, rollouts.rows, policy.settings.micro_batch):
        log_prob = log_probs_of_each(policy.model, rollouts, rows)
        loss = -(log_prob.sum(1) / rollouts.length[rows]).sum()
        gradient, = torch.autograd.grad(loss, seen["embeddings"])
        _, _, predicts = lay_out(rollouts, rows)
        g = gradient.float()[predicts.roll(-1, 1)]  # token t stands where t + 1 is predicted
        size[rows], signed[rows] = g.norm(dim=-1), g.mean(-1)
    hook.remove()
    return sizes_of(policy, rollouts, signed, size)


def sizes_of(policy: Policy, rollouts: Rollouts, signed: torch.Tensor,
             size: torch.Tensor | None = None) -> TokenTable:
    """A number (B, T) of each token with its sign, and its size: abs if no other is given. Without
    the last token of each answer."""
    size = signed.abs() if size is None else size
    tokens = table_of_frames(rollouts.mask, rollouts.group, {
        "token_id": rollouts.ids, "kind": rollouts.kind, "signed": signed.double(),
        "size": size.double()})
    tokens = tokens.where(tokens["position"] < tokens["length"] - 1)
    return with_classes(tokens, policy)


def with_classes(tokens: TokenTable, policy: Policy) -> TokenTable:
    return tokens.having({"class": class_codes(policy.tokenizer, tokens["token_id"])})


def phase_two(run: Path, policy: Policy) -> TokenTable:
    """A log p of all tokens of a training, from its credit files. A problem belongs to one step."""
    steps = []
    for step in credit_steps(run):
        tokens = read_tokens(run, step)
        contribution = tokens["advantage"] * tokens["log_prob"]
        kept = ("problem", "answer", "position", "length", "token_id")
        columns = {name: tokens[name] for name in kept}
        columns |= {"signed": contribution, "size": np.abs(contribution)}
        steps.append(TokenTable(columns))
    return with_classes(joined_tables(steps), policy)


def gradient_of_shuffled_rewards(policy: Policy, rollouts: Rollouts) -> TokenTable:
    """abs(A) s with the advantages that GRPO makes of rewards shuffled over all answers."""
    order = torch.randperm(len(rollouts.reward), generator=rollouts.generator)
    scores = {name: value[order.to(value.device)] for name, value in rollouts.scores.items()}
    advantage = grpo(replace(rollouts, scores=scores))
    s = gradient_size(rollouts.log_prob, rollouts.collision)
    return sizes_of(policy, rollouts, advantage * s)


def forget(model: Qwen2, seed: int) -> None:
    """Draw the weights of a model anew, in place."""
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
