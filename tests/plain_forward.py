"""Qwen2 and Qwen3 once more, written from their formulas alone: one row of tokens, every head and
every position by itself, in float64, without a cache, a mask or a batch. It is slow, and what the
book computes in a faster way is compared with it."""
import torch


def plain_logits(model, ids):
    """(L, V): what the model says behind each of these tokens. Its gradient reaches the model's own
    parameters."""
    weights = {name: parameter.double() for name, parameter in model.named_parameters()}
    embeddings, config = weights["model.embed_tokens.weight"], model.config
    x = embeddings[list(ids)]                                                        # (L, D)
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        of_layer = {name.removeprefix(prefix): weight for name, weight in weights.items()
                    if name.startswith(prefix)}
        x = x + attended(norm(x, of_layer["input_layernorm.weight"], config), of_layer, config)
        y = norm(x, of_layer["post_attention_layernorm.weight"], config)
        gate, up = y @ of_layer["mlp.gate_proj.weight"].T, y @ of_layer["mlp.up_proj.weight"].T
        x = x + gate / (1 + (-gate).exp()) * up @ of_layer["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"], config) @ weights.get("lm_head.weight",
                                                                       embeddings).T


def norm(x, weight, config):
    return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * weight


def attended(x, weights, config):
    """Each head of each position looks at its own position and those before it."""
    size = config.head_dim
    queries_of_a_key = config.num_attention_heads // config.num_key_value_heads

    def heads(name):
        """Of the matrix `name`: a list over heads of (L, size)."""
        bias = weights.get(f"self_attn.{name}_proj.bias", 0)
        return (x @ weights[f"self_attn.{name}_proj.weight"].T + bias).split(size, -1)

    def turned(head, name):
        """Normalised in a Qwen3. Number i of the first half of a head and number i of its second
        half are one complex number, turned by position * theta^(-2i / size)."""
        if f"self_attn.{name}_norm.weight" in weights:
            head = norm(head, weights[f"self_attn.{name}_norm.weight"], config)
        first, second = head.chunk(2, -1)
        frequency = config.rope_theta ** (-torch.arange(0, size, 2).double() / size)
        angle = torch.arange(len(head))[:, None] * frequency
        pair = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([pair.real, pair.imag], -1)

    found, keys, values = [], [turned(head, "k") for head in heads("k")], heads("v")
    for number, head in enumerate(heads("q")):
        query, shared = turned(head, "q"), number // queries_of_a_key
        rows = []
        for t in range(len(x)):
            score = (keys[shared][:t + 1] @ query[t] / size ** 0.5).exp()
            rows.append(score / score.sum() @ values[shared][:t + 1])
        found.append(torch.stack(rows))
    return torch.cat(found, -1) @ weights["self_attn.o_proj.weight"].T
