"""Make a run folder of the answers that another trainer wrote, for analyze.py.

    python -m bridges.import_run FILES... --model FOLDER --out runs/mine
    python analyze.py runs/mine

FILES are those of another trainer (bridges/import_formats.py), or JSON lines with the fields that
bridges/your_own_run.md lists. What they lack is computed, and the page says so: tokens by the
tokenizer of --model, log-prob, entropy and collision by a forward pass of its weights, the
advantage from the rewards of the group. One step is in memory at a time.
"""
if not __package__:
    raise SystemExit("start it with: python -m bridges.import_run")
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from types import SimpleNamespace

import torch
from tokenizers import Tokenizer

import mitigations  # noqa: F401  fills the lists of choices that settings are checked with
from bridges.import_formats import FIELDS, PER_TOKEN, lines_of
from bridges.messages import own_text, prompt_text
from bridges.trl_queue import Queue
from countdown_task import annotate
from engine.errors import UserError, read_json
from engine.extra_forward import with_facts
from engine.rollouts import NOTHING, Rollouts, score_answers
from engine.tokens import END_OF_TURN, OTHER, THINK, encode, load_tokenizer, token_bytes
from grpo import group_z_score, to_every_token
from harness.record import credit_path, find_folder, provenance, replace_text, whole, write_credit
from harness.screen import run_as_program, show_status
from harness.flags import Flag
from harness.parser import make_parser, with_defaults
from harness.load import pick_device
from qwen2_model import Qwen2

MODELS = ("qwen2", "qwen3")  # the model_type of those that are implemented
AT_ONCE = 8                  # answers of a forward pass
FACTS = ("log_prob", "entropy", "collision")  # what that tells of a token
FLAGS = {"device": Flag("cpu", "cpu, cuda or cuda:N, for the forward pass"),
         "temperature": Flag(None, "of sampling, and of that pass", kind=float, above=0, most=100)}


