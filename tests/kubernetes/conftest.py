"""One API server for all tests here, and a namespace of Kubernetes, as new, for each of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.kubernetes.cluster import Cluster, running, why_not

CLUSTER = pytest.StashKey[Cluster]()


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    with running() as made:
        pytestconfig.stash[CLUSTER] = made
        yield made


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    with cluster.namespace() as name:
        yield name


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a failure what the programs of the cluster wrote."""
    report = yield
    if report.failed and CLUSTER in item.config.stash:
        report.sections.append(("the cluster", item.config.stash[CLUSTER].log()))
    return report
