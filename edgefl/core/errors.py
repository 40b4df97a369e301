"""Error classes of edgefl; each carries the exit code of the command that ends with it.

EdgeflError                  1   anything below, or nothing more exact
├── UsageError               2   wrong arguments (click's own code for the same)
├── ConfigError              3   a run file, settings file or option that makes no sense
├── DataError                4   a shard or data set that is damaged, foreign or missing
├── TaskError                5   an unknown task, or one that cannot run here (torch missing)
├── StrategyError            6   an unknown strategy, or one that broke its contract
│   ├── PrivacyBudgetError   9   a version that the privacy budget has no room for
│   └── SecureAggregationError 16 a message or sum that breaks the protocol of secure aggregation
├── CodecError               7   a body that cannot be decoded, or an unknown codec
├── MissingPackageError      8   a package of an extra that is not installed
├── StoreError               10  the database or a model file cannot be used
│   ├── StoreFullError       11  no room on the disk
│   ├── StoreTooNewError     12  a database, journal or checkpoint that a newer edgefl wrote
│   ├── StoreBusyError       14  in use by another program
│   └── LeaseLostError       17  another host has taken over the fleet
├── JournalError             13  a damaged journal or checkpoint
│   └── NotKeptError         15  what a strategy gives can be in none, or is there no longer
├── NetworkError             20  a peer cannot be reached or answers nonsense
│   ├── PortInUseError       21  the address is taken
│   ├── BrokerError          22  no usable MQTT broker
│   ├── TooManyTriesError    23  refused for a while, after too many wrong tries
│   └── SplitSessionError    24  the coordinator has lost its part of an assignment of a split network
├── JoinError                30  the coordinator refused the join
│   ├── TokenInvalidError    31  no such token
│   ├── TokenExpiredError    32  the token's lifetime is over
│   ├── TokenUsedError       33  the token has no uses left
│   ├── WrongCaError         34  the coordinator's CA is not the one the token names
│   └── NameTakenError       35  another device has this name
├── NotJoinedError           36  this state directory belongs to no fleet yet
├── NotAllowedError          37  the access token is missing or wrong
│   └── RoleError            42  the access token counts, for a role that may not do this
├── VersionError             38  the other side speaks another version
├── ClonedError              39  another agent works under this device's identity: this one is the copy
├── NotFoundError            40  no such run, device or model
├── RunFailedError           41  the run ended without reaching its goal
├── UnsoundError             50  `edgefl doctor` or `flower check` found a problem, `edgefl audit` a broken promise
├── BundleError              51  a release or task pack that is damaged, not trusted, or not for this board
└── DriftError               52  `edgefl data drift` found a column above its threshold
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from edgefl import DISTRIBUTION


class EdgeflError(Exception):
    """An error that a user can fix; its text says what, the value found and what would be right."""

    exit_code: ClassVar[int] = 1


class UsageError(EdgeflError):
    exit_code = 2


class ConfigError(EdgeflError):
    """Settings that make no sense; `faults` are the messages of several, each beginning with its setting."""

    exit_code = 3

    def __init__(self, message: str, faults: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults) or (message,)


class DataError(EdgeflError):
    exit_code = 4


class TaskError(EdgeflError):
    exit_code = 5


class StrategyError(EdgeflError):
    exit_code = 6


class PrivacyBudgetError(StrategyError):
    """A version cannot be released within the privacy budget; the run's record says so from then on, and it ends."""

    exit_code = 9


class SecureAggregationError(StrategyError):
    """A message or sum breaks the protocol of secure aggregation, or asks for what a board never gives."""

    exit_code = 16


class CodecError(EdgeflError):
    exit_code = 7


class MissingPackageError(EdgeflError):
    exit_code = 8


class StoreError(EdgeflError):
    exit_code = 10


class StoreFullError(StoreError):
    exit_code = 11


class StoreTooNewError(StoreError):
    """A whole file of a format newer than this program knows; it must not be changed."""

    exit_code = 12


class StoreBusyError(StoreError):
    exit_code = 14


class LeaseLostError(StoreError):
    """Another host is the fleet's active coordinator; what this one would write is refused."""

    exit_code = 17


class JournalError(EdgeflError):
    exit_code = 13


class NotKeptError(JournalError):
    """A value that the journal cannot store, or no longer has; journal and disk are intact."""

    exit_code = 15


class NetworkError(EdgeflError):
    exit_code = 20


class PortInUseError(NetworkError):
    exit_code = 21


class BrokerError(NetworkError):
    exit_code = 22


class TooManyTriesError(NetworkError):
    exit_code = 23


class SplitSessionError(NetworkError):
    """Lost training of the rest of a split network; the assignment begins again."""

    exit_code = 24


class JoinError(EdgeflError):
    exit_code = 30


class TokenInvalidError(JoinError):
    exit_code = 31


class TokenExpiredError(JoinError):
    exit_code = 32


class TokenUsedError(JoinError):
    exit_code = 33


class WrongCaError(JoinError):
    exit_code = 34


class NameTakenError(JoinError):
    exit_code = 35


class NotJoinedError(EdgeflError):
    exit_code = 36


class NotAllowedError(EdgeflError):
    exit_code = 37


class RoleError(NotAllowedError):
    exit_code = 42


class VersionError(EdgeflError):
    exit_code = 38


class ClonedError(EdgeflError):
    exit_code = 39


class NotFoundError(EdgeflError):
    exit_code = 40


class RunFailedError(EdgeflError):
    exit_code = 41


class UnsoundError(EdgeflError):
    exit_code = 50


class BundleError(EdgeflError):
    exit_code = 51


class DriftError(EdgeflError):
    exit_code = 52


EXTRAS = {
    "alembic": "coordinator", "authlib": "coordinator", "fastapi": "coordinator", "joserfc": "coordinator",
    "pathspec": "coordinator", "prometheus_client": "coordinator", "segno": "coordinator",
    "sqlalchemy": "coordinator", "starlette": "coordinator", "textual": "coordinator", "tomli_w": "coordinator",
    "uvicorn": "coordinator", "yaml": "coordinator",
    "matplotlib": "plots", "onnx": "export", "onnxscript": "export", "psycopg": "postgres", "sklearn": "demo",
    "PIL": "pictures", "cv2": "camera", "gpiod": "gpio", "mlflow": "track", "pyarrow": "parquet",
    "tensorboard": "track", "torch": "train", "apprise": "alerts", "pandas": "tables", "polars": "tables",
    "torchvision": "torchvision", "timm": "timm", "ray": "ray", "optuna": "optuna",
    "botocore": "s3", "fsspec": "s3", "opentelemetry": "track", "s3fs": "s3", "dp_accounting": "privacy",
}  # fmt: skip
"""Extra of the distribution by module; modules that every device needs are absent."""


def format_install_command(module: str) -> str:
    """Returns the command that installs the extra that `module` belongs to."""
    return f"pip install '{DISTRIBUTION}[{EXTRAS[module]}]' -c constraints.txt"


RETRYABLE_STORE_ERRORS = (StoreFullError, StoreBusyError)
"""Transient errors: the disk gets room again, another program releases a lock. A damaged store is not."""
