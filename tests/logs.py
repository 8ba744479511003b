"""Run folders that the tests of analysis are made on: any numbers, and known effects."""
import re
from pathlib import Path

import numpy as np
from conftest import ROOT, credit_columns, evaluation, write_log
from tokenizers import Tokenizer

from lab.analysis.comparison import arms_of
from lab.analysis.run_folders import Run, read_run
from lab.engine.tokens import load_tokenizer

ITEMS = 200


def ids_of(text):
    return Tokenizer.from_file(str(ROOT / "models/tiny/tokenizer.json")).encode(text).ids


def random_log(folder, steps=3, groups=3, answers=4, longest=9, seed=0, **config):
    """Any tokens, any numbers: what the definitions are checked on."""
    rng, files, G = np.random.default_rng(seed), {}, groups * answers
    for step in range(1, steps + 1):
        lengths = rng.integers(1, longest + 1, G).tolist()
        group = np.repeat(np.arange(groups), answers)
        n, reward = sum(lengths), rng.choice([0.0, 0.1, 1.1], G)
        reward[group == 0] = 0.1  # one group without spread
        z = [(r - r.mean()) / (r.std() + 1e-4) if r.std() > 1e-8 else 0 * r
             for r in reward.reshape(groups, answers)]
        p = rng.uniform(0.01, 0.99, n)
        files[step] = credit_columns(
            lengths, group, token_id=rng.integers(0, 200, n), log_prob=np.log(p),
            collision=p**2 + (1 - p) ** 2 / 2, entropy=rng.uniform(0, 2, n),
            weight=rng.gamma(1, 1, n),
            advantage=np.repeat(np.concatenate(z), lengths), section=rng.integers(0, 3, n),
            kind=rng.integers(0, 7, n), reward=reward, reward_answer=reward > 1)
    return write_log(folder, files, config), files


def rows_in(table):
    return table.to_json()["rows"]


def plain_rows(folder, files):
    """The same log as a list of dictionaries, one a token, with its sizes."""
    tokenizer, rows = load_tokenizer(folder), []
    for step, c in files.items():
        ends = [*c["episode_start"][1:].tolist(), len(c["token_id"])]
        for b, (start, end) in enumerate(zip(c["episode_start"].tolist(), ends)):
            for i in range(start, end):
                token = int(c["token_id"][i])
                row = {name: float(c[name][i]) for name in ("log_prob", "advantage", "weight",
                                                            "entropy", "collision")}
                row |= {"step": step, "episode": (step, b), "group": (step, int(c["group"][b])),
                        "position": i - start, "length": end - start,
                        "kind": int(c["kind"][i]), "section": int(c["section"][i]),
                        "id": token, "text": tokenizer.decode([token], skip_special_tokens=False)}
                row["s"] = (1 - 2 * np.exp(row["log_prob"]) + row["collision"]) ** 0.5
                row["gradient"] = row["advantage"] * row["weight"] * row["s"]
                row["push"] = row["gradient"] * row["s"]
                row |= {f"abs {name}": abs(row[name]) for name in ("advantage", "gradient")}
                rows.append({**row, "middle": (row["position"] + 0.5) / row["length"]})
    return rows


def titles_in(printed):
    """Of the tables that were printed."""
    return re.findall("^## (.+)$", printed, re.M)


def by_name(tables):
    return {table.name: rows_in(table) for table in tables}


def write_run(folder, success, seed=0, steps=10, rng=None, **config):
    """A finished run: its success at the end on the same 200 problems, drawn; the same start for
    all."""
    rng = rng or np.random.default_rng(seed)
    start = (np.arange(ITEMS) % 4 == 0).astype(int).tolist()
    end = (rng.random(ITEMS) < success).astype(int).tolist()
    lines = [evaluation(step, answer, mode) for step, answer in ((0, start), (steps, end))
             for mode in ("sampled", "greedy")]
    metrics = [{"step": i, "success": success * i / steps, "entropy": 0.5,
                "gradient_norm": 0.1 * i, "length": 9.0} for i in range(1, steps + 1)]
    return write_log(folder, {1: credit_columns([3, 4], [0, 0])},
                     {"seed": seed, "steps": steps, **config}, metrics, lines)


def make(tmp_path, arms, seeds=5, spread=0.02, rng=None):
    """arms: name -> (success, settings)"""
    rng, folders = rng or np.random.default_rng(7), []
    for name, (success, config) in arms.items():
        for seed in range(seeds):
            drawn = float(np.clip(success + rng.normal(0, spread), 0, 1))
            run = write_run(tmp_path / f"{name}-s{seed}", drawn, seed, rng=rng, **config)
            folders.append(str(run))
    return folders


def recorded(metrics=(), evaluations=(), config=(), credit=()):
    """A run as it is read, without a folder."""
    run = object.__new__(Run)
    run.metrics, run.evaluations = list(metrics), list(evaluations)
    run.config, run.credit, run.folder = dict(config), dict(credit), Path("runs/x")
    run.last_step = len(run.metrics)
    return run


def arms_in(folders, baseline=None):
    return arms_of([read_run(folder) for folder in folders], baseline)
