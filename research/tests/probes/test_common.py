"""What the probes share: a folder with numbers, a screen of findings, gradients."""
import json
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from analysis.tables import Table
from conftest import assert_bounded
from engine.errors import UserError
from engine.forward import response_log_probs
from research import __main__ as overview
from research.probes.common import (
    COMMON, OF_A_MODEL, Findings, Flag, command_of, gradients, run_probe)

KNOWN = {**OF_A_MODEL, "answers": Flag(8, "answers", least=2, quick=2),
         "note": Flag(None, "a text")}


def measured(probe):
    columns = {"arm": ("", [f"arm {n}" for n in range(60)]),
               "95%": ("+.1f", [(0.5, 1.5)] * 60)}
    gains = Table("gains", "The gains", columns, "One idea.\nAnother idea.",
                  headings={"95%": "95% interval"})
    picture = probe.folder / "gains.png", "A picture"
    picture[0].write_bytes(b"")
    checks = Table("checks", "Checks", {"left": ("d", [1])}, "The sides agree.\nTo 2e-7.")
    return Findings("Who gains?", ["model x: 2 problems.", "How to read it."], [gains, checks],
                    picture, "about 8 minutes")


def run(folder, *flags, measure=measured):
    run_probe("gains", "A probe.", KNOWN, measure, ["--out", str(folder), *flags])


def test_a_probe_prints_its_first_table_or_all(tmp_path, capsys):
    run(tmp_path / "x")
    out = capsys.readouterr().out
    assert all(len(line) <= 100 for line in out.splitlines()[:-3]) and "Checks" not in out
    assert "- One idea." in out and "95% interval" in out and "How to read it." not in out
    run(tmp_path / "y", "--all")
    out = capsys.readouterr().out
    assert "arm 59" in out and "## Checks" in out and "How to read it." in out


def test_a_quick_look_says_what_to_type(tmp_path, capsys):
    run(tmp_path / "quick", "--quick", "--note", "a b", "--seed", "3")
    out = " ".join(capsys.readouterr().out.split())
    assert "takes about 8 minutes: python -m research gains --note 'a b' --seed 3 " in out
    numbers = json.loads((tmp_path / "quick/numbers.json").read_text())
    assert numbers["quick_look"] and len(numbers["tables"][0]["rows"]) == 60
    assert numbers["settings"]["answers"] == 2 and numbers["settings"]["seed"] == 3
    assert "A quick look: its numbers" in out


def test_the_command_leaves_out_what_changes_no_number():
    typed = {"quick": True, "all": True, "out": "x", "runs": "x", "model": "runs/it's"}
    assert command_of("noise", typed) == "python -m research noise --model 'runs/it'\"'\"'s'"


def test_a_folder_is_not_overwritten_and_appears_whole_or_not_at_all(tmp_path):
    def fail(probe):
        raise UserError("stopped half-way")

    with pytest.raises(UserError, match="stopped half-way"):
        run(tmp_path / "x", measure=fail)
    assert not list(tmp_path.iterdir())
    run(tmp_path / "x")
    with pytest.raises(UserError, match="exists already: name another with --out"):
        run(tmp_path / "x")


def test_the_overview_names_every_probe_and_help_shows_what_it_asks(capsys):
    overview.main([])
    out = capsys.readouterr().out
    for name in overview.PROBES:
        assert f"python -m research {name} " in out
        with pytest.raises(SystemExit) as stopped:
            overview.main([name, "--help"])
        assert stopped.value.code == 0
        assert f"python -m research {name} [flags]" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match="there is no scorebord here"):
        overview.main(["scorebord"])


def test_every_number_has_bounds_and_its_defaults_lie_within():
    flags = {name: import_module(f"research.probes.{name}").FLAGS for name in overview.PROBES}
    assert_bounded({f"{probe} {name}": flag for probe, own in {"common": COMMON, **flags}.items()
                    for name, flag in own.items()})


def test_gradients_of_single_log_probs(small_model, rollouts):
    """Several from one forward pass are each their own backward pass."""
    policy = SimpleNamespace(model=small_model, settings=SimpleNamespace(micro_batch=4))
    places = rollouts.mask.float() * torch.arange(rollouts.mask.shape[1])
    coefficients = {"one": rollouts.advantage, "two": places}
    at_once = gradients(policy, rollouts, coefficients)
    for name, coefficient in coefficients.items():
        small_model.zero_grad()
        log_prob = response_log_probs(small_model, rollouts, torch.arange(6))
        (coefficient * log_prob).sum().backward()
        expected = torch.cat([p.grad.flatten() for p in small_model.parameters()])
        rounding = dict(rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
        torch.testing.assert_close(at_once[name], expected, **rounding)
    small_model.zero_grad(set_to_none=True)
