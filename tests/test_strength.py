"""The deliberate faults of tests/strength.py fit the code, so that `make strength` can put them in."""

import pytest
import strength
from strength import FAULTS, PROJECT, Fault


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_put_into_the_code_and_has_its_tests(fault: Fault) -> None:
    strength.check_text(PROJECT, fault)
    assert fault.replacement != fault.text


def test_every_package_with_tests_has_a_fault() -> None:
    packages = {path.name for path in (PROJECT / "tutti").iterdir() if (PROJECT / "tests" / path.name).is_dir()}
    assert {fault.package for fault in FAULTS} == packages - {"__pycache__"}
