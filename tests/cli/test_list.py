"""What `tutti list` prints can be read."""

import pytest
from conftest import Tutti

from tutti.config.recipes import built_in


@pytest.mark.system
def test_descriptions_begin_in_one_column_beside_the_longest_name(tutti: Tutti) -> None:
    lines = [line for line in tutti("list").out.splitlines() if line.startswith("  ")]
    described = [line for line in lines if len(line.split()) > 1]
    column = 2 + max(len(line.split()[0]) for line in lines) + 2
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in described)
    assert {name for name, _ in built_in()} <= {line.split()[0] for line in lines}
