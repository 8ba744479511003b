"""Make a run folder of the answers that another trainer wrote, for analyze.py.

    python -m bridges.import_run FILES... --model FOLDER --out runs/mine
    python analyze.py runs/mine

FILES are those of TRL, verl or prime-rl (bridges/import_formats.py), or JSON lines with the fields
that bridges/your_own_run.md lists. What they lack is computed: tokens by the tokenizer of --model,
log-prob, entropy and collision by a forward pass of its weights, the advantage from the rewards of
the group. What was computed stands in config.json and on the page. One step is in memory at a time,
and nothing that a file holds is executed.
"""
if not __package__:
    raise SystemExit("start it with: python -m bridges.import_run")
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path

import torch

import mitigations  # noqa: F401  fills the lists of choices that settings are checked with
from bridges.import_formats import PER_TOKEN, lines_of
from countdown_task import annotate
from engine.errors import UserError
from engine.forward import with_facts
from engine.rollouts import Rollouts
from engine.tokens import (CHATML, END_OF_TURN, OTHER, SECTIONS, THINK, encode, load_tokenizer,
                           token_bytes)
from grpo import group_z_score, to_every_token
from harness.credit_file import SCORES, credit_path, write_credit
from harness.files import find_folder, read_json, replace_text, sha256_of, whole_folder
from harness.flags import Flag, Parser, add_flags, some_text, with_defaults
from harness.identity import fingerprint, provenance, run_id_of
from harness.load import pick_device
from harness.program import run_as_program
from harness.progress import show_status
from harness.settings import make_settings
from harness.tasks import make_task
from qwen2_model import Qwen2

MODELS = ("qwen2", "qwen3")  # the model_type of those that are implemented
AT_ONCE = 8                  # answers of a forward pass
FACTS = ("log_prob", "entropy", "collision")  # what that tells of a token
FLAGS = {"task": Flag(None, "label the tokens as this task does, instead of by tags and text"),
         "device": Flag("cpu", "cpu, cuda or cuda:N, for the forward pass")}


@dataclass
class Answer:
    where: str          # file and line
    line: dict          # what that says, in our own fields
    prompt: list[int]
    ids: list[int]

    @property
    def group(self):
        return self.line.get("group", tuple(self.prompt))


