"""The cache of the sampler: keys and values of all earlier tokens, and the attention to them.

Example: prompts p (3 tokens) and r (5 tokens), two answers each, at most 4 new tokens. The model
has H = 4 query heads, and every 2 of them share one of K = 2 key heads.

    row          0   1   2   3       R = 4
    question     0   0   1   1       rows 0 and 1 answer p, rows 2 and 3 answer r

What is stored, for every layer (keys and values alike):

    prompt_keys  (Q, K, P, head_dim)   = (2, 2, 5, head_dim)   padded on the right
    keys         (E, slots, head_dim)  = (8, 3, head_dim)      E = R * K pairs: a row, a key head

Slot t of a pair belongs to token t of its row. There are 3 slots for 4 tokens, because the last
token is sampled but never fed to the model. The step that feeds token 1 writes slot 1 and sees
(x is seen, . is padding or not written yet):

                 prompt        slots
    row 0        x x x . .     x x .
    row 1        x x x . .     x x .
    row 2        x x x x x     x x .
    row 3        x x x x x     x x .

Pairs are ordered by question, then key head, then answer. So those that meet the same keys of a
prompt are neighbours. They form a grid (Q, K, G) of G = 2 answers, and one product serves them:

    pair         0   1   2   3   4   5   6   7
    row          0   1   0   1   2   3   2   3
    key head     0   0   1   1   0   0   1   1

    queries      (E, H / K, head_dim)        = (8, 2, head_dim)
      in grid    (Q, K, G * H / K, head_dim) = (2, 2, 4, head_dim)
    scores       (Q, K, G * H / K, P)        = (2, 2, 4, 5)    with prompt_keys
                 (E, H / K, slots)           = (8, 2, 3)       with keys

When row 1 leaves, 6 pairs remain, and the grid has two holes. There pair 0 is computed once more,
and its result is dropped:

    place in grid    0   1   2   3   4   5   6   7
    pair             0   -   1   -   2   3   4   5

Rows may also go on from within a prompt. Such a row sees only the first tokens of it; `seen` says
how many. Here rows 2 and 3 go on from the first 4 and the first 2 tokens of r:

                 prompt        slots        seen
    row 2        x x x x .     x x .        4
    row 3        x x . . .     x x .        2
"""
import torch

from qwen2_model import ModelConfig

FIRST_SLOTS = 32  # the cache begins with so many and grows: most answers end long before the limit


class Layout:
    """Where the E pairs of R rows and K key heads stand, and how tensors get there and back.

    question (R,): which question each row answers, ascending from 0 to Q - 1
    answers (Q,):  how many rows each question has
    """

    def __init__(self, question: torch.Tensor, answers: torch.Tensor, key_heads: int):
        device = question.device
        self.K = key_heads
        self.G = int(answers.max())
        first_row = answers.cumsum(0) - answers
        answer = torch.arange(len(question), device=device) - first_row[question]
        head = torch.arange(self.K, device=device)
        place = (question[:, None] * self.K + head) * self.G + answer[:, None]  # (R, K)
        place = place.flatten()
        self.order = place.argsort()      # (E,) which of the flat (R, K) each pair is
        self.back = self.order.argsort()  # (E,) the inverse: which pair each of (R, K) is
        self.place = place[self.order]    # (E,) the place of each pair in the grid
        self.pair = torch.zeros(len(answers) * self.K * self.G, dtype=torch.long, device=device)
        self.pair[self.place] = torch.arange(len(place), device=device)  # a hole keeps 0
        self.has_holes = len(self.place) < len(self.pair)

    def rows_to_pairs(self, x: torch.Tensor) -> torch.Tensor:
        """(R, K * n, m) -> (E, n, m)"""
        return x.reshape(len(self.order), -1, x.shape[-1]).index_select(0, self.order)

    def pairs_to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """(E, n, m) -> (R, K * n, m)"""
        return x.index_select(0, self.back).view(-1, self.K * x.shape[1], x.shape[2])

    def pairs_to_grid(self, x: torch.Tensor) -> torch.Tensor:
        """(E, n, m) -> (Q, K, G * n, m)"""
        by_place = x.index_select(0, self.pair) if self.has_holes else x
        return by_place.unflatten(0, (-1, self.K, self.G)).flatten(2, 3)

    def grid_to_pairs(self, x: torch.Tensor) -> torch.Tensor:
        """(Q, K, G * n, m) -> (E, n, m)"""
        by_place = x.unflatten(2, (self.G, -1)).flatten(0, 2)
        return by_place.index_select(0, self.place) if self.has_holes else by_place


