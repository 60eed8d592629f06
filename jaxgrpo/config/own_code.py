"""Own code by name: "path/file.py:function" or "package.module:function"."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxgrpo.core.errors import InputError, one_line, own_line, suggest

PYTHON = "python"
"""The module, in names of what was given as a Python object."""

LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib"))
PACKAGE = str(Path(__file__).parent.parent)


def is_reference(name: str) -> bool:
    """Whether a name means own code and not a built-in part.

    >>> is_reference("mine.py:score"), is_reference("grpo")
    (True, False)
    """
    return ":" in name


def named_file(name: str) -> str | None:
    """The file of "path/file.py:function"; None for the name of a module or of a built-in part."""
    place = name.rpartition(":")[0]
    return place if place.endswith(".py") else None


_REFERENCES = re.compile(r"""(?<=["'])[^"']+:\w+(?=["'])|(?:^|(?<=[+=]))[^"'+={]+:\w+""")
"""Own code in a method of an atlas: in quotes, or alone behind its beginning, a + or a =."""


def references(method: str) -> list[str]:
    """The names of own code in an entry of `atlas.methods`.

    >>> references("mine.py:chain+loss.surrogate={ use = 'lib.own:f', high = 0.28 }")
    ['mine.py:chain', 'lib.own:f']
    """
    return [name.strip() for name in _REFERENCES.findall(method)]


def with_absolute_files(method: str, folder: Path) -> str:
    """An entry of `atlas.methods` whose files of own code are absolute, in a table where their path
    holds what divides an entry.

    >>> with_absolute_files("mine.py:chain+loss.surrogate=clip", Path("/lib"))
    '/lib/mine.py:chain+loss.surrogate=clip'
    >>> with_absolute_files("mine.py:chain+loss.surrogate=clip", Path("/c++"))
    'recipe={ use = "/c++/mine.py:chain" }+loss.surrogate=clip'
    """

    def absolute(match: re.Match[str]) -> str:
        name, before = match.group().strip(), method[: match.start()][-1:]
        if named_file(name) is None:
            return match.group()
        path = str(folder / os.path.expanduser(name))
        if before in ("'", '"') or not {"+", "="} & {*path}:
            return path
        return ("" if before == "=" else "recipe=") + f'{{ use = "{path}" }}'

    return _REFERENCES.sub(absolute, method)


def find_source(name: str) -> Path | None:
    """The file of "path/file.py:function" or of "package.module:function", which is not imported.

    None for a built-in part, for a Python object and where there is no such module.
    """
    if file := named_file(name):
        return Path(file)
    place = name.rpartition(":")[0]
    top, *submodules = place.split(".")
    try:
        spec = None if place in ("", PYTHON) else importlib.util.find_spec(top)
    except ValueError:  # __main__ in a notebook
        spec = None
    if spec is None:
        return None
    if not submodules:
        origin = spec.origin or ""
        return Path(origin) if origin.endswith(".py") else None
    folders = [Path(folder, *submodules) for folder in spec.submodule_search_locations or ()]
    return next((file for folder in folders for file in _modules_at(folder)), None)


def with_imports(files: Iterable[Path]) -> tuple[Path, ...]:
    """Files of own code and the modules beside them that they import, theirs too, each once.

    Modules of other folders are left out, and so are installed packages and this one.
    """
    all_files = dict.fromkeys(files)
    roots = [folder for file in all_files if _is_own(file) for folder in (file.parent, _root(file))]
    queue = [file for file in all_files if _is_own(file)]
    while queue:
        imports = dict.fromkeys(_imported_files(queue.pop(0), roots))
        queue += [file for file in imports if file not in all_files]
        all_files |= imports
    return tuple(all_files)


def _is_own(file: Path) -> bool:
    """Whether it is neither installed nor of this package."""
    return not any(file.is_relative_to(folder) for folder in (*LIBRARIES, PACKAGE))


def _root(file: Path) -> Path:
    """The folder in which the outermost package of a file is."""
    folder = file.parent
    while (folder / "__init__.py").is_file():
        folder = folder.parent
    return folder


