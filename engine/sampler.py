"""Sampling answers: every prompt is computed once, then all its answers grow one token a step.

Example: prompts p (3 tokens) and r (5 tokens), two answers each, at most 4 new tokens. The
answers are R = 4 rows: 0 and 1 go on from p, 2 and 3 from r. Row 1 draws the stop token as its
token 1; V is the vocabulary, D the width.

               fed to the model             at positions   hidden -> logits      sampled
    prefill    p0 p1 p2 r0 r1 r2 r3 r4      0 1 2 0 .. 4   (8, D) -> (4, V)      token 0 of 4 rows
    step 1     token 0 of rows 0 1 2 3      3 3 5 5        (4, D) -> (4, V)      token 1 of 4 rows
    (row 1 is done and leaves)
    step 2     token 1 of rows 0 2 3        4 6 6          (3, D) -> (3, V)      token 2 of 3 rows
    step 3     token 2 of rows 0 2 3        5 7 7          (3, D) -> (3, V)      token 3 of 3 rows

    Generation.mask (4, 4)    1 1 1 1      index t is the t-th generated token,
                              1 1 0 0      the stop token is part of the answer
                              1 1 1 1
                              1 1 1 1

Step t feeds token t - 1 and samples token t. What a fed token sees is in engine/cache.py.

Answers may also go on from places within a sequence, which is still computed once: its state at
the place predicts their first token. Here the sequence r0 to r4 is asked for three rows by
`starts=[Start(0, 5), Start(0, 2), Start(0, 2, without=7)]`. The last two see r0 and r1 alone, and
the last one may have any first token but 7:

               fed to the model             at positions   hidden -> logits      sampled
    prefill    r0 r1 r2 r3 r4               0 1 2 3 4      (5, D) -> (3, V)      from states 4 1 1
    step 1     token 0 of rows 0 1 2        5 2 2          (3, D) -> (3, V)      token 1 of 3 rows

On a GPU a step is recorded as a CUDA graph and replayed. So within a step no shape and no decision
may depend on what was sampled: a step changes tensors in place, and rows that are done are still
computed until they leave between two recordings. On a CPU the same step is simply called.
"""
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn

from engine.cache import Cache
from engine.errors import UserError
from engine.packing import SharedPrompts, to_rows
from engine.sharded import whole_model
from qwen2_model import Qwen2

STEPS_BETWEEN_DEPARTURES = {"cpu": 1, "cuda": 64}


class Start(NamedTuple):
    """Where an answer goes on from: after the first `seen` tokens of a prompt."""
    prompt: int
    seen: int
    without: int = -1  # a token that may not come first; -1 is none


@dataclass
class Generation:
    """What was sampled, in answer coordinates: index t is the t-th generated token.

    log_prob, entropy -sum p log p and collision sum p^2 are those of the temperature-1
    distribution, the one that training sees, whatever the sampling temperature was.
    Beyond the mask everything is 0.
    """
    tokens: torch.Tensor     # (B, T) int64
    mask: torch.Tensor       # (B, T) bool, the stop token included
    finished: torch.Tensor   # (B,) bool, the row ended with a stop token
    log_prob: torch.Tensor   # (B, T) float32
    entropy: torch.Tensor    # (B, T) float32
    collision: torch.Tensor  # (B, T) float32

    @classmethod
    def empty(cls, B: int, T: int, device) -> "Generation":
        return cls(tokens=torch.zeros(B, T, dtype=torch.long, device=device),
                   mask=torch.zeros(B, T, dtype=torch.bool, device=device),
                   finished=torch.zeros(B, dtype=torch.bool, device=device),
                   log_prob=torch.zeros(B, T, device=device),
                   entropy=torch.zeros(B, T, device=device),
                   collision=torch.zeros(B, T, device=device))

    def record(self, rows, live, t, token, distribution: "Distribution", stop) -> None:
        """Write token t of these rows, or 0 where a row is no longer live."""
        log_prob, entropy, collision = distribution.facts(token)
        self.tokens[rows, t] = token * live
        self.mask[rows, t] = live
        self.log_prob[rows, t] = log_prob * live
        self.entropy[rows, t] = entropy * live
        self.collision[rows, t] = collision * live
        self.finished[rows] |= (token[:, None] == stop).any(1) & live


