"""The tries: which ideas and strengths were compared with the same runs of plain GRPO.

Whoever tries many ideas finds one that is better by luck. So each comparison with plain GRPO is
written down beside plain GRPO's runs, in tries.json, and the p-value of a verdict is corrected for
all of them by Holm's method. The same idea on other seeds is another try, because whoever adds
seeds until the verdict pleases tries more than once.
"""
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.engine.errors import UserError, read_json
from lab.harness.record import replace_text


@dataclass(frozen=True)
class Try:
    """A comparison of an idea with plain GRPO."""
    idea: str          # with its flags
    seeds: list[int]
    p: float | None    # not corrected; None if there were too few pairs for a test

    def __str__(self) -> str:
        return f"{self.idea} ({len(self.seeds)} seeds)"


class Tries:
    """The tries on some runs of plain GRPO. Without a path they are not kept, and there are no
    others."""

    def __init__(self, idea: str = "", digest: str = "", path: Path | None = None):
        self.idea, self.digest, self.path = idea, digest, path

    def add(self, seeds: tuple[int, ...], p: float) -> list[Try]:
        """Write down a try of this idea, and return the other tries that share runs of plain GRPO
        with it. `digest` tells ideas apart whose settings differ."""
        if self.path is None:
            return []
        known = read_json(self.path) if self.path.exists() else {}
        own = f"{self.digest} on seeds {' '.join(map(str, seeds))}"
        known[own] = asdict(Try(self.idea, list(seeds), p if p == p else None))
        replace_text(self.path, json.dumps(known, indent=1) + "\n")
        others = []
        for key, value in known.items():
            try:
                one = Try(**value)
            except TypeError:
                raise UserError(f"{self.path}: {key} is no try, which has an idea, seeds and a p"
                                ) from None
            if key != own and set(one.seeds) & set(seeds):
                others.append(one)
        return others
