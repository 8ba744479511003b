"""Answers from a vLLM server that is already running: --rollouts http://HOST:PORT.

    hand_over   writes the model folder RUN/serve/step_000012 and tells the server to load it
    ask         POST /v1/completions for each problem: token ids go out, ids and log-probs come back
    refuse_gap  ends the run if its log-probs are not ours, rounding aside: a server that kept old
                weights, or was told by somebody else to load theirs, shows here

One forward pass of our own gives the log-probs to compare with, and entropy and collision, which
servers do not return. Evaluations, and whatever goes on from the middle of an answer (vine, oracle,
measured ...), use our own sampler.
"""
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bridges.http_client import FLAG, Client, one_line, read_address
from engine.errors import UserError
from engine.extra_forward import with_facts
from engine.model_folder import write_model_folder
from engine.policy import as_rollouts, encode_prompts, stop_ids
from engine.rollouts import Rollouts
from engine.sampler import Generation
from harness.record import read_lines, remove, run_config, whole
from harness.screen import say
from qwen2_model import Qwen2

AS_SAMPLED = {  # a server would take other values from the model's generation_config.json
    "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
LOWEST = -1e5    # of a log-prob; vLLM writes -9999 for -inf
MOST_BYTES = 2 ** 24   # of a reply without answers
BYTES_OF_TOKEN = 1000  # the most that each token adds to it: its text, id and log-prob
ROUNDING = 1e-4  # a log-prob may be above 0 by that much
# Mean differences in log-prob; bridges/rollouts_by_a_server.md has measured ones
LARGE_AT_FIRST = 0.1  # another model, or other weights of this one
TIMES = 3             # the most that a difference may be of that at first


def connect(policy, optimizer, run) -> "RolloutServer":
    """Connect to the server of --rollouts and give it the weights that training begins with. A
    server that does not answer, or takes no weights, ends the run here."""
    s = policy.settings
    if s.temperature != 1:
        raise UserError(f"{FLAG}: --temperature {s.temperature} has to be 1, because vLLM's "
                        "log-probs are those before a temperature is applied")
    server = RolloutServer(policy, optimizer, run)
    server.introduce()
    server.usual = usual_before(s)
    server.ask_to_load(policy.folder)
    return server


def usual_before(settings) -> float | None:
    """The difference of log-probs that was usual in a resumed run. None for a new run, and when
    another server or number type makes other differences."""
    folder = settings.folder
    config = run_config(folder) if folder.exists() else {}
    if any(config.get(name) != getattr(settings, name) for name in ("rollouts", "dtype")):
        return None
    last = read_lines(folder / "metrics.jsonl")[-settings.rollouts_every:]
    gaps = [line["sampler_gap"] for line in last if line["sampler_gap"] is not None]
    return min(gaps, default=None)


class RolloutServer:
    """A source of answers, as the policy itself is one."""

    def __init__(self, policy, optimizer, run):
        s = policy.settings
        self.policy = policy
        self.optimizer = optimizer
        self.run = run
        longest = MOST_BYTES + BYTES_OF_TOKEN * s.answers * s.max_new_tokens
        self.client = Client(read_address(s.rollouts), s.rollouts_timeout, longest)
        self.model = ""                 # its name at the server
        self.salt = ""                  # see `ask_to_load`
        self.weights_of = run.step + 1  # the step before which the server got its weights
        self.usual = None               # mean gap of log-probs where both have the same weights

    def introduce(self) -> None:
        """Ask which model is served; this also finds out whether there is a server at all."""
        try:
            self.model = self.client.ask("GET", "/v1/models")["data"][0]["id"]
        except (LookupError, TypeError):
            raise self.client.error("its /v1/models does not name a model") from None
        say(f"the answers to train on come from {one_line(self.model)} at {self.client.address}, "
            "and those of evaluations from the sampler of this program")

    def hand_over(self, step: int) -> None:
        """Give the server the weights after step - 1, matrices in the type that products have."""
        model = self.policy.model
        parameters = dict(model.named_parameters())
        for name, value in parameters.items():
            if value.dim() == 2:
                parameters[name] = value.detach().to(model.compute_dtype)
        folder = self.run.folder.path / "serve" / f"step_{step - 1:06d}"
        write_weights(folder, model, parameters)
        self.ask_to_load(folder)
        self.weights_of = step

    def ask_to_load(self, folder: Path) -> None:
        """Have the server load a model folder, and wait until it has. Its cache of prompts was made
        with the weights before; requests with a new salt do not use it."""
        path = os.path.abspath(folder)
        try:
            self.client.ask("POST", "/collective_rpc", {"method": "reload_weights",
                                                        "kwargs": {"weights_path": path}})
        except UserError as error:
            raise UserError(
                f"{error} (does the server see {path}, and was it started on this model, with "
                "VLLM_SERVER_DEV_MODE=1? A vLLM that failed to load has to be started again)"
            ) from None
        self.salt = secrets.token_hex(16)

    def sample(self, problems: Sequence, answers: int, seed: int) -> Rollouts:
        """`answers` answers to each problem, in the frame that our own sampler writes in."""
        policy, step = self.policy, self.run.step
        s = policy.settings
        if step - self.weights_of >= s.rollouts_every:
            self.hand_over(step)
        prompts = encode_prompts(policy.tokenizer, policy.task, problems)
        limits = Limits(answers, s.max_new_tokens, policy.model.config.vocab_size,
                        stop_ids(policy.model, policy.tokenizer))
        completions = self.ask(prompts, limits, seed)
        sampled = laid_out(completions, len(prompts) * answers, limits, policy.model.device)
        rollouts = as_rollouts(problems, prompts, answers, sampled)
        ours = with_facts(policy.model, rollouts, s.micro_batch)
        if self.weights_of == step:
            self.refuse_gap(rollouts.log_prob, ours)
        return replace(ours, log_prob=rollouts.log_prob)

    def refuse_gap(self, theirs: torch.Tensor, ours: Rollouts) -> None:
        """End the run if log-probs (B, T) are further from ours, on average, than rounding can
        explain. How far that is, the first comparison shows."""
        difference = (theirs - ours.log_prob).abs() * ours.mask
        gap = difference.sum().item() / int(ours.mask.sum())
        largest = LARGE_AT_FIRST
        if self.usual is not None:
            largest = TIMES * self.usual + ROUNDING
        if gap > largest:
            raise self.client.error(
                f"its log-probs differ from ours by {gap:.2g} on average, and rounding explains "
                f"only {largest:.2g}. Perhaps it did not load all of the weights that it was told "
                "to load, or another training gives it weights as well, or it does not sample "
                "from the distribution as it is (bridges/rollouts_by_a_server.md)")
        if self.usual is None:
            self.usual = gap

    def ask(self, prompts: list[list[int]], limits: "Limits", seed: int) -> list["Answer"]:
        """The answers to all prompts, asked for at the same time, and checked."""
        requests = []
        for number, prompt in enumerate(prompts):
            # vLLM draws answer i of a request by the seed + i
            request = self.request(prompt, limits, seed + number * limits.answers)
            requests.append(("POST", "/v1/completions", request))
        answers: list[Answer] = []
        for number, response in enumerate(self.client.all(requests), 1):
            try:
                answers += read_answers(response, limits)
            except (LookupError, TypeError, UserError) as error:
                raise self.client.error(f"its answers to problem {number} of this step: "
                                        f"{one_line(error)}") from None
        return answers

    def request(self, prompt: list[int], limits: "Limits", seed: int) -> dict:
        return {
            "model": self.model,
            "prompt": prompt,
            "n": limits.answers,
            "seed": seed,
            "max_tokens": limits.tokens,
            "stop_token_ids": list(limits.ends),
            "logprobs": 0,
            "return_token_ids": True,
            "cache_salt": self.salt,
            **AS_SAMPLED}


def write_weights(folder: Path, model: Qwen2, parameters: dict[str, torch.Tensor]) -> None:
    """Write the model folder, and remove the one before it."""
    remove(folder.parent)
    with whole(folder) as unfinished:
        write_model_folder(model, unfinished, parameters)


Answer = tuple[list[int], list[float]]  # token ids, and the log-prob of each


@dataclass(frozen=True)
class Limits:
    """Limits that the answers to a prompt have to keep to."""
    answers: int           # how many there have to be
    tokens: int            # the most that one may have
    vocabulary: int        # token ids are below it
    ends: tuple[int, ...]  # the tokens that end an answer


def read_answers(response: dict, limits: Limits) -> list[Answer]:
    """The answers to a prompt, in the order of their index."""
    choices = sorted(response["choices"], key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(limits.answers)):
        raise UserError(f"there should be {limits.answers}, each with an index of its own")
    answers = [(choice.get("token_ids"), choice["logprobs"]["token_logprobs"])
               for choice in choices]
    for number, answer in enumerate(answers):
        if flaw := flaw_of(*answer, limits):
            raise UserError(f"number {number} {flaw}")
    return answers


def flaw_of(ids: list | None, log_probs: list, limits: Limits) -> str:
    """Say what is wrong with an answer; empty if nothing is."""
    if not ids:
        return "has no token_ids: the server is too old for return_token_ids"
    if not all(type(token) is int and 0 <= token < limits.vocabulary for token in ids):
        return f"has token_ids outside the model's vocabulary of {limits.vocabulary}"
    if len(ids) > limits.tokens or len(ids) < limits.tokens and ids[-1] not in limits.ends:
        return (f"has {len(ids)} tokens, and no token that ends it. Does the server allow "
                f"{limits.tokens} tokens?")
    known = [value for value in log_probs
             if type(value) in (int, float) and LOWEST < value < ROUNDING]
    if len(known) < len(log_probs) or len(known) != len(ids):
        return f"should have a log-prob for each token, not {one_line(log_probs)}"
    return ""


def laid_out(answers: list[Answer], B: int, limits: Limits, device: torch.device) -> Generation:
    """The answers as our sampler would write them. A process that did not ask has none."""
    tokens = torch.zeros(B, limits.tokens, dtype=torch.long)
    facts = torch.zeros(3, B, limits.tokens)  # log-prob, and zeros for entropy and collision
    length = torch.zeros(B, dtype=torch.long)
    for row, (ids, log_probs) in enumerate(answers):
        length[row] = len(ids)
        tokens[row, :len(ids)] = torch.tensor(ids)
        facts[0, row, :len(ids)] = torch.tensor(log_probs).clamp(max=0.0)
    ends = torch.tensor(limits.ends)
    return Generation.of_tokens(tokens.to(device), facts.to(device), length.to(device),
                                ends.to(device))
