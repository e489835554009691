import gzip
import io
import os
import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from eagle3_jax.data import unpickle as module
from eagle3_jax.data.torch_tensors import StoredTensor
from eagle3_jax.data.unpickle import load_state_dict, load_torch
from eagle3_jax.errors import UserError

FILES = Path(__file__).parents[1] / "golden" / "foreign"
BASE = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture(params=["dtypes.pt", "legacy.pt", "dtypes.pt.gz"])
def many(request, tmp_path):
    if not request.param.endswith(".gz"):
        return load_torch(FILES / request.param)
    file = tmp_path / request.param
    file.write_bytes(gzip.compress((FILES / "dtypes.pt").read_bytes()))
    return load_torch(file)


def test_dtypes(many):
    expected = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32, "f64": np.float64}
    for name, dtype in expected.items():
        assert many[name].dtype == dtype
        np.testing.assert_array_equal(many[name].astype(np.float32), BASE)
    for name, dtype in {"i64": np.int64, "i32": np.int32, "i16": np.int16, "u8": np.uint8}.items():
        assert many[name].dtype == dtype
        assert many[name].tolist() == [0, 1, 2, 3, 4]
    assert many["i8"].tolist() == [-2, -1, 0, 1, 2]
    assert many["bool"].dtype == bool and many["bool"].tolist() == [True, False, True]
    assert many["c64"].tolist() == [1 + 2j]
    assert many["scalar"].shape == () and many["scalar"] == 3.5
    assert many["empty"].shape == (0, 4)
    if "fp8" in many:
        assert many["fp8"].dtype == ml_dtypes.float8_e4m3fn and many["fp8"].astype(float).tolist() == [1, 2, -0.5]
        assert many["u16"].tolist() == [1, 65535]


def test_views_keep_strides_and_storage(many):
    np.testing.assert_array_equal(many["t"], BASE.T)
    np.testing.assert_array_equal(many["slice"], BASE[1:, ::2])
    assert many["exp"].tolist() == [[7, 7]] * 3
    assert np.shares_memory(many["t"], many["f32"])
    assert not many["f32"].flags.writeable
    np.testing.assert_array_equal(many["param"], BASE[:1])


def test_containers_and_plain_values(many):
    nested = many["nested"]
    assert nested["a"] == [1, 2.5, None, True, "x", b"yz"]
    np.testing.assert_array_equal(nested["t"][0], BASE[0])
    assert nested["t"][1] == (1, 2) and nested["dtype"] == ml_dtypes.bfloat16 and nested["set"] == {1, 2}
    assert nested["od"] == {"a": 1} and nested["dev"] == "cpu" and nested["big"] == 2**70
    assert nested["counter"] == {1: 2, 2: 1}


def test_lazy_tensors_know_their_shape_and_read_on_demand(tmp_path):
    file = tmp_path / "copy.pt"
    file.write_bytes((FILES / "dtypes.pt").read_bytes())
    lazy = load_torch(file, lazy=True)["slice"]
    assert isinstance(lazy, StoredTensor) and lazy.shape == (3, 3) and lazy.dtype == np.float32
    np.testing.assert_array_equal(lazy.read(), BASE[1:, ::2])


def test_state_dict(golden):
    tensors = load_state_dict(golden("convert/safeailab_bin/pytorch_model.bin"))
    assert len(tensors) == 15 and tensors["fc.weight"].shape == (64, 192) and tensors["t2d"].dtype == bool


def test_a_state_dict_holds_tensors_only():
    with pytest.raises(UserError, match="'nested' is no tensor but a dict"):
        load_state_dict(FILES / "dtypes.pt")


@pytest.mark.parametrize(
    "file, name",
    [
        ("module.pt", "torch.nn.modules.linear.Linear"),
        ("sparse.pt", "torch._utils._rebuild_sparse_tensor"),
        ("script.pt", "TorchScript"),
    ],
)
def test_what_is_no_data_is_refused_by_name(file, name):
    with pytest.raises(UserError, match=name):
        load_torch(FILES / file)


