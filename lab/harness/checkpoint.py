"""The checkpoints of a run of the lab: a model's folder, and below it trainer/ with what a resumed
run has to get back beside the model, and digests of all that has to match it."""
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from lab.engine.errors import UserError, read_json, refuse_undefined
from lab.engine.model_folder import write_model_folder
from lab.harness.build import Parts
from lab.harness.record import digest_of
from lab.harness.screen import python_command
from lab.harness.settings import CHANGEABLE
from lab.harness.versions import digest_of as digest_of_text
from qwen2_model import read_tensors, small_files
from run import checkpoints, remove, whole


FILES = {"its model": "model.safetensors", "its trainer's state": "trainer/state.safetensors"}


def refuse_damage(run: Path, step: int) -> None:
    """Refuse a newest checkpoint whose files are not those that were written."""
    found = checkpoints(run)
    checkpoint, before = found.pop(step), max(found, default=0)
    path = checkpoint / "trainer" / "state.json"
    if not path.exists():
        raise UserError(f"{checkpoint} was written by train.py: "
                        f"{python_command('train.py', '--resume', run)} goes on from it")
    known = read_json(path)
    for what, name in FILES.items():
        if known.get(what) != digest_of(checkpoint / name):
            said = (f"{checkpoint}: {what} has changed since this checkpoint was made, so the run "
                    "cannot go on from it")
            if before:
                said += f". Without this folder, --resume goes on from step {before}"
            raise UserError(said)


class Checkpoints:
    def __init__(self, run: Path, parts: Parts):
        self.run, self.parts, self.settings = run, parts, parts.policy.settings
        self.copied = small_files(parts.policy.folder)  # of the model's folder

    def put_back(self, step: int, checkpoint: Path) -> None:
        """Give the parts the state that they had after this step."""
        known = read_json(checkpoint / "trainer" / "state.json")
        for what, digest in self.digests(checkpoint, step).items():
            if known.get(what) != digest:
                raise UserError(f"{checkpoint}: {what} has changed since this checkpoint was made, "
                                "so the run cannot go on from it")
        self.parts.put_back(read_tensors(checkpoint / "trainer" / "state.safetensors"))

    def digests(self, checkpoint: Path, step: int) -> dict[str, str]:
        """Hashes of everything that has to match a checkpoint."""
        s, task = self.settings, self.parts.policy.task
        problems = [*task.training_problems(s.seed, step, s.questions),
                    *(task.held_out_problems(s.eval_tasks) if s.eval_every else [])]
        settings = {name: value for name, value in s.to_json().items()
                    if name not in CHANGEABLE}
        of_files = {what: digest_of(checkpoint / name) for what, name in FILES.items()}
        return of_files | {
            "its number": str(step), "a setting in config.json": digest_of_text(settings),
            "the task's choice of problems": digest_of_text(
                [(task.prompt_for(problem), task.show(problem)) for problem in problems])}

    def write(self, step: int) -> None:
        """Write a checkpoint, unless something in it is not finite. Only the newest two keep their
        trainer's state."""
        self.parts.policy.refuse_broken_model()
        state = {name: tensor.detach().cpu().contiguous()
                 for name, tensor in self.parts.state().items()}
        refuse_undefined("the state that a resumed run would continue from is", *state.values())
        with whole(self.folder_of(step)) as path:
            self.write_model(path, self.parts.parameters)
            (path / "trainer").mkdir()
            save_file(state, path / "trainer" / "state.safetensors")
            (path / "trainer" / "state.json").write_text(json.dumps(self.digests(path, step)))
        for old in [*checkpoints(self.run).values()][:-2]:
            shutil.rmtree(old / "trainer")

    def write_last(self, step: int) -> None:
        """Write the trained model alone, with its matrices rounded to the type of the products. In
        products the run has used no more digits of them; only as inputs the embeddings had more.

        If a stopped run has kept its trainer's state, this is removed, because a later resume would
        go back to it and train past this model.
        """
        dtype = self.parts.policy.model.compute_dtype
        rounded = {}
        for name, parameter in self.parts.parameters.items():
            is_matrix = parameter.dim() > 1
            rounded[name] = parameter.detach().to(dtype) if is_matrix else parameter
        folder = self.folder_of(step)
        if not folder.exists():  # a run that was stopped in its last step has a checkpoint there
            with whole(folder) as unfinished:
                self.write_model(unfinished, rounded)
        for folder in checkpoints(self.run).values():
            remove(folder / "trainer")

    def write_model(self, folder: Path, parameters: Mapping[str, Tensor]) -> None:
        """Write the model's folder. With --lora the additions are a part of its matrices."""
        model = self.parts.policy.model
        if self.settings.lora:
            from lab.engine.adapter import write_lora_folder
            write_lora_folder(model, folder)
        else:
            write_model_folder(model, folder, parameters)
        for name, content in self.copied.items():
            (folder / name).write_bytes(content)

    def folder_of(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step_{step:06d}"

    def last_good_model(self) -> str:
        """A clause about a way out of an error that a resumed run would make again."""
        if found := checkpoints(self.run):
            return (f"the last good checkpoint is {found[max(found)]}, from which --model begins a "
                    "new run")
        return "there is no checkpoint before it"
