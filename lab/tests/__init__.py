"""Tests of lab/ and the examples, which can be deleted with them. They also use what tests/ has in
conftest.py, runs.py and logs.py."""
