"""What the tests of the ``plans`` room share."""

from __future__ import annotations

import pytest
from hypothesis import settings
from specplan.plans import catalog as catalogs
from specplan.plans.catalog import Catalog
from specplan.plans.plan import Plan

# A machine that runs many tests at once misses any deadline now and then.
settings.register_profile("specplan", deadline=None)
settings.load_profile("specplan")


@pytest.fixture(scope="session")
def shipped() -> Catalog:
    """The catalog that specplan ships; reading it takes a second."""
    return catalogs.load()


@pytest.fixture(scope="session")
def reachable(shipped: Catalog) -> frozenset[tuple[str, str, Plan]]:
    """Every plan that a cell of the shipped catalog reaches, with the cell's family and arch."""
    return frozenset(
        (cell.family, cell.arch, plan) for cell in shipped.claims for plan in shipped.plans_of(cell)
    )
