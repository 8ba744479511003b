"""Make a run folder from the answers that another trainer wrote, for analyze.py.

    python -m lab.trl.import_run FILES... --model FOLDER --out runs/mine
    python analyze.py runs/mine

FILES are JSON lines with the fields that lab/trl/your_own_run.md lists. What they lack is computed,
and the page of the run says what. Tokens come from the tokenizer of --model. Log-prob, entropy and
collision come from a forward pass of its weights, and the advantage from the rewards of the group.
One step is in memory at a time.
"""
if not __package__:
    raise SystemExit("start it with: python -m lab.trl.import_run")
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

from lab.engine.model_folder import read_model_folder
import mitigations  # noqa: F401  fills the lists of choices that settings are checked with
from lab.trl.import_formats import FIELDS, PER_TOKEN, lines_of
from lab.trl.messages import own_text
from lab.countdown import annotate
from lab.engine.errors import UserError, read_json
from lab.engine.extra_forward import with_facts
from lab.engine.rollouts import UNSET, Rollouts, score_answers
from lab.engine.tokens import END_OF_TURN, OTHER, THINK, encode, load_tokenizer, token_bytes
from grpo import group_z_score, to_every_token
from lab.harness.chat_template import prompt_of
from lab.harness.record import (RunFolder, credit_path, find_folder, provenance, replace_text,
                                whole, write_credit)
from lab.harness.screen import python_command, run_as_program, show_status
from lab.harness.flags import Flag, read
from lab.harness.build import pick_device
from lab.harness.step_lines import batch_metrics

MODELS = ("qwen2", "qwen3")  # the model_type of those that are implemented
AT_ONCE = 8                  # answers in a forward pass
FACTS = ("log_prob", "entropy", "collision")  # what a forward pass says about a token
FLAGS = {
    "model": Flag(None, "folder of the model. Its tokenizer reads the tokens, and its weights "
                        "compute what is missing", metavar="FOLDER"),
    "out": Flag(None, "the run folder to make", metavar="RUN"),
    "device": Flag("cpu", "device of the forward pass: cpu, cuda or cuda:N"),
    "temperature": Flag(None, "temperature of the sampling, and of the forward pass",
                        kind=float, above=0, most=100)}