class Reader:
    """Makes answers of lines and batches of answers, and counts what it computes for that."""

    def __init__(self, folder: Path, device: str, temperature: float = 1):
        self.folder, self.tokenizer = folder, load_tokenizer(folder)
        self.kind = read_json(folder / "config.json").get("model_type")
        self.device, self.temperature, self.model = pick_device(device), temperature, None
        if self.kind in MODELS:
            self.model = Qwen2.from_pretrained(folder, self.device)
            self.model.model.norm.weight.data /= temperature  # and so the logits
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {i for i, token in added.items() if token.special}
        self.count, self.passed_over = Counter(), set()
        self.queue, self.trainer = Queue(), None  # of TRL; who wrote the files

    def steps(self, files: list[Path]) -> Iterator[tuple[int, list[dict]]]:
        """The answers of each step. A run that counts its steps from 0 counts from 1 here."""
        answers, seen = (self.answer(*found) for found in lines_of(files)), []
        for step, of_step in groupby(answers, key=lambda answer: answer["step"]):
            rows = list(of_step)
            if step in seen or step == 0 and seen:
                raise UserError(f"{rows[0]['where']}: step {step} comes after others: name the "
                                "files in the order of their steps")
            seen.append(step)
            numbered = step + (seen[0] == 0)
            if self.trainer != "TRL" or self.queue.is_new(numbered, rows):
                yield numbered, rows
        if not seen:
            raise UserError(f"there is no answer in {', '.join(map(str, files))}")

    def answer(self, where: str, trainer: str, line: dict) -> dict:
        """A line with its tokens, and where it stands."""
        self.trainer = self.trainer or trainer
        if trainer != self.trainer:
            raise UserError(f"{where} is of {trainer}, and what was read before of {self.trainer}: "
                            "import the files of one run")
        self.passed_over |= line.keys() - FIELDS.keys()
        prompt, ids = self.tokens_of(line, where)
        if not (prompt and ids):
            raise UserError(f"{where} has no {'answer' if prompt else 'prompt'}")
        for name in PER_TOKEN:
            if isinstance(line.get(name), list) and len(line[name]) != len(ids):
                raise UserError(f"{where}: its {name} has {len(line[name])} values, the answer "
                                f"{len(ids)} tokens")
        if self.model:
            config, whole = self.model.config, prompt + ids
            if max(whole) >= config.vocab_size or len(whole) > config.max_position_embeddings:
                raise UserError(
                    f"{where} has {len(whole)} tokens up to number {max(whole)}; {self.folder} "
                    f"takes {config.max_position_embeddings}, of {config.vocab_size}")
        is_text = "token_ids" not in line  # that does not say whether it was cut off
        return {"finished": is_text or ids[-1] in self.special, "group": tuple(prompt), **line,
                "where": where, "is_text": is_text, "prompt_ids": prompt, "token_ids": ids}

    def tokens_of(self, line: dict, where: str) -> tuple[list[int], list[int]]:
        """Those of the prompt and of the answer, given or by their texts."""
        prompt, answer = line.get("prompt_ids"), line.get("token_ids")
        if prompt is None:
            text = line.get("prompt", "")
            self.count["messages"] += not isinstance(text, str)
            text = text if isinstance(text, str) else prompt_text(text, self.folder)
            prompt = encode(self.tokenizer, text, f"the prompt of {where}")
        if answer is None and "completion" in line:
            text = line["completion"]
            text = text if isinstance(text, str) else own_text(text, where)
            # of an end of turn alone nothing is left in a text
            answer = encode(self.tokenizer, text, f"the completion of {where}") or [
                end for end in map(self.tokenizer.token_to_id, END_OF_TURN) if end is not None][:1]
        return prompt, answer or []

    def batch(self, answers: list[dict], step: int) -> tuple[Rollouts, torch.Tensor]:
        """The answers of a step, group by group; and their weights."""
        numbers = {key: g for g, key in enumerate(dict.fromkeys(a["group"] for a in answers))}
        answers = sorted(answers, key=lambda answer: numbers[answer["group"]])
        prompts = {}
        for answer in answers:
            if prompts.setdefault(answer["group"], answer["prompt_ids"]) != answer["prompt_ids"]:
                raise UserError(f"{answer['where']}: its prompt is not that of its group")
        length = torch.tensor([len(answer["token_ids"]) for answer in answers])
        mask = torch.arange(int(length.max())) < length[:, None]

        def frame(values, dtype=torch.float32) -> torch.Tensor:
            """(B, T) of lists, or of numbers that hold for an answer; None is nan."""
            rows = [row if isinstance(row, list) else [math.nan if row is None else row] * n
                    for row, n in zip(values, length.tolist())]
            known = torch.tensor(list(chain(*rows)), dtype=dtype)
            return torch.zeros(mask.shape, dtype=dtype).masked_scatter(mask, known)

        given = {name: frame([answer.get(name) for answer in answers]) for name in PER_TOKEN}
        scores = scores_of(answers)
        batch = Rollouts(
            problems=list(prompts), prompt_ids=list(prompts.values()), step=step, mask=mask,
            group=torch.tensor([numbers[answer["group"]] for answer in answers]),
            ids=frame([answer["token_ids"] for answer in answers], torch.long),
            finished=torch.tensor([answer["finished"] for answer in answers]),
            **{name: given[name] for name in (*FACTS, "advantage")})
        self.count.update({"steps": 1, "answers": len(answers), "tokens": int(mask.sum()),
                           "texts": sum(answer["is_text"] for answer in answers),
                           "no reward": int(scores["reward"].isnan().sum()),
                           "unsolved": int(scores.get("answer", NOTHING).isnan().sum())})
        batch = replace(labelled(batch, self.tokenizer), scores=scores)
        batch = self.add_advantage(self.add_facts(batch))
        batch = replace(batch, scores={part: or_unknown(score) for part, score in scores.items()})
        return batch, given["weight"].nan_to_num(1)

    def add_facts(self, batch: Rollouts) -> Rollouts:
        """With log-prob, entropy and collision where the files do not say them of all answers."""
        missing = [name for name in FACTS if getattr(batch, name).isnan().any()]
        self.count.update(name if self.model else f"no {name}" for name in missing)
        computed = with_facts(self.model, batch.to(self.device),
                              AT_ONCE).to("cpu") if self.model and missing else batch
        return replace(batch, **{name: or_unknown(getattr(computed, name)) for name in missing})

    def add_advantage(self, batch: Rollouts) -> Rollouts:
        missing = batch.advantage.isnan()
        z_score = to_every_token(group_z_score(batch.reward, batch.group), batch)
        advantage = torch.where(missing, z_score, batch.advantage)
        if advantage.isnan().any():
            raise UserError(f"step {batch.step}: an answer has no advantage, and its group not all "
                            "rewards, from which it would be computed")
        self.count["advantage"] += int(missing.any(1).sum())
        return replace(batch, advantage=advantage)

    def notes(self, files: int) -> list[str]:
        """What the page says of where its numbers come from."""
        count, model = self.count, self.folder
        computed = ", ".join(name for name in FACTS if count[name])
        unknown = ", ".join(name for name in (*FACTS, "reward") if count[f"no {name}"])
        why = "" if self.model or unknown == "reward" else f" ({model} is of type {self.kind})"
        sentences = (
            (True, f"Imported from {files} file{'s' * (files > 1)} of {self.trainer}."),
            (count["unsolved"], "Which answers are right is not known."),
            (count["texts"], f"{count['texts']:,} answers were texts, split by the tokenizer of "
             f"{model}: into other tokens, perhaps, than were sampled. Where a text lacks the end "
             "of its turn, so do they, and whether it was cut off is not known."),
            (count["messages"], f"Prompts were written by the chat template of {model}."),
            (computed, f"Computed with the weights of {model}, which need not be those that "
             f"sampled, at temperature {self.temperature:g}: {computed}."),
            (count["advantage"], f"Computed from rewards: the advantage of {count['advantage']:,} "
             "answers, a z-score in the group."),
            (self.passed_over, f"No fields of a line: {', '.join(sorted(self.passed_over))}."),
            (unknown, f"Not known, and left out: {unknown}{why}."))
        return [*(sentence for holds, sentence in sentences if holds), *self.queue.notes()]


