"""Credit of turns: without the luck of replies, by hand; sampled, against the exact values; and the
methods that need no more than the turns."""
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, refusal
from small import hand_made

import mitigations  # noqa: F401  fills the choices
from lab.credit.turns import Redraw, Worth, redrawn_values, turn_credit, turn_mean, without_luck
from examples.guess import Game, Task
from lab.engine.methods import ADVANTAGES
from lab.engine.rollouts import OF_TURNS
from lab.harness.build import load_policy
from lab.harness.settings import make_settings

# guess a number from 1 to 3 in two tries: for each answer its secret and its turns
ANSWERS = [(1, ["2", "1"]), (2, ["2"]), (3, ["2", "1"]), (1, ["3", "2"])]
REWARD = [1.0, 1.0, 0.0, 0.0]
MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [1, 1, 0, 1], [1, 1, 0, 1]], dtype=torch.bool)


class Guess:
    """Its `redraw` goes through the secrets that fit, one after the other."""
    count, tries = 0, 2

    def prompt_for(self, secret):
        return "1 3"

    def show(self, secret):
        return f"the secret {secret}"

    def reply(self, secret, turns):
        if int(turns[-1]) == secret or len(turns) == self.tries:
            return None
        return "big" if int(turns[-1]) > secret else "small"

    def score(self, secret, turns):
        return {"reward": float(int(turns[-1]) == secret)}

    def redraw(self, secret, turns, rng):
        fitting = [other for other in (1, 2, 3) if all(
            self.reply(other, turns[:d + 1]) == self.reply(secret, turns[:d + 1])
            for d in range(len(turns)))]
        self.count += 1
        return fitting[self.count % len(fitting)]


class Drawn(Guess):
    """Without `redraw`: the secrets of a step, in turn."""
    redraw = property()

    def training_problems(self, seed, step, count):
        return list(itertools.islice(itertools.cycle((1, 2, 3)), count))


def policy_of(task, **settings):
    """A turn ends with the token 1. A reply has as many tokens as words."""
    usual = dict(task="my_task", dynamic_sampling=1, questions=3, max_new_tokens=9)
    tokenizer = SimpleNamespace(
        token_to_id=lambda text: None,
        encode=lambda text, add_special_tokens: SimpleNamespace(ids=text.split()))
    return SimpleNamespace(task=task, settings=SimpleNamespace(**{**usual, **settings}),
                           tokenizer=tokenizer,
                           model=SimpleNamespace(config=SimpleNamespace(eos_token_id=(1,))))


def batch_of(**changed):
    """The answers to two problems, of which the second is a group of its own."""
    batch = hand_made(MASK, written=MASK.clone(), scores={"reward": torch.tensor(REWARD)})
    groups = dict(problems=[secret for secret, _ in ANSWERS], prompt_ids=[[5, 6]] * 4,
                  group=torch.arange(4), turns=[turns for _, turns in ANSWERS],
                  finished=torch.ones(4, dtype=torch.bool), step=1,
                  generator=torch.Generator().manual_seed(0))
    return replace(batch, **{**groups, **changed})


def test_luck_is_taken_out_by_hand():
    """The others' rewards at turn 0 have the means 1/3, 1/3, 2/3, 2/3; at turn 1, which the second
    answer does not reach, 0, 1/3, 1/2, 1/2. After a 2 one secret of three is right and the others
    go on, so X is (1 + 2 worth) / 3; after a 3, too. Then 1 is right for the only secret that is
    left after big and wrong after small, and 2 is right for one of the two below 3."""
    method = without_luck(policy_of(Guess()), redraws=6)
    found = method(batch_of(), policy_of(Guess()))
    expected = torch.tensor([[1, 1, 0, 1], [2 / 9, 2 / 9, 0, 0], [-.5, -.5, 0, -.5], [0, 0, 0, 0]])
    torch.testing.assert_close(found, expected)
    # the luck is -1/3 4/9 -1/6 -2/3: its variance is 281/1728, its covariance with the reward
    # 17/144, and the reward's variance 1/4
    share = (2 * 17 / 144 - 281 / 1728) / (1 / 4)
    assert method.metrics["luck_share"] == pytest.approx(share, rel=1e-5)


def test_an_answer_that_is_cut_off_has_what_it_earns():
    """The limit cuts off the second turn of the last answer: nothing goes on after it. Nor does the
    first turn of the third, so all three secrets are scored after it."""
    finished = torch.tensor([True, True, False, False])
    turns = [["2", "1"], ["2"], ["2"], ["3", "2"]]
    mask, ids = MASK.clone(), torch.ones(4, 4, dtype=torch.long)
    mask[2, 3] = False
    ids[2, 1] = ids[3, 3] = 7  # where a turn ends it would be a 1
    batch = batch_of(finished=finished, turns=turns, mask=mask, ids=ids)
    found = without_luck(policy_of(Guess()), redraws=6)(batch, policy_of(Guess()))
    # others at turn 0: 2/3; X is the reward of a 2, which is right for one of three
    assert found[2].tolist() == pytest.approx([1 / 3 - 2 / 3] * 2 + [0, 0])