class Reader:
    """Makes answers from lines and batches from answers, and counts what it had to compute."""

    def __init__(self, folder: Path, device: str, temperature: float | None = None):
        self.folder = folder
        self.tokenizer = load_tokenizer(folder)
        self.kind = read_json(folder / "config.json").get("model_type")
        self.device = pick_device(device)
        self.is_temperature_known = temperature is not None
        self.temperature = temperature or 1
        self.model = None
        if self.kind in MODELS:
            self.model = read_model_folder(folder, self.device)
            self.model.model.norm.weight.data /= self.temperature  # and so the logits
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {i for i, token in added.items() if token.special}
        self.count = Counter()     # how many answers or steps lacked what
        self.passed_over = set()   # names of fields that nothing here knows

    def steps(self, files: list[Path]) -> Iterator[tuple[int, list[dict]]]:
        """The answers of each step. A run that counts its steps from 0 counts from 1 here."""
        answers = (self.answer(*found) for found in lines_of(files))
        seen = []
        for step, of_step in groupby(answers, key=lambda answer: answer["step"]):
            rows = list(of_step)
            if step in seen or step == 0 and seen:
                raise UserError(f"{rows[0]['where']}: step {step} comes after others: name the "
                                "files in the order of their steps")
            seen.append(step)
            number = step + 1 if seen[0] == 0 else step
            yield number, rows
        if not seen:
            raise UserError(f"there is no answer in {', '.join(map(str, files))}")

    def answer(self, where: str, line: dict) -> dict:
        """A line with its tokens, and the place in its file."""
        self.passed_over |= line.keys() - FIELDS.keys()
        prompt = self.prompt_of(line, where)
        ids = self.answer_of(line, where)
        if not prompt:
            raise UserError(f"{where} has no prompt")
        if not ids:
            raise UserError(f"{where} has no answer")
        for name in (*PER_TOKEN, "own"):
            if isinstance(line.get(name), list) and len(line[name]) != len(ids):
                raise UserError(f"{where}: its {name} has {len(line[name])} values, but the answer "
                                f"has {len(ids)} tokens")
        self.refuse_unfit(prompt + ids, where)
        is_text = "token_ids" not in line  # a text does not say whether it was cut off
        return {"finished": is_text or ids[-1] in self.special, "group": tuple(prompt), **line,
                "where": where, "is_text": is_text, "prompt_ids": prompt, "token_ids": ids}

    def refuse_unfit(self, tokens: list[int], where: str) -> None:
        """Refuse prompt and answer that the model cannot take."""
        if self.model is None:
            return
        vocabulary = self.model.config.vocab_size
        longest = self.model.config.max_position_embeddings
        if max(tokens) >= vocabulary or len(tokens) > longest:
            raise UserError(f"{where} has {len(tokens)} tokens with numbers up to {max(tokens)}, "
                            f"but the model of {self.folder} takes at most {longest} tokens, with "
                            f"numbers up to {vocabulary - 1}")

    def prompt_of(self, line: dict, where: str) -> list[int]:
        """The prompt's tokens, which are given, or made from its text or its messages."""
        if "prompt_ids" in line:
            return line["prompt_ids"]
        text = line.get("prompt", "")
        if not isinstance(text, str):
            self.count["messages"] += 1
            text = prompt_of(text, self.folder)
        return encode(self.tokenizer, text, f"the prompt of {where}")

    def answer_of(self, line: dict, where: str) -> list[int]:
        """The answer's tokens, which are given, or made from its text or its one message."""
        if "token_ids" in line:
            return line["token_ids"]
        if "completion" not in line:
            return []
        text = line["completion"]
        if not isinstance(text, str):
            text = own_text(text, where)
        ids = encode(self.tokenizer, text, f"the completion of {where}")
        return ids or self.end_of_turn()  # an empty text was an end of turn, which it leaves out

    def end_of_turn(self) -> list[int]:
        """The first token of this tokenizer that ends a turn, or nothing."""
        known = [self.tokenizer.token_to_id(name) for name in END_OF_TURN]
        return [token for token in known if token is not None][:1]

    def batch(self, answers: list[dict], step: int) -> tuple[Rollouts, torch.Tensor]:
        """The answers of a step, group by group; and their weights (B, T)."""
        numbers = {}  # of the groups, in the order in which they come
        for answer in answers:
            numbers.setdefault(answer["group"], len(numbers))
        for name in numbers:
            if type(name) is int and str(name) in numbers:
                raise UserError(f"step {step} has a group {name} and a group {str(name)!r}: write "
                                "both as a number or both as a text")
        answers = sorted(answers, key=lambda answer: numbers[answer["group"]])
        prompts = prompts_of_groups(answers)
        length = torch.tensor([len(answer["token_ids"]) for answer in answers])
        written = torch.arange(int(length.max())) < length[:, None]
        mask = column_of(answers, "own", written).nan_to_num(1).bool() & written
        given = {name: column_of(answers, name, written) for name in PER_TOKEN}
        scores = scores_of(answers)
        batch = Rollouts(
            problems=list(prompts), prompt_ids=list(prompts.values()), step=step, mask=mask,
            written=written,
            group=torch.tensor([numbers[answer["group"]] for answer in answers]),
            ids=column_of(answers, "token_ids", written, torch.long),
            finished=torch.tensor([answer["finished"] for answer in answers]),
            log_prob=given["log_prob"], entropy=given["entropy"], collision=given["collision"],
            advantage=given["advantage"])
        self.count["steps"] += 1
        self.count["answers"] += len(answers)
        self.count["tokens"] += int(mask.sum())
        self.count["texts"] += sum(answer["is_text"] for answer in answers)
        self.count["no reward"] += int(scores["reward"].isnan().sum())
        self.count["unsolved"] += int(scores.get("answer", UNSET).isnan().sum())
        batch = replace(labelled(batch, self.tokenizer), scores=scores)
        batch = self.add_facts(batch)
        batch = self.add_advantage(batch)
        recorded = {part: or_unknown(score) for part, score in scores.items()}
        return replace(batch, scores=recorded), given["weight"].nan_to_num(1)

    def add_facts(self, batch: Rollouts) -> Rollouts:
        """The batch with log-prob, entropy and collision, also where the files lack them for some
        answers. Without a model these stay unknown."""
        missing = [name for name in FACTS if getattr(batch, name).isnan().any()]
        self.count.update(f"given {name}" for name in FACTS if name not in missing)
        computed = batch
        if missing and self.model:
            computed = with_facts(self.model, batch.to(self.device), AT_ONCE).to("cpu")
        for name in missing:
            self.count[name if self.model else f"no {name}"] += 1
        return replace(batch, **{name: or_unknown(getattr(computed, name)) for name in missing})

    def add_advantage(self, batch: Rollouts) -> Rollouts:
        """The batch with an advantage for every token: the given one, or the z-score of the reward
        in its group."""
        missing = batch.advantage.isnan()
        z_score = to_every_token(group_z_score(batch.reward, batch.group), batch)
        advantage = torch.where(missing, z_score, batch.advantage)
        if advantage.isnan().any():
            raise UserError(f"step {batch.step}: an answer has no advantage, and it cannot be "
                            "computed, because its group does not have all rewards")
        self.count["advantage"] += int(missing.any(1).sum())
        return replace(batch, advantage=advantage)

    def notes(self, files: int) -> list[str]:
        """The sentences in which the page says where its numbers come from."""
        count, model = self.count, self.folder
        said = [f"Imported from {files} file{'s' if files > 1 else ''} of JSON lines."]
        if count["unsolved"]:
            said.append("Which answers are right is not known.")
        if count["texts"]:
            said.append(f"{count['texts']:,} answers were recorded as texts. The tokenizer of "
                        f"{model} split them, perhaps into other tokens than were sampled. Where a "
                        "text does not have the end of its turn, the tokens do not have it "
                        "either, and it is not known whether the answer was cut off.")
        if count["messages"]:
            said.append(f"Prompts were written by the chat template of {model}.")
        computed = [name for name in FACTS if count[name]]
        if computed:
            said.append(f"With the weights of {model}, which may differ from those that sampled, "
                        "these columns were computed, at temperature "
                        f"{self.temperature:g}: {', '.join(computed)}.")
        if count["advantage"]:
            said.append(f"The advantage of {count['advantage']:,} answers was computed from the "
                        "rewards, as a z-score in the group.")
        given = [name for name in FACTS if count[f"given {name}"]]
        if given and not self.is_temperature_known:
            said.append("The files do not say at which temperature these columns were computed: "
                        f"{', '.join(given)}.")
        if self.passed_over:
            said.append("The files have fields that are not used here: "
                        f"{', '.join(sorted(self.passed_over))}.")
        unknown = [name for name in (*FACTS, "reward") if count[f"no {name}"]]
        if unknown:
            needs_model = unknown != ["reward"]
            why = ""
            if needs_model and not self.model:
                why = f", because models of type {self.kind}, as {model}, are not implemented"
            said.append(f"These are not known, and left out: {', '.join(unknown)}{why}.")
        return said


