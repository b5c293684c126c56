"""Fixtures of the whole suite. Fixtures of one kind live in files of their own and are named here."""

pytest_plugins = ["tests.s3_fixtures"]
