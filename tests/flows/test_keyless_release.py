"""Release the demo with a keyless signature in whole runs, and verify it with the commands of users."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_project import Printed, Project
from sigstore_stand_in import sigstore_on_loopback

import mergegate
from mergegate.tasks.publish.keyless import TOKEN_VARIABLE

IDENTITY = "https://ci.example.org/acme/models/release"
SIGNED = "path: ../releases/signed\n  sign: {trust_config: trust.json}\n"


@pytest.fixture(scope="module")
def signed(released: tuple[Project, Printed]) -> Iterator[tuple[Project, str, str]]:
    """Yield a project whose demo was released twice with a signature, its issuer, and the identity token."""
    project, _ = released
    profile = project.edit("demo.yaml", "path: ../releases/demo\n", SIGNED)
    log: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    with sigstore_on_loopback() as instance, pytest.MonkeyPatch.context() as patch:
        token = instance.token(IDENTITY)
        instance.write_trust_config(project.root / "profiles")
        for variable in ("GITHUB_ACTIONS", "GITLAB_CI", TOKEN_VARIABLE):
            patch.delenv(variable, raising=False)
        refused = project.mergegate("check", profile)
        assert refused.exit_code == 2, refused.output
        assert f"export {TOKEN_VARIABLE}" in refused.output
        patch.setenv(TOKEN_VARIABLE, token)
        checked = project.mergegate("check", profile)
        assert f"publish: signed by {IDENTITY} (issuer {instance.issuer})" in checked.output
        assert instance.requests == []
        logging.getLogger().addHandler(handler)
        try:
            first, again = (project.mergegate("run", profile, "--json") for _ in range(2))
        finally:
            logging.getLogger().removeHandler(handler)
        assert [json.loads(run.stdout)["status"] for run in (first, again)] == ["released", "nothing new"]
        assert instance.signings == 1
        log += [checked.output, first.output, again.output, first.stderr, again.stderr]
        (project.root / "everything.log").write_text("\n".join(log))
        yield project, instance.issuer, token


@pytest.mark.story
def test_the_release_verifies_for_its_signer_only(signed: tuple[Project, str, str]) -> None:
    project, issuer, _ = signed
    release = "releases/edited-signed/latest"
    plain = project.mergegate("verify", release)
    assert f"a keyless signature that claims to be by {IDENTITY} (issuer {issuer})" in plain.output
    assert "it is not signed" not in plain.output
    options = ("--issuer", issuer, "--trust-config", "profiles/trust.json")
    verified = project.mergegate("verify", release, "--verdict", "--identity", IDENTITY, *options)
    assert verified.exit_code == 0, verified.output
    assert f"the keyless signature is valid: signed by {IDENTITY} (issuer {issuer})" in verified.output
    printed = json.loads(project.mergegate("verify", release, "--json", "--identity", IDENTITY, *options).stdout)
    assert printed["signed"] == "none"
    assert printed["keyless"] == {"status": "valid", "signer": {"identity": IDENTITY, "issuer": issuer}}
    wrong = project.mergegate("verify", release, "--identity", "mallory@example.org", *options)
    assert wrong.exit_code == 3
    assert f"signed by {IDENTITY} (issuer {issuer}); expected mallory@example.org (issuer {issuer})" in wrong.output


@pytest.mark.story
@pytest.mark.parametrize(
    "options", [["--identity", "x"], ["--issuer", "x"], ["--offline"], ["--identity", "", "--issuer", "x"]]
)
def test_identity_and_issuer_are_required_together(signed: tuple[Project, str, str], options: list[str]) -> None:
    result = signed[0].mergegate("verify", "releases/edited-signed/latest", *options)
    assert result.exit_code == 2
    assert "pass --identity ID --issuer URL" in result.output


def test_python_verifies_it_with_the_same_arguments(signed: tuple[Project, str, str]) -> None:
    project, issuer, _ = signed
    trust = project.root / "profiles" / "trust.json"
    location = project.root / "releases" / "edited-signed" / "latest"
    verified = mergegate.verify(location, identity=IDENTITY, issuer=issuer, trust_config=trust)
    assert verified.keyless is not None
    assert (verified.keyless.status, verified.keyless.signer.identity) == ("valid", IDENTITY)
    with pytest.raises(mergegate.InvalidInput, match="no value for --issuer"):
        mergegate.verify(location, identity=IDENTITY)


def test_openssf_model_signing_verifies_it_as_the_card_says(
    signed: tuple[Project, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner
    from model_signing._cli import main

    project, issuer, _ = signed
    release = Path(shutil.copytree(project.root / "releases" / "edited-signed" / "latest", tmp_path / "release"))
    card = (release / "README.md").read_text()
    command = next(line for line in card.splitlines() if line.startswith("model_signing verify sigstore"))
    trust = str(project.root / "profiles" / "trust.json")
    values = {"ID": IDENTITY, "URL": issuer, "FILE": trust}
    arguments = [values.get(word, word) for word in command.partition("#")[0].split()[1:]]
    monkeypatch.chdir(release)
    assert CliRunner().invoke(main, arguments).exit_code == 0
    (release / "config.json").write_text("{}")
    assert CliRunner().invoke(main, arguments).exit_code != 0


def test_no_file_log_or_output_contains_the_token(signed: tuple[Project, str, str]) -> None:
    project, _, token = signed
    secrets = [part.encode() for part in token.split(".")[1:]]
    leaks = [
        path
        for path in project.root.rglob("*")
        if path.is_file() and not path.is_symlink() and any(part in path.read_bytes() for part in secrets)
    ]
    assert leaks == []
    assert (project.root / "everything.log").read_text()
