"""The picture of a forecast: measured points filled, forecasts hollow, the band of its interval, the ideal."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.ticker import NullLocator

from tutti import units
from tutti.forecast.curve import ScalingCurve
from tutti.forecast.forecast import Forecast
from tutti.report.style import BLUE, GREY, LIGHT_GREY, VERMILION, plt


def draw_forecast(path: Path, curve: ScalingCurve, made: Sequence[Forecast], is_band: bool = False) -> Path:
    """Draw throughput over ranks; a band that is no forecast is grey and has no points."""
    measured = curve.measurements
    ranks = sorted({each.ranks for each in measured} | {each.ranks for each in made})
    rate = curve.first.samples_per_second / curve.first.ranks
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    axes.plot(ranks, [rate * each for each in ranks], color=GREY, ls=":", label="ideal")
    asked = [each.ranks for each in made]
    colour, name = (LIGHT_GREY, "90% band, not a forecast") if is_band else (VERMILION, "90% interval")
    alpha = 0.6 if is_band else 0.2
    low, high = ([each.interval90[end] for each in made] for end in (0, 1))
    if len(made) > 1:
        axes.fill_between(asked, low, high, color=colour, alpha=alpha, lw=0, label=name)
    else:
        axes.vlines(asked, low, high, color=colour, lw=4, alpha=alpha, label=name)
    if not is_band:
        speeds = [each.samples_per_second for each in made]
        axes.plot(asked, speeds, color=VERMILION, marker="o", mfc="white", ls="--", label="forecast")
    speeds = [each.samples_per_second for each in measured]
    axes.plot([each.ranks for each in measured], speeds, color=BLUE, marker="o", ls="-", label="measured")
    axes.set(xlabel="ranks", ylabel="samples/s", xscale="log", yscale="log", title=_title(curve, is_band))
    axes.set_xticks(ranks, [units.count(each) for each in ranks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path


def _title(curve: ScalingCurve, is_band: bool) -> str:
    return f"{curve.mode} scaling, {'not a forecast' if is_band else 'measured and forecast'}"
