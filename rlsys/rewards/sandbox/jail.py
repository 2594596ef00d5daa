"""Runs inside the process that is about to become an untrusted program: gives up rights, then executes it.

Started as `python -I -S jail.py SPEC`, where SPEC is JSON written by run.py. Rights are given up in the kernel and
cannot be taken back: resource limits; a file system in memory with nothing but the readable paths and the working
folder, and IPC of its own (namespaces); no capabilities; Landlock (read only the interpreter and the system libraries,
write only the working folder, no signals or abstract sockets to the outside); a seccomp filter (no sockets, no new
processes, no tracing, no signals to others, no change of a file's metadata, no kernel facilities that outlive the
process). What the kernel does not offer is in the exit message; run.py runs nothing without what it requires.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
EPERM, ENOSYS = 1, 38
CLONE_THREAD = 0x00010000
SYS_LANDLOCK = (444, 445, 446)
NEW_MOUNTS, NEW_IPC, NEW_USER = 0x00020000, 0x08000000, 0x10000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 1 << 12, 1 << 14, 1 << 18, 2
MAX_INODES = 4096
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

CLONE, CLONE3 = (56, 220), (435, 435)  # on x86_64 and aarch64
TO_SELF_ONLY = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)}

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Give up everything, then become the program named in SPEC."""
    spec = json.loads(sys.argv[1])
    os.chdir(spec["folder"])
    missing = [] if own_namespaces(spec["readable"], spec["folder"], spec["folder_bytes"]) else ["isolation"]
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != spec["parent"]:
        sys.exit("the process that asked for this run is gone")
    limit_resources(spec["limits"])
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 or not drop_capabilities():
        missing.append("privileges")
    if not restrict_files(spec["readable"], spec["folder"]):
        missing.append("files")
    if not filter_system_calls(spec["forbidden"]):
        missing += ["network", "processes"]
    if lacking := [m for m in missing if m in spec["require"]]:
        os.write(2, f"{spec['refusal']}{','.join(lacking)}".encode())
        os._exit(1)
    os.execve(spec["command"][0], spec["command"], spec["environment"])


def own_namespaces(readable: list[str], folder: str, folder_bytes: int) -> bool:
    """Make a file system of `folder_bytes` in memory the root, with the readable paths and a copy of the folder."""
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(NEW_MOUNTS | NEW_IPC) != 0:
        if libc.unshare(NEW_USER | NEW_MOUNTS | NEW_IPC) != 0:
            return False
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    with open("main.py", "rb") as file:
        program = file.read()
    try:
        mount("none", "/", "", MS_REC | MS_PRIVATE)
        mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={folder_bytes},nr_inodes={MAX_INODES},mode=755")
        for path in (*filter(os.path.exists, readable), "/dev/null"):
            place = folder + path
            os.makedirs(place if os.path.isdir(path) else os.path.dirname(place), exist_ok=True)
            if not os.path.exists(place):
                open(place, "w").close()
            mount(path, place, "", MS_BIND | MS_REC)
        os.makedirs(folder + folder)
        with open(f"{folder}{folder}/main.py", "wb") as file:
            file.write(program)
        os.chroot(folder)
        os.chdir(folder)
    except OSError:
        libc.umount2(folder.encode(), MNT_DETACH)
        return False
    return True


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """mount(2); OSError where it fails."""
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()) != 0:
        raise OSError(ctypes.get_errno(), f"cannot mount {target}")


def limit_resources(limits: dict[str, int]) -> None:
    """Set soft and hard limits by their names in the resource module, never above what already holds.

    A second of CPU more is the hard limit: with equal ones Linux kills at once, not by SIGXCPU, which names the reason.
    """
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        most = value + (kind == resource.RLIMIT_CPU)
        if hard != resource.RLIM_INFINITY:
            value, most = min(value, hard), min(most, hard)
        resource.setrlimit(kind, (value, most))


def drop_capabilities() -> bool:
    """Empty all capability sets; with no_new_privs set, executing a program does not give them back."""
    number = {"x86_64": 126, "aarch64": 91}.get(platform.machine())  # of the system call capset
    return number is not None and libc.syscall(number, struct.pack("=Ii", 0x20080522, 0), bytes(24)) == 0


def restrict_files(readable: list[str], folder: str) -> bool:
    """Landlock: execute and read below `readable`, everything below `folder`, nothing outside of both."""
    create, add_rule, restrict_self = SYS_LANDLOCK
    abi = libc.syscall(create, None, 0, 1)
    if abi < 1:
        return False
    rights = (1 << (13 + (abi >= 2) + (abi >= 3))) - 1 | (1 << 15 if abi >= 5 else 0)
    network = 3 if abi >= 4 else 0
    scopes = 3 if abi >= 6 else 0
    attributes = struct.pack("=QQQ", rights, network, scopes)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = libc.syscall(create, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    read_file, read_any = 1 << 2, 1 | 1 << 2 | 1 << 3
    rules = [(path, read_any if os.path.isdir(path) else read_file | 1) for path in readable]
    rules.append(("/dev/null", 1 << 1 | read_file))
    rules.append((folder, 1 << 1 | read_file | 1 << 3 | 1 << 5 | 1 << 8 | (1 << 14 if abi >= 3 else 0)))
    for path, allowed in rules:
        if not os.path.exists(path):
            continue
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        done = libc.syscall(add_rule, ruleset, 1, struct.pack("=Qi", allowed, fd), 0)
        os.close(fd)
        if done != 0:
            return False
    done = libc.syscall(restrict_self, ruleset, 0)
    os.close(ruleset)
    return done == 0


def filter_system_calls(forbidden: list[list[int | None]]) -> bool:
    """A seccomp filter for this architecture; False where the kernel or the architecture does not have it.

    `forbidden` are the calls that fail, by their numbers on x86_64 and aarch64, None where there is no such call.
    """
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        return False
    column = 0 if machine == "x86_64" else 1
    numbers = [number for pair in forbidden if (number := pair[column]) is not None]
    program = build_filter(numbers, column, AUDIT_ARCH[machine], os.getpid())
    held = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    head = struct.pack("@HP", len(program), ctypes.addressof(held))
    return libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, head, 0, 0) == 0


def build_filter(forbidden: list[int], column: int, arch: int, own_pid: int) -> list[tuple[int, int, int, int]]:
    """Classic BPF over struct seccomp_data (number at 0, architecture at 4, low words of arguments from 16)."""
    load, equal, above, bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer, 0, 0, KILL), (load, 0, 0, 0)]
    program += [(above, 0, 1, 0x40000000), (answer, 0, 0, KILL)]
    program += [line for n in forbidden for line in ((equal, 0, 1, n), (answer, 0, 0, ERRNO | EPERM))]
    program += [(equal, 0, 1, CLONE3[column]), (answer, 0, 0, ERRNO | ENOSYS)]
    new_thread, own_process = (bits, 1, 0, CLONE_THREAD), (equal, 1, 0, own_pid)
    for numbers, test in [(CLONE, new_thread), *((numbers, own_process) for numbers in TO_SELF_ONLY.values())]:
        program += [(equal, 0, 4, numbers[column]), (load, 0, 0, 16), test, (answer, 0, 0, ERRNO | EPERM)]
        program += [(answer, 0, 0, ALLOW)]
    return [*program, (answer, 0, 0, ALLOW)]


if __name__ == "__main__":
    main()
