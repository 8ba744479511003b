"""Answers of several turns: what an environment writes is in the context, and in nothing else."""
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, refusal
from small import hand_made, one_of

import grpo
import mitigations  # noqa: F401  fills the choices
from lab.analysis.token_table import read_step
from lab.credit.monte_carlo import prefix_values
from lab.engine.dynamic import joined
from lab.engine.methods import ADVANTAGES, MITIGATIONS, make
from lab.engine.optimizer import AdamW
from lab.engine.rollouts import ByTurns, score_answers, turns_of
from examples.guess import Game, Task
from examples.histories import BIG, SMALL
from lab.engine.update import update
from lab.harness.build import load_policy, refuse_methods_of_one_turn
from lab.analysis.run_folders import read_columns, read_credit
from lab.harness.record import write_credit
from lab.harness.settings import make_settings
from lab.harness.tasks import CheckedTask, score_again
from lab.tests.paid_guess import PRICE
from lab_runs import assert_goes_on_the_same, run

GUESSER = ROOT / "models/guesser"
GAMES = [Game(2, "a"), Game(5, "b"), Game(7, "c")]


@pytest.fixture(scope="module")
def policy():
    return load_policy(make_settings({"model": str(GUESSER)}))


@pytest.fixture(scope="module")
def games(policy):
    batch = policy.ask(GAMES, 16, seed=1)
    assert batch.turn.max() == 2 and not batch.mask.equal(batch.written)
    return batch


def test_the_environment_has_written_what_it_replies(policy, games):
    """After each turn but the last; what the model wrote is told to it turn by turn."""
    pieces = zip(games.texts, games.drawn.tolist(), games.turns, games.group.tolist())
    for texts, drawn, turns, group in pieces:
        own = "".join(text for text, is_own in zip(texts, drawn) if is_own)
        foreign = "".join(text for text, is_own in zip(texts, drawn) if not is_own)
        assert own == "".join(f"{turn}<|im_end|>" for turn in turns)
        secret = GAMES[group].secret
        assert foreign == "".join(BIG if int(turn) > secret else SMALL for turn in turns[:-1])
    last = [turns[-1] for turns in games.turns]
    won = [turn == f" {GAMES[g].secret}" for turn, g in zip(last, games.group.tolist())]
    assert games.reward.tolist() == [float(one) for one in won] and games.finished.all()
    assert 0 < sum(won) < len(won)


def test_a_step_is_that_of_the_formula_over_the_models_tokens(games):
    """Loss and gradient, by a loop over single tokens with a plain forward pass."""
    policy = load_policy(make_settings({"model": str(GUESSER)}))
    advantage = torch.linspace(-1, 1, len(games.ids))[:, None] * games.mask
    weight = (1 + 0.1 * torch.arange(games.ids.shape[1])) * games.mask
    batch = replace(games, advantage=advantage)
    other = load_policy(make_settings({"model": str(GUESSER)})).model
    loss, N = 0.0, int(games.mask.sum())
    for row, ids in enumerate(games.groups_and_ids[1]):
        prompt = games.prompt_ids[int(games.group[row])]
        log_p = other(torch.tensor([prompt + ids]))[0].log_softmax(-1)
        for t, token in enumerate(ids):
            if games.mask[row, t]:
                term = weight[row, t] * advantage[row, t] * log_p[len(prompt) - 1 + t, token]
                loss = loss - term / N
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in other.parameters()]).norm()
    optimizer = AdamW(policy.model.parameters(), 1e-3, 0.0)
    metrics, _ = update(policy.model, optimizer, batch, weight, policy.settings)
    assert metrics["N"] == metrics["trained_tokens"] == N < int(games.written.sum())
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert metrics["gradient_norm"] == pytest.approx(norm.item(), rel=1e-4)
    assert metrics["sampler_gap"] < 1e-5


