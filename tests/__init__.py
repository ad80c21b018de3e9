"""Tests, laid out as `src/loraplex` is; a shared part is imported as `tests.NAME`."""
