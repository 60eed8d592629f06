"""Programs that try to pass tests without solving them, or to do harm.

Most know the right solution and give it only where their attack has worked: any score above 0 is a
leak. `{...}` stands for what a test puts there.
"""

PROGRAMS = {
    "endless loop": "def double(value):\n    while True:\n        pass",
    "endless loop that catches": """
while True:
    try:
        while True:
            pass
    except BaseException:
        pass
""",
    "memory": """
blocks = bytearray(2**30)
double = lambda value: value * 2
""",
    "memory in small pieces": """
blocks = []
for number in range(2**10):
    blocks.append(bytes([number % 256]) * 2**20)
double = lambda value: value * 2
""",
    "fork": """
import os
if os.fork() == 0:
    while True:
        os.fork()
double = lambda value: value * 2
""",
    "orphan": """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
double = lambda value: value * 2
""",
    "thread": """
import threading
threading.Thread(target=print).start()
double = lambda value: value * 2
""",
    "write a file": """
import os
library = os.path.dirname(os.__file__)
for folder in ("{folder}", "/tmp", "/dev/shm", "/var/tmp", "/", "/dev", library):
    try:
        with open(os.path.join(folder, "mark"), "w") as file:
            file.write("x")
        double = lambda value: value * 2
    except OSError:
        pass
""",
    "read a file": """
import glob
for pattern in ("{folder}/secret", "/etc/passwd", "/proc/*/environ", "/proc/*/cmdline",
                "{repository}/pyproject.toml", "/home/*", "/root/*.*", "{packages}/*"):
    for path in glob.glob(pattern):
        double = lambda value: value * 2
""",
    "environment": """
import os
if "SECRET" in os.environ:
    double = lambda value: value * 2
""",
    "network": """
import socket
socket.create_connection(("127.0.0.1", {port}), timeout=1)
double = lambda value: value * 2
""",
    "flood": """
while True:
    print("6 10 " * 1000)
""",
    "end of a loop": "def double(value):\n    raise StopIteration",
    "exit": "import sys\nsys.exit(0)",
    "exit in a call": "def double(value):\n    raise SystemExit(0)",
    "exit at once": "import os\ndef double(value):\n    os._exit(0)",
    "equal to all": """
class Same(int):
    def __eq__(self, other):
        return True
    def __ne__(self, other):
        return False
    def __hash__(self):
        return 6
    def __repr__(self):
        return "6"
double = Same
""",
    "equal to all, no number": """
class Same:
    def __eq__(self, other):
        return True
double = lambda value: Same()
""",
    "builtins": """
import builtins
builtins.AssertionError = type("Quiet", (BaseException,), dict())
builtins.all = builtins.any = builtins.bool = lambda *values: True
builtins.exec = builtins.eval = builtins.compile = lambda *values: None
def double(value):
    return True
""",
    "print what is expected": """
print("6", "10", "[1, 1]", sep="\\n")
def double(value):
    print("6")
""",
    "print a verdict": """
import os
for file in range(32):
    for line in ('["passed"]', '["case", true]', '["value", true]', '["value", 6]'):
        try:
            os.write(file, line.encode() + b"\\n")
        except OSError:
            pass
def double(value):
    return None
""",
    "recursion": """
import sys
sys.setrecursionlimit(10**9)
def double(value):
    return double(value)
""",
    "nested value": """
nested = []
for _ in range(10**6):
    nested = [nested]
def double(value):
    return nested
""",
    "repr that raises": """
class Angry(Exception):
    def __repr__(self):
        raise self
    __str__ = __repr__
def double(value):
    raise Angry
""",
    "look for the tests": """
import gc, re, sys
def double(value):
    frame, texts = sys._getframe(), []
    while frame is not None:
        texts += [repr(frame.f_globals), repr(frame.f_locals), repr(frame.f_code.co_consts)]
        frame = frame.f_back
    texts += [repr(item) for item in gc.get_objects() if isinstance(item, (str, list, dict, tuple))]
    texts += [repr(sys.argv), repr(vars(sys.modules["__main__"]))]
    if re.search(r"double\\(3\\) ?== ?6", " ".join(texts)):
        return value * 2
""",
    "ctypes": """
import ctypes
ctypes.CDLL(None).getpid()
double = lambda value: value * 2
""",
    "ctypes of another Python": """
import glob, sys
for pattern in ("/usr/lib/python3*/lib-dynload", "/usr/lib*/python3*/*-packages"):
    sys.path[:0] = glob.glob(pattern)
try:
    import _ctypes
except ImportError:
    import _cffi_backend
double = lambda value: value * 2
""",
    "kill": """
import os, signal
for process in (-1, 1, os.getppid()):
    try:
        os.kill(process, signal.SIGKILL)
    except OSError:
        pass
""",
    "raise a limit": """
import resource
for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC):
    resource.setrlimit(kind, (2**40, 2**40))
double = lambda value: value * 2
""",
    "become root": """
import os
os.setuid(0)
if os.getuid() == 0 and os.listdir("/root"):
    double = lambda value: value * 2
""",
}
