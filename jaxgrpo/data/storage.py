"""Buckets: what is named by a URL such as gs://bucket/run, read and written through fsspec.

An object of a bucket is whole or absent. It cannot be appended to or renamed, and folders are no
more than the beginnings of names. Listings are not cached: others write there too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, Self

from etils import epath

from jaxgrpo.core.errors import InputError, one_line

if TYPE_CHECKING:

    class BucketPath(PurePosixPath):
        """What etils' path has of pathlib's: that package brings no types."""

        def exists(self) -> bool: ...
        def is_file(self) -> bool: ...
        def is_dir(self) -> bool: ...
        def iterdir(self) -> Iterator[Self]: ...
        def glob(self, pattern: str) -> Iterator[Self]: ...
        def rglob(self, pattern: str) -> Iterator[Self]: ...
        def resolve(self, strict: bool = False) -> Self: ...
        def open(self, mode: str = "r", encoding: str | None = None) -> IO[Any]: ...
        def read_text(self, encoding: str | None = None) -> str: ...
        def read_bytes(self) -> bytes: ...
        def write_text(self, data: str, encoding: str | None = None) -> int: ...
        def write_bytes(self, data: bytes) -> int: ...
        def mkdir(
            self, mode: int | None = None, parents: bool = False, exist_ok: bool = False
        ) -> None: ...
        def rmdir(self) -> None: ...
        def unlink(self, missing_ok: bool = False) -> None: ...

else:
    BucketPath = epath.Path

URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)", re.DOTALL)
EXTRAS = {"gs": "gcs", "s3": "s3"}
"""Scheme -> the extra of jaxgrpo that installs what reads it."""
RUNS = ("gs",)
"""Schemes of run folders: those that Orbax writes checkpoints to."""
Place = Path | BucketPath
"""Where something is: here, or in a bucket."""
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)
REMOVALS = 3  # attempts to remove a folder that another thread may write into
LARGE = 1 << 26
"""Bytes from which on a file is sent in parts, without a copy of it in memory."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path names something in a bucket.

    >>> is_url("gs://bucket/run"), is_url("runs/first"), is_url("task:arithmetic:train")
    (True, False, False)
    """
    return URL.fullmatch(os.fspath(path)) is not None


def on_host(path: str | os.PathLike[str], output: str) -> Path:
    """An absolute path. Raises: InputError where it is a URL, and has to be on this host."""
    if is_url(path):
        raise InputError(
            f"{os.fspath(path)}: {output} is written to a folder of this host: name one"
        )
    return Path(os.path.expanduser(path)).absolute()


def refuse_unnameable(path: str | os.PathLike[str], where: str) -> None:
    """Raises: InputError where the names of files here, in the encoding of the locale, cannot hold
    a character of a path."""
    try:
        os.fsencode(path)
    except UnicodeEncodeError as error:
        character = error.object[error.start : error.end]
        raise InputError(
            f"{where}: the locale's encoding of names, {error.encoding}, has no {character!r}: set "
            "LC_ALL=C.UTF-8, or give another path"
        ) from None


def may_write(place: Path) -> bool:
    """Whether this user may make files in a folder, or write to a file."""
    by_effective = os.access in os.supports_effective_ids  # as files are opened
    mode = os.W_OK | (os.X_OK if place.is_dir() else 0)
    return os.access(place, mode, effective_ids=by_effective)


def refuse_unwritable(folder: Place, noun: str) -> None:
    """Raises: InputError where no folder can be made at a path, or be replaced there.

    Args:
      noun: what belongs into it, with its article.
    """
    if is_url(folder):
        return
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: choose the name of a folder for {noun}")
    target = Path(folder).resolve()
    above = next((place for place in target.parents if place.exists()), target)
    if not above.is_dir() or not may_write(above):
        problem = "cannot be written" if above.is_dir() else "is a file"
        raise InputError(f"{folder}: {above} {problem}: choose another folder for {noun}")


def unwritable(errors: Iterable[BaseException], folder: Path) -> str | None:
    """What the first of some errors says that comes from a place outside of a folder, as a cache,
    which takes nothing; None: none does.

    >>> unwritable([PermissionError(13, "Permission denied", "/cache/a")], Path("/data"))
    '/cache/a: Permission denied'
    """
    for error in errors:
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            file = str(error.filename or "its cache")
            if not Path(file).is_relative_to(folder.absolute()):
                return f"{file}: {error.strerror}"
    return None


def open_file(path: str | os.PathLike[str], flags: int) -> int:
    """A descriptor of a file to write, made where it is missing; never of what a link points to.

    Where others may write in its folder, a link would have us write into any file of this user.

    Raises: InputError where it is a symbolic link, or no file, as a pipe. OSError.
    """
    if os.path.islink(path):
        raise InputError(
            f"{path} is a symbolic link (to {os.readlink(path)}), which is not written through: "
            "remove the link, or put the file itself there"
        )
    refuse_no_file(path)
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def refuse_no_file(path: str | os.PathLike[str]) -> None:
    """Raises: InputError where something else than a file is at a path, as a pipe or a device."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise InputError(f"{path} is no file, and one is written there: move it away")


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where this host keeps copies: $XDG_CACHE_HOME/jaxgrpo or ~/.cache/jaxgrpo.

    Raises: InputError where there is neither that variable nor a home, as for a user without name.
    """
    folder = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if folder.startswith("~"):
        raise InputError(
            "this user has no home folder, where copies and compiled programs would be kept: set "
            "HOME, or XDG_CACHE_HOME, to a folder that can be written"
        )
    return Path(folder) / "jaxgrpo"


def place(path: str | os.PathLike[str]) -> Place:
    """A path made absolute; a URL as etils' path, which has the methods of pathlib that read.

    Raises: InputError where nothing installed reads such URLs.
    """
    if not is_url(path):
        return Path(os.path.expanduser(path)).absolute()
    file_system(path)
    return BucketPath(os.fspath(path))


def place_as_named(path: str | os.PathLike[str]) -> Place:
    """`place`, but a relative path stays relative, as a message is to name it."""
    return place(path) if is_url(path) else Path(os.path.expanduser(path))


def file_system(url: str | os.PathLike[str], key: str | None = None) -> Any:
    """fsspec's file system for a URL. Raises: InputError where nothing installed reads it."""
    import fsspec
    import fsspec.config

    text = os.fspath(url)
    where = f"{key} = {text}" if key else text
    scheme = text.partition("://")[0]
    if scheme in ("http", "https"):
        raise InputError(f"{where}: {scheme}:// is no bucket: fetch the file and give its path")
    for name in ("gcs", "gs", scheme):
        # The one that etils takes is made by name alone; another process's objects would be hidden.
        fsspec.config.conf.setdefault(name, {}).setdefault("use_listings_cache", False)
    try:
        return fsspec.filesystem(scheme)
    except ImportError as error:
        extra = EXTRAS.get(scheme)
        remedy = f"pip install 'jaxgrpo[{extra}]'" if extra else one_line(error)
        raise InputError(f"{where}: reading {scheme}:// needs another package: {remedy}") from error
    except Exception as error:  # of a dozen kinds
        raise InputError(
            f"{where}: {scheme}:// cannot be read ({one_line(error)}): give gs://, s3:// or a path "
            "of this host"
        ) from error


