"""Confinement of this process for good, before it runs code of others: files, system calls, resources.

Landlock (Linux 5.13 and newer) leaves the named files, and no network and no other process. A kernel without it, as
that of Raspberry Pi OS, gets user and mount namespaces in which the secret folder is empty. A seccomp filter leaves
the system calls of computing: no socket, no new process or program, no signal to others, no tracing. Neither needs a
privilege, and neither can be taken back. What the kernel lacks, `find_gaps` says.

Man pages landlock(7), seccomp(2), user_namespaces(7); libseccomp makes the filter for this processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import MappingProxyType

from edgefl.core.errors import NotAllowedError
from edgefl.core.extensions import ALLOW_VARIABLE, list_allowed_modules

_LIBC = ctypes.CDLL(None, use_errno=True)
_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446
"""Numbers of the Landlock calls, the same on every processor."""
_CREATE_RULESET_VERSION, _RULE_PATH_BENEATH = 1, 1
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG = 1 << 4, 1 << 5, 1 << 7, 1 << 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_NUM_FILE_RIGHTS = MappingProxyType({1: 13, 2: 14, 3: 15, 4: 15, 5: 16})
"""Version of Landlock: how many of the rights on files it knows."""
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_READ = _READ_FILE | _READ_DIR
_WRITE = _READ | _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _REFER | _TRUNCATE
_DEVICE = _READ_FILE | _WRITE_FILE | _IOCTL_DEV
_NETWORK, _SCOPES = 0b11, 0b11
"""Binding and connecting TCP; abstract Unix sockets and signals."""

SYSTEM_PATHS = (
    "/usr", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache", "/etc/localtime", "/etc/os-release",
    "/etc/nv_tegra_release", "/sys", "/proc/self", "/proc/meminfo", "/proc/cpuinfo", "/proc/stat", "/proc/loadavg",
    "/proc/device-tree", "/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/osrelease", "/proc/driver/nvidia",
    "/dev/urandom",
)  # fmt: skip
GPU_DEVICES = "nvidia*", "nvhost*", "nvmap", "nvgpu*", "nvsciipc", "dri"

ALLOWED_CALLS = """
read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek open openat openat2 close close_range
creat stat fstat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat getdents getdents64 getcwd
chdir fchdir mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 ftruncate fallocate fsync fdatasync
sync_file_range fadvise64 flock dup dup2 dup3 pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1
epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 timerfd_create timerfd_settime timerfd_gettime
sendfile copy_file_range splice tee memfd_create ioctl statfs fstatfs umask
mmap munmap mprotect mremap madvise msync mincore brk mlock mlock2 munlock mbind get_mempolicy set_mempolicy
pkey_alloc pkey_free pkey_mprotect membarrier
futex futex_waitv get_robust_list set_robust_list set_tid_address rseq sched_yield sched_getaffinity sched_getparam
sched_getscheduler sched_get_priority_max sched_get_priority_min getpriority getcpu arch_prctl restart_syscall
rt_sigaction rt_sigprocmask rt_sigpending rt_sigtimedwait rt_sigsuspend rt_sigreturn sigaltstack alarm setitimer
getitimer pause timer_create timer_settime timer_gettime timer_getoverrun timer_delete
clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time times
getpid getppid gettid getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid getsid
uname sysinfo getrusage getrlimit getrandom exit exit_group
"""
"""What computing needs; a call that this processor or library does not know is left out."""
CONNECTION_CALLS = """
accept accept4 recvfrom recvmsg sendto sendmsg getsockname getpeername getsockopt setsockopt shutdown
"""
IGNORED_CALLS = "chmod fchmod fchmodat fchmodat2"
"""What succeeds and does nothing: Landlock does not keep it from other files, and `shutil.copy` needs it."""
KEPT_VARIABLES = frozenset({"LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "LD_PRELOAD", ALLOW_VARIABLE})
KEPT_PREFIXES = ("OMP_", "OPENBLAS_", "MKL_", "CUDA_", "NVIDIA_", "PYTORCH_")
_ALLOWED_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1032, 1033, 1034)
"""Not F_SETOWN, F_SETOWN_EX and F_SETSIG: with them a pipe sends signals to another process."""
_CLONE_THREAD = 0x10000
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_EPERM, _ENOSYS = 1, 38
_ALLOW, _FAIL, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
"""`_FAIL` with the number of an error, or with none: nothing is done, and the call succeeds."""
_NOT_EQUAL, _EQUAL, _MASKED_EQUAL = 1, 4, 7
_FILTER_BAD_ARCHITECTURE = 2

NO_FILE_RULES = (
    "its kernel has neither Landlock nor user namespaces for everybody: others' code can read what the agent's user "
    "can, the key included"
)
NO_FILTER = "it has no libseccomp.so.2: others' code may make every system call"
MAX_FILE_BYTES = 4 * 1024**3
MAX_OPEN_FILES = 1024
MAX_THREADS = 512
"""More than the user has at the start."""
OOM_SCORE = 1000
"""Where memory runs out, the kernel ends this process first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """What a confined process may use.

    Attributes:
        secret: a folder that stays closed but for what lies in `readable` and `writable`, whatever holds it.
        readable: files and folders to read, beside the system's; those that do not exist are left out.
        writable: folders to write in.
        memory_bytes: of its own data; None for no limit.
        has_gpu: may use the devices of a GPU.
        has_connections: may accept connections at a socket that it has, and answer them; it opens none.
    """

    secret: str
    readable: Sequence[str] = ()
    writable: Sequence[str] = ()
    memory_bytes: int | None = None
    has_gpu: bool = False
    has_connections: bool = False


