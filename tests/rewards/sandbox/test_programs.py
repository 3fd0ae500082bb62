"""Programs in the sandbox and attacks on it, with each way of isolation."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlsys.rewards import sandbox
from rlsys.rewards.sandbox import fork_server_client as hosts
from rlsys.rewards.sandbox.fork_server_client import ForkServerClient
from tests.errors import invalid
from tests.tiers import rest_slow

pytestmark = pytest.mark.usefixtures("way")


def output(program: str, **settings: object) -> str:
    """Return the output of a program that must succeed."""
    result = sandbox.run_sync(program, **settings)  # type: ignore[arg-type]
    assert result.ok, result
    return result.stdout


def refused(*attempts: str, before: str = "") -> None:
    """Assert that each attempt raises OSError in its own program."""
    for attempt in attempts:
        program = f"import os, sys, ctypes, socket, signal, subprocess\n{before}\n"
        program += f"try:\n    {attempt}\nexcept OSError:\n    print('refused')\n"
        assert output(program) == "refused\n", attempt


def test_a_program_runs_like_in_python() -> None:
    result = sandbox.run_sync("print(int(input()) * 2)", stdin="21\n")
    assert (result.stdout, result.stderr, result.exit_code) == ("42\n", "", 0)
    assert result.ok
    assert output("print(__name__, open(0).read())", stdin="a\nb") == "__main__ a\nb\n"
    failed = sandbox.run_sync("def f():\n    return 1 / 0\nprint('before')\nf()\n")
    assert failed.stdout == "before\n"
    assert failed.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert '  File "program.py", line 4, in <module>' in failed.stderr
    assert "    return 1 / 0" in failed.stderr
    assert failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert (failed.exit_code, failed.reason, failed.ok) == (1, "ended", False)


@pytest.mark.parametrize(
    ("program", "code", "stderr"),
    [
        ("exit(3)", 3, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("import sys; sys.exit()", 0, ""),
        ("import os; os._exit(7)", 7, ""),
        ("import atexit; atexit.register(print, 'end'); exit(2)", 2, ""),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, ""),
    ],
)
def test_the_end_of_a_program_is_reported(program: str, code: int, stderr: str) -> None:
    result = sandbox.run_sync(program)
    assert (result.exit_code, result.stderr, result.reason) == (code, stderr, "ended")


def test_a_text_that_is_not_a_program_fails_like_in_python() -> None:
    for program, error in (
        ("(", "SyntaxError"),
        ("\x00", "null bytes"),
        ("\ud800", "SyntaxError"),
    ):
        result = sandbox.run_sync(program)
        assert result.exit_code == 1
        assert error in result.stderr


def test_threads_and_deep_recursion_work() -> None:
    program = (
        "import sys, threading\n"
        "sys.setrecursionlimit(10**6)\n"
        "threading.stack_size(2**26)\n"
        "def deep(n): return 0 if n == 0 else 1 + deep(n - 1)\n"
        "thread = threading.Thread(target=lambda: print(deep(50_000)))\n"
        "thread.start()\n"
    )
    assert output(program) == "50000\n"


def test_each_program_has_its_own_empty_directory() -> None:
    program = (
        "import os, tempfile\n"
        "print(os.listdir('.'))\n"
        "open('a', 'w').write('mine')\n"
        "with tempfile.TemporaryFile() as file: file.write(b'x')\n"
        "print(open('a').read())\n"
    )
    for _ in range(3):
        assert output(program) == "[]\nmine\n"


def test_nothing_is_left_of_the_previous_program() -> None:
    output("import builtins, sys, json; builtins.left = json.left = sys.left = 1")
    program = (
        "import builtins, sys, json\nprint([hasattr(m, 'left') for m in (builtins, sys, json)])"
    )
    assert output(program) == "[False, False, False]\n"


def test_two_programs_do_not_draw_the_same_random_numbers() -> None:
    assert output("import random; print(random.random())") != output(
        "import random; print(random.random())"
    )


@pytest.mark.parametrize(
    "program",
    rest_slow(
        [
            "while True: pass",
            "import time; time.sleep(1000)",
            "sum(range(10**15))",  # in C, with the interpreter lock
            "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
            "import os\nfor i in range(3): os.close(i)\nwhile True: pass",
            "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
            "import atexit, time; atexit.register(time.sleep, 1000)",
            "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()",
            "def f(g):\n    yield from g\n    yield from f(g)\nlist(f(iter(int, 1)))",
        ],
        first=4,
    ),
)
def test_a_program_that_does_not_end_is_ended(program: str) -> None:
    began_s = time.monotonic()
    result = sandbox.run_sync(program, timeout_s=0.3, memory_mib=64)
    assert result.reason in ("time", "memory")
    assert time.monotonic() - began_s < 10
    if result.reason == "time":
        assert result.exit_code == -signal.SIGKILL


@pytest.mark.parametrize(
    "program",
    [
        "x = 'a' * 10**9",
        "x = []\nwhile True: x.append('a' * 10**6)",
        "x = bytearray(2**40)",
        "import mmap; mmap.mmap(-1, 2**30)",  # shared memory, which RLIMIT_DATA does not count
    ],
)
def test_memory_has_a_limit(program: str) -> None:
    result = sandbox.run_sync(program, memory_mib=64)
    assert result.exit_code == 1
    assert "Error" in result.stderr
    if "mmap" not in program:
        assert result.reason == "memory"


def test_output_has_a_limit_and_is_cut() -> None:
    for program in ("print('x' * 10**7)", "while True: print('x' * 1000)"):
        result = sandbox.run_sync(program, output_mib=1)
        assert result.reason == "output"
        assert result.stdout == result.stdout[:1] * 2**20 or len(result.stdout) == 2**20
    assert len(output("print('x' * 10**7)", output_mib=10)) == 10**7 + 1
    quiet = sandbox.run_sync(
        "import os\ntry:\n    while True: os.write(2, b'x' * 999)\nexcept OSError: exit(4)"
    )
    assert (len(quiet.stderr), quiet.reason) == (2**20, "output")


def test_files_have_a_limit() -> None:
    program = (
        "for i in range(1000):\n"
        "    with open(str(i), 'wb') as file: file.write(bytes(2**20))\n"
        "import time; time.sleep(1)\n"
    )
    result = sandbox.run_sync(program)
    assert result.reason == "disk" or "No space left on device" in result.stderr


def test_no_processes_and_no_programs() -> None:
    refused(
        "os.fork()",
        "subprocess.run(['/bin/true'])",
        "os.system('true') == 0 or (_ for _ in ()).throw(OSError)",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/sh', ['sh'])",
        "os.execv(sys.executable, ['python'])",
        "import multiprocessing; multiprocessing.Process(target=print).start()",
        "import pty; pty.fork()",
        before="def libc(name, *args):\n    if ctypes.CDLL(None)[name](*args) < 0: raise OSError",
    )
    refused(
        "libc('vfork')",
        "libc('syscall', 56, 17, 0, 0, 0, 0)",
        "libc('syscall', 435, 0, 0)",
        before=LIBC,
    )


LIBC = "def libc(name, *args):\n    if ctypes.CDLL(None)[name](*args) < 0: raise OSError"


def test_no_network_and_no_unix_sockets() -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        name = f"\0rlsys-test-{os.getpid()}"
        listening.bind(name)
        listening.listen()
        refused(
            "socket.socket()",
            "socket.socket(socket.AF_UNIX)",
            "socket.create_connection(('127.0.0.1', 22))",
            f"s = socket.socket(socket.AF_UNIX); s.connect({name!r})",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        )
    assert output("import socket; a, b = socket.socketpair(); a.send(b'x'); print(b.recv(1))") == (
        "b'x'\n"
    )
    assert output("import asyncio; print(asyncio.run(asyncio.sleep(0, 5)))") == "5\n"


def test_only_its_own_files_are_accessible(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    os.chmod(secret, 0o666)
    home = os.path.expanduser("~")
    refused(
        "open('/etc/passwd')",
        "open('/etc/shadow')",
        f"open({str(secret)!r})",
        f"open({str(secret)!r}, 'a')",
        f"os.unlink({str(secret)!r})",
        f"os.chmod({str(secret)!r}, 0o600)",
        f"os.utime({str(secret)!r}, (0, 0))",
        f"os.truncate({str(secret)!r}, 0)",
        f"os.rename({str(secret)!r}, 'here')",
        f"os.link({str(secret)!r}, 'here')",
        f"os.symlink({str(secret)!r}, 'here'); open('here')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
        f"open({home + '/../new-from-sandbox'!r}, 'w')",
        f"os.listdir({str(tmp_path)!r})",
        "open('/dev/shm/new-from-sandbox', 'w')",
        "open('/tmp/../new-from-sandbox', 'w')",
        f"open({sys.prefix + '/pyvenv.cfg'!r})",
        f"open({sys.executable!r} + '-config')",
        f"open({os.__file__!r}, 'a')",
        "os.mknod('device', 0o20600, os.makedev(1, 1))",
        "os.listdir('/proc')",
        "open('/proc/self/environ')",
        "open('/proc/1/environ')",
        f"open('/proc/{os.getpid()}/mem')",
        "open('/sys/kernel/uevent_helper')",
        "os.chroot('.')",
    )
    assert secret.read_text() == "secret"
    assert os.listdir(tmp_path) == ["secret"]
    assert (
        output("import sys; print(any('site-packages' in path for path in sys.path))") == "False\n"
    )
    result = sandbox.run_sync("import numpy")
    assert "ModuleNotFoundError" in result.stderr


def test_the_environment_is_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret-value")
    host = ForkServerClient([hosts.host().way])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "_of_this_process", host)
        program = (
            "import ctypes, json, os\n"
            "environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), 'environ')\n"
            "i = 0\nfound = list(os.environ)\n"
            "while environ[i]: found.append(environ[i].decode()); i += 1\n"
            "print(json.dumps(found))\n"
        )
        found = json.loads(output(program))
    host.close()
    assert found
    assert not [one for one in found if "TOKEN" in one or "secret" in one]


def test_no_other_processes() -> None:
    mine = os.getpid()
    server = hosts.host().pid
    refused(
        f"os.kill({mine}, 0)",
        f"os.kill({server}, 9)",
        "os.kill(-1, 9)",
        "os.kill(0, 9)",
        "os.kill(2, 9)",
        f"os.pidfd_open({mine})",
        "os.setpriority(os.PRIO_PROCESS, 0, 5)",
        "os.sched_setaffinity(0, {0})",
    )
    # ptrace, process_vm_readv, userfaultfd, io_uring_setup, unshare, setns, bpf, memfd_create,
    # keyctl, personality, and PR_SET_PDEATHSIG.
    if os.uname().machine == "x86_64":
        refused(
            *(
                f"libc('syscall', {number}, {argument}, 0, 0, 0, 0)"
                for number, argument in (
                    (101, 16),
                    (310, mine),
                    (323, 0),
                    (425, 1),
                    (272, 0x10000000),
                    (308, 0),
                    (321, 0),
                    (319, 0),
                    (250, 0),
                    (135, 0xFFFFFFFF),
                    (157, 1),
                    (302, mine),
                    (0x40000000 + 41, 2),
                )
            ),
            before=LIBC,
        )
    assert psutil.pid_exists(server)
    assert output("print(1)") == "1\n"


def test_limits_cannot_be_raised() -> None:
    program = (
        "import resource\n"
        "for name in ('AS', 'CPU', 'FSIZE', 'NOFILE', 'CORE'):\n"
        "    which = getattr(resource, 'RLIMIT_' + name)\n"
        "    try: resource.setrlimit(which, (resource.RLIM_INFINITY,) * 2)\n"
        "    except (ValueError, OSError): print('refused')\n"
    )
    assert output(program) == "refused\n" * 5


def test_many_threads_end_with_their_program() -> None:
    program = (
        "import threading, time\n"
        "threading.stack_size(32768)\n"
        "try:\n"
        "    while True: threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "except RuntimeError: print('refused', flush=True)\n"
        "import os; os._exit(0)\n"
    )
    assert output(program) == "refused\n"
    assert output("print(1)") == "1\n"


def test_only_standard_descriptors_are_open() -> None:
    program = (
        "import os\n"
        "def is_open(fd):\n"
        "    try: os.fstat(fd)\n"
        "    except OSError: return False\n"
        "    return True\n"
        "print([fd for fd in range(4096) if is_open(fd)])\n"
    )
    assert output(program) == "[0, 1, 2]\n"


def test_concurrent_programs_do_not_see_each_other() -> None:
    program = (
        "import os, time\nopen('mine', 'w').write('x')\ntime.sleep(0.2)\n"
        "def reads(path):\n"
        "    try: return open(path).read() == 'x'\n"
        "    except OSError: return False\n"
        "own = os.path.basename(os.getcwd())\n"
        "others = [f'../{n}/mine' for n in range(40) if str(n) != own]\n"
        "print(os.listdir('.'), any(map(reads, others)))\n"
    )

    async def many() -> list[sandbox.Result]:
        return await asyncio.gather(*(sandbox.run(program) for _ in range(6)))

    assert {one.stdout for one in asyncio.run(many())} == {"['mine'] False\n"}


def test_a_cancelled_program_is_ended() -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(sandbox.run("import time; time.sleep(600)", timeout_s=600))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    before = len(tree())
    for _ in range(4):  # more than the number of places
        asyncio.run(cancelled())
    assert output("print(1)") == "1\n"
    until(lambda: len(tree()) <= before)


def tree() -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(hosts.host().pid).children(recursive=True)
    return found


def until(found: object) -> None:
    end_s = time.monotonic() + 30
    while not found():  # type: ignore[operator]
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_threads_and_loops_may_use_it_at_once() -> None:
    outputs: list[str] = []

    def work(i: int) -> None:
        outputs.append(sandbox.run_sync(f"print({i})").stdout)
        outputs.append(asyncio.run(sandbox.run(f"print({i})")).stdout)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(outputs) == sorted(f"{i}\n" for i in range(8) for _ in range(2))


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout_s", 0), ("timeout_s", math.nan), ("memory_mib", 0), ("output_mib", -1)],
)
def test_wrong_limits_are_refused(name: str, value: float) -> None:
    with invalid(name):
        sandbox.run_sync("1", **{name: value})  # type: ignore[arg-type]
