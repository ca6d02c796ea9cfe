"""Nothing that arrives over a socket or a store is executed: what could do so is listed here, with the reason."""

import ast
from pathlib import Path

import tutti

ROOT = Path(tutti.__file__).parent
# Calls that can run code found in their input, by the last words of their names.
DANGEROUS = (
    "eval", "exec", "pickle.loads", "pickle.load", "Unpickler", "cloudpickle.loads", "dill.loads", "marshal.loads",
    "shelve.open", "yaml.load", "torch.load", "all_gather_object", "broadcast_object_list", "gather_object",
    "scatter_object_list", "send_object_list", "recv_object_list", "rpc_sync", "rpc_async",
)  # fmt: skip
ALLOWED = {
    ("tutti.horovod.run.call", "pickle.loads"): "the function of horovod.run and its results, after Secret.verify",
    ("tutti.horovod.torch.functions", "pickle.loads"): "objects of a user's script, after Secret.verify",
}
FROM_FILES = {
    ("tutti.launch.function", "pickle.loads"): "the call and its results, in a folder that only this user can read",
}


def calls(path: Path) -> list[str]:
    """The dangerous calls of a module; `model.eval()` is none, nor is `torch.load` of tensors alone."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "torch.load" and "weights_only=True" in map(ast.unparse, node.keywords):
                continue
            if name in DANGEROUS or name.endswith(tuple(f".{each}" for each in DANGEROUS[2:])):
                found.append(name)
    return found


def test_nothing_from_a_socket_or_a_store_is_executed() -> None:
    found = {
        (".".join(path.relative_to(ROOT.parent).with_suffix("").parts), name)
        for path in ROOT.rglob("*.py")
        for name in calls(path)
    }
    known = {*ALLOWED, *FROM_FILES}
    assert found - known == set(), "calls that can execute their input: parse data, or list them with a reason"
    assert known - found == set(), "these are no longer there"


def test_what_is_allowed_verifies_first() -> None:
    for module, _ in ALLOWED:
        source = (ROOT.parent / f"{module.replace('.', '/')}.py").read_text()
        assert ".verify(" in source, module
    for module, _ in FROM_FILES:
        source = (ROOT.parent / f"{module.replace('.', '/')}.py").read_text()
        assert "TemporaryDirectory(" in source, module  # it makes folders of mode 700


def test_the_search_finds_what_it_looks_for(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    tensors = "torch.load(x, weights_only=True)\ntorch.load(x)\n"
    module.write_text(f"model.eval()\npickle.loads(x)\neval(x)\ndist.all_gather_object(a, b)\n{tensors}")
    assert calls(module) == ["pickle.loads", "eval", "dist.all_gather_object", "torch.load"]