def get_landlock_version() -> int:
    """Returns the version of the kernel's Landlock, 0 without it."""
    return max(0, int(_LIBC.syscall(_SYS_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_RULESET_VERSION)))


def make_command(module: str, confinement: Confinement | None) -> list[str]:
    """Returns the command of `python -m MODULE`, confined before the module is imported."""
    if confinement is None:
        return [sys.executable, "-P", "-m", module]
    return [sys.executable, "-P", "-m", __spec__.name, json.dumps(asdict(confinement)), module]


def make_environment(confinement: Confinement | None) -> dict[str, str]:
    """Returns the environment of a process: all of this one's, or what a confined one needs, without any secret."""
    if confinement is None:
        return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    scratch = next(iter(confinement.writable), "/nonexistent")
    return {
        **{name: os.environ[name] for name in os.environ if name in KEPT_VARIABLES or name.startswith(KEPT_PREFIXES)},
        "HOME": scratch,
        "TMPDIR": scratch,
        "LOGNAME": "confined",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(list_import_paths()),
    }


def list_import_paths() -> list[str]:
    """Returns the folders of `sys.path` that hold installed packages, edgefl, or modules that may be named."""
    points = (
        point for group in entry_points().groups if group.startswith("edgefl.") for point in entry_points(group=group)
    )
    modules = {
        name.partition(":")[0].partition(".")[0]
        for name in ("edgefl", *list_allowed_modules(), *(point.value for point in points))
    }
    prefixes = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}

    def is_needed(folder: Path) -> bool:
        return not prefixes.isdisjoint(folder.resolve().parents) or any(
            (folder / name).exists() or (folder / f"{name}.py").exists() for name in modules
        )

    return [entry for entry in sys.path if entry and is_needed(Path(entry))]


def find_gaps() -> list[str]:
    """Returns what keeps this machine from a complete confinement, one reason each."""
    gaps = []
    if not get_landlock_version():
        program = shutil.which("unshare")
        can_hide = (
            program is not None
            and not subprocess.run(
                [program, "--user", "--mount", "true"], capture_output=True, check=False
            ).returncode
        )
        gaps += [] if can_hide else [NO_FILE_RULES]
    return [*gaps, *([] if _load_seccomp() else [NO_FILTER])]


def confine(confinement: Confinement) -> list[str]:
    """Confines this process, which must have a single thread; there is no way back.

    Returns:
        What this machine lacks for it, as `find_gaps`.

    Raises:
        NotAllowedError: the kernel refused a part of it that it offers, or there are other threads.
    """
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise NotAllowedError("this process cannot be confined: it has several threads")
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    _limit_resources(confinement.memory_bytes)
    _check(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    gaps, version = [], get_landlock_version()
    if version:
        _restrict_files(confinement, version)
    elif _make_namespaces():
        _hide_folder(confinement)
    else:
        gaps.append(NO_FILE_RULES)
    library = _load_seccomp()
    if library is None:
        return [*gaps, NO_FILTER]
    _filter_calls(library, ALLOWED_CALLS + CONNECTION_CALLS if confinement.has_connections else ALLOWED_CALLS)
    return gaps


def _limit_resources(memory_bytes: int | None) -> None:
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_NPROC: _count_threads_of_user() + MAX_THREADS,
        **({resource.RLIMIT_DATA: memory_bytes} if memory_bytes is not None else {}),
    }
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (value, value))


def _count_threads_of_user() -> int:
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                count += len(list((folder / "task").iterdir()))
    return count


