"""What a run was made of: versions, commit, and a fingerprint of every file it was given.

A run that goes on later compares: a fingerprint is a sha256, of a file or of what a model folder
computes with. Two files with the same name need not be the same problems.
"""
import hashlib
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import safetensors
import tokenizers
import torch

from engine.errors import UserError
from harness.files import PROJECT, find_folder, is_folder, paths_in, sha256_of


def provenance() -> dict:
    """The versions a run was made with, and the commit of this code (null outside a checkout)."""
    versions = {"python": platform.python_version()} | {
        package.__name__: package.__version__ for package in (torch, np, safetensors, tokenizers)}
    commit = None
    if shutil.which("git"):
        command = ["git", "rev-parse", "HEAD"]
        result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
        commit = result.stdout.strip() if result.returncode == 0 else None
    return {"git_commit": commit, "versions": versions}


def fingerprints(settings) -> dict[str, str]:
    """The fingerprint of every file or folder that a flag names, by the flag."""
    return {name: fingerprint(path) for name, path in given_paths(settings).items()}


def given_paths(settings) -> dict[str, Path]:
    """The files and folders that flags name, by the flag."""
    values = settings.to_json()
    return {name: find_folder(values[name]) for name, flag in settings.flags.items()
            if flag.is_path and values[name] is not None}


def fingerprint(path: Path) -> str:
    """A sha256 of a file; of a model folder, one of its config, its tokenizer and its weights."""
    if not is_folder(path):
        return sha256_of(path)
    weights = [file.name for file in paths_in(path) if file.suffix == ".safetensors"]
    names = ["config.json", "tokenizer.json", *weights]
    parts = [f"{name} {sha256_of(path / name)}\n" for name in sorted(names)]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def refuse_other_sources(before: dict[str, str], settings, names: set[str]) -> None:
    """Stop if what one of these flags names was changed since the run began."""
    paths = given_paths(settings)
    for name in sorted(names & set(before) & set(paths)):
        if fingerprint(paths[name]) != before[name]:
            raise UserError(f"--{name}: {paths[name]} is not what it was when this run began (its "
                            "sha256 is another). Put the old one back, or begin a run of its own "
                            "with --out")