def test_what_a_model_writes_itself_is_no_reply(policy):
    """The same tokens, drawn by the model: one turn, which is no number and loses."""
    ids = policy.tokenizer.encode(f" 4<|im_end|>{BIG} 2<|im_end|>").ids
    assert turns_of(policy.tokenizer, ids, [True] * len(ids)) == [f" 4<|im_end|>{BIG} 2"]
    drawn = [True, True, False, False, False, True, True]
    assert turns_of(policy.tokenizer, ids, drawn) == [" 4", " 2"]
    assert policy.environment.drawn_in(GAMES[0], ids) == drawn
    assert policy.environment.drawn_in(GAMES[0], ids[:4]) == drawn[:4]
    assert policy.reward_of(GAMES[0], ids) == 1.0
    assert policy.task.score(GAMES[0], [f" 4<|im_end|>{BIG} 2"])["reward"] == 0.0
    both = hand_made([[True] * 7, drawn], ids=torch.tensor([ids, ids]), problems=GAMES[:1],
                     group=torch.zeros(2, dtype=torch.long), written=torch.ones(2, 7).bool())
    assert score_answers(both, policy.tokenizer, policy.task).reward.tolist() == [0.0, 1.0]


def test_what_the_books_sample_leaves_out_stays_out(policy, games, monkeypatch):
    sample = grpo.sample

    def edited(*given):
        batch = sample(*given)
        batch.mask[:, 0] = False
        return batch

    monkeypatch.setattr(grpo, "sample", edited)
    found = policy.ask(GAMES, 16, seed=1)
    assert torch.equal(found.mask[:, 1:], games.mask[:, 1:]) and found.turns == games.turns
    assert not found.mask[:, 0].any() and not found.written[:, 0].any()


def test_a_text_that_was_not_sampled_has_no_turns(policy, games):
    """Nobody knows who wrote which part of it."""
    asked = ByTurns(policy.task, policy.tokenizer, [GAMES[0]] * len(games.ids), games)
    assert asked.score(GAMES[0], games.answers[0])["answer"] in (0, 1)
    for problem, text in ((GAMES[1], games.answers[0]), (GAMES[0], games.answers[0] + " 1")):
        assert f"none of this batch is {text!r}" in refusal(asked.score, problem, text)


def test_the_value_of_a_prefix_is_computed_and_sampled(policy, games):
    """Continuations of answers to a secret, which the environment goes on answering; and an end of
    a turn to which there is no reply is the end."""
    tree = Task().tree(policy.tokenizer).evaluate(policy.model)
    cuts = [[] for _ in games.turns]
    expected = {}
    for row, turns in enumerate(games.turns[:6]):
        if int(games.ids[row, 0]) not in tree.numbers:
            continue
        first = tree.numbers.index(int(games.ids[row, 0]))
        is_over = len(turns) == 1
        after = tree.levels[0].later[0, first, GAMES[0].secret - 1]
        # before the reply to the first turn, within it and after it
        cuts[row] = [2] if is_over else [2, 4, 5]
        expected[row] = after.item()
    k = 300
    values, _ = prefix_values(policy, games, cuts, k)
    for row, value in expected.items():
        for found in values[row]:
            assert abs(found - value) <= 4.5 * (value * (1 - value) / k) ** 0.5


def odd_task(answer):
    """The game with another reply."""
    task = Task()
    task.reply = lambda problem, turns: answer(problem, turns) if len(turns) < 3 else None
    return CheckedTask(task)


@pytest.mark.parametrize("answer, said", [
    (lambda problem, turns: 3, "should return a text that is not empty, or None if the answer"),
    (lambda problem, turns: "", "It returned ''"),
    (lambda problem, turns: " zebra", "cannot spell what reply (lab/tests/engine/test_turns.py:")])
def test_a_reply_that_is_none_is_refused(policy, answer, said):
    odd = replace(policy, task=odd_task(answer))
    assert said in refusal(odd.ask, GAMES[:1], 2, 1)


def test_a_reply_that_is_not_the_same_twice_is_refused(policy):
    rng = random.Random(0)
    odd = replace(policy, task=odd_task(lambda *_: rng.choice((BIG, SMALL))))
    batch = odd.ask(GAMES[:1], 8, 1)
    said = refusal(score_again, batch, odd.task, "odd", odd.environment)
    assert said.startswith("reply (lab/tests/engine/test_turns.py:") and "asked twice" in said


