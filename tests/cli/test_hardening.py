"""What a stranger to the tool once broke."""

import json
import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent.kernel.lab import built

ROOT = Path(__file__).parent.parent.parent
DESKTOP = ROOT / "examples" / "desktop.yaml"
COMMAND = f"{sys.executable} -m agent.entry"


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """A command line in which `portranger` stands for ours."""
    line = re.sub(r"(?<!/)\bportranger ", f"{COMMAND} ", command, count=1)
    return subprocess.run(
        ["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (f"portranger plan --against empty -f {DESKTOP} >&-", 1),
        (f"portranger plan --against empty -f {DESKTOP} >/dev/full", 1),
        (f"portranger plan --against empty -f {DESKTOP} 2>&-", 0),
        (f"portranger plan --against empty --detailed-exitcode -f {DESKTOP} 2>&-", 2),
        ("portranger validate -f - <&-", 65),
        ("portranger --help >&-", 0),
        ("portranger --help >/dev/full", 1),
        (f"portranger apply --yes --netns '' -f {DESKTOP}", 64),
        ("portranger show --netns pid:99999999", 75),
        (f"portranger plan --against empty -f {DESKTOP} --netns $'a\\xff'", 0),
        (f"portranger plan --against empty -f {DESKTOP} -o nft --backend iptables", 64),
        ("portranger top --interval nan", 64),
        ("ulimit -v 2000000; portranger validate -f - </dev/zero", 65),
    ],
)
def test_odd_streams_and_names_get_a_sentence_and_a_code(command: str, code: int) -> None:
    done = shell(command)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def machine(name: str, kind: str = "VirtualMachine", **annotations: str) -> dict[str, object]:
    """A masquerade machine with one range, as JSON has it."""
    spec = {
        "domain": {
            "devices": {
                "interfaces": [
                    {
                        "name": "red",
                        "masquerade": {},
                        "portRanges": [{"start": 1000, "end": 2000}],
                    }
                ]
            }
        },
        "networks": [{"name": "red", "pod": {}}],
    }
    metadata = {
        "name": name,
        "annotations": {f"portranger.io/{key}": value for key, value in annotations.items()},
    }
    whole = {"template": {"spec": spec}} if kind == "VirtualMachine" else spec
    return {"apiVersion": "kubevirt.io/v1", "kind": kind, "metadata": metadata, "spec": whole}


def test_a_machine_and_its_running_instance_are_one(tmp_path: Path) -> None:
    both = [machine("a"), machine("a", "VirtualMachineInstance")]
    path = tmp_path / "both.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": both}))
    done = shell(f"portranger plan --against empty -o json -f {path}")
    assert done.returncode == 0
    assert "VirtualMachine/default/a is left to its running instance" in done.stderr
    owners = {c["after"].get("owner") for c in json.loads(done.stdout)["changes"]} - {None}
    assert owners == {"VirtualMachineInstance/default/a/red"}


@pytest.mark.needs_root
def test_one_namespace_under_two_names_is_refused(tmp_path: Path) -> None:
    with built(f"prt{os.getpid()}") as lab:
        link = tmp_path / "alias"
        link.symlink_to(f"/run/netns/{lab.pod}")
        for name, netns in (("a", lab.pod), ("b", str(link))):
            Path(tmp_path, f"{name}.json").write_text(json.dumps(machine(name, netns=netns)))
        done = shell(f"portranger apply --yes -f {tmp_path}/a.json -f {tmp_path}/b.json")
        assert done.returncode == 65
        assert "are one and the same namespace" in done.stderr
        assert "nothing of ours" in shell(f"portranger show --netns {lab.pod}").stdout


@pytest.mark.needs_root
def test_a_machine_that_is_no_longer_masqueraded_loses_its_rules(tmp_path: Path) -> None:
    with built(f"prt{os.getpid()}") as lab:
        path = tmp_path / "vm.json"
        path.write_text(json.dumps(machine("a", netns=lab.pod)))
        assert shell(f"portranger apply --yes -f {path}").returncode == 0
        text = path.read_text().replace('"masquerade": {}', '"bridge": {}')
        path.write_text(text.replace('"portRanges": [{"start": 1000, "end": 2000}]', '"tag": "x"'))
        done = shell(f"portranger apply --yes -f {path}")
        assert (done.returncode, "0 to add" in done.stdout) == (0, True), done
        assert "nothing of ours" in shell(f"portranger show --netns {lab.pod}").stdout


