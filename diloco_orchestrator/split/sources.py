"""Data files that can be split: JSONL, text files and folders of them, Parquet, and `datasets` datasets on disk.

A source yields its records in order, and writes a selection of them in its own format. `split.split` selects.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from diloco_orchestrator.errors import ConfigError

SUFFIXES = (".jsonl", ".parquet", ".txt")


class Source(Protocol):
    """One file or folder of data records, each a JSON object or text."""

    @property
    def name(self) -> str:
        """The name of the file or folder, below which selections are written."""
        ...

    def records(self) -> Iterator[tuple[str, Any]]:
        """(place, record) of every record, in order; the place, such as "a.jsonl:3", is unique among all sources.

        Raises `ConfigError` for a record that cannot be read.
        """
        ...

    def write(self, selection: Sequence[int], folder: Path) -> None:
        """Write the records with these numbers, in order, below `folder`, under this source's name."""
        ...


def open_source(path: Path) -> Source:
    """The source at a path. Raises `ConfigError` if there is none, or for a format that is not known."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist: pass the JSONL, text or Parquet files, or folders, to split.")
    if path.is_dir():
        if (path / "dataset_info.json").exists() or (path / "state.json").exists():
            return _Dataset(path)
        if (path / "dataset_dict.json").exists():
            inside = sorted(each.name for each in path.iterdir() if each.is_dir())
            raise ConfigError(
                f"{path} holds several datasets ({', '.join(inside)}): pass those that are to be split, such as "
                f"{path / inside[0] if inside else path}."
            )
        return _TextFolder(path)
    if path.suffix == ".jsonl":
        return _JsonLines(path)
    if path.suffix == ".parquet":
        return _Parquet(path)
    if path.suffix == ".txt":
        return _TextFile(path)
    raise ConfigError(
        f"{path} has a format that is not known: {path.suffix or 'no suffix'}. Pass {', '.join(SUFFIXES)} files, a "
        "folder of text files, or a folder that `save_to_disk` of `datasets` wrote."
    )


def _library(name: str, what: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise ConfigError(
            f"{what} cannot be read, because the package {name.partition('.')[0]} is not installed: pip install "
            "'diloco-orchestrator[data]'."
        ) from None


class _JsonLines:
    """A file with one JSON object on a line; blank lines are skipped."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._path = path

    def records(self) -> Iterator[tuple[str, Any]]:
        for number, line in self._lines():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"{self._path}, line {number}, is not JSON ({error}): correct the line, or remove it."
                ) from None
            if not isinstance(record, dict):
                raise ConfigError(
                    f"{self._path}, line {number}, holds a JSON {type(record).__name__}: write one object on each "
                    'line, such as {"text": "…"}.'
                )
            yield f"{self.name}:{number}", record

    def write(self, selection: Sequence[int], folder: Path) -> None:
        lines = [line for _, line in self._lines()]
        with (folder / self.name).open("wb") as file:
            file.writelines(lines[index].rstrip(b"\r\n") + b"\n" for index in selection)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line


class _TextFolder:
    """A folder of text files, each one item."""

    def __init__(self, path: Path) -> None:
        self.name = path.resolve().name
        self._path = path
        self._files = sorted(each for each in path.rglob("*") if each.is_file())

    def records(self) -> Iterator[tuple[str, Any]]:
        for file in self._files:
            yield f"{self.name}/{file.relative_to(self._path).as_posix()}", _text(file)

    def write(self, selection: Sequence[int], folder: Path) -> None:
        for index in selection:
            file = self._files[index]
            target = folder / self.name / file.relative_to(self._path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


class _TextFile:
    """A text file, whose items are separated by blank lines."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._path = path

    def records(self) -> Iterator[tuple[str, Any]]:
        for number, text in enumerate(self._items(), start=1):
            yield f"{self.name}#{number}", text

    def write(self, selection: Sequence[int], folder: Path) -> None:
        items = self._items()
        (folder / self.name).write_text("\n\n".join(items[index] for index in selection) + "\n", encoding="utf-8")

    def _items(self) -> list[str]:
        paragraphs: list[list[str]] = [[]]
        for line in _text(self._path).splitlines():
            if line.strip():
                paragraphs[-1].append(line)
            elif paragraphs[-1]:
                paragraphs.append([])
        return ["\n".join(lines) for lines in paragraphs if lines]


class _Parquet:
    """A Parquet file, each row a record. Needs pyarrow."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self._parquet = _library("pyarrow.parquet", str(path))
        self._table = self._parquet.read_table(path)

    def records(self) -> Iterator[tuple[str, Any]]:
        for number, row in enumerate(self._table.to_pylist()):
            yield f"{self.name}:{number}", row

    def write(self, selection: Sequence[int], folder: Path) -> None:
        self._parquet.write_table(self._table.take(list(selection)), folder / self.name)


class _Dataset:
    """A dataset of the library `datasets` on disk, each row a record."""

    def __init__(self, path: Path) -> None:
        self.name = path.resolve().name
        self._dataset = _library("datasets", str(path)).load_from_disk(str(path))

    def records(self) -> Iterator[tuple[str, Any]]:
        for number, row in enumerate(self._dataset):
            yield f"{self.name}:{number}", row

    def write(self, selection: Sequence[int], folder: Path) -> None:
        self._dataset.select(list(selection)).save_to_disk(str(folder / self.name))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not UTF-8 text ({error.reason} at byte {error.start}): convert or remove it."
        ) from None
