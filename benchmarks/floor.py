"""The floor of a step: the least that must be computed and moved, and what is kept. Arithmetic, nothing is run.

    python benchmarks/floor.py models/tiny
    python benchmarks/floor.py 1.5B --dtype bfloat16 --checkpointing --flops 1e14 --bandwidth 1e12
    python benchmarks/floor.py --worked      # the tables of benchmarks/README.md

Computed and moved is what no implementation can avoid: each question's prompt once, only those pairs of tokens that see
each other, the output matrix only where a token is predicted, all weights once for each token of the longest answer.
Kept is what this implementation keeps, tensor by tensor, for the largest micro-batch of the update; the tests count
it. On a GPU the norms keep a tensor less, and keys and values are repeated for every query head: that is read off the
code, not measured.

D width, I width of the MLP, A all query heads side by side, C all key/value heads, V vocabulary; Q prompts of P tokens
at most, R answers, N tokens in all.
"""
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent

from mitigations import Bounds
from engine.errors import UserError
from engine.packing import SharedPrompts
from qwen2_model import ModelConfig
from analysis.tables import Table, by_row
from engine.forward import LOGITS_AT_ONCE
from engine.settings import Parser, check_value, flag_kind, run_as_program, underscores


def qwen25(D: int, I: int, layers: int, heads: int, kv_heads: int, head_dim: int, V: int = 151936, tied: bool = True) -> ModelConfig:
    return ModelConfig(V, D, I, layers, heads, kv_heads, head_dim, rope_theta=1e6, tie_word_embeddings=tied)


SHAPES = {"tiny": qwen25(128, 384, 4, 4, 2, 32, V=512), "small": qwen25(256, 768, 6, 8, 4, 32, V=4096),
          "0.5B": qwen25(896, 4864, 24, 14, 2, 64), "1.5B": qwen25(1536, 8960, 28, 12, 2, 128),
          "3B": qwen25(2048, 11008, 36, 16, 2, 128), "7B": qwen25(3584, 18944, 28, 28, 4, 128, V=152064, tied=False)}
NUMBER = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Batch:
    """What one rank works on in a step, and how."""
    prompts: list[int]      # tokens of each question's prompt
    answers: list[int]      # tokens of each answer, one question's after the other's
    micro_batch: int = 8
    number: int = 4         # bytes of a number that is computed with
    checkpointing: bool = False
    offload_optimizer: bool = False
    device: str = "cpu"

    @property
    def fed(self) -> list[int]:
        """The last token of an answer predicts nothing and goes through no layer."""
        return [n - 1 for n in self.answers]

    def question(self, row: int) -> int:
        return row * len(self.prompts) // len(self.answers)

    def micro_batches(self) -> list["Batch"]:
        """Each with the prompts that its answers need."""
        rows = range(len(self.answers))
        parts = [rows[start:start + self.micro_batch] for start in rows[::self.micro_batch]]
        return [replace(self, prompts=[self.prompts[q] for q in sorted({self.question(row) for row in part})],
                        answers=[self.answers[row] for row in part]) for part in parts]


class Work(NamedTuple):
    operations: float  # an addition and a multiplication are two
    bytes: float

    def seconds(self, rate: float, bandwidth: float) -> float:
        return max(self.operations / rate, self.bytes / bandwidth)


def heads(config: ModelConfig) -> tuple[int, int]:
    """A and C: the widths of all query heads, and of all key or value heads."""
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim


def layer_matrices(config: ModelConfig) -> int:
    """Numbers in the matrices of a layer: queries and output, keys and values, gate, up and down."""
    (A, C), D = heads(config), config.hidden_size
    return 2 * D * A + 2 * D * C + 3 * D * config.intermediate_size


def parameters(config: ModelConfig) -> int:
    (A, C), D = heads(config), config.hidden_size
    own = A + 2 * C if config.model_type == "qwen2" else 2 * config.head_dim  # biases, or norms of queries and keys
    return matrices(config) + config.num_hidden_layers * (own + 2 * D) + D


def matrices(config: ModelConfig) -> int:
    """Numbers in all matrices, the rest are biases and norms."""
    return config.num_hidden_layers * layer_matrices(config) + config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)


def cached(config: ModelConfig, number: int) -> int:
    """Bytes of a token's keys and values."""
    return 2 * config.num_hidden_layers * heads(config)[1] * number