@pytest.mark.needs_root
def test_appliers_at_once_take_turns(tmp_path: Path) -> None:
    with built(f"prt{os.getpid()}") as lab:
        paths = [tmp_path / f"{number}.json" for number in range(8)]
        for number, path in enumerate(paths):
            text = json.dumps(machine("a", netns=lab.pod))
            path.write_text(text.replace("2000", str(2000 + number)))
        with ThreadPoolExecutor(len(paths)) as pool:
            done = list(pool.map(lambda path: shell(f"portranger apply --yes -f {path}"), paths))
        assert [one.returncode for one in done] == [0] * len(paths)
        plans = [
            shell(f"portranger plan --detailed-exitcode -f {path}").returncode for path in paths
        ]
        assert sorted(plans) == [0] + [2] * (len(paths) - 1)


@pytest.mark.needs_root
def test_a_family_that_loses_its_address_keeps_its_rules(tmp_path: Path) -> None:
    with built(f"prt{os.getpid()}") as lab:
        path = tmp_path / "vm.json"
        path.write_text(json.dumps(machine("a", netns=lab.pod)))
        assert shell(f"portranger apply --yes -f {path}").returncode == 0
        subprocess.run(
            ["ip", "-n", lab.pod, "addr", "del", "192.0.2.2/24", "dev", "eth0"], check=True
        )
        assert "No changes" in shell(f"portranger apply --yes -f {path}").stdout


def test_a_plan_for_a_pipeline_takes_nothing_from_the_machine_it_runs_on(tmp_path: Path) -> None:
    """Also where somebody else may not read the daemon's configuration there."""
    phone = ROOT / "examples" / "services" / "phone.yaml"
    plain = shell(f"portranger plan --against empty -f {phone}")
    hidden = f"mount -t tmpfs -o mode=0700 none /etc && cd {ROOT}"
    line = f"{hidden} && setpriv --reuid 65534 --clear-groups {COMMAND} plan --against empty"
    assert plain.returncode == 0
    done = shell(f"unshare --mount bash -c '{line} -f {phone}'")
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr


@pytest.mark.parametrize("answer", ["<&-", "< <(printf 'j\\xe4\\n')"])
@pytest.mark.needs_root
def test_no_answer_is_no(answer: str) -> None:
    with built(f"prt{os.getpid()}") as lab:
        done = shell(f"LC_ALL=C.UTF-8 portranger apply --netns {lab.pod} -f {DESKTOP} {answer}")
        assert "nothing was applied" in done.stderr
        assert (done.returncode, "Traceback" in done.stderr) == (1, False)


def test_what_is_converted_is_utf8_whatever_the_locale(tmp_path: Path) -> None:
    text = DESKTOP.read_text() + "# \N{RIGHTWARDS ARROW}\n"
    file = tmp_path / "desktop.yaml"
    file.write_text(text)
    for encoding in ("latin-1", "ascii", "utf-8"):
        done = subprocess.run(
            [*COMMAND.split(), "convert", "--to", "annotations", "-f", file],
            cwd=ROOT,
            env={**os.environ, "PYTHONIOENCODING": encoding},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode().endswith("# \N{RIGHTWARDS ARROW}\n")


@pytest.mark.needs_root
@pytest.mark.parametrize("number", ["HUP", "TERM", "INT"])
def test_a_demonstration_that_is_interrupted_leaves_nothing(number: str) -> None:
    with subprocess.Popen(
        # A shell lets what it starts in the background ignore INT.
        ["env", "--default-signal=INT", *COMMAND.split(), "demo"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdout=subprocess.PIPE,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        assert "namespace of its own" in demo.stdout.readline()
        demo.send_signal(signal.Signals[f"SIG{number}"])
        demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert not list(Path("/run/netns").glob(f"portranger-demo-{demo.pid}-*"))