@contextlib.contextmanager
def failing_as_os_error(url: str | os.PathLike[str]) -> Iterator[None]:
    """What the clients of buckets raise, of a dozen kinds, becomes an OSError that names the URL.

    FileNotFoundError and FileExistsError pass: they are answers and no failures.
    """
    try:
        yield
    except (FileNotFoundError, FileExistsError, InputError):
        raise
    except Exception as error:
        kind = type(error).__name__
        raise OSError(f"{os.fspath(url)}: {one_line(error) or kind} ({kind})") from error


def listing(url: str | os.PathLike[str]) -> dict[str, tuple[int, str]]:
    """Name below a URL -> bytes and a mark that changes with the content. {} where nothing is.

    Raises: OSError where the bucket cannot be listed, as one that does not exist.
    """
    files, objects = file_system(url), {}
    root = files._strip_protocol(os.fspath(url)).rstrip("/")
    with failing_as_os_error(url):
        bucket = root.partition("/")[0]
        with contextlib.suppress(FileNotFoundError):
            objects = files.find(root, detail=True)
        if not objects and bucket != root and not files.exists(bucket):
            raise OSError(f"there is no bucket {bucket}, or it may not be listed")
    marks = ("md5Hash", "ETag", "etag", "generation", "mtime", "LastModified", "created")
    return {
        name[len(root) + 1 :]: (int(info["size"] or 0), str([info.get(mark) for mark in marks]))
        for name, info in objects.items()
        if name.startswith(f"{root}/") and not name.endswith("/")
    }


def read(url: str | os.PathLike[str]) -> bytes | None:
    """The content of an object; None where there is none. Raises: OSError."""
    with failing_as_os_error(url), contextlib.suppress(FileNotFoundError):
        return file_system(url).cat_file(os.fspath(url))
    return None


def write(url: str | os.PathLike[str], content: bytes, new: bool = False) -> None:
    """Writes a whole object or nothing.

    Args:
      new: refuse to replace one.
    Raises: OSError; FileExistsError where `new` and there is one.
    """
    with failing_as_os_error(url):
        mode = "create" if new else "overwrite"
        file_system(url).pipe_file(os.fspath(url), content, mode=mode)


def upload(file: Path, url: str) -> None:
    """Writes a local file. One that may grow meanwhile is sent as it was at one moment."""
    if file.stat().st_size < LARGE:
        write(url, file.read_bytes())
        return
    with failing_as_os_error(url):
        file_system(url).put_file(str(file), url)


def upload_folder(folder: Path, url: str) -> None:
    """Writes all files of a folder, and removes what else is below the URL."""
    names = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    for name in names:
        upload(folder / name, f"{url.rstrip('/')}/{name}")
    for name in listing(url).keys() - set(names):
        remove(f"{url.rstrip('/')}/{name}")


