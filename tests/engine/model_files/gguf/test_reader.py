"""What a file declares: read as plain values, or refused in one line before it is believed."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from penstock.engine import ModelLoadError
from penstock.engine.model_files.gguf.choice import gguf_folder
from penstock.engine.model_files.gguf.reader import BLOCK_TYPES, read_gguf

from .written import directory_of, write

NUM_MUTATED = 3000
MAX_GROWTH_KB = 300 << 10


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    head = text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
    return head + struct.pack("<IQ", kind, offset)


def declaring(*, keys: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = ()) -> bytes:
    content = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys + tensors)
    return content.ljust(-(-len(content) // 32) * 32, b"\0")


def refusal(content: bytes, folder: Path) -> str:
    file = folder / "x.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelLoadError) as caught:
        read_gguf(file)
    assert str(caught.value).startswith(f"{file} cannot be read: ")
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{file} cannot be read: ")


def test_values_are_plain(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    values: dict[str, Any] = {
        "bool": True, "uint32": 7, "int32": -7, "uint64": 1 << 40, "float32": 0.5, "float64": 0.1,
        "string": "größer", "uint8": 255, "int8": -1, "uint16": 65535, "int16": -2, "int64": -3,
    }  # fmt: skip
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"a.{kind}", value)
    lists = {"texts": ["", "▁a", "\x00"], "numbers": [1.5, 2.5], "flags": [True, False]}
    for name, value in lists.items():
        writer.add_array(f"a.{name}", value)
    writer.add_tensor("t", np.ones((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_gguf(tmp_path / "x.gguf")
    assert {
        key.removeprefix("a."): each for key, each in found.keys.items() if key[:2] == "a."
    } == {
        **values,
        **lists,
    }
    assert type(found.keys["a.bool"]) is bool
    assert (found.tensors["t"].shape, found.tensors["t"].type) == ((2, 3), "F32")
    assert found.numbers("t") == (1.0,) * 6


def test_sizes_of_all_types_are_those_of_the_package():
    known = {
        int(kind): (kind.name, *sizes)
        for kind, sizes in gguf.GGML_QUANT_SIZES.items()
        if kind.name not in ("Q8_1", "Q8_K")  # of activations: no file has them
    }
    ours = {number: tuple(each) for number, each in BLOCK_TYPES.items()}
    assert {number: ours[number] for number in known} == known


KEY = text("a") + struct.pack("<II", 4, 1)
DATA = bytes(4096)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (declaring(keys=(KEY, KEY)), "key 'a' is there twice"),
        (declaring(keys=(text("a") + struct.pack("<I", 8) + struct.pack("<Q", 1) + b"\xff",)),
         "key 'a' is not UTF-8"),
        (declaring(keys=(text("a") + struct.pack("<IIQQ", 9, 8, 1, 1) + b"\xff",)),
         "element 0 of key 'a' is not UTF-8"),
        (declaring(tensors=(tensor("t", 4), tensor("t", 4, offset=32))) + DATA,
         "tensor 't' is there twice"),
        (declaring(tensors=(tensor("t", 16), tensor("u", 16, offset=32))) + DATA,
         "tensor 'u' begins within another one"),
        (declaring(tensors=(tensor("t", 2, 4096),)) + DATA, "tensor 't' ends after the file"),
        (declaring(tensors=(tensor("t", 2, 48, kind=8),)) + DATA, "rows of 48, no multiple of 32"),
        (declaring(tensors=(tensor("t", 4, kind=4),)) + DATA, "has type 4, which is not known"),
        (declaring(tensors=(tensor("t", 0, 4),)) + DATA, "tensor 't' has shape [0, 4]"),
        (declaring(tensors=(tensor("t", 1 << 62, 1 << 62),)) + DATA, "tensor 't' has shape ["),
    ],
)  # fmt: skip
def test_what_is_damaged_is_refused(content: bytes, message: str, tmp_path: Path):
    assert message in refusal(content, tmp_path)


# -- split files -------------------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path: Path) -> Callable[..., list[Path]]:
    def make(num: int = 3, **more: int) -> list[Path]:
        files = [tmp_path / f"m-{number + 1:05}-of-{num:05}.gguf" for number in range(num)]
        for number, file in enumerate(files):
            writer = gguf.GGUFWriter(file, "llama")
            writer.add_uint16("split.no", more.get("no", number))
            writer.add_uint16("split.count", num)
            writer.add_int32("split.tensors.count", more.get("tensors", num))
            writer.add_tensor(f"t{number}", np.full(8, number, np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
        return files

    return make


def test_a_split_file_by_its_first_part(parts: Callable[..., list[Path]]):
    files = parts()
    found = read_gguf(files[0])
    assert found.parts == tuple(files)
    assert [found.numbers(f"t{number}")[0] for number in range(3)] == [0, 1, 2]


def test_other_weights_in_any_part_make_another_directory(parts: Callable[..., list[Path]]):
    files = parts()
    before = gguf_folder(files[0])
    assert gguf_folder(files[0]) == before
    files[2].write_bytes(files[2].read_bytes()[:-4] + b"\0\0\0\1")
    assert gguf_folder(files[0]) != before


def test_another_part_names_the_first(parts: Callable[..., list[Path]]):
    files = parts()
    with pytest.raises(ModelLoadError, match=r"is one of 3 parts: give the first, .*m-00001-of"):
        read_gguf(files[1])


def test_a_part_that_is_missing(parts: Callable[..., list[Path]]):
    files = parts()
    files[2].unlink()
    with pytest.raises(ModelLoadError, match=r"m-00003-of-00003\.gguf is missing"):
        read_gguf(files[0])


@pytest.mark.parametrize(
    ("more", "message"),
    [({"no": 0}, "is not part 2 of 3"), ({"tensors": 5}, "the parts have 3 tensors, not 5")],
)
def test_parts_of_others(more: dict[str, int], message: str, parts: Callable[..., list[Path]]):
    with pytest.raises(ModelLoadError, match=message):
        read_gguf(parts(**more)[0])


def test_a_part_under_another_name(parts: Callable[..., list[Path]], tmp_path: Path):
    file = parts()[0].rename(tmp_path / "sha256-0a1b")
    with pytest.raises(ModelLoadError, match=r"not called …-00001-of-00003\.gguf"):
        read_gguf(file)


# -- mutations ---------------------------------------------------------------------------------


def mutated(content: bytes, rng: random.Random, end: int) -> bytes:
    """With a few bytes of what stands before the tensors changed, or cut off."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(end)
        match rng.randrange(5):
            case 0:
                data[place] = rng.randrange(256)
            case 1:
                data[place] ^= 1 << rng.randrange(8)
            case 2:
                data[place : place + 8] = struct.pack("<Q", rng.choice((0, 1, 1 << 31, 1 << 63)))
            case 3:
                del data[place : place + rng.randrange(1, 40)]
            case _:
                data[place : place + 4] = struct.pack("<I", rng.choice((0, 7, 8, 9, 77, 1 << 31)))
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.05 else data)


def outcome(file: Path, folder: Path) -> str:
    """`made`, or why it is refused."""
    try:
        directory_of(file, folder)
    except ModelLoadError as error:
        return str(error)
    return "made"


@pytest.mark.parametrize("num", [150, pytest.param(NUM_MUTATED, marks=pytest.mark.exhaustive)])
def test_mutated_headers(num: int, tiny_checkpoint: Any, tmp_path: Path):
    """A directory is made, or the file refused in one line: nothing else, and in little memory."""
    write(tiny_checkpoint("LlamaForCausalLM"), tmp_path / "whole.gguf", "llama")
    content = (tmp_path / "whole.gguf").read_bytes()
    end = min(each.offset for each in read_gguf(tmp_path / "whole.gguf").tensors.values())
    rng, outcomes = random.Random(num), set()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(num):
        file = tmp_path / "mutated.gguf"
        file.write_bytes(mutated(content, rng, end))
        said = outcome(file, tmp_path / f"made{number}")
        assert said == "made" or (str(file) in said and "\n" not in said)
        outcomes.add(said == "made")
    assert outcomes == {True, False}
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after - before < MAX_GROWTH_KB
