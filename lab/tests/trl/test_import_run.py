"""Runs of other trainers become run folders: files written by hand and by this lab."""
import json
import shutil

import numpy as np
import pytest
import torch
from conftest import ROOT

import lab.analysis.program as analyze
from lab.analysis.run_folders import is_done, read_run
from lab.trl.import_run import main
from lab.engine.errors import UserError
from lab.engine.model_folder import read_model_folder
from lab.engine.tokens import OTHER, THINK, load_tokenizer
from lab.harness.read_record import credit_steps, read_columns
from runs import SHORT, run

TINY = ROOT / "models/tiny"
PROMPT = "<|im_start|>user\n 3 5 7 make 22<|im_end|>\n<|im_start|>assistant\n<think>"
RIGHT = " 3 * 5 = 15, 15 + 7 = 22 hit.</think>\n<answer> ( 3 * 5 ) + 7</answer>"
WRONG = " 3 + 5 = 8, 8 + 7 = 15 wrong."
OURS = {"step": 1, "prompt": PROMPT, "completion": RIGHT, "reward": 1}


def encoded(text):
    return load_tokenizer(TINY).encode(text).ids


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def imported(folder, *files, model=TINY, flags=()):
    main([*map(str, files), "--model", str(model), "--out", str(folder / "mine"), *flags])
    return folder / "mine"


def facts_of(ids, prompt):
    """log p, entropy and sum p^2 of each token, from the logits of the whole sequence."""
    with torch.no_grad():
        logits = read_model_folder(TINY)(torch.tensor([prompt + ids]))[0, len(prompt) - 1:-1]
    p = logits.double().softmax(-1)
    return (p[range(len(ids)), ids].log().numpy(), -(p * p.log()).sum(-1).numpy(),
            p.square().sum(-1).numpy())


def test_of_texts_and_rewards_the_rest_is_computed(tmp_path):
    """Two files of a step each; groups are equal prompts, wherever they stand. With rewards 1 and 0
    the z-score is 0.5 / (0.5 + 1e-4)."""
    other = PROMPT.replace("22", "15")
    lines = [{"step": step, "prompt": prompt, "completion": text, "reward": reward, **solved}
             for step, prompt, text, reward, solved in (
                 (3, PROMPT, RIGHT, 1.0, {"solved": True}),
                 (3, other, WRONG, 0.0, {"solved": False}),
                 (3, PROMPT, WRONG, 0, {"solved": False}), (7, PROMPT, "", 0.0, {}))]
    files = [write(tmp_path / "3.jsonl", *lines[:3]), write(tmp_path / "7.jsonl", *lines[3:])]
    folder = imported(tmp_path, *files)
    assert credit_steps(folder) == [3, 7]
    columns = read_columns(folder, 3)
    ids = [encoded(text) for text in (RIGHT, WRONG, WRONG)]
    assert columns["token_id"].tolist() == sum(ids, [])
    assert columns["group"].tolist() == [0, 0, 1] and columns["reward"].tolist() == [1, 0, 0]
    z = 0.5 / 0.5001
    expected = np.repeat([z, -z, 0], list(map(len, ids)))
    assert np.allclose(columns["advantage"], expected, atol=1e-6)
    facts = facts_of(ids[0], encoded(PROMPT))
    for name, values in zip(("log_prob", "entropy", "collision"), facts):
        assert np.allclose(columns[name][:len(ids[0])], values, atol=1e-4), name
    assert (columns["weight"] == 1).all() and columns["reward_answer"].tolist() == [1, 0, 0]
    later = read_columns(folder, 7)
    assert later["token_id"].tolist() == encoded("<|im_end|>")
    assert "reward_answer" not in later


def test_what_an_environment_wrote_is_kept_and_is_not_the_models(tmp_path):
    """Two turns, between which stand two tokens of a reply."""
    line = {"step": 1, "prompt_ids": [5, 6], "token_ids": [10, 2, 11, 12, 13, 2],
            "own": [1, 1, 0, 0, 1, 1], "reward": 1.0}
    folder = imported(tmp_path, write(tmp_path / "a.jsonl", line, {**line, "reward": 0.0}))
    columns = read_columns(folder, 1)
    assert columns["own"].tolist() == line["own"] * 2
    assert columns["token_id"].tolist() == line["token_ids"] * 2
    z = np.array(line["own"]) * 0.5 / 0.5001
    assert np.allclose(columns["advantage"], [*z, *-z], atol=1e-6)
    of_drawn = facts_of(line["token_ids"], [5, 6])[0] * line["own"]
    assert np.allclose(columns["log_prob"][:6], of_drawn, atol=1e-4)


