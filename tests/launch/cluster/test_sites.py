"""Sites: found by name, beside the recipe or by path; laid over each other; wrong keys named."""

from pathlib import Path

import pytest

from tutti.errors import ConfigError
from tutti.launch.cluster.resources import load_site, site_names


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of the user's own sites."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    folder = tmp_path / "config" / "tutti" / "sites"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.usefixtures("own")
def test_the_built_in_sites_say_what_they_are() -> None:
    names = site_names()
    assert names == [
        "cobalt",
        "cori",
        "pbs",
        "perlmutter",
        "perlmutter-shifter",
        "polaris",
        "slurm",
        "theta",
        "thetagpu",
    ]
    assert all(load_site(name).about and load_site(name).name == name for name in names)


def test_a_users_own_site_extends_another(own: Path) -> None:
    (own / "mine.yaml").write_text("extends: polaris\naccount: climate\nenvironment: {NCCL_DEBUG: WARN}\n")
    site = load_site("mine")
    assert (site.name, site.account, site.launcher, site.gpus_per_node) == ("mine", "climate", "pals", 4)
    assert site.environment == {"NCCL_DEBUG": "WARN"}


def test_numbers_in_the_environment_are_text_and_true_is_refused(own: Path) -> None:
    (own / "mine.yaml").write_text("extends: slurm\nenvironment: {KMP_BLOCKTIME: 0, SCALE: 1.5, NAME: a b}\n")
    assert load_site("mine").environment == {"KMP_BLOCKTIME": "0", "SCALE": "1.5", "NAME": "a b"}
    (own / "mine.yaml").write_text("extends: slurm\nenvironment: {DEBUG: on}\n")
    with pytest.raises(ConfigError, match=r"environment.DEBUG=True: expected a number or text"):
        load_site("mine")


def test_a_users_own_site_may_have_the_name_of_ours(own: Path) -> None:
    (own / "perlmutter.yaml").write_text("extends: perlmutter\naccount: m1\ndirectives: {account: '-A {}'}\n")
    site = load_site("perlmutter")
    assert (site.account, site.constraint) == ("m1", "gpu")
    assert site.directives == {"queue": "--qos={}", "account": "-A {}"}


def test_a_site_beside_the_recipe_wins(own: Path, tmp_path: Path) -> None:
    (own / "here.yaml").write_text("extends: slurm\nqueue: far\n")
    (tmp_path / "here.yaml").write_text("extends: slurm\nqueue: near\n")
    assert load_site("here", tmp_path).queue == "near"
    assert load_site("here").queue == "far"
    assert load_site(str(tmp_path / "here.yaml")).queue == "near"


@pytest.mark.usefixtures("own")
def test_a_recipe_of_a_sites_name_is_no_site(tmp_path: Path) -> None:
    (tmp_path / "slurm.yaml").write_text("extends: digits\nmodel: {name: mlp}\n")
    assert load_site("slurm", tmp_path).launcher == "srun"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "extends: slurm\nqeue: debug\n",
            r"unknown key 'qeue': expected one of about, scheduler.* Did you mean 'queue'",
        ),
        ("queue: debug\n", r"scheduler is missing. Set it, or begin with `extends: slurm`"),
        ("extends: slurm\ngpus_per_node: four\n", r"gpus_per_node='four': input should be a valid integer"),
        ("extends: slurm\nlauncher: mpirun\n", r"launcher='mpirun': input should be 'srun', 'mpich'"),
        ("extends: slrm\n", r"unknown site 'slrm': expected one of .*Did you mean 'slurm'"),
        ("extends: [slurm]\n", r"extends=\['slurm'\]: expected the name of a site"),
        ("- slurm\n", r"expected a mapping of keys"),
        ("extends: own\n", r"unknown site 'own'"),
        ("queue: [\n", r"own.yaml, line 2: not valid YAML"),
    ],
)
def test_a_wrong_site_is_named_with_its_fix(own: Path, text: str, message: str) -> None:
    (own / "own.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_site("own")


def test_an_unknown_site_offers_those_there_are(own: Path) -> None:
    (own / "frontier.yaml").write_text("extends: slurm\n")
    with pytest.raises(ConfigError, match=r"'fronteer': expected one of frontier, cobalt, .*Did you mean 'frontier'"):
        load_site("fronteer")
    with pytest.raises(ConfigError, match=r"site 'nowhere.yaml': no such file"):
        load_site("nowhere.yaml")
