"""To import TRL takes seconds, and all tests of its trainer are slow: where these are left out, the
file is not read."""


def pytest_ignore_collect(collection_path, config):
    is_left_out = config.option.markexpr == "not slow"
    return True if is_left_out and collection_path.name == "test_trl_trainer.py" else None