def or_unknown(values: torch.Tensor) -> torch.Tensor:
    """As credit files have it: what is not known of one of a step is nan of all."""
    return torch.full_like(values, math.nan) if values.isnan().any() else values


def scores_of(lines: list[dict]) -> dict[str, torch.Tensor]:
    """The reward and its parts (B,); None is nan."""
    def column(values) -> torch.Tensor:
        return torch.tensor([math.nan if value is None else value for value in values],
                            dtype=torch.float32)

    names = dict.fromkeys(chain(*(line.get("parts", ()) for line in lines)))
    scores = named_parts(names, [column(line.get("parts", {}).get(name) for line in lines)
                                 for name in names])
    if any("solved" in line for line in lines):
        scores["answer"] = column(line.get("solved") for line in lines)
    return scores | {"reward": column(line.get("reward") for line in lines)}


def named_parts(names: Iterable[str], columns: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rewards by the names of their functions. `reward` is the lab's name of the sum, `answer` that
    of whether an answer is right, which a function called so says by 1 or more. Of several with one
    name the later ones get a number."""
    parts = {}
    for number, (name, values) in enumerate(zip(names, columns), 1):
        if name == "answer":
            parts["answer"] = torch.where(values.isnan(), values, (values >= 1).float())
        own = f"own_{name}" if name in ("reward", "answer") else name
        parts[f"{own}_{number}" if own in parts else own] = values
    return parts


def labelled(batch: Rollouts, tokenizer: Tokenizer, task=None) -> Rollouts:
    """With section and kind of each token, by a task, or by tags and text alone. Without a tag, in
    the answer or at the end of the prompt, nothing is called thinking."""
    prompt = b"".join(token_bytes(tokenizer, batch.prompt_ids[0]))  # they end alike

    def by_tags(pieces: list[bytes]) -> tuple[list[int], list[int]]:
        sections, kinds = annotate(pieces)
        if not (prompt.rstrip().endswith(b"<think>") or b"think>" in b"".join(pieces)):
            sections = [OTHER if code == THINK else code for code in sections]
        return sections, kinds

    names = SimpleNamespace(label=task.label if task else by_tags, score=lambda problem, text: {})
    return score_answers(batch, tokenizer, names)


def import_run(files: list[Path], out: Path, reader: Reader, config: dict) -> None:
    """Write the run folder, whole or not at all."""
    with whole(out) as unfinished:
        replace_text(unfinished / "tokenizer.json", reader.tokenizer.to_str())
        for step, answers in reader.steps(files):
            show_status(f"step {step}: {len(answers)} answers")
            batch, weight = reader.batch(answers, step)
            write_credit(credit_path(unfinished, step), batch, weight,
                         {"trainer_step": answers[0]["step"]})
        config["imported"] = reader.notes(len(files))
        replace_text(unfinished / "config.json", json.dumps(config, indent=2) + "\n")


def main(argv: list[str]) -> None:
    parser = make_parser("python -m bridges.import_run FILES... --model FOLDER --out RUN", __doc__,
                         FLAGS)
    parser.add_argument("files", nargs="+", metavar="FILES",
                        help="what the trainer wrote, in the order of the steps")
    parser.add_argument("--model", required=True, metavar="FOLDER",
                        help="its tokenizer reads the tokens, its weights compute what is missing")
    parser.add_argument("--out", required=True, metavar="RUN", help="the run folder to make")
    given = parser.read(argv)
    files = [Path(file) for file in given.pop("files")]
    model, out = given.pop("model"), Path(given.pop("out"))
    source = find_folder(model)
    flags = with_defaults(given, FLAGS)
    reader = Reader(source, flags.device, flags.temperature or 1)
    *_, line = next(lines_of(files), [{}])
    import_run(files, out, reader, {
        "mitigation": out.name, "advantage": "grpo", "seed": 0, "steps": 0, "model": model,
        **provenance(), "temperature": flags.temperature or 1,
        "columns_temperature": flags.temperature or (None if line.keys() & set(FACTS) else 1)})
    show_status("")
    count = reader.count
    print(f"{out}: {count['answers']:,} answers, {count['tokens']:,} tokens, {count['steps']:,} "
          f"step{'s' * (count['steps'] > 1)}", *reader.notes(len(files)),
          f"python analyze.py {out}", sep="\n")


if __name__ == "__main__":
    run_as_program("import_run", main)