def remove(url: str | os.PathLike[str]) -> None:
    """Removes an object; one that is missing is no error."""
    with failing_as_os_error(url), contextlib.suppress(FileNotFoundError):
        file_system(url).rm_file(os.fspath(url))


def remove_tree(path: Place) -> None:
    """Removes a folder with all that is in it, here or in a bucket; of a link the link alone.

    Of a folder here what cannot be removed stays; another thread may write into it meanwhile.
    Raises: OSError of a link or a bucket.
    """
    if not is_url(path):
        if os.path.islink(path):
            path.unlink()
        for _ in range(REMOVALS):
            if not os.path.lexists(path):
                break
            shutil.rmtree(path, ignore_errors=True)
        return
    for name in listing(path):
        remove(f"{os.fspath(path)}/{name}")


def write_atomically(path: Place, content: str | bytes) -> None:
    """Writes a whole file or nothing: a reader sees the old content or the new, never a part."""
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    if is_url(path):
        write(path, data)
        return
    if not path.is_dir():
        refuse_no_file(path)  # a device would be replaced as well
    # Named by process: a run and `jaxgrpo report` may write the same report at the same time.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a process that died and had this number
        with open(open_file(temporary, os.O_WRONLY | os.O_EXCL), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # on a full disk it would take what is left
            temporary.unlink()
        error.filename = error.filename or os.fspath(path)  # which a write does not know
        raise


def flush(*paths: Place) -> None:
    """Waits until files, or the names in folders, are on the disk: a power cut then leaves them.

    Objects in a bucket are, once they are written. Raises: OSError with the path.
    """
    for path in paths:
        if is_url(path):
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # it cannot flush a folder
                raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        finally:
            os.close(descriptor)


def flush_tree(folder: Place) -> None:
    """`flush` of a folder with all that is in it. Raises: OSError."""
    if not is_url(folder):
        flush(*folder.rglob("*"), folder)


def folder_files(folder: Place) -> dict[str, Place]:
    """Name below a folder, here or in a bucket -> each file."""
    if is_url(folder):
        return {name: folder / name for name in sorted(listing(folder))}
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path for path in paths}


def local(path: str | os.PathLike[str], key: str, **patterns: list[str]) -> Path:
    """A local path as it is; a URL copied into this host's cache, once for all its processes.

    A copy belongs to the contents of one moment: what has changed in the bucket is copied again.

    Args:
      key: of the config, for messages.
      patterns: of the files to copy, of a folder: allow_patterns and ignore_patterns, as the hub
        takes them (* matches / too).
    Raises: InputError where there is nothing, or it cannot be copied.
    """
    if not is_url(path):
        refuse_unnameable(path, f"{key} = {os.fspath(path)!r}")
        return Path(os.path.expanduser(path))
    url = os.fspath(path).rstrip("/")
    try:
        return _copied(url, patterns)
    except FileNotFoundError:
        raise InputError(f"{key} = {url} does not exist: give what is there") from None
    except OSError as error:
        raise InputError(
            f"{key} = {url} cannot be copied to {cache_folder()}: {one_line(error)}; see to the "
            "name, your credentials, the network and the space on this host"
        ) from error


def below(folder: Path, name: str, url: str) -> Path:
    """The file in a folder of an object below a URL.

    Raises: OSError for one that leads out of the folder: names of objects are any texts, also of
      strangers.
    """
    if name.startswith("/") or ".." in PurePosixPath(name).parts:
        raise OSError(f"{url} holds an object whose name leads out of a folder: {name!r}")
    return folder / name


def _copied(url: str, patterns: dict[str, Any]) -> Path:
    from huggingface_hub.utils import filter_repo_objects

    names = listing(url)
    name = url.rpartition("/")[2]
    with failing_as_os_error(url):
        # A file has nothing below it.
        info = None if names else file_system(url).info(url)
    file_names = sorted(filter_repo_objects(names, **patterns))
    version = repr(
        [url, *((n, names[n]) for n in file_names), *(sorted(info.items()) if info else ())]
    )
    home = cache_folder() / "copies" / hashlib.sha256(version.encode()).hexdigest()[:24]
    if info is None and not file_names:
        raise FileNotFoundError(url)
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(home.with_suffix(".lock"), "ab", opener=open_file) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other processes of this host wait for the copy
        if not home.exists():
            partial = home.with_suffix(".partial")  # of a process that died
            shutil.rmtree(partial, ignore_errors=True)
            files = {below(partial / name, part, url): f"{url}/{part}" for part in file_names}
            for file, source in files.items():
                download(source, file)
            if info is not None:
                download(url, partial / name)
            os.rename(partial, home)
    return home / name


def download(url: str, file: Path) -> None:
    """Copies one object into a file. Raises: OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with failing_as_os_error(url):
        file_system(url).get_file(url, str(file))


def checksum(parts: Iterable[bytes]) -> str:
    """The crc32 of all parts, in hexadecimal digits."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return f"{crc:08x}"