def test_where_nothing_is_hidden_it_is_the_reward_minus_that_of_the_others(capsys):
    """No other problem of the step has this prompt."""
    class Open(Drawn):
        def prompt_for(self, secret):
            return str(secret)

        def training_problems(self, seed, step, count):
            return [7] * count

    batch = batch_of(prompt_ids=[[1], [2], [3], [1]])
    found = without_luck(policy_of(Open()))(batch, policy_of(Open()))
    assert torch.equal(found, turn_mean(batch))
    assert "for 7 of 7 turns in step 1 no other problem was found" in capsys.readouterr().out


def test_problems_that_fit_are_those_that_reply_alike():
    """Each as often as the others, and at most as many as were asked for."""
    redraw = Redraw(policy_of(Drawn()), batch_of(), redraws=30)
    assert [sorted({*redraw.problems([place], 10)}) for place in (
        (0, 0), (0, 1), (1, 0), (2, 1), (3, 1))] == [[1, 2, 3], [1], [1, 2, 3], [3], [1, 2]]
    assert len(redraw.problems([(0, 0)], 10)) == 10 and redraw.alone == 0
    assert redraw.that_fit(redraw.read[3][1]).count(1) == 15  # of 30, for one answer


@pytest.mark.parametrize("other, prompt_for, said", [
    (2, lambda secret: "1 3", "replies None to the turns ['2'], and not 'big'"),
    (4, str, "has another prompt")])
def test_a_redraw_that_contradicts_what_was_read_is_refused(other, prompt_for, said):
    policy = policy_of(Guess())
    policy.task.prompt_for = prompt_for
    policy.task.redraw = lambda secret, turns, rng: other if turns else secret
    found = refusal(without_luck(policy), batch_of(), policy)
    assert said in found and "looks the same to a model that has read this far" in found


def test_a_redraw_that_fits_every_reply_is_taken():
    """Each reply is compared with the one to the turns before it: to 1 small, to 1 and 3 big."""
    redraw = Redraw(policy_of(Guess()), batch_of(), 1)
    redraw.task.reply = lambda secret, turns: "big" if int(turns[-1]) > secret else "small"
    assert redraw.redrawn(2, ["1", "3"], ((), ("1", "3"), ("small", "big"))) == 2


@pytest.mark.parametrize("name, method", [
    ("without_luck", without_luck), ("turn_credit", lambda p: turn_credit(p, continuations=2))])
def test_a_task_of_one_turn_and_chosen_groups_are_refused(name, method):
    assert refusal(method, policy_of(SimpleNamespace())).startswith(
        f"--advantage {name} needs answers of several turns, and --task my_task has no method")
    assert "--dynamic_sampling" in refusal(method, policy_of(Guess(), dynamic_sampling=2))
    assert "--continuations 4 samples it" in refusal(turn_credit, policy_of(Guess()))


def test_worth_is_the_mean_reward_of_the_others_that_reach_a_turn():
    """Of one prompt. Where no other answer reaches a turn, the turn before it stands for it."""
    worth = Worth(batch_of(prompt_ids=[[1], [1], [2], [2]]))
    assert [worth.at(row, 0) for row in range(4)] == [1, 1, 0, 0]
    assert worth.at(0, 1) == 1.0  # the second has one turn
    assert worth.at(1, 1) == 1.0 and worth.at(2, 1) == 0.0


def test_turn_mean_by_hand():
    """Of one group: the means of the others that reach each turn are subtracted."""
    batch = batch_of(group=torch.zeros(4, dtype=torch.long), problems=[1], prompt_ids=[[5, 6]])
    others = torch.tensor([[1 / 3, 1 / 3, 2 / 3, 2 / 3], [0, 0, .5, .5]])
    reward = torch.tensor(REWARD)
    expected = torch.stack([reward - others[0]] * 3 + [reward - others[1]], 1) * MASK
    torch.testing.assert_close(turn_mean(batch), expected)


# the same game, in which the first guess costs 1/4 and each later one 1/2
PAID = torch.tensor([[0, -.25, 0, .5], [0, .75, 0, 0], [0, -.25, 0, -.5], [0, -.25, 0, -.5]])


class Priced(Guess):
    def score(self, secret, turns):
        of_turns = [(int(turn) == secret) - (0.5 if d else 0.25) for d, turn in enumerate(turns)]
        return {"reward": sum(of_turns), OF_TURNS: of_turns}