def test_a_game_without_end_is_cut_off_at_the_limit_and_told(policy, games, capsys):
    odd = Task()
    odd.reply = lambda problem, turns: BIG
    endless = replace(policy, task=CheckedTask(odd))
    batch = endless.ask(GAMES[:1], 4, seed=1)
    assert not batch.finished.any() and (batch.written.sum(1) == 16).all()
    told = "every answer of this step was cut off at --max_new_tokens. Does its reply never"
    for one, asked, environment, count in ((batch, endless, endless.environment, 1),
                                           (games, policy, policy.environment, 0),
                                           (batch, endless, None, 0)):
        score_again(one, asked.task, "odd", environment)
        assert capsys.readouterr().out.count(told) == count


def test_the_record_has_all_tokens_and_says_which_are_the_models(policy, games, tmp_path):
    batch = replace(games, advantage=games.mask * 1.0, step=1)
    (tmp_path / "credit").mkdir()
    write_credit(tmp_path / "credit/step_000001.npz", batch, games.mask * 1.0)
    columns = read_columns(tmp_path, 1)
    assert columns["own"].sum() == games.mask.sum() and len(columns["own"]) == games.written.sum()
    again = read_credit(tmp_path, 1, policy.tokenizer)
    for name in ("ids", "mask", "written", "log_prob"):
        assert getattr(again, name).equal(getattr(games, name)[:, :again.ids.shape[1]]), name
    record = read_step(tmp_path, 1)
    assert len(record.tokens) == games.mask.sum() and record.tokens["own"].all()
    assert record.answers["length"].tolist() == games.length.tolist()
    for b in range(len(games.ids)):
        own = record.tokens.where(record.tokens["answer"] == b)
        assert own["position"].tolist() == list(range(int(games.length[b])))
        tokens = record.tokens_of(b)
        assert tokens["token_id"].tolist() == games.groups_and_ids[1][b]
        assert np.array_equal(tokens["own"] > 0, games.drawn[b, :len(tokens)])


def squeezed(rollouts):
    """The same batch without what the environment wrote, and how to bring back what is computed."""
    order = (~rollouts.mask).long().sort(dim=1, stable=True).indices
    T = int(rollouts.length.max())

    def move(frame):
        return frame.gather(1, order)[:, :T]

    mask = move(rollouts.mask)
    names = ("ids", "log_prob", "entropy", "collision", "section", "kind", "advantage")
    frames = {name: move(getattr(rollouts, name)) * mask for name in names}
    return replace(rollouts, mask=mask, written=mask, **frames), move


OF_PLACES = {"turn_mean",  # where a turn begins
             "attention_credit",  # and of what can be looked at
             "random",  # a number for each place
             "dpo"}     # of examples/dpo.py, if it is loaded


def functions():
    return [(axis, name) for axis, choices in (("mitigation", MITIGATIONS),
                                               ("advantage", ADVANTAGES))
            for name in choices if not isinstance(choices[name], type) and name not in OF_PLACES]


@pytest.mark.parametrize("axis, name", functions())
def test_methods_see_the_models_tokens_alone(games, axis, name):
    """As if nothing had been written between them."""
    choices = MITIGATIONS if axis == "mitigation" else ADVANTAGES
    scores = {**games.scores, "reward": torch.linspace(0, 1, len(games.ids))}
    batch = replace(games, advantage=torch.linspace(-1, 1, len(games.ids))[:, None] * games.mask,
                    scores=scores)
    without, move = squeezed(batch)
    found, expected = (choices[name](replace(one, generator=torch.Generator().manual_seed(0)))
                       for one in (batch, without))
    found = move(found.expand(batch.mask.shape)) * without.mask
    torch.testing.assert_close(found, expected.expand(without.mask.shape) * without.mask)


@pytest.mark.parametrize("axis, name", [
    ("mitigation", "causal_ablation"), ("advantage", "deletion")])
def test_methods_of_one_turn_are_refused(axis, name):
    s = make_settings({"model": str(GUESSER), axis: name})
    assert refusal(refuse_methods_of_one_turn, s, Task()).startswith(
        f"--{axis} {name} takes answers of one turn")
    refuse_methods_of_one_turn(s, SimpleNamespace())


