"""The name horovod: its modules are tutti's, as a folder on Python's path and as a distribution of its own."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, Finished, Tutti, command

from tutti.horovod.alias import HOROVOD_MODULES, SITE_FOLDER

pytestmark = pytest.mark.xdist_group("alias")
SAME = """
import importlib, importlib.util, inspect, json, os, pickle, sys
from importlib import metadata
import horovod
light = "torch" not in sys.modules
import horovod.torch as hvd
import tutti.horovod.torch as ours
from horovod.torch import *
from horovod.torch.mpi_ops import allreduce_async_, rank, synchronize, _basics
found = {
    "version": horovod.__version__,
    "numbers": list(map(int, horovod.__version__.split(".")[:3])),
    "metadata": [metadata.version("horovod"), metadata.distribution("Horovod").metadata["Summary"]],
    "files": metadata.distribution("horovod").files,
    "light": light,
    "names": [name for name in dir(ours) if name[0] != "_" and not inspect.ismodule(getattr(ours, name))
              and getattr(hvd, name, None) is not getattr(ours, name)],
    "star": allreduce is ours.allreduce and DistributedOptimizer is ours.DistributedOptimizer,
    "submodules": [hvd.mpi_ops.__name__, hvd.compression.__name__, hvd.optimizer.__name__, hvd.functions.__name__],
    "run": horovod.run.__module__,
    "pickled": pickle.loads(pickle.dumps(hvd.Compression.fp16)) is ours.Compression.fp16,
    "source": inspect.getsourcefile(hvd.DistributedOptimizer),
    "unknown": hasattr(hvd, "no_such_name"),
}
same = {
    "horovod.torch.mpi_ops": ("allreduce", "size", "Average", "init", "synchronize", "is_homogeneous"),
    "horovod.torch.compression": ("Compression", "NoneCompressor", "FP16Compressor"),
    "horovod.torch.functions": ("broadcast_parameters", "broadcast_optimizer_state", "broadcast_object"),
    "horovod.torch.optimizer": ("DistributedOptimizer", "_DistributedOptimizer"),
    "horovod.torch.sync_batch_norm": ("SyncBatchNorm",),
    "horovod.torch.elastic": ("run", "TorchState", "ElasticSampler"),
    "horovod.torch.elastic.state": ("get_handler_registry", "set_handler_registry"),
    "horovod.torch.elastic.sampler": ("ElasticSampler",),
    "horovod.common.elastic": ("State", "ObjectState"),
    "horovod.common.basics": ("init", "rank"),
    "horovod.common.exceptions": ("HorovodInternalError", "HostsUpdatedInterrupt"),
    "horovod.common.process_sets": ("ProcessSet", "global_process_set"),
    "horovod.data": ("AsyncDataLoaderMixin", "BaseDataLoader"),
    "horovod.data.data_loader_base": ("AsyncDataLoaderMixin", "BaseDataLoader"),
    "horovod.runner": ("run",),
    "horovod.runner.launch": ("run_commandline",),
    "horovod.runner.util.threads": ("in_thread",),
    "horovod.runner.common.util.env": ("get_env_rank_and_size",),
}
found["missing"] = [
    f"{module}.{name}" for module, names in same.items() for name in names
    if not hasattr(importlib.import_module(module), name)
]
found["one"] = hvd.HorovodInternalError is importlib.import_module("horovod.common.exceptions").HorovodInternalError
hvd.init()
found["engine"] = ours.is_initialized() and hvd.mpi_ops.size() == ours.size() == 1
util = importlib.import_module("horovod.common.util")
found["util"] = [util.extension_available("torch"), util.num_rank_is_power_2(6), util.split_list([1, 2, 3, 4, 5], 2)]
cached = util._cache(lambda word, verbose=False: object())
found["cached"] = [cached("a") is cached("a"), cached("a") is cached("b")]
found["built"] = [util.gloo_built(verbose=False), util.mpi_built(verbose=False), util.ddl_built(), util.ccl_built()]
found["nccl"] = util.nccl_built(verbose=False) == hvd.nccl_built()
os.environ["HERE"] = "before"
with util.env(HERE="within", NEW="set", NONE=None):
    within = [os.environ.get(name) for name in ("HERE", "NEW", "NONE")]
found["environment"] = [within, [os.environ.get(name) for name in ("HERE", "NEW", "NONE")]]
found["versions"] = [util.is_version_greater_equal_than(each, "2.9.0") for each in ("2.10.1", "2.9.0", "2.8")]
found["who"] = importlib.import_module("horovod.runner.common.util.env").get_env_rank_and_size()
heard = []
importlib.import_module("horovod.runner.util.threads").in_thread(heard.append, (1,)).join()
found["heard"] = heard
found["refused"] = {}
for name in ("horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras"):
    find, importlib.util.find_spec = importlib.util.find_spec, lambda *_: None
    for module in ("tensorflow", "keras"):
        sys.modules[module] = None
    try:
        importlib.import_module(name)
    except ImportError as error:
        found["refused"][name] = str(error)
    importlib.util.find_spec = find
print(json.dumps(found))
"""
USES_IT = """
import horovod.torch as hvd, torch
hvd.init()
print("sum", hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), flush=True)
"""
SPAWNS = """
import multiprocessing
import horovod.torch.mpi_ops as ops

