"""Pickles of arrays, as NumPy writes them in any protocol, and made ones that would harm the process."""

from __future__ import annotations

import collections
import contextlib
import pickle
import pickletools
import resource
from typing import Any

import numpy as np
import pytest

from pretrain.common import plain_pickle

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(6.0).reshape(2, 3).T, np.arange(3, dtype=">i8"),
    np.zeros((0, 4)), np.array(2.5), np.arange(8)[::2], np.array([True, False]), np.array(["a", "bcd"]),
    np.array([b"\xff"]), np.ones(2, np.complex64), np.ones(3, np.float16),
]  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_and_scalars_are_what_numpy_reads(protocol: int) -> None:
    values = {
        "arrays": ARRAYS,
        "scalars": [np.float32(0.1), np.int64(-3), np.bool_(True)],
        "text": ["a", b"\xff", None],
    }
    content = pickle.dumps(collections.OrderedDict(values), protocol)
    found, wanted = plain_pickle.load(content), pickle.loads(content)
    assert list(found) == list(wanted) and found["text"] == wanted["text"]
    for a, b in zip(found["arrays"], wanted["arrays"], strict=True):
        assert a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=")
        assert (a.shape, a.strides, a.tolist()) == (b.shape, b.strides, b.tolist())
    assert found["scalars"] == wanted["scalars"] and [type(x) for x in found["scalars"]] == [float, int, bool]


def test_arrays_of_python_2_are_read() -> None:
    """Their bytes are strings, which NumPy takes as Latin-1, too."""
    content = pickle.dumps({"w": np.array([-1.5, 2], np.float32)}, 2)
    encoded = b"c_codecs\nencode\n"
    assert encoded in content
    old = (
        b"\x80\x02}U\x01wcnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x02\x85cnumpy\ndtype\nU\x02f4K\x00K\x01\x87R(K\x03U\x01<NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x08" + np.array([-1.5, 2], "<f4").tobytes() + b"tbs."
    )
    assert plain_pickle.load(old)["w"].tolist() == [-1.5, 2] == pickle.loads(old, encoding="latin1")["w"].tolist()


@pytest.mark.parametrize("array", [np.array([None]), np.array(["2020-01-01"], "M8[D]"), np.zeros(2, [("a", "f4")])])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_times_and_records_are_refused(array: Any, protocol: int) -> None:
    with pytest.raises(pickle.UnpicklingError, match="Unsupported class"):
        plain_pickle.load(pickle.dumps({"a": array}, protocol))


def _made(state: bytes, kind: bytes = b"f4") -> bytes:
    """An array of type ``kind`` whose state is given as opcodes; %s stands for the type."""
    typed = b"cnumpy\ndtype\n(X\x02\x00\x00\x00" + kind + b"\x89\x88tR"
    return (
        b"\x80\x04cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tC\x01btR"
        + state.replace(b"%s", typed)
        + b"b."
    )


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(_made(b"(K\x01(K\x09t%s\x89C\x04aaaat"), id="longer than its bytes"),
        pytest.param(_made(b"(K\x01(K\x01t%s\x89C\x08aaaaaaaat"), id="shorter than its bytes"),
        pytest.param(_made(b"(K\x01(J\xff\xff\xff\x7fJ\xff\xff\xff\x7fK\x10t%s\x89C\x00t"), id="size overflows"),
        pytest.param(_made(b"(K\x01(t%sb\x89C\x04aaaat"), id="a type whose state is a tuple"),
        pytest.param(_made(b"(K\x01(K\x01t%s\x89C\x08aaaaaaaat", b"O8"), id="addresses"),
        pytest.param(_made(b"(K\x01(K\x01t%s\x89K\x04t"), id="bytes that are a number"),
        pytest.param(_made(b"(K\x01(K\x01tX\x02\x00\x00\x00f4\x89C\x04aaaat"), id="a type that is text"),
        pytest.param(b"\x80\x04cnumpy\nndarray\n(K\x01tR.", id="ndarray itself"),
        pytest.param(b"\x80\x04c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00idna8tR.", id="another codec"),
    ],
)
def test_arrays_that_are_none_raise(content: bytes) -> None:
    pickletools.dis(content, out=open("/dev/null", "w"))  # noqa: SIM115
    with pytest.raises(Exception):  # noqa: B017
        plain_pickle.load(content)