def prompts_of_groups(answers: list[dict]) -> dict:
    """The prompt of each group, which all its answers share."""
    prompts = {}
    for answer in answers:
        prompt = prompts.setdefault(answer["group"], answer["prompt_ids"])
        if prompt != answer["prompt_ids"]:
            raise UserError(f"{answer['where']}: its prompt differs from that of its group")
    return prompts


def column_of(answers: list[dict], name: str, mask: torch.Tensor,
              dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A field of the answers as (B, T). It is a list, or one number for all tokens of an answer; an
    answer without it gets nan."""
    known = []  # end to end
    for answer, length in zip(answers, mask.sum(1).tolist()):
        value = answer.get(name, math.nan)
        known += value if isinstance(value, list) else [value] * length
    values = torch.tensor(known, dtype=dtype)
    return torch.zeros(mask.shape, dtype=dtype).masked_scatter(mask, values)


def or_unknown(values: torch.Tensor) -> torch.Tensor:
    """The values; or, if one of them is not known, nan for all, as credit files have it."""
    return torch.full_like(values, math.nan) if values.isnan().any() else values


def scores_of(lines: list[dict]) -> dict[str, torch.Tensor]:
    """The reward and its parts (B,); nan where a line does not say them."""
    def column(rows: list[dict], name: str) -> torch.Tensor:
        values = [row.get(name, math.nan) for row in rows]
        return torch.tensor(values, dtype=torch.float32)

    parts = [line.get("parts", {}) for line in lines]
    names = list(dict.fromkeys(chain(*parts)))  # each once, in the order of the lines
    scores = named_parts(names, [column(parts, name) for name in names])
    if any("solved" in line for line in lines):
        scores["answer"] = column(lines, "solved")
    scores["reward"] = column(lines, "reward")
    return scores


def named_parts(names: Iterable[str], columns: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rewards by the names of their functions.

    `reward` is the lab's name for the sum, and `answer` for whether an answer is right, which a
    function called `answer` says by 1 or more: the functions' own values get the names own_reward
    and own_answer. When several functions share a name, the later ones get a number.
    """
    parts = {}
    for number, (name, values) in enumerate(zip(names, columns), 1):
        if name == "answer":
            parts["answer"] = torch.where(values.isnan(), values, (values >= 1).float())
        own = f"own_{name}" if name in ("reward", "answer") else name
        parts[f"{own}_{number}" if own in parts else own] = values
    return parts


def labelled(batch: Rollouts, tokenizer: Tokenizer, task=None) -> Rollouts:
    """The batch with section and kind of each token: by a task, or by tags and text alone. Without
    a tag, in the answer or at the end of the prompt, nothing is called thinking."""
    prompt = b"".join(token_bytes(tokenizer, batch.prompt_ids[0]))  # all prompts end alike
    opens_thinking = prompt.rstrip().endswith(b"<think>")

    def by_tags(pieces: list[bytes]) -> tuple[list[int], list[int]]:
        sections, kinds = annotate(pieces)
        if not opens_thinking and b"think>" not in b"".join(pieces):
            sections = [OTHER if code == THINK else code for code in sections]
        return sections, kinds

    names = SimpleNamespace(label=task.label if task else by_tags, score=lambda problem, text: {})
    if not batch.mask.equal(batch.written):  # then answers have turns
        names.reply = None
    return score_answers(batch, tokenizer, names)


def import_run(files: list[Path], out: Path, reader: Reader, config: dict) -> None:
    """Write the run folder, whole or not at all."""
    with whole(out) as unfinished:
        replace_text(unfinished / "tokenizer.json", reader.tokenizer.to_str())
        record = RunFolder(unfinished)
        for step, answers in reader.steps(files):
            show_status(f"step {step}: {len(answers)} answers")
            batch, weight = reader.batch(answers, step)
            write_credit(credit_path(unfinished, step), batch, weight, {"step": step})
            record.append("metrics.jsonl", {"step": step, **batch_metrics(batch)})
            config["steps"] = step
        config["notes"] = reader.notes(len(files))
        replace_text(unfinished / "config.json", json.dumps(config, indent=2) + "\n")


def main(argv: list[str]) -> None:
    flags = read(argv, "python -m lab.trl.import_run FILE ... --model FOLDER --out RUN", __doc__,
                 FLAGS, {"FILE ...": "what the trainer wrote, in the order of the steps"})
    for name in ("model", "out"):
        if name not in flags.typed:
            raise UserError(f"--{name} is required (--help lists the flags)")
    files, model, out = [Path(file) for file in flags.file], flags.model, Path(flags.out)
    source = find_folder(model)
    reader = Reader(source, flags.device, flags.temperature)
    # what is not known of the run, such as its task, is left out
    import_run(files, out, reader, {
        "mitigation": out.name, "advantage": "grpo", "seed": 0, "model": model, "eval_every": 0,
        **provenance(), "temperature": reader.temperature,
        "columns_temperature": reader.temperature})
    show_status("")
    count = reader.count
    steps = "step" if count["steps"] == 1 else "steps"
    print(f"{out}: {count['answers']:,} answers, {count['tokens']:,} tokens, {count['steps']:,} "
          f"{steps}")
    print(*reader.notes(len(files)), python_command("analyze.py", out), sep="\n")


if __name__ == "__main__":
    run_as_program("import_run", main)
