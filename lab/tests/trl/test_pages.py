"""How the programs of lab/trl are found and started, and what their pages say of versions."""
from lab.tests.trl import REQUIREMENTS
from conftest import ROOT
from runs import assert_programs_say_how_to_start


def test_a_bridge_that_is_started_as_a_file_says_how_to_start_it():
    assert_programs_say_how_to_start("lab/trl")


def test_page_and_program_name_the_versions_that_are_tested():
    """What is installed here may be newer; .ci/run installs what requirements.txt says."""
    lines = (ROOT / REQUIREMENTS).read_text().splitlines()
    versions = dict(line.split("==") for line in lines if "==" in line)
    page = (ROOT / "lab/trl/your_own_run.md").read_text()
    for name in ("trl", "transformers", "accelerate", "datasets", "peft"):
        assert f"{name} {versions[name]}" in page, name
    program = (ROOT / "lab/trl/trl_trainer.py").read_text()
    assert f"trl=={versions['trl']} transformers=={versions['transformers']}" in program
    assert REQUIREMENTS in (ROOT / ".ci/run").read_text()
