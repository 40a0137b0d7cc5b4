"""The environment report."""

from __future__ import annotations

import json

import pytest
import torch

from flashproto import backends, env


def test_text_names_versions_devices_backends_and_peers(capsys: pytest.CaptureFixture[str]) -> None:
    env.main([])
    text = capsys.readouterr().out
    assert f"torch       {torch.__version__}" in text
    assert "backends on cpu" in text
    for name in (*backends.BACKENDS, *env.PEERS):
        assert name in text
    if not torch.cuda.is_available():
        assert "none that torch can use" in text


def test_every_backend_that_does_not_run_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    env.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    for device, table in report["backends"].items():
        assert set(table) == set(backends.BACKENDS)
        default = report["default"][device]
        assert table[default] == [] or default == backends.get_default()
        for name, reasons in table.items():
            assert reasons == list(backends.device_reasons(name, torch.device(device)))
    assert report["versions"]["torch"] == torch.__version__
    assert set(report["peers"]) == set(env.PEERS)


def test_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        env.main(["--yaml"])
    assert "--yaml" in capsys.readouterr().err
