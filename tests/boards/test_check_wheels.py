from __future__ import annotations

import pytest
from boards.check_wheels import Outcome, modules

ARM = "cpython-313-aarch64-linux-gnu"


@pytest.mark.parametrize(
    ("names", "packages", "extensions"),
    [
        (["six.py", "six-1.17.0.dist-info/RECORD"], ["six"], []),
        (
            ["grpc/__init__.py", f"grpc/_cython/cygrpc.{ARM}.so", "grpc/beta/__init__.py"],
            ["grpc"],
            ["grpc._cython.cygrpc"],
        ),
        (
            ["google/protobuf/__init__.py", "google/_upb/_message.abi3.so"],
            ["google.protobuf"],
            ["google._upb._message"],
        ),
        (["torch/__init__.py", "torch/lib/libtorch.so", f"torch/_C.{ARM}.so"], ["torch"], ["torch._C"]),
        (["psutil/__init__.py", "psutil/_psutil_linux.abi3.so"], ["psutil"], ["psutil._psutil_linux"]),
        (["tests/__init__.py", "x/__init__.py", "x-1.data/scripts/x"], ["x"], []),
    ],
)
def test_packages_and_extensions_of_a_wheel_are_found(
    names: list[str], packages: list[str], extensions: list[str]
) -> None:
    assert modules(names) == (packages, extensions)


def test_an_illegal_instruction_is_called_by_its_name() -> None:
    told = Outcome(wheel="torch", cpu="cortex-a53", code=-4, seconds=1.0, words="")
    assert told.verdict == "illegal instruction"
