"""What a training step with TensorFlow takes from Horovod: tapes, broadcasts, batch norm, elastic state."""

import pytest
from rank_jobs import InTensorFlow, run_in_tensorflow

pytestmark = [pytest.mark.ranks, pytest.mark.xdist_group("tensorflow")]
work = InTensorFlow("hvd_tensorflow_work")
run_ranks = run_in_tensorflow
FORMS = ("eager", "function")


@pytest.mark.parametrize("form", FORMS)
def test_a_tape_reduces_what_it_finds(form: str) -> None:
    for rank, (mean, dense, half, local, wrapped, is_tape) in enumerate(run_ranks(2, work.use_a_tape, form)):
        assert mean == dense == [[1.5, 1.5], [[0.5, 0.5], [0.5, 0.5], [0, 0]], None]
        assert half == [[3, 3], [[1, 1], [1, 1], [0, 0]], None]
        assert local == [(rank + 1) / 2] * 2  # its share of the mean
        assert wrapped == [1.5, 1.5] and is_tape


def test_all_gradients_of_a_step_leave_the_graph_in_one_call() -> None:
    assert run_ranks(2, work.count_calls) == [(3, 20)] * 2  # where it begins, where it waits, and where it ends


def test_variables_are_broadcast_at_once_in_functions_and_from_keras() -> None:
    first, second = run_ranks(2, work.broadcast_in_many_places)
    assert first[0] != second[0]  # the models began with other weights
    assert first[1] == second[1]
    for found in (first, second):
        assert found[2] == [[3, 3], 3, True] and found[3] == [3, 3]
        assert found[4][0] == "RuntimeError" and "hvd.broadcast_variables" in found[4][1]


def test_batch_norm_over_ranks_is_that_of_the_whole_batch() -> None:
    assert max(run_ranks(2, work.normalise_together)) < 1e-4


def test_an_elastic_state_is_saved_restored_and_taken_over() -> None:
    for found in run_ranks(2, work.keep_a_state):
        assert found[:5] == [[0.0], 0, [0.0], 0, [7.0]]
        assert found[5] == [[1.0], [1.0]]
        assert found[6] == pytest.approx(0.1)
        assert found[7:] == [0, "ValueError"]


def test_an_elastic_function_is_called_again_after_a_failure_in_a_graph() -> None:
    assert run_ranks(2, work.fail_and_go_on) == [[2.0, [3, 3]]] * 2