def weights(config: ModelConfig) -> int:
    """Numbers in the matrices that every token is multiplied with."""
    return config.num_hidden_layers * layer_matrices(config) + config.vocab_size * config.hidden_size


def layers_work(config: ModelConfig, tokens: int, pairs: int) -> int:
    """Operations of all layers forward; a pair of tokens that see each other takes part in two products over A numbers."""
    return config.num_hidden_layers * (2 * layer_matrices(config) * tokens + 4 * heads(config)[0] * pairs)


def prompt_pairs(batch: Batch) -> int:
    return sum(p * (p + 1) // 2 for p in batch.prompts)


def answer_pairs(batch: Batch) -> int:
    """A prompt and n tokens after it: the j-th of them sees the prompt and j of the n."""
    return sum(batch.prompts[batch.question(row)] * n + n * (n + 1) // 2 for row, n in enumerate(batch.fed))


def rollout_work(config: ModelConfig, batch: Batch) -> dict[str, Work]:
    output, cache = 2 * config.vocab_size * config.hidden_size, cached(config, batch.number)
    longest = [max(n for row, n in enumerate(batch.fed) if batch.question(row) == q) for q in range(len(batch.prompts))]
    own = sum(n * (n + 1) // 2 for n in batch.fed)
    shared = sum(p * n for p, n in zip(batch.prompts, longest))  # read once a step for all answers to the question
    return {"prompts": Work(layers_work(config, sum(batch.prompts), prompt_pairs(batch)) + output * len(batch.prompts),
                            weights(config) * batch.number + cache * sum(batch.prompts)),
            "answers": Work(layers_work(config, sum(batch.fed), answer_pairs(batch)) + output * sum(batch.fed),
                            weights(config) * batch.number * max(batch.fed) + cache * (own + shared))}


def update_work(config: ModelConfig, batch: Batch) -> dict[str, Work]:
    """Backward is twice forward: a product has a gradient on either side."""
    output = 2 * config.vocab_size * config.hidden_size * sum(batch.answers)
    forward = output + layers_work(config, sum(batch.prompts) + sum(batch.fed), prompt_pairs(batch) + answer_pairs(batch))
    parts, n, read = batch.micro_batches(), parameters(config), weights(config) * batch.number
    activations = sum(sum(kept(config, part).values()) for part in parts)  # written once, read once
    added = n * (batch.number + 2 * 4)                                     # a gradient is made, and added to the sum in float32
    return {"forward": Work(forward, read * len(parts) + activations),
            "backward": Work(2 * forward, (read + added) * len(parts) + activations),
            "AdamW": Work(12 * n, 7 * 4 * n)}  # parameter, gradient and moments are read, all but the gradient written


def recomputed(config: ModelConfig, batch: Batch) -> dict[str, Work]:
    """What is computed a second time to keep less; no part of the floor."""
    layers = layers_work(config, sum(batch.prompts) + sum(batch.fed), prompt_pairs(batch) + answer_pairs(batch)) * batch.checkpointing
    tokens = [sum(part.answers) for part in batch.micro_batches()]
    output = 2 * config.vocab_size * config.hidden_size * sum(n for n in tokens if n > tokens_at_once(config))
    return {"forward again": Work(layers + output, weights(config) * batch.number * len(tokens))} if layers + output else {}


def attention_blocks(part: Batch) -> list[tuple[int, int]]:
    """Answers and longest answer of each block that attention is computed for at once."""
    fed = sorted(n for n in part.fed if n)
    return [(len(block), max(block)) for block in (fed[start:start + SharedPrompts.ROWS] for start in range(0, len(fed), SharedPrompts.ROWS))]


def kept_in_layer(config: ModelConfig, part: Batch) -> dict[str, int]:
    """Bytes that autograd keeps of one layer, for one micro-batch. What norms work on is float32 whatever the products are in."""
    (A, C), D, b = heads(config), config.hidden_size, part.number
    Q, P, N, blocks = len(part.prompts), max(part.prompts), sum(part.prompts) + sum(part.fed), attention_blocks(part)
    asking = Q * P + sum(r * S for r, S in blocks)
    seen = sum(r * (P + S) for r, S in blocks)  # every answer has its keys and values in a row with the prompt's
    scaled = 4 if part.device == "cpu" else 0  # x / rms(x), which the fused kernel makes again
    normed = 2 * (D * (4 + scaled + b) + 4)    # x, perhaps scaled, what comes out, 1 / rms(x)
    if config.model_type == "qwen3":
        normed += (A + C) * (4 + scaled) + 4 * (A + C) // config.head_dim
    return {
        "norms": N * normed,
        "queries": b * A * asking,
        "keys and values": 2 * b * (C * Q * P + (C if part.device == "cpu" else A) * seen),
        "mixed values": b * A * (asking + N) + 4 * config.num_attention_heads * asking,  # in rows, and end to end; log normaliser
        "mask": b * sum(S * r * (P + S) for r, S in blocks),                             # as numbers to be added
        "MLP": 4 * b * config.intermediate_size * N,                                     # gate, its silu, up, their product
        "converted matrices": layer_matrices(config) * b if b < 4 and not part.offload_optimizer else 0}


def kept(config: ModelConfig, part: Batch) -> dict[str, int]:
    """Bytes that autograd keeps from the forward to the backward pass of one micro-batch."""
    D, N, tokens = config.hidden_size, sum(part.prompts) + sum(part.fed), sum(part.answers)
    inside = sum(kept_in_layer(config, part).values())
    final = D * (8 if part.device == "cpu" else 4) + 4 + 8 * config.head_dim  # as in a layer's norms; cosines and sines
    return {"layers": config.num_hidden_layers * (4 * D * N if part.checkpointing else inside), "final norm": N * final,
            "states that predict": part.number * D * tokens,
            "probabilities": 4 * config.vocab_size * tokens if tokens <= tokens_at_once(config) else 0}


def tokens_at_once(config: ModelConfig) -> int:
    """More than these are computed in chunks, and their probabilities not kept."""
    return max(1, LOGITS_AT_ONCE // config.vocab_size)


def fullest(config: ModelConfig, part: Batch) -> dict[str, int]:
    """Bytes by part at the fullest moment of a micro-batch's backward pass, which begins at the output matrix, goes down
    through the layers and ends at the embeddings. With tied weights the first gradient waits for the last, and their sum
    is a third."""
    D, V, b, tokens, N = config.hidden_size, config.vocab_size, part.number, sum(part.answers), sum(part.prompts) + sum(part.fed)
    activations = sum(bytes for name, bytes in kept(config, part).items() if name != "probabilities")
    inside = sum(kept_in_layer(config, part).values()) if part.checkpointing else 0
    summed, tied = b if part.offload_optimizer else 4, config.tie_word_embeddings  # bytes of a number of a gradient
    chunk, converted = min(tokens, tokens_at_once(config)), b if b < 4 else 0
    gradient = V * chunk * (4 + converted)  # probabilities become it, unless they were kept
    moments = [{"activations": activations, "logits and their gradient": gradient + kept(config, part)["probabilities"] + 2 * b * D * tokens,
                "gradient being made": (summed + b) * V * D},  # the sum and what is added
               {"activations": activations, "a layer's backward pass": inside + b * config.intermediate_size * N, "gradient being made": summed * V * D * tied},
               {"gradient being made": summed * V * D * (3 if tied else 1)}]
    if chunk < tokens:  # a chunk's logits come, and are made float32, while the gradient of the one before is there
        both = chunk + min(chunk, tokens - chunk)
        moments.append({"activations": activations, "logits and their gradient": V * both * (4 + converted) + 2 * b * D * tokens, "gradient being made": summed * V * D})
    return max(moments, key=lambda moment: sum(moment.values()))


def memory(config: ModelConfig, batch: Batch) -> dict[str, dict[str, int]]:
    """Bytes by part on the device, during a rollout and during an update at its fullest."""
    n, b, V = parameters(config), batch.number, config.vocab_size
    Q, P, R, T = len(batch.prompts), max(batch.prompts), len(batch.answers), max(batch.answers)
    held = {"parameters": 4 * n, "gradient": 4 * n, "moments of AdamW": 8 * n}
    if batch.offload_optimizer:
        held = {"parameters": b * matrices(config) + 4 * (n - matrices(config))}
    made = max(12 * R * V, sum(batch.prompts) * (3 * b * config.intermediate_size + 12 * config.hidden_size))
    converted = b < 4 and not batch.offload_optimizer
    sampled_with = matrices(config) if converted else matrices(config) - V * config.hidden_size if batch.device == "cpu" else 0
    rollout = {**held, "matrices to sample with": b * sampled_with, "keys and values": cached(config, b) * (Q * P + R * (T - 1)),
               "what was sampled": 25 * R * T, "a step's or the prompts' inside": made}
    return {"rollout": rollout, "update": {**held, **max((fullest(config, part) for part in batch.micro_batches()), key=lambda moment: sum(moment.values()))}}


def beside(config: ModelConfig, batch: Batch, ranks: int) -> list[str]:
    """What the device does not hold or what leaves it."""
    n, lines = parameters(config), []
    if batch.offload_optimizer:
        parts = len(batch.micro_batches())
        lines.append(f"on the CPU {giga(16 * n)} GB: parameters, sum of gradients and moments in float32")
        lines.append(f"to the CPU and back in an update: {giga(batch.number * n * parts)} GB of gradients, {giga(batch.number * n)} GB of parameters")
    if ranks > 1:
        lines.append(f"over the wire of each rank in an update: {giga(4 * n * 2 * (ranks - 1) / ranks)} GB of gradients")
    return lines


def giga(number: float) -> str:
    return f"{number / 1e9:,.3g}" if number < 1e9 else f"{number / 1e9:,.1f}"


def work_table(config: ModelConfig, batch: Batch, rate: float | None, bandwidth: float | None) -> Table:
    works = {f"rollout: {name}": work for name, work in rollout_work(config, batch).items()}
    works |= {f"update: {name}": work for name, work in {**update_work(config, batch), **recomputed(config, batch)}.items()}
    columns = {"": "", "10^9 operations": "", "GB moved": ""} | ({"seconds": "", "bound by": ""} if rate else {})
    rows = [[name, giga(work.operations), giga(work.bytes)] for name, work in works.items()]
    rows.append(["sum", *(giga(sum(column)) for column in zip(*works.values()))])
    if rate:
        seconds = [work.seconds(rate, bandwidth) for work in works.values()]
        for row, work, time in zip(rows, [*works.values(), None], [*seconds, sum(seconds)]):
            row += [f"{time:.3g}", "" if work is None else "operations" if time == work.operations / rate else "bytes"]
    return Table("work", "Computed and moved in a step", by_row(columns, rows))


def memory_table(config: ModelConfig, batch: Batch) -> Table:
    found = memory(config, batch)
    names = dict.fromkeys([*found["rollout"], *found["update"]])
    rows = [[name, *(giga(moment[name]) if name in moment else "" for moment in found.values())] for name in names]
    rows.append(["sum", *(giga(sum(moment.values())) for moment in found.values())])
    return Table("memory", "Kept on the device, GB", by_row({"": "", "rollout": "", "update": ""}, rows))


def fits(config: ModelConfig, batch: Batch) -> float:
    return max(sum(moment.values()) for moment in memory(config, batch).values())


WORKED = {"": {}, "--checkpointing": {"checkpointing": True}, "--offload_optimizer": {"offload_optimizer": True},
          "both": {"checkpointing": True, "offload_optimizer": True}}


def worked_tables(device: str) -> list[Table]:
    """8 questions x 8 answers, prompts of 100 tokens, 512 new ones, 8 answers at once in the update."""
    batch, per_token, whole = Batch([100] * 8, [512] * 64, micro_batch=8, device=device), [], []
    for name in ("0.5B", "1.5B", "3B", "7B"):
        config = SHAPES[name]
        shares = [sum(kept(config, part).values()) / (100 + sum(part.fed)) / 1000 for part in (replace(batch.micro_batches()[0], **change) for change in (
            {}, {"number": 2}, {"checkpointing": True}))]
        per_token.append([name, parameters(config) / 1e6, 2 * weights(config) / 1e9, cached(config, 2) / 1000, *shares])
        for dtype, number in NUMBER.items():
            most = [fits(config, replace(batch, number=number, **flags)) for flags in WORKED.values()]
            whole.append([name, dtype, *(f"{giga(bytes)}{' fits' if bytes < 22e9 else ''}" for bytes in most)])
    token = {"model": "", "million parameters": ",.0f", "10^9 operations": ".1f", "cache, kB in bfloat16": ".0f", "kept, kB in float32": ",.0f",
             "in bfloat16": ",.0f", "float32, --checkpointing": ",.0f"}
    return [Table("token", "", by_row(token, per_token)),
            Table("whole", "", by_row({"model": "", "computes in": "", "GB": "", **{f"GB, {flag}": "" for flag in list(WORKED)[1:]}}, whole))]


FLAGS = {  # name: type, default, bounds, help
    "questions": (int, 8, Bounds(least=1, most=10_000), "questions a step, of all ranks together"),
    "answers": (int, 8, Bounds(least=1, most=1000), "answers to each question"),
    "prompt": (int, 100, Bounds(least=1), "tokens of a prompt"),
    "new_tokens": (int, 512, Bounds(least=2), "tokens of an answer"),
    "micro_batch": (int, 8, Bounds(least=1), "answers in memory at once during the update"),
    "dtype": (str, "float32", Bounds(), "numbers to compute with: float32 or bfloat16"),
    "ranks": (int, 1, Bounds(least=1), "devices, each with the whole model and its share of the questions"),
    "device": (str, "cuda", Bounds(), "whose memory: cpu or cuda"),
    "flops": (float, None, Bounds(above=0), "operations a second of a large product, for the seconds"),
    "bandwidth": (float, None, Bounds(above=0), "bytes a second from memory, for the seconds"),
    "checkpointing": (bool, False, Bounds(), "a layer's inside is made again in the backward pass instead of being kept"),
    "offload_optimizer": (bool, False, Bounds(), "the optimizer lives on the CPU, the device keeps parameters in the computing type only"),
    "worked": (bool, False, Bounds(), "the tables of benchmarks/README.md instead")}
CHOICES = {"dtype": tuple(NUMBER), "device": ("cpu", "cuda")}


def read_arguments(argv: list[str]):
    parser = Parser(usage="python benchmarks/floor.py MODEL [flags]", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("model", nargs="?", help=f"a model folder, or one of {', '.join(SHAPES)}")
    for name, (kind, default, _, text) in FLAGS.items():
        shown = "" if default in (None, False) else f" (default {default})"
        parser.add_argument(f"--{name}", default=default, help=text + shown, **flag_kind(kind))
    given = parser.parse_args([underscores(argument) for argument in argv])
    for name, (kind, default, bounds, _) in FLAGS.items():
        if getattr(given, name) is not None:
            check_value(name, getattr(given, name), kind, bounds, CHOICES.get(name, ()))
    if (given.flops is None) != (given.bandwidth is None):
        raise UserError("--flops and --bandwidth go together: a step takes as long as the slower of the two needs")
    if given.ranks > given.questions:
        raise UserError(f"--ranks {given.ranks} is more than there are questions to share, {given.questions}")
    return given


def read_shape(name: str | None) -> ModelConfig:
    if name in SHAPES:
        return SHAPES[name]
    if name is None or not Path(name).is_dir():
        raise UserError(f"{'no model given' if name is None else f'there is no model folder {name}'}; known shapes: {', '.join(SHAPES)}")
    return ModelConfig.from_folder(Path(name))


def main(argv: list[str]) -> None:
    given = read_arguments(argv)
    if given.worked:
        return print("\n\n".join(table.to_text(limit=1000) for table in worked_tables(given.device)))
    config, questions = read_shape(given.model), -(-given.questions // given.ranks)  # the fullest rank's
    batch = Batch([given.prompt] * questions, [given.new_tokens] * questions * given.answers, given.micro_batch, NUMBER[given.dtype],
                  given.checkpointing, given.offload_optimizer, given.device)
    print(f"{given.model}: {parameters(config) / 1e6:,.2f} million parameters, {given.dtype}; {questions} questions x {given.answers} answers"
          f"{f' on each of {given.ranks} ranks' if given.ranks > 1 else ''}, prompts of {given.prompt} tokens, answers of {given.new_tokens}")
    for table in (work_table(config, batch, given.flops, given.bandwidth), memory_table(config, batch)):
        print(f"\n## {table.title}\n\n{table.to_text(limit=1000)}")
    print("".join(f"\n{line}" for line in beside(config, batch, given.ranks)))


if __name__ == "__main__":
    run_as_program("floor.py", main)
