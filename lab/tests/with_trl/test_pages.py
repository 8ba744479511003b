"""What the page of lab/trl says of versions."""
from lab.tests.with_trl import REQUIREMENTS
from conftest import ROOT


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