def child():
    print("in a child", ops.Sum, flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
"""


def test_every_module_that_a_name_comes_from_exists() -> None:
    sources = {source for alias in HOROVOD_MODULES.values() for source in alias.sources}
    files = {source: REPOSITORY / "tutti" / "horovod" / source.replace(".", "/") for source in sources}
    assert [
        source
        for source, path in files.items()
        if not (path.with_name(f"{path.name}.py").is_file() or (path / "__init__.py").is_file())
    ] == []


def python(*words: str, cwd: Path, path: Path) -> Finished:
    return command(sys.executable, *words, cwd=cwd, PYTHONPATH=str(path))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a program sees that has the alias on its path."""
    done = python("-W", "error", "-c", SAME, cwd=tmp_path_factory.mktemp("alias"), path=SITE_FOLDER)
    assert done.code == 0, done.all
    return json.loads(done.out)


@pytest.mark.system
def test_names_are_the_same_objects(found: dict[str, Any]) -> None:
    assert found["names"] == []
    assert found["missing"] == []
    assert found["star"] and found["one"] and found["engine"] and found["pickled"]
    assert found["submodules"][0] == "horovod.torch.mpi_ops"
    assert Path(found["source"]) == REPOSITORY / "tutti/horovod/torch/optimizer.py"
    assert not found["unknown"]


@pytest.mark.system
def test_the_package_itself_is_light(found: dict[str, Any]) -> None:
    assert found["version"] == "0.28.1" and found["numbers"] == [0, 28, 1]
    assert found["metadata"] == ["0.28.1", "The API of Horovod, provided by tutti."] and found["files"] is None
    assert found["light"]
    assert found["run"] == "tutti.horovod.run.call"


@pytest.mark.system
def test_small_questions_are_answered(found: dict[str, Any]) -> None:
    assert found["util"] == [True, False, [[1, 2, 3], [4, 5]]]
    assert found["versions"] == [True, True, False]
    assert (found["who"], found["heard"]) == ([0, 1], [1])
    assert found["cached"] == [True, False] and found["built"] == [True, False, False, False] and found["nccl"]
    assert found["environment"] == [["within", "set", None], ["before", None, None]]


@pytest.mark.system
def test_a_framework_that_is_missing_is_named_with_its_install_line(found: dict[str, Any]) -> None:
    assert set(found["refused"]) == {"horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras"}
    assert all("pip install 'tutti-train[" in text for text in found["refused"].values())


@pytest.mark.ranks
def test_tutti_run_offers_the_name(tutti: Tutti, tmp_path: Path) -> None:
    asks = "import importlib.metadata\nassert importlib.metadata.version('horovod') == '0.28.1'\n"
    (tmp_path / "script.py").write_text(asks + USES_IT)
    (tmp_path / "horovod").mkdir()  # a folder that is no package does not stand in the way
    done = tutti("run", "-n", "2", "script.py")
    assert done.code == 0, done.all
    assert "sum 2.0" in done.out
    assert "import horovod" not in done.err


@pytest.mark.system
def test_processes_that_a_script_spawns_find_the_name(tutti: Tutti, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SPAWNS)
    done = tutti("run", str(tmp_path / "script.py"))
    assert (done.code, done.out) == (0, "in a child 1\n"), done.all


@pytest.mark.system
def test_tutti_run_does_not_replace_a_real_horovod(tutti: Tutti, tmp_path: Path) -> None:
    (tmp_path / "site" / "horovod").mkdir(parents=True)
    (tmp_path / "site" / "horovod" / "__init__.py").write_text("whose = 'the real one'\n")
    (tmp_path / "script.py").write_text("import horovod; print(horovod.whose)\n")
    found = tutti("run", "script.py", PYTHONPATH=str(tmp_path / "site"))
    assert (found.code, found.out) == (0, "the real one\n"), found.all
    assert "import horovod: found in " in found.err
    metadata = "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n"
    (tmp_path / "site" / "horovod-0.28.1.dist-info").mkdir()
    (tmp_path / "site" / "horovod-0.28.1.dist-info" / "METADATA").write_text(metadata)
    installed = tutti("run", "script.py", PYTHONPATH=str(tmp_path / "site"))
    assert (installed.code, installed.out) == (0, "the real one\n"), installed.all
    assert installed.err == "import horovod: Horovod 0.28.1 is installed, which tutti does not replace\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the distribution tutti-horovod has been built and installed."""
    folder = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", folder, REPOSITORY / "compat" / "horovod"], check=True)
    return folder


@pytest.mark.system
def test_the_distribution_provides_package_and_command(site: Path, tmp_path: Path) -> None:
    done = python("-W", "error", "-c", SAME, cwd=tmp_path, path=site)
    assert done.code == 0, done.all
    found = json.loads(done.out)
    assert found["names"] == found["missing"] == []
    assert found["light"] and found["engine"] and found["run"] == "tutti.horovod.run.call"
    version = python("-m", "horovod.runner.launch", "--version", cwd=tmp_path, path=site)
    assert version.out.strip() == f"{found['version']}+tutti"
    script = python(str(site / "bin" / "horovodrun"), "--version", cwd=tmp_path, path=site)
    assert script.out.strip() == version.out.strip()
    assert [path.name for path in (site / "horovod").glob("*.py")] == ["__init__.py"]


@pytest.mark.system
def test_tutti_run_uses_the_distribution_in_silence(site: Path, tutti: Tutti, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import horovod; print(horovod.__file__)\n")
    done = tutti("run", "script.py", PYTHONPATH=str(site))
    assert (done.code, done.err) == (0, ""), done.all
    assert done.out.strip() == str(site / "horovod" / "__init__.py")


@pytest.mark.system
def test_the_distribution_refuses_to_stand_beside_a_real_horovod(site: Path, tmp_path: Path) -> None:
    (tmp_path / "horovod-0.28.1.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n"
    (tmp_path / "horovod-0.28.1.dist-info" / "METADATA").write_text(metadata)
    done = python("-c", "import horovod.torch", cwd=tmp_path, path=site)
    assert done.code == 1
    assert "ImportError: horovod 0.28.1 and tutti-horovod are both installed" in done.err
    assert "pip uninstall horovod" in done.err
