"""Cells to give advice on."""

from __future__ import annotations

from tests.e2e.conftest import model_folder, start_cell

__all__ = ["model_folder", "start_cell"]
