"""Run folders and arms that the tests of analysis are made on, with known effects."""
import re
from pathlib import Path

import numpy as np
from conftest import ROOT, credit_columns, evaluation, write_log
from tokenizers import Tokenizer

from lab.analysis.comparison import arms_of
from lab.analysis.run_folders import Run

ITEMS = 200


def ids_of(text):
    return Tokenizer.from_file(str(ROOT / "models/tiny/tokenizer.json")).encode(text).ids


def rows_in(table):
    return table.to_json()["rows"]


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
    run.metrics = [{"step": step} | line for step, line in enumerate(metrics, 1)]
    run.evaluations = list(evaluations)
    run.config, run.credit, run.folder = dict(config), dict(credit), Path("runs/x")
    run.last_step = len(run.metrics)
    return run


def arms_in(folders, baseline=None):
    return arms_of([Run(folder) for folder in folders], baseline)