def paid_batch(**changed):
    """The rewards are 0.25, 0.75, -0.75 and -0.75. What is paid for the second turns is 0.5, -0.5
    and -0.5."""
    return batch_of(of_turns=PAID, scores={"reward": PAID.sum(1)}, **changed)


def one_group(**changed):
    return paid_batch(group=torch.zeros(4, dtype=torch.long), problems=[1], prompt_ids=[[5, 6]],
                      **changed)


def test_rewards_of_turns_by_hand():
    """turn_mean compares what is still to come: in turn 0 the sums, with means of the others of
    -1/4, -5/12, 1/12, 1/12; in turn 1 with -1/2, 0, 0. GRPO compares the sums."""
    batch = one_group()
    expected = torch.tensor([[.5, .5, 0, 1], [7 / 6, 7 / 6, 0, 0], [-5 / 6, -5 / 6, 0, -.5],
                             [-5 / 6, -5 / 6, 0, -.5]])
    torch.testing.assert_close(turn_mean(batch), expected)
    sums = torch.tensor([.25, .75, -.75, -.75])
    z = (sums + 0.125) / (sums.std(correction=0) + 1e-4)
    torch.testing.assert_close(ADVANTAGES["grpo"](batch), z[:, None] * MASK)


def test_luck_is_taken_out_of_rewards_of_turns_by_hand():
    """After a first 2 a turn is paid 3/4 for one secret of three, and -1/4 for two, which go on.
    So the mean of X is (3/4 - 2/4 + 2 worth) / 3."""
    found = without_luck(policy_of(Priced()), redraws=6)(paid_batch(), policy_of(Priced()))
    on = [-.5, -1 / 6, 0, 0]  # what other problems are paid after turn 0
    first = [-.25 + on[0] - (.25 + 2 * on[0]) / 3, .75 - (.25 + 2 * on[1]) / 3,
             -.25 + on[2] - (.25 + 2 * on[2]) / 3, None]
    # 3 is right for one secret of three, too; 1 after "big" is right for the one that is left, 1
    # after "small" is wrong; 2 after a 3 is right for one of two
    first[3] = -.25 + on[3] - (.25 + 2 * on[3]) / 3
    later = [0, 0, 0, -.5]
    to_go, others = [.25, .75, -.75, -.75], [-.25, -5 / 12, 1 / 12, 1 / 12]
    expected = torch.zeros(4, 4)
    for row in range(4):
        expected[row, :2] = to_go[row] - others[row] - first[row] - later[row]
    expected[:, 3] = torch.tensor([.5 + .5, 0, -.5, -.5 + .5])
    torch.testing.assert_close(found, expected * MASK)


@pytest.mark.slow
@pytest.mark.parametrize("has_redraw", [False, True])
def test_sampled_values_are_the_exact_ones(monkeypatch, has_redraw):
    """Before and after each turn, with k continuations for each answer that comes there."""
    policy = load_policy(make_settings({"model": str(ROOT / "models/guesser"), "answers": "16"}))
    if has_redraw:
        monkeypatch.setattr(Task, "redraw", redraw_game, raising=False)
    batch = policy.ask([Game(secret, str(secret)) for secret in (1, 3, 4, 6, 7)], 8, seed=2)
    k = 25
    values, spent = redrawn_values(batch, policy, k)
    tree = Task().tree(policy.tokenizer)
    with torch.no_grad():
        tree.evaluate(policy.model)
    found = {}
    for row, of_answer in enumerate(values):
        places = list(tree.places(batch, row))
        read = batch.ids[row].tolist()
        for d, (before, after) in enumerate(of_answer):
            here = [place for place in places if place.depth == d]
            starts, ends = here[0], here[-1]
            exact = tree.values_at(starts)[0], tree.values_at(ends)[1]
            for value, true, t in zip((before, after), exact, (starts.t, ends.t + 1)):
                found.setdefault((*read[:t],), []).append((value, true))
    z = []
    for places in found.values():
        value, true = places[0]
        assert all(place == places[0] for place in places)
        if 1e-6 < true < 1 - 1e-6:
            z.append((value - true) / (true * (1 - true) / (k * len(places))) ** 0.5)
        else:
            assert value == pytest.approx(true, abs=1e-6)
    z = torch.tensor(z)
    assert len(z) > 40 and z.abs().max() < 4.2 and 0.7 < z.std() < 1.3 and abs(z.mean()) < 0.5
    assert spent["extra_tokens"] > spent["extra_answers"] > 0


def redraw_game(task, problem, turns, rng):
    low, high = 1, task.highest
    for turn in turns:
        guess = task.number_in(turn)
        if guess > problem.secret:
            high = min(high, guess - 1)
        else:
            low = max(low, guess + 1)
    return Game(rng.randint(low, high), "drawn again")
