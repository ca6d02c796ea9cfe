"""No launcher: one rank."""

from tutti.ranks.placement import Environment, Placement

NAME = "none"


def is_present(env: Environment) -> bool:
    return True


def read(env: Environment) -> Placement:
    return Placement(launcher=NAME)