def test_a_held_out_game_is_told_from_others_by_what_show_says():
    """All games have one prompt."""
    task = CheckedTask(Task())
    assert len(task.held_out_problems(9)) == 9 and len(task.training_problems(0, 1, 50)) == 50
    mixed = Task()
    mixed.training_problems = lambda *_: mixed.held_out_problems(1)
    task = CheckedTask(mixed)
    task.held_out_problems(2)
    assert "may not be trained on" in refusal(task.training_problems, 0, 1, 1)


@pytest.fixture(scope="module")
def paid_games():
    policy = load_policy(make_settings({"model": str(GUESSER), "task": "lab.tests.paid_guess"}))
    return policy.ask(GAMES, 16, seed=1)


def test_turns_are_paid_at_their_last_tokens(games, paid_games):
    """Also where a reply follows that was cut off, and in rows that are chosen and joined."""
    assert paid_games.ids.equal(games.ids) and games.of_turns.dim() == 0
    won = games.reward[:, None] * (games.turn == games.turn.amax(1, keepdim=True))
    assert paid_games.paid.equal((won - PRICE) * games.ends_turn)
    assert paid_games.to_go[:, 0].equal(paid_games.reward)
    parts = [paid_games.of_problems(range(g, g + 1)) for g in range(3)]
    T = joined(parts).ids.shape[1]
    assert joined(parts).of_turns.equal(paid_games.of_turns[:, :T])
    assert joined([games.of_problems(range(1))]).of_turns.dim() == 0


class AtTheEnd(Task):
    def score(self, problem, turns):
        score = super().score(problem, turns)
        return {**score, "reward": [*[0.0] * (len(turns) - 1), score["reward"]]}


@pytest.mark.parametrize("name", ["grpo", "turn_mean", "gae", "without_luck"])
def test_a_list_that_pays_at_the_end_alone_is_one_reward_to_the_last_digit(policy, name):
    """Also for a second batch, which the critic of gae has learned from the first one."""
    found = []
    for task in (policy.task, CheckedTask(AtTheEnd())):
        player = replace(policy, task=task)
        method = make(ADVANTAGES[name], {}, player)
        for seed in (1, 2):
            batch = replace(player.ask(GAMES, 16, seed=seed), forward=player.extra_forward(),
                            generator=torch.Generator().manual_seed(0))
            found.append(method(batch, player))
    assert found[0].equal(found[2]) and found[1].equal(found[3]) and found[1].any()


def test_gae_is_paid_where_turns_end(policy, paid_games):
    """Its first critic says 0. At lambda 1 a token gets what is paid from it on, at lambda 0 what
    is paid at it."""
    batch = replace(paid_games, forward=policy.extra_forward())
    for gae_lambda, expected in ((1.0, batch.to_go * batch.mask), (0.0, batch.paid)):
        found = make(ADVANTAGES["gae"], {"gae_lambda": gae_lambda}, policy)(batch, policy)
        torch.testing.assert_close(found, expected)


def test_a_turn_whose_reward_depends_on_a_later_one_is_refused(policy, games):
    class Late(Task):
        def score(self, problem, turns):
            return {**super().score(problem, turns), "reward": [float(len(turns))] * len(turns)}

    task = CheckedTask(Late())
    batch = score_answers(games, policy.tokenizer, task)
    said = refusal(score_again, batch, task, "my_task")
    assert "and the first 1 of them alone have [1.0]" in said


@pytest.mark.parametrize("flags", one_of(6, [
    "--task lab.tests.paid_guess --advantage gae --dynamic_sampling 2",
    "", "--lora 4 --epochs 2 --kl 0.1",
    "--mitigation lambda_grpo --drop_unfinished --micro_batch 7",
    "--advantage vine --values_k 2 --values_every 2 --dynamic_sampling 2",
    "--advantage gae --loss_norm sequence"]))
def test_stopped_and_resumed_is_as_if_never_stopped(tmp_path, flags):
    short = ["--questions", "3", "--answers", "4", "--eval_tasks", "8", "--eval_every", "2",
             "--checkpoint_every", "1"]
    run("--model", GUESSER, "--steps", 2, *short, *flags.split(), "--out",
        tmp_path / "whole")
    assert_goes_on_the_same(tmp_path / "whole", tmp_path / "stopped")