class Reader:
    """Makes answers of lines and batches of answers, and counts what it computes for that."""

    def __init__(self, folder: Path, task: str | None, device: str):
        self.folder, self.tokenizer = folder, load_tokenizer(folder)
        self.kind = read_json(folder / "config.json").get("model_type")
        self.device, self.model = pick_device(device), None
        if self.kind in MODELS:
            self.model = Qwen2.from_pretrained(folder, self.device)
        self.task = make_task(make_settings({"model": str(folder), "task": task})) if task else None
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {i for i, token in added.items() if token.special}
        self.count = Counter()

    def steps(self, files: list[Path]) -> Iterator[tuple[int, list[Answer]]]:
        """The answers of each step. A run that counts its steps from 0 counts from 1 here."""
        answers, seen = (self.answer(*found) for found in lines_of(files)), []
        for step, of_step in groupby(answers, key=lambda answer: answer.line["step"]):
            first = next(of_step)
            if step in seen or step == 0 and seen:
                raise UserError(f"{first.where}: step {step} comes after others: name the files in "
                                "the order of their steps")
            seen.append(step)
            yield step + (seen[0] == 0), [first, *of_step]
        if not seen:
            raise UserError(f"there is no answer in {', '.join(map(str, files))}")

    def answer(self, where: str, trainer: str, line: dict) -> Answer:
        prompt = self.ids_of(line, "prompt", "prompt_ids", where)
        ids = self.ids_of(line, "completion", "token_ids", where)
        if not ids and "completion" in line:  # of an end of turn alone nothing is left in a text
            ends = map(self.tokenizer.token_to_id, END_OF_TURN)
            ids = [end for end in ends if end is not None][:1]
        if not (prompt and ids):
            raise UserError(f"{where} has no {'answer' if prompt else 'prompt'}")
        for name in (*PER_TOKEN, "sections"):
            if isinstance(line.get(name), list) and len(line[name]) != len(ids):
                raise UserError(f"{where}: its {name} has {len(line[name])} values, the answer "
                                f"{len(ids)} tokens")
        if self.model:
            limits, whole = self.model.config, prompt + ids
            if max(whole) >= limits.vocab_size or len(whole) > limits.max_position_embeddings:
                raise UserError(f"{where} has {len(whole)} tokens up to number {max(whole)}; "
                                f"{self.folder} takes {limits.max_position_embeddings}, of "
                                f"{limits.vocab_size}")
        self.count[f"from {trainer}"] += 1
        return Answer(where, line, prompt, ids)

    def ids_of(self, line: dict, text: str, number: str, where: str) -> list[int]:
        """The tokens that a line gives, or those of its text."""
        if number in line or text not in line:
            return line.get(number, [])
        self.count["texts"] += text == "completion"
        return encode(self.tokenizer, as_text(line[text], text), f"the {text} of {where}")

    def batch(self, answers: list[Answer], step: int) -> tuple[Rollouts, torch.Tensor, dict]:
        """The answers of a step, group by group; their weights; columns that not every file has."""
        numbers = {key: g for g, key in enumerate(dict.fromkeys(a.group for a in answers))}
        answers = sorted(answers, key=lambda answer: numbers[answer.group])
        prompts = {}
        for answer in answers:
            if prompts.setdefault(answer.group, answer.prompt) != answer.prompt:
                raise UserError(f"{answer.where}: its prompt is not that of its group")
        length = torch.tensor([len(answer.ids) for answer in answers])
        mask = torch.arange(int(length.max())) < length[:, None]

        def frame(values, dtype=torch.float32) -> torch.Tensor:
            """(B, T) of lists, or of numbers that hold for an answer; None is nan."""
            rows = [row if isinstance(row, list) else [math.nan if row is None else row] * n
                    for row, n in zip(values, length.tolist())]
            known = torch.tensor(list(chain(*rows)), dtype=dtype)
            return torch.zeros(mask.shape, dtype=dtype).masked_scatter(mask, known)

        given = {name: frame([a.line.get(name) for a in answers]) for name in PER_TOKEN}
        section, kind = (frame(codes, torch.uint8) for codes in zip(*map(self.labels, answers)))
        reward = torch.tensor([a.line.get("reward", math.nan) for a in answers],
                              dtype=torch.float32)
        unknown = dict.fromkeys(SCORES.values(), torch.full_like(reward, math.nan))
        batch = Rollouts(
            problems=[], prompt_ids=list(prompts.values()), step=step, mask=mask,
            group=torch.tensor([numbers[answer.group] for answer in answers]),
            ids=frame([answer.ids for answer in answers], torch.long),
            finished=torch.tensor([self.is_finished(answer) for answer in answers]),
            section=section, kind=kind, scores=unknown | {"reward": reward},
            **{name: given[name] for name in (*FACTS, "advantage")})
        self.count.update({"steps": 1, "answers": len(answers),
                           "tokens": int(mask.sum()), "no reward": int(reward.isnan().sum())})
        ratio = {} if given["ratio"].isnan().any() else {"ratio": given["ratio"]}
        return self.add_advantage(self.add_facts(batch)), given["weight"].nan_to_num(1), ratio

    def add_facts(self, batch: Rollouts) -> Rollouts:
        """With log-prob, entropy and collision where no file says them. What stays unknown of a
        token is nan at every token of the step."""
        missing = {name: getattr(batch, name).isnan() for name in FACTS}
        computed = batch
        if self.model and any(where.any() for where in missing.values()):
            computed = with_facts(self.model, batch.to(self.device), AT_ONCE).to("cpu")
        facts = {}
        for name, where in missing.items():
            values = torch.where(where, getattr(computed, name), getattr(batch, name))
            is_known = not values.isnan().any()
            facts[name] = values if is_known else torch.full_like(values, math.nan)
            self.count[name if is_known else f"no {name}"] += int(where.sum())
        return replace(batch, **facts)

    def add_advantage(self, batch: Rollouts) -> Rollouts:
        missing = batch.advantage.isnan()
        z_score = to_every_token(group_z_score(batch.reward, batch.group), batch)
        advantage = torch.where(missing, z_score, batch.advantage)
        if advantage.isnan().any():
            raise UserError(f"step {batch.step}: an answer has no advantage, and its group not all "
                            "rewards, from which it would be computed")
        self.count["advantage"] += int(missing.any(1).sum())
        return replace(batch, advantage=advantage)

    def is_finished(self, answer: Answer) -> bool:
        """Texts do not say whether they were cut off."""
        ended = "token_ids" not in answer.line or answer.ids[-1] in self.special
        return answer.line.get("finished", ended)

    def labels(self, answer: Answer) -> tuple[list[int], list[int]]:
        """Section and kind of each token."""
        prompt, pieces = (token_bytes(self.tokenizer, ids) for ids in (answer.prompt, answer.ids))
        label = self.task.label if self.task else partial(label_by_tags, b"".join(prompt))
        sections, kinds = label(pieces)
        if "sections" in answer.line:
            sections = [SECTIONS.index(name) for name in answer.line["sections"]]
        return sections, kinds

    def notes(self, files: int) -> list[str]:
        """What the page says of where its numbers come from."""
        count, model = self.count, self.folder
        trainers = [name.removeprefix("from ") for name in count if name.startswith("from ")]
        computed = ", ".join(name.replace("_", "-") for name in FACTS if count[name])
        unknown = ", ".join(name.replace("_", "-") for name in (*FACTS, "reward")
                            if count[f"no {name}"])
        why = (f" ({model} is of type {self.kind}, and {', '.join(MODELS)} alone are computed "
               "here)") * (unknown != "reward")
        sentences = (
            (True, f"Imported from {files} file{'s' * (files > 1)} of {', '.join(trainers)}. Which "
             "answers are right is not known."),
            (count["texts"], f"{count['texts']:,} answers were texts, split by the tokenizer of "
             f"{model}: into other tokens, perhaps, than were sampled. Where a text lacks the end "
             "of its turn, so do they, and whether it was cut off is not known."),
            (count["from verl"], "verl leaves special tokens out of prompts: those of ChatML were "
             "put back where a line names a role."),
            (computed, f"Computed with the weights of {model}, which need not be those that "
             f"sampled: {computed}."),
            (count["advantage"], f"Computed from rewards: the advantage of {count['advantage']:,} "
             "answers, a z-score in the group."),
            (unknown, f"Not known, and left out: {unknown}{why}."))
        return [sentence for holds, sentence in sentences if holds]