def _imported_files(file: Path, roots: Iterable[Path]) -> Iterator[Path]:
    """The files under `roots` of the modules that a file imports; none where it cannot be read."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # refused when loaded
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            places, names = roots, [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            places = [file.parents[node.level - 1]] if node.level else roots
            module = [node.module] if node.module else []
            names = [".".join([*module, alias.name]) for alias in node.names]
        else:
            continue
        for place in places:
            for name in names:
                parts = name.split(".")
                paths = [place.joinpath(*parts[: n + 1]) for n in range(len(parts))]
                yield from (file for path in paths for file in _modules_at(path) if _is_own(file))


def _modules_at(path: Path) -> Iterator[Path]:
    """The file of the module whose path is `path` without its suffix, if there is one."""
    yield from (file for file in (Path(f"{path}.py"), path / "__init__.py") if file.is_file())


def short_name(name: str) -> str:
    """The function's name without its place; a built-in name as it is.

    >>> short_name("rewards/mine.py:score")
    'score'
    """
    return name.rpartition(":")[2]


def python_name(name: str) -> str:
    """How a config names what was given as a Python object.

    >>> python_name("my_reward")
    'python:my_reward'
    """
    return f"{PYTHON}:{name}"


def resolve(use: Any, folder: str | Path | None = None) -> Any:
    """The function that `use` names if it is a reference to own code; else `use` itself."""
    return load(use, folder) if isinstance(use, str) and is_reference(use) else use


def load(
    reference: str,
    folder: str | Path | None = None,
    expected: Any = Callable,
    kind: str = "function",
) -> Any:
    """The function that a reference names, or another thing.

    A file is run once per process, however often it is named, until `forget_changed`, and finds
    modules in its folder.

    Args:
      folder: where a relative path of a file begins; None: the working directory.
      expected, kind: the type of the thing, and what to call it.

    Raises: InputError if there is no such file, module or function, no function of that name, or
    if the file or module raises something while it is loaded.
    """
    place, _, name = reference.rpartition(":")
    if place == PYTHON:
        raise InputError(
            f"{reference!r}: the run was begun from Python with the object {name}: give it again, "
            "jaxgrpo.train(..., rewards=..., advantage=...), jaxgrpo.evaluate(..., scorer=...) or "
            "jaxgrpo.probe(..., reward=...)"
        )
    if not place or not name:
        raise InputError(
            f"{reference!r} names no {kind}: write path/file.py:{kind} or package.module:{kind}"
        )
    with _explaining(reference):
        if named_file(reference):
            module = _module_of_file(reference, Path(folder or Path.cwd(), place))
        else:
            module = _module(reference, place)
        # Not `vars`: a package may load its names when they are first asked for, as trl does.
        if not hasattr(module, name):
            names = (key for key in dir(module) if not key.startswith("_"))
            candidates = [key for key in names if isinstance(getattr(module, key, None), expected)]
            raise InputError(f"{reference!r}: {place} has no {name!r}: {suggest(name, candidates)}")
        value = getattr(module, name)
    if not isinstance(value, expected):
        raise InputError(f"{reference!r}: {name} is a {type(value).__name__}: name a {kind}")
    return value


def load_part(reference: str) -> Callable[..., Any]:
    """As `load`, of what may be a finished part of a method, as @jaxgrpo.transform makes it of a
    function: then a function without arguments that returns it."""
    part = load(reference, None, (Callable, tuple))
    if callable(part):
        return part
    name = short_name(reference)
    if not hasattr(part, "_fields"):
        raise InputError(f"{reference!r}: {name} is a tuple: name a function")

    def build() -> Any:
        return part

    build.__name__ = name
    return build


_LOADED: dict[str, dict[Path, bytes]] = {}
"""Name of a module that was loaded from a file -> this file and the modules beside it that it
imports, and what was in them."""


def forget_changed() -> None:
    """Forgets own code whose file has changed since it was loaded, or that of a module beside it
    that it imports: `load` then runs it again. For calls from Python, as in a notebook."""
    for name, contents in list(_LOADED.items()):
        now, (file, *neighbours) = _contents(contents), contents
        if now == contents:
            continue
        del _LOADED[name]
        sys.modules.pop(name, None)
        # One of them that stays may have imported one that has changed.
        changed = any(now[neighbour] != contents[neighbour] for neighbour in neighbours)
        files = {str(file), *(map(str, neighbours) if changed else ())}
        for module_name, module in list(sys.modules.items()):
            if getattr(module, "__file__", None) in files:
                del sys.modules[module_name]


def _contents(files: Iterable[Path]) -> dict[Path, bytes]:
    """What is in files; of those that cannot be read nothing."""
    contents = {}
    for file in files:
        try:
            contents[file] = file.read_bytes()
        except OSError:
            contents[file] = b""
    return contents


def _refuse_neighbours_elsewhere(reference: str, file: Path, neighbours: Iterable[Path]) -> None:
    """Raises: InputError where a module beside a file that it imports came from another folder,
    whose module of that name was loaded before."""
    for neighbour in neighbours:
        module = sys.modules.get(neighbour.stem)
        origin = Path(getattr(module, "__file__", None) or neighbour).resolve()
        if neighbour.parent == file.parent and origin != neighbour.resolve() and _is_own(origin):
            raise InputError(
                f"{reference!r}: it imports {neighbour.stem} and would get {origin}, which this "
                f"process has loaded under that name, and not {neighbour}: rename one of the two, "
                "or start another process"
            )


def _module_of_file(reference: str, path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        files = ", ".join(sorted(file.name for file in path.parent.glob("*.py"))) or "no .py files"
        raise InputError(
            f"{reference!r}: there is no file {path}; {path.parent} holds {files}: relative paths "
            "begin at the folder of the config, those of options at the working directory"
        )
    name = f"own_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:  # impossible for the suffix .py
        raise InputError(f"{reference!r}: {path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a file beside it hides no installed package
    contents = _contents(with_imports([path]))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        _refuse_neighbours_elsewhere(reference, path, [*contents][1:])
    except BaseException:
        del sys.modules[name]
        raise
    _LOADED[name] = contents
    return module


@contextlib.contextmanager
def _explaining(reference: str) -> Iterator[None]:
    """Turns what own code raises while it is loaded into an InputError with file and line."""
    try:
        yield
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit too
        place, line = own_line(error)
        location = f" ({place}: {line})" if place else ""
        raise InputError(
            f"{reference!r} cannot be loaded{location}: it raised {type(error).__name__}: "
            f"{one_line(error)}"
        ) from error


def _module(reference: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise  # the user's module misses another one
        raise InputError(
            f"{reference!r}: no module {error.name!r}: install it, or name a file, as "
            "path/file.py:function"
        ) from None


def installed(module: str) -> bool:
    """Whether a package can be imported, without importing it."""
    return importlib.util.find_spec(module) is not None
