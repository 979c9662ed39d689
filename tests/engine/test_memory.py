"""How much memory an engine may use, from a made-up system's files."""

import pytest

from engine.memory import allowed_bytes, default_kv_bytes, free_bytes

GIB = 1024**3


@pytest.fixture
def system(tmp_path):
    """Writes files below a root; the machine has 64 GiB, of which 40 are available."""

    def write(**files):
        for name, text in {
            "proc/meminfo": f"MemTotal: {64 * 1024**2} kB\nMemAvailable: {40 * 1024**2} kB\n",
            **files,
        }.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(text))
        return tmp_path

    return write


def test_without_control_groups_the_machine_counts(system):
    root = system()
    assert (allowed_bytes(root), free_bytes(root), default_kv_bytes(root)) == (64 * GIB, 40 * GIB, 2 * GIB)


def test_version_2_the_lowest_level_wins(system):
    root = system(
        **{
            "proc/self/cgroup": "0::/service/engine\n",
            "sys/fs/cgroup/service/memory.max": 4 * GIB,
            "sys/fs/cgroup/service/memory.current": 3 * GIB,
            "sys/fs/cgroup/service/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "sys/fs/cgroup/service/engine/memory.max": "max\n",
        }
    )
    assert (allowed_bytes(root), free_bytes(root), default_kv_bytes(root)) == (4 * GIB, 2 * GIB, GIB)


def test_version_2_in_a_container_whose_path_is_not_mounted(system):
    root = system(**{"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/memory.max": 2 * GIB})
    assert default_kv_bytes(root) == GIB // 2


def test_version_1(system):
    root = system(
        **{
            "proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/job\n1:name=systemd:/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 2**63 - 4096,
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 6 * GIB,
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 5 * GIB,
            "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {2 * GIB}\n",
        }
    )
    assert (allowed_bytes(root), free_bytes(root), default_kv_bytes(root)) == (6 * GIB, 3 * GIB, 6 * GIB // 4)


def test_a_group_over_its_limit_has_nothing_free(system):
    root = system(
        **{
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": GIB,
            "sys/fs/cgroup/memory.current": 2 * GIB,
        }
    )
    assert free_bytes(root) == 0


def test_this_machine_answers():
    assert 0 < free_bytes() <= allowed_bytes()
