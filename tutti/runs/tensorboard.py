"""Event files for TensorBoard, written without torch or TensorFlow."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

# By this name tensorboard is told to pass over a TensorFlow that is installed; importing that takes seconds.
sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))

from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: E402 # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata  # noqa: E402 # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.tensor_pb2 import TensorProto  # noqa: E402 # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.types_pb2 import DT_STRING  # noqa: E402 # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: E402

from tutti.runs.summary import Histogram, Png  # noqa: E402

_NOT_CURVES = {"event", "step", "epoch", "time", "ranks", "batch"}


class TensorBoardLog:
    """Writes every number of an event as a curve over steps; what a run wrote after `resumed_after` is given up."""

    def __init__(self, folder: Path, resumed_after: int | None = None) -> None:
        self._writer = EventFileWriter(str(folder))
        if resumed_after is not None:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=resumed_after + 1, session_log=start))

    def write(self, event: dict[str, Any]) -> None:
        values = [
            Summary.Value(tag=tag, simple_value=number)
            for key, number in event.items()
            if key not in _NOT_CURVES and isinstance(number, int | float)
            for tag in [_tag(key)]
        ]
        self._writer.add_event(Event(wall_time=event["time"], step=event["step"], summary=Summary(value=values)))

    def show(self, step: int, values: Mapping[str, Png | Histogram | str]) -> None:
        """Write images, histograms and texts of a step, by the names that curves would have."""
        shown = [_summary(_tag(key), value) for key, value in values.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=shown)))

    def commit(self) -> list[str]:
        return []

    def close(self, ended: str = "finished") -> list[str]:
        self._writer.close()
        return []


def _summary(tag: str, value: Png | Histogram | str) -> Summary.Value:
    if isinstance(value, Png):
        image = Summary.Image(height=value.height, width=value.width, encoded_image_string=value.content)
        return Summary.Value(tag=tag, image=image)
    if isinstance(value, Histogram):
        histogram = HistogramProto(
            min=value.least,
            max=value.greatest,
            num=value.count,
            sum=value.total,
            sum_squares=value.squares,
            bucket_limit=value.ends,
            bucket=value.counts,
        )
        return Summary.Value(tag=tag, histo=histogram)
    about = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    content = TensorProto(dtype=DT_STRING, string_val=[value.encode()])
    return Summary.Value(tag=f"{tag}/text_summary", metadata=about, tensor=content)


def _tag(key: str) -> str:
    """`train_loss` and `valid_loss` become `train/loss` and `valid/loss`."""
    for split in ("train", "valid"):
        if key.startswith(f"{split}_"):
            return f"{split}/{key.removeprefix(f'{split}_')}"
    return f"step/{key}"
