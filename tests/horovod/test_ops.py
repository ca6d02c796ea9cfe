"""What the collectives compute: reductions of all types, gathered, sent, swapped and scattered rows."""

from typing import Any

import hvd_engine_work as work
import pytest
from rank_jobs import run_ranks

from tutti.horovod.engine.messages import AVERAGE, MAX, MIN, PRODUCT, SUM

pytestmark = pytest.mark.ranks


def same(found: list[Any]) -> Any:
    """What is the same on all ranks."""
    assert all(each == found[0] for each in found)
    return found[0]


def test_whole_numbers_are_averaged_in_double_precision_and_cut_off() -> None:
    found = same(run_ranks(2, work.average_whole_numbers))
    for name in ("int8", "int32", "int64"):
        assert found[name] == [7, -6, 1, 0, 0]  # 7.5, -6.5, 1.5, -0.5, 0.5
    assert found["prescale"] == [7, -6, 1, 0, 0]  # each rank's halves are cut off before the sum
    assert found["postscale"] == [7, -6, 1, 0, 0]
    assert found["large"] == [(1 << 52) + 1]


def test_reductions_of_all_types_in_place_and_out_of_place() -> None:
    found = same(run_ranks(2, work.reduce_all_ways))
    for name in ("uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"):
        half = 0.5 if "float" in name else 0
        assert found[name, AVERAGE] == [2 + half, 3 + half, 5 + half]
        assert found[name, SUM] == [5, 7, 11]
        assert found[name, MIN] == [2, 3, 5]
        assert found[name, MAX] == [3, 4, 6]
        assert found[name, PRODUCT] == [6, 12, 30]
    assert found["scaled"] == [2000.0, 6.0]
    assert found["empty"] == (0, 3)
    assert found["scalar"] == 4.0
    assert found["leaf"] == [2.0, 2.0]


def test_a_group_is_reduced_as_one_unit_and_keeps_its_types() -> None:
    (mixed, early, inside), _ = run_ranks(2, work.reduce_groups)
    assert mixed == [[200000001.0] * 2, [1.0] * 3, [1]]
    assert not early
    assert inside == [[1.0, 1.0]] * 3


def test_rows_are_gathered_from_ranks_that_have_different_numbers_of_them() -> None:
    found = same(run_ranks(3, work.gather_rows))
    for name in work.DTYPES:
        assert found[name] == [[1, 1], [0, 0], [0, 0]]
    assert found["none"] == (0, 5)
    assert found["thin"] == (3, 0)
    assert found["all but one"] == [2, 2, 2]


def test_every_rank_can_send_every_type_to_all() -> None:
    found = same(run_ranks(3, work.broadcast_all))
    for root in range(3):
        for name in work.DTYPES:
            values = [i * (root + 1) % 3 for i in range(4)]
            assert found[root, name] == ([bool(value) for value in values] if name == "bool" else values)
    assert found["scalar"] == 6
    assert found["empty"] == (0,)


def test_rows_are_swapped_evenly_or_by_splits() -> None:
    for rank, found in enumerate(run_ranks(3, work.swap_rows)):
        assert found["even"] == [10 * other + 2 * rank + i for other in range(3) for i in range(2)]
        assert found["even counts"] == [2, 2, 2]
        rows = [10 * other + other * rank + i for other in range(3) for i in range(other)]
        assert found["list"] == found["tensor"] == (rows, [0, 1, 2])
        assert found["nothing"] == ((0, 2), [0, 0, 0])


def test_the_first_ranks_get_one_more_row_where_rows_do_not_divide() -> None:
    found = run_ranks(3, work.scatter_rows)
    rows = [(0, 3), (3, 5), (5, 7)]
    for each, (begin, end) in zip(found, rows, strict=True):
        mean = [[2.0 * row + 1, 2.0 * row + 2] for row in range(begin, end)]
        assert each["mean"] == mean
        assert each["sum"] == [[3 * value for value in row] for row in mean]
        assert each["scaled"] == [[value / 2 for value in row] for row in mean]
    assert [each["few"] for each in found] == [(1, 2), (0, 2), (0, 2)]
    assert [each["none"] for each in found] == [(0, 2)] * 3


def test_a_job_of_one_rank_knows_all_collectives() -> None:
    (found,) = run_ranks(1, work.work_alone)
    assert found["allreduce"] == found["allgather"] == found["broadcast"] == found["reducescatter"] == [[3, 4]]
    assert found["alltoall"] == ([[3, 4]], [1])
    assert found["error"][0] == "HorovodInternalError" and "without dimensions" in found["error"][1]
    assert found["join"] == 0


def test_wrong_arguments_are_refused_at_submission() -> None:
    errors, afterwards = same(run_ranks(2, work.give_wrong_arguments))
    told = [
        ("ValueError", "Tensor type torch.BoolTensor is not supported."),
        ("ValueError", "Tensor type torch.ComplexFloatTensor is not supported."),
        ("ValueError", "Tensor is required to be contiguous."),
        ("ValueError", "op=17 is not a reduction: expected one of hvd.Average"),
        ("ValueError", "The op parameter supersedes average."),
        ("ValueError", "root_rank=2 is not in ProcessSet(process_set_id=0"),
        ("ValueError", "alltoall of 3 rows without splits: expected a multiple of 2"),
        ("ValueError", "splits [1] for 4 rows and 2 ranks"),
        ("ValueError", "splits [4, 1] for 4 rows and 2 ranks"),
        ("ValueError", "splits [-1, 2] for 4 rows and 2 ranks"),
        ("ValueError", "splits are torch.int64: expected torch.int32"),
        ("RuntimeError", "reducescatter with op=4 is not supported"),
        ("ValueError", "is not registered"),
        ("ValueError", "Handle 10000 was not created or has been cleared."),
    ]
    for (kind, text), (expected, part) in zip(errors, told, strict=True):
        assert kind == expected and part in text
    assert afterwards == 2.0
