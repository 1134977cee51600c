"""The matrix that all tests here share: no truth is computed and no row is measured twice."""

from __future__ import annotations

from typing import Any

import pytest
from cases import Matrix


@pytest.fixture(scope="session")
def matrix(ranks: Any) -> Matrix:
    return Matrix(ranks)
