"""To import TRL takes seconds, and all tests of its trainer are slow: where these are left out, the
file is not read."""


def pytest_ignore_collect(collection_path, config):
    is_left_out = config.option.markexpr == "not slow"
    files = ("test_trl_trainer.py", "test_exact_trl.py")
    return True if is_left_out and collection_path.name in files else None
