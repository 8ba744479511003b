"""How bridges are found and started."""
from runs import assert_programs_say_how_to_start


def test_a_bridge_that_is_started_as_a_file_says_how_to_start_it():
    assert_programs_say_how_to_start("bridges")