class Distribution:
    """softmax(logits) for each row, with few passes over the vocabulary.

    z_v = logit_v - max logit, e_v = exp(z_v), Z = sum e: then p_v = e_v / Z.
    """

    def __init__(self, logits: torch.Tensor):
        self.z = logits.float() - logits.amax(-1, keepdim=True).float()  # (R, V)
        self.e = self.z.exp()                                            # (R, V)
        self.Z = self.e.sum(-1)                                          # (R,)

    def pick(self, uniform, temperature: float = 1.0, greedy: bool = False) -> torch.Tensor:
        """(R,) tokens by inverse-CDF sampling, with each row's own random number."""
        if greedy:
            return self.z.argmax(-1)
        e = self.e if temperature == 1 else (self.z / temperature).exp()
        cumulative = e.cumsum(-1)
        height = uniform[:, None] * cumulative[:, -1:]
        # `right` skips tokens of probability zero
        token = torch.searchsorted(cumulative, height, right=True).squeeze(1)
        return token.clamp(max=self.z.shape[-1] - 1)

    def without(self, tokens: torch.Tensor) -> "Distribution":
        """The distribution in which row r cannot draw tokens[r], and the other tokens keep their
        proportions. -1 rules out nothing."""
        rows = (tokens >= 0).nonzero().squeeze(1)
        z = self.z.clone()
        z[rows, tokens[rows]] = float("-inf")
        return Distribution(z)

    def facts(self, token) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """log p of the token, entropy -sum p log p = log Z - sum(e z) / Z, collision sum p^2."""
        log_prob = self.z.gather(1, token[:, None]).squeeze(1) - self.Z.log()
        entropy = self.Z.log() - torch.linalg.vecdot(self.e, self.z) / self.Z
        collision = torch.linalg.vecdot(self.e, self.e) / self.Z.square()
        return log_prob, entropy, collision


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and which of them end an answer."""
    uniform: torch.Tensor  # (B, T) a random number in [0, 1) for every token of every answer
    stop: torch.Tensor     # ids of the stop tokens
    temperature: float
    greedy: bool


@dataclass
class Rows:
    """The R answers that are still growing."""
    index: torch.Tensor          # (R,) which answer, as a row of the Generation
    prompt_length: torch.Tensor  # (R,) how many tokens of its prompt it sees
    limit: torch.Tensor          # (R,) the most tokens it may have
    token: torch.Tensor          # (R,) the token sampled last
    done: torch.Tensor           # (R,) bool

    @classmethod
    def of_starts(cls, starts: list[Start], limits: list[int], numbers: range, device) -> "Rows":
        """The rows with these numbers, those of one prompt side by side for the cache."""
        order = sorted(numbers, key=lambda row: starts[row].prompt)
        index = torch.tensor(order, device=device)
        return cls(index=index,
                   prompt_length=torch.tensor([starts[row].seen for row in order], device=device),
                   limit=torch.tensor([limits[row] for row in order], device=device),
                   token=torch.zeros_like(index),
                   done=torch.zeros_like(index, dtype=torch.bool))

    def keep(self, stay: torch.Tensor) -> "Rows":
        return Rows(**{name: values[stay] for name, values in vars(self).items()})


class Decoding:
    """Answers being sampled: `prefill` samples the first token of every row, each `step` one more.

    `result` is filled in place. `t` is the index of the next token, a tensor because a CUDA graph
    must read it from memory.
    """

    def __init__(self, model: Qwen2, rows: Rows, cache: Cache, sampling: Sampling,
                 result: Generation):
        self.model = model
        self.rows = rows
        self.cache = cache
        self.sampling = sampling
        self.result = result
        self.t = torch.zeros(1, dtype=torch.long, device=model.device)

    def prefill(self, prompts: list[list[int]], without: torch.Tensor | None = None) -> None:
        """Compute every prompt once, keep its keys and values, sample token 0 of every row.

        without: (R,) for each row a token that may not come first, or -1
        """
        device = self.model.device
        lengths = [len(prompt) for prompt in prompts]
        packed = SharedPrompts(lengths, [], torch.zeros(0, dtype=torch.long, device=device))
        self.cache.show_prompts(self.rows.prompt_length, max(lengths))

        def attend(layer, q, k, v):
            self.cache.add_prompts(to_rows(k, packed.prompts), to_rows(v, packed.prompts))
            return packed(layer, q, k, v)

        ids = torch.tensor(sum(prompts, []), device=device)
        hidden = self.model.model(ids, packed.positions, attend)   # (N, D)
        last_seen = packed.prompts[self.cache.question, self.rows.prompt_length - 1]  # (R,)
        self.sample(hidden[last_seen], without)

    def step(self) -> None:
        """Feed the last token of every row, sample the next. A CUDA graph can record this."""
        slot = self.t - 1
        self.cache.set_slot(slot)
        positions = self.rows.prompt_length + slot
        self.sample(self.model.model(self.rows.token, positions, self.cache.attend))

    def sample(self, hidden: torch.Tensor, without: torch.Tensor | None = None) -> None:
        """Draw and record token t of every row, from the state (R, D) that predicts it."""
        rows, sampling = self.rows, self.sampling
        distribution = Distribution(self.model.logits(hidden))  # (R, V)
        allowed = distribution if without is None else distribution.without(without)
        uniform = sampling.uniform[rows.index, self.t]
        rows.token.copy_(allowed.pick(uniform, sampling.temperature, sampling.greedy))
        self.result.record(rows.index, ~rows.done, self.t, rows.token, distribution, sampling.stop)
        rows.done.copy_(self.result.finished[rows.index] | (self.t + 1 >= rows.limit))
        self.t += 1

    def leave(self) -> None:
        """Drop the rows that are done."""
        stay = ~self.rows.done
        self.rows = self.rows.keep(stay)
        self.cache.keep(stay)


def step_until_done(decoding: Decoding, longest: int) -> None:
    """Sample tokens 1 to longest - 1, or stop when every row is done.

    Rows leave once an eighth of them are done, since every departure moves the cache.
    """
    device = decoding.model.device
    t = 1  # token 0 came with the prefill
    while t < longest:
        rows = len(decoding.rows.done)
        done = int(decoding.rows.done.sum())
        if done == rows:
            return
        if 8 * done >= rows:
            decoding.leave()
        count = min(STEPS_BETWEEN_DEPARTURES[device.type], longest - t)
        last_written = t + count - 2  # the last of these steps feeds this token
        decoding.cache.set_window(last_written + 1, ahead=count > 1)
        repeat(decoding.step, count, device)
        t += count


def repeat(step, count: int, device) -> None:
    """Call `step` `count` times; on a GPU through a CUDA graph.

    A step starts some hundred small kernels, and starting them takes longer than running them. A
    graph records them once and replays them with a single launch. The first step runs on a side
    stream, outside the recording: libraries allocate their workspaces there, which they must not
    do while recording.
    """
    if device.type != "cuda" or count < 3:
        for _ in range(count):
            step()
        return
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()  # recorded, not carried out
    for _ in range(count - 1):
        graph.replay()


def copy_for_sampling(model: Qwen2) -> Qwen2:
    """A copy of the model, its matrices in the layout in which they are multiplied fastest.

    They are cast to the compute type here, once, and not in every step. On a CPU they are
    column-major, which suits products with few rows; the embeddings stay row-major, since rows are
    looked up there. What needs no change is shared, not copied.
    """
    embeddings = model.model.embed_tokens.weight
    parameters = {}
    for name, parameter in model.named_parameters():
        fast = parameter.detach()
        if parameter.dim() == 2:
            fast = fast.to(model.compute_dtype)
            if fast.device.type == "cpu" and parameter is not embeddings:
                fast = fast.t().contiguous().t()
        parameters[name] = nn.Parameter(fast, requires_grad=False)
    return with_parameters(model, parameters)


def with_parameters(module: nn.Module, parameters: dict[str, nn.Parameter],
                    prefix: str = "") -> nn.Module:
    """A copy of the module and all inside it that has these parameters, by their full names.

    All else is shared. A new Qwen2 would do as well, but it first draws random numbers for every
    matrix, which takes as long as the sampling in a short call of `generate`.
    """
    copy = module.__new__(type(module))
    copy.__dict__ = dict(module.__dict__)
    copy._parameters = {}
    for name, parameter in module._parameters.items():
        is_absent = parameter is None  # the bias of a Linear without one
        copy._parameters[name] = None if is_absent else parameters[prefix + name]
    copy._modules = {}
    for name, child in module._modules.items():
        copy._modules[name] = with_parameters(child, parameters, f"{prefix}{name}.")
    return copy


def generate(model: Qwen2, prompts: list[list[int]], *, max_new_tokens: int | list[int],
             answers: int = 1, temperature: float = 1.0, greedy: bool = False, seed: int = 0,
             stop_ids: tuple[int, ...] | None = None, share: range | None = None,
             starts: list[Start] | None = None) -> Generation:
    """Sample `answers` continuations of every prompt; rows are in the order of the prompts.

    max_new_tokens: one number for all prompts, or one for each
    stop_ids:       tokens that end an answer, by default the model's own
    share:          only these prompts are answered, and the rows of all others stay 0; by default
                    all are
    starts:         instead of `answers`, the places to go on from: a row for each, in their order;
                    max_new_tokens and share are then about starts

    The random numbers of all tokens of all rows are drawn before the first token. So what a row
    samples depends neither on which other rows are still growing nor on the share.
    """
    if starts is None:
        starts = [Start(number, len(prompt)) for number, prompt in enumerate(prompts)]
    limits = max_new_tokens
    if isinstance(max_new_tokens, int):
        limits = [max_new_tokens] * len(starts)
    check_request(model, starts, limits, answers, temperature)
    check_starts(model, prompts, starts)
    if stop_ids is None:
        stop_ids = model.config.stop_ids
    if share is None:
        share = range(len(starts))
    model = whole_model(model)  # all processes have to call it, those with an empty share, too
    result = Generation.empty(len(starts) * answers, max(limits), model.device)
    if share:
        uniform = random_numbers(result.mask.shape, seed, model.device)
        stop = torch.tensor(stop_ids, dtype=torch.long, device=model.device)
        sampling = Sampling(uniform, stop, temperature, greedy)
        numbers = range(share.start * answers, share.stop * answers)
        decode(model, prompts, repeated(starts, answers), repeated(limits, answers), numbers,
               sampling, result)
    return result


def random_numbers(shape: torch.Size, seed: int, device) -> torch.Tensor:
    """Uniform in [0, 1), drawn on the CPU: the same ones whatever the device is."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def repeated(values: list, count: int) -> list:
    """a b -> a a a b b b"""
    result = []
    for value in values:
        result += [value] * count
    return result


