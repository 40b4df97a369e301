"""A graph in onnxruntime, bound to arrays that stay; the only file of this room that imports onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edgefl.core.errors import DataError, TaskError
from edgefl.core.types import Array
from edgefl.system.processes import drop_code_pages, map_large_blocks, reuse_large_blocks

CPU = "CPUExecutionProvider"
"""The provider that every build of onnxruntime has."""
MAX_ARENA_BYTES = 2 * 1024**3
"""Most memory of a graph's own tensors, unless the caller knows better."""
MEMORY_LIMITS = {"CUDAExecutionProvider": "gpu_mem_limit", "TensorrtExecutionProvider": "trt_max_workspace_size"}
"""Settings by which providers bound memory of their own, in bytes."""
_POWERS_OF_TWO = 0
"""How the arena grows beyond its first block."""
MIN_BLOCK_BYTES, MAX_BLOCK_BYTES, TIMES_ESTIMATE = 1 << 20, 256 << 20, 2
"""Of the arena's first block, which has so many times the estimate, since freed tensors leave gaps."""


class BoundGraph:
    """A session whose inputs and outputs are arrays that stay, so that nothing is copied.

    Attributes:
        outputs: arrays by name, which `run` fills.
    """

    def __init__(self, session: Any, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> None:
        self._session, self._inputs, self.outputs = session, inputs, outputs
        self._has_run = False
        self._binding = session.io_binding()
        for name in [entry.name for entry in session.get_inputs()]:
            _bind(self._binding.bind_input, name, inputs[name])
        for name, array in outputs.items():
            _bind(self._binding.bind_output, name, array)

    def run(self) -> Mapping[str, Array]:
        """Returns the filled `outputs`; raises `DataError` where the graph fails, or takes too much memory."""
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # noqa: BLE001 onnxruntime's errors have no class in common but this one
            if "Available memory" in str(error):
                raise DataError("the compiled task cannot be run: it takes more memory than it may have") from None
            raise DataError(f"the compiled task cannot be run: {str(error).splitlines()[0]:.300}") from None
        finally:
            if not self._has_run:
                self._has_run = True
                reuse_large_blocks()
                drop_code_pages("onnxruntime")  # half of them are for loading a graph
        return self.outputs


def _bind(bind: Callable[..., None], name: str, array: Array) -> None:
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)


class Arena:
    """Memory of the tensors that graphs compute, which sessions of one learner share: their graphs run in turn."""

    _registered: Arena | None = None

    def __init__(self, max_bytes: int, estimate_bytes: int = 0) -> None:
        """Stores how large it may be.

        Args:
            max_bytes: of all of them; a graph that needs more is refused when it is run.
            estimate_bytes: what they take by the file's own word.
        """
        self.max_bytes = max_bytes
        # Tensors share one block as they come and go. Of what is too large only a 32nd is written.
        block_bytes = max(MIN_BLOCK_BYTES, TIMES_ESTIMATE * estimate_bytes)
        self._block_bytes = min(block_bytes, MAX_BLOCK_BYTES, max_bytes)

    def register(self, onnxruntime: Any) -> None:
        """Makes it the one of later sessions: onnxruntime has one a process, the last that was registered."""
        if Arena._registered is self:
            return
        kinds = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
        config = onnxruntime.OrtArenaCfg({
            "max_mem": self.max_bytes,
            "arena_extend_strategy": _POWERS_OF_TWO,
            "initial_chunk_size_bytes": self._block_bytes,
        })  # fmt: skip
        onnxruntime.create_and_register_allocator(onnxruntime.OrtMemoryInfo("Cpu", kinds[0], 0, kinds[1]), config)
        Arena._registered = self


def list_providers() -> list[str]:
    """Returns the names of the execution providers of this machine's onnxruntime, which may not all work."""
    found: list[str] = _import_runtime().get_available_providers()
    return found


def get_runtime_version() -> str:
    """Returns the version of this machine's onnxruntime."""
    return str(_import_runtime().__version__)


def make_session(graph: bytes, threads: int | None, arena: Arena, provider: str = CPU) -> Any:
    """Returns a session of a checked graph, whose first run as a `BoundGraph` ends what is done once.

    Args:
        graph: an ONNX file.
        threads: of the runtime; None for as many as there are cores.
        arena: where its tensors are.
        provider: that runs the operators that it knows; the CPU's runs the others. One that has memory of its own
            may take as much as the arena.

    Raises:
        TaskError: onnxruntime is missing.
        DataError: it cannot load the graph, or has no such provider.
    """
    onnxruntime = _import_runtime()
    arena.register(onnxruntime)
    onnxruntime.disable_telemetry_events()  # what a board computes is nobody else's business
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads or 0, 1
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # A plan of all tensors' places takes a tenth more memory, and no step is faster by it.
    options.enable_mem_pattern = False
    # An arena of the process's own can be bounded: shapes that a graph computes are in no file that could be checked.
    options.add_session_config_entry("session.use_env_allocators", "1")
    limit = {MEMORY_LIMITS[provider]: str(arena.max_bytes)} if provider in MEMORY_LIMITS else {}
    providers: list[Any] = [(provider, limit), CPU] if limit else [*dict.fromkeys((provider, CPU))]
    map_large_blocks()
    try:
        # Constants are folded while the graph is loaded, in memory that no arena bounds.
        session = onnxruntime.InferenceSession(
            graph, options, providers=providers, disabled_optimizers=["ConstantFolding"]
        )
    except Exception as error:  # noqa: BLE001 onnxruntime's errors have no class in common but this one
        reuse_large_blocks()
        raise DataError(f"the compiled task cannot be loaded: {str(error).splitlines()[0]:.300}") from None
    if provider not in session.get_providers():  # it says so on a console at most, and takes another one
        reuse_large_blocks()
        raise DataError(f"the compiled task cannot be loaded: onnxruntime has no {provider} here")
    return session


def _import_runtime() -> Any:
    try:
        import onnxruntime  # noqa: PLC0415 its memory is only needed to train with it
    except ImportError:
        raise TaskError("onnxruntime is not installed; pip install onnxruntime") from None
    return onnxruntime
