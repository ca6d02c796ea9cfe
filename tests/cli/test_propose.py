"""`tutti propose`: the page of an allocation request in three formats, and what it refuses."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from conftest import Call, command
from study_folders import Made, scale_study, spread, sweep_study

from tutti.report.proposal import escape_tex
from tutti.study.definition import Mode, Point, RunFolder, read_definition, write_definition

CONFIG = """recipe: digits
data: {name: images, path: data_set}
model: {name: my_model & 50% more}
optim: {name: adamw}
checkpoint: {keep: 3}
precision: fp32
epochs: 10
"""
ASKED = ("--site", "perlmutter", "--runs", "20")


def study(name: str, *ranks: int, slower: float = 1.0, mode: Mode = "weak", config: str = CONFIG) -> str:
    """A study with four ranks on a node, of which two nodes lose 4 %."""

    def run(point: Point) -> Made:
        batch = 32 if mode == "weak" else 256 // point.ranks
        return Made(100.0 * point.ranks * (0.96 if point.ranks > 4 else 1.0) / slower, per_rank_batch=batch)

    folder = scale_study(Path("runs", "studies", "digits", name), run, ranks=ranks, repeats=2, mode=mode)
    for record in folder.points.glob("*/record.json"):
        content = json.loads(record.read_text())
        content["plan"] |= {"train_samples": 65536, "gradient_bytes": 4000}
        record.write_text(json.dumps(content))
        RunFolder(record.parent).config.write_text(config)
    return str(spread(folder, 4, device="NVIDIA A100"))


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call_tutti: Call) -> Call:
    monkeypatch.chdir(tmp_path)

    return partial(call_tutti, "propose")


@pytest.fixture
def quick(call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The command without its figures, which take most of the time."""
    monkeypatch.setattr("tutti.report.proposal.draw_charts", lambda charts, folder: [])
    return call


def numbers(call: Call, *words: str) -> dict:
    code, out, err = call(*words, "--json")
    assert code == 0, err
    return json.loads(out)