def label_by_tags(prompt: bytes, pieces: list[bytes]) -> tuple[list[int], list[int]]:
    """Section and kind of each token, by its text alone. Without a tag, in the answer or at the end
    of the prompt, nothing is called thinking."""
    sections, kinds = annotate(pieces)
    if not (prompt.rstrip().endswith(b"<think>") or b"think>" in b"".join(pieces)):
        sections = [OTHER if code == THINK else code for code in sections]
    return sections, kinds


def as_text(value, field: str) -> str:
    """Messages are written as ChatML, the roles between tags; an answer begins behind its tag."""
    if isinstance(value, str):
        return value
    begin, end = CHATML
    text = "".join(f"{begin}{turn['role']}\n{turn['content']}{end}\n" for turn in value)
    if field == "prompt":
        return f"{text}{begin}assistant\n"
    return text.removeprefix(f"{begin}assistant\n").removesuffix(f"{end}\n")


def import_run(files: list[Path], source: Path, out: Path, reader: Reader, config: dict) -> None:
    """Write the run folder, whole or not at all."""
    config["run_id"] = run_id_of(config)
    with whole_folder(out) as unfinished:
        shutil.copyfile(source / "tokenizer.json", unfinished / "tokenizer.json")
        for step, answers in reader.steps(files):
            show_status(f"step {step}: {len(answers)} answers")
            batch, weight, ratio = reader.batch(answers, step)
            origin = {"run_id": config["run_id"], "step": step}
            write_credit(credit_path(unfinished, step), batch, weight, origin, **ratio)
        config["imported"] = reader.notes(len(files))
        replace_text(unfinished / "config.json", json.dumps(config, indent=2) + "\n")


def main(argv: list[str]) -> None:
    parser = Parser("python -m bridges.import_run FILES... --model FOLDER --out RUN", __doc__)
    parser.add_argument("files", nargs="+", metavar="FILES", type=some_text,
                        help="what the trainer wrote, in the order of the steps")
    parser.add_argument("--model", required=True, type=some_text, metavar="FOLDER",
                        help="its tokenizer reads the tokens, its weights compute what is missing")
    parser.add_argument("--out", required=True, type=some_text, metavar="RUN",
                        help="the run folder to make")
    given = add_flags(parser, FLAGS).read(argv)
    files, model, out = map(Path, given.pop("files")), given.pop("model"), Path(given.pop("out"))
    flags, source, files = with_defaults(given, FLAGS), find_folder(model), list(files)
    reader = Reader(source, flags.task, flags.device)
    made_of = {"model": fingerprint(source), **{str(path): sha256_of(path) for path in files}}
    task = {"task": flags.task} if flags.task else {}
    import_run(files, source, out, reader, {
        "mitigation": out.name, "advantage": "grpo", "seed": 0, "steps": 0, **task,
        "model": model, "made_of": made_of, **provenance()})
    show_status("")
    count = reader.count
    print(f"{out}: {count['answers']:,} answers, {count['tokens']:,} tokens, {count['steps']:,} "
          f"step{'s' * (count['steps'] > 1)}", *reader.notes(len(files)), sep="\n")
    print(f"python analyze.py {out}")


if __name__ == "__main__":
    run_as_program("import_run", main)
