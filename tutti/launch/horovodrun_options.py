"""What the flags of `horovodrun` come to: a job of a fixed number of ranks, or one that may grow and shrink."""

from dataclasses import dataclass, field

from tutti.launch.hosts import Host, Slot

HOROVOD_VERSION = "0.28.1+tutti"  # the API that is offered, and who offers it


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """How ranks are started, and where their output goes."""

    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    network_interfaces: tuple[str, ...] = ()
    output_filename: str | None = None
    prefix_timestamp: bool = False
    verbose: bool = False
    environment: dict[str, str] = field(default_factory=dict)  # of every rank: this process's and the settings flags'


@dataclass(frozen=True, kw_only=True)
class StaticOptions(StartOptions):
    """Which ranks there are."""

    slots: tuple[Slot, ...]


@dataclass(frozen=True, kw_only=True)
class ElasticOptions(StartOptions):
    """How many ranks there may be, and where they may run."""

    np: int  # ranks to start with
    min_np: int  # with fewer slots, the job waits
    max_np: int | None = None  # None: as many as there are slots
    host_discovery_script: str | None = None  # None: the hosts below, for ever
    slots_per_host: int | None = None  # for the hosts that the script names without slots
    elastic_timeout: float = 600.0  # seconds to wait for min_np slots
    reset_limit: int | None = None
    cooldown_range: tuple[float, float] | None = None  # seconds; None: a host that failed is out for good
    start_timeout: float | None = None  # seconds
    hosts: tuple[Host, ...] = ()