@pytest.mark.parametrize("own, said", [
    ([1, 1, 0], "its own has 3 values, but the answer has 4 tokens"),
    ([1, 2, 0, 1], "its own should be a list of 1 for each token that the model drew"),
    ([0, 0, 0, 0], "its own should be a list of 1")])
def test_a_mask_that_is_none_is_refused(tmp_path, own, said):
    line = {"step": 1, "prompt_ids": [5], "token_ids": [10, 2, 3, 2], "own": own, "reward": 1.0}
    with pytest.raises(UserError, match=said):
        imported(tmp_path, write(tmp_path / "a.jsonl", line))


FACTS = {"prompt_ids": [5, 6], "token_ids": [10, 11, 12, 2], "log_prob": [-1, -2, -3, -0.5],
         "entropy": [1, 2, 3, 0.5]}


def test_json_lines_say_all_but_the_collision(tmp_path):
    """Their steps count from 0, ours from 1. What one line of a step lacks is not known of the
    step; a weight is 1 unless it is said."""
    usual = {**FACTS, "advantage": [0.5, 0.5, 0.5, 0.25]}
    file = write(tmp_path / "t.jsonl",
                 {**usual, "step": 0, "reward": 0.75, "weight": [1, 0, 0, 2]},
                 {**usual, "step": 0, "reward": 0.25},
                 {**usual, "step": 1, "reward": None})
    folder = imported(tmp_path, file)
    assert credit_steps(folder) == [1, 2]
    columns = read_columns(folder, 1)
    assert columns["prompt_ids"].tolist() == [5, 6] and columns["group"].tolist() == [0, 0]
    assert columns["token_id"].tolist() == [10, 11, 12, 2] * 2
    assert columns["log_prob"].tolist() == [-1, -2, -3, -0.5] * 2
    assert columns["entropy"].tolist() == [1, 2, 3, 0.5] * 2
    assert columns["advantage"].tolist() == [0.5, 0.5, 0.5, 0.25] * 2
    assert columns["weight"].tolist() == [1, 0, 0, 2, 1, 1, 1, 1]
    assert columns["reward"].tolist() == [0.75, 0.25] and columns["finished"].all()
    collision = facts_of([10, 11, 12, 2], [5, 6])[2]
    assert np.allclose(columns["collision"][:4], collision, atol=1e-5)
    assert np.isnan(read_columns(folder, 2)["reward"]).all()
    said = read_run(folder)["config"]["notes"]
    assert any("at temperature 1: collision." in text for text in said)
    assert any("left out: reward." in text for text in said)


def test_a_forward_pass_is_at_the_temperature_of_the_sampling(tmp_path, capsys, undrawn):
    """If somebody says it. The own numbers of the files are at that."""
    file = write(tmp_path / "t.jsonl", {**FACTS, "step": 1, "reward": 0.75, "advantage": 0.5})
    said = "at temperature 0.5: collision."
    folder = imported(tmp_path, file, flags=["--temperature", "0.5"])
    assert said in capsys.readouterr().out
    with torch.no_grad():
        logits = read_model_folder(TINY)(torch.tensor([[5, 6, 10, 11, 12, 2]]))[0, 1:-1]
    collision = (logits.double() / 0.5).softmax(-1).square().sum(-1).numpy()
    assert np.allclose(read_columns(folder, 1)["collision"], collision, atol=1e-5)
    analyzed(folder, capsys)
    page = (folder / "analysis/report.html").read_text()
    assert "entropy and s were computed at temperature 0.5" in page


TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
            "{{ 'called' if m.tool_calls is defined }}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def with_template(folder):
    model = shutil.copytree(TINY, folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    return model


def test_a_prompt_of_messages_is_written_by_the_models_template(tmp_path, capsys):
    """A table has each field in each message."""
    asked = [{"role": "user", "content": " 3 5 7", "tool_calls": None},
             {"role": "assistant", "content": None, "tool_calls": None}, *ASKED]
    line = {**OURS, "prompt": asked, "completion": [SAID]}
    columns = read_columns(imported(tmp_path, write(tmp_path / "t.jsonl", line),
                                    model=with_template(tmp_path)), 1)
    assert columns["token_id"].tolist() == encoded(" hmm.")
    assert columns["prompt_ids"].tolist() == encoded(
        "<|im_start|>user\n 3 5 7<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>user\n 3 5 7 make 22<|im_end|>\n<|im_start|>assistant\n")
    assert "by the chat template of" in capsys.readouterr().out


ASKED = [{"role": "user", "content": " 3 5 7 make 22"}]
SAID = {"role": "assistant", "content": " hmm.", "tool_calls": None}


def test_groups_may_share_a_prompt_and_texts_have_their_special_tokens(tmp_path, capsys):
    """Two groups have one prompt. An answer that is an end of turn alone is one token."""
    end = "<|im_end|>"
    lines = [{**OURS, "step": step, "group": group, "completion": text, "reward": reward}
             for step, group, text, reward in (
                 (0, 17, RIGHT + end, 1.0), (0, 17, end, 0.0), (0, 18, WRONG + end, 2.0),
                 (3, 19, WRONG, 2.0))]
    folder = imported(tmp_path / "my runs", write(tmp_path / "t.jsonl", *lines))
    assert credit_steps(folder) == [1, 4]
    columns = read_columns(folder, 1)
    assert columns["group"].tolist() == [0, 0, 1] and columns["reward"].tolist() == [1, 0, 2]
    assert columns["token_id"].tolist() == encoded(RIGHT + end + end + WRONG + end)
    first = columns["advantage"][columns["episode_start"]]
    assert np.allclose(first, [1, -1, 0], atol=1e-3)
    said = capsys.readouterr().out
    assert "No fields" not in said and said.endswith(f"\npython analyze.py '{folder}'\n")


@pytest.fixture(scope="module")
def own_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own") / "run"
    run(*SHORT, "--out", folder, "--mitigation", "entropy_weighted", "--eval_every", "0")
    return folder


def lines_of(folder):
    """The credit files of a run as JSON lines."""
    per_token = ("advantage", "weight", "log_prob", "entropy", "collision")
    for step in credit_steps(folder):
        columns = read_columns(folder, step)
        parts = {name: np.split(columns[name], columns["episode_start"][1:])
                 for name in ("token_id", *per_token)}
        prompts = np.split(columns["prompt_ids"], columns["prompt_start"][1:])
        for b, group in enumerate(columns["group"].tolist()):
            yield {"step": step, "group": group, "prompt_ids": prompts[group].tolist(),
                   "token_ids": parts["token_id"][b].tolist(),
                   "reward": float(columns["reward"][b]),
                   "finished": bool(columns["finished"][b]),
                   **{name: parts[name][b].astype(float).tolist() for name in per_token}}


def test_an_imported_own_run_equals_its_credit_files(tmp_path, own_run):
    folder = imported(tmp_path, write(tmp_path / "own.jsonl", *lines_of(own_run)))
    for step in credit_steps(own_run):
        ours, theirs = read_columns(own_run, step), read_columns(folder, step)
        for name in ours:
            if name not in ("reward_format", "reward_answer", "reward_reasoning", "change", "step"):
                assert np.array_equal(ours[name], theirs[name]), name
    config = read_run(folder)["config"]
    assert config["notes"] == [
        "Imported from 1 file of JSON lines.", "Which answers are right is not known.",
        "The files do not say at which temperature these columns were computed: log_prob, "
        "entropy, collision."]
    shared = ("step", "reward", "tokens", "length", "finished", "groups_without_spread", "entropy",
              "collision")
    for ours, theirs in zip(read_run(own_run)["metrics"], read_run(folder)["metrics"], strict=True):
        assert [theirs[name] for name in shared] == [ours[name] for name in shared]
        assert theirs["success"] is theirs["N"] is theirs["gradient_norm"] is None
    assert is_done(read_run(folder))


def test_what_is_left_out_of_an_own_run_is_computed_as_it_was(tmp_path, own_run):
    """Of the first step, which the same weights sampled: the rounding of float32 alone differs."""
    left_out = ("advantage", "log_prob", "entropy", "collision", "group")
    lines = [{name: value for name, value in line.items() if name not in left_out}
             for line in lines_of(own_run) if line["step"] == 1]
    folder = imported(tmp_path, write(tmp_path / "own.jsonl", *lines))
    ours, theirs = read_columns(own_run, 1), read_columns(folder, 1)
    for name in ("group", "kind", "section", "prompt_ids"):
        assert np.array_equal(ours[name], theirs[name]), name
    for name in ("advantage", "log_prob", "entropy", "collision"):
        assert np.allclose(ours[name], theirs[name], atol=1e-4), name


@pytest.mark.parametrize("tag, section", [("", OTHER), ("<think>", THINK)])
def test_nothing_is_thinking_without_a_tag(tmp_path, tag, section):
    """In the answer, or at the end of the prompt."""
    asked = PROMPT.removesuffix("<think>")
    for n, prompt, answer in ((1, asked + tag, " hmm. 3 * 5"), (2, asked, tag + " hmm. 3 * 5")):
        file = write(tmp_path / f"{n}.jsonl", {**OURS, "prompt": prompt, "completion": answer})
        assert read_columns(imported(tmp_path / str(n), file), 1)["section"][-1] == section


def analyzed(folder, capsys):
    capsys.readouterr()
    analyze.main([str(folder), "--all"])
    return capsys.readouterr().out


def test_analyze_says_that_a_run_was_imported(tmp_path, capsys, undrawn):
    lines = [{**OURS, "completion": text, "reward": reward, "prompt": prompt, "difficulty": 2,
              "parts": {"form": reward / 4}} for prompt in (PROMPT, PROMPT.replace("22", "15"))
             for text, reward in ((RIGHT, 1), (WRONG, 0))]
    folder = imported(tmp_path, write(tmp_path / "t.jsonl", *lines))
    said = analyzed(folder, capsys)
    page = (folder / "analysis/report.html").read_text()
    assert '"parts":"form = 0.25"' in page
    assert "<th scope=row>form</th><td class=n>0.125</td>" in page
    for words in ("Imported from 1 file of JSON lines", "4 answers were recorded as texts",
                  "which may differ from those that sampled", "at temperature 1: log_prob",
                  "advantage of 4 answers",
                  "The files have fields that are not used here: difficulty."):
        assert words in " ".join(said.split()) and words in page, words
    assert "not finished" not in said and '"answer":null' in page
    assert "The task is not on record." in said and "To measure what each token" not in said


def test_of_another_model_the_files_alone_are_shown(tmp_path, capsys, undrawn):
    """Its tokenizer need not know ChatML."""
    model = shutil.copytree(TINY, tmp_path / "other")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    tokenizer = (model / "tokenizer.json").read_text().replace("<|im_start|>", "<|turn|>")
    (model / "tokenizer.json").write_text(tokenizer)
    prompt = PROMPT.replace("<|im_start|>", "<|turn|>")
    lines = [{**OURS, "prompt": prompt, "reward": None, "advantage": sign, "log_prob": log_prob}
             for sign, log_prob in ((1, -0.5), (-1, None))]
    folder = imported(tmp_path, write(tmp_path / "t.jsonl", *lines), model=model)
    columns = read_columns(folder, 1)
    assert np.isnan(columns["log_prob"]).all() and np.isnan(columns["collision"]).all()
    said = " ".join(analyzed(folder, capsys).split())
    assert "left out: log_prob, entropy, collision, reward" in said and "type llama" in said


ID = {"step": 1, "prompt_ids": [5, 6], "token_ids": [7, 8], "reward": 1.0}


@pytest.mark.parametrize("line, said", [
    ('{"step": 1', "t.jsonl, line 2 is not JSON"),
    ("{}", "line 2 is no answer"), ({**OURS, "step": None}, "line 2 has no step"),
    ({**OURS, "reward": "1"}, "line 2: its reward should be a number"),
    ({**OURS, "completion": " unheard"}, "cannot spell the completion of .*line 2"),
    ({**ID, "token_ids": [7, 211]}, "line 2 has 4 tokens with numbers up to 211"),
    ({**ID, "log_prob": [-1.0]}, "line 2: its log_prob has 1 values, but the answer has 2 "),
    ({**ID, "log_prob": [-1.0, 2.0]}, "line 2: its log_prob should be"),
    ({**ID, "weight": -1}, "line 2: its weight should be"),
    ({**ID, "advantage": [1, 10 ** 400]}, "line 2: its advantage should be")])
def test_a_damaged_line_says_file_and_line_and_leaves_nothing(tmp_path, line, said):
    path = tmp_path / "t.jsonl"
    path.write_text(f"{json.dumps(ID)}\n{line if isinstance(line, str) else json.dumps(line)}\n")
    with pytest.raises(UserError, match=said):
        imported(tmp_path, path)
    assert [left.name for left in tmp_path.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize("lines, said", [
    ([], "there is no answer"),
    ([ID, {**ID, "step": 0}], "line 2: step 0 comes after"),
    ([{**ID, "group": 1}, {**ID, "group": 1, "prompt_ids": [5]}], "line 2: its prompt differs"),
    ([{**ID, "group": 0}, {**ID, "group": "0"}], "step 1 has a group 0 and a group '0'"),
    ([{**ID, "reward": None, "advantage": 1}, ID], "step 1: an answer has no advantage"),
    ([{**ID, "token_ids": 5}], "line 1: its token_ids should be a list of token numbers")])
def test_lines_that_do_not_go_together(tmp_path, lines, said):
    with pytest.raises(UserError, match=said):
        imported(tmp_path, write(tmp_path / "step1.jsonl", *lines))


@pytest.mark.parametrize("name", ["completions_00001.parquet", "completions_00001.parquet.jsonl"])
def test_a_table_of_trl_names_the_trainer_that_records(tmp_path, name):
    with pytest.raises(UserError, match=f"{name}: TRL's tables repeat batches .* are not read"):
        imported(tmp_path, write(tmp_path / name, OURS))
