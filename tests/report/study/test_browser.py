"""The report in a real browser: no errors, working buttons, nothing cut off."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, needs_browser, open_browser
from study_folders import Made, scale_study, spread, sweep_study

from tutti.report.study.write import write_report
from tutti.study.definition import Point

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("browser"), needs_browser]
CHARTS = {"throughput", "efficiency", "parts", "communication", "losses", "forecast"}


def some(point: Point) -> Made:
    exposed = 0.01 * 2 * (point.ranks - 1) / point.ranks
    return Made(32 * point.ranks / (0.05 + exposed), exposed / (0.05 + exposed), noise=0.02)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:  # the page alone
        patch.setattr("tutti.report.study.write.draw_charts", lambda charts, folder: None)
        study = scale_study(tmp_path_factory.mktemp("browser") / "study", some)
        return write_report(spread(study, per_node=2)).page


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
    _point_at_a_figure(browser)
    _switch_losses(browser)
    _switch_theme(browser, page)


def _look_at_charts(browser: Browser) -> None:
    drawn = "[...document.querySelectorAll('.plot')].filter(p => p.querySelector('svg.main-svg')).map(p => p.id)"
    assert set(browser.evaluate(drawn)) == CHARTS
    assert browser.evaluate("document.querySelectorAll('#throughput .scatterlayer .trace').length") == 3
    assert browser.evaluate("document.querySelectorAll('#parts .bars .point').length") == 20
    assert browser.evaluate("document.querySelectorAll('#forecast .scatterlayer .fills path').length") == 1


def _point_at_a_figure(browser: Browser) -> None:
    browser.point_at("document.querySelectorAll('#efficiency .points path')[1]")
    said = browser.wait_for("document.querySelector('#efficiency .hoverlayer').textContent")
    assert said.startswith("2 ranks, n = 1 (10 windows)efficiency 8")


def _switch_losses(browser: Browser) -> None:
    def losses() -> list:
        return browser.evaluate(
            "(() => { const p = document.getElementById('losses');"
            " return [p.querySelector('.xtitle').textContent, p.data[0].x.slice(-1)[0],"
            " [...document.querySelectorAll('[data-chart]')].map(b => b.ariaPressed).join()]; })()"
        )

    assert losses() == ["step", 60, "true,false"]
    browser.evaluate("document.querySelector('[data-axis=\"1\"]').click()")
    title, last, pressed = losses()
    assert (title, pressed) == ("training time in seconds", "false,true")
    assert 0 < last < 60
    browser.evaluate("document.querySelector('[data-axis=\"0\"]').click()")
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
def test_panels_stand_side_by_side_as_there_is_room_and_are_seen_close_up(tmp_path: Path) -> None:
    def learned(point: Point) -> Made:
        is_broken = point.values["batch.global"] == 512 and point.values["schedule.scaling"] == "linear"
        last = 0.1 if is_broken else 0.98 - 0.0001 * point.values["batch.global"]
        return Made(epochs=[{"train_loss": 1.0, "valid_accuracy": 0.5}, {"train_loss": 0.5, "valid_accuracy": last}])

    optim = [{"name": "sgd", "lr": 0.1}, {"name": "lars", "lr": 0.1}]
    rules = {"schedule.scaling": ["none", "linear", "sqrt"], "schedule.warmup_epochs": [0, 2]}
    study = sweep_study(tmp_path / "study", learned, {"optim": optim, "batch.global": [64, 128, 512]} | rules, 1)
    page = write_report(study.path).page
    layout = "document.getElementById('metric').layout"
    axes = f"(letter => ['', 2, 3, 4].map(number => {layout}[letter + 'axis' + number]))"
    lefts, ends = f"[...new Set({axes}('x').map(axis => axis.domain[0]))]", f"{axes}('y').map(axis => axis.range)"
    with open_browser(tmp_path / "profile") as browser:
        browser.resize(1280, 900)
        browser.open(page)
        assert len(browser.evaluate(lefts)) == 2
        assert browser.evaluate(f"{ends}[0][0]") < 0.1
        browser.evaluate("document.querySelector('[data-view=\"1\"]').click()")
        assert all(low > 0.9 and high < 1 for low, high in browser.evaluate(ends))
        browser.evaluate("document.querySelector('[data-view=\"0\"]').click()")
        assert all(low < 0.1 for low, _ in browser.evaluate(ends))
        browser.point_at("document.querySelectorAll('#metric .subplot.x4y4 .points path')[1]")
        said = browser.wait_for("document.querySelector('#metric .hoverlayer').textContent")
        assert said.startswith(("sgd, ", "lars, "))  # whose points lie at the same place
        assert "with 2 epochs of warm-upglobal batch 128: 96.72%" in said
        browser.resize(390, 844)
        browser.open(page)
        assert browser.evaluate(lefts) == [0]
        assert browser.evaluate("document.documentElement.scrollWidth") == 390
        assert browser.complaints == []


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
