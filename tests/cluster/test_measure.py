"""The disk measurement writes nothing that stays, and says so when it cannot write. Devices are in
tests/cli/test_doctor.py."""

from shardwise.cluster.describe.versions import core_libraries, optional_libraries
from shardwise.cluster.measure.devices import measure_disk


def test_disk_of_a_directory_that_does_not_exist_yet(tmp_path):
    rates = measure_disk(tmp_path / "runs" / "deep", size=2**20)
    assert rates.path == str(tmp_path)
    assert rates.free_bytes > 0 and rates.write_bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_core_libraries_are_here_and_missing_ones_say_how_to_get_them():
    assert all(library.version for library in core_libraries())
    assert all(library.version or library.install.startswith("pip install") for library in optional_libraries())
