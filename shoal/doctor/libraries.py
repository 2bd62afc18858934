"""Checks of Python packages: what every run needs, and what some options need."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires

from shoal.doctor.finding import CheckTarget, Finding, Findings, fails, works
from shoal.doctor.machine import reaches_other_hosts
from shoal.doctor.programs import python_failure, version_of
from shoal.fleet.planner.predictors import NEEDS_STATSMODELS
from shoal.fleet.registry.open import NATS

TRIAL_LIMIT_S = 30
# As kv/transfer/nixl.py makes one: it needs NIXL's library and UCX.
NIXL_AGENT = "import nixl._api as api; api.nixl_agent('doctor', api.nixl_agent_config(backends=['UCX']))"


@dataclass(frozen=True, slots=True)
class Extra:
    """A package that only some options need. `trial`: code that runs where it works. `of` says which extra of
    Shoal has it; "": none has. `gives`: what it is for. `is_asked`: whether what the user asked for needs
    it."""

    package: str
    trial: str
    of: str
    gives: str
    is_asked: Callable[[CheckTarget], bool]


def _has_store(asked: CheckTarget) -> bool:
    return bool(asked.options("kv_store") or asked.options("compile_cache"))


def _takes_attention(name: str) -> Callable[[CheckTarget], bool]:
    return lambda asked: name in asked.options("attention_backend")


EXTRAS = (
    Extra("nats-py", "import nats", "nats", "planes of many hosts", lambda a: _is_nats(a.router.plane)),
    Extra("nixl", NIXL_AGENT, "nixl", "KV blocks between hosts", reaches_other_hosts),
    Extra("ray", "import ray", "ray", "fleets on Ray", lambda a: a.planner.connector == "ray"),
    Extra("circus", "import circus", "circus", "connector circus", lambda a: a.planner.connector == "circus"),
    Extra(
        "kubernetes-asyncio",
        "import kubernetes_asyncio",
        "kubernetes",
        "connector kubernetes",
        lambda a: a.planner.connector == "kubernetes",
    ),
    Extra(
        "opentelemetry-exporter-otlp-proto-http",
        "import opentelemetry.exporter.otlp.proto.http.trace_exporter",
        "otel",
        "traces (otlp_traces_endpoint)",
        lambda a: a.server.otlp_traces_endpoint is not None,
    ),
    Extra("fsspec", "import fsspec", "store", "kv_store and compile_cache", _has_store),
    Extra(
        "statsmodels",
        "import statsmodels.api",
        "planner",
        "the predictors " + " and ".join(NEEDS_STATSMODELS),
        lambda a: a.planner.enabled and a.planner.load_predictor in NEEDS_STATSMODELS,
    ),
    Extra(
        "flashinfer-python",
        "import flashinfer",
        "",
        "attention_backend flashinfer",
        _takes_attention("flashinfer"),
    ),
    Extra(
        "flash-attn", "import flash_attn", "", "attention_backend flash_attn", _takes_attention("flash_attn")
    ),
)


def _is_nats(plane: str | None) -> bool:
    return plane is not None and plane.startswith(NATS)


def required(asked: CheckTarget) -> Findings:
    """Checks that Shoal's dependencies are installed in fitting versions."""
    try:
        needed = requires("shoal") or []
    except PackageNotFoundError:
        yield works("packages", "Shoal runs from its source tree; what it needs is not listed")
        return
    from packaging.requirements import Requirement

    wrong = []
    for text in needed:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = version_of(requirement.name)
        if found is None:
            wrong.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} is {found}, and {requirement.specifier} is needed")
    if wrong:
        means = "Some commands fail when they import them."
        remedy = f"{sys.executable} -m pip install --upgrade shoal"
        yield fails("packages", "; ".join(wrong), means, remedy)
    else:
        yield works("packages", "all that Shoal needs, in fitting versions")


def extras(asked: CheckTarget) -> Findings:
    for extra in EXTRAS:
        yield _extra(extra, extra.is_asked(asked))


def _extra(extra: Extra, is_asked: bool) -> Finding:
    """Checks an extra. One that the user did not ask for is not imported, which would take seconds."""
    found = version_of(extra.package)
    install = f"pip install 'shoal[{extra.of}]'" if extra.of else f"pip install {extra.package}"
    means = f"It is for {extra.gives}."
    if found is None and not is_asked:
        return fails(extra.package, "not installed", means, install, is_asked=False)
    failure = python_failure(extra.trial, TRIAL_LIMIT_S) if is_asked else None
    if failure is not None:
        state = "not installed" if found is None else f"{found} does not work"
        return fails(extra.package, f"{state}: {failure}", means, install)
    return works(extra.package, found or "installed", is_asked=is_asked)
