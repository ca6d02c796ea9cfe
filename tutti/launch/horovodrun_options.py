"""What the flags of `horovodrun` come to: a job of a fixed number of ranks, or one that may grow and shrink."""

from dataclasses import dataclass, field

from tutti.launch.hosts import Host, Slot

HOROVOD_VERSION = "0.28.1+tutti"  # the API that is offered, and who offers it


@dataclass(frozen=True)
class StaticOptions:
    """Which ranks there are, and how they are started."""

    slots: tuple[Slot, ...]
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    network_interfaces: tuple[str, ...] = ()
    output_filename: str | None = None
    prefix_timestamp: bool = False
    verbose: bool = False
    environment: dict[str, str] = field(default_factory=dict)  # of every rank: this process's and the settings flags'


@dataclass(frozen=True)
class ElasticOptions:
    """How many ranks there may be, where they may run, and how they are started."""

    np: int  # ranks to start with
    min_np: int  # with fewer slots, the job waits
    max_np: int | None = None  # None: as many as there are slots
    host_discovery_script: str | None = None  # None: the hosts below, for ever
    slots_per_host: int | None = None  # for the hosts that the script names without slots
    elastic_timeout: float = 600.0  # seconds to wait for min_np slots
    reset_limit: int | None = None
    cooldown_range: tuple[float, float] | None = None  # seconds; None: a host that failed is out for good
    start_timeout: float | None = None  # seconds
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    network_interfaces: tuple[str, ...] = ()
    output_filename: str | None = None
    prefix_timestamp: bool = False
    verbose: bool = False
    environment: dict[str, str] = field(default_factory=dict)  # of every rank: this process's and the settings flags'
    hosts: tuple[Host, ...] = ()
