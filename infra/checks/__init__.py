"""Checks and generated files of infra/: run by `make infra-check`, no part of the wheel."""
