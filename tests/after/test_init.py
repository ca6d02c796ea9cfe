"""Runs that begin with weights of another run or of a file."""

import json
from pathlib import Path
from typing import Any

import after_work
import pytest
import torch
from rank_jobs import run_ranks, train
from small_config import small_config

from tutti.checkpoint.weights import compare, read_file
from tutti.config.check import check_init
from tutti.config.load import change
from tutti.config.schema import InitConfig
from tutti.errors import ConfigError

THERE = {"backbone.0.weight": "float32 [8, 1]", "backbone.1.count": "int64 []", "head.1.weight": "float32 [10, 8]"}


def starts(folder: Path) -> dict[str, Any]:
    """What a run has told of its weights before the first step."""
    first = json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])
    return {name: first[name] for name in ("valid_loss", "valid_accuracy")}


@pytest.mark.ranks
def test_a_run_begins_with_the_weights_of_another_on_every_layout(tmp_path: Path) -> None:
    short = {"epochs": 1, "max_steps": 6, "out": str(tmp_path)}
    source = run_ranks(1, train, after_work.VALUES | short | {"max_steps": 11})[0]["folder"]
    [expected] = run_ranks(1, after_work.evaluate, source)
    init = {"from": str(source), "strict": True}
    for ranks, parallel in ((1, {}), (2, {"shard": "all"})):
        found = run_ranks(ranks, train, after_work.VALUES | short | {"init": init, "parallel": parallel})[0]["folder"]
        assert starts(found) == pytest.approx(expected, rel=1e-6), parallel
        record = json.loads((found / "record.json").read_text())["init"]
        assert record["source"].startswith(str(source)) and len(record["loaded"]) == 9 and record["missing"] == []
    values = after_work.VALUES | short | {"model": {"name": "after_work:Net", "width": 4}}
    file = tmp_path / "part.pt"
    torch.save({"state_dict": {"backbone.0.weight": torch.ones(4, 1, 3, 3), "other": torch.ones(1)}}, file)
    init = {"from": str(file), "only": "backbone.0.*", "strict": False}
    part = run_ranks(1, train, values | {"init": init, "checkpoint": {"every_steps": 1, "keep": 9}})[0]["folder"]
    record = json.loads((part / "record.json").read_text())["init"]
    assert record["loaded"] == ["backbone.0.weight"] and record["missing"] == ["backbone.0.bias"]
    assert record["left_out"] == ["other"]
    log = (part / "logs" / "rank-0.log").read_text()
    assert f"weights from {file}: 1 of 2 tensors loaded" in log
    file.unlink()  # a run that is resumed has its own weights
    resumed = run_ranks(1, train, values | {"init": init}, str(part / "checkpoints" / "step-000003"))[0]
    assert resumed["folder"] == part


def ask(**values: Any) -> InitConfig:
    return InitConfig.model_validate({"from": "other"} | values)


def test_what_fits_is_taken_and_the_rest_is_told() -> None:
    here = THERE | {"head.1.weight": "float32 [5, 8]", "head.1.bias": "float32 [5]"}
    there = THERE | {"old": "float32 [1]"}
    found = compare("other", there, here, ask(strict=False))
    assert found.loaded == ["backbone.0.weight", "backbone.1.count"]
    assert found.left_out == ["old"] and found.missing == ["head.1.bias"]
    assert found.mismatched == {"head.1.weight": "float32 [10, 8] there, float32 [5, 8] here"}
    assert found.lines()[0] == "weights from other: 2 of 4 tensors loaded"
    only = compare("other", there, here, ask(only=["backbone.*"]))
    assert only.loaded == found.loaded and only.left_out == ["head.1.weight", "old"]


@pytest.mark.parametrize(
    ("here", "init", "said"),
    [
        (
            THERE | {"head.1.weight": "float32 [5, 8]"},
            {},
            r"head.1.weight is float32 \[10, 8\] there, float32 \[5",
        ),
        (THERE | {"new": "float32 [5]"}, {}, "new is absent there"),
        (THERE, {"only": "encoder.*"}, r"init.only='encoder.\*' fits none of the 3 names of the model"),
        ({"new": "float32 [5]"}, {"strict": False}, "nothing in it fits the model"),
    ],
)
def test_weights_that_do_not_fit_are_refused(here: dict[str, str], init: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compare("other", THERE, here, ask(**init))


def test_other_types_of_numbers_are_converted() -> None:
    assert compare("other", {"a": "float16 [2]"}, {"a": "float32 [2]"}, ask()).loaded == ["a"]


@pytest.mark.parametrize(
    ("content", "said"), [(b"nonsense", "cannot be read as weights"), (None, "holds no tensors by name")]
)
def test_a_file_without_weights_is_refused(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(content) if content else torch.save([1, 2], path)
    with pytest.raises(ConfigError, match=said):
        read_file(path)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["init.from=nowhere"], "init.from=nowhere: no such file or folder"),
        (["init.from={here}"], "expected a run folder, as `tutti runs` lists them"),
        (["init.from={here}/notes.txt"], "expected a run folder or a file that ends in .safetensors, .pt"),
        (["framework=keras", "init.from={here}/notes.txt"], "a file that ends in .keras, .weights.h5"),
        (["framework=keras", "init={{from: {here}/a.keras, only: x}}"], "Leave init.only out"),
    ],
)
def test_weights_that_are_not_there_are_refused_before_anything_starts(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    for name in ("notes.txt", "a.keras"):
        (tmp_path / name).touch()
    config = change(small_config(), [text.format(here=tmp_path) for text in overrides])
    with pytest.raises(ConfigError) as refused:
        check_init(config)
    assert said in str(refused.value)
