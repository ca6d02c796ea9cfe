"""Images, histograms and texts: TensorBoard reads back what metrics, steps and loops have shown."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import own_work as work
import pytest
import torch
from PIL import Image
from rank_jobs import run_ranks, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tutti
from tutti.runs.folder import RunFolder
from tutti.runs.journal import Journal, Screen
from tutti.runs.metrics import NOISE


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder), {"images": 0, "histograms": 0, "tensors": 0})
    found.Reload()
    return found


def pixels(found: EventAccumulator, tag: str) -> np.ndarray:
    (event,) = found.Images(tag)
    return np.asarray(Image.open(io.BytesIO(event.encoded_image_string)))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    (tmp_path / "logs").mkdir()
    return Journal(RunFolder(tmp_path), Screen(10, 1, 1, live=False), ("tensorboard",))


def test_tensorboard_shows_what_was_collected_for_an_event(journal: Journal, tmp_path: Path) -> None:
    tutti.summary.text("too_early", "")
    journal.collect(True)
    grey = torch.tensor([[0.0, 0.5], [1.0, 0.25]])
    tutti.summary.image("grey", grey)
    tutti.summary.image("grey", 1 - grey)  # the first counts
    tutti.summary.image("scaled", torch.tensor([[-2.0, 2.0]]))
    tutti.summary.image("limited", np.array([[-2.0, 2.0]]), limits=(-2, 6))
    tutti.summary.image("bytes", torch.arange(6, dtype=torch.uint8).reshape(1, 2, 3))
    tutti.summary.image("batch", torch.stack([torch.full((3, 2, 2), value) for value in (0.0, 0.2, 0.4, 0.6, 0.8)]))
    tutti.summary.histogram("weights", torch.tensor([1.0, 2.0, 3.0, 4.0, torch.nan], dtype=torch.bfloat16))
    tutti.summary.text("note", "two\nlines")
    journal.write(NOISE, step=3, epoch=1)
    journal.write("step", step=4, epoch=1, loss=1.0, samples_per_second=1.0)
    journal.collect(True, "valid_noisy_", "_ema")
    tutti.summary.text("note", "three")
    journal.write("epoch", step=5, epoch=1, valid_loss=1.0)
    journal.collect(False)
    tutti.summary.text("too_late", "")
    journal.close()
    found = read(tmp_path / "tensorboard")
    assert pixels(found, "step/grey").tolist() == [[0, 128], [255, 64]]
    assert pixels(found, "step/scaled").tolist() == [[0, 255]]
    assert pixels(found, "step/limited").tolist() == [[0, 128]]
    assert pixels(found, "step/bytes").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert pixels(found, "step/batch").shape == (4, 6, 3)
    assert pixels(found, "step/batch")[::2, ::2, 0].tolist() == [[0, 51, 102], [153, 204, 0]]
    (histogram,) = found.Histograms("step/weights")
    assert histogram.step == 4
    values = histogram.histogram_value
    assert (values.min, values.max, values.num, values.sum, values.sum_squares) == (1.0, 4.0, 4.0, 10.0, 30.0)
    assert sum(values.bucket) == 4
    (text,) = found.Tensors("step/note/text_summary")
    assert text.tensor_proto.string_val == [b"two\nlines"]
    (text,) = found.Tensors("valid/noisy_note_ema/text_summary")
    assert (text.step, text.tensor_proto.string_val) == (5, [b"three"])
    assert not [tag for tags in found.Tags().values() if isinstance(tags, list) for tag in tags if "too_" in tag]


def test_what_cannot_be_shown_is_a_warning_once(journal: Journal, capsys: pytest.CaptureFixture[str]) -> None:
    def unreadable() -> Any:
        raise AssertionError

    given = {"volume": torch.zeros(2, 2, 2), "words": "text", "large": np.zeros((1, 5000, 5000))}
    for step in (1, 2):
        journal.collect(True)
        for name, value in given.items():
            tutti.summary.image(name, value)
        tutti.summary.histogram("empty", [float("nan")])
        tutti.summary.histogram("odd", type("Odd", (), {"detach": lambda self: unreadable()})())
        journal.write("step", step=step, epoch=1, loss=1.0, samples_per_second=1.0)
    journal.close()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: tutti.summary: ")]
    assert len(said) == 5
    assert said[0].startswith("warning: tutti.summary: image 'volume': ValueError: an array of the shape (2, 2, 2)")
    assert said[3].endswith("histogram 'empty': ValueError: no finite number: expected at least one. It is left out.")


def test_a_figure_of_matplotlib_is_an_image(journal: Journal, tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2, 1))
    figure.add_subplot().plot([1, 2])
    journal.collect(True)
    tutti.summary.image("curve", figure)
    journal.write("step", step=1, epoch=1, loss=1.0, samples_per_second=1.0)
    journal.close()
    assert pixels(read(tmp_path / "tensorboard"), "step/curve").shape[:2] == (110, 220)


def test_nothing_is_collected_without_tensorboard_and_on_other_ranks(tmp_path: Path) -> None:
    for screen, to in ((Screen(10, 1, 1, live=False), ("csv",)), (None, ("tensorboard",))):
        journal = Journal(RunFolder(tmp_path), screen, to)
        journal.collect(True)
        tutti.summary.text("note", "unseen")
        journal.write("step", step=1, epoch=1, loss=1.0, samples_per_second=1.0)
        journal.close()
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.ranks
def test_a_metric_shows_on_two_ranks_at_log_windows_and_in_validation(tmp_path: Path) -> None:
    values = {
        "recipe": "shown",
        "data": {"name": "synthetic", "shape": [8], "classes": 4, "train": 64, "valid": 16},
        "model": {"name": "mlp", "hidden": [8]},
        "optim": {"name": "adam", "lr": 1e-2},
        "metrics": ["own_work:shown_accuracy"],
        "batch": {"global": 16, "micro": 4},
        "epochs": 2,
        "log": {"every_steps": 3},
        "out": str(tmp_path),
    }
    found = read(run_ranks(2, train, values)[0]["folder"] / "tensorboard")
    assert [each.step for each in found.Histograms("step/scores")] == [1, 3, 4, 6, 8]
    assert [each.step for each in found.Histograms("valid/scores")] == [0, 4, 8]
    assert [each.histogram_value.num for each in found.Histograms("step/scores")] == [16.0] * 5  # of one micro-batch
    assert len(found.Tensors("valid/first_target/text_summary")) == 3


@pytest.mark.ranks
def test_a_loop_of_ones_own_shows_the_last_step_of_each_window(tmp_path: Path) -> None:
    (folder,) = run_ranks(1, work.shown_loop, str(tmp_path))
    found = read(folder / "tensorboard")
    assert [each.step for each in found.Images("step/picture")] == [1, 2, 4]
    log = (folder / "logs" / "rank-0.log").read_text()
    assert log.count("warning: tutti.summary: image 'no_picture': ") == 1
