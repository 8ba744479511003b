"""What the page of lab/trl says of versions, and what is said where TRL is missing or older."""
import pytest

from lab.tests.with_trl import REQUIREMENTS
from conftest import ROOT
from lab_runs import program


def test_page_and_program_name_the_versions_that_are_tested():
    """What is installed here may be newer; .ci/run installs what requirements.txt says."""
    lines = (ROOT / REQUIREMENTS).read_text().splitlines()
    versions = dict(line.split("==") for line in lines if "==" in line)
    page = (ROOT / "lab/trl/README.md").read_text()
    for name in ("trl", "transformers", "accelerate", "datasets", "peft"):
        assert f"{name} {versions[name]}" in page, name
    program = (ROOT / "lab/trl/trl_trainer.py").read_text()
    assert f"trl=={versions['trl']} transformers=={versions['transformers']}" in program
    assert REQUIREMENTS in (ROOT / ".ci/run").read_text()


WITHOUT_TRL = """
import sys
from types import SimpleNamespace as Module

def ask():
    from lab.engine.errors import UserError
    try:
        import lab.trl.trl_trainer
    except UserError as error:
        print(error)

sys.path.insert(0, ".")
sys.modules["trl"] = None
ask()
for name, version in ("trl", "1.10.0"), ("transformers", "5.23.0"):
    sys.modules[name] = Module(__version__=version)
ask()
"""


@pytest.mark.slow
def test_without_the_right_trl_one_sentence_says_what_to_install():
    """Tried without TRL and with an older one, whatever is installed."""
    none, older = program(ROOT, "-c", WITHOUT_TRL).splitlines()
    for told, said in ((none, "import of trl halted"),
                       (older, "cannot import name 'GRPOTrainer'")):
        assert told.startswith("lab.trl.trl_trainer needs TRL, which is not among this project's")
        assert said in told and "pip install trl==" in told


def test_rows_of_the_page_of_settings_are_stored():
    """The worst cosine and noise, and the median cosine, stand in the row of that name."""
    page = (ROOT / "docs/reference/trl.md").read_text("utf-8")
    stored = "".join((ROOT / f"lab/results/{name}_settings.txt").read_text("utf-8")
                     for name in ("trl", "verl")).splitlines()
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if ".9" in line
            and line.startswith("|")]
    for name, *numbers in rows:
        [line] = [line for line in stored if line.startswith(f"{name}  ")]
        assert {*numbers[:2], numbers[-1]} <= {*line.replace(",", "").split()}, name
    assert len(rows) > 10