def _restrict_files(confinement: Confinement, version: int) -> None:
    known = (1 << _NUM_FILE_RIGHTS.get(version, 16)) - 1
    attributes = struct.pack("QQQ", known, _NETWORK if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _LIBC.syscall(_SYS_CREATE_RULESET, attributes, ctypes.c_size_t(size), 0)
    _check(ruleset, "Landlock")
    try:
        for path, rights in _list_rights(confinement):
            _add_rule(ruleset, path, rights & known)
        _check(_LIBC.syscall(_SYS_RESTRICT_SELF, ruleset, 0), "Landlock")
    finally:
        os.close(ruleset)


def _list_rights(confinement: Confinement) -> Iterator[tuple[Path, int]]:
    secret = Path(confinement.secret).resolve()
    for name in (*SYSTEM_PATHS, sys.prefix, sys.base_prefix, *list_import_paths(), *confinement.readable):
        path = Path(name).resolve()
        yield from _open_around(path, secret) if path in (secret, *secret.parents) else [(path, _READ)]
    yield from ((Path(name).resolve(), _WRITE) for name in confinement.writable)
    yield Path("/dev/null"), _DEVICE
    if confinement.has_gpu:
        for pattern in GPU_DEVICES:
            yield from ((path, _DEVICE | _READ_DIR) for path in Path("/dev").glob(pattern))


def _open_around(folder: Path, secret: Path) -> Iterator[tuple[Path, int]]:
    """Yields the rights to read a folder but for the secret one in it; names are listed there, too."""
    while folder != secret:
        yield folder, _READ_DIR
        inner = folder / secret.relative_to(folder).parts[0]
        yield from ((path, _READ) for path in folder.iterdir() if path != inner and not path.is_symlink())
        folder = inner


def _add_rule(ruleset: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        allowed = rights if path.is_dir() else rights & _ON_FILES
        rule = struct.pack("=Qi", allowed, descriptor)
        _check(_LIBC.syscall(_SYS_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0), f"Landlock for {path}")
    finally:
        os.close(descriptor)


def _make_namespaces() -> bool:
    user, group = os.geteuid(), os.getegid()
    if _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNS) < 0:
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def _hide_folder(confinement: Confinement) -> None:
    """Mounts an empty folder over the secret one, and into it what may be used; in namespaces of this process."""
    secret = Path(confinement.secret).resolve()
    opened = {
        path: os.open(path, os.O_PATH | os.O_CLOEXEC)
        for name in (sys.prefix, *list_import_paths(), *confinement.readable, *confinement.writable)
        if (path := Path(name).resolve()).exists() and secret in path.parents
    }
    _mount(b"none", Path("/"), None, _MS_REC | _MS_PRIVATE)
    _mount(b"tmpfs", secret, b"tmpfs", 0, b"size=1m,mode=700")
    for path, descriptor in opened.items():
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        _mount(f"/proc/self/fd/{descriptor}".encode(), path, None, _MS_BIND | _MS_REC)
        os.close(descriptor)


def _mount(source: bytes, target: Path, kind: bytes | None, flags: int, options: bytes | None = None) -> None:
    _check(_LIBC.mount(source, str(target).encode(), kind, ctypes.c_ulong(flags), options), f"a mount at {target}")


class _Comparison(ctypes.Structure):
    _fields_ = (
        ("argument", ctypes.c_uint), ("operator", ctypes.c_int), ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )  # fmt: skip


def _load_seccomp() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError:
        return None
    library.seccomp_init.restype = ctypes.c_void_p
    library.seccomp_init.argtypes = [ctypes.c_uint32]
    library.seccomp_attr_set.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
    library.seccomp_rule_add_array.argtypes = [
        ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(_Comparison),
    ]  # fmt: skip
    library.seccomp_load.argtypes = [ctypes.c_void_p]
    library.seccomp_release.argtypes = [ctypes.c_void_p]
    return library


def _filter_calls(library: ctypes.CDLL, names: str) -> None:
    context = library.seccomp_init(_FAIL | _EPERM)
    library.seccomp_attr_set(context, _FILTER_BAD_ARCHITECTURE, _KILL_PROCESS)

    def add(name: str, *comparisons: tuple[int, ...], action: int = _ALLOW) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number < 0:  # unknown to this library, or of other processors
            return
        rules = (_Comparison * len(comparisons))(*(_Comparison(*values) for values in comparisons))
        _check(library.seccomp_rule_add_array(context, action, number, len(comparisons), rules), name)

    for name in names.split():
        add(name)
    for name in IGNORED_CALLS.split():
        add(name, action=_FAIL)
    add("clone", (0, _MASKED_EQUAL, _CLONE_THREAD, _CLONE_THREAD))
    add("clone3", action=_FAIL | _ENOSYS)  # its flags lie in memory, which a filter cannot read; glibc takes clone
    for name in ("kill", "tgkill"):
        add(name, (0, _EQUAL, os.getpid()))
    for command in _ALLOWED_FCNTL:
        add("fcntl", (1, _EQUAL, command))
    add("prctl", (0, _NOT_EQUAL, _PR_SET_PDEATHSIG))
    add("prlimit64", (2, _EQUAL, 0))
    add("setpriority", (0, _EQUAL, 0), (1, _EQUAL, 0))
    _check(library.seccomp_load(context), "seccomp")
    library.seccomp_release(context)


def _check(result: int, what: str) -> None:
    if result < 0:
        raise NotAllowedError(
            f"this process cannot be confined: {what}: {os.strerror(ctypes.get_errno() or -result)}"
        )


if __name__ == "__main__":
    import runpy

    confine(Confinement(**json.loads(sys.argv[1])))
    _module = sys.argv[2]
    del sys.argv[1:]
    runpy.run_module(_module, run_name="__main__", alter_sys=True)