@pytest.mark.parametrize("name", [b"argparse\nNamespace", b"numpy\ndtype", b"_codecs\nencode"])
def test_a_file_cannot_change_what_the_next_is_read_with(name: bytes) -> None:
    """BUILD sets attributes of a function, or of a class."""
    content = b"\x80\x04c" + name + b"\n}X\x03\x00\x00\x00badK\x01sb0N."
    with pytest.raises(pickle.UnpicklingError, match="with a state"):
        plain_pickle.load(content)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


LONG_TEXT = b"X\x00\x00\x10\x00" + b"a" * 2**20 + b"q\x00"  # one MiB, kept as 0
COPIES = b"c_codecs\nencode\nq\x01" + b"h\x01h\x00\x85R" * 5000


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x80\x02}r\x00\x00\x00\x11.", id="index of the memo"),
        pytest.param(b"\x80\x02}p285212672\n.", id="index of the memo as text"),
        pytest.param(b"\x80\x05\x96\x00\x00\x00\x00\x0f\x00\x00\x00.", id="length of a bytearray"),
        pytest.param(b"\x80\x04" + LONG_TEXT + COPIES + b".", id="shared"),
    ],
)  # fmt: skip
def test_a_few_bytes_do_not_take_gigabytes(content: bytes) -> None:
    """Neither as room that Python makes before it reads, nor as copies of the same bytes."""
    before = _peak()
    with contextlib.suppress(Exception):
        plain_pickle.load(content)
    assert _peak() - before < 2**18  # KiB


_TUPLES = {
    "deep": b"N" + b"\x85" * 1_000_000,
    "shared": b"N" + b"2\x86" * 100,
    "long": b"(" + b"N" * 1000 + b"t",
}


@pytest.mark.parametrize("kind", [*_TUPLES, "integer"])
@pytest.mark.parametrize(
    "made",
    [
        b"}%sNs.", b"}(%sNu.", b"(%sNd.",
        b"ccollections\nOrderedDict\n)R%sNs.", b"ccollections\nOrderedDict\n(((%sNtttR.",
    ],
)  # fmt: skip
def test_a_key_is_plain(kind: str, made: bytes) -> None:
    """The hash of a deeply nested tuple ends the process; that of one whose parts are shared has no end."""
    key = b"\x8b\x00\x00\x01\x00" + b"a" * 2**16 if kind == "integer" else _TUPLES[kind]
    with pytest.raises(pickle.UnpicklingError, match="as a key"):
        plain_pickle.load(b"\x80\x02" + made.replace(b"%s", key))


def test_keys_that_files_have_are_read() -> None:
    content = {"a": 1, 0: 2, None: 3, (1, "b"): 4, b"c": 5, 1.5: 6}
    assert plain_pickle.load(pickle.dumps(content)) == content


@pytest.mark.parametrize("name", ["get", "items", "__class__"])
def test_a_dictionary_keeps_its_methods(name: str) -> None:
    made = b"\x80\x02ccollections\nOrderedDict\n)R}U%c%sNsb." % (len(name), name.encode())
    with pytest.raises(pickle.UnpicklingError, match="a state that changes it"):
        plain_pickle.load(made)
    metadata = collections.OrderedDict(a=1)
    metadata._metadata = {"version": 2}  # type: ignore[attr-defined]
    assert plain_pickle.load(pickle.dumps(metadata))._metadata == {"version": 2}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_cut_file_raises(protocol: int) -> None:
    content = pickle.dumps({"w": ARRAYS[0], "text": "abc", "b": b"abc"}, protocol)
    for size in range(len(content)):
        with pytest.raises(Exception) as caught:
            plain_pickle.load(content[:size])
        assert "Unsupported class" not in str(caught.value)  # which would be taken for code, not for damage


def test_memory_is_not_read_through_an_array() -> None:
    """An item is assigned an object that names an address, which NumPy would read."""
    array = pickle.dumps(np.zeros(2, np.float32), 2).removeprefix(b"\x80\x02").removesuffix(b".")
    value = pickle.dumps(
        {"__array_interface__": {"data": (0x1000, True), "shape": (2,), "typestr": "<f4", "version": 3}}, 0
    )
    named = b"cargparse\nNamespace\n)\x81" + value.removesuffix(b".") + b"b"
    with pytest.raises(pickle.UnpicklingError, match="_Array with items"):
        plain_pickle.load(b"\x80\x02" + array + b"K\x00K\x01\x86c__builtin__\nbytes\n0" + named + b"s.")


def test_a_type_of_an_array_is_not_made_up() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"in place of numpy\.dtype"):
        plain_pickle.load(
            b"\x80\x02cnumpy.core.multiarray\nscalar\ncargparse\nNamespace\n)\x81U\x04\x00\x00\x00\x00\x86R."
        )
