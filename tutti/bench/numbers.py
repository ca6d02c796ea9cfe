"""Measured numbers as a reader wants them: three digits and a unit.

Light: imports no torch.
"""

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def percent(share: float, digits: int = 0) -> str:
    """A share of a whole in percent."""
    return f"{100 * share:.{digits}f} %"


def show_seconds(seconds: float, keep_zeros: bool = False) -> str:
    """A time with a unit that suits it; in a column zeros at the end are kept."""
    size, unit = next((each for each in _UNITS if abs(seconds) >= each[0]), _UNITS[-1])
    return f"{three_digits(seconds / size, keep_zeros)} {unit}"


def three_digits(value: float, keep_zeros: bool = False) -> str:
    """Three digits that count."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if keep_zeros and value else f"{value:.3g}"
