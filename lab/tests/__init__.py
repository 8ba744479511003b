"""Tests of lab/, for who changes it: they can be deleted with it. The models and run folders that
they stand on are those of tests/conftest.py."""
