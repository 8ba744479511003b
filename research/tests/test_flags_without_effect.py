"""A flag that a command would read and ignore is refused."""
import pytest

from engine.errors import UserError
from research.__main__ import main


@pytest.mark.parametrize("typed, refusal", [
    ("law --against board --steps 3", "--steps has no effect without a measurement"),
    ("law --against board --only by_kind", "--only has no effect without arms of synthetic tasks"),
    ("law --against law,dial --policies 2", "--policies has no effect without a measurement"),
    ("signal --again signal_real --only gtpo", "--only has no effect without batches to sample"),
    ("signal --again signal_real --split", "--split has no effect without batches to sample"),
    ("rank --critic_batches 0 --critic trunk", "--critic has no effect without --critic_batches"),
    ("change --steps 2", "--steps has no effect without --runs"),
    ("change --questions 2", "--questions has no effect without --runs, or --seeds above 0"),
    ("change --runs x --model y", "--model has no effect without --seeds above 0"),
    ("exact --above 0.01", "--above has no effect without --model"),
    ("later --dry_run --report_only", "--dry_run has no effect without runs to start"),
    ("publish --check --name x", "--check publishes nothing: leave out --name"),
    ("group --threads 2", "unknown argument --threads")])
def test_a_flag_without_an_effect_is_refused(typed, refusal, tmp_path, monkeypatch):
    """Before anything is measured; the same flag where it has an effect is taken (its default)."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=refusal):
        main(typed.split())
    assert not list(tmp_path.iterdir())
