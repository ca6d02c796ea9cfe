"""`tutti plan` prints the memory of a rank as a table or JSON, and refuses what it cannot read."""

import json

import pytest
from conftest import Call

SMALL = ("digits", "runtime.device=cpu", "batch.global=32")


def test_a_table_ends_with_the_verdict(call_tutti: Call) -> None:
    code, out, _ = call_tutti("plan", *SMALL, "-n", "2", "--memory", "2GB")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "digits: small_cnn, fp32, on the CPU; 2 ranks = 2 data; 16 samples a rank in one pass"
    assert lines[1].split() == ["memory", "of", "a", "rank", "size", "share"]
    assert [line.split("  ")[0] for line in lines[2:5]] == ["parameters", "gradients", "optimizer state"]
    assert any(line.startswith("peak of a rank") and " in " in line for line in lines)
    assert "fits in 2GB (1.86 GiB)" in lines


def test_json_holds_bytes(call_tutti: Call) -> None:
    code, out, _ = call_tutti("plan", *SMALL, "--memory", "100MB", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["verdict"] == "does not fit"
    assert found["memory_bytes"] == 100_000_000
    assert found["prediction"]["peak_bytes"] == sum(found["prediction"]["kinds"].values())
    assert found["needed_bytes"][0] < found["needed_bytes"][1]
    assert found["trials"][0]["settings"] == ["precision=bf16"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--memory", "40"), "--memory '40': expected a number with a unit, such as 40GB or 24GiB."),
        (("--memory", "GB"), "--memory 'GB': expected a number with a unit, such as 40GB or 24GiB."),
        (("--memory", "-4GB"), "--memory '-4GB': expected a number with a unit, such as 40GB or 24GiB."),
        (("--memory", "0GB"), "--memory 0GB: expected at least 1 MiB. Give the memory of a rank's device, as in 40GB."),
        (("-n", "0"), "-n 0: expected 1 or more ranks. Try -n 2."),
        (("-n", "-3"), "-n -3: expected 1 or more ranks. Try -n 2."),
        (("batch.global=7", "-n", "2"), "batch.global=7 does not split over 2 ranks"),
        (("batch.micro=0",), "batch.micro=0"),
        (
            ("framework=keras", "batch.micro=null"),
            "framework=keras: expected torch, whose memory alone can be predicted.",
        ),
        (("model.hidden=[0]",), "model.hidden"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_message(call_tutti: Call, words: tuple[str, ...], message: str) -> None:
    code, out, err = call_tutti("plan", "digits", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


VOLUMES = ("nbody", "data.source=synthetic", "data.crop=16", "data.box=16", "model.width=4", "model.depth=2")
VOLUMES += ("runtime.device=cpu", "batch.global=8")


def test_parts_of_samples_and_stages_are_planned(call_tutti: Call) -> None:
    code, out, _ = call_tutti("plan", *VOLUMES, "-n", "4", "parallel.space=[2,2]", "--memory", "4GB")
    assert code == 0
    assert "4 ranks = 1 data x 4 space [2, 2]; 8 samples a rank in one pass" in out
    assert "fits in 4GB" in out
    code, out, _ = call_tutti("plan", *VOLUMES, "-n", "2", "batch.micro=2", "parallel.stages=2", "--memory", "4GB")
    assert code == 0
    assert "2 ranks = 1 data x 2 stages; 8 samples a rank in 4 passes of 2" in out
    assert "needs most. Stages are cut by floating-point operations here, and by measured times in a run" in out


def test_one_rank_is_told_to_share_its_samples(call_tutti: Call) -> None:
    code, out, _ = call_tutti("plan", *VOLUMES, "--memory", "300MB")
    assert code == 0
    assert any(line.startswith("with -n ") and " parallel.space=" in line for line in out.splitlines())


LAYOUTS = {
    "a degree that divides no ranks": (
        ("digits", "-n", "2", "parallel.space=3"),
        "parallel.space=3 on 2 ranks: expected a multiple of 3 ranks.",
    ),
    "no part": (
        ("digits", "-n", "2", "parallel.space=0"),
        "parallel.space=0 (command line): expected a number of parts",
    ),
    "negative parts": (
        ("digits", "parallel.space=[2,-1]"),
        "parallel.space=[2, -1] (command line): expected a number of",
    ),
    "four dimensions": (("digits", "parallel.space=[2,1,1,1]"), "or up to 3 such numbers, as in [2,2,1]."),
    "no stage": (
        ("digits", "parallel.stages=0"),
        "parallel.stages=0 (command line): expected a number greater than 0.",
    ),
    "negative stages": (
        ("digits", "parallel.stages=-2"),
        "parallel.stages=-2 (command line): expected a number greater than 0.",
    ),
    "a model that needs the whole sample": (
        ("digits", "-n", "2", "parallel.space=2"),
        "flatten in features.5 Flatten",
    ),
    "images of odd size": (
        ("digits", "-n", "2", "data.name=synthetic", "data.shape=[1,9,9]", "parallel.space=2"),
        "9 cells do not split into 2 equal parts. Set a divisor of 9",
    ),
    "crops too small": (
        (*VOLUMES, "-n", "2", "data.crop=4", "parallel.space=[1,1,4]", "-n", "4"),
        "would compute the whole sample on every rank, since its parts are too small",
    ),
    "a model without names": (
        ("digits", "-n", "2", "parallel.stages=2"),
        "parallel.stages with SmallCnn: expected a model that names its parts.",
    ),
    "more stages than layers": (
        ("text", "-n", "8", "parallel.stages=8", "batch.global=32"),
        "parallel.stages=8: GPT has 6 modules with weights to train. Set parallel.stages=6 or less",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_that_cannot_be_is_one_message(call_tutti: Call, name: str) -> None:
    words, message = LAYOUTS[name]
    code, out, err = call_tutti("plan", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
