"""The walls around a program: namespaces where the kernel gives them, else Landlock and seccomp."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Sequence

from system import (
    LIBC,
    MS_BIND,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_RDONLY,
    MS_REC,
    MS_REMOUNT,
    PR_SET_SECCOMP,
    check,
    mount,
)

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 1 << 17, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30
SYS_MOUNT_SETATTR, SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446
SOCKETS = {"x86_64": (0xC000003E, (41, 425)), "aarch64": (0xC00000B7, (198, 425))}  # socket and io_uring_setup
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
LIBRARIES = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
)
USERS_FROM = 1_200_000_000  # user numbers that nobody has; each sandbox of a superuser takes one


def put_up_walls(root: str, visible: Sequence[str], disk_bytes: int) -> dict[str, str]:
    """Leaves for namespaces of its own, with a small file system in memory on ``root``.

    Args:
      root: an empty folder, which the init is to make its root.
      visible: folders of the machine that are shown there, read-only.
      disk_bytes: size of the file system.

    Returns:
      What cannot be had, and why; empty when all is well.
    """
    user, group, superuser = os.getuid(), os.getgid(), os.geteuid() == 0
    try:
        kinds = NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS
        if not superuser or LIBC.unshare(kinds):
            superuser = False
            check(LIBC.unshare(kinds | NEWUSER), "unshare")
            for name, text in (("setgroups", "deny"), ("uid_map", f"1000 {user} 1"), ("gid_map", f"1000 {group} 1")):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        mount(None, "/", None, MS_REC | MS_PRIVATE)
        mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk_bytes},nr_inodes=8192,mode=755")
        for path in (*LIBRARIES, *DEVICES, *visible):
            show(path, root)
        os.makedirs(f"{root}/tmp", exist_ok=True)
        os.chmod(f"{root}/tmp", 0o1777)
        return {}
    except OSError as error:
        return {"namespaces": f"{error.strerror or error} ({error.filename or 'setting up'})"}


def show(path: str, root: str) -> None:
    """Makes a file or folder of the machine visible under the new root, read-only."""
    if not os.path.exists(path) or os.path.lexists(root + path):
        return
    if os.path.islink(path):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(os.readlink(path), root + path)
        return
    if os.path.isdir(path):
        os.makedirs(root + path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        open(root + path, "x").close()
    mount(path, root + path, None, MS_BIND | MS_REC)
    if path in DEVICES:
        return
    readonly_nosuid = ctypes.create_string_buffer(struct.pack("QQQQ", 1 | 2, 0, 0, 0))
    recursive = 0x8000
    if LIBC.syscall(SYS_MOUNT_SETATTR, -100, (root + path).encode(), recursive, readonly_nosuid, 32):
        # An older kernel: the flags that lie on the mount already must be kept.
        flags = os.statvfs(root + path).f_flag & (MS_NOSUID | MS_NODEV | 8 | 1024 | 2048)
        mount(None, root + path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | flags)


def become_nobody() -> None:
    """Gives up the superuser's rights, for a user that owns nothing."""
    for number in (USERS_FROM + os.getppid() % 100_000_000, USERS_FROM + int.from_bytes(os.urandom(3), "big"), 65534):
        try:
            os.setgroups([])
            os.setresgid(number, number, number)
            os.setresuid(number, number, number)
            return
        except OSError as error:  # a container may know few numbers
            fault = error
    raise fault


def forbid_sockets() -> str:
    """No new socket for this process and its children; returns why not, if so."""
    kind, numbers = SOCKETS.get(platform.machine(), (0, ()))
    if not numbers:
        return f"no filter of system calls is known for {platform.machine()}"
    ld, jump_if, jump_if_not_less, give = 0x20, 0x15, 0x35, 0x06
    refuse, allow = 0x00050000 | errno.EACCES, 0x7FFF0000
    code = [(ld, 0, 0, 4), (jump_if, 1, 0, kind), (give, 0, 0, refuse), (ld, 0, 0, 0)]
    code += [(jump_if_not_less, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # numbers of x32
    for number in numbers:
        code += [(jump_if, 0, 1, number), (give, 0, 0, refuse)]
    code.append((give, 0, 0, allow))
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(filters)))
    if LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0):
        return f"seccomp: {os.strerror(ctypes.get_errno())}"
    return ""


def forbid_files(folder: str, visible: Sequence[str]) -> str:
    """Writing in the folder alone, reading there and in what is visible; returns why not, if so."""
    version = LIBC.syscall(SYS_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return "the kernel has no Landlock"
    execute, read_file, read_folder = 1, 4, 8
    everything = (1 << min(13 + (version >= 2) + (version >= 3), 15)) - 1
    # Version 6 knows signals and abstract sockets, too.
    rules = struct.pack("QQQ", everything, 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    handle = LIBC.syscall(SYS_LANDLOCK_CREATE, ctypes.create_string_buffer(rules), size, 0)
    if handle < 0:
        return f"Landlock: {os.strerror(ctypes.get_errno())}"
    for path in (folder, *visible):
        if not os.path.exists(path):
            continue
        rights = everything if path == folder else execute | read_file | read_folder
        if not os.path.isdir(path):
            rights = read_file | (execute if path not in DEVICES else 2)  # a device may be written to
        number = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, number))
        if LIBC.syscall(SYS_LANDLOCK_ADD, handle, 1, rule, 0):
            return f"Landlock, {path}: {os.strerror(ctypes.get_errno())}"
        os.close(number)
    if LIBC.syscall(SYS_LANDLOCK_RESTRICT, handle, 0):
        return f"Landlock: {os.strerror(ctypes.get_errno())}"
    os.close(handle)
    return ""