def decode(model: Qwen2, prompts: list[list[int]], starts: list[Start], limits: list[int],
           numbers: range, sampling: Sampling, result: Generation) -> None:
    """Fill in the rows with these numbers. Only the prompts that they go on from are computed."""
    fast_model = copy_for_sampling(model)
    # cheaper than no_grad; `result` was made outside, so autograd can use it like any tensor
    with torch.inference_mode():
        rows = Rows.of_starts(starts, limits, numbers, model.device)
        prompt = torch.tensor([start.prompt for start in starts], device=model.device)[rows.index]
        without = torch.tensor([start.without for start in starts], device=model.device)
        longest = result.mask.shape[1]
        cache = Cache(model.config, model.compute_dtype, prompt, slots=longest - 1)
        decoding = Decoding(fast_model, rows, cache, sampling, result)
        needed = [prompts[number] for number in prompt.unique().tolist()]
        decoding.prefill(needed, without[rows.index] if (without >= 0).any() else None)
        step_until_done(decoding, longest)


def check_request(model: Qwen2, starts: list[Start], limits: list[int], answers: int,
                  temperature: float) -> None:
    if not starts or len(limits) != len(starts) or not all(start.seen for start in starts):
        raise UserError("generate needs at least one prompt, no empty one, and one max_new_tokens "
                        "for all or one for each")
    if min(limits) < 1 or answers < 1 or not temperature > 0:
        raise UserError(f"max_new_tokens {min(limits)} and answers {answers} must be at least 1, "
                        f"temperature {temperature} above 0 "
                        "(greedy=True takes the likeliest token)")
    longest = max(start.seen + limit for start, limit in zip(starts, limits))
    if longest > model.config.max_position_embeddings:
        raise UserError(f"prompt and answer can reach {longest} tokens, "
                        f"the model's limit is {model.config.max_position_embeddings}")


def check_starts(model: Qwen2, prompts: list[list[int]], starts: list[Start]) -> None:
    for start in starts:
        if not 0 <= start.prompt < len(prompts):
            raise UserError(f"{start}: there are {len(prompts)} prompts, numbered from 0")
        if not 0 < start.seen <= len(prompts[start.prompt]):
            raise UserError(f"{start}: prompt {start.prompt} has {len(prompts[start.prompt])} "
                            "tokens, and an answer sees at least the first of them")
        if not -1 <= start.without < model.config.vocab_size:
            raise UserError(f"{start}: the model has no token {start.without}; -1 rules out none")
