"""Which steps a profile traces."""

import re
from dataclasses import dataclass

from tutti.errors import ConfigError

DEFAULT_STEPS = "20:25"


@dataclass(frozen=True)
class Asked:
    """What is to be traced: steps counted from 1, the last one included."""

    first: int
    last: int
    memory: bool = False
    stacks: bool = False

    def check_end(self, total_steps: int) -> None:
        """Refuse steps that the recipe does not come to."""
        if self.last > total_steps:
            raise ConfigError(
                f"--steps {self.first}:{self.last}: the recipe ends with step {total_steps:,}. "
                f"Give a last step of at most {total_steps}, or set more epochs."
            )


def parse_steps(text: str) -> tuple[int, int]:
    """FIRST:LAST, counted from 1, as two numbers."""
    found = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if found is None:
        raise ConfigError(f"--steps {text}: expected FIRST:LAST, two numbers of steps. Try --steps {DEFAULT_STEPS}.")
    first, last = int(found.group(1)), int(found.group(2))
    if first < 1:
        raise ConfigError(f"--steps {text}: steps are counted from 1. Try --steps 1:{max(1, last)}.")
    if first > last:
        raise ConfigError(f"--steps {text}: the first step comes after the last. Try --steps {last}:{first}.")
    return first, last
