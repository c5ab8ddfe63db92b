"""The README's way from a clone to a forwarded port, on a node of its own; what starts the daemon
there is systemd, which tests/systemd has."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.readme import PREPARE, README, ROOT

STEPS = """
set -e
{prepare}
ip link set lo up
{python} -m agent.entry run -c {folder}/portranger.toml 2>{folder}/log &
trap 'kill $(jobs -p) 2>/dev/null || true; sh examples/desktop.sh down' EXIT
until grep -q event=ready {folder}/log; do sleep 0.05; done
sh examples/desktop.sh
cp examples/desktop.yaml {folder}/manifests.d/
{python} - <<'END'
import time, urllib.request
for _ in range(100):
    try:
        print("answered", urllib.request.urlopen("http://192.0.2.10:8000/", timeout=5).status)
        break
    except OSError:
        time.sleep(0.05)
END
echo status:
{python} -m agent.entry status -c {folder}/portranger.toml
echo flushed:
ip netns exec desktop nft flush ruleset
for _ in $(seq 100); do
    {python} -m agent.entry status -c {folder}/portranger.toml | grep repaired && break
    sleep 0.05
done
kill %1
wait %1
"""


@pytest.mark.needs_root
def test_the_steps_to_a_forwarded_port_lead_there(tmp_path: Path) -> None:
    text = README.read_text()
    for step in ("sh examples/desktop.sh", "cp examples/desktop.yaml", "http://192.0.2.10:8000/"):
        assert step in text
    (tmp_path / "manifests.d").mkdir()
    (tmp_path / "portranger.toml").write_text(
        f'manifests = "{tmp_path}/manifests.d"\nstate_dir = "{tmp_path}/state"\n'
    )
    steps = STEPS.format(prepare=PREPARE, python=sys.executable, folder=tmp_path)
    done = subprocess.run(
        ["unshare", "--net", "--mount", "timeout", "60", "bash", "-c", steps],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answered 200" in done.stdout
    told, _, repaired = done.stdout.partition("status:\n")[2].partition("flushed:\n")
    text = text.replace("/etc/portranger/manifests.d", f"{tmp_path}/manifests.d")
    sample = re.search(r"^```text\n(portranger .*?)^```", text, re.MULTILINE | re.DOTALL)
    assert sample
    assert lasting(told) == lasting(sample[1])
    assert "nft (pid " in repaired
    assert lasting(repaired) in lasting(text)


def lasting(text: str) -> str:
    """What does not depend on when it was said; which of two looks came last decides on the reason
    for the backend."""
    text = re.sub(r"\d+-\d+-\d+ [\d:]+ UTC|\d+ (s|min) ago|just now", "then", text)
    return re.sub(r"(?<=pid )\d+|(?<=revision: )\d+|(?<=nftables: ).*", "…", text).strip()


@pytest.mark.needs_root
def test_whoever_may_not_make_the_example_is_told_so() -> None:
    script = (ROOT / "examples/desktop.sh").read_text()  # which an ordinary user may not see here
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--clear-groups", "sh", "-c", script, "desktop.sh"],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    words = "desktop.sh makes and removes network namespaces: run it as root\n"
    assert (done.stdout, done.stderr, done.returncode) == ("", words, 77)
