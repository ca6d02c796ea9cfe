"""Every kind of quantity has one spelling."""

from functools import partial

import pytest

from tutti import units


@pytest.mark.parametrize(
    ("seconds", "text", "in_a_column"),
    [
        (0.0, "0 us", "0 us"),
        (4.56e-5, "45.6 us", "45.6 us"),
        (0.0123, "12.3 ms", "12.3 ms"),
        (0.09999, "100 ms", "100 ms"),
        (0.9996, "1,000 ms", "1,000 ms"),
        (2.0, "2 s", "2.00 s"),
        (90.0, "90 s", "90.0 s"),
        (150.0, "2.5 min", "2.50 min"),
        (5400.0, "1.5 h", "1.50 h"),
        (3.6e6, "1,000 h", "1,000 h"),
        (-0.5, "-500 ms", "-500 ms"),
    ],
)
def test_a_duration_has_three_digits_and_the_unit_that_suits_it(seconds: float, text: str, in_a_column: str) -> None:
    assert units.duration(seconds) == text
    assert units.duration(seconds, keep_zeros=True) == in_a_column


def test_numbers_have_three_digits_and_commas() -> None:
    assert [units.number(each) for each in (0, 0.01234, 1.5, 99.96, 12480.4)] == ["0", "0.0123", "1.5", "100", "12,480"]
    assert [units.number(each, keep_zeros=True) for each in (0, 0.5, 15.0, 99.96, 7718.4)] == [
        "0",
        "0.500",
        "15.0",
        "100",
        "7,718",
    ]


def test_counts_have_commas_and_their_noun() -> None:
    assert [units.count(4096), units.count(0.5), units.count(64.0)] == ["4,096", "0.5", "64"]
    assert [units.count(n, "rank") for n in (0, 1, 1024)] == ["0 ranks", "1 rank", "1,024 ranks"]


def test_shares_are_percent_without_a_space() -> None:
    assert [units.percent(0.1234), units.percent(0.1234, 1), units.percent(1.0)] == ["12%", "12.3%", "100%"]
    assert units.percent(-1e-9) == "0%"


def test_sizes_are_in_powers_of_1024() -> None:
    sizes = (0, 4, 1023, 1536, 4 << 20, 5 * 2**40, 2**51)
    assert [units.size(each) for each in sizes] == ["0 B", "4 B", "1,023 B", "1.5 KiB", "4 MiB", "5 TiB", "2,048 TiB"]


def test_rates_say_whether_they_are_bytes_or_bits() -> None:
    assert [units.bandwidth(each) for each in (1.2e9, 119.4e6, 999.0, 0.5)] == [
        "1.20 GB/s",
        "119 MB/s",
        "999 B/s",
        "0.5 B/s",
    ]
    assert [units.bit_rate(each) for each in (2.5e6, 25e6, 1.25e9)] == ["20 Mbit/s", "200 Mbit/s", "10 Gbit/s"]


def test_an_interval_shows_its_ends_like_its_value() -> None:
    assert units.interval(units.percent, 0.74, 0.7, 0.78) == "74% (70% to 78%)"
    assert units.interval(partial(units.metric, "valid_accuracy"), 0.5, 0.25, 0.75) == "50.00% (25.00% to 75.00%)"


def test_metrics_are_shown_alike_everywhere() -> None:
    assert [units.metric(name, 0.99174) for name in ("valid_accuracy", "top5", "loss")] == [
        "99.17%",
        "99.17%",
        "0.9917",
    ]
    assert [units.metric("loss", each) for each in (0.0, 2.30259, 1.234567e-5)] == ["0.0000", "2.3026", "1.235e-05"]
    assert units.metric_title("valid_accuracy") == "validation accuracy"


def test_ranks_and_names_are_abbreviated() -> None:
    assert [units.ranks([3]), units.ranks([0, 1, 2, 8])] == ["rank 3", "ranks 0-2, 8"]
    assert units.ranks(range(0, 40, 2)).endswith("28, 30, ...")
    assert units.ranges({8, 0, 1, 2, 3}) == "0-3,8"
    assert [units.names(["n1", "n2"]), units.names([*"abcd"], most=2)] == ["n1, n2", "a, b and 2 more"]


def test_a_table_aligns_words_to_the_left_and_numbers_to_the_right(capsys: pytest.CaptureFixture[str]) -> None:
    titles, rows = ("name", "ms", "where"), [("a", "1.5", "host [1]"), ("long one", "10.0", "n2")]
    expected = ["name        ms  where", "a          1.5  host [1]", "long one  10.0  n2"]
    assert units.table(titles, rows, left=("name", "where")) == expected
    assert units.table(titles[:2], [row[:2] for row in rows]) == [line[:14].rstrip() for line in expected]
    assert units.table(titles, []) == ["name  ms  where"]
    units.print_table(titles, rows, left=("name", "where"))
    assert capsys.readouterr().out.splitlines() == expected


def test_losses_and_errors_are_better_when_they_are_lower() -> None:
    lower = ("valid_loss", "top1_error", "valid_MAE", "rmse", "valid_perplexity", "valid_mse_ema")
    assert all(map(units.is_lower_better, lower))
    assert not any(map(units.is_lower_better, ("valid_accuracy", "valid_top5", "valid_f1")))


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("40GB", 40 * 10**9), ("24GiB", 24 << 30), ("1.5 gib", 3 << 29), ("512 MB", 512 * 10**6), ("80b", 80)],
)
def test_a_size_is_read_with_its_unit(text: str, num_bytes: int) -> None:
    assert units.parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["40", "GB", "", "-1GB", "40 GBit", "4e3GB", "nan GB"])
def test_a_size_without_a_number_or_a_unit_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a number with a unit, such as 40GB or 24GiB"):
        units.parse_size(text)
