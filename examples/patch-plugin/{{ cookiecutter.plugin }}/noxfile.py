"""nox -s tests: the logic, without vLLM. nox -s drift: what it relies on, release by release."""

import nox

PINS = ["0.24.0", "0.28.0", "0.32.0", "0.33.0"]
"""The releases that the plugin is for; the newest is in the workflow, as `latest`."""

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"


@nox.session
def tests(session: nox.Session) -> None:
    """The logic, without vLLM."""
    session.install(".[test]")
    session.run("pytest", *session.posargs)


@nox.session
@nox.parametrize("vllm", PINS)
def drift(session: nox.Session, vllm: str) -> None:
    """What the patch relies on, in the source of one release, which is not installed."""
    session.install("vllm-drift")
    session.run("vllm-drift", "scan", "--surface", "surface.toml", vllm, *session.posargs)
