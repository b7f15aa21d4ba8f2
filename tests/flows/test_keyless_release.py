"""Release the demo with a keyless signature in whole runs, and verify it with the commands of users."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo_project import Project, expect
from sigstore_stand_in import sigstore_on_loopback

import mergegate
from mergegate.tasks.release.publish.signing import TOKEN_VARIABLE

pytestmark = pytest.mark.story

IDENTITY = "https://ci.example.org/acme/models/release"
SIGNED = "path: ../releases/signed\n  sign: {trust_config: trust.json}\n"


@pytest.fixture(scope="module")
def signed(demo: Project) -> Iterator[tuple[Project, str, str]]:
    """Yield a project whose demo was released twice with a signature, its issuer, and the identity token."""
    profile = demo.edit("demo.yaml", "path: ../releases/demo\n", SIGNED)
    log: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: log.append(record.getMessage())  # type: ignore[method-assign]
    with sigstore_on_loopback() as instance, pytest.MonkeyPatch.context() as patch:
        token = instance.token(IDENTITY)
        instance.write_trust_config(demo.root / "profiles")
        for variable in ("GITHUB_ACTIONS", "GITLAB_CI", TOKEN_VARIABLE):
            patch.delenv(variable, raising=False)
        expect(demo.mergegate("check", profile), 2, f"export {TOKEN_VARIABLE}")
        patch.setenv(TOKEN_VARIABLE, token)
        checked = demo.mergegate("check", profile)
        assert f"publish: signed by {IDENTITY} (issuer {instance.issuer})" in checked.output
        assert instance.requests == []
        logging.getLogger().addHandler(handler)
        try:
            first, again = (demo.mergegate("run", profile, "--json") for _ in range(2))
        finally:
            logging.getLogger().removeHandler(handler)
        assert [json.loads(run.stdout)["status"] for run in (first, again)] == ["released", "nothing new"]
        assert instance.signings == 1
        log += [checked.output, first.output, again.output, first.stderr, again.stderr]
        (demo.root / "everything.log").write_text("\n".join(log))
        yield demo, instance.issuer, token


@pytest.mark.proof
def test_the_release_verifies_for_its_signer_only(signed: tuple[Project, str, str]) -> None:
    project, issuer, _ = signed
    release = "releases/edited-signed/latest"
    plain = project.mergegate("verify", release)
    assert f"a keyless signature that claims to be by {IDENTITY} (issuer {issuer})" in plain.output
    assert "it is not signed" not in plain.output
    options = ("--issuer", issuer, "--trust-config", "profiles/trust.json")
    result = project.mergegate("verify", release, "--verdict", "--identity", IDENTITY, *options)
    expect(result, 0, f"the keyless signature is valid: signed by {IDENTITY} (issuer {issuer})")
    printed = json.loads(project.mergegate("verify", release, "--json", "--identity", IDENTITY, *options).stdout)
    assert printed["signed"] == "none"
    assert printed["keyless"] == {"status": "valid", "signer": {"identity": IDENTITY, "issuer": issuer}}
    result = project.mergegate("verify", release, "--identity", "mallory@example.org", *options)
    expect(result, 3, f"signed by {IDENTITY} (issuer {issuer}); expected mallory@example.org (issuer {issuer})")


@pytest.mark.proof
def test_identity_and_issuer_are_required_together(signed: tuple[Project, str, str]) -> None:
    project, issuer, _ = signed
    location = project.root / "releases" / "edited-signed" / "latest"
    for options in (["--identity", "x"], ["--issuer", "x"], ["--offline"], ["--identity", "", "--issuer", "x"]):
        expect(project.mergegate("verify", str(location), *options), 2, "pass --identity ID --issuer URL")
    trust = project.root / "profiles" / "trust.json"
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
