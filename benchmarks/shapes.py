"""The shapes that the arithmetic of floor.py is about: of a model, and of the batch of a step.

Letters, here and in operations.py and bytes_kept.py: D width, I width of the MLP, V vocabulary;
A all query heads side by side, C all key (or all value) heads; Q prompts of P tokens at most,
R answers, N tokens in all; b bytes of a number.
"""
from dataclasses import dataclass, replace

from qwen2_model import ModelConfig


def qwen25(D: int, I: int, layers: int, heads: int, kv_heads: int, head_dim: int,
           V: int = 151936, tied: bool = True) -> ModelConfig:
    return ModelConfig(V, D, I, layers, heads, kv_heads, head_dim,
                       rope_theta=1e6, tie_word_embeddings=tied)


SHAPES = {
    "tiny": qwen25(128, 384, layers=4, heads=4, kv_heads=2, head_dim=32, V=512),
    "small": qwen25(256, 768, layers=6, heads=8, kv_heads=4, head_dim=32, V=4096),
    "0.5B": qwen25(896, 4864, layers=24, heads=14, kv_heads=2, head_dim=64),
    "1.5B": qwen25(1536, 8960, layers=28, heads=12, kv_heads=2, head_dim=128),
    "3B": qwen25(2048, 11008, layers=36, heads=16, kv_heads=2, head_dim=128),
    "7B": qwen25(3584, 18944, layers=28, heads=28, kv_heads=4, head_dim=128, V=152064, tied=False),
    "14B": qwen25(5120, 13824, layers=48, heads=40, kv_heads=8, head_dim=128, V=152064, tied=False),
}
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Batch:
    """What one process works on in a step, and how it does it."""
    prompts: list[int]      # tokens of each problem's prompt
    answers: list[int]      # tokens of each answer, those to one problem after those to another
    micro_batch: int = 8
    number_bytes: int = 4   # bytes of a number that is computed with
    checkpointing: bool = False
    offload_optimizer: bool = False
    device: str = "cpu"
    shards: int = 1         # processes that keep a part of the model each, with --shard

    @property
    def converts(self) -> bool:
        """Whether parameters lie there in float32 and are converted to be multiplied."""
        return self.number_bytes < 4 and not self.offload_optimizer and self.shards == 1

    @property
    def fed(self) -> list[int]:
        """Tokens of each answer that go through the layers; the last one predicts nothing."""
        return [length - 1 for length in self.answers]

    @property
    def tokens(self) -> int:
        """All tokens that go through the layers in the update."""
        return sum(self.prompts) + sum(self.fed)

    def question(self, row: int) -> int:
        return row * len(self.prompts) // len(self.answers)

    def micro_batches(self) -> list["Batch"]:
        """The batch cut into parts, each with the prompts that its answers need."""
        starts = range(0, len(self.answers), self.micro_batch)
        return [self.part(start) for start in starts]

    def part(self, start: int) -> "Batch":
        rows = range(start, min(start + self.micro_batch, len(self.answers)))
        questions = sorted({self.question(row) for row in rows})
        return replace(self, prompts=[self.prompts[question] for question in questions],
                       answers=[self.answers[row] for row in rows])


def head_widths(config: ModelConfig) -> tuple[int, int]:
    """A and C: the widths of all query heads, and of all key or value heads."""
    A = config.num_attention_heads * config.head_dim
    C = config.num_key_value_heads * config.head_dim
    return A, C


def layer_matrices(config: ModelConfig) -> int:
    """Numbers in the matrices of a layer."""
    A, C = head_widths(config)
    D = config.hidden_size
    attention = 2 * D * A + 2 * D * C           # queries and output, keys and values
    mlp = 3 * D * config.intermediate_size      # gate, up and down
    return attention + mlp


def multiplied_matrices(config: ModelConfig) -> int:
    """Numbers in the matrices that every token is multiplied with: layers and output matrix."""
    in_layers = config.num_hidden_layers * layer_matrices(config)
    return in_layers + config.vocab_size * config.hidden_size


def all_matrices(config: ModelConfig) -> int:
    """Numbers in all matrices. Embeddings that are not tied are one matrix more."""
    if config.tie_word_embeddings:
        return multiplied_matrices(config)
    return multiplied_matrices(config) + config.vocab_size * config.hidden_size


def parameters(config: ModelConfig) -> int:
    """Numbers in the matrices, the biases and the norms."""
    A, C = head_widths(config)
    D = config.hidden_size
    biases = A + 2 * C                      # Qwen2: of queries, keys and values
    head_norms = 2 * config.head_dim        # Qwen3: of queries and keys
    in_attention = biases if config.model_type == "qwen2" else head_norms
    layer_norms = 2 * D
    final_norm = D
    vectors = config.num_hidden_layers * (in_attention + layer_norms) + final_norm
    return all_matrices(config) + vectors


def cached_bytes(config: ModelConfig, number_bytes: int) -> int:
    """Bytes of the keys and values of one token in all layers."""
    _, C = head_widths(config)
    return 2 * config.num_hidden_layers * C * number_bytes
