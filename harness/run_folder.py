"""The folder a run leaves behind, written so that a kill at any moment costs nothing but time.

Files and checkpoints appear whole or not at all: they are written under another name, then renamed.
Lines are appended; the last one may be cut off, and is forgotten when the run goes on.
"""
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from engine import processes
from engine.choices import Method
from engine.errors import BadCredit
from engine.optimizer import (
    AdamW, load_optimizer_tensors, optimizer_tensors, parameters_by_name)
from engine.processes import refuse_undefined
from engine.rollouts import Rollouts
from harness.credit_file import checkpoint_folders, credit_path, write_credit
from harness.files import (Json, append_line, is_file, is_folder, is_there, locked, remove,
                           replace_text, whole_folder, writing)
from harness.identity import make_seal, run_id_on_record
from harness.own_code import expect, is_dense, joined, place_of, told_as
from qwen2_model import NAME_OF_TYPE, Qwen2, opened, write_tensors

TRAVELS_ALONG = (  # from the model's folder to every checkpoint
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "generation_config.json", "recipe.json")


@dataclass
class TrainerState:
    """What a resumed run needs beside the model: the state of the optimizer, and of a critic say,
    in every checkpoint."""
    model: Qwen2
    optimizer: AdamW
    methods: dict[str, Method]  # the advantage and the weighting, which may have a state

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return parameters_by_name(self.model, self.optimizer)

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors = optimizer_tensors(self.optimizer, self.parameters)
        refuse_undefined("what a resumed run would go on from is", *tensors.values())
        return tensors | self.of_methods()

    def of_methods(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for part, method in self.methods.items():
            with told_as(f"the {part}'s state_dict", method):
                state: dict[str, torch.Tensor] = getattr(method, "state_dict", dict)()
            expect(lambda: all(isinstance(name, str) and value.dtype in NAME_OF_TYPE
                               and is_dense(value) for name, value in state.items()),
                   f"the {part}'s state_dict", "plain tensors by name", state)
            for name in (name for name, value in state.items() if not value.isfinite().all()):
                raise BadCredit(f"{name} of the {part}'s state_dict ({place_of(method)}) is not "
                                "finite")
            tensors |= {f"{part}.{name}": value for name, value in state.items()}
        return tensors

    def load(self, checkpoint: Path) -> None:
        with opened(checkpoint / "trainer" / "state.safetensors") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        for part, method in self.methods.items():
            names = [name for name in tensors if name.startswith(f"{part}.")]
            state = {name.partition(".")[2]: tensors.pop(name) for name in names}
            if hasattr(method, "load_state_dict"):
                with told_as(f"the {part}'s load_state_dict", method):
                    method.load_state_dict(state)
        load_optimizer_tensors(self.optimizer, self.parameters, tensors)


class RunFolder:
    """Of several processes one `writes`; the others write their own credit, and nothing else."""

    def __init__(self, path: Path, writes: bool = True):
        self.path, self.writes = Path(path), writes

    @classmethod
    def create(cls, path: Path, config: Json, tokenizer: Path) -> "RunFolder":
        with whole_folder(path) as unfinished, writing(path):
            replace_text(unfinished / "config.json", json.dumps(config, indent=2) + "\n")
            shutil.copyfile(tokenizer, unfinished / "tokenizer.json")
        return cls(path)

    @cached_property
    def origin(self) -> dict[str, str]:
        """What all that is written here says of itself."""
        run_id = run_id_on_record(self.path)
        return {"run_id": run_id} if run_id else {}

    def replace(self, name: str, text: str) -> None:
        if self.writes:
            replace_text(self.path / name, text)

    def append(self, name: str, line: Mapping[str, object]) -> None:
        if self.writes:
            append_line(self.path / name, joined(line, self.origin))

    def write_credit(self, step: int, rollouts: Rollouts, weight: torch.Tensor,
                     **more: torch.Tensor) -> None:
        path = credit_path(self.path, step, processes.rank())
        with writing(path):
            write_credit(path, rollouts, weight, {"step": step, **self.origin}, **more)

    def checkpoints(self) -> list[Path]:
        return [folder for folder in checkpoint_folders(self.path).values()
                if is_file(folder / "trainer" / "state.json")]

    def save_checkpoint(self, step: int, state: TrainerState, source: Path) -> None:
        """Write a model folder with the trainer's state; `source` has the tokenizer to copy."""
        parameters, tensors = state.parameters, state.tensors()
        if not self.writes:
            write_tensors(None, parameters)  # of each the part that this process keeps
            write_tensors(None, tensors)
            return
        checkpoint = self.path / "checkpoints" / f"step_{step:06d}"
        with whole_folder(checkpoint) as unfinished, writing(checkpoint):
            state.model.save_pretrained(unfinished, parameters)
            for name in TRAVELS_ALONG:
                if is_file(source / name):
                    shutil.copyfile(source / name, unfinished / name)
            (unfinished / "trainer").mkdir()
            write_tensors(unfinished / "trainer" / "state.safetensors", tensors)
            seal = make_seal(self.path, unfinished, step)
            replace_text(unfinished / "trainer" / "state.json", json.dumps(seal, indent=2) + "\n")
        self.remove_old_states()

    def remove_old_states(self) -> None:
        """Keep the trainer's state, larger than the model, in the two newest checkpoints only."""
        states = [folder / "trainer" for folder in checkpoint_folders(self.path).values()
                  if is_folder(folder / "trainer")]
        with writing(self.path):
            for old_state in states[:-2] if self.writes else []:
                remove(old_state)

    def remove_unless_begun(self) -> None:
        """Without a step on record it would only be in the way of the next attempt."""
        if self.writes and not is_there(self.path / "metrics.jsonl"):
            shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def open_folder(path: Path) -> Iterator[RunFolder]:
    """The folder of a run; rank 0 writes it, and locks it."""
    writes = processes.rank() == 0
    with locked(path) if writes else nullcontext():
        yield RunFolder(path, writes)
