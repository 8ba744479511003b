"""Answers by a server: bridges/tests/server.py in another process, well behaved and not."""
import re
import subprocess
import sys
import threading
from copy import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bridges import http_client
from bridges.http_client import Client
from bridges.remote_rollouts import Limits, RolloutServer, connect, laid_out, read_answers
from conftest import ROOT
from engine.errors import UserError
from harness.load import load_optimizer, load_policy
from engine.policy import encode_prompts
from engine.sampler import generate
from harness.settings import make_settings
from runs import arrays, assert_same_run, free_port, lines, run

FLAGS = ["--model", str(ROOT / "models/tiny"), "--threads", "1", "--questions", "1", "--answers",
         "8", "--max_new_tokens", "60", "--steps", "3", "--eval_every", "0", "--checkpoint_every",
         "1"]


@pytest.fixture(scope="module")
def address(learner):
    """Where the server is."""
    command = [sys.executable, "-m", "bridges.tests.server", learner, "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    yield re.search(r"http://\S+\d", process.stdout.readline())[0]
    process.kill()
    process.wait()


@pytest.fixture
def behave(address):
    """Tells the server how to behave; afterwards it is well behaved again."""
    def tell(how: str) -> None:
        Client(address, 60.0, 1000).ask("POST", "/behave", {"as": how})

    yield tell
    tell("")


@pytest.fixture(scope="module")
def policy(address, learner):
    """With the server that answers it, and two problems a step."""
    policy = load_policy(make_settings({"model": str(learner), "rollouts": address, "questions": 2,
                                  "max_new_tokens": 24}))
    policy.optimizer = load_optimizer(policy.settings, policy)
    policy.server = connect(policy, policy.optimizer, SimpleNamespace(step=2))
    return policy


def ask(policy, seconds=60.0):
    """The answers to a step's problems."""
    server = policy.server
    server.client = replace(server.client, seconds=60.0)
    server.ask_to_load(policy.folder)  # other tests have it load other weights
    server.client = replace(server.client, seconds=seconds)
    server.weights_of = 2
    return server.sample(policy.task.training_problems(0, 1, 2), 4, 77)


def said_by(function, *arguments) -> str:
    with pytest.raises(UserError) as error:
        function(*arguments)
    return str(error.value)


@pytest.fixture(scope="module")
def served(address, tmp_path_factory):
    """A run of three steps whose answers the server gave. What the environment says of proxies is
    not asked."""
    folder = tmp_path_factory.mktemp("served") / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            patch.setenv(name, "http://127.0.0.1:9")
        run(*FLAGS, "--out", folder, "--rollouts", address)
    return folder


def test_training_is_as_by_our_own_sampler(served, tmp_path):
    """The server samples as we do, and the first problem of a step has the step's own seed."""
    run(*FLAGS, "--out", tmp_path / "own")
    own, theirs = lines(tmp_path / "own/metrics.jsonl"), lines(served / "metrics.jsonl")
    for ours, other in zip(own, theirs, strict=True):
        assert other["sampler_gap"] < 1e-5
        for name in ("reward", "tokens", "loss", "gradient_norm", "entropy", "collision"):
            assert other[name] == pytest.approx(ours[name], abs=1e-5), name
    for name in ("credit/step_000003.npz", "checkpoints/step_000003/model.safetensors"):
        ours, theirs = arrays(tmp_path / "own" / name), arrays(served / name)
        for key in ours:
            assert abs(ours[key].astype(float) - theirs[key].astype(float)).max() < 1e-4, key


def test_the_server_has_the_weights_of_the_step(served, address, tmp_path):
    """Handed over after each step, or as often as was asked; one folder is kept."""
    [folder] = (served / "serve").iterdir()
    assert folder.name == "step_000002"
    given = arrays(folder / "model.safetensors")
    kept = arrays(served / "checkpoints/step_000002/model.safetensors")
    assert all((given[name] == kept[name]).all() for name in kept)
    run(*FLAGS, "--rollouts", address, "--out", tmp_path / "seldom", "--rollouts_every", "2",
        "--learning_rate", "0.003")
    gaps = [line["sampler_gap"] for line in lines(tmp_path / "seldom/metrics.jsonl")]
    assert gaps[0] < 1e-5 and gaps[1] > 0.05 and gaps[2] < 1e-5


def test_a_batch_is_in_the_frame_of_our_own(policy):
    """Each problem has seeds of its own, which no two answers share."""
    rollouts = ask(policy)
    problems = policy.task.training_problems(0, 1, 2)
    prompts = encode_prompts(policy.tokenizer, policy.task, problems)
    assert rollouts.prompt_ids == prompts and rollouts.group.tolist() == [0] * 4 + [1] * 4
    for number, prompt in enumerate(prompts):
        rows = slice(4 * number, 4 * number + 4)
        ours = generate(policy.model, [prompt], answers=4, max_new_tokens=24, seed=77 + 4 * number)
        assert torch.equal(rollouts.ids[rows], ours.tokens)
        assert torch.equal(rollouts.mask[rows], ours.mask)
        assert torch.equal(rollouts.finished[rows], ours.finished)
        for name in ("log_prob", "entropy", "collision"):
            torch.testing.assert_close(getattr(rollouts, name)[rows], getattr(ours, name),
                                       atol=1e-5, rtol=0)


def test_all_that_shapes_the_sampling_is_said(policy):
    """What is left out a server takes from the model's generation_config.json."""
    request = policy.server.request([5, 6], Limits(4, 24, 100, (2, 7)), 77)
    assert len(request.pop("cache_salt")) == 32 and request.pop("model")
    assert request == {
        "prompt": [5, 6], "n": 4, "seed": 77, "max_tokens": 24, "stop_token_ids": [2, 7],
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "logprobs": 0, "return_token_ids": True}


LIMITS = Limits(2, 3, 10, (2,))  # answers of three tokens below 10, which 2 ends


def choice(index=0, ids=(5, 2), log_probs=(5e-5, -1)):
    return {"index": index, "token_ids": ids and list(ids),
            "logprobs": {"token_logprobs": list(log_probs)}}


@pytest.mark.parametrize("changed, words", [
    (choice(1), "there should be 2, each with an index"),
    (choice(ids=None), "number 0 has no token_ids"),
    (choice(ids=(10, 2)), "outside the model's vocabulary"),
    (choice(ids=(5, 5, 5, 2)), "has 4 tokens, and no token that ends it. Does the "
     "server allow 3 tokens?"),
    (choice(ids=(5, 6)), "has 2 tokens, and no token that ends it"),
    *((choice(log_probs=(wrong, -1)), f"a log-prob for each token, not [{wrong}, -1]")
      for wrong in (None, 0.5, float("nan")))])
def test_what_is_wrong_with_an_answer_is_told(changed, words):
    assert words in said_by(read_answers, {"choices": [changed, choice(1)]}, LIMITS)


WORDS = {
    "null": "its answers to problem 1 of this step: number 0 should have a log-prob for each token",
    "halved": "no answer to /v1/completions (IncompleteRead(13 bytes read, 987 more",
    "html": "is not JSON", "broken": "with 500: CUDA out of",
    "silent": "no whole answer within 1 s",
    "huge": "no answer to /v1/completions (IncompleteRead(2 bytes read, 999999999999999998 more",
    "endless": "its answer to /v1/completions has more than 16,873,216 bytes"}


@pytest.mark.parametrize("how", WORDS)
def test_a_strange_answer_is_one_line(policy, behave, how):
    behave(how)
    said = said_by(ask, policy, 1.0 if "1 s" in WORDS[how] else 60.0)
    assert said.startswith(f"--rollouts {policy.server.client.address}: ") and WORDS[how] in said
    assert "\n" not in said and len(said) < 400


def test_a_log_prob_that_rounding_put_above_0_is_0():
    """And answers stand in the order of their index."""
    answers = read_answers({"choices": [choice(1, (2,), (0,)), choice()]}, LIMITS)
    assert answers == [([5, 2], [5e-5, -1]), ([2], [0])]
    sampled = laid_out(answers, 3, LIMITS, torch.device("cpu"))
    assert sampled.log_prob.tolist() == [[0.0, -1.0, 0.0], [0.0] * 3, [0.0] * 3]
    assert sampled.finished.tolist() == [True, True, False]
    assert sampled.mask.sum(1).tolist() == [2, 1, 0] and sampled.tokens[0].tolist() == [5, 2, 0]


def test_answers_stand_in_the_order_of_their_requests(monkeypatch):
    """Side by side: the first is answered when the second has been."""
    second_is_done = threading.Event()

    def the_first_is_last(client, number):
        if number == 0 and not second_is_done.wait(10):
            raise UserError("the second waits for the first")
        second_is_done.set()
        return {"number": number}

    monkeypatch.setattr(Client, "exchange", the_first_is_last)
    monkeypatch.setattr(http_client, "AT_ONCE", 2)
    answers = Client("http://nowhere", 60.0, 1000).all([(number,) for number in range(5)])
    assert answers == [{"number": number} for number in range(5)]


def test_many_requests_need_few_threads(monkeypatch):
    """A system does not start thousands of them."""
    names = set()

    def note_the_thread(client, number):
        names.add(threading.current_thread().name)
        return {}

    monkeypatch.setattr(Client, "exchange", note_the_thread)
    monkeypatch.setattr(http_client, "AT_ONCE", 3)
    assert len(Client("http://nowhere", 60.0, 1000).all([(number,) for number in range(99)])) == 99
    assert 1 <= len(names) <= 3


def test_a_server_that_is_of_no_use_is_told_before_anything_is_written(tmp_path, address, behave):
    """There is none; or it takes no weights."""
    behave("failed")
    for server, words in ((f"http://127.0.0.1:{free_port()}", "no answer to /v1/models (Connection "
                           "refused)"), (address, "models/tiny, and was it started on this model, "
                                         "with VLLM_SERVER_DEV_MODE=1?")):
        said = run(*FLAGS, "--out", tmp_path / "x", "--rollouts", server, expect=1).stderr
        assert f"--rollouts {server}: " in said and words in said
        assert not (tmp_path / "x").exists()


def test_a_run_whose_server_failed_goes_on_as_if_it_had_not(served, tmp_path, address, behave,
                                                            monkeypatch):
    argv = [*FLAGS, "--rollouts", address, "--out", tmp_path / "broken"]
    sample = RolloutServer.sample

    def fails_at_three(server, problems, answers, seed):
        behave("halved" if server.run.step == 3 else "")
        return sample(server, problems, answers, seed)

    with monkeypatch.context() as patch:
        patch.setattr(RolloutServer, "sample", fails_at_three)
        assert "IncompleteRead" in run(*argv, expect=1).stderr
    assert len(lines(tmp_path / "broken/metrics.jsonl")) == 2
    behave("")
    assert "continuing after step 2" in run(*argv, "--continue").stdout
    assert_same_run(served, tmp_path / "broken")


def test_what_rounding_explains_is_seen_at_first(policy):
    """The usual difference is 0.002: up to 0.0061 on average is what rounding explains."""
    known, server = ask(policy), copy(policy.server)
    server.usual = 0.002
    ours = replace(known, log_prob=torch.zeros(8, 20), mask=torch.ones(8, 20, dtype=torch.bool))
    server.refuse_gap(torch.full((8, 20), -0.006), ours)
    said = said_by(server.refuse_gap, torch.full((8, 20), -0.007), ours)
    assert "differ from ours by 0.007 on average, and rounding explains only 0.0061" in said


OTHER_WEIGHTS = "Perhaps it did not load all of the weights that it was told to load"


@pytest.mark.parametrize("how", ["deaf", "in part"])
def test_a_server_that_keeps_old_weights_is_told_before_their_answers_are_trained_on(
        tmp_path, address, behave, how):
    argv = [*FLAGS, "--rollouts", address, "--out", tmp_path / "x"]
    run(*argv, "--steps", "1", "--learning_rate", "0.003")  # it loads --model
    behave(how)
    argv = ["--resume", tmp_path / "x", "--steps", "3"]
    said = run(*argv, expect=1).stderr
    assert OTHER_WEIGHTS in said and len(lines(tmp_path / "x/metrics.jsonl")) == 1
    behave("")
    assert "done." in run(*argv).stdout


@pytest.mark.parametrize("argv, words", [
    (["--rollouts", "http://me:secret@127.0.0.1:8000"], "cannot hold a user or a password"),
    (["--rollouts", "https://127.0.0.1:8000"], "should be http://HOST:PORT"),
    (["--rollouts", "http://127.0.0.1:8000", "--temperature", "0.5"], "--temperature 0.5 has to"),
    (["--rollouts_every", "2"], "--rollouts_every has no effect without --rollouts http")])
def test_what_cannot_work_is_refused(tmp_path, argv, words):
    said = run(*FLAGS, "--out", tmp_path / "x", *argv, expect=1).stderr
    assert words in said and "secret" not in said and not (tmp_path / "x").exists()
