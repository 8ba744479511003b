"""A flag that a command would read and ignore is refused."""
import pytest

from lab.engine.errors import UserError
from lab.__main__ import main


@pytest.mark.parametrize("typed, refusal", [
    ("rank --critic_batches 0 --critic trunk", "--critic has no effect without --critic_batches"),
    ("decided --all_answers --of_each 4", "--of_each has no effect without drawn answers"),
    ("experiment board --report_only --dry_run", "--dry_run has no effect without runs to start")])
def test_a_flag_without_an_effect_is_refused(typed, refusal, tmp_path, monkeypatch):
    """Before anything is measured; the same flag where it has an effect is taken (its default)."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=refusal):
        main(typed.split())
    assert not list(tmp_path.iterdir())