def part(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_numbers_follow_from_each_other(quick: Call) -> None:
    found = numbers(quick, study("s", 4, 8), *ASKED, "--fabric", "hpc", "--contingency", "10%")
    assert found["global_batch"] == 32 * found["ranks"] == 128 * found["nodes"]
    assert found["steps"] == 10 * (65536 // found["global_batch"])
    hours, total = found["hours_of_a_run"], found["node_hours"]
    assert hours["q05"] < hours["q50"] < hours["q95"]
    assert total["q50"] == pytest.approx(20 * found["nodes"] * hours["q50"])
    assert found["request"] == pytest.approx(1.1 * total["q50"])
    assert 0.5 < found["probability_of_enough"] < 1
    in_gpus = numbers(
        quick, "runs/studies/digits/s", *ASKED, "--fabric", "hpc", "--contingency", "10%", "--unit", "gpu-hours"
    )
    assert in_gpus["request"] == pytest.approx(4 * found["request"])


def test_the_most_nodes_that_reach_the_efficiency_are_chosen(quick: Call) -> None:
    path = study("s", 4, 8)
    found = [
        numbers(quick, path, *ASKED, "--fabric", "hpc", "--efficiency", share) for share in ("50%", "95%", "99.9%")
    ]
    assert [each["nodes"] for each in found] == [8, 2, 1]
    assert "More than 4 times the measured nodes are not considered" in found[0]["reason"]
    given = numbers(quick, path, *ASKED, "--nodes", "16", "--steps", "1000")
    assert (given["nodes"], given["ranks"], given["steps"]) == (16, 64, 1000)
    assert given["reason"].startswith("16 nodes were given. The chance of 80% is ")


def test_every_field_of_a_request_is_on_the_page(quick: Call, tmp_path: Path) -> None:
    (tmp_path / "data_set").mkdir()
    (tmp_path / "data_set" / "a.jpg").write_bytes(b"x" * 2048)
    strong = study("strong", 4, 8, mode="strong")
    code, out, _ = quick(study("s", 4, 8), "--more", strong, *ASKED, "--fabric", "hpc", "--nodes", "8", "--out", "page")
    assert code == 0
    assert re.match(r"[\d.,]+ node-hours for 20 runs on 8 nodes \(32 ranks\): ", out)
    text = Path("page/proposal.md").read_text()
    assert "| device | NVIDIA A100 |" in part(text, "Machine and software")
    assert "torch 2.13.0+cpu" in part(text, "Machine and software")
    assert "| training samples | 65,536 |" in part(text, "Workload")
    measured = part(text, "Measured")
    assert measured.index("Weak scaling of digits") < measured.index("Strong scaling of digits")
    assert "| 8 | 2 | 256 | 2 (20) | 768 (768 to 768) |" in measured
    ahead = part(text, "Forecast")
    assert "Basis: measurements on 1, 2 nodes, HPC fabric." in ahead
    assert [line.split("|")[1].strip() for line in ahead.splitlines() if line.startswith("| ")][1:] == [
        "16",
        "32",
        "64",
        "128",
    ]
    assert "Assumed: " in ahead
    assert "| hours of a run | " in part(text, "Time to solution and cost")
    assert "contingency" in part(text, "Time to solution and cost")
    volumes = part(text, "Input and output")
    assert "| input: data set | 2 KiB | 2 KiB | data_set |" in volumes
    assert "| output: 3 checkpoints kept | 35.2 KiB | 703 KiB | 11.7 KiB each, estimated" in volumes
    assert "8 nodes: at most 2 nodes were measured." in part(text, "What was not measured")
    assert "global batch of 1,024: the largest in the study, for a few steps, is 256." in part(
        text, "What was not measured"
    )
    plan = part(text, "Verification")
    assert "tutti scale digits batch.per_rank=32 --ranks 32 --mode weak --repeat 3 --on perlmutter" in plan
    assert "--ranks-per-node 4 --account ACCOUNT\ntutti forecast --verify\ntutti propose runs/" in plan
    assert "None of the forecast runs has been measured yet." in part(text, "Forecast and measurement")


def test_every_number_leads_to_its_run_folder(quick: Call, tmp_path: Path) -> None:
    quick(study("s", 4, 8), *ASKED, "--out", "page")
    text = Path("page/proposal.md").read_text()
    for title in (
        "Machine and software",
        "Workload",
        "Measured",
        "Forecast",
        "Time to solution and cost",
        "Input and output",
    ):
        lines = [line for line in part(text, title).splitlines() if line.startswith("| ")][1:]
        assert lines
        assert all(re.search(r"\(#S\d+\) \|\s*$", line) for line in lines), title
    links = re.findall(r'<a id="(S\d+)"></a>S\d+ \| \[[^]]*\]\(([^)]+)\)', part(text, "Sources"))
    assert {label for label, _ in links} >= set(re.findall(r"#(S\d+)", text))
    assert all((tmp_path / "page" / target).exists() for _, target in links)
    page = Path("page/proposal.html").read_text()
    for label, target in links:
        assert f'id="{label}"' in page
        assert f'href="{target}"' in page


def test_the_page_is_filled_in_when_the_runs_exist(quick: Call) -> None:
    first = study("first", 4, 8)
    words = (first, *ASKED, "--fabric", "hpc", "--nodes", "4")
    kept = numbers(quick, *words)["files"][-1]
    study("later", 16, slower=1.02)
    assert numbers(quick, *words)["files"][-1] == kept
    text = part(Path(first, "proposal", "proposal.md").read_text(), "Forecast and measurement")
    assert "Over all studies of this project: 1 forecast checked: off by" in text
    assert f"| [{Path(kept).stem}](../forecasts/{Path(kept).name}) | 16 | 4 |" in text


def test_a_number_of_nodes_that_was_measured_is_no_forecast(quick: Call) -> None:
    path = study("s", 4, 8)
    quick(path, *ASKED, "--nodes", "2")
    text = Path(path, "proposal", "proposal.md").read_text()
    assert not [line for line in part(text, "Forecast").splitlines() if line.startswith("| 8 |")]
    label = re.search(r"\| hours of a run .*\[(S\d+) to", part(text, "Time to solution and cost"))
    assert label is not None
    assert f"{label[1]} | [{path}/points/n8-r1]" in part(text, "Sources")
    assert "--verify" not in part(text, "Verification")


def swept(recipe: str = "digits") -> str:
    """A sweep in which twice the batch takes a quarter more epochs to 90 %."""

    def run(point: Point) -> Made:
        batch = point.values["batch.global"]
        late = {256: 4, 512: 5, 1024: 6}[batch]
        epochs = [{"train_loss": 1.0, "valid_accuracy": 0.95 if epoch >= late else 0.5} for epoch in range(1, 9)]
        return Made(epochs=epochs, per_rank_batch=batch // 2, windows=16)

    folder = sweep_study(Path("sweep"), run, {"batch.global": [256, 512, 1024]})
    write_definition(folder, replace(read_definition(folder), recipe=recipe))
    for record in folder.points.glob("*/record.json"):
        content = json.loads(record.read_text())
        content["plan"] |= {"train_samples": 10 * content["plan"]["global_batch"]}
        record.write_text(json.dumps(content))
    return str(folder.path)


def test_a_sweep_says_how_long_a_run_takes(quick: Call) -> None:
    path, target = study("s", 4, 8), ("--sweep", swept(), "--target", "valid_accuracy=0.9")
    words = (path, *ASKED, "--fabric", "hpc", "--nodes", "4")
    told, given = numbers(quick, *words, *target), numbers(quick, *words, "--epochs", "5")
    assert told["global_batch"] == 512
    assert told["steps"] == pytest.approx(given["steps"], rel=0.3)
    spreads = [each["hours_of_a_run"]["q95"] / each["hours_of_a_run"]["q05"] for each in (told, given)]
    assert spreads[0] > spreads[1]
    quick(*words, *target)
    text = Path(path, "proposal", "proposal.md").read_text()
    assert re.search(
        r"steps of a run \| .* epochs to valid_accuracy=0.9, by a sweep\) \| \[S\d+\]", part(text, "Workload")
    )
    assert "| [sweep](" in part(text, "Sources")
    assert "converges" not in part(text, "What was not measured")
    quick(*words[:-1], "16", *target)
    text = part(Path(path, "proposal", "proposal.md").read_text(), "What was not measured")
    assert "2,048: the largest with which the sweep reached its target is 1,024." in text


def test_a_sweep_of_another_recipe_is_refused(quick: Call) -> None:
    code, _, err = quick(study("s", 4, 8), *ASKED, "--sweep", swept("mnist"), "--target", "valid_accuracy=0.9")
    assert code == 2
    assert "is of mnist: expected a sweep of digits" in err


def test_figures_are_drawn_as_png_and_svg(call: Call) -> None:
    assert call(study("s", 4, 8), *ASKED, "--out", "page")[0] == 0
    names = {path.name for path in Path("page/figures").iterdir()}
    assert names == {f"{name}.{ending}" for name in ("throughput", "forecast") for ending in ("png", "svg")}
    for name in re.findall(r'src="([^"]+)"', Path("page/proposal.html").read_text()):
        assert Path("page", name).exists()


@pytest.mark.system
@pytest.mark.skipif(
    shutil.which("pdflatex") is None, reason="no LaTeX on this machine: apt-get install texlive-latex-base"
)
def test_the_latex_can_be_typeset(call: Call) -> None:
    later = study("later", 16)
    call(study("s", 4, 8), "--more", later, *ASKED, "--nodes", "8", "--out", "page")
    words = ("pdflatex", "-interaction=nonstopmode", "-halt-on-error", "proposal.tex")
    done = command(*words, cwd=Path("page"))
    assert done.code == 0, done.out[-2000:]
    wide = [float(points) for points in re.findall(r"Overfull .hbox \(([\d.]+)pt too wide", done.out)]
    assert max(wide, default=0.0) < 12


def test_the_latex_is_balanced_and_escaped(quick: Call) -> None:
    quick(study("s_1", 4, 8), *ASKED, "--out", "page")
    text = Path("page/proposal.tex").read_text()
    assert r"my\_model \& 50\% more" in text
    opened: list[str] = []
    for word, name in re.findall(r"\\(begin|end)\{(\w+)\}", text):
        if word == "begin":
            opened.append(name)
        else:
            assert opened.pop() == name
    assert opened == []
    plain = re.sub(r"\\[{}]", "", text)
    assert plain.count("{") == plain.count("}")
    body = text.partition(r"\begin{document}")[2]
    assert not re.search(
        r"(?<!\\)[#_$^~]", re.sub(r"\\(hyperlink|hypertarget)\{S\d+\}", "", body).replace("_figures", "")
    )
    assert "\u00b5".encode() not in escape_tex("\u03bc\u2026").encode()
    assert escape_tex("a_b{c}\\~^<|>") == (
        r"a\_b\{c\}\textbackslash{}\textasciitilde{}\textasciicircum{}\textless{}\textbar{}\textgreater{}"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--site", "perlmuter", "--runs", "3"], ["unknown site 'perlmuter'", "Did you mean 'perlmutter'"]),
        (["--site", "perlmutter", "--runs", "0"], ["--runs 0: expected 1 or more"]),
        ([*ASKED, "--nodes", "0"], ["--nodes 0: expected 1 or more"]),
        ([*ASKED, "--epochs", "0"], ["--epochs 0: expected more than 0"]),
        ([*ASKED, "--epochs", "2", "--steps", "3"], ["--epochs and --steps are given", "Leave out --steps"]),
        ([*ASKED, "--epochs", "2", "--sweep", "x"], ["--epochs and --sweep are given", "Leave out --sweep"]),
        ([*ASKED, "--target", "valid_accuracy=0.9"], ["--target valid_accuracy=0.9: expected --sweep STUDY"]),
        ([*ASKED, "--sweep", "nowhere"], ["nowhere holds no study"]),
        ([*ASKED, "--contingency", "15"], ["--contingency 15: expected a share from 0% to 100%"]),
        ([*ASKED, "--contingency", "x%"], ["--contingency x%"]),
        ([*ASKED, "--efficiency", "180%"], ["--efficiency 180%"]),
        ([*ASKED, "--fabric", "tpc"], ["--fabric tpc", "Did you mean 'tcp'"]),
        ([*ASKED, "--unit", "gpu-hour"], ["--unit gpu-hour: expected node-hours or gpu-hours", "Did you mean"]),
        (["--site", "slurm", "--runs", "3", "--unit", "gpu-hours"], ["site slurm has no gpus_per_node"]),
        ([*ASKED, "--nodes", "4096"], ["is larger than the 65,536 training samples", "--nodes"]),
        ([*ASKED, "--more", "nowhere"], ["nowhere holds no study"]),
        ([*ASKED, "--out", "runs/studies/digits/s/study.json"], ["cannot be written"]),
    ],
)
def test_bad_input_is_named_with_its_fix(quick: Call, words: list[str], message: list[str]) -> None:
    code, out, err = quick(study("s", 4, 8), *words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    for each in message:
        assert each in err


def test_studies_that_cannot_be_continued_are_refused(quick: Call) -> None:
    code, _, err = quick(study("one", 1, 2, 4), *ASKED)
    assert code == 2
    assert "no forecast can be given. Everything was measured on one node (up to 4 ranks)" in err
    assert "--link" in err
    linked = numbers(quick, "runs/studies/digits/one", *ASKED, "--link", "200Gbit,3us", "--nodes", "2")
    assert linked["nodes"] == 2
    code, _, err = quick(study("no_length", 4, 8, config="recipe: digits\n"), *ASKED)
    assert code == 2
    assert "the length of a run is not known: expected --epochs or --steps" in err
    swept = sweep_study(Path("sweep"), lambda _: Made(), {"batch.global": [64]}).path
    code, _, err = quick(str(swept), *ASKED)
    assert code == 2
    assert "expected one of tutti scale" in err
