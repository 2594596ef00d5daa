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
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
SYS_LANDLOCK = (444, 445, 446)
NEW_MOUNTS, NEW_IPC, NEW_USER = 0x00020000, 0x08000000, 0x10000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 1 << 12, 1 << 14, 1 << 18, 2
MAX_INODES = 4096
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# system call: (number on x86_64, number on aarch64); None where the architecture does not have it
FORBIDDEN = {
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201),
    "fork": (57, None), "vfork": (58, None),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "setpgid": (109, 154), "setsid": (112, 157), "prctl": (157, 167), "seccomp": (317, 277),
    "setrlimit": (160, 164), "prlimit64": (302, 261), "setpriority": (141, 140),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "chroot": (161, 51),
    "pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsmount": (432, 432), "mount_setattr": (442, 442),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "memfd_create": (319, 279),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_setup": (206, 0),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "memfd_secret": (447, 447),
    "fallocate": (285, 47), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16), "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "reboot": (169, 142), "swapon": (167, 224), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "acct": (163, 89), "quotactl": (179, 60),
    "sethostname": (170, 161), "mknod": (133, None), "mknodat": (259, 33),
}  # fmt: skip
CLONE, CLONE3 = (56, 220), (435, 435)
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
    if not filter_system_calls():
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
    """Set soft and hard limits by their names in the resource module, never above what already holds."""
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def drop_capabilities() -> bool:
    """Empty all capability sets; with no_new_privs set, executing a program does not give them back."""
    header = struct.pack("=Ii", 0x20080522, 0)
    number = SYS_CAPSET.get(platform.machine())
    return number is not None and libc.syscall(number, header, bytes(24)) == 0


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


def filter_system_calls() -> bool:
    """A seccomp filter for this architecture; False where the kernel or the architecture does not have it."""
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        return False
    column = 0 if machine == "x86_64" else 1
    program = build_filter(column, AUDIT_ARCH[machine], os.getpid())
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    held = ctypes.create_string_buffer(code)
    head = struct.pack("@HP", len(program), ctypes.addressof(held))
    return libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, head, 0, 0) == 0


def build_filter(column: int, arch: int, own_pid: int) -> list[tuple[int, int, int, int]]:
    """Classic BPF over struct seccomp_data (number at 0, architecture at 4, low words of arguments from 16)."""
    load, equal, above, bits, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    program = [(load, 0, 0, 4), (equal, 1, 0, arch), (answer, 0, 0, KILL), (load, 0, 0, 0)]
    program += [(above, 0, 1, 0x40000000), (answer, 0, 0, KILL)]
    for numbers in FORBIDDEN.values():
        number = numbers[column]
        if number is not None:
            program += [(equal, 0, 1, number), (answer, 0, 0, ERRNO | EPERM)]
    program += [(equal, 0, 1, CLONE3[column]), (answer, 0, 0, ERRNO | ENOSYS)]
    program += [
        (equal, 0, 4, CLONE[column]), (load, 0, 0, 16), (bits, 1, 0, CLONE_THREAD), (answer, 0, 0, ERRNO | EPERM),
        (answer, 0, 0, ALLOW),
    ]  # fmt: skip
    for numbers in TO_SELF_ONLY.values():
        program += [
            (equal, 0, 4, numbers[column]), (load, 0, 0, 16), (equal, 1, 0, own_pid), (answer, 0, 0, ERRNO | EPERM),
            (answer, 0, 0, ALLOW),
        ]  # fmt: skip
    return [*program, (answer, 0, 0, ALLOW)]


if __name__ == "__main__":
    main()