class _Attack:
    """Pickles as a call of any function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def _torch_zip(program: bytes, **storages: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x/data.pkl", program)
        for key, data in storages.items():
            archive.writestr(f"x/data/{key.removeprefix('s')}", data)
    return buffer.getvalue()


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_nothing_is_executed(tmp_path, protocol):
    victim, file = tmp_path / "victim", tmp_path / "evil.pt"
    program = pickle.dumps({"a": [_Attack(os.mkdir, str(victim))]}, protocol)
    for content in (_torch_zip(program), gzip.compress(_torch_zip(program)), program):
        file.write_bytes(content)
        with pytest.raises(UserError) as refused:
            load_torch(file)
        assert not victim.exists() and str(file) in str(refused.value)
    file.write_bytes(_torch_zip(program))
    with pytest.raises(UserError, match="posix.mkdir"):
        load_torch(file)


@pytest.mark.parametrize(
    "program",
    [
        b"ctorch\nFloatStorage\n.",  # a class as a value
        b"\x80\x02ctorch\nFloatStorage\n)R.",  # a call of a class that is data
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b.",  # attributes of a function
        b"\x80\x02cos\nsystem\n.",
        b"\x80\x02c__builtin__\neval\nX\x03\x00\x00\x001+1\x85R.",
        b"\x80\x02cbuiltins\nset\n\x81.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x04\x00\x00\x00zlibtR.",
        b"\x80\x02c_codecs\nencode\n(K\x05X\x06\x00\x00\x00latin1tR.",
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(K\x05K\x00))\x89}tR.",  # a view of a number
        b"\x80\x02]q\x00h\x00a.",  # a list that holds itself
        b"\x80\x02}",  # no end
        b"\x80\x02.",
        b"\x80\x02(t",
        b"garbage",
    ],
)
def test_hostile_and_torn_pickles_are_one_line(tmp_path, program):
    (tmp_path / "x.pt").write_bytes(_torch_zip(program))
    with pytest.raises(UserError) as refused:
        load_torch(tmp_path / "x.pt")
    assert "\n" not in str(refused.value)


def _tensor_program(items: int, offset: int, shape: tuple, strides: tuple) -> bytes:
    def number(n: int) -> bytes:
        return b"J" + n.to_bytes(4, "little", signed=True)

    def numbers(values: tuple) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    identity = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + number(items)
    view = number(offset) + numbers(shape) + numbers(strides)
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + identity + b"tQ" + view + b"\x89}tR."


def test_tensors_cannot_reach_beyond_their_storage(tmp_path):
    file = tmp_path / "x.pt"
    data = np.arange(4, dtype=np.float32).tobytes()

    def load(*program, data=data):
        file.write_bytes(_torch_zip(_tensor_program(*program), s0=data))
        return load_torch(file)

    assert load(4, 1, (3,), (1,)).tolist() == [1, 2, 3]
    for program in [
        (4, 2, (3,), (1,)),
        (4, 0, (2, 2), (3, 1)),
        (4, -1, (2,), (1,)),
        (4, 0, (2,), (-1,)),
        (-4, 0, (), ()),
    ]:
        with pytest.raises(UserError, match="torn"):
            load(*program)
    with pytest.raises(UserError, match="has 12 bytes"):
        load(4, 0, (3,), (1,), data=data[:-4])


@pytest.mark.parametrize("file", ["dtypes.pt", "legacy.pt"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_torn_files(tmp_path, file, share):
    whole = (FILES / file).read_bytes()
    (tmp_path / "torn.pt").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(UserError, match="torn.pt"):
        load_torch(tmp_path / "torn.pt")
    compressed = gzip.compress(whole)
    (tmp_path / "torn.gz").write_bytes(compressed[: max(3, int(share * len(compressed)))])
    with pytest.raises(UserError, match="torn.gz"):
        load_torch(tmp_path / "torn.gz")


def test_other_files(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"hello, this is text")
    with pytest.raises(UserError, match="it is text, not"):
        load_torch(tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(UserError, match="no data.pkl"):
        load_torch(tmp_path / "x.zip")
    with pytest.raises(UserError, match="No such file"):
        load_torch(tmp_path / "absent.pt")


# --- small files that ask for much: refused at once, in one line


def _bomb(levels: int) -> bytes:
    """A tuple of twice the same tuple of twice ...: small as a graph, 2**levels long to whoever walks or prints it."""
    return b")" + b"q\x00h\x00\x86" * levels


@pytest.mark.parametrize(
    "program",
    [
        b"\x80\x02}" + _bomb(60) + b"K\x01s.",  # a key
        b"\x80\x02}(" + _bomb(60) + b"K\x01u.",
        b"\x80\x04\x8f(" + _bomb(60) + b"\x90.",  # a member of a set
        b"\x80\x04(" + _bomb(60) + b"\x91.",
        b"\x80\x02c__builtin__\nset\n(" + _bomb(60) + b"tR.",
        b"\x80\x02ccollections\nOrderedDict\n](" + _bomb(60) + b"K\x01\x86e\x85R.",
        b"\x80\x02ctorch\ndevice\n" + _bomb(60) + b"\x85R.",
        b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00a" + _bomb(60) + b"\x86R.",
        b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + _bomb(60) + b"NK\x01tQ.",  # the name of a storage
        b"\x80\x02}\x8a\x09" + b"\x01" * 9 + b"Ns.",  # an integer as one chosen to collide
        b"\x80\x02ctorch\nSize\nq\x00](" + b"N" * 5000 + b"eq\x01" + b"h\x00h\x01\x85R0" * 4000 + b".",  # copies
    ],
)
def test_a_program_that_never_ends_is_refused(tmp_path, program):
    (tmp_path / "x.pt").write_bytes(_torch_zip(program))
    with pytest.raises(UserError) as refused:
        load_torch(tmp_path / "x.pt")
    assert "\n" not in str(refused.value)


def test_many_marks_take_no_longer_than_their_items(tmp_path):
    (tmp_path / "x.pt").write_bytes(_torch_zip(b"\x80\x02(" + b"N" * 50_000 + b"(t0" * 50_000 + b"l."))
    assert len(load_torch(tmp_path / "x.pt")) == 50_000


def test_archives_that_unpack_to_more_than_they_are(tmp_path, monkeypatch):
    file, program = tmp_path / "x.pt", _tensor_program(4, 0, (4,), (1,))
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", program)
        archive.writestr("x/data/0", bytes(16))
    with pytest.raises(UserError, match="compressed members, as torch.save never writes"):
        load_torch(file)
    file.write_bytes(_torch_zip(_tensor_program(4, 0, (4,), (1,)), s0=bytes(20)))
    with pytest.raises(UserError, match="a storage of 4 float32 has 20 bytes"):
        load_torch(file)
    file.write_bytes(_torch_zip(_tensor_program(1, 0, (1 << 30, 2), (0, 0)), s0=bytes(4)))
    with pytest.raises(UserError, match="repeats a storage of 1"):
        load_torch(file)
    monkeypatch.setattr(module, "_MAX_GZIP", 10_000)
    file.write_bytes(gzip.compress(bytes(10_001)))
    with pytest.raises(UserError, match="unpacks to more than 10000 bytes"):
        load_torch(file)


def test_a_storage_that_is_damaged_after_opening_is_one_line(tmp_path):
    file = tmp_path / "x.pt"
    whole = _torch_zip(_tensor_program(4, 0, (4,), (1,)), s0=b"\x01\x02\x03\x04" * 4)
    file.write_bytes(whole.replace(b"\x01\x02\x03\x04" * 4, b"\x01\x02\x03\x05" * 4))  # against its checksum
    with pytest.raises(UserError, match=r"x\.pt / Bad CRC-32"):
        load_torch(file, lazy=True).read()
    file.write_bytes(whole)
    lazy = load_torch(file, lazy=True)
    file.unlink()
    with pytest.raises(UserError, match=r"x\.pt / No such file"):
        lazy.read()