class Cache:
    """Keys and values of Q prompts and of the R rows that answer them.

    Fill it with `show_prompts` and, a layer after the other, `add_prompts`. Then steps follow:
    after `set_window` and `set_slot` the model calls `attend` in every layer. Between steps `keep`
    lets rows leave, and `set_window` makes room for more tokens.

    During a step only the content of tensors changes, never their place in memory: a CUDA graph
    repeats what it recorded at the same addresses.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, question: torch.Tensor,
                 slots: int):
        """`slots` is the most that a row may need."""
        pairs = len(question) * config.num_key_value_heads
        self.most_slots = slots
        shape = (config.num_hidden_layers, pairs, min(slots, FIRST_SLOTS), config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=question.device)
        self.values = torch.zeros(shape, dtype=dtype, device=question.device)
        self.prompt_keys = []    # of each layer (Q, K, P, head_dim)
        self.prompt_values = []
        self.seen = None         # (R,) how many tokens of its prompt each row sees
        self.unseen = None       # (Q, 1, G, 1, P) to be added to scores: -inf if not seen, else 0
        self.arrange(question, config.num_key_value_heads)
        self.end = 0
        self.ahead = False
        self.slot = None         # (1,)
        self.unwritten = None    # (end,) to be added to scores: -inf after the slot, else 0

    def show_prompts(self, seen: torch.Tensor, longest: int) -> None:
        """Let each row see its first `seen` (R,) tokens of a prompt; P is `longest`."""
        self.seen = seen
        self.hide_unseen(longest)

    def hide_unseen(self, longest: int) -> None:
        """Make the mask `unseen` in the order of the grid; a hole sees only the first token."""
        layout = self.layout
        of_heads = self.seen[:, None, None].expand(-1, layout.K, 1)           # (R, K, 1)
        seen = torch.ones_like(layout.pair)                                   # (Q * K * G,)
        seen[layout.place] = layout.rows_to_pairs(of_heads).flatten()
        seen = seen.view(-1, layout.K, layout.G)[:, :1, :, None, None]        # (Q, 1, G, 1, 1)
        is_unseen = torch.arange(longest, device=seen.device) >= seen         # (Q, 1, G, 1, P)
        zeros = torch.zeros(is_unseen.shape, device=seen.device)
        self.unseen = zeros.masked_fill(is_unseen, float("-inf"))

    def add_prompts(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep the next layer's keys and values (Q, K, P, head_dim), contiguous to read fast."""
        self.prompt_keys.append(keys.contiguous())
        self.prompt_values.append(values.contiguous())

    def set_window(self, end: int, ahead: bool) -> None:
        """Let the coming steps look at slots 0 to end - 1.

        With `ahead`, some of these are written only by a later one of the steps.
        """
        self.end = end
        self.ahead = ahead
        if end > self.keys.shape[2]:
            slots = min(max(end, 2 * self.keys.shape[2]), self.most_slots)
            self.keys = self.with_slots(self.keys, slots)
            self.values = self.with_slots(self.values, slots)

    def with_slots(self, stored: torch.Tensor, slots: int) -> torch.Tensor:
        """(layers, E, slots, head_dim): what is stored of the E pairs, with room for more slots."""
        layers, _, old_slots, size = stored.shape
        pairs = len(self.layout.order)
        larger = stored.new_zeros(layers, pairs, slots, size)
        larger[:, :, :old_slots] = stored[:, :pairs]
        return larger

    def set_slot(self, slot: torch.Tensor) -> None:
        """Let this step write the slot (1,), and see no slot after it."""
        self.slot = slot
        if self.ahead:
            slots = torch.arange(self.end, device=slot.device)
            zeros = torch.zeros_like(slots, dtype=torch.float32)
            self.unwritten = zeros.masked_fill(slots > slot, float("-inf"))

    def attend(self, layer: int, q, k, v) -> torch.Tensor:
        """(R, H, head_dim): each row's queries, one softmax over its prompt's and its own keys."""
        layout = self.layout
        q = layout.rows_to_pairs(q * q.shape[-1] ** -0.5)         # (E, H / K, head_dim)
        keys = self.write(self.keys[layer], k)                    # (E, end, head_dim)
        values = self.write(self.values[layer], v)
        slot_scores = q @ keys.transpose(1, 2)                    # (E, H / K, end)
        if self.ahead:
            slot_scores = slot_scores + self.unwritten
        prompt_scores = layout.pairs_to_grid(q) @ self.prompt_keys[layer].transpose(2, 3)
        prompt_scores.unflatten(2, (layout.G, -1)).add_(self.unseen)
        prompt_scores = layout.grid_to_pairs(prompt_scores)       # (E, H / K, P)
        P = prompt_scores.shape[-1]
        scores = torch.cat([prompt_scores, slot_scores], -1)
        weight = scores.softmax(-1, dtype=torch.float32).type_as(v)
        from_slots = weight[..., P:] @ values                     # (E, H / K, head_dim)
        from_prompt = layout.pairs_to_grid(weight[..., :P]) @ self.prompt_values[layer]
        return layout.pairs_to_rows(from_slots + layout.grid_to_pairs(from_prompt))

    def write(self, stored: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Store the keys or values (R, K, head_dim) of the new tokens in their slot, and return the
        slots 0 to end - 1 of all pairs: (E, end, head_dim)."""
        pairs = self.layout.rows_to_pairs(new)
        stored = stored[:len(pairs)]
        stored.index_copy_(1, self.slot, pairs)
        return stored[:, :self.end]

    def keep(self, stay: torch.Tensor) -> None:
        """Drop the rows where `stay` (R,) is False, and the prompts that no row answers any more.

        The pairs that stay move up. The memory behind them stays allocated and is not read again.
        """
        pairs = stay[self.layout.order // self.layout.K].nonzero().squeeze(1)
        for stored in (*self.keys, *self.values):  # a layer at a time
            stored[:len(pairs), :self.end] = stored[:, :self.end].index_select(0, pairs)
        remaining = self.arrange(self.question[stay], self.layout.K)
        if len(remaining) < len(self.unseen):
            self.prompt_keys = [keys[remaining] for keys in self.prompt_keys]
            self.prompt_values = [values[remaining] for values in self.prompt_values]
        self.show_prompts(self.seen[stay], self.unseen.shape[-1])

    def arrange(self, question: torch.Tensor, key_heads: int) -> torch.Tensor:
        """Number these questions (R,) from 0 again and lay out their rows; returns the numbers that
        the Q questions had before."""
        old_numbers, self.question, answers = question.unique(return_inverse=True,
                                                              return_counts=True)
        self.layout = Layout(self.question, answers, key_heads)
        return old_numbers
