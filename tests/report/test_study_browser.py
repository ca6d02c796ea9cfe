"""The report in a real browser: it draws without a complaint, its switches work, nothing is cut off."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, needs_browser, open_browser
from study_folders import Made, scale_study

from tutti.report.study import write_report
from tutti.study.definition import Point

pytestmark = [pytest.mark.xdist_group("browser"), needs_browser]
CHARTS = {"throughput", "efficiency", "parts", "communication", "losses"}


def some(point: Point) -> Made:
    exposed = 0.01 * 2 * (point.ranks - 1) / point.ranks
    return Made(32 * point.ranks / (0.05 + exposed), exposed / (0.05 + exposed), noise=0.02)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:  # the page alone
        patch.setattr("tutti.report.study.draw_charts", lambda charts, folder: None)
        return write_report(scale_study(tmp_path_factory.mktemp("browser") / "study", some).path).page


@pytest.fixture
def browser(tmp_path: Path, page: Path) -> Iterator[Browser]:
    """A browser of its own for each test, since all it has started must be gone afterwards."""
    with open_browser(tmp_path / "profile") as found:
        found.prefer("light")
        found.resize(1280, 900)
        found.open(page)
        yield found
        assert found.complaints == []
        assert found.requests == [page.as_uri()]


def test_all_charts_are_drawn_and_the_switches_work(browser: Browser, page: Path) -> None:
    _look_at_charts(browser)
    _switch_losses(browser)
    _switch_theme(browser, page)


def _look_at_charts(browser: Browser) -> None:
    drawn = "[...document.querySelectorAll('.plot')].filter(p => p.querySelector('svg.main-svg')).map(p => p.id)"
    assert set(browser.evaluate(drawn)) == CHARTS
    assert browser.evaluate("document.querySelectorAll('#throughput .scatterlayer .trace').length") == 3
    assert browser.evaluate("document.querySelectorAll('#parts .bars .point').length") == 20


def _switch_losses(browser: Browser) -> None:
    def losses() -> list:
        return browser.evaluate(
            "(() => { const p = document.getElementById('losses');"
            " return [p.querySelector('.xtitle').textContent, p.data[0].x.slice(-1)[0],"
            " [...document.querySelectorAll('[data-chart]')].map(b => b.ariaPressed).join()]; })()"
        )

    assert losses() == ["step", 60, "true,false"]
    browser.evaluate("document.querySelector('[data-way=\"1\"]').click()")
    title, last, pressed = losses()
    assert (title, pressed) == ("training time in seconds", "false,true")
    assert 0 < last < 60
    browser.evaluate("document.querySelector('[data-way=\"0\"]').click()")
    assert losses() == ["step", 60, "true,false"]


def _switch_theme(browser: Browser, page: Path) -> None:
    """Dark follows the preference, and the switch."""
    colours = (
        "[getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('#efficiency .xtitle')).fill,"
        " document.getElementById('theme').ariaPressed]"
    )
    light = ["rgb(255, 255, 255)", "rgb(27, 31, 36)", "false"]
    dark = ["rgb(20, 24, 28)", "rgb(230, 233, 236)", "true"]
    assert browser.evaluate(colours) == light
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(colours) == dark
    browser.prefer("dark")
    browser.open(page)
    assert browser.evaluate(colours) == dark
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate(colours) == light


@pytest.mark.slow
def test_a_phone_and_paper_have_room_for_all(browser: Browser, page: Path, tmp_path: Path) -> None:
    browser.resize(390, 844)
    browser.open(page)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert browser.evaluate("Math.max(...[...document.querySelectorAll('svg.main-svg')].map(s => s.clientWidth))") < 390
    browser.evaluate("window.addEventListener('beforeprint', () => { window.widths ="
                     " [...document.querySelectorAll('.plot')].map(p => p.layout.width) })")  # fmt: skip
    browser.print(tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert browser.evaluate("window.widths") == [660] * len(CHARTS)
    assert browser.evaluate("document.querySelector('.plot').layout.width ?? null") is None
