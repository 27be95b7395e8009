"""Units of a deployment: accepted by systemd itself, private where they hold a secret, alike on all nodes."""

from __future__ import annotations

import configparser
import json
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from test_render import HERE, TWO, facts, plan

from exl3kit import render, systemd


def parsed(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


def test_each_node_has_a_unit_that_runs_its_compose_file_after_the_engine() -> None:
    made = plan(*TWO)
    for node in ("spark1", "spark2"):
        unit = parsed(systemd.unit(made, node))
        assert (
            unit["Service"]["ExecStart"]
            == "/usr/bin/docker compose --file /etc/exl3kit/demo-tp2/compose.yaml up --detach"
        )
        assert unit["Service"]["ExecStop"].endswith("down --timeout 30")
        assert (unit["Service"]["Type"], unit["Service"]["RemainAfterExit"]) == ("oneshot", "yes")
        assert unit["Unit"]["Requires"] == "docker.service"
        assert unit["Unit"]["RequiresMountsFor"] == f"/weights/of/{node}"
        assert unit["Install"]["WantedBy"] == "multi-user.target"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """Given a model in a folder with blanks and signs that mean something to systemd, then it accepts the unit."""
    odd = facts("spark1", "10.0.0.1")
    made = plan(odd, TWO[1])
    text = systemd.unit(made, "spark1").replace("/weights/of/spark1", systemd.word('/the models/50%/"a" $b'))
    path = tmp_path / systemd.unit_name(made)
    # docker need not be where systemd checks: `true` is in its place
    path.write_text(text.replace("/usr/bin/docker", shutil.which("true") or "/bin/true"))
    (tmp_path / "docker.service").write_text("[Service]\nExecStart=/bin/true\n")
    (tmp_path / "network-online.target").write_text("[Unit]\n")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", path], capture_output=True, text=True
    )
    own = [line for line in (done.stdout + done.stderr).splitlines() if path.name in line]
    assert (done.returncode, own) == (0, []), done.stdout + done.stderr
    path.write_text(text + "\n[Service]\nRestart=sometimes\n")
    wrong = subprocess.run(["systemd-analyze", "verify", "--man=no", path], capture_output=True, text=True)
    assert "sometimes" in wrong.stdout + wrong.stderr  # and the check would find a fault


@pytest.mark.parametrize(
    ("text", "word"),
    [("/a/b-1.2_c", "/a/b-1.2_c"), ("/a b", '"/a b"'), ("/50%", "/50%%"), ("/$x", "/$$x"), ('/"q"', '"/\\"q\\""')],
)
def test_words_of_a_unit_mean_themselves(text: str, word: str) -> None:
    assert systemd.word(text) == word


def test_the_gangs_secret_is_one_private_file_on_every_node(tmp_path: Path) -> None:
    made = plan(*TWO)
    written = render.write_files(systemd.files(made), tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in written} == {
        f"{node}/{name}"
        for node, rank in (("spark1", 0), ("spark2", 1))
        for name in ("compose.yaml", f"rank{rank}.env", "exl3kit-demo-tp2.service", "gang_secret")
    }
    secrets = {(tmp_path / node / "gang_secret").read_text() for node in ("spark1", "spark2")}
    assert len(secrets) == 1 and len(secrets.pop()) == 65
    private = {path.name for path in written if stat.S_IMODE(path.stat().st_mode) == 0o600}
    assert private == {"rank0.env", "rank1.env", "gang_secret"}
    secret = next(one for one in systemd.installs(made, "spark2") if one.file == "gang_secret")
    assert (secret.target, secret.mode, secret.owner) == (made.ranks[1].secret_file, "400", "10001")


def test_the_steps_install_every_file_and_enable_the_unit() -> None:
    made = plan(*HERE)
    (argvs,) = systemd.steps(made).values()
    assert argvs[-1] == ["systemctl", "enable", "--now", "exl3kit-demo-tp2.service"]
    installed = {argv[-2] for argv in argvs if argv[0] == "install"}
    assert installed == {name.partition("/")[2] for name in systemd.files(made)}
    assert json.dumps(argvs)
